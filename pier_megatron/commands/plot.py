"""``pier-megatron plot``: overlays runs from their TensorBoard logs."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pier_megatron.commands.tensorboard_log import TensorBoardLog
from pier_megatron.values import existing_folder, folder_to_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is drawn of the outer loop, with its axis.
_OUTER = {
    "pseudo-gradient-norm": "norm of the mean pseudo-gradient",
    "momentum-norm": "norm of the outer momentum",
    "cosine-mean": "cosine of groups to the mean (mean)",
    "cosine-min": "cosine of groups to the mean (min)",
    "eta": "outer learning rate",
    "mu": "outer momentum coefficient",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own flags."""
    parser.add_argument(
        "runs", nargs="+", type=named_run, metavar="RUN", help="--tensorboard-dir of a run; NAME=RUN gives it a name"
    )
    parser.add_argument("--output", type=folder_to_write, default=Path("."), help="folder for the PNGs (%(default)s)")


def named_run(text: str) -> tuple[str, Path]:
    """Name and folder of a run."""
    # A folder's own name may have the sign in it.
    name, separator, folder = ("", "", text) if os.path.isdir(text) else text.partition("=")
    path = existing_folder(folder if separator else text)
    return name or path.name, path


def run(options: argparse.Namespace) -> int:
    """Plots; returns the exit status."""
    logs = {}
    for name, folder in options.runs:
        try:
            logs[name] = TensorBoardLog(folder)
        except FileNotFoundError as error:
            print(f"pier-megatron plot: {error}", file=sys.stderr)
            return 2
    options.output.mkdir(parents=True, exist_ok=True)
    for path in draw(logs, options.output):
        print(path)
    return 0


def draw(logs: dict[str, TensorBoardLog], folder: Path) -> list[Path]:
    """Draws runs over each other.

    Args:
        logs: Logs of the runs, by the names they shall have.
        folder: Folder for the pictures.

    Returns:
        What was written: ``loss_over_tokens.png``, ``loss_over_time.png``, and ``outer_loop.png`` if a run has outer steps.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from pier_megatron.outer.report import SCALAR_PREFIX

    written = []
    for name, label, place in (
        ("loss_over_tokens.png", "tokens", _tokens),
        ("loss_over_time.png", "hours since the first logged iteration", _hours),
    ):
        figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
        for index, (run, log) in enumerate(logs.items()):
            for scalar, style in (("lm loss", {"alpha": 0.35, "linewidth": 1}), ("lm loss validation", {"marker": "o"})):
                if scalar in log.scalars:
                    is_validation = scalar != "lm loss"
                    label_of_run = f"{run}, validation" if is_validation else run
                    axes.plot(*place(log, scalar), color=f"C{index}", label=label_of_run, markersize=4, **style)
        axes.set(xlabel=label, ylabel="loss")
        axes.legend()
        axes.grid(alpha=0.3)
        written.append(_written(figure, folder / name))
    present = [name for name in _OUTER if any(SCALAR_PREFIX + name in log.scalars for log in logs.values())]
    if present:
        figure, grid = pyplot.subplots((len(present) + 1) // 2, 2, figsize=(11, 9), layout="constrained", squeeze=False)
        for axes, name in zip(grid.flat, present, strict=False):
            for index, (run, log) in enumerate(logs.items()):
                points = log.mean(SCALAR_PREFIX + name)
                if points:
                    axes.plot(*zip(*points, strict=True), color=f"C{index}", label=run)
            axes.set(title=_OUTER[name], xlabel="iteration")
            axes.grid(alpha=0.3)
        grid.flat[0].legend()
        written.append(_written(figure, folder / "outer_loop.png"))
    return written


def _tokens(log: TensorBoardLog, scalar: str) -> tuple[list[float], list[float]]:
    """A scalar over the tokens that the run has consumed; over samples if the run's sequence length is unknown."""
    points = log.mean(scalar)
    samples = log.scalars.get("batch-size")
    batch = samples.values[-1] if samples else float(log.arguments.get("global_batch_size", 1))
    length = float(log.arguments.get("seq_length", 1))
    return [step * batch * length for step, _ in points], [value for _, value in points]


def _hours(log: TensorBoardLog, scalar: str) -> tuple[list[float], list[float]]:
    begin = min(series.times[0] for series in log.scalars.values() if series.times)
    series = log.scalars[scalar]
    return [(time - begin) / 3600 for time in series.times], list(series.values)


def _written(figure: "Figure", path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
