"""Settings of a run with Pier, resolved and checked before anything is built.

Every check names the flag, its value, the arithmetic and a remedy, because it is read at 3 a.m. next to a failed job.
"""

import dataclasses
import math
from collections.abc import Iterator
from functools import cached_property

from pier_megatron.errors import PierConfigError, division, no_multiple
from pier_megatron.exchange.codecs import CODECS, Codec
from pier_megatron.schedules import PRESETS, Preset, value_at
from pier_megatron.settings import Settings, flag_of
from pier_megatron.values import Choice, Number

# What a few kernels and a message take time for, against which their overhead is small.
_CHUNK_MIB = {"cpu": 16, "cuda": 64}

# Above this share of the run, an outer step still undoes gradients that the model has long left behind.
_LONG_HORIZON = 0.03


@dataclasses.dataclass(frozen=True)
class PierConfig(Settings):
    """The hyperparameters of a run with Pier; the symbols are those of arXiv 2511.17849.

    ``T`` is ``train_iters``, ``G`` groups, ``H`` the sync interval, ``W`` the lazy start in iterations, ``P`` fragments.

    Raises:
        PierConfigError: If a value is out of range or the run is too short for its lazy start.
    """

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            accepts, value = setting.metadata.get("accepts"), getattr(self, setting.name)
            if isinstance(accepts, Number | Choice) and value is not None and (problem := accepts.problem(value)):
                raise PierConfigError(f"{flag_of(setting.name)} {value}: {problem}.")
        self._check_elastic()
        if self.fragments > self.sync_interval:
            raise PierConfigError(
                f"--pier-fragments {self.fragments} exceeds --pier-sync-interval {self.sync_interval}: fragments take their "
                "outer steps in different iterations of an interval, one in each at most."
            )
        if self.overlap >= self.sync_interval:
            raise PierConfigError(
                f"--pier-overlap {self.overlap}: must be from 0 to {self.sync_interval - 1}, below --pier-sync-interval "
                f"{self.sync_interval}, because an exchange has to be applied before the next one of its fragment begins."
            )
        if self.save_inner_state == "first" and (self.overlap or self.fragments > 1):
            raise PierConfigError(
                f"--pier-save-inner-state first cannot be used with --pier-overlap {self.overlap} and --pier-fragments "
                f"{self.fragments}: groups then never hold the same parameters, and what all but the first have learned since "
                "their last outer step would be lost. Save all."
            )
        if self.sync_seconds is not None and self.lighthouse is None:
            raise PierConfigError(
                f"--pier-sync-seconds {self.sync_seconds} is for elastic islands (--pier-lighthouse). "
                "Groups of one launch take outer steps by --pier-sync-interval alone."
            )
        if self.inner_optimizer != "adam" and not self.islands:
            raise PierConfigError(f"--pier-inner-optimizer {self.inner_optimizer} needs --pier-islands.")
        self._check_subgroups()
        self._check_lazy_start()

    def _check_elastic(self) -> None:
        names = ("island", "island_address", "secret_file", "island_timeout", "island_wait") if self.lighthouse is None else ()
        for name in (name for name in names if getattr(self, name) != getattr(Settings, name)):
            raise PierConfigError(
                f"{flag_of(name)} {getattr(self, name)} without --pier-lighthouse: it is for elastic islands. Without a "
                "lighthouse this job would train alone, as would the others, and all would save to one --save folder. Add "
                "--pier-lighthouse URL, or drop it."
            )

    def _check_subgroups(self) -> None:
        if self.subgroup_size is not None and self.subgroup_size > self.groups:
            raise PierConfigError(
                f"--pier-subgroup-size {self.subgroup_size}: must be from 2 to --pier-groups {self.groups}, or left out for "
                "outer steps of all groups together."
            )
        if self.subgroup is None:
            for name, default in (("subgroup_gamma", None), ("subgroup_seed", 0), ("evaluate_mean", False)):
                if getattr(self, name) != default:
                    raise PierConfigError(
                        f"{flag_of(name)} is for runs in which groups never agree, but all groups of this one meet at every "
                        "outer step: drop it, or add --pier-preset noloco or --pier-subgroup-size."
                    )
            return
        if self.save_inner_state == "first":
            raise PierConfigError(
                "--pier-save-inner-state first cannot be used where groups never agree (--pier-preset noloco or "
                "--pier-subgroup-size): each has weights and outer momentum of its own, which would be lost. Save all."
            )

    def _check_lazy_start(self) -> None:
        steps, interval = self.train_iters, self.sync_interval
        if self.lazy_start_iters is not None:
            given = f"--pier-lazy-start-iters {self.lazy_start_iters}"
            if self.lazy_start_iters % interval:
                raise no_multiple(given, self.lazy_start_iters, interval, "the momentum warmup ends on a sync iteration")
        else:
            target = self.lazy_start_fraction * steps
            given = f"--pier-lazy-start-fraction {self.lazy_start_fraction} of --train-iters {steps}"
            if target > 0 and self.lazy_start == 0:
                raise PierConfigError(
                    f"{given} is {target:g} iterations, which rounds to 0 x --pier-sync-interval {interval}: the run is "
                    f"too short for its lazy start. Use --pier-sync-interval {max(int(target), 1)} or less, "
                    f"--pier-lazy-start-iters {interval}, or --pier-lazy-start-iters 0 to start without one."
                )
        if self.lazy_start >= steps:
            raise PierConfigError(
                f"{given} gives a lazy start of {self.lazy_start} iterations, but the run has {steps}: no iteration is "
                "left for the local phase, so this would be a synchronous run. Shorten the lazy start or "
                "--pier-sync-interval, or train with --optimizer adam."
            )

    @property
    def _preset(self) -> Preset:
        return PRESETS[self.preset]

    @property
    def codec(self) -> Codec:
        """What pseudo-gradients look like on the wire."""
        return CODECS[self.exchange_dtype]

    @property
    def has_error_feedback(self) -> bool:
        """Whether what a low-bit exchange rounds away is kept for the next one."""
        return not (self.codec.lossless or self.no_error_feedback)

    @property
    def subgroup(self) -> int | None:
        """How many groups meet at an outer step; None if all do and agree."""
        size = self.subgroup_size or self._preset.subgroup_size
        return None if size is None else min(size, self.groups)

    @property
    def has_common_anchor(self) -> bool:
        """Whether all groups take part in every outer step, and hold the same anchor after it."""
        return self.subgroup is None

    @property
    def sends_differences(self) -> bool:
        """Whether participants send their pseudo-gradients, and separately, ahead, their slow weights.

        With gamma = eta the sum of parameters says all. But those cross the groups exactly or not at all.
        """
        return self.subgroup_gamma is not None or not self.codec.lossless

    @property
    def pulls(self) -> bool:
        """Whether slow weights cross the groups, ahead of the outer step that needs them."""
        return not self.has_common_anchor and self.sends_differences and self.subgroup_gamma != 0

    def pull_at(self, iteration: int) -> float:
        """``gamma / eta(t)``, the share of the distance of the anchor to the participants' mean that the momentum takes.

        Args:
            iteration: Iteration, counted from 1.
        """
        return 1.0 if self.subgroup_gamma is None else self.subgroup_gamma / self.learning_rate_at(iteration)

    def chunk_mib_on(self, device_type: str) -> int:
        """Size in MiB of the pieces in which buffers on a ``cpu`` or a ``cuda`` device are exchanged.

        A piece is cut into one segment for each group, and segments far below a MiB are bound by latency.

        Args:
            device_type: Type of the device, ``cpu`` or ``cuda``.
        """
        return self.chunk_mib or max(_CHUNK_MIB[device_type], self.groups)

    def chunk_numel_on(self, device_type: str) -> int:
        """Largest number of elements of such a piece.

        Args:
            device_type: Type of the device, ``cpu`` or ``cuda``.
        """
        return self.chunk_mib_on(device_type) * 2**20 // 4

    @cached_property
    def lazy_start(self) -> int:
        """``W``: number of fully synchronous iterations at the start."""
        if self.lazy_start_iters is not None:
            return self.lazy_start_iters
        # Half rounds up: the longer lazy start is the safer one.
        return int(self.lazy_start_fraction * self.train_iters / self.sync_interval + 0.5) * self.sync_interval

    @property
    def local_intervals(self) -> float:
        """Sync intervals of the local phase; the last one may be cut short."""
        return (self.train_iters - self.lazy_start) / self.sync_interval

    @property
    def warms_momentum(self) -> bool:
        """Whether the momentum is built up during the lazy start."""
        return self._preset.warmup_momentum is not None

    def is_lazy(self, iteration: int) -> bool:
        """Whether gradients are averaged over all groups.

        Args:
            iteration: Iteration, counted from 1.
        """
        return iteration <= self.lazy_start

    def is_momentum_warmup(self, iteration: int) -> bool:
        """Whether the momentum warmup runs after an iteration.

        Args:
            iteration: Iteration, counted from 1.
        """
        return self.warms_momentum and self.is_lazy(iteration) and iteration % self.sync_interval == 0

    def is_outer_step(self, iteration: int) -> bool:
        """Whether any fragment's outer step begins after an iteration.

        Args:
            iteration: Iteration, counted from 1.
        """
        return bool(self.fragments_due(iteration))

    def fragments_due(self, iteration: int) -> range:
        """Fragments whose outer step begins after an iteration.

        Each has one every H iterations, evenly spread, the last fragment at multiples of H; after the last iteration all do.

        Args:
            iteration: Iteration, counted from 1.
        """
        if self.is_lazy(iteration):
            return range(0)
        if iteration == self.train_iters:
            return range(self.fragments)
        # Fragment f is due when the interval is (f + 1) / P through.
        through = (iteration - 1) % self.sync_interval + 1
        begin, end = ((self.fragments * n) // self.sync_interval for n in (through - 1, through))
        return range(begin, end)

    def next_outer_step(self, fragment: int, iteration: int) -> int | None:
        """The iteration after which a fragment's next outer step begins; None if there is none.

        Args:
            fragment: Number of the fragment, from 0.
            iteration: Iteration, counted from 1, that the outer step is later than.
        """
        later = range(iteration + 1, min(iteration + self.sync_interval, self.train_iters) + 1)
        return next((t for t in later if fragment in self.fragments_due(t)), None)

    def is_synchronised(self, iteration: int) -> bool:
        """Whether all groups hold the same parameters at the end of an iteration.

        Args:
            iteration: Iteration, counted from 1.
        """
        if self.is_lazy(iteration) or iteration == self.train_iters:
            return True
        return self.has_common_anchor and self.overlap == 0 and self.fragments == 1 and self.is_outer_step(iteration)

    def outer_steps(self) -> Iterator[int]:
        """The iterations after which an outer step begins, in order."""
        return (iteration for iteration in range(self.lazy_start + 1, self.train_iters + 1) if self.is_outer_step(iteration))

    def momentum_at(self, iteration: int) -> float:
        """``mu(t)``, the outer momentum coefficient.

        Args:
            iteration: Iteration, counted from 1.
        """
        if self.outer_momentum is not None:
            return self.outer_momentum
        if self.is_lazy(iteration):
            return self._preset.warmup_momentum or 0.0
        mu = value_at(self._preset.momentum, *self._local_progress(iteration))
        if self._preset.longest_horizon is None:
            return mu
        limit = 1 - 1 / (self._preset.longest_horizon * self.local_intervals)
        return min(mu, max(limit, self._preset.warmup_momentum or 0.0))

    def learning_rate_at(self, iteration: int) -> float:
        """``eta(t)``, the outer learning rate; 0 in the lazy start, in which no outer step changes the parameters.

        Args:
            iteration: Iteration, counted from 1.
        """
        if self.is_lazy(iteration):
            return 0.0
        if self.outer_lr is not None:
            return self.outer_lr
        return value_at(self._preset.learning_rate, *self._local_progress(iteration))

    def _local_progress(self, iteration: int) -> tuple[float, float]:
        """Fractions of the whole run: behind us since the lazy start, and in all since the lazy start."""
        return (iteration - self.lazy_start) / self.train_iters, 1 - self.lazy_start / self.train_iters

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
        """Refuses to fall back into the lazy start: it averages gradients, which groups that have drifted apart do not share.

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
            f"{iteration}, where the run goes on, it is over: the groups hold different parameters, and averaging their "
            "gradients would never bring them together. Add --pier-lazy-start-iters with the value that the run began with, "
            f"or {fitting}."
        )

    def check_interval(self, flag: str, interval: int, purpose: str, remedy: str = "") -> None:
        """Refuses an interval at which the groups would not agree on the parameters.

        Args:
            flag: Flag that sets the interval.
            interval: Interval in iterations.
            purpose: What happens at that interval, for the message.
            remedy: Other ways out, for the end of the message.

        Raises:
            PierConfigError: If the interval is no multiple of the sync interval.
        """
        if interval % self.sync_interval == 0 or interval > self.train_iters:
            return
        why = f"{purpose} would find groups whose parameters have drifted apart"
        raise no_multiple(f"{flag} {interval}", interval, self.sync_interval, why, remedy)

    def warnings(self) -> list[str]:
        """What is allowed but likely to disappoint, one sentence each."""
        found = []
        horizon = self.momentum_horizon()
        # A preset that keeps to a horizon of its own has not been seen to overshoot: docs/study.md.
        is_limited = self.outer_momentum is None and self._preset.longest_horizon is not None
        if horizon > _LONG_HORIZON and not is_limited:
            found.append(
                f"the outer momentum remembers H / (1 - mu) = {horizon * self.train_iters:.0f} iterations, "
                f"{horizon:.0%} of this run (the paper's runs: about 0.5 %). Expect it to overshoot; --pier-preset pier-rising "
                "is made for few outer steps; a shorter --pier-sync-interval or a lower --pier-outer-momentum helps too."
            )
        return found + self._warnings_of_subgroups()

    def _warnings_of_subgroups(self) -> list[str]:
        """What arXiv 2506.10911 says of its constants: within them the spread of the groups stays bounded."""
        n = self.subgroup
        if n is None or self.groups == 1 or (n == self.groups and self.subgroup_gamma == 0):
            return []
        for step in self.outer_steps():
            alpha = self.momentum_at(step)
            gamma = self.pull_at(step) * self.learning_rate_at(step)
            low, high = (math.sqrt(n / (2 * (n - 1)) * of) for of in (alpha**2, 2 + alpha**2))
            if not low < gamma < high:
                return [
                    f"at the outer step after iteration {step} gamma = {gamma:.3g} is not between {low:.3g} and {high:.3g} "
                    f"(outer momentum {alpha:.3g}, {n} groups that meet; arXiv 2506.10911): the groups may drift apart. Change "
                    "--pier-subgroup-gamma, or take the momentum of --pier-preset noloco, 0.5."
                ]
        return []

    def momentum_horizon(self) -> float:
        """``H / (1 - mu) / T`` with the final ``mu``: the share of the run that the outer momentum remembers."""
        return self.sync_interval / (1 - self.momentum_at(self.train_iters)) / self.train_iters
