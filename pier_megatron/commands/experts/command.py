"""``pier-megatron experts``: its subcommands."""

import argparse

_SUBCOMMANDS = {
    "plan": "write one job per expert, at equal total operations",
    "train": "run or submit the jobs that are missing",
    "score": "write the log-likelihood of every token under every expert",
    "mix": "combine the experts and compare the perplexities",
    "export": "turn the experts into Hugging Face GPT-2s",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands."""
    from pier_megatron.commands.experts import exporting, mix, plan, score, train

    modules = {"plan": plan, "train": train, "score": score, "mix": mix, "export": exporting}
    subcommands = parser.add_subparsers(metavar="SUBCOMMAND", dest="subcommand", required=True)
    for name, purpose in _SUBCOMMANDS.items():
        subcommand = subcommands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        modules[name].add_arguments(subcommand)
        subcommand.set_defaults(run_subcommand=modules[name].run)


def run(options: argparse.Namespace) -> int:
    """Runs a subcommand; returns the exit status."""
    status: int = options.run_subcommand(options)
    return status
