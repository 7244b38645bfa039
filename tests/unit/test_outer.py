"""The flat buffers and their updates against the formulas, on one process."""

import pytest
import torch

from pier_megatron import PierConfig
from pier_megatron.integration import startup
from pier_megatron.outer import CODECS, GOOD, NOT_FINITE, GroupExchange, OuterRound, OuterState, Part, Staging, momentum_warmup

EXCHANGE = GroupExchange()


def shards(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in (5, 1, 17)]


def outer_round(
    state: OuterState, mu: float = 0.9, eta: float = 0.7, contributes: bool = True, fragments: tuple[int, ...] = (0,)
) -> OuterRound:
    return OuterRound([Staging(state)], EXCHANGE, fragments, mu, eta, GOOD if contributes else NOT_FINITE)


# How the state may be cut and kept; none of it may change a result.
LAYOUTS = [
    {},
    {"chunk_numel": 4},
    {"chunk_numel": 1},
    {"chunk_numel": 7, "offload": True},
    {"chunk_numel": 100, "offload": True},
]


def test_starts_at_the_parameters_without_momentum() -> None:
    state = OuterState([Part(shards())])
    torch.testing.assert_close(state.anchor, torch.cat(shards()), rtol=0, atol=0)
    assert not state.momentum.any()
    assert (state.numel, state.nbytes) == (23, 8 * 23)


def cut(parts: list[Part], **layout: int) -> list[tuple[int, int, int]]:
    return [(chunk.start, chunk.numel, chunk.fragment) for chunk in OuterState(parts, **layout).chunks]


