"""Where the communicator between islands listens, and how long somebody waits in it."""

import datetime
import itertools
import time
from concurrent import futures

import pytest
import torch
import torch.distributed as dist

from pier_megatron.exchange import communicator
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import GroupExchange


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
