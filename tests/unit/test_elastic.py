"""Elastic islands: one that takes over the state of another, what they hear of each other, and where they listen."""

import datetime
import functools
import gc
import itertools
import math
import time
import weakref
from collections.abc import Sequence
from concurrent import futures
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forked_ranks import free_port

from pier_megatron import PierConfig, PierConfigError
from pier_megatron.exchange import communicator
from pier_megatron.exchange.authentication import answer_peers
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import Gathered, GroupExchange, Residual, Sum
from pier_megatron.exchange.membership import Outcome
from pier_megatron.exchange.silence import changes, lost_peer, neighbours
from pier_megatron.exchange.torchft_api import QUORUM, known_arguments
from pier_megatron.outer import OuterLoop, Shards
from pier_megatron.outer.elastic import ElasticMembership
from pier_megatron.outer.standings import LeftBehindError
from pier_megatron.outer.verdicts import GOOD

_RUN: dict[str, Any] = {"train_iters": 20, "groups": 2, "sync_interval": 4, "lazy_start_iters": 0}
_ISLANDS = {**_RUN, "preset": "diloco", "lighthouse": "http://other"}


class _Lost(GroupExchange):
    """Two islands: the other is due to take an outer step, hands over all of its state and then dies."""

    def __init__(self) -> None:
        super().__init__(codec=CODECS["fp32"])
        self.size, self.groups = 2, (0, 1)

    def gather(self, vector: torch.Tensor) -> Gathered:
        standing = torch.tensor([1, 4, 8, 1, 0, 4, 0, -1])
        return Gathered(torch.stack([vector, standing if len(vector) == len(standing) else torch.full_like(vector, GOOD)]))

    def broadcast(self, tensor: torch.Tensor, source: int, targets: Sequence[int]) -> None:
        tensor.fill_(1.0)

    def sum(self, vectors: Sequence[torch.Tensor], residuals: Sequence[Residual | None] = (), exactly: bool = False) -> Sum:
        raise RuntimeError("the other island died")


