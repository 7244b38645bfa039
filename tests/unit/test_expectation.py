"""What a run says of what groups will cost in loss."""

import math
from typing import Any

import pytest

from pier_megatron import PierConfig
from pier_megatron.outer.expectation import LEAST_NOISE, after, at_start, share_by_noise


def test_share_falls_with_noise_and_groups() -> None:
    assert share_by_noise(4.0, 8, 1) == 1
    shares = [share_by_noise(4.0, 8, groups) for groups in (1, 2, 4, 8, 16)]
    assert shares == sorted(shares, reverse=True)
    # Of 4 groups in place of 8 each has half the noise; what it costs is that of runs with half the noise.
    assert share_by_noise(4.0, 8, 4) == pytest.approx(share_by_noise(2.0, 4, 4))


def config(**kwargs: Any) -> PierConfig:
    settings = {"train_iters": 100_000, "groups": 8, "sync_interval": 20, "preset": "pier-rising"} | kwargs
    return PierConfig(**settings)


def with_muon(**kwargs: Any) -> PierConfig:
    return config(**({"preset": "pier-muon-annealed", "inner_optimizer": "muon"} | kwargs))


def test_log_says_what_to_expect_after_ten_outer_steps() -> None:
    said = {t: text for t in config().outer_steps() if (text := after(config(), 4.0, t)) is not None}
    assert list(said) == [10_200]
    share, with_four, with_two = (f"{share_by_noise(4.0, 8, groups):.1%}" for groups in (8, 4, 2))
    assert (
        f"a synchronous run of {share} of the iterations, with 4 groups {with_four}, with 2 groups {with_two} (" in said[10_200]
    )


def test_start_says_what_to_expect_with_muon() -> None:
    # 2.3 intervals of 20 iterations for each of 8, 4 and 2 groups.
    all_groups, four, two = (f"{math.exp(-2.3 * groups * 20 / 10_000):.1%}" for groups in (8, 4, 2))
    said = at_start(with_muon(train_iters=10_000))
    assert said is not None
    assert f"expect about the loss of a synchronous run of {all_groups} of the iterations" in said
    assert f", with 4 groups {four}, with 2 groups {two} (" in said
    assert after(with_muon(), 4.0, 10_200) is None
    assert at_start(config()) is None


def test_nothing_is_said_of_what_was_not_studied() -> None:
    assert after(config(preset="pier"), 4.0, 10_200) is None
    assert after(config(outer_momentum=0.5), 4.0, 10_200) is None
    assert after(config(), None, 10_200) is None
    assert after(config(), LEAST_NOISE - 0.01, 10_200) is None
    assert after(config(), LEAST_NOISE, 10_200) is not None
    assert after(config(exchange_dtype="int4"), 4.0, 10_200) is not None
    assert after(config(exchange_dtype="int1"), 4.0, 10_200) is None
    assert after(config(train_iters=500), 4.0, 260) is None
    for other in (
        {"preset": "pier-muon"},
        {"sync_interval": 5},
        {"train_iters": 200},
        {"outer_lr": 1.0},
        {"exchange_dtype": "int2"},
        {"sites": 2, "site_interval": 10},
        {"groups": 1},
    ):
        assert at_start(with_muon(**other)) is None
