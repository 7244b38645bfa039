"""How well routers balance whose biases groups move apart: ``python study/router_balance.py`` prints the table.

``--train`` trains what is missing, in one process for each row; an interrupted study resumes. Simulated: a plain GPT whose
feed-forward parts are mixtures of experts, which routers choose by sigmoid scores and biases, without an auxiliary loss
(arXiv 2408.15664; Megatron's ``--moe-router-enable-expert-bias``). In the local phase each group moves its biases by the loads
of its own tokens, and an outer step takes their mean, as the plugin does. The load of an expert is its number of tokens.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rows import BATCH, SYNCHRONOUS
from simulation import Inner, Outcome, Outer, Run
from small_gpt import MATRIX, SEQUENCE, Parameters, Text, initial, losses
from text import data_arguments
from torch import Tensor
from torch.nn import functional

_RECORDS = Path(__file__).resolve().parents[1] / "docs" / "router-balance.jsonl"
_EXPERTS, _CHOSEN, _HIDDEN, _RATE = 8, 2, 64, 1e-3
_SEEDS, _PRESET = (1, 2, 3), "pier-rising"

# Loads are compared over as many tokens in every row: those of one of eight groups.
_SHARES = 8

OWN, ALL, FIXED = "own", "all", "fixed"
"""Choice of the loads that move the biases of a group: its own, those of all groups, or none."""

_ROWS = ((1, OWN), (2, OWN), (4, OWN), (8, OWN), (8, ALL), (1, FIXED), (8, FIXED))


@dataclasses.dataclass(frozen=True)
class Balance:
    """What came out of a training.

    Attributes:
        groups: Number of groups; 1 for a synchronous training.
        moved_by: Choice of the loads that move the biases.
        seed: Seed of weights and data.
        loss: Validation loss in nats per byte.
        own: Largest load over the mean load, of an eighth of the batch; mean over layers and the last quarter of the run.
        all: The same, of the whole batch.
        validation: The same, of the validation data, at the end.
    """

    groups: int
    moved_by: str
    seed: int
    loss: float
    own: float
    all: float
    validation: float


def main() -> None:
    """Prints the table; trains first, if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train what is missing")
    parser.add_argument("--folder", type=Path, default=Path("runs/router-balance"), help="folder for the text (%(default)s)")
    options = parser.parse_args()
    found = [Balance(**json.loads(line)) for line in _RECORDS.read_text().splitlines()] if _RECORDS.exists() else []
    if options.train:
        options.folder.mkdir(parents=True, exist_ok=True)
        data_arguments(options.folder)
        torch.set_num_threads(1)
        for seed in _SEEDS:
            for groups, moved_by in _ROWS:
                if not any((each.groups, each.moved_by, each.seed) == (groups, moved_by, seed) for each in found):
                    found.append(train(groups, moved_by, seed, Text(options.folder)))
                    with _RECORDS.open("a") as records:
                        records.write(json.dumps(dataclasses.asdict(found[-1])) + "\n")
    print(_table(found))


def train(groups: int, moved_by: str, seed: int, text: Text) -> Balance:
    """Trains a row; the same batches in the same order as all rows of its seed."""
    run = Run(method=SYNCHRONOUS if groups == 1 else _PRESET, groups=groups, seed=seed)
    parameters = _with_experts(initial(run.layers, run.width, seed), run, seed)
    inner, outer = Inner(run, parameters), None if groups == 1 else Outer(run, parameters)
    biases, generator = torch.zeros(1, run.layers, _EXPERTS), np.random.default_rng(seed)
    own, together = [], []
    for iteration in range(1, run.iterations + 1):
        batch = text.batch(generator, run.batch).view(len(biases), -1, SEQUENCE + 1)
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        loss, loads = _losses(leaves, batch, biases)
        inner.step(
            parameters,
            dict(zip(leaves, torch.autograd.grad(loss.sum(), list(leaves.values())), strict=True)),
            run.rate_factor(iteration),
        )
        if iteration > 0.75 * run.iterations:
            own.append(_largest(loads.flatten(0, 1)))
            together.append(_largest(loads.sum((0, 1))[None]))
        if moved_by != FIXED:
            counted = loads.sum(1) if moved_by == OWN else loads.sum((0, 1))[None]
            biases = biases + _RATE * (counted.mean(-1, keepdim=True) - counted).sign()
        if outer is None:
            continue
        outer.follow(iteration, parameters)
        if outer.step(iteration, parameters, Outcome()):
            biases = biases.mean(0, keepdim=True).expand_as(biases)
        if len(biases) < groups and not outer.config.is_lazy(iteration + 1):
            parameters.update({name: value.repeat(groups, *[1] * (value.dim() - 1)) for name, value in parameters.items()})
            inner.change(lambda common: common.repeat(groups, *[1] * (common.dim() - 1)))
            biases = biases.expand(groups, -1, -1)
    with torch.no_grad():
        loss, loads = _losses({name: value[:1] for name, value in parameters.items()}, text.validation, biases[:1])
    of_run = [round(statistics.mean(ratios), 4) for ratios in (own, together)]
    return Balance(groups, moved_by, seed, round(loss.item(), 5), *of_run, round(_largest(loads.sum((0, 1))[None]), 4))


