"""What elastic islands compare before they exchange anything: all that changes what a run computes."""

import argparse
import hashlib
import inspect
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pier_megatron.config import PierConfig
from pier_megatron.integration.checkpoint.content import layout_of
from pier_megatron.integration.checkpoint.description import Description
from pier_megatron.outer import Shards
from pier_megatron.outer.rules import bits_of_products, rule_class
from pier_megatron.version import __version__

PACKAGE = Path(__file__).parents[1]

# All other arguments are compared, including any that a later release or a script adds.
MAY_DIFFER = (
    # Who an island is, and where things are.
    *(
        "pier_island",
        "pier_lighthouse",
        "pier_ranks_per_domain",
        "pier_secret_file",
        "pier_sync_seconds",
        "rank",
        "local_rank",
        "world_size",
        "data_parallel_size",
        "data_cache_path",
        "object_storage_cache_path",
    ),
    *("distributed_", "nccl_", "flight_recorder_", "master_", "fault_injector_", "inprocess_", "use_sharp"),
    # What is saved, loaded, logged, evaluated and profiled, and when a job ends.
    *(
        "pier_save_",
        "pier_load_",
        "pier_override_",
        "pier_waits_",
        "pier_eval",
        "pier_log_",
        "save",
        "load",
        "no_save",
        "no_load",
        "non_persistent_",
        "ckpt_",
        "dist_ckpt_",
        "async_",
        "use_persistent_",
        "exit_",
    ),
    *("log_", "logging_", "tensorboard_", "wandb_", "timing_", "barrier_", "one_logger_", "enable_one_logger", "app_tag_"),
    *("eval_", "full_validation", "multiple_validation_sets", "valid", "test_", "profile", "pytorch_profiler_", "record_"),
    *("use_pytorch_profiler", "memory_snapshot_", "nvtx_", "straggler_", "disable_straggler_", "inference_", "manual_gc"),
    # Arguments that change speed or memory only.
    *(
        "pier_offload",
        "micro_batch_size",
        "recompute_",
        "cpu_offloading",
        "num_workers",
        "num_dataset_builder_threads",
        "mmap_bin_files",
    ),
    *("overlap_", "tp_comm_", "ddp_bucket_size", "ddp_num_buckets", "empty_unused_memory_level", "cuda_graph_"),
)
"""Beginnings of the names of arguments in which islands may differ."""


def in_common(
    args: argparse.Namespace,
    config: PierConfig,
    shards: Sequence[Sequence[Shards]],
    world: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, Any]:
    """What all islands of a run must have alike; called by all ranks of an island.

    Args:
        args: Megatron's, validated.
        config: Pier's.
        shards: The parameters that this rank owns; a list for each optimizer that owns some of them.
        world: The ranks of the island.
        device: Device for the collective.

    Returns:
        Plain values by what a user calls them.
    """
    settings = Description.of_run(config, 0, layout_of(args, world.size()), device.type).in_common
    of_code = {"pier_megatron": f"{__version__}, sources {fingerprint(PACKAGE)}"}
    if rule_class(config).takes_matrices:
        what = f"bits of matrix products (--pier-outer-rule {config.rule_name} needs processors of one kind)"
        of_code[what] = str(bits_of_products(device).item())
    if ":" in config.rule_name:
        # Islands have files of their own, and the same name may be another formula.
        source = Path(inspect.getfile(rule_class(config))).read_bytes()
        of_code[f"source of {config.outer_rule}"] = hashlib.sha256(source).hexdigest()[:12]
    shapes = {"shapes of all ranks' parameters": _shapes(shards, world, device)}
    return {**arguments_in_common(args), **settings, **of_code, **shapes}


def fingerprint(package: Path) -> str:
    """Digest of the sources in a folder: two commits of a development version may compute different things."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def arguments_in_common(args: argparse.Namespace) -> dict[str, Any]:
    """Megatron's arguments and those of the script, by flag, without those in which islands may differ."""
    return {
        f"--{name.replace('_', '-')}": _plain(value)
        for name, value in vars(args).items()
        # With --use-checkpoint-args Megatron puts the iteration of the checkpoint among them.
        if not name.startswith((*MAY_DIFFER, "_")) and name != "iteration"
    }


def _plain(value: Any) -> Any:
    """A value as JSON keeps it; a file by its name and size, since its folder is another one at each site."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, str) and os.sep in value:
        # Data sets are given by the name of their two files without the ending.
        sizes = [path.stat().st_size for path in (Path(value), Path(f"{value}.bin")) if path.is_file()]
        return " ".join([Path(value).name, *(f"of {size:,} bytes" for size in sizes)])
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _shapes(shards: Sequence[Sequence[Shards]], world: dist.ProcessGroup, device: torch.device) -> str:
    shapes = [[tuple(tensor.shape) for alike in of_optimizer for tensor in alike.tensors] for of_optimizer in shards]
    numel = sum(tensor.numel() for of_optimizer in shards for alike in of_optimizer for tensor in alike.tensors)
    own = torch.tensor([numel, zlib.crc32(repr(shapes).encode())], device=device)
    everyone = [torch.empty_like(own) for _ in range(world.size())]
    dist.all_gather(everyone, own, group=world)
    numbers = torch.stack(everyone).tolist()
    return f"{sum(numel for numel, _ in numbers):,} parameters, checksum {zlib.crc32(repr(numbers).encode()):08x}"
