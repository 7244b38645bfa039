"""One thing at a time in the outer loop: what went wrong once."""

from typing import Any

import pytest
import torch
from programs import Program, are_the_same, check
from ranks import LONG_CHUNK_NUMEL, FailedError, Ranks, Settings
from torch.overrides import TorchFunctionMode

from pier_megatron import PierConfig
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer import OuterLoop

pytestmark = pytest.mark.processes

_BASE: dict[str, Any] = {"preset": "pier", "train_iters": 12, "sync_interval": 3, "lazy_start_iters": 3}


Command = tuple[int | str, dict[str, Any]]


def program(*commands: Command, groups: int = 2, **settings: Any) -> Program:
    """A run: a number of iterations with what happens in each of them, or the name of another command."""
    of_run = {name: settings.pop(name) for name in ("flips_a_bit", "averages", "copies", "inner") if name in settings}
    planned = Program(Settings(groups, 1 + of_run.get("copies", False), _BASE | settings, **of_run))
    for what, arguments in commands:
        planned.commands += [("iterate", arguments)] * what if isinstance(what, int) else [(what, arguments)]
    return planned


def is_right(ranks: Ranks, planned: Program) -> bool:
    """Whether a run is what the reference makes of it, and what it would have been undisturbed."""
    results = planned.run(ranks)
    assert check(planned, results, ranks.do("layout")) == len(planned.iterations)
    return are_the_same(results, planned.run(ranks, only_iterations=True))


QUIET: dict[str, Any] = {}
_BAD = {"bad": [1]}

_PAIRS: dict[str, Any] = {"preset": "noloco"}
_SITES: dict[str, Any] = {"sites": 2, "sync_interval": 4, "lazy_start_iters": 4, "site_interval": 2, "train_iters": 15}
_OWN_RULE: dict[str, Any] = {"outer_rule": "own_rules:Aside", "outer_lr": 0.7, "outer_momentum": 0.6}
_ORTHOGONAL: dict[str, Any] = {"outer_rule": "muon"}

