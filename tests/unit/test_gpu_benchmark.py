"""What ``make gpu`` promises of its parts: they end in time, keep what they found, and start on a bare machine."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import one_gpu
import pytest

sys.path += [str(Path(__file__).parents[2] / "benchmarks" / folder) for folder in ("", "gpu")]

import against_stock
import first_step
import inventory
import limits
import passes
import suites
import unit_outer_steps
from table import Results, Row, Rows, SkippedError, write_whole

from pier_megatron.exchange.codecs import BLOCK, CODECS

pytestmark = pytest.mark.slow

_REPOSITORY = Path(__file__).parents[2]
_RUN = _REPOSITORY / "benchmarks" / "gpu" / "run.py"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    # By its path: the study has a module of that name.
    spec = importlib.util.spec_from_file_location("gpu_run", _RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("seconds", [540.0, 60.0])
@pytest.mark.parametrize("used", [1.0, 0.1])
def test_a_part_ends_in_time_whatever_its_checks_take(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, used: float
) -> None:
    clock, setup = _Clock(), 0.2 * seconds
    monkeypatch.setattr(run, "time", clock)
    monkeypatch.setattr(inventory, "is_found", lambda module: True)
    for part, checks in run._PARTS.items():
        begin, given = clock.now, []

        def take_all(part: str, name: str, allowed: float, log: Path, given: list[float] = given) -> list[Row]:
            given.append(allowed)
            clock.now += used * allowed
            return []

        monkeypatch.setattr(run, "_run_check", take_all)
        clock.now += setup
        run._run_part(part, None, Results(tmp_path / "results.json"), tmp_path, begin + seconds)
        assert clock.now - begin < seconds
        assert len(given) == len(checks)
        if used < 1:
            # What one leaves is for the others.
            assert given[-1] > 0.5 * (seconds - setup)


@pytest.mark.parametrize("has_transformer_engine", [True, False])
@pytest.mark.parametrize("takes_all", [True, False])
def test_what_matters_ends_in_the_first_part(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_transformer_engine: bool, takes_all: bool
) -> None:
    # As on an H100, where a mode of the outer step and a start of Megatron took so long.
    mode, training, setup = 35, 45, 30
    usual = {
        "an outer step of 7B": mode * len(first_step.MODES),
        "Megatron against stock": training * len(against_stock.WAYS),
        "copies": 10,
        "FusedAdam": training,
        "parameter gather": training,
        "inventory": 10,
    }
    clock, given, results = _Clock(), {}, Results(tmp_path / "results.json")

    def take(part: str, name: str, allowed: float, log: Path) -> list[Row]:
        given[name] = allowed
        clock.now += allowed if takes_all else min(usual[name], allowed)
        return []

    monkeypatch.setattr(run, "time", clock)
    monkeypatch.setattr(run, "_run_check", take)
    monkeypatch.setattr(inventory, "is_found", lambda module: has_transformer_engine or module != "transformer_engine")
    deadline = clock.now + run._SECONDS
    clock.now += setup
    run._run_part("1", None, results, tmp_path, deadline)

    def of_each(check: str, number: int) -> float:
        for name, value in limits.environment(given[check]).items():
            monkeypatch.setenv(name, value)
        return limits.share(limits.left(), [1.0] * number)

    assert list(usual)[:2] == list(given)[:2]
    assert of_each("an outer step of 7B", len(first_step.MODES)) > mode
    assert of_each("Megatron against stock", len(against_stock.WAYS)) > training
    of_engine = {"FusedAdam", "parameter gather"}
    assert given.keys() == usual.keys() - (set() if has_transformer_engine else of_engine)
    if has_transformer_engine:
        assert takes_all or min(of_each(check, 1) for check in of_engine) > training
    else:
        rows = [row for check in of_engine for row in results.parts["1"]["checks"][check]]
        assert [row["why"] for row in rows] == ["transformer_engine: not there"] * 2


def test_suites_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "_run", lambda *paths, needs=(): iter(paths))
    for look in (suites.unit, suites.exchange, suites.communicator, suites.loop, suites.crossings):
        for path in look():
            assert (_REPOSITORY / str(path)).is_file()


@pytest.mark.parametrize("look", [unit_outer_steps.fused_adam, unit_outer_steps.gather])
def test_comparison_with_stock_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, look: Callable[[], Rows]) -> None:
    monkeypatch.setattr(inventory, "has", lambda module: module != "transformer_engine")
    for device, backend, missing in (("cpu", "gloo", "needs a GPU"), ("cuda", "nccl", "transformer_engine: not there")):
        monkeypatch.setenv("PIER_TEST_DEVICE", device)
        monkeypatch.setenv("PIER_TEST_BACKEND", backend)
        with pytest.raises(SkippedError, match=missing):
            next(look())


def test_fused_adam_is_compared_with_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {at: f"{5 - 0.1 * at:.6E}" for at in range(1, 7)}

    def trained(flags: list[str], ranks: int, seconds: float) -> dict[int, str]:
        assert ranks == 1
        if "pier" in flags and "--use-precision-aware-optimizer" in flags:
            return losses | {6: "4.401000E+00"}
        return losses

    monkeypatch.setattr(unit_outer_steps, "_check_needs", lambda: None)
    monkeypatch.setattr(unit_outer_steps, "_losses", trained)
    monkeypatch.setattr(unit_outer_steps.torch.cuda, "get_device_capability", lambda: (9, 0))
    found = {row.what.partition(":")[0]: row.status for row in unit_outer_steps.fused_adam()}
    assert found == {
        "FP32 main parameters": "ok",
        "halves of main parameters": "failed",
        # What is scaled again is close.
        "FP16 main parameters": "ok",
    }


def test_what_stock_did_not_end_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    line = " iteration {}/ 20 | elapsed time per iteration (ms): 9.0 | lm loss: 5.0 |\n"
    printed = "".join(map(line.format, range(1, against_stock._END + 1)))

    def trained(folder: Path, ranks: int, flags: list[str], seconds: float) -> tuple[str, dict[str, object]]:
        if ranks == 1 and not flags:
            raise one_gpu.RanksFailedError("no end")
        return printed, {"bytes": 1, "waits": {}}

    monkeypatch.setattr(against_stock, "check_needs", lambda: None)
    monkeypatch.setattr(against_stock, "_train", trained)
    found = [row.status for row in against_stock.compare() if "losses" in row.what]
    assert found == ["skipped", "ok"]


def test_physical_bandwidth_of_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        memory_clock_rate, memory_bus_width = 2_619_000, 5120

    monkeypatch.setattr(passes.torch.cuda, "get_device_properties", lambda device: Properties)
    assert passes._memory_bandwidth() == pytest.approx(3352, abs=1)
    for printed, bandwidth in (("5, 16", 63.0), ("[N/A], [N/A]", None), ("unknown: no such file", None)):
        monkeypatch.setattr(inventory, "nvidia_smi", lambda fields, printed=printed: printed)
        assert passes._bus_bandwidth() == pytest.approx(bandwidth, abs=0.1)


def test_every_codec_takes_outer_steps_without_a_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_parameters", lambda: 4 * BLOCK * passes._SHARDS)
    monkeypatch.setattr(passes, "_REPETITIONS", 1)
    monkeypatch.setattr(passes, "_GROUPS", (4,))
    found = list(passes.codecs())
    assert len([row for row in found if row.what.endswith("without a wire")]) == len(CODECS) * len(passes._GROUPS)


def test_a_process_knows_when_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.left() > 1000
    for name, value in limits.environment(100).items():
        monkeypatch.setenv(name, value)
    assert 80 < limits.left() < 100


def test_what_was_found_outlives_a_check_that_fails(run: ModuleType, tmp_path: Path) -> None:
    def look() -> Iterator[Row]:
        yield Row("found")
        raise ValueError("then it fails")

    rows = tmp_path / "rows.json"
    with pytest.raises(ValueError, match="then it fails"):
        run._look(run.Check(look, 1), rows)
    assert [row["what"] for row in json.loads(rows.read_text())] == ["found"]

    def skip() -> Iterator[Row]:
        yield Row("found")
        raise SkippedError("nothing more here")

    run._look(run.Check(skip, 1), rows)
    assert [row["status"] for row in json.loads(rows.read_text())] == ["measured", "skipped"]


def test_a_check_that_is_ended_leaves_its_rows_and_says_so(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "check.py"
    script.write_text(
        "import json, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[-1]).write_text(json.dumps([{'what': 'found'}]))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(run, "__file__", str(script))
    begin = time.monotonic()
    found = run._run_check("1", "inventory", 5.0, tmp_path / "log")
    assert time.monotonic() - begin < 60
    assert [(row.what, row.status) for row in found] == [("found", "measured"), ("inventory", "failed")]
    assert found[1].why.startswith("no end after 5 s")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    write_whole(path, "before")

    def is_ended(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", is_ended)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "afterwards")
    assert path.read_text() == "before"


def test_the_backend_that_answered_is_not_looked_for_again(tmp_path: Path) -> None:
    about = {"device": "one GPU", "PyTorch": "2.11", "ranks over": "gloo", "command": ""}
    Results(tmp_path / "results.json").begin("1", about, forgets=True)
    later = Results(tmp_path / "results.json")
    assert later.backend("one GPU", "2.11") == "gloo"
    assert later.backend("one GPU", "2.13") is None
    assert later.backend("another GPU", "2.11") is None


def test_a_wheel_beside_the_checkout_is_found(run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "checkout"
    repository.mkdir()
    monkeypatch.setattr(inventory, "is_found", lambda module: False)
    assert run.wheel_beside(repository) is None
    wheel = tmp_path / "megatron_core-0.19.2-cp312-cp312-linux_x86_64.whl"
    wheel.touch()
    assert run.wheel_beside(repository) == wheel
    monkeypatch.setattr(inventory, "is_found", lambda module: True)
    assert run.wheel_beside(repository) is None


def test_pairs_over_gloo_meet_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIER_TEST_DEVICE", "cuda")
    monkeypatch.setenv("PIER_TEST_BACKEND", "gloo")
    assert one_gpu.device().type == "cuda"
    assert one_gpu.device_of_pairs().type == "cpu"
    monkeypatch.setenv("PIER_TEST_BACKEND", "nccl")
    assert one_gpu.device_of_pairs().type == "cuda"
