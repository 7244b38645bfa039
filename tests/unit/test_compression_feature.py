"""What ``--pier-compress`` means for a run; through Megatron's own parser in ``end_to_end/test_arguments.py``."""

import argparse
from typing import Any
from unittest import mock

import one_gpu
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.codecs import BLOCK, CODECS, padded
from pier_megatron.exchange.coding import decode, encode
from pier_megatron.experiments.compression import activations, layout, traffic
from pier_megatron.experiments.compression import feature as compression
from pier_megatron.experiments.compression.layout import pieces
from pier_megatron.experiments.compression.policy import DIMENSIONS, POLICIES, parse_policy
from pier_megatron.megatron_api import run

DEVICE = one_gpu.device()


def args(**changes: Any) -> argparse.Namespace:
    """Arguments of two tensor-parallel ranks, two stages and four replicas, in bf16."""
    given = dict.fromkeys(("pier_exchange_dtype", "pier_preset", "pier_subgroup_size", "pier_groups"))
    given |= dict.fromkeys(("pier", "sequence_parallel", "fp32_residual_connection", "fp16"), False)
    given |= {
        "pier_compress": "naive",
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "data_parallel_size": 4,
        "num_distributed_optimizer_instances": 1,
        "use_distributed_optimizer": True,
        "accumulate_allreduce_grads_in_fp32": True,
        "transformer_impl": "local",
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "rank": 0,
    }
    return argparse.Namespace(**given | changes)


def names(text: str) -> dict[str, str]:
    return {dimension: codec.name for dimension, codec in parse_policy(text)[0].items()}


def test_policies_say_something_about_dimensions_only() -> None:
    for policy, codecs in POLICIES.items():
        assert names(policy) == codecs
        assert codecs.keys() <= DIMENSIONS.keys()


@pytest.mark.parametrize(
    ("text", "codecs", "named"),
    [
        ("dp=int4", {"dp": "int4"}, {"dp"}),
        ("hybrid,pp=int8", {"dp": "int8", "pp": "int8", "outer": "int8"}, {"pp"}),
        ("hybrid, outer=off", {"dp": "int8", "pp": "bf16"}, {"outer"}),
        ("dp=int4,hybrid", {"dp": "int8", "pp": "bf16", "outer": "int8"}, {"dp"}),
        ("naive,dp=off,dp=int4", {**POLICIES["naive"], "dp": "int4"}, {"dp"}),
    ],
)
def test_what_comes_later_counts(text: str, codecs: dict[str, str], named: set[str]) -> None:
    assert names(text) == codecs
    assert parse_policy(text)[1] == named


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, {}),
        ({"data_parallel_size": 1}, {"dp": "there is one model replica", "gather": "each group is one model replica"}),
        ({"pipeline_model_parallel_size": 1}, {"pp": "nothing travels between stages"}),
        ({"tensor_model_parallel_size": 1}, {"tp": "nothing travels between tensor-parallel ranks"}),
        ({"sequence_parallel": True}, {"tp": "--sequence-parallel"}),
        ({"use_distributed_optimizer": False}, {"gather": "no parameters are gathered"}),
        ({"params_dtype": torch.float32, "bf16": False}, {"gather": "must not be rounded"}),
        ({"use_precision_aware_optimizer": True}, {"gather": "halves of the main parameters"}),
        ({"fp8_param_gather": True}, {"gather": "fewer bits already"}),
        ({"num_distributed_optimizer_instances": 4}, {"gather": "gathers nothing"}),
        (
            {"pier_compress": "naive,dp=bf16", "grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": False},
            {"dp": "bf16 already"},
        ),
        (
            {
                "pier_compress": "naive,dp=bf16",
                "bf16": False,
                "fp16": True,
                "params_dtype": torch.float16,
                "accumulate_allreduce_grads_in_fp32": False,
            },
            {"dp": "with --fp16 they have 16 bits already"},
        ),
        ({"pier_compress": "naive,pp=bf16"}, {"pp": "16 bits already"}),
        ({"pier_compress": "naive,tp=bf16"}, {"tp": "16 bits already"}),
        ({"pier_compress": "naive,gather=bf16"}, {"gather": "16 bits already"}),
    ],
)
def test_what_is_left_out(changes: dict[str, Any], reasons: dict[str, str]) -> None:
    given = args(**changes)
    codecs, named = parse_policy(given.pier_compress)
    if not named:
        assert set(compression.compressed(given)) == {"dp", "pp", "gather", "tp"} - reasons.keys()
        said = dict(line.strip().split(": ", 1) for line in compression.describe(given)[1:])
        assert all(reason in said[dimension].partition(": as they are: ")[2] for dimension, reason in reasons.items())
    for dimension, reason in reasons.items():
        alone = argparse.Namespace(**vars(given) | {"pier_compress": f"{dimension}={codecs[dimension].name}"})
        with pytest.raises(PierConfigError, match=f"{dimension}={codecs[dimension].name} is not possible: .*{reason}"):
            compression.compressed(alone)


