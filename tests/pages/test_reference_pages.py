"""The reference pages say what the code says: generated parts, figures, public parameters, diffs of the architecture."""

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import check_prose
import numpy as np
import pytest
import write_reference
from PIL import Image

import pier_megatron
from pier_megatron import outer, reference, schedules
from pier_megatron.exchange import authentication, codecs
from pier_megatron.integration.checkpoint.description import FORMAT

_REPOSITORY = Path(__file__).parents[2]
_DOCS = _REPOSITORY / "docs"


def test_generated_parts_are_what_the_code_says() -> None:
    stale = write_reference.stale(write=False)
    assert not stale, f"Run: .venv/bin/python tools/write_reference.py, and commit {', '.join(stale)}."


def test_picture_of_the_demo_can_be_read_on_white_and_on_black() -> None:
    with Image.open(_DOCS / "demo.png") as image:
        pixels = np.asarray(image.convert("RGBA")).reshape(-1, 4)
    opaque = pixels[pixels[:, 3] == 255][:, :3] / 255
    assert 0 < len(opaque) < len(pixels) / 5
    # Contrast by the Web Content Accessibility Guidelines; the dark page is GitHub's.
    for page in ((255, 255, 255), (13, 17, 23)):
        [own], others = luminance(np.array([page]) / 255), luminance(opaque)
        contrast = (np.maximum(others, own) + 0.05) / (np.minimum(others, own) + 0.05)
        assert contrast.min() >= 3, page


def luminance(colors: np.ndarray) -> np.ndarray:
    linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    return np.asarray(linear @ [0.2126, 0.7152, 0.0722])


def literal(path: str, name: str) -> int:
    """Number of entries of a dictionary in a test file, which is not imported: it starts processes."""
    for node in ast.parse((_REPOSITORY / path).read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).startswith((f"{name} =", f"{name}:")):
            return len(node.value.keys) if isinstance(node.value, ast.Dict) else 0
    raise AssertionError(f"{path} has no {name}")


def default(path: str, flag: str) -> int:
    """Default of a flag of a script, which is not imported."""
    [found] = re.findall(rf'"{flag}", type=int, default=(\d+)', (_REPOSITORY / path).read_text())
    return int(found)


_FIGURES: dict[str, Callable[[], int]] = {
    r"(\d+) (?:refused )?command lines": lambda: literal("tests/end_to_end/test_arguments.py", "_REFUSED"),
    r"FP32 scale for every (\d+) elements": lambda: codecs.BLOCK,
    r"format \((\d+); no other is read\)": lambda: FORMAT,
    r"of at least (\d+) bytes": lambda: authentication.LEAST_SECRET,
    r"(\d+) (?:refused )?checkpoints and set-ups": lambda: literal("tests/distributed/test_refusals.py", "_REFUSED"),
    r"`test_loop.py` has (\d+) more runs": lambda: literal("tests/loop/test_loop.py", "_CASES"),
    r"(\d+) (?:random )?faults from each of three": lambda: default("tests/loop/islands_torture.py", "--events"),
}


@pytest.mark.parametrize("words", _FIGURES)
def test_figures_on_pages_are_those_of_the_files(words: str) -> None:
    files = (_REPOSITORY / "CONTRIBUTING.md", _REPOSITORY / "SECURITY.md", *_DOCS.glob("*.md"))
    pages = {page.name: " ".join(page.read_text().split()) for page in files}
    found = [(name, int(number)) for name, text in pages.items() for number in re.findall(words, text)]
    assert found
    assert [(name, number) for name, number in found if number != _FIGURES[words]()] == []


def test_summary_of_scale_is_its_record() -> None:
    page = " ".join((_DOCS / "performance.md").read_text().split())
    lines = [json.loads(line) for line in (_DOCS / "worlds.jsonl").read_text().splitlines()]
    small, large = ({line["kind"]: line for line in lines if line["world"] == world} for world in (64, 16384))
    stock, pier = large["stock"], large["worlds"]
    assert pier["start"] <= 0.6 * stock["start"]
    starts = {f"{small[kind]['start']:.1f}" for kind in ("stock", "worlds")}
    for words in (
        f"At {pier['world']:,} faked ranks and {pier['groups']:,} groups a rank starts in {pier['start']:.1f} s of CPU time, "
        f"under stock Megatron in {stock['start']:.1f} s**: its world has {pier['world'] // pier['groups']} ranks",
        f"At 64 ranks and {small['worlds']['groups']} groups both take {' '.join(starts)} s",
        f"Without a network an outer step takes {pier['outer']:.1f} ms, {small['worlds']['outer']:.1f} ms at 64 ranks; in int4 "
        f"{large['int4']['outer']:.1f} ms, in pairs {large['pairs']['outer']:.1f} ms",
        f"in {stock['collectives']} collectives in an iteration of stock Megatron, in {pier['collectives']} between outer "
        f"steps, and in {pier['collectives of an outer step']} in an iteration with an outer step",
        f"`python benchmarks/worlds.py` measured this on {pier['date']}",
    ):
        assert words in page


