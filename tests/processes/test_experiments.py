"""An experiment is removed by deleting its folder and its line."""

import shutil
import subprocess
import sys
from pathlib import Path

from pier_megatron.experiments import EXPERIMENTS

_PACKAGE = Path(__file__).parents[2] / "pier_megatron"

# Each copy in a fork, which finds PyTorch and Megatron imported.
_IMPORT_ALL = """
import importlib, os, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore")
import megatron.training.training


def import_all(folder):
    sys.path.insert(0, str(folder))
    from pier_megatron import cli, features, flags
    from pier_megatron.integration import seams

    assert Path(cli.__file__).is_relative_to(folder), cli.__file__
    for path in sorted((folder / "pier_megatron").rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        if not name.endswith("__main__") and ".bridge" not in name:
            importlib.import_module(name)
    gone = f"pier_megatron.experiments.{folder.name}"
    assert not [feature for feature in features.FEATURES if feature.__name__.startswith(gone)]
    assert folder.name not in cli.COMMANDS
    assert "--pier-groups" in flags._Parser().flags
    seams.check_needed()
    for feature in features.FEATURES:
        for row in feature.seams():
            row.original()
    cli.parser().format_help()


children = []
for folder in map(Path, sys.argv[1:]):
    if not (child := os.fork()):
        import_all(folder)
        os._exit(0)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def test_experiment_is_deleted_by_its_folder_and_its_line(tmp_path: Path) -> None:
    for name in EXPERIMENTS:
        copy = tmp_path / name / "pier_megatron"
        shutil.copytree(_PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.rmtree(copy / "experiments" / name)
        listed = copy / "experiments" / "__init__.py"
        lines = listed.read_text().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith(f'    "{name}":')]
        assert len(kept) == len(lines) - 1
        listed.write_text("".join(kept))
    command = [sys.executable, "-P", "-c", _IMPORT_ALL, *(str(tmp_path / name) for name in EXPERIMENTS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
