"""Starts trainings in real processes and reads back what they recorded."""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]

# Where the tests train: the smallest GPT with every kind of parameter.
_MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --make-vocab-size-divisible-by 16 --tokenizer-type NullTokenizer --vocab-size 257 "
    "--hidden-dropout 0 --attention-dropout 0 --lr 2e-3 --lr-decay-style constant --adam-eps 1e-4 "
    "--log-interval 1 --eval-interval 1000000 --eval-iters 1"
).split()


# Of one launch, in seconds.
_TIMEOUT = 600


@dataclasses.dataclass
class Run:
    """A training to launch.

    Attributes:
        name: Of the run, unique within a launch.
        argv: Its command line, beside the model's; ``{directory}`` stands for the launch's.
        probes: What to record of it, see ``worker.Recorder``.
        sabotage: Names of bugs and faults planted in it, see ``sabotage.py``.
        saves: Iterations after which it saves, beside those of its command line.
        fails: Whether every rank must end with an error, which is recorded.
    """

    name: str
    argv: str
    probes: Sequence[str] = ()
    sabotage: Sequence[str] = ()
    fails: bool = False
    saves: Sequence[int] = ()


class Recorded:
    """What the ranks of a run recorded."""

    def __init__(self, directory: Path, run: Run, world_size: int) -> None:
        self.directory = directory / run.name
        self.ranks: list[dict[str, Any]] = [
            torch.load(directory / f"{run.name}-rank{rank}.pt", weights_only=False) for rank in range(world_size)
        ]

    @property
    def printed(self) -> str:
        """What its ranks printed, one after the other."""
        logs = (self.directory.with_name(f"{self.directory.name}-rank{rank}.txt") for rank in range(len(self.ranks)))
        return "".join(log.read_text() for log in logs)

    @property
    def losses(self) -> dict[int, float]:
        """The losses that Megatron logged, by iteration."""
        return self.ranks[-1]["losses"]

    @property
    def printed_losses(self) -> dict[int, float]:
        """The losses since the line before that Megatron printed, by iteration."""
        return self.ranks[-1]["printed"]

    @property
    def grad_norms(self) -> dict[int, float]:
        """The gradient norms that Megatron logged, by iteration."""
        return self.ranks[-1]["grad_norms"]

    def of_group(self, group: int) -> list[dict[str, Any]]:
        """Records of the ranks of a group, in order: the same parts of the model in every group."""
        return [rank for rank in self.ranks if rank["group"] == group]

    @property
    def error(self) -> str:
        """With what rank 0 ended."""
        return self.ranks[0]["error"]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """All weights of the model, whole, as saved under that name."""
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        path = self.directory / f"{name}.pt"
        dcp_to_torch_save(self.directory / name, path)
        return torch.load(path, weights_only=False)


def launch(
    directory: Path,
    corpus: tuple[Path, Path],
    runs: Sequence[Run],
    world_size: int = 4,
    megatron: Path | None = None,
    recorder: str = "recorder",
) -> dict[str, Recorded]:
    """Runs trainings one after the other in one set of processes.

    Args:
        directory: For what they record.
        corpus: Prefixes of the train and the validation dataset.
        runs: What to train.
        world_size: Number of processes.
        megatron: Folder of another megatron-core release than the installed one.
        recorder: Module that runs them.

    Returns:
        What each run recorded, by its name.
    """
    train, validation = corpus
    data = ["--train-data-path", str(train), "--valid-data-path", str(validation), "--test-data-path", str(validation)]
    specification = directory / "specification.json"
    specification.write_text(
        json.dumps(
            [
                dataclasses.asdict(run) | {"argv": [*_MODEL, *data, *run.argv.replace("{directory}", str(directory)).split()]}
                for run in runs
            ]
        )
    )
    with contextlib.ExitStack() as stack:
        # The installed release is launched again and again, the others once.
        server = _installed() if megatron is None else stack.enter_context(Server(megatron, recorder))
        server.launch(specification, directory, world_size)
    return {run.name: Recorded(directory, run, world_size) for run in runs}


class Server:
    """A process that has imported Megatron; every launch is a fork of it."""

    def __init__(self, megatron: Path | None = None, recorder: str = "recorder") -> None:
        """Starts it, with another megatron-core release than the installed one if asked, and another recorder."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # What stands in for a GPU had better find none.
        environment = os.environ | _environment(megatron) | {"CUDA_VISIBLE_DEVICES": ""}
        pipe = subprocess.PIPE
        command = [sys.executable, str(Path(__file__).parent / "worker.py"), recorder]
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._log, env=environment, text=True, start_new_session=True
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def launch(self, specification: Path, directory: Path, world_size: int) -> None:
        """Runs the trainings of a specification to their end.

        Raises:
            AssertionError: If one failed, with the errors that were printed.
        """
        log = directory / "log.txt"
        job = {"specification": str(specification), "directory": str(directory), "world_size": world_size, "log": str(log)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        there, _, _ = select.select([self._process.stdout], [], [], _TIMEOUT)
        answer = self._process.stdout.readline() if there else ""
        if not answer:
            self.end()
            self._log.seek(0)
            raise AssertionError(f"{_errors(f'no answer in {_TIMEOUT} s', *_newest(directory))}\n{self._log.read()[-5000:]}")
        assert int(answer) == 0, _errors(f"the trainings in {directory} ended with {int(answer)}", *_newest(directory))

    def end(self) -> None:
        """Ends it, with all that is left of its launches."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        _installed.cache_clear()


@functools.cache
def _installed() -> Server:
    server = Server()
    atexit.register(server.end)
    return server


def torchrun(world_size: int) -> list[str]:
    """The command that starts processes on this machine, on a free port."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]


def execute(command: Sequence[str], log: Path, megatron: Path | None = None, **environment: str) -> str:
    """Runs a command to its end.

    Returns:
        What it printed.

    Raises:
        AssertionError: If it failed, with the end of what it printed.
    """
    variables = os.environ | _environment(megatron) | environment
    with log.open("w") as output:
        process = subprocess.run(command, env=variables, stdout=output, stderr=subprocess.STDOUT, timeout=_TIMEOUT)
    assert process.returncode == 0, _errors(" ".join(command), log)
    return log.read_text()


def _environment(megatron: Path | None) -> dict[str, str]:
    path = [str(folder) for folder in (megatron, REPOSITORY, REPOSITORY / "tools") if folder is not None]
    return {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        # Megatron's Makefile for its dataset helper calls python3.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }


def _newest(directory: Path) -> list[Path]:
    """What was printed before the first run, and by the ranks of the one that began last."""
    logs = sorted(directory.glob("*-rank*.txt"), key=lambda log: log.stat().st_ctime)
    runs = [log.stem.rpartition("-")[0] for log in logs]
    return [directory / "log.txt", *(log for log, run in zip(logs, runs, strict=True) if run == runs[-1])]


def _errors(what: str, *logs: Path) -> str:
    errors = [line for log in logs if log.exists() for line in log.read_text().splitlines() if "Error" in line]
    return "\n".join([what, *errors[:20], "The whole logs:", *map(str, logs)])
