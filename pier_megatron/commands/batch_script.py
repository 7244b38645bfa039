"""Reads a batch script: the launch command in it, with what Slurm and the script itself set for it."""

import contextlib
import dataclasses
import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from pier_megatron.commands.srun import expanded, options_of
from pier_megatron.errors import PierConfigError, Problems

_SHELLS = ("sbatch", "bash", "sh")
_PYTHON = re.compile(r"python[\d.]*")
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_NODES = ("NNODES", "JOB_NUM_NODES")
# What ends a command, or redirects what it prints.
_END = re.compile(r"\|\|?|&&?|;|\d?&?>.*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\((.*)\)", re.DOTALL)
_EXPANSION = re.compile(
    r"(?P<quoted>'[^']*')|(?P<command>\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`)"
    r"|\$\{(?P<braced>\w+)(?:\[[@*]\])?(?::?-(?P<default>[^}]*))?\}|\$(?P<plain>\w+|[@*])"
)
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*[\"'\\]?([A-Za-z_]\w*)")
_ALL_OF_ARRAY = re.compile(r'"\$(?:\{(\w+)\[[@*]\]\}|([@*]))"')


@dataclasses.dataclass
class BatchScript:
    """A batch script.

    Attributes:
        path: Its file.
        variables: Shell variables with a visible value, as text for a shell.
        environment: Environment variables that it sets for its commands.
        words: Launch command in it.
        unseen: Words of the launch command that only the running job knows.
        folder: Folder in which the launch command runs, as far as it can be seen.
    """

    path: Path
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    words: list[str] = dataclasses.field(default_factory=list)
    unseen: list[str] = dataclasses.field(default_factory=list)
    folder: Path = dataclasses.field(default_factory=Path.cwd)

    @property
    def note(self) -> str:
        """What was read."""
        unseen = f"; known only to the running job: {', '.join(dict.fromkeys(self.unseen))}" if self.unseen else ""
        return f"{self.path}: read as {shlex.join(self.words[:3])} ...{unseen}"

    @classmethod
    def read(cls, path: Path, options: dict[str, str], arguments: Sequence[str]) -> "BatchScript":
        """Reads a script.

        Args:
            path: Its file.
            options: Options of sbatch on the command line, which win over the script's.
            arguments: Arguments of the script.

        Raises:
            PierConfigError: If there is no launch command in it.
        """
        script, text = cls(path), path.read_text(errors="replace")
        own = [
            word for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE) for word in shlex.split(line, comments=True)
        ]
        options = options_of(own)[0] | options
        script._allocate(options)
        script._enter(options.get("--chdir", options.get("-D", ".")))
        script.variables |= script.environment | {"@": shlex.join(arguments), "*": shlex.join(arguments)}
        commands = [(*command, script.folder) for line in _lines(text) if (command := script._take(line))]
        for is_launched in (_LAUNCHERS.__contains__, _PYTHON.fullmatch):
            for words, unseen, folder in commands:
                if any(is_launched(Path(word).name) for word in expanded(words)):
                    script.words, script.unseen, script.folder = words, unseen, folder
                    return script
        raise PierConfigError(f"{path}: no torchrun in this script, and no python. Give the launch command of the job itself.")

    def _allocate(self, options: dict[str, str]) -> None:
        """Sets what Slurm sets in an allocation of this size."""

        def number(*names: str) -> str | None:
            found = re.sub(r"\(.*?\)", "", next((options[name] for name in names if name in options), ""))
            # The list may also name other resources than GPUs.
            found = next((each for each in found.split(",") if each.startswith("gpu:")), found)
            return last if (last := re.split("[-:]", found)[-1]).isdigit() else None

        nodes, per_node = number("-N", "--nodes"), number("--ntasks-per-node")
        tasks = number("-n", "--ntasks") or (str(int(nodes) * int(per_node)) if nodes and per_node else None)
        gpus = number("--gpus-per-node", "--gres")
        known = {"NNODES": nodes, "JOB_NUM_NODES": nodes, "NTASKS_PER_NODE": per_node, "NTASKS": tasks}
        known |= {"GPUS_ON_NODE": gpus, "GPUS_PER_NODE": gpus, "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
        self.environment |= {f"SLURM_{name}": value for name, value in known.items() if value is not None}

    def _enter(self, folder: str) -> None:
        """Changes the folder of the commands that follow, to one that can be seen."""
        self.folder = place if (place := self.folder / Path(folder).expanduser()).is_dir() else self.folder

    def _take(self, line: str) -> tuple[list[str], list[str]] | None:
        """Takes over a line's assignments; returns the words of its command, and those that cannot be seen."""
        unseen: list[str] = []
        text = self._substituted(line.strip(), unseen)
        if array := _ARRAY.fullmatch(text):
            self._assign(array[1], array[2], shlex.join(shlex.split(array[3], comments=True)), " ", unseen)
            return None
        words = shlex.split(text, comments=True)
        exports = words[:1] == ["export"]
        if exports or (words and all(map(_ASSIGNMENT.match, words))):
            for word in words[exports:]:
                name, joined, value = word.partition("=")
                if joined:
                    self._assign(name.removesuffix("+"), "+" * name.endswith("+"), value, "", unseen)
                if exports:
                    name = name.removesuffix("+")
                    self.environment[name] = self.variables.get(name, f"${name}")
            return None
        words = words[1:] if words[:1] == ["exec"] else words
        end = next((place for place, word in enumerate(words) if _END.fullmatch(word)), len(words))
        if words[:1] == ["cd"]:
            self._enter("".join(words[1:end]))
            return self._take(shlex.join(words[end + 1 :])) if words[end + 1 :] else None
        return (words[:end], unseen) if words[:end] else None

    def _assign(self, name: str, appends: str, value: str, between: str, unseen: list[str]) -> None:
        if unseen:
            # It stays a variable.
            self.variables.pop(name, None)
        else:
            self.variables[name] = f"{self.variables[name]}{between}{value}" if appends and name in self.variables else value

    def _substituted(self, text: str, unseen: list[str]) -> str:
        """Puts the values of variables that can be seen into a line, and quotes what cannot."""

        def value(found: re.Match[str]) -> str:
            if found["quoted"] is not None:
                return found[0]
            name = found["braced"] or found["plain"] or ""
            known = self.variables.get(name, os.environ.get(name, found["default"]))
            if found["command"] is not None or known is None:
                unseen.append(found[0])
                return found[0] if found["command"] is None else found[0].replace(" ", "_").replace('"', "")
            return known

        text = _ALL_OF_ARRAY.sub(lambda found: self.variables.get(found[1] or found[2], found[0][1:-1]), text)
        return _EXPANSION.sub(value, text)


def _lines(text: str) -> Iterator[str]:
    """Commands of a script, continued lines, quoted texts and arrays in one piece; without here-documents."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    while lines:
        # A quote that nothing ends is of its line alone.
        length = next((length for length in range(1, len(lines) + 1) if _is_whole("\n".join(lines[:length]))), None)
        if length is not None:
            yield "\n".join(lines[:length])
        document = _HERE_DOCUMENT.search(lines[(length or 1) - 1])
        lines = lines[length or 1 :]
        if document and document[1] in map(str.strip, lines):
            lines = lines[list(map(str.strip, lines)).index(document[1]) + 1 :]


def _is_whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return not re.match(r"\s*\w+\+?=\(", command) or command.rstrip().endswith(")")


def _named(words: Sequence[str]) -> tuple[Path, dict[str, str], list[str]] | None:
    """The batch script that words name, options of sbatch before it and arguments behind it; None if they name none."""
    if any(Path(word).name in _LAUNCHERS or _PYTHON.fullmatch(Path(word).name) for word in words) or not words:
        return None
    options, rest = options_of(words[1:]) if Path(words[0]).name in _SHELLS else ({}, list(words))
    return (Path(rest[0]), options, rest[1:]) if rest and Path(rest[0]).is_file() else None


@contextlib.contextmanager
def opened(words: Sequence[str], command: str = "doctor", flags: Collection[str] = ()) -> Iterator[tuple[list[str], list[str]]]:
    """Gives a launch command and notes on how it was read: the words themselves, or the command in the batch script they name.

    Inside, environment and folder are those of the script's commands.

    Args:
        words: Launch command, or a batch script with sbatch's options before it and its arguments behind it.
        command: Name of the command of ``pier-megatron`` that asks.
        flags: Flags of that command, which belong before the job.

    Raises:
        PierConfigError: If they name a script without a launch command, or what belongs before it is behind it.
    """
    named = _named(words)
    if named is None:
        yield list(words), []
        return
    path, options, arguments = named
    behind = [name for word in arguments if (name := word.partition("=")[0]) in flags]
    Problems([f"{name} after {path.name} goes to the script. Put it before {path.name}." for name in behind]).report()
    script, before, folder = BatchScript.read(path, options, arguments), dict(os.environ), Path.cwd()
    sized = any(f"SLURM_{name}" in script.environment | os.environ for name in _NODES)
    if not sized and re.search(rf"\$\{{?SLURM_({'|'.join(_NODES)})\b(?!:?-)", " ".join(script.words)):
        raise PierConfigError(
            "the script does not say on how many nodes it runs. Give it as to sbatch: "
            f"pier-megatron {command} sbatch --nodes 8 {path}"
        )
    try:
        os.environ |= script.environment
        os.chdir(script.folder)
        yield script.words, [script.note]
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)
