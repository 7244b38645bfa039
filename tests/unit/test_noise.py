"""The noise of pseudo-gradients, and what a run and a plan make of it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pier_megatron import PierConfig
from pier_megatron.commands.plan import loss
from pier_megatron.errors import PierConfigError
from pier_megatron.outer.noise import equivalent_share, expectation, noise_to_signal


@pytest.mark.parametrize("groups", [2, 8])
def test_noise_to_signal_is_found_again(groups: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    signal = torch.randn(100_000, generator=generator, dtype=torch.float64)
    for noise in (0.0, 0.5, 3.0):
        own = signal + noise * torch.randn(groups, 100_000, generator=generator, dtype=torch.float64)
        found = noise_to_signal(own.square().sum(1).mean().item(), own.mean(0).square().sum().item(), groups)
        assert found == pytest.approx(noise**2, rel=0.03, abs=1e-9)


def test_groups_without_anything_in_common_are_all_noise() -> None:
    # Orthogonal pseudo-gradients, and opposite ones.
    assert noise_to_signal(1.0, 0.5, 2) == noise_to_signal(1.0, 0.0, 2) == math.inf
    assert equivalent_share(math.inf, 2, 2) == 0


def test_share_falls_with_noise_and_groups() -> None:
    assert equivalent_share(4.0, 8, 1) == 1
    shares = [equivalent_share(4.0, 8, groups) for groups in (1, 2, 4, 8, 16)]
    assert shares == sorted(shares, reverse=True)
    # Of 4 groups in place of 8 each has half the noise; what it costs is that of runs with half the noise.
    assert equivalent_share(4.0, 8, 4) == pytest.approx(equivalent_share(2.0, 4, 4))


def config(**kwargs: Any) -> PierConfig:
    settings = {"train_iters": 100_000, "groups": 8, "sync_interval": 20, "preset": "pier-rising"} | kwargs
    return PierConfig(**settings)


def test_log_says_what_to_expect_after_ten_outer_steps() -> None:
    said = {t: text for t in config().outer_steps() if (text := expectation(config(), 4.0, t)) is not None}
    assert list(said) == [10_200]
    share, with_four, with_two = (f"{equivalent_share(4.0, 8, groups):.0%}" for groups in (8, 4, 2))
    assert (
        f"a synchronous run of {share} of the iterations, with 4 groups {with_four}, with 2 groups {with_two} (" in said[10_200]
    )


def test_nothing_is_said_of_what_was_not_studied() -> None:
    assert expectation(config(preset="pier"), 4.0, 10_200) is None
    assert expectation(config(islands=True, inner_optimizer="muon"), 4.0, 10_200) is None
    assert expectation(config(), None, 10_200) is None
    assert expectation(config(train_iters=500), 4.0, 260) is None


@pytest.fixture
def run_with_eight_groups(tmp_path: Path) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "tensorboard"))
    writer.add_text("pier_groups", "8")
    writer.add_text("global_batch_size", "64")
    for step, noise in enumerate([0.5, 1.0, 2.0, 3.0, 4.0, 4.0, 4.0]):
        writer.add_scalar("pier/noise-to-signal", noise, 20 * step)
    writer.close()
    return tmp_path


def test_plan_reads_the_noise_of_a_run_that_has_begun(run_with_eight_groups: Path) -> None:
    found = loss.expected_shares(loss.read(run_with_eight_groups), config(groups=4), global_batch=64)
    assert found["shares"] == {groups: equivalent_share(4.0, 8, groups) for groups in (8, 4, 2)}
    (line,) = loss.text(found, 4)
    assert f"{equivalent_share(4.0, 8, 4):.0%} of the iterations with 4 groups; " in line
    assert "noise to signal 4.00 with 8 groups" in line


def test_plan_of_one_group_loses_nothing(run_with_eight_groups: Path) -> None:
    found = loss.expected_shares(loss.read(run_with_eight_groups), config(groups=1), global_batch=64)
    assert found["shares"] == {2: equivalent_share(4.0, 8, 2), 1: 1.0}
    assert "100% of the iterations with 1 groups" in loss.text(found, 1)[0]


def test_plan_refuses_logs_that_say_nothing_of_the_job(run_with_eight_groups: Path, tmp_path: Path) -> None:
    log = loss.read(run_with_eight_groups)
    with pytest.raises(PierConfigError, match="--global-batch-size 64, the job 128"):
        loss.expected_shares(log, config(), global_batch=128)
    with pytest.raises(PierConfigError, match="the job has adam, diloco and 4500"):
        loss.expected_shares(log, config(preset="diloco"), global_batch=64)
    del log.scalars["pier/noise-to-signal"]
    with pytest.raises(PierConfigError, match="at least 5 outer steps"):
        loss.expected_shares(log, config(), global_batch=64)
    with pytest.raises(PierConfigError, match="no TensorBoard event files"):
        loss.read(tmp_path / "nowhere")
