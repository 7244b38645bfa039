"""The commands that README and documentation show, through the parsers of what they call. What they do is tested elsewhere."""

import argparse
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest

from pier_megatron import cli
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.flags import add_pier_arguments

_REPOSITORY = Path(__file__).parents[2]
_PAGES = sorted(
    page
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "examples/README.md", "examples/downstream/README.md")
    for page in _REPOSITORY.glob(pattern)
)
_PROGRAMS = ("pier-megatron", "torchrun", "make", "pip", "pytest", "python", "shtab", "git", "train.sh", "sbatch", "srun")


def shown(text: str) -> Iterator[list[str]]:
    """The words of each command in the code of a page, without what a reader fills in or leaves out."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    unmarked = [re.sub(r"^[+-] ", "", block, flags=re.MULTILINE) for block in blocks]  # marks of a diff
    joined = [block.replace("\\\n", " ") for block in unmarked]
    for number, block in enumerate(joined):
        for name, value in re.findall(r'^ *([A-Z]+)="(.+)"$', block, re.MULTILINE):
            joined[number] = joined[number].replace(f"${name}", value)
    lines = [line for block in joined for line in block.splitlines()]
    rest = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]
    for code in (*lines, *spans):
        code = re.sub(r"\[--[^]]*\]|(^|\s)#.*|\.\.\.", " ", code).replace("$NODE", "0")
        try:
            words = shlex.split(code.split(" > ")[0])
        except ValueError:
            continue  # prose in a diagram or a log
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words and (Path(words[0]).name in _PROGRAMS or (len(words) > 1 and words[0].endswith(".py"))):
            yield words


_COMMANDS = sorted({(page.name, shlex.join(words)) for page in _PAGES for words in shown(page.read_text())})


def test_commands_are_found() -> None:
    programs = {Path(shlex.split(command)[0]).name for _, command in _COMMANDS}
    assert {*_PROGRAMS} <= programs


@pytest.mark.parametrize(("page", "command"), _COMMANDS)
def test_command_is_understood(page: str, command: str) -> None:
    program, *words = shlex.split(command)
    match Path(program).name:
        case "pier-megatron":
            understand_own(words)
        case "torchrun":
            understand_launch([program, *words])
        case "make":
            environment = {"PATH": "/usr/bin:/bin"}
            subprocess.run(["make", "--dry-run", *words], cwd=_REPOSITORY, env=environment, check=True, capture_output=True)
        case "pip":
            extras = {extra for found in re.findall(r"\[([\w,]+)\]", command) for extra in found.split(",")}
            project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]
            assert extras <= project["optional-dependencies"].keys()
        case "python" if words[:2] == ["-m", "pier_megatron"]:
            understand_flags(words[2:])
        case "python" | "pytest":
            understand_script(words)
        case "shtab":
            assert callable(getattr(sys.modules[words[2].rpartition(".")[0]], words[2].rpartition(".")[2]))
        case "srun" if ".py" in command:
            understand_flags(list(LaunchCommand.parse([program, *words]).arguments))
        case "git" | "train.sh" | "sbatch" | "srun":
            # Tested with all that they start: test_checkouts.py, test_examples.py, test_experts_script.py.
            files = [word for word in (program, *words) if Path(word).suffix in (".sh", ".slurm", ".patch")]
            files = [word for word in files if not word.startswith("runs/")]
            assert all((_REPOSITORY / word).exists() or (_REPOSITORY / "examples" / word).exists() for word in files)
        case _:
            understand_script([program, *words])


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_no_job_names_a_preset(page: Path) -> None:
    """``auto``, the default, takes the one that suits a run: what a page passes would be worse, or the same."""
    jobs = [words for words in shown(page.read_text()) if words[0] in ("pier-megatron", "torchrun", "srun") and words[1:]]
    assert [words for words in jobs if any(word.startswith("--pier-preset") for word in words)] == []
    assert "preset=" not in page.read_text().partition("```python")[2] or page.name == "api.md"


_SCRIPTS = sorted(script for folder in ("benchmarks", "examples", "study") for script in (_REPOSITORY / folder).rglob("*.py"))


@pytest.mark.parametrize("page", [*_PAGES, *_SCRIPTS], ids=lambda page: page.name)
def test_flags_of_the_plugin_exist(page: Path) -> None:
    parser = argparse.ArgumentParser()
    add_pier_arguments(parser)
    assert set(re.findall(r"--pier-[a-z-]*[a-z]", page.read_text())) <= set(re.findall(r"--pier-[a-z-]+", parser.format_help()))


def understand_own(words: list[str]) -> None:
    if len(words) < 2:  # named, not shown
        assert not words or words[0] in cli.COMMANDS
        return
    parser = cli.parser()
    need_no_paths(parser)
    options, unknown = parser.parse_known_args(words)
    assert not unknown
    started = getattr(options, "command", [])
    if "torchrun" in started:
        understand_launch(started)
    elif started[:1] == ["srun"] and ".py" in shlex.join(started):
        understand_flags(list(LaunchCommand.parse(started).arguments))
    understand_flags(getattr(options, "arguments", []))


def need_no_paths(parser: argparse.ArgumentParser) -> None:
    """Lets a parser accept what is not there: the pages speak of the reader's files."""
    for action in parser._actions:
        if getattr(action.type, "__name__", None) in ("existing_file", "existing_folder", "name_or_folder"):
            action.type = str
        for inner in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            need_no_paths(inner)


