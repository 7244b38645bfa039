"""What an iteration costs: a model of compute, networks and memory, calibrated on published measurements.

Times follow from few figures: what a GPU achieves on this model, what a node's network carries in an all-reduce, what every
iteration costs besides. The network of a *node* counts, because ranks that hold the same parameters use it one after the
other: on the authors' A100 machine an all-reduce moved 5 GB/s per node whether 1 or 4 different shards lived on it.

``tools/planner_accuracy.py`` compares it with every published point.
"""

import argparse
import dataclasses
from typing import Any

from pier_megatron.commands import planned_sizes
from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.config import PierConfig
from pier_megatron.exchange.codecs import BLOCK, CODECS
from pier_megatron.integration.inner.requirements import are_shared_out
from pier_megatron.outer.rules import rule_class
from pier_megatron.schedules import NEWTON_SCHULZ
from pier_megatron.settings import settings_of

# Share of an iteration's compute behind which Megatron can hide gradients: the backward pass, two thirds of it.
_HIDING = 2 / 3

# How often the operators of pier_megatron/outer/rounds.py read or write a number of every owned parameter, by count.
_BLOCKING_PASSES, _OVERLAPPED_PASSES = 26, 33

# How often matrices are read or written when they are measured before an orthogonal outer step.
_MEASURING_PASSES = 6

# Bytes that a codec reads and writes per element: its input and its integers when it encodes; the integers, the decoded values
# and their sum when it decodes. On a GPU each is one kernel; see pier_megatron/exchange/kernels.py.
_CODING = 16

# Operations that orthogonalise a matrix, over its numbers and its shorter side, by count: Newton-Schulz with square matrices.
_ORTHOGONALISING = 6 * len(NEWTON_SCHULZ)

# FP32 products run without tensor cores: 19.5 TFLOP/s on an A100, whose BF16 has 312, and nearer to their peak.
_FP32_RATE = 1 / 8

# Bytes per owned parameter of the parameters themselves, and of one flat buffer such as the anchor, the momentum, the residual.
_BUFFER = 4

# Bytes on the wire of an FP32 gradient.
_GRADIENT = 4

