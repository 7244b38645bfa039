"""The flat buffers and their updates against the formulas, on one process."""

import dataclasses
import gc
import weakref
from typing import Any
from unittest import mock

import one_gpu
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from pier_megatron import PierConfig, PierConfigError
from pier_megatron.exchange.codecs import BLOCK, CODECS, Codec
from pier_megatron.exchange.collectives import GroupExchange, Sum
from pier_megatron.exchange.wire import Wire
from pier_megatron.integration import startup
from pier_megatron.outer import OuterLoop, loop, state
from pier_megatron.outer.chunks import Shards
from pier_megatron.outer.memory import buffers_at_once, host_bytes, rounds_at_once
from pier_megatron.outer.rounds import PRODUCTS, OuterRound
from pier_megatron.outer.rules import Nesterov
from pier_megatron.outer.share import Share
from pier_megatron.outer.staging import Staging
from pier_megatron.outer.state import OuterState
from pier_megatron.outer.static import StaticPeers
from pier_megatron.outer.stopwatch import Stopwatch
from pier_megatron.outer.verdicts import GOOD, Verdicts

EXCHANGE, _OF_TWO = GroupExchange(), GroupExchange(groups=range(2))
DEVICE = one_gpu.device()


def shards(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(DEVICE) for size in (5, 1, 17)]


def seen(*tensors: torch.Tensor) -> torch.Tensor:
    """What is in tensors, wherever they are, once all copies on their way have arrived."""
    one_gpu.synchronize()
    return torch.cat([tensor.cpu() for tensor in tensors])


def outer_round(state: OuterState, mu: float = 0.9, eta: float = 0.7) -> OuterRound:
    round_ = OuterRound([Staging(state)], (0,), Nesterov(mu, eta), 1, GOOD, Stopwatch(DEVICE), DEVICE)
    round_.meet(EXCHANGE, Verdicts(EXCHANGE, GOOD, round_.lengths))
    return round_


# How the state may be cut and kept; none of it may change a result.
LAYOUTS = [{}, {"chunk_numel": 4}, {"chunk_numel": 1}, {"chunk_numel": 7, "offload": True}]


