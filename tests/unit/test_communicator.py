"""Where the communicator between islands listens, and how long somebody waits in it."""

import datetime
import threading
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
