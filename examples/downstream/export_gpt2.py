"""Turns a checkpoint of Megatron's, by Pier or not, into a Hugging Face GPT-2.

python examples/downstream/export_gpt2.py --checkpoint runs/xl/checkpoint --output xl-hf --tokenizer gpt2
"""

import argparse
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import gpt2
from script import main_of

from pier_megatron.commands.trust import TRUSTED_ONLY
from pier_megatron.errors import PierConfigError
from pier_megatron.values import existing_folder, folder_to_write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pier_megatron.integration.checkpoint.description import Description

# Names in the exported configuration for the weights of a checkpoint.
_MEANING = {
    "stock": "of a stock run",
    "synchronised": "those that all groups hold",
    "anchor": "the anchor, from the last outer step before",
    "mean": "the mean of the groups' slow weights",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the script's flags."""
    parser.epilog = TRUSTED_ONLY
    parser.add_argument(
        "--checkpoint",
        type=existing_folder,
        required=True,
        metavar="DIR",
        help="--save folder of a run, for its last checkpoint, or an iter_ folder in it; of Pier or of stock Megatron-LM",
    )
    parser.add_argument("--output", type=folder_to_write, required=True, metavar="DIR", help="folder for the model")
    add_tokenizer_argument(parser)


def add_tokenizer_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--tokenizer``."""
    parser.add_argument(
        "--tokenizer",
        type=name_or_folder,
        metavar="NAME_OR_DIR",
        help="Hugging Face tokenizer of the model, such as gpt2 for Megatron's GPT2BPETokenizer (default: the "
        "--tokenizer-model of the run if it was a HuggingFaceTokenizer, otherwise none)",
    )


def name_or_folder(text: str) -> str:
    """Folder, or name on the Hugging Face Hub, as the ``type`` of an argparse argument.

    Raises:
        argparse.ArgumentTypeError: If it is no folder and can be no name.
    """
    is_name = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", text) and not os.path.lexists(text)
    return text if is_name else str(existing_folder(text))


def run(options: argparse.Namespace) -> int:
    """Exports; returns the exit status."""
    require_packages("transformers")
    print("\n".join(export(options.checkpoint, options.output, options.tokenizer)))
    return 0


def require_packages(*names: str) -> None:
    """Checks that packages are there.

    Raises:
        PierConfigError: If one is missing.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise PierConfigError(
            f"needs {', '.join(missing)}, not installed: pip install transformers 'lm-eval[hf]', the extra [downstream] of "
            "this plugin."
        )


def export(checkpoint: Path, output: Path, tokenizer: str | None = None) -> list[str]:
    """Writes the model of a checkpoint as ``GPT2LMHeadModel``: weights, configuration, and the tokenizer if it is known.

    Weights keep the type they are stored in, and the vocabulary its padding.

    Args:
        checkpoint: Folder of a checkpoint or of a run's checkpoints.
        output: Folder to write to, which must not hold a model yet.
        tokenizer: Name or folder of a Hugging Face tokenizer; None for the one that the run was trained with, if that is one.

    Returns:
        What was written, line by line.

    Raises:
        PierConfigError: If the model is not a GPT-2, or cannot be read or written.
        PierConfigError: If a newer plugin wrote the checkpoint.
    """
    from pier_megatron.integration.checkpoint.stored_model import StoredModel

    if (output / "config.json").exists():
        raise PierConfigError(f"--output {output}: there is a model already. Choose another folder, or remove this one.")
    stored = StoredModel.find(checkpoint)
    arguments = stored.arguments
    if tokenizer is None and arguments.tokenizer_type == "HuggingFaceTokenizer":
        tokenizer = arguments.tokenizer_model
    config = gpt2.configuration(arguments)
    weights = _weights(stored.description)
    config.megatron_checkpoint = {"iteration": stored.iteration, "weights": weights}
    tokens = None
    if tokenizer is not None:
        tokens = _load_tokenizer(tokenizer, config.vocab_size)
        config.bos_token_id, config.eos_token_id = tokens.bos_token_id, tokens.eos_token_id
    model = gpt2.build(config, stored.weights())
    model.save_pretrained(output)
    if tokens:
        tokens.save_pretrained(output)
    return [
        f"{output}: {config.n_layer} layers of {config.n_embd}, {config.n_head} heads, {config.activation_function}, "
        f"{model.num_parameters():,} parameters as {str(model.dtype).removeprefix('torch.')}",
        f"vocabulary: {config.vocab_size} with Megatron's padding, which is part of its softmax",
        f"weights: {_MEANING[weights]}, iteration {stored.iteration}",
        f"tokenizer: {tokenizer}"
        if tokenizer
        else f"tokenizer: none; {arguments.tokenizer_type} is not Hugging Face's, see --tokenizer",
    ]


def _weights(description: "Description | None") -> str:
    if description is None:
        return "stock"
    if description.is_synchronised:
        return "synchronised"
    return "anchor" if description.has_common_outer_state else "mean"


def _load_tokenizer(name: str, vocabulary: int) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise PierConfigError(f"--tokenizer {name} cannot be loaded: {error}") from error
    if len(tokenizer) > vocabulary:
        raise PierConfigError(
            f"--tokenizer {name} has {len(tokenizer)} tokens, but the model's vocabulary, with padding, only {vocabulary}: "
            "it is not the tokenizer that the model was trained with."
        )
    return tokenizer


main = main_of(__doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
