"""The outer step on one rank: its passes, its codecs, its copies to the host, each against what memory can do."""

import contextlib
import functools
from collections.abc import Iterator

import inventory
import one_gpu
import outer_step_passes
import torch
import torch.distributed as dist
from measuring import copy_rate, gigabytes_per_second, is_gpu, launches, median_seconds
from table import Row, Rows, checked

from pier_megatron import PierConfig
from pier_megatron.exchange.codecs import BLOCK, CODECS, Codec
from pier_megatron.exchange.coding import decode, decode_plainly, encode, encode_plainly
from pier_megatron.outer import GroupExchange, OuterLoop, Shards

_REPETITIONS = 5
_SHARDS = 200
_CHUNK_MIB = 16
_GROUPS = (4, 64)
_PER = 100_000_000

# GB/s of one lane in one direction, by generation of PCI Express.
_PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


def _parameters() -> int:
    return _PER if is_gpu() else 2_000_000


def copies() -> Rows:
    """Copies within the device, and between it and pinned memory, against what memory and bus can carry."""
    numel = _parameters()
    memory, bus = (_memory_bandwidth(), _bus_bandwidth()) if is_gpu() else (None, None)
    yield Row(f"copy of {numel:,} FP32 within the device", _against(copy_rate(numel), memory, "read and written"))
    for way, seconds in _pinned_copies(numel).items():
        yield Row(f"pinned copy {way}", _against(gigabytes_per_second(4 * numel, seconds), bus, "one way"))


def _against(rate: float, physical: float | None, what: str) -> str:
    share = f", {rate / physical:.0%} of the physical {physical:,.0f}" if physical else ""
    return f"{rate:.1f} GB/s {what}{share}"


def _memory_bandwidth() -> float | None:
    """GB/s of the device's memory; None where PyTorch does not know its clock."""
    properties = torch.cuda.get_device_properties(0)
    kilohertz, bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    # Two transfers in a clock.
    return 2 * kilohertz * 1e3 * bits / 8 / 1e9 or None


def _bus_bandwidth() -> float | None:
    """GB/s of the link to the host, one way; None where the driver does not say."""
    found = [word.strip() for word in inventory.nvidia_smi("pcie.link.gen.max,pcie.link.width.max").split(",")]
    if len(found) != 2 or not all(map(str.isdecimal, found)):
        return None
    generation, lanes = map(int, found)
    return _PCIE_LANE.get(generation, 0.0) * lanes or None


def _pinned_copies(numel: int) -> dict[str, float]:
    """Seconds of a copy of FP32 between the device and pinned memory, each way."""
    device, found = one_gpu.device(), {}
    for way, (source, target) in {"to the device": ("cpu", device), "to the host": (device, "cpu")}.items():
        tensors = [torch.ones(numel, device=place, pin_memory=is_gpu() and place == "cpu") for place in (source, target)]
        found[way] = median_seconds(functools.partial(_copy, *tensors), repetitions=_REPETITIONS)
    return found


def passes() -> Rows:
    """The passes over parameters, anchor and momentum, without any exchange."""
    device = one_gpu.device().type
    for chunk_mib in (_CHUNK_MIB, 64):
        seconds = outer_step_passes.measure(_parameters(), _SHARDS, chunk_mib, False, _REPETITIONS, device)
        (_, copy), *others = seconds.items()
        for name, median in others:
            result = f"{median * 1e3:.2f} ms, {median / copy:.2f} x a copy of {_parameters():,} FP32 ({copy * 1e3:.2f} ms)"
            yield Row(f"{name}, chunks of {chunk_mib} MiB", result)
    yield Row("floor of an outer step", f"{outer_step_passes.FLOOR:.0f} x a copy")


def codecs() -> Rows:
    """Encoding and decoding alone, then whole outer steps between groups that do not exist."""
    numel = _CHUNK_MIB * 2**20 // 4 if is_gpu() else 64 * BLOCK * 16
    copy = copy_rate(numel)
    yield Row(f"memory copy of a chunk of {numel:,}", f"{copy:.1f} GB/s read and written")
    for codec in CODECS.values():
        for groups in _GROUPS if not codec.lossless else ():
            yield _coding(codec, groups, numel, copy)
    for codec in CODECS.values():
        for groups in _GROUPS:
            yield _whole_step(codec, groups)


