"""What Megatron's arguments are in a ``ConfigContainer``, so that one code serves flags and configurations."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pier_megatron.errors import PierConfigError
from pier_megatron.integration import own_world
from pier_megatron.megatron_api import versions

_PIER = "pier_"
# Parts of the configuration that hold settings by the names of Megatron's arguments, in the order in which they are asked.
_SECTIONS = (
    "validation train checkpoint logger dist rng ddp model optimizer scheduler dataset rerun_state_machine profiling straggler"
).split()
# Where a setting has another name than Megatron's argument, or is in no part.
_OTHER_PATHS = {
    "num_experts": "model.num_moe_experts",
    "inprocess_restart": "inprocess_restart.enabled",
    "data_parallel_size": "data_parallel_size",
    "pier_inner_optimizer": "optimizer.optimizer",
}
_OTHER_WORDS = {
    "--optimizer pier": "PierOptimizerConfig",
    "--optimizer adam": "OptimizerConfig",
}


class BridgeArguments:
    """Settings of a run under Megatron-Bridge, by the names of Megatron's arguments; they are looked up when asked for.

    Attributes:
        pier: Whether the run uses Pier.
    """

    def __init__(self, config: Any, pier: bool) -> None:
        """Looks into a ``ConfigContainer``."""
        self._config, self.pier = config, pier

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # copy and pickle ask an object that they have not filled yet.
            raise AttributeError(name)
        found = self.place_of(name)
        if found is None and name.startswith(_PIER):
            # A flag that is not given, and here no setting.
            return None
        if found is None:
            raise AttributeError(name)
        return None if found[0] is None else getattr(*found)

    def place_of(self, name: str) -> tuple[Any, str] | None:
        """The part of the configuration that holds an argument, and the name there; None if there is none."""
        path = self.path_of(name)
        if path is None:
            return None
        section, _, attribute = path.rpartition(".")
        return (getattr(self._config, section) if section else self._config), attribute

    def assign(self, name: str, value: object) -> None:
        """Sets an argument where the configuration holds it."""
        place = self.place_of(name)
        assert place is not None
        setattr(*place, value)

    def path_of(self, name: str) -> str | None:
        """The same as a user writes it, such as ``checkpoint.save_interval``."""
        if name in _OTHER_PATHS:
            return _OTHER_PATHS[name]
        if name.startswith(_PIER):
            own = name.removeprefix(_PIER)
            return f"optimizer.{own}" if self.pier and hasattr(self._config.optimizer, own) else None
        sections = (section for section in _SECTIONS if hasattr(getattr(self._config, section, None), name))
        return next((f"{section}.{name}" for section in sections), None)

    @property
    def world_size(self) -> int:
        """Number of ranks of the launch, under torchrun and under Slurm."""
        launch = own_world.divided()
        return (
            launch.size
            if launch is not None
            else int(versions.require("megatron.bridge.utils.common_utils", "get_world_size_safe")())
        )

    @property
    def no_load_rng(self) -> bool:
        """Whether random states are not taken over from a checkpoint."""
        return not self._config.checkpoint.load_rng

    @property
    def no_save_optim(self) -> bool:
        """Whether checkpoints hold weights alone."""
        return not self._config.checkpoint.save_optim

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Megatron's arguments have the tensor-parallel size where none is given."""
        model = self._config.model
        return int(model.expert_tensor_parallel_size or model.tensor_model_parallel_size)


class BridgeLoop:
    """The training loop of Megatron-Bridge; see :class:`pier_megatron.megatron_api.run.Loop`.

    Attributes:
        config: Configuration of the run.
        state: Global state of Megatron-Bridge, once it trains.
    """

    def __init__(self, config: Any, pier: bool) -> None:
        """Takes the ``ConfigContainer`` of a run."""
        self.config, self.state = config, None
        self._arguments = BridgeArguments(config, pier)

    def arguments(self) -> Any:
        """The settings, by the names of Megatron's arguments."""
        return self._arguments

    @contextlib.contextmanager
    def with_arguments(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Inside, settings of the configuration have other values."""
        with contextlib.ExitStack() as stack:
            for name, value in values.items():
                place = self._arguments.place_of(name)
                if place is None:
                    raise versions.missing(f"{name} in ConfigContainer")
                stack.enter_context(versions.replaced(place[0], {place[1]: value}))
            yield

    def print_last(self, text: str) -> None:
        """Prints on the last rank."""
        versions.require("megatron.bridge.utils.common_utils", "print_rank_last")(text)

    def tensorboard(self) -> Any:
        """The writer of TensorBoard, or None."""
        return getattr(self.state, "tensorboard_logger", None)

    def wandb(self) -> Any:
        """Weights & Biases, or None."""
        return getattr(self.state, "wandb_logger", None)

    def signal_handler(self) -> object:
        """What has received signals."""
        return self.state.signal_handler  # type: ignore[attr-defined]

    def begun(self) -> float:
        """Time at which training began, in seconds since the epoch."""
        return float(self.state.start_time)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def own_words(self) -> Iterator[None]:
        """Inside, refusals and notes on errors name settings of the configuration, not flags."""
        try:
            yield
        except PierConfigError as error:
            raise PierConfigError(self.in_own_words(str(error))) from None
        except Exception as error:
            error.__notes__ = [self.in_own_words(note) for note in getattr(error, "__notes__", ())]
            raise

    def in_own_words(self, text: str) -> str:
        """Replaces each flag in a text by the setting of the configuration, if there is one."""
        for flags, settings in _OTHER_WORDS.items():
            text = text.replace(flags, settings)
        return re.sub(r"(?<![\w/.-])--[a-z0-9]+(?:[-_][a-z0-9]+)*", lambda flag: self._in_own_words(flag[0]), text)

    def _in_own_words(self, flag: str) -> str:
        name = flag.removeprefix("--").replace("-", "_")
        path = self._arguments.path_of(name)
        return flag if path is None else f"config.{path}"
