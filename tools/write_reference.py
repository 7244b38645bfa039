"""Writes the generated parts of the reference pages, so that they say what the code says.

A page marks each part with ``<!-- generated: NAME -->`` and ``<!-- generated: end -->``; the rest is written by hand.
``--check`` writes nothing and lists the pages and pictures that are not what this script would write.
"""

import argparse
import ast
import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

import reference_pictures  # noqa: E402

from pier_megatron import cli, values  # noqa: E402
from pier_megatron.experiments.compression.policy import DIMENSIONS, POLICIES, policy  # noqa: E402
from pier_megatron.flags import WITH_ANY_OPTIMIZER  # noqa: E402
from pier_megatron.integration import arguments, refusals  # noqa: E402
from pier_megatron.megatron_api import args as megatron_args  # noqa: E402
from pier_megatron.schedules import PRESETS, Preset, Segment  # noqa: E402
from pier_megatron.settings import Settings, flag_of  # noqa: E402
from pier_megatron.values import Choice, Number  # noqa: E402

_MARK = re.compile(r"(<!-- generated: (?!end)(.+?) -->\n).*?(<!-- generated: end -->)", re.DOTALL)

_TEXTS: dict[Callable[..., Any], str] = {
    values.any_path: "path",
    values.function_name: "function in a module",
    values.outer_rule: "rule, or class in a module",
    values.address: "IP address or host name",
    values.url: "`http://ADDRESS:PORT`",
    values.numbers: "whole numbers separated by commas",
    values.existing_file: "file",
    values.existing_folder: "folder",
    values.file_to_write: "file, may be new",
    values.folder_to_write: "folder, may be new",
    values.png_to_write: "`.png` file, may be new",
    policy: f"{', '.join(f'`{name}`' for name in POLICIES)}, or pairs of {', '.join(f'`{name}`' for name in DIMENSIONS)} "
    "with a codec",
}
"""Values that parsers of ``pier_megatron.values`` accept, where these do not say so themselves."""

_START_UP = ("config.py", "integration/arguments.py", "integration/refusals.py")
"""Modules whose refusals the start of every run with Pier checks; pages of features list those of features."""

_WISHES = {
    "Form the groups": ("groups", "ranks_per_domain", "inner_optimizer"),
    "Time the outer steps": ("sync_interval", "lazy_start_fraction", "lazy_start_iters"),
    "Choose the outer schedule": ("preset", "outer_lr", "outer_momentum", "outer_rule"),
    "Hide or shrink the exchange": (
        *("overlap", "exchange_dtype", "no_error_feedback", "fragments"),
        *("offload", "chunk_mib"),
    ),
    "Train between sites": ("sites", "site_interval"),
    "Let islands join and leave": (
        *("lighthouse", "island", "island_address", "secret_file"),
        *("island_timeout", "island_wait", "sync_seconds"),
    ),
    "Exchange in gossip pairs": ("subgroup_size", "subgroup_seed", "evaluate_mean"),
    "Save and resume": ("save_inner_state", "load_inner_state", "override_checkpoint", "load_newest_whole"),
    "Accumulate gradients layer by layer": ("layered",),
    "Skip pipeline stages": ("skip_fraction", "skip_routes", "skip_seed", "eval_skip"),
    "Compress the traffic inside a group": ("compress",),
    "Run another release": ("try_any_megatron",),
}
"""Settings by what a user wants, in the order of the page."""