@pytest.mark.parametrize("chunk_numel", [1, 4, 5, 6, 23, 100])
@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_chunks_cover_everything_once_and_lie_in_one_fragment_and_part(chunk_numel: int, fragments: int) -> None:
    first, *rest = shards()
    state = OuterState([Shards(rest), Shards([first], is_counted=False)], chunk_numel=chunk_numel, fragments=fragments)
    covered = [position for chunk in state.chunks for position in range(chunk.start, chunk.start + chunk.numel)]
    assert covered == list(range(23))
    assert max(chunk.numel for chunk in state.chunks) <= chunk_numel
    assert sum(chunk.numel for chunk in state.chunks if chunk.shards.is_counted) == 18
    sizes = [sum(chunk.numel for chunk in state.chunks if chunk.fragment == f) for f in range(fragments)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("layout", [{"chunk_numel": 4}, {"chunk_numel": 7, "fragments": 3}])
def test_copies_on_other_ranks_are_cut_alike(layout: dict[str, int]) -> None:
    first, *rest = shards()
    of_ranks = (OuterState([Shards(rest), Shards([first], is_counted=counts)], **layout).chunks for counts in (True, False))
    one, other = ([(chunk.start, chunk.numel, chunk.fragment) for chunk in chunks] for chunks in of_ranks)
    assert one == other


def test_tied_parameters_come_in_the_last_fragment() -> None:
    first, *rest = shards()
    state = OuterState([Shards(rest), Shards([first], is_tied=True)], fragments=3)
    assert {chunk.fragment for chunk in state.chunks if chunk.shards.is_tied} == {2}
    # Elsewhere they may come with fewer other parameters; those before them are divided as if they were not there.
    assert [chunk.fragment for chunk in state.chunks if not chunk.shards.is_tied] == [0, 1, 2]


def test_half_precision_shards_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.bfloat16"):
        OuterState([Shards([torch.zeros(3, dtype=torch.bfloat16)])])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spans_iterations", [False, True])
def test_outer_step_is_nesterov(layout: dict[str, int], spans_iterations: bool) -> None:
    parameters = shards()
    state = OuterState([Shards(parameters)], **layout)
    anchor, momentum = seen(state.anchor).double(), torch.linspace(-1, 1, 23)
    state.momentum.copy_(momentum)
    for parameter in parameters:
        parameter.mul_(0.9).add_(0.1)
    delta = anchor - seen(*parameters).double()
    round_ = outer_round(state)
    progress = torch.zeros(23)
    if spans_iterations:
        round_.begin()
        round_.proceed(0, span=2)
        progress = torch.linspace(-0.3, 0.3, 23)
        for parameter, step in zip(parameters, progress.split([5, 1, 17]), strict=True):
            parameter.add_(step.to(DEVICE))
        round_.finish()
    else:
        round_.run()
    expected_momentum = 0.9 * momentum.double() + delta
    expected = anchor - 0.7 * (delta + 0.9 * expected_momentum)
    torch.testing.assert_close(seen(state.momentum).double(), expected_momentum, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen(state.anchor).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen(*parameters), seen(state.anchor) + progress, rtol=1e-5, atol=1e-6)
    norms = torch.stack([*3 * [delta @ delta], expected_momentum @ expected_momentum])
    torch.testing.assert_close(seen(round_.sums)[:PRODUCTS], norms, rtol=1e-4, atol=1e-6)


def test_subgroup_stops_if_it_is_useless_within_an_interval_of_a_restart() -> None:
    """An anchor that is not finite restarts nobody; with an overlap of a whole interval it is judged in the same iteration."""
    config = PierConfig(train_iters=40, groups=4, sync_interval=4, lazy_start_iters=4, subgroup_size=2, overlap=4)
    peers = StaticPeers(config, mock.Mock(exchange=GroupExchange(groups=range(config.groups))), None)
    peers.last_restart = 12
    looked = []
    for begun in (8, 12, 16, 20):
        round_ = mock.Mock(begun=begun, exchange=mock.Mock(size=2))
        peers.check(round_, begun + config.overlap)
        looked.append(round_.verdicts.check.called)
    assert looked == [False, True, True, False]


def test_unit_step_of_a_single_group_is_the_identity_to_the_last_bit() -> None:
    # (anchor - (anchor - p)) == p does not hold in floating point, for example here.
    anchor, parameter = torch.tensor([[1e-3], [-3.1415926e-8]], device=DEVICE)
    assert anchor - (anchor - parameter) != parameter
    shard = anchor.clone()
    state = OuterState([Shards([shard])])
    shard.copy_(parameter)
    outer_round(state, mu=0.0, eta=1.0).run()
    assert shard == parameter
    assert state.anchor == parameter


def test_sees_parameters_that_are_not_finite() -> None:
    parameters = shards()
    state = OuterState([Shards(parameters)])
    assert state.parameters_are_finite()
    for value in (float("nan"), float("inf"), float("-inf")):
        parameters[2][11] = value
        assert not state.parameters_are_finite()


def test_parameters_are_restored_when_showing_the_anchor_fails() -> None:
    parameters = shards()
    alone = loop.OuterLoop([[Shards(parameters)]], PierConfig(1000, groups=1), EXCHANGE)
    alone.progress.is_synchronised = False
    for parameter in parameters:
        parameter.add_(1.0)
    trained = [parameter.clone() for parameter in parameters]

    def write_and_fail(state: OuterState, flat: torch.Tensor) -> None:
        parameters[0].copy_(flat[:5])
        raise RuntimeError("a device is lost")

    calls = iter([write_and_fail, OuterState.set_parameters])
    with (
        mock.patch.object(OuterState, "set_parameters", lambda *args: next(calls)(*args)),
        pytest.raises(RuntimeError, match="lost"),
        alone.anchor_in_model(),
    ):
        raise AssertionError("never shown")
    assert all(map(torch.equal, parameters, trained))


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("exactly", [False, True])
def test_group_of_a_site_sends_over_the_slow_link_what_its_part_takes(codec: Codec, exactly: bool) -> None:
    wire = Wire(codec, 2, groups_in_site=4)
    between = Wire(codec, 2).bytes_of_sum(1000 * BLOCK, exactly)
    assert wire.bytes_between_sites(4000 * BLOCK, exactly) == between
    assert wire.bytes_of_sum(4000 * BLOCK, exactly) == between + 3 * 4 * 1000 * BLOCK
    assert Wire(codec, 1).bytes_of_sum(1000 * BLOCK, exactly) == 0
    assert Wire(CODECS["fp32"], 4).bytes_of_sum(1000) == 6000


def test_memory_of_a_sum_counts_what_a_site_puts_together_and_whole_blocks() -> None:
    alone, in_site = (Wire(CODECS["fp32"], 2, groups_in_site=groups) for groups in (1, 4))
    assert (alone.payload_bytes(4000), alone.coding_bytes(4000)) == (0, 0)
    assert (in_site.payload_bytes(4000), in_site.coding_bytes(4000)) == (4 * 1000, 4 * 4000)
    numels = [(1000, 4), (1024, 4), (1025, 4), (5, 8)]
    assert [Wire(CODECS["int8"], groups).segment_numel(numel) for numel, groups in numels] == [256, 256, 384, 128]


def test_model_learns_of_every_outer_step() -> None:
    config, changed = PierConfig(9, groups=1, sync_interval=3, lazy_start_iters=0, preset="diloco"), list[int]()
    running = loop.OuterLoop(
        [[Shards([torch.ones(3)])]], config, GroupExchange(), on_change=lambda: changed.append(running.iteration)
    )
    agreed = []
    for iteration in range(1, 8):
        running.begin_iteration(iteration)
        running.end_iteration()
        agreed += [iteration] if running.is_synchronised else []
    assert changed == agreed == [3, 6]
    running.skip_iteration()
    assert (running.iteration, running.progress.trained) == (8, 1)


def test_stretches_of_the_flat_buffers_are_those_of_the_parameters() -> None:
    parameters = [torch.arange(5.0), torch.arange(5.0, 12.0).view(7, 1)]
    state = OuterState([Shards(parameters)])
    assert all(torch.equal(state.anchor[at].view(given.shape), given) for given, at in state.slices())
    assert not state.momentum.any()
    assert (state.numel, state.nbytes) == (12, 8 * 12)


@pytest.mark.parametrize(("span", "ages"), [(1, (0, 1)), (2, (0, 1)), (3, (1, 2)), (10, (1, 5)), (11, (1, 6))])
def test_sum_begins_in_one_launch_behind_the_verdicts_and_is_sent_on_half_way(span: int, ages: tuple[int, int]) -> None:
    round_ = outer_round(OuterState([Shards(shards())], chunk_numel=4))
    begun, sent_on = list[tuple[int, int]](), list[int]()
    with mock.patch.object(GroupExchange, "sum", return_value=Sum()) as sums, mock.patch.object(Sum, "advance") as advance:
        round_.begin()
        for age in range(span + 1):
            if age < span:
                round_.proceed(age, span)
            else:
                round_.arrive()
            begun += [(age, len(call.args[0])) for call in sums.mock_calls]
            sent_on += [age] * advance.called
            sums.reset_mock()
            advance.reset_mock()
    assert begun == [(ages[0], len(round_.chunks))]
    assert sent_on[0] == ages[1]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_parameters_that_evaluation_hides_wait_in_pinned_memory(device_type: str) -> None:
    with FakeTensorMode():
        state = OuterState([], device=torch.device(device_type))
        with (
            mock.patch.object(OuterState, "copy_parameters_to", lambda state, flat: flat),
            mock.patch.object(torch, "empty") as made,
        ):
            state.parameters_on_host()
    assert made.call_args.kwargs["device"] == "cpu"
    assert made.call_args.kwargs["pin_memory"] is (device_type == "cuda")


def test_groups_are_compared_without_copies_of_the_model() -> None:
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=10_000):
        alone = loop.OuterLoop([[Shards([torch.randn(300_000), torch.randn(200_000)])]], PierConfig(1000, groups=1), EXCHANGE)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        startup.check_groups_agree(alone)
    allocated = [event.self_cpu_memory_usage for event in profiled.events()]
    # An anchor in int64 or float64 would be 4 MB.
    assert 0 < max(allocated) <= 2 * 8 * 10_000


