"""Ranks that run the outer loop on a small problem, without Megatron: real processes, kept for many programs.

The problem: each group is drawn to targets of its own, so groups drift apart; AdamW inside. Everything is a function of
group and iteration, so ``pier_megatron.reference`` can train on the same.
"""

import contextlib
import dataclasses
import io
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import device_memory
import one_gpu
import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron import PierConfig
from pier_megatron.exchange.codecs import BLOCK
from pier_megatron.exchange.collectives import GroupExchange, Sum
from pier_megatron.exchange.sites import SiteExchange, new_site_communicators
from pier_megatron.outer import OuterLoop, OuterStepReport, Shards
from pier_megatron.outer.chunks import matrix_in
from pier_megatron.outer.memory import wire_of
from pier_megatron.outer.rules import Nesterov
from pier_megatron.outer.share import moments_of
from pier_megatron.outer.staging import Staged

WORLD = 4

# What each rank of a group owns for itself, then what all of them hold copies of.
SPLIT, COPIED = [(7,), (3, 5), (11, 2)], [(5,), (4, 2)]

# Chunks far shorter than a user's, so that there are many and they cut tensors.
CHUNK_NUMEL = 16

# For counts of memory, in which only chunks matter.
LONG_CHUNK_NUMEL = 2**16


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run.

    Attributes:
        groups: Number of groups.
        ranks_in_group: Number of ranks that share the parameters of a group.
        config: Settings of Pier, without the groups.
        flips_a_bit: Whether a bit of one rank's anchor flips in each outer step.
        averages: Whether outer steps take the mean of the last parameter, as of a router's biases.
        copies: Whether the ranks of a group hold the same parameters, all of them, instead of a part each.
        inner: Name of the inner optimizer.
    """

    groups: int
    ranks_in_group: int
    config: dict[str, Any]
    flips_a_bit: bool = False
    averages: bool = False
    copies: bool = False
    inner: str = "AdamW"

    @property
    def parts(self) -> int:
        """Number of ranks of a group that hold parameters of their own."""
        return 1 if self.copies else self.ranks_in_group

    def pier(self) -> PierConfig:
        return PierConfig(groups=self.groups, **self.config)


_update, _begin_sum = Nesterov.update, GroupExchange.sum


def _update_with_a_flipped_bit(rule: Nesterov, staged: Staged, is_alone: bool) -> None:
    """One bit of one number in the memory of one group."""
    _update(rule, staged, is_alone)
    if dist.get_rank() == 1 and staged.chunk.start == 0:
        staged.anchor[0:1].view(torch.int32).bitwise_xor_(1)


def initial(part: int) -> list[Tensor]:
    """Parameters of the ``part``-th rank of a group, then those that all ranks hold."""
    own, common = torch.Generator().manual_seed(part), torch.Generator().manual_seed(99)
    return [torch.randn(s, generator=own) for s in SPLIT] + [torch.randn(s, generator=common) for s in COPIED]


def gradient(parameters: list[Tensor], part: int, group: int, iteration: int, bad: bool = False) -> list[Tensor]:
    """Draws the parameters of a group to its targets in an iteration; nan where it is ``bad``."""
    wanted = [*_targets(part, group, iteration, SPLIT), *_targets(99, group, iteration, COPIED)]
    grads = [parameter - target.to(parameter) for parameter, target in zip(parameters, wanted, strict=True)]
    if bad:
        grads[1].view(-1)[3] = float("nan")
    return grads


def _targets(part: int, group: int, iteration: int, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    always = torch.Generator().manual_seed(1000 + 10 * part + group)
    now = torch.Generator().manual_seed(100_000 + 1000 * part + 100 * group + iteration)
    return [2 + 0.5 * torch.randn(shape, generator=always) + 0.3 * torch.randn(shape, generator=now) for shape in shapes]


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def inner_optimizer(parameters: list[Tensor], name: str = "AdamW") -> torch.optim.Optimizer:
    if name == "Adafactor":
        return torch.optim.Adafactor(parameters, lr=0.05)
    # A large eps: where gradients are near zero, Adam would magnify the difference between float32 and float64.
    return torch.optim.AdamW(parameters, lr=0.05, eps=0.05, weight_decay=0.01)


def _refuse_new_buffers(names: Sequence[str], **place: Any) -> Any:
    raise AssertionError("a buffer is taken after the rehearsal")


class Rank:
    """One rank of a run, which executes its commands in each iteration."""

    def __init__(self, settings: Settings, communicators: "Communicators") -> None:
        self._settings, self._communicators = settings, communicators
        rank = dist.get_rank()
        self.group, self._part = rank // settings.ranks_in_group, rank % settings.parts
        self.reports: list[OuterStepReport] = []
        self.history: list[dict[str, Any]] = []
        self.summed = 0
        self._rehearses = False
        self._build()

    def _build(self) -> None:
        settings = self._settings
        here = one_gpu.device() if settings.pier().subgroup is None else one_gpu.device_of_pairs()
        self.parameters = [parameter.to(here) for parameter in initial(self._part)]
        self._optimizer = inner_optimizer(self.parameters, settings.inner)
        split, copied = self.parameters[: len(SPLIT)], self.parameters[len(SPLIT) :]
        between, inside = self._communicators.of(settings)
        config = settings.pier()
        (exchange, sites), report = self._communicators.exchanges(settings), self.reports.append
        if settings.parts == 1 and not settings.averages:
            self.loop = OuterLoop.for_optimizer(self._optimizer, config, between, group=inside, report=report, sites=sites)
        else:
            last, holders = len(copied) - int(settings.averages), inside if settings.copies else None
            is_counted = inside is None or inside.rank() == 0

            def shards_of(tensors: list[Tensor], is_counted: bool, is_averaged: bool = False) -> Shards:
                matrices = [matrix_in(tensor, slice(0, tensor.numel())) for tensor in tensors]
                return Shards(tensors, is_counted, is_averaged=is_averaged, holders=holders, matrices=matrices)

            shards = [shards_of(split, is_counted or not settings.copies), shards_of(copied[:last], is_counted)]
            shards += [shards_of(copied[last:], is_counted=False, is_averaged=True)]
            self.loop = OuterLoop(
                [shards], config, exchange, group=inside, inner_state=self._moments, report=report, sites=sites
            )

    def rehearse(self) -> None:
        """Rehearses before the first iteration, and whenever it starts again; whatever is taken later is an error."""
        self._rehearses = True
        self.loop.rehearse()
        for staging in self.loop.share.stagings:
            staging.allocate = _refuse_new_buffers  # type: ignore[method-assign]

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        return moments_of(self._optimizer, parameter)

    def iterate(self, skip: bool = False, overflow: Sequence[int] = (), bad: Sequence[int] = ()) -> None:
        """One iteration.

        Args:
            skip: Nobody trains.
            overflow: Groups that skip their step.
            bad: Groups that diverge.
        """
        iteration = self.loop.iteration + 1
        if skip:
            self.loop.skip_iteration()
        else:
            self.loop.begin_iteration(iteration)
            self._step(iteration, overflow, bad)
            with mock.patch.object(GroupExchange, "sum", autospec=True, side_effect=self._sum):
                self.loop.end_iteration()
        # Offloaded state may still be on its way to the host.
        one_gpu.synchronize()
        self.history.append(
            self._outer_state() | {"parameters": on_cpu(self.parameters), "is_synchronised": self.loop.is_synchronised}
        )

    def _sum(self, exchange: GroupExchange, vectors: Sequence[Tensor], *how: Any, **named: Any) -> Sum:
        self.summed += sum(map(len, vectors))
        return _begin_sum(exchange, vectors, *how, **named)

    def _outer_state(self) -> dict[str, Any]:
        [state] = self.loop.states
        return {"anchor": state.anchor.to("cpu", copy=True), "momentum": state.momentum.to("cpu", copy=True)}

    def _step(self, iteration: int, overflow: Sequence[int], bad: Sequence[int]) -> None:
        def of(group: int) -> list[Tensor]:
            # On one rank of the group only, unless all hold the same: the others must learn of it.
            return gradient(self.parameters, self._part, group, iteration, group in bad and self._part == 0)

        if self.loop.is_local:
            if self.group in overflow:
                return
            grads = of(self.group)
        else:
            if overflow:
                return
            grads = [torch.stack(same).mean(0) for same in zip(*map(of, range(self._settings.groups)), strict=True)]
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        self._optimizer.step()

    def stop_and_resume(self, changes: dict[str, Any] | None = None) -> None:
        """Stores everything as a file would, forgets it, and resumes from there; perhaps with other settings."""
        file = io.BytesIO()
        stored = {"loop": self.loop.snapshot(), "parameters": self.parameters, "optimizer": self._optimizer.state_dict()}
        torch.save(stored, file)
        file.seek(0)
        found = torch.load(file, weights_only=True)
        if changes:
            self._settings = dataclasses.replace(self._settings, config=self._settings.config | changes)
        self._build()
        for parameter, kept in zip(self.parameters, found["parameters"], strict=True):
            parameter.copy_(kept)
        self._optimizer.load_state_dict(found["optimizer"])
        if self._rehearses:
            self.rehearse()
        self.loop.restore(found["loop"])

    def save(self) -> None:
        """Takes a snapshot and trains on."""
        self.loop.snapshot()

    def evaluate(self, fails: bool = False, as_mean: bool = False) -> dict[str, Any]:
        """What evaluation sees; with an error in its middle on demand."""
        before = [parameter.clone() for parameter in self.parameters]
        seen: list[Tensor] = []
        with contextlib.suppress(KeyboardInterrupt), self.loop.anchor_in_model(as_mean):
            seen = on_cpu(self.parameters)
            if fails:
                raise KeyboardInterrupt
        untouched = all(map(torch.equal, before, self.parameters)) or any(not tensor.isfinite().all() for tensor in before)
        is_as_trained = not self.loop.is_synchronised or all(map(torch.equal, on_cpu(before), seen))
        return {"seen": seen, "untouched": untouched, "is_as_trained": is_as_trained}

    def layout(self) -> tuple[list[Tensor], list[Tensor]]:
        """Fragment of every element of every parameter, and number of the block in which a codec encodes it; -1 for none."""
        [state], config = self.loop.states, self._settings.pier()
        fragments, blocks = torch.full((2, state.numel), -1)
        for number, chunk in enumerate(state.chunks):
            chunk.of(fragments).fill_(chunk.fragment)
            if not chunk.shards.travel_exactly(config.codec):
                # Parts of the ranks that hold copies, then of the groups of a site, then blocks.
                place, of_site = torch.arange(chunk.numel), wire_of(config).part_numel(chunk.carried)
                part, place = place // chunk.carried, place % chunk.carried
                parts = part * WORLD + place // of_site
                chunk.of(blocks).copy_(number * 1000 + parts * 10 + place % of_site // BLOCK)
        first, second = ([part[at].view(one.shape).clone() for one, at in state.slices()] for part in (fragments, blocks))
        return first, second

    def call(self, method: str, arguments: Sequence[Any] = ()) -> None:
        """Calls a method of the loop."""
        getattr(self.loop, method)(*arguments)

    def device_memory(self) -> tuple[int, int]:
        """Most memory that a loop of these settings over more parameters takes, and what the start-up block says of it."""
        config, (exchange, sites) = self._settings.pier(), self._communicators.exchanges(self._settings)
        with mock.patch.object(PierConfig, "chunk_numel_on", return_value=LONG_CHUNK_NUMEL):
            return device_memory.used_and_said(config, exchange, 16 * LONG_CHUNK_NUMEL, sites)

    def result(self) -> dict[str, Any]:
        """What has happened so far."""
        # No run waits for a report; this does.
        self.loop.reports.write_arrived(waits=True)
        return {"history": self.history, "reports": self.reports, "summed": self.summed}


class Communicators:
    """Process groups of every layout, made once: a new set for every run would leave thousands behind."""

    def __init__(self) -> None:
        self._own: dict[tuple[int, int], tuple[Any, Any]] = {}
        for groups, ranks_in_group in ((2, 1), (3, 1), (4, 1), (2, 2), (1, 2)):
            world = range(groups * ranks_in_group)
            between = [[part + ranks_in_group * g for g in range(groups)] for part in range(ranks_in_group)]
            inside = [list(world[g * ranks_in_group :][:ranks_in_group]) for g in range(groups)]
            mine = []
            for enumeration in (between, inside):
                made = [dist.new_group(ranks) if len(ranks) > 1 else None for ranks in enumeration]
                here = [group for group, ranks in zip(made, enumeration, strict=True) if dist.get_rank() in ranks]
                mine.append(here[0] if here else None)
            self._own[groups, ranks_in_group] = (mine[0], mine[1])
        self._of_sites = new_site_communicators([range(WORLD)], sites=2)

    def of(self, settings: Settings) -> tuple[Any, Any]:
        return self._own[settings.groups, settings.ranks_in_group]

    def exchanges(self, settings: Settings) -> tuple[GroupExchange, SiteExchange | None]:
        """Collectives between the groups of a run, and between its sites."""
        (between, _), config = self.of(settings), settings.pier()
        everyone = GroupExchange(between, config.codec)
        return everyone, None if config.sites is None else SiteExchange(everyone, *self._of_sites)


def _serve(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    one_gpu.become_rank(rank)
    dist.init_process_group(one_gpu.backend(), init_method=f"file://{store}", rank=rank, world_size=WORLD)
    communicators = Communicators()
    present: Rank | None = None
    planted = contextlib.ExitStack()
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=CHUNK_NUMEL):
        while True:
            name, arguments = pipe.recv()
            try:
                if name == "end":
                    break
                if name == "start":
                    settings = arguments["settings"]
                    planted.close()
                    if settings.flips_a_bit:
                        planted.enter_context(mock.patch.object(Nesterov, "update", _update_with_a_flipped_bit))
                    is_needed = rank < settings.groups * settings.ranks_in_group
                    present = Rank(settings, communicators) if is_needed else None
                    answer: Any = None
                else:
                    answer = getattr(present, name)(**arguments) if present is not None else None
                pipe.send(("done", answer))
            except Exception as error:
                pipe.send(("failed", (f"{type(error).__name__}: {error}", traceback.format_exc())))
    dist.destroy_process_group()


def forking() -> Any:
    """Makes processes as forks of one with ``warm.py`` imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    # Without it the server does not find the module, and says nothing.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        multiprocessing.forkserver.ensure_running()
    return context


