"""What a run compresses: ``--pier-compress`` against the run's parallel layout, types and other flags."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.codecs import BLOCK, Codec
from pier_megatron.experiments import EXPERIMENTS
from pier_megatron.experiments.compression.policy import DIMENSIONS, has_feedback, parse_policy, policy
from pier_megatron.features import Cost
from pier_megatron.integration.inner.requirements import keeps_halves
from pier_megatron.megatron_api.args import captures_full_iterations, flag, uses_pier
from pier_megatron.megatron_api.seam import Seam
from pier_megatron.schedules import AUTO, PRESETS
from pier_megatron.settings import setting

REFUSED = {
    "use_megatron_fsdp": ("dp", "gather"),
    "use_torch_fsdp2": ("dp", "gather"),
    "ddp_reduce_scatter_with_fp32_accumulation": ("dp",),
    "use_ring_exchange_p2p": ("pp",),
}
"""What decides by itself how something travels, with the dimensions that it is refused for."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of compression inside a group."""

    compress: str | None = setting(
        None,
        "Codecs of the traffic inside a group (arXiv 2409.02423): hybrid (gradients int8, activations between stages bf16, the "
        "outer step int8), aggressive (gradients int4 with error feedback), naive (int8 everywhere, for comparison), or "
        "DIMENSION=CODEC with dp, pp, gather, tp, outer; several separated by commas, as in hybrid,pp=int8,outer=off. Default: "
        "no compression.",
        metavar="POLICY",
        accepts=policy,
    )


def is_used(args: argparse.Namespace) -> bool:
    """Whether this run compresses anything inside a group."""
    return getattr(args, "pier_compress", None) is not None


def prepare(args: argparse.Namespace) -> None:
    """Sets Pier's own flag for what crosses the groups; where that is given, a policy does not change it.

    Raises:
        PierConfigError: If the two contradict each other.
    """
    codecs, named = parse_policy(args.pier_compress)
    if "outer" not in codecs or _outer(args, codecs["outer"]) is not None:
        return
    given, chosen = args.pier_exchange_dtype, codecs["outer"].name
    if given is not None and "outer" in named and given != chosen:
        raise PierConfigError(
            f"--pier-exchange-dtype {given} contradicts --pier-compress {args.pier_compress}, which sets it to {chosen}. "
            "Drop one of them."
        )
    args.pier_exchange_dtype = given or chosen


def check(args: argparse.Namespace) -> None:
    """Refuses what cannot be compressed, and puts the codecs in force.

    Raises:
        PierConfigError: With the flag, the reason and a remedy.
    """
    from pier_megatron.experiments.compression import traffic

    codecs = compressed(args)
    check_other_flags(args, codecs)
    traffic.put_in_force(codecs)


def compressed(args: argparse.Namespace) -> dict[str, Codec]:
    """The codec of each dimension inside a group that this run compresses, of arguments that have been validated.

    Raises:
        PierConfigError: If a dimension is named in ``--pier-compress`` that cannot be compressed here.
    """
    codecs, named = parse_policy(args.pier_compress)
    found = {}
    for dimension, codec in codecs.items():
        reason = _obstacle(args, dimension, codec)
        if reason is None:
            found[dimension] = codec
        elif dimension in named:
            raise PierConfigError(f"--pier-compress {args.pier_compress}: {dimension}={codec.name} is not possible: {reason}.")
    if not found:
        raise PierConfigError(
            f"--pier-compress {args.pier_compress} compresses nothing in this run: "
            + (
                "; ".join(f"{dimension}: {_obstacle(args, dimension, codec)}" for dimension, codec in codecs.items())
                or "all is off"
            )
            + ". Drop it."
        )
    return found


def _obstacle(args: argparse.Namespace, dimension: str, codec: Codec) -> str | None:
    """Why a dimension of this run is not compressed, with a remedy if there is one; None if it is."""
    return {"dp": _dp, "pp": _pp, "gather": _gather, "tp": _tp, "outer": _outer}[dimension](args, codec)


