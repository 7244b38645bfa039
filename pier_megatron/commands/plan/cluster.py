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


_MOST = 1e6
_POSITIVE, _NOT_NEGATIVE = positive(_MOST), Number(float, 0.0, _MOST)
# Above what any data sheet promises, in FP4 too.
_TFLOPS = positive(2e4, "it is that of one GPU, not of all")


def _figure(key: str, unit: float, kind: Number, metavar: str, help: str, default: Any = dataclasses.MISSING) -> Any:
    """A field that is a key of a cluster's file and a flag of the same name, both in a multiple of the field's unit."""
    metadata = {"key": key, "unit": unit, "type": kind, "metavar": metavar, "help": help}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where a job runs, in bytes, seconds, operations and bytes per second; a file needs what has no default.

    Attributes:
        overhead: Seconds of every iteration besides compute.
        overhead_per_parameter: Seconds of every iteration per parameter whose optimizer state a GPU holds.
        is_of_data_sheets: Whether the links' figures follow from data sheets, rather than from measurements or their user.
    """

    gpus_per_node: int = _figure("gpus-per-node", 1, whole(1, _MOST), "N", "number of GPUs of a node")
    memory: float = _figure("memory", 1e9, _POSITIVE, "GB", "memory of a GPU")
    flops: float = _figure("tflops", 1e12, _TFLOPS, "TFLOP/S", "rate that a GPU achieves on this model, measured on one group")
    node_bandwidth: float = _figure("node-bandwidth", 1e9, _POSITIVE, "GB/S", "rate of a node in an all-reduce between nodes")
    gpu_bandwidth: float = _figure("gpu-bandwidth", 1e9, _POSITIVE, "GB/S", "rate of a GPU in an all-reduce inside a node")
    memory_bandwidth: float = _figure("memory-bandwidth", 1e9, _POSITIVE, "GB/S", "bandwidth of a GPU's memory", 2e12)
    host_bandwidth: float = _figure(
        "host-bandwidth",
        1e9,
        _POSITIVE,
        "GB/S",
        "rate at which a GPU copies from pinned host memory, and as much to it, while all GPUs of its node do",
        20e9,
    )
    overhead: float = 0.015
    overhead_per_parameter: float = 0.0
    latency: float = _figure("latency", 1e-3, _NOT_NEGATIVE, "MS", "latency of a message between nodes", 10e-6)
    is_of_data_sheets: bool = False
    efficiency: float = _figure(
        "efficiency",
        1,
        positive(1.0),
        "SHARE",
        f"share of node and site bandwidth that an exchange achieves: 1 for measured rates, {TCP_EFFICIENCY} for TCP at a "
        "link's rate, which a file's default is",
        1.0,
    )
    nodes_per_site: int = _figure(
        "nodes-per-site", 1, whole(1, _MOST), "N", "number of nodes of a site, where a job spans sites", 0
    )
    site_bandwidth: float = _figure("site-bandwidth", 1e9, _POSITIVE, "GB/S", "rate at which a site sends to others", 0.0)
    site_latency: float = _figure("site-latency", 1e-3, _NOT_NEGATIVE, "MS", "latency of a message between sites", 0.0)

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


FIGURES = tuple(field for field in dataclasses.fields(Cluster) if field.metadata)
"""Fields of a cluster that are keys and flags."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--cluster`` and a flag for each figure."""
    parser.add_argument(
        "--cluster",
        type=named_or_file,
        metavar="NAME|FILE",
        help=f"where the job runs (needed): {', '.join(CLUSTERS)}, or a file such as {_EXAMPLE}",
    )
    _add_figures(parser)


def _add_figures(parser: argparse.ArgumentParser) -> None:
    for figure in FIGURES:
        options = {name: figure.metadata[name] for name in ("type", "metavar", "help")}
        parser.add_argument(f"--{figure.metadata['key']}", dest=figure.name, **options)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Fields that are given, in their own units."""
    given = {figure: getattr(options, figure.name) for figure in FIGURES}
    return {figure.name: value * figure.metadata["unit"] for figure, value in given.items() if value is not None}


def chosen(options: argparse.Namespace) -> Cluster:
    """The cluster of ``--cluster``, with the figures that other flags override.

    Raises:
        argparse.ArgumentTypeError: If none is given, or sites are described by halves.
    """
    if options.cluster is None:
        # Not by argparse, which would say so of a misspelt flag.
        raise argparse.ArgumentTypeError(f"cluster: not given. Name {', '.join(CLUSTERS)}, or a file such as {_EXAMPLE}")
    changed = _given(options)
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
    """Reads a file, whose lines are the flags without their dashes."""
    import yaml

    try:
        entries = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        # A day that no calendar has is a ValueError in PyYAML.
        raise argparse.ArgumentTypeError(f"{path}: no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict):
        raise argparse.ArgumentTypeError(f"{path}: must be lines of KEY: NUMBER, such as {_EXAMPLE}")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_figures(parser)
    try:
        options, unknown = parser.parse_known_args([f"--{key}={value}" for key, value in entries.items()])
    except argparse.ArgumentError as error:
        raise argparse.ArgumentTypeError(f"{path}: {str(error).removeprefix('argument --')}") from None
    if unknown:
        key, known = unknown[0].removeprefix("--").partition("=")[0], [figure.metadata["key"] for figure in FIGURES]
        why = f"no such key{suggestion(key, known) or '.'} Known: {', '.join(known)}"
        if key in ("nodes", "links"):
            why = f"plan knows equal nodes only; {ROUTES}"
        raise argparse.ArgumentTypeError(f"{path}: {key}: {why}")
    needed = [figure for figure in FIGURES if figure.default is dataclasses.MISSING]
    if missing := [figure.metadata["key"] for figure in needed if getattr(options, figure.name) is None]:
        raise argparse.ArgumentTypeError(f"{path}: {', '.join(missing)} missing; see {_EXAMPLE}")
    return _checked(Cluster(**{"efficiency": TCP_EFFICIENCY} | _given(options)), f"{path}: ")


def _checked(cluster: Cluster, where: str = "") -> Cluster:
    names = {"nodes-per-site": cluster.nodes_per_site, "site-bandwidth": cluster.site_bandwidth}
    given = [name for name, value in names.items() if value]
    if len(given) == 1:
        [missing] = names.keys() - given
        raise argparse.ArgumentTypeError(f"{where}{given[0]} without {missing}: give both, or neither for one site")
    return cluster
