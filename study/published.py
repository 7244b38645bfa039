"""What published runs of real models lost, and whether a law in their settings predicts it: ``python study/published.py``.

Gaps are final losses above synchronous training with the same inner optimizer, in nats per token, as their authors print them.
A law is fitted to half of the DiLoCo runs with AdamW inside and predicts the other half, for every way to halve them.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np
from law import markdown

_PIER, _MULOCO, _SCALING = "arXiv 2511.17849", "arXiv 2505.23725", "arXiv 2503.09799"
_ADAMW, _MUON = "AdamW", "Muon"
_DILOCO, _PIERS = "DiLoCo", "Pier"

WITHIN = 1.5
"""Factor within which a law has to predict half of the gaps that it has not seen, to be of use to anybody."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A published run.

    Attributes:
        source: Paper that has it.
        method: Outer schedule.
        inner: Inner optimizer.
        parameters: Parameters of the model, in millions.
        tokens: Tokens of the training, in billions; 20 for each parameter where the authors say no more.
        groups: Number of groups.
        interval: Iterations between outer steps.
        gap: Final loss above synchronous training, in nats per token.
    """

    source: str
    method: str
    inner: str
    parameters: float
    tokens: float
    groups: int
    interval: int
    gap: float

    @property
    def features(self) -> tuple[float, ...]:
        """What the law is linear in, for the logarithm of the gap."""
        return 1.0, math.log(self.groups - 1), math.log(self.tokens)


def _pier(method: str, parameters: float, groups: int, interval: int, gap: float) -> Published:
    """100,000 iterations of 512 sequences of 1024 tokens."""
    return Published(_PIER, method, _ADAMW, parameters, 52.4, groups, interval, gap)


def _muloco(inner: str, parameters: float, gap: float) -> Published:
    return Published(_MULOCO, _DILOCO, inner, parameters, 0.02 * parameters, 16, 30, gap)


# The two gaps of _SCALING are 0.7 % and 2.0 % of a loss of 3.485.
RUNS = (
    _pier(_DILOCO, 124, 8, 50, 0.0394),
    _pier(_DILOCO, 355, 32, 50, 0.0493),
    _pier(_DILOCO, 1558, 64, 50, 0.1211),
    *(_muloco(_ADAMW, *run) for run in ((150, 0.168), (416, 0.126), (3100, 0.070), (15_000, 0.019))),
    Published(_SCALING, _DILOCO, _ADAMW, 35, 0.7, 2, 30, 0.024),
    Published(_SCALING, _DILOCO, _ADAMW, 35, 0.7, 4, 30, 0.070),
    *(_muloco(_MUON, *run) for run in ((150, 0.098), (416, 0.072), (3100, 0.037), (15_000, 0.053))),
    _pier(_PIERS, 124, 8, 50, 0.0063),
    _pier(_PIERS, 124, 8, 100, 0.0065),
    _pier(_PIERS, 124, 8, 200, 0.0077),
    _pier(_PIERS, 124, 8, 500, 0.0150),
    _pier(_PIERS, 355, 32, 50, 0.0334),
    _pier(_PIERS, 355, 128, 50, 0.1100),
    _pier(_PIERS, 1558, 64, 50, -0.0049),
)


def fitted() -> list[Published]:
    """The runs that a law is fitted to: one method, one inner optimizer."""
    return [run for run in RUNS if run.method == _DILOCO and run.inner == _ADAMW]


def factor(law: Sequence[float], run: Published) -> float:
    """How many times a law's gap is larger or smaller than a run's."""
    return math.exp(abs(float(np.dot(law, run.features)) - math.log(run.gap)))


def fit(runs: Sequence[Published]) -> list[float]:
    """The law of these runs: coefficients of their features."""
    features, gaps = np.array([run.features for run in runs]), np.log([run.gap for run in runs])
    found: list[float] = np.linalg.lstsq(features, gaps, rcond=None)[0].tolist()
    return found


def held_back() -> list[float]:
    """Median factor on the half that a law has not seen, for every half that it has."""
    runs = fitted()
    return [
        statistics.median(factor(fit(half), run) for run in runs if run not in half)
        for half in itertools.combinations(runs, (len(runs) + 1) // 2)
    ]


def table() -> str:
    """All runs, as the page shows them: a narrow table for each method, inner optimizer and source."""
    parts = []
    for (method, inner, source), runs in itertools.groupby(RUNS, lambda run: (run.method, run.inner, run.source)):
        number = source.removeprefix("arXiv ")
        rows = [(f"{run.gap:+g}", f"{run.parameters:,.0f} M", run.groups, f"{run.tokens:g} B", run.interval) for run in runs]
        columns = ("gap", "parameters", "groups", "tokens", "H")
        parts.append(f"{method}, {inner}, [{number}](https://arxiv.org/abs/{number}):\n\n{markdown(columns, rows)}")
    return "\n\n".join(parts)


def main() -> None:
    """Prints the runs, and what a law is worth."""
    print(table())
    law, factors = fit(fitted()), held_back()
    print(
        f"\ngap = {math.exp(law[0]):.3f} (groups - 1)^{law[1]:.2f} (tokens / 10^9)^{law[2]:.2f}: on halves that it has not "
        f"seen, off by a factor of {statistics.median(factors):.2f} in the median ({min(factors):.2f} to {max(factors):.2f}; "
        f"{WITHIN} would be of use)"
    )


if __name__ == "__main__":
    main()
