"""What a checkpoint of a Pier run holds in addition to Megatron's own content, and which runs may resume from it.

Megatron's keys hold the weights that all groups agree on and the inner optimizer's state of group 0, so that everything
that reads a stock checkpoint reads this one. Pier adds the outer state, once, and what each group has of its own; where
groups never agree, the outer state is of each group too, and Megatron's keys hold the mean.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.settings import flag_of
from pier_megatron.version import __version__

FORMAT = 10
"""Raised when what is written changes: a plugin reads its own format alone."""

SCHEDULES = "--override-opt_param-scheduler (this run's), or --use-checkpoint-opt_param-scheduler (those that were saved)"
"""What Megatron asks for where the schedules of learning rate and weight decay have another length than those saved."""

ENTRY = "pier"
"""Key of the plugin's own content, in Megatron's content metadata and in the optimizer's state dict."""

OUTER = "pier.outer"
"""Prefix of the outer state: the anchor where Megatron has ``param``, the outer momentum where it has ``exp_avg``."""

# Settings that make a run another run.
_SETTINGS = (
    "train_iters",
    "groups",
    "inner_optimizer",
    "sync_interval",
    "preset",
    "subgroup_size",
    "subgroup_seed",
    "lazy_start",
    "outer_lr",
    "outer_momentum",
    "overlap",
    "fragments",
    "exchange_dtype",
    "no_error_feedback",
    "sites",
    "site_interval",
)

LAYER_WISE = "--use-distributed-optimizer"
"""In the layout of a run whose inner optimizer can do with and without."""

PRECISION_AWARE = "--use-precision-aware-optimizer"
"""In the layout of a run whose inner optimizer keeps the main parameters: bits of one under Megatron's own keys."""

# What the tensors of the inner optimizer are, and how they are stored.
_INNER = (flag_of("inner_optimizer"), LAYER_WISE, PRECISION_AWARE)


_OLDER = "Finish the run with the plugin that wrote it, or begin from its weights with --finetune."


def group_prefix(group: int) -> str:
    """Prefix of what a group has of its own."""
    return f"pier.group_{group}"


