"""``pier-megatron plan --routes``: searches the routes of a job on its nodes, and writes them for ``--pier-skip-routes``."""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.hosts import Host, SiteLink
from pier_megatron.commands.plan.model import Job, Plan, predict
from pier_megatron.commands.plan.skipping_gain import ACTIVATION
from pier_megatron.errors import PierConfigError
from pier_megatron.pipeline.play import Grid, Link, play
from pier_megatron.pipeline.routes import MicroBatch, Routes, plain
from pier_megatron.pipeline.search import Wishes, search
from pier_megatron.values import file_to_write, whole


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the command line asks for.

    Attributes:
        file: File for the routes.
        held: Micro-batches whose activations a rank may keep; None for as many as Megatron's first stage does.
        stays: Whether a micro-batch stays in its replica.
        keeps_order: Whether stages come in the order of the layers.
        places: Whether nodes may change places.
    """

    file: Path
    held: int | None
    stays: bool
    keeps_order: bool
    places: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of routes."""
    parser.add_argument(
        "--routes",
        type=file_to_write,
        metavar="FILE",
        help="search routes for the job's --pier-skip-fraction on the cluster's nodes and links, and write them for "
        "--pier-skip-routes",
    )
    parser.add_argument(
        "--held",
        type=whole(1),
        metavar="N",
        help="with --routes: micro-batches whose activations a rank may keep at once (default: the pipeline's ranks)",
    )
    parser.add_argument("--stay", action="store_true", help="with --routes: micro-batches stay in their replica")
    parser.add_argument("--in-order", action="store_true", help="with --routes: no stages are swapped")
    parser.add_argument(
        "--place", action="store_true", help="with --routes: nodes may change places; prints the order in which to start them"
    )


def wanted_of(options: argparse.Namespace) -> Wanted | None:
    """What the command line asks for; None if for no routes.

    Raises:
        PierConfigError: If flags of routes stand without them.
    """
    given = {"--held": options.held, "--stay": options.stay, "--in-order": options.in_order, "--place": options.place}
    if options.routes is None:
        alone = [name for name, value in given.items() if value]
        if alone:
            raise PierConfigError(f"{alone[0]} says how routes are searched: it needs --routes FILE.")
        return None
    return Wanted(options.routes, options.held, options.stay, options.in_order, options.place)


def make(args: argparse.Namespace, job: Job, cluster: Cluster, wanted: Wanted) -> Plan:
    """Searches routes, and writes them.

    Args:
        args: Megatron's, validated; ``--pier-skip-fraction`` among them.
        job: Their sizes.
        cluster: Cluster on which it runs.
        wanted: What is asked for.

    Returns:
        Seconds of a simulated step that skips nothing, ``full``, that passes stages on, ``passed``, and by ``routes``; what
        there is to say of these.

    Raises:
        PierConfigError: If the job cannot go by routes, or its nodes are not those of the cluster.
    """
    from pier_megatron.features.skipping import feature as skipping
    from pier_megatron.features.skipping import routing
    from pier_megatron.megatron_api import batches

    if not skipping.is_skipping(args):
        raise PierConfigError(f"--routes {wanted.file}: how much shall be skipped? Give the job --pier-skip-fraction.")
    routing.check_job(argparse.Namespace(**vars(args) | {"pier_skip_fraction": None}))
    counts = sorted(set(batches.training_phases(args).values()))
    if len(counts) > 1:
        raise PierConfigError(
            f"--routes {wanted.file}: routes are for one number of micro-batches, and the job's batch ramps up: its steps have "
            f"{', '.join(map(str, counts))} of a replica. Plan a job without the ramp-up."
        )
    [micro_batches] = counts
    layout = _Layout(args, cluster)
    if wanted.places and layout.groups > 1:
        raise PierConfigError(
            f"--place orders the nodes of one group, and the job has {layout.groups}. Drop it, or plan a job of one group."
        )
    stages, replicas = layout.stages, layout.replicas
    grid = layout.grid(job, micro_batches)
    groups = [[replica] for replica in range(replicas)] if wanted.stays else [range(replicas)]
    wishes = Wishes(args.pier_skip_fraction, wanted.held or stages, may_swap=not wanted.keeps_order, may_move=wanted.places)
    found = search(grid, micro_batches, groups, wishes)
    names = layout.names(found.hosts) if layout.groups == 1 else ()
    routes = Routes(stages, replicas, micro_batches, found.played.held, found.paths, found.played.order, names)
    routes.check()
    wanted.file.parent.mkdir(parents=True, exist_ok=True)
    wanted.file.write_text(routes.text())
    skipped = skipping.paths(args, micro_batches).skipped
    passed = {(MicroBatch(replica, number), stage) for replica in range(replicas) for stage, number in skipped}
    passing = play(grid, plain(stages, replicas, micro_batches), stages, passed).seconds
    return _figures(routes, grid, str(wanted.file), found.played.seconds) | {
        "passed": passing,
        "hosts": names if wanted.places else (),
    }


