"""A plan as a picture: the time to finish over the rate of the link, where Pier starts to pay."""

import textwrap
from pathlib import Path

from pier_megatron.commands.plan.model import Plan
from pier_megatron.commands.plan.ways import COMPUTE, OWN, SYNCHRONOUS
from pier_megatron.errors import PierConfigError

_COLORS = {SYNCHRONOUS: "#b2473e", OWN: "#2f6f9f", COMPUTE: "#777777"}


def draw(plan: Plan, path: Path) -> None:
    """Draws the sweep of a plan of a job with groups, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    days, own, what = plan["iterations"] / 86400, plan["link"] / 1e9, "site" if plan["sites"] > 1 else "node"
    by_rate = {rate / 1e9: found for rate, found in plan["over the link's rate"].items()}
    for name in next(iter(by_rate.values())):
        seconds = [found[name] * days for found in by_rate.values()]
        style = ":" if name == COMPUTE else "-"
        axes.plot(list(by_rate), seconds, style, label=name, linewidth=2, color=_COLORS.get(name, "#3f9b6d"))
    paying = [rate for rate, found in by_rate.items() if found[OWN] < found[SYNCHRONOUS]]
    if paying:
        axes.axvspan(min(paying), max(paying), color="#2f6f9f", alpha=0.08, label="this job beats synchronous")
    axes.axvline(own, color="black", linewidth=1)
    axes.text(own, 0.985, f" this job: {own:g} GB/s", transform=axes.get_xaxis_transform(), va="top", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel=f"GB/s that a {what} sends", ylabel="days to finish, lazy start included")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=9)
    figure.suptitle("\n".join(textwrap.wrap(plan["verdict"], 100, break_on_hyphens=False)), fontsize=11)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise PierConfigError(f"--plot {path}: {error.strerror}. Name another file.") from error
    pyplot.close(figure)
