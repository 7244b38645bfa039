"""Settings of a run with Pier, resolved and checked before anything is built.

Every check names the flag, its value, the arithmetic and a remedy, because it is read at 3 a.m. next to a failed job.
"""

import dataclasses
import math
from collections.abc import Iterator

from pier_megatron.errors import PierConfigError, Problems, division, no_multiple
from pier_megatron.run_schedule import RunSchedule
from pier_megatron.schedules import AUTO, NESTEROV
from pier_megatron.settings import Settings, flag_of
from pier_megatron.values import Choice, Number

# Above this share of the run, an outer step still undoes gradients that the model has long left behind.
_LONG_HORIZON = 0.03

# With fewer outer steps a run is hardly one with Pier.
_FEW_OUTER_STEPS = 3


@dataclasses.dataclass(frozen=True)
class PierConfig(RunSchedule):
    """The hyperparameters of a run with Pier; the symbols are those of arXiv 2511.17849.

    ``T`` is ``train_iters``, ``G`` groups, ``H`` the sync interval, ``W`` the lazy start in iterations, ``P`` fragments.

    Raises:
        PierConfigError: With a message for each value that is out of range, or that others rule out.
    """

    def __post_init__(self) -> None:
        # Out of their range, values would make nonsense of the other checks.
        Problems(list(self._out_of_range())).report()
        if self.preset == AUTO:
            # What follows, and what a checkpoint stores, is of a schedule, however it was chosen.
            object.__setattr__(self, "preset", self.suited_preset[0])
        checks = (
            self._wrong_of_islands,
            self._wrong_together,
            self._wrong_of_subgroups,
            self._wrong_of_sites,
            self._wrong_of_lazy_start,
        )
        problems = Problems([message for check in checks for message in check()])
        if self.lighthouse is not None:
            with problems.collecting():
                self.check_elastic()
        problems.report()

    def _out_of_range(self) -> Iterator[str]:
        if self.train_iters < 1:
            yield f"--train-iters {self.train_iters}: there is no iteration to train. Give at least 1."
        for setting in dataclasses.fields(self):
            accepts, value = setting.metadata.get("accepts"), getattr(self, setting.name)
            if isinstance(accepts, Number | Choice) and value is not None and (problem := accepts.problem(value)):
                yield f"{flag_of(setting.name)} {value}: {problem}."

    def _wrong_together(self) -> Iterator[str]:
        if self.fragments > self.sync_interval:
            yield (
                f"--pier-fragments {self.fragments} exceeds --pier-sync-interval {self.sync_interval}: fragments take their "
                "outer steps in different iterations of an interval, one in each at most."
            )
        if self.overlap > self.sync_interval:
            yield (
                f"--pier-overlap {self.overlap}: must be from 0 to --pier-sync-interval {self.sync_interval}, because an "
                "exchange has to be applied before the next one of its fragment begins."
            )
        if not self.has_common_anchor and (self.outer_rule is not None or self._preset.rule != NESTEROV):
            yield (
                f"--pier-outer-rule {self.outer_rule or self._preset.rule} with outer steps of {self.subgroup} groups "
                f"(--pier-preset {self.preset}, --pier-subgroup-size): groups then keep anchors of their own, which only "
                "NoLoCo's rule pulls together. Drop one of them."
            )
        if self.no_error_feedback and self.codec.needs_error_feedback:
            yield (
                f"--pier-exchange-dtype {self.exchange_dtype} with --pier-no-error-feedback: {self.codec.bits} bits drop most "
                "of a number, and without error feedback that is lost. Drop --pier-no-error-feedback, or use int4."
            )
        if self.save_inner_state == "first" and (self.overlap or self.fragments > 1):
            yield (
                f"--pier-save-inner-state first cannot be used with --pier-overlap {self.overlap} and --pier-fragments "
                f"{self.fragments}: groups then never hold the same parameters, and what all but the first have learned since "
                "their last outer step would be lost. Save all."
            )
        if self.sync_seconds is not None and self.lighthouse is None:
            yield (
                f"--pier-sync-seconds {self.sync_seconds} is for elastic islands (--pier-lighthouse). "
                "Groups of one launch take outer steps by --pier-sync-interval alone."
            )

    def check_elastic(self) -> None:
        """Refuses what is incompatible with outer steps that are retried, and with islands that join.

        Raises:
            PierConfigError: With a message for each such setting, its reason and a remedy.
        """
        table = (
            (
                self.sites is not None,
                f"--pier-sites {self.sites}",
                "they join and leave one by one, and each carries a part of what its site sends. Drop one",
            ),
            (
                self.overlap > self.sync_interval // self.fragments,
                f"--pier-overlap {self.overlap} with --pier-sync-interval {self.sync_interval} and --pier-fragments "
                f"{self.fragments}",
                f"one exchange at a time is hidden behind training, and the next one begins after {self.sync_interval} // "
                f"{self.fragments} = {self.sync_interval // self.fragments} iterations. Use at most that",
            ),
            (
                self.sync_seconds is not None and (self.overlap or self.fragments > 1),
                f"--pier-sync-seconds {self.sync_seconds} with --pier-overlap {self.overlap} and --pier-fragments "
                f"{self.fragments}",
                "an island rests until the one outer step of an interval, for which the others wait. Drop it",
            ),
            (
                not self.has_common_anchor,
                f"--pier-preset {self.preset} in subgroups of {self.subgroup}",
                "islands that never agree have no common state for a joining island to take over. Use another preset, without "
                "--pier-subgroup-size",
            ),
        )
        beside = "cannot be used with elastic islands (--pier-lighthouse)"
        Problems([f"{given} {beside}: {why}." for holds, given, why in table if holds]).report()

    def _wrong_of_islands(self) -> Iterator[str]:
        names = ("island", "island_address", "secret_file", "island_timeout", "island_wait") if self.lighthouse is None else ()
        for name in (name for name in names if getattr(self, name) != getattr(Settings, name)):
            yield (
                f"{flag_of(name)} {getattr(self, name)} without --pier-lighthouse: it is for elastic islands. Without a "
                "lighthouse this job would train alone, as would the others, and all would save to one --save folder. Add "
                "--pier-lighthouse URL, or drop it."
            )

    def _wrong_of_subgroups(self) -> Iterator[str]:
        if self.subgroup_size is not None and self.subgroup_size > self.groups:
            yield (
                f"--pier-subgroup-size {self.subgroup_size}: must be from 2 to --pier-groups {self.groups}, or left out for "
                "outer steps of all groups together."
            )
        if self.subgroup is None:
            for name in ("subgroup_seed", "evaluate_mean"):
                if getattr(self, name):
                    yield (
                        f"{flag_of(name)} is for runs in which groups never agree, but all groups of this one meet at every "
                        "outer step: drop it, or add --pier-preset noloco or --pier-subgroup-size."
                    )
            return
        if self.groups > 1 and not self.codec.lossless:
            yield (
                f"--pier-exchange-dtype {self.exchange_dtype} with outer steps of {self.subgroup} groups (--pier-preset "
                f"{self.preset}, --pier-subgroup-size): they send their weights, and a codec would drop more of them than a "
                "step changes. Drop one of them."
            )
        if self.save_inner_state == "first":
            yield (
                "--pier-save-inner-state first cannot be used where groups never agree (--pier-preset noloco or "
                "--pier-subgroup-size): each has weights and outer momentum of its own, which would be lost. Save all."
            )

    def _wrong_of_sites(self) -> Iterator[str]:
        sites, interval = self.sites, self.site_interval
        if sites is None or interval is None:
            for name, needed in (("sites", "site_interval"), ("site_interval", "sites")):
                if getattr(self, name) is not None:
                    yield (
                        f"{flag_of(name)} {getattr(self, name)} without {flag_of(needed)}: the groups of a site average their "
                        f"parameters every --pier-site-interval iterations. Add {flag_of(needed)}, or drop it."
                    )
            return
        if self.groups % sites or self.groups == sites:
            yield (
                f"--pier-sites {sites}: must divide --pier-groups {self.groups} into sites of two groups or more "
                f"({division(self.groups, sites)}). With one group in each site, drop it: outer steps are all that crosses."
            )
        if self.sync_interval % interval:
            yield (
                f"--pier-site-interval {interval} does not divide --pier-sync-interval {self.sync_interval} "
                f"({division(self.sync_interval, interval)}): an outer step begins with an average inside each site."
            )
        untried = (
            ("lighthouse", None, "elastic islands join and leave one by one, and each carries a part of what its site sends"),
            ("fragments", 1, "a fragment crosses between two averages, where the groups of a site differ"),
        )
        for name, default, reason in untried:
            if getattr(self, name) != default:
                yield (f"{flag_of(name)} {getattr(self, name)} cannot be used with --pier-sites {sites}: {reason}. Drop one.")
        if self.subgroup is not None:
            yield (
                f"--pier-sites {sites} with outer steps of {self.subgroup} groups (--pier-preset {self.preset}, "
                "--pier-subgroup-size): the groups of a site have one anchor, and pairs have two. Drop one."
            )

    def _wrong_of_lazy_start(self) -> Iterator[str]:
        iterations, steps, interval = self.lazy_start_iters, self.train_iters, self.sync_interval
        # One that is a share of the run is as long as the run allows.
        if iterations is None:
            return
        given = f"--pier-lazy-start-iters {iterations}"
        if iterations % interval:
            lower = min(iterations, steps - 1) // interval * interval
            fitting = [str(each) for each in (lower, lower + interval) if 0 < each < steps] or ["0"]
            yield (
                f"{given} is no multiple of --pier-sync-interval {interval} ({division(iterations, interval)}): the momentum "
                f"warmup ends on a sync iteration. Use {' or '.join(fitting)}."
            )
        elif iterations >= steps:
            yield (
                f"{given} gives a lazy start of {iterations} iterations, but the run has {steps}: no iteration is "
                "left for the local phase, so this would be a synchronous run. Shorten the lazy start or "
                "--pier-sync-interval, or train with --optimizer adam."
            )

    def check_data_parallel_size(self, data_parallel_size: int, context_parallel_size: int = 1) -> None:
        """Refuses groups that would not be whole model replicas; context parallelism does not count in their number.

        Args:
            data_parallel_size: Number of model replicas.
            context_parallel_size: Number of ranks that share the sequences of a replica.

        Raises:
            PierConfigError: If the replicas do not divide among the groups.
        """
        if data_parallel_size % self.groups == 0:
            return
        divisors = [n for n in range(1, data_parallel_size + 1) if data_parallel_size % n == 0]
        cut = (
            f" (Megatron itself only asks that {data_parallel_size} x {context_parallel_size} = "
            f"{data_parallel_size * context_parallel_size} ranks divide by it, and would cut a context-parallel group)"
            if context_parallel_size > 1
            else ""
        )
        raise PierConfigError(
            f"--pier-groups {self.groups} does not divide the data-parallel size {data_parallel_size} "
            f"({division(data_parallel_size, self.groups)}): every group needs the same number of whole model "
            f"replicas{cut}. Use one of {', '.join(map(str, divisors))}."
        )

    def check_resumable(self, iteration: int, is_local: bool) -> None:
        """Refuses to return to the lazy start, which averages gradients: those of groups with different weights do not add up.

        Args:
            iteration: Iteration at which the run resumes.
            is_local: Whether the run was in its local phase there.

        Raises:
            PierConfigError: If the run was in its local phase at ``iteration``; with the value that fits.
        """
        if not is_local or not self.is_lazy(iteration + 1):
            return
        fitting = iteration // self.sync_interval * self.sync_interval
        raise PierConfigError(
            f"--train-iters {self.train_iters}: the lazy start would last to iteration {self.lazy_start}, but at iteration "
            f"{iteration}, where the run resumes, it is over: the groups hold different parameters, and averaging their "
            "gradients would never bring them together. Add --pier-lazy-start-iters with the value that the run began with, "
            f"or {fitting}."
        )

    def check_interval(self, flag: str, interval: int, purpose: str, remedy: str = "") -> None:
        """Refuses an interval at which the groups would not agree on the parameters; after the last iteration they do.

        Args:
            flag: Flag that sets the interval.
            interval: Interval in iterations.
            purpose: What happens at that interval, for the message.
            remedy: Other ways out, for the end of the message.

        Raises:
            PierConfigError: If the interval is no multiple of the sync interval.
        """
        if interval % self.sync_interval == 0 or interval >= self.train_iters:
            return
        why = f"{purpose} would find groups whose parameters have drifted apart"
        raise no_multiple(f"{flag} {interval}", interval, self.sync_interval, why, remedy)

    def warnings(self) -> list[str]:
        """What is allowed but likely to disappoint, one sentence each."""
        found, steps = self._warnings_of_short_run(), self.train_iters
        horizon, suited = self.momentum_horizon(), self.suited_preset[0]
        # A preset that keeps to a horizon of its own has not been seen to overshoot: docs/study.md.
        is_limited = self.outer_momentum is None and (self._preset.longest_horizon is not None or self.preset == suited)
        if horizon > _LONG_HORIZON and not is_limited:
            remedy = f"Drop --pier-preset, for {suited}" if self.outer_momentum is None else "Lower --pier-outer-momentum"
            found.append(
                f"the outer momentum remembers H / (1 - mu) = {horizon * steps:.0f} iterations, {horizon:.0%} of this run (the "
                f"paper's runs: about 0.5 %). Expect it to overshoot. {remedy}, or shorten --pier-sync-interval."
            )
        return found + self._warnings_of_subgroups()

    def _warnings_of_short_run(self) -> list[str]:
        found, interval = [], self.sync_interval
        target, outer_steps = self.lazy_start_fraction * self.train_iters, math.ceil(self.local_intervals)
        if self.lazy_start_iters is None and target > 0 and self.lazy_start == 0:
            remedy = f"; --pier-sync-interval {int(target)} or less would have one" if target >= 1 else ""
            found.append(
                f"the run has no lazy start: --pier-lazy-start-fraction {self.lazy_start_fraction} of --train-iters "
                f"{self.train_iters} is {target:g} iterations, which rounds to 0 x --pier-sync-interval {interval}{remedy}."
            )
        if outer_steps < _FEW_OUTER_STEPS:
            found.append(
                f"the run has {outer_steps} outer step{'s' * (outer_steps > 1)}: {self.train_iters - self.lazy_start} "
                f"iterations after the lazy start / --pier-sync-interval {interval}. Shorten --pier-sync-interval, or train "
                "for longer."
            )
        return found

    def _warnings_of_subgroups(self) -> list[str]:
        """What arXiv 2506.10911 says of its constants: within them the spread of the groups stays bounded."""
        n = self.subgroup
        if n is None or self.groups == 1:
            return []
        for step in self.outer_steps():
            alpha, gamma = self.momentum_at(step), self.learning_rate_at(step)
            low, high = (math.sqrt(n / (2 * (n - 1)) * of) for of in (alpha**2, 2 + alpha**2))
            if not low < gamma < high:
                return [
                    f"at the outer step after iteration {step} gamma = {gamma:.3g} is not between {low:.3g} and {high:.3g} "
                    f"(outer momentum {alpha:.3g}, subgroups of {n}; arXiv 2506.10911): the groups may drift apart. Change "
                    "--pier-outer-lr, which is gamma, or take the momentum of --pier-preset noloco, 0.5."
                ]
        return []
