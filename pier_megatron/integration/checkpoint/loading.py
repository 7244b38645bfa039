"""How a run resumes from a checkpoint of its own or of another run."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier_megatron import features
from pier_megatron.integration.checkpoint.content import RunPosition, sharded_object, without_sharded
from pier_megatron.integration.checkpoint.files import DamagedCheckpointError
from pier_megatron.integration.checkpoint.parameter_state import ParameterState
from pier_megatron.integration.checkpoint.random_states import restore_random_states
from pier_megatron.integration.checkpoint.sources import Sources
from pier_megatron.integration.checkpoint.stored_run import StoredRun
from pier_megatron.integration.worlds import folder_of_island, island_folder_error
from pier_megatron.megatron_api import versions
from pier_megatron.outer import OuterLoop, Snapshot
from pier_megatron.outer.description import ENTRY, Description, Metadata, group_prefix
from pier_megatron.outer.snapshot import Progress

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclasses.dataclass
class _Request:
    """What has been asked of a checkpoint.

    Attributes:
        saved: What the checkpoint says of itself.
        is_exact: Whether this run continues as if it had never stopped.
        same_layout: Whether the ranks of a group share the model as they did.
        changes: What is different, one phrase each.
        metadata: Metadata of the checkpoint.
        sources: Folders and groups from which each group continues.
        inner_sources: Saved groups of whose inner states this group takes the mean.
        outer_sources: The same for the outer state; none if the first island hands it out.
        snapshot: Snapshot for the outer loop; its tensors are what is read into.
        stock: Megatron's own description of the optimizer's state.
        model_state: The sharded state of the model.
        objects: What the first source has beside its tensors, once it was read.
    """

    saved: Description
    is_exact: bool
    same_layout: bool
    changes: list[str]
    metadata: Metadata
    sources: Sources
    inner_sources: list[int]
    outer_sources: list[int | None]
    snapshot: Snapshot
    stock: "ShardedStateDict" = dataclasses.field(default_factory=dict)
    model_state: "ShardedStateDict" = dataclasses.field(default_factory=dict)
    objects: dict[str, Any] | None = None


class Loading:
    """One load of a checkpoint, of Pier or of stock Megatron."""

    def __init__(self, place: RunPosition, loop: OuterLoop, stored: StoredRun | None) -> None:
        """Prepares a load of what is ``stored`` into the parameters of ``place`` and into ``loop``."""
        self._place, self._loop = place, loop
        self._sources = Sources(place, stored) if stored is not None else None
        self._request: _Request | None = None

    def arguments(self) -> dict[str, str | int]:
        """The arguments with which Megatron loads what it loads itself: from the folder of the first source."""
        if self._sources is None:
            root = versions.megatron_args().load
            return {} if root is None else {"load": str(folder_of_island(Path(root), self._place.in_world.start))}
        return self._sources.stored.arguments(self._sources.first_folder())

    def begin(self, metadata: Metadata) -> None:
        """Looks at what the checkpoint is; see :class:`pier_megatron.integration.optimizer.Restoration`.

        Raises:
            PierConfigError: If it is of another run than this one and the user has not accepted that.
        """
        if ENTRY in metadata:
            self._request = self._asked_of(Description.from_metadata(metadata[ENTRY]), metadata)

    def complete(self, stock: "ShardedStateDict", model_state: "ShardedStateDict", metadata: Metadata) -> "ShardedStateDict":
        """Asks for what this rank wants; see :class:`pier_megatron.integration.optimizer.Completion`."""
        if self._request is None:
            return stock
        self._request.stock, self._request.model_state = stock, model_state
        return self._wanted_from(self._request, self._request.sources.first_folder())

    def _wanted_from(self, request: _Request, key: int) -> "ShardedStateDict":
        """What this rank reads from a folder of the stored run."""
        place, saved, sources, stored = self._place, request.saved, request.sources, request.sources.stored
        metadata, model_state = request.metadata, request.model_state
        # Of the groups that go on with the inner state of a saved one, each reads a copy.
        copies = collections.Counter(source for group in self._before_this for source in sources.of_inner(saved, group))
        copies_of_outer = collections.Counter(
            source for group in self._before_this for source in sources.of_outer(saved, group) if source is not None
        )
        entry: ShardedStateDict = {}
        for index, outer in enumerate(place.outer_states(request.snapshot)):
            for source in (source for source in request.outer_sources if sources.folder_of_outer(source) == key):
                target = outer if len(request.outer_sources) == 1 else outer.zeros_on_host()
                prefix = saved.outer_prefix(None if source is None else stored.number_in_folder(source), index)
                copy = None if source is None else copies_of_outer[source]
                entry[f"outer{index}.{source}"] = target.sharded(model_state, metadata, prefix, True, copy)
        of_inner = [source for source in request.inner_sources if stored.key_of(source) == key]
        apart = [source for source in of_inner if sources.is_apart(saved, source)]
        for index, inner in enumerate(place.inner_states()):
            for source in apart:
                prefix = f"{group_prefix(stored.number_in_folder(source))}.{index}"
                # Not into the parameters themselves: in FP32 they are the model's, and its weights are yet to be loaded.
                target = inner.zeros_on_host()
                entry[f"inner{index}.{source}"] = target.sharded(model_state, metadata, prefix, True, copies[source])
        first = request.inner_sources[0]
        if first in of_inner:
            rank, copy = (place.ranks.rank(), 0) if request.same_layout else (0, place.ranks.rank())
            entry["objects"] = sharded_object(stored.number_in_folder(first), rank, None, copy=(copies[first], copy))
            if request.is_exact:
                number = stored.number_in_folder(place.group)
                entry["tensors"] = place.sharded_tensors(number, place.exact_tensors(request.snapshot))
        stock = without_sharded(request.stock) if apart == of_inner else request.stock
        return {**stock, ENTRY: entry}

    @property
    def _before_this(self) -> range:
        """The groups that load together with this one and come before it."""
        return range(self._place.in_world.start, self._place.group)

    def _asked_of(self, saved: Description, metadata: Metadata) -> _Request:
        place, loop, sources = self._place, self._loop, self._sources
        assert sources is not None
        if saved.island and not sources.stored.islands:
            # Known by what the checkpoint says: a job's folder may have any name.
            raise island_folder_error(versions.megatron_args().load)
        config, present = place.config, place.describe(saved.iteration)
        lacking = sources.lacking(saved)
        changes = saved.check(present, config.override_checkpoint, lacking)
        sources.check_folders(saved)
        is_exact = saved.is_exact_for(present) and not lacking
        last_common_step = saved.iteration if saved.last_common_step is None else saved.last_common_step
        progress = Progress(saved.iteration, bool(saved.is_local), bool(saved.is_synchronised), last_common_step)
        snapshot = loop.empty_snapshot(progress, saved.rounds if is_exact else {})
        snapshot.restarted = saved.restarted if is_exact else {}
        return _Request(
            saved,
            is_exact,
            saved.has_layout_of(present),
            changes,
            metadata,
            sources,
            sources.of_inner(saved, place.group),
            sources.outer_to_read(saved, place.group),
            snapshot,
        )

    def restore(self, state: "StateDict", load_stock: "Callable[[StateDict], None]") -> bool:
        """Takes over what was read; see :class:`pier_megatron.integration.optimizer.Restoration`."""
        request, place = self._request, self._place
        if request is None:
            return False
        inner_mean, outer_mean = _Mean(place.inner_states), _Mean(lambda: place.outer_states(request.snapshot))
        # In order, and each is done with before the next: Megatron reads into the optimizer itself.
        first = request.sources.first_folder()
        for key in request.sources.folders(request.saved):
            read = state if key == first else self._read(request, key)
            self._take_from(request, key, read, load_stock, inner_mean, outer_mean)
        inner_mean.take()
        outer_mean.take()
        if request.sources.is_handed_out(request.saved):
            # What all islands have in common only the first island's folder holds.
            self._loop.hand_out(source=0)
        assert request.objects is not None
        snapshot, progress = request.snapshot, request.snapshot.progress
        # Older plugins do not say: all of them, as far as they knew.
        progress.trained = request.objects.get("trained", progress.iteration - progress.last_common_step)
        self._loop.restore(snapshot)
        return True

    def _take_from(
        self,
        request: _Request,
        key: int,
        state: "StateDict",
        load_stock: "Callable[[StateDict], None]",
        inner_mean: "_Mean",
        outer_mean: "_Mean",
    ) -> None:
        """Takes over what was read from a folder."""
        place, sources, stored = self._place, request.sources, request.sources.stored
        entry = state.get(ENTRY, {})
        request.objects = entry.get("objects", request.objects)
        for source in (source for source in request.inner_sources if stored.key_of(source) == key):
            if sources.is_apart(request.saved, source):
                for owner, settings in zip(place.owners, self._inner_settings(request), strict=True):
                    owner.take_settings(settings)
                # Only now: loading may have put other tensors in the place of those that were there.
                for index, inner in enumerate(place.inner_states()):
                    inner.load(entry[f"inner{index}.{source}"], request.metadata)
            else:
                load_stock({name: part for name, part in state.items() if name != ENTRY})
            inner_mean.add()
        for holder in (holder for holder in request.outer_sources if sources.folder_of_outer(holder) == key):
            for index, outer in enumerate(place.outer_states(request.snapshot)):
                outer.load(entry[f"outer{index}.{holder}"], request.metadata)
            outer_mean.add()
        if request.is_exact and stored.key_of(request.inner_sources[0]) == key:
            for name, tensor in place.exact_tensors(request.snapshot).items():
                if tensor.numel():
                    tensor.copy_(entry["tensors"][name])

    def _read(self, request: _Request, key: int) -> "StateDict":
        """Reads from a folder that Megatron does not load from; called by all ranks that load together."""
        load = versions.require("megatron.core.dist_checkpointing", "load")
        # Groups read copies of the same, each for itself.
        found = load(
            {"optimizer": self._wanted_from(request, key)},
            str(request.sources.stored.folder(key)),
            validate_access_integrity=False,
        )
        state: StateDict = found["optimizer"]
        return state

    def _inner_settings(self, request: _Request) -> "list[StateDict]":
        """What each inner optimizer has beside its tensors."""
        assert request.objects is not None
        saved: list[StateDict] = request.objects["inner"]
        if request.same_layout and len(saved) == len(self._place.owners):
            return saved
        # The saved rank may have owned other kinds of parameters, experts or not. All its optimizers have stepped together, and
        # the rest of the settings is this run's own.
        step = next((group["step"] for of in saved for group in of["optimizer"]["param_groups"] if "step" in group), None)
        settings = []
        for owner in self._place.owners:
            own = owner.settings()
            for group in own["optimizer"]["param_groups"]:
                group |= {} if step is None else {"step": step}
            settings.append({**own, **{name: saved[0][name] for name in saved[0] if name != "optimizer"}} if saved else own)
        return settings

    def finish(self, iteration: int, opt_param_scheduler: "OptimizerParamScheduler | None") -> str | None:
        """Restores what Megatron keeps outside of the optimizer, and checks the result.

        Args:
            iteration: Iteration from which the run continues; 0 if nothing was loaded.
            opt_param_scheduler: Megatron's.

        Returns:
            Request that the run resumes from, or None if it begins.

        Raises:
            DamagedCheckpointError: If the outer state is not what was saved.
        """
        request = self._request
        if request is None or request.objects is None:
            self._loop.reset(iteration)
            return f" Pier begins at iteration {iteration}, from weights without outer momentum" if iteration else None
        if request.same_layout:
            self._verify(request)
            if not _keeps_random_states():
                restore_random_states(request.objects["rng"])
        steps = request.objects["scheduler steps"]
        if opt_param_scheduler is not None and steps is not None and steps != opt_param_scheduler.num_steps:
            # Megatron has restored the scheduler of group 0, which may have skipped other steps than this one.
            opt_param_scheduler.num_steps = steps
            opt_param_scheduler.step(0)
        return _resumption(request)

    def _verify(self, request: _Request) -> None:
        saved, sources = request.saved, request.sources
        found = self._loop.checksums()[self._loop.exchange.rank]
        [source, *others] = sources.of_outer(saved, self._place.group)
        expected = {} if others else {name: sources.checksum_of_outer(saved, source, name) for name in found}
        wrong = [name for name, checksum in expected.items() if checksum not in (None, found[name])]
        if wrong:
            raise DamagedCheckpointError(
                f"--load {versions.megatron_args().load}: the {' and the '.join(wrong)} of iteration {saved.iteration} are not "
                "what was saved: their checksums differ. The files are damaged. Choose another iteration with --ckpt-step."
            )


class _Mean:
    """The mean of what is put into the same tensors one after the other; one of them as it is."""

    def __init__(self, states: Callable[[], Sequence[ParameterState]]) -> None:
        """Begins with nothing; ``states`` are where the tensors are."""
        self._states = states
        self._number = 0
        self._sums: list[ParameterState] = []

    def add(self) -> None:
        """Adds what the tensors hold now."""
        states = self._states()
        self._sums = self._sums or [state.zeros_on_host() for state in states]
        self._number += 1
        for total, state in zip(self._sums, states, strict=True):
            total.add(state)

    def take(self) -> None:
        """Lets the tensors hold the mean."""
        for total, state in zip(self._sums, self._states(), strict=False):
            if self._number > 1:
                total.divide(self._number)
                state.take(total)


def _keeps_random_states() -> bool:
    return bool(getattr(versions.megatron_args(), "no_load_rng", False))


def _resumption(request: _Request) -> str:
    saved, changed = request.saved, features.changes(request.metadata, versions.megatron_args())
    is_whole = request.is_exact and saved.holds_all_groups
    if is_whole and not changed and not _keeps_random_states():
        return f" Pier resumes exactly from iteration {saved.iteration}"
    lines = [f" Pier resumes from iteration {saved.iteration}"]
    if changed:
        lines.append(f"with other features inside groups: {', '.join(changed)}")
    if _keeps_random_states():
        lines.append("with random states of its own (--no-load-rng)")
    if is_whole:
        return "; ".join([*lines, "with the whole state"])
    if request.changes:
        lines.append(f"with changes: {', '.join(request.changes)}")
    elif not request.is_exact:
        lines.append(
            "with flat buffers that are cut elsewhere (--pier-chunk-mib, gradient buckets, layers of stages), without what "
            "error feedback held"
        )
    lines.append(f"the first group with the inner state of saved group {' and '.join(map(str, request.inner_sources))}")
    if saved.rounds and not request.is_exact:
        lines.append("exchanges under way are dropped: what they carried goes into the next outer step")
    return "; ".join(lines)
