"""What the pipeline schedule does in which order: passes, reductions, and activations that wait for their backward pass."""

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import training as megatron_training

from pier_megatron.megatron_api import versions


@contextlib.contextmanager
def traced(recorder: Any) -> Iterator[None]:
    """Records by iteration, for the probe ``pipeline``: ``order``, ``layers``, ``held``, ``evaluated`` and ``visits``.

    ``order`` has ``F1.2`` for the forward pass of micro-batch 2 through virtual stage 1, ``B1.2`` for the backward one, ``R1``
    for the start of the reduction of its gradients and ``E1.2`` for a pass without gradients; ``layers`` has these letters for
    layers in training, counted from 0 in a stage, a reduction named after the first layer in its bucket, or ``-`` without;
    ``held`` the most outputs of forward passes at once that had not been through the backward pass; ``evaluated`` the losses of
    evaluations; ``visits`` how often a micro-batch of training has run a layer, by both.
    """
    if "pipeline" not in recorder.probes:
        yield
        return
    forward, backward, evaluate = schedules.forward_step, schedules.backward_step, megatron_training.evaluate
    run_layer = TransformerLayer.forward
    start_reduction = _ParamAndGradBucketGroup.start_grad_sync
    record, waiting, runs = recorder.record, {}, {}

    def keep(event: str, order: str = "order") -> None:
        events = record.setdefault(order, {}).setdefault(recorder.iteration, [])
        # A virtual stage may have several buckets.
        if events[-1:] != [event]:
            events.append(event)

    def bucket_groups(chunk: Any) -> list[Any]:
        return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]

    @functools.wraps(forward)
    def recorded_forward(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        given = versions.given(forward, args, kwargs)
        place, is_training = f"{given.get('vp_stage') or 0}.{given['current_microbatch']}", given["model"].training
        keep(("F" if is_training else "E") + place)
        if is_training:
            waiting[id(result[0])] = place
            held = record.setdefault("held", {})
            held[recorder.iteration] = max(held.get(recorder.iteration, 0), len(waiting))
        return result

    @functools.wraps(backward)
    def recorded_backward(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        keep("B" + waiting.pop(id(output_tensor)))
        return backward(input_tensor, output_tensor, *args, **kwargs)

    @functools.wraps(start_reduction)
    def recorded_reduction(group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.grad_reduce_handle is None:  # else it has been started, and Megatron only makes sure
            keep(f"R{next(stage for stage, groups in enumerate(map(bucket_groups, recorder.model)) if group in groups)}")
            names = [name for chunk in recorder.model for name, each in chunk.named_parameters() if each in group.params]
            keep(f"R{min(re.findall(r'layers.([0-9]+)', ' '.join(names)), default='-')}", "layers")
        return start_reduction(group, *args, **kwargs)

    @functools.wraps(run_layer)
    def recorded_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer.training:
            visits = record.setdefault("visits", {}).setdefault(recorder.iteration, Counter())
            visits[layer.layer_number - 1, layer.current_microbatch] += 1
        result = run_layer(layer, *args, **kwargs)
        if layer.training and torch.is_grad_enabled():
            passed = runs.setdefault(recorder.iteration, Counter())
            place = f"{layer.layer_number - 1}.{passed[layer]}"
            passed[layer] += 1
            keep(f"F{place}", "layers")
            result[0].register_hook(lambda gradient: keep(f"B{place}", "layers"))
        return result

    @functools.wraps(evaluate)
    def recorded_evaluate(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        record.setdefault("evaluated", {})[recorder.iteration] = {name: float(loss) for name, loss in result[0].items()}
        return result

    with (
        mock.patch.object(schedules, "forward_step", recorded_forward),
        mock.patch.object(schedules, "backward_step", recorded_backward),
        mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", recorded_reduction),
        mock.patch.object(megatron_training, "evaluate", recorded_evaluate),
        mock.patch.object(TransformerLayer, "forward", recorded_layer),
    ):
        yield
