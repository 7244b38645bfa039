"""Layered gradient accumulation (arXiv 2106.02679): several micro-batches pass each segment of a model before the next one.

Megatron's schedule, forward step and model stay as they are. Each forward step is a coroutine that pauses where a layer begins;
what comes out of the layer before is cut off from what follows, so that the backward passes can be taken segment by segment.
"""

import contextlib
import contextvars
import copy
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence

import greenlet
import torch
from torch import nn

from pier_megatron.errors import PierConfigError
from pier_megatron.megatron_api import versions

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"

# What Megatron's forward step returns: a micro-batch's loss and its tokens.
type _Loss = tuple[torch.Tensor, torch.Tensor | int]


def accumulate[R](
    schedule: Callable[..., R],
    /,
    *,
    model: Sequence[nn.Module],
    num_microbatches: int,
    at_a_time: int,
    **kwargs: object,
) -> R:
    """Runs Megatron's schedule without pipelining, of a training step, layer by layer.

    Args:
        schedule: Megatron's function.
        model: The model, alone in its list.
        num_microbatches: Number of micro-batches of this step.
        at_a_time: Most micro-batches that pass a layer before any passes the next one.
        kwargs: Other arguments of the schedule.

    Raises:
        PierConfigError: If the model has no single sequence of layers.
    """
    with cut_before_layers(model[0]) as cuts:
        steps = _Steps(model[0], num_microbatches, at_a_time, cuts)
        replacements = {"forward_step": steps.forward_step, "backward_step": steps.backward_step}
        with versions.replaced(importlib.import_module(_SCHEDULES), replacements):
            return schedule(model=model, num_microbatches=num_microbatches, **kwargs)


