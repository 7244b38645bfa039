"""What the doctor reads of a script and of what it imports, without running it."""

from pathlib import Path

import pytest

from pier_megatron.commands.doctor.launch import look
from pier_megatron.commands.findings import Findings
from pier_megatron.commands.job_arguments import look_at_unknown
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.commands.script_sources import ScriptSources

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
        {
            "train.py": "import pkg.inner.start\n",
            "pkg/inner/start.py": "from ..own import go\n",
            "pkg/own.py": _REGISTERS,
        },
        # In a circle.
        {"train.py": "import a\n", "a.py": "import b\n", "b.py": f"import a\n{_REGISTERS}"},
    ],
)
def test_a_script_registers_by_way_of_what_it_imports(files: dict[str, str], tmp_path: Path) -> None:
    command, findings = written(tmp_path, files), Findings()
    look(command, ScriptSources.of(command), findings)
    assert findings.verdict == "OK", findings.errors
    assert "is made known by" in findings.notes[0]


def test_what_megatron_imports_is_not_followed(tmp_path: Path) -> None:
    files = {"train.py": "import megatron.training\n", "megatron/training/__init__.py": "import own\n", "own.py": _REGISTERS}
    command, findings = written(tmp_path, files), Findings()
    look(command, ScriptSources.of(command), findings)
    assert "Put -m pier_megatron before" in findings.errors[0]


def test_flag_that_looks_like_one_of_megatrons_may_be_added_far_away(tmp_path: Path) -> None:
    files = {"train.py": "import mine\n", "mine.py": "import flags\n", "flags.py": "add('--hidden-sizes')\n"}
    findings = Findings()
    look_at_unknown(["--hidden-sizes", "3"], ["--hidden-size"], ScriptSources.of(written(tmp_path, files)), findings)
    assert findings.verdict == "OK", findings.errors
    assert "flags.py adds it" in findings.notes[0]
