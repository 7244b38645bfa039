"""Parameters that Transformer Engine quantises for their gather: outer steps that change nothing against stock Megatron.

Two ranks of one group step Transformer Engine's FusedAdam. With a unit outer step after every iteration, each parameter is
quantised and gathered twice, and losses must be stock's bit for bit.
"""

import re
import sys
import tempfile
from pathlib import Path

import inventory
import limits
import one_gpu
import torch
from table import Row, Rows, SkippedError, checked
from trainings import ENVIRONMENT, TRANSFORMER_ENGINE, check_needs, launched

_RANKS, _END = 2, 6
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
_OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather"
_FP8 = "--fp8-format e4m3 --fp8-param-gather --fp8-recipe"
_MXFP8 = f"{_FP8} mxfp8 --reuse-grad-buf-for-mxfp8-param-ag"
# By name: compute capability that the format needs, and flags.
_WAYS = {
    "FP8 tensorwise": ((8, 9), f"{_FP8} tensorwise {_OVERLAPPED}"),
    "FP8 blockwise": ((9, 0), f"{_FP8} blockwise"),
    "MXFP8": ((10, 0), _MXFP8),
    "MXFP8, overlapped": ((10, 0), f"{_MXFP8} {_OVERLAPPED}"),
    "NVFP4": ((10, 0), f"--fp4-format e2m1 --fp4-param-gather {_OVERLAPPED}"),
}


def compare() -> Rows:
    """A row for each format."""
    check_needs()
    if one_gpu.device().type != "cuda":
        raise SkippedError("needs a GPU")
    if not inventory.has("transformer_engine"):
        raise SkippedError(f"transformer_engine: {inventory.version('transformer_engine') or 'not there'}")
    if one_gpu.backend() != "nccl":
        raise SkippedError("ranks talk over gloo, which gathers codes and BF16 parameters together as numbers of one type")
    here = torch.cuda.get_device_capability()
    able = [name for name, (needed, _) in _WAYS.items() if here >= needed]
    for name, (needed, flags) in _WAYS.items():
        if name not in able:
            yield Row(name, "", "skipped", "needs compute capability {}.{}".format(*needed))
            continue
        seconds = limits.share(limits.left(), [1.0] * (len(able) - able.index(name)))
        yield _row(name, flags.split(), seconds / 2)


def _row(name: str, flags: list[str], seconds: float) -> Row:
    try:
        stock, pier = (_losses([*flags, *of], seconds) for of in (_STOCK, _PIER))
    except one_gpu.RanksFailedError as error:
        return Row(name, "", "failed", str(error))
    what = f"{name}: unit outer steps after {_END} iterations against stock"
    is_same = stock == pier and len(stock) == _END
    return checked(what, is_same, f"loss {stock.get(1)} to {stock.get(_END)}", f"Pier's losses {pier}, stock's {stock}")


def _losses(flags: list[str], seconds: float) -> dict[int, str]:
    """Trains; returns the losses that Megatron printed, by iteration."""
    script = Path(__file__).resolve().parents[2] / "pier_megatron/commands/demo/pretrain_bytes.py"
    backend = ["--distributed-backend", one_gpu.backend()]
    with tempfile.TemporaryDirectory() as folder:
        try:
            one_gpu.run(
                [*launched(script), *_FLAGS, *TRANSFORMER_ENGINE, *backend, *flags],
                _RANKS,
                Path(folder),
                seconds,
                **ENVIRONMENT,
            )
        finally:
            for log in sorted(Path(folder).glob("*.log")):
                print(log.read_text(errors="replace"), file=sys.stderr, flush=True)
        printed = (Path(folder) / f"rank{_RANKS - 1}.log").read_text()
    return {int(at): loss for at, loss in re.findall(r" iteration +(\d+)/.* lm loss: (\S+) ", printed)}