_PURPOSES = {
    "pier": "thousands of outer steps: the paper's runs have about 1800",
    "pier-cosine": "comparison with the later code of the paper's authors",
    "pier-long": "1,500 outer steps and more at H of 50 and more, AdamW inside",
    "pier-rising": "fewer than 25 outer steps, AdamW inside",
    "pier-annealed": "25 outer steps and more, AdamW inside",
    "pier-orthogonal": "AdamW inside, with [orthogonal outer steps](study.md#orthogonal-outer-steps)",
    "pier-muon": "few outer steps, Muon inside",
    "pier-muon-annealed": "Muon inside",
    "pier-frequent": "outer steps every few iterations",
    "diloco": "comparison with DiLoCo",
    "noloco": "[gossip pairs](deploy.md#gossip-pairs): heavy ball among two groups at a time",
    "local-sgd": "comparison: the mean of the groups, no outer momentum",
}
"""What each preset is for."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n" for cells in lines)


def code_flags(text: str) -> str:
    """Sets the flags in a sentence as code."""
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*\w)", r"`\1`", text)


def accepted(accepts: Any) -> str:
    """What a flag accepts, in words."""
    if isinstance(accepts, Choice):
        return ", ".join(f"`{name}`" for name in accepts.names)
    if not isinstance(accepts, Number):
        return _TEXTS.get(accepts, "")
    if accepts.kind is int:
        return f"{accepts.low:.0f} or more" if accepts.high >= values.LARGEST else f"{accepts.low:.0f} to {accepts.high:.0f}"
    least = f"above {accepts.low:g}, " if accepts.open_low else f"{accepts.low:g} "
    return f"{least}{'to below' if accepts.open_high else 'up to' if accepts.open_low else 'to'} {accepts.high:.15g}"


def entry(name: str, text: str, *facts: str) -> str:
    """A flag or an option as an entry of a list, which breaks no name at its hyphens as a narrow column does."""
    shown = "; ".join(fact for fact in facts if fact)
    return f"- {name}: {text.rstrip('.')}." + (f" {shown[0].upper()}{shown[1:]}." if shown else "") + "\n"


def settings_entries(settings: Sequence[dataclasses.Field[Any]]) -> str:
    """Flags of settings under headings, which are their anchors: what each accepts, its default and what it does."""
    described = {setting.name: setting for setting in settings if setting.metadata}
    missing = described.keys() - {name for names in _WISHES.values() for name in names}
    assert not missing, f"_WISHES lacks {', '.join(sorted(missing))}"
    parts = []
    for wish, names in _WISHES.items():
        entries = [_setting(described[name]) for name in names if name in described]
        parts += [f"### {wish}\n", *entries] if entries else []
    return "\n".join(parts)


def _setting(field: dataclasses.Field[Any]) -> str:
    """The heading and the text of a flag."""
    accepts = field.metadata["accepts"]
    text, _, default = field.metadata["help"].partition(" Default: ")
    is_switch = field.type in (bool, "bool")
    metavar = field.metadata["metavar"] or ("NAME" if isinstance(accepts, Choice) else "N")
    shown = f"`{metavar}`" if field.metadata["alone"] is None else f"`{metavar}`, optional"
    given = default.removesuffix(".")
    value = "off" if given == "False" else f"`{given}`" if given == str(field.default) else code_flags(given)
    takes = "" if is_switch else f"{shown}: {accepted(accepts)}. "
    return f"#### `{flag_of(field.name)}`\n\n{takes}Default: {value}.\n\n{code_flags(text)}\n"


def messages(path: Path, module: ModuleType | None) -> Iterator[str]:
    """The text of each refusal of a module, with ``…`` for what depends on the run."""
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "_met":
                    yield from _met(node, function, module)
                if isinstance(node, ast.Yield) and node.value and function.name.startswith("_wrong"):
                    yield from _texts(node.value, _known(function, node, module))
                call = node.exc if isinstance(node, ast.Raise) else None
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                    continue
                known = _known(function, node, module)
                if call.func.id == "PierConfigError":
                    yield from _texts(call.args[0], known)
                elif call.func.id == "no_multiple":
                    for given, why in itertools.product(_texts(call.args[0], known), _texts(call.args[3], known)):
                        yield f"{given} is no multiple of --pier-sync-interval: {why}."


def _met(call: ast.Call, function: ast.FunctionDef, module: ModuleType | None) -> Iterator[str]:
    """Texts of the rows of a table of refusals."""
    beside, *rows = call.args
    known = _known(function, call, module)
    for row in rows:
        names: list[str] = []
        if isinstance(row, ast.Starred) and isinstance(row.value, ast.GeneratorExp):
            names, row = _names(row.value, function, module), row.value.elt
        tables = (
            [node.elts for node in ast.walk(function) if isinstance(node, ast.List)]
            if isinstance(row, ast.Starred)
            else [[row]]
        )
        for each in (each for table in tables for each in table if isinstance(each, ast.Tuple)):
            for text in _texts(each.elts[1], known | {"name": [", ".join(map(megatron_args.flag, names))]}):
                what, _, why = text.partition(": ")
                yield f"{what} cannot be used with {_texts(beside, known)[0]}: {why}."


def _known(function: ast.FunctionDef, where: ast.AST, module: ModuleType | None) -> dict[str, list[str]]:
    """What names in a function stand for in its messages, where the source says it."""
    known: dict[str, list[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if isinstance(node.value, ast.JoinedStr | ast.Constant):
                known.setdefault(node.targets[0].id, []).extend(_texts(node.value, known))
        elif isinstance(node, ast.For) and any(inner is where for inner in ast.walk(node)):
            names = _names(node.iter, function, module)
            known |= {
                f"{call}(name)": [", ".join(_flag(call, name) for name in names)] for call in ("flag", "flag_of") if names
            }
    return known


def _flag(call: str, name: str) -> str:
    return flag_of(name) if call == "flag_of" else megatron_args.flag(name)


def _names(iterable: ast.expr, function: ast.FunctionDef, module: ModuleType | None) -> list[str]:
    """Names of settings or arguments that a loop goes over."""
    if isinstance(iterable, ast.GeneratorExp):
        iterable = iterable.generators[0].iter
    if isinstance(iterable, ast.Name):
        found = [n.value for n in ast.walk(function) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == iterable.id]
        iterable = found[0] if found else iterable
    if isinstance(iterable, ast.IfExp):
        iterable = iterable.body
    if isinstance(iterable, ast.ListComp):
        iterable = iterable.generators[0].iter
    if isinstance(iterable, ast.Tuple):
        literal = ast.literal_eval(iterable)
        return [each if isinstance(each, str) else each[0] for each in literal]
    owner = iterable.func.value if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Attribute) else iterable
    value = getattr(module, owner.id, ()) if isinstance(owner, ast.Name) else ()
    return [name for name in value if isinstance(name, str)] if isinstance(value, Mapping | tuple) else []


def _texts(node: ast.expr, known: dict[str, list[str]]) -> list[str]:
    """All readings of a string expression."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(parts) for parts in itertools.product(*(_texts(value, known) for value in node.values))]
    if isinstance(node, ast.FormattedValue):
        return known.get(ast.unparse(node.value), ["…"])
    return known.get(ast.unparse(node), ["…"])


