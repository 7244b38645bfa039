"""Kinds of jobs that people run, shrunk: the lazy start is stock's to the last bit, and outer steps bring groups together."""

import math
from pathlib import Path

import pytest
import torch
from launch import Recorded, Run, launch

pytestmark = pytest.mark.processes

_ROTARY = "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-token-dispatcher-type alltoall "
_JOBS = {
    "grouped queries": f"{_ROTARY} --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights --bf16",
    "multi-latent attention": f"{_ROTARY} --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 --bf16",
    "DeepSeek": f"{_EXPERTS} --swiglu --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --moe-shared-expert-intermediate-size 32 "
    "--moe-layer-freq [0,1] --moe-ffn-hidden-size 32 --expert-model-parallel-size 2 --bf16",
    "norms of queries and keys": f"{_ROTARY} --qk-layernorm --tensor-model-parallel-size 2 --bf16",
    "muP": "--use-mup --mup-base-hidden-size 16",
    "decoupled rates": "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4",
    "loss per token": "--calculate-per-token-loss --reset-attention-mask --reset-position-ids --eod-mask-loss",
    "sandwich layout": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL "
    "--untie-embeddings-and-output-weights",
    "recomputation": "--overlap-grad-reduce --overlap-param-gather --bf16 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "a growing batch": "--rampup-batch-size 8 8 32 --global-batch-size 16",
}
_STOCK = "--train-iters 2 --use-distributed-optimizer --num-distributed-optimizer-instances 2"
_PIER = "--train-iters 6 --optimizer pier --pier-groups 2 --pier-sync-interval 2 --pier-lazy-start-iters 2 "
_PROBES = ["main", "weights"]


def _batch(job: str) -> str:
    return "" if "--global-batch-size" in job or "--rampup" in job else "--global-batch-size 16 "


def _stand_in(job: str) -> list[str]:
    return ["latent attention"] if "--multi-latent-attention" in job else []


_RUNS = [
    run
    for name, job in _JOBS.items()
    for run in (
        Run(f"stock, {name}", f"{job} {_batch(job)} {_STOCK}", [], _stand_in(job)),
        Run(name, f"{job} {_batch(job)} {_PIER}", _PROBES, _stand_in(job)),
    )
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    return launch(tmp_path_factory.mktemp("jobs"), corpus, _RUNS)


@pytest.mark.parametrize("name", _JOBS)
def test_job_trains_to_its_second_outer_step(runs: dict[str, Recorded], name: str) -> None:
    run, stock = runs[name], runs[f"stock, {name}"]
    assert [run.losses[t] for t in (1, 2)] == [stock.losses[t] for t in (1, 2)]
    assert all(map(math.isfinite, run.losses.values()))
    assert set(run.losses) == {1, 2, 3, 4, 5, 6}
    for one, other in zip(run.of_group(0), run.of_group(1), strict=True):
        for iteration, are_together in ((4, True), (5, False), (6, True)):
            assert torch.equal(one["main"][iteration], other["main"][iteration]) is are_together


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("multi-latent attention", "linear_kv_down_proj"),
        ("norms of queries and keys", "q_layernorm"),
        ("DeepSeek", "shared_experts"),
        ("DeepSeek", "expert_bias"),
    ],
)
def test_model_is_the_one_that_the_flags_name(runs: dict[str, Recorded], name: str, weight: str) -> None:
    assert any(weight in key for key in runs[name].weights("final"))
    assert not any(weight in key for key in runs["muP"].weights("final"))


def test_norm_is_the_one_that_the_flag_names(runs: dict[str, Recorded]) -> None:
    # RMSNorm has no bias.
    assert not any("layernorm" in key and key.endswith("bias") for key in runs["grouped queries"].weights("final"))
