"""What a person chooses about Pier: each setting with its flag, its default and what ``--help`` says of it."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from pier_megatron.exchange.codecs import CODECS
from pier_megatron.schedules import PRESETS
from pier_megatron.values import (
    LONGEST,
    Number,
    address,
    any_path,
    one_of,
    positive,
    share,
    url,
    whole,
)

SEED = whole(0, 2**63 - 1)
"""Seeds of random numbers."""

INNER_OPTIMIZERS = ("adam", "muon")
"""By Megatron's names."""


def flag_of(setting: str) -> str:
    """The flag that sets an attribute of :class:`PierConfig`, or of the settings of a feature."""
    not_called_after_it = {"train_iters": "--train-iters", "lazy_start": "--pier-lazy-start-iters"}
    return not_called_after_it.get(setting, "--pier-" + setting.replace("_", "-"))


def given(kind: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Settings of a class that are given on the command line, by name.

    Args:
        kind: Dataclass of settings.
        args: Megatron's arguments.
    """
    values = {field.name: getattr(args, f"pier_{field.name}", None) for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def setting(default: Any, text: str, metavar: str | None = None, accepts: Callable[[str], Any] | None = None) -> Any:
    """A setting with a flag.

    Args:
        default: Its default.
        text: What ``--help`` says of it; of the default too, unless its value says it.
        metavar: What stands for its value there.
        accepts: What its value may be, see :mod:`pier_megatron.values`; None for a switch and for any text.
    """
    told = text if "Default:" in text else f"{text} Default: {default}."
    return dataclasses.field(default=default, metadata={"help": told, "metavar": metavar, "accepts": accepts})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings as they are given. The ``--pier-*`` flags and their help are made of them.

    The symbols in :class:`pier_megatron.config.PierConfig` are those of arXiv 2511.17849.
    """

    train_iters: int
    groups: int = setting(
        dataclasses.MISSING,
        "Number of groups that train apart between outer steps; each holds DP / groups model replicas. Default: one per node, "
        "or per domain of --pier-ranks-per-domain.",
        accepts=whole(1),
    )
    ranks_per_domain: int | None = setting(
        None,
        "Number of consecutive ranks that share a fast network, where that is not the node: more where it spans nodes, as 72 "
        "in an NVL72. Tensor parallelism stays inside. Default: the ranks of a node.",
        metavar="N",
        accepts=whole(1),
    )
    islands: bool = setting(
        False,
        "Make each group a Megatron world of its own, of consecutive ranks, in place of an instance of the distributed "
        "optimizer: nothing of Megatron's spans groups, and the inner optimizer may be another one.",
    )
    inner_optimizer: str = setting(
        "adam",
        "What trains inside a group: AdamW, or Megatron's Muon with its own --muon-... flags, which needs --pier-islands and "
        "the package emerging-optimizers; with --use-distributed-optimizer in its layer-wise form, where data-parallel ranks "
        "share the work out.",
        accepts=one_of(INNER_OPTIMIZERS),
    )
    lighthouse: str | None = setting(
        None,
        "Address of a torchft lighthouse, such as http://10.0.0.1:29510: each island is a job of its own, which joins those "
        "that are there and may leave. Default: all islands are in one launch.",
        metavar="URL",
        accepts=url,
    )
    island: int | None = setting(
        None,
        "With --pier-lighthouse, which of the --pier-groups islands this job is, from 0. Default: none.",
        metavar="N",
        accepts=whole(0),
    )
    island_address: str = setting(
        "127.0.0.1",
        "With --pier-lighthouse, the address at which other islands reach this node.",
        metavar="ADDRESS",
        accepts=address,
    )
    secret_file: str | None = setting(
        None,
        "With --pier-lighthouse, a file with a secret that all islands share and others must not read: an island that does not "
        "prove to have it is refused. pier-megatron lighthouse --new-secret makes one. Default: none, whoever comes is let in.",
        metavar="FILE",
        # An island's first rank reads it; its other nodes need no copy.
        accepts=any_path,
    )
    island_timeout: int = setting(
        120,
        "With --pier-lighthouse, seconds after which an exchange is taken again without islands that do not answer.",
        accepts=whole(1, LONGEST),
    )
    island_wait: int = setting(
        30,
        "With --pier-lighthouse, minutes to wait for enough islands before the job saves and ends.",
        accepts=whole(1, LONGEST // 60),
    )
    sync_interval: int = setting(50, "Iterations between outer steps.", accepts=whole(1))
    sync_seconds: float | None = setting(
        None,
        "With --pier-lighthouse, seconds of training after which an island rests until the next outer step, so that faster "
        "ones need not wait for it; the mean is weighted by what each has read. Default: none rests.",
        metavar="SECONDS",
        accepts=positive(LONGEST),
    )
    preset: str = setting("pier", "Schedule of outer momentum and outer learning rate over the run.", accepts=one_of(PRESETS))
    lazy_start_fraction: float = setting(
        0.1,
        "Share of the run, in [0, 1), that starts fully synchronous; rounded to the nearest multiple of the sync interval.",
        accepts=share("such as 0.1"),
    )
    lazy_start_iters: int | None = setting(
        None,
        "The same in iterations, a multiple of the sync interval. Default: from the fraction.",
        accepts=whole(0, why="with 0 for a run without one"),
    )
    outer_lr: float | None = setting(
        None,
        "Constant outer learning rate (dimensionless) in place of the preset's schedule. Default: the preset's.",
        accepts=positive(100, "because with 0 no outer step moves anything; about 1 is customary"),
    )
    outer_momentum: float | None = setting(
        None,
        "Constant outer momentum coefficient, in [0, 1), in place of the preset's schedule, momentum warmup included. "
        "Default: the preset's.",
        accepts=share("because the momentum sums about 1 / (1 - mu) pseudo-gradients, which has no limit at 1"),
    )
    subgroup_size: int | None = setting(
        None,
        "Number of groups that meet at an outer step, drawn anew for each: NoLoCo (arXiv 2506.10911). Default: all, or 2 with "
        "--pier-preset noloco.",
        metavar="N",
        accepts=whole(2, why="or left out for outer steps of all groups together"),
    )
    subgroup_gamma: float | None = setting(
        None,
        "How strongly slow weights are pulled to the mean of the groups that meet, NoLoCo's gamma. Default: the outer learning "
        "rate, with which half as many bytes cross in FP32.",
        metavar="GAMMA",
        accepts=Number(float, 0.0, 100.0, why="because a negative pull drives groups apart; about 1 is customary"),
    )
    subgroup_seed: int = setting(0, "Seed of the drawing.", metavar="SEED", accepts=SEED)
    evaluate_mean: bool = setting(
        False,
        "Where groups never agree, evaluate the mean of their slow weights, at the cost of an all-reduce of the parameters. "
        "Default: each its own, and log mean and spread of the losses.",
    )
    overlap: int = setting(
        0,
        "Iterations over which an exchange is hidden behind training; its result is applied that much later, on top of what "
        "each group has learned meanwhile. Default: 0, wait for it.",
        metavar="ITERS",
        accepts=whole(0),
    )
    fragments: int = setting(
        1,
        "Number of parts of the parameters that are exchanged in turn, spread over the sync interval, which divides the peak "
        "bandwidth.",
        accepts=whole(1),
    )
    exchange_dtype: str = setting(
        "fp32", "Type of pseudo-gradients on the wire; integers are scaled by blocks.", accepts=one_of(CODECS)
    )
    no_error_feedback: bool = setting(
        False,
        "Drop what a low-bit exchange rounds away; saves 4 bytes per owned parameter. Default: add it to the next one.",
    )
    offload: bool = setting(
        False, "Keep the outer state in pinned host memory instead of on the device. Default: on the device."
    )
    chunk_mib: int | None = setting(
        None,
        "Size in MiB, of FP32, of the pieces in which buffers are exchanged and updated. Default: 64 on a GPU, 16 on a CPU, or "
        "the number of groups if that is more.",
        metavar="MIB",
        accepts=whole(1, 2**20),
    )
    outlier_zscore: float | None = setting(
        None,
        "Leave a group out of a round if the norm of its pseudo-gradient is more than this many standard deviations above the "
        "moving mean of its own history. Default: never.",
        metavar="Z",
        accepts=positive(1e6, "of which 3 is customary"),
    )
    save_inner_state: str = setting(
        "all",
        "Groups whose inner optimizer state a checkpoint holds: all, which resumes exactly, or the first only, with whose "
        "state all groups then continue.",
        accepts=one_of(("all", "first")),
    )
    load_inner_state: str = setting(
        "mean",
        "Inner state of a group if their number has changed: the mean over the saved groups that it takes the place of, or "
        "that of the first saved group.",
        accepts=one_of(("mean", "first")),
    )
    override_checkpoint: bool = setting(
        False, "Go on from a checkpoint of a run with other settings or another group layout. Default: refuse."
    )


@dataclasses.dataclass(frozen=True)
class PluginSettings:
    """What concerns the plugin with every optimizer, beside the settings of :data:`pier_megatron.features.FEATURES`."""

    try_any_megatron: bool = setting(
        False, "Run on a release of Megatron on which the plugin has not been tested. Default: refuse."
    )
