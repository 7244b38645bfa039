"""Work buffers for the chunks that are on their way, and the copies of offloaded state that go with them."""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pier_megatron.exchange.collectives import Residual
from pier_megatron.outer.state import ANCHOR, MOMENTUM, RESIDUAL, Chunk, OuterState

OWN, SHARED = "own", "shared"
WORK = (OWN, SHARED)
"""Names of what a round works with beside the state: the own pseudo-gradient, and what is exchanged."""

MOVE = "move"
"""Name of what the parameters will move by, where that is computed before its time."""


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


class Part:
    """A stretch of the flat buffers with everything that its outer step reads and writes, where the parameters are.

    Attributes:
        chunk: The stretch that it is.
        tensors: Its part of the state, of :data:`OWN` and of :data:`SHARED` by name, each float32 of shape ``[numel]``: in
            place, or copies of what is offloaded.
    """

    def __init__(self, chunk: Chunk, tensors: dict[str, Tensor]) -> None:
        """Takes the attributes."""
        self.chunk, self.tensors = chunk, tensors

    @property
    def own(self) -> Tensor:
        """This group's pseudo-gradient."""
        return self.tensors[OWN]

    @property
    def shared(self) -> Tensor:
        """What the group sends, then what arrives."""
        return self.tensors[SHARED]

    @property
    def anchor(self) -> Tensor:
        """The part of the anchor."""
        return self.tensors[ANCHOR]

    @property
    def momentum(self) -> Tensor:
        """The part of the momentum."""
        return self.tensors[MOMENTUM]

    def subtract_parameters(self, into: Tensor) -> None:
        """Computes ``anchor - parameters`` into one of the work buffers."""
        self.chunk.copy_parameters_to(into)
        torch.sub(self.anchor, into, out=into)

    def apart(self, parameters: Tensor) -> "Part":
        """Returns it laid over other parameters, float32 of shape ``[numel]``, with the same tensors."""
        chunk = self.chunk
        return Part(Chunk(chunk.start, chunk.fragment, chunk.shards, [parameters]), dict(self.tensors))

    def blocks(self) -> "Iterator[Part]":
        """Cuts it into :attr:`Chunk.blocks`."""
        if len(self.chunk.blocks) == 1:
            yield self
            return
        for block in self.chunk.blocks:
            begin = block.start - self.chunk.start
            yield Part(block, {name: tensor[begin : begin + block.numel] for name, tensor in self.tensors.items()})


class Staged(Part):
    """A chunk, staged.

    Attributes:
        residual: What the codec has dropped here, if it drops anything.
        homes: Places where what is offloaded lives, by name.
        present: Names of what has come from there, or went there.
        copied_in: Event after which everything that has been read is there.
    """

    def __init__(self, staging: "Staging", chunk: Chunk, kept: Buffers | None) -> None:
        """Lays a chunk over work buffers, or over those that are ``kept`` for it."""
        self._staging = staging
        state = staging.state
        in_state = {name: chunk.of(flat) for name, flat in state.flats.items()}
        in_place = kept if kept is not None and not state.offload else None
        self.lent = None if in_place else staging.take_work()
        super().__init__(chunk, in_state | (in_place or self.lent).of(chunk))  # type: ignore[union-attr]
        self.homes = in_state | (kept.of(chunk) if kept is not None else {}) if state.offload else {}
        self.present: set[str] = set()
        self.copied_in: torch.cuda.Event | None = None
        reduced = state.reduced_residuals.get(chunk.start)
        self.residual = None if reduced is None else Residual(self.tensors[RESIDUAL], reduced)

    def read(self, names: Collection[str]) -> None:
        """Begins to copy more of what is offloaded into the work buffers, unless it is there: :meth:`wait` for it."""
        self._staging.read(self, names)

    def write(self, names: Collection[str]) -> None:
        """Begins to copy what has been written to where it lives; before it is changed again, :meth:`read` and :meth:`wait`."""
        self._staging.write(self, names)

    def wait(self) -> None:
        """Waits, on the present stream, for what is copied in."""
        if self.copied_in is not None:
            torch.cuda.current_stream().wait_event(self.copied_in)

    def give_back(self, writes: Collection[str] = ()) -> None:
        """Gives the work buffers back, and begins to copy what is named to where it lives."""
        self._staging.take_back(self, writes)


