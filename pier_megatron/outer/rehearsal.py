"""A rehearsal of the outer step before training: what does not fit or connect fails at once, not a tenth into the run."""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator

import torch

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer.memory import buffers_at_once
from pier_megatron.outer.report import OuterStepReports
from pier_megatron.outer.rules import OptimizerFactory
from pier_megatron.outer.share import Share
from pier_megatron.outer.snapshot import Progress
from pier_megatron.outer.state import Shards
from pier_megatron.outer.steps import OuterSteps
from pier_megatron.outer.weights import Weights


def rehearse(config: PierConfig, share: Share, exchange: GroupExchange, outer_optimizer: OptimizerFactory | None) -> None:
    """Takes outer steps of parameters made for it, then the work buffers of the real ones; called by all ranks of all groups.

    The run's own state has no part in it, so that nothing of it can change. Everything else is what the run will use: the
    communicators, the rule, the codec, one chunk of each kind as long as the run's longest. Elastic islands rehearse alone:
    who else is there is known only when they meet.

    Args:
        config: Settings of the run.
        share: What this rank owns; its stagings keep the buffers.
        exchange: Collectives between all groups that are known beforehand.
        outer_optimizer: Factory of the outer optimizer; None for the built-in rules.
    """
    first = next(config.outer_steps(), None)
    if first is None:
        return
    with _explained(first):
        _take_outer_steps(dataclasses.replace(config, fragments=1), share, exchange, outer_optimizer)
        # Participants refer to themselves, so that only this gives their memory back.
        gc.collect()
        in_fragments = [staging.state.in_fragments for staging in share.stagings]
        for staging, buffers in zip(share.stagings, buffers_at_once(config, in_fragments), strict=True):
            staging.reserve(*buffers)


def _take_outer_steps(
    config: PierConfig, share: Share, exchange: GroupExchange, outer_optimizer: OptimizerFactory | None
) -> None:
    """Takes the first outer step and the last one of a run over parameters made for it, and what comes with them."""
    made = share.alike(_of_each_kind(config, share), config)
    reports = OuterStepReports(config, lambda report: None, share.device)
    weights = Weights(made, exchange, on_change=lambda: None)
    steps = OuterSteps(config, made, exchange, weights, reports, islands=None, outer_optimizer=outer_optimizer)
    progress = Progress(next(config.outer_steps()), is_local=True)
    steps.participants.average(progress.iteration)
    steps.take(progress, config.fragments_due(progress.iteration))
    # What spans iterations ends here. Groups that never agree do.
    progress.iteration = config.train_iters
    steps.proceed(progress)
    reports.write_arrived(waits=True)


def _of_each_kind(config: PierConfig, share: Share) -> list[Shards]:
    """Zeros as long as the longest chunk of those that travel exactly and of those that do not."""
    chunks = [chunk for state in share.states for chunk in state.chunks]
    kinds = ([chunk for chunk in chunks if chunk.shards.travel_exactly(config.codec) == exactly] for exactly in (False, True))
    longest = [max(alike, key=lambda chunk: chunk.numel) for alike in kinds if alike]
    return [
        dataclasses.replace(chunk.shards, tensors=[torch.zeros(chunk.numel, device=share.device)], is_counted=True)
        for chunk in longest
    ]


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