def start_up_refusals() -> list[tuple[str, str]]:
    """What start-up refuses in a run with Pier, and its reason with the remedy; in the order of the code."""
    modules: dict[str, ModuleType | None] = {
        "config.py": None,
        "integration/arguments.py": arguments,
        "integration/refusals.py": refusals,
    }
    package = REPOSITORY / "pier_megatron"
    sources = [(package / name, modules[name]) for name in _START_UP]
    found: dict[str, str] = {}
    for path, module in sources:
        for message in messages(path, module):
            what, why = (*re.split(r": |\.$|\. (?=[A-Z])", re.sub(r"\s*\(…\)", "", message), maxsplit=1), "")[:2]
            if "--" in what and not what.startswith("…"):
                found.setdefault(what, _without_gaps(why))
    return list(found.items())


def _without_gaps(why: str) -> str:
    """The sentences of a reason that depend on nothing in the run."""
    sentences = re.split(r"(?<=\.) (?=[A-Z…])", why)
    return " ".join(sentence for sentence in sentences if sentence.count("…") <= 1 and sentence.strip("…. ")) or why


def refusals_list() -> str:
    """What start-up refuses, apart from the flags of Megatron's that no run with Pier may have."""
    flags = ", ".join(map(megatron_args.flag, refusals._REFUSED))
    return "".join(
        entry(code_flags(what), code_flags(why)) if why else f"- {code_flags(what)}.\n"
        for what, why in start_up_refusals()
        if not what.startswith(flags)
    )


def refused_flags_list() -> str:
    """Flags of Megatron's that no run with Pier may have."""
    reasons: dict[str, list[str]] = {}
    for name, reason in refusals._REFUSED.items():
        reasons.setdefault(reason, []).append(f"`{megatron_args.flag(name)}`")
    return "".join(entry(", ".join(names), code_flags(reason)) for reason, names in reasons.items())


