"""The outer momentum coefficient ``mu`` and the outer learning rate ``eta`` over training progress.

Presets are data. Every length in them is a fraction of the run counted from the end of the lazy start, so a longer or
shorter lazy start shifts all break points with it.

Sources: arXiv 2511.17849, section 4 (``pier``), its authors' later code (``pier-cosine``), arXiv 2311.08105 (``diloco``),
arXiv 2506.10911 (``noloco``), docs/study.md (``pier-rising``, ``pier-annealed`` and those for Muon), docs/frontier.md
(``pier-long``, ``pier-frequent``).
"""

import dataclasses
import math
from collections.abc import Callable

# Iterations are integers and presets are decimal fractions: this absorbs the rounding of their products, so that an outer
# step exactly on a break point always belongs to the segment that ends there.
_BREAK_POINT_TOLERANCE = 1e-9

NESTEROV, MUON = "nesterov", "muon"
"""Rules of outer steps by name."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of a schedule.

    Attributes:
        start: Value at the beginning of the segment.
        end: Value at its end; equal to ``start`` for a constant segment.
        length: Fraction of the whole run, or None for everything that the other segments leave of it.
        shape: Maps the fraction of the segment behind us, in [0, 1], to the fraction of the way from start to end.
    """

    start: float
    end: float
    length: float | None
    shape: Callable[[float], float]


def _linear(fraction: float) -> float:
    return fraction


def _cosine(fraction: float) -> float:
    return 0.5 - 0.5 * math.cos(math.pi * fraction)


def _constant(value: float, length: float | None = None) -> Segment:
    return Segment(value, value, length, _linear)


@dataclasses.dataclass(frozen=True)
class Preset:
    """An outer schedule by name.

    Attributes:
        warmup_momentum: ``mu`` of the momentum warmup during the lazy start, or None to start the local phase with a
            momentum of zero.
        momentum: ``mu`` over the local phase.
        learning_rate: ``eta`` over the local phase.
        longest_horizon: ``mu`` does not rise above ``warmup_momentum`` to where ``1 / (1 - mu)`` exceeds this share of the
            local phase's outer steps; None for no such limit.
        subgroup_size: How many groups meet at an outer step; None for all of them.
        rule: Name of the rule by which all groups take outer steps, see :mod:`pier_megatron.outer.rules`.
    """

    warmup_momentum: float | None
    momentum: tuple[Segment, ...]
    learning_rate: tuple[Segment, ...]
    longest_horizon: float | None = None
    subgroup_size: int | None = None
    rule: str = NESTEROV


def _rising(
    highest: float, learning_rate: tuple[float, float], falls_back: float | None = None, rule: str = NESTEROV
) -> Preset:
    """Amplifies the mean pseudo-gradient, by ``eta / (1 - mu)``, as the inner learning rate falls.

    Args:
        highest: ``mu`` that it rises to.
        learning_rate: ``eta`` at the beginning and at the end.
        falls_back: Fraction of the whole run, at its end, in which ``mu`` falls to where it began.
        rule: Rule of the outer steps.
    """
    begin = 0.3
    back = () if falls_back is None else (Segment(highest, begin, falls_back, _linear),)
    return Preset(
        warmup_momentum=begin,
        momentum=(Segment(begin, highest, None, _linear), *back),
        learning_rate=(Segment(*learning_rate, None, _linear),),
        longest_horizon=0.4,
        rule=rule,
    )


_PIER = Preset(
    warmup_momentum=0.9,
    momentum=(_constant(0.99, length=0.05), _constant(0.95, length=0.05), _constant(0.90)),
    learning_rate=(Segment(0.0, 1.0, 0.10, _linear), _constant(1.1, length=0.60), _constant(0.9)),
)

PRESETS: dict[str, Preset] = {
    "pier": _PIER,
    # The same, with the noise of its long momentum kept out of the end.
    "pier-long": dataclasses.replace(_PIER, momentum=(*_PIER.momentum, Segment(0.9, 0.3, 0.10, _linear))),
    "pier-cosine": Preset(
        warmup_momentum=0.9,
        momentum=(Segment(0.99, 0.90, None, _cosine),),
        learning_rate=(Segment(0.0, 1.1, 0.10, _linear), Segment(1.1, 0.9, None, _cosine)),
    ),
    "pier-rising": _rising(0.9, (1.0, 0.8)),
    # For 25 outer steps and more, whose noise a long momentum would carry into the end.
    "pier-annealed": _rising(0.9, (1.0, 0.8), falls_back=0.10),
    # For AdamW inside under Megatron, which tells embeddings from other matrices.
    "pier-orthogonal": _rising(0.9, (1.0, 0.8), falls_back=0.10, rule=MUON),
    # For Muon inside. Its steps are as long where gradients are mostly noise, so that less has to be made up for.
    "pier-muon": _rising(0.8, (0.8, 0.6)),
    "pier-muon-annealed": _rising(0.8, (0.8, 0.6), falls_back=0.10),
    # For outer steps every few iterations. They need no lazy start, hence no momentum warmup.
    "pier-frequent": Preset(warmup_momentum=None, momentum=(_constant(0.3),), learning_rate=(_constant(0.8),)),
    "diloco": Preset(warmup_momentum=None, momentum=(_constant(0.9),), learning_rate=(_constant(0.7),)),
    "noloco": Preset(warmup_momentum=None, momentum=(_constant(0.5),), learning_rate=(_constant(0.7),), subgroup_size=2),
    "local-sgd": Preset(warmup_momentum=None, momentum=(_constant(0.0),), learning_rate=(_constant(1.0),)),
}


NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of the iterations that make it orthogonal, those that Megatron's Muon takes by default.

Source: KellerJordan/modded-nanogpt, by way of emerging-optimizers' ``quintic``.
"""

AUTO = "auto"
"""Stands for the preset that suits a run."""


def value_at(segments: tuple[Segment, ...], offset: float, total: float) -> float:
    """Evaluates a schedule.

    Args:
        segments: The schedule, one of them at most open-ended.
        offset: Progress since the end of the lazy start, as a fraction of the whole run.
        total: The whole local phase, as a fraction of the whole run.

    Returns:
        The value at ``offset``. A break point belongs to the segment that ends there.
    """
    begin, left = 0.0, max(total - sum(segment.length or 0.0 for segment in segments), 0.0)
    for segment in segments:
        length = left if segment.length is None else segment.length
        if offset <= begin + length + _BREAK_POINT_TOLERANCE or segment is segments[-1]:
            break
        begin += length
    fraction = min(max((offset - begin) / length, 0.0), 1.0) if length > 0 else 1.0
    return segment.start + (segment.end - segment.start) * segment.shape(fraction)
