"""The order of copies and kernels of offloaded state, on stand-in streams: no GPU needed."""

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from streams import RaceDetector, RaceError, new_work

from pier_megatron import PierConfig
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import Gathered, GroupExchange, Residual, Sum
from pier_megatron.exchange.wire import Wire
from pier_megatron.outer import Shards, loop, rounds
from pier_megatron.outer.elastic import ElasticMembership
from pier_megatron.outer.staging import OWN, Buffers, Staged, Staging
from pier_megatron.outer.state import OuterState
from pier_megatron.outer.static import StaticPeers
from pier_megatron.outer.stopwatch import Stopwatch


class _Exchange(GroupExchange):
    """Two groups that always say the same, on a communicator with a stream of its own."""

    def __init__(self, detector: RaceDetector, codec: str) -> None:
        super().__init__(codec=CODECS[codec])
        self.size, self.groups, self._detector = 2, (0, 1), detector
        self.wire = Wire(self.codec, 2)
        self._read: list[torch.Tensor] = []

    def sum(self, vectors: Sequence[torch.Tensor], residuals: Sequence[Residual | None] = (), exactly: bool = False) -> Sum:
        for vector, residual in zip(vectors, residuals, strict=False):
            if residual is not None:
                vector += residual.sent
                residual.sent.mul_(0.5)

        def work() -> None:
            for vector in vectors:
                vector.mul_(2.0)

        waits = new_work(self._detector, work)
        under_way = Sum()
        under_way.finish = waits
        return under_way

    def gather(self, vector: torch.Tensor) -> Gathered:
        vectors = vector.new_empty(2, len(vector))
        # A communicator too keeps what it reads.
        self._read.append(vector)
        waits = new_work(self._detector, lambda: vectors.copy_(vector))
        return Gathered(vectors, [mock.Mock(wait=waits, is_completed=lambda: False)])


def train(chunk_numel: int = 4, save_at: tuple[int, ...] = (), **settings: Any) -> list[torch.Tensor]:
    """Trains with offloaded state, in which a race is an error; returns parameters, anchors and momenta."""
    torch.manual_seed(0)
    detector = RaceDetector()
    keep = Staging.keep

    def kept_on_host(staging: Staging) -> Buffers:
        buffers = keep(staging)
        detector.on_host.add(buffers.tensors[OWN].untyped_storage().data_ptr())
        return buffers

    common = {"train_iters": 20, "groups": 2, "sync_interval": 4, "lazy_start_iters": 4, "preset": "pier-rising"}
    config = PierConfig(offload=True, **(common | settings))
    # Two optimizers' parameters.
    parameters = [torch.randn(size) for size in (5, 1, 17, 30, 24)]
    exchange = _Exchange(detector, config.exchange_dtype)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(PierConfig, "chunk_numel_on", return_value=chunk_numel))
        stack.enter_context(mock.patch.object(OuterState, "copies_on_streams", True))
        stack.enter_context(mock.patch.object(StaticPeers, "at", return_value=exchange))
        stack.enter_context(mock.patch.object(Staging, "keep", kept_on_host))
        stack.enter_context(detector.watching())
        trained = loop.OuterLoop([[Shards(parameters[:4])], [Shards(parameters[4:])]], config, exchange)
        detector.on_host |= {flat.untyped_storage().data_ptr() for state in trained.states for flat in state.flats.values()}
        for iteration in range(1, config.train_iters + 1):
            trained.begin_iteration(iteration)
            for parameter in parameters:
                parameter.add_(0.1)
            trained.end_iteration()
            if iteration in save_at:
                trained.snapshot()
                trained.checksums()
                for as_mean in {False, config.subgroup is not None}:
                    with trained.anchor_in_model(as_mean):
                        pass
        trained.checksums()
    return [*parameters, *(flat for state in trained.states for flat in state.flats.values())]


_SETTINGS = [
    {},
    {"exchange_dtype": "int8"},
    {"overlap": 1},
    {"overlap": 3, "exchange_dtype": "int8"},
    {"overlap": 2, "fragments": 3, "exchange_dtype": "int4"},
    {"preset": "noloco"},
    {"preset": "noloco", "overlap": 2, "fragments": 3},
    {"overlap": 4},
    {"overlap": 4, "preset": "noloco"},
    {"train_iters": 36, "overlap": 8, "sync_interval": 12, "lazy_start_iters": 12, "fragments": 3, "exchange_dtype": "int8"},
]


@pytest.mark.parametrize("settings", _SETTINGS)
@pytest.mark.parametrize("chunk_numel", [10, 100])
def test_nothing_is_read_or_written_too_early(settings: dict[str, Any], chunk_numel: int) -> None:
    train(chunk_numel, save_at=(3, 9, 14), **settings)


_take_work, _lend = Staging.take_work, Staging.lend


def _take_unfinished_work(staging: Staging) -> Buffers:
    buffers = _take_work(staging)
    buffers.ready = None
    return buffers


def _lend_without_the_last_write(staging: Staging, *args: Any, **kwargs: Any) -> Staged:
    staging.written.clear()
    for buffers in staging.work:
        buffers.ready = None
    return _lend(staging, *args, **kwargs)


_FRAGMENTS = {"overlap": 3, "fragments": 2, "chunk_numel": 10}

# What is omitted, and the settings under which that is a race.
_BUGS: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "new buffers are written at once": (Staging, "take_work", _take_unfinished_work, {}),
    "a chunk is read while it is written back": (Staging, "lend", _lend_without_the_last_write, _FRAGMENTS),
    "copies are not waited for": (rounds, "one_ahead", iter, {}),
    "what groups tell each other is read before it is there": (Gathered, "result", lambda gathered: gathered.vectors, {}),
    "host memory is read while it is written": (Staging, "synchronize", lambda staging: None, {"overlap": 3}),
}


