"""Emulated nodes on one Linux machine: a network namespace each, joined by a switch over links of a chosen rate.

Namespaces have no names and live in processes, so nothing is left behind, however the program that made them ends.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

from pier_megatron.processes import running

INTERFACE = "eth0"
"""Name of each node's link, inside its namespace."""


class NoNetworkError(RuntimeError):
    """This machine cannot, or may not, emulate a network; the text says why and what would help."""


class EmulatedNodes:
    """Nodes that live as long as the ``with`` block.

    Attributes:
        size: Number of nodes.
    """

    def __init__(self, size: int) -> None:
        """Plans ``size`` nodes."""
        self.size = size
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "EmulatedNodes":
        """Makes the nodes.

        Raises:
            NoNetworkError: If tools are missing, or this process may make no namespaces or links.
        """
        if sys.platform != "linux":
            raise NoNetworkError("network namespaces are Linux's")
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise NoNetworkError(f"{' and '.join(missing)} not found: install iproute2")
        try:
            self._hold()
            self._at_switch("ip link add name bridge type bridge")
            self._at_switch("ip link set bridge up")
            for node in range(self.size):
                holder, port = self._hold(self._switch), f"port{node}"
                self._at_switch(f"ip link add name {INTERFACE} netns {holder} type veth peer name {port}")
                self._at_switch(f"ip link set {port} master bridge up")
                _run(f"ip address add {self.address(node)}/24 dev {INTERFACE}", holder)
                for device in (INTERFACE, "lo"):
                    _run(f"ip link set {device} up", holder)
        except subprocess.SubprocessError as error:
            self.__exit__()
            # What fails before a program is there has no text.
            said = f"{error} {error.stderr.strip()}" if isinstance(error, subprocess.CalledProcessError) else "unshare failed."
            raise NoNetworkError(
                f"{said} It needs root or user namespaces (sysctl kernel.unprivileged_userns_clone, "
                "user.max_user_namespaces), in a container --cap-add SYS_ADMIN,NET_ADMIN"
            ) from error
        return self

    def __exit__(self, *error: object) -> None:
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        self._holders = []

    @property
    def _switch(self) -> int:
        return self._holders[0].pid

    def _hold(self, *of: int) -> int:
        # It ends with its standard input, hence with this process. In a separate session: Ctrl-C is for this one.
        leave = functools.partial(_leave, *of)
        holder = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True, preexec_fn=leave)
        self._holders.append(holder)
        return holder.pid

    def _at_switch(self, command: str) -> None:
        _run(command, self._switch)

    @staticmethod
    def address(node: int) -> str:
        """Address of a node on the switch."""
        return f"10.199.0.{node + 1}"

    def set_rate(self, megabits: float | None, nodes: Collection[int] | None = None) -> None:
        """Limits the links of some nodes, by default of all, in both directions; None takes the limit off.

        What is on its way stays on its way.
        """
        for node, holder in enumerate(self._holders[1:]):
            for place, device in ((holder.pid, INTERFACE), (self._switch, f"port{node}")):
                if nodes is not None and node not in nodes:
                    continue
                if megabits is None:
                    with contextlib.suppress(subprocess.CalledProcessError):  # There may be no limit to take off.
                        _run(f"tc qdisc delete dev {device} root", place)
                    continue
                # A burst is what the link sends in 5 ms, but at least two of TCP's segments: the kernel would split longer
                # segments on the cores that train. The queue holds a window of TCP.
                burst = max(int(megabits * 1e6 / 8 * 0.005), 2 * 65_536)
                limit = max(int(megabits * 1e6 / 8 * 0.4), 1_000_000)
                _run(f"tc qdisc replace dev {device} root tbf rate {megabits}mbit burst {burst} limit {limit}", place)

    def set_links(self, up: bool, nodes: Collection[int] | None = None) -> None:
        """Cuts the links of some nodes, by default of all, or mends them.

        Connections stay open, and what is sent meanwhile is lost.
        """
        for node in range(self.size) if nodes is None else nodes:
            self._at_switch(f"ip link set port{node} {'up' if up else 'down'}")

    def running_on(self, node: int) -> Callable[..., contextlib.AbstractContextManager["subprocess.Popen[str]"]]:
        """Runs a process on a node, like :func:`running`."""
        before = functools.partial(_settle, self._holders[1 + node].pid, node)

        def start(
            command: Sequence[str], log: IO[str], environment: Mapping[str, str]
        ) -> contextlib.AbstractContextManager["subprocess.Popen[str]"]:
            return running(command, log, {"GLOO_SOCKET_IFNAME": INTERFACE, **environment}, before)

        return start


def sent_bytes() -> int:
    """Bytes that the node of this process has sent over its link, packet headers included; 0 outside of all nodes."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return 0


def enter(holder: int) -> None:
    """Moves this process, which must have one thread, into the namespaces of another one."""
    for kind in ("user", "net"):
        path = f"/proc/{holder}/ns/{kind}"
        if os.stat(path).st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino:
            continue
        descriptor = os.open(path, os.O_RDONLY)
        os.setns(descriptor)
        os.close(descriptor)


def _leave(*of: int) -> None:
    """Moves this process into a network namespace of its own; without root it becomes root of a user namespace for that.

    With the PID of another holder the namespace is made in that one's user namespace.
    """
    for holder in of:
        enter(holder)
    try:
        os.unshare(os.CLONE_NEWNET)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(content)


def _settle(holder: int, node: int) -> None:
    enter(holder)
    # Nodes do not take each other's cores, as far as there are enough.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[node % len(cores)]})


def _run(command: str, holder: int) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True, preexec_fn=functools.partial(enter, holder))
