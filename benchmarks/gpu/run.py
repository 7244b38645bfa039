"""Everything that needs a GPU, on one GPU: ``python benchmarks/gpu/run.py [--part N] [--device cuda|cpu]``.

An hour, what is least known first. Called again, it continues with the first part that has not ended on this device and
PyTorch; ``--part`` repeats one. Each part ends within ``--seconds``, set-up included, and needs nothing but PyTorch, NumPy and,
for what trains, Megatron's wheel with einops, psutil and pybind11. Missing parts are reported and skipped; a part that fails or
takes too long does not stop the rest. With ``--device cpu`` everything is small and shows only that it runs. Results:
``runs/gpu/results.json`` and ``.md``.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

import against_stock
import first_step
import inner_optimizers
import inventory
import limits
import one_gpu
import passes
import quality
import suites
import torch
import trainings
import two_ranks
import unit_outer_steps
from table import Results, Row, Rows, SkippedError, write_whole

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Check:
    """Something to look at, in a process of its own.

    Attributes:
        look: Function that yields rows.
        weight: Seconds that it may take of nine minutes of its part; more, if others take less.
        needs: Modules without which it is skipped and its time is for the others.
    """

    look: Callable[[], Rows]
    weight: int
    needs: tuple[str, ...] = ()

    def why_not(self) -> str | None:
        """Reason to skip it here, without importing anything."""
        missing = [module for module in self.needs if not inventory.is_found(module)]
        return f"{', '.join(missing)}: not there" if missing else None


_MEGATRON = ("megatron.core",)
_PARTS: dict[str, dict[str, Check]] = {
    # What matters comes first. On an H100 a mode of the outer step takes 35 s, and a training 45 s.
    "1": {
        "Megatron against stock": Check(against_stock.compare, 400, _MEGATRON),
        "parameter gather": Check(unit_outer_steps.gather, 50, unit_outer_steps.NEEDS),
        "FusedAdam": Check(unit_outer_steps.fused_adam, 50, unit_outer_steps.NEEDS),
        "inventory": Check(inventory.look, 15),
    },
    "2": {
        "tests of updates and codecs": Check(suites.unit, 60),
        "codecs against operators": Check(passes.against_operators, 240),
        "codecs": Check(passes.codecs, 120),
        "copies": Check(passes.copies, 15),
        "passes of an outer step": Check(passes.passes, 60),
    },
    "3": {
        "several worlds of one launch": Check(trainings.resumed, 400, _MEGATRON),
        "a killed rank": Check(two_ranks.killed, 120),
    },
    "4": {
        "delayed FP8 against stock": Check(against_stock.delayed, 260, unit_outer_steps.NEEDS),
        "Megatron against stock, hidden": Check(against_stock.hidden, 240, _MEGATRON),
    },
    "5": {
        "an outer step of 7B": Check(first_step.rows, 200),
        "offload": Check(passes.offload, 80),
        "overlap": Check(two_ranks.overlap, 120),
        "memory": Check(two_ranks.memory, 100),
    },
    "6": {
        "124 million parameters": Check(quality.compare, 520, quality.NEEDS),
    },
    "7": {
        "tests of the exchange": Check(suites.exchange, 90),
        "tests of islands' communicators": Check(suites.communicator, 90),
        "tests of the loop": Check(suites.loop, 300),
    },
    "8": {
        "random lives of the loop": Check(suites.crossings, 360),
        "inner optimizers": Check(inner_optimizers.compare, 120),
    },
}
_SECONDS, _PROBE = 540.0, 1 / 6


def main() -> int:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", choices=list(_PARTS), action="append", help="run this one; by default, all that have not ended here"
    )
    parser.add_argument("--only", help="name of the only check to run, of the parts that are run")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="device; by default cuda, which must be there", default="cuda"
    )
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="limit of each part, set-up included (%(default)s)")
    parser.add_argument(
        "--backend", choices=["nccl", "gloo"], help="between ranks; by default as in --output, or what answers, NCCL first"
    )
    parser.add_argument(
        "--megatron", type=Path, help="wheel of megatron-core, or an unpacked one; by default a wheel next to the checkout"
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs/gpu/results.json", help="(%(default)s)")
    parser.add_argument("--into", type=Path, help="also show the tables in this document, such as benchmarks/gpu/results.md")
    parser.add_argument("--render", action="store_true", help="run nothing, only show what --output holds")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # So that a check under way ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.rows:
        return _look(_PARTS[options.part[0]][options.only], options.rows)

    begin, results = time.monotonic(), Results(options.output)
    if not options.render:
        try:
            backend = options.backend or results.backend(inventory.device_name(options.device), torch.__version__)
            print(f"Device and backend: {one_gpu.choose(options.device, backend, _PROBE * options.seconds)}", flush=True)
        except (RuntimeError, AssertionError) as error:
            parser.error(f"{error} --device cpu shows that everything runs, and measures nothing.")
        with _importable(options.megatron or wheel_beside(REPOSITORY)):
            for part in options.part or results.unfinished(_PARTS, inventory.about("")):
                _run_part(part, options.only, results, options.output.parent / "logs", begin + options.seconds)
                begin = time.monotonic()
        print(f"\n{results.markdown()}\n{options.output}", flush=True)
    if options.into:
        results.write_into(options.into)
    for failure in results.failed():
        print(f"FAILED {failure}", file=sys.stderr)
    return bool(results.failed())


@contextlib.contextmanager
def _importable(megatron: Path | None) -> Iterator[None]:
    """Lets the processes that are started inside import the plugin and Megatron."""
    with tempfile.TemporaryDirectory() as unpacked:
        folders = [str(REPOSITORY / folder) for folder in ("", "tools", "benchmarks")]
        if megatron is not None and megatron.is_dir():
            folders.append(str(megatron.resolve()))
        elif megatron is not None:
            # Its compiled helper cannot be imported from within a file.
            with zipfile.ZipFile(megatron) as wheel:
                wheel.extractall(unpacked)
            folders.append(unpacked)
        sys.path += folders
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        yield


def wheel_beside(repository: Path) -> Path | None:
    """The newest of Megatron's wheels in the repository or next to it; None where Megatron is installed, or there is none."""
    if inventory.is_found("megatron.core"):
        return None
    wheels = [wheel for folder in (repository, repository.parent) for wheel in folder.glob("megatron_core-*.whl")]
    return max(wheels, key=lambda wheel: wheel.stat().st_mtime, default=None)