@dataclasses.dataclass(frozen=True)
class Deferred:
    """Work on a chunk that is put off.

    Attributes:
        chunk: The chunk.
        kept: What :meth:`Staging.keep` has set aside for it, released afterwards.
        reads: Names of what it reads.
        writes: Names of what it writes.
        run: Does the work.
    """

    chunk: Chunk
    kept: Buffers
    reads: Collection[str]
    writes: Collection[str]
    run: Callable[[Staged], object]


class Staging:
    """Lends work buffers to the chunks of one state, and takes them back.

    Buffers are made by :meth:`reserve`, or when they are first needed, and then kept. Offloaded state is copied to the
    device on a stream of its own while earlier chunks are worked on, and back on another, behind the work on its chunk.

    Work can be put off: :meth:`defer`. Whoever lends a chunk, or waits for the state, finds it done.
    """

    def __init__(self, state: OuterState, names: Sequence[str] = WORK) -> None:
        """Starts without buffers.

        Args:
            state: Outer state.
            names: Names of what its buffers hold beside the state, see :func:`pier_megatron.outer.memory.work_names`.
        """
        self.state, self._names = state, names
        self._longest = max((chunk.numel for chunk in state.chunks), default=0)
        self._work: collections.deque[Buffers] = collections.deque()
        # In place, a chunk is worked on where it is kept.
        self._kept: collections.deque[Buffers] = collections.deque() if state.offload else self._work
        self._written: dict[int, torch.cuda.Event] = {}
        self._deferred: collections.deque[Deferred] = collections.deque()
        self._coming: collections.deque[tuple[Staged, Deferred]] = collections.deque()
        self._at_a_time = 1
        if state.copies_on_streams:
            self._inward, self._outward = (torch.cuda.Stream(state.device) for _ in range(2))

    def lend(self, chunk: Chunk, reads: Collection[str], kept: Buffers | None = None) -> Staged:
        """Lends buffers to a chunk, and begins to copy what is named into them: wait with :func:`one_ahead`.

        Args:
            chunk: Chunk of the state.
            reads: Names of what will be read.
            kept: What :meth:`keep` has set aside for it, if it does more than pass by.
        """
        while any(chunk is work.chunk for work in self._deferred):
            self.work_off(least=1)
        if any(chunk is work.chunk for _, work in self._coming) or not self._work:
            # For its sake, or before other buffers are made.
            self._finish_coming()
        return self._lend(chunk, reads, kept)

    def _lend(self, chunk: Chunk, reads: Collection[str], kept: Buffers | None) -> Staged:
        staged = Staged(self, chunk, kept)
        if staged.lent is not None and staged.lent.ready is not None:
            # Nobody else may use the buffers any more.
            self._inward.wait_event(staged.lent.ready)
        self.read(staged, reads)
        return staged

    def read(self, staged: Staged, names: Collection[str]) -> None:
        """See :meth:`Staged.read`."""
        with contextlib.ExitStack() as stack:
            if self.state.copies_on_streams:
                # What the chunk has sent home must have arrived.
                if staged.chunk.start in self._written:
                    self._inward.wait_event(self._written[staged.chunk.start])
                stack.enter_context(torch.cuda.stream(self._inward))
            for name, home in staged.homes.items():
                if name in names and name not in staged.present:
                    staged.tensors[name].copy_(home, non_blocking=True)
                    staged.present.add(name)
            if self.state.copies_on_streams:
                staged.copied_in = self._inward.record_event()

    def write(self, staged: Staged, names: Collection[str]) -> None:
        """See :meth:`Staged.write`."""
        with contextlib.ExitStack() as stack:
            if self.state.copies_on_streams:
                self._outward.wait_stream(torch.cuda.current_stream())
                stack.enter_context(torch.cuda.stream(self._outward))
            for name, home in staged.homes.items():
                if name in names:
                    home.copy_(staged.tensors[name], non_blocking=True)
                    staged.present.add(name)
            if self.state.copies_on_streams:
                self._written[staged.chunk.start] = self._outward.record_event()

    def take_back(self, staged: Staged, writes: Collection[str]) -> None:
        """See :meth:`Staged.give_back`."""
        if staged.lent is None:
            return
        self.write(staged, writes)
        staged.lent.ready = self._written.get(staged.chunk.start)
        self._work.append(staged.lent)

    def keep(self) -> Buffers:
        """Sets aside where a chunk's pseudo-gradient and sum wait between iterations: where the state lives."""
        while not self._kept and self.is_behind:
            if self._coming:
                self._finish_coming()
            else:
                self.work_off(least=1)
        return self._kept.popleft() if self._kept else self._new(self._names, **self.state.factory_kwargs)

    def release(self, kept: Buffers) -> None:
        """Takes back what :meth:`keep` has set aside."""
        self._kept.append(kept)

    def reserve(self, work: int, kept: int) -> None:
        """Makes buffers that are not there yet, while none is lent, so that none has to be made later.

        Args:
            work: Number of work buffers on the device.
            kept: Number of those beside them that wait between iterations, where the state is offloaded.
        """
        self._work.extend(self._new_work() for _ in range(work - len(self._work)))
        self._kept.extend(self._new(self._names, **self.state.factory_kwargs) for _ in range(kept - len(self._kept)))

    def take_work(self) -> Buffers:
        """Work buffers on the device."""
        # Those that were given back longest ago: their copies back are done soonest.
        return self._work.popleft() if self._work else self._new_work()

    def _new_work(self) -> Buffers:
        buffers = self._new((*self._names, *(self.state.flats if self.state.offload else ())), device=self.state.device)
        if self.state.copies_on_streams:
            # The memory may be what kernels of the present stream, still to run, have been given before.
            buffers.ready = torch.cuda.current_stream().record_event()
        return buffers

    def defer(self, works: Sequence[Deferred], calls: int) -> None:
        """Puts work on chunks off.

        Args:
            works: Work, each on a chunk of its own.
            calls: Calls of :meth:`work_off` in which it is begun, if buffers are free.
        """
        self._deferred.extend(works)
        self._at_a_time = -(-len(works) // calls)

    def work_off(self, least: int = 0) -> None:
        """Does work that was put off and whose copies began in the call before, and begins those of what comes next.

        Called once an iteration, it leaves copies that long. Kernels that wait for copies would hold up those of training,
        where they share a queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``).

        Args:
            least: Chunks whose copies begin even if buffers have to be made for them.
        """
        self._finish_coming()
        for _ in range(min(len(self._deferred), max(least, min(self._at_a_time, len(self._work))))):
            work = self._deferred[0]
            self._coming.append((self._lend(work.chunk, work.reads, work.kept), work))
            self._deferred.popleft()

    def _finish_coming(self) -> None:
        while self._coming:
            # Taken off before it is done: nothing is done twice after an error.
            staged, work = self._coming.popleft()
            staged.wait()
            work.run(staged)
            staged.give_back(work.writes)
            self.release(work.kept)

    @property
    def is_behind(self) -> bool:
        """Whether work is put off."""
        return bool(self._coming or self._deferred)

    def synchronize(self) -> None:
        """Waits until the state, and all that is kept, is whole where it lives."""
        while self.is_behind:
            self.work_off(least=1)
        if self.state.copies_on_streams:
            self._outward.synchronize()

    def _new(self, names: Iterable[str], **place: object) -> Buffers:
        return Buffers({name: torch.empty(self._longest, dtype=torch.float32, **place) for name in names})  # type: ignore[call-overload]


def chunks_of(stagings: Sequence[Staging], fragments: Sequence[int]) -> Iterator[tuple[Staging, Chunk]]:
    """The chunks of some fragments, each with what lends it buffers."""
    return ((staging, chunk) for staging in stagings for chunk in staging.state.chunks if chunk.fragment in fragments)


def one_ahead(chunks: Iterable[Staged]) -> Iterator[Staged]:
    """Hands out chunks that are staged lazily, each once its copies are there.

    It stages one chunk ahead, so that the copies of offloaded state run beside the work on the chunk before.
    """
    before: Staged | None = None
    for staged in itertools.chain(chunks, (None,)):
        if before is not None:
            before.wait()
            yield before
        before = staged