class _Membership:
    """The other island is there once."""

    def __init__(self) -> None:
        self.quorums: list[GroupExchange] = []

    def meet(self, within: datetime.timedelta) -> GroupExchange:
        self.quorums.append(GroupExchange(codec=CODECS["fp32"]) if self.quorums else _Lost())
        return self.quorums[-1]

    def agree(self, exchange: GroupExchange | None, outcome: Outcome) -> Outcome:
        return outcome

    def sum_inside(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers


def test_anchor_of_an_island_that_was_lost_is_not_taken_for_the_own_one() -> None:
    membership = _Membership()
    islands = ElasticMembership(membership, own=0, wait_seconds=60)
    joins = OuterLoop([[Shards([torch.randn(10)])]], PierConfig(**_ISLANDS), GroupExchange(), islands=islands)
    with pytest.raises(LeftBehindError, match="Island 0 lost those whose anchor it was to take over"):
        joins.join()
    assert len(membership.quorums) == 2


class _LostInFlight(_Lost):
    """Both islands are there, and the exchange is lost while it is on the wire."""

    def gather(self, vector: torch.Tensor) -> Gathered:
        other = vector.clone()
        if len(vector) == 8:
            other[0] = 1
        return Gathered(torch.stack([vector, other]))

    def sum(self, vectors: Sequence[torch.Tensor], residuals: Sequence[Residual | None] = (), exactly: bool = False) -> Sum:
        under_way = Sum()
        under_way.finish = mock.Mock(side_effect=RuntimeError("the other island died"))  # type: ignore[method-assign]
        return under_way


class _FailsThreeTimes(_Membership):
    def meet(self, within: datetime.timedelta) -> GroupExchange:
        self.quorums.append(_LostInFlight() if len(self.quorums) < 3 else GroupExchange(codec=CODECS["fp32"]))
        return self.quorums[-1]


@pytest.mark.parametrize("offload", [False, True])
def test_failed_attempts_leave_no_buffers_behind(offload: bool) -> None:
    config = PierConfig(**_ISLANDS, offload=offload, chunk_mib=1)
    membership, parameter = _FailsThreeTimes(), torch.randn(5 * 2**18 - 3)
    islands = ElasticMembership(membership, own=0, wait_seconds=60)
    loop = OuterLoop([[Shards([parameter])]], config, GroupExchange(), islands=islands)
    [staging] = loop.share.stagings
    made: list[Any] = []
    new = staging.allocate

    def count(*args: Any, **kwargs: Any) -> Any:
        tensors = new(*args, **kwargs)
        made.extend(map(weakref.ref, tensors.values()))
        return tensors

    staging.allocate = count  # type: ignore[method-assign]
    for iteration in range(1, 5):
        loop.begin_iteration(iteration)
        parameter += 1
        loop.end_iteration()
    assert len(membership.quorums) == 4
    gc.collect()
    # What is still on the wire may write to buffers of a lost attempt: they are not lent again, and nobody holds them.
    alive = {id(tensor) for tensor in (made_one() for made_one in made) if tensor is not None}
    lent = {id(tensor) for buffers in (*staging.work, *staging.kept) for tensor in buffers.tensors.values()}
    assert alive == lent
    assert len(made) > len(alive)


def test_what_islands_cannot_do_is_refused_by_loop_and_settings() -> None:
    islands = ElasticMembership(_Membership(), own=0, wait_seconds=60)
    for settings, words in (
        (
            {"overlap": 3, "fragments": 2},
            r"--pier-overlap 3 with .* cannot be used with elastic islands .*4 // 2 = 2 iterations",
        ),
        ({"preset": "noloco"}, "--pier-preset noloco in subgroups of 2 cannot .*no common state"),
    ):
        with pytest.raises(PierConfigError, match=words):
            OuterLoop([[Shards([torch.randn(10)])]], PierConfig(**_RUN | settings), GroupExchange(), islands=islands)
        with pytest.raises(PierConfigError, match=words):
            PierConfig(**_RUN | settings, lighthouse="http://other")


def test_loop_without_islands_has_nobody_to_join() -> None:
    alone = OuterLoop([[Shards([torch.randn(10)])]], PierConfig(**_RUN | {"groups": 1}), GroupExchange())
    with pytest.raises(PierConfigError, match=r"join\(\) meets elastic islands.*without them.*islands=ElasticMembership"):
        alone.join()
    assert alone.iteration == 0


def test_an_island_hears_of_silent_ones_and_of_those_that_have_left() -> None:
    secret = b"s" * 32
    said: list[dict[str, list[int]]] = [{"left": [], "meeting": [7, 1]} for _ in range(3)]
    names = [answer_peers(index, "127.0.0.1", secret, functools.partial(said.__getitem__, index)) for index in range(3)]
    stranger = answer_peers(3, "127.0.0.1", b"t" * 32, dict)
    nobody = f"0004/{'0' * 16}/127.0.0.1/{free_port()}"
    assert lost_peer(names, [7, 1], secret) is None
    said[2]["left"] = [6, 8]
    assert lost_peer(names, [7, 1], secret) is None
    said[2]["left"] = [6, 7, 8]
    assert lost_peer(names, [7, 1], secret) == "island 2 has ended it"
    assert lost_peer([*names[:2], nobody], [7, 1], secret) == "island 4 does not answer"
    assert lost_peer([stranger], [7, 1], secret) == "island 3 does not answer"
    # Not those that are on their way to this one.
    for meeting, is_lost in (([6, 2], False), ([7, 2], True), ([8, 1], True)):
        said[1]["meeting"] = meeting
        assert lost_peer(names[:2], [7, 1], secret) == ("island 1 meets other islands" if is_lost else None)


def test_who_stood_still_itself_believes_in_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pier_megatron.exchange.silence.ask", lambda *_: time.sleep(0.1) or {})
    monkeypatch.setattr("pier_megatron.exchange.silence.SECONDS", 0.01)
    assert lost_peer(["0001/x/127.0.0.1/1"], [7, 1], b"") is None


@pytest.mark.parametrize("count", [2, 3, 5, 1000])
def test_all_are_asked_and_all_hear_of_it_soon(count: int) -> None:
    islands = [str(place) for place in range(count)]
    asked = [{int(name) for name in neighbours(islands, place)} for place in range(count)]
    assert [int(neighbours(islands, place)[0]) for place in range(count)] == [*range(1, count), 0]
    assert all(place not in of_one for place, of_one in enumerate(asked))
    known, rounds = {count // 2}, 0
    while len(known) < count:
        known |= {place for place, of_one in enumerate(asked) if of_one & known}
        rounds += 1
    assert rounds <= math.ceil(math.log2(count))


def test_who_has_gone_and_who_is_new_is_said_by_number() -> None:
    first, second, third, again = (f"{number:04}/{part}/host/1" for number, part in ((0, "a"), (1, "b"), (12, "c"), (1, "d")))
    assert changes([first, second], [first, second]) == ""
    assert changes([first, second], [first, third]) == "gone: 1; new: 12"
    # A number that was started again, and one that two islands have for a moment.
    assert changes([first, second], [first, again]) == "new: 1"
    assert changes([first, second, again], [first]) == "gone: 1"


def test_other_nodes_of_an_island_listen_at_their_own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []

    def create(**of: str) -> object:
        asked.append(of)
        if of.get("hostname") == "10.1.1.1":
            raise RuntimeError("none of this node")
        return object()

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", create)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0,ib1")
    communicator.device_at("10.1.1.1")
    assert asked == [{"hostname": "10.1.1.1"}, {"interface": "ib0"}]
    communicator.device_at("10.1.1.2")
    assert asked[2:] == [{"hostname": "10.1.1.2"}]


class _Forgotten:
    """A collective that gloo has forgotten: it never ends."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: datetime.timedelta) -> bool:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")


def test_nobody_waits_for_a_collective_of_a_lost_exchange() -> None:
    store, silences = dist.HashStore(), iter([None, "island 7 does not answer"])
    own = communicator.Communicator(store, datetime.timedelta(seconds=300))
    alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=300))
    own.begin("ends/1", lambda: next(silences), lambda: alone)  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match="the exchange is interrupted: island 7 does not answer"):
        communicator.Wait(_Forgotten(), own.watched).wait()  # type: ignore[arg-type]
    store.set("ends/1", "")
    with pytest.raises(RuntimeError, match="interrupted: another rank of this island has ended it"):
        own.watched(lambda _: False)
    # What comes about in the meantime is taken.
    comes = itertools.chain([False], itertools.repeat(True))
    own.watched(lambda _: next(comes))


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_islands_sum_several_chunks_in_one_launch(dtype: str) -> None:
    store = communicator.store_at("127.0.0.1")

    def island(rank: int) -> list[torch.Tensor]:
        at = ("127.0.0.1", store.port)
        timeout = datetime.timedelta(seconds=10)
        own = communicator.Communicator(dist.HashStore(), timeout)
        group = own.begin("ends", lambda: None, lambda: communicator.connect(at, dtype, (rank, 2), "127.0.0.1", timeout))
        chunks = [torch.full((numel,), rank + 1.0) for numel in (3, 5)]
        under_way = GroupExchange(group, CODECS[dtype]).sum(chunks)
        under_way.advance()
        under_way.finish()
        return chunks

    with futures.ThreadPoolExecutor() as islands:
        for chunks in islands.map(island, range(2)):
            assert all(torch.allclose(chunk, torch.tensor(3.0), rtol=0.01) for chunk in chunks)


def test_a_torchft_with_another_signature_is_refused_where_all_ranks_learn_of_it() -> None:
    known = {**QUORUM, "step": 1}

    def present(group_rank: int, step: int, checkpoint_metadata: str, shrink_only: bool, init_sync: bool) -> None: ...

    def nightly(
        group_rank: int, step: int, checkpoint_metadata: str, shrink_only: bool, init_sync: bool, reconfigure_handle: str
    ) -> None: ...

    def with_more(
        group_rank: int, step: int, checkpoint_metadata: str, shrink_only: bool, init_sync: bool, zone: str
    ) -> None: ...

    def with_less(group_rank: int, step: int, checkpoint_metadata: str, init_sync: bool) -> None: ...

    assert known_arguments(present, known) == {name: value for name, value in known.items() if name != "reconfigure_handle"}
    assert known_arguments(nightly, known) == known
    for other, named in ((with_more, "zone"), (with_less, "shrink_only")):
        with pytest.raises(PierConfigError, match=rf"this torchft has another signature in {named} .*torchft>=0\.2,<0\.3"):
            known_arguments(other, known)
