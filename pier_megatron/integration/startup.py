"""Checks and log lines before the first iteration of a run."""

import argparse
import dataclasses
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.topology import Topology, some_of
from pier_megatron.outer import OuterLoop, Shards
from pier_megatron.outer.chunks import Matrix, Stored
from pier_megatron.outer.memory import ORTHOGONAL, STORED, bytes_of_outer_step, host_bytes, residuals_of, wire_of, work_bytes
from pier_megatron.outer.rules import common_names, rule_class
from pier_megatron.outer.state import ANCHOR, OuterState
from pier_megatron.schedules import NESTEROV
from pier_megatron.values import folder_to_write, is_in_object_store

# Compute capability from which on Megatron does without CUDA_DEVICE_MAX_CONNECTIONS=1.
_BLACKWELL = (10, 0)

# Longer schedules are shown by their first, last and evenly spaced outer steps.
_SCHEDULE_ROWS = 8


def check_groups_agree(loop: OuterLoop, begins: bool = True) -> None:
    """Refuses groups whose shards or weights differ; called by all ranks.

    Args:
        loop: The outer loop, at the parameters that the run starts from.
        begins: Whether the run starts rather than resumes; groups that never agree resume with different weights.

    Raises:
        PierConfigError: If the shards do not match or do not hold the same values.
    """
    exchange, device = loop.exchange, loop.device
    compares = begins or loop.config.has_common_anchor
    own = [(state.numel, state.counted, int(state.checksum(ANCHOR)) if compares else 0) for state in loop.states]
    numbers = exchange.gather(torch.tensor([len(own)], device=device)).result()
    if (numbers != numbers[0]).any():
        raise PierConfigError("The groups hold different numbers of parameter buffers: their parallel layouts differ.")
    if not own:
        return
    everyone = exchange.gather(torch.tensor(own, dtype=torch.int64, device=device).flatten()).result()
    differing = (everyone != everyone[0]).any(dim=1).nonzero().flatten().tolist()
    if differing:
        raise PierConfigError(
            f"Group {differing[0]} does not start from the same weights as group 0: of (parameters, counted ones, sum of their "
            f"bits) per buffer it has {everyone[differing[0]].tolist()}, group 0 {everyone[0].tolist()}. All groups need "
            "the same --seed, no --data-parallel-random-init, and the same checkpoint if one is loaded."
        )


def check_folder(flag: str, folder: str | None) -> None:
    """Refuses a folder that this rank cannot write to, before hours of training end at the first save.

    Raises:
        PierConfigError: With the reason.
    """
    if not folder or is_in_object_store(folder):
        return
    try:
        folder_to_write(folder)
    except argparse.ArgumentTypeError as error:
        raise PierConfigError(f"{flag} {error}. Give another folder.") from None


def check_host_memory(config: PierConfig, numels: Sequence[int], ranks_on_node: int, available: int, is_pinned: bool) -> None:
    """Refuses to keep more in host memory than a node has, before any of its ranks allocates.

    Args:
        config: Settings of the run; without ``offload`` nothing is checked.
        numels: Parameters that this rank owns, for each optimizer that owns some of them.
        ranks_on_node: Number of processes on this node; each needs as much.
        available: Host memory that was available on the node before any rank allocated, in bytes.
        is_pinned: Whether the memory will be pinned, for a device to copy to.

    Raises:
        PierConfigError: With the arithmetic.
    """
    if not config.offload:
        return
    needed = ranks_on_node * sum(host_bytes(config, numel, is_pinned) for numel in numels)
    if needed > available:
        rounded = ", buffers rounded up to powers of two as PyTorch pins them," if is_pinned else ""
        raise PierConfigError(
            f"--pier-offload: the outer state of the {ranks_on_node} ranks on this node takes {needed / 1e9:,.1f} GB of host "
            f"memory{rounded} but only {available / 1e9:,.1f} GB are available. Use fewer ranks per node, more ranks per "
            "group, or keep the outer state on the device."
        )


def preset(config: PierConfig) -> str:
    """Names the preset and its purpose, or the one that ``auto`` would choose."""
    suited, why = config.suited_preset
    return f"preset {config.preset} " + (
        f"(suits {why})" if config.preset == suited else f"(auto would be {suited}, for {why})"
    )


def sites(config: PierConfig) -> list[str]:
    """Says which groups share a site, and how often they average; nothing without ``--pier-sites``."""
    if config.sites is None:
        return []
    size = config.groups_in_site
    members = some_of(f"{first}-{first + size - 1}" for first in range(0, config.groups, size))
    return [
        f"{config.sites} sites of {size} groups ({members}): the groups of a site average their parameters every "
        f"{config.site_interval} iterations, and share what it sends in an outer step"
    ]


