"""How long outer steps are waited for with their state on the device and on the host, and which mode the planner names."""

import argparse
import dataclasses
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pier_megatron import PierConfig
from pier_megatron.commands.plan import fit, model, waiting, ways
from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.model import Job, Plan, Prediction, Way, predict
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import GroupExchange, Wire
from pier_megatron.outer.rounds import OuterRound, Stopwatch
from pier_megatron.outer.rules import Nesterov
from pier_megatron.outer.staging import Staged, Staging
from pier_megatron.outer.state import OuterState, Shards
from pier_megatron.outer.verdicts import GOOD, Verdicts

# 7B on 64 A100 with TP 4, four to a node; a fast link of 80 GB/s. Iterations of 4 s.
_JOB = Job(flops=64 * 4e14, shard=1.75e9, gpus=64, tensor_parallel=4, replicas=16, groups=16)
_A100 = Cluster(4, 40e9, 1e14, 80e9, 30e9, 1.4e12, 20e9, overhead=0.0, latency=0.0)

# Half a ring of 16 for FP32, 4 shards a node: 52.5 GB at 80 GB/s; 11 passes over 7 GB, or 14; 32 bytes a parameter for a codec.
_WIRE, _BLOCKING_PASSES, _OVERLAPPED_PASSES, _CODING = 0.65625, 0.055, 0.07, 0.04
# A vector of FP32 at 20 GB/s; five that an overlapped step waits for, beside its passes.
_VECTOR = 0.35
_OVERLAPPED = 5 * _VECTOR


def test_blocking_step_hides_copies_or_is_hidden_behind_them() -> None:
    found = predict(_JOB, _A100)
    assert found.exposed(Way(50)) == pytest.approx(_WIRE + _BLOCKING_PASSES)
    # Anchor and momentum take as long as two vectors, 0.7 s, which is less than wire and passes together.
    assert found.exposed(Way(50, offload=True)) == pytest.approx(_WIRE + _BLOCKING_PASSES)
    hosted = predict(_JOB, dataclasses.replace(_A100, host_bandwidth=10e9))
    assert hosted.exposed(Way(50, offload=True)) == pytest.approx(4 * _VECTOR)
    slow = predict(_JOB, dataclasses.replace(_A100, node_bandwidth=40e9))
    assert slow.exposed(Way(50, offload=True)) == slow.exposed(Way(50)) == pytest.approx(2 * _WIRE + _BLOCKING_PASSES)
    # In int8 the residual goes along.
    assert found.exposed(Way(50, dtype="int8", offload=True)) == pytest.approx(3 * _VECTOR)
    assert found.exposed(Way(50, in_pairs=True, offload=True)) == pytest.approx(2 * _VECTOR)
    assert found.mean_iteration(Way(50, in_pairs=True, offload=True)) == pytest.approx(4 + 2 * _VECTOR / 50)


def test_overlapped_step_waits_for_all_copies() -> None:
    found = predict(_JOB, _A100)
    assert found.exposed(Way(50, 25)) == pytest.approx(_OVERLAPPED_PASSES)
    for overlap in (2, 25):
        assert found.exposed(Way(50, overlap, offload=True)) == pytest.approx(_OVERLAPPED)
        # The residual is waited for, too.
        assert found.exposed(Way(50, overlap, dtype="int8", offload=True)) == pytest.approx(6 * _VECTOR)
    quick = predict(_JOB, dataclasses.replace(_A100, host_bandwidth=1e12))
    assert quick.exposed(Way(50, 25, offload=True)) == pytest.approx(_OVERLAPPED_PASSES)


def test_passes_are_those_that_the_page_counts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    counted = re.search(r"^\| passes \| (\d+) 1/16 \| (\d+) 1/16 \|$", page, re.MULTILINE)
    assert counted is not None
    found = predict(_JOB, _A100)
    for seconds, passes in zip((found.passes, found.overlapped_passes), counted.groups(), strict=True):
        assert seconds == pytest.approx(int(passes) * 4 * _JOB.owned / _A100.memory_bandwidth)


@dataclasses.dataclass
class _Copied:
    """Bytes a parameter that a round has copied to the device."""

    inward: float = 0.0


@pytest.fixture(name="copied")
def _copied() -> Iterator[_Copied]:
    found, read = _Copied(), Staging.read

    def counting(staging: Staging, staged: Staged, names: Collection[str]) -> None:
        found.inward += 4 * staged.chunk.numel * len((set(names) & staged.homes.keys()) - staged.present) / staging.state.numel
        read(staging, staged, names)

    with mock.patch.object(Staging, "read", counting):
        yield found


def _round(dtype: str) -> OuterRound:
    exchange, device = GroupExchange(codec=CODECS[dtype]), torch.device("cpu")
    exchange.wire = Wire(exchange.codec, 2)
    segment = None if exchange.codec.lossless else exchange.wire.segment_numel
    state = OuterState([Shards([torch.randn(48)])], chunk_numel=1, offload=True, segment_numel=segment)
    verdicts = Verdicts(exchange, GOOD, device)
    return OuterRound([Staging(state)], exchange, (0,), Nesterov(0.9, 0.7), verdicts, 1, Stopwatch(device), device)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("span", [1, 2, 3, 26])
