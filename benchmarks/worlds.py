"""Start and outer step of one rank of a world that is not there: ``python benchmarks/worlds.py``.

``python benchmarks/worlds.py [--worlds 64 1024 4096 16384] [--ranks first middle last] [--groups 2 16 1024] [--pipeline 4]``.
Real Megatron and the plugin as a single process on the CPU. PyTorch's ``fake`` process groups, which Megatron has for
``--fake-process-group``, take part in collectives of up to 16,384 ranks without any other rank. The benchmark so measures the
Python and the memory of one rank. Where the plugin reads what other ranks have sent, the benchmark supplies it. It measures no
network, no NCCL and no store with thousands of clients. Seconds are CPU seconds of the process. ``--profile FILE`` writes the
profile of the start of each case for ``pstats``.
"""

import argparse
import collections
import contextlib
import cProfile
import dataclasses
import functools
import itertools
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import fake_launch

_TENSOR, _PER_NODE = 4, 8
_LAZY, _INTERVAL, _LOG, _ITERATIONS = 4, 4, 7, 20

# What is measured where: iterations with an outer step, those that log, those under the census, and of the others.
_OUTER, _LOGGED, _CENSUS = (8, 12), (7, 14), (15, 16)
_PLAIN = (5, 6, 9, 10, 11, 13)

