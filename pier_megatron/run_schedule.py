"""What follows from the settings of a run: which iteration does what, and how groups exchange."""

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from pier_megatron.exchange.codecs import CODECS, Codec
from pier_megatron.schedules import MUON, PRESETS, Preset, value_at
from pier_megatron.settings import Settings

# Up to this interval groups hardly drift apart, and there is little for the outer momentum to make up for: docs/frontier.md.
_SHORT_INTERVAL = 5

# From here on the noise of the last outer steps is worth being kept out of the end.
_MANY_OUTER_STEPS = 25

# The length for which the paper's schedule was made, and at which it ends below others: docs/frontier.md.
_OUTER_STEPS_OF_PAPER, _INTERVAL_OF_PAPER = 1500, 50

# What a few kernels and a message take time for, against which their overhead is small.
_CHUNK_MIB = {"cpu": 16, "cuda": 64}


@dataclasses.dataclass(frozen=True)
class RunSchedule(Settings):
    """The settings of a run with everything that is derived from them; the symbols are those of arXiv 2511.17849.

    Iterations are counted from 1. ``T`` is ``train_iters``, ``G`` groups, ``H`` the sync interval, ``W`` the lazy start in
    iterations, ``P`` fragments.

    Attributes:
        marks_embeddings: Whether embeddings and output layers are marked, as Megatron marks them, so that ``auto`` may take an
            outer rule for the other matrices.
    """

    marks_embeddings: bool = False

    @property
    def _preset(self) -> Preset:
        return PRESETS[self.preset]

    @property
    def suited_preset(self) -> tuple[str, str]:
        """The preset that ``--pier-preset auto`` takes, and why, in words that follow "for"."""
        if self.subgroup_size is not None:
            return "noloco", "groups that exchange in subgroups"
        # A momentum of the user's own has a use for its warmup.
        if self.sync_interval == 1 and not self.overlap and self.outer_momentum is None:
            return "local-sgd", "an outer step after every iteration"
        is_long = self.local_intervals >= _OUTER_STEPS_OF_PAPER and self.sync_interval >= _INTERVAL_OF_PAPER
        if is_long and self.outer_momentum is None and self.inner_optimizer == "adam":
            length = f"{_OUTER_STEPS_OF_PAPER:,} outer steps or more, H = {_INTERVAL_OF_PAPER} or more"
            return "pier-long", f"{length}, with AdamW inside"
        if self._suits_orthogonal_steps:
            return "pier-orthogonal", "AdamW inside"
        if self.sync_interval <= _SHORT_INTERVAL and self.outer_momentum is None:
            return "pier-frequent", f"an interval of at most {_SHORT_INTERVAL} iterations"
        if self.inner_optimizer == "muon":
            return "pier-muon-annealed", "Muon inside"
        if self.local_intervals < _MANY_OUTER_STEPS:
            return "pier-rising", f"fewer than {_MANY_OUTER_STEPS} outer steps with AdamW inside"
        return "pier-annealed", f"{_MANY_OUTER_STEPS} outer steps or more with AdamW inside"

    @property
    def _suits_orthogonal_steps(self) -> bool:
        if self.outer_rule is not None:
            return self.outer_rule == MUON and self.inner_optimizer == "adam"
        # Islands may come on processors that round products otherwise, and would be refused.
        is_alike = self.marks_embeddings and self.lighthouse is None
        return is_alike and self.inner_optimizer == "adam" and self.outer_momentum is None and self.outer_lr is None

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
    def rule_name(self) -> str:
        """Name of the rule by which outer steps are taken, as checkpoints record it."""
        return (self.outer_rule or self._preset.rule) if self.has_common_anchor else "noloco"

    @property
    def groups_in_site(self) -> int:
        """Number of groups of each site; all of them without ``--pier-sites``."""
        return self.groups // (self.sites or 1)

    def is_site_average(self, iteration: int) -> bool:
        """Whether the groups of each site average their parameters after an iteration, before the outer step."""
        if self.site_interval is None or self.is_lazy(iteration):
            return False
        return iteration % self.site_interval == 0 or self.is_outer_step(iteration)

    def chunk_mib_on(self, device_type: str) -> int:
        """Size in MiB of the pieces in which buffers on a ``cpu`` or a ``cuda`` device are exchanged.

        A piece is cut into one segment for each group, and segments far below a MiB are bound by latency.
        """
        return self.chunk_mib or max(_CHUNK_MIB[device_type], self.groups)

    def chunk_numel_on(self, device_type: str) -> int:
        """Largest number of elements of such a piece."""
        return self.chunk_mib_on(device_type) * 2**20 // 4

    @cached_property
    def lazy_start(self) -> int:
        """``W``: number of fully synchronous iterations at the start."""
        if self.lazy_start_iters is not None:
            return self.lazy_start_iters
        # Half rounds up: the longer lazy start is the safer one. An iteration of the local phase has to remain.
        intervals = int(self.lazy_start_fraction * self.train_iters / self.sync_interval + 0.5)
        return min(intervals, (self.train_iters - 1) // self.sync_interval) * self.sync_interval

    @property
    def local_intervals(self) -> float:
        """Sync intervals of the local phase; the last one may be cut short."""
        return (self.train_iters - self.lazy_start) / self.sync_interval

    @property
    def warms_momentum(self) -> bool:
        """Whether the momentum is built up during the lazy start."""
        return self._preset.warmup_momentum is not None

    def is_lazy(self, iteration: int) -> bool:
        """Whether gradients are averaged over all groups."""
        return iteration <= self.lazy_start

    def is_momentum_warmup(self, iteration: int) -> bool:
        """Whether the momentum warmup runs after an iteration."""
        return self.warms_momentum and self.is_lazy(iteration) and iteration % self.sync_interval == 0

    def is_outer_step(self, iteration: int) -> bool:
        """Whether any fragment's outer step begins after an iteration."""
        return bool(self.fragments_due(iteration))

    def fragments_due(self, iteration: int) -> range:
        """Fragments whose outer step begins after an iteration.

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
        """Whether all groups hold the same parameters at the end of an iteration."""
        if self.is_lazy(iteration) or iteration == self.train_iters:
            return True
        return self.has_common_anchor and self.overlap == 0 and self.fragments == 1 and self.is_outer_step(iteration)

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
        limit = 1 - 1 / (self._preset.longest_horizon * self.local_intervals)
        return min(mu, max(limit, self._preset.warmup_momentum or 0.0))

    def learning_rate_at(self, iteration: int) -> float:
        """``eta(t)``, the outer learning rate; 0 in the lazy start, in which no outer step changes the parameters."""
        if self.is_lazy(iteration):
            return 0.0
        if self.outer_lr is not None:
            return self.outer_lr
        return value_at(self._preset.learning_rate, *self._local_progress(iteration))

    def _local_progress(self, iteration: int) -> tuple[float, float]:
        """Fractions of the whole run: behind us since the lazy start, and in all since the lazy start."""
        return (iteration - self.lazy_start) / self.train_iters, 1 - self.lazy_start / self.train_iters

    def momentum_horizon(self) -> float:
        """``H / (1 - mu) / T`` with the final ``mu``: the share of the run that the outer momentum remembers."""
        return self.sync_interval / (1 - self.momentum_at(self.train_iters)) / self.train_iters