@dataclasses.dataclass(frozen=True)
class Takes:
    """Memory and traffic of the outer loop on a rank.

    Attributes:
        parameters: FP32 parameters whose outer state the rank holds.
        state: Bytes of that state, on the host with ``--pier-offload``.
        work: Bytes of device memory for chunks on their way.
        residuals: Bytes of device memory for residuals of sums, which stay there when the rest of the state is offloaded.
        sent: Bytes that the rank sends to other groups in a sync interval.
        between_sites: Bytes of these that cross between sites; None without sites.
    """

    parameters: int
    state: int
    work: int
    residuals: int
    sent: int
    between_sites: int | None

    @classmethod
    def of(cls, config: PierConfig, states: Sequence[OuterState], device_type: str) -> "Takes":
        """Counts the states of a rank whose parameters are on a ``cpu`` or a ``cuda`` device."""
        chunks = [(chunk.carried, chunk.shards.travel_exactly(config.codec)) for state in states for chunk in state.chunks]
        wire, is_pinned = wire_of(config), device_type == "cuda"
        stay = [residual.nbytes for state in states for residual in state.reduced_residuals.values() if config.offload]
        return cls(
            parameters=sum(state.numel for state in states),
            state=sum(host_bytes(config, state.numel, is_pinned) if config.offload else state.nbytes for state in states),
            work=working_bytes(config, states),
            residuals=sum(stay),
            sent=sum(bytes_of_outer_step(config, *chunk) for chunk in chunks),
            between_sites=sum(wire.bytes_between_sites(*chunk) for chunk in chunks) if config.sites else None,
        )

    @classmethod
    def planned(
        cls,
        config: PierConfig,
        owned: Sequence[int],
        copies: bool,
        device_type: str,
        stored: Stored | None = None,
        experts: int = 0,
        holders: int = 1,
        holders_of_experts: int = 1,
        matrix: int = 0,
    ) -> "Takes":
        """Counts what a rank will hold, without allocating it.

        Args:
            config: Settings of the run.
            owned: Numbers of parameters, as of :func:`pier_megatron.commands.planned_sizes.parameters_of_first_shard`.
            copies: Whether other ranks hold copies of the second of them.
            device_type: Device of the run, ``cpu`` or ``cuda``.
            stored: Format of main parameters that are no FP32 tensors.
            experts: Number of parameters of routed experts, which an optimizer of their own steps.
            holders: Number of ranks that hold all of them and exchange a part each.
            holders_of_experts: Likewise of routed experts.
            matrix: Number of elements of the largest matrix, where the outer rule takes matrices.
        """
        # They have a size, and do not talk.
        ranks, of_experts = (dist.ProcessGroup(0, size) for size in (holders, holders_of_experts))  # type: ignore[call-arg]

        def shards(numel: int, holders: dist.ProcessGroup, **kind: bool) -> Shards:
            # As if all matrices were as large.
            sizes = [*[matrix] * (numel // matrix), numel % matrix] if matrix else [numel]
            tensors = [torch.empty(size, device="meta") for size in sizes if size]
            matrices = [Matrix(0, torch.Size((len(tensor), 1))) for tensor in tensors if matrix]
            return Shards(tensors, stored=stored, holders=holders, matrices=matrices, **kind)

        split, copied, tied = owned
        of_optimizers = [[shards(split, ranks), shards(copied, ranks, is_copied=copies), shards(tied, ranks, is_tied=True)]]
        if experts:
            of_optimizers.append([shards(experts, of_experts)])
        segment_numel, residuals = residuals_of(config, config.lighthouse is not None)
        states = [
            OuterState(
                of_optimizer,
                chunk_numel=config.chunk_numel_on(device_type),
                fragments=config.fragments,
                device=torch.device("meta"),
                common=common_names(config),
                segment_numel=segment_numel,
                residuals=residuals,
                cuts_matrices=not rule_class(config).takes_matrices,
            )
            for of_optimizer in of_optimizers
        ]
        return cls.of(config, states, device_type)

    def lines(self, config: PierConfig, device_type: str) -> list[str]:
        """Lines of start-up, doctor and plan."""
        synchronous = round(8 * self.parameters * (config.groups - 1) / config.groups)
        sites = "" if self.between_sites is None else f", {self.between_sites / 1e6:,.2f} MB of them to other sites"
        fewer = (
            "; --pier-exchange-dtype sends fewer" if config.codec.lossless and config.has_common_anchor and self.sent else ""
        )
        is_gpu = device_type == "cuda"
        memory, communicator = ("device memory", ", and one more NCCL communicator") if is_gpu else ("memory", "")
        elsewhere = "; --pier-offload moves the state to the host" if is_gpu and not config.offload else ""
        residuals = f", {self.residuals / 1e6:,.2f} MB for residuals of sums" if self.residuals else ""
        return [
            f"per rank: {self.parameters:,} FP32 parameters; sends {self.sent / 1e6:,.2f} MB to other groups in "
            f"{config.sync_interval} iterations (synchronous training: {synchronous / 1e6:,.2f} MB in each, with FP32 "
            f"gradients){sites}{fewer}",
            f"outer state per rank: {self.state / 1e6:,.2f} MB of {'host memory' if config.offload else memory}, and up to "
            f"{self.work / 1e6:,.2f} MB of {memory} for chunks on their way{residuals}{communicator}{elsewhere}",
        ]


def describe(who: Sequence[str], topology: Topology, loop: OuterLoop, warnings: Sequence[str]) -> str:
    """Writes the block that rank 0 prints at start: :func:`lines`, its own warnings and ``warnings``."""
    config, device_type = loop.config, loop.device.type
    taken = Takes.of(config, loop.states, device_type).lines(config, device_type)
    said = [
        *lines(config, topology, who, taken, device_type),
        *(f"WARNING: {warning}" for warning in (*config.warnings(), *warnings, *of_queues(loop))),
    ]
    return "\n  ".join([f"Pier: {said[0]}", *said[1:]])


def lines(config: PierConfig, topology: Topology, who: Sequence[str], taken: Sequence[str], device_type: str) -> list[str]:
    """What start-up and doctor say of a run: groups, schedule, traffic and memory.

    Args:
        config: Settings of the run.
        topology: Places of its ranks.
        who: Lines on the groups and their logs.
        taken: Lines of :class:`Takes`.
        device_type: Device of the run, ``cpu`` or ``cuda``.
    """
    ranks = len(topology.members(0))
    options = [
        f"overlapped over {config.overlap} iterations" if config.overlap else "blocking",
        f"between {config.subgroup} groups, drawn at random for each outer step" if not config.has_common_anchor else "",
        f"in {config.fragments} fragments" if config.fragments > 1 else "",
        f"as {config.codec.name}" + (" without error feedback" if config.no_error_feedback else ""),
    ]
    groups = f"{'group' if config.lighthouse is None else 'island'}{'' if config.groups == 1 else 's'}"
    copying = "overlapped steps wait for copies of offloaded state: pier-megatron plan says whether blocking ones are faster"
    return [
        f"{config.groups} {groups} of {ranks} rank{'' if ranks == 1 else 's'}, {preset(config)}"
        + ("" if config.rule_name in (NESTEROV, "noloco") else f", outer rule {config.rule_name}"),
        *who,
        f"iterations: {config.lazy_start} of lazy start (synchronous), then {config.train_iters - config.lazy_start} local "
        f"with an outer step every {config.sync_interval}",
        f"exchange: {', '.join(option for option in options if option)}, in chunks of {config.chunk_mib_on(device_type)} MiB",
        *sites(config),
        *schedule(config),
        *taken,
        *([copying] if config.overlap and config.offload else ()),
    ]


def of_queues(loop: OuterLoop) -> list[str]:
    """Which work on a GPU waits for other work because both go through the same queue."""
    config, queues = loop.config, os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if loop.device.type != "cuda" or queues != "1" or not (config.overlap or config.offload):
        return []
    if torch.cuda.get_device_capability(loop.device) >= _BLACKWELL:
        return [
            "CUDA_DEVICE_MAX_CONNECTIONS=1 on a GPU on which Megatron does not need it (Blackwell and newer): kernels, "
            "collectives and copies wait for each other in one queue. Set it to 32, the most that CUDA accepts."
        ]
    if config.offload and os.environ.get("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "1") == "1":
        return [
            "--pier-offload with CUDA_DEVICE_MAX_CONNECTIONS=1: copies between host and device wait in the queue of the "
            "kernels. Set CUDA_DEVICE_MAX_COPY_CONNECTIONS=8, which gives them queues of their own."
        ]
    return []


def working_bytes(config: PierConfig, states: Sequence[OuterState]) -> int:
    """Work memory of a rank on its device: also what one chunk takes while it is encoded, or its parameters are copied."""
    longest = [max((chunk.numel for chunk in state.chunks), default=0) for state in states]
    coding = max(map(wire_of(config).coding_bytes, longest), default=0)
    stored = (chunk.numel for state in states for chunk in state.chunks if chunk.shards.stored is not None)
    matrices = (shape.numel() for state in states for chunk in state.chunks for shape in chunk.matrix_shapes)
    own = STORED * max(stored, default=0) + ORTHOGONAL * max(matrices, default=0)
    return work_bytes(config, longest, [state.in_fragments for state in states]) + coding + own


def schedule(config: PierConfig) -> list[str]:
    """Writes the schedule as a table over iterations, line by line."""
    steps = list(config.outer_steps())
    last = len(steps) - 1
    shown = sorted({round(row * last / (_SCHEDULE_ROWS - 1)) for row in range(_SCHEDULE_ROWS)})
    lines = [f"{'iteration':>12} {'progress':>9} {'mu':>6} {'eta':>6}"]
    if config.lazy_start:
        warmup = f"{config.momentum_at(1):6.3f}" if config.warms_momentum else f"{'-':>6}"
        lines.append(f"{f'1-{config.lazy_start}':>12} {'':>9} {warmup} {'-':>6}")
    for step in (steps[index] for index in shown):
        lines.append(
            f"{step:12d} {step / config.train_iters:9.1%} {config.momentum_at(step):6.3f} {config.learning_rate_at(step):6.3f}"
        )
    return lines