# What happens, and with which settings.
_CASES: dict[str, tuple[list[Command], dict[str, Any]]] = {
    "stopped before an offloaded low-bit exchange leaves": (
        [(6, QUIET), ("stop_and_resume", QUIET), (6, QUIET)],
        {"offload": True, "overlap": 3, "exchange_dtype": "int8"},
    ),
    "a group diverges while exchanges are under way": ([(4, QUIET), (1, _BAD), (7, QUIET)], {"fragments": 3, "overlap": 2}),
    "a group diverges without an exchange": ([(4, QUIET), (1, _BAD), (7, QUIET)], {}),
    "the last iteration of the lazy start is skipped": ([(2, QUIET), (1, {"skip": True}), (9, QUIET)], {"preset": "diloco"}),
    "an outer step falls on a skipped iteration": ([(5, QUIET), (1, {"skip": True}), (6, QUIET)], {}),
    "the last iteration is skipped": ([(11, QUIET), (1, {"skip": True})], {"overlap": 1}),
    "pairs, stopped before they send": (
        [(6, QUIET), ("stop_and_resume", QUIET), (6, QUIET)],
        {**_PAIRS, "overlap": 3, "offload": True},
    ),
    "pairs, offloaded, in flight": (
        [(7, QUIET), ("stop_and_resume", QUIET), (5, QUIET)],
        {**_PAIRS, "offload": True, "overlap": 2, "fragments": 2},
    ),
    "a group diverges that sits out, then in a pair": (
        [(4, QUIET), (1, {"bad": [0]}), (9, QUIET), (1, {"bad": [0, 2]}), (6, QUIET)],
        {**_PAIRS, "train_iters": 21, "subgroup_seed": 4},
    ),
    "sites, stopped between an average and an outer step": ([(7, QUIET), ("stop_and_resume", QUIET), (8, QUIET)], _SITES),
    "sites in few bits, offloaded": (
        [(9, QUIET), ("stop_and_resume", QUIET), (6, QUIET)],
        {**_SITES, "exchange_dtype": "int2", "offload": True},
    ),
    "copies in a bit, stopped in flight, behind a group that diverges": (
        [(4, QUIET), (1, _BAD), (3, QUIET), ("stop_and_resume", QUIET), (4, QUIET)],
        {"copies": True, "fragments": 2, "overlap": 2, "exchange_dtype": "int1"},
    ),
    "copies of biases": ([(5, QUIET), ("evaluate", QUIET), (7, QUIET)], {"copies": True, "averages": True, "offload": True}),
    "a group diverges whose optimizer remembers rows and columns": (
        [(4, QUIET), (1, _BAD), (7, QUIET)],
        {"inner": "Adafactor"},
    ),
    "seen before the first outer step": ([(2, QUIET), ("evaluate", QUIET), (10, QUIET)], {}),
    "a site diverges": ([(5, QUIET), (1, {"bad": [2, 3]}), (9, QUIET)], _SITES),
    "a group diverges in each site": ([(4, QUIET), (1, {"bad": [1, 2]}), (10, QUIET)], {**_SITES, "overlap": 3}),
    "a rule of one's own, offloaded, low bits in flight, stopped behind a group that diverges": (
        [(4, QUIET), (1, _BAD), (2, QUIET), ("stop_and_resume", QUIET), (5, QUIET)],
        {**_OWN_RULE, "fragments": 3, "overlap": 2, "exchange_dtype": "int8", "offload": True},
    ),
    "sites under a rule of one's own, stopped in flight": (
        [(10, QUIET), ("stop_and_resume", QUIET), (5, QUIET)],
        {**_SITES, **_OWN_RULE, "overlap": 3},
    ),
    "a group diverges under a rule of one's own": ([(4, QUIET), (1, _BAD), (7, QUIET)], _OWN_RULE),
    "orthogonal steps": ([(12, QUIET)], _ORTHOGONAL),
    "orthogonal steps in fragments, low bits in flight, offloaded, stopped behind a group that diverges": (
        [(4, QUIET), (1, _BAD), (2, QUIET), ("stop_and_resume", QUIET), (5, QUIET)],
        {**_ORTHOGONAL, "fragments": 3, "overlap": 2, "exchange_dtype": "int8", "offload": True},
    ),
    "orthogonal steps of copies, evaluated, behind a group that diverges": (
        [(5, QUIET), ("evaluate", QUIET), (1, _BAD), (6, QUIET)],
        {**_ORTHOGONAL, "copies": True, "averages": True},
    ),
    "sites with orthogonal steps, stopped in flight": (
        [(10, QUIET), ("stop_and_resume", QUIET), (5, QUIET)],
        {**_SITES, **_ORTHOGONAL, "overlap": 3},
    ),
    "biases, stopped under way, behind a group that diverges": (
        [(4, QUIET), (1, _BAD), (2, QUIET), ("stop_and_resume", QUIET), (5, QUIET)],
        {"averages": True, "fragments": 3, "overlap": 2, "exchange_dtype": "int8", "offload": True},
    ),
    "biases in pairs": ([(7, QUIET), ("stop_and_resume", QUIET), (5, QUIET)], {**_PAIRS, "averages": True, "overlap": 1}),
    "biases in sites": ([(9, QUIET), ("stop_and_resume", QUIET), (6, QUIET)], {**_SITES, "averages": True}),
    "evaluation fails between outer steps": ([(5, QUIET), ("evaluate", {"fails": True}), (7, QUIET)], {}),
}


@pytest.mark.parametrize("name", _CASES)
def test_run_is_right(ranks: Ranks, name: str) -> None:
    commands, config = _CASES[name]
    groups = 4 if "sites" in config else 3 if config.get("preset") == "noloco" else 2
    assert is_right(ranks, program(*commands, **config, groups=groups))


def test_one_group_takes_orthogonal_steps(ranks: Ranks) -> None:
    assert is_right(ranks, program((12, QUIET), groups=1, copies=True, **_ORTHOGONAL))


