"""Reads a batch script: the launch command in it, with what Slurm and the script itself set for it."""

import contextlib
import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from pier_megatron.commands.srun import expanded, options_of
from pier_megatron.errors import PierConfigError

_SHELLS = ("sbatch", "bash", "sh")
_PYTHON = re.compile(r"python[\d.]*")
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
# What ends a command, or redirects what it prints.
_END = re.compile(r"\|\|?|&&?|;|\d?&?>.*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\((.*)\)", re.DOTALL)
_EXPANSION = re.compile(
    r"(?P<quoted>'[^']*')|(?P<command>\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`)"
    r"|\$\{(?P<braced>\w+)(?:\[[@*]\])?(?::?-(?P<default>[^}]*))?\}|\$(?P<plain>\w+|[@*])"
)
_ALL_OF_ARRAY = re.compile(r'"\$(?:\{(\w+)\[[@*]\]\}|([@*]))"')


@dataclasses.dataclass
class BatchScript:
    """A batch script.

    Attributes:
        path: Its file.
        variables: Shell variables that it sets and whose values can be seen, as text for a shell.
        environment: Environment variables of its commands, beside those that are set here.
        words: Launch command in it.
        unseen: Words of the launch command that only the running job knows.
    """

    path: Path
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    words: list[str] = dataclasses.field(default_factory=list)
    unseen: list[str] = dataclasses.field(default_factory=list)

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
        script._allocate(options_of(own)[0] | options)
        script.variables |= script.environment | {"@": shlex.join(arguments), "*": shlex.join(arguments)}
        commands = [command for line in _lines(text) if (command := script._take(line))]
        for is_launched in (_LAUNCHERS.__contains__, _PYTHON.fullmatch):
            for words, unseen in commands:
                if any(is_launched(Path(word).name) for word in expanded(words)):
                    script.words, script.unseen = words, unseen
                    return script
        raise PierConfigError(f"{path}: no torchrun in this script, and no python. Give the launch command of the job itself.")

    def _allocate(self, options: dict[str, str]) -> None:
        """Sets what Slurm sets in an allocation of this size."""

        def number(*names: str) -> str | None:
            found = next((options[name] for name in names if name in options), "")
            return last if (last := re.split("[-:]", found)[-1]).isdigit() else None

        nodes, per_node = number("-N", "--nodes"), number("--ntasks-per-node")
        tasks = number("-n", "--ntasks") or (str(int(nodes) * int(per_node)) if nodes and per_node else None)
        gpus = number("--gpus-per-node", "--gres")
        known = {"NNODES": nodes, "JOB_NUM_NODES": nodes, "NTASKS_PER_NODE": per_node, "NTASKS": tasks}
        known |= {"GPUS_ON_NODE": gpus, "GPUS_PER_NODE": gpus, "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
        self.environment |= {f"SLURM_{name}": value for name, value in known.items() if value is not None}

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
    """Commands of a script, continued lines, quoted texts and arrays in one piece."""
    pending = ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        pending = f"{pending}\n{line}" if pending else line
        try:
            shlex.split(pending, comments=True)
        except ValueError:
            continue
        if re.match(r"\s*\w+\+?=\(", pending) and not pending.rstrip().endswith(")"):
            continue
        yield pending
        pending = ""


def _found(words: Sequence[str]) -> BatchScript | None:
    if any(Path(word).name in _LAUNCHERS or _PYTHON.fullmatch(Path(word).name) for word in words) or not words:
        return None
    options, rest = options_of(words[1:]) if Path(words[0]).name in _SHELLS else ({}, list(words))
    return BatchScript.read(Path(rest[0]), options, rest[1:]) if rest and Path(rest[0]).is_file() else None


@contextlib.contextmanager
def opened(words: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Gives the launch command that words are, or that the batch script has that they name, and what was read of it.

    Inside, the environment is that of the script's commands.

    Raises:
        PierConfigError: If they name a script without a launch command.
    """
    script, before = _found(words), dict(os.environ)
    if script is None:
        yield list(words), []
        return
    try:
        os.environ |= script.environment
        yield script.words, [script.note]
    finally:
        os.environ.clear()
        os.environ.update(before)
