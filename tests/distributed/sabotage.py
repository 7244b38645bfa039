"""Faults that happen to trainings, and what stands in for parts that a CPU does not have."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import quantised_parameters
import te_stand_in
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.models import backends
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.training import (
    dist_signal_handler,
    global_vars,
)
from megatron.training import training as megatron_training
from torch.distributed.checkpoint import FileSystemReader
from torch.multiprocessing import reductions

from pier_megatron.commands.demo import pretrain_bytes
from pier_megatron.exchange import codecs
from pier_megatron.exchange.pairs import draw_subgroups
from pier_megatron.experiments.compression import activations, layout, tensor_parallel
from pier_megatron.integration import current, own_world, training
from pier_megatron.integration.checkpoint import description as checkpoint
from pier_megatron.integration.inner.choice import commit_main_parameters, owners
from pier_megatron.megatron_api.tracker import tracker_of
from pier_megatron.outer import state as outer_state

Patch = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def planted(names: list[str], directory: Path) -> Iterator[None]:
    """Runs with the faults of those names; they may leave marks in ``directory``."""
    with contextlib.ExitStack() as stack:
        for name in names:
            numbered = _NUMBERED.fullmatch(name)
            stack.enter_context(_fault(*numbered.groups()) if numbered else _ALL[name](directory))
        yield


def _losses_are_averaged(directory: Path) -> Patch:
    """Imports the function by name, as pretrain_bert.py does."""
    average = importlib.import_module("megatron.training.utils").average_losses_across_data_parallel_group

    def loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = (losses.view(-1).float() * mask.view(-1)).sum() / mask.sum()
        return mean, {"lm loss": average([mean])[0]}

    return mock.patch.object(pretrain_bytes, "_loss", loss)


def _the_script_reduces(directory: Path) -> Patch:
    """In every micro-batch: over all ranks that it knows, and, as pretrain_gpt.py of core_r0.12, over data-parallel ones."""
    forward_step = pretrain_bytes.forward_step

    def reducing(batches: Any, model: Any) -> Any:
        optimizer = current.pier_optimizer()
        assert optimizer is not None
        # Evaluation is of all groups.
        is_local = model.training and optimizer.loop.is_local
        over_all, over_data_parallel = torch.ones(1000), torch.ones(1000)
        dist.all_reduce(over_all)
        dist.all_reduce(over_data_parallel, group=parallel_state.get_data_parallel_group())
        assert over_all[0] == dist.get_world_size() == 2
        assert over_data_parallel[0] == (2 if is_local else 4)
        return forward_step(batches, model)

    return mock.patch.object(pretrain_bytes, "forward_step", reducing)


def _imported(name: str) -> Callable[[Path], Patch]:
    """A module has imported one of Megatron's functions by name, before arguments were parsed, and calls that one."""

    @contextlib.contextmanager
    def by_name(directory: Path) -> Iterator[None]:
        set_up, replaced = megatron_training.setup_model_and_optimizer, getattr(megatron_training, name)

        @functools.wraps(set_up)
        def then_by_name(*args: Any, **kwargs: Any) -> Any:
            result = set_up(*args, **kwargs)
            setattr(megatron_training, name, inspect.unwrap(replaced))
            return result

        with mock.patch.object(megatron_training, "setup_model_and_optimizer", then_by_name):
            try:
                yield
            finally:
                setattr(megatron_training, name, replaced)

    return by_name


@contextlib.contextmanager
def _sequences_are_packed(directory: Path) -> Iterator[None]:
    """Tells Megatron the lengths of sequences in every micro-batch, as pretrain_gpt.py does with ``--sft``."""
    forward_step, count = pretrain_bytes.forward_step, megatron_training.num_floating_point_operations

    def forward_packed(*args: Any) -> Any:
        megatron_training.update_seqlen_stats_from_cu_seqlens(torch.tensor([0, 10, 32]))
        return forward_step(*args)

    def count_all(*args: Any, **packed: Any) -> Any:
        # 32 tokens in each of two micro-batches of four replicas.
        assert packed["total_real_tokens_in_batch"] == 256
        return count(*args, **packed)

    with (
        mock.patch.object(pretrain_bytes, "forward_step", forward_packed),
        mock.patch.object(megatron_training, "num_floating_point_operations", count_all),
    ):
        yield


