"""Reads the part of a launch command that a scheduler or a shell interprets: ``srun``, ``env`` and ``bash -c``."""

import argparse
import contextlib
import dataclasses
import io
import math
import os
import re
import shlex
import shutil
import string
from collections.abc import Callable, Sequence
from pathlib import Path

from pier_megatron.errors import PierConfigError, division

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# Options of srun that take no value; a value of any other one is joined with "=" or is the next word.
_SWITCHES = frozenset(
    "-E -H -I -K -O -Q -X -Z -k -l -s -u -v --contiguous --disable-status --exact --exclusive --help --hold --kill-on-bad-exit "
    "--label --multi-prog --no-allocate --no-kill --overcommit --overlap --oversubscribe --preserve-env --propagate --pty "
    "--quiet --reboot --spread-job --unbuffered --use-min-nodes --verbose --version --whole".split()
)
_SHELLS = ("bash", "sh", "zsh", "dash")
# What starts a training in the text of a shell, and what ends that command.
_STARTS, _ENDS = re.compile(r"(.*/)?(torchrun|python[\d.]*)"), re.compile(r"[;\n]+|&&?|\|\|?")
# What stands before a command without changing the environment that it finds, or only by assignments in sight.
_TRANSPARENT = re.compile(r"(ba|z|da)?sh|env|exec|export|python[\d.]*")


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What stands around the launcher or the Python of a job.

    Attributes:
        is_step: Whether srun starts it.
        nodes: Number of nodes; None if neither srun nor the environment says it.
        tasks_per_node: Processes that srun starts on each; None likewise.
        variables: Environment variables with the same value in all processes.
        wrapper: Text of the shell commands or the script that starts the job in each process, as far as it can be read.
        unread: Name of a program in between that cannot be read; None without one.
    """

    is_step: bool = False
    nodes: int | None = None
    tasks_per_node: int | None = None
    variables: frozenset[str] = frozenset()
    wrapper: str = ""
    unread: str | None = None

    def provides(self, variable: str, differs: bool) -> bool:
        """Whether the processes find a variable set; only a wrapper can give each of them a value that ``differs``."""
        return bool(re.search(rf"\b{variable}\b", self.wrapper)) or (not differs and variable in self.variables)


def understood[R](parse: Callable[[list[str]], R], words: Sequence[str]) -> R:
    """What a parser of argparse makes of some words.

    Raises:
        PierConfigError: With the parser's own message.
    """
    refusal = io.StringIO()
    with contextlib.redirect_stderr(refusal):
        try:
            return parse(list(words))
        except SystemExit:
            # Help ends without a message.
            raise PierConfigError((refusal.getvalue().strip() or f"{' '.join(words)} asks for help").splitlines()[-1]) from None


def expanded(words: Sequence[str]) -> list[str]:
    """Words of a command as the first process of a step sees them; TEXT of ``bash -c TEXT`` is split into its words.

    What TEXT does after the command that starts a training is left out.
    """
    place = _place_of_text(words)
    if place is None:
        return list(words)
    first = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    text = string.Template(words[place]).safe_substitute(first | dict(os.environ))
    # A shell takes a backslash and the end of its line for nothing.
    lexer = shlex.shlex(text.replace("\\\n", ""), posix=True, punctuation_chars=";\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        split = list(lexer)
        start = next((place for place, word in enumerate(split) if _STARTS.fullmatch(word)), len(split))
        end = next((place for place, word in enumerate(split) if place > start and _ENDS.fullmatch(word)), len(split))
        return [*words[: place - 2], *split[:end]]
    except ValueError as error:
        raise PierConfigError(f"{' '.join(words[place - 2 : place + 1])}: {error}.") from None


def _place_of_text(words: Sequence[str]) -> int | None:
    """Which word is the TEXT of ``bash -c TEXT``."""
    shells = (place for place, word in enumerate(words) if Path(word).name in _SHELLS)
    return next((place + 2 for place in shells if words[place + 2 :] and re.fullmatch(r"-\w*c", words[place + 1])), None)


def surroundings(words: Sequence[str], before: Sequence[str]) -> Surroundings:
    """Reads what stands before the launcher.

    Args:
        words: Whole command, as its user typed it.
        before: Words before the launcher, see :func:`expanded`.

    Raises:
        PierConfigError: If srun would start different numbers of processes on its nodes.
    """
    start = next((place + 1 for place, word in enumerate(before) if Path(word).name == "srun"), None)
    variables = {word.partition("=")[0] for word in before if _ASSIGNMENT.match(word)}
    if start is None:
        return Surroundings(variables=frozenset(variables | os.environ.keys()))
    end = start
    # Options of what srun starts may have the same names.
    while end < len(before) and (word := before[end]).startswith("-"):
        is_joined = "=" in word or (len(word) > 2 and not word.startswith("--"))
        end += 1 if is_joined or word in _SWITCHES else 2
    options, _ = understood(_options().parse_known_args, before[start:end])
    # srun passes all variables on, unless --export names some.
    exported = options.export.split(",")
    variables |= {name.partition("=")[0] for name in exported} | (os.environ.keys() if "ALL" in exported else set())
    place, unread = _place_of_text(words), None
    wrapper = "" if place is None else words[place]
    for word in before[end:]:
        program = None if _TRANSPARENT.fullmatch(Path(word).name) else shutil.which(word)
        text = Path(program).read_bytes() if program else b""
        if b"\0" in text:
            unread = word
        else:
            wrapper += text.decode(errors="replace")
    return Surroundings(True, *_size(options), frozenset(variables), wrapper, unread)


def _options() -> argparse.ArgumentParser:
    """The options of srun that decide on processes and variables; an allocation has defaults of some."""
    parser = argparse.ArgumentParser(prog="srun", add_help=False, allow_abbrev=False)
    allocated = os.environ.get("SLURM_NNODES", os.environ.get("SLURM_JOB_NUM_NODES"))
    parser.add_argument("-N", "--nodes", type=_number, default=allocated)
    parser.add_argument("-n", "--ntasks", type=_number)
    parser.add_argument("--ntasks-per-node", type=_number)
    parser.add_argument("--export", default="ALL")
    return parser


def _number(text: str) -> int | None:
    """A number, or the end of a range such as 2-4; None for other texts, which srun would refuse."""
    last = text.rpartition("-")[2]
    return int(last) if last.isdigit() and int(last) else None


def _size(options: argparse.Namespace) -> tuple[int | None, int | None]:
    """Numbers of nodes and of processes on each that srun starts."""
    tasks, per_node = options.ntasks, options.ntasks_per_node
    if tasks is None and per_node is None:
        tasks = _number(os.environ.get("SLURM_NTASKS", ""))
    per_node = per_node or _number(os.environ.get("SLURM_NTASKS_PER_NODE", ""))
    nodes = options.nodes or (math.ceil(tasks / per_node) if tasks and per_node else None)
    if nodes is None:
        return None, per_node
    tasks = tasks or nodes * (per_node or 1)
    if tasks % nodes:
        raise PierConfigError(
            f"srun --ntasks {tasks} on --nodes {nodes}: {division(tasks, nodes)}, so that nodes would run different numbers of "
            f"ranks. Use a multiple of {nodes}."
        )
    return nodes, tasks // nodes
