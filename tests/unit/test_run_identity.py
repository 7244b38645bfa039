"""What elastic islands compare before they exchange anything."""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pier_megatron import PierConfig
from pier_megatron.integration import run_identity
from pier_megatron.version import __version__

_DOCS = Path(__file__).parents[2] / "docs" / "islands.md"


def args(**changes: Any) -> argparse.Namespace:
    given = {
        "global_batch_size": 8,
        "lr": 1e-3,
        "bf16": True,
        "seed": 1,
        "data_path": ["0.5", "/here/code", "0.5", "/here/prose"],
        "micro_batch_size": 1,
        "rank": 0,
        "save": "/here/checkpoints",
        "log_interval": 1,
        "recompute_granularity": None,
        "pier_island": 0,
    }
    return argparse.Namespace(**given | changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_batch_size", 16),
        ("lr", 2e-3),
        ("bf16", False),
        ("seed", 2),
        ("data_path", ["0.4", "/here/code", "0.6", "/here/prose"]),
        ("data_path", ["0.5", "/here/code", "0.5", "/here/poems"]),
        ("pier_compress", "dp=int4"),
        ("pier_skip_seed", 1),
        ("an_argument_of_the_script", "x"),
    ],
)
def test_what_changes_the_mathematics_is_compared(name: str, value: object) -> None:
    here, there = (run_identity.arguments_in_common(found) for found in (args(), args(**{name: value})))
    different = {flag for flag in here.keys() | there.keys() if here.get(flag) != there.get(flag)}
    assert different == {f"--{name.replace('_', '-')}"}


def test_where_and_how_fast_may_differ() -> None:
    elsewhere = args(
        data_path=["0.5", "/there/code", "0.5", "/there/prose"],
        micro_batch_size=2,
        rank=1,
        save="/there/checkpoints",
        log_interval=10,
        recompute_granularity="full",
        pier_island=1,
    )
    assert run_identity.arguments_in_common(args()) == run_identity.arguments_in_common(elsewhere)


def test_data_is_compared_by_name_and_size(tmp_path: Path) -> None:
    found = []
    for site, content in (("a", b"1234"), ("b", b"1234"), ("c", b"12345")):
        (tmp_path / site).mkdir()
        (tmp_path / site / "text.bin").write_bytes(content)
        found.append(run_identity.arguments_in_common(args(data_path=[str(tmp_path / site / "text")])))
    assert found[0] == found[1] != found[2]
    assert found[2]["--data-path"] == ["text of 5 bytes"]


def test_page_lists_what_may_differ() -> None:
    page = _DOCS.read_text()
    missing = [name for name in run_identity.MAY_DIFFER if f"`{name.strip('_').replace('_', '-')}" not in page]
    assert missing == []


def test_where_an_island_goes_on_is_not_compared() -> None:
    # Megatron's --use-checkpoint-args puts it among the arguments.
    assert run_identity.arguments_in_common(args(iteration=500)) == run_identity.arguments_in_common(args())
    skipped = run_identity.arguments_in_common(args(iterations_to_skip=[3]))
    assert skipped["--iterations-to-skip"] == [3]


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_other_code_of_the_same_name_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: dist.ProcessGroup
) -> None:
    """The plugin's of the same version, and an outer rule's."""
    copy, rule = tmp_path / "pier_megatron", tmp_path / "rules_of_islands.py"
    shutil.copytree(run_identity.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    rule.write_text("from pier_megatron.outer import OuterRule\n\nclass Rule(OuterRule):\n    def step(self, *_): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = PierConfig(train_iters=1000, groups=2, outer_rule="rules_of_islands:Rule")

    def code() -> tuple[str, str]:
        found = run_identity.in_common(args(optimizer="adam"), config, [], world, torch.device("cpu"))
        return found["pier_megatron"], found["source of rules_of_islands:Rule"]

    here = code()
    monkeypatch.setattr(run_identity, "PACKAGE", copy)
    assert code() == here
    assert here[0].startswith(f"{__version__}, sources ")
    for source in (copy / "outer" / "rules.py", rule):
        with source.open("a") as file:
            file.write("# Other code.\n")
    assert all(now != before for now, before in zip(code(), here, strict=True))