def _ends_for_a_rerun(directory: Path) -> Patch:
    """Megatron's rerun machine has seen a result in iteration 4 that it wants to see again on other devices."""
    decide = RerunStateMachine.should_checkpoint_and_exit

    def decide_to_exit(machine: Any) -> Any:
        return (True, True, 16) if current.pier_optimizer().loop.iteration == 4 else decide(machine)

    return mock.patch.object(RerunStateMachine, "should_checkpoint_and_exit", decide_to_exit)


def _an_indexer_has_losses(directory: Path) -> Patch:
    """Sparse attention needs kernels for a GPU; what Megatron logs of its indexer does not."""
    losses = {"values": torch.ones(2), "reduce_group": None, "avg_group": None}
    return mock.patch.dict(dsa.DSAIndexerLossLoggingHelper.tracker, losses)


@contextlib.contextmanager
def _lossless_codecs(directory: Path) -> Iterator[None]:
    """What would be compressed goes the same way in FP32, so that nothing but that way can make a difference; in pieces."""
    exact = {codec.name: dataclasses.replace(codec, bits=32, scale_bytes=0) for codec in codecs.CODECS.values()}
    with (
        mock.patch.dict(codecs.CODECS, exact),
        mock.patch.object(layout, "_PIECE", 2**12),
        mock.patch.object(activations, "saves_bytes", return_value=True),
        mock.patch.object(tensor_parallel, "saves_bytes", return_value=True),
    ):
        yield


def _lengths_that_vary(directory: Path) -> Patch:
    """Stages tell each other the shape of what they send, as with sequences of different lengths; no flag asks for it."""
    init = p2p_communication.P2PCommunicator.__init__

    def exchanging(communicator: Any, pp_group: Any, config: Any) -> None:
        init(communicator, pp_group, config)
        communicator.config = copy.copy(config)
        communicator.config.variable_seq_lengths = True

    return mock.patch.object(p2p_communication.P2PCommunicator, "__init__", exchanging)


