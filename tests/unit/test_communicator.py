"""Where the communicator between islands listens, and how long somebody waits in it."""

import datetime
import itertools
import time

import pytest
import torch.distributed as dist

from pier_megatron.exchange import communicator


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
