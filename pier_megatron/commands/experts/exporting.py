"""``pier-megatron experts export``: every expert as ``pier-megatron export`` does it."""

import argparse

from pier_megatron.commands.experts.planned import Plan
from pier_megatron.commands.export import export, require_packages


def run(options: argparse.Namespace) -> int:
    """Exports all experts; returns the exit status."""
    require_packages("transformers")
    plan = Plan.read(options.folder)
    for expert in plan.experts:
        print("\n".join(export(plan.checkpoints(expert.name), options.output / expert.name, options.tokenizer)), flush=True)
    return 0
