"""Phases, and what is refused: every message must name the flag, the values, the arithmetic and a remedy."""

import argparse
import dataclasses
import itertools
import re
from typing import Any

import golden
import pytest

from pier_megatron import PierConfig, PierConfigError
from pier_megatron.exchange.pairs import draw_subgroups
from pier_megatron.integration import cautions
from pier_megatron.integration.examination import examined_iteration


def test_phases_of_a_run() -> None:
    config = PierConfig(train_iters=104, groups=2, sync_interval=10, lazy_start_iters=20)
    assert [t for t in range(1, 105) if config.is_lazy(t)] == list(range(1, 21))
    assert [t for t in range(1, 105) if config.is_momentum_warmup(t)] == [10, 20]
    # The first outer step is at W + H, never at W: no synchronous work is thrown away. The last is after the last iteration.
    assert [t for t in range(1, 105) if config.is_outer_step(t)] == [30, 40, 50, 60, 70, 80, 90, 100, 104]
    assert list(config.outer_steps()) == [30, 40, 50, 60, 70, 80, 90, 100, 104]
    # One that ends on a sync iteration has no extra outer step.
    assert list(PierConfig(train_iters=40, groups=2, sync_interval=10, lazy_start_iters=20).outer_steps()) == [30, 40]
    at_once = PierConfig(train_iters=20, groups=2, sync_interval=10, lazy_start_iters=0)
    assert not at_once.is_lazy(1)
    assert list(at_once.outer_steps()) == [10, 20]


@pytest.mark.parametrize(
    ("train_iters", "interval", "lazy_start"), [(1000, 50, 100), (1200, 50, 100), (1300, 50, 150), (100_000, 50, 10_000)]
)
def test_lazy_start_is_the_multiple_of_the_interval_nearest_a_tenth(train_iters: int, interval: int, lazy_start: int) -> None:
    assert PierConfig(train_iters, groups=2, sync_interval=interval).lazy_start == lazy_start


_SITES = {"groups": 4, "sites": 2, "site_interval": 5}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"preset": "nesterov"}, ["--pier-preset nesterov", "pier-cosine", "diloco"]),
        ({"subgroup_size": 1}, ["--pier-subgroup-size 1", "at least 2"]),
        ({"subgroup_size": 3}, ["--pier-subgroup-size 3", "from 2 to --pier-groups 2"]),
        ({"subgroup_seed": 7}, ["--pier-subgroup-seed", "all groups of this one meet", "--pier-preset noloco"]),
        ({"evaluate_mean": True}, ["--pier-evaluate-mean", "all groups of this one meet"]),
        ({"preset": "noloco", "exchange_dtype": "int8"}, ["--pier-exchange-dtype int8", "they send their weights"]),
        ({"preset": "noloco", "save_inner_state": "first"}, ["--pier-save-inner-state first", "Save all"]),
        ({"save_inner_state": "first", "fragments": 2}, ["--pier-save-inner-state first", "--pier-fragments 2", "Save all"]),
        ({"island": 1}, ["--pier-island 1 without --pier-lighthouse", "one --save folder", "Add --pier-lighthouse URL"]),
        ({"island_address": "10.0.0.2"}, ["--pier-island-address 10.0.0.2 without --pier-lighthouse"]),
        ({"secret_file": "key"}, ["--pier-secret-file key without --pier-lighthouse"]),
        ({"lighthouse": "http://h:1", "island_timeout": 0}, ["--pier-island-timeout 0", "[1, 31622400]"]),
        ({"lighthouse": "http://h:1", "island_wait": -3}, ["--pier-island-wait -3", "[1, 527040]"]),
        ({"outer_lr": 0.0}, ["--pier-outer-lr 0.0", "(0, 100]", "no outer step moves anything"]),
        ({"outer_momentum": 1.0}, ["--pier-outer-momentum 1.0", "[0, 1)", "1 / (1 - mu)"]),
        ({"lazy_start_fraction": 1.0}, ["--pier-lazy-start-fraction 1.0", "[0, 1)"]),
        ({"lazy_start_iters": -50}, ["--pier-lazy-start-iters -50", "of at least 0"]),
        ({"sites": 2}, ["--pier-sites 2 without --pier-site-interval", "Add --pier-site-interval"]),
        ({"site_interval": 5}, ["--pier-site-interval 5 without --pier-sites", "Add --pier-sites"]),
        ({"sites": 2, "site_interval": 5}, ["--pier-sites 2", "--pier-groups 2", "one group in each site, drop it"]),
        ({**_SITES, "groups": 5}, ["--pier-groups 5", "5 = 2 x 2 + 1"]),
        ({**_SITES, "site_interval": 20}, ["--pier-site-interval 20", "--pier-sync-interval 50", "50 = 2 x 20 + 10"]),
        ({**_SITES, "lighthouse": "http://h:1"}, ["--pier-lighthouse http://h:1 cannot be used with --pier-sites 2"]),
        ({**_SITES, "fragments": 2}, ["--pier-fragments 2 cannot be used with --pier-sites 2", "differ. Drop one"]),
        ({**_SITES, "preset": "noloco"}, ["--pier-sites 2 with outer steps of 2 groups", "--pier-preset noloco", "pairs"]),
        ({"train_iters": 0}, ["--train-iters 0: there is no iteration to train. Give at least 1"]),
        ({"train_iters": 24, "lazy_start_iters": 20}, ["20 = 0 x 50 + 20", "Use 0."]),
        # All of them at once.
        ({"groups": 0, "sync_interval": 0, "outer_lr": 0.0}, ["--pier-groups 0", "--pier-sync-interval 0", "--pier-outer-lr"]),
        (
            {"fragments": 60, "overlap": 60, "lazy_start_iters": 120, "sites": 2, "evaluate_mean": True, "island": 1},
            [
                "--pier-fragments 60",
                "--pier-overlap 60",
                "-iters 120",
                "--pier-sites 2",
                "--pier-evaluate-mean",
                "--pier-island 1",
            ],
        ),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], words: list[str]) -> None:
    with pytest.raises(PierConfigError) as refusal:
        PierConfig(**({"train_iters": 1000, "groups": 2} | settings))
    for word in words:
        assert word in str(refusal.value)


