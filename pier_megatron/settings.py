"""Settings of Pier: each with its flag, its default, its help text and the values that it accepts."""

import argparse
import collections
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pier_megatron.exchange.codecs import CODECS
from pier_megatron.schedules import AUTO, PRESETS
from pier_megatron.values import LONGEST, Choice, address, any_path, outer_rule, positive, share, url, whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SEED = whole(0, 2**63 - 1)
"""Seeds of random numbers."""

INNER_OPTIMIZERS = ("adam", "muon")
"""Inner optimizers, by Megatron's names."""


def flag_of(setting: str) -> str:
    """The flag that sets an attribute of :class:`PierConfig`, or of the settings of a feature."""
    not_called_after_it = {"train_iters": "--train-iters", "lazy_start": "--pier-lazy-start-iters"}
    return not_called_after_it.get(setting, "--pier-" + setting.replace("_", "-"))


def given(kind: "type[DataclassInstance]", args: argparse.Namespace) -> dict[str, Any]:
    """Settings of a dataclass that the command line sets, by name, among Megatron's arguments."""
    values = {field.name: getattr(args, f"pier_{field.name}", None) for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def setting(
    default: object, text: str, metavar: str | None = None, accepts: Callable[[str], object] | None = None, alone: object = None
) -> Any:
    """A setting with a flag.

    Args:
        default: Its default.
        text: Help text; ends with a sentence "Default: ..." where the value of the default does not explain itself.
        metavar: Placeholder for its value in the help.
        accepts: Values that it accepts, see :mod:`pier_megatron.values`; None for a switch and for any text.
        alone: What it is if its flag stands there without a value; None if there must be one.
    """
    told = text if "Default:" in text else f"{text} Default: {default}."
    return dataclasses.field(default=default, metadata={"help": told, "metavar": metavar, "accepts": accepts, "alone": alone})


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings as the user gives them. The ``--pier-*`` flags, their help and ``docs/flags.md`` are generated from them.

    The symbols in :class:`pier_megatron.config.PierConfig` are those of arXiv 2511.17849.
    """

    train_iters: int
    groups: int = setting(
        dataclasses.MISSING,
        "Number of groups. They train independently between outer steps, each with DP / groups model replicas. Default: one "
        "per node, or per domain of --pier-ranks-per-domain.",
        accepts=whole(1),
    )
    ranks_per_domain: int | None = setting(
        None,
        "Number of consecutive ranks on one fast network, if it is not the node: 72 in an NVL72. Tensor parallelism stays "
        "inside it. Default: the ranks of a node.",
        metavar="N",
        accepts=whole(1),
    )
    inner_optimizer: str = setting(
        "adam",
        "Optimizer inside a group: AdamW, or Megatron's Muon with its own flags (--muon-momentum and others). Muon needs "
        "the package emerging-optimizers; --use-distributed-optimizer selects its layer-wise form, which shards the work over "
        "data-parallel ranks.",
        accepts=Choice(INNER_OPTIMIZERS),
    )
    lighthouse: str | None = setting(
        None,
        "Address of a torchft lighthouse, such as http://10.0.0.1:29510. Makes this job one elastic island, which may join and "
        "leave the run. Default: all groups are in one launch.",
        metavar="URL",
        accepts=url,
    )
    island: int | None = setting(
        None,
        "Number of this island, from 0 to --pier-groups less 1; needed with --pier-lighthouse. Default: none.",
        metavar="N",
        accepts=whole(0),
    )
    island_address: str = setting(
        "127.0.0.1",
        "Address at which other islands reach this node, with --pier-lighthouse.",
        metavar="ADDRESS",
        accepts=address,
    )
    secret_file: str | None = setting(
        None,
        "File with the secret that all islands of a run share, with --pier-lighthouse; only its owner may read it. An island "
        "without the secret is refused. pier-megatron lighthouse --new-secret creates the file. "
        "Default: none, every island is admitted.",
        metavar="FILE",
        # An island's first rank reads it; its other nodes need no copy.
        accepts=any_path,
    )
    island_timeout: int = setting(
        120,
        "Seconds that a collective between islands may take before the outer step is retried, with --pier-lighthouse. Silent "
        "islands are given up earlier.",
        accepts=whole(1, LONGEST),
    )
    island_wait: int = setting(
        30,
        "Minutes to wait for a quorum of islands before the job saves and ends, with --pier-lighthouse.",
        accepts=whole(1, LONGEST // 60),
    )
    sync_interval: int = setting(50, "Number of iterations between outer steps (H).", accepts=whole(1))
    sync_seconds: float | None = setting(
        None,
        "Seconds of training after which a slow island rests until the next outer step, with --pier-lighthouse, so that "
        "faster islands need not wait for it. The mean is then weighted by the iterations that each has trained. Default: "
        "islands do not rest.",
        metavar="SECONDS",
        accepts=positive(LONGEST),
    )
    preset: str = setting(
        AUTO,
        "Schedule of the outer momentum and the outer learning rate; auto takes the one that suits the number of outer steps, "
        "the inner optimizer and the interval, and logs it with its reason.",
        # Presets that are added later are accepted too; what auto has here does not matter.
        accepts=Choice(collections.ChainMap(PRESETS, {AUTO: PRESETS["pier"]})),
    )
    lazy_start_fraction: float = setting(
        0.1,
        "Fraction of the run, at its start, that is fully synchronous; rounded to the nearest multiple of the sync interval.",
        accepts=share("such as 0.1"),
    )
    lazy_start_iters: int | None = setting(
        None,
        "Length of the lazy start in iterations, a multiple of the sync interval. Default: from --pier-lazy-start-fraction.",
        accepts=whole(0, why="with 0 for a run without one"),
    )
    outer_lr: float | None = setting(
        None,
        "Constant outer learning rate (eta, dimensionless), instead of the preset's schedule. Default: the preset's.",
        accepts=positive(100, "because with 0 no outer step moves anything; about 1 is customary"),
    )
    outer_momentum: float | None = setting(
        None,
        "Constant outer momentum coefficient (mu), also in the momentum warmup, instead of the preset's schedule. Default: the "
        "preset's.",
        accepts=share("because the momentum sums about 1 / (1 - mu) pseudo-gradients, which has no limit at 1"),
    )
    outer_rule: str | None = setting(
        None,
        "Rule of the outer step: nesterov; muon, which makes each matrix of the mean pseudo-gradient orthogonal first; or a "
        "subclass of pier_megatron.outer.OuterRule of your own, as package.module:Class. Default: the preset's: muon with "
        "pier-orthogonal, NoLoCo's with random subgroups, nesterov with all others.",
        metavar="RULE",
        accepts=outer_rule,
    )
    subgroup_size: int | None = setting(
        None,
        "Number of participants of an outer step; for each one the groups are divided at random into sets of this size: NoLoCo "
        "(arXiv 2506.10911). Default: all groups, or 2 with --pier-preset noloco.",
        metavar="N",
        accepts=whole(2, why="or left out for outer steps of all groups together"),
    )
    subgroup_seed: int = setting(0, "Seed of the random subgroups.", metavar="SEED", accepts=SEED)
    evaluate_mean: bool = setting(
        False,
        "Evaluate the mean of the groups' anchors, in runs in which they differ; costs an all-reduce of the parameters. "
        "Default: each group evaluates its own anchor, and the log has mean and spread of the losses.",
    )
    sites: int | None = setting(
        None,
        "Number of sites, each of consecutive groups that share a good network. The groups of a site average their parameters "
        "every --pier-site-interval iterations. Only outer steps cross the links between sites, and a site sends as much as "
        "one group. Default: groups exchange in outer steps only.",
        metavar="N",
        accepts=whole(2, why="or omitted: groups then exchange in outer steps only"),
    )
    site_interval: int | None = setting(
        None,
        "Number of iterations between averages inside a site, with --pier-sites; divides the sync interval, after which all "
        "sites take an outer step. Default: none.",
        metavar="ITERS",
        accepts=whole(1),
    )
    overlap: int = setting(
        0,
        "Number of iterations that hide an exchange, at most the sync interval. Its result is applied that much later, on top "
        "of the inner steps taken meanwhile. Default: 0, wait for it.",
        metavar="ITERS",
        accepts=whole(0),
    )
    fragments: int = setting(
        1,
        "Number of fragments of the parameters. They are exchanged in turn over the sync interval, which divides the peak "
        "bandwidth by their number.",
        accepts=whole(1),
    )
    exchange_dtype: str = setting(
        "fp32",
        "Codec of pseudo-gradients on the wire; integers have a scale per block.",
        accepts=Choice(CODECS),
    )
    no_error_feedback: bool = setting(
        False,
        "Drop the rounding errors of a low-bit exchange, which saves 4 bytes per owned parameter. Default: they are added "
        "to the next exchange (error feedback).",
    )
    offload: bool = setting(False, "Keep the outer state in pinned host memory. Default: on the device.")
    chunk_mib: int | None = setting(
        None,
        "Size in MiB, counted in FP32, of the chunks in which buffers are exchanged and updated. Default: 64 on a GPU, 16 on a "
        "CPU, or the number of groups if that is more. With --pier-outer-rule muon at least the largest matrix.",
        metavar="MIB",
        accepts=whole(1, 2**20),
    )
    save_inner_state: str = setting(
        "all",
        "Groups whose inner optimizer state a checkpoint holds: all, which resumes exactly, or only the first. Then all groups "
        "continue from its state.",
        accepts=Choice(("all", "first")),
    )
    load_inner_state: str = setting(
        "mean",
        "Inner state of a group after the number of groups has changed: the mean over the saved groups that it replaces, or "
        "the state of the first saved group.",
        accepts=Choice(("mean", "first")),
    )
    override_checkpoint: bool = setting(
        False, "Resume from a checkpoint of a run with other settings or another group layout. Default: refuse."
    )

    load_newest_whole: bool = setting(
        False,
        "Resume from the newest whole checkpoint in --load if the last one is damaged, or the file that names it is empty, "
        "and log which one that is. Without effect with --ckpt-step. Default: refuse.",
    )

    @property
    def launches(self) -> int:
        """Number of launches that the run is made of: one for each elastic island, or one with all groups."""
        return self.groups if self.lighthouse is not None else 1


def settings_of(args: argparse.Namespace) -> Settings:
    """Settings of the command line, unchecked; with a stock optimizer those of one group."""
    return Settings(**{"train_iters": 0, "groups": 1} | given(Settings, args))


@dataclasses.dataclass(frozen=True)
class PluginSettings:
    """Settings of the plugin that hold with every optimizer, besides those of :data:`pier_megatron.features.FEATURES`."""

    try_any_megatron: bool = setting(
        False, "Run on a release of Megatron that the plugin has not been tested on. Default: refuse."
    )