def _with_experts(parameters: Parameters, run: Run, seed: int) -> Parameters:
    """Parameters of a GPT, with experts and routers instead of the feed-forward parts."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: value for name, value in parameters.items() if ".up" not in name and ".down" not in name}
    for layer in range(run.layers):
        down = parameters[f"{layer}.down{MATRIX}"].std()
        for name, shape, scale in (
            ("router", (_EXPERTS, run.width), 0.02),
            ("experts_up", (_EXPERTS, _HIDDEN, run.width), 0.02),
            ("experts_down", (_EXPERTS, run.width, _HIDDEN), float(down)),
        ):
            found[f"{layer}.{name}{MATRIX}"] = torch.randn(1, *shape, generator=generator) * scale
    return found


def _losses(parameters: Parameters, tokens: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of groups, and loads of experts: shape ``[groups, shares of the group's sequences, layers, experts]``."""
    groups, shares = len(tokens), max(_SHARES // len(tokens), 1)
    loads = torch.zeros(groups, shares, biases.shape[1], _EXPERTS)

    def mixture(layer: int, x: Tensor) -> Tensor:
        scores = torch.einsum("gtw,gew->gte", x, parameters[f"{layer}.router{MATRIX}"]).sigmoid()
        chosen = (scores + biases[:, layer, None]).topk(_CHOSEN, -1).indices
        mask = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        loads[:, :, layer] = mask.view(groups, shares, -1, _EXPERTS).sum(2)
        weights = scores * mask
        weights = weights / weights.sum(-1, keepdim=True)
        hidden = torch.einsum("gtw,gehw->gteh", x, parameters[f"{layer}.experts_up{MATRIX}"])
        hidden = functional.gelu(hidden, approximate="tanh") * weights[..., None]
        return torch.einsum("gteh,gewh->gtw", hidden, parameters[f"{layer}.experts_down{MATRIX}"])

    return losses(parameters, tokens, feed_forward=mixture), loads


def _largest(loads: Tensor) -> float:
    """Largest load over the mean load of experts, shape ``[..., layers, experts]``; the mean over all else."""
    return (loads.amax(-1) / loads.mean(-1)).mean().item()


def _table(found: Sequence[Balance]) -> str:
    by_seed = {each.seed: each.loss for each in found if (each.groups, each.moved_by) == (1, OWN)}
    names = {OWN: "loads of the own group", ALL: "loads of all groups", FIXED: "nothing: fixed at 0"}
    lines = [
        "| groups | biases follow | loss above synchronous | largest / mean load, own tokens | all tokens | validation |",
        "|---|---|---|---|---|---|",
    ]
    for groups, moved_by in _ROWS:
        rows = [each for each in found if (each.groups, each.moved_by) == (groups, moved_by) and each.seed in by_seed]
        if rows:
            above = [each.loss - by_seed[each.seed] for each in rows]
            cells = [
                f"{statistics.mean(column):.2f}" for column in zip(*((r.own, r.all, r.validation) for r in rows), strict=True)
            ]
            spread = f"{statistics.mean(above):+.3f} ({min(above):+.3f} to {max(above):+.3f})"
            lines.append(f"| {groups} | {names[moved_by]} | {spread} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(by_seed)} seeds, batch {BATCH}"])


if __name__ == "__main__":
    main()
