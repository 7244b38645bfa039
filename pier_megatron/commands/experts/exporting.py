"""``pier-megatron experts export``: every expert as ``pier-megatron export`` does it."""

import argparse
from pathlib import Path

from pier_megatron.commands.experts.planned import Plan
from pier_megatron.commands.experts.train import add_folder_argument
from pier_megatron.commands.export import add_tokenizer_argument, export, require_packages
from pier_megatron.commands.trust import TRUSTED_ONLY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own flags."""
    parser.epilog = TRUSTED_ONLY
    add_folder_argument(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the models, one in it for each")
    add_tokenizer_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Exports all experts; returns the exit status."""
    require_packages("transformers")
    plan = Plan.read(options.folder)
    for expert in plan.experts:
        print("\n".join(export(plan.checkpoints(expert.name), options.output / expert.name, options.tokenizer)), flush=True)
    return 0
