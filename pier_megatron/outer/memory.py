"""What the outer optimizer takes of a rank's memory and of its links, before it is taken."""

import math
from collections.abc import Sequence

from pier_megatron.config import PierConfig
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import Wire
from pier_megatron.exchange.pairs import DirectWire
from pier_megatron.exchange.sites import SiteWire
from pier_megatron.outer.flights import AHEAD, PIPELINE_DEPTH, chunks_at_once
from pier_megatron.outer.staging import MOVE, WORK
from pier_megatron.outer.state import state_names

_FP32 = 4


def wire_of(config: PierConfig) -> Wire:
    """Returns what sums cost in the outer steps of a run."""
    if config.sites is not None:
        return SiteWire(config.codec, config.sites, config.groups_in_site)
    return DirectWire(config.codec, config.subgroup) if config.subgroup else Wire(config.codec, config.groups)


def bytes_of_site_average(config: PierConfig, numel: int) -> int:
    """Bytes that each rank sends inside its site to average ``numel`` parameters, in FP32."""
    return Wire(CODECS["fp32"], config.groups_in_site).bytes_of_sum(numel)


def bytes_of_outer_step(config: PierConfig, numel: int, exactly: bool = False) -> int:
    """Bytes that each rank sends to other groups in a sync interval for ``numel`` elements, see :class:`Wire`.

    Slow weights and the averages inside sites are included.
    """
    wire = wire_of(config)
    ahead = wire.bytes_of_sum(numel, exactly=True) if config.pulls else 0
    if config.site_interval is not None:
        ahead = config.sync_interval // config.site_interval * bytes_of_site_average(config, numel)
    return wire.bytes_of_sum(numel, exactly) + ahead


def bytes_per_parameter(config: PierConfig) -> int:
    """What the outer state takes for each parameter that a rank owns: FP32 in each flat buffer."""
    return _FP32 * len(state_names(config.has_error_feedback))


def host_bytes(config: PierConfig, numel: int, is_pinned: bool) -> int:
    """Host memory that the offloaded state of ``numel`` parameters takes, with what rounds under way keep.

    PyTorch's allocator rounds pinned buffers up to a power of two, which may double them.
    """

    def taken(numel: int) -> int:
        nbytes = _FP32 * numel
        return 1 << (nbytes - 1).bit_length() if is_pinned and nbytes else nbytes

    chunk = min(numel, config.chunk_numel_on("cuda" if is_pinned else "cpu"))
    in_flight = math.ceil(numel / config.fragments / chunk) * _rounds_kept(config) if chunk else 0
    return len(state_names(config.has_error_feedback)) * taken(numel) + len(work_names(config)) * in_flight * taken(chunk)


