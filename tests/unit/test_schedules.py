"""The presets against the table of the paper (arXiv 2511.17849, section 4) and of its authors' later code."""

import math

import pytest

from pier_megatron import PierConfig
from pier_megatron.schedules import PRESETS


def config(preset: str, **kwargs: object) -> PierConfig:
    return PierConfig(train_iters=1000, groups=8, sync_interval=10, preset=preset, **kwargs)


@pytest.mark.parametrize(
    ("iteration", "mu"),
    [(10, 0.9), (100, 0.9), (110, 0.99), (150, 0.99), (160, 0.95), (200, 0.95), (210, 0.9), (1000, 0.9)],
)
def test_pier_momentum_follows_the_paper(iteration: int, mu: float) -> None:
    assert config("pier").momentum_at(iteration) == pytest.approx(mu)


@pytest.mark.parametrize(
    ("iteration", "eta"), [(110, 0.1), (150, 0.5), (200, 1.0), (210, 1.1), (800, 1.1), (810, 0.9), (1000, 0.9)]
)
def test_pier_learning_rate_follows_the_paper(iteration: int, eta: float) -> None:
    assert config("pier").learning_rate_at(iteration) == pytest.approx(eta)


def test_parameters_do_not_change_in_the_lazy_start() -> None:
    assert {config(preset).learning_rate_at(100) for preset in PRESETS} == {0.0}


@pytest.mark.parametrize(
    ("iteration", "mu", "eta"),
    [
        (110, 0.9 + 0.09 * (0.5 + 0.5 * math.cos(math.pi / 90)), 0.11),
        (200, 0.9 + 0.09 * (0.5 + 0.5 * math.cos(math.pi / 9)), 1.1),
        (600, None, 1.0),
        (1000, 0.9, 0.9),
    ],
)
def test_pier_cosine_ends_where_it_should(iteration: int, mu: float | None, eta: float) -> None:
    schedule = config("pier-cosine")
    if mu is not None:
        assert schedule.momentum_at(iteration) == pytest.approx(mu)
    assert schedule.learning_rate_at(iteration) == pytest.approx(eta)


@pytest.mark.parametrize(("iteration", "mu", "eta"), [(100, 0.3, 0.0), (550, 0.6, 0.9), (1000, 0.9, 0.8)])
def test_rising_momentum_goes_on_from_its_warmup(iteration: int, mu: float, eta: float) -> None:
    schedule = config("pier-rising")
    assert schedule.momentum_at(iteration) == pytest.approx(mu)
    assert schedule.learning_rate_at(iteration) == pytest.approx(eta)


@pytest.mark.parametrize(("train_iters", "mu"), [(600, 0.9), (270, 0.8), (80, 0.3), (60, 0.3)])
def test_rising_momentum_remembers_two_fifths_of_the_outer_steps_at_most(train_iters: int, mu: float) -> None:
    schedule = PierConfig(train_iters, groups=4, sync_interval=20, preset="pier-rising", lazy_start_iters=20)
    assert schedule.momentum_at(train_iters) == pytest.approx(mu)
    assert schedule.momentum_at(20) == 0.3
    assert not [told for told in schedule.warnings() if "remembers" in told]


@pytest.mark.parametrize(("iteration", "mu", "eta"), [(100, 0.3, 0.0), (550, 0.55, 0.7), (1000, 0.8, 0.6)])
def test_preset_for_muon_moves_less(iteration: int, mu: float, eta: float) -> None:
    schedule = config("pier-muon")
    assert schedule.momentum_at(iteration) == pytest.approx(mu)
    assert schedule.learning_rate_at(iteration) == pytest.approx(eta)


@pytest.mark.parametrize(("preset", "highest"), [("pier-annealed", 0.9), ("pier-muon-annealed", 0.8)])
@pytest.mark.parametrize("lazy_start", [0, 100, 300, 900])
def test_annealed_momentum_rises_and_falls_back_in_the_last_tenth(preset: str, highest: float, lazy_start: int) -> None:
    schedule = config(preset, lazy_start_iters=lazy_start)
    assert schedule.momentum_at(1000) == pytest.approx(0.3)
    assert schedule.momentum_at(950) == pytest.approx(0.3 + (highest - 0.3) / 2)
    if lazy_start < 900:
        assert schedule.momentum_at(900) == pytest.approx(highest)
        middle = (lazy_start + 900) // 2
        assert schedule.momentum_at(middle) == pytest.approx(0.3 + (highest - 0.3) / 2)


def test_long_preset_is_the_papers_until_its_momentum_falls() -> None:
    paper, long = config("pier"), config("pier-long")
    for iteration in range(1, 1001):
        assert long.learning_rate_at(iteration) == paper.learning_rate_at(iteration)
        fallen = 0.6 * max(iteration - 900, 0) / 100
        assert long.momentum_at(iteration) == pytest.approx(paper.momentum_at(iteration) - fallen)


def test_constant_presets() -> None:
    assert (config("diloco").momentum_at(500), config("diloco").learning_rate_at(500)) == (0.9, 0.7)
    assert (config("local-sgd").momentum_at(500), config("local-sgd").learning_rate_at(500)) == (0.0, 1.0)


@pytest.mark.parametrize("preset", ["diloco", "local-sgd"])
def test_presets_without_momentum_warmup(preset: str) -> None:
    assert not any(config(preset).is_momentum_warmup(iteration) for iteration in range(1, 1001))


def test_break_points_shift_with_the_lazy_start() -> None:
    early, late = config("pier"), config("pier", lazy_start_fraction=0.25)
    for iteration in range(110, 850, 10):
        assert late.momentum_at(iteration + 150) == pytest.approx(early.momentum_at(iteration))
        assert late.learning_rate_at(iteration + 150) == pytest.approx(early.learning_rate_at(iteration))


def test_break_points_scale_with_the_run() -> None:
    short, long = config("pier"), PierConfig(train_iters=100_000, groups=8, sync_interval=50, preset="pier")
    for percent in range(11, 101):
        assert long.momentum_at(percent * 1000) == pytest.approx(short.momentum_at(percent * 10))
        assert long.learning_rate_at(percent * 1000) == pytest.approx(short.learning_rate_at(percent * 10))


def test_overrides_are_constant() -> None:
    schedule = config("pier", outer_lr=0.5, outer_momentum=0.3)
    assert {schedule.learning_rate_at(t) for t in range(101, 1001)} == {0.5}
    assert {schedule.momentum_at(t) for t in range(1, 1001)} == {0.3}


def test_no_preset_leaves_the_range_its_segments_span() -> None:
    for preset in ("pier", "pier-cosine"):
        for lazy_start in (0.0, 0.1, 0.3, 0.5, 0.9):
            schedule = config(preset, lazy_start_fraction=lazy_start)
            for iteration in schedule.outer_steps():
                assert 0.9 <= schedule.momentum_at(iteration) <= 0.99
                assert 0.0 < schedule.learning_rate_at(iteration) <= 1.1
