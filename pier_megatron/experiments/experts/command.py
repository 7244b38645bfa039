"""``pier-megatron experts``: its subcommands and their flags. What they do is imported when they run."""

import argparse
import importlib
from pathlib import Path

from pier_megatron.commands.trust import TRUSTED_ONLY
from pier_megatron.values import existing_file, existing_folder, folder_to_write

# Purpose of each subcommand, and the module that runs it.
_SUBCOMMANDS = {
    "plan": ("write one job per expert, at equal total operations", "plan"),
    "score": ("write the log-likelihood of every token under every expert", "score"),
    "mix": ("combine the experts and compare the perplexities", "mix"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands."""
    subcommands = parser.add_subparsers(metavar="SUBCOMMAND", dest="subcommand", required=True)
    added = {}
    for name, (purpose, _) in _SUBCOMMANDS.items():
        added[name] = subcommands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if name != "plan":
            folder = "--output of pier-megatron experts plan"
            added[name].add_argument("folder", type=existing_folder, metavar="FOLDER", help=folder)
    plan = added["plan"]
    plan.add_argument("file", type=existing_file, metavar="FILE.yaml", help="description of the ensemble: docs/experts.md")
    plan.add_argument(
        "--output", type=folder_to_write, default=Path("runs/experts"), help="folder for plan, jobs and results (%(default)s)"
    )
    plan.epilog = added["score"].epilog = TRUSTED_ONLY


def run(options: argparse.Namespace) -> int:
    """Runs a subcommand; returns the exit status."""
    module = importlib.import_module(f"pier_megatron.experiments.experts.{_SUBCOMMANDS[options.subcommand][1]}")
    status: int = module.run(options)
    return status