_MODEL = (
    f"--num-layers 4 --hidden-size 64 --num-attention-heads 4 --tensor-model-parallel-size {_TENSOR} --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --bf16 --tokenizer-type NullTokenizer --vocab-size 257 "
    f"--make-vocab-size-divisible-by 16 --lr 1e-3 --lr-decay-style constant --train-iters {_ITERATIONS} --log-interval {_LOG} "
    "--eval-interval 1000000 --eval-iters 1 --fake-process-group --use-distributed-optimizer"
)
_PIER = f"--optimizer pier --pier-sync-interval {_INTERVAL} --pier-lazy-start-iters {_LAZY} --pier-groups"
_KINDS = {
    "stock": "--num-distributed-optimizer-instances {groups}",
    "worlds": f"{_PIER} {{groups}}",
    "int4": f"{_PIER} {{groups}} --pier-exchange-dtype int4",
    "pairs": f"{_PIER} {{groups}} --pier-preset noloco",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One rank of one world.

    Attributes:
        world: Number of ranks.
        rank: Number of this one.
        kind: Key of the arguments of the training.
        groups: Number of groups, or of stock Megatron's instances.
        pipeline: Number of pipeline stages.
    """

    world: int
    rank: int
    kind: str
    groups: int
    pipeline: int

    @property
    def arguments(self) -> str:
        """Arguments of the training script."""
        replicas = self.world // (_TENSOR * self.pipeline)
        flags = _KINDS[self.kind].format(groups=self.groups)
        return f"{_MODEL} --pipeline-model-parallel-size {self.pipeline} --global-batch-size {replicas} {flags}"


def main() -> None:
    """Runs the cases and prints a table, or runs one of them and prints what it has measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 1024, 4096, 16384], help="ranks (%(default)s)")
    parser.add_argument("--ranks", choices=("first", "middle", "last"), nargs="+", default=["first"], help="(%(default)s)")
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 16, 1024], help="up to the replicas (%(default)s)")
    parser.add_argument("--kinds", choices=_KINDS, nargs="+", default=["stock", "worlds"], help="(%(default)s)")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=1, help="repetitions of each case; medians count (%(default)s)")
    parser.add_argument("--save", action="store_true", help="also count what the rank writes into a checkpoint")
    parser.add_argument("--record", type=Path, help="file to which each case is appended, as a line of JSON")
    parser.add_argument("--profile", type=Path, help="folder for profiles of the starts")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        _run(Case(**json.loads(options.one)), options)
        return
    print(f"`python {' '.join(sys.argv)}`, {date.today().isoformat()}\n")
    print(
        "| ranks | rank | kind | groups | start, s | MB | communicators, own | iteration, ms | outer step, + ms | log, + ms | "
        "collectives | of an outer step |\n" + "|---" * 12 + "|",
        flush=True,
    )
    for world in options.worlds:
        for place in options.ranks:
            rank = {"first": 0, "middle": world // 2, "last": world - 1}[place]
            for groups in (groups for groups in options.groups if groups <= world // (_TENSOR * options.pipeline)):
                for kind in options.kinds:
                    case = Case(world, rank, kind, groups, options.pipeline)
                    measured = [_measured(case, options) for _ in range(options.repetitions)]
                    found = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
                    print(_row(case, found), flush=True)
                    if options.record:
                        line = {"date": date.today().isoformat(), **dataclasses.asdict(case), **found}
                        with options.record.open("a") as file:
                            file.write(json.dumps(line) + "\n")


def _measured(case: Case, options: argparse.Namespace) -> dict[str, float]:
    """Runs a case as a process."""
    command = [sys.executable, __file__, "--one", json.dumps(dataclasses.asdict(case)), *(["--save"] if options.save else [])]
    command += ["--profile", str(options.profile)] if options.profile else []
    environment = {
        "RANK": str(case.rank),
        "WORLD_SIZE": str(case.world),
        "LOCAL_RANK": str(case.rank % _PER_NODE),
        "LOCAL_WORLD_SIZE": str(_PER_NODE),
        "GROUP_RANK": str(case.rank // _PER_NODE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # What a stage would receive is memory that nobody has written to: zeros.
        "MALLOC_PERTURB_": "255",
    }
    process = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{case}\n{process.stdout[-3000:]}\n{process.stderr[-5000:]}")
    found: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return found


def _row(case: Case, found: dict[str, float]) -> str:
    step = f"{found['outer']:.1f}" if case.kind != "stock" else ""
    saved = f" {found['keys']:.0f} keys, {found['saved']:,.0f} kB, {found['prepared']:.2f} s |" if "keys" in found else ""
    return (
        f"| {case.world:,} | {case.rank:,} | {case.kind} | {case.groups:,} | {found['start']:.2f} | {found['memory']:,.0f} | "
        f"{found['communicators']:.0f}, {found['joined']:.0f} | {found['plain']:.1f} | {step} | {found['log']:.1f} | "
        f"{found['collectives']:.0f} | {found['collectives of an outer step']:.0f} |{saved}"
    )


def _run(case: Case, options: argparse.Namespace) -> None:
    """Trains as one rank, and prints what was measured as the last line."""
    from pier_megatron.cpu import emulation
    from pier_megatron.cpu.preparations import missing_cpu_flags

    emulation.install()
    import torch.distributed as dist

    from pier_megatron import register
    from pier_megatron.commands.demo import corpus, pretrain_bytes
    from pier_megatron.integration import seams
    from pier_megatron.megatron_api.seam import install

    install(seams.WITHOUT_PIER)
    register()
    marks: list[float] = []
    found: dict[str, float] = {}
    profile = cProfile.Profile()
    begun = time.process_time()
    created = _count_communicators()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        train, validation = corpus.write(Path(folder) / "corpus")
        data = f"--train-data-path {train} --valid-data-path {validation} --test-data-path {validation}"
        keep = f"--save {folder}/saved --save-interval {_ITERATIONS}" if options.save else ""
        argv = f"{case.arguments} {data} {keep}".split()
        sys.argv = [pretrain_bytes.__file__, *argv, *missing_cpu_flags(argv)]
        fake_launch.install(lambda: created.update(communicators=1))
        said = stack.enter_context(_said_by_others(case))
        stack.enter_context(_marking_iterations(marks, found, profile, said, created))
        stack.enter_context(_counting_saves(found))
        _make_indices_of_data(pretrain_bytes)
        if options.profile:
            profile.enable()
        pretrain_bytes.main()
    spent = dict(enumerate((after - before for before, after in itertools.pairwise(marks)), 1))
    plain, outer, log = (1e3 * statistics.median(spent[i] for i in where) for where in (_PLAIN, _OUTER, _LOGGED))
    found |= {"start": marks[0] - begun, "plain": plain, "outer": outer - plain, "log": log - plain}
    found["joined"] = len(dist.distributed_c10d._world.pg_names)
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
        profile.dump_stats(options.profile / f"{case.kind}-{case.groups}-of-{case.world}.pstats")
    # Groups other than the last one are silent.
    print(json.dumps(found), file=sys.__stdout__, flush=True)
    os._exit(0)


def _make_indices_of_data(script: Any) -> None:
    """Lets this rank write the indices of the data sets, which it would wait for the first one to write."""
    import torch.distributed as dist

    build, get_rank = script.build_datasets, dist.get_rank

    @functools.wraps(build)
    def as_the_first(*args: Any, **kwargs: Any) -> Any:
        dist.get_rank = lambda group=None: 0
        try:
            return build(*args, **kwargs)
        finally:
            dist.get_rank = get_rank

    script.build_datasets = as_the_first


def _count_communicators() -> collections.Counter[str]:
    """Counts the communicators that this rank makes or hears of from now on."""
    from torch.distributed import distributed_c10d

    created: collections.Counter[str] = collections.Counter()
    make = distributed_c10d._new_process_group_helper

    @functools.wraps(make)
    def counting(*args: Any, **kwargs: Any) -> Any:
        created["communicators"] += 1
        return make(*args, **kwargs)

    distributed_c10d._new_process_group_helper = counting
    return created


@contextlib.contextmanager
def _marking_iterations(
    marks: list[float],
    found: dict[str, float],
    profile: cProfile.Profile,
    said: dict[str, float],
    created: collections.Counter[str],
) -> Iterator[None]:
    """Notes the CPU time at the beginning of every iteration, and the counts."""
    from megatron.training import training

    from pier_megatron.integration import own_world
    from pier_megatron.integration.census import CollectiveCensus

    train_step = training.train_step

    def marked(*args: Any, **kwargs: Any) -> Any:
        iteration = len(marks) + 1
        if iteration == 1:
            profile.disable()
            found.update(created)
        marks.append(time.process_time() - said["seconds"])
        if iteration == _CENSUS[0] - 1:
            found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if iteration not in _CENSUS:
            return train_step(*args, **kwargs)
        census = CollectiveCensus(own_world.launch().first_of_group)
        with census:
            result = train_step(*args, **kwargs)
        found["collectives" + (" of an outer step" if iteration % _INTERVAL == 0 else "")] = len(census.collectives)
        return result

    training.train_step = marked
    yield


@contextlib.contextmanager
def _said_by_others(case: Case) -> Iterator[dict[str, float]]:
    """Says for other ranks what the plugin asks them; yields the CPU seconds that this takes, which are not this rank's."""
    import torch.distributed as dist

    from pier_megatron.exchange.topology import Rank
    from pier_megatron.integration import samples

    gather, spent = dist.all_gather_object, {"seconds": 0.0}

    def said_by(rank: int) -> "Rank":
        node = f"node {rank // _PER_NODE}"
        return Rank(rank, node, node, group=rank * case.groups // case.world, tensor_parallel=rank - rank % _TENSOR)

    def gather_from_all(objects: list[Any], own: Any, group: Any = None) -> None:
        gather(objects, own, group)
        begun, ranks = time.process_time(), case.world // case.groups
        if isinstance(own, Rank):
            objects[:] = [said_by(own.rank - own.rank % ranks + rank) for rank in range(ranks)]
            assert own in objects, own
        elif isinstance(own, list) and isinstance(own[0], Rank):
            objects[:] = [[said_by(first + rank) for rank in range(ranks)] for first in range(0, case.world, ranks)]
            assert own in objects, own
        spent["seconds"] += time.process_time() - begun

    dist.all_gather_object = gather_from_all
    # Equal fingerprints of samples would be refused. Ranks that read nothing have none.
    samples.fingerprint_of = lambda batch: None
    yield spent


@contextlib.contextmanager
def _counting_saves(found: dict[str, float]) -> Iterator[None]:
    """Counts what this rank puts into a checkpoint, and writes nothing: Megatron would miss what other ranks do."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory, apply_factories, is_main_replica
    from megatron.training import training

    from pier_megatron.integration import own_world
    from pier_megatron.integration.checkpoint import groups_files

    save_checkpoint = training.save_checkpoint

    def count(state: Any, *args: Any, **kwargs: Any) -> None:
        found["prepared"] = time.process_time() - found.pop("began")
        apply_factories(state)
        parts = [part for part in nested_values(state) if isinstance(part, ShardedBase)]
        assert not any(isinstance(part, ShardedTensorFactory) for part in parts)
        written = [part for part in parts if is_main_replica(part.replica_id)]
        found["keys"] = len({part.unique_key if hasattr(part, "unique_key") else part.key for part in written})
        found["saved"] = sum(_size(part.data) for part in written) / 1e3

    def timed(*args: Any, **kwargs: Any) -> Any:
        if (launch := own_world.divided()) is not None:
            launch.store.set(groups_files._key(1, 0), groups_files._DONE)
        found["began"] = time.process_time()
        return save_checkpoint(*args, **kwargs)

    groups_files._list_files = lambda *_: None
    dist_checkpointing.save = count
    training.save_checkpoint = timed
    yield


def _size(data: Any) -> int:
    """Bytes of a tensor, or of what is pickled."""
    return int(getattr(data, "nbytes", 0)) or len(pickle.dumps(data))


if __name__ == "__main__":
    main()
