"""Trains a GPT by Megatron on a GPU that is not there, and prints how often the host waits in each iteration, by place.

A process of its own: it changes ``torch`` for good. The process group is PyTorch's ``fake`` one instead of NCCL. What PyTorch
cannot do without a driver is left out: its autograd engine, whose results the hooks of Megatron's DDP get without numbers.
"""

import dataclasses
import importlib
import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import fake_launch
import torch
import torch.distributed as dist
from fake_cuda import FakeGpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from pier_megatron.cpu.preparations import missing_cpu_flags, silence_missing_extensions

_MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --bf16 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --tokenizer-type NullTokenizer --vocab-size 257 --lr 2e-3 "
    "--lr-decay-style constant --mock-data --split 100,0,0 --eval-iters 0 --eval-interval 1000 "
    "--distributed-backend nccl --use-distributed-optimizer --no-check-for-nan-in-loss-and-grad --rerun-mode disabled"
).split()

_SCRIPT = "pier_megatron.commands.demo.pretrain_bytes"
_hooks: list[tuple[torch.nn.Parameter, Any]] = []


def be_a_gpu(gpu: FakeGpu) -> None:
    """Makes ``torch.cuda`` answer as on a GPU."""
    properties = types.SimpleNamespace(
        name="fake", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132, warp_size=32, gcnArchName="", uuid=""
    )
    answers = {"is_available": True, "is_initialized": True, "device_count": 2, "current_device": 0, "memory_stats": {}}
    answers |= {
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
        "get_rng_state": torch.get_rng_state(),
    }
    answers |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0)
    answers |= dict.fromkeys(("set_device", "manual_seed", "manual_seed_all", "set_rng_state", "_lazy_call", "_lazy_init"))
    answers |= dict.fromkeys(("synchronize", "empty_cache", "set_stream"))
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args: None)
    torch.cuda.default_generators = (torch.default_generator,)
    torch.cuda.default_stream = torch.accelerator.current_stream = lambda device=None: gpu.stream
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
    torch.compile = lambda function=None, **options: function or (lambda decorated: decorated)  # type: ignore[assignment]
    # As it is for a process that finds no driver.
    FakeTensorMode.avoid_device_init = True  # type: ignore[assignment,method-assign]
    torch.utils.swap_tensors = lambda parameter, other: setattr(parameter, "data", other.data)


def be_two_ranks(gpu: FakeGpu) -> None:
    """Makes this process rank 0 of two, whose collectives answer without numbers."""
    init, new_group = dist.init_process_group, dist.new_group

    def gather(into: list[Any], own: Any, group: Any = None) -> None:
        of_rank = dataclasses.replace if dataclasses.is_dataclass(own) else lambda own, **place: own
        into[:] = [of_rank(own, rank=rank) for rank in range(len(into))]

    def grouped(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs | {"backend": "fake", "pg_options": None})

    dist.init_process_group = lambda *args, **kwargs: init("fake", rank=0, world_size=kwargs["world_size"], store=FakeStore())
    dist.new_group = dist.distributed_c10d.new_group = grouped
    dist.barrier = lambda *args, **kwargs: gpu.wait("a barrier")
    dist.all_gather_object = gather


def stand_in_for_numbers() -> None:
    """Leaves out what needs numbers, and hands gradients without any to Megatron's hooks."""
    ddp = importlib.import_module("megatron.core.distributed.distributed_data_parallel").DistributedDataParallel
    make_hook = ddp._make_backward_post_hook

    def remembered(model: Any, parameter: torch.nn.Parameter) -> Any:
        _hooks.append((parameter, make_hook(model, parameter)))
        return _hooks[-1][1]

    def backward(output: Tensor, gradient: Tensor) -> None:
        for parameter, hook in reversed(_hooks):
            parameter.grad = torch.empty_like(parameter)
            hook()

    ddp._make_backward_post_hook = remembered
    importlib.import_module("megatron.core.pipeline_parallel.schedules").custom_backward = backward
    # Megatron's own without Transformer Engine brings every norm to the host.
    importlib.import_module("megatron.core.optimizer.clip_grads").l2_norm_impl = lambda size, flag, lists, each: (
        torch.stack([tensor.norm() for tensors in lists for tensor in tensors]).norm().view(1),
        None,
    )
    importlib.import_module("pier_megatron.integration.startup").check_groups_agree = lambda loop, begins=True: None
    importlib.import_module("pier_megatron.integration.training").check_groups_read_different_samples = lambda *args: None


def main(argv: Sequence[str]) -> None:
    """Trains with more arguments, and prints a line for each iteration: waits, waits for other streams, launches."""
    gpu = FakeGpu()
    be_a_gpu(gpu)
    be_two_ranks(gpu)
    fake_launch.install()
    silence_missing_extensions()
    launcher, script = importlib.import_module("pier_megatron.launcher"), importlib.import_module(_SCRIPT)
    stand_in_for_numbers()
    training = importlib.import_module("megatron.training.training")
    step = training.train_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        gpu.forget()
        result = step(*args, **kwargs)
        counts = json.dumps([gpu.waits, gpu.waits_apart, gpu.launches.total()])
        # Groups other than the last one are silent.
        print("counted", counts, file=sys.__stdout__, flush=True)
        return result

    counted.__wrapped__ = step  # type: ignore[attr-defined]
    with gpu.watching():
        training.train_step = counted
        launcher.main([str(script.__file__), *_MODEL, *missing_cpu_flags(_MODEL), *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
