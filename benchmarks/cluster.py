"""Emulated nodes on one Linux machine: a network namespace each, joined by a switch over links of a chosen rate."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

INTERFACE = "eth0"
"""Name of each node's link, inside its namespace."""

_PREFIX = "pierbench"
_SWITCH = f"{_PREFIX}-switch"


class Cluster:
    """Nodes that live as long as the ``with`` block.

    Attributes:
        size: Number of nodes.
    """

    def __init__(self, size: int) -> None:
        """Plans a cluster.

        Args:
            size: Number of nodes.

        Raises:
            PermissionError: If this process may not make network namespaces.
            FileNotFoundError: If the tools for it are missing.
        """
        missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
        if missing:
            raise FileNotFoundError(
                f"{' and '.join(missing)} not found: install iproute2 and util-linux for the emulated network."
            )
        if os.geteuid() != 0:
            raise PermissionError("Network namespaces need root: run `sudo make bench`, or in a container as root.")
        self.size = size

    def __enter__(self) -> "Cluster":
        self._remove()
        _run("ip netns add", _SWITCH)
        _run(f"ip -n {_SWITCH} link add bridge type bridge")
        _run(f"ip -n {_SWITCH} link set bridge up")
        for node in range(self.size):
            name, port = self._namespace(node), f"port{node}"
            _run("ip netns add", name)
            _run(f"ip link add {INTERFACE} netns {name} type veth peer name {port} netns {_SWITCH}")
            _run(f"ip -n {_SWITCH} link set {port} master bridge up")
            _run(f"ip -n {name} address add {self.address(node)}/24 dev {INTERFACE}")
            _run(f"ip -n {name} link set {INTERFACE} up")
            _run(f"ip -n {name} link set lo up")
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _remove(self) -> None:
        present = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
        for name in present:
            if name.startswith(_PREFIX):
                _run("ip netns delete", name)

    @staticmethod
    def _namespace(node: int) -> str:
        return f"{_PREFIX}-{node}"

    @staticmethod
    def address(node: int) -> str:
        """Address of a node on the switch."""
        return f"10.199.0.{node + 1}"

    def set_rate(self, megabits: float | None) -> None:
        """Limits every link in both directions; None takes the limit off."""
        for node in range(self.size):
            for namespace, device in ((self._namespace(node), INTERFACE), (_SWITCH, f"port{node}")):
                with contextlib.suppress(subprocess.CalledProcessError):  # There may be no limit to take off.
                    _run(f"tc -n {namespace} qdisc delete dev {device} root")
                if megabits is not None:
                    # Bursts of some 5 ms, but of two packets as TCP hands them over: longer ones the kernel would cut up, at
                    # the cost of the cores that train. And room for a window of TCP in the queue.
                    burst = max(int(megabits * 1e6 / 8 * 0.005), 2 * 65_536)
                    limit = max(int(megabits * 1e6 / 8 * 0.4), 1_000_000)
                    _run(f"tc -n {namespace} qdisc add dev {device} root tbf rate {megabits}mbit burst {burst} limit {limit}")

    @contextlib.contextmanager
    def start(
        self, node: int, command: Sequence[str], log: IO[str], environment: Mapping[str, str]
    ) -> Iterator["subprocess.Popen[str]"]:
        """Runs a command on a node while the ``with`` block lasts."""
        process = subprocess.Popen(
            # Nodes do not take each other's cores, as far as there are enough.
            ["ip", "netns", "exec", self._namespace(node), "taskset", "-c", str(node % (os.cpu_count() or 1)), *command],
            env=os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE} | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()


def sent_bytes() -> int:
    """Bytes that the node of this process has sent over its link, packet headers included."""
    path = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    return int(path.read_text()) if path.exists() else 0


def _run(command: str, *arguments: str) -> None:
    subprocess.run([*command.split(), *arguments], check=True, capture_output=True)
