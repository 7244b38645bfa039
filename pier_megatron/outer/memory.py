"""What the outer optimizer takes of a rank's memory and of its links, before it is taken."""

import math
from collections.abc import Callable, Sequence

from pier_megatron.config import PierConfig
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.wire import Wire
from pier_megatron.outer.rules import common_names
from pier_megatron.outer.staging import WORK
from pier_megatron.outer.state import REDUCED, RESIDUAL

_FP32 = 4

STORED = 2 * _FP32
"""Bytes of device memory for each element of a chunk of main parameters that are read and written by way of copies."""

ORTHOGONAL = 4 * _FP32
"""Bytes of device memory for each element of a matrix that an outer rule makes orthogonal: its iterations' copies."""

PIPELINE_DEPTH = 4
"""Chunks on their way at once where everything is waited for: one is subtracted, two are on the wire, one is updated."""


def wire_of(config: PierConfig) -> Wire:
    """Returns what sums cost in the outer steps of a run."""
    if config.subgroup is not None:
        return Wire(config.codec, config.subgroup, is_direct=True)
    return Wire(config.codec, config.sites or config.groups, config.groups_in_site if config.sites else 1)


def residuals_of(config: PierConfig, is_elastic: bool) -> tuple[Callable[[int], int] | None, tuple[str, ...]]:
    """Returns what error feedback keeps: how much of the sums that a rank reduces, and which flat buffers."""
    if not config.has_error_feedback:
        return None, ()
    # With other elastic islands a rank reduces other sums.
    return (None, (RESIDUAL, REDUCED)) if is_elastic else (wire_of(config).segment_numel, (RESIDUAL,))


def bytes_of_site_average(config: PierConfig, numel: int) -> int:
    """Bytes that each rank sends inside its site to average ``numel`` parameters, in FP32."""
    return Wire(CODECS["fp32"], config.groups_in_site).bytes_of_sum(numel)


def bytes_of_outer_step(config: PierConfig, numel: int, exactly: bool = False) -> int:
    """Bytes that each rank sends to other groups in a sync interval for ``numel`` elements, see :class:`Wire`.

    The averages inside sites are included.
    """
    interval = config.site_interval
    inside = 0 if interval is None else config.sync_interval // interval * bytes_of_site_average(config, numel)
    return wire_of(config).bytes_of_sum(numel, exactly) + inside


def bytes_per_parameter(config: PierConfig) -> int:
    """What the outer state takes for each parameter that a rank owns: FP32 in each flat buffer."""
    return _FP32 * _flat_buffers(config)


def _flat_buffers(config: PierConfig) -> int:
    # Islands keep what they have dropped of sums as long as the parameters, wherever their segment is.
    return len(common_names(config)) + config.has_error_feedback * (1 if config.lighthouse is None else 2)


def host_bytes(config: PierConfig, numel: int, is_pinned: bool) -> int:
    """Host memory that the offloaded state of ``numel`` parameters takes, with what rounds under way keep.

    PyTorch's allocator rounds pinned buffers up to a power of two, which may double them.
    """

    def taken(numel: int) -> int:
        nbytes = _FP32 * numel
        return 1 << (nbytes - 1).bit_length() if is_pinned and nbytes else nbytes

    chunk = min(numel, config.chunk_numel_on("cuda" if is_pinned else "cpu"))
    in_flight = math.ceil(numel / config.fragments / chunk) * _rounds_kept(config) if chunk else 0
    return _flat_buffers(config) * taken(numel) + in_flight * taken(chunk)


def buffers_at_once(config: PierConfig, in_fragments: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Most buffers, each for a chunk, that a rank has lent at a time, given the chunks in each fragment of each state.

    Returns:
        Numbers of buffers for each state: on the device, and in host memory between iterations if the state is offloaded.
    """
    found = []
    for own in in_fragments:
        # In a blocking step: those on their way, one in hand, one staged ahead.
        work, kept = min(sum(own), PIPELINE_DEPTH + 2), sum(sorted(own, reverse=True)[: _rounds_kept(config)])
        found.append((work, kept) if config.offload else (max(work, kept + min(sum(own), 2)), 0))
    return found


def work_bytes(config: PierConfig, longest: Sequence[int], in_fragments: Sequence[Sequence[int]]) -> int:
    """Device memory for the chunks that a rank works on at a time, made before training and then kept.

    Its arguments are the number of elements of the longest chunk of each state, and the chunks in each of its fragments.
    """
    wire, total = wire_of(config), 0
    for own, numel, (work, kept) in zip(in_fragments, longest, buffers_at_once(config, in_fragments), strict=True):
        of_work = _FP32 * len(WORK) + (bytes_per_parameter(config) if config.offload else 0)
        encoded = max(min(sum(own), PIPELINE_DEPTH), sum(sorted(own, reverse=True)[: _rounds_kept(config)]))
        total += numel * (work * of_work + kept * _FP32) + encoded * wire.payload_bytes(numel)
        if config.lighthouse is not None and config.has_error_feedback:
            # What the codec drops lasts once all islands have the sum. With two of them, each reduces half of the sums.
            total += encoded * _FP32 * (numel + Wire(config.codec, 2).segment_numel(numel))
    return total


def rounds_at_once(config: PierConfig) -> int:
    """Rounds that span iterations and are under way at a time."""
    if not config.overlap:
        return 0
    return min(config.fragments, config.overlap * config.fragments // config.sync_interval + 1)


def _rounds_kept(config: PierConfig) -> int:
    """Rounds that keep their chunks at a time: elastic islands apply nothing before everything is there."""
    return 1 if config.lighthouse is not None else rounds_at_once(config)
