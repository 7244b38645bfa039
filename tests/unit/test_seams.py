"""What is put around Megatron's functions, on functions that are not Megatron's."""

import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from pier_megatron.integration import current, versions


class Machine:
    def vote(self, value: int) -> int:
        return value


def train_step(iteration: int, optimizer: str = "theirs", function: str = "theirs") -> tuple[int, str, str]:
    return iteration, optimizer, function


@pytest.fixture
def module() -> Iterator[str]:
    found = types.ModuleType("not_megatron")
    found.train_step, found.Machine = train_step, type("Machine", (), {"vote": Machine.vote})  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"not_megatron": found}), mock.patch.object(current, "_optimizer", None):
        yield "not_megatron"


@current.in_pier_runs
def in_pier_runs(function: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    return "in a run with Pier", function(*args, **kwargs)


@current.in_the_local_phase
def in_the_local_phase(function: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    return "in the local phase", function(*args, **kwargs)


@pytest.mark.parametrize("around", [in_pier_runs, in_the_local_phase])
def test_a_run_without_pier_passes_through(module: str, around: Any) -> None:
    versions.wrap(module, "train_step", around)
    assert versions.require(module, "train_step")(1, optimizer="own", function="own") == (1, "own", "own")


@pytest.mark.parametrize("is_local", [False, True])
def test_arguments_may_be_passed_by_any_name(module: str, is_local: bool) -> None:
    versions.wrap(module, "train_step", in_the_local_phase)
    versions.wrap(module, "train_step", in_pier_runs)
    with mock.patch.object(current, "_optimizer", mock.Mock(**{"loop.is_local": is_local})):
        kind, result = versions.require(module, "train_step")(iteration=1, optimizer="own", function="own")
    assert kind == "in a run with Pier"
    assert result == (("in the local phase", (1, "own", "own")) if is_local else (1, "own", "own"))
    assert versions.given(versions.require(module, "train_step"), (1,), {"function": "own"}) == {
        "iteration": 1,
        "function": "own",
    }


def test_a_method_is_wrapped_where_it_is_defined(module: str) -> None:
    versions.wrap(module, "Machine.vote", lambda vote, machine, value: 2 * vote(machine, value))
    assert versions.require(module, "Machine")().vote(3) == 6


def test_what_is_missing_is_named(module: str) -> None:
    for name in ("training_log", "Machine.elect"):
        with pytest.raises(
            versions.UnsupportedMegatronError, match=rf"needs not_megatron\.{name}, .* Supported releases: 0\.17"
        ):
            versions.wrap(module, name, in_pier_runs)
