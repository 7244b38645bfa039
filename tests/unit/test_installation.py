"""Installing the package where PyTorch and Megatron are already there, as in NVIDIA's images; and what the demo installs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