def public_functions() -> Iterator[tuple[str, Any]]:
    """Functions and methods of the public API, by name."""
    owners = [pier_megatron.PierConfig, pier_megatron.PierOptimizer, *(getattr(outer, name) for name in outer.__all__)]
    owners += [thing for thing in vars(schedules).values() if inspect.isclass(thing) and thing.__module__ == schedules.__name__]
    for owner in owners:
        for name, member in vars(owner).items():
            member = getattr(member, "__func__", member)
            made = name == "__init__" and hasattr(owner, "__dataclass_fields__")
            if inspect.isfunction(member) and (not name.startswith("_") or name == "__init__") and not made:
                yield f"{owner.__name__}.{name}", member
    for module in (pier_megatron, schedules, reference):
        for name, member in vars(module).items():
            if inspect.isfunction(member) and member.__module__ == module.__name__ and not name.startswith("_"):
                yield name, member


def test_every_public_parameter_is_described() -> None:
    functions = {name: function for name, function in public_functions() if "Protocol" not in str(function)}
    assert len(functions) > 30
    for name, function in functions.items():
        text = inspect.getdoc(function) or ""
        if "see :meth:" in text or "See :meth:" in text or name == "OuterRule.__init__":
            continue
        names = [parameter for parameter in inspect.signature(function).parameters if parameter not in ("self", "cls")]
        assert [parameter for parameter in names if not re.search(rf"^    {parameter}: ", text, re.MULTILINE)] == [], name


@pytest.mark.parametrize("diff", re.findall(r"```diff\n(.*?)```", (_DOCS / "architecture.md").read_text(), re.DOTALL))
def test_diffs_of_the_architecture_apply(diff: str) -> None:
    command = ["git", "apply", "--check", "-"]
    done = subprocess.run(command, input=diff, cwd=_REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pages_have_at_most_40_000_words() -> None:
    pages = (_REPOSITORY / "README.md", *_DOCS.glob("*.md"))
    assert sum(len(page.read_text().split()) for page in pages) <= 40_000


def test_law_of_the_study_is_what_its_script_prints() -> None:
    command = [sys.executable, "study/law.py"]
    printed = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=True).stdout
    of_adam, of_muon = re.split(r"^## ", printed, flags=re.MULTILINE)[1:3]
    width, measured = 1, -2
    for text, words in (
        (of_adam, "{low:.2f} to {high:.2f} in {runs} runs"),
        (of_muon, "{low:.2f} to {high:.2f} at widths 64 and 128, up to {most:.1f} in long runs at width 32"),
    ):
        rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")][2:]
        ratios = [(row[width], float(row[measured])) for row in rows if row[measured] != "-"]
        near = [ratio for size, ratio in ratios if text is of_adam or size in ("64", "128")]
        most = max(ratio for _, ratio in ratios)
        assert words.format(low=min(near), high=max(near), runs=len(near), most=most) in (_DOCS / "study.md").read_text()


def test_prose_is_checked_outside_of_code() -> None:
    page = "The job goes\non without it.\n\n```\nanew\n```\n`anew` [a](anew.md) is foretold\n"
    assert [(line, word) for line, word, _ in check_prose.of_page(page)] == [(1, "goes on without"), (7, "foretold")]
    page = (
        "It takes some 2.3 in place\nof 3. A rule that a group takes by which nothing is lost. A rule by which nothing is lost."
    )
    assert [word for _, word, _ in check_prose.of_page(page)] == ["some", "in place of", "that a group takes by which"]
    module = (
        'def f():\n    """Begins anew.\n\n    Args:\n        beside: None.\n    """\n    x = "anew"\n'
        '    p.add_argument("--a", help="in vain")\n    # It goes\n    # on.\n    E(f"{beside} in place "\n "of it")\n'
    )
    found = [(2, "anew"), (8, "in vain"), (9, "goes on"), (11, "in place of")]
    assert [(line, word) for line, word, _ in check_prose.of_module(module)] == found
    assert [line for line, *_ in check_prose.of_module(module, is_test=True)] == [2, 9]
