"""Reads the part of a launch command that a scheduler or a shell interprets: ``srun``, ``env`` and ``bash -c``."""

import dataclasses
import math
import os
import re
import shlex
import shutil
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

from pier_megatron.errors import PierConfigError, division

# Options of srun that take no value; a value of any other one is joined with "=" or is the next word.
_SWITCHES = frozenset(
    "-E -H -I -K -O -Q -X -Z -k -l -s -u -v --contiguous --disable-status --exact --exclusive --help --hold --kill-on-bad-exit "
    "--label --multi-prog --no-allocate --no-kill --overcommit --overlap --oversubscribe --preserve-env --propagate --pty "
    "--quiet --reboot --spread-job --unbuffered --use-min-nodes --verbose --version --whole".split()
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SHELLS = ("bash", "sh", "zsh", "dash")
# What stands before a command without changing the environment that it finds, or only by assignments in sight.
_TRANSPARENT = re.compile(r"(ba|z|da)?sh|env|exec|export|python[\d.]*")


@dataclasses.dataclass(frozen=True)
class Step:
    """What ``srun`` starts.

    Attributes:
        nodes: Number of nodes; None if neither srun nor the environment says it.
        tasks_per_node: Processes on each; None likewise.
    """

    nodes: int | None
    tasks_per_node: int | None


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What stands around the launcher or the Python of a job.

    Attributes:
        step: What srun starts; None without it.
        variables: Environment variables with the same value in all processes.
        wrapper: Text of the shell commands or the script that starts the job in each process, as far as it can be read.
        unread: Name of a program in between that cannot be read; None without one.
    """

    step: Step | None = None
    variables: frozenset[str] = frozenset()
    wrapper: str = ""
    unread: str | None = None

    def provides(self, variable: str, differs: bool) -> bool:
        """Whether the processes find an environment variable set.

        Args:
            variable: Name of the variable.
            differs: Whether each process needs another value, which only a wrapper can give.
        """
        return bool(re.search(rf"\b{variable}\b", self.wrapper)) or (not differs and variable in self.variables)


def expanded(words: Sequence[str]) -> list[str]:
    """Words of a command as the first process of a step sees them; TEXT of ``bash -c TEXT`` is split into its words."""
    place = _place_of_text(words)
    if place is None:
        return list(words)
    first = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    text = string.Template(words[place]).safe_substitute(first | dict(os.environ))
    try:
        # A shell takes a backslash and the end of its line for nothing.
        return [*words[: place - 2], *shlex.split(text.replace("\\\n", "").replace(";", " ; "))]
    except ValueError as error:
        raise PierConfigError(f"{' '.join(words[place - 2 : place + 1])}: {error}.") from None


def _place_of_text(words: Sequence[str]) -> int | None:
    """Which word is the TEXT of ``bash -c TEXT``."""
    shells = (place for place, word in enumerate(words) if Path(word).name in _SHELLS)
    return next((place + 2 for place in shells if re.fullmatch(r"-\w*c", "".join(words[place + 1 : place + 2]))), None)


def surroundings(words: Sequence[str], before: Sequence[str]) -> Surroundings:
    """Reads what stands before the launcher.

    Args:
        words: The whole command, as its user typed it.
        before: Its words before the launcher, see :func:`expanded`.

    Raises:
        PierConfigError: If srun would start different numbers of processes on its nodes.
    """
    start = next((place + 1 for place, word in enumerate(before) if Path(word).name == "srun"), None)
    options, rest = ({}, list(before)) if start is None else options_of(before[start:])
    # srun passes all variables on, unless --export names some.
    exported = options.get("--export", "ALL").split(",")
    variables = {name.partition("=")[0] for name in exported} | (set(os.environ) if "ALL" in exported else set())
    variables |= {word.partition("=")[0] for word in before if _ASSIGNMENT.match(word)}
    if start is None:
        return Surroundings(None, frozenset(variables))
    place, unread = _place_of_text(words), None
    wrapper = "" if place is None else words[place]
    for word in rest:
        program = None if _TRANSPARENT.fullmatch(Path(word).name) else shutil.which(word)
        text = Path(program).read_bytes() if program else b""
        if b"\0" in text:
            unread = word
        else:
            wrapper += text.decode(errors="replace")
    return Surroundings(_step(options, os.environ), frozenset(variables), wrapper, unread)


def options_of(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Options of srun with their values, and the words of the command that it starts."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, joined, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2:
            name, joined, value = word[:2], "=", word[2:].removeprefix("=")
        if not joined and name not in _SWITCHES and rest:
            value = rest.pop(0)
        options[name] = value
    return options, rest


def _step(options: Mapping[str, str], environment: Mapping[str, str]) -> Step:
    """How many processes srun starts on how many nodes, by its options and, where they are silent, the allocation's."""

    def number(*names: str) -> int | None:
        given = next((table[name] for table in (options, environment) for name in names if name in table), "")
        # The end of a range such as 2-4 counts.
        last = given.split("-")[-1]
        return int(last) if last.isdigit() and int(last) else None

    nodes = number("-N", "--nodes", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    per_node = number("--ntasks-per-node", "SLURM_NTASKS_PER_NODE")
    if not {"-n", "--ntasks"} & options.keys() and "--ntasks-per-node" in options:
        tasks = nodes and per_node and nodes * per_node
    else:
        tasks = number("-n", "--ntasks", "SLURM_NTASKS")
    if nodes is None and tasks and per_node:
        nodes = math.ceil(tasks / per_node)
    if nodes is None:
        return Step(None, per_node)
    tasks = tasks or nodes * (per_node or 1)
    if tasks % nodes:
        raise PierConfigError(
            f"srun --ntasks {tasks} on --nodes {nodes}: {division(tasks, nodes)}, so that nodes would run different numbers of "
            f"ranks. Use a multiple of {nodes}."
        )
    return Step(nodes, tasks // nodes)
