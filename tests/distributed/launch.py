"""Starts trainings in real processes and reads back what they recorded."""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "pier_megatron" / "commands" / "demo" / "pretrain_bytes.py"
TOOLS, WARM = REPOSITORY / "tools", REPOSITORY / "tests" / "warm"

# Where the tests train: the smallest GPT with every kind of parameter.
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --make-vocab-size-divisible-by 16 --tokenizer-type NullTokenizer --vocab-size 257 "
    "--hidden-dropout 0 --attention-dropout 0 --lr 2e-3 --lr-decay-style constant --adam-eps 1e-4 "
    "--log-interval 1 --eval-interval 1000000 --eval-iters 1"
).split()


# Limit of one launch, in seconds.
_TIMEOUT = 600


@dataclasses.dataclass
class Run:
    """A training to launch.

    Attributes:
        name: Name of the run, unique within a launch.
        argv: Its command line, without the model's; ``{directory}`` stands for the launch's.
        probes: What to record of it, see ``worker.Recorder``.
        sabotage: Names of bugs and faults planted in it, see ``sabotage.py``.
        saves: Iterations after which it saves, in addition to those of its command line.
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

    def differing_weights(self, other: "Recorded") -> list[str]:
        """Keys of final weights that are not the other's to the last bit."""
        weights, those = self.weights("final"), other.weights("final")
        assert weights.keys() == those.keys()
        return [key for key, value in those.items() if isinstance(value, torch.Tensor) and not torch.equal(weights[key], value)]

    @property
    def printed(self) -> str:
        """What its ranks printed, one after the other."""
        logs = (self.directory.with_name(f"{self.directory.name}-rank{rank}.txt") for rank in range(len(self.ranks)))
        return "".join(log.read_text() for log in logs)

    @property
    def losses(self) -> dict[int, float]:
        """Means over the groups of the losses that Megatron logged, by iteration."""
        return self._means("losses")

    @property
    def printed_losses(self) -> dict[int, float]:
        """The losses since the line before that Megatron printed, by iteration."""
        return self.ranks[-1]["printed"]

    @property
    def grad_norms(self) -> dict[int, float]:
        """Means over the groups of the gradient norms that Megatron logged, by iteration."""
        return self._means("grad_norms")

    def _means(self, logged: str) -> dict[int, float]:
        """Means of what the last rank of each group logged; a value that all groups logged stays exact, to the last bit."""
        groups = {rank["group"]: rank[logged] for rank in self.ranks if rank[logged]}
        found: dict[int, list[float]] = {}
        for iteration, value in (item for group in groups.values() for item in group.items()):
            found.setdefault(iteration, []).extend([value] if value is not None else [])
        return {t: values[0] if len({*values}) == 1 else sum(values) / len(values) for t, values in found.items() if values}

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
        directory: Folder for what they record.
        corpus: Prefixes of the train and the validation dataset.
        runs: What to train.
        world_size: Number of processes.
        megatron: Folder of another megatron-core release than the installed one.
        recorder: Module that runs them.

    Returns:
        What each run recorded, by its name.
    """
    specification = directory / "specification.json"
    specification.write_text(
        json.dumps(
            [
                dataclasses.asdict(run)
                | {"argv": [*MODEL, *data(corpus), *run.argv.replace("{directory}", str(directory)).split()]}
                for run in runs
            ]
        )
    )
    # The installed release is launched again and again, the others once.
    with contextlib.nullcontext(installed()) if megatron is None else WarmProcesses({"megatron": recorder}, megatron) as warm:
        log, words = directory / "log.txt", [recorder, str(specification), str(directory), str(world_size)]
        # What stands in for a GPU had better find none. Megatron asks for the last one, which its launcher sets.
        variables = {"PIER_TEST_WARM": str(warm.folder), "CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        status = _run([sys.executable, "-m", "worker", *words], log, environment(megatron) | variables)
    assert status == 0, _errors(f"the trainings in {directory} ended with {status}", *_newest(directory))
    return {run.name: Recorded(directory, run, world_size) for run in runs}


def data(corpus: tuple[Path, Path]) -> list[str]:
    """Flags that name the train and the validation dataset."""
    train, validation = map(str, corpus)
    return ["--train-data-path", train, "--valid-data-path", validation, "--test-data-path", validation]


class WarmProcesses:
    """Processes that have imported PyTorch and Megatron: what is started with ``PIER_TEST_WARM`` set becomes a fork of one.

    Attributes:
        folder: What ``PIER_TEST_WARM`` has to be.
    """

    def __init__(self, imports: Mapping[str, str], megatron: Path | None = None) -> None:
        """Starts them.

        Args:
            imports: Module that each process imports, by the name of the process.
            megatron: Folder of another megatron-core release than the installed one.
        """
        self.folder = Path(tempfile.mkdtemp())
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(WARM / "warm_process.py"), str(self.folder / name), module],
                env=os.environ | environment(megatron) | {"CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, module in imports.items()
        ]
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def __enter__(self) -> "WarmProcesses":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends them; what they have forked ends by itself."""
        for process in self._processes:
            process.kill()
            process.communicate()
        shutil.rmtree(self.folder)


