"""How the same total of operations is shared between experts."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from pier_megatron.commands.experts.ensemble import DENSE, HOMOGENEOUS, UNEQUAL_ITERATIONS, Ensemble


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


def shares(ensemble: Ensemble, variant: str, operations: Mapping[str, float]) -> list[BudgetedExpert]:
    """Shares the operations of the homogeneous variant between the experts of a variant.

    The total is met as near as whole iterations allow: within half an iteration of all experts together.

    Args:
        ensemble: What was described.
        variant: One of the description's.
        operations: Operations of one iteration, by the name of the size.
    """
    domains, size = ensemble.domains, ensemble.homogeneous
    together = len(domains) * ensemble.iterations
    if variant == DENSE:
        return [BudgetedExpert(DENSE, tuple(domains), size, together)]
    if variant == UNEQUAL_ITERATIONS:
        iterations = apportioned(together, [domain.difficulty for domain in domains.values()])
        return [BudgetedExpert(name, (name,), size, number) for name, number in zip(domains, iterations, strict=True)]
    sizes = [size if variant == HOMOGENEOUS else domain.size for domain in domains.values()]
    of_an_iteration = math.fsum(operations[name] for name in sizes)
    number = max(round(together * operations[size] / of_an_iteration), 1)
    return [BudgetedExpert(name, (name,), of_it, number) for name, of_it in zip(domains, sizes, strict=True)]


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
