"""The words of ``pier-megatron`` itself."""

import os
import signal
import sys
from pathlib import Path

import pytest

from pier_megatron import cli
from pier_megatron.commands import lighthouse
from pier_megatron.errors import PierConfigError
from pier_megatron.processes import refusal
from pier_megatron.version import __version__


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert all(f" {name} {purpose} " in listed for name, purpose in cli.COMMANDS.items())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"pier-megatron {__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctr"], "doctr: no such command. Did you mean doctor?"),
        (["weigh"], "weigh: no such command\n"),
        (["demo", "--ouput", "x"], "--ouput: demo does not know it. Did you mean --output?"),
        (["plot", "."], "plot was removed. TensorBoard shows runs side by side"),
        (["do"], "do: no such command. Did you mean doctor?"),
        (["export", "--checkpoint", "."], "export was removed. Use examples/downstream/export_gpt2.py"),
        (["experts", "export", "."], "experts export was removed. Use examples/downstream/export_mixture.py"),
    ],
)
def test_unknown_words_suggest_the_nearest(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["experts score", "doctor"])
def test_commands_that_read_checkpoints_warn_of_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    assert "use trusted checkpoints only" in " ".join(capsys.readouterr().out.split())


def test_each_problem_of_a_job_has_its_source() -> None:
    error = PierConfigError("--a: wrong", "--b: wrong")
    error.add_note("Read the page.")
    said = "pier_megatron: error: --a: wrong\npier_megatron: error: --b: wrong\nRead the page.\n"
    assert refusal(error) == said


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    monkeypatch.setattr(lighthouse, "run", lambda options: print("a line") or 0)
    assert cli.main(["lighthouse", "--islands", "2"]) == 128 + signal.SIGPIPE
    sys.stdout.close()
