"""What a process of a test launch does: it runs several trainings one after the other and records what they did.

Its arguments are a specification and a directory. The specification is a JSON list of the fields of ``launch.Run``; each
run leaves ``DIRECTORY/NAME-rankR.pt``. Everything that trains is Megatron's and the plugin's; this file only looks on,
except where a run asks for a planted bug, by its name in ``sabotage.py``.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from pier_megatron.cpu import emulation
from pier_megatron.cpu.preparations import missing_cpu_flags

emulation.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from copies import compare_copies  # noqa: E402
from megatron.core import (  # noqa: E402
    dist_checkpointing,
    num_microbatches_calculator,
    parallel_state,
    rerun_state_machine,
)
from megatron.core.optimizer import ChainedOptimizer  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402
from megatron.training import arguments as megatron_arguments  # noqa: E402
from megatron.training import global_vars  # noqa: E402
from megatron.training import training as megatron_training  # noqa: E402
from megatron.training import utils as training_utils  # noqa: E402
from pipeline_trace import traced  # noqa: E402
from sabotage import planted  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from writers import fork_what_hands_over_results  # noqa: E402

from pier_megatron.commands.demo import pretrain_bytes  # noqa: E402
from pier_megatron.integration import current, examination, own_world, seams  # noqa: E402
from pier_megatron.integration.census import CollectiveCensus  # noqa: E402
from pier_megatron.integration.inner.choice import commit_main_parameters, owners  # noqa: E402
from pier_megatron.megatron_api import run as training_under_way  # noqa: E402
from pier_megatron.megatron_api.seam import install  # noqa: E402

# Megatron and PyTorch import these when they train, which takes each rank seconds; here all ranks share them.
for _late in (
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.libraries",
    "megatron.core.tokenizers.text.models",
    "torch._dynamo",
    "torch.onnx",
):
    with contextlib.suppress(ModuleNotFoundError):  # Not every release has them all.
        importlib.import_module(_late)


def make_flags_once() -> None:
    """Every start of Megatron makes 800 flags, and from 0.18 on compiles the sources of its dataclasses for their helps."""
    made = megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(add_help=False))

    def add_made(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        # As ``ArgumentParser(parents=[made])`` does.
        parser._add_container_actions(made)
        return parser

    megatron_arguments.add_megatron_arguments = add_made


make_flags_once()


class Communicator(distributed_c10d.ProcessGroupGloo):
    """A communicator that lives until :meth:`end`: for each connection it takes gloo up to 10 ms to end, one after the other.

    Attributes:
        made: Those that live.
        has_made: Whether there was one.
    """

    made: ClassVar[list[Any]] = []
    has_made: ClassVar[bool] = False

    def __init__(self, *place: Any, **options: Any) -> None:
        super().__init__(*place, **options)
        if not self.has_made:
            type(self).has_made = True
            self.let_others_run_first()
        self.made.append(self)

    @staticmethod
    def let_others_run_first() -> None:
        """Gives gloo's threads what the ranks leave: they poll while a rank holds a lock, which took a fifth of the cores.

        Where other work keeps all cores busy, collectives take longer for it.
        """
        for thread in Path("/proc/self/task").glob("*"):
            # Another thread may have ended.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if (thread / "comm").read_text() == "gloo_tcp_loop\n":
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)

    @classmethod
    def end(cls) -> None:
        """Ends them at the same time."""
        threads = [threading.Thread(target=cls.made.pop) for _ in cls.made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


distributed_c10d.ProcessGroupGloo = Communicator


class Recorder:
    """Looks on at one training. What it keeps is chosen by ``probes``."""

    def __init__(self, probes: list[str], directory: Path) -> None:
        self.probes = set(probes)
        self.directory = directory
        self.record: dict[str, Any] = {"losses": {}, "grad_norms": {}, "printed": {}, "said": [], "validation": {}}
        self.iteration, self.evaluation = 0, ""
        self.has_begun = False
        self.census: CollectiveCensus | None = None
        self.model: Any = None
        self.optimizer: Any = None

    def begin_iteration(self, model: Any, optimizer: Any, iteration: int) -> None:
        self.model, self.optimizer, self.iteration = model, optimizer, iteration + 1
        if not self.has_begun:
            self.has_begun = True
            self.begin_run()
        if "census" in self.probes:
            self.take_census()

    def evaluate(self) -> None:
        """Records what an evaluation looks at."""
        if "main" in self.probes:
            self.record["validation"][self.evaluation] = self.flat_main_parameters()

    def begin_run(self) -> None:
        """Records where the run starts: at the beginning or at what it has loaded."""
        if "weights" in self.probes:
            self.save_weights("initial")
        if "fragments" in self.probes:
            self.save_fragments()
        if "matrices" in self.probes:
            self.save_matrices()
        if "start" in self.probes:
            self.record["start"] = {"main": self.flat_main_parameters(), "moments": self.flat_moments()}
        for name in ("anchor", "momentum"):
            if f"start {name}" in self.probes:
                self.record[f"start {name}"] = [state.flats[name].clone() for state in self.optimizer.loop.states]
        if "outer weights" in self.probes:
            for name in ("anchor", "momentum"):
                self.save_shown(name, [state.flats[name] for state in self.optimizer.loop.states])

    def take_census(self) -> None:
        """Records the collectives of a whole iteration, from one beginning to the next."""
        if self.census is not None:
            self.census.__exit__(None, None, None)
            self.record.setdefault("census", {})[self.iteration - 1] = self.census.collectives
        self.census = CollectiveCensus(own_world.launch().first_of_group)
        self.census.__enter__()

    def save_fragments(self) -> None:
        """Saves a model whose weights are the numbers of their fragments."""
        flats = [torch.empty(state.numel) for state in self.optimizer.loop.states]
        for state, flat in zip(self.optimizer.loop.states, flats, strict=True):
            for chunk in state.chunks:
                chunk.of(flat).fill_(chunk.fragment)
        self.save_shown("fragments", flats)

    def save_matrices(self) -> None:
        """Saves a model whose weights are numbers of the matrices of this rank that an outer rule sees, or -1."""
        flats = [torch.full((state.numel,), -1.0) for state in self.optimizer.loop.states]
        number = itertools.count(10_000 * dist.get_rank())
        for state, flat in zip(self.optimizer.loop.states, flats, strict=True):
            for matrix in (matrix for chunk in state.chunks for matrix in chunk.matrices(chunk.of(flat))):
                matrix.fill_(next(number))
        self.save_shown("matrices", flats)

    def save_shown(self, name: str, flats: list[torch.Tensor]) -> None:
        """Saves what the model would be with other main parameters."""
        kept = self.flat_outer_parameters()
        for shown in (flats, kept):
            for state, flat in zip(self.optimizer.loop.states, shown, strict=True):
                for chunk in state.chunks:
                    chunk.set_parameters(chunk.of(flat))
            commit_main_parameters(owners(self.optimizer), self.model)
            if shown is flats:
                self.save_weights(name)

    def after_inner_step(self) -> None:
        if "inner" in self.probes:
            self.record.setdefault("inner", {})[self.iteration] = self.flat_outer_parameters()
        if "gradients" in self.probes:
            gradients = torch.cat([parameter.grad.flatten() for parameter in self.main_parameters()])
            self.record.setdefault("gradients", {})[self.iteration] = gradients

    def end_iteration(self, result: tuple[Any, ...]) -> None:
        keep = self.record.setdefault
        if "skipped" in self.probes:
            keep("skipped", {})[self.iteration] = result[1]
            keep("own losses", {})[self.iteration] = {name: float(loss) for name, loss in result[0].items()}
        if "outer" in self.probes:
            keep("anchor", {})[self.iteration] = [state.anchor.clone() for state in self.optimizer.loop.states]
            keep("momentum", {})[self.iteration] = [state.momentum.clone() for state in self.optimizer.loop.states]
        looks = {
            "main": self.flat_main_parameters,
            "moments": self.flat_moments,
            "outer main": self.flat_outer_parameters,
            "stale": self.stale_parameters,
        }
        for name, look in looks.items():
            if name in self.probes:
                keep(name, {})[self.iteration] = look()

    def main_parameters(self) -> list[torch.Tensor]:
        groups = [group for owner in owners(self.optimizer) for group in owner.optimizer.optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def flat_outer_parameters(self) -> list[torch.Tensor]:
        """The main parameters in the order of the outer state."""
        flats = [torch.empty(state.numel) for state in self.optimizer.loop.states]
        for state, flat in zip(self.optimizer.loop.states, flats, strict=True):
            for chunk in state.chunks:
                chunk.copy_parameters_to(chunk.of(flat))
        return flats

    def flat_main_parameters(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.main_parameters()])

    def flat_moments(self) -> torch.Tensor:
        """The inner optimizers' moments, parameter by parameter; nothing before the first step."""
        states = [owner.state_of(main) for owner in owners(self.optimizer) for _, main in owner.parameters()]
        found = [moment for state in states for _, moment in sorted(state.items())]
        return torch.cat([moment.flatten() for moment in found] or [torch.empty(0)])

    def stale_parameters(self) -> int:
        """Counts elements with which the model would not compute what the main parameters say, on any rank of the group."""
        stale = 0
        for owner in owners(self.optimizer):
            for model, main in owner.parameters():
                held = model.detach().flatten()
                if main.shape != model.shape:
                    owned = owner.optimizer._get_model_param_range_map(model)["param"]
                    held = held[owned.start : owned.end]
                stale += int((held != main.detach().flatten().to(model.dtype)).sum())
        group = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
        for parameter in (parameter for chunk in self.model for parameter in chunk.parameters()):
            if not getattr(parameter, "allreduce", True):
                continue
            copies = [torch.empty_like(parameter.data) for _ in range(group.size())]
            dist.all_gather(copies, parameter.data.contiguous(), group=group)
            stale += sum(int((copy != parameter.data).sum()) for copy in copies)
        return stale

    def save_weights(self, name: str) -> None:
        if own_world.launch().group:
            # Those of the first group are saved.
            return
        path = self.directory / name
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        dist.barrier()
        state = {f"chunk{i}": chunk.module.sharded_state_dict() for i, chunk in enumerate(self.model)}
        dist_checkpointing.save(state, str(path), validate_access_integrity=False)

    def finish(self, path: Path) -> None:
        """Writes the record; :meth:`collect` comes first, unless the loop has called it before it forgot its groups."""
        if "group_of" not in self.record:
            self.collect()
        torch.save(self.record, path)

    def compare_copies(self) -> None:
        """Looks whether copies of a parameter are equal on all ranks that have one.

        Raises:
            AssertionError: If not.
        """
        if self.model:
            compare_copies(self.model, owners(self.optimizer), current.pier_optimizer())

    def collect(self) -> None:
        """Records what can be seen only while Megatron has its groups."""
        # A run may have had nothing left to train.
        self.optimizer = self.optimizer or current.pier_optimizer()
        if self.census is not None:
            self.census.__exit__(None, None, None)
        if "weights" in self.probes:
            self.save_weights("final")
        self.record["group_of"] = group_of_every_rank()
        self.record["parameters"] = sum(parameter.numel() for parameter in self.main_parameters())
        self.record["P2P waits for the device"] = get_model_config(self.model[0]).batch_p2p_sync if self.model else None
        self.record["group"] = self.record["group_of"][own_world.launch().rank]
        self.record["data_parallel_rank"] = parallel_state.get_data_parallel_rank()


