"""What the demo trains on: two GPUs or more, two emulated nodes with a slow link, or just this machine."""

import contextlib
import dataclasses
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pier_megatron.commands.megatron_log import PROGRESS
from pier_megatron.cpu.nodes import EmulatedNodes, NoNetworkError
from pier_megatron.cpu.preparations import missing_cpu_flags
from pier_megatron.processes import running

_NODES = 2
_PORT = 29611

_ENVIRONMENT = {
    # One thread per process: the processes share the cores.
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONWARNINGS": "ignore",
    # Megatron compiles its dataset helper with the python3 on the PATH.
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the trainings run on.

    Attributes:
        description: Words for people.
        device: ``cuda`` or ``cpu``.
        processes: Number of processes on each node.
        tensor_parallel: Size of the tensor-parallel groups.
        nodes: Emulated nodes, or None if the processes share one machine without links between them.
    """

    description: str
    device: str
    processes: int
    tensor_parallel: int = 1
    nodes: EmulatedNodes | None = None

    def train(self, arguments: Sequence[str], folder: Path) -> int:
        """Trains with Megatron's ``arguments``, shows how far it is, and returns the exit status; logs are in the folder."""
        arguments = [*arguments, "--tensor-model-parallel-size", str(self.tensor_parallel)]
        if self.device == "cuda" and importlib.util.find_spec("transformer_engine") is None:
            # The same plain PyTorch path as on the CPU, on NCCL.
            arguments += missing_cpu_flags(["--distributed-backend", "--num-workers"])
        logs = [folder / f"log{node}.txt" for node in range(_NODES if self.nodes else 1)]
        with contextlib.ExitStack() as stack:
            processes = []
            for node, log in enumerate(logs):
                command = [*self._launcher(node), *arguments]
                file = stack.enter_context(log.open("w"))
                file.write(" ".join(command) + "\n")
                file.flush()
                start = running if self.nodes is None else self.nodes.running_on(node)
                processes.append(stack.enter_context(start(command, file, _ENVIRONMENT)))
            follow(processes, logs)
            status = next((process.returncode for process in processes if process.returncode), 0)
        if status:
            print(f"\nThe training failed with status {status}; its logs are in {folder}. Their ends:", file=sys.stderr)
            for log in logs:
                lines = log.read_text(errors="replace").splitlines()
                # The launcher's own report follows what a script has printed.
                print("\n".join([line for line in lines[:-25] if "error: " in line] + lines[-25:]), file=sys.stderr)
        return status

    def _launcher(self, node: int) -> list[str]:
        place = ["--standalone"]
        if self.nodes:
            place = ["--nnodes", str(_NODES), "--node-rank", str(node), "--master-port", str(_PORT)]
            place += ["--master-addr", self.nodes.address(0)]
        return [
            *(sys.executable, "-m", "torch.distributed.run", *place, "--nproc-per-node", str(self.processes)),
            *("-m", "pier_megatron", "--device", self.device, str(Path(__file__).with_name("pretrain_bytes.py"))),
        ]


@contextlib.contextmanager
def this_machine(megabits: float) -> Iterator[Machine]:
    """What this machine has to offer, while the ``with`` block lasts; ``megabits`` is the rate of an emulated link."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus >= _NODES:
        size, of = (2, "two GPUs, tensor-parallel") if gpus >= 2 * _NODES else (1, "one GPU")
        yield Machine(f"Two groups of {of}, on NCCL", "cuda", size * _NODES, size)
        return
    found = "no GPU" if gpus == 0 else "one GPU, and two groups need two"
    with contextlib.ExitStack() as stack:
        try:
            nodes = stack.enter_context(EmulatedNodes(_NODES))
        except NoNetworkError as error:
            yield Machine(
                f"Found {found}: Megatron runs on the CPU and gloo, without a slow link between emulated nodes: {error}. So "
                "the time that Pier saves does not show: all trainings take as long.",
                "cpu",
                _NODES,
            )
            return
        nodes.set_rate(megabits)
        yield Machine(
            f"Found {found}: Megatron runs on the CPU and gloo, on two emulated nodes with {megabits:g} Mbit/s between them.",
            "cpu",
            1,
            nodes=nodes,
        )


def follow(processes: Sequence["subprocess.Popen[str]"], logs: Sequence[Path]) -> None:
    """Shows how far a training is until it ends, or a part of it fails. One node says so: the last, or that of island 0."""
    begin, shown, is_terminal = time.monotonic(), "starting", sys.stdout.isatty()
    if not is_terminal:
        print("     0 s  starting", flush=True)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(log.open(errors="replace")) for log in logs]
        while any(process.poll() is None for process in processes) and not any(p.returncode for p in processes):
            time.sleep(0.5)
            found = PROGRESS.findall("".join(file.read() for file in files))
            if found:
                shown = "iteration {} of {}, loss {:.3f}".format(*found[-1][:2], float(found[-1][2]))
            seconds = time.monotonic() - begin
            if is_terminal:
                print(f"\r  {seconds:4.0f} s  {shown}", end="", flush=True)
            elif found and int(found[-1][0]) % 50 == 0:
                print(f"  {seconds:4.0f} s  {shown}", flush=True)
    if is_terminal:
        print()
