"""A plan as a picture: the time to finish over the interval, the link rate and the GPUs, where Pier starts to pay."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier_megatron.commands.plan import ways
from pier_megatron.commands.plan.model import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Line and color by way to train.
_STYLES: dict[str, dict[str, Any]] = {
    ways.SYNCHRONOUS: {"color": "#b2473e", "linestyle": "--"},
    ways.HIDDEN: {"color": "#b2473e"},
    ways.BLOCKING: {"color": "#2f6f9f"},
    ways.OVERLAPPED: {"color": "#3f9b6d"},
    ways.COMPUTE: {"color": "#777777", "linestyle": ":"},
}


def draw(plan: Plan, path: Path) -> None:
    """Draws the sweeps of a plan.

    Args:
        plan: Plan of a job with groups.
        path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(16, 6.2), layout="constrained")
    days, gpus = plan["iterations"] / 86400, plan["gpus"]
    interval, rate = plan["interval"], plan["link"] / 1e9
    what = "site" if plan["sites"] > 1 else "node"
    by_rate = {link / 1e9: found for link, found in plan["sweeps"]["link"].items()}
    by_interval, by_gpus = plan["sweeps"]["interval"], plan["sweeps"]["gpus"]
    _panel(panels[0], by_interval, days, "sync interval H, iterations", interval, f"this job: H = {interval}")
    _panel(panels[1], by_rate, days, f"GB/s that a {what} sends (H = {interval})", rate, f"this job: {rate:g} GB/s")
    _panel(panels[2], by_gpus, days, f"GPUs, global batch unchanged (H = {interval})", gpus, f"this job: {gpus} GPUs")
    panels[0].set(yscale="linear", ylim=(0, 1.12 * panels[0].get_ylim()[1]))
    for panel in panels[:2]:
        hours = panel.secondary_yaxis("right", functions=_scaled(24 * gpus))
        hours.set_ylabel(f"GPU-hours of {gpus} GPUs")
        hours.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for panel in panels:
        panel.set_ylabel("days to finish, lazy start included")
    panels[2].legend(fontsize=9, loc="lower left")
    # Blanks that hold a number and its unit together are not broken at.
    title = plan["verdict"].replace(" x ", "\u00a0x ")
    figure.suptitle("\n".join(textwrap.wrap(title, 150, break_on_hyphens=False)), fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axes: "Axes", sweep: dict[float, dict[str, float]], days: float, label: str, own: float, note: str) -> None:
    for name, style in _STYLES.items():
        axes.plot(list(sweep), [found[name] * days for found in sweep.values()], label=name, linewidth=2, **style)
    paying = [place for place, found in sweep.items() if found[ways.BLOCKING] < found[ways.HIDDEN]]
    if paying:
        axes.axvspan(min(paying), max(paying), color="#2f6f9f", alpha=0.08, label="Pier, blocking, beats synchronous")
    axes.set(xscale="log", yscale="log", xlabel=label)
    _annotate(axes, own, note)


def _annotate(axes: "Axes", own: float | None, note: str) -> None:
    """Marks where this job is, and prints plain numbers at the axes."""
    if own is not None:
        axes.axvline(own, color="black", linewidth=1)
        place = axes.get_xaxis_transform()
        axes.text(own, 0.985, f" {note}", transform=place, va="top", fontsize=9, backgroundcolor="#ffffffcc")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.grid(alpha=0.3, which="both")


def _scaled(factor: float) -> tuple[Callable[[float], float], Callable[[float], float]]:
    return lambda days: days * factor, lambda hours: hours / factor
