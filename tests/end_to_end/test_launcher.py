"""``python -m pier_megatron``: what it runs, what it refuses, and the processes that Megatron spawns."""

import dataclasses
import re
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import forked_ranks
import psutil
import pytest
from launch import DEMO, MODEL, REPOSITORY, data, execute, torchrun, user_job

from pier_megatron.exchange.codecs import BLOCK
from pier_megatron.settings import Settings, flag_of

pytestmark = pytest.mark.processes

_LAUNCHER = [sys.executable, "-m", "pier_megatron"]
_STOCK = [*MODEL, *"--global-batch-size 8 --eval-interval 6 --bf16 --train-iters 6 --tensor-model-parallel-size 2".split()]
_TRAINING = [*_STOCK, *"--optimizer pier --pier-preset pier --pier-sync-interval 2 --pier-lazy-start-iters 2".split()]

# Runs a function of the main module in a spawned process, as Megatron's checkpoint writers do.
_SPAWNING_SCRIPT = """
import multiprocessing
import sys
from pathlib import Path

import torch

import neighbour

ON_EMULATED_DEVICE = torch.zeros(1, device="cuda")


class Message:
    text = "of the script's own"


def report(queue):
    queue.put((__name__, Path(__file__).name, ON_EMULATED_DEVICE.device.type, neighbour.NAME))


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=report, args=(queue,))
    process.start()
    print("arguments", sys.argv[1:3], "child", queue.get(timeout=60))
    process.join()
    with context.Manager() as manager:
        queue = manager.Queue()
        queue.put(Message())
        print("message", queue.get().text)
"""


