"""A thread that works behind training."""

import contextlib
import threading
from collections.abc import Callable
from concurrent import futures

import torch


class Behind[T]:
    """What another thread does behind training, without gradients and on a stream of its own."""

    def __init__(self, work: Callable[[], T], device: torch.device) -> None:
        """Begins after what the present stream has queued."""
        self._done: futures.Future[T] = futures.Future()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

        def run() -> None:
            apart = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
            try:
                with torch.no_grad(), apart:
                    self._done.set_result(work())
            except BaseException as error:
                self._done.set_exception(error)

        # A daemon: a process that ends does not wait for islands.
        threading.Thread(target=run, name="pier-islands", daemon=True).start()

    def result(self) -> T:
        """Waits for it."""
        formed = self._done.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return formed

    def wait(self) -> None:
        """Waits for it, whatever comes of it."""
        futures.wait([self._done])
