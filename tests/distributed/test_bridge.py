"""Megatron-Bridge trains as flags do, with the same promises."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch
from launch import Recorded, Run, launch

pytestmark = pytest.mark.processes

_BRIDGE = Path(os.environ.get("MEGATRON_BRIDGE_PATH", Path(sys.prefix) / "bridge"))
if not (_BRIDGE / "megatron" / "bridge").is_dir():
    pytest.skip(f"Megatron-Bridge is not in {_BRIDGE}: make test installs it there", allow_module_level=True)

# Lazy start to 3, outer steps at 6, 9 and 12.
_PIER = {"groups": 2, "sync_interval": 3, "lazy_start_iters": 3}


def flags(**pier: object) -> str:
    """The command line of a run with Pier."""
    words = [f"--pier-{name.replace('_', '-')} {value}" for name, value in (_PIER | pier).items()]
    return " ".join(["--train-iters 12 --global-batch-size 8 --optimizer pier", *words])


def config(*settings: str, **pier: object) -> str:
    """The same as settings of a configuration."""
    return " ".join([*(f"pier.{name}={value}" for name, value in (_PIER | pier).items()), *settings])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    probes = ["main", "moments", "outer", "census"]
    trainings = [
        Run("flags", flags(), probes),
        Run("bridge", config(), probes),
    ]
    return launch(tmp_path_factory.mktemp("bridge"), corpus, trainings, 2, _BRIDGE, "bridge_recorder")


def test_bridge_equals_flags(runs: dict[str, Recorded]) -> None:
    for ours, theirs in zip(runs["bridge"].ranks, runs["flags"].ranks, strict=True):
        for name in ("main", "moments"):
            for iteration in range(1, 13):
                assert torch.equal(ours[name][iteration], theirs[name][iteration]), (name, iteration)