class FailedError(RuntimeError):
    """Ranks failed; the text is what each of them said."""


class Ranks:
    """Processes that do the same at the same time."""

    def __init__(self) -> None:
        # A server of forks saves seconds for each rank. With a GPU each rank is a new process: a fork would inherit the driver.
        context = multiprocessing.get_context("spawn") if one_gpu.device().type == "cuda" else forking()
        store = tempfile.mktemp()
        self._pipes, self._processes = [], []
        for rank in range(WORLD):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        self._active = WORLD

    def start(self, settings: Settings) -> None:
        """Begins a run."""
        self._tell("start", settings=settings)
        self._active = settings.groups * settings.ranks_in_group

    def do(self, name: str, **arguments: Any) -> list[Any]:
        """Calls a method of each :class:`Rank` of the run; returns what they answer."""
        return self._tell(name, **arguments)[: self._active]

    def _tell(self, name: str, **arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((name, arguments))
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(300), "a rank hangs"
            answers.append(pipe.recv())
        failed = [answer for status, answer in answers if status == "failed"]
        if failed:
            raise FailedError("\n".join(said for said, _ in failed) + "\n" + failed[0][1])
        return [answer for _, answer in answers]

    def end(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.send(("end", {}))
        for process in self._processes:
            process.join(10)
            process.kill()


@contextlib.contextmanager
def running() -> Iterator[Ranks]:
    """Ranks while the ``with`` block lasts."""
    ranks = Ranks()
    try:
        yield ranks
    finally:
        ranks.end()
