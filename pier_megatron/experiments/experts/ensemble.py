"""What a person writes of an ensemble: a YAML file, checked key by key."""

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pier_megatron.commands.plan.cluster import CLUSTERS
from pier_megatron.errors import PierConfigError, division, suggestion

# Variants as HDEE (arXiv 2502.19385) names them. MHo and MHe: homogeneous and heterogeneous models, of one size or of the
# domain's. IHo and IHe: the same iterations for all experts, or shares by the domain's difficulty. The paper has no MHe-IHe.
HOMOGENEOUS, UNEQUAL_SIZES, UNEQUAL_ITERATIONS, UNEQUAL = "MHo-IHo", "MHe-IHo", "MHo-IHe", "MHe-IHe"

DENSE = "dense"
"""One model on all domains, to compare with."""

# A new variant comes last: a plan grows at its end.
VARIANTS = (HOMOGENEOUS, UNEQUAL_SIZES, UNEQUAL_ITERATIONS, DENSE, UNEQUAL)


@dataclasses.dataclass(frozen=True)
class Size:
    """A shape of model.

    Attributes:
        arguments: Megatron's arguments for this size; those of all experts are added.
        seed: ``--save`` folder of the model that experts of this size begin from; None for random weights.
    """

    arguments: tuple[str, ...]
    seed: Path | None


@dataclasses.dataclass(frozen=True)
class Domain:
    """What an expert is trained on.

    Attributes:
        train: Path prefix of a dataset of Megatron's.
        validation: The same, of text that is not trained on.
        size: Name of its expert's size where sizes differ.
        difficulty: Its expert's share of the iterations where those differ, relative to the other domains'.
    """

    train: Path
    validation: Path
    size: str
    difficulty: float


@dataclasses.dataclass(frozen=True)
class Machines:
    """Where experts are trained.

    Attributes:
        nodes: Number of nodes.
        gpus_per_node: Ranks that a node takes; on the CPU, processes.
        ranks_per_expert: Processes of one expert's job.
        cluster: Cluster of the planner's that hours are predicted for; None to predict none.
    """

    nodes: int
    gpus_per_node: int
    ranks_per_expert: int
    cluster: str | None


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """An ensemble as it is described.

    Attributes:
        script: Training script, such as Megatron-LM's ``pretrain_gpt.py``.
        device: ``cuda`` or ``cpu``.
        arguments: Megatron's, of every expert.
        sizes: Sizes by name.
        domains: Domains by name; one expert is trained on each.
        held_out: Path prefixes of datasets that are only scored, by name.
        homogeneous: Name of the size of all experts where sizes do not differ.
        iterations: Iterations of each expert in the homogeneous variant, which sets the operations of all variants.
        variants: Variants to plan.
        counts_seeds: Whether the equal operations of the variants include those of their seed models.
        machines: Where.
    """

    script: Path
    device: str
    arguments: tuple[str, ...]
    sizes: Mapping[str, Size]
    domains: Mapping[str, Domain]
    held_out: Mapping[str, Path]
    homogeneous: str
    iterations: int
    variants: tuple[str, ...]
    counts_seeds: bool
    machines: Machines

    @classmethod
    def read(cls, path: Path) -> "Ensemble":
        """Reads a description; paths in it are relative to its folder.

        Raises:
            PierConfigError: If it cannot be read or a value in it cannot work; with file, key, value and remedy.
        """
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise PierConfigError(f"{path} cannot be read: {error}") from error
        top = _Section(path, "", content)
        sizes = {name: _size(section) for name, section in top.sections("sizes")}
        ensemble = cls(
            script=top.path("script"),
            device=top.one_of("device", ("cuda", "cpu"), "cuda"),
            arguments=top.words("arguments"),
            sizes=sizes,
            domains={name: _domain(section, sizes) for name, section in top.sections("domains")},
            held_out=top.paths("held-out"),
            homogeneous=top.one_of("homogeneous", sizes),
            iterations=top.positive("iterations"),
            variants=top.several_of("variants", VARIANTS),
            counts_seeds=top.yes_or_no("count-seeds"),
            machines=_machines(top.section("machines")),
        )
        twice = sorted(ensemble.domains.keys() & ensemble.held_out.keys())
        if twice:
            top.refuse("held-out", ", ".join(twice), "is among the domains, too. Give it another name")
        if not ensemble.script.is_file():
            top.refuse("script", str(ensemble.script), "no such file. Give a training script, such as pretrain_gpt.py")
        top.refuse_unknown()
        return ensemble

    @property
    def validation(self) -> dict[str, Path]:
        """Path prefixes of all that is scored, by the name of the domain."""
        return {name: domain.validation for name, domain in self.domains.items()} | dict(self.held_out)


def _size(section: "_Section") -> Size:
    size = Size(section.words("arguments", ()), section.path("seed") if section.has("seed") else None)
    section.refuse_unknown()
    return size


def _domain(section: "_Section", sizes: Iterable[str]) -> Domain:
    domain = Domain(
        train=section.dataset("train"),
        validation=section.dataset("validation"),
        size=section.one_of("size", sizes),
        difficulty=section.above_zero("difficulty", 1.0),
    )
    section.refuse_unknown()
    return domain


