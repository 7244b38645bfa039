"""Megatron with Pier on four ranks: a resumed run against a whole one, bit for bit."""

import re
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import inventory
import limits
import one_gpu
import torch
from table import Row, Rows, SkippedError, checked

_REPOSITORY = Path(__file__).resolve().parents[2]
_SCRIPT = _REPOSITORY / "pier_megatron/commands/demo/pretrain_bytes.py"
_RANKS, _STOP, _END = 4, 8, 12

# Eight is within an interval, and with the hidden exchange one is in flight then.
_FLAGS = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 8 --make-vocab-size-divisible-by 16 --tokenizer-type NullTokenizer "
    "--vocab-size 257 --hidden-dropout 0.1 --attention-dropout 0.1 --lr 2e-3 --lr-decay-style constant --bf16 "
    "--log-interval 1 --eval-interval 1000000 --eval-iters 1 --num-workers 0 --tensor-model-parallel-size 2 "
    f"--train-iters {_END} --save-interval 4 --optimizer pier --pier-groups 2 --pier-sync-interval 3 "
    "--pier-lazy-start-iters 6 --deterministic-mode"
).split()
_HIDDEN = "--pier-overlap 2 --pier-exchange-dtype int8 --pier-offload".split()
TRANSFORMER_ENGINE = (
    "--transformer-impl transformer_engine --no-gradient-accumulation-fusion --attention-backend unfused".split()
)

ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    # Compiled functions need a compiler, which need not be there.
    "TORCHDYNAMO_DISABLE": "1",
}
"""Variables of ranks that train, for the same bits in each run."""


def resumed() -> Rows:
    """A row for each way to train."""
    check_needs()
    on_gpu = one_gpu.device().type == "cuda"
    has_te, has_apex = (on_gpu and inventory.has(module) for module in ("transformer_engine", "apex"))
    local = local_flags(_FLAGS)
    with tempfile.TemporaryDirectory() as folder:
        yield _compare("TP 2 x 2 groups", Path(folder) / "plain", local)
        yield _compare("TP 2 x 2 groups, int8 overlapped and offloaded", Path(folder) / "hidden", [*local, *_HIDDEN])
        if has_te or has_apex:
            flags = [*engine_flags(_FLAGS), "--sequence-parallel"]
            yield _compare("TP 2 x 2 groups, sequence parallelism", Path(folder) / "sequence", flags)
        else:
            why = "neither Transformer Engine nor Apex is there" if on_gpu else "needs a GPU"
            yield Row("TP 2 x 2 groups, sequence parallelism", "", "skipped", why)


def check_needs() -> None:
    """Skips trainings where Megatron, or what it imports, is missing."""
    for module in ("megatron.core", "einops", "psutil", "pybind11"):
        if not inventory.has(module):
            raise SkippedError(f"{module}: {inventory.version(module) or 'missing'}")


def local_flags(flags: Sequence[str]) -> list[str]:
    """Flags that ``flags`` lack for the path through plain PyTorch, which needs no library that may be missing."""
    from pier_megatron.cpu.preparations import missing_cpu_flags

    backend = ["--distributed-backend", one_gpu.backend()]
    return [*backend, *missing_cpu_flags([*flags, *backend])]


def engine_flags(flags: Sequence[str]) -> list[str]:
    """The same through Transformer Engine, where it is there."""
    if one_gpu.device().type == "cuda" and inventory.has("transformer_engine"):
        return ["--distributed-backend", one_gpu.backend(), *TRANSFORMER_ENGINE]
    return local_flags(flags)


def launched(script: Path) -> list[str]:
    """Returns the words that start a training script under the plugin, on the device."""
    return [sys.executable, "-m", "pier_megatron", "--device", one_gpu.device().type, str(script)]


def _compare(what: str, folder: Path, flags: list[str]) -> Row:
    load = ["--load", str(folder / "whole"), "--ckpt-step", str(_STOP), "--exit-on-missing-checkpoint"]
    # The second line that Megatron prints after a start is the mean of both iterations.
    compared = {_STOP + 1, *range(_STOP + 3, _END + 1)}
    return _equal(f"{what}: resumed at {_STOP}", folder, {"whole": flags, "again": [*flags, *load]}, compared)


def _equal(what: str, folder: Path, runs: Mapping[str, list[str]], compared: Collection[int]) -> Row:
    """Trains two runs; the second must come to all that the first has stored, and to its losses in some iterations."""
    try:
        losses, others = (_train(folder / name, flags, "--save", str(folder / name)) for name, flags in runs.items())
        ends = [_stored(folder / name) for name in runs]
    except Exception as error:
        return Row(what, "", "failed", f"{type(error).__name__}: {error}")
    differing = [name for name in ends[0] | ends[1] if not _same(ends[0].get(name), ends[1].get(name))]
    if any(losses[iteration] != others[iteration] for iteration in compared):
        differing.append("losses")
    result = f"loss {losses[1]} to {losses[_END]}; {len(ends[0])} weights and checksums after {_END} iterations"
    return checked(what, not differing, result, f"differs: {', '.join(differing[:5])}")


def _train(folder: Path, flags: list[str], *more: str) -> dict[int, str]:
    """Trains; returns the losses that Megatron printed, by iteration."""
    from pier_megatron.commands.demo.corpus import write_documents

    corpus = write_documents(folder.parent / "corpus", [_REPOSITORY / "LICENSE"])
    data = [word for kind in ("train", "valid", "test") for word in (f"--{kind}-data-path", str(corpus))]
    logs = folder.with_name(f"{folder.name}-logs")
    last = logs / f"rank{_RANKS - 1}.log"
    try:
        one_gpu.run([*launched(_SCRIPT), *_FLAGS, *data, *flags, *more], _RANKS, logs, limits.left() / 2, **ENVIRONMENT)
    finally:
        print(last.read_text(errors="replace"), flush=True)
    printed = last.read_text()
    return {int(t): loss for t, loss in re.findall(r" iteration +(\d+)/.* lm loss: (\S+) ", printed)}


def _stored(checkpoints: Path) -> dict[str, Any]:
    """The weights of the last checkpoint, and its checksums of anchor and momentum."""
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = checkpoints / f"iter_{_END:07d}"
    whole = checkpoints / "whole.pt"
    dcp_to_torch_save(folder, whole)
    found = torch.load(whole, weights_only=False, map_location="cpu")
    # What an optimizer stores is padded with whatever was in memory.
    is_weight = re.compile("embedding|decoder|output_layer")
    weights = {name: value for name, value in found.items() if is_weight.match(name) and isinstance(value, torch.Tensor)}
    checksums = dist_checkpointing.load_content_metadata(str(folder))["pier"]["checksums"]
    return weights | {f"checksum of {name}": torch.tensor(value) for name, value in checksums.items()}


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)