def _dp(args: argparse.Namespace, codec: Codec) -> str | None:
    if args.data_parallel_size * args.context_parallel_size == 1:
        return "there is one model replica (data-parallel size 1), whose gradients go nowhere"
    if codec.bits == 16 and not args.accumulate_allreduce_grads_in_fp32:
        if args.fp16:
            return (
                "with --fp16 they have 16 bits already; use int8, or add --accumulate-allreduce-grads-in-fp32 to sum them in "
                "FP32 and still send 16 bits"
            )
        if args.bf16:
            return "with --grad-reduce-in-bf16 they are bf16 already; use int8, or drop it"
    return None


def _pp(args: argparse.Namespace, codec: Codec) -> str | None:
    if args.pipeline_model_parallel_size == 1:
        return "--pipeline-model-parallel-size is 1, nothing travels between stages"
    half = args.params_dtype.itemsize == 2 and not args.fp32_residual_connection
    if codec.bits == 16 and half:
        return f"activations have 16 bits already, with --{'bf16' if args.bf16 else 'fp16'}; use pp=int8, or leave them"
    return None


def _gather(args: argparse.Namespace, codec: Codec) -> str | None:
    if getattr(args, "use_layer_wise_distributed_optimizer", False):
        return "those that Megatron's layer-wise optimizer gathers have not been tried"
    if not args.use_distributed_optimizer:
        return "without --use-distributed-optimizer no parameters are gathered"
    if args.params_dtype.itemsize == 4:
        return "without --bf16 or --fp16 the parameters are the main parameters themselves, which must not be rounded"
    if keeps_halves(args):
        return (
            "with --use-precision-aware-optimizer the parameters are halves of the main parameters, which must not be rounded"
        )
    if codec.bits == 16:
        return f"they have 16 bits already, with --{'bf16' if args.bf16 else 'fp16'}; use gather=int8, or leave them"
    if any(getattr(args, name, None) for name in ("fp8_param_gather", "fp4_param_gather")):
        return "--fp8-param-gather and --fp4-param-gather gather them in fewer bits already"
    replicas = args.data_parallel_size * args.context_parallel_size
    if replicas == (args.pier_groups or args.num_distributed_optimizer_instances):
        return "each group is one model replica, which gathers nothing"
    return None


def _tp(args: argparse.Namespace, codec: Codec) -> str | None:
    if args.tensor_model_parallel_size == 1:
        return "--tensor-model-parallel-size is 1, nothing travels between tensor-parallel ranks"
    if args.transformer_impl != "local":
        return (
            f"with --transformer-impl {args.transformer_impl} the collectives are inside Transformer Engine, where Pier cannot "
            "replace them; only --transformer-impl local can be compressed"
        )
    if args.sequence_parallel:
        return "--sequence-parallel gathers and scatters in other places than the sums that are compressed"
    if codec.bits == 16 and args.params_dtype.itemsize == 2:
        return f"activations have 16 bits already, with --{'bf16' if args.bf16 else 'fp16'}; use tp=int8, or leave them"
    return None


def _outer(args: argparse.Namespace, codec: Codec) -> str | None:
    if not uses_pier(args):
        return "there are no outer steps without --optimizer pier"
    preset = PRESETS.get(args.pier_preset or AUTO)
    if args.pier_subgroup_size is not None or (preset is not None and preset.subgroup_size is not None):
        return "groups in pairs send their weights, in FP32"
    return None


