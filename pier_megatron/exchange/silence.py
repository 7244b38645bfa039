"""Silence of islands: the order of questions in a meeting, what an answer, or none, means for it, and who has gone since."""

import time
from collections.abc import Sequence

from pier_megatron.exchange.authentication import ask, island_of
from pier_megatron.exchange.topology import some_of

REMEMBERED = 64
"""Number of past meetings that an island reports as left; an island that still waits in one asks within seconds."""

SECONDS = 5.0
"""Silence after which an island counts as dead in a meeting, as it does at the lighthouse by default."""


Meeting = list[int]
"""Step of a meeting, and a checksum of the islands that one of them has admitted to it."""


def neighbours(islands: Sequence[str], place: int) -> list[str]:
    """The islands that the one at a place asks, the next one first: those at distances 1, 2, 4 and so on behind it.

    All are asked, and what one has said all know after as many rounds as there are distances.
    """
    return [islands[(place + 2**power) % len(islands)] for power in range((len(islands) - 1).bit_length())]


def lost_peer(islands: Sequence[str], meeting: Meeting, secret: bytes) -> str | None:
    """What is wrong with an island that does not answer or prove the secret, or is not in a meeting any more, or None."""
    begun = time.monotonic()
    answers = ask(islands, secret, SECONDS)
    if time.monotonic() - begun > 1.2 * SECONDS:
        # This process itself stood still.
        return None
    for island in islands:
        answer = answers.get(island)
        if answer is None:
            return f"island {island_of(island)} does not answer"
        if meeting[0] in answer["left"]:
            return f"island {island_of(island)} has ended it"
        if answer["meeting"][0] >= meeting[0] and answer["meeting"] != meeting:
            return f"island {island_of(island)} meets other islands"
    return None


def changes(before: Sequence[str], now: Sequence[str]) -> str:
    """The numbers of islands that have gone, and of those that are new or were restarted, for the log; empty without any."""
    gone = set(map(island_of, before)) - set(map(island_of, now))
    new = set(map(island_of, set(now) - set(before)))
    found = (("gone", gone), ("new", new))
    return "; ".join(f"{what}: {some_of(map(str, sorted(islands)))}" for what, islands in found if islands)