@pytest.mark.parametrize("is_pinned", [False, True])
def test_host_memory_is_counted_for_all_ranks_of_a_node(is_pinned: bool) -> None:
    config = PierConfig(1000, groups=2, offload=True)
    numel = 50 * 10**9 // 8  # Anchor and momentum take 50 GB; pinned, 68.7 GB.
    available = 700 * 10**9
    startup.check_host_memory(config, [numel], 8, available, is_pinned)
    with pytest.raises(PierConfigError, match=r"--pier-offload: .* 16 ranks.*takes (800\.0|1,099\.5) GB.*700\.0 GB are"):
        startup.check_host_memory(config, [numel], 16, available, is_pinned)


@pytest.mark.parametrize("settings", [{}, {"overlap": 5}, {"offload": True}, {"overlap": 5, "offload": True}])
def test_start_points_to_the_planner_where_overlapped_steps_wait_for_the_host(settings: dict[str, Any]) -> None:
    running = loop.OuterLoop([[Shards([torch.zeros(23)])]], PierConfig(1000, groups=2, **settings), _OF_TWO)
    topology = mock.Mock(members=lambda group: [group], warnings=list)
    said = startup.describe([], topology, running, [])
    assert ("pier-megatron plan" in said) == (len(settings) == 2)
    assert "iterations: 100 of lazy start (synchronous), then 900 local with an outer step every 50" in said


