"""Installing the package where PyTorch and Megatron are already there, as in NVIDIA's images; and what the demo installs."""

import argparse
import importlib.metadata
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pier_megatron import PierConfig
from pier_megatron.integration import cautions

_REPOSITORY = Path(__file__).parents[2]
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.mark.slow
def test_the_image_keeps_its_pytorch_and_megatron(tmp_path: Path) -> None:
    page = (_REPOSITORY / "docs" / "deploy.md").read_text()
    [pattern] = re.findall(r"pip list --format freeze \| grep -E '(.+?)' > /tmp/kept.txt", page)
    [extras] = re.findall(r"pip install --no-cache-dir --constraint /tmp/kept.txt '/opt/pier_megatron(.*?)'", page)
    listed = subprocess.run([*_PIP, "list", "--format", "freeze"], capture_output=True, text=True, check=True).stdout
    kept = [line for line in listed.splitlines() if re.match(pattern, line)]
    assert [line.partition("==")[0] for line in kept] == ["megatron-core", "torch"]
    (tmp_path / "kept.txt").write_text("\n".join(kept))
    # What is not there pip does not find.
    command = [*_PIP, "install", "--dry-run", "--no-index", "--no-build-isolation"]
    constrained = [*command, "--constraint", str(tmp_path / "kept.txt"), f"{_REPOSITORY}{extras}"]
    ended = subprocess.run(constrained, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = re.findall(r"^Would install (.*)$", ended.stdout, re.MULTILINE)
    assert not {"torch", "megatron-core"} & {re.sub(r"-\d.*", "", each) for line in found for each in line.split()}
    assert "pip install --no-deps /opt/pier_megatron" in page


def test_the_demo_installs_no_tools_of_tests_and_pages() -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"], cwd=_REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    installs = re.findall(r"pip install .*", shown)
    assert len(installs) == 1
    assert "--constraint constraints.txt" in installs[0]
    assert installs[0].endswith("'.[muon]'")


@pytest.mark.parametrize(
    ("package", "settings"),
    [
        ("torch", {}),
        ("torchft", {"lighthouse": "http://other", "island": 0, "lazy_start_iters": 0}),
        ("emerging-optimizers", {"inner_optimizer": "muon"}),
    ],
)
def test_what_no_test_has_run_on_is_not_installed_and_start_up_warns(
    package: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = cautions.TESTED[package]
    release, number = last.rsplit(".", 1)
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    after = f"{release}.{int(number) + 1}"
    assert all(one.endswith(f",<{after}") for one in declared if re.match(rf"{package}\b", one))
    config, args = PierConfig(100, groups=2, **settings), argparse.Namespace(load=None, save=None, timing_log_level=0)
    vars(args).update(data_parallel_size=2, context_parallel_size=1, use_distributed_optimizer=True)

    def warned(version: str) -> list[str]:
        versions = {name: tested for name, (_, tested) in cautions.TESTED.items()} | {package: version}
        monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
        return [warning for warning in cautions.warnings(args, config) if "was tested with" in warning]

    assert warned(f"{last}.7+cu130") == []
    [said] = warned(f"{after}.0rc1")
    assert said.startswith(f"{package} {after}.0rc1: Pier was tested with {first}")
    config = PierConfig(100, groups=2)
    assert len(warned(f"{after}.0")) == (package == "torch")
