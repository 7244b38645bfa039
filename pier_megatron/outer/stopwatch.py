"""How long an outer step holds training up."""

import contextlib
import time
from collections.abc import Iterator

import torch


class Stopwatch:
    """Adds up stretches of work: on a GPU the time between events in the stream, which is not waited for until it is read."""

    def __init__(self, device: torch.device) -> None:
        """Starts at zero."""
        self._is_on_device = device.type == "cuda"
        self._seconds = 0.0
        self._stretches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of what happens inside."""
        if self._is_on_device:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._stretches.append((begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started

    def is_over(self) -> bool:
        """Whether :meth:`seconds` would not wait."""
        return all(end.query() for _, end in self._stretches)

    def seconds(self) -> float:
        """The time counted so far, once it is over on the device too."""
        for begin, end in self._stretches:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        self._stretches = []
        return self._seconds
