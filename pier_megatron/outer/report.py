"""What an operator sees of an outer step: one line in the log, scalars in TensorBoard and Weights & Biases."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import Gathered
from pier_megatron.exchange.topology import NAMED, ranges_of
from pier_megatron.outer.rounds import CHECKSUM, ELEMENTS, PRODUCTS, OuterRound
from pier_megatron.outer.verdicts import NOT_FINITE

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Prefix of the scalars' names in TensorBoard and Weights & Biases.
SCALAR_PREFIX = "pier/"


class AnchorsDifferError(RuntimeError):
    """What all groups should hold in common is not the same everywhere."""


@dataclasses.dataclass(frozen=True)
class OuterStepReport:
    """One outer step, the same on all ranks except for ``seconds``; where groups never agree, each reports its own.

    Attributes:
        iteration: Iterations completed.
        pseudo_gradient_norm: L2 norm of the mean pseudo-gradient over the whole model.
        momentum_norm: L2 norm of the outer momentum over the whole model, after the update.
        cosine_min: Smallest cosine, over the contributing groups, of a group's pseudo-gradient to the mean one. 1 means
            that all groups moved the same way; groups that moved at random are near ``1 / sqrt(groups)``.
        cosine_mean: Mean of those cosines.
        mu: Outer momentum coefficient.
        eta: Outer learning rate.
        bytes_sent: Bytes that one rank sent to other groups.
        loss: Mean over the contributing groups of their training loss since the last outer step began, without this one's
            iteration; None if nobody has called :meth:`pier_megatron.outer.loop.OuterLoop.note_training`.
        loss_min: Smallest of these losses.
        loss_max: Largest of these losses.
        grad_norm: Mean over the groups of their gradient norm since then; None if there is none.
        seconds: Time that training stood still, the wait for the slowest group included; on a GPU the time of its stream.
        not_finite: Groups excluded because their parameters were not finite.
        spread: Standard deviation of a parameter over the participants, root mean square over the parameters. It is measured on
            the weights before the outer step. None for one group, and for a group that measures alone and is excluded or an
            island that has just joined.
        restarted: Excluded groups that this step restarted from the anchor; the others had been restarted since it began.
    """

    iteration: int
    pseudo_gradient_norm: float
    momentum_norm: float
    cosine_min: float
    cosine_mean: float
    mu: float
    eta: float
    bytes_sent: int
    seconds: float
    loss: float | None = None
    loss_min: float | None = None
    loss_max: float | None = None
    grad_norm: float | None = None
    spread: float | None = None
    not_finite: tuple[int, ...] = ()
    restarted: tuple[int, ...] = ()

    def line(self) -> str:
        """The line for the log, in the manner of Megatron's own."""
        left_out = _left_out("NOT FINITE", self.not_finite, self.restarted)
        return (
            f" outer step after iteration {self.iteration:8d} | "
            + f"mu: {self.mu:.3f} | eta: {self.eta:.3f} | "
            + (
                f"loss of groups (mean, min, max): ({self.loss:.4f}, {self.loss_min:.4f}, {self.loss_max:.4f}) | "
                if self.loss is not None
                else ""
            )
            + (f"gradient norm: {self.grad_norm:.3f} | " if self.grad_norm is not None else "")
            + f"pseudo-gradient norm: {self.pseudo_gradient_norm:.4E} | "
            + f"momentum norm: {self.momentum_norm:.4E} | "
            + f"cosine of groups to mean (min, mean): ({self.cosine_min:.3f}, {self.cosine_mean:.3f}) | "
            + (f"spread of weights: {self.spread:.3E} | " if self.spread is not None else "")
            + f"sent per rank (MB): {self.bytes_sent / 1e6:.2f} | elapsed time (ms): {self.seconds * 1e3:.1f} |"
            + left_out
        )

    def scalars(self) -> dict[str, float]:
        """What is plotted over iterations, by name."""
        return {
            SCALAR_PREFIX + field.name.replace("_", "-"): float(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ("iteration", "not_finite", "restarted") and getattr(self, field.name) is not None
        } | {SCALAR_PREFIX + "groups-left-out": float(len(self.not_finite))}

    def write(self, print_line: Callable[[str], None], tensorboard: "SummaryWriter | None", wandb: Any, now: int) -> None:
        """Writes the report.

        Args:
            print_line: Prints on the rank that prints Megatron's log.
            tensorboard: Megatron's TensorBoard writer, None on all other ranks.
            wandb: Megatron's Weights & Biases writer, likewise.
            now: The present iteration, later than the report's if the exchange was hidden behind training.
        """
        print_line(self.line())
        if tensorboard is not None:
            for name, value in self.scalars().items():
                tensorboard.add_scalar(name, value, self.iteration)
        if wandb is not None:
            # It drops what belongs to a step before the last one that was logged, without a word.
            wandb.log(self.scalars() | {SCALAR_PREFIX + "outer-step-iteration": self.iteration}, now)


def _left_out(why: str, groups: Sequence[int], restarted: Sequence[int]) -> str:
    """Says which groups were excluded, each of a few and many together."""
    if len(groups) <= NAMED:
        return "".join(f" {why}, LEFT OUT{' AND RESTARTED' if group in restarted else ''}: group {group} |" for group in groups)
    again = len(set(groups) & set(restarted))
    how = f", {again:,} of them RESTARTED" if again else ""
    return f" {why}, LEFT OUT: {len(groups):,} groups ({ranges_of(groups)}){how} |"


class OuterStepReports:
    """Reports outer steps once their numbers have arrived, so that no group waits for another for the sake of a log line.

    Attributes:
        write: Called for each outer step, in their order, on every rank.
    """

    def __init__(self, config: PierConfig, write: Callable[[OuterStepReport], None], device: torch.device) -> None:
        """Begins with none under way; training is noted on the ``device``."""
        self._config, self.write = config, write
        # The loss, how often there was one, the norm, how often there was one: summed on the device, so that nothing waits.
        self._training = torch.zeros(4, dtype=torch.float64, device=device)
        self._unreported: list[tuple[OuterRound, Gathered, Sequence[int]]] = []

    def note_training(self, loss: Tensor | float | None, grad_norm: Tensor | float | None) -> None:
        """See :meth:`pier_megatron.outer.loop.OuterLoop.note_training`."""
        for place, value in ((0, loss), (2, grad_norm)):
            if value is not None:
                self._training[place] += value.detach().flatten()[0] if isinstance(value, Tensor) else value
                self._training[place + 1] += 1

    def take_training(self) -> Tensor:
        """Returns the sums of what was noted since the last time, which follow those of a round; float64, shape ``[4]``."""
        sums, self._training = self._training, torch.zeros_like(self._training)
        return sums

    def add(self, round_: OuterRound, sums: Gathered, restarted: Sequence[int]) -> None:
        """Takes note of a round that has finished, with the groups ``restarted`` at its end, by index among its participants.

        The sums under way, see :func:`norms_and_cosines`, are those of all participants, or of the own group.
        """
        self._unreported.append((round_, sums, restarted))

    def write_arrived(self, waits: bool) -> None:
        """Reports what has arrived, or everything if the caller ``waits``.

        Raises:
            AnchorsDifferError: If the groups do not hold the same anchor.
        """
        while self._unreported and (waits or self._has_arrived(*self._unreported[0][:2])):
            round_, sums, restarted = self._unreported.pop(0)
            self.write(self.report_of(round_, sums.on_host(), restarted))

    @staticmethod
    def _has_arrived(round_: OuterRound, sums: Gathered) -> bool:
        before = round_.restarted_before
        return sums.is_complete() and round_.stopwatch.is_over() and (before is None or before.is_complete())

    def report_of(self, round_: OuterRound, sums: Tensor, restarted: Sequence[int]) -> OuterStepReport:
        """Evaluates what the groups of a round have sent; see :meth:`add`."""
        verdicts, counted, groups = round_.verdicts.all(), round_.verdicts.counted, round_.exchange.groups
        is_common = round_.rule.has_common_anchor and len(sums) == len(groups)
        if is_common:
            check_anchors(round_.begun, dict(zip(groups, sums[:, CHECKSUM].tolist(), strict=True)))
            sums = sums[torch.tensor(counted)]
        is_known = is_common or counted[round_.exchange.rank]
        left_out = [index for index, counts in enumerate(counted) if not counts]
        before = round_.restarted_before.on_host().flatten().tolist() if round_.restarted_before is not None else ()
        in_sites = [group for group, was_restarted in enumerate(before) if was_restarted]
        return OuterStepReport(
            iteration=round_.begun,
            **norms_and_cosines(sums),
            **training_means(sums),
            mu=round_.rule.mu,
            eta=round_.rule.eta,
            bytes_sent=round_.bytes_sent,
            seconds=round_.stopwatch.seconds(),
            spread=spread(sums, sum(counted)) if is_known else None,
            not_finite=self._named((groups[index] for index in left_out if verdicts[index] == NOT_FINITE), in_sites),
            restarted=self._named((groups[index] for index in restarted), in_sites),
        )

    def _named(self, groups: Iterable[int], in_sites: Iterable[int]) -> tuple[int, ...]:
        """Groups, each for its whole site where there are sites, and those that their sites have excluded."""
        size = 1 if self._config.sites is None else self._config.groups_in_site
        of_sites = (member for group in groups for member in range(group - group % size, group - group % size + size))
        return tuple(sorted({*of_sites, *in_sites}))


def check_anchors(iteration: int, checksums: Mapping[int, float]) -> None:
    """Compares checksums, by group, with that of the first one."""
    first, *_ = checksums
    differing = [group for group, checksum in checksums.items() if checksum != checksums[first]]
    if differing:
        is_short = len(checksums) <= NAMED
        which = f"{differing}" if is_short else ranges_of(differing)
        found = {group: int(checksums[group]) for group in (checksums if is_short else (first, *differing[: NAMED - 1]))}
        raise AnchorsDifferError(
            f"After the outer step that began at iteration {iteration} the anchors of groups {which} are not group {first}'s "
            f"(checksums of a part of them, by group: {found}), though all groups have "
            "computed them from the same sums. A memory, a link or a kernel has gone wrong, in this outer step or in one of "
            "the last ones, since each compares a part only. Restart from a checkpoint that is some outer steps older "
            "(--ckpt-step), without the group's nodes if it happens again."
        )


def norms_and_cosines(sums: Tensor) -> dict[str, float]:
    """Attributes of :class:`OuterStepReport`: norms over the whole model, and cosines, of a zero vector 0.

    Args:
        sums: Sums of the contributing groups, see :class:`pier_megatron.outer.rounds.OuterRound`, over each one's whole model;
            float64, shape ``[groups, columns]``.
    """
    own, product, mean, momentum = sums[:, :PRODUCTS].unbind(1)
    denominator = (own * mean).sqrt()
    cosine = torch.where(denominator > 0, product / denominator, torch.zeros_like(product))
    return {
        "pseudo_gradient_norm": mean[0].sqrt().item(),
        "momentum_norm": momentum[0].sqrt().item(),
        "cosine_min": cosine.min().item(),
        "cosine_mean": cosine.mean().item(),
    }


def training_means(sums: Tensor) -> dict[str, float]:
    """Attributes of :class:`OuterStepReport`, without what no group has noted.

    Args:
        sums: Sums as above, whose last four columns are those of :meth:`OuterStepReports.take_training` over a group's ranks.
    """
    found = {}
    loss, losses, norm, norms = sums[:, -4:].unbind(1)
    if losses.any():
        of_groups = loss[losses > 0] / losses[losses > 0]
        found = {"loss": of_groups.mean().item(), "loss_min": of_groups.min().item(), "loss_max": of_groups.max().item()}
    if norms.any():
        found["grad_norm"] = (norm[norms > 0] / norms[norms > 0]).mean().item()
    return found


def spread(sums: Tensor, groups: int) -> float | None:
    """Standard deviation of a parameter over the ``groups`` that met, root mean square over the parameters.

    Its sums are those of :func:`norms_and_cosines`; a single row stands for its meeting.
    """
    if groups == 1 or not sums[:, ELEMENTS].any():
        return None
    own, product, mean, *_ = sums[:, :PRODUCTS].unbind(1)
    # All are measured from the anchor, which cancels in the difference.
    distance = (own - 2 * product + mean).clamp(min=0)
    return math.sqrt((distance / sums[:, ELEMENTS]).mean().item() * groups / (groups - 1))
