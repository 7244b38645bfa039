"""Work buffers for the chunks that are on their way, and the copies of offloaded state that go with them."""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pier_megatron.exchange.collectives import Residual
from pier_megatron.outer.chunks import Chunk
from pier_megatron.outer.state import ANCHOR, MOMENTUM, RESIDUAL, OuterState

OWN, SHARED = "own", "shared"
WORK = (OWN, SHARED)
"""Names of the vectors that a round works with: the own pseudo-gradient, and what is exchanged."""


@dataclasses.dataclass
class Buffers:
    """Tensors to lend, float32, each as long as the longest chunk.

    Attributes:
        tensors: Tensors by name.
        ready: Event after which nobody reads or writes the tensors any more, where copies run on streams.
    """

    tensors: dict[str, Tensor]
    ready: torch.cuda.Event | None = None

    def of(self, chunk: Chunk) -> dict[str, Tensor]:
        """The part that a chunk fills."""
        return {name: tensor[: chunk.numel] for name, tensor in self.tensors.items()}


class Staged:
    """A chunk of the flat buffers with everything that its outer step reads and writes, where the parameters are.

    Attributes:
        chunk: The stretch that it is.
        tensors: Its part of the state, of :data:`OWN` and of :data:`SHARED` by name, each float32 of shape ``[numel]``: in
            place, or copies of what is offloaded.
        own: This group's pseudo-gradient, one of the tensors.
        shared: What the group sends, then what arrives, likewise.
        anchor: The part of the anchor, likewise.
        momentum: The part of the momentum, likewise.
        residual: What the codec has dropped here, if it drops anything.
        lengths: How far groups have moved each of the chunk's matrices, once that is known, see
            :attr:`pier_megatron.outer.verdicts.Verdicts.lengths`.
        homes: Places where what is offloaded lives, by name.
        copied_in: Event after which everything that has been read is there.
    """

    lengths: Tensor

    def __init__(self, staging: "Staging", chunk: Chunk, kept: Buffers | None) -> None:
        """Lays a chunk over work buffers, or over those that are ``kept`` for it."""
        self._staging = staging
        state = staging.state
        in_state = {name: chunk.of(flat) for name, flat in state.flats.items()}
        own = {} if kept is None else kept.of(chunk)
        self.lent = None if kept is not None and not state.offload else staging.take_work()
        lent = {} if self.lent is None else self.lent.of(chunk)
        # Offloaded, a sum stays on the device while it is on the wire, and the pseudo-gradient waits on the host.
        on_the_wire = {name: tensor for name, tensor in own.items() if name != OWN}
        self.chunk, self.tensors = chunk, in_state | own | lent | on_the_wire
        self.own, self.shared, self.anchor, self.momentum = (self.tensors[name] for name in (*WORK, ANCHOR, MOMENTUM))
        self.homes = in_state | ({OWN: own[OWN]} if own else {}) if state.offload else {}
        self.copied_in: torch.cuda.Event | None = None
        reduced = state.reduced_residuals.get(chunk.start)
        self.residual = None if reduced is None else Residual(self.tensors[RESIDUAL], reduced)

    def subtract_parameters(self, into: Tensor) -> None:
        """Computes ``anchor - parameters`` into one of the work buffers."""
        self.chunk.copy_parameters_to(into)
        torch.sub(self.anchor, into, out=into)

    def give_back(self, writes: Collection[str] = ()) -> None:
        """Gives the work buffers back, and begins to copy what is named to where it lives."""
        if self.lent is None:
            return
        staging, outward = self._staging, self._staging.outward
        if outward is not None:
            outward.wait_stream(torch.cuda.current_stream())
        with _on(outward):
            for name, home in self.homes.items():
                if name in writes:
                    home.copy_(self.tensors[name], non_blocking=True)
        if outward is not None:
            self.lent.ready = staging.written[self.chunk.start] = outward.record_event()
        staging.work.append(self.lent)