def refused(*arguments: str) -> str:
    """The message with which the launcher refuses to start."""
    process = subprocess.run([*_LAUNCHER, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert process.returncode == 2
    return process.stderr


def test_script_must_exist() -> None:
    assert "SCRIPT nowhere.py: no such file" in refused("--device", "cpu", "nowhere.py")


def test_cpu_is_never_a_silent_fallback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('must not run')")
    for arguments in ((), ("--device", "cuda")):
        message = refused(*arguments, str(script))
        assert "--device cuda: PyTorch" in message
        assert "finds no CUDA device" in message
        assert "pass --device cpu" in message


def test_spawned_processes_know_the_main_module(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SPAWNING_SCRIPT)
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    command = [*_LAUNCHER, "--device", "cpu", str(tmp_path / "script.py"), "--flag", "value"]
    log = execute(command, tmp_path / "log.txt")
    assert "arguments ['--flag', 'value'] child ('__mp_main__', 'script.py', 'cpu', 'neighbour')" in log
    assert "message of the script's own" in log
    assert "compiled kernels, and adds: --distributed-backend gloo" in log


def test_help_lists_the_flags_with_their_defaults(tmp_path: Path) -> None:
    help_text = execute(user_job([sys.executable], "--help"), tmp_path / "help.txt")
    # Lines are broken in the middle of flags, too.
    group = "".join(help_text[help_text.index("\npier:") :].split())
    told = {flag_of(setting.name): setting.metadata["help"] for setting in dataclasses.fields(Settings) if setting.metadata}
    assert len(told) > 25
    for flag, words in told.items():
        assert "Default: " in words
        assert "".join(words.split()) in group[group.index(flag) :], flag


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> tuple[str, Path]:
    """A training started as on a cluster: one torchrun per node, and no word about the number of groups."""
    folder = tmp_path_factory.mktemp("nodes")
    saving = ["--save", str(folder / "checkpoint"), "--save-interval", "6", "--tensorboard-dir", str(folder / "tensorboard")]
    return on_two_nodes(2, folder, [*_TRAINING, *data(corpus), *saving]), folder


def on_two_nodes(processes: int, folder: Path, words: list[str]) -> str:
    """Runs one torchrun for each of two nodes, both on this machine; returns what they printed."""
    port = str(forked_ranks.free_port())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(processes)]
    launcher += ["--master-addr", "localhost", "--master-port", port, "--node-rank"]
    with futures.ThreadPoolExecutor() as pool:
        nodes = [
            pool.submit(execute, user_job([*launcher, str(node)], *words), folder / f"node{node}.txt") for node in range(2)
        ]
    return "".join(node.result() for node in nodes)


def test_default_is_one_group_per_node(two_nodes: tuple[str, Path]) -> None:
    log, _ = two_nodes
    assert "Pier: 2 groups of 2 ranks, preset pier" in log
    assert "group 0: ranks 0-1 on node 0" in log
    assert "group 1: ranks 2-3 on node 1" in log


def test_operator_sees_every_outer_step(two_nodes: tuple[str, Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log, folder = two_nodes
    assert log.count("outer step after iteration") == 2
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    scalars = {name for name in accumulator.Tags()["scalars"] if name.startswith("pier/")}
    assert {"pier/pseudo-gradient-norm", "pier/momentum-norm", "pier/cosine-min", "pier/bytes-sent"} < scalars
    assert [event.step for event in accumulator.Scalars("pier/mu")] == [4, 6]
    # 2 (G - 1) / G x 4 bytes of each parameter that the rank owns, and what fills the last block of those that it shares.
    parameters = int(log[log.index("per rank: ") + 10 :].split()[0].replace(",", ""))
    [sent] = {event.value for event in accumulator.Scalars("pier/bytes-sent")}
    assert 0 <= sent - 4 * parameters < 4 * 2 * BLOCK


def test_checkpoint_is_written_by_spawned_processes(two_nodes: tuple[str, Path]) -> None:
    _, folder = two_nodes
    assert (folder / "checkpoint" / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert list((folder / "checkpoint" / "iter_0000006").glob("*.distcp"))


def test_tensor_parallel_group_across_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"--tensor-model-parallel-size 2.*rank 0 on node 0, rank 1 on node 1"):
        on_two_nodes(1, tmp_path, [*_TRAINING, "--mock-data", "--pier-groups", "1"])


def test_demo(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    command = [sys.executable, "-m", "pier_megatron.cli", "demo", "--iterations", "12", "--output", str(output)]
    command += "--sync-interval 4 -- --pier-preset diloco --eval-iters 1 --eval-interval 6 --pier-lazy-start-iters 4".split()
    said = execute(command, tmp_path / "log.txt")
    assert re.search(r"Pier \(diloco\) reached a validation loss of \d\.\d+, ", said)
    assert re.search(r"After the same tokens: \d\.\d+ and \d\.\d+ nats per byte", said)
    assert re.search(r"Pier, Muon inside \(diloco\) reached a validation loss of .* synchronous Muon after ", said)
    assert "(4 synchronous iterations, 2 outer steps)" in said
    assert "warn" not in said.lower()
    assert (output / "loss.png").stat().st_size
    runs = ("synchronous", "pier", "synchronous-muon", "pier-muon")
    assert all(list((output / training / "tensorboard").iterdir()) for training in runs)
    assert (output / "pier" / "checkpoint" / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert "preset diloco" in (output / "pier" / "log0.txt").read_text()
    left = [process for process in psutil.process_iter(["cmdline"]) if str(output) in " ".join(process.info["cmdline"] or [])]
    assert left == []


def test_stock_run_through_the_launcher_is_the_stock_run(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    training = [*_STOCK, "--use-distributed-optimizer", *data(corpus)]
    through = execute(user_job(torchrun(2), *training), tmp_path / "through.txt")
    # The same without the launcher: only the GPU is stood in for, and the ranks share their imports.
    bare_script = tmp_path / "bare.py"
    bare_script.write_text(
        "import runpy, sys\nimport forked_ranks\nfrom pier_megatron.cpu import emulation\nemulation.install()\n"
        "from pier_megatron.cpu.preparations import missing_cpu_flags\n"
        "from megatron.core.datasets import utils\nutils.compile_helpers = lambda: None\n"
        f"sys.argv[0] = {str(DEMO)!r}\nsys.argv += missing_cpu_flags(sys.argv)\nimport megatron.training\n"
        "assert 'pier_megatron.integration.training' not in sys.modules\n"
        f"forked_ranks.run(2, lambda: runpy.run_path({str(DEMO)!r}, run_name='__main__'))\n"
    )
    # Pier's launcher sets it on the CPU.
    bare = execute([sys.executable, str(bare_script), *training], tmp_path / "bare.txt", CUDA_DEVICE_MAX_CONNECTIONS="1")

    def numbers(log: str) -> list[str]:
        # Other processes may print into the line before its first field.
        lines = re.findall(r"consumed samples:.*?nan iterations: +\d+", log)
        return [re.sub(r"elapsed time .*?\|", "", line) for line in lines]

    assert len(numbers(through)) == 6
    assert numbers(through) == numbers(bare)