def against_operators() -> Rows:
    """Kernels of codecs, with error feedback, against PyTorch's operators as they are and compiled."""
    numel = _CHUNK_MIB * 2**20 // 4 if is_gpu() else 16 * BLOCK
    rows, dropped = (torch.randn(1, numel, device=one_gpu.device()) for _ in range(2))
    for codec in CODECS.values():
        if codec.lossless:
            continue
        # With what was dropped, rows change.
        payloads, expected = (way(codec, rows.clone()) for way in (encode, encode_plainly))
        ways = {"kernels": (encode, decode), "operators": (encode_plainly, decode_plainly)}
        if is_gpu():  # Where nothing is measured, nothing waits for a compiler.
            ways["compiled"] = tuple(torch.compile(each, dynamic=False) for each in ways["operators"])
        found = []
        for name, (there, back) in ways.items():
            seconds = [
                median_seconds(functools.partial(there, codec, rows, dropped.view(-1)), repetitions=_REPETITIONS),
                median_seconds(functools.partial(back, codec, payloads), repetitions=_REPETITIONS),
            ]
            found.append(f"{name} {' and '.join(f'{each * 1e6:,.0f}' for each in seconds)} us")
        is_same = torch.equal(payloads, expected)
        yield checked(f"{codec.name}, to encode and to decode {numel:,}", is_same, "; ".join(found), "kernels have other bits")


def _coding(codec: Codec, groups: int, numel: int, copy: float) -> Row:
    segment = GroupExchange(None, codec).wire.segment_numel(numel // groups)
    matrix = torch.randn(groups, segment, device=one_gpu.device())
    payloads = encode(codec, matrix)
    moved = matrix.nbytes + payloads.nbytes
    found = []
    for name, run in (("encode", lambda: encode(codec, matrix)), ("decode", lambda: decode(codec, payloads))):
        rate = gigabytes_per_second(moved, median_seconds(run, repetitions=_REPETITIONS))
        found.append(f"{name} {rate:.1f} GB/s, {rate / copy:.0%} of a copy, {launches(run)} launches")
    return Row(f"{codec.name}, a chunk for {groups} groups", "; ".join(found))


def _whole_step(codec: Codec, groups: int) -> Row:
    config = PierConfig(
        train_iters=10**9,
        groups=groups,
        sync_interval=1,
        lazy_start_iters=0,
        chunk_mib=_CHUNK_MIB,
        exchange_dtype=codec.name,
    )
    parameters = [torch.zeros(_parameters() // _SHARDS, device=one_gpu.device()) for _ in range(_SHARDS)]
    with _absent_groups(groups) as between:
        loop = OuterLoop([[Shards(parameters)]], config, GroupExchange(between, codec))

        def restart() -> None:
            # What never arrives may be anything, also nan.
            for state in loop.states:
                for tensor in (*parameters, *state.kept.values()):
                    tensor.zero_()
            loop.reset()

        seconds = median_seconds(loop.skip_iteration, restart, _REPETITIONS)
        restart()
        started = launches(loop.skip_iteration)
    share = _PER / loop.states[0].numel
    result = f"{seconds * share * 1e3:.1f} ms and {round(started * share):,} launches for each {_PER:,} parameters"
    return Row(f"{codec.name}, outer step of {groups} groups without a wire", result)


@contextlib.contextmanager
def _absent_groups(groups: int) -> Iterator[dist.ProcessGroup]:
    """A communicator to groups that do not exist: it drops what is sent, and receives uninitialised memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=groups)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def offload() -> Rows:
    """Outer steps with state in host memory, against what copies to and from pinned memory can do."""
    numel, device = _parameters(), one_gpu.device()
    slowest = max(_pinned_copies(numel).values())
    kept, offloaded = (
        outer_step_passes.measure(numel, _SHARDS, _CHUNK_MIB, away, _REPETITIONS, device.type) for away in (False, True)
    )
    for name in list(kept)[1:]:
        # Anchor and momentum, there and back; the two directions run at the same time.
        result = (
            f"{offloaded[name] * 1e3:.1f} ms; its copies alone {2 * slowest * 1e3:.1f} ms; "
            f"not offloaded {kept[name] * 1e3:.1f} ms"
        )
        yield Row(f"{name}, offloaded", result)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