Plan = dict[str, Any]
"""Plain values by name: a plan, or a part of one."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained, and how it is laid out.

    Attributes:
        flops: Operations of one iteration, all GPUs together.
        shard: Parameters of one tensor- and pipeline-parallel rank.
        gpus: Number of GPUs.
        tensor_parallel: Ranks that share a layer.
        replicas: Ranks that hold the same shard: data and context parallelism.
        groups: Pier groups.
        is_shared_out: Whether ranks that hold the same shard share its optimizer state.
        parameter_bytes: Bytes on the wire of a parameter that is gathered inside a group; BF16's by default.
        experts: Those of the parameters of a shard that are routed experts'.
        expert_owners: Ranks of a group that hold the same ones.
        matrix_side: Shorter side of most matrices of a rank.
    """

    flops: float
    shard: float
    gpus: int
    tensor_parallel: int
    replicas: int
    groups: int
    is_shared_out: bool = True
    parameter_bytes: float = 2
    experts: float = 0
    expert_owners: int = 1
    matrix_side: float = 0

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Job":
        """Sizes of a validated job.

        Raises:
            PierConfigError: If the vocabulary's size is unknown.
        """
        return cls(
            flops=planned_sizes.operations(args),
            shard=sum(planned_sizes.parameters_of_first_shard(args)),
            gpus=args.world_size * settings_of(args).launches,
            tensor_parallel=args.tensor_model_parallel_size,
            replicas=args.data_parallel_size * args.context_parallel_size,
            groups=args.pier_groups or 1,
            is_shared_out=are_shared_out(args),
            parameter_bytes=planned_sizes.gathered_bytes(args),
            experts=planned_sizes.experts_of_first_shard(args),
            expert_owners=planned_sizes.owners(args, of_experts=True),
            matrix_side=min(args.hidden_size, planned_sizes.largest_matrix(args) // args.hidden_size),
        )

    @property
    def model_parallel(self) -> int:
        """Number of GPUs that share one replica."""
        return self.gpus // self.replicas

    @property
    def replicas_in_group(self) -> int:
        """Ranks of a group that hold the same shard."""
        return self.replicas // self.groups

    @property
    def owned(self) -> float:
        """Parameters whose optimizer and outer state a rank holds."""
        if not self.is_shared_out:
            return self.shard
        return (self.shard - self.experts) / self.replicas_in_group + self.experts / self.expert_owners


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of a job's iterations and outer steps.

    Attributes:
        compute: Seconds of an iteration without any data-parallel communication.
        inner: Communication inside a group, per iteration.
        synchronous: Seconds of an iteration that all groups take together, nothing hidden.
        synchronous_hidden: The same with gradients and parameters hidden behind compute as far as they fit.
        local: Seconds of an iteration of the local phase.
        exchange: Seconds of one outer exchange, by type on the wire.
        pairs: Seconds of one between two groups at a time, of their weights in FP32 (``--pier-preset noloco``).
        passes: Seconds of a blocking outer step's own work on the parameters.
        passing: Seconds in which a number of every owned parameter is read or written.
        coding: Seconds of encoding and decoding an exchange in fewer bits than FP32, and the sum that comes back.
        copying: Seconds in which one byte of every owned parameter comes from host memory, or goes there.
        orthogonalising: Seconds in which an outer step makes every matrix orthogonal (``--pier-outer-rule muon``).
    """

    compute: float
    inner: float
    synchronous: float
    synchronous_hidden: float
    local: float
    exchange: dict[str, float]
    pairs: float
    passes: float
    passing: float
    coding: float
    copying: float
    orthogonalising: float

    def _coding(self, dtype: str) -> float:
        return 0.0 if CODECS[dtype].lossless else self.coding

    def mean_iteration(self, config: PierConfig, hidden: bool = True) -> float:
        """Mean iteration of the local phase in seconds, outer steps included.

        ``hidden`` says that the group's own communication is behind compute (Megatron's overlap flags).
        """
        return self._local(hidden) + self.exposed(config, hidden) / config.sync_interval

    def exposed(self, config: PierConfig, hidden: bool = True) -> float:
        """Seconds of an interval for which a group waits for its outer step; arguments as of :meth:`mean_iteration`."""
        exchanged, waited = self.exchanged_and_waited(config)
        # However many fragments are on the link at a time, an interval has no more iterations to hide them behind.
        behind = min(config.fragments * config.overlap, config.sync_interval)
        return max(exchanged - behind * self._local(hidden), 0.0) + waited

    def exchanged_and_waited(self, config: PierConfig) -> tuple[float, float]:
        """Seconds of an outer step that iterations can hide, if it is overlapped, and those that a group waits for.

        Copies of offloaded state run in both directions at once, during the exchange and the passes over the parameters. Not
        counted: the copy of the first chunk, which nothing hides; the residuals, which ``--pier-no-error-feedback`` saves.
        """
        dtype = config.exchange_dtype
        wire, coding = self.pairs if config.subgroup == 2 else self.exchange[dtype], self._coding(dtype)
        passes = (_OVERLAPPED_PASSES * self.passing if config.overlap else self.passes) + coding
        measured = 0.0
        if rule_class(config).takes_matrices:
            # Before anything is sent it reads the anchor and the parameters, to know how long matrices are.
            measured = max(_MEASURING_PASSES * self.passing, _BUFFER * self.copying * config.offload)
            passes += self.orthogonalising
        if not config.offload:
            return wire, measured + passes
        if config.overlap == 0:
            return wire, measured + max(passes, copied_by_blocking(dtype) * self.copying - wire)
        return wire, measured + max(passes, copied_by_overlapped(dtype) * self.copying)

    def _local(self, hidden: bool) -> float:
        return self.local if hidden else self.compute + self.inner

    def mean_of_run(self, config: PierConfig, hidden: bool = True) -> float:
        """Mean iteration in seconds of a whole run, whose lazy start is synchronous."""
        lazy = config.lazy_start / config.train_iters
        return lazy * self.of_synchronous(hidden) + (1 - lazy) * self.mean_iteration(config, hidden)

    def of_synchronous(self, hidden: bool) -> float:
        """Seconds of an iteration that all groups take together."""
        return self.synchronous_hidden if hidden else self.synchronous


def copied_by_blocking(dtype: str) -> float:
    """Bytes per owned parameter that come from the host in a blocking step: anchor, momentum, residual. No more goes out."""
    return 2 * _BUFFER + _residual(dtype)


def copied_by_overlapped(dtype: str) -> float:
    """Bytes per owned parameter that an overlapped step copies from the host; training waits for all of them.

    The anchor when it begins, what is sent and the residual when it is sent, what was sent and the state when it ends.
    """
    return _BUFFER + _BUFFER + _residual(dtype) + 3 * _BUFFER


def _residual(dtype: str) -> int:
    return 0 if CODECS[dtype].lossless else _BUFFER


def predict(job: Job, cluster: Cluster) -> Prediction:
    """Predicts a job's times."""
    compute = job.flops / job.gpus / cluster.flops + _overhead(job, cluster)
    inner = _between_replicas(job, cluster, job.replicas_in_group, _GRADIENT + job.parameter_bytes)
    across = _between_replicas(job, cluster, job.replicas, _GRADIENT * 2)
    passing = _BUFFER * job.owned / cluster.memory_bandwidth
    exchange = {name: _exchange(job, cluster, codec.nbytes(BLOCK) / BLOCK) for name, codec in CODECS.items()}
    return Prediction(
        compute=compute,
        inner=inner,
        synchronous=compute + across,
        synchronous_hidden=compute + max(across - _HIDING * compute, 0.0),
        local=compute + max(inner - _HIDING * compute, 0.0),
        exchange=exchange,
        pairs=_pairs(job, cluster),
        passes=_BLOCKING_PASSES * passing,
        passing=passing,
        coding=2 * _CODING * job.owned / cluster.memory_bandwidth if job.groups > 1 else 0.0,
        copying=job.owned / cluster.host_bandwidth,
        orthogonalising=_ORTHOGONALISING * job.matrix_side * job.owned / (_FP32_RATE * cluster.flops),
    )