def check_other_flags(args: argparse.Namespace, codecs: dict[str, Codec]) -> None:
    """Refuses flags that compress the same traffic otherwise, or that bypass the compressed collectives.

    Raises:
        PierConfigError: With the flag, the reason and a remedy.
    """
    for name, dimensions in REFUSED.items():
        found = [dimension for dimension in dimensions if dimension in codecs]
        if getattr(args, name, None) and found:
            raise PierConfigError(
                f"{flag(name)} cannot be used with --pier-compress {args.pier_compress}: both decide how "
                f"{' and '.join(DIMENSIONS[dimension] for dimension in found)} travel. Drop one of them, or add "
                f"{','.join(f'{dimension}=off' for dimension in found)} to --pier-compress."
            )
    if captures_full_iterations(args):
        raise PierConfigError(
            f"CUDA graphs of the full iteration cannot be used with --pier-compress {args.pier_compress}: they capture what "
            "is sent before it could be encoded. Capture layers instead."
        )
    if "dp" in codecs and has_feedback(codecs["dp"]) and args.fp16:
        raise PierConfigError(
            f"--pier-compress {args.pier_compress}: what {codecs['dp'].name} drops of gradients is added to the next ones, "
            "which --fp16 scales differently whenever the loss scale changes. Use --bf16, or dp=int8."
        )


def cost(args: argparse.Namespace) -> Cost:
    """Says what the codec of gradients drops and keeps, and at most what is on its way at once: all of them."""
    codec = compressed(args).get("dp")
    if codec is None:
        return Cost()
    dropped = {"gradients dropped by --pier-compress, for the next ones": 4.0} if has_feedback(codec) else {}
    return Cost(per_parameter=dropped | {"gradients encoded, on their way": 2 * codec.nbytes(BLOCK) / BLOCK})


def warnings(args: argparse.Namespace) -> list[str]:
    """None: what is not compressed is described."""
    return []


def describe(args: argparse.Namespace) -> list[str]:
    """Says what is compressed and what is not, line by line."""
    codecs, (wanted, _) = compressed(args), parse_policy(args.pier_compress)
    lines = [f"Pier compress {args.pier_compress}:"]
    for dimension, what in DIMENSIONS.items():
        if dimension in codecs:
            name = args.pier_exchange_dtype if dimension == "outer" else codecs[dimension].name
            kept = ", what it drops is added to the next ones (4 bytes per parameter)"
            feedback = kept if dimension == "dp" and has_feedback(codecs[dimension]) else ""
            lines.append(f"  {dimension}: {what}: {name}{feedback}")
        elif dimension in wanted:
            lines.append(f"  {dimension}: {what}: as they are: {_obstacle(args, dimension, wanted[dimension])}")
    return lines


def seams() -> Sequence[Seam]:
    """What is put around Megatron's transfers inside a group."""
    from pier_megatron.experiments.compression import activations, gradients, parameters, tensor_parallel, traffic

    buffers = "megatron.core.distributed.param_and_grad_buffer"
    tensor_parallel_ranks = "megatron.core.tensor_parallel"
    training = "megatron.training.training"
    transfers = "megatron.core.pipeline_parallel.p2p_communication"
    routes = "pier_megatron.experiments.skipping.executor"
    of_routes = (Seam(routes, "transfer", activations.transfer_along_route),) if "skipping" in EXPERIMENTS else ()
    return (
        *of_routes,
        Seam(training, "get_megatron_optimizer", traffic.compile_codecs, is_outermost=True),
        Seam(training, "training_log", traffic.log, is_outermost=True),
        Seam(training, "save_checkpoint", gradients.save, is_outermost=True),
        Seam(buffers, "_ParamAndGradBucketGroup.start_grad_sync", gradients.start),
        Seam(buffers, "_ParamAndGradBucketGroup.start_param_sync", parameters.start),
        Seam(transfers, "_p2p_ops", activations.transfer),
        Seam(transfers, "_batched_p2p_ops", activations.transfer),
        Seam(f"{tensor_parallel_ranks}.mappings", "_reduce", tensor_parallel.sum_encoded),
        Seam(f"{tensor_parallel_ranks}.layers", "ColumnParallelLinear.__init__", tensor_parallel.build),
    )


def look() -> Callable[[], list[str]]:
    """Counts bytes from now on."""
    from pier_megatron.experiments.compression import traffic

    return traffic.look()
