"""The order of copies and kernels of offloaded state, on stand-in streams: no GPU needed."""

import contextlib
import copy
import datetime
import gc
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from streams import RaceDetector, RaceError, new_work

from pier_megatron import PierConfig
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import Gathered, GroupExchange, Residual, Sum, Wire
from pier_megatron.exchange.membership import Outcome
from pier_megatron.outer import Shards, arithmetic, loop, rounds, steps
from pier_megatron.outer.elastic import ElasticMembership
from pier_megatron.outer.participants import DrawnParticipants, Participants
from pier_megatron.outer.rounds import Stopwatch
from pier_megatron.outer.snapshot import Progress
from pier_megatron.outer.staging import MOVE, Buffers, Deferred, Staged, Staging
from pier_megatron.outer.state import RESIDUAL, Chunk, OuterState


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
        # As a communicator does, which keeps what it reads.
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
        detector.on_host |= {tensor.untyped_storage().data_ptr() for tensor in buffers.tensors.values()}
        return buffers

    common = {
        "train_iters": 20,
        "groups": 2,
        "sync_interval": 4,
        "lazy_start_iters": 4,
        "preset": "pier-rising",
        "offload": True,
    }
    config = PierConfig(**(common | settings))
    # Of two optimizers.
    parameters = [torch.randn(size) for size in (5, 1, 17, 30, 24)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(PierConfig, "chunk_numel_on", return_value=chunk_numel))
        stack.enter_context(mock.patch.object(OuterState, "copies_on_streams", True))
        stack.enter_context(mock.patch.object(DrawnParticipants, "at", Participants.at))
        stack.enter_context(mock.patch.object(Staging, "keep", kept_on_host))
        stack.enter_context(detector.watching())
        trained = loop.OuterLoop(
            [[Shards(parameters[:4])], [Shards(parameters[4:])]], config, _Exchange(detector, config.exchange_dtype)
        )
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


# Some chunks have arrived long before the round ends.
_LONG_OVERLAPS = [
    {"overlap": 4},
    {"overlap": 4, "preset": "noloco"},
    {
        "train_iters": 24,
        "overlap": 7,
        "sync_interval": 8,
        "lazy_start_iters": 8,
        "exchange_dtype": "int8",
        "outlier_zscore": 3.0,
    },
    # Time is left until the next round begins: for some of the work that is put off, for all of it, beside other fragments.
    {"train_iters": 27, "overlap": 7, "sync_interval": 9, "lazy_start_iters": 9},
    {"train_iters": 36, "overlap": 5, "sync_interval": 12, "lazy_start_iters": 12},
    {"train_iters": 36, "overlap": 8, "sync_interval": 12, "lazy_start_iters": 12, "fragments": 3, "exchange_dtype": "int8"},
    {"train_iters": 36, "overlap": 5, "sync_interval": 12, "lazy_start_iters": 12, "preset": "noloco", "subgroup_gamma": 0.9},
]
_SETTINGS = [
    {},
    {"exchange_dtype": "int8"},
    {"outlier_zscore": 3.0},
    {"overlap": 1},
    {"overlap": 3, "exchange_dtype": "int8"},
    {"overlap": 2, "fragments": 3, "exchange_dtype": "int4", "outlier_zscore": 3.0},
    {"preset": "noloco"},
    {"preset": "noloco", "subgroup_gamma": 0.9, "fragments": 2},
    {"preset": "noloco", "exchange_dtype": "int8", "overlap": 2, "fragments": 3},
    *_LONG_OVERLAPS,
]


@pytest.mark.parametrize("settings", _SETTINGS)
@pytest.mark.parametrize("chunk_numel", [10, 100])
def test_nothing_is_read_or_written_too_early(settings: dict[str, Any], chunk_numel: int) -> None:
    train(chunk_numel, save_at=(3, 9, 14), **settings)


@pytest.mark.parametrize("settings", _LONG_OVERLAPS)
def test_offloaded_and_overlapped_numbers_are_those_on_the_device(settings: dict[str, Any]) -> None:
    offloaded, on_device = (train(10, (3, 9, 14), **settings, offload=offload) for offload in (True, False))
    assert all(map(torch.equal, offloaded, on_device))


