"""Every flag of every command and every ``--pier-*`` setting against values that it cannot have, by walking the parsers.

A new flag is tried by itself, and fails ``test_every_flag_says_what_it_accepts`` if it does not say what it accepts.
"""

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pier_megatron import PierConfig, PierConfigError, cli, launcher
from pier_megatron.flags import WITH_ANY_OPTIMIZER
from pier_megatron.settings import Settings, flag_of
from pier_megatron.values import (
    Number,
    any_path,
    existing_file,
    existing_folder,
    file_to_write,
    folder_to_write,
    png_to_write,
    url,
)

_LIMIT = 60.0
"""Seconds: a bound against what looks at a network or a model before it looks at a value."""

# Free text: names of tasks and of domains, and the words of other programs.
_TEXT = {"doctor COMMAND", "plan COMMAND", "demo -- ARGUMENTS"}

_NUMBERS = ("-5", "0", "1" + 30 * "0", "1" + 400 * "0", "-1e999", "nan", "inf", "", "pire", "1.5x")
_WORDS = ("", "/no/such/thing", "pi re", "a;b")
_NOBODY = 65534


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command, as words before its value."""

    command: tuple[str, ...]
    action: argparse.Action

    @property
    def name(self) -> str:
        return (self.action.option_strings or [str(self.action.metavar)])[-1]

    def __str__(self) -> str:
        return " ".join((*self.command, self.name))

    def words(self, value: str) -> list[str]:
        """The command with nothing but the flag and its value."""
        return [*self.command, f"{self.name}={value}" if self.action.option_strings else value]


def parsers(parser: argparse.ArgumentParser, command: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All parsers below one, with the words that lead to them."""
    yield command, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from parsers(inner, (*command, name))


def flags() -> Iterator[Flag]:
    """All flags with a value, and all positional arguments, of all commands."""
    for command, parser in parsers(cli.parser()):
        for action in parser._actions:
            if action.nargs != 0 and not isinstance(action, argparse._SubParsersAction):
                yield Flag(command, action)


_FLAGS = {str(flag): flag for flag in flags() if str(flag) not in _TEXT and flag.action.help != argparse.SUPPRESS}
_SETTINGS = {
    flag_of(setting.name): setting
    for setting in (*dataclasses.fields(Settings), *WITH_ANY_OPTIMIZER)
    if setting.metadata and setting.type is not bool and setting.type != "bool"
}


def test_every_flag_says_what_it_accepts() -> None:
    assert len(_FLAGS) > 25
    assert len(_SETTINGS) > 25
    assert {str(flag) for flag in flags()} >= _TEXT
    bare = (None, int, float, str, Path)
    assert not [str(flag) for flag in _FLAGS.values() if flag.action.type in bare and flag.action.choices is None]
    assert not [name for name, setting in _SETTINGS.items() if setting.metadata["accepts"] is None]


def impossible(accepts: Any, place: Path) -> list[str]:
    """Values that a flag refuses, by what it says it accepts."""
    if isinstance(accepts, Number):
        return [text for text in _NUMBERS if text not in ("-5", "0") or accepts.problem(int(text))]
    file, folder = str(place / "file"), str(place)
    kinds: dict[Any, Sequence[str]] = {
        any_path: ("",),
        existing_file: ("", f"{place}/missing", folder, f"{file}/below", "x" * 300),
        existing_folder: ("", f"{place}/missing", file, f"{file}/below", "x" * 300),
        folder_to_write: ("", file, f"{file}/below"),
        file_to_write: ("", folder, f"{file}/below"),
        png_to_write: ("", folder, f"{file}/below.png", f"{place}/picture.xyz"),
    }
    return list(kinds.get(accepts, _WORDS))


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that everybody can look into, with a file, and a file and a folder that nobody may open."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for file in ("file", "closed_file"):
            (folder / file).write_text("text")
        (folder / "closed").mkdir()
        for closed in ("closed", "closed_file"):
            (folder / closed).chmod(0)
        yield folder
        (folder / "closed").chmod(0o700)


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Takes from root that it may read everything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(_NOBODY)
    yield
    if is_root:
        os.seteuid(0)


def refused(capsys: pytest.CaptureFixture[str], run: Callable[[], object], flag: str, value: str) -> None:
    """Runs what must end at once, with the flag, the value and what is accepted instead."""
    begin = time.monotonic()
    try:
        status = run()
    except SystemExit as ended:
        status = ended.code
    assert time.monotonic() - begin < _LIMIT
    said = capsys.readouterr().err
    assert status == 2, said
    assert "Traceback" not in said
    assert f"{flag}: {value or '(empty)'}: " in said
    assert len(said.partition(f"{flag}: {value or '(empty)'}: ")[2]) > 5


