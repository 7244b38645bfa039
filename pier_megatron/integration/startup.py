"""What a run says and checks before its first iteration."""

import collections
from collections.abc import Sequence

import psutil
import torch

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.topology import Topology
from pier_megatron.outer import PIPELINE_DEPTH, GroupExchange, OuterState, Staging

# Longer schedules are shown by their first, last and evenly spaced outer steps.
_SCHEDULE_ROWS = 8


def check_groups_agree(states: Sequence[OuterState], exchange: GroupExchange) -> None:
    """Refuses groups whose shards or weights differ; called by all ranks.

    Args:
        states: The outer states of this rank, at the parameters the run starts from.
        exchange: Collectives between the groups.

    Raises:
        PierConfigError: If the shards do not match or do not hold the same values.
    """
    sums = [torch.stack([state.anchor.double().sum(), state.anchor.double().abs().sum()]).tolist() for state in states]
    own = [[state.numel, _counted(state), *sums] for state, sums in zip(states, sums, strict=True)]
    device = states[0].device if states else torch.device("cpu")
    vector = torch.tensor([value for row in own for value in row], dtype=torch.float64, device=device)
    sizes = exchange.gather(torch.tensor([float(len(vector))], dtype=torch.float64, device=device)).result()
    if (sizes != sizes[0]).any():
        raise PierConfigError("The groups hold different numbers of parameter buffers: their parallel layouts differ.")
    everyone = exchange.gather(vector).result()
    differing = [group for group in range(exchange.size) if not torch.equal(everyone[group], everyone[0])]
    if differing:
        raise PierConfigError(
            f"Group {differing[0]} does not start from the same weights as group 0: of (parameters, counted ones, sum, sum of "
            f"magnitudes) per buffer it has {everyone[differing[0]].tolist()}, group 0 {everyone[0].tolist()}. All groups need "
            "the same --seed, no --data-parallel-random-init, and the same checkpoint if one is loaded."
        )


def check_host_memory(config: PierConfig, states: Sequence[OuterState], ranks_on_node: int) -> None:
    """Refuses to keep more in host memory than a node has.

    Raises:
        PierConfigError: With the arithmetic.
    """
    if not config.offload:
        return
    needed = ranks_on_node * sum(state.nbytes for state in states)
    # What this rank has pinned already is no longer available.
    available = psutil.virtual_memory().available + sum(state.nbytes for state in states)
    if needed > available:
        raise PierConfigError(
            f"--pier-offload: the outer state of the {ranks_on_node} ranks on this node takes {needed / 1e9:,.1f} GB of host "
            f"memory, of which {available / 1e9:,.1f} GB are available. Use fewer ranks per node, more ranks per group, or "
            "keep the outer state on the device."
        )


def describe(
    config: PierConfig, topology: Topology, states: Sequence[OuterState], exchange: GroupExchange, log_interval: int
) -> str:
    """Writes the block that rank 0 prints at start: groups, schedule, traffic, memory."""
    parameters = sum(state.numel for state in states)
    sent = sum(exchange.bytes_of_sum(chunk.numel, chunk.part.is_tied) for state in states for chunk in state.chunks)
    synchronous = round(8 * parameters * (exchange.size - 1) / exchange.size)
    place = "host" if config.offload else "device"
    options = [
        f"overlapped over {config.overlap} iterations" if config.overlap else "waited for",
        f"in {config.fragments} fragments" if config.fragments > 1 else "",
        f"as {exchange.codec.name}" + (" without error feedback" if config.no_error_feedback else ""),
    ]
    lines = [
        f"Pier: {config.groups} groups of {len(topology.members(0))} ranks, preset {config.preset}",
        *(f"  {line}" for line in topology.describe()),
        f"  iterations: {config.lazy_start} of lazy start (synchronous), then {config.train_iters - config.lazy_start} local "
        f"with an outer step every {config.sync_interval}",
        f"  exchange: {', '.join(option for option in options if option)}, in chunks of {config.chunk_mib} MiB",
        *schedule(config),
        f"  per rank: {parameters:,} FP32 parameters; sends {sent / 1e6:,.2f} MB to other groups in {config.sync_interval} "
        f"iterations (synchronous training: {synchronous / 1e6:,.2f} MB in each, with FP32 gradients)",
        f"  outer state per rank: {sum(state.nbytes for state in states) / 1e6:,.2f} MB of {place} memory, and up to "
        f"{_working_bytes(config, states) / 1e6:,.2f} MB of device memory for chunks on their way",
        f"  logged losses and gradient norms are means over all groups, gathered every {log_interval} iterations",
        f"  momentum horizon H / (1 - mu) / T: {config.momentum_horizon():.2%} of the run",
        *(f"  WARNING: {warning}" for warning in [*config.warnings(), *topology.warnings()]),
    ]
    return "\n".join(lines)


def _counted(state: OuterState) -> int:
    """Parameters that a norm over the model counts on this rank."""
    return sum(chunk.numel for chunk in state.chunks if chunk.part.is_counted)


def _working_bytes(config: PierConfig, states: Sequence[OuterState]) -> int:
    """Work memory of a rank: buffers are made when chunks first need them at once, and then kept."""
    total = 0
    for state in states:
        in_fragments = collections.Counter(chunk.fragment for chunk in state.chunks)
        longest = max((chunk.numel for chunk in state.chunks), default=0)
        total += chunks_at_once(config, list(in_fragments.values())) * longest * Staging.bytes_per_element(state)
    return total


def chunks_at_once(config: PierConfig, in_fragments: Sequence[int]) -> int:
    """Most chunks that a rank works on at a time.

    Args:
        config: Of the run.
        in_fragments: Number of chunks in each fragment.
    """
    # Beside those on their way: one in hand, one staged ahead.
    at_once = min(sum(in_fragments), PIPELINE_DEPTH + 2)
    if not config.overlap:
        return at_once
    underway = min(config.fragments, config.overlap * config.fragments // config.sync_interval + 1)
    return max(at_once, sum(sorted(in_fragments)[-underway:]))


def schedule(config: PierConfig) -> list[str]:
    """Writes the schedule as a table over iterations, line by line."""
    steps = list(config.outer_steps())
    last = len(steps) - 1
    shown = sorted({round(row * last / (_SCHEDULE_ROWS - 1)) for row in range(_SCHEDULE_ROWS)})
    lines = [f"  {'iteration':>12} {'progress':>9} {'mu':>6} {'eta':>6}"]
    if config.lazy_start:
        warmup = f"{config.momentum_at(1):6.3f}" if config.warms_momentum else f"{'-':>6}"
        lines.append(f"  {f'1-{config.lazy_start}':>12} {'':>9} {warmup} {'-':>6}")
    for step in (steps[index] for index in shown):
        lines.append(
            f"  {step:12d} {step / config.train_iters:9.1%} {config.momentum_at(step):6.3f} "
            f"{config.learning_rate_at(step):6.3f}"
        )
    return lines
