"""What happens in a run of the outer loop, and what ``pier_megatron.reference`` makes of the same."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import ranks as processes
import torch
from ranks import SPLIT, Ranks, Settings
from torch import Tensor

from pier_megatron import reference

Layout = tuple[list[Tensor], list[Tensor]]
"""Fragments and blocks of the parameters of a rank."""

# AdamW and the exchange in FP32 against float64; parameters move by about 2. A number in the middle between two that a codec
# can send, or a scale in BF16, may be rounded up here and down there: a few steps of 2**-8, 1 / 127 and 1 / 2047.
TOLERANCE = {"fp32": 5e-5, "bf16": 0.02, "int12": 3e-3, "int8": 0.03, "int4": 5e-5, "int2": 0.02, "int1": 0.02}

# Orthogonal steps enlarge what is small in a matrix, noise included: up to 2.2 times these tolerances in 130 random runs.
_ORTHOGONAL = 10

# A step of these is as large as what parameters move by. Runs are compared until such noise at their start, more than FP32's,
# makes another step of one: of 40 random runs each, 38 to their end with int4, all with int2 and int1.
_LARGE_STEPS, _NOISE = ("int4", "int2", "int1"), 2e-6


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
                seen = ranks.do(name, **arguments)
                assert name != "evaluate" or all(each["untouched"] and each["is_as_trained"] for each in seen)
        return ranks.do("result")

    def train_reference(self, layouts: Sequence[Layout], noise: float = 0.0) -> list[list[list[Tensor]]]:
        """Parameters of each rank after each iteration, float64: its own, then those that all ranks of its group hold.

        Args:
            layouts: What :meth:`ranks.Rank.layout` says on each rank of the first group.
            noise: Amplitude of what is added to the parameters at the start.
        """
        config, parts = self.settings.pier(), range(self.settings.parts)
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

        def of_group(of_parts: Sequence[list[Tensor]]) -> list[Tensor]:
            return [tensor for part in parts for tensor in of_parts[part][:n]] + of_parts[0][n:]

        initial = of_group([processes.initial(part) for part in parts])
        signs = torch.Generator().manual_seed(7)
        initial = [of + noise * (2 * torch.randint(2, of.shape, generator=signs) - 1) for of in map(Tensor.double, initial)]
        fragments = of_group([layout[0] for layout in layouts])
        # Each rank numbers its own blocks.
        own = [[torch.where(of < 0, of, of + 10**6 * part) for of in layouts[part][1]] for part in parts]
        masks = [[tensor == fragment for tensor in fragments] for fragment in range(config.fragments)]
        states: list[list[list[Tensor]]] = []
        reference.train(
            initial,
            gradient,
            functools.partial(processes.inner_optimizer, name=self.settings.inner),
            config,
            fragment_masks=masks,
            on_iteration=lambda t, groups: states.append([[tensor.clone() for tensor in theta] for theta in groups]),
            skipped={t for t, happens in iterations.items() if happens.get("skip")},
            averaged=[len(initial) - 1] if self.settings.averages else [],
            blocks=of_group(own),
        )
        ranks = [rank % len(parts) for rank in range(self.settings.ranks_in_group)]
        return [[of_part(theta, part) for theta in state for part in ranks] for state in states]


def check(program: Program, results: list[dict[str, Any]], layouts: Sequence[Layout]) -> int:
    """Holds a run against the reference, and the groups against each other.

    Returns:
        Number of iterations that were held against the reference, see :data:`_LARGE_STEPS`.
    """
    expected = program.train_reference(layouts)
    dtype = program.settings.config.get("exchange_dtype", "fp32")
    tolerance, parts, compared = TOLERANCE[dtype], program.settings.parts, 0
    tolerance *= _ORTHOGONAL if program.settings.config.get("outer_rule") == "muon" else 1
    perturbed = [program.train_reference(layouts, noise) for noise in (_NOISE, -_NOISE) if dtype in _LARGE_STEPS]
    for t in range(len(program.iterations)):
        states = [result["history"][t] for result in results]
        if compared == t and all(_are_close(other[t], expected[t], tolerance) for other in perturbed):
            compared += 1
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
    return compared


def _are_close(one: list[list[Tensor]], other: list[list[Tensor]], tolerance: float) -> bool:
    pairs = (pair for mine, theirs in zip(one, other, strict=True) for pair in zip(mine, theirs, strict=True))
    return all(torch.allclose(*pair, rtol=0, atol=tolerance, equal_nan=True) for pair in pairs)


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
