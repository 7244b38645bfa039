"""The words of ``pier-megatron`` itself."""

import pytest

from pier_megatron.commands import cli
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
        (["plot", ".", "--ouput", "x.png"], "--ouput: plot does not know it. Did you mean --output?"),
        (["export", "--checkpoint", ".", "--output", "b", "--tokeniser=gpt2"], "Did you mean --tokenizer?"),
    ],
)
def test_unknown_words_suggest_the_nearest(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "evaluate", "experts score", "experts export", "doctor"])
def test_commands_that_read_checkpoints_warn_of_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    assert "use trusted checkpoints only" in " ".join(capsys.readouterr().out.split())