def groups_apart(config: PierConfig, is_local: bool, is_synchronised: bool) -> range:
    """Groups of a launch whose inner states are stored apart: Megatron's own keys hold that of the first, if it agrees."""
    if not is_local or config.save_inner_state == "first":
        return range(0)
    return range(1 if is_synchronised else 0, config.groups // config.launches)


def checksum_name(name: str, group: int | None) -> str:
    """What the checksum of a flat buffer is called: that of all groups, or of one."""
    return name if group is None else f"{name} of group {group}"


Metadata = Mapping[str, Any]
"""Description of a checkpoint, plain values: Megatron's content metadata, and the plugin's :data:`ENTRY` in it."""


@dataclasses.dataclass(frozen=True)
class Description:
    """What a checkpoint says about itself, as plain values in Megatron's content metadata.

    Attributes:
        iteration: Iterations completed.
        settings: The run's, by the names of :class:`PierConfig`.
        layout: Sizes of the parallel groups, by flag.
        chunk_mib: Size of the chunks, which error feedback and exchanges under way are cut into.
        own_inner_state: Groups whose main parameters and inner optimizer state are stored apart; all others have what
            Megatron's own keys hold.
        rounds: Exchanges under way: the iteration at which each began, and the verdicts on all groups.
        restarted: Iteration at which each group was last restarted, by group.
        island: Elastic island that has saved it, with its own state only.
        is_local: Whether the groups were training apart.
        is_synchronised: Whether all groups held the same parameters.
        last_common_step: Iteration after which the groups took their last outer step together.
        checksums: Checksums of the outer state, over all ranks of a group, by :func:`checksum_name`.
        format: See :data:`FORMAT`.
        version: Version of the plugin.
        cut: How the ranks of a group share the parameters, a checksum.
        rule: Name of the rule of the outer steps.
    """

    iteration: int
    settings: Mapping[str, Any]
    layout: Mapping[str, int]
    chunk_mib: int
    own_inner_state: tuple[int, ...] = ()
    rounds: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    restarted: Mapping[int, int] = dataclasses.field(default_factory=dict)
    island: int | None = None
    is_local: bool = False
    is_synchronised: bool = True
    last_common_step: int = 0
    checksums: Mapping[str, int] = dataclasses.field(default_factory=dict)
    format: int = FORMAT
    version: str = __version__
    cut: int = 0
    rule: str = ""

    @classmethod
    def of_run(
        cls, config: PierConfig, iteration: int, layout: Mapping[str, int], device_type: str, **content: Any
    ) -> "Description":
        """Describes a run as it is, and what of it is stored."""
        settings = {name: getattr(config, name) for name in _SETTINGS}
        content |= {"rule": config.rule_name, "island": config.island}
        return cls(iteration, settings, dict(layout), config.chunk_mib_on(device_type), **content)

    @classmethod
    def from_metadata(cls, found: Metadata) -> "Description":
        """Reads what a checkpoint says.

        Raises:
            PierConfigError: If another format is written in it.
        """
        if found["format"] != FORMAT:
            raise PierConfigError(
                f"--load: the checkpoint of iteration {found['iteration']} was written by pier_megatron {found['version']} in "
                f"format {found['format']}; this is {__version__}, which reads format {FORMAT}. "
                + ("Upgrade pier_megatron." if found["format"] > FORMAT else _OLDER)
            )
        return cls(**found)

    @functools.cached_property
    def _config(self) -> PierConfig:
        settings = dict(self.settings)
        return PierConfig(lazy_start_iters=settings.pop("lazy_start"), **settings)

    def to_metadata(self) -> Metadata:
        """The plain values to store."""
        return dataclasses.asdict(self)

    def is_exact_for(self, present: "Description") -> bool:
        """Whether a run resumes from here as if it had never stopped: same settings, same shape."""
        return not self._changes(present) and (self.chunk_mib, self.cut) == (present.chunk_mib, present.cut)

    @property
    def has_common_outer_state(self) -> bool:
        """Whether all groups held the same anchor and momentum."""
        return self._config.has_common_anchor

    @property
    def holds_all_groups(self) -> bool:
        """Whether nothing of any group is missing: in the lazy start they are all the same."""
        return not self.is_local or self.island is not None or len(self.own_inner_state) >= self.settings["groups"] - 1

    def is_apart(self, group: int) -> bool:
        """Whether the inner state of a group is stored apart from Megatron's own keys."""
        return group in self._apart

    @functools.cached_property
    def _apart(self) -> frozenset[int]:
        return frozenset(self.own_inner_state)

    @property
    def in_common(self) -> dict[str, object]:
        """Settings that must be equal in all elastic islands, by the user's names."""
        settings = {flag_of(name): value for name, value in self.settings.items()}
        own = {flag_of("chunk_mib"): self.chunk_mib, "pier_megatron": self.version, "outer rule": self.rule}
        return settings | dict(self.layout) | own

    def has_layout_of(self, present: "Description") -> bool:
        """Whether the ranks of a group share the model as they did."""
        return self.layout == present.layout

    def remembers_otherwise(self, present: "Description") -> bool:
        """Whether the outer momentum means something else: Nesterov's and NoLoCo's rules sum the same pseudo-gradients."""
        return self.rule != present.rule and not {self.rule, present.rule} <= {"nesterov", "noloco"}

    def check(self, present: "Description", accepts_changes: bool, lacking: Sequence[str] = ()) -> list[str]:
        """Compares the saved run with the run that loads it.

        Args:
            present: The run that loads.
            accepts_changes: Whether the user allows the run to continue with other settings.
            lacking: Missing parts of the saved run, one phrase each.

        Returns:
            What has changed, one phrase each.

        Raises:
            PierConfigError: If something has changed that the user has not accepted, or that cannot be.
        """
        changes = [*self._changes(present), *lacking]
        foreign = [change for change in changes if change.startswith(_INNER)]
        if foreign:
            raise PierConfigError(
                f"--load: the checkpoint of iteration {self.iteration} has the state of another inner optimizer: "
                f"{', '.join(foreign)}. Restore the setting, or restart from the weights with --finetune."
            )
        if changes and not accepts_changes:
            # Megatron would ask about schedules at the next start.
            is_longer = self.settings["train_iters"] != present.settings["train_iters"]
            whole = f" (for another length the whole line: --pier-override-checkpoint with {SCHEDULES})" if is_longer else ""
            raise PierConfigError(
                f"--load: the checkpoint of iteration {self.iteration} is of another run: {', '.join(changes)}. Restore what "
                f"was saved, or accept the differences with --pier-override-checkpoint{whole}."
            )
        present._config.check_resumable(self.iteration, self.is_local)
        return changes

    def _changes(self, present: "Description") -> list[str]:
        pairs = [(flag_of(name), self.settings[name], present.settings[name]) for name in _SETTINGS]
        kinds = ["in one launch" if run.island is None else "in elastic islands" for run in (self, present)]
        pairs.append(("run", kinds[0], kinds[1]))
        pairs.append(("outer rule", self.rule, present.rule))
        pairs += [
            (flag, self.layout.get(flag, "off"), present.layout.get(flag, "off")) for flag in {**self.layout, **present.layout}
        ]
        return [f"{flag} {then} is now {now}" for flag, then, now in pairs if then != now]

    def refusal_in_one_launch(self, config: PierConfig, load: str | None) -> str | None:
        """Why groups of one launch cannot continue from this checkpoint in the folder ``load``; None if they can."""
        if self.island is None or config.island is not None:
            return None
        return (
            f"--load {load}: island {self.island} has saved its own part of a run there. Groups of one launch cannot continue "
            "from it. Continue with elastic islands (--pier-lighthouse), or begin from the weights with --finetune."
        )

    def sources(self, group: int, groups: int, rule: str) -> list[int]:
        """Saved groups of whose inner states a group takes the mean.

        If the number of groups is the same, each takes its own. Otherwise it takes those whose share of the data-parallel ranks
        overlaps with its own: several after a merger, one after a split.

        Args:
            group: Index of the group that loads.
            groups: Number of groups that load.
            rule: ``mean`` for this rule, ``first`` for group 0 wherever the number of groups has changed.
        """
        saved = self.settings["groups"]
        if self.island is not None:
            # It is alone in its folder.
            return [0]
        if saved == groups:
            overlapping = range(group, group + 1)
        elif rule == "first":
            overlapping = range(1)
        else:
            overlapping = range(group * saved // groups, math.ceil((group + 1) * saved / groups))
        return sorted({source if self.is_apart(source) else 0 for source in overlapping})

    def outer_sources(self, group: int, present: "Description", rule: str) -> list[int | None]:
        """Saved groups of whose outer states a group takes the mean; None stands for that of all groups.

        Args:
            group: Index of the group that loads.
            present: The run that loads.
            rule: Rule for groups in another number, see :meth:`sources`.
        """
        if self.has_common_outer_state:
            return [None]
        if present.has_common_outer_state:
            return list(range(self.settings["groups"]))
        return list(self.sources(group, present.settings["groups"], rule))

    def outer_prefix(self, group: int | None, index: int) -> str:
        """Prefix of the keys of an optimizer's outer state, of all groups or of one."""
        return f"{OUTER}.{index}" if group is None else f"{group_prefix(group)}.outer.{index}"
