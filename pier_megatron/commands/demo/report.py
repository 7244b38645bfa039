"""What a demo run ended with: numbers from its TensorBoard log, and a plot."""

import argparse
import ast
from pathlib import Path
from typing import Any

from pier_megatron.commands.tensorboard_log import TensorBoardLog
from pier_megatron.config import PierConfig
from pier_megatron.integration.arguments import config_from_args, uses_pier
from pier_megatron.outer.report import SCALAR_PREFIX

Points = list[tuple[int, float]]


def summarise(output: Path) -> str:
    """Reads a finished run and plots it.

    Args:
        output: Its folder, with ``tensorboard`` in it; ``loss.png`` is written beside it.

    Returns:
        A few lines for people.
    """
    log = TensorBoardLog(output)
    train, validation = log.mean("lm loss"), log.mean("lm loss validation")
    sent = log.mean(f"{SCALAR_PREFIX}bytes-sent")
    args = argparse.Namespace(**{name: _value(text) for name, text in log.arguments.items()})
    config = config_from_args(args) if uses_pier(args) else None
    _plot(output / "loss.png", train, validation, config, [iteration for iteration, _ in sent])
    lines = [""]
    if validation:
        iteration, loss = validation[-1]
        lines.append(f"Validation loss after {iteration} iterations, on synchronised parameters: {loss:.4f} nats per byte")
    if config is not None and config.groups > 1 and sent:
        outer = sum(nbytes for _, nbytes in sent) * args.world_size
        # As many bytes as a gradient has.
        if config.exchange_dtype == "fp32" and config.fragments == 1:
            synchronous = sent[0][1] * config.train_iters * args.world_size
            pier = sent[0][1] * config.lazy_start * args.world_size + outer
            lines.append(
                f"Crossed the groups, all ranks together: {pier / 1e6:,.0f} MB ({config.lazy_start} synchronous iterations, "
                f"{len(sent)} outer steps); synchronous training: {synchronous / 1e6:,.0f} MB, "
                f"{synchronous / pier:.1f} x as much"
            )
        else:
            lines.append(f"Crossed the groups in {len(sent)} outer steps, all ranks together: {outer / 1e6:,.0f} MB")
    lines += [
        f"Loss curves: {output / 'loss.png'}",
        f"TensorBoard: tensorboard --logdir {output / 'tensorboard'}",
        f"Checkpoint:  {output / 'checkpoint'}",
    ]
    return "\n".join(lines)


def _value(text: str) -> Any:
    """An argument as it was before Megatron logged it as text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _plot(path: Path, train: Points, validation: Points, config: PierConfig | None, outer_steps: list[int]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    axes.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.6, linewidth=1, label="train")
    axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=4, label="validation")
    if config is not None:
        axes.axvspan(0, config.lazy_start, color="tab:green", alpha=0.1, linewidth=0, label="lazy start (synchronous)")
        axes.axvline(config.lazy_start, color="tab:green", linewidth=1, label="switch")
    if outer_steps:
        axes.plot(
            outer_steps,
            [0.02] * len(outer_steps),
            "|",
            color="black",
            markersize=8,
            transform=axes.get_xaxis_transform(),
            label="outer steps",
        )
    axes.set(xlabel="iteration", ylabel="loss (nats per byte)", xlim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