def buffers_at_once(config: PierConfig, in_fragments: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Most buffers, each for a chunk, that a rank has lent at a time.

    Args:
        config: Settings of the run.
        in_fragments: Number of chunks in each fragment of each state.

    Returns:
        Numbers for each state: of those on the device, and of those beside them that wait between iterations where the state is
        offloaded.
    """
    ahead = AHEAD if config.offload else 0
    found = []
    for own, lent, pulled in zip(
        in_fragments, _under_way(config, in_fragments, ahead), _pulled(config, in_fragments, ahead), strict=True
    ):
        # Beside those on their way in a blocking step: one in hand, one staged ahead.
        at_once = min(sum(own), PIPELINE_DEPTH + 2)
        # Evaluation of pairs' mean weights and averages inside sites pass by chunk by chunk: one in hand, one staged ahead.
        passing = min(sum(own), 2) if config.subgroup or config.sites else 0
        kept = sorted(own, reverse=True)[: _rounds_kept(config)]
        # In place, chunks that wait keep their buffers. Offloaded, a save lets one of several rounds arrive, a few at a time.
        in_rounds = lent + (len(kept) > 1) if config.offload else sum(kept)
        most = max(max(at_once, passing + in_rounds) + _beside(config, pulled), passing + sum(pulled))
        found.append((most, sum(kept) if config.offload else 0))
    return found


def work_bytes(config: PierConfig, longest: Sequence[int], in_fragments: Sequence[Sequence[int]]) -> int:
    """Device memory for the chunks that a rank works on at a time. It is made before training, and then kept.

    Args:
        config: Settings of the run.
        longest: Number of elements of the longest chunk of each state.
        in_fragments: Number of chunks in each fragment of each state.
    """
    wire, total = wire_of(config), 0
    for own, numel, (on_device, _), sent, pulled in zip(
        in_fragments,
        longest,
        buffers_at_once(config, in_fragments),
        _under_way(config, in_fragments),
        _pulled(config, in_fragments),
        strict=True,
    ):
        encoded = max(min(sum(own), PIPELINE_DEPTH), sent)
        of_chunk = numel * (_FP32 * len(work_names(config)) + (bytes_per_parameter(config) if config.offload else 0))
        # Of a chunk that is looked ahead on, the sum in a copy.
        copied = _FP32 * numel if MOVE in work_names(config) else 0
        received = encoded * wire.payload_bytes(numel)
        ahead = (wire.groups - 1) * _FP32 * numel
        total += on_device * of_chunk + copied + max(received + _beside(config, pulled) * ahead, sum(pulled) * ahead)
    return total


def work_names(config: PierConfig) -> tuple[str, ...]:
    """Names of what the buffers of a run hold beside the state.

    With overlap and offload, what parameters will move by is computed as soon as a sum has arrived, and waits in 4 bytes a
    parameter: a round that ends would otherwise wait for 16 from the host. Elastic islands compute nothing of an outer step
    before all of them have everything.
    """
    return (*WORK, MOVE) if config.offload and config.overlap > 0 and config.lighthouse is None else WORK


def rounds_at_once(config: PierConfig) -> int:
    """Rounds that span iterations and are under way at a time."""
    if not config.overlap:
        return 0
    return min(config.fragments, config.overlap * config.fragments // config.sync_interval + 1)


def _rounds_kept(config: PierConfig) -> int:
    """Rounds under way at a time that keep all of their chunks: elastic islands apply nothing before everything is there."""
    return 1 if config.lighthouse is not None else rounds_at_once(config)


def _under_way(config: PierConfig, in_fragments: Sequence[Sequence[int]], ahead: int = 0) -> list[int]:
    """Chunks of each state that are on the wire at a time in the rounds under way; ``ahead`` as of :func:`chunks_at_once`."""
    launches = wire_of(config).launches_of_sum()
    rounds = [chunks_at_once(numbers, config.overlap, launches, ahead) for numbers in zip(*in_fragments, strict=True)]
    return [sum(sorted(of_state, reverse=True)[: _rounds_kept(config)]) for of_state in zip(*rounds, strict=True)]


def _beside(config: PierConfig, pulled: Sequence[int]) -> int:
    """Chunks of slow weights, of :func:`_pulled`, beside rounds: they cross for every fragment that is not in one."""
    return sum(pulled[max(1, _rounds_kept(config)) :])


def _pulled(config: PierConfig, in_fragments: Sequence[Sequence[int]], ahead: int = 0) -> list[list[int]]:
    """Chunks of slow weights of each state that are on the wire at a time for each fragment, most first."""
    if not config.pulls:
        return [[] for _ in in_fragments]
    span = config.sync_interval - config.overlap
    launches = wire_of(config).launches_of_sum(exactly=True)
    found = []
    for numbers in zip(*in_fragments, strict=True):
        at_once = chunks_at_once(numbers, span, launches, ahead)
        found.append([min(number, max(most, PIPELINE_DEPTH)) for number, most in zip(numbers, at_once, strict=True)])
    return [sorted(of_state, reverse=True) for of_state in zip(*found, strict=True)]