def test_a_stream_of_32_bits_between_stages_is_halved_and_a_policy_without_a_codec_refused() -> None:
    assert compression.compressed(args(pier_compress="pp=bf16", fp32_residual_connection=True))["pp"].name == "bf16"
    with pytest.raises(PierConfigError, match=r"--pier-compress dp=off compresses nothing in this run: all is off\. Drop it"):
        compression.compressed(args(pier_compress="dp=off"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_megatron_fsdp": True}, ["--use-megatron-fsdp", "dp=off,gather=off"]),
        ({"use_torch_fsdp2": True}, ["--use-torch-fsdp2", "dp=off,gather=off"]),
        ({"use_ring_exchange_p2p": True}, ["--use-ring-exchange-p2p", "pp=off"]),
        ({"pier_compress": "aggressive", "fp16": True, "bf16": False}, ["int4", "loss scale", "Use --bf16, or dp=int8"]),
        ({"cuda_graph_impl": "full_iteration"}, ["CUDA graphs of the full iteration", "Capture layers"]),
    ],
)
def test_what_cannot_go_together(changes: dict[str, Any], words: list[str]) -> None:
    given = args(**changes)
    with pytest.raises(PierConfigError) as error:
        compression.check_other_flags(given, compression.compressed(given))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("policy", "given", "pier", "becomes"),
    [
        ("hybrid", "fp32", True, "fp32"),
        ("hybrid,outer=int4", None, True, "int4"),
        ("hybrid,outer=int8", "int8", True, "int8"),
        ("hybrid", None, False, None),
    ],
)
def test_the_outer_step_has_a_flag_of_its_own(policy: str, given: str | None, pier: bool, becomes: str | None) -> None:
    arguments = args(pier_compress=policy, pier_exchange_dtype=given, pier=pier)
    compression.prepare(arguments)
    assert arguments.pier_exchange_dtype == becomes


def test_groups_in_pairs_send_weights() -> None:
    for pairs in ({"pier_preset": "noloco"}, {"pier_subgroup_size": 2}):
        arguments = args(pier_compress="hybrid", pier=True, **pairs)
        compression.prepare(arguments)
        assert arguments.pier_exchange_dtype is None
        assert "outer" not in compression.compressed(arguments)


def test_a_run_begins_with_nothing_in_force() -> None:
    traffic.put_in_force(parse_policy("naive")[0])
    run.begin()
    assert all(traffic.codec_in_force(dimension) is None for dimension in DIMENSIONS)
    assert not compression.is_used(args(pier_compress=None))


def test_what_is_kept_of_gradients_is_told() -> None:
    given = args(pier_compress="aggressive")
    assert sorted(compression.cost(given).per_parameter.values()) == [2 * (1 / 2 + 4 / 128), 4]
    assert any("dp: gradients" in line and "4 bytes per parameter" in line for line in compression.describe(given))
    assert list(compression.cost(args(pier_compress="hybrid")).per_parameter.values()) == [2 * (1 + 4 / 128)]


