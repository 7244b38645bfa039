"""What a checkpoint takes on disk, before one is written."""

import argparse

from pier_megatron.config import PierConfig
from pier_megatron.integration.checkpoint.description import groups_apart
from pier_megatron.integration.inner.requirements import keeps_halves
from pier_megatron.outer.memory import rounds_at_once
from pier_megatron.outer.rules import common_names

INNER_STATE = "inner state of"
"""Prefix of the names under which groups store what Megatron does not."""

_FP32 = 4
# Main parameter and AdamW's two moments.
_INNER = 3 * _FP32


def bytes_per_parameter(args: argparse.Namespace, config: PierConfig | None) -> dict[str, float]:
    """Bytes that each parameter of the model takes in a checkpoint of the local phase, by what they are.

    Args:
        args: Megatron's, validated.
        config: Configuration of the run; None with a stock optimizer.
    """
    is_half = args.bf16 or args.fp16
    weights = 2 if is_half else _FP32
    if args.no_save_optim:
        return {"weights": weights}
    # Only the distributed optimizer keeps separate main parameters for FP32 weights.
    optimizer = _INNER if is_half or args.use_distributed_optimizer else _INNER - _FP32
    if keeps_halves(args):
        # The lower halves of main parameters.
        optimizer -= 2
    sizes: dict[str, float] = {"weights": weights, "optimizer": optimizer}
    if config is None:
        return sizes
    groups = config.groups // config.launches
    sizes["outer state"] = _FP32 * len(common_names(config)) * (1 if config.has_common_anchor else config.groups)
    interval = args.save_interval or config.sync_interval
    after_outer_steps = interval % config.sync_interval == 0 and not config.overlap and config.fragments == 1
    own = len(groups_apart(config, is_local=True, is_synchronised=after_outer_steps and config.has_common_anchor))
    if own:
        sizes[f"{INNER_STATE} {own} {'group' if own == 1 else 'groups'} apart"] = _INNER * own
    residuals = config.has_error_feedback * (1 if config.lighthouse is None else 2)
    under_way = _FP32 * (2 * rounds_at_once(config) / config.fragments + residuals)
    if under_way:
        sizes["exchanges under way and what codecs dropped"] = under_way * groups
    return sizes