class _LatentAttention(torch.nn.Module):
    """What Transformer Engine has for heads whose values are not as long as their queries; Megatron's own refuses them."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        # Shapes [sequence, batch, heads, channels].
        of_heads = [each.permute(1, 2, 0, 3) for each in (query, key, value)]
        context = torch.nn.functional.scaled_dot_product_attention(*of_heads, is_causal=True, scale=self._scale)
        return context.permute(2, 0, 1, 3).flatten(2)


def _small_pieces(directory: Path) -> Patch:
    """What is sent is encoded in many pieces, as that of a large model."""
    return mock.patch.object(layout, "_PIECE", 2**12)


def _a_copy_drifts(is_other: Callable[[], bool], is_copied: Callable[[torch.Tensor], bool]) -> Callable[[Path], Patch]:
    """One of the ranks that hold copies of a parameter changes its own, in every group and in its main parameter."""
    step = ChainedOptimizer.step

    def drifting(optimizer: Any) -> Any:
        result = step(optimizer)
        if optimizer.loop.iteration == 2 and is_other():
            mains = [main for owner in owners(optimizer) for model, main in owner.parameters() if is_copied(model)]
            next(main for main in mains if main.numel()).detach().view(-1)[0] += 1e-4
        return result

    return lambda directory: mock.patch.object(ChainedOptimizer, "step", drifting)


def _a_gather_goes_wrong(directory: Path) -> Patch:
    """One data-parallel rank of each group computes with another parameter than the others."""

    def commit(members: Any, model_chunks: Any) -> None:
        commit_main_parameters(members, model_chunks)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
        if group.rank() == 1:
            next(parameter for parameter in model_chunks[0].parameters() if parameter.dim() == 1).data[0] += 1

    return mock.patch("pier_megatron.integration.training.commit_main_parameters", commit)


def _another_file_of_routes(directory: Path) -> Patch:
    """One rank has read a file of routes that the others have not."""
    read = Path.read_bytes

    def other_bytes(path: Path) -> bytes:
        return read(path) + (b" " if dist.get_rank() == 3 else b"")

    return mock.patch.object(Path, "read_bytes", other_bytes)


_NUMBERED = re.compile(r"(overflow|nan|nan in the moments) (?:in|of) group (\d) at (\d+)(?: and (\d+))?")


def _fault(kind: str, group: str, *iterations: str | None) -> Patch:
    """Does something to one group before its inner step, or to its parameters after it."""
    step = ChainedOptimizer.step

    def faulty_step(optimizer: Any) -> Any:
        strikes = optimizer.loop.exchange.rank == int(group) and str(optimizer.loop.iteration) in iterations
        if strikes and kind != "nan":
            {"overflow": _overflow, "nan in the moments": _nan_moments}[kind](optimizer)
        result = step(optimizer)
        if strikes and kind == "nan":
            _nan(optimizer)
        return result

    return mock.patch.object(ChainedOptimizer, "step", faulty_step)


def _group_1_waits_for_group_0(directory: Path) -> Patch:
    """Group 1 does not end iteration 4 before group 0 has ended iteration 5: impossible if they meet in between."""
    return _asleep(directory / "group 0 has ended iteration 5", 1, (0, 5), "group 0 waits for group 1")


def _a_group_sleeps_while_two_others_meet(directory: Path) -> Patch:
    """A group does not end iteration 4 before one has ended iteration 8 whose meeting after iteration 6 is another."""
    (sleeper, _), (awake, _), *_ = draw_subgroups(6, 2, 0, 6)
    return _asleep(directory / "two others have met", sleeper, (awake, 8), "a group waits for one that it does not meet")


def _asleep(mark: Path, sleeper: int, until: tuple[int, int], complaint: str) -> Patch:
    """A group does not end iteration 4 before another group has ended an iteration."""
    step = ChainedOptimizer.step

    def waiting_step(optimizer: Any) -> Any:
        result = step(optimizer)
        group, iteration = optimizer.loop.exchange.rank, optimizer.loop.iteration
        if (group, iteration) == until:
            mark.touch()
        if (group, iteration) == (sleeper, 4):
            deadline = time.monotonic() + 60
            while not mark.exists():
                assert time.monotonic() < deadline, complaint
                time.sleep(0.05)
        return result

    return mock.patch.object(ChainedOptimizer, "step", waiting_step)


@contextlib.contextmanager
def _slow_writers_that_share_host_memory(directory: Path) -> Iterator[None]:
    """A checkpoint is written five iterations after its own, or at the end, by processes that share offloaded buffers.

    Then a round that began after it has ended.

    The emulation copies them, because it cannot tell them from what would be on a device.
    """
    step, write = ChainedOptimizer.step, FileSystemWriterAsync.write_preloaded_data_multithread
    copied = ForkingPickler._extra_reducers[torch.Tensor]
    # Shared with the process that writes, a child of this one.
    ended = multiprocessing.Value("i", 0)

    def counting_step(optimizer: Any) -> Any:
        result = step(optimizer)
        ended.value = optimizer.loop.iteration
        return result

    @functools.wraps(write)
    def late(transforms: Any, use_msc: bool, rank: int, buckets: Any, results: Any) -> None:
        saved = re.search(r"/iter_(\d+)/", str(buckets[0][0]))
        assert saved
        deadline = time.monotonic() + 60
        while ended.value < min(int(saved[1]) + 5, global_vars.get_args().train_iters):
            assert time.monotonic() < deadline, "training waits for the save"
            time.sleep(0.02)
        write(transforms, use_msc, rank, buckets, results)

    def reduced(tensor: torch.Tensor) -> Any:
        pier = current.pier_optimizer()
        assert pier
        offloaded = {flat.untyped_storage().data_ptr() for state in pier.loop.states for flat in state.flats.values()}
        is_shared = tensor.untyped_storage().data_ptr() in offloaded
        return reductions.reduce_tensor(tensor) if is_shared else copied(tensor)

    with (
        mock.patch.object(ChainedOptimizer, "step", counting_step),
        mock.patch.object(FileSystemWriterAsync, "write_preloaded_data_multithread", staticmethod(late)),
        mock.patch.dict(ForkingPickler._extra_reducers, {torch.Tensor: reduced}),
        # A process that has used a device cannot be forked. This one can, and its child knows what is patched here.
        mock.patch.object(torch.multiprocessing, "get_context", return_value=multiprocessing.get_context("fork")),
    ):
        yield


def _newer_plugin(directory: Path) -> Patch:
    """Checkpoints are written by a plugin that does not exist yet."""
    to_metadata = checkpoint.Description.to_metadata
    return mock.patch.object(
        checkpoint.Description, "to_metadata", lambda self: to_metadata(self) | {"format": 99, "version": "9.0"}
    )


def _damaged(damage: Callable[[Path], None], iteration: int) -> Callable[[Path], Patch]:
    """Damages a checkpoint before the run loads it, which no rank does before this one takes part."""

    def strike(directory: Path) -> Patch:
        if os.environ["RANK"] == "0":
            damage(directory / "damaged" / f"iter_{iteration:07d}")
        return contextlib.nullcontext()

    return strike


def _flip_a_bit(folder: Path) -> None:
    """Changes one bit in the middle of the longest stretch of the momentum."""
    found = FileSystemReader(folder).read_metadata().storage_data.items()
    momentum = [place for index, place in found if "pier.outer" in index.fqn and index.fqn.endswith("exp_avg")]
    place = max(momentum, key=lambda place: place.length)
    with (folder / place.relative_path).open("r+b") as file:
        file.seek(place.offset + place.length // 2)
        byte = file.read(1)[0]
        file.seek(place.offset + place.length // 2)
        file.write(bytes([byte ^ 1]))


def _remove_a_file(folder: Path) -> None:
    max(folder.glob("*.distcp")).unlink()


def _truncate_a_file(folder: Path) -> None:
    path = max(folder.glob("*.distcp"))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _empty_the_tracker(folder: Path) -> None:
    tracker_of(folder.parent).write_text("")


def _remove_a_group(folder: Path) -> None:
    """The files of a group are gone, and the job was killed while it named its last checkpoint."""
    shutil.rmtree(folder / "group_1")
    _empty_the_tracker(folder)


def _other_weights(directory: Path) -> Patch:
    """Group 1 starts from weights of its own."""
    get_model = megatron_training.get_model

    def differing_model(*args: Any, **kwargs: Any) -> Any:
        chunks = get_model(*args, **kwargs)
        if own_world.launch().group == 1:
            with torch.no_grad():
                next(chunks[0].parameters()).add_(0.5)
        return chunks

    return mock.patch.object(megatron_training, "get_model", differing_model)


@contextlib.contextmanager
def _no_memory(directory: Path) -> Iterator[None]:
    """A node without free memory, where it must not be taken before that is seen."""
    taken = mock.patch.object(outer_state.OuterState, "__init__", side_effect=AssertionError("taken before it was looked at"))
    with taken, mock.patch.object(training.psutil, "virtual_memory", return_value=mock.Mock(available=0)):
        yield


def _same_data(directory: Path) -> Patch:
    """Every rank reads what the first one reads."""
    return mock.patch.object(parallel_state, "get_data_parallel_rank", return_value=0)


@contextlib.contextmanager
def _middle_stages_read_nothing(directory: Path) -> Iterator[None]:
    """Gives data to the first and the last pipeline stage only, like Megatron-LM's ``pretrain_gpt.py``."""
    build, forward = pretrain_bytes.build_datasets, pretrain_bytes.forward_step

    def build_datasets(*args: Any, **kwargs: Any) -> Any:
        # All stages wait for each other there.
        built = build(*args, **kwargs)
        reads = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
        return built if reads else (None, None, None)

    def forward_step(batches: Any, model: Any) -> Any:
        # A middle stage computes with what it has received, whatever it reads.
        nothing = dict.fromkeys(("tokens", "labels", "position_ids", "loss_mask"), torch.zeros(2, 32, dtype=torch.int64))
        return forward(iter([nothing]) if batches is None else batches, model)

    build_datasets.is_distributed = True  # type: ignore[attr-defined]
    with (
        mock.patch.object(pretrain_bytes, "build_datasets", build_datasets),
        mock.patch.object(pretrain_bytes, "forward_step", forward_step),
    ):
        yield