def _run_part(part: str, only: str | None, results: Results, logs: Path, deadline: float) -> None:
    command = f"python benchmarks/gpu/run.py --part {part} --device {one_gpu.device().type}"
    results.begin(part, inventory.about(command), forgets=only is None)
    logs.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    checks = {name: check for name, check in _PARTS[part].items() if only in (None, name)}
    skipped = {name: why for name, check in checks.items() if (why := check.why_not())}
    weights = [check.weight for name, check in checks.items() if name not in skipped]
    for name in checks:
        if name in skipped:
            print(f"part {part}: {name}, skipped: {skipped[name]}", flush=True)
            results.add(part, name, [Row("all", "", "skipped", skipped[name])])
            continue
        seconds = limits.share(deadline - time.monotonic(), weights)
        weights.pop(0)
        print(f"part {part}: {name}, at most {seconds:.0f} s ...", flush=True)
        results.add(part, name, _run_check(part, name, seconds, logs / f"{part} {name}.log".replace(" ", "-")))
    if only is None:
        results.end(part)
    print(f"part {part}: {time.monotonic() - begin:.0f} s", flush=True)


def _run_check(part: str, name: str, seconds: float, log: Path) -> list[Row]:
    """The rows of a check, and one more that says why if it did not come to its end."""
    command = [sys.executable, __file__, "--part", part, "--only", name]
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        rows = Path(folder) / "rows.json"
        process = subprocess.Popen(
            [*command, "--rows", str(rows)],
            env=os.environ | limits.environment(seconds),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                # Also the ranks that it has started.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = [Row(**row) for row in json.loads(rows.read_text())] if rows.exists() else []
    if status is None:
        found.append(Row(name, "", "failed", f"no end after {seconds:.0f} s: {one_gpu.last_lines(log)}"))
    elif status:
        found.append(Row(name, "", "failed", one_gpu.last_lines(log)))
    return found


def _look(check: Check, rows: Path) -> int:
    """Runs one check; called in a process of its own."""
    found: list[Row] = []
    try:
        for row in check.look():
            found.append(row)
            write_whole(rows, json.dumps([dataclasses.asdict(row) for row in found]))
    except SkippedError as reason:
        found.append(Row("all", "", "skipped", str(reason)))
    write_whole(rows, json.dumps([dataclasses.asdict(row) for row in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
