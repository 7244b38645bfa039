"""Turns experts that ``pier-megatron experts`` has trained into Hugging Face GPT-2s, and each mixture into one model.

python examples/downstream/export_mixture.py runs/experts --output runs/exported --tokenizer gpt2
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from export_gpt2 import add_tokenizer_argument, export, require_packages
from script import main_of

from pier_megatron.commands.trust import TRUSTED_ONLY
from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.experts.ensemble import DENSE
from pier_megatron.experiments.experts.mix import prior_of
from pier_megatron.experiments.experts.mixture import Array, uniform_prior
from pier_megatron.experiments.experts.planned import Expert, Plan
from pier_megatron.values import existing_folder, folder_to_write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the script's flags."""
    parser.epilog = TRUSTED_ONLY
    parser.add_argument("folder", type=existing_folder, metavar="FOLDER", help="--output of pier-megatron experts plan")
    parser.add_argument(
        "--output", type=folder_to_write, required=True, metavar="DIR", help="folder for the models, with a folder for each"
    )
    parser.add_argument(
        "--prior",
        metavar="DOMAIN",
        help="domain whose cached prior begins every sequence of a mixture; needs scores (default: no preference)",
    )
    add_tokenizer_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Exports all experts and mixtures; returns the exit status."""
    require_packages("transformers")
    plan = Plan.read(options.folder)
    mixtures = {variant: members for variant, members in plan.by_variant.items() if variant != DENSE and len(members) > 1}
    for members in mixtures.values():
        _check_same_tokens(plan, members)
    # What is refused is refused before anything is written.
    priors = {variant: _log_prior(plan, variant, options.prior) for variant in mixtures}
    for expert in plan.experts:
        print("\n".join(export(plan.checkpoints(expert.name), options.output / expert.name, options.tokenizer)), flush=True)
    for variant, members in mixtures.items():
        print("\n".join(_write_mixture(options.output, variant, members, priors[variant].tolist())), flush=True)
    return 0


def _log_prior(plan: Plan, variant: str, domain: str | None) -> Array:
    if domain is None:
        return uniform_prior(len(plan.by_variant[variant]))
    if domain not in plan.domains:
        raise PierConfigError(f"--prior {domain}: no domain of the plan. Choose one of {', '.join(plan.domains)}.")
    return prior_of(plan, variant, domain)


def _check_same_tokens(plan: Plan, members: Sequence[Expert]) -> None:
    """Refuses experts that were trained with different tokenizers, whose probabilities are of different things."""
    from pier_megatron.integration.checkpoint.stored_model import StoredModel

    found = {}
    for expert in members:
        arguments = StoredModel.find(plan.checkpoints(expert.name)).arguments
        found[expert.name] = (arguments.tokenizer_type, arguments.tokenizer_model, arguments.vocab_size)
    if len(set(found.values())) > 1:
        told = "; ".join(f"{name}: {' '.join(map(str, tokenizer))}" for name, tokenizer in found.items())
        raise PierConfigError(f"experts of one mixture need the same tokenizer: {told}.")


def _write_mixture(output: Path, variant: str, members: Sequence[Expert], log_prior: Sequence[float]) -> list[str]:
    """Writes the mixture of a variant's exported experts, and returns what it is, line by line."""
    from mixture_model import MixtureForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folders = [output / expert.name for expert in members]
    experts = [AutoModelForCausalLM.from_pretrained(folder, dtype="auto") for folder in folders]
    names = [Path(expert.name).name for expert in members]
    model = MixtureForCausalLM.of(experts, names, log_prior)
    model.save_pretrained(output / variant)
    if (folders[0] / "tokenizer_config.json").exists():
        AutoTokenizer.from_pretrained(folders[0]).save_pretrained(output / variant)
    weights = ", ".join(f"{name} {math.exp(weight):.3f}" for name, weight in zip(names, log_prior, strict=True))
    return [f"{output / variant}: mixture of {weights}; {model.num_parameters():,} parameters; needs trust_remote_code"]


main = main_of(__doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
