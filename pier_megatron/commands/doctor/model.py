"""Builds rank 0's part of a job's model as its script would, without memory for it: what Megatron refuses there comes early."""

import argparse
import importlib
import importlib.util
import logging
import math
import re

import torch.distributed as dist

from pier_megatron.commands.findings import Findings
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.commands.planned_job import as_rank_0, configuration, may_start_elsewhere
from pier_megatron.commands.planned_sizes import with_vocabulary
from pier_megatron.commands.script_sources import ScriptSources
from pier_megatron.cpu.preparations import LOCAL
from pier_megatron.errors import PierConfigError, Problems
from pier_megatron.megatron_api import versions

# Modules of a checkout that build models, as its scripts import them.
_BUILDERS = re.compile(r"^from (gpt|hybrid|mamba)_builders import", re.MULTILINE)


def look(args: argparse.Namespace, command: LaunchCommand, sources: ScriptSources, findings: Findings) -> None:
    """Says what keeps Megatron from building the model of validated arguments, if the script builds one of Megatron's."""
    builds = None if sources.script is None else _BUILDERS.search(sources.texts[sources.script])
    lacks_te = importlib.util.find_spec("transformer_engine") is None
    problems = Problems()
    if args.transformer_impl == "transformer_engine" and lacks_te:
        problems.found.append(
            "--transformer-impl transformer_engine, the default: Transformer Engine is not installed, and Megatron ends with "
            "TypeError: 'NoneType' object is not callable. Install it (pip install --no-build-isolation "
            f"'transformer-engine[pytorch]'), or do without: {LOCAL}."
        )
    elif builds is not None:
        with problems.collecting():
            _build(args, command, builds[1])
    for problem in problems.found:
        if may_start_elsewhere(args, problem):
            findings.warnings.append(f"here: {problem}")
        else:
            findings.errors.append(problem)


def _build(args: argparse.Namespace, command: LaunchCommand, kind: str) -> None:
    """Builds the first pipeline stage on fake tensors, among ranks that are not there."""
    fake = importlib.import_module("torch._subclasses.fake_tensor")
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore
    parallel = importlib.import_module("megatron.core.parallel_state")
    tensor, stages, context = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    experts, of_expert = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    # The fewest ranks that the sizes need.
    ranks = math.lcm(tensor * stages * context, of_expert * experts * stages)
    args, config = with_vocabulary(args), configuration(args, command.ranks_per_node)
    versions.assign(config, "perform_initialization", False)
    with as_rank_0(args.world_size, command.ranks_per_node, "Megatron cannot build the model"):
        # What Megatron advises on the way is logged at the start.
        logging.disable(logging.WARNING)
        dist.init_process_group("fake", store=store(), rank=0, world_size=ranks)
        try:
            parallel.initialize_model_parallel(
                tensor,
                stages,
                args.virtual_pipeline_model_parallel_size,
                context_parallel_size=context,
                expert_model_parallel_size=experts,
                expert_tensor_parallel_size=of_expert,
                create_gloo_process_groups=False,
            )
            importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(args.seed)
            stage = None if args.virtual_pipeline_model_parallel_size is None else 0
            with fake.FakeTensorMode(allow_non_fake_inputs=True):
                builder = getattr(importlib.import_module(f"{kind}_builders"), f"{kind}_builder")
                builder(args, True, stages == 1, vp_stage=stage, config=config)
        except (fake.UnsupportedFakeTensorException, fake.DataDependentOutputException, fake.DynamicOutputShapeException):
            # What needs numbers is seen at the start.
            return
        except (ImportError, AttributeError) as error:
            raise PierConfigError(f"Megatron cannot build the model: {error}") from error
        finally:
            logging.disable(logging.NOTSET)
            parallel.destroy_model_parallel()
            dist.destroy_process_group()
