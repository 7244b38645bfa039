"""The configuration of Pier in a ``ConfigContainer``, and the optimizer that Megatron-Bridge asks it for."""

import dataclasses
import functools
from typing import Any

from megatron.bridge.training.config import ConfigContainer, OptimizerConfig
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

from pier_megatron.bridge.arguments import BridgeLoop
from pier_megatron.errors import PierConfigError, suggestion
from pier_megatron.flags import REMOVED
from pier_megatron.integration.arguments import check_arguments
from pier_megatron.integration.training import with_outer_loop
from pier_megatron.megatron_api import run, versions
from pier_megatron.settings import PluginSettings, Settings

# A stored configuration names its classes.
register_allowed_target_prefix("pier_megatron.bridge.")

_ISLANDS = "elastic islands replace what megatron.training does with samples and at the start. Groups are of one launch here"
_NOT_HERE = {
    "inner_optimizer": "the optimizer inside a group is that of config.optimizer.optimizer",
    "train_iters": "it is config.train.train_iters",
    "load_newest_whole": "Megatron-Bridge names its last checkpoint in a file of its own. Use config.checkpoint.ckpt_step",
    **dict.fromkeys("lighthouse island island_address secret_file island_timeout island_wait sync_seconds".split(), _ISLANDS),
}
"""Settings of the flags that are none under Megatron-Bridge, with the reason."""


@dataclasses.dataclass
class PierOptimizerConfig(OptimizerConfig):
    """AdamW or Muon inside groups, with Pier's outer step between them.

    Attributes without a description here are those of Megatron's ``OptimizerConfig``; those of Pier are the ``--pier-*``
    flags, see :class:`pier_megatron.settings.Settings`.
    """

    groups: int | None = None
    ranks_per_domain: int | None = Settings.ranks_per_domain
    sync_interval: int = Settings.sync_interval
    preset: str = Settings.preset
    lazy_start_fraction: float = Settings.lazy_start_fraction
    lazy_start_iters: int | None = Settings.lazy_start_iters
    outer_lr: float | None = Settings.outer_lr
    outer_momentum: float | None = Settings.outer_momentum
    outer_rule: str | None = Settings.outer_rule
    subgroup_size: int | None = Settings.subgroup_size
    subgroup_seed: int = Settings.subgroup_seed
    evaluate_mean: bool = Settings.evaluate_mean
    sites: int | None = Settings.sites
    site_interval: int | None = Settings.site_interval
    overlap: int = Settings.overlap
    fragments: int = Settings.fragments
    exchange_dtype: str = Settings.exchange_dtype
    no_error_feedback: bool = Settings.no_error_feedback
    offload: bool = Settings.offload
    chunk_mib: int | None = Settings.chunk_mib
    save_inner_state: str = Settings.save_inner_state
    load_inner_state: str = Settings.load_inner_state
    override_checkpoint: bool = Settings.override_checkpoint
    try_any_megatron: bool = PluginSettings.try_any_megatron

    def finalize(self) -> None:
        """Checks what Megatron-Bridge checks; AdamW under the distributed optimizer."""
        self.use_distributed_optimizer = self.optimizer == "adam"
        super().finalize()

    def provide(
        self, model_chunks: Any, config_overrides: Any, use_gloo_process_groups: bool = False, pg_collection: Any = None
    ) -> Any:
        """Builds the optimizer; Megatron-Bridge calls it once the model is wrapped and before anything is loaded.

        Args:
            model_chunks: Virtual stages of the model on this rank, in order.
            config_overrides: Megatron-Bridge's settings of groups of parameters.
            use_gloo_process_groups: Whether Megatron may gather the optimizer's state over gloo.
            pg_collection: Process groups, if Megatron-Bridge keeps them outside of Megatron's global state.

        Raises:
            PierConfigError: If a check fails that needs the model, or the configuration has not been validated.
        """
        loop = run.loop()
        if not isinstance(loop, BridgeLoop) or loop.config.optimizer is not self:
            raise PierConfigError(
                "PierOptimizerConfig: the configuration that it belongs to has not been validated. Train with "
                "megatron.bridge.training.pretrain.pretrain(config, forward_step), which does."
            )
        with loop.own_words():
            # Megatron-Bridge may have computed the number of iterations since the configuration was validated.
            check_arguments(loop.arguments())
        build = versions.require("megatron.core.optimizer", "get_megatron_optimizer")
        optimizer = build(
            config=self,
            model_chunks=model_chunks,
            config_overrides=config_overrides,
            use_gloo_process_groups=use_gloo_process_groups,
            pg_collection=pg_collection,
        )
        with loop.own_words():
            return with_outer_loop(optimizer, model_chunks, loop.arguments(), loop.in_own_words)


@functools.cache
def settings() -> tuple[str, ...]:
    """Names of Pier's settings in a :class:`PierOptimizerConfig`."""
    megatron = {field.name for field in dataclasses.fields(OptimizerConfig)}
    return tuple(field.name for field in dataclasses.fields(PierOptimizerConfig) if field.name not in megatron)


def with_pier(config: ConfigContainer, **pier: Any) -> ConfigContainer:
    """Makes a recipe of Megatron-Bridge train with Pier.

    Args:
        config: Configuration of a run with AdamW, changed in place.
        pier: Settings of Pier, such as ``sync_interval=50``: the ``--pier-*`` flags without their prefix.

    Returns:
        The same configuration.

    Raises:
        PierConfigError: If there is no such setting, or the recipe has an optimizer of its own.
    """
    for name in pier.keys() - {*settings()}:
        if (why := REMOVED.get(f"--pier-{name.replace('_', '-')}")) is not None:
            raise PierConfigError(f"{name}={pier[name]!r}: no such setting any more: {why}")
        if name in _NOT_HERE:
            raise PierConfigError(f"{name}={pier[name]!r} is not supported under Megatron-Bridge: {_NOT_HERE[name]}.")
        raise PierConfigError(f"{name}={pier[name]!r}: Pier has no such setting{suggestion(name, settings())}")
    optimizer = config.optimizer
    if type(optimizer) not in (OptimizerConfig, PierOptimizerConfig):
        raise PierConfigError(
            f"config.optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}. Pier needs Megatron's own: "
            "use megatron.bridge.training.config.OptimizerConfig(optimizer='adam', ...), or 'muon'."
        )
    given = {field.name: getattr(optimizer, field.name) for field in dataclasses.fields(optimizer) if field.init}
    config.optimizer = PierOptimizerConfig(**given | pier)
    return config