def test_bytes_are_those_that_rounds_copy(copied: _Copied, dtype: str, span: int) -> None:
    _round(dtype).run()
    assert copied.inward == pytest.approx(model.copied_by_blocking(dtype))
    copied.inward, overlapped = 0.0, _round(dtype)
    overlapped.begin()
    for age in range(span):
        overlapped.proceed(age, span)
    overlapped.finish()
    assert copied.inward == pytest.approx(model.copied_by_overlapped(dtype))


def waits(monkeypatch: pytest.MonkeyPatch, there: float = 40e9, cluster: Cluster = _A100, **settings: Any) -> Plan:
    """What the planner says of a job whose state takes 14 GB beside 24."""

    def memory_of(args: argparse.Namespace, config: PierConfig) -> dict[str, float]:
        return {"state": 24e9 + (0 if config.offload else 8 * _JOB.owned)}

    def changed(args: argparse.Namespace, config: PierConfig, **changes: Any) -> PierConfig | None:
        return None if config.lighthouse is not None and changes["overlap"] else dataclasses.replace(config, **changes)

    monkeypatch.setattr(fit, "memory_of", memory_of)
    monkeypatch.setattr(fit, "changed_settings", changed)
    config = PierConfig(**({"train_iters": 100_000, "groups": 16} | settings))
    args = argparse.Namespace(recompute_granularity=None)
    return waiting.waits(args, config, predict(_JOB, cluster), there)


def test_fastest_of_four_modes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = waits(monkeypatch, overlap=25, offload=True)
    assert {name: mode["seconds"] for name, mode in found["modes"].items()} == {
        "overlapped by 25 with --pier-offload": pytest.approx(_OVERLAPPED),
        "blocking with --pier-offload": pytest.approx(_WIRE + _BLOCKING_PASSES),
        "overlapped by 25": pytest.approx(0.07),
        "blocking": pytest.approx(_WIRE + _BLOCKING_PASSES),
    }
    assert found["fastest"] == "overlapped by 25"
    *_, said = waiting.lines(found, 50, 4.0)
    # Of 50 iterations of 4 s and what the job waits for, 200.8 s.
    assert said == "faster, and fits: --pier-overlap 25 without --pier-offload saves 1,680 ms, 0.8% of the interval"


def test_what_does_not_fit_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a slower link, that an overlap hides.
    slow = dataclasses.replace(_A100, node_bandwidth=20e9)
    found = waits(monkeypatch, there=30e9, cluster=slow, offload=True)
    shown, said = waiting.lines(found, 50, 4.0)
    assert said == "faster, and fits: --pier-overlap 25 --pier-offload saves 930 ms, 0.5% of the interval"
    assert shown == (
        "waited for in each interval (H = 50): 70 ms overlapped by 25 (does not fit); 1,750 ms overlapped by 25 with "
        "--pier-offload; 2,680 ms blocking with --pier-offload (this job); 2,680 ms blocking (does not fit)"
    )
    shown, said = waiting.lines(waits(monkeypatch, there=30e9), 50, 4.0)
    assert "711 ms blocking (this job, does not fit)" in shown
    assert said == "fastest of these that fits: --pier-overlap 0 --pier-offload"
    assert waiting.lines(waits(monkeypatch, there=20e9), 50, 4.0)[1] == "none of these fits"


def test_job_that_waits_least_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in ({"overlap": 10}, {"sync_interval": 1}):
        found = waits(monkeypatch, **settings)
        assert waiting.lines(found, 50, 4.0)[1] == "of these that fit, this job's is the fastest"
    # Blocking on a slow link the host's copies cost nothing.
    slow = dataclasses.replace(_A100, node_bandwidth=1e9)
    found = waits(monkeypatch, cluster=slow, offload=True, sync_interval=1)
    assert found["fastest"] == found["job"] == "blocking with --pier-offload"
    assert set(found["modes"]) == {"blocking", "blocking with --pier-offload"}


@pytest.mark.parametrize("seconds", [0.7, 0.70051])
def test_a_millionth_of_a_second_is_no_reason_to_change(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(Prediction, "exposed", lambda prediction, way: seconds - 1e-6 * way.overlap)
    for overlap in (0, 25):
        found = waits(monkeypatch, overlap=overlap, offload=True)
        assert found["fastest"] == found["job"]


def test_modes_that_would_not_start_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = waits(monkeypatch, lighthouse="http://127.0.0.1:29510", island=0, lazy_start_iters=0)
    assert set(found["modes"]) == {"blocking", "blocking with --pier-offload"}


def test_tables_count_the_copies_of_the_job() -> None:
    # On a host of half the speed, on which a blocking step waits for its copies.
    cluster, vector = dataclasses.replace(_A100, host_bandwidth=10e9), 2 * _VECTOR
    prediction = predict(_JOB, cluster)
    copying = 2 * vector - _WIRE - _BLOCKING_PASSES
    on_device, on_host = (PierConfig(100_000, groups=16, overlap=25, offload=offload) for offload in (False, True))
    assert ways.of_job(on_host) == dataclasses.replace(ways.of_job(on_device), offload=True)
    (device, own), (host, own_on_host) = (ways.modes(prediction, config) for config in (on_device, on_host))
    assert own == own_on_host == "Pier, H = 50, overlapped by H / 2"
    assert host[own] - device[own] == pytest.approx(0.9 * (2 * _OVERLAPPED - _OVERLAPPED_PASSES) / 50)
    name = "DiLoCo from the first iteration, H = 50"
    assert host[name] - device[name] == pytest.approx(copying / 50)
