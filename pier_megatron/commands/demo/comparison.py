"""What the demo's trainings ended with: numbers from their TensorBoard logs, a record of them, and one picture."""

import dataclasses
import datetime
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier_megatron.commands.tensorboard_log import TensorBoardLog
from pier_megatron.config import PierConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOSS, _VALIDATION = "lm loss", "lm loss validation"
_NAMES = {
    "synchronous": "synchronous AdamW",
    "pier": "Pier",
    "synchronous-muon": "synchronous Muon",
    "pier-muon": "Pier, Muon inside",
}
# A baseline is as dark as the run that is compared with it.
_STYLES = {
    "synchronous": {"color": "tab:blue", "linestyle": "--"},
    "pier": {"color": "tab:blue"},
    "synchronous-muon": {"color": "tab:green", "linestyle": "--"},
    "pier-muon": {"color": "tab:green"},
}
# As far from white as from the black of dark pages.
_ON_BOTH = "#7a7a7a"


@dataclasses.dataclass(frozen=True)
class Curve:
    """A loss over a training.

    Attributes:
        iterations: Iterations at which it was measured.
        seconds: Seconds of training up to there, since the first iteration that was logged.
        losses: In nats per byte.
    """

    iterations: list[int]
    seconds: list[float]
    losses: list[float]

    def seconds_to(self, loss: float) -> float | None:
        """Time at which the loss was reached, interpolated between the points; None if it never was."""
        points = list(zip(self.seconds, self.losses, strict=True))
        if points and points[0][1] <= loss:
            return points[0][0]
        for (before, high), (after, low) in itertools.pairwise(points):
            if low <= loss:
                return before + (after - before) * (high - loss) / (high - low)
        return None


def curve(log: TensorBoardLog, name: str) -> Curve:
    """Reads a curve; of an iteration that comes again, the first value counts: Megatron writes its test loss there too."""
    begin = log.scalars[_LOSS].times[0]
    series = log.scalars[name]
    first: dict[int, tuple[float, float]] = {}
    for step, time, value in zip(series.steps, series.times, series.values, strict=True):
        first.setdefault(step, (time - begin, value))
    seconds, losses = zip(*first.values(), strict=True)
    return Curve(list(first), list(seconds), list(losses))


def summarise(output: Path, runs: Mapping[str, PierConfig | None], megabits: float | None) -> str:
    """Compares the trainings of a demo; writes ``result.json`` and ``loss.png`` into its folder. Returns lines for people.

    ``runs`` has Pier's settings by training, None without it; ``megabits`` is the rate of the emulated link, if there is one.
    """
    logs = {name: TensorBoardLog(output / name) for name in runs}
    validation = {name: curve(log, _VALIDATION) for name, log in logs.items()}
    titles = {name: _NAMES[name] + (f" ({config.preset})" if config else "") for name, config in runs.items()}

    def compared(name: str, baseline: str) -> list[str]:
        return verdict(validation[baseline], validation[name], titles[name], titles[baseline])

    arguments, config = logs["pier"].arguments, runs["pier"]
    assert config is not None
    said = [*compared("pier", "synchronous"), *_bytes(logs["pier"], config)]
    if "pier-muon" in runs:
        said += [*compared("pier-muon", "synchronous-muon"), compared("pier-muon", "synchronous")[0]]
    else:
        said.append("Muon was not trained: pip install 'emerging-optimizers>=0.2'")
    result = {
        "lines": said,
        "curves": {name: dataclasses.asdict(found) for name, found in validation.items()},
        "labels": {
            name: f"{title}, seed {arguments['seed']}: {validation[name].losses[-1]:.3f}" for name, title in titles.items()
        },
        # Millions of them in an iteration.
        "tokens": float(arguments["global_batch_size"]) * float(arguments["seq_length"]) / 1e6,
        "megabits": megabits,
        "date": datetime.date.today().isoformat(),
    }
    (output / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    paint(result).savefig(output / "loss.png", dpi=150)
    places = {"Picture": output / "loss.png", "TensorBoard": f"tensorboard --logdir {output}"}
    places["Checkpoint"] = output / "pier" / "checkpoint"
    return "\n".join(["", *said, *(f"{what + ':':13}{place}" for what, place in places.items())])


def verdict(synchronous: Curve, pier: Curve, name: str = _NAMES["pier"], baseline: str = _NAMES["synchronous"]) -> list[str]:
    """How much sooner, and at what price, ``pier`` reached the lowest validation loss that both reached."""
    loss = max(min(synchronous.losses), min(pier.losses))
    slow, fast = synchronous.seconds_to(loss), pier.seconds_to(loss)
    assert slow is not None
    assert fast is not None
    gap = pier.losses[-1] - synchronous.losses[-1]
    ratio = f"{slow / fast:.1f} x sooner" if slow >= fast > 0 else "no sooner"
    return [
        f"{name} reached a validation loss of {loss:.3f}, {ratio}: after {fast:.0f} s, {baseline} after {slow:.0f} s",
        f"After the same tokens: {pier.losses[-1]:.3f} and {synchronous.losses[-1]:.3f} nats per byte, {name} {gap:+.3f}, "
        f"in {pier.seconds[-1]:.0f} s and {synchronous.seconds[-1]:.0f} s",
    ]


def _bytes(log: TensorBoardLog, config: PierConfig) -> list[str]:
    """What has crossed the groups, and what synchronous training sends: as many bytes for a gradient as for an outer step."""
    from pier_megatron.outer.report import SCALAR_PREFIX

    series = log.scalars.get(f"{SCALAR_PREFIX}bytes-sent")
    if series is None or config.exchange_dtype != "fp32" or config.fragments > 1:
        return []
    sent = [nbytes * int(log.arguments["world_size"]) / 1e6 for nbytes in series.values]
    pier, synchronous = sent[0] * config.lazy_start + sum(sent), sent[0] * config.train_iters
    what = f"({config.lazy_start} synchronous iterations, {len(sent)} outer steps)"
    return [f"Crossed the groups: {pier:,.0f} MB with Pier {what}, {synchronous:,.0f} MB without"]


def paint(result: Mapping[str, Any]) -> "Figure":
    """Draws the losses of a ``result.json``, narrow enough to be read on a telephone, on white and on black."""
    import matplotlib
    from matplotlib.figure import Figure

    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _ON_BOTH)
    colors |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), "none")
    with matplotlib.rc_context(colors):
        figure = Figure(figsize=(4.6, 6.2), layout="constrained")
        over_time, over_tokens = figure.subplots(2, 1)
        for name, found in result["curves"].items():
            tokens = [result["tokens"] * iteration for iteration in found["iterations"]]
            over_time.plot(found["seconds"], found["losses"], marker=".", label=result["labels"][name], **_STYLES[name])
            over_tokens.plot(tokens, found["losses"], marker=".", **_STYLES[name])
        link = "" if result["megabits"] is None else f", {result['megabits']:g} Mbit/s between two nodes"
        for axes, what in ((over_time, f"seconds of training{link}"), (over_tokens, "tokens, in millions")):
            axes.set(xlim=(0, None), xlabel=what, ylabel="nats per byte")
            axes.grid(alpha=0.3)
        figure.legend(loc="outside lower left", fontsize=9)
        figure.suptitle("Validation loss, synchronous and with Pier")
    return figure
