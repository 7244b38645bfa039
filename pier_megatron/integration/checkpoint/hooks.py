"""Hooks the plugin into how Megatron saves and loads checkpoints."""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from pier_megatron import features
from pier_megatron.errors import PierConfigError
from pier_megatron.integration import current, own_world, startup
from pier_megatron.integration.checkpoint.content import RunPosition
from pier_megatron.integration.checkpoint.description import ENTRY, SCHEDULES
from pier_megatron.integration.checkpoint.files import names_nothing, newest_whole, refusal
from pier_megatron.integration.checkpoint.groups_files import folder_of_group
from pier_megatron.integration.checkpoint.loading import Loading
from pier_megatron.integration.checkpoint.saving import Saving
from pier_megatron.integration.checkpoint.stored_run import find
from pier_megatron.integration.inner.choice import owners
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.tracker import stored_checkpoint
from pier_megatron.outer import OuterLoop

if TYPE_CHECKING:
    from pier_megatron.integration.optimizer import PierOptimizer


# Where Megatron keeps checkpoints that the next one replaces.
_APART = "non_persistent_global_ckpt_dir"


def _place(optimizer: "PierOptimizer") -> RunPosition:
    loop = optimizer.loop
    return RunPosition(
        config=loop.config,
        device_type=loop.device.type,
        # An elastic island is alone in the launch.
        group=(loop.config.island or 0) + loop.exchange.rank,
        ranks=own_world.ranks(),
        owners=owners(optimizer, optimizer.model_chunks),
        slices=[list(state.slices()) for state in loop.states],
    )


