"""What a seed model's training has cost, as its checkpoint tells."""

import argparse
from pathlib import Path

from pier_megatron.errors import PierConfigError


def operations(seed: Path, defaults: argparse.Namespace) -> float:
    """Operations of the training behind a seed model, by Megatron's own count.

    A model that began from another one's weights has cost that model's training, too.

    Args:
        seed: ``--save`` folder of the training.
        defaults: Arguments of a job of this size, for those that an older release has not stored.

    Raises:
        PierConfigError: If a checkpoint on the way cannot be read, or repeats itself.
    """
    from pier_megatron.commands import planned_sizes
    from pier_megatron.integration.checkpoint.stored_model import StoredModel

    # The same vocabulary, counted as it is for experts: without Megatron's padding.
    vocabulary = {"vocab_size": defaults.vocab_size, "padded_vocab_size": getattr(defaults, "padded_vocab_size", None)}
    total, folder, seen = 0.0, seed, set()
    while True:
        if folder.resolve() in seen:
            raise PierConfigError(f"{folder}: its model began from its own folder, so its earlier seed is not known.")
        seen.add(folder.resolve())
        arguments = argparse.Namespace(**vars(defaults) | vars(StoredModel.find(folder).arguments) | vocabulary)
        done = planned_sizes.operations(arguments, arguments.consumed_train_samples)
        total += done
        origin = arguments.pretrained_checkpoint or (arguments.load if arguments.finetune else None)
        if not done and origin is None:
            raise PierConfigError(f"{folder}: no training is stored with it, as of a model that was converted.")
        if origin is None:
            return total
        folder = Path(origin)
