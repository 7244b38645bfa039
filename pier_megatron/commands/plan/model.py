"""What an iteration costs: a model of compute, networks and memory, calibrated on published measurements.

Times follow from few figures: what a GPU achieves on this model, what a node's network carries in an all-reduce, what every
iteration costs besides. The network of a *node* counts, because ranks that hold the same parameters use it one after the
other: on the authors' A100 machine an all-reduce moved 5 GB/s per node whether 1 or 4 different shards lived on it.

``benchmarks/planner_accuracy.py`` compares it with every published point.
"""

import dataclasses
import math

from pier_megatron.exchange.codecs import BLOCK, CODECS

# Share of an iteration's compute behind which Megatron can hide gradients: the backward pass, two thirds of it.
HIDING = 2 / 3

# Bytes that the outer step's own passes read and write per owned parameter, as benchmarks/outer_step_passes.py counts them.
_PASSES = 32

# Bytes on the wire of an FP32 gradient and of a bf16 parameter.
_GRADIENT, _PARAMETER = 4, 2


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where a job runs.

    Attributes:
        gpus_per_node: Number of GPUs of a node.
        memory: Of a GPU, in bytes.
        flops: What a GPU achieves in training, in operations per second; a job's own figure is better.
        node_bandwidth: What a node sends in an all-reduce over the network, in bytes per second.
        gpu_bandwidth: What a GPU sends in an all-reduce inside a node, in bytes per second.
        memory_bandwidth: Of a GPU, in bytes per second.
        overhead: Of every iteration, in seconds.
        overhead_per_parameter: The same per parameter whose optimizer state a GPU holds, in seconds.
        latency: Of a message between nodes, in seconds.
        is_calibrated: Whether the figures fit published measurements; else they follow from data sheets.
    """

    gpus_per_node: int
    memory: float
    flops: float
    node_bandwidth: float
    gpu_bandwidth: float
    memory_bandwidth: float
    overhead: float = 0.015
    overhead_per_parameter: float = 0.0
    latency: float = 10e-6
    is_calibrated: bool = False


# Bandwidths of the first two are fitted, see benchmarks/planner_accuracy.py; nodes of the others send 80 % of what an adapter
# of 400 Gbit/s per GPU could.
CLUSTERS = {
    "perlmutter": Cluster(4, 40e9, 90e12, 5.0e9, 30e9, 1.5e12, 0.015, 0.12e-9, is_calibrated=True),
    "vista": Cluster(1, 96e9, 430e12, 41.4e9, 360e9, 3.6e12, 0.015, 0.03e-9, is_calibrated=True),
    "dgx-h100": Cluster(8, 80e9, 400e12, 320e9, 360e9, 3.3e12, 0.015, 0.03e-9),
    "dgx-h200": Cluster(8, 141e9, 400e12, 320e9, 360e9, 4.8e12, 0.015, 0.03e-9),
}


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
        sent_between_stages: Elements that a rank in the middle of a pipeline sends in an iteration, forward and backward.
        is_shared_out: Whether ranks that hold the same shard share its optimizer state.
    """

    flops: float
    shard: float
    gpus: int
    tensor_parallel: int
    replicas: int
    groups: int
    sent_between_stages: float = 0.0
    is_shared_out: bool = True

    @property
    def replicas_in_group(self) -> int:
        """Ranks of a group that hold the same shard."""
        return self.replicas // self.groups

    @property
    def owned(self) -> float:
        """Parameters whose optimizer and outer state a rank holds."""
        return self.shard / (self.replicas_in_group if self.is_shared_out else 1)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of a job's iterations and outer steps.

    Attributes:
        compute: Of an iteration, without any data-parallel communication.
        inner: Communication inside a group, per iteration.
        synchronous: Of an iteration that all groups take together, nothing hidden.
        synchronous_hidden: The same with gradients and parameters hidden behind compute as far as they fit.
        local: Of an iteration of the local phase.
        exchange: Of one outer exchange, by type on the wire.
        pairs: Of one between two groups at a time, of their weights in FP32 (``--pier-preset noloco``).
        ring_latency: Of the messages of an exchange of all groups, one behind the other around a ring.
        pair_latency: Of that between two.
        passes: Of the outer step's own work on the parameters.
    """

    compute: float
    inner: float
    synchronous: float
    synchronous_hidden: float
    local: float
    exchange: dict[str, float]
    pairs: float
    ring_latency: float
    pair_latency: float
    passes: float

    def outer_step(self, dtype: str = "fp32") -> float:
        """Seconds of a blocking outer step."""
        return self.exchange[dtype] + self.passes

    def mean_iteration(self, interval: int, dtype: str = "fp32", overlap: int = 0, fragments: int = 1) -> float:
        """Mean iteration of the local phase, outer steps included.

        Args:
            interval: Iterations between outer steps.
            dtype: On the wire.
            overlap: Iterations behind which the exchange is hidden.
            fragments: Parts that are exchanged in turn, each hidden for itself.
        """
        waited = max(self.exchange[dtype] - fragments * overlap * self.local, 0.0) + self.passes
        return self.local + waited / interval

    def mean_iteration_in_pairs(self, interval: int) -> float:
        """Mean iteration of the local phase if two groups meet at a time, blocking."""
        return self.local + (self.pairs + self.passes) / interval

    def break_even_interval(self, hidden: bool = True) -> float:
        """Interval from which on blocking Pier is faster than synchronous training; infinite if none is."""
        gained = (self.synchronous_hidden if hidden else self.synchronous) - self.local
        return self.outer_step() / gained if gained > 0 else math.inf


def predict(job: Job, cluster: Cluster, flops: float | None = None) -> Prediction:
    """Predicts a job's times.

    Args:
        job: The job.
        cluster: Where it runs.
        flops: What a GPU achieves on this model in operations per second, measured on one group; None for the cluster's.
    """
    per_gpu = flops or cluster.flops
    compute = job.flops / job.gpus / per_gpu + cluster.overhead + cluster.overhead_per_parameter * job.owned
    inner = seconds_between_replicas(job, cluster, job.replicas_in_group, _GRADIENT + _PARAMETER)
    across = seconds_between_replicas(job, cluster, job.replicas, _GRADIENT * 2)
    hidden = max(across - HIDING * compute, 0.0)
    exchange = {name: _exchange(job, cluster, codec.nbytes(BLOCK) / BLOCK) for name, codec in CODECS.items()}
    return Prediction(
        compute=compute,
        inner=inner,
        synchronous=compute + across,
        synchronous_hidden=compute + hidden,
        local=compute + max(inner - HIDING * compute, 0.0),
        exchange=exchange,
        pairs=_pairs(job, cluster),
        ring_latency=2 * (job.groups - 1) * cluster.latency,
        pair_latency=cluster.latency if job.groups > 1 else 0.0,
        passes=_PASSES * job.owned / cluster.memory_bandwidth,
    )


def _shards_on_node(job: Job, cluster: Cluster) -> int:
    """Different shards that live on one node."""
    return min(job.tensor_parallel, cluster.gpus_per_node)


def seconds_between_replicas(job: Job, cluster: Cluster, ranks: int, nbytes: float) -> float:
    """Seconds to reduce and gather a shard over neighbouring ranks; ``nbytes`` per parameter in both directions together."""
    if ranks == 1:
        return 0.0
    traffic = (ranks - 1) / ranks * job.shard * nbytes
    if ranks * job.tensor_parallel <= cluster.gpus_per_node:
        return traffic / cluster.gpu_bandwidth
    return traffic * _shards_on_node(job, cluster) / cluster.node_bandwidth


def bandwidth_between_stages(gpus: int, cluster: Cluster) -> float:
    """Bytes per second of one GPU's messages to another stage: on another node, unless all ``gpus`` of the job are on one.

    All GPUs of a node send at once.
    """
    return cluster.gpu_bandwidth if gpus <= cluster.gpus_per_node else cluster.node_bandwidth / cluster.gpus_per_node


def _exchange(job: Job, cluster: Cluster, nbytes: float) -> float:
    """Seconds to exchange all pseudo-gradients between groups."""
    if job.groups == 1:
        return 0.0
    # Groups that share a node reduce there first; of a group that spans nodes, each node sends what its ranks own.
    on_node = min(_shards_on_node(job, cluster) * job.shard, cluster.gpus_per_node * job.owned)
    traffic = 2 * (job.groups - 1) / job.groups * on_node * nbytes
    within_a_node = job.gpus <= cluster.gpus_per_node
    seconds = traffic / (cluster.gpu_bandwidth if within_a_node else cluster.node_bandwidth)
    return seconds + 2 * (job.groups - 1) * cluster.latency


def _pairs(job: Job, cluster: Cluster) -> float:
    """Seconds to exchange all weights between two groups; all pairs at once, and none of them inside a node."""
    if job.groups == 1:
        return 0.0
    if job.gpus <= cluster.gpus_per_node:
        return job.owned * 4 / cluster.gpu_bandwidth + cluster.latency
    return cluster.gpus_per_node * job.owned * 4 / cluster.node_bandwidth + cluster.latency
