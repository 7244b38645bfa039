"""Reads the part of a launch command that a scheduler or a shell interprets: ``srun``, ``mpirun``, ``env``, ``bash -c``."""

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

from pier_megatron.commands import mpirun
from pier_megatron.errors import PierConfigError, division

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# Options of srun that take no value; a value of any other one is joined with "=" or is the next word.
_SWITCHES = frozenset(
    "-E -H -I -K -O -Q -X -Z -k -l -s -u -v --contiguous --disable-status --exact --exclusive --help --hold --kill-on-bad-exit "
    "--label --multi-prog --no-allocate --no-kill --overcommit --overlap --oversubscribe --preserve-env --propagate --pty "
    "--quiet --reboot --spread-job --unbuffered --use-min-nodes --verbose --version --whole".split()
)
_LONGEST_SCRIPT = 1 << 20
_SHELLS = ("bash", "sh", "zsh", "dash")
# What starts a training in the text of a shell, and what ends that command.
_STARTS, _ENDS = re.compile(r"(.*/)?(torchrun|python[\d.]*)"), re.compile(r"[;\n]+|&&?|\|\|?")
# What stands before a command without changing the environment that it finds, or only by assignments in sight.
_TRANSPARENT = re.compile(r"(ba|z|da)?sh|env|exec|export|python[\d.]*")


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What stands around the launcher or the Python of a job.

    Attributes:
        starter: Program that starts the processes of all nodes, such as srun or mpirun; None without one.
        nodes: Number of nodes; None if neither the starter nor the environment says it.
        tasks_per_node: Processes that the starter starts on each; None likewise.
        variables: Environment variables with the same value in all processes.
        wrapper: Text of the shell commands or the script that starts the job in each process, as far as it can be read.
        unread: Name of a program in between that cannot be read; None without one.
    """

    starter: str | None = None
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
    return list(words) if place is None else [*words[: place[0]], *_split(words[place[1]], words[place[0] : place[1] + 1])]


def through_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Continues a command where a shell script among its words hands the rest of them on, as ``"$@"``.

    Returns:
        The words up to the script and those that it starts, as they were if no script can be read; and the names of scripts
        that cannot.
    """
    unread = []
    for place, word in enumerate(words):
        text = _text(word)
        for line in reversed((text or "").replace("\\\n", " ").splitlines()):
            if re.search(r"\$\{?[@*]", line) and re.search(r"\b(python[\d.]*|torchrun)\b", line):
                split = _split(re.sub(r"\"?\$\{?[@*]\}?\"?", "\0", line), [word])
                rest = words[place + 1 :]
                return [*words[: place + 1], *(each for found in split for each in (rest if found == "\0" else [found]))], []
        unread += [word] if text is None and word.endswith((".sh", ".bash")) else []
    return list(words), unread


def _text(word: str) -> str | None:
    """Text of a script among the words, which a shell need not be able to execute; None for what is no text, such as images."""
    program = shutil.which(word) or word
    if not Path(program).is_file():
        return None
    with Path(program).open("rb") as file:
        beginning = file.read(_LONGEST_SCRIPT)
    return None if b"\0" in beginning else beginning.decode(errors="replace")


def _split(text: str, where: Sequence[str]) -> list[str]:
    first = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    known = string.Template(text).safe_substitute(first | dict(os.environ))
    # A shell takes a backslash and the end of its line for nothing.
    lexer = shlex.shlex(known.replace("\\\n", ""), posix=True, punctuation_chars=";\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        split = list(lexer)
        start = next((place for place, word in enumerate(split) if _STARTS.fullmatch(word)), len(split))
        end = next((place for place, word in enumerate(split) if place > start and _ENDS.fullmatch(word)), len(split))
        return split[:end]
    except ValueError as error:
        raise PierConfigError(f"{error}, in {' '.join(where)}.") from None


def _place_of_text(words: Sequence[str]) -> tuple[int, int] | None:
    """Which word is the shell of ``bash -c TEXT``, with more options or not, and which is the TEXT."""
    for place, word in enumerate(words):
        if Path(word).name in _SHELLS:
            text, has_text = place + 1, False
            while text < len(words) and re.fullmatch(r"[-+]\w+|--[a-z]+", words[text]):
                has_text = has_text or bool(re.fullmatch(r"-\w*c\w*", words[text]))
                # As in -o pipefail.
                text += 2 if re.fullmatch(r"[-+]\w*o", words[text]) else 1
            if has_text and text < len(words):
                return place, text
    return None


def surroundings(words: Sequence[str], before: Sequence[str]) -> Surroundings:
    """Reads what stands before the launcher.

    Args:
        words: Whole command, as its user typed it.
        before: Words before the launcher, see :func:`expanded`.

    Raises:
        PierConfigError: If srun would start different numbers of processes on its nodes.
    """
    starters = ("srun", *mpirun.PROGRAMS)
    start = next((place + 1 for place, word in enumerate(before) if Path(word).name in starters), None)
    variables = {word.partition("=")[0] for word in before if _ASSIGNMENT.match(word)}
    if start is None:
        return Surroundings(variables=frozenset(variables | os.environ.keys()))
    starter, end = Path(before[start - 1]).name, start
    if starter in mpirun.PROGRAMS:
        variables |= mpirun.exported(before[start:]) | os.environ.keys()
        return Surroundings(starter, *mpirun.size(before[start:]), frozenset(variables), *_wrapping(words, before[start:]))
    # Options of what srun starts may have the same names.
    while end < len(before) and (word := before[end]).startswith("-"):
        is_joined = "=" in word or (len(word) > 2 and not word.startswith("--"))
        end += 1 if is_joined or word in _SWITCHES else 2
    options, _ = understood(_options().parse_known_args, before[start:end])
    # srun passes all variables on, unless --export names some.
    exported = options.export.split(",")
    variables |= {name.partition("=")[0] for name in exported} | (os.environ.keys() if "ALL" in exported else set())
    return Surroundings(starter, *_size(options), frozenset(variables), *_wrapping(words, before[end:]))


def _wrapping(words: Sequence[str], between: Sequence[str]) -> tuple[str, str | None]:
    """Text of what stands between the starter and the launcher, and the name of a program there that cannot be read."""
    place, unread = _place_of_text(words), None
    wrapper = "" if place is None else words[place[1]]
    for word in between:
        if not _TRANSPARENT.fullmatch(Path(word).name):
            text = _text(word)
            wrapper += text or ""
            unread = word if text is None and shutil.which(word) else unread
    return wrapper, unread


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
