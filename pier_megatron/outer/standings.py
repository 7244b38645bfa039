"""Standings that islands compare when they meet: from whose anchor all continue, and who cannot."""

import collections
from collections.abc import Sequence

from pier_megatron.errors import PierConfigError


class LeftBehindError(PierConfigError):
    """The other islands continued without this one."""


# Standing of an island, which it sends to its quorum.
ISLAND, SYNCED, ITERATION, IS_DUE, CHECKSUM, TRAINED, IS_NEW, UNDER_WAY = range(8)
Standing = Sequence[int]

# Standing of an island that has dropped its own anchor and does not hold that of the others yet; no outer step under way.
NOWHERE = -1

_TO_REJOIN = "What it learned since is lost; start it again, for example by torchrun --max-restarts, and it joins the others."


def _how_far(standing: Standing) -> tuple[int, ...]:
    # The newest anchor comes first: a step on an older one would take the others back to it.
    return standing[SYNCED], standing[IS_DUE], standing[ITERATION], standing[UNDER_WAY]


def weight(standings: Sequence[Standing], counted: Sequence[bool], rank: int) -> float:
    """How much a pseudo-gradient counts, by the samples behind it, in units of those that count on average."""
    trained = [standing[TRAINED] for standing, counts in zip(standings, counted, strict=True) if counts]
    # All have let everything pass, as Megatron's --iterations-to-skip may say.
    return standings[rank][TRAINED] * len(trained) / sum(trained) if sum(trained) else 1.0


def those_present(standings: Sequence[Standing]) -> list[int]:
    """The islands whose anchor all continue from, by rank in the quorum: the newest one, with an outer step due if on any.

    The right anchor is that of most, where anchors differ.
    """
    newest = max(map(_how_far, standings))
    furthest = [rank for rank, standing in enumerate(standings) if _how_far(standing) == newest]
    [(checksum, _)] = collections.Counter(standings[rank][CHECKSUM] for rank in furthest).most_common(1)
    return [rank for rank in furthest if standings[rank][CHECKSUM] == checksum]


def refusals_of(standings: Sequence[Standing], present: Sequence[int]) -> dict[int, LeftBehindError | PierConfigError]:
    """Why islands cannot continue with those present, by rank in the quorum."""
    source, are_present = standings[present[0]], set(present)
    found: dict[int, LeftBehindError | PierConfigError] = {}
    for rank, standing in enumerate(standings):
        island, synced, iteration = standing[ISLAND], standing[SYNCED], standing[ITERATION]
        if source[SYNCED] == NOWHERE:
            found[rank] = LeftBehindError(f"Island {island} lost those whose anchor it was to take over. {_TO_REJOIN}")
        elif rank not in are_present and standing[IS_DUE] and not standing[IS_NEW]:
            found[rank] = LeftBehindError(
                f"Island {island} missed the outer step after iteration {source[SYNCED]}: it is at iteration {iteration} with "
                f"an anchor of its own, of iteration {synced}. {_TO_REJOIN}"
            )
        elif rank not in are_present and _how_far(standing) == _how_far(source):
            found[rank] = PierConfigError(
                f"--pier-island {island} is at iteration {iteration} with another anchor than island {source[ISLAND]}. All "
                "need the same --seed, or checkpoints of one run."
            )
    names = collections.Counter(standing[ISLAND] for rank, standing in enumerate(standings) if rank not in found)
    for rank, standing in enumerate(standings):
        # An island that has met the others keeps its number.
        if rank not in found and standing[IS_NEW] and names[standing[ISLAND]] > 1:
            found[rank] = PierConfigError(
                f"--pier-island {standing[ISLAND]}: another island of that number is there. Each needs one of its own, from 0 "
                "to --pier-groups less 1. If this one was started again, end the processes of its former start."
            )
    return found
