"""What is put around Megatron's functions: on functions that are not Megatron's, and the table on Megatron's own."""

import argparse
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import megatron_symbols
import pytest
from launch import REPOSITORY

from pier_megatron.errors import PierConfigError
from pier_megatron.integration import arguments, current, examination, scoring, seams
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.seam import Seam, SeamOrderError, install


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
    install([inner, Seam(module, "train_step", in_pier_runs, over=in_the_local_phase)])
    current.set_optimizer(mock.Mock(**{"loop.is_local": is_local}))
    kind, result = versions.require(module, "train_step")(iteration=1, optimizer="own", function="own")
    current.set_optimizer(None)
    assert kind == "in a run with Pier"
    assert result == (("in the local phase", (1, "own", "own")) if is_local else (1, "own", "own"))
    assert versions.given(versions.require(module, "train_step"), (1,), {"function": "own"}) == {
        "iteration": 1,
        "function": "own",
    }


def test_a_method_is_wrapped_where_it_is_defined(module: str) -> None:
    install([Seam(module, "Machine.vote", doubled)])
    assert versions.require(module, "Machine")().vote(3) == 6


def test_what_is_missing_is_named_and_nothing_is_touched(module: str) -> None:
    for name in ("training_log", "Machine.elect", "Heir.vote"):
        with pytest.raises(versions.UnsupportedMegatronError, match=rf"needs not_megatron\.{name}.* Supported releases: 0\.17"):
            install([Seam(module, "train_step", in_pier_runs), Seam(module, name, in_pier_runs)])
    assert versions.require(module, "train_step") is train_step


def test_wrong_order_is_refused_and_nothing_is_touched(module: str) -> None:
    inner, outer = Seam(module, "train_step", in_the_local_phase), Seam(module, "train_step", in_pier_runs, in_the_local_phase)
    for rows, found in (([outer, inner], "nothing"), ([inner, Seam(module, "train_step", in_pier_runs)], ".*the_local_phase")):
        with pytest.raises(SeamOrderError, match=rf"in_pier_runs around not_megatron.train_step finds {found} there"):
            install(rows)
    assert versions.require(module, "train_step") is train_step


def all_rows() -> tuple[Seam, ...]:
    with mock.patch.dict(os.environ, {examination.VARIABLE: "x", scoring.VARIABLE: "x"}):
        return seams.table()


def test_what_is_outermost_goes_around_whatever_is_there_and_nothing_around_it(module: str) -> None:
    inner, outermost = (
        Seam(module, "train_step", in_pier_runs),
        Seam(module, "train_step", in_the_local_phase, is_outermost=True),
    )
    with pytest.raises(SeamOrderError, match=r"in_pier_runs around .* finds .*in_the_local_phase there, must find nothing"):
        install([outermost, inner])
    install([inner, outermost])
    assert versions.require(module, "train_step")(1) == (1, "theirs", "theirs")


def test_each_seam_of_a_function_names_the_one_beneath() -> None:
    rows = all_rows()
    twice = [row for row in rows if row.over is not None]
    for row in twice:
        without = [other for other in rows if (other.module, other.name) == (row.module, row.name) and other.around != row.over]
        with mock.patch.object(Seam, "original", return_value=print), pytest.raises(SeamOrderError):
            install(without)


def test_attributes_that_are_not_there_are_not_made() -> None:
    bucket = types.SimpleNamespace(gradient_scaling_factor=1.0)
    versions.assign(bucket, "gradient_scaling_factor", 2.0)
    assert bucket.gradient_scaling_factor == 2.0
    with pytest.raises(versions.UnsupportedMegatronError, match=r"needs SimpleNamespace\.scale, "):
        versions.assign(bucket, "scale", 2.0)
    with pytest.raises(versions.UnsupportedMegatronError, match=r"needs SimpleNamespace\.scale, "):
        versions.replaced(bucket, {"scale": 2.0}).__enter__()
    assert vars(bucket) == {"gradient_scaling_factor": 2.0}


def test_every_symbol_that_is_looked_up_is_checked_at_the_start() -> None:
    checked = {f"{needed.module}.{name}" for needed in seams.NEEDED for name in needed.names.split()}
    replaced = {f"{row.module}.{row.name}" for row in all_rows()}
    # A module or a class that holds a name is there when the name is.
    parts = {name.rsplit(".", depth)[0] for name in checked | replaced for depth in range(3)}
    looked_up = megatron_symbols.looked_up().items()
    # Those of Megatron-Bridge are in a table of their own, which needs it installed.
    unchecked = {name: where for name, where in looked_up if name not in parts and not name.startswith("megatron.bridge.")}
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
    assert len(of_first) == len(seams.TABLE) + len(seams.NEEDED) - 5


_EACH_IN_TURN = """
import functools, importlib, os
from pier_megatron.cpu import emulation
emulation.install()
from pier_megatron.integration import examination, scoring, seams
from pier_megatron.megatron_api import versions
os.environ[examination.VARIABLE] = os.environ[scoring.VARIABLE] = "x"
rows = seams.table()
symbols = {(row.module, row.name) for row in rows if row.exists}
for needed in seams.NEEDED:
    if needed.exist:
        symbols |= {(needed.module, name) for name in needed.names.split()}
before = {symbol: versions.require(*symbol) for symbol in symbols}
for module, name in sorted(symbols):
    *path, attribute = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    there = vars(owner)[attribute] if attribute in vars(owner) else getattr(owner, attribute)
    try:
        delattr(owner, attribute)
    except AttributeError:
        raise SystemExit(f"{module}.{name} is inherited: name the class that has it")
    try:
        seams.register()
        raise SystemExit(f"without {module}.{name} nothing was refused")
    except versions.UnsupportedMegatronError as error:
        assert f"{module}.{name}" in str(error), error
    finally:
        setattr(owner, attribute, there)
assert all(versions.require(*symbol) is found for symbol, found in before.items()), "something was replaced"
seams.register()
print(len(symbols), "symbols")
"""


@pytest.mark.slow
@pytest.mark.processes
def test_each_symbol_that_a_release_may_lack_is_named_at_the_start() -> None:
    ran = subprocess.run([sys.executable, "-c", _EACH_IN_TURN], cwd=REPOSITORY, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert int(ran.stdout.split()[-2]) > 80
