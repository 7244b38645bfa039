"""How a run goes on from what was stored of another one."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pier_megatron.integration import versions
from pier_megatron.integration.checkpoint.content import Place, sharded_object, without_sharded
from pier_megatron.integration.checkpoint.files import DamagedCheckpointError, folder_of_an_island
from pier_megatron.integration.checkpoint.parameter_state import ParameterState
from pier_megatron.integration.checkpoint.random_states import restore_random_states
from pier_megatron.outer import OuterLoop, Snapshot
from pier_megatron.outer.description import ENTRY, Description, checksum_name, group_prefix
from pier_megatron.outer.state import COMMON


@dataclasses.dataclass
class _Request:
    """What has been asked of a checkpoint.

    Attributes:
        saved: What the checkpoint says of itself.
        is_exact: Whether this run goes on as if it had never stopped.
        same_layout: Whether the ranks of a group share the model as they did.
        changes: What is different, one phrase each.
        metadata: Of the checkpoint.
        sources: Saved groups whose inner state this group goes on with, as their mean.
        outer_sources: The same for the outer state; none if the first island hands it out.
        snapshot: The outer loop's; its tensors are what is read into.
        objects: What the first source has beside its tensors, once it was read.
    """

    saved: Description
    is_exact: bool
    same_layout: bool
    changes: list[str]
    metadata: Any
    sources: list[int]
    outer_sources: list[int | None]
    snapshot: Snapshot
    objects: dict[str, Any] | None = None


class Loading:
    """One load of a checkpoint, of Pier or of stock Megatron."""

    def __init__(self, place: Place, loop: OuterLoop) -> None:
        """Prepares a load into the parameters of ``place`` and into ``loop``."""
        self._place, self._loop = place, loop
        self._request: _Request | None = None

    def begin(self, metadata: Any) -> None:
        """Looks at what the checkpoint is; see :class:`pier_megatron.integration.optimizer.Restoration`.

        Raises:
            PierConfigError: If it is of another run than this one and the user has not accepted that.
        """
        if ENTRY in (metadata or {}):
            self._request = self._asked_of(Description.from_metadata(metadata[ENTRY]), metadata)

    def complete(self, stock: dict[Any, Any], model_state: Any, metadata: Any) -> dict[Any, Any]:
        """Asks for what this rank wants; see :class:`pier_megatron.integration.optimizer.Completion`."""
        if self._request is None:
            return stock
        request, place, saved = self._request, self._place, self._request.saved
        # Of the groups that go on with the inner state of a saved one, each reads a copy.
        sources_of = [self._sources(saved, group) for group in self._before_this]
        copies = {source: sum(source in of for of in sources_of) for source in request.sources}
        entry: dict[str, Any] = {}
        for index, outer in enumerate(place.outer_states(request.snapshot)):
            for source in request.outer_sources:
                target = outer if source == request.outer_sources[0] else outer.empty_on_host()
                prefix, copy = saved.outer_prefix(source, index), self._copy_of_outer(saved, source)
                entry[f"outer{index}.{source}"] = target.sharded(model_state, metadata, prefix, True, copy)
        for index, inner in enumerate(place.inner_states()):
            for source in (source for source in request.sources if source in saved.own_inner_state):
                prefix = f"{group_prefix(source)}.{index}"
                # Not into the parameters themselves: in FP32 they are the model's, and its weights are yet to be loaded.
                target = inner.empty_on_host()
                entry[f"inner{index}.{source}"] = target.sharded(model_state, metadata, prefix, True, copies[source])
        first = request.sources[0]
        rank, copy = (place.ranks.rank(), 0) if request.same_layout else (0, place.ranks.rank())
        entry["objects"] = sharded_object(first, rank, None, copy=(copies[first], copy))
        if request.is_exact:
            entry["tensors"] = place.sharded_tensors(place.exact_tensors(request.snapshot))
        if all(source in saved.own_inner_state for source in request.sources):
            stock = without_sharded(stock)
        return {**stock, ENTRY: entry}

    @property
    def _before_this(self) -> range:
        """The groups that load together with this one and come before it."""
        return range(self._place.group if self._place.island is None else 0)

    def _asked_of(self, saved: Description, metadata: Any) -> _Request:
        if saved.island is not None and self._place.island is not None:
            self._place = dataclasses.replace(self._place, group=0)
        place, loop = self._place, self._loop
        if saved.island and place.island is None:
            raise folder_of_an_island(versions.megatron_args().load)
        config, present = place.config, place.describe(saved.iteration)
        changes, is_exact = saved.check(present, config.override_checkpoint), saved.is_exact_for(present)
        rounds = []
        for begun, verdicts in saved.rounds.items() if is_exact else ():
            fragments = config.fragments_due(begun)
            numel = sum(chunk.numel for state in loop.states for chunk in state.chunks if chunk.fragment in fragments)
            rounds.append({"begun": begun, "verdicts": verdicts, "own": torch.empty(numel), "sum": torch.empty(numel)})
        snapshot = loop.snapshot() | {
            "iteration": saved.iteration,
            "is_local": saved.is_local,
            "is_synchronised": saved.is_synchronised,
            "last_common_step": saved.iteration if saved.last_common_step is None else saved.last_common_step,
            "rounds": rounds,
            "pulled": saved.pulled_for(present),
            "restarted": saved.restarted if is_exact else {},
        }
        sources, outer_sources = self._sources(saved, place.group), self._outer_sources(saved, place.group)
        if not saved.holds_outer_state:
            outer_sources = []
        same_layout = saved.has_layout_of(present)
        return _Request(saved, is_exact, same_layout, changes, metadata, sources, outer_sources, snapshot)

    def _sources(self, saved: Description, group: int) -> list[int]:
        return saved.sources(group, self._place.config.groups, self._place.config.load_inner_state)

    def _outer_sources(self, saved: Description, group: int) -> list[int | None]:
        present = self._place.describe(saved.iteration)
        return saved.outer_sources(group, present, self._place.config.load_inner_state)

    def _copy_of_outer(self, saved: Description, source: int | None) -> int | None:
        """How many groups before this one read the outer state of a saved one; None if all read the same."""
        if source is None:
            return None
        return sum(source in self._outer_sources(saved, group) for group in self._before_this)

    def restore(self, state: dict[Any, Any], load_stock: Callable[[dict[Any, Any]], None]) -> bool:
        """Takes over what was read; see :class:`pier_megatron.integration.optimizer.Restoration`."""
        request, place = self._request, self._place
        if request is None:
            return False
        entry = state[ENTRY]
        request.objects = entry["objects"]
        if request.sources == [0] and 0 not in request.saved.own_inner_state:
            load_stock({key: part for key, part in state.items() if key != ENTRY})
        else:
            self._take_inner_states(request, state)
        for index, outer in enumerate(place.outer_states(request.snapshot)):
            _load_mean(outer, [entry[f"outer{index}.{source}"] for source in request.outer_sources], request.metadata)
        shares = request.saved.island is not None and request.saved.has_common_outer_state
        if shares and place.island is not None and not place.is_job:
            self._receive_outer_state(request.snapshot)
        for name, tensor in place.exact_tensors(request.snapshot).items() if request.is_exact else ():
            if tensor.numel():
                tensor.copy_(entry["tensors"][name])
        request.snapshot["outliers"] = request.objects["outliers"]
        self._loop.restore(request.snapshot)
        return True

    def _take_inner_states(self, request: _Request, state: dict[Any, Any]) -> None:
        """Takes over the mean of the inner states of the sources, wherever they are stored."""
        place = self._place
        for owner, settings in zip(place.owners, self._inner_settings(request), strict=True):
            owner.take_settings(settings)
        # Only now: loading may have put other tensors in the place of those that were there.
        for index, inner in enumerate(place.inner_states()):
            of_sources = {
                source: state[ENTRY][f"inner{index}.{source}"]
                if source in request.saved.own_inner_state
                else self._stock_of(state, index)["param_state"]
                for source in request.sources
            }
            _load_mean(inner, of_sources.values(), request.metadata)

    def _receive_outer_state(self, snapshot: Snapshot) -> None:
        """Takes over from the first island what all islands have in common, which only its folder holds."""
        exchange = self._loop.exchange
        for state in snapshot["states"]:
            for name in COMMON:
                exchange.broadcast(state[name], 0, range(1, exchange.size))

    def _inner_settings(self, request: _Request) -> list[dict[Any, Any]]:
        """What each inner optimizer has beside its tensors."""
        assert request.objects is not None
        saved: list[dict[Any, Any]] = request.objects["inner"]
        if request.same_layout:
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

    def _stock_of(self, state: dict[Any, Any], index: int) -> Any:
        """An owner's part of Megatron's own state, which numbers optimizers only where there are several."""
        chained = self._place.chained
        return state[chained.index(self._place.owners[index].optimizer)] if len(chained) > 1 else state

    def finish(self, iteration: int, opt_param_scheduler: Any) -> str | None:
        """Restores what Megatron keeps outside of the optimizer, and checks the result.

        Args:
            iteration: At which the run goes on; 0 if nothing was loaded.
            opt_param_scheduler: Megatron's.

        Returns:
            What the run goes on from, or None if it begins.

        Raises:
            DamagedCheckpointError: If the outer state is not what was saved.
        """
        request = self._request
        if request is None or request.objects is None:
            self._loop.reset(iteration)
            return f" Pier begins at iteration {iteration}, from weights without outer momentum" if iteration else None
        if request.same_layout:
            self._verify(request.saved)
            restore_random_states(request.objects["rng"])
        self._undo_decay(request.saved)
        steps = request.objects["scheduler steps"]
        if opt_param_scheduler is not None and steps is not None and steps != opt_param_scheduler.num_steps:
            # Megatron has restored the scheduler of group 0, which may have skipped other steps than this one.
            opt_param_scheduler.num_steps = steps
            opt_param_scheduler.step(0)
        return _resumption(request)

    def _undo_decay(self, saved: Description) -> None:
        """Takes a decay back that the next outer step would repeat."""
        factors = saved.decay(self._place.describe(saved.iteration))
        for state in self._loop.states:
            for chunk in state.chunks:
                chunk.of(state.momentum).div_(factors[chunk.fragment])

    def _verify(self, saved: Description) -> None:
        found = self._loop.checksums()[self._loop.exchange.rank]
        [source, *others] = self._outer_sources(saved, self._place.group)
        expected = {} if others else {name: saved.checksums.get(checksum_name(name, source)) for name in found}
        wrong = [name for name, checksum in expected.items() if checksum not in (None, found[name])]
        if wrong:
            raise DamagedCheckpointError(
                f"--load {versions.megatron_args().load}: the {' and the '.join(wrong)} of iteration {saved.iteration} are not "
                "what was saved: their checksums differ. The files are damaged. Choose another iteration with --ckpt-step."
            )


def _load_mean(mean: ParameterState, of_sources: Iterable[Any], metadata: Any) -> None:
    """Takes over the mean of what was read of several groups; one of them as it is."""
    number = 0
    for number, read in enumerate(of_sources, start=1):
        target = mean if number == 1 else mean.empty_on_host()
        target.load(read, metadata)
        if number > 1:
            mean.add(target)
    if number > 1:
        mean.divide(number)


def _resumption(request: _Request) -> str:
    saved = request.saved
    if request.is_exact and saved.holds_all_groups:
        return f" Pier goes on exactly from iteration {saved.iteration}"
    lines = [f" Pier goes on from iteration {saved.iteration}"]
    if request.changes:
        lines.append(f"with changes: {', '.join(request.changes)}")
    lines.append(f"group 0 with the inner state of saved group {' and '.join(map(str, request.sources))}")
    if saved.rounds and not request.is_exact:
        lines.append("exchanges under way are dropped: what they carried goes into the next outer step")
    return "; ".join(lines)
