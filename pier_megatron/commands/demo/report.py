"""What a demo run ended with: numbers from its TensorBoard log, and a plot."""

from pathlib import Path

from pier_megatron.commands.tensorboard_log import TensorBoardLog
from pier_megatron.outer.report import SCALAR_PREFIX

Points = list[tuple[int, float]]


def summarise(output: Path, processes: int, lazy_start: int | None, is_plain: bool) -> str:
    """Reads a finished run and plots it.

    Args:
        output: Its folder, with ``tensorboard`` in it; ``loss.png`` is written beside it.
        processes: How many took part.
        lazy_start: Iterations of its lazy start, or None if it trained without Pier.
        is_plain: Whether outer steps exchanged all parameters in FP32, and so as many bytes as a gradient has.

    Returns:
        A few lines for people.
    """
    log = TensorBoardLog(output)
    train, validation = log.mean("lm loss"), log.mean("lm loss validation")
    sent = log.mean(f"{SCALAR_PREFIX}bytes-sent")
    _plot(output / "loss.png", train, validation, lazy_start, [iteration for iteration, _ in sent])
    iterations = train[-1][0]
    lines = [
        "",
        f"Validation loss after {validation[-1][0]} iterations, on synchronised parameters: {validation[-1][1]:.4f} "
        "nats per byte",
    ]
    if lazy_start is not None and sent:
        outer = sum(nbytes for _, nbytes in sent) * processes
        if is_plain:
            synchronous = sent[0][1] * iterations * processes
            pier = sent[0][1] * lazy_start * processes + outer
            lines.append(
                f"Crossed the groups, all ranks together: {pier / 1e6:,.0f} MB ({lazy_start} synchronous iterations, "
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


def _plot(path: Path, train: Points, validation: Points, lazy_start: int | None, outer_steps: list[int]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    axes.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.6, linewidth=1, label="train")
    axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=4, label="validation")
    if lazy_start is not None:
        axes.axvspan(0, lazy_start, color="tab:green", alpha=0.1, linewidth=0, label="lazy start (synchronous)")
        axes.axvline(lazy_start, color="tab:green", linewidth=1, label="switch")
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
    axes.set(xlabel="iteration", ylabel="loss (nats per byte)", xlim=(0, train[-1][0]))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
