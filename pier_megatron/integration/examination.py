"""What one iteration of a running job does between outer steps, for ``pier-megatron doctor --start``."""

import contextlib
import os
import sys
from collections.abc import Mapping

import torch.distributed as dist

from pier_megatron.config import PierConfig
from pier_megatron.integration.census import CollectiveCensus, table

VARIABLE = "PIER_MEGATRON_DOCTOR"
"""Environment variable that tells the processes of a job that they are looked at."""


class Examination:
    """Counts what crosses the groups in one iteration of the local phase, then ends the job."""

    def __init__(self, config: PierConfig, group_of: Mapping[int, int]) -> None:
        """Plans the examination.

        Args:
            config: Of the run.
            group_of: Group of each global rank.
        """
        self._group_of = group_of
        self._census = CollectiveCensus()
        self._looking = contextlib.ExitStack()
        # The first iteration of the local phase may still set something up.
        quiet = range(config.lazy_start + 2, config.train_iters)
        self._iteration = next((t for t in quiet if not config.is_outer_step(t)), config.lazy_start + 1)

    def iteration_begins(self, iteration: int) -> None:
        """Called at the beginning of every iteration, 1-based.

        Raises:
            SystemExit: Once the iteration that was looked at is over, on all ranks.
        """
        if iteration == self._iteration:
            self._looking.enter_context(self._census)
        elif iteration == self._iteration + 1:
            self._looking.close()
            if dist.get_rank() == 0:
                print("\n".join(self._findings()), flush=True)
            sys.exit(0)

    def _findings(self) -> list[str]:
        crossing = self._census.crossing(self._group_of)
        inside = len(self._census.collectives) - len(crossing)
        heading = (
            f"Pier doctor: iteration {self._iteration}, between outer steps, rank 0: {inside} collectives inside its group, "
        )
        if not crossing:
            return [heading + "none across groups."]
        return [heading + "and across groups:", *(f"  {line}" for line in table(crossing))]


def examination(config: PierConfig, group_of: Mapping[int, int]) -> Examination | None:
    """The examination that this process was started for, or None."""
    return Examination(config, group_of) if VARIABLE in os.environ else None