@pytest.mark.parametrize("chunk_numel", [1, 4, 5, 6, 23, 100])
@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_chunks_cover_everything_once_and_lie_in_one_fragment_and_part(chunk_numel: int, fragments: int) -> None:
    first, *rest = shards()
    state = OuterState([Part(rest), Part([first], is_counted=False)], chunk_numel=chunk_numel, fragments=fragments)
    covered = [position for chunk in state.chunks for position in range(chunk.start, chunk.start + chunk.numel)]
    assert covered == list(range(23))
    assert max(chunk.numel for chunk in state.chunks) <= chunk_numel
    assert sum(chunk.numel for chunk in state.chunks if chunk.part.is_counted) == 18
    sizes = [sum(chunk.numel for chunk in state.chunks if chunk.fragment == f) for f in range(fragments)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("layout", [{"chunk_numel": 4}, {"chunk_numel": 7, "fragments": 3}])
def test_copies_on_other_ranks_are_cut_alike(layout: dict[str, int]) -> None:
    first, *rest = shards()
    counted, not_counted = ([Part(rest), Part([first], is_counted=counts)] for counts in (True, False))
    assert cut(counted, **layout) == cut(not_counted, **layout)


def test_tied_parameters_come_in_the_last_fragment() -> None:
    first, *rest = shards()
    state = OuterState([Part(rest), Part([first], is_tied=True)], fragments=3)
    assert {chunk.fragment for chunk in state.chunks if chunk.part.is_tied} == {2}
    # Elsewhere they may come with fewer other parameters; those before them are divided as if they were not there.
    assert [chunk.fragment for chunk in state.chunks if not chunk.part.is_tied] == [0, 1, 2]


def test_half_precision_shards_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.bfloat16"):
        OuterState([Part([torch.zeros(3, dtype=torch.bfloat16)])])


def test_rank_without_parameters() -> None:
    state = OuterState([])
    outer_round(state).run()
    assert state.numel == 0
    assert state.parameters_are_finite()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_momentum_warmup_does_not_move_the_parameters(layout: dict[str, int]) -> None:
    parameters = shards()
    state = OuterState([Part(parameters)], **layout)
    state.momentum.fill_(2.0)
    before = state.anchor.clone()
    for parameter in parameters:
        parameter.add_(0.5)
    momentum_warmup([Staging(state)], mu=0.9)
    torch.testing.assert_close(state.momentum, torch.full_like(before, 0.9 * 2.0 - 0.5))
    torch.testing.assert_close(state.anchor, torch.cat(parameters), rtol=0, atol=0)
    torch.testing.assert_close(state.anchor, before + 0.5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spans_iterations", [False, True])
def test_outer_step_is_nesterov(layout: dict[str, int], spans_iterations: bool) -> None:
    parameters = shards()
    state = OuterState([Part(parameters)], **layout)
    anchor, momentum = state.anchor.clone().double(), torch.linspace(-1, 1, 23)
    state.momentum.copy_(momentum)
    for parameter in parameters:
        parameter.mul_(0.9).add_(0.1)
    delta = anchor - torch.cat(parameters).double()
    round_ = outer_round(state)
    progress = torch.zeros(23)
    if spans_iterations:
        round_.begin()
        round_.advance()
        progress = torch.linspace(-0.3, 0.3, 23)
        for parameter, step in zip(parameters, progress.split([5, 1, 17]), strict=True):
            parameter.add_(step)
        round_.finish()
    else:
        round_.run()
    expected_momentum = 0.9 * momentum.double() + delta
    expected = anchor - 0.7 * (delta + 0.9 * expected_momentum)
    torch.testing.assert_close(state.momentum.double(), expected_momentum, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.anchor.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(parameters), state.anchor + progress, rtol=1e-5, atol=1e-6)
    norms = torch.stack([delta @ delta, delta @ delta, delta @ delta, expected_momentum @ expected_momentum])
    torch.testing.assert_close(round_.sums, norms, rtol=1e-4, atol=1e-6)


def test_blocking_step_leaves_parameters_and_anchor_equal_to_the_last_bit() -> None:
    parameters = shards()
    state = OuterState([Part(parameters)], chunk_numel=4)
    for parameter in parameters:
        parameter.mul_(0.9)
    outer_round(state).run()
    assert torch.equal(torch.cat(parameters), state.anchor)


def test_fragment_leaves_the_others_alone() -> None:
    parameters = shards()
    state = OuterState([Part(parameters)], chunk_numel=4, fragments=2)
    anchor = state.anchor.clone()
    for parameter in parameters:
        parameter.mul_(0.9)
    before = torch.cat(parameters)
    outer_round(state, fragments=(1,)).run()
    assert torch.equal(torch.cat(parameters)[:11], before[:11])
    assert torch.equal(state.anchor[:11], anchor[:11])
    assert not state.momentum[:11].any()
    assert (state.anchor[11:] != anchor[11:]).all()


def test_unit_step_of_a_single_group_is_the_identity_to_the_last_bit() -> None:
    # (anchor - (anchor - p)) == p does not hold in floating point, for example here.
    anchor, parameter = torch.tensor([1e-3]), torch.tensor([-3.1415926e-8])
    assert anchor - (anchor - parameter) != parameter
    shard = anchor.clone()
    state = OuterState([Part([shard])])
    shard.copy_(parameter)
    outer_round(state, mu=0.0, eta=1.0).run()
    assert shard == parameter
    assert state.anchor == parameter


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_sees_parameters_that_are_not_finite(value: float) -> None:
    parameters = shards()
    state = OuterState([Part(parameters)])
    assert state.parameters_are_finite()
    parameters[2][11] = value
    assert not state.parameters_are_finite()


@pytest.mark.parametrize("spans_iterations", [False, True])
def test_group_left_out_moves_to_the_others_and_poisons_nothing(spans_iterations: bool) -> None:
    parameters = shards()
    state = OuterState([Part(parameters)])
    anchor = state.anchor.clone()
    parameters[0].fill_(float("nan"))
    round_ = outer_round(state, contributes=False)
    round_._verdicts = torch.tensor([GOOD])  # As if another group had contributed, and not moved.
    if spans_iterations:
        round_.begin()
        round_.advance()
        round_.finish()
    else:
        round_.run()
    torch.testing.assert_close(state.anchor, anchor)
    torch.testing.assert_close(torch.cat(parameters), anchor)
    assert state.momentum.isfinite().all()


def test_bytes_of_a_sum() -> None:
    exchange = GroupExchange()
    assert exchange.bytes_of_sum(1000) == 0
    exchange.size = 4
    assert exchange.bytes_of_sum(1000) == 6000


@pytest.mark.parametrize(
    ("overlap", "fragments", "offload", "dtype"),
    [(0, 1, False, "fp32"), (0, 1, True, "fp32"), (10, 1, False, "fp32"), (10, 5, True, "int8"), (0, 5, False, "int8")],
)
def test_memory_is_what_the_start_says(overlap: int, fragments: int, offload: bool, dtype: str) -> None:
    config = PierConfig(
        1000, 2, lazy_start_iters=0, overlap=overlap, fragments=fragments, offload=offload, exchange_dtype=dtype, chunk_mib=1
    )
    feedback = None if dtype == "fp32" else GroupExchange(None, CODECS[dtype]).segment_numel
    state = OuterState([Part([torch.randn(3_000_000)])], 2**18, fragments, offload, feedback)
    staging = Staging(state)
    held = [*state.flats.values(), *state.reduced_residuals.values()]
    assert state.nbytes == sum(buffer.nbytes for buffer in held)
    # As many rounds at once as there ever are.
    rounds = []
    for iteration in range(1, 101):
        due = config.fragments_due(iteration)
        if due:
            rounds.append((iteration, OuterRound([staging], EXCHANGE, due, 0.9, 0.7, GOOD)))
            if overlap:
                rounds[-1][1].begin()
        for begun, round_ in list(rounds):
            if not overlap:
                round_.run()
                rounds.remove((begun, round_))
            elif iteration - begun == overlap:
                round_.finish()
                rounds.remove((begun, round_))
    for _, round_ in rounds:
        round_.finish()
    lent = sum(buffer.nbytes for buffers in staging._free for buffer in buffers)
    spare = 2 * state.chunks[0].numel * Staging.bytes_per_element(state)
    assert lent <= startup._working_bytes(config, [state]) <= lent + spare
