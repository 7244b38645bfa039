"""When ``--pier-compress`` pays: bytes that it takes off the wire against the passes over memory that codecs take."""

import dataclasses
from collections.abc import Iterator

from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.model import CODING, HIDING, Job, Plan, bandwidth_between_stages, seconds_between_replicas
from pier_megatron.exchange.codecs import BLOCK, CODECS

# Bytes per element on the wire that are not compressed: FP32 gradients, bf16 parameters and activations.
_GRADIENT, _PARAMETER, _ACTIVATION = 4.0, 2.0, 2.0


@dataclasses.dataclass(frozen=True)
class CodecGain:
    """What a codec does to an iteration.

    Attributes:
        what: What is compressed.
        policy: Policy as in ``--pier-compress``.
        wire: Seconds on the wire without it.
        compressed: Seconds on the wire with it.
        coding: Seconds of encoding and decoding.
        hidden: Seconds of compute behind which the wire, but no codec, can be hidden.
    """

    what: str
    policy: str
    wire: float
    compressed: float
    coding: float
    hidden: float

    @property
    def gain(self) -> float:
        """Seconds that it takes off an iteration in which nothing is hidden; below 0 if it costs more than it saves."""
        return self.wire - self.compressed - self.coding

    @property
    def gain_behind_compute(self) -> float:
        """The same with the overlap flags."""
        return max(self.wire - self.hidden, 0.0) - max(self.compressed - self.hidden, 0.0) - self.coding


def savings(job: Job, cluster: Cluster, compute: float) -> Iterator[CodecGain]:
    """Predicts what policies save.

    Args:
        job: The job.
        cluster: Cluster on which it runs.
        compute: Seconds of an iteration without communication.
    """
    for name in ("int8", "int4"):
        yield from savings_of_gradients(job, cluster, compute, name)
    if job.sent_between_stages:
        bandwidth = bandwidth_between_stages(job.gpus, cluster)
        elements = job.sent_between_stages
        wire, compressed = (elements * size / bandwidth for size in (_ACTIVATION, _bytes("int8")))
        coding = CODING * elements / cluster.memory_bandwidth
        yield CodecGain("activations and gradients between stages", "pp=int8", wire, compressed, coding, 0.0)


def savings_of_gradients(job: Job, cluster: Cluster, compute: float, codec: str) -> Iterator[CodecGain]:
    """As :func:`savings`, of gradients with one codec."""
    coding = CODING * job.shard / cluster.memory_bandwidth
    places = {
        # Reduced and gathered inside a group, or whole gradients reduced; all groups together reduce once more, as far as the
        # model goes.
        "gradients inside a group": (job.replicas_in_group, *((1, _PARAMETER) if job.is_shared_out else (2, 0.0))),
        "gradients of all groups, in the lazy start": (job.replicas if job.groups > 1 else 1, 2, 0.0),
    }
    for what, (ranks, times, beside) in places.items():
        if ranks > 1:
            wire = seconds_between_replicas(job, cluster, ranks, times * _GRADIENT + beside)
            compressed = seconds_between_replicas(job, cluster, ranks, times * _bytes(codec) + beside)
            yield CodecGain(what, f"dp={codec}", wire, compressed, times * coding, HIDING * compute)


def _bytes(codec: str) -> float:
    return CODECS[codec].nbytes(BLOCK) / BLOCK


def lines(plan: Plan) -> list[str]:
    """The lines of a plan, if its job has ``--pier-compress``."""
    return table([CodecGain(**saving) for saving in plan["compression"]]) if plan["compresses"] else []


def table(found: list[CodecGain]) -> list[str]:
    """Lists them for people."""
    return [
        f"--pier-compress {saving.policy}, {saving.what}: {saving.compressed * 1e3:,.1f} ms on the wire and "
        f"{saving.coding * 1e3:,.1f} ms of coding in place of {saving.wire * 1e3:,.1f} ms: {_worth(saving)}"
        for saving in found
    ]


def _worth(saving: CodecGain) -> str:
    if saving.gain <= 0:
        return f"costs {-saving.gain * 1e3:,.1f} ms of an iteration more than it saves"
    if saving.hidden and saving.gain_behind_compute <= 0:
        return f"saves {saving.gain * 1e3:,.1f} ms of an iteration, but nothing where the overlap flags hide the wire"
    behind = f", {saving.gain_behind_compute * 1e3:,.1f} ms behind the overlap flags" if saving.hidden else ""
    return f"saves {saving.gain * 1e3:,.1f} ms of an iteration{behind}"
