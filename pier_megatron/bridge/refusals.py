"""What of Megatron-Bridge cannot be used with Pier: settings that Megatron has no flag for, each with its reason.

What has a flag is refused as under flags, by :mod:`pier_megatron.integration.refusals`.
"""

import operator
from typing import Any

from pier_megatron.errors import PierConfigError
from pier_megatron.settings import INNER_OPTIMIZERS

# By path in the configuration. A setting is refused unless it is None, False or 0; a part of the configuration is, if its own
# switch is on.
_REFUSED = {
    "dist.use_decentralized_pg": "Pier finds its groups among Megatron's global process groups",
    "dist.eval_context_parallel_size": "it replaces process groups for evaluation, which has not been tried",
    "ddp.use_megatron_fsdp": "the outer loop needs the main parameters of Megatron's distributed optimizer",
    "peft": "the outer state is laid out for all parameters of the model, and adapters have not been tried",
    "inprocess_restart.enabled": "a restart inside the process begins at an iteration that the outer loop does not know of",
    "nvrx_straggler.enabled": "it gathers reports of all ranks between outer steps",
    "checkpoint.custom_manager_class": "what groups have of their own is stored by Megatron-Bridge's own functions, which "
    "another manager need not call",
    "checkpoint.load_main_params_from_ckpt": "main parameters would be set after the outer loop has taken them over",
}


def refuse_what_cannot_work(config: Any) -> None:
    """Refuses settings of a ``ConfigContainer``.

    Raises:
        PierConfigError: With the setting and the reason.
    """
    for path, reason in _REFUSED.items():
        value = config
        for name in path.split("."):
            value = getattr(value, name, None)
        if value:
            raise PierConfigError(f"config.{path} cannot be used with PierOptimizerConfig: {reason}.")
    inner = config.optimizer.optimizer
    if inner not in INNER_OPTIMIZERS:
        raise PierConfigError(
            f"config.optimizer.optimizer='{inner}' cannot be used with PierOptimizerConfig: not one of "
            f"{', '.join(INNER_OPTIMIZERS)}."
        )
    if inner != "adam":
        for path in ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"):
            if operator.attrgetter(path)(config):
                raise PierConfigError(
                    f"config.{path}=True cannot be used with config.optimizer.optimizer='{inner}': Megatron-Bridge lays no "
                    "buckets out for Megatron's layer-wise optimizer, which shards the work. Set it to False, or use flags."
                )
    instances, groups = config.ddp.num_distributed_optimizer_instances, config.optimizer.groups
    if instances not in (1, groups):
        raise PierConfigError(
            f"config.ddp.num_distributed_optimizer_instances={instances} contradicts config.optimizer.groups={groups}: a Pier "
            "group is a distributed-optimizer instance, and PierOptimizerConfig sets their number. Drop the former."
        )
