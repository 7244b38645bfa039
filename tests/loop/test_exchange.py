"""The exchange between four groups, in real processes, against plain arithmetic in one."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from exchange_worker import DEVICE, NUMEL, vector
from launch import as_a_fork, execute

from pier_megatron.exchange.codecs import BLOCK, CODECS
from pier_megatron.exchange.coding import decode, encode

pytestmark = pytest.mark.processes

_GROUPS = 4
_LOSSY = ["bf16", "int12", "int8", "int4", "int2", "int1"]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict]]:
    folder = tmp_path_factory.mktemp("exchange")
    worker = Path(__file__).with_name("exchange_worker.py")
    execute([sys.executable, str(worker), str(folder), str(_GROUPS)], folder / "log.txt", **as_a_fork(DEVICE.type))
    return [torch.load(folder / f"exchange-{rank}.pt", weights_only=False) for rank in range(_GROUPS)]


def exact_sum(step: int = 0, groups: int = _GROUPS) -> torch.Tensor:
    return sum(vector(rank, step).cpu().double() for rank in range(groups))


@pytest.mark.parametrize("codec", CODECS)
def test_every_group_gets_the_same_bits(records: list[dict[str, dict]], codec: str) -> None:
    first, *others = (record["sums"][codec]["sum"] for record in records)
    assert all(torch.equal(first, other) for other in others)
    for layout in records[0]["rounds"]:
        _, _, spans_iterations = layout
        # Parameters that were moved by a difference, not set, agree to rounding only.
        for key in ("anchor", "momentum", *(() if spans_iterations else ("parameters",))):
            first, *others = (record["rounds"][layout][key] for record in records)
            assert all(torch.equal(first, other) for other in others)


def test_fp32_sum_is_exact(records: list[dict[str, dict]]) -> None:
    torch.testing.assert_close(records[0]["sums"]["fp32"]["sum"].double(), exact_sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("codec", CODECS)
def test_exact_sums_are_in_group_order(records: list[dict[str, dict]], codec: str) -> None:
    in_order = vector(0).cpu()
    for rank in range(1, _GROUPS):
        in_order = in_order + vector(rank).cpu()
    assert all(torch.equal(record["exact sums"][codec]["sum"], in_order) for record in records)
    # A collective of the communicator takes an order of its own, which another communicator need not take.
    assert not torch.equal(records[0]["sums"]["fp32"]["sum"], in_order)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("groups", ["all", "some"])
def test_vectors_summed_at_once_have_the_sums_of_each_alone(
    records: list[dict[str, dict]], codec: str, exactly: bool, groups: str
) -> None:
    # A collective of the communicator takes an order that depends on the length.
    tolerance = 1e-5 if codec == "fp32" and groups == "all" and not exactly else 0
    for record in records:
        at_once, one_by_one = record["together"][codec, exactly][groups]
        for found, expected in zip(at_once, one_by_one, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    if exactly or codec == "fp32":
        lengths = [len(vector) for vector in records[0]["together"][codec, exactly][groups][0][:3]]
        expected = sum(vector(rank, 1).cpu().double() for rank in range(_GROUPS) if groups == "all" or rank != 2)
        for found, part in zip(records[0]["together"][codec, exactly][groups][0], expected.split(lengths), strict=False):
            torch.testing.assert_close(found.double(), part, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("codec", "steps"), [("bf16", 128), ("int12", 2047), ("int8", 127), ("int4", 7), ("int2", 2), ("int1", 1)]
)
def test_low_bit_sum_is_off_by_one_rounding_per_group_and_one_of_the_sum(
    records: list[dict[str, dict]], codec: str, steps: int
) -> None:
    error = (records[0]["sums"][codec]["sum"].double() - exact_sum()).abs()
    blocks = [
        torch.nn.functional.pad(values, (0, -NUMEL % BLOCK)).view(-1, BLOCK).abs().amax(1)
        for values in (*(vector(rank).cpu() for rank in range(_GROUPS)), exact_sum().float())
    ]
    # The blocks of the exchange begin at the same places: segments are whole blocks.
    bound = sum(block / steps / 2 for block in blocks).repeat_interleave(BLOCK)[:NUMEL] * 1.3
    assert (error <= bound).all()
    assert error.max() > 0


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_counted_are_bytes_sent(records: list[dict[str, dict]], codec: str) -> None:
    for record in records:
        collectives = record["sums"][codec]["collectives"]
        if CODECS[codec].lossless:
            [all_reduce] = collectives
            sent = 2 * all_reduce.nbytes * (_GROUPS - 1) / _GROUPS
        else:
            all_to_all, all_gather = collectives
            # Each rank keeps its own segment, and sends its sum to all others.
            sent = all_to_all.nbytes * (_GROUPS - 1) / _GROUPS + all_gather.nbytes * (_GROUPS - 1)
        assert record["sums"][codec]["sent"] == sent


@pytest.mark.parametrize("codec", _LOSSY)
def test_error_feedback_keeps_the_running_sum(records: list[dict[str, dict]], codec: str) -> None:
    drift = records[0]["drift"]
    assert drift[codec, True] < 0.5 * drift[codec, False]


@pytest.mark.parametrize("codec", CODECS)
def test_parts_are_summed_and_gathered_as_in_one_process(records: list[dict[str, dict]], codec: str) -> None:
    coded = CODECS[codec]
    size = NUMEL // _GROUPS
    padding = (0, -size % BLOCK)
    assert padding[1], "parts should be no whole blocks"
    dropped = [torch.zeros(_GROUPS, size + padding[1]) for _ in range(_GROUPS)]
    for step in range(2):
        arrived = []
        for rank in range(_GROUPS):
            rows = torch.nn.functional.pad(vector(rank, step).cpu().view(_GROUPS, size), padding) + dropped[rank]
            arrived.append(decode(coded, encode(coded, rows)))
            dropped[rank] = rows - arrived[-1]
        sums = torch.stack(arrived).sum(0)
        expected = decode(coded, encode(coded, sums))
        for rank, record in enumerate(records):
            found = record["in parts"][codec]
            torch.testing.assert_close(found["scattered"][step], sums[rank : rank + 1], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(found["gathered"][step], expected, rtol=1e-6, atol=1e-6)


def summed(vectors: list[torch.Tensor], codec: str, sent: list[torch.Tensor], reduced: list[torch.Tensor]) -> torch.Tensor:
    """What a low-bit exchange makes of the groups' vectors, in one process; residuals are carried over in place."""
    coded, groups = CODECS[codec], len(vectors)
    segment = -(-len(vectors[0]) // (groups * BLOCK)) * BLOCK
    arrived = []
    for given, residual in zip(vectors, sent, strict=True):
        padded = torch.nn.functional.pad(given + residual, (0, groups * segment - len(given)))
        decoded = torch.cat([decode(coded, encode(coded, part[None]))[0] for part in padded.split(segment)])
        residual.copy_((padded - decoded)[: len(given)])
        arrived.append(decoded)
    result = []
    for place in range(groups):
        total = torch.stack([decoded.split(segment)[place] for decoded in arrived]).sum(0) + reduced[place]
        decoded = decode(coded, encode(coded, total[None]))[0]
        reduced[place].copy_(total - decoded)
        result.append(decoded)
    return torch.cat(result)[: len(vectors[0])]


def two_rounds(codec: str, chunk_numel: int, spans_iterations: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchor and momentum after the two rounds of the workers, chunk by chunk in one process; group 3 counts in the first."""

    def zeros(numel: int = NUMEL) -> torch.Tensor:
        # Where the ranks compute: other devices add up in other orders.
        return torch.zeros(numel, device=DEVICE)

    anchor, momentum = zeros(), zeros()
    parameters = [zeros() for _ in range(_GROUPS)]
    bounds = [*range(0, NUMEL, chunk_numel), NUMEL]
    sent = [zeros() for _ in range(_GROUPS)]
    reduced = {
        start: [zeros(-(-(stop - start) // (_GROUPS * BLOCK)) * BLOCK) for _ in range(_GROUPS)]
        for start, stop in itertools.pairwise(bounds)
    }
    for step in range(2):
        for group, parameter in enumerate(parameters):
            parameter.sub_(vector(group, step))
        for start, stop in itertools.pairwise(bounds):
            chunk = slice(start, stop)
            own = [anchor[chunk] - parameter[chunk] for parameter in parameters]
            if step:
                own[3].zero_()
            moves = [mine - anchor[chunk] for mine in own]
            delta = summed(own, codec, [residual[chunk] for residual in sent], reduced[start]) / (3 if step else 4)
            momentum[chunk] = torch.add(delta, momentum[chunk], alpha=0.9)
            anchor[chunk] = anchor[chunk].add(delta, alpha=-0.7).add(momentum[chunk], alpha=-0.7 * 0.9)
            for parameter, move in zip(parameters, moves, strict=True):
                if spans_iterations:
                    parameter[chunk] += move + anchor[chunk]
                else:
                    parameter[chunk] = anchor[chunk]
    return anchor.cpu(), momentum.cpu()


@pytest.mark.parametrize("spans_iterations", [False, True])
@pytest.mark.parametrize("chunk_numel", [10_000, 300])
@pytest.mark.parametrize("codec", _LOSSY)
def test_low_bit_rounds_are_what_one_process_computes(
    records: list[dict[str, dict]], codec: str, chunk_numel: int, spans_iterations: bool
) -> None:
    found = records[0]["rounds"][codec, chunk_numel, spans_iterations]
    for key, expected in zip(("anchor", "momentum"), two_rounds(codec, chunk_numel, spans_iterations), strict=True):
        torch.testing.assert_close(found[key], expected, rtol=0, atol=0)


@pytest.mark.parametrize("chunk_numel", [10_000, 300])
@pytest.mark.parametrize("spans_iterations", [False, True])
def test_neither_chunks_nor_time_change_an_fp32_result(
    records: list[dict[str, dict]], chunk_numel: int, spans_iterations: bool
) -> None:
    rounds = records[0]["rounds"]
    expected, found = rounds["fp32", 10_000, False], rounds["fp32", chunk_numel, spans_iterations]
    for key in ("anchor", "momentum"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-5)


def test_rounds_are_nesterov_on_the_mean_of_those_that_contribute(records: list[dict[str, dict]]) -> None:
    # Group 3 contributes to the first round only; it follows the others all the same.
    anchor = torch.zeros(NUMEL, dtype=torch.float64)
    momentum = torch.zeros(NUMEL, dtype=torch.float64)
    for step, groups in enumerate((4, 3)):
        delta = exact_sum(step, groups) / groups
        momentum = 0.9 * momentum + delta
        anchor = anchor - 0.7 * (delta + 0.9 * momentum)
    found = records[0]["rounds"]["fp32", 300, False]
    torch.testing.assert_close(found["anchor"].double(), anchor, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["momentum"].double(), momentum, rtol=1e-5, atol=1e-5)
    assert torch.equal(found["parameters"], found["anchor"])


def test_groups_that_meet_sum_as_one_process_would(records: list[dict[str, dict]]) -> None:
    found = [record["met"] for record in records]
    for step in range(3):
        expected = vector(0, step).cpu() + vector(1, step).cpu() + vector(3, step).cpu()
        for rank in (0, 1, 3):
            assert torch.equal(found[rank]["sums"][step], expected)
        # One that sits out keeps what it has, whole.
        assert torch.equal(found[2]["sums"][step], vector(2, step).cpu())
    for rank in range(_GROUPS):
        assert found[rank]["sent"] == found[rank]["counted"]
        assert found[rank]["gathered"] == ([2] if rank == 2 else [0, 1, 3])
    assert [record["handed"][0] for record in found] == [0.0, 1.0, 2.0, 1.0]