def queues_said(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), **settings: Any) -> list[str]:
    """What start-up says of queues on a GPU, with ``CUDA_DEVICE_MAX_CONNECTIONS=1``."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    running = loop.OuterLoop([[Shards([torch.zeros(7 * 2**18)])]], PierConfig(1000, groups=2, **settings), _OF_TWO)
    running.device = torch.device("cuda")
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        return startup.of_queues(running)


def test_copies_behind_kernels_are_said_unless_they_have_queues_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_COPY_CONNECTIONS", raising=False)
    [said] = queues_said(monkeypatch, offload=True)
    assert "Set CUDA_DEVICE_MAX_COPY_CONNECTIONS=8" in said
    assert queues_said(monkeypatch) == []
    monkeypatch.setenv("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "8")
    assert queues_said(monkeypatch, offload=True) == []
    # Blackwell has the warning of a single queue whatever the copies have.
    for settings in ({"overlap": 5, "chunk_mib": 1}, {"offload": True}):
        [said] = queues_said(monkeypatch, (10, 0), **settings)
        assert "Blackwell" in said
        assert "Set it to 32" in said


class _Summed(TorchDispatchMode):
    """Notes how many numbers are summed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith("sum"):
            self.numels.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_summed_a_few_at_a_time(dtype: torch.dtype) -> None:
    vector = torch.randn(17, generator=torch.Generator().manual_seed(1)).to(dtype)
    integers = vector.view(torch.int32 if dtype == torch.float32 else torch.int16).tolist()
    with mock.patch.object(state, "_SUMMED_AT_ONCE", 5), _Summed() as summed:
        assert state.sum_of_bits(vector).item() == sum(integers)
    assert summed.numels == [5, 5, 5, 2, 4]
    assert state.sum_of_bits(vector[:0]).item() == 0


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_exchange_ends_with_its_loop_and_not_with_the_interpreter(overlap: int) -> None:
    """Without the garbage collector: gloo aborts a process that ends with a communicator of its own."""

    def train() -> weakref.ref[GroupExchange]:
        config = PierConfig(4, groups=1, sync_interval=2, lazy_start_iters=0, overlap=overlap)
        exchange = GroupExchange()
        outer = loop.OuterLoop([[Shards(shards())]], config, exchange)
        for iteration in range(1, 5):
            outer.begin_iteration(iteration)
            outer.end_iteration()
        return weakref.ref(exchange)

    gc.disable()
    try:
        assert train()() is None
    finally:
        gc.enable()