def test_group_is_restarted_once_and_said_so(ranks: Ranks) -> None:
    results = program((4, QUIET), (1, _BAD), (10, QUIET), train_iters=15, fragments=3).run(ranks)
    for result in results:
        assert [report.not_finite for report in result["reports"] if report.not_finite] == [(1,)]
        assert [report.restarted for report in result["reports"] if report.restarted] == [(1,)]
        assert all(tensor.isfinite().all() for tensor in result["history"][5]["parameters"])
    # With an overlap, rounds that began before the restart leave the group out too, but do not restart it again.
    results = program((4, QUIET), (1, _BAD), (10, QUIET), train_iters=15, fragments=3, overlap=2).run(ranks)
    reports = results[0]["reports"]
    assert len([report for report in reports if report.not_finite]) > 1
    assert [report.restarted for report in reports if report.restarted] == [(1,)]


def test_group_that_was_restarted_in_its_site_is_named_in_the_next_outer_step(ranks: Ranks) -> None:
    results = program((4, QUIET), (1, {"bad": [1, 2]}), (10, QUIET), groups=4, **_SITES).run(ranks)
    for result in results:
        found = [(report.iteration, report.not_finite, report.restarted) for report in result["reports"]]
        assert found == [(8, (1, 2), (1, 2)), (12, (), ()), (15, (), ())]
        assert all(tensor.isfinite().all() for tensor in result["history"][5]["parameters"])


def test_all_groups_of_a_site_that_diverges_are_named(ranks: Ranks) -> None:
    for result in program((5, QUIET), (1, {"bad": [2, 3]}), (9, QUIET), groups=4, **_SITES).run(ranks):
        found = [(report.iteration, report.not_finite, report.restarted) for report in result["reports"]]
        assert found == [(8, (2, 3), (2, 3)), (12, (), ()), (15, (), ())]


def test_sites_that_were_stopped_count_the_averages_before(ranks: Ranks) -> None:
    stopped, whole = (
        program((7, QUIET), *others, (8, QUIET), groups=4, **_SITES).run(ranks) for others in ([("stop_and_resume", QUIET)], [])
    )
    for result, other in zip(stopped, whole, strict=True):
        assert [report.bytes_sent for report in result["reports"]] == [report.bytes_sent for report in other["reports"]]


def test_moments_are_not_taken_from_a_group_that_has_none(ranks: Ranks) -> None:
    # Group 0 has skipped all its steps when group 1 is left out: it has nothing to hand over, and nobody waits for it.
    commands = [(2, {"overflow": [0]}), (1, {"overflow": [0], "bad": [1]}), (9, QUIET)]
    assert is_right(ranks, program(*commands, lazy_start_iters=0))


def test_all_groups_bad_is_a_clear_stop(ranks: Ranks) -> None:
    with pytest.raises(FailedError, match=r"DivergedError.*group 0 not finite, group 1 not finite"):
        program((4, QUIET), (1, {"bad": [0, 1]}), (1, QUIET)).run(ranks)


def test_pair_that_diverges_begins_anew_but_not_twice_running(ranks: Ranks) -> None:
    both = {"bad": [0, 1]}
    # With this seed they meet after iterations 6 and 9.
    assert is_right(ranks, program((4, QUIET), (1, both), (7, QUIET), groups=3, preset="noloco", subgroup_seed=3))
    with pytest.raises(FailedError, match=r"DivergedError.*no group has a pseudo-gradient that can be used"):
        program((4, QUIET), (1, both), (2, QUIET), (1, both), (4, QUIET), groups=3, preset="noloco", subgroup_seed=3).run(ranks)


@pytest.mark.parametrize("config", [{}, {"overlap": 1, "exchange_dtype": "int8"}, {"fragments": 2, "offload": True}])
def test_anchors_that_differ_in_one_bit_are_seen_before_long(ranks: Ranks, config: dict[str, Any]) -> None:
    config = {"sync_interval": 2, "lazy_start_iters": 2, "train_iters": 80} | config
    with pytest.raises(FailedError, match=r"AnchorsDifferError: .* of groups \[1\] are not group 0's .*--ckpt-step"):
        program((80, QUIET), **config, flips_a_bit=True).run(ranks)


def test_anchors_that_differ_between_sites_are_named_by_their_groups(ranks: Ranks) -> None:
    config = {"sites": 2, "sync_interval": 2, "site_interval": 1, "lazy_start_iters": 2, "train_iters": 80}
    with pytest.raises(FailedError, match=r"AnchorsDifferError: .* of groups \[3\] are not group 1's .*by group: \{1: "):
        program((80, QUIET), **config, groups=4, flips_a_bit=True).run(ranks)


