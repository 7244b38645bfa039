"""``doctor``: what decides which network the nodes of a job meet on."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from pier_megatron.commands.findings import Findings

# What decides between nodes whether NCCL and gloo find the fast network, and what happens when it does not.
_NETWORK = {
    "NCCL_SOCKET_IFNAME": "unset: NCCL chooses an interface; if nodes do not connect, export another one",
    "GLOO_SOCKET_IFNAME": "unset: gloo takes the interface of the host's name; if nodes do not connect, export another one",
    "NCCL_IB_HCA": "unset: NCCL uses all InfiniBand adapters; if some are for storage, export the names of the others",
}
# What decides how fast NCCL is over sockets.
_SOCKETS = {
    "NCCL_SOCKET_NTHREADS": "unset: one thread sends for each connection; NCCL advises 4 for 100 Gbit/s",
    "NCCL_NSOCKS_PERTHREAD": "unset: one socket per thread; 4 or more where one TCP stream does not fill the link, as over a "
    "long distance. Threads x sockets may be 64",
}
_ROUTES, _INTERFACES, _ADAPTERS = (Path(path) for path in ("/proc/net/route", "/sys/class/net", "/sys/class/infiniband"))
_EVERYWHERE = "00000000"


def look(findings: Findings, nodes: int, island: str | None) -> None:
    """Says which network this node will use, and warns of a slow one.

    Args:
        findings: Findings to add to.
        nodes: Number of nodes of the job.
        island: ``--pier-island-address``, if the job is an elastic island.
    """
    over_sockets = os.environ.get("NCCL_IB_DISABLE") == "1"
    if nodes > 1:
        shown = _NETWORK | (_SOCKETS if over_sockets else {})
        findings.notes += [
            f"{name}={os.environ[name]}" if name in os.environ else f"{name} {default}" for name, default in shown.items()
        ]
        if over_sockets:
            findings.warnings.append("NCCL_IB_DISABLE=1 keeps NCCL off InfiniBand: everything between nodes goes over sockets")
    of_addresses = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    what, used = "unless GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are set, nodes often meet by the default route, which", None
    if island is not None:
        what, used = f"--pier-island-address {island}", of_addresses.get(island)
    elif not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} <= os.environ.keys() and (over_sockets or not has_adapters()):
        used = default_route(_ROUTES.read_text() if _ROUTES.exists() else "")
    # Bridges of containers say how fast they are, too. Parts of a bond have no address.
    cards = {name for name in of_addresses.values() if (_INTERFACES / name / "device").exists()} | {used}
    stats = psutil.net_if_stats()
    findings.warnings += slow(what, used, {name: stats[name].speed for name in cards & stats.keys() if stats[name].isup})


def has_adapters() -> bool:
    """Whether this node has InfiniBand adapters: NCCL then sends nothing but its first words over an interface."""
    return _ADAPTERS.exists() and any(_ADAPTERS.iterdir())


def default_route(table: str) -> str | None:
    """The interface of the default route, by the kernel's table of routes; None if there is none."""
    rows = [line.split() for line in table.splitlines()[1:]]
    # A VPN adds routes to both halves of all addresses: one of them begins at 0.0.0.0, too, but its mask has a bit.
    return next((row[0] for row in rows if row[1] == row[7] == _EVERYWHERE), None)


def slow(what: str, interface: str | None, speeds: Mapping[str, int]) -> list[str]:
    """Warns if another interface of this node is faster than the one in use.

    Args:
        what: What decides on the interface.
        interface: The one in use; None if it is unknown.
        speeds: Mbit/s of the interfaces that are up; not above 0 where one does not say.
    """
    own = speeds.get(interface or "", 0)
    fastest = max(speeds, key=lambda name: speeds[name], default="")
    if own <= 0 or own >= speeds[fastest]:
        return []
    return [
        f"{what} leads over {interface} with {own:,} Mbit/s, but {fastest} of this node has {speeds[fastest]:,}. "
        "If the other nodes can be reached over it, name it."
    ]