def parameters_table() -> str:
    """Parameters of ``PierConfig``: each with its type, its default and a link to the flag that describes it."""
    rows = [["`train_iters`", "`int`", ""]]
    for field in (field for field in dataclasses.fields(Settings) if field.metadata):
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        rows.append([f"[`{field.name}`](flags.md#{flag_of(field.name)})", f"`{kind}`", default])
    return table(["parameter", "type", "default"], rows)


def _described(segments: Sequence[Segment]) -> str:
    """A schedule in words."""
    words = []
    for segment in segments:
        length = "" if segment.length is None else f" for {segment.length:.0%} of the run".replace("%", " %")
        if segment.start == segment.end:
            words.append(f"{segment.start:g}{length}")
        else:
            shape = "cosine" if segment.shape.__name__ == "_cosine" else "linear"
            words.append(f"{segment.start:g} to {segment.end:g}{length}, {shape}")
    return "; then ".join(words)


def _momentum(preset: Preset) -> str:
    limit = preset.longest_horizon
    return _described(preset.momentum) + (f"; `1 / (1 - mu)` at most {limit:.0%} of the outer steps" if limit else "").replace(
        "%", " %"
    )


def presets_list() -> str:
    """Presets: purpose and schedules, each as an entry of a list, which fits a narrow screen."""
    lines = []
    for name, preset in PRESETS.items():
        warmup, momentum = preset.warmup_momentum, _momentum(preset)
        mu = f"{momentum}, no warmup" if warmup is None else f"{warmup:g} in the lazy start; then {momentum}"
        lines.append(f"- `{name}`: {_PURPOSES[name]}. `mu`: {mu}. `eta`: {_described(preset.learning_rate)}.\n")
    return "".join(lines)


def _parser_of(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = cli.parser()
    for word in words:
        choices = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = choices[word]
    return parser


def options_list(command: str) -> str:
    """Options of a command."""
    lines = []
    for action in _parser_of(command.split())._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        name = (action.option_strings or [""])[-1]
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        shown = f"{name} {metavar}".strip() if action.nargs != 0 and not (name and action.choices) else name
        text = str(action.help or "") % {"default": action.default, "prog": "pier-megatron"}
        lines.append(entry(f"`{shown}`", code_flags(text), accepted_by(action)))
    return "".join(lines)


def accepted_by(action: argparse.Action) -> str:
    """What an option of a command accepts, in words."""
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    return accepted(action.type) if action.nargs != 0 else ""


def generated(name: str) -> str:
    """The generated part of that name."""
    kind, _, rest = name.partition(" ")
    match kind:
        case "flags":
            return settings_entries(dataclasses.fields(Settings) if rest == "of Pier" else WITH_ANY_OPTIMIZER)
        case "refusals":
            return refusals_list()
        case "refused":
            return refused_flags_list()
        case "parameters":
            return parameters_table()
        case "presets":
            return presets_list()
        case "options":
            return options_list(rest)
    raise ValueError(f"{name}: no generated part of that name.")


def written(text: str) -> str:
    """A page with its generated parts as they should be."""
    return _MARK.sub(lambda mark: f"{mark[1]}\n{generated(mark[2])}\n{mark[3]}", text)


def stale(write: bool) -> list[str]:
    """Names of the pages and pictures that are not as they should be; writes them."""
    found = []
    for page in sorted((REPOSITORY / "docs").glob("*.md")):
        text = page.read_text()
        if (right := written(text)) != text:
            found.append(f"docs/{page.name}")
            if write:
                page.write_text(right)
    for name, picture in reference_pictures.PICTURES.items():
        path = REPOSITORY / "docs" / name
        if reference_pictures.drawn_from(path) != picture.fingerprint():
            found.append(f"docs/{name}")
            if write:
                picture.draw(path)
    return found


def main() -> int:
    """Writes what is out of date, or with ``--check`` only lists it and returns 1."""
    parser = argparse.ArgumentParser(description="Writes the generated parts of docs/*.md and their pictures.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    options = parser.parse_args()
    found = stale(write=not options.check)
    for name in found:
        print(f"{name}: {'out of date' if options.check else 'written'}")
    return int(bool(found) and options.check)


if __name__ == "__main__":
    sys.exit(main())
