"""A job that has not been started: its arguments through Megatron's own parser, its ranks through Megatron's own order."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from pier_megatron.checkpoint import ENTRY, Description
from pier_megatron.config import PierConfig, PierConfigError
from pier_megatron.groups import Rank, Topology
from pier_megatron.integration import versions
from pier_megatron.integration.checkpointing import damage, layout_of
from pier_megatron.launch_command import LaunchCommand
from pier_megatron.planner import Job

_ARGUMENTS = "megatron.training.arguments"


def parsed_arguments(command: LaunchCommand) -> tuple[argparse.Namespace, list[str]]:
    """Parses and validates a job's arguments as rank 0 of it would. The plugin must be registered.

    Returns:
        The arguments, and those words that Megatron does not know: the script's own flags, or misspelt ones.

    Raises:
        PierConfigError: If Megatron or the plugin refuses them, with the reason.
    """
    environment = {
        "RANK": "0",
        "WORLD_SIZE": str(command.ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(command.ranks_per_node),
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
    }
    output = io.StringIO()
    with _in_the_job(environment, [command.script, *command.arguments]):
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                args, unknown = _parse()
                versions.require(_ARGUMENTS, "validate_args")(args)
        except PierConfigError:
            raise
        except SystemExit:
            raise PierConfigError(output.getvalue().strip().splitlines()[-1]) from None
        except (AssertionError, ValueError, RuntimeError) as error:
            raise PierConfigError(f"Megatron refuses the arguments: {error}") from error
    return args, unknown


def _parse() -> tuple[argparse.Namespace, list[str]]:
    """Megatron's ``parse_args``, and what it would leave out."""
    unknown: list[str] = []
    original = argparse.ArgumentParser.parse_known_args

    def listening(parser: Any, *args: Any, **kwargs: Any) -> Any:
        namespace, rest = original(parser, *args, **kwargs)
        unknown[:] = rest
        return namespace, rest

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", listening):
        args: argparse.Namespace = versions.require(_ARGUMENTS, "parse_args")(ignore_unknown_args=True)
    return args, unknown


@contextlib.contextmanager
def _in_the_job(environment: Mapping[str, str], argv: list[str]) -> Iterator[None]:
    with mock.patch.dict(os.environ, environment), mock.patch.object(sys, "argv", argv):
        yield


def parameters_of_largest_shard(args: argparse.Namespace) -> int | None:
    """Parameters of the fullest tensor- and pipeline-parallel shard of a model, by Megatron's own estimate.

    Args:
        args: Megatron's, parsed and validated.

    Returns:
        Their number, or None if it hangs on the tokenizer, which has not been loaded.
    """
    vocabulary = getattr(args, "padded_vocab_size", None) or args.vocab_size
    if vocabulary is None:
        return None
    estimate = versions.require("megatron.training.theoretical_memory_usage", "compute_weight_and_optimizer_memory")
    # Without the distributed optimizer the estimate is 18 bytes for each parameter, whatever else is set.
    sizes = argparse.Namespace(**vars(args) | {"use_distributed_optimizer": False, "padded_vocab_size": vocabulary})
    parameters: int = round(estimate(sizes) / 18)
    return parameters


def job(args: argparse.Namespace) -> Job:
    """Sizes of a job.

    Raises:
        PierConfigError: If the vocabulary's size is not known.
    """
    shard = parameters_of_largest_shard(args)
    if shard is None:
        raise PierConfigError("the vocabulary's size comes from the tokenizer, which is not loaded here: add --vocab-size.")
    args.padded_vocab_size = getattr(args, "padded_vocab_size", None) or args.vocab_size
    flops = versions.require("megatron.training.training", "num_floating_point_operations")(args, args.global_batch_size)
    replicas = args.data_parallel_size * args.context_parallel_size
    return Job(flops, shard, args.world_size, args.tensor_model_parallel_size, replicas, args.pier_groups)


def memory(args: argparse.Namespace) -> dict[str, float]:
    """What Megatron itself takes on the fullest rank, by its own estimate, in bytes."""
    module = "megatron.training.theoretical_memory_usage"
    # The instances of the distributed optimizer share nothing: a rank owns what it would with the replicas of one group.
    sizes = argparse.Namespace(**vars(args) | {"data_parallel_size": args.data_parallel_size // args.pier_groups})
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    return {
        "weights, gradients, optimizer": versions.require(module, "compute_weight_and_optimizer_memory")(sizes),
        "activations, without recomputation": versions.require(module, "compute_activation_memory_without_sp")(
            args, microbatches
        ),
    }


def check_checkpoint(args: argparse.Namespace, config: PierConfig, ranks_in_group: int) -> str | None:
    """Looks at the checkpoint that a job would load.

    Args:
        args: Megatron's, parsed and validated.
        config: Of the job.
        ranks_in_group: Its ranks in a group.

    Returns:
        What it is, or None if there is none to load.

    Raises:
        PierConfigError: If the job would refuse it, or files of it are damaged.
    """
    if args.load is None or not (Path(args.load) / "latest_checkpointed_iteration.txt").exists():
        return None
    iteration = args.ckpt_step or (Path(args.load) / "latest_checkpointed_iteration.txt").read_text().strip()
    folder = Path(args.load) / (f"iter_{int(iteration):07d}" if str(iteration).isdigit() else str(iteration))
    found = damage(folder)
    if found:
        raise PierConfigError(f"--load: {folder} is damaged: {found}. Choose another iteration with --ckpt-step.")
    metadata = versions.require("megatron.core", "dist_checkpointing").load_content_metadata(str(folder)) or {}
    if ENTRY not in metadata:
        return f"{folder}: a stock checkpoint; Pier begins from its weights, without outer momentum"
    saved = Description.from_metadata(metadata[ENTRY])
    present = Description.of_run(config, saved.iteration, layout_of(args, ranks_in_group))
    changes = saved.check(present, config.override_checkpoint)
    how = f"with changes: {', '.join(changes)}" if changes else "and the job goes on exactly"
    return f"{folder}: whole, of iteration {saved.iteration}, by pier_megatron {saved.version}, {how}"


def planned_topology(args: argparse.Namespace, ranks_per_node: int) -> Topology:
    """Where the ranks of a job will stand, if the launcher numbers them node by node.

    Args:
        args: Megatron's, parsed and validated.
        ranks_per_node: Processes on each node.
    """
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    generator = versions.require("megatron.core.parallel_state", "RankGenerator")(
        tp=args.tensor_model_parallel_size,
        ep=1,
        dp=args.data_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        order=order,
    )
    tensor_parallel = {rank: tuple(ranks) for ranks in generator.get_ranks("tp") for rank in ranks}
    positions = {}
    for ranks in generator.get_ranks("dp-cp"):
        size = len(ranks) // args.pier_groups
        groups = [ranks[start : start + size] for start in range(0, len(ranks), size)]
        for index, members in enumerate(groups):
            for place, rank in enumerate(members):
                positions[rank] = (index, tuple(other[place] for other in groups))
    return Topology(
        [
            Rank(rank, f"node {rank // ranks_per_node}", group, tensor_parallel[rank], peers)
            for rank, (group, peers) in sorted(positions.items())
        ]
    )
