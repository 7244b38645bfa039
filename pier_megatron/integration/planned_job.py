"""A job that has not been started: its arguments through Megatron's own parser, its ranks through Megatron's own order."""

import argparse
import contextlib
import io
import linecache
import math
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pier_megatron import features
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.topology import Rank, Topology, domain_name
from pier_megatron.integration.arguments import settle_iterations
from pier_megatron.integration.checkpoint.content import layout_of
from pier_megatron.integration.checkpoint.files import damage
from pier_megatron.integration.inner.requirements import are_shared_out
from pier_megatron.integration.seams import register
from pier_megatron.integration.startup import Takes
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.args import flag, ranks_of_activations
from pier_megatron.megatron_api.batches import counted
from pier_megatron.megatron_api.tracker import stored_checkpoint
from pier_megatron.outer.description import ENTRY, Description
from pier_megatron.outer.memory import bytes_per_parameter
from pier_megatron.settings import settings_of

_ARGUMENTS = "megatron.training.arguments"
_MEMORY = "megatron.training.theoretical_memory_usage"

# What Megatron has no default for, and refuses with one error after the other.
_NEEDED = ("micro_batch_size", "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "lr")


def parsed_arguments(ranks: int, ranks_per_node: int, argv: Sequence[str]) -> argparse.Namespace:
    """Parses a job's arguments as rank 0 of it would; needs no GPU, but what stands in for one.

    Args:
        ranks: Processes in all.
        ranks_per_node: Processes on each node.
        argv: The training script and its arguments.

    Raises:
        PierConfigError: If Megatron's parser or the plugin refuses them.
    """
    register()
    with _as_rank_0(ranks, ranks_per_node), versions.replaced(sys, {"argv": list(argv)}):
        args: argparse.Namespace = versions.require(_ARGUMENTS, "parse_args")(ignore_unknown_args=True)
    return args


def validate(args: argparse.Namespace, ranks_per_node: int) -> None:
    """Has Megatron and the plugin fill in and check parsed arguments, in place.

    Raises:
        PierConfigError: If one of them refuses the arguments.
    """
    with _as_rank_0(args.world_size, ranks_per_node):
        versions.require(_ARGUMENTS, "validate_args")(args)
        _settle_iterations(args)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _as_rank_0(ranks: int, ranks_per_node: int) -> Iterator[None]:
    """Inside, the environment is that of a job's rank 0, refusals become errors, and what Megatron prints is kept back."""
    environment = {
        "RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
    }
    output = io.StringIO()
    with (
        _environment(environment),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            yield
        except PierConfigError:
            raise
        except SystemExit:
            raise PierConfigError(*_said_of_parser(output.getvalue())) from None
        except (AssertionError, ValueError, RuntimeError, TypeError, LookupError, OSError) as error:
            raise PierConfigError(f"Megatron refuses the arguments: {str(error).strip() or _failed_check(error)}") from error


def _said_of_parser(output: str) -> list[str]:
    """The messages below the usage that a parser has printed."""
    return output.strip().rpartition(": error: ")[2].splitlines()


def _failed_check(error: Exception) -> str:
    """The check behind an error without a text, and the flags that it looks at."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    last = traceback.extract_tb(error.__traceback__)[-1]
    lines = (linecache.getline(last.filename, number) for number in range(last.lineno or 1, (last.end_lineno or 1) + 1))
    check = " ".join("".join(lines).split())
    args = frame.f_locals.get("args")
    values = {flag(name): getattr(args, name, None) for name in re.findall(r"\bargs\.(\w+)", check)}
    found = f"its check {check!r} ({Path(last.filename).name}, line {last.lineno}) fails"
    if not values:
        return f"{found}."
    missing = [name for name, value in values.items() if value is None]
    said = ", ".join(f"{name} is {value}" for name, value in values.items())
    return f"{found}: {said}. {f'Give {missing[0]}' if missing else f'Change {next(iter(values))}'}."


def _settle_iterations(args: argparse.Namespace) -> None:
    """Derives the iterations of a sample-based job as the training loop does, its batch sizes changing on the way."""
    if args.train_samples is None:
        if args.train_iters is None:
            raise PierConfigError("the job says neither --train-iters nor --train-samples.")
        return
    with counted(args):
        settle_iterations(args)


def parameters_of_first_shard(args: argparse.Namespace) -> tuple[int, int, int] | None:
    """Parameters of a validated job's model on rank 0, which holds a part of the first pipeline stage.

    What Megatron's own estimate leaves out is added: biases, norms of queries and keys, position embeddings.

    Returns:
        Numbers of those that are split over tensor-parallel ranks, that each of these ranks copies, and that the first and the
        last pipeline stage share; None if they depend on the tokenizer, which has not been loaded.
    """
    sized = _with_vocabulary(args)
    if sized is None:
        return None
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
    tied = embedding if stages > 1 and not sized.untie_embeddings_and_output_weights else 0
    return round(split) - tied, round(copied), tied


def _estimated(args: argparse.Namespace, tensor_parallel: int) -> float:
    estimate = versions.require(_MEMORY, "compute_weight_and_optimizer_memory")
    # Without the distributed optimizer the estimate is 18 bytes for each parameter, whatever else is set.
    changed = _with(args, use_distributed_optimizer=False, tensor_model_parallel_size=tensor_parallel)
    return float(estimate(changed)) / 18


def owners(args: argparse.Namespace) -> int:
    """Ranks of a group that shard the parameters of a validated job."""
    replicas: int = args.data_parallel_size * args.context_parallel_size // (getattr(args, "pier_groups", None) or 1)
    return replicas if are_shared_out(args) else 1


def taken_by_outer_loop(args: argparse.Namespace, config: PierConfig) -> Takes | None:
    """What start-up will say that the outer loop takes of rank 0 of a validated job, or None as above.

    Where ranks of a group shard the parameters, Megatron pads the buffers that it divides, and a rank may hold fewer.
    """
    held = parameters_of_first_shard(args)
    if held is None:
        return None
    has_copies = args.tensor_model_parallel_size > 1 or not are_shared_out(args)
    owned = [-(-numel // owners(args)) for numel in held]
    return Takes.planned(config, owned, has_copies, device_type(args))


def lines_of_outer_loop(args: argparse.Namespace, config: PierConfig) -> list[str]:
    """The lines of start-up's block on it; of a job whose vocabulary is unknown, what is known."""
    takes = taken_by_outer_loop(args, config)
    if takes is None:
        size = bytes_per_parameter(config)
        return [
            f"outer state: {size} bytes per owned parameter; how many depends on the tokenizer (--vocab-size shows it here)"
        ]
    about = "up to the padding of buffers, " if owners(args) > 1 else ""
    return [f"{about}{line}" for line in takes.lines(config, device_type(args))]


def device_type(args: argparse.Namespace) -> str:
    """Type of the device on which a job trains."""
    return "cuda" if args.distributed_backend == "nccl" else "cpu"


def parameters_of_model(args: argparse.Namespace) -> int | None:
    """Parameters of a validated job's whole model; None as above."""
    sized = _with_vocabulary(args)
    held = (
        None
        if sized is None
        else parameters_of_first_shard(
            _with(
                sized, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, world_size=1, expert_model_parallel_size=1
            )
        )
    )
    return None if held is None else sum(held)


def _with(args: argparse.Namespace, **changes: object) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | changes)


def missing_flags(args: argparse.Namespace) -> list[str]:
    """Flags that parsed arguments lack and that have no default, unless a file of the job may give them."""
    if args.use_checkpoint_args or args.yaml_cfg is not None or args.heterogeneous_layers_config_path is not None:
        return []
    needed = [*_NEEDED, *(["seq_length"] if args.encoder_seq_length is None else [])]
    needed += [] if args.train_samples is not None else ["train_iters"]
    return [flag(name) for name in needed if getattr(args, name) is None]


def _with_vocabulary(args: argparse.Namespace) -> argparse.Namespace | None:
    """The arguments as they are once the tokenizer is built, as far as its size is given."""
    padded = getattr(args, "padded_vocab_size", None)
    if padded is None and args.vocab_size is not None:
        pad = versions.require("megatron.core.tokenizers.utils.build_tokenizer", "vocab_size_with_padding")
        padded = pad(args.vocab_size, args, logging_enabled=False)
    return None if padded is None else _with(args, padded_vocab_size=padded)


def operations(args: argparse.Namespace) -> float | None:
    """Floating-point operations of the mean iteration, all ranks together, by Megatron's own count; None as above."""
    batch = args.global_batch_size if args.train_samples is None else args.train_samples / args.train_iters
    return _operations(args, batch)


def operations_done(args: argparse.Namespace) -> float | None:
    """The same of all iterations behind a checkpoint, by the arguments stored in it."""
    return _operations(args, args.consumed_train_samples)


def _operations(args: argparse.Namespace, samples: float) -> float | None:
    sized = _with_vocabulary(args)
    if sized is None:
        return None
    return float(versions.require("megatron.training.training", "num_floating_point_operations")(sized, samples))


def elements_between_stages(args: argparse.Namespace) -> float:
    """Elements that a rank in the middle of a pipeline sends in an iteration: activations onwards, their gradients back."""
    if args.pipeline_model_parallel_size == 1:
        return 0.0
    microbatches = args.global_batch_size / (args.micro_batch_size * args.data_parallel_size)
    return float(2 * microbatches * (args.virtual_pipeline_model_parallel_size or 1)) * elements_of_message(args)


def elements_of_message(args: argparse.Namespace) -> float:
    """Elements that a rank sends to the next stage for one micro-batch."""
    return float(args.seq_length * args.micro_batch_size * args.hidden_size / ranks_of_activations(args))


def memory(args: argparse.Namespace) -> dict[str, float]:
    """What Megatron itself takes on the fullest rank of a job whose sizes are known, by its own estimate, in bytes."""
    sized = _with_vocabulary(args) or args
    # The instances of the distributed optimizer share nothing: a rank owns what it would with the replicas of one group.
    sizes = _with(sized, data_parallel_size=args.data_parallel_size // (args.pier_groups or 1))
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    compute_activations = versions.require(_MEMORY, "compute_activation_memory_without_sp")
    costs = [feature.cost(args) for feature in features.used(args)]
    activations = compute_activations(sized, microbatches) * math.prod(cost.activations for cost in costs)
    parameters = sum(parameters_of_first_shard(args) or ())
    return {
        "weights, gradients, optimizer": versions.require(_MEMORY, "compute_weight_and_optimizer_memory")(sizes),
        "activations, without recomputation": activations,
    } | {what: size * parameters for cost in costs for what, size in cost.per_parameter.items()}


def check_checkpoint(args: argparse.Namespace, config: PierConfig, ranks_in_group: int) -> str | None:
    """Looks at the checkpoint that a validated job would load, and says what it is; None if there is none.

    Raises:
        PierConfigError: If the job would refuse it, or files of it are damaged.
    """
    folder = None if args.load is None else stored_checkpoint(Path(args.load), args.ckpt_step)
    if folder is None:
        return None
    found = damage(folder)
    if found:
        raise PierConfigError(f"--load: {folder} is damaged: {found}. Choose another iteration with --ckpt-step.")
    metadata = versions.require("megatron.core", "dist_checkpointing").load_content_metadata(str(folder)) or {}
    if ENTRY not in metadata:
        return f"{folder}: a stock checkpoint; Pier begins from its weights, without outer momentum"
    saved = Description.from_metadata(metadata[ENTRY])
    present = Description.of_run(config, saved.iteration, layout_of(args, ranks_in_group), "cuda")
    changes = saved.check(present, config.override_checkpoint) + features.changes(metadata, args)
    how = f"with changes: {', '.join(changes)}" if changes else "and the job resumes exactly, if gradient buckets are the same"
    return f"{folder}: whole, of iteration {saved.iteration}, by pier_megatron {saved.version}, {how}"


def planned_topology(args: argparse.Namespace, ranks_per_node: int) -> Topology:
    """Where the ranks of a validated job will stand, if the launcher numbers them node by node."""
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    worlds, ranks_of_run = settings_of(args).worlds, args.world_size * settings_of(args).launches
    generator = versions.require("megatron.core.parallel_state", "RankGenerator")(
        tp=args.tensor_model_parallel_size,
        ep=1,
        dp=args.data_parallel_size // worlds,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        order=order,
    )
    firsts = range(0, ranks_of_run, ranks_of_run // worlds)
    tensor_parallel = {
        first + rank: first + ranks[0] for first in firsts for ranks in generator.get_ranks("tp") for rank in ranks
    }
    positions = {}
    for alike in generator.get_ranks("dp-cp"):
        ranks = [first + rank for first in firsts for rank in alike]
        size = len(ranks) // args.pier_groups
        groups = [ranks[start : start + size] for start in range(0, len(ranks), size)]
        for index, members in enumerate(groups):
            for place, rank in enumerate(members):
                positions[rank] = (index, groups[0][place])
    planned = []
    for rank, (group, peers) in sorted(positions.items()):
        node = f"node {rank // ranks_per_node}"
        domain = domain_name(rank, node, args.pier_ranks_per_domain)
        planned.append(Rank(rank, node, domain, group, tensor_parallel[rank], peers))
    return Topology(planned)
