"""Runs a step by routes: each rank takes the passes of its list, and sends and receives between them.

Megatron's forward and backward step run the passes, and its schedule without a pipeline is around them, for what a step has
before and after. Every message is posted where the order of all passes has it, on both ranks: what two ranks exchange has one
order, as NCCL needs it, and no circle of waits can come about even if a message blocks until the other side is there.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.skipping.pipeline.routes import Action, MicroBatch, Place, Routes, Visit
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.run import part

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_PARALLEL_STATE = "megatron.core.parallel_state"


class Handle(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Waits for it."""


def transfer(start: Callable[..., dict[str, Handle]], /, **given: Tensor) -> dict[str, Handle]:
    """Sends or receives activations; a codec may be put around it."""
    return start(**given)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This rank's place, and the ranks at all places.

    Attributes:
        own: Its place.
        of: Global rank at a place.
    """

    own: Place
    of: Callable[[Place], int]


def ranks(replicas: int) -> Ranks:
    """Finds this rank's place in its group: the ranks with the same part of the layers' tensors and of the sequence.

    Args:
        replicas: Number of model replicas of a group.
    """
    pipeline = versions.require(_PARALLEL_STATE, "get_pipeline_model_parallel_group")()
    data = versions.require(_PARALLEL_STATE, "get_data_parallel_group")()
    # Groups are consecutive data-parallel ranks; an island sees its own alone.
    index = dist.get_rank(data)
    first = index // replicas * replicas
    stages, peers = dist.get_process_group_ranks(pipeline), dist.get_process_group_ranks(data)
    # Megatron lays ranks out as a grid in every order that it knows.
    return Ranks(
        Place(dist.get_rank(pipeline), index - first),
        lambda place: stages[place.stage] + peers[first + place.replica] - dist.get_rank(),
    )


def run(routes: Routes, /, *, model: Sequence[nn.Module], num_microbatches: int, **kwargs: object) -> object:
    """Runs a training step.

    Args:
        routes: Those of a group.
        model: The rank's stage, alone in its list.
        num_microbatches: Number of micro-batches of this step.
        kwargs: Other arguments of Megatron's schedule.

    Raises:
        PierConfigError: If it has another number of micro-batches than the routes.
    """
    if num_microbatches != routes.micro_batches:
        raise PierConfigError(
            f"--pier-skip-routes has routes for steps of {routes.micro_batches} micro-batches of a replica, and this one has "
            f"{num_microbatches}. Plan routes for this batch; a batch that ramps up has none."
        )
    steps = _Steps(routes, model[0], kwargs)
    replacements = {"forward_step": steps.forward_step, "backward_step": steps.backward_step}
    schedule = versions.require(_SCHEDULES, "forward_backward_no_pipelining")
    with versions.replaced(importlib.import_module(_SCHEDULES), replacements):
        return schedule(model=model, num_microbatches=num_microbatches, **kwargs)


@dataclasses.dataclass
class _Own:
    """What this rank does in each step of the training under way; nothing before the first one."""

    actions: list[Action] = dataclasses.field(default_factory=list)


class Batches:
    """The batches of this rank's replica, which micro-batches may want in another order than the data has them in."""

    def __init__(self, data: Iterator[object] | None, own: Place) -> None:
        self._data, self._own = data, own
        self._read: list[object] = []

    def of(self, micro_batch: MicroBatch) -> Iterator[object] | None:
        """An iterator over a micro-batch's own; None where Megatron gives a rank none."""
        return None if self._data is None else self._only(self._data, micro_batch)

    def _only(self, data: Iterator[object], micro_batch: MicroBatch) -> Iterator[object]:
        # Most scripts do not come here between the ends of the pipeline.
        if micro_batch.replica != self._own.replica:
            raise PierConfigError(
                f"--pier-skip-routes: the training script reads data in stage {self._own.stage}, between the ends of the "
                f"pipeline, as for packed sequences. It reads data of replica {self._own.replica} for a micro-batch of replica "
                f"{micro_batch.replica}. Search routes that stay in their replica: --stay of examples/skip_routes.py."
            )
        while len(self._read) <= micro_batch.number:
            self._read.append(next(data))
        batch, self._read[micro_batch.number] = self._read[micro_batch.number], None
        yield batch


