"""What happens in a run of the outer loop, and what ``pier_megatron.reference`` makes of the same."""

import dataclasses
from typing import Any

import ranks as processes
import torch
from ranks import SPLIT, Ranks, Settings
from torch import Tensor

from pier_megatron import reference

# Parameters move by about 2; AdamW and the exchange in FP32 against float64, and what low bits may add to that.
TOLERANCE = {"fp32": 2e-4, "bf16": 0.05, "int12": 0.01, "int8": 0.05, "int4": 0.5, "int2": 1.5, "int1": 4.0}


@dataclasses.dataclass
class Program:
    """A run and all that happens to it.

    Attributes:
        settings: Settings of the run.
        commands: Methods of :class:`ranks.Rank` with their arguments, in order.
    """

    settings: Settings
    commands: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)

    @property
    def iterations(self) -> list[dict[str, Any]]:
        """The arguments of each iteration so far."""
        return [arguments for name, arguments in self.commands if name == "iterate"]

    def run(self, ranks: Ranks, only_iterations: bool = False) -> list[dict[str, Any]]:
        """Runs everything, or as if nobody had looked and nothing had been stopped; returns what each rank did."""
        ranks.start(self.settings)
        for name, arguments in self.commands:
            if name == "iterate" or not only_iterations:
                ranks.do(name, **arguments)
        return ranks.do("result")

    def train_reference(self, fragments: list[list[Tensor]]) -> list[list[list[Tensor]]]:
        """Parameters of each group after each iteration, float64: those of each rank's own, then those that all hold.

        Args:
            fragments: What :meth:`ranks.Rank.fragments` says on each rank of the first group.
        """
        config, parts = self.settings.pier(), range(self.settings.ranks_in_group)
        iterations = dict(enumerate(self.iterations, start=1))
        n = len(SPLIT)

        def of_part(parameters: Any, part: int) -> list[Tensor]:
            return [*parameters[part * n : (part + 1) * n], *parameters[len(parts) * n :]]

        def gradient(parameters: Any, group: int, iteration: int) -> list[Tensor] | None:
            happens = iterations.get(iteration, {})
            if group in happens.get("overflow", ()):
                return None
            grads = [
                processes.gradient(
                    of_part(parameters, part), part, group, iteration, group in happens.get("bad", ()) and part == 0
                )
                for part in parts
            ]
            return [grad for of in grads for grad in of[:n]] + grads[0][n:]

        initial = [tensor for part in parts for tensor in processes.initial(part)[:n]] + processes.initial(0)[n:]
        flat = [tensor for part in parts for tensor in fragments[part][:n]] + fragments[0][n:]
        masks = [[tensor == fragment for tensor in flat] for fragment in range(config.fragments)]
        states: list[list[list[Tensor]]] = []
        reference.train(
            initial,
            gradient,
            processes.inner_optimizer,
            config,
            fragment_masks=masks,
            on_iteration=lambda t, groups: states.append([[tensor.clone() for tensor in theta] for theta in groups]),
            skipped={t for t, happens in iterations.items() if happens.get("skip")},
            averaged=[len(initial) - 1] if self.settings.averages else [],
        )
        return [[of_part(theta, part) for theta in state for part in parts] for state in states]


def check(program: Program, ranks: Ranks, results: list[dict[str, Any]], fragments: list[list[Tensor]]) -> None:
    """Holds a run against the reference, and the groups against each other."""
    expected = program.train_reference(fragments)
    tolerance = TOLERANCE[program.settings.config.get("exchange_dtype", "fp32")]
    parts = program.settings.ranks_in_group
    for t in range(len(program.iterations)):
        states = [result["history"][t] for result in results]
        for state, wanted in zip(states, expected[t], strict=True):
            for found, exact in zip(state["parameters"], wanted, strict=True):
                torch.testing.assert_close(found.double(), exact, rtol=0, atol=tolerance, equal_nan=True)
        for part in range(parts):
            first, *others = states[part::parts]
            for key in ("anchor", "momentum") if program.settings.pier().subgroup is None else ():
                assert all(torch.equal(first[key], other[key]) for other in others), (key, t + 1)
            if first["is_synchronised"]:
                assert all(
                    torch.equal(one, other)
                    for state in others
                    for one, other in zip(first["parameters"], state["parameters"], strict=True)
                ), ("parameters", t + 1)
        assert len({state["is_synchronised"] for state in states}) == 1


def are_the_same(results: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether two runs went the same way, to the last bit."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().view(torch.int32)

    def tensors(state: dict[str, Any]) -> list[Tensor]:
        return [*state["parameters"], state["anchor"], state["momentum"]]

    return all(
        torch.equal(bits(mine), bits(theirs))
        for result, other in zip(results, others, strict=True)
        for state, same in zip(result["history"], other["history"], strict=True)
        for mine, theirs in zip(tensors(state), tensors(same), strict=True)
    )
