"""The buffers of Megatron's layer-wise optimizer, which divides matrices over the data-parallel ranks of a group."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from pier_megatron.errors import PierConfigError
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

_MODULE = "megatron.core.optimizer.layer_wise_optimizer"
_CLASS = "LayerWiseDistributedOptimizer"
BUILDERS = "megatron.training.models.dist_utils"


def lay_out[**P, R](ddp_wrap: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Lays buffers out for it where a script describes its model by a configuration, as ``pretrain_gpt.py`` of 0.19 does.

    Megatron's builders lay out for the distributed optimizer alone, and ``get_model`` for both. Without a layout the
    data-parallel ranks gather parts of unequal length, which gloo refuses, and which an outer step cannot repeat.
    """
    given = versions.given(ddp_wrap, args, kwargs)
    versions.require(_MODULE, "tag_params_for_buffer_routing")(given["model"])
    changed = {"ddp_config": dataclasses.replace(given["ddp_config"], use_distributed_optimizer=True)}
    dist_utils = importlib.import_module(BUILDERS)
    with versions.replaced(dist_utils, {"DistributedOptimizer": versions.require(_MODULE, _CLASS)}):
        return versions.called_with(ddp_wrap, args, kwargs, changed)


def check_laid_out(optimizer: "MegatronOptimizer") -> None:
    """Looks at the optimizer that was built, whoever has built the model.

    Raises:
        PierConfigError: If it gathers parameters in a way that outer steps do not repeat.
    """
    for link in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
        if isinstance(link, versions.require(_MODULE, _CLASS)) and not link.use_buffer_param_sync and link.dp_cp.size() > 1:
            raise PierConfigError(
                f"--use-distributed-optimizer with --pier-inner-optimizer muon: the {link.dp_cp.size()} data-parallel ranks of "
                "a group gather parts of unequal length, by a call of the inner step that outer steps do not repeat. The "
                "script has built its model around Megatron's get_model and its model builders, which lay buffers out for the "
                "layer-wise optimizer. Build it with one of these, or drop --use-distributed-optimizer."
            )
