"""What the doctor reads without running it: folders that a job names, its script and what that imports."""

import os
from pathlib import Path

import pytest

from pier_megatron.commands.doctor import job_files, launch
from pier_megatron.commands.findings import Findings
from pier_megatron.commands.job_arguments import look_at_unknown
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.commands.script_sources import ScriptSources
from pier_megatron.exchange.authentication import new_secret


def look(arguments: str) -> Findings:
    findings = Findings()
    job_files.look(job_files.paths(f"--mock-data {arguments}".split()), findings)
    return findings


def test_folders_that_may_not_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(f"--save {tmp_path}").verdict == look(f"--save {tmp_path / 'new'} --load {tmp_path / 'new'}").verdict == "OK"
    # root may write everywhere; other users may not.
    monkeypatch.setattr(os, "access", lambda path, mode, effective_ids=False: False)
    for folder in (tmp_path, tmp_path / "new"):
        refusal = f"--save {folder}: this user cannot write to {tmp_path}. Give another folder."
        assert look(f"--save {folder}").errors == [refusal]
    assert look(f"--load {tmp_path}").errors == [f"--load {tmp_path}: may not be read by you."]


def test_object_stores_and_flags_without_their_values_are_left_alone() -> None:
    assert look("--save s3://bucket/run --load s3://bucket/run").verdict == look("--save").verdict == "OK"


def test_weights_of_a_blend_are_no_datasets() -> None:
    for words, first, others in (("1 a 1 b 1 c", "a", 2), ("a b", "a", 1), ("1 2 3", "1", 2)):
        findings = Findings()
        job_files.look(job_files.paths(["--data-path", *words.split()]), findings)
        # One error, however many files a blend has.
        [error] = findings.errors
        assert error.startswith(
            f"--data-path {first}: there is no {first}.bin and no {first}.idx, nor the files of {others} more"
        )


def test_secret_that_an_island_would_refuse(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    [warning] = look(f"--pier-secret-file {secret}").warnings
    assert "the node of the island's first rank needs it" in warning
    new_secret(secret)
    assert look(f"--pier-secret-file {secret}").verdict == "OK"
    secret.chmod(0o644)
    [error] = look(f"--pier-secret-file {secret}").errors
    assert f"Run chmod 600 {secret}" in error


@pytest.mark.parametrize("text", ["[]", '"words"', '{"train": 3}', "{"])
def test_lists_of_data_that_are_none(text: str, tmp_path: Path) -> None:
    lists = tmp_path / "lists.json"
    lists.write_text(text)
    findings = Findings()
    job_files.look(job_files.paths(["--per-split-data-args-path", str(lists)]), findings)
    [error] = findings.errors
    assert error.startswith(f"--per-split-data-args-path {lists}: cannot be read (")


_REGISTERS = "import pier_megatron\npier_megatron.register()\n"


def written(folder: Path, files: dict[str, str]) -> LaunchCommand:
    """A job whose script is train.py among these files."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return LaunchCommand(1, 2, str(folder / "train.py"), ("--optimizer", "pier"))


@pytest.mark.parametrize(
    "files",
    [
        {"train.py": "from pier_megatron import register as enable\nenable()\n"},
        {"train.py": "import mine\n", "mine.py": "from deep import go\n", "deep.py": _REGISTERS},
        {
            "train.py": "import pkg.start\n",
            "pkg/__init__.py": "",
            "pkg/start.py": "from . import own\n",
            "pkg/own.py": _REGISTERS,
        },
        {"train.py": "import pkg.inner.start\n", "pkg/inner/start.py": "from ..own import go\n", "pkg/own.py": _REGISTERS},
        # In a circle.
        {"train.py": "import a\n", "a.py": "import b\n", "b.py": f"import a\n{_REGISTERS}"},
    ],
)
def test_a_script_registers_by_way_of_what_it_imports(files: dict[str, str], tmp_path: Path) -> None:
    command, findings = written(tmp_path, files), Findings()
    launch.look(command, ScriptSources.of(command), findings)
    assert findings.verdict == "OK", findings.errors
    assert "is made known by" in findings.notes[0]


def test_what_megatron_imports_is_not_followed(tmp_path: Path) -> None:
    files = {"train.py": "import megatron.training\n", "megatron/training/__init__.py": "import own\n", "own.py": _REGISTERS}
    command, findings = written(tmp_path, files), Findings()
    launch.look(command, ScriptSources.of(command), findings)
    assert "Put -m pier_megatron before" in findings.errors[0]


def test_flag_that_looks_like_one_of_megatrons_may_be_added_far_away(tmp_path: Path) -> None:
    files = {"train.py": "import mine\n", "mine.py": "import flags\n", "flags.py": "add('--hidden-sizes')\n"}
    findings = Findings()
    look_at_unknown(["--hidden-sizes", "3"], ["--hidden-size"], ScriptSources.of(written(tmp_path, files)), findings)
    assert findings.verdict == "OK", findings.errors
    assert "flags.py adds it" in findings.notes[0]
