"""What an inner optimizer keeps, and who steps it, by Megatron's arguments."""

import argparse
from collections.abc import Iterable

from pier_megatron.megatron_api.args import flag

MAIN_PARAMETERS, MOMENTS = "main_params_dtype", ("exp_avg_dtype", "exp_avg_sq_dtype")
"""Arguments with the types in which FusedAdam keeps them."""

# Types of optimizer state that FusedAdam keeps with a scale: what Megatron's validation makes of words of the command line.
_SCALED = {"torch.float16": "fp16", "torch.uint8": "fp8"}


def are_shared_out(args: argparse.Namespace) -> bool:
    """Whether the data-parallel ranks of a group shard the main parameters, by arguments that have been validated."""
    return bool(args.use_distributed_optimizer or getattr(args, "use_layer_wise_distributed_optimizer", False))


def keeps_main_parameters(args: argparse.Namespace) -> bool:
    """Whether FusedAdam keeps the main parameters, by validated arguments; otherwise Megatron does, in FP32.

    Megatron derives the same when it builds the optimizer: ``use_precision_aware_optimizer_no_fp8_or_ds_fp8``.
    """
    of_fp8 = getattr(args, "fp8_recipe", None) not in (None, "delayed")
    is_aware = bool(getattr(args, "use_precision_aware_optimizer", False))
    return is_aware and (not of_fp8 or bool(scaled(args, [MAIN_PARAMETERS])))


def keeps_halves(args: argparse.Namespace) -> bool:
    """Whether a checkpoint has halves of main parameters under Megatron's own keys; with Transformer Engine 2.1 or newer."""
    if not keeps_main_parameters(args) or scaled(args, [MAIN_PARAMETERS]):
        return False
    # A setting of Megatron-Bridge's alone.
    return bool(args.bf16) and getattr(args, "store_param_remainders", True)


def scaled(args: argparse.Namespace, names: Iterable[str] = (MAIN_PARAMETERS, *MOMENTS)) -> list[str]:
    """Flags, as typed, of the kinds of tensors that FusedAdam keeps with a scale for each, by arguments typed or validated."""
    if not getattr(args, "use_precision_aware_optimizer", False):
        return []
    kept = [(name, str(getattr(args, name, None))) for name in names]
    return [f"{flag(name)} {_SCALED.get(kind, kind)}" for name, kind in kept if kind in {*_SCALED, *_SCALED.values()}]