def test_bytes_are_means_over_the_iterations_since_the_last_log() -> None:
    run.begin()
    traffic.put_in_force(parse_policy("dp=int8,pp=bf16")[0])
    lines: list[str] = []
    modules = {"print_rank_last": lines.append, "get_tensorboard_writer": lambda: None}

    def training_log(losses: Any, iteration: int) -> None: ...

    with (
        mock.patch.object(traffic.versions, "megatron_args", return_value=argparse.Namespace(log_interval=2, iteration=2)),
        mock.patch.object(traffic.versions, "require", lambda module, name: modules[name]),
    ):
        for iteration in (3, 4, 5, 6):
            traffic.count("dp", iteration * 1e6, 4e6 * iteration)
            traffic.log(training_log, {}, iteration)
    assert [line.split(": ")[1] for line in lines] == [
        "3.500 MB in int8, 14.000 MB without",
        "5.500 MB in int8, 22.000 MB without",
    ]


_STEPS = {"bf16": 2**-8, "int12": 0.5001 / 2047, "int8": 0.5001 / 127, "int4": 0.5001 / 7, "int2": 0.51 / 2, "int1": 0.51}


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    name=st.sampled_from([*_STEPS]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    magnitude=st.floats(-3, 3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_any_tensor_arrives_within_half_a_step(
    shape: tuple[int, ...], name: str, dtype: torch.dtype, magnitude: float, seed: int
) -> None:
    codec = CODECS[name]
    original = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10**magnitude).to(DEVICE, dtype)
    payload = activations.pack(original, codec)
    assert payload.shape == (1, codec.nbytes(padded(original.numel())))
    arrived = torch.empty_like(original, requires_grad=True)
    activations.unpack(payload, codec, arrived)
    # The step of a block, plus the rounding of the tensor's own type.
    bound = _STEPS[name] * original.float().abs().max() + torch.finfo(dtype).eps * original.float().abs()
    assert ((arrived.float() - original.float()).abs() <= bound + torch.finfo(dtype).tiny).all()


def through(codec: str, buffer: torch.Tensor, parts: int, parameters: list[tuple[int, int]]) -> torch.Tensor:
    """What arrives of a buffer that is cut into parts; where nothing is sent it stays zero."""
    arrived = torch.zeros_like(buffer)
    for piece in pieces(len(buffer), parts, parameters):
        rows = piece.read(buffer.view(parts, -1))
        assert rows.shape == (parts, piece.numel)
        assert piece.numel % BLOCK == 0
        piece.write(decode(CODECS[codec], encode(CODECS[codec], rows)), arrived.view(parts, -1))
    return arrived


# Several parameters, some cut by the end of a part, with room between them and behind them.
_PARAMETERS = [(0, 96), (96, 500), (512, 1024), (1024, 1025), (1088, 1500)]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("blocks_at_once", [1, 2, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_has_one_place(parts: int, blocks_at_once: int, dtype: torch.dtype) -> None:
    buffer = torch.zeros(1536, dtype=dtype)
    for low, high in _PARAMETERS:
        buffer[low:high] = torch.randn(high - low)
    with mock.patch.object(layout, "_PIECE", blocks_at_once * parts * BLOCK):
        assert torch.equal(through("fp32", buffer, parts, _PARAMETERS), buffer)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_neighbours_do_not_matter(codec: str, parts: int) -> None:
    own = torch.randn(1536) * 1e-6
    low, high = _PARAMETERS[1]
    arrived = [torch.zeros(1536)] * 2
    for rank in range(2):
        buffer = torch.randn(1536, generator=torch.Generator().manual_seed(rank)) * 10**rank
        buffer[low:high] = own[low:high]
        arrived[rank] = through(codec, buffer, parts, _PARAMETERS)[low:high]
    assert torch.equal(*arrived)
    # However much larger the neighbours are.
    assert torch.linalg.vector_norm(arrived[0] - own[low:high]) < 0.2 * torch.linalg.vector_norm(own[low:high])


def test_whole_blocks_are_not_copied() -> None:
    buffer = torch.randn(4 * BLOCK)
    [piece] = pieces(4 * BLOCK, 2, [(0, BLOCK), (BLOCK, 4 * BLOCK)])
    assert piece.read(buffer.view(2, -1)).data_ptr() == buffer.data_ptr()