# The end of the run cuts rounds of fragments short.
@pytest.mark.parametrize("settings", [each for each in _LONG_OVERLAPS if "fragments" not in each])
def test_the_end_of_a_round_waits_for_what_parameters_move_by_and_nothing_else(settings: dict[str, Any]) -> None:
    """But for the chunks that arrive in that iteration, which are on the device."""
    finish = rounds.OuterRound.finish

    def watched(round_: rounds.OuterRound) -> None:
        lend, training, waited_for = Staging.lend, torch.cuda.current_stream(), []

        def lent(staging: Staging, chunk: Chunk, reads: Collection[str], kept: Buffers | None = None) -> Staged:
            if torch.cuda.current_stream() is training:
                waited_for.append(reads)
            return lend(staging, chunk, reads, kept)

        with mock.patch.object(Staging, "lend", lent):
            finish(round_)
        assert set(waited_for) == {(MOVE,)}
        assert len(waited_for) < len(round_._chunks)

    with mock.patch.object(rounds.OuterRound, "finish", watched):
        train(chunk_numel=10, **settings)


@pytest.mark.parametrize("settings", _LONG_OVERLAPS)
def test_training_waits_for_no_copy_that_begins_beside_it(settings: dict[str, Any]) -> None:
    """What is sent has an iteration to come from the host; what is sent first is on the device already."""
    proceed, wait = rounds.OuterRound.proceed, Staged.wait
    lent: list[Staged] = []

    def watched(round_: rounds.OuterRound, age: int, span: int) -> None:
        lend = Staging.lend

        def lending(staging: Staging, chunk: Chunk, reads: Collection[str], kept: Buffers | None = None) -> Staged:
            assert set(reads) == {RESIDUAL, *round_.rule.sent_of}
            lent.append(lend(staging, chunk, reads, kept))
            return lent[-1]

        def waiting(staged: Staged) -> None:
            assert not any(staged is each for each in lent)
            wait(staged)

        before = len(round_._chunks)
        with mock.patch.object(Staging, "lend", lending), mock.patch.object(Staged, "wait", waiting):
            proceed(round_, age, span)
        assert len(lent) < before
        lent.clear()

    with mock.patch.object(rounds.OuterRound, "proceed", watched):
        train(chunk_numel=10, **settings)


@pytest.mark.parametrize("settings", _LONG_OVERLAPS)
def test_state_that_is_put_off_has_an_iteration_to_come_from_the_host(settings: dict[str, Any]) -> None:
    """Or it is asked for before, by the next round, by slow weights, or for a save."""
    work_off, called, begun = Staging.work_off, [], []
    proceed = steps.OuterSteps.proceed

    def proceeding(of_loop: steps.OuterSteps, progress: Progress) -> None:
        begun.clear()
        proceed(of_loop, progress)

    def watched(staging: Staging, least: int = 0) -> None:
        lent: list[Staged] = []
        wait, lend = Staged.wait, Staging._lend

        def lending(staging: Staging, *args: Any) -> Staged:
            lent.append(lend(staging, *args))
            return lent[-1]

        def waiting(staged: Staged) -> None:
            assert not any(staged is each for each in lent)
            wait(staged)

        if not least:
            # Those of this iteration, by whomever they were asked for.
            assert not any(staged is each for staged, _ in staging._coming for each in begun)
        with mock.patch.object(Staging, "_lend", lending), mock.patch.object(Staged, "wait", waiting):
            work_off(staging, least)
        called.append((least, len(lent)))
        begun.extend(lent)

    with (
        mock.patch.object(Staging, "work_off", watched),
        mock.patch.object(steps.OuterSteps, "proceed", proceeding),
    ):
        train(chunk_numel=10, **settings)
    in_time = sum(number for least, number in called if not least)
    # With an overlap of the whole interval the next round asks for all of it at once. Slow weights, and other fragments, may
    # leave no buffers for it until somebody asks.
    if not {"preset", "fragments"} & settings.keys():
        assert bool(in_time) == (settings["overlap"] < settings.get("sync_interval", 4))


def test_nothing_is_done_twice_after_an_error() -> None:
    staging = Staging(OuterState([Shards([torch.randn(30)])], chunk_numel=10, offload=True))
    done = []

    def run(staged: Staged) -> None:
        done.append(staged.chunk.start)
        if len(done) == 2:
            raise RuntimeError("the second one")

    staging.defer([Deferred(chunk, staging.keep(), (), (), run) for chunk in staging.state.chunks], 1)
    staging.work_off(least=3)
    with pytest.raises(RuntimeError, match="the second one"):
        staging.work_off()
    staging.synchronize()
    assert done == [0, 10, 20]
    assert len(staging._work) == len({id(each) for each in staging._work}) == 2


