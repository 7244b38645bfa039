"""Reads job scripts: what ``#SBATCH`` lines and options of sbatch ask for, and the launch line behind ``${CHECK:-}``."""

import argparse
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pier_megatron.commands.findings import Findings
from pier_megatron.commands.srun import understood
from pier_megatron.errors import PierConfigError

_SHELL_SCRIPT = re.compile(rb"#!.*\b(ba|z|da)?sh\b")
# What stands before a script without being part of it.
_STARTERS = ("sbatch", "bash", "sh")
_COMMANDS = {
    # Stands before the launch line, and keeps it together with what the script has exported.
    "pier-launch-line": 'printf "%s\\0" "$@" > "$0.words"; env -0 > "$0.environment"',
    # Neither asks a controller, nor queues anything again.
    "scontrol": '[ "$1" != show ] || for ((node = 0; node < SLURM_NNODES; node++)); do echo "node$node"; done',
}
_UNITS = (86400, 3600, 60, 1)
# Slurm may send the signal of --signal a minute early.
_EARLY = 60


def launch_line(words: Sequence[str], findings: Findings) -> list[str]:
    """The launch line that a job script would start, if the words start one; otherwise the words themselves.

    Runs the script up to that line, with the variables that Slurm would set, and takes over what it exports.

    Args:
        words: ``[sbatch OPTIONS | bash] SCRIPT WORDS``, or any other command.
        findings: Receives what Slurm would not do as the script expects.

    Raises:
        PierConfigError: If the script has no ``${CHECK:-}`` before its launch line, or does not reach it.
    """
    starts = bool(words) and Path(words[0]).name in _STARTERS
    # An option of sbatch may name a file, too, such as its log.
    place = next((place for place, word in enumerate(words if starts else words[:1]) if _is_script(Path(word))), None)
    if place is None:
        return list(words)
    script = Path(words[place])
    text = script.read_bytes()
    asked = _options([*_directives(text.decode(errors="replace")), *(words[1:place] if words[0] == "sbatch" else ())])
    if b"${CHECK:-}" not in text:
        raise PierConfigError(
            f"{script}: its launch line cannot be seen from here. Write ${{CHECK:-}} before it (${{CHECK:-}} torchrun ..., or "
            "${CHECK:-} srun ...), or give the launch line itself."
        )
    _look_at_time(asked, findings)
    given = _variables(_options(words[1:place])) if words[0] == "sbatch" else {}
    return _asked(script, words[place + 1 :], _variables(asked) | os.environ | given)


def _is_script(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _SHELL_SCRIPT.match(file.readline(200)) is not None


def _directives(text: str) -> list[str]:
    """Words of the ``#SBATCH`` lines, which end at the first command."""
    found: list[str] = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            found += shlex.split(line.removeprefix("#SBATCH"), comments=True)
    return found


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sbatch", add_help=False, allow_abbrev=False)
    parser.add_argument("-N", "--nodes", type=lambda text: text.rpartition("-")[2])
    parser.add_argument("-n", "--ntasks")
    for name in ("--ntasks-per-node", "--gpus-per-node", "--gres", "--signal"):
        parser.add_argument(name)
    parser.add_argument("-a", "--array")
    parser.add_argument("-t", "--time")
    options, _ = understood(parser.parse_known_args, words)
    return options


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """Variables that Slurm would set in the script."""
    nodes = options.nodes
    if nodes is None and options.ntasks and options.ntasks_per_node:
        nodes = str(-(-int(options.ntasks) // int(options.ntasks_per_node)))
    gpus = re.search(r"(\d+)$", options.gpus_per_node or options.gres or "")
    first = re.match(r"\d+", options.array or "")
    found = {
        "SLURM_NNODES": nodes,
        "SLURM_NTASKS": options.ntasks,
        "SLURM_NTASKS_PER_NODE": options.ntasks_per_node,
        "SLURM_GPUS_ON_NODE": gpus and gpus[1],
        "SLURM_ARRAY_TASK_ID": first and first[0],
        "SLURM_ARRAY_JOB_ID": first and "1",
    }
    return {name: value for name, value in found.items() if value is not None}


def _look_at_time(options: argparse.Namespace, findings: Findings) -> None:
    """Compares the time limit with the time from which on the job's signal may come."""
    at = re.fullmatch(r".*@(\d+)", options.signal or "")
    limit = _seconds(options.time or "")
    if at and limit is not None and limit <= int(at[1]) + _EARLY:
        findings.errors.append(
            f"#SBATCH --signal {options.signal} and --time {options.time}: the job has {limit} s, and the signal comes up to "
            f"{int(at[1])} s + {_EARLY} s before their end: it would end as it starts. Give it a longer --time, or a shorter "
            "--signal."
        )


def _seconds(text: str) -> int | None:
    """Seconds of a time limit as Slurm writes them: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None for others."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in (*parts, *([days] if dash else []))):
        return None
    first = 1 if dash or len(parts) == 3 else 2
    numbers = [int(days or 0), *[0] * (first - 1), *map(int, parts)]
    return sum(number * unit for number, unit in zip(numbers, _UNITS, strict=False))


def _asked(script: Path, words: Sequence[str], environment: dict[str, str]) -> list[str]:
    """Runs a script up to its launch line; returns that line."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in _COMMANDS.items():
            (Path(folder) / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (Path(folder) / name).chmod(0o755)
        defaults = {"SLURM_NNODES": "1", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node0"}
        own = {"CHECK": "pier-launch-line", "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
        run = subprocess.run(
            ["bash", str(script), *words], env=defaults | environment | own, capture_output=True, text=True, errors="replace"
        )
        found = Path(folder) / "pier-launch-line.words"
        if not found.exists():
            said = (run.stderr.strip() or run.stdout.strip() or "it prints nothing").splitlines()[-1]
            raise PierConfigError(f"{script}: it has ended with status {run.returncode} before its launch line: {said}")
        exported = Path(folder, "pier-launch-line.environment").read_text(errors="replace").split("\0")[:-1]
        pairs = (pair.partition("=") for pair in exported if not pair.startswith(("CHECK=", "PATH=")))
        os.environ.update((name, value) for name, _, value in pairs)
        return found.read_text(errors="replace").split("\0")[:-1]