# What pairs log.


def test_spread_of_pairs_is_logged_as_if_nobody_had_saved(ranks: Ranks) -> None:

    def logged(*commands: Command) -> list[list[tuple[int, float | None, int]]]:
        results = program(*commands, groups=4, **_PAIRS | {"train_iters": 15}).run(ranks)
        return [[(report.iteration, report.spread, report.bytes_sent) for report in result["reports"]] for result in results]

    undisturbed = logged((15, QUIET))
    assert logged((7, QUIET), ("save", QUIET), (8, QUIET)) == undisturbed
    assert logged((7, QUIET), ("stop_and_resume", QUIET), (8, QUIET)) == undisturbed


# Other lengths at a resume.


def test_run_does_not_fall_back_into_the_lazy_start(ranks: Ranks) -> None:
    longer = {"train_iters": 40, "lazy_start_iters": 9}
    with pytest.raises(FailedError, match=r"PierConfigError: --train-iters 40.*iteration 9.*at iteration 5.*or 3\."):
        program((5, QUIET), ("stop_and_resume", {"changes": longer})).run(ranks)


def test_lazy_start_that_is_cut_short_is_not_undone(ranks: Ranks) -> None:
    commands = [(6, QUIET), ("stop_and_resume", {"changes": {"lazy_start_iters": 4}}), (2, QUIET)]
    results = program(*commands, sync_interval=4, lazy_start_iters=8, preset="diloco").run(ranks)
    for result in results:
        switched = torch.cat([tensor.flatten() for tensor in result["history"][5]["parameters"]])
        assert torch.equal(result["history"][6]["anchor"], switched)


def test_shortened_run_is_not_synchronised_because_of_its_length(ranks: Ranks) -> None:
    commands = [(5, QUIET), ("stop_and_resume", {"changes": {"train_iters": 5}}), ("evaluate", QUIET)]
    planned = program(*commands)
    planned.run(ranks)
    one, other = ranks.do("evaluate")
    assert all(map(torch.equal, one["seen"], other["seen"]))


def calls(method: str, *arguments: Any) -> Command:
    return "call", {"method": method, "arguments": arguments}


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        ([calls("begin_iteration", 5)], "Iteration 5 begins, but the last one that Pier knows of is 3"),
        ([calls("end_iteration")], "Iteration 3 has ended already, and what was due is done"),
        ([calls("begin_iteration", 4), calls("begin_iteration", 5)], "Iteration 5 begins, but iteration 4 has not ended"),
        ([calls("begin_iteration", 4), calls("snapshot")], r"snapshot\(\) in iteration 4: call it before"),
    ],
)
def test_clock_that_is_not_kept_is_refused(ranks: Ranks, commands: list[Command], said: str) -> None:
    with pytest.raises(FailedError, match=said):
        program((3, QUIET), *commands).run(ranks)


@pytest.mark.parametrize(
    ("name", "was", "now"), [("sync_interval", 3, 4), ("exchange_dtype", "int8", "int4"), ("chunk_mib", 16, 1)]
)
def test_snapshot_of_other_settings_is_refused_or_loses_what_is_on_its_way(ranks: Ranks, name: str, was: Any, now: Any) -> None:
    config = {"fragments": 3, "overlap": 2, "exchange_dtype": "int8", "lazy_start_iters": 0}
    said = rf"PierConfigError: The snapshot of iteration 5 .*: --pier-{name.replace('_', '-')} {was} is now {now}\."
    with pytest.raises(FailedError, match=said):
        program((5, QUIET), ("stop_and_resume", {"changes": {name: now}}), **config).run(ranks)
    accepts = {"changes": {name: now, "override_checkpoint": True}}
    [result, _] = program((5, QUIET), ("stop_and_resume", accepts), (7, QUIET), **config).run(ranks)
    begun = [report.iteration for report in result["reports"]]
    assert begun[:3] == [1, 2, 3]
    assert begun[3] > 5
    assert begun[-1] == 12
    # What has arrived before stays, and nothing arrives in the iteration after.
    stopped, resumed = result["history"][4:6]
    assert all(torch.equal(stopped[key], resumed[key]) and stopped[key].any() for key in ("anchor", "momentum"))