# At iteration 31 some of the state of the round that ended at 30 is still to be written.
_PUTTING_OFF: dict[str, Any] = {
    "train_iters": 36,
    "groups": 1,
    "sync_interval": 12,
    "lazy_start_iters": 12,
    "offload": True,
    "overlap": 6,
}


def test_a_loop_that_is_dropped_holds_no_communicator() -> None:
    config = PierConfig(**_PUTTING_OFF)
    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(PierConfig, "chunk_numel_on", return_value=10):
            trained = loop.OuterLoop([[Shards([torch.randn(100)])]], config, GroupExchange())
            for _ in range(31):
                trained.skip_iteration()
        assert trained._share.stagings[0].is_behind
        exchange = weakref.ref(trained.exchange)
        del trained
        assert exchange() is None
    finally:
        gc.enable()


def test_a_loop_that_is_set_back_does_not_end_what_it_had_put_off() -> None:
    config = PierConfig(**_PUTTING_OFF)
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=10):
        parameter = torch.randn(100)
        trained = loop.OuterLoop([[Shards([parameter])]], config, GroupExchange())
        stored, ends = None, []
        for iteration in (*range(1, 32), *range(24, 32)):
            trained.begin_iteration(iteration)
            parameter.add_(0.1)
            trained.end_iteration()
            if iteration == 23 and stored is None:
                stored, kept = copy.deepcopy(trained.snapshot()), parameter.clone()
            if iteration == 31:
                if not ends:
                    assert trained._share.stagings[0]._deferred
                ends.append([parameter.clone(), *(flat.clone() for flat in trained.states[0].flats.values())])
                assert stored is not None
                trained.restore(stored)
                parameter.copy_(kept)
    assert all(map(torch.equal, *ends))


_take_work, _lend, _read, _finish_coming = Staging.take_work, Staging.lend, Staging.read, Staging._finish_coming


def _take_unfinished_work(staging: Staging) -> Buffers:
    buffers = _take_work(staging)
    buffers.ready = None
    return buffers


def _read_unnoticed(staging: Staging, staged: Staged, names: Collection[str]) -> None:
    before = staged.copied_in
    _read(staging, staged, names)
    staged.copied_in = before or staged.copied_in


def _read_without_the_last_write(staging: Staging, staged: Staged, names: Collection[str]) -> None:
    if staged.present:
        staging._written.clear()
    _read(staging, staged, names)


def _lend_without_the_last_write(staging: Staging, *args: Any, **kwargs: Any) -> Staged:
    staging._written.clear()
    return _lend(staging, *args, **kwargs)


def _finish_without_a_wait(staging: Staging) -> None:
    with mock.patch.object(Staged, "wait", return_value=None):
        _finish_coming(staging)


# What is left out, and the settings under which that is a race.
_BUGS: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "new buffers are written at once": (Staging, "take_work", _take_unfinished_work, {}),
    "a chunk is read while it is written back": (
        Staging,
        "lend",
        _lend_without_the_last_write,
        {"overlap": 3, "fragments": 2, "chunk_numel": 10},
    ),
    "copies are not waited for": (rounds, "one_ahead", iter, {}),
    "slow weights are sent before they are there": (
        Staged,
        "wait",
        lambda staged: None,
        {"preset": "noloco", "exchange_dtype": "int8"},
    ),
    "what is sent first is changed while it is written back": (
        Staging,
        "read",
        _read_without_the_last_write,
        {"overlap": 4},
    ),
    "what was put off is worked on before it is there": (
        Staging,
        "_finish_coming",
        _finish_without_a_wait,
        {"train_iters": 36, "overlap": 5, "sync_interval": 12, "lazy_start_iters": 12, "chunk_numel": 10},
    ),
    "what groups tell each other is read before it is there": (Gathered, "result", lambda gathered: gathered._vectors, {}),
    "what is read while a chunk crosses is not waited for": (Staging, "read", _read_unnoticed, {"overlap": 4}),
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
    """Two islands, of which the other is ahead; what it hands over breaks off once."""

    def __init__(self, detector: RaceDetector) -> None:
        super().__init__(detector, "fp32")
        self._handed_over, self._breaks_after = 0, 4

    def gather(self, vector: torch.Tensor) -> Gathered:
        return Gathered(torch.stack([vector, torch.tensor([1, 4, 4, 0, 0, 0, 0])]))

    def broadcast(self, tensor: torch.Tensor, source: int, targets: Sequence[int]) -> None:
        self._handed_over += 1
        if self._handed_over == self._breaks_after:
            raise RuntimeError("the other island died")
        tensor.fill_(1.0)


