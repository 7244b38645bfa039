"""``pier-megatron experts mix``: the experts as one model, against each of them, the seed model and the dense one."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.experts import mixture
from pier_megatron.experiments.experts.ensemble import DENSE
from pier_megatron.experiments.experts.planned import Plan
from pier_megatron.experiments.experts.score import read_scores, scored_models

UNIFORM, CACHED, SIMPLE = "uniform prior", "cached prior", "simple average"

_JSON, _PICTURE = "mixture.json", "mixture.png"


def run(options: argparse.Namespace) -> int:
    """Mixes; returns the exit status."""
    plan = Plan.read(options.folder)
    found = perplexities(plan)
    print("\n".join([*table(plan, found), "", *operations(plan)]))
    (plan.folder / _JSON).write_text(json.dumps(found, indent=1))
    draw(plan, found, plan.folder / _PICTURE)
    print(f"\nWritten: {plan.folder / _JSON}, {plan.folder / _PICTURE}")
    return 0


def perplexities(plan: Plan) -> dict[str, dict[str, float]]:
    """Perplexity per token of all models and mixtures, by name, then by domain.

    All are of the same sequences: those that the cached prior is not learned from, which are the first of each domain, a
    hundred or half of them. A sequence that repeats an earlier one does not count.

    Raises:
        PierConfigError: If scores are missing, or are not of the same text.
    """
    found: dict[str, dict[str, float]] = {model.name: {} for model in scored_models(plan)}
    for domain in plan.domains:
        scores, seen = distinct_scores(plan, domain)
        for name, of_model in scores.items():
            found[name][domain] = mixture.perplexity(of_model[seen:])
        for variant, members in plan.by_variant.items():
            names = [expert.name for expert in members]
            if variant == DENSE or len(names) == 1:
                continue
            experts = np.stack([scores[name] for name in names])
            learned = mixture.cached_prior(experts[:, :seen])
            mixtures = {
                UNIFORM: mixture.mixed(experts[:, seen:], mixture.uniform_prior(len(names))),
                CACHED: mixture.mixed(experts[:, seen:], learned),
                SIMPLE: mixture.averaged(experts[:, seen:]),
            }
            for method, of_mixture in mixtures.items():
                found.setdefault(f"{variant}, {method}", {})[domain] = mixture.perplexity(of_mixture)
    return found


def distinct_scores(plan: Plan, domain: str) -> tuple[dict[str, NDArray[np.float64]], int]:
    """Log-likelihoods of a domain's distinct sequences by model, and how many of them the cached prior is learned from."""
    scores: dict[str, NDArray[np.float64]] = {}
    first, labels = "", np.empty(0, dtype=np.int64)
    for model in scored_models(plan):
        scores[model.name], tokens = read_scores(plan, model.name, domain)
        if not first:
            first, labels = model.name, tokens
        elif not np.array_equal(tokens, labels):
            raise PierConfigError(
                f"{domain}: {model.name} was scored on other tokens, {list(tokens.shape)}, than {first}, {list(labels.shape)}. "
                "All sizes need the same tokenizer and --seq-length; remove their scores folders and score again."
            )
    kept = distinct(labels)
    if len(kept) < len(labels):
        print(f"{domain}: {len(labels) - len(kept)} of {len(labels)} sequences repeat another one and do not count")
    if len(kept) < 2:
        raise PierConfigError(
            f"{domain}: {len(kept)} distinct sequence of validation text; one for the prior and one to evaluate are the least."
        )
    seen = min(mixture.CACHED_SEQUENCES, len(kept) // 2)
    check_disjoint(domain, labels[kept[:seen]], labels[kept[seen:]])
    return {name: of_model[kept] for name, of_model in scores.items()}, seen


def prior_of(plan: Plan, variant: str, domain: str) -> NDArray[np.float64]:
    """Logarithm of the prior that a variant's experts get from a domain's first sequences; in the order of the plan.

    Raises:
        PierConfigError: If scores are missing, or are not of the same text.
    """
    scores, seen = distinct_scores(plan, domain)
    return mixture.cached_prior(np.stack([scores[expert.name][:seen] for expert in plan.by_variant[variant]]))


def distinct(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of the sequences that repeat none before them, in order."""
    return np.sort(np.unique(labels, axis=0, return_index=True)[1])


def check_disjoint(domain: str, prior: NDArray[np.int64], evaluated: NDArray[np.int64]) -> None:
    """Refuses sequences that would teach the cached prior of a domain and be evaluated."""
    shared = {sequence.tobytes() for sequence in prior} & {sequence.tobytes() for sequence in evaluated}
    if shared:
        raise PierConfigError(
            f"{domain}: {len(shared)} sequences would both teach the cached prior and be evaluated. This is a fault of the "
            "plugin: please report it."
        )


def table(plan: Plan, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The perplexities for people; ``*`` marks the lowest of each domain."""
    width = max(map(len, found)) + 1
    lowest = {domain: min(of_model[domain] for of_model in found.values()) for domain in plan.domains}
    titles = [name if name in plan.trained else f"{name} (held out)" for name in plan.domains]
    columns = [max(len(title), 11) for title in titles]
    lines = [f"{'perplexity per token':{width}}" + "".join(f"  {t:>{c}}" for t, c in zip(titles, columns, strict=True))]
    for name in _ordered(plan, found):
        cells = [
            f"  {f'{found[name][domain]:.4f}' + ('*' if found[name][domain] == lowest[domain] else ' '):>{column}}"
            for domain, column in zip(plan.domains, columns, strict=True)
        ]
        lines.append(f"{name:{width}}" + "".join(cells))
    return lines


def operations(plan: Plan) -> list[str]:
    """What each variant has cost, for people."""
    lines = [f"{'operations':12}  {'experts':>11}  {'seeds':>11}  {'together':>11}"]
    for variant in plan.by_variant:
        experts, seeds = plan.operations(variant)
        cells = f"{'unknown':>11}  {'unknown':>11}" if seeds is None else f"{seeds:11.3e}  {experts + seeds:11.3e}"
        lines.append(f"{variant:12}  {experts:11.3e}  {cells}")
    return lines


def _ordered(plan: Plan, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Names of the table: what has no variant, then each variant with its mixtures behind its experts."""
    variants = list(plan.by_variant)
    alone = [name for name in found if not name.startswith(tuple(variants))]
    return alone + [name for variant in variants for name in found if name.startswith((f"{variant}/", f"{variant},"))]


def draw(plan: Plan, found: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draws the perplexities of the mixtures, the dense model and the seed model, one group of bars per domain."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    experts = {expert.name for expert in plan.experts if expert.variant != DENSE}
    names: Sequence[str] = [name for name in _ordered(plan, found) if name not in experts]
    figure, axes = pyplot.subplots(figsize=(11, 5), layout="constrained")
    for place, name in enumerate(names):
        positions = [index + (place - len(names) / 2) * 0.8 / len(names) for index in range(len(plan.domains))]
        axes.bar(positions, [found[name][domain] for domain in plan.domains], 0.8 / len(names), align="edge", label=name)
    titles = [name if name in plan.trained else f"{name}\n(held out)" for name in plan.domains]
    axes.set_xticks(range(len(plan.domains)), titles)
    axes.set(ylabel="perplexity per token")
    axes.legend(fontsize="small", ncols=2)
    axes.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
