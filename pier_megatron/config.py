"""What a person chooses about Pier, resolved and checked before anything is built.

Every check names the flag, its value, the arithmetic and a remedy, because it is read at 3 a.m. next to a failed job.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.codecs import CODECS, Codec
from pier_megatron.schedules import PRESETS, Preset, value_at

DEFAULT_SYNC_INTERVAL = 50
DEFAULT_PRESET = "pier"
DEFAULT_LAZY_START_FRACTION = 0.1
DEFAULT_CHUNK_MIB = 16
EXCHANGE_DTYPES = tuple(CODECS)
SAVED_INNER_STATES = ("all", "first")
LOADED_INNER_STATES = ("mean", "first")

# Above this share of the run, an outer step still undoes gradients that the model has long left behind.
_LONG_HORIZON = 0.03


# Settings whose flags are not called after them.
_FLAGS = {"train_iters": "--train-iters", "lazy_start": "--pier-lazy-start-iters"}


def flag_of(setting: str) -> str:
    """The flag that sets an attribute of :class:`PierConfig`."""
    return _FLAGS.get(setting, "--pier-" + setting.replace("_", "-"))


@dataclasses.dataclass(frozen=True)
class PierConfig:
    """The hyperparameters of a run with Pier; the symbols are those of arXiv 2511.17849.

    Attributes:
        train_iters: ``T``, iterations of the whole run.
        groups: ``G``, number of groups that train apart between outer steps.
        sync_interval: ``H``, iterations between outer steps.
        preset: Name of the outer schedule, a key of :data:`pier_megatron.schedules.PRESETS`.
        lazy_start_fraction: Share of the run that is fully synchronous, rounded to the nearest multiple of ``H``.
        lazy_start_iters: ``W`` itself, a multiple of ``H``; overrides the fraction.
        outer_lr: Constant ``eta`` in place of the preset's.
        outer_momentum: Constant ``mu`` in place of the preset's, momentum warmup included.
        overlap: Iterations over which an exchange is hidden: its result is applied that much later. 0 waits for it.
        fragments: ``P``, number of parts that take their outer steps in turn, spread over the sync interval.
        exchange_dtype: What pseudo-gradients look like on the wire, one of :data:`EXCHANGE_DTYPES`.
        no_error_feedback: Drop what a low-bit exchange rounds away instead of adding it to the next one.
        offload: Keep the outer state in host memory.
        chunk_mib: Size of the pieces in which buffers are exchanged, in MiB of FP32.
        outlier_zscore: Standard deviations above the mean of its history from which on the norm of a group's
            pseudo-gradient leaves it out of a round; None for never.
        save_inner_state: Whose inner state a checkpoint holds, one of :data:`SAVED_INNER_STATES`.
        load_inner_state: Where a group's inner state comes from if their number has changed, one of
            :data:`LOADED_INNER_STATES`.
        override_checkpoint: Go on from a checkpoint of a run with other settings.
        ranks_per_domain: How many consecutive ranks share a fast network; None for those of a node.

    Raises:
        PierConfigError: If a value is out of range or the run is too short for its lazy start.
    """

    train_iters: int
    groups: int
    sync_interval: int = DEFAULT_SYNC_INTERVAL
    preset: str = DEFAULT_PRESET
    lazy_start_fraction: float = DEFAULT_LAZY_START_FRACTION
    lazy_start_iters: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    overlap: int = 0
    fragments: int = 1
    exchange_dtype: str = EXCHANGE_DTYPES[0]
    no_error_feedback: bool = False
    offload: bool = False
    chunk_mib: int = DEFAULT_CHUNK_MIB
    outlier_zscore: float | None = None
    save_inner_state: str = SAVED_INNER_STATES[0]
    load_inner_state: str = LOADED_INNER_STATES[0]
    override_checkpoint: bool = False
    ranks_per_domain: int | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("preset", PRESETS),
            ("exchange_dtype", EXCHANGE_DTYPES),
            ("save_inner_state", SAVED_INNER_STATES),
            ("load_inner_state", LOADED_INNER_STATES),
        ):
            if getattr(self, name) not in choices:
                raise PierConfigError(f"{flag_of(name)} {getattr(self, name)}: not one of {', '.join(choices)}.")
        for name in ("groups", "sync_interval", "fragments", "chunk_mib", "ranks_per_domain"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PierConfigError(f"{flag_of(name)} {value}: must be at least 1.")
        if self.fragments > self.sync_interval:
            raise PierConfigError(
                f"--pier-fragments {self.fragments} exceeds --pier-sync-interval {self.sync_interval}: fragments take their "
                "outer steps in different iterations of an interval, one in each at most."
            )
        if not 0 <= self.overlap < self.sync_interval:
            raise PierConfigError(
                f"--pier-overlap {self.overlap}: must be from 0 to {self.sync_interval - 1}, below --pier-sync-interval "
                f"{self.sync_interval}, because an exchange has to be applied before the next one of its fragment begins."
            )
        if self.outer_lr is not None and not self.outer_lr > 0:
            raise PierConfigError(f"--pier-outer-lr {self.outer_lr}: must be above 0, or no outer step moves anything.")
        if self.outer_momentum is not None and not 0 <= self.outer_momentum < 1:
            raise PierConfigError(
                f"--pier-outer-momentum {self.outer_momentum}: must be in [0, 1); the momentum sums about 1 / (1 - mu) "
                "pseudo-gradients, which has no limit at 1."
            )
        if self.outlier_zscore is not None and not self.outlier_zscore > 0:
            raise PierConfigError(f"--pier-outlier-zscore {self.outlier_zscore}: must be above 0; 3 is customary.")
        if self.save_inner_state == "first" and (self.overlap or self.fragments > 1):
            raise PierConfigError(
                f"--pier-save-inner-state first cannot be used with --pier-overlap {self.overlap} and --pier-fragments "
                f"{self.fragments}: groups then never hold the same parameters, and what all but the first have learned since "
                "their last outer step would be lost. Save all."
            )
        if not 0 <= self.lazy_start_fraction < 1:
            raise PierConfigError(f"--pier-lazy-start-fraction {self.lazy_start_fraction}: must be in [0, 1).")
        self._check_lazy_start()

    def _check_lazy_start(self) -> None:
        steps, interval = self.train_iters, self.sync_interval
        if self.lazy_start_iters is not None:
            given = f"--pier-lazy-start-iters {self.lazy_start_iters}"
            if self.lazy_start_iters < 0:
                raise PierConfigError(f"{given}: must not be negative.")
            if self.lazy_start_iters % interval:
                raise PierConfigError(
                    f"{given} is no multiple of --pier-sync-interval {interval} "
                    f"({_division(self.lazy_start_iters, interval)}): the momentum warmup ends on a sync iteration. "
                    f"Use {_neighbours(self.lazy_start_iters, interval)}."
                )
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
    def chunk_numel(self) -> int:
        """Largest number of elements of a piece in which buffers are exchanged."""
        return self.chunk_mib * 2**20 // 4

    @cached_property
    def lazy_start(self) -> int:
        """``W``: number of fully synchronous iterations at the start."""
        if self.lazy_start_iters is not None:
            return self.lazy_start_iters
        # Half rounds up: the longer lazy start is the safer one.
        return int(self.lazy_start_fraction * self.train_iters / self.sync_interval + 0.5) * self.sync_interval

    @property
    def warms_momentum(self) -> bool:
        """Whether the momentum is built up during the lazy start."""
        return self._preset.warmup_momentum is not None

    def is_lazy(self, iteration: int) -> bool:
        """Whether gradients of ``iteration`` (1-based) are averaged over all groups."""
        return iteration <= self.lazy_start

    def is_momentum_warmup(self, iteration: int) -> bool:
        """Whether the momentum warmup runs after ``iteration`` (1-based)."""
        return self.warms_momentum and self.is_lazy(iteration) and iteration % self.sync_interval == 0

    def is_outer_step(self, iteration: int) -> bool:
        """Whether any fragment's outer step begins after ``iteration`` (1-based)."""
        return bool(self.fragments_due(iteration))

    def fragments_due(self, iteration: int) -> range:
        """Fragments whose outer step begins after ``iteration`` (1-based).

        Each has one every H iterations, evenly spread, the last fragment at multiples of H; after the last iteration all do.
        """
        if self.is_lazy(iteration):
            return range(0)
        if iteration == self.train_iters:
            return range(self.fragments)
        # Fragment f is due when the interval is (f + 1) / P through.
        through = (iteration - 1) % self.sync_interval + 1
        begin, end = ((self.fragments * n) // self.sync_interval for n in (through - 1, through))
        return range(begin, end)

    def is_synchronised(self, iteration: int) -> bool:
        """Whether all groups hold the same parameters at the end of ``iteration`` (1-based)."""
        if self.is_lazy(iteration) or iteration == self.train_iters:
            return True
        return self.overlap == 0 and self.fragments == 1 and self.is_outer_step(iteration)

    def outer_steps(self) -> Iterator[int]:
        """The iterations after which an outer step begins, in order."""
        return (iteration for iteration in range(self.lazy_start + 1, self.train_iters + 1) if self.is_outer_step(iteration))

    def momentum_at(self, iteration: int) -> float:
        """``mu(t)``, the outer momentum coefficient."""
        if self.outer_momentum is not None:
            return self.outer_momentum
        if self.is_lazy(iteration):
            return self._preset.warmup_momentum or 0.0
        mu = value_at(self._preset.momentum, *self._local_progress(iteration))
        if self._preset.longest_horizon is None:
            return mu
        outer_steps = (self.train_iters - self.lazy_start) / self.sync_interval
        limit = 1 - 1 / (self._preset.longest_horizon * outer_steps)
        return min(mu, max(limit, self._preset.warmup_momentum or 0.0))

    def learning_rate_at(self, iteration: int) -> float:
        """``eta(t)``, the outer learning rate; 0 during the lazy start, where parameters do not change."""
        if self.is_lazy(iteration):
            return 0.0
        if self.outer_lr is not None:
            return self.outer_lr
        return value_at(self._preset.learning_rate, *self._local_progress(iteration))

    def _local_progress(self, iteration: int) -> tuple[float, float]:
        """Fractions of the whole run: behind us since the lazy start, and in all since the lazy start."""
        return (iteration - self.lazy_start) / self.train_iters, 1 - self.lazy_start / self.train_iters

    def check_data_parallel_size(self, data_parallel_size: int, context_parallel_size: int = 1) -> None:
        """Refuses groups that would not be whole model replicas.

        Args:
            data_parallel_size: Model replicas, context parallelism not counted.
            context_parallel_size: Ranks that share a sequence.

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
            f"({_division(data_parallel_size, self.groups)}): every group needs the same number of whole model "
            f"replicas{cut}. Use one of {', '.join(map(str, divisors))}."
        )

    def check_resumable(self, iteration: int, is_local: bool) -> None:
        """Refuses to fall back into the lazy start: it averages gradients, which groups that have drifted apart do not share.

        Args:
            iteration: At which the run goes on.
            is_local: Whether it was in its local phase there.

        Raises:
            PierConfigError: With the lazy start that fits.
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
            flag: The flag that sets the interval.
            interval: Iterations between two such events.
            purpose: What happens then, as a noun.
            remedy: Another way out than to change the interval.

        Raises:
            PierConfigError: If the interval is no multiple of the sync interval.
        """
        if interval % self.sync_interval == 0 or interval > self.train_iters:
            return
        raise PierConfigError(
            f"{flag} {interval} is no multiple of --pier-sync-interval {self.sync_interval} "
            f"({_division(interval, self.sync_interval)}): {purpose} would find groups whose parameters have drifted "
            f"apart. Use {_neighbours(interval, self.sync_interval)}{remedy}."
        )

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
        if self.groups == 1:
            found.append("there is one group, hence nothing to gain from relaxed communication: see --pier-groups.")
        return found

    def momentum_horizon(self) -> float:
        """``H / (1 - mu) / T`` with the final ``mu``: the share of the run that the outer momentum remembers."""
        return self.sync_interval / (1 - self.momentum_at(self.train_iters)) / self.train_iters


def _division(value: int, by: int) -> str:
    return f"{value} = {value // by} x {by} + {value % by}"


def _neighbours(value: int, of: int) -> str:
    lower = value // of * of
    return f"{lower} or {lower + of}" if lower else f"{of}"
