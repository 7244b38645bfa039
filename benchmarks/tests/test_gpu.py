"""What ``make gpu`` promises of its parts: they end in time, keep what they found, and start on a bare machine."""

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

_REPOSITORY = Path(__file__).parents[2]
_RUN = _REPOSITORY / "benchmarks" / "gpu" / "run.py"
# At the end: the study has a module "run", too.
sys.path += [str(_REPOSITORY / folder) for folder in ("benchmarks/gpu", "tools")]

import inventory  # noqa: E402
import one_gpu  # noqa: E402
import suites  # noqa: E402
from table import Results, Row, SkippedError, write_whole  # noqa: E402


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


def test_suites_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "_run", lambda *paths, needs=(): iter(paths))
    for look in (suites.unit, suites.exchange, suites.communicator, suites.loop, suites.crossings):
        for path in look():
            assert (_REPOSITORY / str(path)).is_file()


def test_a_second_call_continues_with_the_first_part_that_has_not_ended(tmp_path: Path) -> None:
    about, parts = {"device": "a card", "PyTorch": "2.14", "command": "run.py"}, ["1", "2", "3"]
    results = Results(tmp_path / "results.json")
    for part in ("1", "2"):
        results.begin(part, about, forgets=True)
        results.add(part, "a check", [Row("found")])
    results.end("1")
    kept = Results(tmp_path / "results.json")
    assert kept.unfinished(parts, about) == ["2", "3"]
    assert kept.unfinished(parts, about | {"device": "another"}) == parts
    # One that is repeated has not ended before its end.
    kept.begin("1", about, forgets=True)
    assert kept.unfinished(parts, about) == parts


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


def test_pairs_over_gloo_meet_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIER_TEST_DEVICE", "cuda")
    monkeypatch.setenv("PIER_TEST_BACKEND", "gloo")
    assert one_gpu.device().type == "cuda"
    assert one_gpu.device_of_pairs().type == "cpu"
    monkeypatch.setenv("PIER_TEST_BACKEND", "nccl")
    assert one_gpu.device_of_pairs().type == "cuda"
