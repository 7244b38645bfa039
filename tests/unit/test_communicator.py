"""Where the communicator between islands listens."""

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
