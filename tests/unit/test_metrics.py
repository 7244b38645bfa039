"""Norms, cosines and the line of the log."""

import dataclasses
import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from pier_megatron import PierConfig
from pier_megatron.outer.report import OuterStepReport, OuterStepReports, norms_and_cosines, spread, training_means
from pier_megatron.outer.rounds import ELEMENTS
from pier_megatron.outer.rules import Nesterov
from pier_megatron.outer.verdicts import ABSENT, GOOD, NOT_FINITE


def test_norms_and_cosines_of_two_groups() -> None:
    # Pseudo-gradients (3, 0) and (0, 4), their mean (1.5, 2), a momentum of length 2.
    sums = torch.tensor([[9.0, 4.5, 6.25, 4.0], [16.0, 8.0, 6.25, 4.0]])
    assert [*norms_and_cosines(sums).values()] == pytest.approx([2.5, 2.0, 0.6, 0.7])
    # Groups that did not move have no direction.
    assert not any(norms_and_cosines(torch.zeros(2, 4)).values())


_REPORT = OuterStepReport(150, 1.25, 2.5, 0.5, 0.75, mu=0.99, eta=0.1, bytes_sent=3_000_000, seconds=0.25, not_finite=(3,))


_TRAINING = {"loss": 2.0, "loss_min": 1.5, "loss_max": 2.5, "grad_norm": 0.5}


def test_page_has_every_metric() -> None:
    """The names in the tables of ``docs/monitoring.md`` are those in the code, and the line's are explained."""
    repository = Path(__file__).parents[2]
    page = (repository / "docs" / "monitoring.md").read_text()
    code = "".join(path.read_text() for path in sorted((repository / "pier_megatron").rglob("*.py")))
    literal = re.findall(r'f"\{SCALAR_PREFIX\}([^"]+)"|SCALAR_PREFIX \+ "([^"]+)"', code)
    names = {f"pier/{formatted or plain}" for formatted, plain in literal} | set(re.findall(r'f"(compressed/[^"]+)"', code))
    # Every report with all that it may have.
    names |= dataclasses.replace(_REPORT, spread=1.0, **_TRAINING).scalars().keys()
    shown = set(re.findall(r"^\| `((?:pier|compressed)/[^`]+)`", page, re.MULTILINE))
    assert shown == {re.sub(r"\{(\w+)\}", lambda found: found[1].upper(), name) for name in names}
    line = dataclasses.replace(_REPORT, spread=1.0, not_finite=(1,), **_TRAINING).line()
    labels = re.findall(r"(?<=\| )[a-zA-Z][\w -]*[\w]|(?<=\| )[A-Z ,]+(?=:)", line)
    assert [label for label in labels if label.split(", see")[0] not in page] == []


@pytest.mark.parametrize("now", [150, 155])
def test_report_of_a_hidden_exchange_arrives(now: int) -> None:
    """At the iteration now, since Weights & Biases drops what comes for a step that is over."""
    wandb, tensorboard, lines = mock.Mock(), mock.Mock(), []
    _REPORT.write(lines.append, tensorboard, wandb, now)
    logged = [call.args for call in wandb.log.mock_calls]
    assert {name: value for values, _ in logged for name, value in values.items()} == {
        "pier/outer-step-iteration": 150,
        **_REPORT.scalars(),
    }
    assert {step for _, step in logged} == {now}
    assert [call.args for call in tensorboard.add_scalar.mock_calls] == [(*item, 150) for item in _REPORT.scalars().items()]
    assert lines == [_REPORT.line()]


def test_training_is_the_mean_over_ranks_iterations_and_groups() -> None:
    rows = []
    of_groups = (([2.0, torch.tensor([4.0])], [1.0, 2.0]), ([None, 6.0], [3.0, 6.0]), ([None, None], [None, None]))
    for losses, norms in of_groups:
        reports = OuterStepReports(PierConfig(20, groups=3), print, torch.device("cpu"))
        for loss, norm in zip(losses, norms, strict=True):
            reports.note_training(loss, norm)
        rows.append(reports.take_training())
        assert not reports.take_training().any()
    # A group that has noted nothing does not count.
    found = training_means(torch.stack(rows))
    assert found == {"loss": 4.5, "loss_min": 3.0, "loss_max": 6.0, "grad_norm": 3.0}
    assert training_means(torch.zeros(2, 9)) == {}


def test_spread_is_the_deviation_of_weights() -> None:
    anchor = torch.zeros(50, dtype=torch.float64)
    weights = torch.randn(3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own, mean = anchor - weights, (anchor - weights).mean(0)
    sums = torch.zeros(3, ELEMENTS + 1, dtype=torch.float64)
    for row, delta in zip(sums, own, strict=True):
        row[:3] = torch.stack([delta @ delta, delta @ mean, mean @ mean])
        row[ELEMENTS] = 50
    expected = weights.var(0).mean().sqrt().item()
    assert spread(sums, 3) == pytest.approx(expected)
    assert spread(sums[:1], 1) is None


def report_of(
    verdicts: tuple[int, ...], sums: torch.Tensor, members: tuple[int, ...] = (0, 1, 2), **settings: int
) -> OuterStepReport:
    round_ = mock.Mock(rule=Nesterov(0.9, 0.7), begun=4, bytes_sent=0, restarted_before=None)
    round_.verdicts.all.return_value, round_.verdicts.counted = verdicts, [said == GOOD for said in verdicts]
    round_.exchange.groups, round_.exchange.rank, round_.stopwatch.seconds.return_value = members[: len(verdicts)], 0, 0.0
    config = PierConfig(20, **{"groups": 3} | settings, sync_interval=4, lazy_start_iters=0, preset="diloco")
    return OuterStepReports(config, print, torch.device("cpu")).report_of(round_, sums, [])


def test_group_left_out_does_not_count() -> None:
    sums = torch.zeros(2, ELEMENTS + 5)
    sums[:, :4] = torch.tensor([[9.0, 9.0, 9.0, 4.0], [0.0, 0.0, 9.0, 4.0]])
    report = report_of((GOOD, NOT_FINITE), sums)
    assert (report.pseudo_gradient_norm, report.momentum_norm) == pytest.approx((3.0, 2.0))
    assert (report.cosine_min, report.cosine_mean, report.not_finite) == (1.0, 1.0, (1,))


def test_site_left_out_is_all_of_its_groups() -> None:
    sums = torch.ones(2, ELEMENTS + 5)
    assert report_of((NOT_FINITE, GOOD), sums, (1, 3), groups=4, sites=2, site_interval=2).not_finite == (0, 1)


def test_elastic_island_logs_the_spread_of_those_that_count() -> None:
    def spread_of(own: int, *others: int) -> float | None:
        """Its pseudo-gradient is (3, 0), and the mean (1.5, 2); nothing if it has just joined."""
        sums = torch.zeros(1, ELEMENTS + 5)
        sums[0, :4] = torch.tensor([9.0, 4.5, 6.25, 4.0] if own == GOOD else [0.0, 0.0, 6.25, 4.0])
        sums[0, ELEMENTS] = 2
        return report_of((own, *others), sums).spread

    # The spread of the two groups above; a third group that has just joined does not matter.
    assert spread_of(GOOD, GOOD) == spread_of(GOOD, GOOD, ABSENT) == pytest.approx(math.sqrt(6.25 / 2 * 2))
    assert spread_of(ABSENT, GOOD, GOOD) is None
    assert spread_of(GOOD, ABSENT) is None