def understand_launch(words: list[str]) -> None:
    if "-m" not in words and not any(word.endswith(".py") for word in words):
        words = [words[0], "pretrain_gpt.py", *words[1:]]
    understand_flags(list(LaunchCommand.parse(words).arguments))


def understand_flags(words: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_pier_arguments(parser)
    _, of_megatron = parser.parse_known_args(words)
    assert not [word for word in of_megatron if word.startswith("--pier")]


class _UnderstoodError(Exception):
    """A script has parsed its command line, and shall do no more."""


def understand_script(words: list[str]) -> None:
    script, *arguments = words
    path = _REPOSITORY / script
    if (_REPOSITORY / "examples" / script).exists():
        return  # tested with all that it does: test_data_preparation.py
    assert path.exists()
    if path.suffix != ".py" or "argparse" not in path.read_text():
        return
    parse_args, before = argparse.ArgumentParser.parse_args, set(sys.modules)

    def only_parse(parser: argparse.ArgumentParser, *given: Sequence[str]) -> None:
        need_no_paths(parser)
        parse_args(parser, *given)
        raise _UnderstoodError

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", only_parse),
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
        pytest.raises(_UnderstoodError),
    ):
        runpy.run_path(str(path), run_name="__main__")
    # Another folder may have modules of the same names.
    for name in sys.modules.keys() - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == path.parent:
            del sys.modules[name]


def test_readme_reaches_its_table_of_features_soon() -> None:
    before, heading, _ = (_REPOSITORY / "README.md").read_text().partition("\n## Features\n")
    assert heading
    assert len(before.split()) <= 500


def test_files_that_pages_name_are_there() -> None:
    """The floors of ``CONTRIBUTING.md``, and files with their folders on every page."""
    floors = re.findall(r"^\| `(\w+/)`", (_REPOSITORY / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(floors) > 5
    assert [name for name in floors if not (_REPOSITORY / "pier_megatron" / name).exists()] == []
    for page in _PAGES:
        folders = (
            _REPOSITORY,
            page.parent,
            *(_REPOSITORY / "pier_megatron" / part for part in ("", "commands", "integration")),
        )
        modules = set(re.findall(r"`((?:[\w-]+/)+\w+\.py)`", page.read_text()))
        assert {name for name in modules if not any((folder / name).exists() for folder in folders)} == set(), page.name