def _machines(section: "_Section") -> Machines:
    machines = Machines(
        nodes=section.positive("nodes", 1),
        gpus_per_node=section.positive("gpus-per-node"),
        ranks_per_expert=section.positive("ranks-per-expert"),
        cluster=section.one_of("cluster", CLUSTERS) if section.has("cluster") else None,
    )
    ranks, node = machines.ranks_per_expert, machines.gpus_per_node
    if ranks > node * machines.nodes:
        together = f"{machines.nodes} nodes x {node} gpus-per-node = {machines.nodes * node}"
        section.refuse("ranks-per-expert", str(ranks), f"more than there are: {together}. Lower it")
    # An expert that shared a node with part of another would leave ranks too few for a third.
    larger, smaller = max(ranks, node), min(ranks, node)
    if larger % smaller:
        section.refuse(
            "ranks-per-expert",
            str(ranks),
            f"experts of {ranks} ranks do not fill nodes of {node} ({division(larger, smaller)}). Use a divisor or a multiple "
            "of gpus-per-node",
        )
    section.refuse_unknown()
    return machines


class _Section:
    """A mapping in the file, with its place there."""

    def __init__(self, file: Path, place: str, content: Any) -> None:
        self._file, self._place = file, place
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise PierConfigError(f"{file}: {place or 'the file'} is {content!r}: expected keys with values.")
        self._content: dict[str, Any] = content
        self._known: list[str] = []

    def has(self, key: str) -> bool:
        self._known.append(key)
        return self._content.get(key) is not None

    def refuse(self, key: str, value: str, why: str) -> NoReturn:
        """Raises the error for a value."""
        raise PierConfigError(f"{self._file}: {self._name(key)}: {value}: {why}.")

    def refuse_unknown(self) -> None:
        """Refuses keys that nobody has asked for."""
        for key in self._content:
            if key not in self._known:
                known = ", ".join(dict.fromkeys(self._known))
                raise PierConfigError(
                    f"{self._file}: {self._name(key)}: no such key{suggestion(key, self._known)} Known here: {known}."
                )

    def section(self, key: str) -> "_Section":
        return _Section(self._file, self._name(key), self._value(key))

    def sections(self, key: str) -> list[tuple[str, "_Section"]]:
        outer = self.section(key)
        if not outer._content:
            self.refuse(key, "{}", "empty. Give at least one")
        for name in outer._content:
            outer._refuse_bad_name(name)
        return [(name, outer.section(name)) for name in outer._content]

    def words(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        value = self._value(key, default)
        if isinstance(value, tuple):
            return value
        if not isinstance(value, str):
            self.refuse(key, repr(value), "expected flags as on a command line, in one text")
        return tuple(shlex.split(value, comments=True))

    def path(self, key: str) -> Path:
        value = self._value(key)
        if not isinstance(value, str):
            self.refuse(key, repr(value), "expected a path")
        return (self._file.parent / value).resolve()

    def dataset(self, key: str) -> Path:
        prefix = self.path(key)
        if not prefix.with_name(f"{prefix.name}.idx").is_file():
            self.refuse(key, str(prefix), "no dataset there. Give the path of an .idx and .bin file without its ending")
        return prefix

    def paths(self, key: str) -> dict[str, Path]:
        if not self.has(key):
            return {}
        inner = self.section(key)
        for name in inner._content:
            inner._refuse_bad_name(name)
        return {name: inner.dataset(name) for name in inner._content}

    def one_of(self, key: str, choices: Iterable[str], default: str | None = None) -> str:
        value = self._value(key, default)
        if value not in (known := list(choices)):
            self.refuse(key, str(value), f"not one of {', '.join(known)}")
        return str(value)

    def several_of(self, key: str, choices: Iterable[str]) -> tuple[str, ...]:
        known = list(choices)
        values = self._value(key, known)
        if not isinstance(values, list) or not values:
            self.refuse(key, repr(values), f"expected a list of some of {', '.join(known)}")
        for value in values:
            if value not in known or values.count(value) > 1:
                self.refuse(key, str(value), f"not one of {', '.join(known)}, each at most once")
        return tuple(values)

    def yes_or_no(self, key: str) -> bool:
        value = self._value(key, False)
        if not isinstance(value, bool):
            self.refuse(key, repr(value), "expected true or false")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, repr(value), "expected a whole number from 1 on")
        return value

    def above_zero(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            self.refuse(key, repr(value), "expected a number above 0")
        return float(value)

    def _value(self, key: str, default: Any = None) -> Any:
        self._known.append(key)
        value = self._content.get(key)
        if value is None:
            value = default
        if value is None:
            raise PierConfigError(f"{self._file}: {self._name(key)} is missing.")
        return value

    def _refuse_bad_name(self, name: str) -> None:
        # It becomes a folder, and a column of a table.
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            self.refuse(name, repr(name), "names are made of letters, digits, -, _ and .")

    def _name(self, key: str) -> str:
        return f"{self._place}.{key}" if self._place else key