def test_groups_must_divide_the_data_parallel_size() -> None:
    config = PierConfig(train_iters=1000, groups=4)
    config.check_data_parallel_size(8)
    with pytest.raises(PierConfigError, match=r"--pier-groups 4 .* 6 \(6 = 1 x 4 \+ 2\).* Use one of 1, 2, 3, 6\."):
        config.check_data_parallel_size(6)
    # 2 replicas x CP 4 are 8 ranks: Megatron would split them into 4 instances of 2 ranks, half a sequence each.
    with pytest.raises(PierConfigError, match=r"2 x 4 = 8 .* cut a context-parallel group"):
        config.check_data_parallel_size(2, context_parallel_size=4)


def test_intervals_must_meet_the_outer_steps() -> None:
    config = PierConfig(train_iters=1000, groups=2, sync_interval=30)
    # As long as the run it ends with it, and a longer one never comes.
    for interval in (90, 1000, 10_000):
        config.check_interval("--save-interval", interval, "saving")
    with pytest.raises(PierConfigError, match=r"--save-interval 100 .* 30 \(100 = 3 x 30 \+ 10\).* Use 90 or 120\."):
        config.check_interval("--save-interval", 100, "saving")


def test_warnings() -> None:
    assert PierConfig(train_iters=100_000, groups=2, preset="pier").warnings() == []
    [horizon] = PierConfig(train_iters=2000, groups=2, preset="pier").warnings()
    assert "500 iterations, 25%" in horizon
    assert PierConfig(train_iters=2000, groups=2, preset="pier-rising").warnings() == []
    [horizon] = PierConfig(train_iters=2000, groups=2, preset="pier-rising", outer_momentum=0.9).warnings()
    assert "500 iterations, 25%" in horizon

    def remembers(preset: str) -> list[str]:
        return [told for told in PierConfig(40, groups=2, sync_interval=4, preset=preset).warnings() if "remembers" in told]

    assert remembers("auto") == remembers("pier-frequent") == []
    assert "Drop --pier-preset, for pier-frequent, or shorten" in remembers("pier")[0]


def test_a_short_run_is_warned_of_and_not_refused() -> None:
    short = PierConfig(train_iters=24, groups=2)
    none, few = short.warnings()
    assert short.lazy_start == 0
    assert "0.1 of --train-iters 24 is 2.4 iterations, which rounds to 0 x --pier-sync-interval 50" in none
    assert "; --pier-sync-interval 2 or less would have one" in none
    assert PierConfig(train_iters=24, groups=2, sync_interval=2).lazy_start == 2
    assert "the run has 1 outer step: 24 iterations after the lazy start / --pier-sync-interval 50" in few
    assert PierConfig(train_iters=24, groups=2, lazy_start_fraction=0.0).warnings() == [few]
    assert "or less" not in PierConfig(train_iters=9, groups=2).warnings()[0]
    assert "; --pier-sync-interval 1 or less" in PierConfig(train_iters=10, groups=2).warnings()[0]
    # An iteration of the local phase remains.
    assert PierConfig(train_iters=50, groups=2, lazy_start_fraction=0.6).lazy_start == 0
    assert PierConfig(train_iters=100, groups=2, lazy_start_fraction=0.9).lazy_start == 50
    assert PierConfig(train_iters=200, groups=2, lazy_start_iters=50).warnings() == []


