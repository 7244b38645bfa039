"""Unit outer steps, which change nothing, against stock Megatron: Transformer Engine's FusedAdam, and its quantised gather.

An outer step after every iteration takes every main parameter out of the optimizer and writes it back. FusedAdam keeps main
parameters in three forms. A quantised parameter is quantised and gathered twice. Losses must be stock's bit for bit, and
close to stock's where an FP16 main parameter is scaled again.
"""

import concurrent.futures
import dataclasses
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import inventory
import limits
import one_gpu
import torch
from table import Row, Rows, SkippedError, checked
from trainings import ENVIRONMENT, TRANSFORMER_ENGINE, check_needs, launched

NEEDS = ("megatron.core", "transformer_engine")
"""Modules without which nothing here is compared."""

_END = 6
_FLAGS = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --global-batch-size 8 --make-vocab-size-divisible-by 128 --tokenizer-type NullTokenizer "
    "--vocab-size 257 --mock-data --hidden-dropout 0 --attention-dropout 0 --lr 2e-3 --lr-decay-style constant --bf16 "
    f"--log-interval 1 --eval-interval 1000000 --eval-iters 0 --num-workers 0 --train-iters {_END} --deterministic-mode"
).split()
_STOCK = ["--use-distributed-optimizer"]
_PIER = (
    "--optimizer pier --pier-groups 1 --pier-sync-interval 1 --pier-lazy-start-iters 1 --pier-outer-lr 1 "
    "--pier-outer-momentum 0"
).split()
_CLOSE = 0.01


@dataclasses.dataclass(frozen=True)
class _Way:
    """A way to train.

    Attributes:
        flags: Megatron's flags.
        capability: Compute capability that it needs.
        tolerance: Largest distance of a loss from stock's.
    """

    flags: str
    capability: tuple[int, int] = (0, 0)
    tolerance: float = 0.0


_AWARE = "--use-precision-aware-optimizer"
_MAIN_PARAMETERS = {
    "FP32 main parameters": _Way(""),
    "halves of main parameters": _Way(_AWARE),
    "FP16 main parameters": _Way(f"{_AWARE} --main-params-dtype fp16", tolerance=_CLOSE),
}
_OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather"
_FP8 = "--fp8-format e4m3 --fp8-param-gather --fp8-recipe"
_MXFP8 = f"{_FP8} mxfp8 --reuse-grad-buf-for-mxfp8-param-ag"
_FORMATS = {
    "FP8 tensorwise": _Way(f"{_FP8} tensorwise {_OVERLAPPED}", (8, 9)),
    "FP8 blockwise": _Way(f"{_FP8} blockwise", (9, 0)),
    "MXFP8": _Way(_MXFP8, (10, 0)),
    "MXFP8, overlapped": _Way(f"{_MXFP8} {_OVERLAPPED}", (10, 0)),
    "NVFP4": _Way(f"--fp4-format e2m1 --fp4-param-gather {_OVERLAPPED}", (10, 0)),
}


def fused_adam() -> Rows:
    """A row for each form in which FusedAdam keeps main parameters, on one rank."""
    _check_needs()
    yield from _rows(_MAIN_PARAMETERS, ranks=1, at_once=3)


def gather() -> Rows:
    """A row for each format of the gather, on two ranks of one group."""
    _check_needs()
    if one_gpu.backend() != "nccl":
        raise SkippedError("ranks talk over gloo, which gathers codes and BF16 parameters together as numbers of one type")
    yield from _rows(_FORMATS, ranks=2, at_once=2)


def _check_needs() -> None:
    check_needs()
    if one_gpu.device().type != "cuda":
        raise SkippedError("needs a GPU")
    if not inventory.has("transformer_engine"):
        raise SkippedError(f"transformer_engine: {inventory.version('transformer_engine') or 'not there'}")


def _rows(ways: Mapping[str, _Way], ranks: int, at_once: int) -> Rows:
    """Trains some ways at the same time, stock's run and Pier's too: starts take most of the time, and no speed is asked."""
    here = torch.cuda.get_device_capability()
    for name, way in ways.items():
        if here < way.capability:
            yield Row(name, "", "skipped", "needs compute capability {}.{}".format(*way.capability))
    able = [name for name, way in ways.items() if here >= way.capability]
    batches = [able[at : at + at_once] for at in range(0, len(able), at_once)]
    for place, batch in enumerate(batches):
        seconds = limits.share(limits.left(), [1.0] * (len(batches) - place))
        with concurrent.futures.ThreadPoolExecutor(2 * at_once) as pool:
            losses = {
                name: [pool.submit(_losses, [*ways[name].flags.split(), *of], ranks, seconds) for of in (_STOCK, _PIER)]
                for name in batch
            }
            for name, (stock, pier) in losses.items():
                try:
                    yield _row(name, stock.result(), pier.result(), ways[name].tolerance)
                except one_gpu.RanksFailedError as error:
                    yield Row(name, "", "failed", str(error))


def _row(name: str, stock: Mapping[int, str], pier: Mapping[int, str], tolerance: float) -> Row:
    what = f"{name}: unit outer steps after {_END} iterations against stock"
    is_whole = stock.keys() == pier.keys() and len(stock) == _END
    # As text they are compared with nan, too.
    is_close = is_whole and all(stock[at] == pier[at] or abs(float(stock[at]) - float(pier[at])) <= tolerance for at in stock)
    return checked(what, is_close, f"loss {stock.get(1)} to {stock.get(_END)}", f"Pier's losses {pier}, stock's {stock}")


def _losses(flags: list[str], ranks: int, seconds: float) -> dict[int, str]:
    """Trains; returns the losses that Megatron printed, by iteration."""
    script = Path(__file__).resolve().parents[2] / "pier_megatron/commands/demo/pretrain_bytes.py"
    backend = ["--distributed-backend", one_gpu.backend()]
    with tempfile.TemporaryDirectory() as folder:
        try:
            one_gpu.run(
                [*launched(script), *_FLAGS, *TRANSFORMER_ENGINE, *backend, *flags], ranks, Path(folder), seconds, **ENVIRONMENT
            )
        finally:
            for log in sorted(Path(folder).glob("*.log")):
                print(log.read_text(errors="replace"), file=sys.stderr, flush=True)
        printed = (Path(folder) / f"rank{ranks - 1}.log").read_text()
    return {int(at): loss for at, loss in re.findall(r" iteration +(\d+)/.* lm loss: (\S+) ", printed)}