def achieved(job: Job, cluster: Cluster, seconds: float) -> float:
    """Operations per second of a GPU in an iteration of ``seconds``, communication aside; the inverse of :func:`predict`.

    Not above 0 where the iteration is shorter than the cluster's overhead.
    """
    return job.flops / job.gpus / (seconds - _overhead(job, cluster))


def _overhead(job: Job, cluster: Cluster) -> float:
    return cluster.overhead + cluster.overhead_per_parameter * job.owned


def _shards_on_node(job: Job, cluster: Cluster) -> int:
    """Number of different shards on one node."""
    return min(job.tensor_parallel, cluster.gpus_per_node)


def _between_replicas(job: Job, cluster: Cluster, ranks: int, nbytes: float) -> float:
    """Seconds to reduce and gather a shard over neighbouring ranks; ``nbytes`` per parameter in both directions together."""
    if ranks == 1:
        return 0.0
    traffic = (ranks - 1) / ranks * job.shard * nbytes
    if ranks * job.tensor_parallel <= cluster.gpus_per_node:
        return traffic / cluster.gpu_bandwidth
    between_nodes = traffic * _shards_on_node(job, cluster) / cluster.node_rate
    if cluster.sites(ranks * job.model_parallel) == 1:
        return between_nodes
    # The rings of all shards cross the boundary of a site once.
    return max(between_nodes, traffic * job.model_parallel / cluster.site_rate)


def _exchange(job: Job, cluster: Cluster, nbytes: float) -> float:
    """Seconds to exchange all pseudo-gradients between groups."""
    if job.groups == 1:
        return 0.0
    # Groups that share a node reduce there first; of a group that spans nodes, each node sends what its ranks own.
    on_node = min(_shards_on_node(job, cluster) * job.shard, cluster.gpus_per_node * job.owned)
    share = 2 * (job.groups - 1) / job.groups * nbytes
    within_a_node = job.gpus <= cluster.gpus_per_node
    seconds = share * on_node / (cluster.gpu_bandwidth if within_a_node else cluster.node_rate)
    if cluster.sites(job.gpus) > 1:
        seconds = max(seconds, share * job.shard * job.model_parallel / cluster.site_rate)
    return seconds + _ring_latency(job, cluster)


def _ring_latency(job: Job, cluster: Cluster) -> float:
    """Seconds of the messages of an exchange of all groups, one behind the other, twice around the ring less one hop."""
    hops = job.groups - 1
    sites = cluster.sites(job.gpus)
    far = min(sites, hops) if sites > 1 else 0
    return 2 * (far * cluster.site_latency + (hops - far) * cluster.latency)


def _pairs(job: Job, cluster: Cluster) -> float:
    """Seconds to exchange all weights between two groups; all pairs at once, and none of them inside a node."""
    if job.groups == 1:
        return 0.0
    if job.gpus <= cluster.gpus_per_node:
        return job.owned * 4 / cluster.gpu_bandwidth + cluster.latency
    seconds = cluster.gpus_per_node * job.owned * 4 / cluster.node_rate
    sites = cluster.sites(job.gpus)
    if sites > 1:
        # Pairs are drawn at random: this many groups of a site meet a group of another site.
        leaving = job.groups / sites * (1 - 1 / sites)
        seconds = max(seconds, leaving * job.shard * job.model_parallel * 4 / cluster.site_rate)
    return seconds + (cluster.site_latency if sites > 1 else cluster.latency)