_MUON = {"inner_optimizer": "muon"}
_MARKED = {"train_iters": 1000, "marks_embeddings": True}


@pytest.mark.parametrize(
    ("settings", "preset"),
    [
        ({"train_iters": 1000}, "pier-rising"),
        ({"train_iters": 80_000}, "pier-annealed"),
        ({"train_iters": 100_000}, "pier-long"),
        ({"train_iters": 100_000, "sync_interval": 49}, "pier-annealed"),
        ({"train_iters": 100_000, **_MUON}, "pier-muon-annealed"),
        ({"train_iters": 100_000, "outer_momentum": 0.9}, "pier-annealed"),
        ({"train_iters": 1000, **_MUON}, "pier-muon-annealed"),
        ({"train_iters": 1000, "sync_interval": 2, "exchange_dtype": "int2", **_MUON}, "pier-frequent"),
        ({"train_iters": 1000, "sync_interval": 1}, "local-sgd"),
        ({"train_iters": 1000, "sync_interval": 1, "overlap": 1}, "pier-frequent"),
        ({"train_iters": 1000, "sync_interval": 2, "outer_momentum": 0.5}, "pier-annealed"),
        ({"train_iters": 1000, "subgroup_size": 2}, "noloco"),
        ({"train_iters": 1000, "outer_rule": "muon"}, "pier-orthogonal"),
        (_MARKED, "pier-orthogonal"),
        ({**_MARKED, "train_iters": 80_000}, "pier-orthogonal"),
        ({**_MARKED, "sync_interval": 2, "exchange_dtype": "int2"}, "pier-orthogonal"),
        ({**_MARKED, "sync_interval": 1}, "local-sgd"),
        ({**_MARKED, "train_iters": 100_000}, "pier-long"),
        ({**_MARKED, **_MUON}, "pier-muon-annealed"),
        ({**_MARKED, "outer_rule": "nesterov"}, "pier-rising"),
        ({**_MARKED, "outer_momentum": 0.9}, "pier-rising"),
        ({**_MARKED, "outer_lr": 0.9}, "pier-rising"),
        ({**_MARKED, "lighthouse": "http://islands:1", "island": 0}, "pier-rising"),
        ({**_MARKED, "subgroup_size": 2}, "noloco"),
        ({"train_iters": 100_000, "preset": "diloco"}, "diloco"),
    ],
)
def test_preset_suits_the_run(settings: dict[str, Any], preset: str) -> None:
    chosen = PierConfig(**({"groups": 4} | settings))
    assert chosen.preset == preset
    # It is resolved once: what is stored is a schedule.
    assert dataclasses.replace(chosen, train_iters=100_000).preset == preset
    assert (chosen.suited_preset[0] == preset) is ("preset" not in settings)


def test_settings_of_megatron_that_disappoint() -> None:
    quiet = {"data_parallel_size": 8, "log_interval": 10, "save": None, "timing_log_level": 0, "train_sync_interval": 10}
    args, overlapped = argparse.Namespace(**quiet), PierConfig(train_iters=1000, groups=2, overlap=10)
    assert cautions.warnings(args, overlapped) == []
    for setting, said in (
        ({"timing_log_level": 1}, "--timing-log-level 1: its timers wait for the device"),
        ({"train_sync_interval": 5}, "-interval 5: Megatron waits .* 2 times in each .* Use --train-sync-interval 10"),
    ):
        waits = argparse.Namespace(**quiet | setting)
        [warning] = cautions.warnings(waits, overlapped)
        assert re.search(said, warning)
        assert cautions.warnings(waits, dataclasses.replace(overlapped, overlap=0)) == []
    args.train_sync_interval = None
    [log] = cautions.warnings(args, PierConfig(train_iters=1000, groups=2, overlap=25))
    assert "--log-interval 10" in log
    assert "3 times in each exchange" in log
    assert "Use --log-interval 25 or more" in log
    [single] = cautions.warnings(args, PierConfig(train_iters=1000, groups=1))
    assert "all 8 model replicas train as one group" in single
    assert "Pass --pier-groups 8" in single
    [alone] = cautions.warnings(
        argparse.Namespace(data_parallel_size=1, log_interval=10, save=None), PierConfig(train_iters=1000, groups=1)
    )
    assert "one model replica (data-parallel size 1)" in alone


