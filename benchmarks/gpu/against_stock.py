"""Megatron with Pier against stock Megatron, on one rank and on two: losses of the lazy start, time, memory, host's waits."""

import collections
import json
import re
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import limits
import one_gpu
from measuring import is_gpu
from table import Row, Rows, checked
from trainings import ENVIRONMENT, check_needs, engine_flags, launched

Ways = Mapping[str, tuple[int, str]]
"""Number of ranks and flags of each way to train."""

_LAZY, _INTERVAL, _END = 5, 5, 20
_OUTER = range(_LAZY + _INTERVAL, _END + 1, _INTERVAL)

# 350 M parameters, and something small for a CPU.
_GPT = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 2 --global-batch-size 8 --make-vocab-size-divisible-by 51200"
)
_SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 8 --make-vocab-size-divisible-by 16"
)
_COMMON = (
    "--tokenizer-type NullTokenizer --vocab-size 257 --mock-data --lr 3e-4 --lr-decay-style constant --bf16 --log-interval 1 "
    f"--eval-interval 1000000 --eval-iters 0 --num-workers 0 --train-iters {_END} --use-distributed-optimizer "
    "--attention-dropout 0 --hidden-dropout 0 --clip-grad 0 --deterministic-mode"
)
_PIER = f"--optimizer pier --pier-sync-interval {_INTERVAL} --pier-lazy-start-iters {_LAZY}"
_HIDDEN = "--pier-overlap 3 --pier-offload --pier-exchange-dtype int8"
WAYS: Ways = {
    "stock, one rank": (1, ""),
    "Pier, one group of one rank": (1, f"{_PIER} --pier-groups 1"),
    "stock, two ranks": (2, ""),
    "Pier, two groups of one rank": (2, f"{_PIER} --pier-groups 2"),
}
_HIDDEN_WAYS: Ways = {
    "stock, two ranks": (2, ""),
    "Pier, two groups, int8 overlapped and offloaded": (2, f"{_PIER} --pier-groups 2 {_HIDDEN}"),
}
# The most ordinary flag: scales from maxima of earlier iterations, which all groups share in the lazy start.
_DELAYED = "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
_DELAYED_WAYS: Ways = {
    "stock, two ranks, delayed FP8": (2, _DELAYED),
    "Pier, two groups, delayed FP8": (2, f"{_PIER} --pier-groups 2 {_DELAYED}"),
}
_SAID = re.compile(r"([\d,.]+) MB of device memory")
_LINE = re.compile(r" iteration +(\d+)/.* elapsed time per iteration \(ms\): ([\d.]+) .* lm loss: (\S+) ")


def compare() -> Rows:
    """Stock and Pier, on one rank and on two."""
    yield from _compare(WAYS)


def hidden() -> Rows:
    """Stock, and Pier with everything that hides an outer step, on two ranks."""
    yield from _compare(_HIDDEN_WAYS)


def delayed() -> Rows:
    """Stock and Pier in FP8 with delayed scaling, on two ranks."""
    yield from _compare(_DELAYED_WAYS)


def _compare(ways: Ways) -> Rows:
    """Rows of each way to train."""
    check_needs()
    stock: dict[int, dict[int, str]] = {}
    stock_bytes: dict[int, int] = {}
    for place, (name, (ranks, flags)) in enumerate(ways.items()):
        seconds = limits.share(limits.left(), [1.0] * (len(ways) - place))
        with tempfile.TemporaryDirectory() as folder:
            try:
                printed, watched = _train(Path(folder), ranks, flags.split(), seconds)
            except one_gpu.RanksFailedError as error:
                yield Row(name, "", "failed", str(error))
                continue
        lines = {int(at): (float(milliseconds), loss) for at, milliseconds, loss in _LINE.findall(printed)}
        losses = {at: loss for at, (_, loss) in lines.items()}
        if len(losses) < _END:
            yield Row(name, "", "failed", f"the log has {len(losses)} of {_END} iterations")
            continue
        has_pier = "--optimizer pier" in flags
        if not has_pier:
            stock[ranks], stock_bytes[ranks] = losses, watched["bytes"]
        elif ranks in stock:
            same = all(stock[ranks][at] == losses[at] for at in range(1, _LAZY + 1))
            yield checked(f"{name}: losses of the lazy start", same, f"{losses[1]} to {losses[_LAZY]}", "not those of stock")
        else:
            yield Row(f"{name}: losses of the lazy start", "", "skipped", "stock's run failed")
        yield Row(f"{name}: time and memory", _times({at: of for at, (of, _) in lines.items()}, has_pier, watched["bytes"]))
        if has_pier and ranks == 1 and ranks in stock and is_gpu():
            more = (watched["bytes"] - stock_bytes[ranks]) / 1e6
            yield Row(
                f"{name}: more memory than stock", f"{more:,.1f} MB; start-up said {' and '.join(_SAID.findall(printed))} MB"
            )
        yield from _waits(name, {int(at): counted for at, counted in watched["waits"].items()}, has_pier)


def _times(milliseconds: Mapping[int, float], has_outer_steps: bool, nbytes: int) -> str:
    local = [of for at, of in milliseconds.items() if at > _LAZY + _INTERVAL and at not in _OUTER]
    found = f"iteration {statistics.median(local):.1f} ms"
    if has_outer_steps:
        found += f", one with an outer step {statistics.median(milliseconds[at] for at in _OUTER[1:]):.1f} ms"
    lazy = statistics.median(of for at, of in milliseconds.items() if 2 < at <= _LAZY)
    return f"{found}, one of the lazy start {lazy:.1f} ms; {nbytes / 1e9:.2f} GB of the device at most"


def _waits(name: str, waits: Mapping[int, Mapping[str, int]], has_outer_steps: bool) -> Rows:
    """The host's waits for the device in an iteration without an outer step, and what an outer step adds."""
    if not is_gpu():
        yield Row(f"{name}: waits for the device", "", "skipped", "needs a GPU")
        return
    # Checks of loss and weights come at intervals: the most frequent count is taken.
    inner = [collections.Counter(waits.get(at, {})) for at in range(_LAZY + _INTERVAL + 1, _END) if at not in _OUTER]
    usual = collections.Counter(
        {place: statistics.mode(of[place] for of in inner) for place in {p for of in inner for p in of}}
    )
    yield Row(f"{name}: waits in an inner iteration", _listed(usual))
    if has_outer_steps:
        outer = collections.Counter(waits.get(_OUTER[2], {}))
        yield Row(f"{name}: further waits in an iteration with an outer step", _listed(outer - usual))


def _listed(counted: collections.Counter[str]) -> str:
    return f"{counted.total()}: " + "; ".join(f"{number} x {place}" for place, number in counted.most_common(12) if number)


def _train(folder: Path, ranks: int, flags: list[str], seconds: float) -> tuple[str, Any]:
    given = [*(_GPT if is_gpu() else _SMALL).split(), *_COMMON.split()]
    command = [*launched(Path(__file__).with_name("watched.py")), str(folder / "watched.json"), *given, *engine_flags(given)]
    try:
        one_gpu.run([*command, *flags], ranks, folder, seconds, **ENVIRONMENT)
    finally:
        for log in sorted(folder.glob("*.log")):
            print(log.read_text(errors="replace"), flush=True)
    printed = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in {0, ranks - 1}]
    return "\n".join(printed), json.loads((folder / "watched.json").read_text())