class MicroBatch(greenlet.greenlet):
    """A micro-batch's forward step, which pauses where a segment of the model begins.

    Attributes:
        cuts: In order, what came out of a segment, and the leaf with the same numbers that went into the next one.
    """

    def __init__(self, forward_step: Callable[[], _Loss]) -> None:
        super().__init__(forward_step)
        self._schedule = greenlet.getcurrent()
        self.gr_context = contextvars.copy_context()
        self.cuts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pause(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Cuts the graph here, and goes on when it is the micro-batch's turn."""
        leaf = hidden_states.detach().requires_grad_()
        self.cuts.append((hidden_states, leaf))
        self._schedule.switch()
        return leaf


class _Steps:
    """Stand in for Megatron's forward and backward step, which its schedule calls by turns for each micro-batch of a step.

    The forward step only collects micro-batches until there are as many as pass a layer together; these then take all their
    passes, and the backward step finds nothing left to do. Only the last backward pass of a segment lets its gradients be
    reduced, as Megatron's schedule does for a whole model: what Megatron adds up for a parameter has the same order.
    """

    def __init__(self, model: nn.Module, count: int, at_a_time: int, cuts: int) -> None:
        self._forward_step = versions.require(_SCHEDULES, "forward_step")
        self._backward_step = versions.require(_SCHEDULES, "backward_step")
        self._config = versions.require("megatron.core.utils", "get_model_config")(model)
        self._left, self._at_a_time, self._cuts = count, at_a_time, cuts
        self._waiting: list[MicroBatch] = []

    def forward_step(self, *args: object, **kwargs: object) -> tuple[None, torch.Tensor | int]:
        """Takes what Megatron's takes; returns no loss, and the tokens of all micro-batches that have passed."""
        self._waiting.append(MicroBatch(functools.partial(self._forward_step, *args, **kwargs)))
        self._left -= 1
        if self._left and len(self._waiting) < self._at_a_time:
            return None, 0
        together, self._waiting = self._waiting, []
        return None, self._run(together)

    def backward_step(self, *args: object) -> None:
        """Does nothing."""

    def _run(self, together: Sequence[MicroBatch]) -> torch.Tensor | int:
        for _ in range(self._cuts):
            for micro_batch in together:
                self._run_segment(micro_batch)
        tokens: torch.Tensor | int = 0
        # The last segment keeps its logits for one micro-batch at a time.
        for micro_batch in together:
            loss, counted = self._run_segment(micro_batch)
            tokens += counted
            with self._reducing(micro_batch is together[-1]):
                self._backward_step(None, loss, None, self._config)
            del loss
        for _ in range(self._cuts):
            for micro_batch in together:
                output, leaf = micro_batch.cuts.pop()
                with self._timed("backward-compute"), self._reducing(micro_batch is together[-1]):
                    torch.autograd.backward(output, leaf.grad)
        return tokens

    def _run_segment(self, micro_batch: MicroBatch) -> _Loss:
        """Runs a forward step up to where it pauses and returns nothing of use, or to its end and returns its result."""
        # A forward step that waits for its turn is not being timed.
        with self._timed("forward-compute"), versions.replaced(self._config, {"timers": None}):
            result: _Loss = micro_batch.switch()
            return result

    def _reducing(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Inside, gradients are only added up, unless these are the last ones of the step."""
        if self._left:
            # Megatron's schedule is inside its own, which must not end here.
            return contextlib.nullcontext()
        no_sync = self._config.no_sync_func
        return contextlib.nullcontext() if is_last or no_sync is None else no_sync()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        timers = self._config.timers
        if timers is not None:
            timers(name, log_level=2).start()
        yield
        if timers is not None:
            timers(name).stop()


@contextlib.contextmanager
def cut_before_layers(model: nn.Module) -> Iterator[int]:
    """Inside, micro-batches pause before each layer and before what follows the last one; yields how often.

    Their contexts end before a pause: what Megatron enters once for all layers is entered for each.
    """
    block, layers, norm = parts_of(model)
    config = vars(block)["config"]
    # Only the block reads it there: it enters no fork of random numbers, and recomputes no layers.
    inside = copy.copy(config)
    inside.sequence_parallel, inside.recompute_granularity = False, None
    with contextlib.ExitStack() as stack:
        stack.enter_context(versions.replaced(block, {"config": inside}))
        for index, layer in enumerate(layers):
            is_recomputed = config.recompute_granularity == "full" and (
                config.recompute_method == "uniform" or index < config.recompute_num_layers
            )
            forward = _forward(layer.forward, config.sequence_parallel, is_recomputed)
            stack.enter_context(versions.replaced(layer, {"forward": forward}))
        for place in (*layers, norm):
            # Before Megatron's own hook, which waits for the layer's parameters.
            stack.callback(place.register_forward_pre_hook(pause, with_kwargs=True, prepend=True).remove)
        yield len(layers) + 1


def parts_of(model: nn.Module) -> tuple[nn.Module, Sequence[nn.Module], nn.Module]:
    """The model's only block of layers, its layers, and its norm behind them."""
    kind = versions.require("megatron.core.transformer.transformer_block", "TransformerBlock")
    blocks = [module for module in model.modules() if isinstance(module, kind)]
    if len(blocks) != 1 or blocks[0].final_layernorm is None:
        raise PierConfigError(
            "--pier-layered with --pipeline-model-parallel-size 1 needs a model of one TransformerBlock with a final norm, "
            f"such as GPT; this one has {len(blocks)} blocks. Drop --pier-layered."
        )
    return blocks[0], blocks[0].layers, blocks[0].final_layernorm


def pause(
    module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]
) -> tuple[tuple[torch.Tensor, ...], dict[str, object]] | None:
    """Lets the micro-batch wait for its turn before it runs a layer; evaluations do not wait."""
    micro_batch = greenlet.getcurrent()
    if not isinstance(micro_batch, MicroBatch):
        return None
    others = [
        name
        for name, value in kwargs.items()
        if name != "hidden_states" and isinstance(value, torch.Tensor) and value.requires_grad
    ]
    if others:
        raise PierConfigError(
            f"--pier-layered with --pipeline-model-parallel-size 1: layers also pass gradients through {', '.join(others)}, "
            "which would be lost. Drop --pier-layered."
        )
    hidden_states = kwargs.get("hidden_states", *args[:1])
    assert isinstance(hidden_states, torch.Tensor)
    leaf = micro_batch.pause(hidden_states)
    return (args, {**kwargs, "hidden_states": leaf}) if "hidden_states" in kwargs else ((leaf, *args[1:]), kwargs)


def _forward(forward: Callable[..., object], has_random_fork: bool, is_recomputed: bool) -> Callable[..., object]:
    """Puts around a layer's forward pass what its block would enter around those of all layers.

    Args:
        forward: A layer's forward pass.
        has_random_fork: Whether it draws the random numbers of its tensor-parallel rank (sequence parallelism).
        is_recomputed: Whether it is recomputed in full.
    """
    tracker = versions.require("megatron.core.tensor_parallel", "get_cuda_rng_tracker")
    checkpoint = versions.require("megatron.core.tensor_parallel", "checkpoint")

    def run(hidden_states: torch.Tensor, **kwargs: object) -> object:
        pass_on = functools.partial(forward, **kwargs)
        with tracker().fork() if has_random_fork else contextlib.nullcontext():
            return checkpoint(pass_on, False, hidden_states) if is_recomputed else pass_on(hidden_states)

    return run