@functools.cache
def installed() -> WarmProcesses:
    """Those of the installed release, as long as the tests run."""
    processes = WarmProcesses({"torch": "torch.distributed.run", "megatron": "recorder"})
    atexit.register(processes.end)
    return processes


def as_a_fork(device: str = "cpu") -> dict[str, str]:
    """Variables with which a process, unless it needs a GPU, becomes a fork of one that has imported PyTorch."""
    return {"PIER_TEST_WARM": str(installed().folder)} if device == "cpu" else {}


def torchrun(world_size: int) -> list[str]:
    """The command that starts processes on this machine, on a free port."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]


def user_job(launcher: Sequence[str], *words: str) -> list[str]:
    """The command of a user's job on emulated devices, which trains as its flags say."""
    return [*launcher, "-m", "pier_megatron", "--device", "cpu", str(DEMO), *words]


def execute(command: Sequence[str], log: Path, megatron: Path | None = None, **variables: str) -> str:
    """Runs a command to its end.

    Returns:
        What it printed.

    Raises:
        AssertionError: If it failed, with the end of what it printed.
    """
    status = _run(command, log, environment(megatron) | variables)
    assert status == 0, _errors(" ".join(command), log)
    return log.read_text()


def _run(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> int | str:
    """Runs a command; returns its status, or that it had none in time."""
    with log.open("w") as output, contextlib.suppress(subprocess.TimeoutExpired):
        run = subprocess.run(command, env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT, timeout=_TIMEOUT)
        return run.returncode
    return f"nothing in {_TIMEOUT} s"


def environment(megatron: Path | None = None) -> dict[str, str]:
    """Variables of a process that trains, with another megatron-core release than the installed one if asked."""
    own = [megatron, WARM, REPOSITORY, TOOLS, Path(__file__).parent]
    path = [*(str(folder) for folder in own if folder is not None), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, path))),
        # Megatron's Makefile for its dataset helper calls python3.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        # Another release is not the one that has been imported.
    } | ({} if megatron is None else {"PIER_TEST_WARM": ""})


def _newest(directory: Path) -> list[Path]:
    """What was printed before the first run, and by the ranks of the one that began last."""
    logs = sorted(directory.glob("*-rank*.txt"), key=lambda log: log.stat().st_ctime)
    runs = [log.stem.rpartition("-")[0] for log in logs]
    return [directory / "log.txt", *(log for log, run in zip(logs, runs, strict=True) if run == runs[-1])]


def _errors(what: str, *logs: Path) -> str:
    telling = ("Error", ": error: ", "malloc", "terminate called", "what(): ")
    lines = (line for log in logs if log.exists() for line in log.read_text().splitlines())
    errors = [line for line in lines if any(word in line for word in telling)]
    return "\n".join([what, *errors[:20], "The whole logs:", *map(str, logs)])
