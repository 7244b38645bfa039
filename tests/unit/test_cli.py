"""The words of ``pier-megatron`` itself, how a process ends that is interrupted while it ends, and the lighthouse."""

import os
import signal
import sys
from pathlib import Path

import pytest

from pier_megatron import cli
from pier_megatron.commands import lighthouse
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.torchft_api import keep_quiet
from pier_megatron.processes import INTERRUPTED, refusal
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


def test_an_interrupted_command_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lighthouse, "run", lambda options: signal.raise_signal(signal.SIGINT))
    assert cli.main(["lighthouse", "--islands", "2"]) == INTERRUPTED


@pytest.mark.slow
def test_torchft_is_kept_from_logging_quorums_of_many_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUST_LOG", raising=False)
    keep_quiet(4)
    assert "RUST_LOG" not in os.environ
    keep_quiet(100)
    assert os.environ["RUST_LOG"] == "warn"
    monkeypatch.setenv("RUST_LOG", "info")
    keep_quiet(100)
    assert os.environ["RUST_LOG"] == "info"
