"""A plan as text that fits one screen: the verdict first, then the ways to train, memory and what was assumed."""

import textwrap

from pier_megatron.commands.plan.model import Plan

_LINES, _COLUMNS = 24, 100

# Smaller sizes are printed in MB.
_LEAST_IN_GB = 0.1e9


def lines(plan: Plan, has_details: bool) -> list[str]:
    """The lines of a plan; with details, more than a screen has."""
    found = [*_wrapped(plan["verdict"]), "", *_table(plan), "", *_memory(plan), *_wrapped(f"assumed: {plan['assumed'][0]}")]
    for assumed in plan["assumed"][1:]:
        found += _wrapped(f"  {assumed}")
    if has_details:
        return [*found, *(["", *_details(plan)] if "groups" in plan else ())]
    if len(found) > _LINES:
        found[_LINES - 1 :] = [f"  and {len(found) - _LINES + 1} lines more: --details"]
    return found


def _wrapped(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, _COLUMNS, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _table(plan: Plan) -> list[str]:
    found = [f"{'mean iteration of the run':40} {'ms':>9} {'x as fast':>10} {'days':>8} {'GPU-hours':>11}"]
    for name, row in plan["rows"].items():
        found.append(
            f"{f'  with {name}' if name.startswith('--') else name:40} {row['seconds'] * 1e3:9,.0f} {row['gain']:10.2f} "
            f"{row['days']:8.{2 if row['days'] >= 0.1 else 4}f} {row['days'] * 24 * plan['gpus']:11,.0f}"
            + ("" if row["fits"] else "  does not fit")
        )
    return found


def _memory(plan: Plan) -> list[str]:
    parts = "; ".join(f"{name} {_bytes(size)}" for name, size in plan["memory"].items())
    return _wrapped(f"memory of a GPU: {plan['memory needed'] / 1e9:.1f} of {plan['memory of a GPU'] / 1e9:.0f} GB: {parts}")


def _bytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= _LEAST_IN_GB else f"{size / 1e6:,.2f} MB"


def _details(plan: Plan) -> list[str]:
    prediction = plan["prediction"]
    between = f", over {plan['sites']} sites" if plan["sites"] > 1 else ""
    return [
        f"{plan['groups']} groups on {plan['gpus']} GPUs{between}, "
        f"{plan['parameters per rank'] / 1e9:.2f} G parameters per rank, H = {plan['interval']}",
        f"an iteration: {prediction['compute'] * 1e3:,.0f} ms of compute, {prediction['inner'] * 1e3:,.0f} ms inside a group",
        f"an outer step: {prediction['exchange']['fp32'] * 1e3:,.0f} ms on the wire in FP32, "
        f"{prediction['exchange']['int8'] * 1e3:,.0f} ms in int8, {prediction['pairs'] * 1e3:,.0f} ms in pairs "
        f"(--pier-preset noloco), {prediction['passes'] * 1e3:,.0f} ms of its own, "
        f"{prediction['orthogonalising'] * 1e3:,.0f} ms for orthogonal steps (--pier-preset pier-orthogonal)",
        *(
            f"{name}: {row['low']:.2f} to {row['high']:.2f} x by published runs, {row['gain_with_flags']:.2f} x with "
            "--overlap-grad-reduce and --overlap-param-gather on both sides"
            for name, row in list(plan["rows"].items())[1:]
        ),
        *plan["taken by the outer loop"],
    ]
