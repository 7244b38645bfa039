"""Pictures of the pages: curves of the presets, the floors of the package with what they import, and the demo."""

import dataclasses
import hashlib
import inspect
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pier_megatron.commands.demo import comparison
from pier_megatron.config import PierConfig
from pier_megatron.schedules import PRESETS

_REPOSITORY = Path(__file__).parents[1]
_RUN = {"train_iters": 10_000, "groups": 4, "sync_interval": 50}
_KEY = "Drawn from"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture, known by the data that it is drawn from: pixels differ from one matplotlib to the next.

    Attributes:
        data: Function that collects the data, plain values.
        paint: Function that draws them and returns matplotlib's figure.
    """

    data: Callable[[], Any]
    paint: Callable[[Any], Any]

    def fingerprint(self) -> str:
        """Digest of the data and of the code that draws them."""
        text = json.dumps(self.data(), sort_keys=True) + inspect.getsource(self.paint)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def draw(self, path: Path) -> None:
        """Writes the picture, with the digest in it."""
        self.paint(self.data()).savefig(path, dpi=150, metadata={_KEY: self.fingerprint(), "Software": ""})


def drawn_from(path: Path) -> str | None:
    """Digest of the data that a picture was drawn from; None if there is none."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        return image.info.get(_KEY)


def curves() -> dict[str, Any]:
    """``mu`` and ``eta`` of each preset at the sync iterations of a run."""
    found: dict[str, Any] = {}
    for name in PRESETS:
        config = PierConfig(preset=name, **_RUN)
        steps = range(_RUN["sync_interval"], _RUN["train_iters"] + 1, _RUN["sync_interval"])
        found[name] = [[step, round(config.momentum_at(step), 6), round(config.learning_rate_at(step), 6)] for step in steps]
    return found


def paint_curves(data: dict[str, Any]) -> Any:
    """Draws momentum and learning rate of the presets, one row for each kind of them."""
    from matplotlib.figure import Figure

    kinds = {
        "for thousands of outer steps": ("pier", "pier-cosine", "pier-long"),
        "for fewer outer steps": ("pier-rising", "pier-annealed", "pier-orthogonal", "pier-muon", "pier-muon-annealed"),
        "constant": ("pier-frequent", "diloco", "noloco", "local-sgd"),
    }
    assert sorted(name for names in kinds.values() for name in names) == sorted(data)
    figure = Figure(figsize=(4.6, 7.8), layout="constrained")
    figure.suptitle("Outer schedules of the presets", fontsize=11)
    styles = (("#1f5fa8", "-"), ("#d1782a", "--"), ("#2d8a57", "-"), ("#8d4aa0", "--"))
    for panels, (title, names) in zip(figure.subfigures(3, 1), kinds.items(), strict=True):
        panels.suptitle(title, fontsize=10)
        for column, (axes, what) in enumerate(zip(panels.subplots(1, 2), ("momentum mu", "learning rate eta"), strict=True)):
            for (color, line), name in zip(styles, names, strict=False):
                share = [100 * point[0] / _RUN["train_iters"] for point in data[name]]
                values = [point[column + 1] for point in data[name]]
                # Dashes lie above whole lines, so that equal curves are both seen.
                axes.plot(share, values, line, color=color, linewidth=1.8, label=name, zorder=2 + (line == "--"))
            axes.axvspan(0, 10, color="0.88", zorder=0)
            axes.grid(color="0.88", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlabel("% of the run", fontsize=9)
            axes.set_title(what, fontsize=9)
            axes.set(xlim=(0, 100), ylim=(-0.05, 1.2), xticks=(0, 50, 100), yticks=(0, 0.5, 1))
            axes.tick_params(labelsize=9)
        handles, labels = axes.get_legend_handles_labels()
        panels.legend(handles, labels, fontsize=9, ncols=2, loc="outside lower center", frameon=False)
    return figure


def floors() -> dict[str, Any]:
    """Floors of the package and their imports, without an import that other imports imply."""
    import grimp

    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    names = [name.strip() for layer in layers for name in layer.split("|")]
    graph = grimp.build_graph("pier_megatron", cache_dir=None)
    imports: dict[str, set[str]] = {name: set() for name in names}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            above, below = (next((n for n in names if m == n or m.startswith(f"{n}.")), "") for m in (module, imported))
            if above and below and above != below:
                imports[above].add(below)

    def reached(name: str) -> set[str]:
        return imports[name].union(*(reached(below) for below in imports[name]))

    return {
        name.split(".")[1]: sorted(
            below.split(".")[1] for below in imports[name] if not any(below in reached(n) for n in imports[name] - {below})
        )
        for name in names
    }


_PLACES = {
    "__main__": 0.3,
    "cli": 1.9,
    "experiments": 1.9,
    "commands": 1.3,
    "launcher": 0.3,
    "cpu": 0.9,
    "bridge": 2.9,
    "integration": 2.1,
    "flags": 1.6,
    "features": 1.6,
    "megatron_api": 0.85,
    "outer": 2.7,
    "reference": 3.5,
    "config": 3.1,
    "run_schedule": 2.9,
    "settings": 2.1,
    "exchange": 3.1,
    "schedules": 2.1,
    "values": 0.3,
}
"""From left to right, for lines that cross little."""

_EVERYWHERE = ("errors", "processes", "version")
"""Leaves that are left out of the picture."""


def paint_floors(data: dict[str, Any]) -> Any:
    """Draws each floor as a box above all that it imports."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    imports = {name: [n for n in below if n not in _EVERYWHERE] for name, below in data.items() if name not in _EVERYWHERE}

    def depth(name: str) -> int:
        return 1 + max((depth(above) for above, below in imports.items() if name in below), default=-1)

    figure = Figure(figsize=(4.6, 5.4), layout="constrained")
    figure.suptitle("Floors of the package and their imports", fontsize=11)
    axes = figure.subplots()
    axes.set_axis_off()
    heights = {name: -float(depth(name)) for name in imports}
    for name, level in heights.items():
        x = _PLACES[name]
        knows = {
            "integration": "#cfe0f3",
            "bridge": "#cfe0f3",
            "commands": "#e4edf7",
            "features": "#f6e3cf",
            "megatron_api": "#f6e3cf",
        }
        color = knows.get(name, "#eeeeee")
        axes.add_patch(FancyBboxPatch((x - 0.4, level - 0.22), 0.8, 0.44, "round,pad=0.02", facecolor=color, edgecolor="0.4"))
        axes.text(x, level - 0.01, name, ha="center", va="center", fontsize=8.5, family="monospace")
        for below in imports[name]:
            begin, end = (x, level - 0.24), (_PLACES[below], heights[below] + 0.25)
            arrow = FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=9, color="0.45", linewidth=0.9, zorder=0)
            axes.add_patch(arrow)
    axes.set_xlim(-0.2, 4.0)
    axes.set_ylim(min(heights.values()) - 0.3, 0.3)
    return figure


def demo() -> dict[str, Any]:
    """Record of a demo: its ``result.json``."""
    found: dict[str, Any] = json.loads((_REPOSITORY / "docs" / "demo.json").read_text())
    return found


PICTURES = {
    "presets.png": Picture(curves, paint_curves),
    "architecture.png": Picture(floors, paint_floors),
    "demo.png": Picture(demo, comparison.paint),
}
"""Pictures in ``docs/`` by file name."""