class _Steps:
    """Stand in for Megatron's forward and backward step: the last micro-batch of the schedule around runs the whole list."""

    def __init__(self, routes: Routes, model: nn.Module, given: Mapping[str, object]) -> None:
        self._forward_step = versions.require(_SCHEDULES, "forward_step")
        self._backward_step = versions.require(_SCHEDULES, "backward_step")
        self._release = versions.require(_SCHEDULES, "deallocate_output_tensor")
        self._config = versions.require("megatron.core.utils", "get_model_config")(model)
        self._model, self._routes, self._ranks = model, routes, ranks(routes.replicas)
        own = part(_Own)
        own.actions = own.actions or routes.actions(self._ranks.own)
        self._actions = own.actions
        self._shape = self._shape_of_messages(given)
        self._left = routes.micro_batches
        self._kept: dict[MicroBatch, tuple[Tensor | None, Tensor]] = {}
        self._results: dict[Visit, Tensor] = {}
        self._arrivals: dict[Visit, tuple[Tensor, Handle]] = {}
        self._sent: list[dist.Work] = []

    def forward_step(self, *args: object, **kwargs: object) -> tuple[None, Tensor | int]:
        """Takes what Megatron's takes; returns no loss, and the tokens of all micro-batches once they have passed."""
        self._left -= 1
        if self._left:
            return None, 0
        given = versions.given(self._forward_step, args, kwargs)
        return None, self._run(given, Batches(given["data_iterator"], self._ranks.own))

    def backward_step(self, *args: object) -> None:
        """Does nothing: the passes are over."""

    def _run(self, given: dict[str, object], batches: Batches) -> Tensor | int:
        if self._config.param_sync_func is not None:
            self._config.param_sync_func(self._model.parameters())
        no_sync = self._config.no_sync_func
        # A reduction with other replicas' ranks inside a pass could wait for one that waits for this rank's messages.
        with contextlib.nullcontext() if no_sync is None else no_sync():
            tokens = self._take_passes(given, batches)
        if self._config.grad_sync_func is not None:
            self._config.grad_sync_func(self._model.parameters())
        for message in self._sent:
            message.wait()
        return tokens

    def _take_passes(self, given: dict[str, object], batches: Batches) -> Tensor | int:
        tokens: Tensor | int = 0
        is_first = True
        for action in self._actions:
            visit = action.visit
            if action.kind == "send":
                self._send(action)
            elif action.kind == "receive":
                self._receive(action)
            elif visit.is_backward:
                self._backward(visit)
            else:
                tokens += self._forward(given, batches, visit, is_first)
                is_first = False
        return tokens

    def _forward(self, given: dict[str, object], batches: Batches, visit: Visit, is_first: bool) -> Tensor | int:
        leaf = None
        if visit.hop:
            leaf = self._arrived(Visit(False, visit.micro_batch, visit.hop - 1)).requires_grad_()
        changed = {
            "data_iterator": batches.of(visit.micro_batch),
            "input_tensor": leaf,
            "is_first_microbatch": is_first,
            "current_microbatch": visit.micro_batch.number,
            "is_last_stage": self._ranks.own.stage == self._routes.stages - 1,
        }
        output, tokens = self._forward_step(**{**given, **changed})
        self._kept[visit.micro_batch] = leaf, output
        self._results[visit] = output
        counted: Tensor | int = tokens
        return counted

    def _backward(self, visit: Visit) -> None:
        is_of_loss = visit.hop == len(self._routes.paths[visit.micro_batch]) - 1
        gradient = None if is_of_loss else self._arrived(Visit(True, visit.micro_batch, visit.hop + 1))
        leaf, output = self._kept.pop(visit.micro_batch)
        self._results.pop(Visit(False, visit.micro_batch, visit.hop), None)
        self._results[visit] = self._backward_step(leaf, output, gradient, self._config)

    def _send(self, action: Action) -> None:
        assert action.peer is not None
        result, peer = self._results.pop(action.visit), self._ranks.of(action.peer)

        def start(tensor_send_next: Tensor) -> dict[str, Handle]:
            message = _present(dist.isend(tensor_send_next, peer))
            self._sent.append(message)
            return {"send_next": message}

        # Megatron empties an output that is sent; the message under way holds on to the numbers.
        transfer(start, tensor_send_next=result.detach().contiguous())
        if not action.visit.is_backward:
            self._release(result, self._config.deallocate_pipeline_outputs)
        self._sent = [message for message in self._sent if not message.is_completed()]

    def _receive(self, action: Action) -> None:
        assert action.peer is not None
        peer = self._ranks.of(action.peer)
        tensor = torch.empty(self._shape, dtype=self._config.pipeline_dtype, device=torch.cuda.current_device())

        def start(tensor_recv_prev: Tensor) -> dict[str, Handle]:
            return {"recv_prev": _present(dist.irecv(tensor_recv_prev, peer))}

        begun = transfer(start, tensor_recv_prev=tensor)
        assert isinstance(begun, dict)
        self._arrivals[action.visit] = tensor, begun["recv_prev"]

    def _arrived(self, visit: Visit) -> Tensor:
        tensor, handle = self._arrivals.pop(visit)
        handle.wait()
        return tensor

    def _shape_of_messages(self, given: Mapping[str, object]) -> tuple[int, int, int]:
        [shape] = versions.require(_SCHEDULES, "get_tensor_shapes")(
            seq_length=given["seq_length"],
            micro_batch_size=given["micro_batch_size"],
            decoder_seq_length=given.get("decoder_seq_length"),
            config=self._config,
            tp_group=versions.require(_PARALLEL_STATE, "get_tensor_model_parallel_group")(),
            cp_group=versions.require(_PARALLEL_STATE, "get_context_parallel_group")(),
        )
        found: tuple[int, int, int] = shape
        return found


def _present(work: dist.Work | None) -> dist.Work:
    """A message under way; PyTorch has none for ranks outside a group."""
    assert work is not None
    return work
