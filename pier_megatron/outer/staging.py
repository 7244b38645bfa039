"""Work buffers for the chunks that are on their way, and the copies of offloaded state that go with them."""

import collections
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import Residual
from pier_megatron.outer.state import ANCHOR, MOMENTUM, RESIDUAL, Chunk, OuterState, bytes_per_parameter

# The own pseudo-gradient, and what is exchanged.
_WORK_BUFFERS = 2


class Staged:
    """A chunk with everything that its outer step reads and writes, where the parameters are.

    Attributes:
        staging: That lent the buffers.
        chunk: The stretch of the flat buffers that it is.
        own: This group's pseudo-gradient; float32, shape ``[numel]``.
        shared: What the group sends, then what arrives; the same shape.
        flats: The chunk's part of the state by name: views of it, or copies of what is offloaded.
        residual: What the codec has dropped here, if it drops anything.
    """

    def __init__(self, staging: "Staging", chunk: Chunk, buffers: list[Tensor]) -> None:
        """Lays a chunk over work buffers, each as long as the longest chunk."""
        self.staging, self.chunk, self.buffers = staging, chunk, buffers
        state = staging.state
        views = [buffer[: chunk.numel] for buffer in buffers]
        self.own, self.shared = views[:_WORK_BUFFERS]
        parts = {name: chunk.of(flat) for name, flat in state.flats.items()}
        self.flats = dict(zip(parts, views[_WORK_BUFFERS:], strict=True)) if state.offload else parts
        self.anchor, self.momentum = self.flats[ANCHOR], self.flats[MOMENTUM]
        reduced = state.reduced_residuals.get(chunk.start)
        self.residual = None if reduced is None else Residual(self.flats[RESIDUAL], reduced)

    def subtract_parameters(self) -> None:
        """Computes ``own = anchor - parameters``."""
        self.chunk.copy_parameters_to(self.own)
        torch.sub(self.anchor, self.own, out=self.own)


def work_bytes_per_parameter(config: PierConfig) -> int:
    """Work memory of a chunk on its way, for each of its parameters."""
    return 4 * _WORK_BUFFERS + (bytes_per_parameter(config) if config.offload else 0)


class Staging:
    """Lends work buffers to the chunks of one state, and takes them back.

    Buffers are made when they are first needed and then kept. Offloaded state is copied to the device on a stream of its own
    while earlier chunks are worked on, and back on another, behind the work on its chunk.
    """

    def __init__(self, state: OuterState) -> None:
        """Starts without buffers."""
        self.state = state
        self._free: collections.deque[list[Tensor]] = collections.deque()
        self._longest = max((chunk.numel for chunk in state.chunks), default=0)
        self._copies_on_streams = state.offload and state.device.type == "cuda"
        if self._copies_on_streams:
            self._inward, self._outward = torch.cuda.Stream(state.device), torch.cuda.Stream(state.device)

    def lend(self, chunk: Chunk) -> Staged:
        """Lends buffers to a chunk and begins to copy its part of the state into them."""
        # The buffers that were given back longest ago: their copies back are done soonest.
        staged = Staged(self, chunk, self._free.popleft() if self._free else self._new_buffers())
        if self._copies_on_streams:
            # What a chunk brings back must be there before it is read again, and before its buffers are overwritten.
            self._inward.wait_stream(self._outward)
            with torch.cuda.stream(self._inward):
                self._copy_in(staged)
        elif self.state.offload:
            self._copy_in(staged)
        return staged

    def wait_for_copies(self) -> None:
        """Lets the work that follows wait for all copies begun so far."""
        if self._copies_on_streams:
            torch.cuda.current_stream().wait_stream(self._inward)

    def give_back(self, staged: Staged) -> None:
        """Takes buffers back and begins to copy their part of the state to where it lives."""
        self.write_back(staged)
        self._free.append(staged.buffers)

    def write_back(self, staged: Staged) -> None:
        """Begins to copy a chunk's part of the state to where it lives; the chunk goes on to use its buffers."""
        if self._copies_on_streams:
            self._outward.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._outward):
                self._copy_out(staged)
        elif self.state.offload:
            self._copy_out(staged)

    def synchronize(self) -> None:
        """Waits until the state is whole where it lives."""
        if self._copies_on_streams:
            self._outward.synchronize()

    def _copy_in(self, staged: Staged) -> None:
        for name, copy in staged.flats.items():
            copy.copy_(staged.chunk.of(self.state.flats[name]), non_blocking=True)

    def _copy_out(self, staged: Staged) -> None:
        for name, copy in staged.flats.items():
            staged.chunk.of(self.state.flats[name]).copy_(copy, non_blocking=True)

    def _new_buffers(self) -> list[Tensor]:
        number = _WORK_BUFFERS + (len(self.state.flats) if self.state.offload else 0)
        return [torch.empty(self._longest, dtype=torch.float32, device=self.state.device) for _ in range(number)]


def chunks_of(stagings: Sequence[Staging], fragments: Sequence[int]) -> Iterator[tuple[Staging, Chunk]]:
    """The chunks of some fragments, each with what lends it buffers."""
    return ((staging, chunk) for staging in stagings for chunk in staging.state.chunks if chunk.fragment in fragments)


def staged_ahead(chunks: Iterable[tuple[Staging, Chunk]]) -> Iterator[Staged]:
    """Stages one chunk ahead, so that the copies of offloaded state run beside the work on the chunk before."""
    ahead: Staged | None = None
    for staging, chunk in chunks:
        staged = ahead
        if staged is not None:
            staged.staging.wait_for_copies()
        ahead = staging.lend(chunk)
        if staged is not None:
            yield staged
    if ahead is not None:
        ahead.staging.wait_for_copies()
        yield ahead