def test_rounds_and_buffers_under_way_at_once() -> None:
    def config(overlap: int, fragments: int) -> PierConfig:
        return PierConfig(train_iters=100, groups=2, sync_interval=10, overlap=overlap, fragments=fragments)

    assert [rounds_at_once(config(*way)) for way in ((0, 4), (1, 1), (5, 4), (10, 4), (4, 2))] == [0, 1, 3, 4, 1]
    assert buffers_at_once(config(5, 2), [[3, 2], []]) == [(7, 0), (0, 0)]
    assert buffers_at_once(dataclasses.replace(config(5, 2), offload=True), [[3, 2], []]) == [(5, 5), (0, 0)]


def test_offloaded_islands_keep_the_chunks_of_one_round() -> None:
    config = PierConfig(train_iters=100, groups=2, lighthouse="http://other", island=0, offload=True, chunk_mib=1)
    assert host_bytes(config, 3 * 2**18, is_pinned=False) == (2 * 3 + 3) * 2**20


class _OnlyExactly(GroupExchange):
    def sum(self, vectors: Any, residuals: Any = (), exactly: bool = False) -> Any:
        assert exactly, "few bits of an anchor are no anchor"
        return super().sum(vectors, residuals, exactly)


def test_mean_of_anchors_crosses_exactly_whatever_the_codec() -> None:
    parameter = torch.randn(300)
    config = PierConfig(train_iters=100, groups=2, exchange_dtype="int4")
    share = Share([[Shards([parameter])]], config, _OnlyExactly(codec=CODECS["int4"]))
    expected = share.states[0].anchor.clone()
    parameter.add_(1)
    share.agree_on_mean()
    assert torch.equal(parameter, expected)


def _config() -> PierConfig:
    return PierConfig(train_iters=8, groups=1, preset="pier", sync_interval=2, lazy_start_iters=2)


def test_moments_are_handed_over_and_the_count_of_steps_is_not() -> None:
    # A scalar, of the shape that AdamW's count of its steps has.
    scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([scale])
    loop = OuterLoop.for_optimizer(optimizer, _config(), GroupExchange())
    assert not list(loop.share.moments.each())
    scale.square().backward()
    optimizer.step()
    state = optimizer.state[scale]
    assert [id(moment) for moment in loop.share.moments.each()] == [id(state["exp_avg"]), id(state["exp_avg_sq"])]


@pytest.mark.parametrize(("rank", "size", "counted"), [(0, 2, 3), (1, 2, 0), (0, 1, 3)])
def test_copies_on_the_ranks_of_a_group_count_once(rank: int, size: int, counted: int) -> None:
    group = mock.Mock(spec=dist.ProcessGroup)
    group.rank.return_value, group.size.return_value = rank, size
    loop = OuterLoop.for_optimizer(torch.optim.SGD([torch.ones(3)]), _config(), GroupExchange(), group=group)
    assert loop.states[0].counted == counted
    assert sum(chunk.carried for chunk in loop.states[0].chunks) == -(-3 // size)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((0,), r"--pier-groups 2: .* collectives of 1\..* one of each of the 2"),
        ((0, 1), "--pier-exchange-dtype int8: .* of fp32"),
    ],
)
def test_collectives_of_another_run_are_refused(groups: tuple[int, ...], said: str) -> None:
    config = PierConfig(train_iters=8, groups=2, exchange_dtype="int8")
    with pytest.raises(PierConfigError, match=said):
        OuterLoop([[Shards([torch.ones(3)])]], config, GroupExchange(groups=groups))
    if len(groups) == 1:
        with pytest.raises(PierConfigError, match=said):
            OuterLoop([[Shards([torch.ones(3)])]], config, None)


def test_parameters_that_are_not_whole_are_refused() -> None:
    class Part(torch.Tensor):
        pass

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3).as_subclass(Part))])
    with pytest.raises(TypeError, match=r"takes whole parameters, but one is a Part.*Shards.*to_local"):
        OuterLoop.for_optimizer(optimizer, _config(), GroupExchange())