def of_job(args: argparse.Namespace, job: Job, cluster: Cluster) -> Plan:
    """Says the same of the routes by which a job goes already, but for what ``passed`` and ``hosts`` are.

    Args:
        args: Megatron's, validated; ``--pier-skip-routes`` among them.
        job: Their sizes.
        cluster: Cluster on which it runs.

    Raises:
        PierConfigError: If the job's nodes are not those of the cluster.
    """
    from pier_megatron.features.skipping import routing

    routes = routing.read(args.pier_skip_routes)
    grid = _Layout(args, cluster).grid(job, routes.micro_batches)
    return _figures(routes, grid, args.pier_skip_routes, play(grid, routes.paths, routes.held).seconds)


def _figures(routes: Routes, grid: Grid, file: str, seconds: float) -> Plan:
    """What there is to say of routes in a file, with which a step takes so many seconds."""
    return {
        "file": file,
        "full": play(grid, plain(routes.stages, routes.replicas, routes.micro_batches), routes.stages).seconds,
        "routes": seconds,
        "fraction": routes.fraction,
        "swaps": routes.swaps,
        "crossings": routes.crossings,
        "held": routes.held,
        "hosts": (),
    }


def describe(routes: Plan) -> list[str]:
    """The same as lines."""
    passed = f"{routes['passed'] * 1e3:,.0f} ms with --pier-skip-fraction, " if "passed" in routes else ""
    lines = [
        f"a step, simulated: {routes['full'] * 1e3:,.0f} ms full, {passed}{routes['routes'] * 1e3:,.0f} ms with "
        f"--pier-skip-routes {routes['file']}{' in its place' if passed else ', which the figures of iterations leave out'} "
        f"({routes['fraction']:.1%} skipped, {routes['swaps']} swaps, {routes['crossings']} messages to other replicas, "
        f"activations of {routes['held']} micro-batches on a rank)"
    ]
    return lines + ([f"start the nodes in this order: {', '.join(routes['hosts'])}"] if routes["hosts"] else [])


