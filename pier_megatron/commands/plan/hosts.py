"""Unequal nodes and links of a cluster's file: their names, sites and speeds, and what lies between two sites."""

import argparse
import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path

from pier_megatron.errors import suggestion
from pier_megatron.values import Number, positive

_GB, _MS = 1e9, 1e-3


@dataclasses.dataclass(frozen=True)
class Host:
    """A node, in the order of the job's ranks.

    Attributes:
        name: Name of the node.
        site: Name of the place where it is.
        speed: How fast its GPUs compute, as a multiple of the cluster's TFLOP/s.
    """

    name: str
    site: str
    speed: float = 1.0


@dataclasses.dataclass(frozen=True)
class SiteLink:
    """What lies between two sites, for one message at a time.

    Attributes:
        bandwidth: Bytes per second.
        latency: Seconds of a message.
    """

    bandwidth: float
    latency: float = 0.0


type SiteLinks = Mapping[frozenset[str], SiteLink]


def read_hosts(path: Path, entries: dict[str, object]) -> tuple[tuple[Host, ...], SiteLinks]:
    """Takes ``nodes`` and ``links`` out of the entries of a cluster's file.

    Args:
        path: The file, for messages.
        entries: Its content.

    Raises:
        argparse.ArgumentTypeError: If they describe no nodes, or no links between them.
    """
    nodes, links = entries.pop("nodes", None), entries.pop("links", None)
    hosts = tuple(_host(f"{path}: nodes: {index}", node) for index, node in enumerate(_list(path, "nodes", nodes)))
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{path}: nodes: a name comes twice: {', '.join(sorted(names))}")
    pairs = [_link(f"{path}: links: {index}", link) for index, link in enumerate(_list(path, "links", links))]
    found = dict(pairs)
    if len(found) < len(pairs):
        raise argparse.ArgumentTypeError(f"{path}: links: a pair of sites comes twice")
    sites = sorted({host.site for host in hosts})
    unknown = sorted(set().union(*found) - set(sites))
    if unknown:
        raise argparse.ArgumentTypeError(f"{path}: links: no node is at {unknown[0]}{suggestion(unknown[0], sites) or '.'}")
    missing = [pair for pair in itertools.combinations(sites, 2) if frozenset(pair) not in found]
    if missing and "site-bandwidth" not in entries:
        raise argparse.ArgumentTypeError(
            f"{path}: links: nothing between {' and '.join(missing[0])}. Add it, or site-bandwidth for all that is not listed."
        )
    return hosts, found


def _list(path: Path, key: str, given: object) -> list[object]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise argparse.ArgumentTypeError(f"{path}: {key}: must be a list")
    return given


def _host(where: str, node: object) -> Host:
    values = _mapping(where, node, {"name", "site", "speed"}, {"name"})
    speed = _figure(where, "speed", values.get("speed", 1), positive(1e3))
    return Host(_text(where, "name", values["name"]), _text(where, "site", values.get("site", "")), speed)


def _link(where: str, link: object) -> tuple[frozenset[str], SiteLink]:
    values = _mapping(where, link, {"sites", "bandwidth", "latency"}, {"sites", "bandwidth"})
    sites = values["sites"]
    if not isinstance(sites, list) or len(sites) != 2 or sites[0] == sites[1]:
        raise argparse.ArgumentTypeError(f"{where}: sites: must be two, as in [east, west]")
    bandwidth = _figure(where, "bandwidth", values["bandwidth"], positive(1e6)) * _GB
    latency = _figure(where, "latency", values.get("latency", 0), Number(float, 0.0, 1e6)) * _MS
    return frozenset(_text(where, "sites", site) for site in sites), SiteLink(bandwidth, latency)


def _mapping(where: str, given: object, known: set[str], needed: set[str]) -> dict[str, object]:
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"{where}: must be {{{', '.join(sorted(known))}}}")
    for key in given:
        if key not in known:
            raise argparse.ArgumentTypeError(f"{where}: {key}: no such key{suggestion(str(key), known) or '.'}")
    for key in sorted(needed - given.keys()):
        raise argparse.ArgumentTypeError(f"{where}: {key} missing")
    return given


def _text(where: str, key: str, given: object) -> str:
    # YAML makes numbers of names such as 1, and truth values of on and off.
    if type(given) not in (str, int):
        raise argparse.ArgumentTypeError(f"{where}: {key}: {given} is no name; put quotes around it")
    return str(given)


def _figure(where: str, key: str, given: object, kind: Number) -> float:
    try:
        return float(kind(str(given)))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{where}: {key}: {error}") from None