def test_first_islands_need_a_checkpoint_or_no_lazy_start() -> None:
    args = argparse.Namespace(data_parallel_size=8, log_interval=10, save=None, load=None)
    config = PierConfig(train_iters=1000, groups=2, lighthouse="http://other:1", island=0)
    [warning] = cautions.warnings(args, config)
    assert "with a lazy start of 100 iterations and without --load: this job can only join" in warning
    assert cautions.warnings(args, dataclasses.replace(config, lazy_start_iters=0)) == []
    args.load = "folder"
    assert cautions.warnings(args, config) == []


def test_chunks_follow_the_device_and_the_groups() -> None:
    config = PierConfig(train_iters=1000, groups=2)
    assert (config.chunk_mib_on("cpu"), config.chunk_mib_on("cuda")) == (16, 64)
    assert config.chunk_numel_on("cpu") == 16 * 2**20 // 4
    assert PierConfig(train_iters=1000, groups=128).chunk_mib_on("cuda") == 128
    assert PierConfig(train_iters=1000, groups=128, chunk_mib=8).chunk_mib_on("cuda") == 8


def test_constants_under_which_groups_drift_apart_are_said() -> None:
    def said(**settings: Any) -> list[str]:
        return [text for text in PierConfig(10_000, groups=4, preset="noloco", **settings).warnings() if "gamma" in text]

    assert said() == said(outer_lr=1.2) == []
    [weak] = said(outer_lr=0.4)
    assert "gamma = 0.4 is not between 0.5 and 1.5" in weak
    [strong] = said(outer_lr=1.6, subgroup_size=2)
    assert "1.6 is not between" in strong
    # Subgroups of three: sqrt(3 / 4) * 0.5.
    assert "between 0.433 and" in said(outer_lr=0.4, subgroup_size=3)[0]


def test_groups_in_pairs_have_a_partner_each_and_the_last_sits_out() -> None:
    for groups, size in itertools.product(range(1, 9), (2, 3)):
        for iteration in range(10, 60, 10):
            drawn = draw_subgroups(groups, size, 0, iteration)
            assert sorted(itertools.chain(*drawn)) == list(range(groups))
            assert [len(met) for met in drawn[:-1]] == [size] * (len(drawn) - 1)
    # A resumed run repeats the drawing, so it must stay the same for ever.
    assert [draw_subgroups(5, 2, 0, t) for t in (50, 100)] == [[(0, 4), (1, 3), (2,)], [(3, 4), (0, 2), (1,)]]
    assert draw_subgroups(5, 2, 1, 50) != draw_subgroups(5, 2, 0, 50)
    # Everybody meets everybody.
    assert len({pair for t in range(200) for pair in draw_subgroups(8, 2, 3, t)}) == 28


@pytest.mark.parametrize(
    ("flags", "iteration", "place"),
    [
        ({"sync_interval": 50}, 2, "between outer steps"),
        ({"sync_interval": 50, "overlap": 25, "fragments": 2}, 2, "before the first outer step"),
        ({"sync_interval": 50, "overlap": 10, "fragments": 2}, 2, "between outer steps"),
        ({"sync_interval": 3, "overlap": 2}, 2, "before the first outer step"),
        ({"sync_interval": 2}, 3, "between outer steps"),
        ({"sync_interval": 2, "overlap": 1}, 2, "as every iteration of this job"),
        ({"sync_interval": 4, "fragments": 4}, 2, "as every iteration of this job"),
        ({"sync_interval": 1}, 2, "as every iteration of this job"),
        ({"sync_interval": 50, "groups": 4, "sites": 2, "site_interval": 2}, 3, "between outer steps"),
        ({"sync_interval": 50, "groups": 4, "sites": 2, "site_interval": 1}, 2, "as every iteration of this job"),
        ({"sync_interval": 50, "train_iters": 3}, 2, "between outer steps"),
        ({"sync_interval": 50, "train_iters": 2}, 1, "between outer steps"),
    ],
)
def test_iteration_without_an_exchange_if_there_is_one(flags: dict[str, int], iteration: int, place: str) -> None:
    config = PierConfig(**{"train_iters": 1000, "groups": 2, "lazy_start_iters": 0} | flags)
    assert examined_iteration(config)[0] == iteration
    assert place in examined_iteration(config)[1]


def test_what_is_drawn_is_accepted_and_covers_every_way() -> None:
    drawn = [golden.draw(seed) for seed in range(200)]
    assert drawn[:5] == [golden.draw(seed) for seed in range(5)]
    configs = [PierConfig(groups=run["settings"]["groups"], **run["settings"]["config"]) for run in drawn]
    for is_on in ("overlap", "offload", "subgroup", "sites", "has_error_feedback"):
        assert 10 < sum(bool(getattr(config, is_on)) for config in configs) < 190, is_on
    named = {name for run in drawn for name, _ in run["commands"]}
    assert named == {"rehearse", "iterate", "stop_and_resume", "evaluate"}
