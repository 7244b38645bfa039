"""How a job waits least for its outer steps: blocking or overlapped, with their state on the device or on the host."""

import argparse
import dataclasses

from pier_megatron.commands.plan import fit, ways
from pier_megatron.commands.plan.model import Plan, Prediction
from pier_megatron.config import PierConfig

# Seconds that are told apart in what is printed.
_SHOWN = 1e-3


def waits(args: argparse.Namespace, config: PierConfig, prediction: Prediction, there: float) -> Plan:
    """Seconds of an interval for which the job waits in each mode.

    Args:
        args: Megatron's, validated.
        config: Settings of the job.
        prediction: Its times.
        there: Bytes of a GPU's memory.

    Returns:
        ``modes`` by name, without those in which the job would not start, each with its ``flags``, the ``seconds`` and whether
        it ``fits``; the name of the ``job``'s own mode, and of the ``fastest`` that fits, None if none does.
    """
    modes: dict[str, Plan] = {}
    for offload in (config.offload, not config.offload):
        for overlap in dict.fromkeys((config.overlap, 0, config.overlap or config.sync_interval // 2)):
            settings = fit.changed_settings(args, config, overlap=overlap, offload=offload)
            if settings is None:
                continue
            way = dataclasses.replace(ways.of_job(config), overlap=overlap, offload=offload)
            modes[_name(overlap, offload)] = {
                "flags": f"--pier-overlap {overlap}" + _flag(config.offload, offload),
                "seconds": prediction.exposed(way),
                "fits": fit.needed(fit.memory_of(args, settings), args) <= there,
            }
    fitting = [name for name, mode in modes.items() if mode["fits"]]
    own, fastest = _name(config.overlap, config.offload), min(fitting, key=lambda name: modes[name]["seconds"], default=None)
    # Nobody should change the job for what is not seen.
    if own in fitting and fastest is not None and modes[own]["seconds"] - modes[fastest]["seconds"] < _SHOWN / 2:
        fastest = own
    return {"modes": modes, "job": own, "fastest": fastest}


def _name(overlap: int, offload: bool) -> str:
    return (f"overlapped by {overlap}" if overlap else "blocking") + (" with --pier-offload" if offload else "")


def _flag(is_set: bool, offload: bool) -> str:
    if offload:
        return " --pier-offload"
    return " without --pier-offload" if is_set else ""


def _remarks(is_own: bool, fits: bool) -> str:
    remarks = [*(["this job"] if is_own else ()), *(() if fits else ["does not fit"])]
    return f" ({', '.join(remarks)})" if remarks else ""


def lines(found: Plan, interval: int, local: float) -> list[str]:
    """The lines of a plan.

    Args:
        found: What :func:`waits` returns.
        interval: Iterations between outer steps.
        local: Seconds of an iteration without them.
    """
    modes, job, fastest = found["modes"], found["job"], found["fastest"]
    shown = (
        f"{mode['seconds'] * 1e3:,.0f} ms {name}{_remarks(name == job, mode['fits'])}"
        for name, mode in sorted(modes.items(), key=lambda item: round(item[1]["seconds"] / _SHOWN))
    )
    said = [f"waited for in each interval (H = {interval}): {'; '.join(shown)}"]
    if fastest is None:
        return [*said, "none of these fits"]
    if fastest == job:
        return [*said, "of these that fit, this job's is the fastest"]
    own, best = modes[job]["seconds"], modes[fastest]["seconds"]
    if not modes[job]["fits"]:
        return [*said, f"fastest of these that fits: {modes[fastest]['flags']}"]
    share = (own - best) / (interval * local + own)
    saved = f"{(own - best) * 1e3:,.0f} ms, {share:.1%} of the interval"
    return [*said, f"faster, and fits: {modes[fastest]['flags']} saves {saved}"]
