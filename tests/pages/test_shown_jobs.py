"""The jobs that pages show train to their first outer step, made small and on the CPU."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPOSITORY, execute, torchrun
from test_shown_commands import _COMMANDS

from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.cpu.preparations import missing_cpu_flags

pytestmark = pytest.mark.processes

_CHECKOUTS = [Path(path) for path in os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep) if path]
_SCRIPT = _CHECKOUTS[-1] / "pretrain_gpt.py" if _CHECKOUTS else REPOSITORY / "pier_megatron/commands/demo/pretrain_bytes.py"

# Values that make a job small. They replace a line's own; a flag that the line lacks is not added.
_SMALL = {
    "--num-layers": "2",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--vocab-size": "257",
    "--micro-batch-size": "1",
    "--global-batch-size": "4",
    "--train-iters": "4",
    "--lr": "3e-4",
    "--tensor-model-parallel-size": "1",
    "--pier-groups": "2",
    "--eval-interval": "4",
    "--save-interval": "4",
}
# What a page writes as "...": a whole job, which the page has shown elsewhere.
_REST = [word for flag in (*list(_SMALL)[:10], "--eval-interval") for word in (flag, _SMALL[flag])]
_REST += shlex.split("--lr-decay-style constant --bf16")
# The reader's data; and an end that is soon reached.
_DATA = shlex.split("--mock-data --tokenizer-type NullTokenizer")
_SOON = shlex.split("--eval-iters 1 --pier-sync-interval 2 --pier-lazy-start-iters 2")
# What makes no other job of a small one on the CPU.
_SAME = {
    *("--lr-decay-style cosine", "--lr-decay-style constant", "--tensor-model-parallel-size 1"),
    *" ".join(missing_cpu_flags([])).replace(" --", "\n--").splitlines(),
}
# Need a second job, or a file of the reader's; tested in test_island_jobs.py and test_resume.py.
_NEED_MORE = ("--pier-lighthouse", "--pier-override-checkpoint")


def small(arguments: tuple[str, ...]) -> list[str]:
    """The arguments of a line, made small."""
    words = [_SMALL.get(flag, word) for flag, word in zip(("", *arguments), arguments, strict=False)]
    words += [] if "--num-layers" in words else _REST
    words += [] if "--mock-data" in words else _DATA
    words += [] if "--pier-groups" in words else ["--pier-groups", "2"]
    return words + _SOON


def shown() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Small jobs with outer steps that differ, by the pages and lines that show them: those shown whole, those only in part."""
    jobs: dict[frozenset[str], tuple[list[str], list[str]]] = {}
    for page, command in sorted(_COMMANDS, key=lambda shown: "--num-layers" not in shown[1]):
        if "pretrain_gpt.py" not in command or any(flag in command for flag in _NEED_MORE):
            continue
        arguments = LaunchCommand.parse(shlex.split(command)).arguments
        if "pier" in arguments:
            job = small(arguments)
            key = frozenset(" ".join(job).replace(" --", "\n--").splitlines()) - _SAME
            jobs.setdefault(key, ([], job))[0].append(f"{page}: {command}")
    named = {"\n".join(names): job for names, job in jobs.values()}
    whole = {name: job for name, job in named.items() if "--num-layers" in name}
    return whole, {name: job for name, job in named.items() if name not in whole}


_DOCTOR = """
import contextlib, io, json, shlex, sys
from pier_megatron import cli

said = []
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(["doctor", *shlex.split(line)])
    said.append(out.getvalue())
print(json.dumps(said))
"""


def test_jobs_start_as_they_stand_with_what_pip_installs() -> None:
    """On the CPU other layers train in any case; what a GPU would find is what doctor says."""
    whole = [
        command.removeprefix("pier-megatron doctor ").replace("pretrain_gpt.py", str(_SCRIPT))
        for page, command in _COMMANDS
        if page in ("README.md", "quickstart.md") and "--num-layers" in command and "--optimizer pier" in command
    ]
    description = re.findall(r"```yaml\n(script:.*?)```", (REPOSITORY / "docs" / "experts.md").read_text(), re.DOTALL)[0]
    arguments = " ".join(re.findall(r"arguments: >.*?\n(.*?)\nsizes:", description, re.DOTALL)[0].split())
    expert = f"torchrun --nproc-per-node 4 {_SCRIPT} {arguments} --train-iters 400 --mock-data --optimizer adam"
    lines = [*whole, expert, expert.replace("--eval-interval 100", "")]
    command = [sys.executable, "-c", _DOCTOR, json.dumps(lines)]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    *said, of_expert, without = json.loads(ran.stdout)
    assert len(said) == 2
    assert all(each.endswith("\nOK\n") for each in said), said
    assert "the job does not use Pier" in of_expert
    assert of_expert.endswith("\n1 warning\n"), of_expert
    assert "ERROR: --eval-interval: not given" in without


def check(name: str, log: str) -> None:
    assert "validation loss at iteration 4" in log, name
    # What is never there on the CPU is no news for each module of each rank.
    assert "Falling back to Torch Norm" not in log, name
    assert re.search(r"outer step after iteration +4 ", log), name


@pytest.mark.parametrize("number", range(len(shown()[0])))
def test_jobs_shown_whole(tmp_path: Path, number: int) -> None:
    """In new processes, as a reader starts them. The first one, of the quickstart, is the cold start of ``make quick``."""
    jobs, _ = shown()
    name = [*jobs][number]
    assert number > 0 or "quickstart.md: " in name
    command = [*torchrun(2), "-m", "pier_megatron", "--device", "cpu", str(_SCRIPT), *jobs[name]]
    check(name, execute(command, tmp_path / "log.txt", PIER_TEST_WARM=""))


def test_jobs_shown_in_part(tmp_path: Path) -> None:
    """Each in new ranks of one process, which has imported Megatron and trained nothing."""
    _, jobs = shown()
    assert len(jobs) >= 3
    lines = [[word.replace("runs/a", str(tmp_path / "a")) for word in job] for job in jobs.values()]
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    trainer = str(Path(__file__).with_name("shown_ranks.py"))
    execute([sys.executable, trainer, str(_SCRIPT), str(tmp_path)], tmp_path / "log.txt", PIER_TEST_WARM="")
    for number, name in enumerate(jobs):
        check(name, (tmp_path / f"line{number}.txt").read_text())
