"""Layered gradient accumulation without a pipeline: micro-batches of a step pass a layer before any passes the next one.

A layer's gradients are complete, and their reduction begins, when all micro-batches have come back through it: it hides behind
their backward passes through all layers below, rather than behind those of the last micro-batch alone. Under Pier that is the
reduction inside a group, and in the lazy start the one of all.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pier_megatron.errors import PierConfigError
from pier_megatron.features import Cost, refuse
from pier_megatron.megatron_api import batches, versions
from pier_megatron.megatron_api.args import ranks_of_activations

if TYPE_CHECKING:
    from torch import nn

_FSDP = "it gathers and frees parameters around each pass of a layer, so that a layer is gathered as often as before"
_CONTEXTS = "its context is entered around a layer, and would stay entered while other micro-batches pass"
_PAIRS = "it expects the backward pass of a micro-batch right after its forward pass"
_GRAPHS = "a CUDA graph of a layer keeps the activations of one micro-batch"
REFUSED = {
    "use_megatron_fsdp": _FSDP,
    "use_torch_fsdp2": _FSDP,
    "fp8": _CONTEXTS,
    "fp4": _CONTEXTS,
    "cpu_offloading_num_layers": _CONTEXTS,
    "fine_grained_activation_offloading": _PAIRS,
    "moe_paged_stash": _PAIRS,
    "log_straggler": "it times the forward pass of each micro-batch as a whole",
    "overlap_moe_expert_parallel_comm": "it is another order, which takes the layers of two micro-batches in turns",
    "hybrid_context_parallel": "it is another order, in which micro-batches have different lengths and ranks",
    "hybrid_layer_pattern": "the layers of a hybrid model are in another block than TransformerBlock",
    "mtp_num_layers": "multi-token prediction has not been tried in this order",
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
    "distribute_saved_activations": "it takes the inputs of layers apart, which the layers before still need",
}
"""What expects Megatron's order of passes, with the reason."""


def run[R](
    schedule: Callable[..., R],
    /,
    *,
    model: Sequence["nn.Module"],
    num_microbatches: int,
    forward_only: bool = False,
    **kwargs: object,
) -> R:
    """Runs Megatron's schedule without pipelining, a training step layer by layer and an evaluation as it is.

    Args:
        schedule: Megatron's function.
        model: The model, alone in its list.
        num_microbatches: Number of micro-batches of this step.
        forward_only: Whether it is an evaluation.
        kwargs: Other arguments of the schedule.
    """
    if forward_only:
        return schedule(model=model, num_microbatches=num_microbatches, forward_only=True, **kwargs)
    # Few runs need greenlet.
    from pier_megatron.experiments.layered.segments import accumulate

    return accumulate(
        schedule,
        model=model,
        num_microbatches=num_microbatches,
        at_a_time=together(versions.megatron_args(), num_microbatches),
        **kwargs,
    )


def together(args: argparse.Namespace, micro_batches: int) -> int:
    """How many micro-batches of a step pass a layer before any passes the next one.

    Args:
        args: Megatron's.
        micro_batches: Number of micro-batches of the step.
    """
    return micro_batches if args.pier_layered is True else min(int(args.pier_layered), micro_batches)


def prepare(args: argparse.Namespace) -> None:
    """Refuses what expects Megatron's order.

    Raises:
        PierConfigError: With the flag, the values and a remedy.
    """
    refuse(args, REFUSED, "--pier-layered and --pipeline-model-parallel-size 1", _GRAPHS)
    if args.recompute_granularity == "full" and args.recompute_method == "uniform" and args.recompute_num_layers != 1:
        raise PierConfigError(
            f"--pier-layered with --recompute-method uniform and --recompute-num-layers {args.recompute_num_layers}: the input "
            "of every layer is kept, so that recomputing several layers from one would save nothing. Use "
            "--recompute-num-layers 1."
        )


def cost(args: argparse.Namespace) -> Cost:
    """Says for how many micro-batches of the largest step there are activations at once."""
    return Cost(activations=together(args, _most(args)))


def describe(args: argparse.Namespace) -> list[str]:
    """Says what the order will be and what it costs, line by line."""
    count = together(args, _most(args))
    # Megatron's placement of activations on ranks.
    ranks = ranks_of_activations(args)
    sizes = (count, args.num_layers, args.seq_length, args.micro_batch_size, args.hidden_size)
    width = 2 if args.bf16 or args.fp16 else 4
    size = math.prod(sizes) * width / ranks
    recomputes = args.recompute_granularity == "full"
    return [
        f"Pier layered: {count} micro-batches of a step pass a layer before any passes the next one",
        f"  activations of {count} micro-batches at once; Megatron's order keeps those of one. Inputs of layers, "
        f"{' x '.join(map(str, sizes))} (micro-batches, layers, tokens, sequences, hidden size) x {width} bytes"
        f"{f' / {ranks} ranks' if ranks > 1 else ''}: {size / 2**30:.2f} GiB"
        + (", all that layers keep with full recomputation" if recomputes else " of them"),
    ]


def warnings(args: argparse.Namespace) -> list[str]:
    """Says where the order is Megatron's own."""
    if together(args, _most(args)) > 1:
        return []
    return ["--pier-layered: one micro-batch at a time is Megatron's own order. Use smaller micro-batches, or a larger N."]


def _most(args: argparse.Namespace) -> int:
    return max(batches.training_phases(args).values())
