"""How the same total of operations is shared between experts."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from pier_megatron.experiments.experts.ensemble import DENSE, UNEQUAL, UNEQUAL_ITERATIONS, UNEQUAL_SIZES, Ensemble


@dataclasses.dataclass(frozen=True)
class BudgetedExpert:
    """What one expert is to be.

    Attributes:
        name: Name of the expert.
        domains: Names of what it is trained on, in equal parts.
        size: Name of its size.
        iterations: Length of its training.
    """

    name: str
    domains: tuple[str, ...]
    size: str
    iterations: int


def shares(
    ensemble: Ensemble, variant: str, operations: Mapping[str, float], seeds: Mapping[str, float]
) -> list[BudgetedExpert]:
    """Divides the operations of a variant between its experts.

    The total is met as near as whole iterations allow: within half an iteration of all experts together.

    Args:
        ensemble: Description.
        variant: Name of the variant.
        operations: Operations of one iteration, by the name of the size.
        seeds: Operations of the seed models, by the name of the size; read only if the description counts them.
    """
    domains, size = ensemble.domains, ensemble.homogeneous
    sizes = [domain.size if variant in (UNEQUAL_SIZES, UNEQUAL) else size for domain in domains.values()]
    total = len(domains) * ensemble.iterations * operations[size]
    if ensemble.count_seeds:
        # The variant with the dearest seeds sets the total, whether it is planned or not: a plan that grows keeps its experts.
        dearest = max(cost_of_seeds(seeds, [size]), cost_of_seeds(seeds, [domain.size for domain in domains.values()]))
        total += dearest - cost_of_seeds(seeds, sizes)
    if variant == DENSE:
        return [BudgetedExpert(DENSE, tuple(domains), size, round(total / operations[size]))]
    if variant == UNEQUAL_ITERATIONS:
        iterations = apportioned(round(total / operations[size]), [domain.difficulty for domain in domains.values()])
    else:
        weights = [domain.difficulty if variant == UNEQUAL else 1.0 for domain in domains.values()]
        of_a_unit = math.fsum(weight * operations[name] for weight, name in zip(weights, sizes, strict=True))
        iterations = [max(round(weight * total / of_a_unit), 1) for weight in weights]
    return [
        BudgetedExpert(name, (name,), of_it, number) for name, of_it, number in zip(domains, sizes, iterations, strict=True)
    ]


def cost_of_seeds(seeds: Mapping[str, float], sizes: Iterable[str]) -> float:
    """Sums the operations of the seed models behind experts of some sizes; experts of one size share a seed model."""
    return math.fsum(seeds[size] for size in set(sizes))


def apportioned(total: int, weights: Sequence[float]) -> list[int]:
    """Shares a whole number by weights, the largest remainders rounded up; nobody gets less than 1."""
    exact = [total * weight / math.fsum(weights) for weight in weights]
    found = [max(math.floor(share), 1) for share in exact]
    by_excess = sorted(range(len(found)), key=lambda place: exact[place] - found[place])
    while sum(found) < total:
        found[by_excess.pop()] += 1
    while sum(found) > total and max(found) > 1:
        found[found.index(max(found))] -= 1
    return found
