"""What decides which network the nodes of a job use, and how fast NCCL is over sockets."""

import os

from pier_megatron.commands.findings import Findings

_NETWORK = {
    "NCCL_SOCKET_IFNAME": "unset: NCCL chooses an interface; if nodes do not connect, export another one",
    "GLOO_SOCKET_IFNAME": "unset: gloo takes the interface of the host's name; if nodes do not connect, export another one",
    "NCCL_IB_HCA": "unset: NCCL uses all InfiniBand adapters; if some are for storage, export the names of the others",
}
_SOCKETS = {
    "NCCL_SOCKET_NTHREADS": "unset: one thread sends for each connection; NCCL advises 4 for 100 Gbit/s",
    "NCCL_NSOCKS_PERTHREAD": "unset: one socket per thread; 4 or more where one TCP stream does not fill the link, as over a "
    "long distance. Threads x sockets may be 64",
}


def look(findings: Findings) -> None:
    """Reports the variables that a job between nodes finds here."""
    over_sockets = os.environ.get("NCCL_IB_DISABLE") == "1"
    shown = _NETWORK | (_SOCKETS if over_sockets else {})
    findings.notes += [
        f"{name}={os.environ[name]}" if name in os.environ else f"{name} {default}" for name, default in shown.items()
    ]
    if over_sockets:
        findings.warnings.append("NCCL_IB_DISABLE=1 keeps NCCL off InfiniBand: everything between nodes goes over sockets")