class _Membership:
    def __init__(self, exchange: GroupExchange) -> None:
        self._exchange = exchange

    def meet(self, within: datetime.timedelta) -> GroupExchange:
        return self._exchange

    def agree(self, exchange: GroupExchange | None, outcome: Outcome) -> Outcome:
        return outcome


def _join_after_a_failure() -> int:
    """An island takes over offloaded state at the second attempt; returns where it continues."""
    detector = RaceDetector()
    config = PierConfig(
        train_iters=20, groups=2, sync_interval=4, lazy_start_iters=0, preset="diloco", offload=True, lighthouse="http://other"
    )
    with (
        mock.patch.object(PierConfig, "chunk_numel_on", return_value=4),
        mock.patch.object(OuterState, "copies_on_streams", True),
        detector.watching(),
    ):
        islands = ElasticMembership(_Membership(_Furthest(detector)), own=0, wait_seconds=60)
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
    config = PierConfig(
        train_iters=8,
        groups=2,
        sync_interval=4,
        lazy_start_iters=0,
        preset="diloco",
        offload=offload,
        lighthouse="http://other",
    )
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=4):
        islands = ElasticMembership(_Membership(GroupExchange()), own=0, wait_seconds=60)
        with mock.patch.object(arithmetic, "compile_for") as compiled:
            alone = loop.OuterLoop([[Shards([torch.randn(60)])]], config, GroupExchange(), islands=islands)
        compiled.assert_called_once_with(alone.device)
        alone.rehearse()
        with mock.patch.object(Staging, "_new", side_effect=AssertionError("a buffer is taken late")):
            alone.join()
            for _ in range(config.train_iters):
                alone.skip_iteration()
    assert alone.is_synchronised


@contextlib.contextmanager
def rehearsed(config: PierConfig, sizes: Sequence[int]) -> Iterator[loop.OuterLoop]:
    """A loop over a state of each size, in chunks of one element, that takes no buffer any more."""
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=1):
        exchange = GroupExchange(codec=CODECS[config.exchange_dtype])
        exchange.wire = Wire(exchange.codec, 2)
        trained = loop.OuterLoop([[Shards([torch.randn(size)])] for size in sizes], config, exchange)
        trained.rehearse()
        with mock.patch.object(Staging, "_new", side_effect=AssertionError("a buffer is taken late")):
            yield trained


@pytest.mark.parametrize("sizes", [(30, 30), (58, 2), (10, 50)])
@pytest.mark.parametrize("overlap", [1, 3, 8])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_states_of_several_optimizers_take_no_buffer_after_the_rehearsal(
    sizes: tuple[int, int], overlap: int, dtype: str
) -> None:
    """Chunks of all states are launched together, so that one state may have more on the wire than if it were alone."""
    config = PierConfig(
        train_iters=24, groups=2, sync_interval=8, lazy_start_iters=8, overlap=overlap, exchange_dtype=dtype, offload=True
    )
    with rehearsed(config, sizes) as trained:
        for _ in range(config.train_iters):
            trained.skip_iteration()


def test_what_is_put_off_takes_the_buffers_that_are_free() -> None:
    """Beside the rounds of other fragments."""
    config = PierConfig(
        120,
        groups=2,
        sync_interval=24,
        lazy_start_iters=0,
        preset="diloco",
        overlap=6,
        fragments=3,
        exchange_dtype="int8",
        offload=True,
    )
    with rehearsed(config, (40, 84)) as trained:
        for _ in range(118):
            trained.skip_iteration()


def test_a_save_of_several_rounds_takes_no_buffer() -> None:
    """It lets one after the other arrive, more chunks at a time than a round has on the wire."""
    config = PierConfig(
        train_iters=120, groups=2, sync_interval=30, lazy_start_iters=30, overlap=29, fragments=3, offload=True, preset="pier"
    )
    with rehearsed(config, [84]) as trained:
        for iteration in range(1, config.train_iters + 1):
            trained.skip_iteration()
            if iteration == 81:
                trained.snapshot()


def test_what_fails_in_a_rehearsal_says_so() -> None:
    config = PierConfig(train_iters=8, groups=2, sync_interval=4, lazy_start_iters=0)
    running = loop.OuterLoop([[Shards([torch.randn(60)])]], config, GroupExchange())
    with (
        mock.patch.object(Staging, "reserve", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError) as failed,
    ):
        running.rehearse()
    assert "a rehearsal, at start, of the outer step after iteration 4" in failed.value.__notes__[-1]
    assert "--pier-chunk-mib" in failed.value.__notes__[-1]
