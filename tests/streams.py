"""Stand-in CUDA streams that find what could be read or written too early: a race detector for a machine without a GPU.

Everything runs at once on the CPU. What is recorded is which stream would have run it, and what that stream had waited for
(vector clocks). Two accesses to the same memory are a race if one of them writes and nothing orders them.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]


class RaceError(AssertionError):
    """Two accesses to the same memory could happen in either order."""


class Timeline:
    """The host, or a stand-in for ``torch.cuda.Stream``."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, {name: 0}

    def wait_event(self, event: Clock) -> None:
        for name, time in event.items():
            self.clock[name] = max(time, self.clock.get(name, 0))

    def wait_stream(self, other: "Timeline") -> None:
        self.wait_event(other.clock)

    def record_event(self) -> Clock:
        return dict(self.clock)


@dataclasses.dataclass
class _Access:
    """Access of one timeline to a stretch of memory, at its own time."""

    timeline: str
    time: int
    start: int
    end: int
    is_write: bool
    operation: str


def is_view(operation: Any) -> bool:
    """Whether an operation of the dispatcher only looks at memory in another way."""
    return any(returned.alias_info and not returned.alias_info.is_write for returned in operation._schema.returns)


class RaceDetector(TorchDispatchMode):
    """Finds races inside a ``with`` block.

    Attributes:
        on_host: Storages that are host memory; all others are the device's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host, self._default = Timeline("host"), Timeline("default")
        self.streams: list[Timeline] = []
        self._current = self._default
        self.on_host: set[int] = set()
        self._accesses: dict[int, list[_Access]] = collections.defaultdict(list)
        # Memory that is freed would be handed out again at the same addresses.
        self._kept_alive: list[torch.Tensor] = []

    def new_stream(self, device: Any = None) -> Timeline:
        stream = Timeline(f"stream {len(self.streams)}")
        stream.synchronize = lambda: self.host.wait_stream(stream)
        self.streams.append(stream)
        return stream

    def current_stream(self, device: Any = None) -> Timeline:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Timeline) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    @contextlib.contextmanager
    def watching(self) -> Iterator["RaceDetector"]:
        """Watches, with stand-ins for CUDA's streams."""
        names = {"Stream": self.new_stream, "current_stream": self.current_stream, "stream": self.stream}
        with mock.patch.multiple(torch.cuda, **names), self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_view(func):
            return result  # Nothing is read.
        arguments = func._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        touched = [
            (tensor, bool(argument.alias_info and argument.alias_info.is_write))
            for argument in arguments
            for tensor in tree_leaves(given.get(argument.name))
            if isinstance(tensor, torch.Tensor) and tensor.numel()
        ]
        new = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor) and tensor.numel()]
        touched += [(tensor, True) for tensor in new]
        where = {tensor.untyped_storage().data_ptr() in self.on_host for tensor, _ in touched}
        self._kept_alive += new
        timeline = self.host if where == {True} else self._current
        self._run(timeline, func.__name__, touched)
        if len(where) == 2 and not given.get("non_blocking"):
            self.host.wait_stream(timeline)
        return result

    def _run(self, timeline: Timeline, operation: str, touched: list[tuple[torch.Tensor, bool]]) -> None:
        if timeline is not self.host:
            timeline.wait_stream(self.host)  # It is queued after what the host has done.
        timeline.clock[timeline.name] += 1
        for tensor, is_write in touched:
            start = tensor.data_ptr()
            access = _Access(timeline.name, timeline.clock[timeline.name], start, start + tensor.nbytes, is_write, operation)
            earlier = self._accesses[tensor.untyped_storage().data_ptr()]
            for other in earlier:
                is_shared = other.start < access.end and access.start < other.end and (is_write or other.is_write)
                if is_shared and other.time > timeline.clock.get(other.timeline, 0):
                    raise RaceError(f"{operation} on {timeline.name} does not wait for {other.operation} on {other.timeline}")
            earlier.append(access)


def new_work(detector: RaceDetector, work: Callable[[], None]) -> Callable[[], None]:
    """Starts a stand-in collective: a stream of its own, behind what the present one has queued; returns what waits for it."""
    stream = detector.new_stream()
    stream.wait_stream(detector.current_stream())
    with detector.stream(stream):
        work()
    done = stream.record_event()
    return lambda: detector.current_stream().wait_event(done)
