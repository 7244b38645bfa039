"""What an inner optimizer needs, said before Megatron would, what it does without, and what it keeps."""

import argparse
import importlib.util
from collections.abc import Iterable

from pier_megatron.errors import PierConfigError
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.args import flag

MAIN_PARAMETERS, MOMENTS = "main_params_dtype", ("exp_avg_dtype", "exp_avg_sq_dtype")
"""Arguments with the types in which FusedAdam keeps them."""

# Types of optimizer state that FusedAdam keeps with a scale: what Megatron's validation makes of words of the command line.
_SCALED = {"torch.float16": "fp16", "torch.uint8": "fp8"}


def check(args: argparse.Namespace) -> None:
    """Refuses what the chosen inner optimizer cannot do.

    Args:
        args: Megatron's, before it has validated them.

    Raises:
        PierConfigError: With the flag, the reason and a remedy.
    """
    name = args.pier_inner_optimizer or "adam"
    if name == "adam":
        return
    given = f"--pier-inner-optimizer {name}"
    if importlib.util.find_spec("emerging_optimizers") is None:
        raise PierConfigError(
            f"{given} needs the package emerging-optimizers, which is not installed: "
            "pip install 'emerging-optimizers>=0.2', or this plugin with the extra [muon]."
        )
    if args.fp16:
        raise PierConfigError(f"--fp16 cannot be used with {given}: Megatron's {name} has no loss scaling. Use --bf16.")
    for name in ("fp8_param_gather", "fp4_param_gather"):
        if getattr(args, name, None):
            raise PierConfigError(
                f"{flag(name)} cannot be used with {given}: Megatron quantises only what its distributed optimizer "
                "over AdamW gathers. Drop it."
            )
    if args.use_distributed_optimizer:
        _check_layer_wise(args, given)


def are_shared_out(args: argparse.Namespace) -> bool:
    """Whether the data-parallel ranks of a group shard the main parameters, by arguments that have been validated."""
    return bool(args.use_distributed_optimizer or getattr(args, "use_layer_wise_distributed_optimizer", False))


def _check_layer_wise(args: argparse.Namespace, given: str) -> None:
    release = versions.megatron_version()
    if release.startswith("0.17"):
        raise PierConfigError(
            f"--use-distributed-optimizer cannot be used with {given} on Megatron {release}: the layer-wise optimizer that it "
            "stands for gathers parameters in another way there. Use Megatron 0.18 or newer, or drop it."
        )
    if not args.bf16:
        raise PierConfigError(
            f"--use-distributed-optimizer cannot be used with {given} in FP32: Megatron's layer-wise optimizer steps bf16 "
            "models only. Add --bf16, or drop it."
        )
    if not args.use_layer_wise_param_layout:
        raise PierConfigError(
            f"--no-use-layer-wise-param-layout cannot be used with {given}: parameters are gathered from parts of unequal "
            "length then, by a call of the inner step that outer steps do not repeat. Drop it."
        )
    if args.expert_model_parallel_size > 1:
        raise PierConfigError(
            f"--expert-model-parallel-size {args.expert_model_parallel_size} with --use-distributed-optimizer cannot be used "
            f"with {given}: Megatron's layer-wise optimizer has no place for the biases of experts, and without them it has "
            "not been tried. Drop --use-distributed-optimizer."
        )


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
