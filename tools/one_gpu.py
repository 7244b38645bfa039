"""Ranks that share one GPU, or have none: where they compute, how they talk, how they are started.

NCCL refuses two ranks on one GPU of one host. Each rank says therefore that it is a host of its own, and they talk through
the loopback interface; NVIDIA does not support that. Where it fails they talk through gloo, which copies GPU tensors through
the host. Device and backend are in the environment, so that every process that is started from here knows them.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import forked_ranks
import torch
import torch.distributed as dist

_DEVICE, _BACKEND = "PIER_TEST_DEVICE", "PIER_TEST_BACKEND"

_NCCL = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    # One socket of the loopback interface is a tenth of what several carry.
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "2",
}

_PROBE_SECONDS = 90


class RanksFailedError(RuntimeError):
    """Ranks failed or took too long; the text is the end of what they printed."""


def choose(device_type: str | None = None, backend_name: str | None = None, seconds: float = _PROBE_SECONDS) -> str:
    """Chooses for this process and all that it starts, unless it has been chosen where this one was started.

    Args:
        device_type: ``cuda`` or ``cpu``; by default ``cuda`` where there is a GPU.
        backend_name: ``nccl`` or ``gloo``. Default: NCCL on a GPU if a probe gets an answer over it, otherwise gloo.
        seconds: Limit of the probe.

    Returns:
        What has been chosen and why, in a line.

    Raises:
        RuntimeError: If there is no GPU to choose.
    """
    has_gpu = torch.cuda.is_available()
    chosen = device_type or os.environ.get(_DEVICE) or ("cuda" if has_gpu else "cpu")
    if chosen == "cuda" and not has_gpu:
        raise RuntimeError(f"Device cuda: PyTorch {torch.__version__} finds no GPU.")
    os.environ[_DEVICE] = chosen
    if chosen == "cpu":
        os.environ[_BACKEND] = "gloo"
        return "cpu, gloo"
    given = backend_name or os.environ.get(_BACKEND)
    why_not = None if given else _probe("nccl", seconds)
    os.environ[_BACKEND] = given or ("gloo" if why_not else "nccl")
    return f"cuda, {backend()}" + (f" (no answer over nccl: {why_not})" if why_not else "")


def device() -> torch.device:
    """Where ranks compute; the CPU where nothing has been chosen."""
    return torch.device(os.environ.get(_DEVICE, "cpu"))


def backend() -> str:
    """How ranks talk."""
    return os.environ.get(_BACKEND, "gloo")


def device_of_pairs() -> torch.device:
    """Where ranks compute that send to single other ones: gloo sends no CUDA tensor that way, other than in a collective."""
    return torch.device("cpu") if backend() == "gloo" else device()


def synchronize() -> None:
    """Waits until the device has done everything."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def become_rank(rank: int) -> torch.device:
    """Prepares this process to be a rank, before it makes its process group; returns its device."""
    if device().type == "cuda":
        os.environ |= _of_rank(rank)
        torch.cuda.set_device(0)
    return device()


def _of_rank(rank: int) -> dict[str, str]:
    if device().type != "cuda":
        return {"LOCAL_RANK": str(rank)}
    return _NCCL | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_HOSTID": f"rank{rank}", "LOCAL_RANK": "0"}


@contextlib.contextmanager
def started(command: Sequence[str], world_size: int, logs: Path, **environment: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs a command as ranks while the ``with`` block lasts, in the environment that torchrun would give them.

    Args:
        command: What each rank runs.
        world_size: Number of ranks.
        logs: Folder for what they print, a file ``rank0.log`` for the first of them.
        environment: Further variables of all of them.

    Yields:
        Their processes, in order.
    """
    port = forked_ranks.free_port()
    logs.mkdir(parents=True, exist_ok=True)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    common |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)} | environment
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            own = os.environ | common | {"RANK": str(rank)} | _of_rank(rank)
            with (logs / f"rank{rank}.log").open("wb") as log:
                ranks.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def run(command: Sequence[str], world_size: int, logs: Path, seconds: float, **environment: str) -> None:
    """Runs a command as ranks to their end.

    Raises:
        RanksFailedError: If one of them failed, or after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    with started(command, world_size, logs, **environment) as ranks:
        while any(process.poll() is None for process in ranks):
            # The others may wait for a rank that has failed until their time is up, too.
            if any(process.returncode for process in ranks) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        ends = [process.poll() for process in ranks]
    if any(ends) or None in ends:
        guilty = next((rank for rank, end in enumerate(ends) if end), 0)
        how = f"rank {guilty} failed with {ends[guilty]}" if any(ends) else f"no end after {seconds:.0f} s"
        raise RanksFailedError(f"{how}: {last_lines(logs / f'rank{guilty}.log')}")


def last_lines(log: Path, number: int = 3) -> str:
    """The end of what a rank has printed, errors before anything else."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return " / ".join((errors or lines)[-number:])


def _probe(backend_name: str, seconds: float) -> str | None:
    """Lets two ranks talk; returns why they cannot."""
    with tempfile.TemporaryDirectory() as logs:
        try:
            run([sys.executable, __file__], 2, Path(logs), seconds, **{_BACKEND: backend_name})
        except RanksFailedError as error:
            return str(error)
    return None


def _answer() -> None:
    here = become_rank(int(os.environ["RANK"]))
    dist.init_process_group(backend())
    one = torch.ones(1000, device=here)
    dist.all_reduce(one)
    assert one.sum().item() == 1000 * dist.get_world_size()
    dist.destroy_process_group()


if __name__ == "__main__":
    _answer()