class _Layout:
    """Which node a place of a group is on, and what lies between two."""

    def __init__(self, args: argparse.Namespace, cluster: Cluster) -> None:
        from pier_megatron.features.skipping import routing
        from pier_megatron.integration.planned_sizes import elements_of_message

        self._args, self._cluster = args, cluster
        self.stages, self.replicas = args.pipeline_model_parallel_size, routing.replicas_of_group(args)
        self._ranks_of_place = args.tensor_model_parallel_size * args.context_parallel_size
        self._of_rank = ACTIVATION * elements_of_message(args)
        # Arguments of an elastic island are of the whole run, but for its ranks.
        self._replicas_of_launch = args.world_size // (self._ranks_of_place * self.stages)
        self.groups = self._replicas_of_launch // self.replicas
        if cluster.hosts and cluster.gpus_per_node % self._ranks_of_place:
            raise PierConfigError(
                f"the cluster's file lists nodes, and a stage of a replica takes {args.tensor_model_parallel_size} "
                f"tensor-parallel x {args.context_parallel_size} context-parallel ranks = {self._ranks_of_place}, on nodes of "
                f"{cluster.gpus_per_node} GPUs: it would span nodes. Routes are for stages inside nodes."
            )
        nodes = math.ceil(args.world_size / cluster.gpus_per_node)
        if cluster.hosts and len(cluster.hosts) != nodes:
            raise PierConfigError(
                f"the cluster's file has {len(cluster.hosts)} nodes, and the job has {args.world_size} ranks on "
                f"{cluster.gpus_per_node} GPUs per node = {nodes}. List those of the job."
            )
        self.hosts = cluster.hosts or tuple(
            Host(f"node {node}", str(node // cluster.nodes_per_site) if cluster.nodes_per_site else "") for node in range(nodes)
        )

    def grid(self, job: Job, micro_batches: int) -> Grid:
        """The ranks of a group: of the only one on its hosts, of several each on the slowest that has its place.

        Args:
            job: Sizes of the job.
            micro_batches: Number of micro-batches of a replica.
        """
        from pier_megatron.features.skipping import feature as skipping

        layer = predict(job, self._cluster).compute / (3 * micro_batches * self._args.num_layers / self.stages)
        forward = tuple(layer * layers for layers in skipping.layers_of_stages(self._args))
        backward = tuple(seconds * skipping.backward_cost(self._args) for seconds in forward)
        devices = tuple(tuple(range(stage * self.replicas, (stage + 1) * self.replicas)) for stage in range(self.stages))
        by_group = [self._hosts_of_group(group) for group in range(self.groups)]
        if self.groups == 1:
            links = [[self._link(one, other) for other in self.hosts] for one in self.hosts]
            speeds = tuple(host.speed for host in self.hosts)
            return Grid(devices, forward, backward, tuple(by_group[0]), speeds, links)
        count = range(self.stages * self.replicas)
        speeds = tuple(min(self.hosts[hosts[device]].speed for hosts in by_group) for device in count)
        links = [
            [
                max((self._link(self.hosts[hosts[one]], self.hosts[hosts[other]]) for hosts in by_group), key=sum)
                for other in count
            ]
            for one in count
        ]
        return Grid(devices, forward, backward, tuple(count), speeds, links)

    def names(self, hosts: Sequence[int]) -> tuple[str, ...]:
        """Names of the only group's hosts in the order of ranks; nothing where none were given."""
        of_ranks = sorted(zip(self._hosts_of_group(0), hosts, strict=True))
        return tuple(dict.fromkeys(self.hosts[host].name for _, host in of_ranks)) if self._cluster.hosts else ()

    def _hosts_of_group(self, group: int) -> list[int]:
        return [self._host_of(group, stage, replica) for stage in range(self.stages) for replica in range(self.replicas)]

    def _host_of(self, group: int, stage: int, replica: int) -> int:
        data = group * self.replicas + replica
        is_data_outermost = self._args.use_tp_pp_dp_mapping
        place = data * self.stages + stage if is_data_outermost else stage * self._replicas_of_launch + data
        first: int = place * self._ranks_of_place
        return first // self._cluster.gpus_per_node

    def _link(self, one: Host, other: Host) -> Link:
        cluster = self._cluster
        if one == other:
            return Link(self._of_rank / cluster.gpu_bandwidth)
        between = cluster.site_links.get(frozenset((one.site, other.site)))
        if between is None and one.site != other.site:
            between = SiteLink(cluster.site_bandwidth, cluster.site_latency)
        if between is None:
            between = SiteLink(cluster.node_bandwidth, cluster.latency)
        # All ranks of a place send their parts at once.
        return Link(self._of_rank * self._ranks_of_place / (between.bandwidth * cluster.efficiency), between.latency)