class Staging:
    """Lends work buffers to the chunks of one state, and takes them back.

    Buffers are made by :meth:`reserve`, or when they are first needed, and then kept. Offloaded state is copied to the
    device on a stream of its own while earlier chunks are worked on, and back on another, behind the work on its chunk.

    Attributes:
        state: The state.
        work: Work buffers that nobody has.
        kept: Buffers of :meth:`keep` that nobody has.
        written: Event after which what a chunk has sent home is there, by the chunk's start.
        inward: Stream of copies to the device, if there is one.
        outward: Stream of copies back, likewise.
    """

    def __init__(self, state: OuterState) -> None:
        """Starts without buffers for a state."""
        self.state = state
        self._longest = max((chunk.numel for chunk in state.chunks), default=0)
        self.work: collections.deque[Buffers] = collections.deque()
        # In place, a chunk is worked on where it is kept.
        self.kept: collections.deque[Buffers] = collections.deque() if state.offload else self.work
        self.written: dict[int, torch.cuda.Event] = {}
        self.inward, self.outward = (torch.cuda.Stream(state.device) if state.copies_on_streams else None for _ in range(2))

    def lend(self, chunk: Chunk, reads: Collection[str], kept: Buffers | None = None) -> Staged:
        """Lends buffers to a chunk, and begins to copy what it ``reads`` into them: wait with :func:`one_ahead`.

        A chunk that does more than pass by brings what :meth:`keep` has set aside for it.
        """
        staged, inward = Staged(self, chunk, kept), self.inward
        if inward is not None:
            # Nobody else may use the buffers any more, and what the chunk has sent home must have arrived.
            for event in (staged.lent.ready if staged.lent else None, self.written.get(chunk.start)):
                if event is not None:
                    inward.wait_event(event)
        with _on(inward):
            for name, home in staged.homes.items():
                if name in reads:
                    staged.tensors[name].copy_(home, non_blocking=True)
        if inward is not None:
            staged.copied_in = inward.record_event()
        return staged

    def keep(self) -> Buffers:
        """Sets aside where a chunk's pseudo-gradient and sum wait between iterations: where the state lives."""
        return self.kept.popleft() if self.kept else self._new_kept()

    def release(self, kept: Buffers) -> None:
        """Takes back what :meth:`keep` has set aside."""
        self.kept.append(kept)

    def reserve(self, work: int, kept: int) -> None:
        """Makes the buffers that :func:`pier_megatron.outer.memory.buffers_at_once` counts, so that none is made later."""
        self.work.extend(self._new_work() for _ in range(work - len(self.work)))
        self.kept.extend(self._new_kept() for _ in range(kept - len(self.kept)))

    def take_work(self) -> Buffers:
        """Work buffers on the device."""
        # Those that were given back longest ago: their copies back are done soonest.
        return self.work.popleft() if self.work else self._new_work()

    def _new_kept(self) -> Buffers:
        return Buffers(self.allocate((OWN,), **self.state.factory_kwargs) | self.allocate((SHARED,), device=self.state.device))

    def _new_work(self) -> Buffers:
        offloaded = self.state.flats if self.state.offload else ()
        buffers = Buffers(self.allocate((*WORK, *offloaded), device=self.state.device))
        if self.state.copies_on_streams:
            # Kernels queued on the present stream may still use this memory under an earlier allocation.
            buffers.ready = torch.cuda.current_stream().record_event()
        return buffers

    def synchronize(self) -> None:
        """Waits until all copies back into the state have arrived."""
        if self.outward is not None:
            self.outward.synchronize()

    def allocate(self, names: Iterable[str], **place: object) -> dict[str, Tensor]:
        """Makes vectors by name, each as long as the longest chunk."""
        return {name: torch.empty(self._longest, dtype=torch.float32, **place) for name in names}  # type: ignore[call-overload]


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def chunks_of(stagings: Sequence[Staging], fragments: Sequence[int]) -> Iterator[tuple[Staging, Chunk]]:
    """The chunks of some fragments, each with what lends it buffers."""
    return ((staging, chunk) for staging in stagings for chunk in staging.state.chunks if chunk.fragment in fragments)


def one_ahead(chunks: Iterable[Staged]) -> Iterator[Staged]:
    """Hands out chunks that are staged lazily, each once its copies are there.

    It stages one chunk ahead, so that the copies of offloaded state run during the work on the chunk before.
    """
    before: Staged | None = None
    for staged in itertools.chain(chunks, (None,)):
        if before is not None:
            if before.copied_in is not None:
                torch.cuda.current_stream().wait_event(before.copied_in)
            yield before
        before = staged