@pytest.mark.parametrize("config", [{}, {"overlap": 2, "fragments": 2}, {"exchange_dtype": "int8"}], ids=str)
def test_ranks_of_a_group_send_its_parameters_once(ranks: Ranks, config: dict[str, Any]) -> None:
    whole, divided = (program((12, QUIET), **config, copies=copies).run(ranks) for copies in (False, True))
    # Odd chunks have one number more.
    assert all(whole[0]["summed"] <= 2 * result["summed"] <= 1.1 * whole[0]["summed"] for result in divided)
    if "exchange_dtype" not in config:
        for one, other in zip(whole[0]["reports"], divided[0]["reports"], strict=True):
            assert one.bytes_sent <= 2 * other.bytes_sent <= 1.1 * one.bytes_sent


# The rehearsal at start.


_REHEARSED: list[dict[str, Any]] = [
    {},
    {"overlap": 3, "fragments": 3, "exchange_dtype": "int8", "offload": True},
    {"preset": "noloco", "groups": 4, "overlap": 2, "fragments": 2, "offload": True},
    {**_SITES, "groups": 4, "exchange_dtype": "int4"},
    {**_OWN_RULE, "groups": 2},
]


@pytest.mark.parametrize("config", _REHEARSED, ids=str)
def test_rehearsal_takes_every_buffer_and_leaves_no_trace(ranks: Ranks, config: dict[str, Any]) -> None:
    length = config.get("train_iters", _BASE["train_iters"])
    # Once more where there is something to leave a trace in, unless buffers are lent then.
    again: list[Command] = [] if "overlap" in config else [("rehearse", QUIET)]
    planned = program(("rehearse", QUIET), (5, QUIET), *again, (length - 5, QUIET), **config)
    assert are_the_same(planned.run(ranks), planned.run(ranks, only_iterations=True))


def test_rehearsal_again_where_an_exchange_resumes(ranks: Ranks) -> None:
    overlapped = {"overlap": 2, "exchange_dtype": "int8", "offload": True}
    planned = program(("rehearse", QUIET), (7, QUIET), ("stop_and_resume", QUIET), (5, QUIET), **overlapped)
    assert are_the_same(planned.run(ranks), planned.run(ranks, only_iterations=True))


# Memory and devices.


@pytest.mark.parametrize(
    ("dtype", "overlap", "offload", "preset"),
    [("bf16", 0, True, "pier"), ("int8", 2, False, "pier"), ("fp32", 2, False, "noloco"), ("fp32", 0, True, "noloco")],
)
def test_device_memory_is_what_the_start_says(ranks: Ranks, dtype: str, overlap: int, offload: bool, preset: str) -> None:
    program(exchange_dtype=dtype, overlap=overlap, offload=offload, preset=preset, lazy_start_iters=0).run(ranks)
    for used, said in ranks.do("device_memory"):
        assert abs(used - said) <= 0.05 * said, (used, said)


@pytest.mark.parametrize(("dtype", "overlap", "offload"), [("fp32", 2, False), ("int8", 2, True)])
def test_device_memory_of_sites_is_what_the_start_says(ranks: Ranks, dtype: str, overlap: int, offload: bool) -> None:
    program(groups=4, **_SITES, exchange_dtype=dtype, overlap=overlap, offload=offload).run(ranks)
    for used, said in ranks.do("device_memory"):
        # Gloo's threads hold a tensor for a moment after its collective has been waited for.
        late = 4 * LONG_CHUNK_NUMEL
        assert -0.05 * said <= used - said <= 0.05 * said + late, (used, said)


def test_rank_without_parameters_takes_part_on_its_device() -> None:
    devices = []

    class Watched(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "device" in (kwargs or {}):
                devices.append(kwargs["device"])
            return function(*args, **(kwargs or {}))

    config = PierConfig(train_iters=2, groups=1, sync_interval=1, lazy_start_iters=0)
    loop = OuterLoop([], config, GroupExchange(), device=torch.device("cpu:0"))
    with Watched():
        loop.skip_iteration()
        assert loop.checksums() == [{"anchor": 0, "momentum": 0}]
    assert set(devices) == {torch.device("cpu:0")}