@pytest.mark.parametrize("flag", _FLAGS.values(), ids=_FLAGS.keys())
def test_impossible_values_of_flags_are_refused(flag: Flag, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if flag.action.type is None:
        with pytest.raises(SystemExit, match="2"):
            cli.main(flag.words("pire"))
        assert f"{flag.name}: invalid choice: 'pire'" in capsys.readouterr().err
        return
    for value in impossible(flag.action.type, place):
        refused(capsys, lambda value=value: cli.main(flag.words(value)), flag.name, value)


@pytest.mark.parametrize("name", _SETTINGS)
def test_impossible_values_of_settings_are_refused(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(place / "file")
    for value in impossible(_SETTINGS[name].metadata["accepts"], place):
        refused(capsys, lambda value=value: launcher.main([script, f"{name}={value}"]), name, value)


@pytest.mark.parametrize(
    ("accepts", "name"),
    [
        (existing_file, "closed_file"),
        (existing_folder, "closed"),
        (folder_to_write, "closed/new"),
        (file_to_write, "closed/new.txt"),
        (png_to_write, "closed/new.png"),
    ],
)
@pytest.mark.usefixtures("as_nobody")
def test_paths_that_may_not_be_used_are_refused(accepts: Callable[[str], Path], name: str, place: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"{place}/{name}: (cannot be read by|this user cannot write to)"):
        accepts(f"{place}/{name}")


@pytest.mark.parametrize(
    "name", [name for name, setting in _SETTINGS.items() if isinstance(setting.metadata["accepts"], Number)]
)
def test_a_program_cannot_set_what_a_flag_cannot(name: str) -> None:
    setting = _SETTINGS[name]
    if setting in WITH_ANY_OPTIMIZER:
        return
    given: dict[str, Any] = {"train_iters": 1000, "groups": 2, "lighthouse": "http://h:1"}
    for value in (-5, 10**30, 10**400, float("nan"), float("inf")):
        with pytest.raises(PierConfigError, match=f"^{flag_of(setting.name)} "):
            PierConfig(**(given | {setting.name: value}))


@pytest.mark.parametrize("host", ["first", "10.0.0.1", "[fd00::1]"])
def test_lighthouse_is_named_or_has_an_address(host: str) -> None:
    assert url(f"http://{host}:29510") == f"http://{host}:29510"
    for wrong in (f"http://{host}", f"{host}:29510", f"http://{host}:65536", f"http://{host}-:29510"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"http://|must be an IP address"):
            url(wrong)


def test_a_number_in_words_has_its_kind_and_its_ends() -> None:
    assert Number(int, 1, 3)("3") == 3
    assert Number(float, 0, 1, open_high=True)("0.999") == 0.999
    for number, text in ((Number(int, 1, 3), "2.0"), (Number(int), "1e3"), (Number(float, 0, 1, open_high=True), "1")):
        with pytest.raises(argparse.ArgumentTypeError):
            number(text)
    assert Number(int, 1, 3).problem(1.5) == "must be a whole number in [1, 3]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pier-groop=4"], "--pier-groop=4: no such flag. Did you mean --pier-groups?"),
        (["--pier-group", "4"], "--pier-group: no such flag. Did you mean --pier-groups?"),
        (["--pier-islands"], "--pier-islands: no such flag any more: every kind of inner optimizer, Muon too, trains in"),
        (["--pier-preset", "pire"], "--pier-preset: pire: not one of auto, pier, "),
        # Behind another mistake, too.
        (["--pier-groop", "4", "--lr", "-1", "--pier-groups", "-1"], "--pier-groups: -1: must be a whole number of at least 1"),
        (["--pier-groups"], "--pier-groups: expected one argument"),
        (["--pier-lazy-start-iters", "0", "--pier-lazy-start-fraction", "0"], "not allowed with argument"),
    ],
)
def test_all_doors_check_the_words_of_a_job(
    words: list[str], said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(place / "file")
    torchrun = ["torchrun", "--nproc-per-node", "2", "-m", "pier_megatron", script, *words]
    doors: tuple[Callable[[], object], ...] = (
        lambda: launcher.main([script, *words]),
        lambda: cli.main(["doctor", *torchrun]),
        lambda: cli.main(["plan", "--cluster", "perlmutter", *torchrun]),
        lambda: cli.main(["demo", "--", *words]),
    )
    for door in doors:
        try:
            status = door()
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        if printed.out.endswith("will not start\n"):  # doctor's verdict
            assert status == 1
            assert said in printed.out
        else:
            assert status == 2
            assert said in printed.err


def test_words_that_only_look_like_flags_are_left_to_the_script() -> None:
    from pier_megatron.flags import check_words

    words = ["--name=--pier-x", "--pier-outer-lr", "0.7", "--title", "--pier- notes", "--pier-groups=4", "--", "--pier-x"]
    given = check_words(words)
    assert (given.pier_groups, given.pier_outer_lr, given.pier_preset) == (4, 0.7, None)