@current.in_pier_runs
def describe_the_run[**P](
    build_metadata: Callable[P, dict[str, object]], pier: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> dict[str, object]:
    """Adds the run's description to a checkpoint's metadata."""
    metadata, settings = build_metadata(*args, **kwargs), versions.megatron_args()
    # Without the optimizers' state it holds weights, as one of stock Megatron.
    if isinstance(pier.saving, Saving) and not settings.no_save_optim:
        metadata[ENTRY] = pier.saving.description.to_metadata()
        metadata[features.ENTRY] = features.settings(settings)
    return metadata


@current.in_pier_runs
def save[**P, R](save_checkpoint: Callable[P, R], pier: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Saves the weights that the groups agree on as the model, and adds each group's own state."""
    given = versions.given(save_checkpoint, args, kwargs)
    scheduler = given["opt_param_scheduler"]
    loop, place = pier.loop, _place(pier)
    snapshot, checksums = loop.snapshot(), loop.checksums()
    with contextlib.ExitStack() as stack:
        shown = loop.anchor_in_model(as_mean=not loop.config.has_common_anchor)
        trained = None if loop.is_synchronised else stack.enter_context(shown)
        saving = Saving(place, snapshot, checksums, trained, scheduler)
        stack.enter_context(versions.replaced(pier, {"saving": saving}))
        stack.enter_context(versions.with_megatron_args(_of_group(loop, given)))
        if loop.exchange.rank and versions.megatron_args().no_save_optim:
            # The weights are those of the first group.
            return None  # type: ignore[return-value]
        try:
            return save_checkpoint(*args, **kwargs)
        except (Exception, CheckpointException) as error:
            error.add_note(
                f"Pier: the checkpoint of iteration {loop.iteration} is not whole. The ones before stay as they are: "
                "remove the cause and start again from the last."
            )
            raise


def _of_group(loop: OuterLoop, given: Mapping[str, object]) -> dict[str, str]:
    """Megatron's arguments by which a group other than the first saves into its own folder inside the checkpoint's."""
    settings, group = versions.megatron_args(), loop.exchange.rank
    if not group:
        return {}
    apart = getattr(settings, _APART, None)
    root = Path(settings.save)
    if given.get("non_persistent_ckpt"):
        root = Path(apart or root / "non_persistent")
    folder = str(folder_of_group(root / f"iter_{loop.iteration:07d}", group))
    return {"save": folder} | ({} if apart is None else {_APART: folder})


def _takes_another(settings: argparse.Namespace) -> bool:
    return bool(settings.load and getattr(settings, "pier_load_newest_whole", False) and not settings.ckpt_step)


def _instead_of_the_last(loop: OuterLoop, root: Path) -> int:
    """Iteration to load instead of the last one, the same in all groups of the launch; 0 if the last one is whole."""
    chosen, said = torch.zeros(1, dtype=torch.int64, device=loop.device), f"--load {root}: no checkpoint there is whole."
    if own_world.launch().rank == 0:
        try:
            if (found := newest_whole(root)) is not None:
                chosen[0], how = found
                print(how, file=sys.stderr, flush=True)
        except PierConfigError as error:
            # The other ranks would wait for this one.
            chosen[0], said = -1, str(error)
    dist.broadcast(chosen, 0)
    iteration = int(loop.exchange.gather(chosen).result()[0])
    if iteration < 0:
        raise PierConfigError(said)
    return iteration


@current.in_pier_runs
def load[**P](
    load_checkpoint: Callable[P, tuple[int, float]], pier: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> tuple[int, float]:
    """Loads the model, the groups' own state and the outer state."""
    loop, place, settings = pier.loop, _place(pier), versions.megatron_args()
    folder, takes = {}, _takes_another(settings)
    if loop.config.island is not None and settings.load is not None:
        # With --finetune all begin from the same weights, whoever saved them.
        accepts_changes = loop.config.override_checkpoint or settings.finetune
        folder = {"load": str(find(Path(settings.load), loop.config.island, settings.ckpt_step, accepts_changes, takes))}
    taken = _instead_of_the_last(loop, Path(folder.get("load", settings.load))) if takes else 0
    missing: list[str | None] = [None]
    if settings.load and not taken:
        root = Path(folder.get("load", settings.load))
        if dist.get_rank() == 0:
            missing = [names_nothing(root)]
            is_step = settings.ckpt_step and getattr(settings, "non_persistent_ckpt_type", None) is None
            chosen = stored_checkpoint(root, settings.ckpt_step) if is_step else None
            if missing[0] is None and chosen is not None and not chosen.exists():
                missing = [refusal(chosen)]
        dist.broadcast_object_list(missing)
    if missing[0] is not None:
        raise PierConfigError(missing[0])
    loading = Loading(place, loop)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(versions.replaced(pier, {"loading": loading}))
            stack.enter_context(versions.with_megatron_args(folder))
            if taken:
                # It would read the file that names the last one, and end without an error if that is empty.
                checkpointing = importlib.import_module("megatron.training.checkpointing")
                stack.enter_context(versions.replaced(checkpointing, {"read_metadata": lambda _: (taken, False)}))
            result = load_checkpoint(*args, **kwargs)
    except PierConfigError:
        raise
    except (Exception, CheckpointException) as error:
        if isinstance(error, AssertionError) and "OptimizerParamScheduler" in str(error):
            raise PierConfigError(f"--load: Megatron refuses: {error}. Add {SCHEDULES}.") from error
        if "Missing keys" in str(error):
            error.add_note(
                "Pier: a checkpoint holds more than a run asks for, such as what stock Megatron reads and the inner state of "
                "other groups. Use --dist-ckpt-strictness raise_unexpected instead of raise_all."
            )
            raise
        error.add_note(
            f"Pier: --load {versions.megatron_args().load} could not be read. Checkpoints of other iterations in that "
            "folder may be whole: choose one with --ckpt-step. If the error is about groups of parameters, restore the flags "
            "of the run that was saved (--lr, --min-lr, --weight-decay)."
        )
        raise
    found = loading.finish(result[0], versions.given(load_checkpoint, args, kwargs)["opt_param_scheduler"])
    startup.check_groups_agree(loop, begins=False)
    if found and dist.get_rank() == 0:
        print(found, flush=True)
    return result
