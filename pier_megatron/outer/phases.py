"""Names for what an outer step does, in profiles and in errors."""

import contextlib
from collections.abc import Iterator

from torch.profiler import record_function

from pier_megatron.exchange.collectives import Exchange
from pier_megatron.outer.verdicts import DivergedError


@contextlib.contextmanager
def phase(name: str, everyone: Exchange, iteration: int) -> Iterator[None]:
    """Names what happens inside, in profiles and in the error if it fails.

    A peer that has died or hangs shows first in the ranks that wait for it, often as a mere "connection closed".
    """
    try:
        with record_function(f"pier::{name}"):
            yield
    except DivergedError:
        raise
    except RuntimeError as error:
        # A group that is a job of its own knows of the others only while it meets them, and then says so itself.
        if everyone.size > 1:
            error.add_note(
                f"Pier: group {everyone.rank} was in phase {name} of the outer step after iteration {iteration}, together with "
                f"the {everyone.size - 1} other groups. If the error speaks of a connection or a timeout, a rank of another "
                "group has died or hangs: its own log says why. The last checkpoint is whole."
            )
        raise
