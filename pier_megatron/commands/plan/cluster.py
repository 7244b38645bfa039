"""Where a job runs: a cluster by name or from a file of a few lines, with figures that flags override."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from pier_megatron.errors import suggestion
from pier_megatron.values import Number, existing_file, positive, whole

TCP_EFFICIENCY = 0.91
"""Share of a shaped link's rate that a blocking FP32 exchange over TCP achieves, median of docs/performance.md."""

FLOPS_SPREAD = (0.33, 1.64)
"""Lowest and highest TFLOP/s of published runs, as multiples of their cluster's figure: tools/planner_accuracy.py."""

LINK_SPREAD = (0.62, 1.32)
"""Lowest and highest rate of published gradient reductions, as multiples of the predicted rate, with measured TFLOP/s."""

ROUTES = "python examples/skip_routes.py searches routes over unequal ones"
"""What took the place of ``--routes``, and of ``nodes`` and ``links`` in a cluster's file."""

_EXAMPLE = "examples/cluster.yaml"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where a job runs.

    Attributes:
        gpus_per_node: Number of GPUs of a node.
        memory: Memory of a GPU, in bytes.
        flops: Operations per second of a GPU in training; a job's own figure is better.
        node_bandwidth: Bytes per second that a node sends over the network.
        gpu_bandwidth: Bytes per second that a GPU sends in an all-reduce inside a node.
        memory_bandwidth: Bytes per second of a GPU's memory.
        host_bandwidth: Bytes per second that a GPU copies from pinned host memory, and as many to it at the same time, while
            all GPUs of its node do.
        overhead: Seconds of every iteration besides compute.
        overhead_per_parameter: Seconds of every iteration per parameter whose optimizer state a GPU holds.
        latency: Seconds of a message between nodes.
        is_of_data_sheets: Whether the links' figures follow from data sheets, rather than from measurements or their user.
        efficiency: Share of the node's and the site's bandwidth that an exchange achieves.
        nodes_per_site: Number of nodes of a site; 0 where all nodes share one network.
        site_bandwidth: Bytes per second that a site sends to others.
        site_latency: Seconds of a message between sites.
    """

    gpus_per_node: int
    memory: float
    flops: float
    node_bandwidth: float
    gpu_bandwidth: float
    memory_bandwidth: float = 2e12
    host_bandwidth: float = 20e9
    overhead: float = 0.015
    overhead_per_parameter: float = 0.0
    latency: float = 10e-6
    is_of_data_sheets: bool = False
    efficiency: float = 1.0
    nodes_per_site: int = 0
    site_bandwidth: float = 0.0
    site_latency: float = 0.0

    @property
    def node_rate(self) -> float:
        """Bytes per second that a node's exchange achieves."""
        return self.node_bandwidth * self.efficiency

    @property
    def site_rate(self) -> float:
        """Bytes per second that a site's exchange achieves."""
        return self.site_bandwidth * self.efficiency

    def spread(self, is_measured: bool) -> tuple["Cluster", "Cluster"]:
        """The cluster at which Pier wins least, and the one at which it wins most, by what published runs achieved.

        The less compute and the slower the link, the larger is what Pier saves. ``is_measured`` says that the TFLOP/s are the
        job's own.
        """
        slow, fast = (
            dataclasses.replace(
                self,
                flops=self.flops * (1.0 if is_measured else flops),
                node_bandwidth=self.node_bandwidth * links,
                site_bandwidth=self.site_bandwidth * links,
            )
            for flops, links in zip(FLOPS_SPREAD, reversed(LINK_SPREAD), strict=True)
        )
        return slow, fast

    def sites(self, gpus: int) -> int:
        """Number of sites that ``gpus`` neighbouring GPUs spread over."""
        return -(-gpus // (self.nodes_per_site * self.gpus_per_node)) if self.nodes_per_site else 1


# Bandwidths of the first two are fitted, see tools/planner_accuracy.py, and are what is achieved; nodes of the others send
# 80 % of what an adapter of 400 Gbit/s per GPU could. The A100 machine's TFLOP/s are the median of six published layouts.
# Bandwidths of the host are not fitted: docs/planner.md has their sources.
CLUSTERS = {
    "perlmutter": Cluster(4, 40e9, 90e12, 5.0e9, 30e9, 1.5e12, 20e9, 0.015, 0.12e-9),
    "vista": Cluster(1, 96e9, 430e12, 41.4e9, 360e9, 3.6e12, 250e9, 0.015, 0.03e-9),
    "dgx-h100": Cluster(8, 80e9, 400e12, 320e9, 360e9, 3.3e12, 40e9, 0.015, 0.03e-9, is_of_data_sheets=True),
    "dgx-h200": Cluster(8, 141e9, 400e12, 320e9, 360e9, 4.8e12, 40e9, 0.015, 0.03e-9, is_of_data_sheets=True),
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of a cluster: a key of its file and a flag of the same name.

    Attributes:
        key: Name in the file; the flag is ``--`` and the key.
        field: Attribute of :class:`Cluster`.
        unit: Multiple of the attribute's own unit.
        kind: Accepted numbers.
        metavar: Unit in the help text.
        help: Explanation.
    """

    key: str
    field: str
    unit: float
    kind: Number
    metavar: str
    help: str


_MOST = 1e6
_POSITIVE, _NOT_NEGATIVE = positive(_MOST), Number(float, 0.0, _MOST)
FIGURES = (
    Figure("gpus-per-node", "gpus_per_node", 1, whole(1, _MOST), "N", "number of GPUs of a node"),
    Figure("memory", "memory", 1e9, _POSITIVE, "GB", "memory of a GPU"),
    Figure("tflops", "flops", 1e12, _POSITIVE, "TFLOP/S", "rate that a GPU achieves on this model, measured on one group"),
    Figure("gpu-bandwidth", "gpu_bandwidth", 1e9, _POSITIVE, "GB/S", "rate of a GPU in an all-reduce inside a node"),
    Figure("node-bandwidth", "node_bandwidth", 1e9, _POSITIVE, "GB/S", "rate of a node in an all-reduce between nodes"),
    Figure("latency", "latency", 1e-3, _NOT_NEGATIVE, "MS", "latency of a message between nodes"),
    Figure("nodes-per-site", "nodes_per_site", 1, whole(1, _MOST), "N", "number of nodes of a site, where a job spans sites"),
    Figure("site-bandwidth", "site_bandwidth", 1e9, _POSITIVE, "GB/S", "rate at which a site sends to others"),
    Figure("site-latency", "site_latency", 1e-3, _NOT_NEGATIVE, "MS", "latency of a message between sites"),
    Figure(
        "efficiency",
        "efficiency",
        1,
        positive(1.0),
        "SHARE",
        f"share of node and site bandwidth that an exchange achieves: 1 for measured rates, {TCP_EFFICIENCY} for TCP at a "
        "link's rate, which a file's default is",
    ),
    Figure("memory-bandwidth", "memory_bandwidth", 1e9, _POSITIVE, "GB/S", "bandwidth of a GPU's memory"),
    Figure(
        "host-bandwidth",
        "host_bandwidth",
        1e9,
        _POSITIVE,
        "GB/S",
        "rate at which a GPU copies from pinned host memory, and as much to it, while all GPUs of its node do",
    ),
)

_NEEDED = ("gpus-per-node", "memory", "tflops", "gpu-bandwidth", "node-bandwidth")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--cluster`` and a flag for each figure."""
    parser.add_argument(
        "--cluster",
        type=named_or_file,
        required=True,
        metavar="NAME|FILE",
        help=f"where the job runs: {', '.join(CLUSTERS)}, or a file such as {_EXAMPLE}",
    )
    for figure in FIGURES:
        parser.add_argument(f"--{figure.key}", type=figure.kind, metavar=figure.metavar, help=figure.help)


def chosen(options: argparse.Namespace) -> Cluster:
    """The cluster of ``--cluster``, with the figures that other flags override.

    Raises:
        argparse.ArgumentTypeError: If sites are described by halves.
    """
    given = {figure: getattr(options, figure.key.replace("-", "_")) for figure in FIGURES}
    changed = {figure.field: value * figure.unit for figure, value in given.items() if value is not None}
    if "node_bandwidth" in changed:
        changed["is_of_data_sheets"] = False
    return _checked(dataclasses.replace(options.cluster, **changed))


def named_or_file(text: str) -> Cluster:
    """The cluster of this name, or of the file at this path, as the ``type`` of an argparse argument.

    Raises:
        argparse.ArgumentTypeError: If there is neither, or the file does not describe a cluster.
    """
    if text in CLUSTERS:
        return CLUSTERS[text]
    try:
        path = existing_file(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}, and no cluster of that name ({', '.join(CLUSTERS)}){suggestion(text, CLUSTERS) or '.'} A file of your "
            f"own looks like {_EXAMPLE}."
        ) from None
    return _of_file(path)


def _of_file(path: Path) -> Cluster:
    import yaml

    try:
        entries = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        # A day that no calendar has is a ValueError in PyYAML.
        raise argparse.ArgumentTypeError(f"{path}: no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict):
        raise argparse.ArgumentTypeError(f"{path}: must be lines of KEY: NUMBER, such as {_EXAMPLE}")
    known = {figure.key: figure for figure in FIGURES}
    values: dict[str, Any] = {"efficiency": TCP_EFFICIENCY}
    for key, value in entries.items():
        if key in ("nodes", "links"):
            raise argparse.ArgumentTypeError(f"{path}: {key}: plan knows equal nodes only; {ROUTES}")
        if key not in known:
            raise argparse.ArgumentTypeError(
                f"{path}: {key}: no such key{suggestion(str(key), known) or '.'} Known: {', '.join(known)}."
            )
        try:
            values[known[key].field] = known[key].kind(str(value)) * known[key].unit
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{path}: {key}: {error}") from None
    missing = [key for key in _NEEDED if key not in entries]
    if missing:
        raise argparse.ArgumentTypeError(f"{path}: {', '.join(missing)} missing; see {_EXAMPLE}")
    return _checked(Cluster(**values), f"{path}: ")


def _checked(cluster: Cluster, where: str = "") -> Cluster:
    names = {"nodes-per-site": cluster.nodes_per_site, "site-bandwidth": cluster.site_bandwidth}
    given = [name for name, value in names.items() if value]
    if len(given) == 1:
        [missing] = names.keys() - given
        raise argparse.ArgumentTypeError(f"{where}{given[0]} without {missing}: give both, or neither for one site")
    return cluster
