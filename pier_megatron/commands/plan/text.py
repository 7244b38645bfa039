"""A plan as text: the verdict first, then the loss, the ways to train, and what they are made of."""

from pier_megatron.commands.plan import compression_gain, loss, routes, stock, waiting, ways
from pier_megatron.commands.plan.model import Plan
from pier_megatron.commands.plan.skipping_gain import describe_skipping

# Less is said in MB.
_LEAST_IN_GB = 0.1e9


def lines(plan: Plan) -> list[str]:
    """The lines of a plan."""
    has_groups = "groups" in plan
    return [
        *(f"WARNING: {warning}" for warning in plan["warnings"]),
        plan["verdict"],
        *([loss.text(plan["loss"], plan["groups"])] if has_groups else ()),
        "",
        *_table(plan),
        *(
            ["Not calibrated: the links' figures follow from data sheets. Give --node-bandwidth as measured."]
            if plan["links from data sheets"]
            else ()
        ),
        "",
        *(_of_groups(plan) if has_groups else stock.describe(plan)),
        *(routes.describe(plan["routes"]) if "routes" in plan else ()),
        *_memory(plan),
    ]


def _table(plan: Plan) -> list[str]:
    modes = plan["modes"]
    reference, own = modes[ways.HIDDEN], plan.get("mode of the job")
    width = max(58, *map(len, modes))
    found = [f"{'mean iteration of the run':{width}} {'ms':>9} {'x as fast':>10} {'days':>8} {'GPU-hours':>11}"]
    for name, seconds in modes.items():
        total = seconds * plan["iterations"]
        found.append(
            f"{name:{width}} {seconds * 1e3:9,.0f} {reference / seconds:10.2f} {total / 86400:8.2f} "
            f"{total / 3600 * plan['gpus']:11,.0f}{'  <- this job' if name == own else ''}"
        )
    return found


def _memory(plan: Plan) -> list[str]:
    needed, there = plan["memory needed"], plan["memory of a GPU"]
    uncounted = "" if needed == sum(plan["memory"].values()) else ", without activations, which the job recomputes"
    return [
        *plan.get("taken by the outer loop", ()),
        *(f"memory per rank: {name}: {_bytes(size)}" for name, size in plan["memory"].items()),
        f"memory per rank: {_bytes(needed)} together{uncounted}, of {there / 1e9:.0f} GB"
        + ("" if needed <= there else ": does not fit"),
    ]


def _bytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= _LEAST_IN_GB else f"{size / 1e6:,.2f} MB"


def _of_groups(plan: Plan) -> list[str]:
    prediction = plan["prediction"]
    break_even = plan["break-even interval"]
    faster = "at no H" if break_even is None else f"from H = {break_even:.1f} on"
    between = f", over {plan['sites']} sites" if plan["sites"] > 1 else ""
    return [
        f"{plan['groups']} groups on {plan['gpus']} GPUs{between}, "
        f"{plan['parameters per rank'] / 1e9:.2f} G parameters per rank",
        f"an iteration: {prediction['compute'] * 1e3:,.0f} ms of compute, {prediction['inner'] * 1e3:,.0f} ms inside a group",
        f"an outer step: {prediction['exchange']['fp32'] * 1e3:,.0f} ms on the wire in FP32, "
        f"{prediction['exchange']['int8'] * 1e3:,.0f} ms in int8, {prediction['passes'] * 1e3:,.0f} ms of its own; "
        f"{plan['bytes between groups per outer step and rank'] / 1e6:,.0f} MB per rank",
        *(_in_pairs(plan) if plan["groups"] > 1 else ()),
        *waiting.lines(plan["waits"], plan["interval"], prediction["local"]),
        *compression_gain.lines(plan),
        *describe_skipping(plan["skipping"], " of the local phase"),
        f"blocking Pier is faster than synchronous training with overlap flags {faster}",
    ]


def _in_pairs(plan: Plan) -> list[str]:
    prediction, groups = plan["prediction"], plan["groups"]
    return [
        f"an outer step in pairs (--pier-preset noloco): {prediction['pairs'] * 1e3:,.0f} ms on the wire in FP32; "
        f"{plan['bytes in pairs per outer step and rank'] / 1e6:,.0f} MB per rank, so that pairs at H / "
        f"{2 * (groups - 1) / groups:.2f} send as much as all groups at H",
        f"latency of an outer step: {prediction['ring_latency'] * 1e3:,.2f} ms around a ring of all groups, "
        f"{prediction['pair_latency'] * 1e3:,.2f} ms in pairs",
    ]