def group_of_every_rank() -> dict[int, int]:
    """The group of each rank of the launch; with a stock optimizer, its instance by Megatron's own communicators."""
    launch = own_world.launch()
    if launch.groups > 1:
        return {rank: rank // launch.ranks_of_group for rank in range(launch.size)}
    inter = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    groups = [0] * dist.get_world_size()
    dist.all_gather_object(groups, inter.rank() if inter is not None else 0)
    return dict(enumerate(groups))


recorder: Recorder


def saves(decide: Any, iterations: list[int]) -> Any:
    """Saves after just these iterations, which no interval hits."""

    @functools.wraps(decide)
    def deciding(model: Any, optimizer: Any, scheduler: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        settings = global_vars.get_args()
        settings.save_interval = iteration if iteration in iterations else 10**6
        result = decide(model, optimizer, scheduler, iteration, *args, **kwargs)
        # After the last iteration Megatron saves too, unless it has just done so.
        settings.save_interval = iteration
        return result

    return (
        mock.patch.object(megatron_training, "checkpoint_and_decide_exit", deciding) if iterations else contextlib.nullcontext()
    )


def printing(print_log: Callable[[str], None]) -> Callable[[str], None]:
    """Records the losses that are printed."""

    def recorded_print(line: str) -> None:
        if found := re.search(r" iteration +(\d+)/.* lm loss: (\S+) ", line):
            recorder.record["printed"][int(found[1])] = float(found[2])
        print_log(line)

    return recorded_print


def look_on() -> None:
    """Puts the recorder under the plugin's hooks, so that it sees what Megatron sees."""
    train_step, training_log = megatron_training.train_step, megatron_training.training_log
    evaluation, inner_step = megatron_training.evaluate_and_print_results, ChainedOptimizer.step
    evaluate = megatron_training.evaluate
    print_log, print_more = megatron_training.print_rank_last, training_utils.print_rank_last

    @functools.wraps(train_step)
    def recorded_step(forward_step: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.begin_iteration(model, optimizer, kwargs["iteration"])
        return train_step(forward_step, data, model, optimizer, *args, **kwargs)

    @functools.wraps(training_log)
    def recorded_log(losses: Any, totals: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        # Position of the gradient norm in every supported release.
        recorder.record["grad_norms"][iteration] = args[3]
        if losses:
            recorder.record["losses"][iteration] = float(losses["lm loss"])
        return training_log(losses, totals, rate, iteration, *args, **kwargs)

    def recorded_more(line: str) -> None:
        recorder.record["said"].append(line)
        print_more(line)

    @functools.wraps(evaluation)
    def recorded_evaluation(prefix: str, *args: Any, **kwargs: Any) -> Any:
        recorder.evaluation = prefix
        return evaluation(prefix, *args, **kwargs)

    @functools.wraps(evaluate)
    def recorded_evaluate(*args: Any, **kwargs: Any) -> Any:
        recorder.evaluate()
        return evaluate(*args, **kwargs)

    def recorded_inner_step(optimizer: Any) -> Any:
        result = inner_step(optimizer)
        recorder.after_inner_step()
        return result

    ChainedOptimizer.step = recorded_inner_step
    megatron_training.train_step = recorded_step
    megatron_training.training_log = recorded_log
    megatron_training.print_rank_last = printing(print_log)
    training_utils.print_rank_last = recorded_more
    megatron_training.evaluate_and_print_results, megatron_training.evaluate = recorded_evaluation, recorded_evaluate


def look_on_from_above() -> None:
    """Sees the end of an iteration after the plugin has done its part, and the samples that a rank trains on."""
    train_step, forward_step = megatron_training.train_step, pretrain_bytes.forward_step

    @functools.wraps(train_step)
    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        recorder.end_iteration(result)
        return result

    @functools.wraps(forward_step)
    def recorded_forward(batches: Any, model: Any) -> Any:
        batch = next(batches)
        if "samples" in recorder.probes:
            kind = "samples" if model.training else "evaluation samples"
            samples = recorder.record.setdefault(kind, {}).setdefault(recorder.iteration, [])
            samples.append((batch["tokens"].clone(), batch["labels"].clone()))
        return forward_step(iter([batch]), model)

    megatron_training.train_step = recorded_step
    pretrain_bytes.forward_step = recorded_forward


def forget_run() -> None:
    """Returns Megatron to the state after import."""
    for chunk in recorder.model or ():
        # Its hooks and its parameters hold each other where Python's garbage collector does not look. Nothing else shall go
        # with them, least of all the communicators, whose threads would make every run slower than the one before.
        chunk.__dict__.clear()
    recorder.model = recorder.optimizer = None
    parallel_state.destroy_model_parallel()
    global_vars.destroy_global_vars()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    with contextlib.suppress(
        ModuleNotFoundError
    ):  # From 0.18 on it keeps the groups over which it averages statistics of experts.
        importlib.import_module("megatron.core.transformer.moe.moe_logging").destroy_moe_metrics_tracker()
    # Megatron forgets its communicators but leaves their threads, hundreds after a few trainings.
    if dist.is_initialized():
        dist.destroy_process_group()
    # Collects the garbage of this run; the next training begins without it.
    training_under_way.begin()
    # What has outlived this run outlives the next ones, which need not look through it for garbage.
    gc.freeze()
    Communicator.end()


class Keys:
    """Keys of one training in the store that the launch has for all of them."""

    def __init__(self, name: str) -> None:
        self._place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        all_keys = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self._store = dist.PrefixStore(name, all_keys)
        # The function of the package hides the module of its name.
        sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers["env"] = lambda url, **options: iter(
            [(self._store, *self._place)]
        )

    def meet_all_ranks(self) -> None:
        """Waits for all ranks, whatever their worlds were."""
        if self._store.add("ended", 1) == self._place[1]:
            self._store.set("all have ended", "")
        self._store.wait(["all have ended"])


def print_to(log: Path) -> None:
    """Sends there what this process and what it starts print from now on."""
    # What is still in a buffer belongs to the run before.
    sys.stdout.flush()
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def train_with_flags(argv: list[str]) -> None:
    """Trains as a command line says."""
    sys.argv = [pretrain_bytes.__file__, *argv, *missing_cpu_flags(argv)]
    # Also after --exit-interval, and after converting a checkpoint.
    with contextlib.suppress(SystemExit):
        pretrain_bytes.main()
    recorder.compare_copies()


def main(train: Callable[[list[str]], None] = train_with_flags) -> None:
    """Runs the trainings of the specification, each as its arguments say."""
    global recorder
    specification, directory = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    install(seams.WITHOUT_PIER)
    fork_what_hands_over_results()
    look_on()
    from pier_megatron import register

    register()
    # Those of all runs, beneath what looks on from above: each passes through where a run does not use it.
    install([row for row in seams.TABLE if row.around.__module__ != examination.__name__])
    look_on_from_above()
    stream = sys.stdout
    for run in specification:
        name, argv = run["name"], run["argv"]
        rank = os.environ["RANK"]
        keys = Keys(name)
        print_to(directory / f"{name}-rank{rank}.txt")
        recorder = Recorder(run["probes"], directory / name)
        record = directory / f"{name}-rank{rank}.pt"
        try:
            decide = megatron_training.checkpoint_and_decide_exit
            with planted(run["sabotage"], directory), saves(decide, run["saves"]), traced(recorder):
                train(argv)
        except Exception as error:
            if not run["fails"]:
                raise
            said = [str(error), *getattr(error, "__notes__", ())]
            failed = {"error": f"{type(error).__name__}: {' '.join(said)}", "group": 0}
            torch.save(recorder.record | failed, record)
        else:
            assert not run["fails"], f"{name} should have failed"
            recorder.finish(record)
        keys.meet_all_ranks()
        forget_run()
        sys.stdout = stream
    sys.stdout.flush()