def _overflow(optimizer: Any) -> None:
    for chunk in optimizer.model_chunks:
        next(chunk.parameters()).main_grad.fill_(float("inf"))


def _nan(optimizer: Any) -> None:
    next(optimizer.loop.states[0].slices())[0].detach()[0] = float("nan")


def _nan_moments(optimizer: Any) -> None:
    for owner in owners(optimizer):
        for _, main in owner.parameters():
            for moment in owner.state_of(main).values():
                moment.fill_(float("nan"))


def _a_signal_behind_the_question(directory: Path) -> Any:
    """Group 1 receives a signal after it has been asked, in iteration 4, where the groups meet for the last time before 6."""
    ask, handler = dist_signal_handler.DistributedSignalHandler.signals_received, dist_signal_handler.DistributedSignalHandler

    def asked(self: Any) -> Any:
        found = ask(self)
        if own_world.launch().group == 1 and importlib.import_module("recorder").recorder.iteration == 4:
            self._signal_received = True
        return found

    return mock.patch.object(handler, "signals_received", asked)


_ALL = {
    "a signal behind the question": _a_signal_behind_the_question,
    "an indexer has losses": _an_indexer_has_losses,
    "Transformer Engine 2.13": lambda directory: te_stand_in.in_place("2.13"),
    "Transformer Engine 2.0": lambda directory: te_stand_in.in_place("2.0"),
    "halves rounded up": lambda directory: te_stand_in.halves_rounded_up(),
    "losses are averaged in every micro-batch": _losses_are_averaged,
    "the script reduces by itself": _the_script_reduces,
    "train_step is imported by name": _imported("train_step"),
    "save_checkpoint is imported by name": _imported("save_checkpoint"),
    "sequences are packed": _sequences_are_packed,
    "ends for a rerun at 4": _ends_for_a_rerun,
    "a newer plugin": _newer_plugin,
    "a bit of the momentum is flipped": _damaged(_flip_a_bit, 3),
    "a file is missing": _damaged(_remove_a_file, 6),
    "a file is truncated": _damaged(_truncate_a_file, 9),
    "the tracker is empty": _damaged(_empty_the_tracker, 12),
    "a group is missing, and the tracker is empty": _damaged(_remove_a_group, 12),
    "other weights in group 1": _other_weights,
    "a node without memory": _no_memory,
    "all groups read the same": _same_data,
    "middle stages read nothing": _middle_stages_read_nothing,
    "group 1 waits for group 0": _group_1_waits_for_group_0,
    "a group sleeps while two others meet": _a_group_sleeps_while_two_others_meet,
    "slow writers that share host memory": _slow_writers_that_share_host_memory,
    "another file of routes": _another_file_of_routes,
    "lossless codecs": _lossless_codecs,
    "lengths that vary": _lengths_that_vary,
    "latent attention": lambda directory: mock.patch.object(backends, "DotProductAttention", _LatentAttention),
    "small pieces": _small_pieces,
    "a tensor-parallel copy drifts": _a_copy_drifts(
        lambda: parallel_state.get_tensor_model_parallel_rank() == 1, lambda parameter: not parameter.tensor_model_parallel
    ),
    "a tied copy drifts": _a_copy_drifts(
        parallel_state.is_pipeline_last_stage, lambda parameter: getattr(parameter, "shared_embedding", False)
    ),
    "a gather goes wrong": _a_gather_goes_wrong,
    **{f"parameters in {recipe}": quantised_parameters.stand_in(recipe) for recipe in quantised_parameters.RECIPES},
    "a scale drifts": quantised_parameters.a_scale_drifts,
}
