"""``examples/plain_pytorch.py``: Pier in a PyTorch loop, without Megatron."""

import re
from pathlib import Path

import pytest
from launch import REPOSITORY, execute, installed, torchrun

pytestmark = pytest.mark.processes


def test_example_trains_and_groups_meet(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    (absent / "megatron").mkdir(parents=True)
    (absent / "megatron" / "__init__.py").write_text("raise ImportError('Megatron is not needed here')")
    script = str(REPOSITORY / "examples" / "plain_pytorch.py")
    command = [*torchrun(4), script, "--groups", "2", "--iterations", "50"]
    # These are forks of a process that has imported PyTorch alone.
    log = execute(command, tmp_path / "log.txt", megatron=absent, PIER_TEST_WARM=str(installed().folder))
    steps = [int(found) for found in re.findall(r"outer step after iteration +(\d+)", log)]
    assert steps == list(range(20, 51, 10))
    losses = {(int(t), int(g)): float(loss) for t, g, loss in re.findall(r"iteration (\d+), group (\d): loss ([\d.]+)", log)}
    assert set(losses) == {(50, 0), (50, 1)}
    # An untrained model has log 256 = 5.5.
    assert max(losses.values()) < 4
