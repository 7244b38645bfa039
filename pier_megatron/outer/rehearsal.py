"""A rehearsal of the outer step before training: what does not fit or connect fails at once, not a tenth into the run."""

import contextlib
from collections.abc import Iterator

import torch

from pier_megatron.config import PierConfig
from pier_megatron.outer.memory import buffers_at_once
from pier_megatron.outer.share import Share
from pier_megatron.outer.staging import SHARED, Staging
from pier_megatron.outer.state import Chunk
from pier_megatron.outer.steps import OuterSteps


def rehearse(config: PierConfig, share: Share, steps: OuterSteps) -> None:
    """Takes the work buffers, then sums and gathers zeros with all participants; called by all ranks of all groups.

    Each sum is as long as the longest chunk of its kind. Elastic islands rehearse alone: they know no others yet.

    Args:
        config: Settings of the run.
        share: What this rank owns; its stagings keep the buffers.
        steps: Outer steps of the rank.
    """
    first = next(config.outer_steps(), None)
    if first is None:
        return
    with _explained(first):
        in_fragments = [staging.state.in_fragments for staging in share.stagings]
        for staging, buffers in zip(share.stagings, buffers_at_once(config, in_fragments), strict=True):
            staging.reserve(*buffers)
        longest: dict[bool, tuple[Staging, Chunk]] = {}
        for found in share.chunks(range(config.fragments)):
            exactly = found[1].shards.travel_exactly(config.codec)
            longest[exactly] = max(longest.get(exactly, found), found, key=lambda each: each[1].numel)
        for exchange in steps.exchanges(first):
            for exactly, (staging, chunk) in sorted(longest.items()):
                under_way = exchange.sum([staging.work[0].of(chunk)[SHARED].zero_()], exactly=exactly)
                under_way.advance()
                under_way.finish()
            exchange.gather(torch.zeros(1, device=share.device)).result().tolist()


@contextlib.contextmanager
def _explained(first: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            f"Pier: this was a rehearsal, at start, of the outer step after iteration {first}. If memory is short, use a "
            "smaller --pier-chunk-mib, --pier-offload or, with an overlap, more --pier-fragments. If the error speaks of a "
            "connection or a timeout, a rank of another group cannot be reached, or its own log says why it failed."
        )
        raise
