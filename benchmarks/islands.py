"""What faults of an island cost the others, in seconds: three jobs of two tensor-parallel ranks on emulated nodes.

``python benchmarks/islands.py``; takes about five minutes on two cores. It asserts only that training continues.
"""

import argparse
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from pier_megatron.commands.demo import pretrain_bytes
from pier_megatron.commands.demo.corpus import write_documents
from pier_megatron.cpu.nodes import EmulatedNodes

_ISLANDS, _PORT = 3, 29510
_LEFT_BEHIND = "missed the outer step"
_ARGUMENTS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    f"--global-batch-size {2 * _ISLANDS} --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 16 "
    "--train-iters 100000 --lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-interval 1000000 --eval-iters 1 "
    f"--tensor-model-parallel-size 2 --optimizer pier --pier-groups {_ISLANDS} --pier-sync-interval 10 "
    "--pier-lazy-start-iters 0"
)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
    # Or ranks that torchrun starts again look for each other where they were before.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Islands:
    """The jobs, their lighthouse, and what happens to them."""

    def __init__(self, nodes: EmulatedNodes, folder: Path, timeout: int) -> None:
        """Starts nothing yet."""
        self._nodes, self._folder, self._timeout = nodes, folder, timeout
        self._running: dict[int, contextlib.ExitStack] = {}
        self._processes: dict[int, int] = {}
        self._starts = 0
        self._logs: dict[int, Path] = {}
        text = Path(pretrain_bytes.__file__)
        self._data = write_documents(folder / "text", [text])

    def start(self, place: int) -> None:
        """Starts the island of that node, or the lighthouse on the last one."""
        self._starts += 1
        log = self._logs[place] = self._folder / f"{place}-{self._starts}.txt"
        address, lighthouse = self._nodes.address(place), f"http://{self._nodes.address(_ISLANDS)}:{_PORT}"
        if place == _ISLANDS:
            command = ["-m", "pier_megatron.cli", "lighthouse", "--islands", str(_ISLANDS), "--address", address]
        else:
            paths = " ".join(f"--{kind}-data-path {self._data}" for kind in ("train", "valid", "test"))
            own = f"--pier-lighthouse {lighthouse} --pier-island {place} --pier-island-address {address} "
            own += f"--data-cache-path {self._folder}"
            command = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 9".split()
            command += "-m pier_megatron --device cpu".split()
            command += [pretrain_bytes.__file__, *f"{_ARGUMENTS} {paths} {own} --pier-island-timeout {self._timeout}".split()]
        stack = self._running[place] = contextlib.ExitStack()
        file = stack.enter_context(log.open("w"))
        process = stack.enter_context(self._nodes.running_on(place)([sys.executable, *command], file, _ENVIRONMENT))
        self._processes[place] = process.pid

    def processes(self, place: int) -> list[psutil.Process]:
        """All that runs there."""
        first = psutil.Process(self._processes[place])
        return [*first.children(recursive=True), first]

    def kill(self, place: int) -> None:
        """Kills all processes of an island, as the kernel does."""
        for process in self.processes(place):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._running.pop(place).close()

    def iteration(self, island: int) -> int:
        """The last one that it has logged since its start, or since it was left behind and started again."""
        found = re.findall(r" iteration +(\d+)/", self.log(island).rpartition(_LEFT_BEHIND)[2])
        return int(found[-1]) if found else 0

    def log(self, island: int) -> str:
        """What it has printed since its start."""
        return self._logs[island].read_text(errors="replace")

    def close(self) -> None:
        """Ends everything."""
        for place in list(self._running):
            self.kill(place)


def seconds_until(condition: Callable[[], bool], limit: float = 300) -> float:
    """Waits; returns for how long.

    Raises:
        TimeoutError: If that takes too long.
    """
    begun = time.monotonic()
    while not condition():
        if time.monotonic() > begun + limit:
            raise TimeoutError
        time.sleep(0.02)
    return time.monotonic() - begun


def misfortunes(islands: Islands, nodes: EmulatedNodes, timeout: int) -> Iterator[tuple[str, float]]:
    """What happens, and how many seconds it takes until island 0 has taken an outer step again."""

    def goes_on(island: int = 0) -> float:
        # At the second outer step from here it is over: the one under way may have been whole already.
        target = (islands.iteration(island) // 10 + 2) * 10 + 1
        return seconds_until(lambda: islands.iteration(island) >= target)

    for place in (_ISLANDS, *range(_ISLANDS)):
        islands.start(place)
    seconds_until(lambda: min(map(islands.iteration, range(_ISLANDS))) > 30)
    yield "nothing (two outer steps)", goes_on()
    islands.kill(2)
    yield "an island is killed", goes_on()
    islands.start(2)
    yield "it is started again: until it trains", seconds_until(lambda: islands.iteration(2) > 0)
    yield "until it has counted in an outer step, from then", goes_on(2)
    nodes.set_links(False)
    time.sleep(10)
    nodes.set_links(True)
    yield "no network for 10 s, from its end", goes_on()
    islands.kill(_ISLANDS)
    time.sleep(5)
    islands.start(_ISLANDS)
    yield "the lighthouse is away for 5 s, from its start", goes_on()
    for process in islands.processes(1):
        process.suspend()
    yield f"an island is stopped for a minute (--pier-island-timeout {timeout})", goes_on()
    time.sleep(60)
    for process in islands.processes(1):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    yield "it wakes: until it says that it was left behind", seconds_until(lambda: _LEFT_BEHIND in islands.log(1))
    yield "torchrun starts it again: until it trains", seconds_until(lambda: islands.iteration(1) > 0)
    yield "nothing (two outer steps)", goes_on()


def main() -> None:
    """Prints a line for each fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=int, default=40, help="--pier-island-timeout. Default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, EmulatedNodes(_ISLANDS + 1) as nodes:
        islands = Islands(nodes, Path(folder), options.timeout)
        try:
            for what, seconds in misfortunes(islands, nodes, options.timeout):
                print(f"{what:75} {seconds:6.1f} s", flush=True)
        except TimeoutError:
            for place in range(_ISLANDS + 1):
                print(f"--- {place}\n{islands.log(place)[-20000:]}")
            raise
        finally:
            islands.close()


if __name__ == "__main__":
    main()
