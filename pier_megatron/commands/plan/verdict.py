"""The answer in at most 25 words: whether to use Pier for this job, over the whole run, if it fits at all."""

from collections.abc import Mapping

from pier_megatron.commands.plan.fit import Fix
from pier_megatron.commands.plan.ways import OWN, SYNCHRONOUS, Row

# Below this gain nobody should take on another optimizer; a change of flags has to win more than the second.
_WORTH, _WORTH_A_FLAG = 1.05, 1.02


def of_rows(rows: Mapping[str, Row], groups: int, is_measured: bool) -> str:
    """The verdict on a job that fits, by the rows of :func:`pier_megatron.commands.plan.ways.rows`."""
    if groups == 1:
        return "Do not use it for speed: one group has nothing to relax (docs/frontier.md#one-group)."
    name = max((name for name, row in rows.items() if row.fits and name != SYNCHRONOUS), key=lambda name: rows[name].gain)
    if rows[name].gain <= _WORTH_A_FLAG * rows[OWN].gain:
        name = OWN
    row, how = rows[name], "" if name == OWN else f"with {name}"
    gain = f"{row.gain:.2f} x as fast as synchronous training"
    spread = f"({row.low:.2f} to {row.high:.2f} x by published runs)"
    if row.gain >= _WORTH > row.gain_with_flags:
        flags = "--overlap-grad-reduce and --overlap-param-gather"
        return f"First give {flags}: with them Pier is {row.gain_with_flags:.2f} x as fast as synchronous training."
    if row.high < _WORTH or (is_measured and row.gain < _WORTH):
        return f"Do not use it: {f'{how} at best ' if how else ''}{gain} {spread}."
    answer = "Use it" if row.low >= _WORTH or is_measured else "Measure first"
    days = f"{row.days:.2f} days instead of {rows[SYNCHRONOUS].days:.2f}"
    return f"{answer}{f', {how}' if how else ''}: {gain}, {days} {spread}."


def does_not_fit(needed: float, there: float, fix: Fix | None, gain: float | None) -> str:
    """The verdict on a job that needs more bytes of a GPU than are there; ``gain`` is that of the job with the fix."""
    size = f"Does not fit: {needed / 1e9:.1f} of {there / 1e9:.0f} GB."
    if fix is None:
        return f"{size} Raise --tensor-model-parallel-size or --pipeline-model-parallel-size."
    if fix.recomputes:
        return f"{size} Perhaps with {fix.flags}: {fix.memory / 1e9:.1f} GB and recomputed activations."
    then = "it fits" if gain is None else f"{gain:.2f} x as fast as synchronous training"
    return f"{size} With {fix.flags} ({fix.memory / 1e9:.1f} GB) {then}."
