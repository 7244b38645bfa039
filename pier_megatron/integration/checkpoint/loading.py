"""How a run resumes from a checkpoint of its own or of another run."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pier_megatron import features
from pier_megatron.errors import PierConfigError
from pier_megatron.integration.checkpoint.content import RunPosition, sharded_object, without_sharded
from pier_megatron.integration.checkpoint.description import ENTRY, Description, Metadata, checksum_name, group_prefix
from pier_megatron.integration.checkpoint.parameter_state import ParameterState
from pier_megatron.integration.checkpoint.random_states import restore_random_states
from pier_megatron.integration.inner.requirements import scaled
from pier_megatron.integration.votes import any_group
from pier_megatron.megatron_api import versions
from pier_megatron.outer import OuterLoop, Snapshot
from pier_megatron.outer.snapshot import Progress
from pier_megatron.outer.state import ANCHOR, MOMENTUM

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclasses.dataclass
class _Request:
    """What has been asked of a checkpoint.

    Attributes:
        saved: Description of the checkpoint.
        present: The run that loads it.
        is_exact: Whether this run continues as if it had never stopped.
        same_layout: Whether the ranks of a group share the model as they did.
        changes: What is different, one phrase each.
        metadata: Metadata of the checkpoint.
        inner_sources: Saved groups of whose inner states this group takes the mean.
        outer_sources: The same for the outer state.
        snapshot: Snapshot for the outer loop; its tensors are what is read into.
        objects: Values of the first source that are not tensors, once it was read.
    """

    saved: Description
    present: Description
    is_exact: bool
    same_layout: bool
    changes: list[str]
    metadata: Metadata
    inner_sources: list[int]
    outer_sources: list[int | None]
    snapshot: Snapshot
    objects: dict[str, Any] | None = None


class Loading:
    """One load of a checkpoint, of Pier or of stock Megatron."""

    def __init__(self, place: RunPosition, loop: OuterLoop) -> None:
        """Prepares a load into the parameters of ``place`` and into ``loop``."""
        self._place, self._loop = place, loop
        self._request: _Request | None = None

    def begin(self, metadata: Metadata) -> None:
        """Looks at what the checkpoint is; see :class:`pier_megatron.integration.optimizer.Restoration`.

        Raises:
            PierConfigError: If it is of another run than this one and the user has not accepted that.
        """
        if ENTRY in metadata:
            self._request = self._asked_of(Description.from_metadata(metadata[ENTRY]), metadata)

    def complete(self, stock: "ShardedStateDict", model_state: "ShardedStateDict", metadata: Metadata) -> "ShardedStateDict":
        """Asks for what this rank wants; see :class:`pier_megatron.integration.optimizer.Completion`."""
        request, place = self._request, self._place
        if request is None:
            return stock
        saved = request.saved
        entry: ShardedStateDict = {}
        for index, outer in enumerate(place.outer_states(request.snapshot)):
            for holder in request.outer_sources:
                target = outer if len(request.outer_sources) == 1 else outer.zeros_on_host()
                outer_prefix = saved.outer_prefix(holder, index)
                entry[f"outer{index}.{holder}"] = target.sharded(model_state, metadata, outer_prefix, is_loading=True)
        apart = [source for source in request.inner_sources if saved.is_apart(source)]
        for index, inner in enumerate(place.inner_states()):
            for source in apart:
                # Not into the parameters themselves: in FP32 they are the model's, and its weights are yet to be loaded.
                target = inner.zeros_on_host()
                prefix = f"{group_prefix(source)}.{index}"
                entry[f"inner{index}.{source}"] = target.sharded(model_state, metadata, prefix, is_loading=True)
        rank, copy = (place.ranks.rank(), 0) if request.same_layout else (0, place.ranks.rank())
        entry["objects"] = sharded_object(request.inner_sources[0], rank, None, copy)
        if request.is_exact:
            entry["tensors"] = place.sharded_tensors(place.number, place.exact_tensors(request.snapshot))
        return {**(without_sharded(stock) if apart == request.inner_sources else stock), ENTRY: entry}

    def _asked_of(self, saved: Description, metadata: Metadata) -> _Request:
        place, loop = self._place, self._loop
        config, present = place.config, place.describe(saved.iteration)
        lacking = []
        if (refusal := saved.refusal_in_one_launch(config, versions.megatron_args().load)) is not None:
            raise PierConfigError(refusal)
        if saved.island not in (None, config.island):
            lacking = [
                f"there is no checkpoint of iteration {saved.iteration} of island {config.island}, which takes the inner state "
                f"of island {saved.island}"
            ]
        changes = saved.check(present, config.override_checkpoint, lacking)
        is_exact = saved.is_exact_for(present) and not lacking
        progress = Progress(saved.iteration, saved.is_local, saved.is_synchronised, saved.last_common_step)
        snapshot = loop.empty_snapshot(progress, saved.rounds if is_exact else {})
        snapshot.restarted = saved.restarted if is_exact else {}
        if saved.remembers_otherwise(present):
            # The momentum of another rule is read and forgotten; what else it remembered is not even asked for.
            snapshot.rule = saved.rule
            snapshot.states = [{name: state[name] for name in (ANCHOR, MOMENTUM)} for state in snapshot.states]
        return _Request(
            saved,
            present,
            is_exact,
            saved.has_layout_of(present),
            changes,
            metadata,
            saved.sources(place.group, config.groups, config.load_inner_state),
            saved.outer_sources(place.group, present, config.load_inner_state),
            snapshot,
        )

    def restore(self, state: "StateDict", load_stock: "Callable[[StateDict], None]") -> bool:
        """Takes over what was read; see :class:`pier_megatron.integration.optimizer.Restoration`."""
        request, place = self._request, self._place
        if request is None:
            return False
        entry = state[ENTRY]
        request.objects = entry["objects"]
        inner_mean = _Mean(place, request.inner_sources, place.inner_states, place.store)
        outer_mean = _Mean(place, request.outer_sources, lambda: place.outer_states(request.snapshot))
        # In order, and each is done with before the next: Megatron reads into the optimizer itself.
        for source in request.inner_sources:
            if request.saved.is_apart(source):
                for owner, settings in zip(place.owners, self._inner_settings(request), strict=True):
                    owner.take_settings(settings)
                # Only now: loading the settings may have replaced the tensors.
                inners = place.inner_states()
                for index, inner in enumerate(inners):
                    inner.load(entry[f"inner{index}.{source}"], request.metadata)
                place.store(inners)
            else:
                load_stock({name: part for name, part in state.items() if name != ENTRY})
            inner_mean.add(source)
        for holder in request.outer_sources:
            for index, outer in enumerate(place.outer_states(request.snapshot)):
                outer.load(entry[f"outer{index}.{holder}"], request.metadata)
            outer_mean.add(holder)
        if request.is_exact:
            for name, tensor in place.exact_tensors(request.snapshot).items():
                if tensor.numel():
                    tensor.copy_(entry["tensors"][name])
        inner_mean.take()
        outer_mean.take()
        assert request.objects is not None
        snapshot, progress = request.snapshot, request.snapshot.progress
        progress.trained, progress.under_way = request.objects["trained"], request.objects.get("under way", 0)
        self._loop.restore(snapshot)
        return True

    def _inner_settings(self, request: _Request) -> "list[StateDict]":
        """Settings of each inner optimizer: all of its state that is not a tensor."""
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
            PierConfigError: If the outer state is not what was saved.
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
        """Compares checksums; called by all ranks of the launch, since those of one group may be the only ones to differ."""
        saved, found = request.saved, self._loop.checksums()[self._loop.exchange.rank]
        if saved.remembers_otherwise(request.present):
            # The checkpoint's momentum was dropped: only the anchor can be compared.
            found = {ANCHOR: found[ANCHOR]}
        [source, *others] = request.outer_sources
        expected = {} if others else {name: saved.checksums.get(checksum_name(name, source)) for name in found}
        wrong = [name for name, checksum in expected.items() if checksum not in (None, found[name])]
        votes = any_group(self._loop, [name in wrong for name in found])
        if names := [name for name, is_wrong in zip(found, votes, strict=True) if is_wrong]:
            what = f"the {' and the '.join(names)} of iteration {saved.iteration}"
            raise PierConfigError(
                f"--load {versions.megatron_args().load}: {what} are not what was saved: their checksums differ. The files are "
                "damaged. Choose another iteration with --ckpt-step."
            )


class _Mean:
    """The mean of what saved groups put into the same tensors one after the other; that of one group as it is."""

    def __init__(
        self,
        place: RunPosition,
        sources: Sequence[int | None],
        states: Callable[[], Sequence[ParameterState]],
        store: Callable[[Sequence[ParameterState]], None] = lambda states: None,
    ) -> None:
        """Begins with nothing; ``states`` are where the tensors are, ``store`` takes what was written to them."""
        self._place, self._has_several, self._states, self._store = place, len(sources) > 1, states, store
        self._number = 0
        self._sums: list[ParameterState] = []

    def add(self, source: int | None) -> None:
        """Adds what the tensors hold now, unless some of it is not finite; called by all ranks of the group."""
        states = self._states()
        if not self._has_several:
            return
        is_finite = torch.tensor([all(state.is_finite for state in states)], dtype=torch.int32, device=self._place.device_type)
        dist.all_reduce(is_finite, dist.ReduceOp.MIN, group=self._place.ranks)
        if not is_finite:
            if self._place.ranks.rank() == 0:
                # Whichever group it is.
                print(
                    f" Pier: group {self._place.group} takes the mean without saved group {source}, not finite",
                    file=sys.stderr,
                    flush=True,
                )
            return
        self._sums = self._sums or [state.zeros_on_host() for state in states]
        self._number += 1
        for total, state in zip(self._sums, states, strict=True):
            total.add(state)

    def take(self) -> None:
        """Lets the tensors hold the mean."""
        if self._number:
            states = self._states()
            for total, state in zip(self._sums, states, strict=True):
                total.divide(self._number)
                state.take(total)
            self._store(states)


def _keeps_random_states() -> bool:
    return bool(getattr(versions.megatron_args(), "no_load_rng", False))


def _resumption(request: _Request) -> str:
    args = versions.megatron_args()
    saved, changed, rounded = request.saved, features.changes(request.metadata, args), scaled(args)
    is_whole = request.is_exact and saved.holds_all_groups
    if is_whole and not (changed or rounded or _keeps_random_states()):
        return f" Pier resumes exactly from iteration {saved.iteration}"
    lines = [f" Pier resumes from iteration {saved.iteration}"]
    if changed:
        lines.append(f"with other features inside groups: {', '.join(changed)}")
    if rounded:
        lines.append(f"with numbers that are scaled again ({', '.join(rounded)})")
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
    if saved.remembers_otherwise(request.present):
        lines.append("without the outer momentum, which another rule has summed")
    sources = request.inner_sources if saved.island is None else [saved.island]
    lines.append(f"the first group with the inner state of saved group {' and '.join(map(str, sources))}")
    if saved.rounds and not request.is_exact:
        lines.append("exchanges under way are dropped: what they carried goes into the next outer step")
    return "; ".join(lines)