@pytest.mark.parametrize("name", _BUGS)
def test_the_race_is_seen(name: str) -> None:
    owner, attribute, bug, settings = _BUGS[name]
    with mock.patch.object(owner, attribute, bug), pytest.raises(RaceError):
        train(save_at=(3, 9, 14), **settings)


def test_stopwatch_reads_events_only_when_asked() -> None:
    made: list[mock.Mock] = []

    def event(enable_timing: bool) -> mock.Mock:
        made.append(mock.Mock(elapsed_time=lambda end: 250.0))
        return made[-1]

    stopwatch = Stopwatch(torch.device("cuda"))
    with mock.patch.object(torch.cuda, "Event", event):
        for _ in range(2):
            with stopwatch.running():
                pass
    assert not any(begin_or_end.synchronize.called for begin_or_end in made)
    assert [stopwatch.seconds(), stopwatch.seconds()] == [0.5, 0.5]
    assert [begin_or_end.synchronize.called for begin_or_end in made] == [False, True, False, True]


class _Furthest(_Exchange):
    """Two islands; the other is ahead, and its transfer of state breaks off once."""

    def __init__(self, detector: RaceDetector) -> None:
        super().__init__(detector, "fp32")
        self._handed_over, self._breaks_after = 0, 4

    def gather(self, vector: torch.Tensor) -> Gathered:
        return Gathered(torch.stack([vector, torch.tensor([1, 4, 4, 0, 0, 0, 0, -1])]))

    def broadcast(self, tensor: torch.Tensor, source: int, targets: Sequence[int]) -> None:
        self._handed_over += 1
        if self._handed_over == self._breaks_after:
            raise RuntimeError("the other island died")
        tensor.fill_(1.0)


def membership(exchange: GroupExchange) -> ElasticMembership:
    meets = mock.Mock(
        **{"meet.return_value": exchange}, agree=lambda exchange, outcome: outcome, sum_inside=lambda numbers: numbers
    )
    return ElasticMembership(meets, own=0, wait_seconds=60)


_ISLANDS: dict[str, Any] = {
    "groups": 2,
    "sync_interval": 4,
    "lazy_start_iters": 0,
    "preset": "diloco",
    "lighthouse": "http://h",
}


def _join_after_a_failure() -> int:
    """An island takes over offloaded state at the second attempt; returns where it continues."""
    detector = RaceDetector()
    config = PierConfig(train_iters=20, offload=True, **_ISLANDS)
    with (
        mock.patch.object(PierConfig, "chunk_numel_on", return_value=4),
        mock.patch.object(OuterState, "copies_on_streams", True),
        detector.watching(),
    ):
        islands = membership(_Furthest(detector))
        joins = loop.OuterLoop([[Shards([torch.randn(10)])]], config, GroupExchange(), islands=islands)
        detector.on_host |= {flat.untyped_storage().data_ptr() for state in joins.states for flat in state.flats.values()}
        joins.join()
    return joins.iteration


def test_anchor_is_not_read_while_a_failed_hand_over_is_copied_back() -> None:
    assert _join_after_a_failure() == 4
    with mock.patch.object(Staging, "synchronize"), pytest.raises(RaceError):
        _join_after_a_failure()


@pytest.mark.parametrize("offload", [False, True])
def test_elastic_island_takes_no_buffer_after_its_rehearsal(offload: bool) -> None:
    """It keeps all chunks of an outer step until every island has everything, more than are on the wire at a time."""
    config = PierConfig(train_iters=8, offload=offload, **_ISLANDS)
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=4):
        islands = membership(GroupExchange())
        alone = loop.OuterLoop([[Shards([torch.randn(60)])]], config, GroupExchange(), islands=islands)
        alone.rehearse()
        with mock.patch.object(Staging, "allocate", side_effect=AssertionError("a buffer is taken late")):
            alone.join()
            for _ in range(config.train_iters):
                alone.skip_iteration()
    assert alone.is_synchronised


@pytest.mark.parametrize(("sizes", "overlap", "dtype"), [((30, 30), 8, "fp32"), ((58, 2), 3, "int8"), ((10, 50), 1, "int8")])
def test_states_of_several_optimizers_take_no_buffer_after_the_rehearsal(
    sizes: tuple[int, int], overlap: int, dtype: str
) -> None:
    """Chunks of all states are launched together, so that one state may have more on the wire than if it were alone."""
    config = PierConfig(
        train_iters=24, groups=2, sync_interval=8, lazy_start_iters=8, overlap=overlap, exchange_dtype=dtype, offload=True
    )
    exchange = GroupExchange(codec=CODECS[dtype], groups=range(2))
    exchange.wire = Wire(exchange.codec, 2)
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=1):
        trained = loop.OuterLoop([[Shards([torch.randn(size)])] for size in sizes], config, exchange)
        trained.rehearse()
        with mock.patch.object(Staging, "allocate", side_effect=AssertionError("a buffer is taken late")):
            for _ in range(config.train_iters):
                trained.skip_iteration()


def test_what_fails_in_a_rehearsal_says_so() -> None:
    config = PierConfig(train_iters=8, groups=2, sync_interval=4, lazy_start_iters=0)
    running = loop.OuterLoop([[Shards([torch.randn(60)])]], config, GroupExchange(groups=range(2)))
    with (
        mock.patch.object(Staging, "reserve", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError) as failed,
    ):
        running.rehearse()
    assert "a rehearsal, at start, of the outer step after iteration 4" in failed.value.__notes__[-1]
    assert "--pier-chunk-mib" in failed.value.__notes__[-1]
