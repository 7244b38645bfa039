"""Jobs that something happens to: started like a user's, watched, hurt, started again."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forked_ranks
import psutil
import torch
from launch import MODEL, REPOSITORY, data, environment, torchrun

_DROPPING = "--global-batch-size 8 --bf16 --hidden-dropout 0.1 --attention-dropout 0.1"
ITERATIONS, INTERVAL, LAZY_START = 24, 4, 8
_PIER = (
    f"--train-iters {ITERATIONS} --optimizer pier --pier-preset pier --pier-groups 2 --pier-sync-interval {INTERVAL} "
    f"--pier-lazy-start-iters {LAZY_START}"
)


class Job:
    """A training that saves to a folder and resumes from there whenever it is started again.

    Attributes:
        folder: Folder of its checkpoints and process numbers.
    """

    def __init__(self, folder: Path, corpus: tuple[Path, Path], ranks: int = 2, flags: str = "") -> None:
        """Plans a job of ``ranks`` processes."""
        self.folder = folder
        self._ranks = ranks
        checkpoints = f"--save {folder / 'checkpoints'} --load {folder / 'checkpoints'}"
        self._arguments = [*MODEL, *data(corpus), *f"{_DROPPING} {checkpoints} {_PIER} {flags}".split()]
        self._attempts = 0
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def started(self, faults: Sequence[dict[str, Any]] = (), restarts: int = 0, flags: str = "") -> Iterator["Attempt"]:
        """Runs the job while the ``with`` block lasts."""
        script = Path(__file__).parent / "faulty_pretrain.py"
        command = [*torchrun(self._ranks), "--max-restarts", str(restarts), "--monitor-interval", "0.2"]
        command += ["-m", "pier_megatron", "--device", "cpu", str(script), *self._arguments, *flags.split()]
        self._attempts += 1
        losses = self.folder / f"losses{self._attempts}.txt"
        variables = environment() | {
            "PYTHONUNBUFFERED": "1",
            "PIER_TEST_FAULTS": json.dumps(list(faults)),
            "PIER_TEST_FOLDER": str(self.folder),
            "PIER_TEST_LOSSES": str(losses),
        }
        if restarts:
            # What the doctor advises. torchrun then takes a port of those that connections are given, long before rank 0
            # listens there: each restart takes another one instead.
            variables |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PIER_TEST_PORT": str(forked_ranks.free_port())}
        process = subprocess.Popen(
            command,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        attempt = Attempt(process, self.folder, losses)
        try:
            yield attempt
        finally:
            # torchrun gives each rank a session of its own.
            left: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                left = psutil.Process(process.pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for child in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()

    def run(self, **how: Any) -> "Attempt":
        """Runs the job until it ends."""
        with self.started(**how) as attempt:
            attempt.wait()
        return attempt

    def examined(self, flags: str = "") -> tuple[int, str]:
        """What the doctor says of the job: exit status and words."""
        script = str(Path(__file__).parent / "faulty_pretrain.py")
        job = ["torchrun", "--nproc-per-node", str(self._ranks), "-m", "pier_megatron", "--device", "cpu", script]
        command = [sys.executable, "-m", "pier_megatron.cli", "doctor", *job, *self._arguments, *flags.split()]
        process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        return process.returncode, process.stdout + process.stderr

    def last_saved(self) -> int:
        """Iteration of the checkpoint that a restart would load."""
        return int((self.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())

    def has_saved(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return (self.folder / "checkpoints" / "latest_checkpointed_iteration.txt").exists()

    def checkpoint(self, iteration: int) -> Path:
        """Folder of a checkpoint."""
        return self.folder / "checkpoints" / f"iter_{iteration:07d}"

    def weights(self, iteration: int) -> dict[str, torch.Tensor]:
        """The model's weights in a checkpoint."""
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        path = self.folder / f"{iteration}.pt"
        dcp_to_torch_save(self.checkpoint(iteration), path)
        found = torch.load(path, weights_only=False)
        # All other tensors have padding, which may hold anything.
        is_weight = re.compile("embedding|decoder|output_layer")
        return {
            key: value
            for key, value in found.items()
            if isinstance(value, torch.Tensor) and is_weight.match(key) and value.is_floating_point()
        }


class Attempt:
    """One start of a job."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path, losses: Path) -> None:
        self._process, self._folder, self._losses = process, folder, losses
        self._lines: list[str] = []
        self._pump = threading.Thread(target=self._read, daemon=True)
        self._pump.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return "".join(self._lines)

    def wait(self, seconds: float = 240) -> int:
        """Waits for its end; returns the exit status."""
        status = self._process.wait(seconds)
        self._pump.join(10)
        # For whoever reads the output of a test that has failed.
        print(*(line for line in self._lines if line.startswith(" Pier: ")), sep="")
        return status

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Waits until it has printed something."""
        deadline = time.monotonic() + seconds
        while not re.search(text, self.log):
            assert time.monotonic() < deadline, self.log[-5000:]
            assert self._process.poll() is None, self.log[-5000:]
            time.sleep(0.02)

    def wait_for_iteration(self, iteration: int) -> None:
        """Waits until the log shows the end of an iteration."""
        self.wait_for(rf"iteration +{iteration}/")

    def send(self, number: signal.Signals, *ranks: int) -> None:
        """Sends a signal to some ranks and all processes that they have started, as torchrun and Slurm do."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int((self._folder / f"rank{rank}.pid").read_text()), number)

    def send_to_all(self, number: signal.Signals) -> None:
        """Sends a signal to torchrun and all ranks, as a terminal does."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        for process in (psutil.Process(self._process.pid), *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def losses(self) -> dict[int, str]:
        """The losses that Megatron logged, to the last bit, by iteration; of iterations that were trained again, the last."""
        lines = self._losses.read_text().splitlines() if self._losses.exists() else []
        return {int(iteration): loss for iteration, loss in map(str.split, lines)}


def outer_checksums(job: Job, iteration: int) -> dict[str, int]:
    """Checksums of anchor and momentum, as a checkpoint describes itself."""
    from megatron.core import dist_checkpointing

    checksums: dict[str, int] = dist_checkpointing.load_content_metadata(str(job.checkpoint(iteration)))["pier"]["checksums"]
    return checksums


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Keys of tensors that are not the same, bit for bit."""
    return sorted(
        key for key in one.keys() | other.keys() if key not in one or key not in other or not same(one[key], other[key])
    )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; a nan equals itself."""
    return one.shape == other.shape and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
