"""Launch commands as people type them."""

import shlex

import pytest

from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.errors import PierConfigError


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nnodes 4 --nproc-per-node 8 -m pier_megatron pretrain_gpt.py --lr 1e-3 --optimizer pier",
        "/bin/torchrun --nnodes=4 --nproc_per_node=8 -m pier_megatron --device cuda pretrain_gpt.py --lr 1e-3 --optimizer pier",
        "srun --ntasks 4 python -m torch.distributed.run --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d "
        "pretrain_gpt.py --lr 1e-3 --optimizer pier",
        "torchrun --nnodes 2:4 --nproc-per-node 8 -m pier_megatron --device=cuda pretrain_gpt.py --lr 1e-3 --optimizer pier",
    ],
)
def test_command_is_read(command: str) -> None:
    expected = LaunchCommand(4, 8, "pretrain_gpt.py", ("--lr", "1e-3", "--optimizer", "pier"))
    assert LaunchCommand.parse(shlex.split(command)) == expected
    assert expected.ranks == 32


@pytest.mark.parametrize(
    ("flags", "rendezvous"),
    [
        ("", None),
        ("--master-addr first --node-rank 1", "static"),
        ("--rdzv-backend c10d", None),
        ("--rdzv-backend c10d --rdzv-endpoint first:29500", "c10d"),
    ],
)
def test_how_nodes_find_each_other(flags: str, rendezvous: str | None) -> None:
    command = LaunchCommand.parse(f"torchrun --nnodes 2 --nproc-per-node 8 {flags} pretrain_gpt.py".split())
    assert command.rendezvous == rendezvous


def test_command_on_the_cpu_gets_what_the_launcher_adds() -> None:
    command = "torchrun --nproc-per-node 2 -m pier_megatron --device cpu pretrain_gpt.py --num-workers 2"
    arguments = LaunchCommand.parse(shlex.split(command)).arguments
    assert arguments[:2] == ("--num-workers", "2")
    assert "--distributed-backend" in arguments
    assert arguments.count("--num-workers") == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python pretrain_gpt.py", "no torchrun"),
        ("", "no torchrun"),
        ("torchrun --nproc-per-node gpu pretrain_gpt.py", "number of GPUs per node"),
        ("torchrun --nproc-per-node 8 -m pier_megatron", "no training script"),
    ],
)
def test_what_cannot_be_read_is_refused(command: str, said: str) -> None:
    with pytest.raises(PierConfigError, match=said):
        LaunchCommand.parse(shlex.split(command))
