"""Megatron's arguments for scoring a model, from those that it was trained with."""

import argparse
from collections.abc import Sequence

_LAYOUT = "--pipeline-model-parallel-layout"

# What says how a model is trained and not what it is.
_OF_TRAINING = (
    "--pier-",
    # Virtual stages need more micro-batches than one.
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--microbatch-group-size-per-virtual-pipeline-stage",
    _LAYOUT,
    # Other batches than one micro-batch: Megatron reads one from the data for each micro-batch, begins them again at their
    # end, and takes as many batches as the data have.
    "--eval-global-batch-size",
    "--eval-micro-batch-size",
    "--rampup-batch-size",
    "--decrease-batch-size-if-needed",
    "--step-batch-size-schedule",
    # Gradients and the optimizer's state, of a distributed optimizer that --optimizer pier had turned on.
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--align-param-gather",
    "--num-distributed-optimizer-instances",
    "--use-precision-aware-optimizer",
    "--main-grads-dtype",
    "--main-params-dtype",
    "--exp-avg-dtype",
    "--exp-avg-sq-dtype",
    "--optimizer-cpu-offload",
    "--optimizer-offload-fraction",
    "--overlap-cpu-optimizer-d2h-h2d",
)


def scoring_arguments(arguments: Sequence[str], micro_batch: int, checkpoints: str, domains: Sequence[str]) -> list[str]:
    """The model in full, one micro-batch after the other, one epoch of each domain's validation text.

    Args:
        arguments: Arguments of the training, without data, schedule and checkpoints.
        micro_batch: Sequences that are scored at once.
        checkpoints: Folder of the model's checkpoints.
        domains: Path prefixes of what is scored.
    """
    return [
        *_without_training(arguments),
        *_whole_stages(arguments),
        *("--optimizer", "adam", "--skip-train", "--train-iters", "1", "--no-load-optim", "--no-load-rng", "--finetune"),
        *("--load", checkpoints, "--exit-on-missing-checkpoint"),
        # Data in the same order for all, whatever they were trained with.
        *("--seed", "1234", "--micro-batch-size", str(micro_batch), "--global-batch-size", str(micro_batch)),
        *("--context-parallel-size", "1", "--expert-model-parallel-size", "1"),
        # Also where there is one domain: Megatron 0.19 does not evaluate one set in full otherwise.
        *("--full-validation", "--multiple-validation-sets", "--valid-data-path", *domains),
    ]


def _without_training(arguments: Sequence[str]) -> list[str]:
    kept, is_kept = [], True
    for argument in arguments:
        if argument.startswith("--"):
            is_kept = not argument.startswith(_OF_TRAINING)
        kept += [argument] if is_kept else []
    return kept


def _whole_stages(arguments: Sequence[str]) -> list[str]:
    """The flag for the layout of a pipeline without its virtual stages; nothing without a layout."""
    from pier_megatron.experiments.experts.scoring import layout_of_whole_stages

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument(_LAYOUT, dest="layout")
    parser.add_argument("--pipeline-model-parallel-size", dest="ranks", type=int, default=1)
    given = parser.parse_known_args(list(arguments))[0]
    return [] if given.layout is None else [_LAYOUT, layout_of_whole_stages(given.layout, given.ranks)]
