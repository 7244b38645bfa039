"""What only an interpreter shows that has imported nothing: what is imported, what is replaced, and the CPU stand-ins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPOSITORY

_LATE = """
import argparse, contextlib, io, sys
from pier_megatron import cli
from pier_megatron import launcher

def show(parser):
    parser.format_help()
    for action in parser._actions:
        for inner in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            show(inner)

show(cli.parser())
for run, words in (
    (cli.main, ["demo", "--iterations", "-5"]),
    (cli.main, ["plan", "--cluster", "perlmutter", "--suggest"]),
    (launcher.main, ["--help"]),
    (launcher.main, [sys.argv[1], "--pier-groups", "0"]),
):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run(words)
heavy = "torch numpy megatron matplotlib psutil yaml transformers tensorboard lm_eval torchft".split()
print(" ".join(name for name in heavy if name in sys.modules))
"""


def test_help_and_refusals_import_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    command = [sys.executable, "-c", _LATE, str(tmp_path / "file")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split() == []


_EVERYWHERE = """
import argparse, builtins, importlib, pkgutil, sys
from pier_megatron.cpu import emulation
emulation.install()
import megatron.core, megatron.training
import torch.distributed
from pier_megatron.integration import seams
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.seam import install
for row in (*seams.BEFORE_ARGUMENTS, *seams.TABLE):
    if row.exists:
        row.original()

def everything():
    found = {}
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] in ("megatron", "torch", "builtins"):
            for attribute, value in [*vars(module).items()]:
                found[f"{name}.{attribute}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {f"{name}.{attribute}.{of_class}": inner for of_class, inner in [*vars(value).items()]}
    return found

before = everything()
for owner, name in (
    (megatron.training.training, "train_step"),
    (megatron.training.arguments, "parse_args"),
    (megatron.core.parallel_state, "get_nccl_options"),
):
    there = vars(owner).pop(name)
    try:
        raise SystemExit(f"without {name} nothing was refused: {seams.register()}")
    except versions.UnsupportedMegatronError as error:
        assert f"{owner.__name__}.{name}" in str(error), error
    setattr(owner, name, there)
unchanged = everything()
assert all(unchanged[name] is value for name, value in before.items())
seams.register()
args = argparse.Namespace(
    pier=True, optimizer="muon", pier_groups=2, pier_lighthouse="x", pier_sync_seconds=1, iterations_to_skip=[1], save="x",
    load="x", async_save=True, log_progress=True,
)
rows = (*seams.BEFORE_ARGUMENTS, *seams.used(seams.TABLE, args))
install(rows)
after = everything()
changed = {name for name in before if before[name] is not after[name] and callable(before[name])}
told = {f"{row.module}.{row.name}" for row in rows if row.exists}
imported = {row.name for row in rows if row.is_imported}
unknown = {name for name in changed - told if name.rpartition(".")[2] not in imported}
assert not unknown, unknown
assert told <= changed, told - changed
print(len(before))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_all_or_nothing_is_replaced_and_only_what_the_table_names() -> None:
    ran = subprocess.run([sys.executable, "-c", _EVERYWHERE], cwd=REPOSITORY, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert int(ran.stdout.split()[-1]) > 50_000


_UNDER_ANOTHER_DEVICE = """
import torch
from pier_megatron.cpu import emulation
emulation.install()
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
with torch.device("meta"):
    made = [torch.empty(2), torch.tensor([1.0]), torch.arange(3), torch.full((2,), 1.0), torch.nn.Linear(2, 2).weight]
assert all(tensor.is_meta for tensor in made), [tensor.device for tensor in made]
cpu = torch.device("cpu")
for cuda in ("cuda", "cuda:0"):
    with torch.device(cuda):
        assert torch.zeros(1).device == torch.tensor([1.0]).device == cpu
    torch.set_default_device(cuda)
    assert torch.zeros(1).device == cpu
    torch.set_default_device(None)
with torch.device(0):
    assert torch.zeros(1).device == cpu
assert torch.empty(2, device="cuda").device == torch.zeros(1).device == cpu
"""


@pytest.mark.slow
def test_tensors_are_made_where_a_device_is_the_default() -> None:
    """transformers loads models this way; on failure their rotary embeddings hold uninitialised memory."""
    command = [sys.executable, "-c", _UNDER_ANOTHER_DEVICE]
    found = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


# Gathers as of overlapped parameters, many at a time. With PyTorch's own communicator this ends with a corrupt heap.
_GATHERS = """
import datetime, torch, torch.distributed as dist
from pier_megatron.cpu.communicators import OnOneDevice
# A newer PyTorch passes further options by name.
group = OnOneDevice(dist.HashStore(), 0, 1, datetime.timedelta(seconds=60), group_name="one")
assert group.options.group_name == "one"
one, other = torch.ones(1), torch.ones(1)
for _ in range(2000):
    for work in [group.allgather_coalesced([[one]], [other]) for _ in range(64)]:
        work.wait()
"""


@pytest.mark.slow
def test_many_collectives_at_a_time() -> None:
    done = subprocess.run([sys.executable, "-c", _GATHERS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tests_under_a_scheduler_are_found() -> None:
    """``make test`` leaves them out, and what they share with others moves."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/slurm", "tests/launchers"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout
