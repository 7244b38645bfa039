"""Files of ``examples/launchers``, each by its own tool and without a cluster; their launch lines by doctor's reader."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from launch import DEMO, MODEL, REPOSITORY, data

from pier_megatron.commands.findings import Findings
from pier_megatron.commands.job_script import launch_line
from pier_megatron.commands.launch_command import LaunchCommand

_FILES = REPOSITORY / "examples" / "launchers"
_PYTHON = Path(os.environ.get("LAUNCHERS_PYTHON", REPOSITORY / ".venv" / "launchers" / "bin" / "python"))

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not _PYTHON.exists(), reason=f"the launchers' tools are missing, there is no {_PYTHON}: make launchers"),
]

# Prints nothing where all that the file says is in what the models keep of it. Kubernetes' schemas know what is inside jobs.
_KUBERNETES = """
import sys, kubernetes_validate, yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

def lost(said, kept, place=""):
    if isinstance(said, dict):
        return [each for key in said for each in lost(said[key], (kept or {}).get(key), f"{place}.{key}")]
    if isinstance(said, list):
        return [each for number, item in enumerate(said) for each in lost(item, (kept or [])[number], f"{place}[{number}]")]
    return [] if str(said) == str(kept) else [place]

for thing in yaml.safe_load_all(open(sys.argv[1])):
    if thing["kind"] == "JobSet":
        for place in lost(thing, JobsetV1alpha2JobSet.from_dict(thing).to_dict()):
            if ".template." not in place:
                print("unknown to JobSet:", place)
        for job in thing["spec"]["replicatedJobs"]:
            own = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, "spec": job["template"]["spec"]}
            kubernetes_validate.validate(own, "1.37", strict=True)
    else:
        kubernetes_validate.validate(thing, "1.37", strict=True)
"""
_SKYPILOT = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
assert all(resources.job_recovery["max_restarts_on_errors"] == 10 for resources in task.resources), task.resources
"""
_CHECKS = {"kubernetes": _KUBERNETES, "skypilot": _SKYPILOT}


@pytest.mark.parametrize("file", sorted(_FILES.glob("*.yaml")), ids=lambda file: file.stem)
def test_its_own_tool_takes_the_file(file: Path, tmp_path: Path) -> None:
    check = _CHECKS[file.stem.partition("-")[0]]
    # What it mounts.
    (tmp_path / "pier.secret").touch()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    run = subprocess.run([_PYTHON, "-c", check, file], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


# Nodes and ranks on each by what the tool would set.
_SIZES = {"kubernetes-groups": (8, 4), "kubernetes-islands": (1, 4), "skypilot-groups": (8, 8), "skypilot-islands": (1, 8)}


@pytest.mark.parametrize("name", _SIZES)
def test_launch_line_is_a_job_of_pier(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    things = list(yaml.safe_load_all((_FILES / f"{name}.yaml").read_text()))
    if name.startswith("kubernetes"):
        text = re.search(r"'args': \[(['\"])(.*?torchrun.*?)\1\]", str(things))
        assert text is not None
        script = text[2]
    else:
        script = things[0]["run"].replace("cd Megatron-LM", "")
    (tmp_path / "job.sh").write_text("#!/bin/bash\n" + script.replace("torchrun", "${CHECK:-} torchrun").replace("exec ", ""))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name_and_value in (
        *("JOB_COMPLETION_INDEX=0", "POD_IP=10.0.0.1", "ISLAND=0", "LIGHTHOUSE=http://10.0.0.1:29510"),
        *(
            "SKYPILOT_NUM_NODES=8",
            "SKYPILOT_NUM_GPUS_PER_NODE=8",
            "SKYPILOT_NODE_RANK=0",
            "SKYPILOT_NODE_IPS=10.0.0.1\n10.0.0.2",
        ),
    ):
        monkeypatch.setenv(*name_and_value.split("="))
    job = LaunchCommand.parse(launch_line([str(tmp_path / "job.sh")], Findings()))
    assert (job.nodes, job.ranks_per_node, job.has_plugin, job.script) == (*_SIZES[name], True, "pretrain_gpt.py")
    assert job.nodes == 1 or job.rendezvous == "static"
    assert {"--optimizer", "pier", "--save", "--load", "/runs/a", "--pier-load-newest-whole"} <= {*job.arguments}
    assert ("--pier-island" in job.arguments) == name.endswith("islands")


def test_nemo_run_trains_two_groups(corpus: tuple[Path, Path], tmp_path: Path) -> None:
    flags = "--bf16 --global-batch-size 8 --optimizer pier --pier-groups 2 --pier-sync-interval 4 --train-iters 8"
    command = [str(_PYTHON), str(_FILES / "nemo_run_groups.py"), str(DEMO), *MODEL, *data(corpus), *shlex.split(flags)]
    environment = os.environ | {"NEMORUN_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-5000:]
    assert "2 groups of 1 rank" in run.stdout + run.stderr
    assert "outer step after iteration        8" in run.stdout + run.stderr
    refused = subprocess.run([*command[:2], "/nowhere"], cwd=tmp_path, env=environment, capture_output=True, timeout=300)
    assert refused.returncode == 1
