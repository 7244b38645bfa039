"""Launch lines of shell scripts: runs a script with stand-ins for everything that it would start, and keeps their words."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm", ".sub", ".job", ".pbs", ".template", ".qsub")
"""Endings of files that may be launch scripts."""

_LAUNCHERS = (
    "torchrun python python3 srun mpirun mpiexec mpiexec.hydra aprun jsrun singularity apptainer docker deepspeed nohup".split()
)
# Programs that read and print. All others do nothing, and succeed.
_HARMLESS = "awk basename cat cut date dirname expr grep head readlink realpath sed seq shuf sort tail tee tr uniq wc".split()
# A script may stop at the first failure. What is not here succeeds without a word; profiles would bring programs back.
_PRELUDE = """
command_not_found_handle() { return 0; }
source() { case "$1" in /*) return 0;; esac; builtin source "$@" || return 0; }
module() { return 0; }
"""
# Two nodes of eight GPUs, where the script does not say otherwise to Slurm.
_SLURM = {
    "NNODES": "2",
    "JOB_NUM_NODES": "2",
    "NTASKS_PER_NODE": "8",
    "NTASKS": "16",
    "GPUS_PER_NODE": "8",
    "GPUS_ON_NODE": "8",
}
_SLURM |= {"JOB_ID": "1", "JOBID": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "CPUS_PER_TASK": "8"}
_SLURM |= {"JOB_NODELIST": "node[0-1]", "NODELIST": "node[0-1]", "JOB_NAME": "job", "SUBMIT_DIR": "."}
# What a script wants of its command line.
_GIVEN = ("/data/1", "/data/2", "/data/3", "/data/4", "/data/5", "/data/6")
_END = "\x01"
# Scripts of others get no more rights than they need.
_NOBODY = 65534


def launch_lines(script: Path) -> Iterator[list[str]]:
    """Yields the words of everything that a script would start, as far as it comes in seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        said = folder / "said"
        said.touch()
        said.chmod(0o666)
        for program, prints in (("scontrol", "node0\nnode1"), ("hostname", "node0"), ("nvidia-smi", "GPU\n" * 8)):
            _write(folder / program, f"printf '%s\\n' '{prints}'\n")
        for launcher in _LAUNCHERS:
            _write(folder / launcher, f"printf '%s\\0' {launcher} \"$@\" '{_END}' >> '{said}'\n")
        for program in _HARMLESS:
            if path := shutil.which(program):
                (folder / program).symlink_to(path)
        (folder / "prelude").write_text(_PRELUDE)
        text = script.read_text(errors="replace")
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["/bin/bash", script.resolve(), *_GIVEN],
                env={"PATH": name, "HOME": name, "BASH_ENV": str(folder / "prelude"), "USER": "user", **allocation(text)},
                cwd=script.parent,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=5,
                check=False,
                **({"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}),
            )
        yield from (words.split("\0")[:-1] for words in said.read_text(errors="replace").split(f"{_END}\0")[:-1])


def _write(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/bash\n{text}")
    program.chmod(0o755)


def allocation(text: str) -> dict[str, str]:
    """What Slurm would set for a batch script."""
    asked = dict(re.findall(r"^#SBATCH\s+--?(N|nodes|ntasks-per-node|gpus-per-node)[ =]+(\d+)", text, re.MULTILINE))
    found = dict(_SLURM)
    nodes = asked.get("nodes", asked.get("N", "2"))
    tasks = asked.get("ntasks-per-node", "1" if "#SBATCH" in text else "8")
    found |= {"NNODES": nodes, "JOB_NUM_NODES": nodes, "NTASKS_PER_NODE": tasks, "NTASKS": str(int(nodes) * int(tasks))}
    return {f"SLURM_{name}": value for name, value in found.items()}
