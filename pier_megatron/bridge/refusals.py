"""What of Megatron-Bridge cannot be used with Pier: settings that Megatron has no flag for, each with its reason.

What has a flag is refused as under flags, by :mod:`pier_megatron.integration.refusals`.
"""

from typing import Any

from pier_megatron.settings import INNER_OPTIMIZERS

_PIER = "PierOptimizerConfig"

# By path in the configuration. A setting is refused unless it is None, False or 0; a part of the configuration is, if its own
# switch is on.
_REFUSED = {
    "dist.use_decentralized_pg": "Pier finds its groups among Megatron's global process groups",
    "dist.eval_context_parallel_size": "it replaces process groups for evaluation, which has not been tried",
    "ddp.use_megatron_fsdp": "the outer loop needs the main parameters of Megatron's distributed optimizer",
    "peft": "the outer state is laid out for all parameters of the model, and adapters have not been tried",
    "nvrx_straggler.enabled": "it gathers reports of all ranks between outer steps",
    "checkpoint.custom_manager_class": "what groups have of their own is stored by Megatron-Bridge's own functions, which "
    "another manager need not call",
    "checkpoint.load_main_params_from_ckpt": "main parameters would be set after the outer loop has taken them over",
}


def refused(config: Any) -> list[str]:
    """Messages of settings of a ``ConfigContainer`` that cannot work, each with its reason."""
    inner = config.optimizer.optimizer
    shares = ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer")
    given = f"config.optimizer.optimizer='{inner}'"
    table = (
        *((_value(config, path), f"config.{path} cannot be used with {_PIER}: {why}.") for path, why in _REFUSED.items()),
        (
            inner not in INNER_OPTIMIZERS,
            f"{given} cannot be used with {_PIER}: not one of {', '.join(INNER_OPTIMIZERS)}.",
        ),
        *(
            (
                inner == "muon" and _value(config, path),
                f"config.{path}=True cannot be used with {given}: Megatron-Bridge lays no buckets out for Megatron's "
                "layer-wise optimizer, which shards the work. Set it to False, or use flags.",
            )
            for path in shares
        ),
    )
    return [message for holds, message in table if holds]


def _value(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config
