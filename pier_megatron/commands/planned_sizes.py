"""How large a job is that has not been started: parameters, memory, operations and messages, from its arguments."""

import argparse
import math

from pier_megatron import features
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.integration.inner.precision_aware import FusedAdamMasters
from pier_megatron.integration.inner.requirements import are_shared_out, keeps_halves, keeps_main_parameters
from pier_megatron.integration.startup import Takes
from pier_megatron.megatron_api import versions
from pier_megatron.outer.rules import rule_class

_MEMORY = "megatron.training.theoretical_memory_usage"


def why_unknown(args: argparse.Namespace) -> str | None:
    """Why a job's sizes cannot be known before it starts; None if they can."""
    if getattr(args, "hybrid_layer_pattern", None) is None:
        return None
    return (
        "--hybrid-layer-pattern: Megatron's estimate of memory, which Pier's follows, does not know hybrid models. The "
        "start-up block says what the job takes"
    )


def parameters_of_first_shard(args: argparse.Namespace) -> tuple[int, int, int]:
    """Parameters of a validated job's model on rank 0, which holds a part of the first pipeline stage.

    What Megatron's own estimate leaves out is added: biases, norms of queries and keys, position embeddings.

    Returns:
        Numbers of those that are split over tensor-parallel ranks, that each of these ranks copies, and that the first and the
        last pipeline stage share.

    Raises:
        PierConfigError: If they depend on the tokenizer, which has not been loaded, or are not known at all; so do all
            functions here.
    """
    if (unknown := why_unknown(args)) is not None:
        raise PierConfigError(f"{unknown}.")
    sized = with_vocabulary(args)
    tensor, stages = sized.tensor_model_parallel_size, sized.pipeline_model_parallel_size
    hidden, norm = sized.hidden_size, 1 if sized.normalization == "RMSNorm" else 2
    embedding = sized.padded_vocab_size * hidden // tensor
    # What is split halves with twice the ranks.
    split = 2 * tensor * (_estimated(sized, tensor) - _estimated(sized, 2 * tensor))
    copied = _estimated(sized, tensor) - split / tensor
    if stages > 1:
        # It follows the last layer, and the estimate divides it among the stages.
        copied -= norm * hidden / stages
    of_layer, copied_of_layer = 0.0, 0.0
    if not sized.multi_latent_attention:
        if sized.add_bias_linear or sized.add_qkv_bias:
            queries = sized.num_attention_heads
            keys = sized.num_query_groups if sized.group_query_attention else queries
            of_layer += sized.kv_channels * (queries + 2 * keys)
        if sized.qk_layernorm:
            copied_of_layer += 2 * norm * sized.kv_channels
    if sized.add_bias_linear and sized.num_experts is None:
        of_layer += sized.ffn_hidden_size * (2 if sized.swiglu else 1)
        copied_of_layer += 2 * hidden
    split = split / tensor + of_layer * sized.num_layers / stages / tensor
    copied += copied_of_layer * sized.num_layers / stages
    if sized.position_embedding_type == "learned_absolute":
        copied += sized.max_position_embeddings * hidden
    if sized.num_experts is not None and sized.moe_router_enable_expert_bias:
        frequency = sized.moe_layer_freq
        routers = sum(frequency) if isinstance(frequency, list) else -(-sized.num_layers // frequency)
        copied += sized.num_experts * routers / stages
    tied = embedding if stages > 1 and not sized.untie_embeddings_and_output_weights else 0
    return round(split) - tied, round(copied), tied


def _estimated(args: argparse.Namespace, tensor_parallel: int) -> float:
    estimate = versions.require(_MEMORY, "compute_weight_and_optimizer_memory")
    # Without the distributed optimizer the estimate is 18 bytes for each parameter, whatever else is set.
    changed = _with(args, use_distributed_optimizer=False, tensor_model_parallel_size=tensor_parallel)
    return float(estimate(changed)) / 18


def experts_of_first_shard(args: argparse.Namespace) -> int:
    """Those of all parameters of :func:`parameters_of_first_shard` that are routed experts'.

    Before Megatron 0.18 none: its estimate does not divide them.
    """
    sized = with_vocabulary(args)
    fewer = _with(sized, expert_model_parallel_size=2 * sized.expert_model_parallel_size)
    # What is theirs halves with twice the ranks.
    return round(
        2 * (_estimated(sized, sized.tensor_model_parallel_size) - _estimated(fewer, sized.tensor_model_parallel_size))
    )


def owners(args: argparse.Namespace, of_experts: bool = False) -> int:
    """Ranks of a group that shard the parameters of a validated job: those of routed experts, or the others."""
    return replicas_in_group(args, of_experts) if are_shared_out(args) else 1


def replicas_in_group(args: argparse.Namespace, of_experts: bool) -> int:
    """Data-parallel and context-parallel ranks of a group: those of routed experts, or of the other parameters."""
    replicas: int = args.data_parallel_size * args.context_parallel_size
    if of_experts:
        ranks = args.expert_tensor_parallel_size * args.expert_model_parallel_size
        replicas = replicas * args.tensor_model_parallel_size // ranks
    return replicas // (getattr(args, "pier_groups", None) or 1)


def taken_by_outer_loop(args: argparse.Namespace, config: PierConfig) -> Takes:
    """What start-up will say that the outer loop takes of rank 0 of a validated job.

    Where ranks of a group shard the parameters, Megatron pads the buffers that it divides, and a rank may hold fewer.
    """
    is_whole, is_elastic = not are_shared_out(args), config.lighthouse is not None
    has_copies = args.tensor_model_parallel_size > 1 or (is_whole and is_elastic)
    holders = [replicas_in_group(args, of) if is_whole and not is_elastic else 1 for of in (False, True)]
    split, copied, tied = parameters_of_first_shard(args)
    # Tensor parallelism does not divide them, so that they are among what is copied.
    experts = experts_of_first_shard(args)
    # Without expert parallelism the optimizer of all others steps them.
    apart = experts if args.expert_model_parallel_size > 1 else 0
    owned = [-(-numel // owners(args)) for numel in (split + experts - apart, copied - experts, tied)]
    # As if fragments could end anywhere: where they end between parameters, they are about as large.
    stored = FusedAdamMasters.unstepped() if keeps_main_parameters(args) else None
    own_experts = -(-apart // owners(args, of_experts=True))
    matrix = largest_matrix(args) if rule_class(config).takes_matrices else 0
    return Takes.planned(config, owned, has_copies, device_type(args), stored, own_experts, holders[0], holders[1], matrix)


def largest_matrix(args: argparse.Namespace) -> int:
    """Elements of the largest matrix that a rank holds: of a layer's attention, or of what comes behind it, or of positions."""
    keys = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    gated, tensor = 2 if args.swiglu else 1, args.tensor_model_parallel_size
    wide = [(args.num_attention_heads + 2 * keys) * args.kv_channels // tensor, gated * args.ffn_hidden_size // tensor]
    if args.num_experts is not None:
        wide.append(gated * args.moe_ffn_hidden_size // args.expert_tensor_parallel_size)
    if args.position_embedding_type == "learned_absolute":
        wide.append(args.max_position_embeddings)
    return int(args.hidden_size * max(wide))


def lines_of_outer_loop(args: argparse.Namespace, config: PierConfig) -> list[str]:
    """The lines of start-up's block on it."""
    about = "up to the padding of buffers, " if owners(args) > 1 else ""
    return [f"{about}{line}" for line in taken_by_outer_loop(args, config).lines(config, device_type(args))]


def device_type(args: argparse.Namespace) -> str:
    """Type of the device on which a job trains."""
    return "cuda" if args.distributed_backend == "nccl" else "cpu"


def parameters_of_model(args: argparse.Namespace) -> int:
    """Parameters of a validated job's whole model."""
    alone = {f"{what}_parallel_size": 1 for what in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")}
    return sum(parameters_of_first_shard(_with(with_vocabulary(args), world_size=1, **alone)))


def _with(args: argparse.Namespace, **changes: object) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | changes)


def with_vocabulary(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments as they are once the tokenizer is built."""
    if getattr(args, "padded_vocab_size", None) is not None:
        return args
    if args.vocab_size is None:
        raise PierConfigError("the vocabulary's size comes from the tokenizer, which is not loaded here: add --vocab-size.")
    pad = versions.require("megatron.core.tokenizers.utils.build_tokenizer", "vocab_size_with_padding")
    return _with(args, padded_vocab_size=pad(args.vocab_size, args, logging_enabled=False))


def operations(args: argparse.Namespace, samples: float | None = None) -> float:
    """Floating-point operations of some samples, by default of the mean iteration, all ranks together, as Megatron counts."""
    if samples is None:
        samples = args.global_batch_size if args.train_samples is None else args.train_samples / args.train_iters
    count = versions.require("megatron.training.training", "num_floating_point_operations")
    return float(count(with_vocabulary(args), samples))


def gathered_bytes(args: argparse.Namespace) -> float:
    """Bytes on the wire of a parameter that a group gathers; embeddings count as if they were quantised too."""
    if getattr(args, "reuse_grad_buf_for_mxfp8_param_ag", False):
        # It is quantised afterwards.
        return 2
    return 1 if getattr(args, "fp8_param_gather", False) else 0.5 if getattr(args, "fp4_param_gather", False) else 2


def memory(args: argparse.Namespace) -> dict[str, float]:
    """What Megatron itself takes on the fullest rank of a job whose sizes are known, by its own estimate, in bytes.

    Quantised parameters count as BF16 ones: on most GPUs codes for the forward and for the backward pass take as much.
    """
    sized = with_vocabulary(args)
    # The instances of the distributed optimizer share nothing: a rank owns what it would with the replicas of one group.
    replicas = args.data_parallel_size // (args.pier_groups or 1)
    of_replica = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    sizes = _with(sized, data_parallel_size=replicas, world_size=replicas * of_replica)
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    compute_activations = versions.require(_MEMORY, "compute_activation_memory_without_sp")
    costs = [feature.cost(args) for feature in features.used(args)]
    activations = compute_activations(sized, microbatches) * math.prod(cost.activations for cost in costs)
    parameters = sum(parameters_of_first_shard(args))
    return {
        "weights, gradients, optimizer": _weights_gradients_and_optimizer(sizes),
        "activations, without recomputation": activations,
    } | {what: size * parameters for cost in costs for what, size in cost.per_parameter.items()}


def _weights_gradients_and_optimizer(args: argparse.Namespace) -> float:
    """Bytes by Megatron's estimate, which counts 2 for weights, 4 for gradients, 12 for the optimizer, whatever their types."""
    estimated = float(versions.require(_MEMORY, "compute_weight_and_optimizer_memory")(args))
    if not getattr(args, "use_precision_aware_optimizer", False):
        return estimated
    parameters = _estimated(args, args.tensor_model_parallel_size)
    owned = (estimated - 6 * parameters) / 12
    moments: int = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    main = 2 if keeps_halves(args) else args.main_params_dtype.itemsize
    return float(parameters * (2 + args.main_grads_dtype.itemsize) + owned * (main + moments))
