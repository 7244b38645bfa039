"""Where the communicator between islands listens, and how long somebody waits in it."""

import datetime
import threading
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
    communicator._device_at("10.1.1.1")
    assert asked == [{"hostname": "10.1.1.1"}, {"interface": "ib0"}]
    communicator._device_at("10.1.1.2")
    assert asked[2:] == [{"hostname": "10.1.1.2"}]


class _Forgotten:
    """A collective that gloo has forgotten: it never ends."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: datetime.timedelta) -> bool:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")


def test_nobody_waits_for_a_collective_of_a_lost_exchange() -> None:
    lost = threading.Event()
    threading.Timer(0.1, lost.set).start()
    with pytest.raises(RuntimeError, match="interrupted"):
        communicator._Wait(_Forgotten(), lost).wait()  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_islands_sum_several_chunks_in_one_launch(dtype: str) -> None:
    store, lost = communicator.store_at("127.0.0.1"), threading.Event()

    def island(rank: int) -> list[torch.Tensor]:
        at = ("127.0.0.1", store.port)
        group = communicator.connect(at, dtype, (rank, 2), "127.0.0.1", datetime.timedelta(seconds=10))
        chunks = [torch.full((numel,), rank + 1.0) for numel in (3, 5)]
        under_way = GroupExchange(communicator._Guarded(group, lost), CODECS[dtype]).sum(chunks)
        under_way.advance()
        under_way.finish()
        return chunks

    with futures.ThreadPoolExecutor() as islands:
        for chunks in islands.map(island, range(2)):
            assert all(torch.allclose(chunk, torch.tensor(3.0), rtol=0.01) for chunk in chunks)
