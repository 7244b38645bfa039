"""What is put around Megatron's functions: on functions that are not Megatron's, and the table on Megatron's own."""

import argparse
import ast
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from launch import REPOSITORY

from pier_megatron.errors import PierConfigError
from pier_megatron.integration import arguments, current, seams
from pier_megatron.integration.inner import torch_adam
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.seam import Seam, SeamOrderError, check_there, install


class Machine:
    def vote(self, value: int) -> int:
        return value


def train_step(iteration: int, optimizer: str = "theirs", function: str = "theirs") -> tuple[int, str, str]:
    return iteration, optimizer, function


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    found = types.ModuleType("not_megatron")
    found.train_step, found.Machine = train_step, type("Machine", (), {"vote": Machine.vote})  # type: ignore[attr-defined]
    found.Heir = type("Heir", (found.Machine,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "not_megatron", found)
    current.set_optimizer(None)
    return "not_megatron"


@current.in_pier_runs
def in_pier_runs(function: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    return "in a run with Pier", function(*args, **kwargs)


@current.in_the_local_phase
def in_the_local_phase(function: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    return "in the local phase", function(*args, **kwargs)


def doubled(vote: Callable[..., int], machine: Any, value: int) -> int:
    return 2 * vote(machine, value)


@pytest.mark.parametrize("around", [in_pier_runs, in_the_local_phase])
def test_a_run_without_pier_passes_through(module: str, around: Any) -> None:
    install([Seam(module, "train_step", around)])
    assert versions.require(module, "train_step")(1, optimizer="own", function="own") == (1, "own", "own")


@pytest.mark.parametrize("is_local", [False, True])
def test_arguments_may_be_passed_by_any_name(module: str, is_local: bool) -> None:
    inner = Seam(module, "train_step", in_the_local_phase)
    install([inner, Seam(module, "train_step", in_pier_runs, is_outermost=True)])
    current.set_optimizer(mock.Mock(**{"loop.is_local": is_local}))
    kind, result = versions.require(module, "train_step")(iteration=1, optimizer="own", function="own")
    current.set_optimizer(None)
    assert kind == "in a run with Pier"
    assert result == (("in the local phase", (1, "own", "own")) if is_local else (1, "own", "own"))
    assert versions.given(versions.require(module, "train_step"), (1,), {"function": "own"}) == {
        "iteration": 1,
        "function": "own",
    }


def test_a_function_of_the_script_in_its_place_is_called_by_the_names_of_megatrons(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return versions.given(function, args, kwargs) | {"returned": function(*args, **kwargs)}

    row = Seam(module, "train_step", named)
    check_there([row])
    monkeypatch.setattr(f"{module}.train_step", lambda *args, **kwargs: "the script's")
    install([row])
    assert versions.require(module, "train_step")(3, optimizer="own") == {
        "iteration": 3,
        "optimizer": "own",
        "returned": "the script's",
    }


def test_a_method_is_wrapped_where_it_is_defined(module: str) -> None:
    install([Seam(module, "Machine.vote", doubled)])
    assert versions.require(module, "Machine")().vote(3) == 6


def test_what_is_missing_is_named_and_nothing_is_touched(module: str) -> None:
    for name in ("training_log", "Machine.elect", "Heir.vote"):
        with pytest.raises(versions.UnsupportedMegatronError, match=rf"needs not_megatron\.{name}.* Supported releases: 0\.17"):
            install([Seam(module, "train_step", in_pier_runs), Seam(module, name, in_pier_runs)])
    assert versions.require(module, "train_step") is train_step


def test_two_around_the_same_function_are_refused_and_nothing_is_touched(module: str) -> None:
    rows = [Seam(module, "train_step", in_the_local_phase), Seam(module, "train_step", in_pier_runs)]
    for first, second in (rows, rows[::-1]):
        told = (
            f"{second.around.__name__} would be put around .*{first.around.__name__}, which is around not_megatron.train_step"
        )
        with pytest.raises(SeamOrderError, match=told):
            install([first, second])
    assert versions.require(module, "train_step") is train_step


def test_who_has_imported_the_function_gets_the_wrapper_if_the_row_says_so(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {module: doubled, "script": doubled, "other": print}
    for place, found in places.items():
        monkeypatch.setitem(sys.modules, place, types.ModuleType(place))
        vars(sys.modules[place])["imported"] = found
    install([Seam(module, "imported", in_pier_runs, is_imported=True)])
    assert versions.require("script", "imported") is versions.require(module, "imported") is not doubled
    assert versions.require("other", "imported") is print


def test_attributes_that_are_not_there_are_not_made() -> None:
    bucket = types.SimpleNamespace(gradient_scaling_factor=1.0)
    versions.assign(bucket, "gradient_scaling_factor", 2.0)
    assert bucket.gradient_scaling_factor == 2.0
    with pytest.raises(versions.UnsupportedMegatronError, match=r"needs SimpleNamespace\.scale, "):
        versions.assign(bucket, "scale", 2.0)
    with pytest.raises(versions.UnsupportedMegatronError, match=r"needs SimpleNamespace\.scale, "):
        versions.replaced(bucket, {"scale": 2.0}).__enter__()
    assert vars(bucket) == {"gradient_scaling_factor": 2.0}


_FOLDER = REPOSITORY / "pier_megatron"
_MODULES = {"parallel_state": "megatron.core.parallel_state"}


def looked_up() -> dict[str, str]:
    """Where each symbol is looked up, by its full name.

    Raises:
        AssertionError: If a name is not a constant that can be read here.
    """
    found: dict[str, str] = {}
    for path in sorted(_FOLDER.rglob("*.py")):
        if path.stem in ("seam", "seams", "versions"):
            continue
        tree = ast.parse(path.read_text())
        constants = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant):
                constants[node.targets[0].id] = node.value.value
        for node in ast.walk(tree):
            for symbol in _of_node(node, constants, path):
                found[symbol] = f"{path.relative_to(_FOLDER)}:{node.lineno}"  # type: ignore[attr-defined]
    return found


def _of_node(node: ast.AST, constants: dict[str, str], path: Path) -> Iterator[str]:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="versions"), attr="require"), args=[module, name]):
            yield f"{_text(module, constants, path)}.{_text(name, constants, path)}"
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in _MODULES:
            yield f"{_MODULES[owner]}.{name}"


def _text(node: ast.expr, constants: dict[str, str], path: Path) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name in constants:
            return constants[name]
        case ast.JoinedStr(values=parts):
            expressions = (part.value if isinstance(part, ast.FormattedValue) else part for part in parts)
            return "".join(_text(part, constants, path) for part in expressions)
    raise AssertionError(f"{path}:{node.lineno}: {ast.unparse(node)} cannot be read without running it")


def test_every_symbol_that_is_looked_up_is_checked_at_the_start() -> None:
    checked = {f"{needed.module}.{name}" for needed in seams.NEEDED for name in needed.names.split()}
    replaced = {f"{row.module}.{row.name}" for row in (*seams.BEFORE_ARGUMENTS, *seams.TABLE)}
    # A module or a class that holds a name is there when the name is.
    parts = {name.rsplit(".", depth)[0] for name in checked | replaced for depth in range(3)}
    symbols = looked_up().items()
    # Those of Megatron-Bridge are in a table of their own, which needs it installed.
    unchecked = {name: where for name, where in symbols if name not in parts and not name.startswith("megatron.bridge.")}
    assert unchecked == {}


@pytest.mark.parametrize("given", [{"optimizer": "pier"}, {"optimizer": "adam", "pier_layered": True}])
def test_a_release_that_was_not_tested_is_refused(given: dict[str, Any]) -> None:
    args = argparse.Namespace(pier=given["optimizer"] == "pier", pier_try_any_megatron=None, **given)
    with mock.patch.object(versions, "megatron_version", return_value="0.20.1"):
        with pytest.raises(PierConfigError, match=r"Megatron 0\.20\.1 is not one of .* 0\.19\. .* --pier-try-any-megatron"):
            arguments.check_release(args)
        arguments.check_release(argparse.Namespace(**vars(args) | {"pier_try_any_megatron": True}))
        arguments.check_release(argparse.Namespace(pier=False, optimizer="adam", pier_try_any_megatron=None))
    with mock.patch.object(versions, "megatron_version", return_value="0.19.7"):
        arguments.check_release(args)


@pytest.mark.parametrize("newest", ["0.19.2", "0.20.0", "0.20rc0", "1.0.0rc1"])
def test_a_newer_release_has_the_rows_of_the_newest_that_is_known(newest: str) -> None:
    with mock.patch.object(versions, "megatron_version", return_value="0.17.1"):
        of_first = [row for row in (*seams.TABLE, *seams.NEEDED) if getattr(row, "exists", None) or getattr(row, "exist", None)]
    with mock.patch.object(versions, "megatron_version", return_value=newest):
        assert all(row.exist for row in seams.NEEDED)
        [only_older] = [row for row in seams.TABLE if not row.exists]
        assert versions.is_between("0.9", None)
        assert not versions.is_between(None, "0.9")
    assert only_older.until == "0.17"
    assert only_older in of_first
    assert len(of_first) == len(seams.TABLE) + len(seams.NEEDED) - 7


def run_of(**given: Any) -> argparse.Namespace:
    stock = {"optimizer": "adam", "save": None, "load": None, "async_save": False, "iterations_to_skip": []}
    pier = {"pier": True, "pier_groups": 2, "pier_lighthouse": None, "pier_sync_seconds": None, "log_progress": False}
    return argparse.Namespace(**stock | pier | given)


def test_a_plain_run_replaces_few_functions_and_a_stock_run_none() -> None:
    with mock.patch.object(versions, "megatron_version", return_value="0.19.2"):
        # PyTorch's own Adam is what Megatron has without Transformer Engine and Apex, as on this machine.
        rows = [row for row in seams.TABLE if row.exists and row.used_by is not torch_adam.is_used]
    plain = len(seams.used(rows, run_of()))
    assert plain + len(seams.BEFORE_ARGUMENTS) <= 15
    assert seams.used(rows, run_of(pier=False)) == []
    kinds = ({"save": "runs"}, {"load": "runs"}, {"async_save": True}, {"pier_lighthouse": "http://localhost:1"})
    assert [len(seams.used(rows, run_of(**kind))) - plain for kind in kinds] == [5, 3, 2, 1]
