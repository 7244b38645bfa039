"""What a person writes of an ensemble: a YAML file, checked key by key."""

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from pier_megatron.commands.plan.cluster import CLUSTERS
from pier_megatron.errors import PierConfigError, Problems, division, suggestion

# Variants as HDEE (arXiv 2502.19385) names them. MHo and MHe: homogeneous and heterogeneous models, of one size or of the
# domain's. IHo and IHe: the same iterations for all experts, or shares by the domain's difficulty. The paper has no MHe-IHe.
HOMOGENEOUS, UNEQUAL_SIZES, UNEQUAL_ITERATIONS, UNEQUAL = "MHo-IHo", "MHe-IHo", "MHo-IHe", "MHe-IHe"

DENSE = "dense"
"""One model on all domains, to compare with."""

# A new variant comes last: a plan grows at its end.
VARIANTS = (HOMOGENEOUS, UNEQUAL_SIZES, UNEQUAL_ITERATIONS, DENSE, UNEQUAL)


def _split(words: object) -> tuple[str, ...]:
    if not isinstance(words, str):
        raise ValueError(f"{words!r}: expected flags as on a command line, in one text")
    return tuple(shlex.split(words, comments=True))


def _in_folder(path: Path, info: ValidationInfo) -> Path:
    folder: Path = info.context  # type: ignore[assignment]
    return (folder / path).resolve()


def _script(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path}: no such file. Give a training script, such as pretrain_gpt.py")
    return path


def _dataset(prefix: Path) -> Path:
    if not prefix.with_name(f"{prefix.name}.idx").is_file():
        raise ValueError(f"{prefix}: no dataset there. Give the path of an .idx and .bin file without its ending")
    return prefix


def _one_of(choices: Iterable[str]) -> AfterValidator:
    known = tuple(choices)

    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"{value}: not one of {', '.join(known)}")
        return value

    return AfterValidator(check)


def _different(variants: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(variants)) < len(variants):
        raise ValueError(f"{', '.join(variants)}: each at most once")
    return variants


Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
RelativePath = Annotated[Path, AfterValidator(_in_folder)]
Dataset = Annotated[RelativePath, AfterValidator(_dataset)]
# It becomes a folder, and a column of a table.
Name = Annotated[str, Field(pattern=r"^[._-]*[A-Za-z0-9][A-Za-z0-9._-]*$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=lambda name: name.replace("_", "-"))

    @model_validator(mode="before")
    @classmethod
    def _without_empty_keys(cls, content: object) -> object:
        # All entries of one may be comments.
        return {key: value for key, value in content.items() if value is not None} if isinstance(content, dict) else content


class Size(_Section):
    """A shape of model.

    Attributes:
        arguments: Megatron's arguments for this size; those of all experts are added.
        seed: ``--save`` folder of the model that experts of this size begin from; None for random weights.
    """

    arguments: Words = ()
    seed: RelativePath | None = None


class Domain(_Section):
    """What an expert is trained on.

    Attributes:
        train: Path prefix of a dataset of Megatron's.
        validation: The same, of text that is not trained on.
        size: Name of its expert's size where sizes differ.
        difficulty: Its expert's share of the iterations where those differ, relative to the other domains'.
    """

    train: Dataset
    validation: Dataset
    size: str
    difficulty: float = Field(1.0, gt=0, allow_inf_nan=False)


class Machines(_Section):
    """Where experts are trained.

    Attributes:
        nodes: Number of nodes.
        gpus_per_node: Ranks that a node takes; on the CPU, processes.
        ranks_per_expert: Processes of one expert's job.
        cluster: Cluster of the planner's that hours are predicted for; None to predict none.
    """

    nodes: int = Field(1, gt=0, strict=True)
    gpus_per_node: int = Field(gt=0, strict=True)
    ranks_per_expert: int = Field(gt=0, strict=True)
    cluster: Annotated[str, _one_of(CLUSTERS)] | None = None

    @property
    def nodes_per_expert(self) -> int:
        """Number of nodes of one expert's job."""
        return max(self.ranks_per_expert // self.gpus_per_node, 1)

    @property
    def ranks_on_node(self) -> int:
        """Processes of one expert's job on each of its nodes."""
        return min(self.ranks_per_expert, self.gpus_per_node)

    def problems(self) -> Iterator[str]:
        """What does not fit together."""
        ranks, node = self.ranks_per_expert, self.gpus_per_node
        if ranks > node * self.nodes:
            together = f"{self.nodes} nodes x {node} gpus-per-node = {self.nodes * node}"
            yield f"machines.ranks-per-expert: {ranks}: more than there are: {together}. Lower it"
        # An expert that shared a node with part of another would leave ranks too few for a third.
        elif (larger := max(ranks, node)) % (smaller := min(ranks, node)):
            yield (
                f"machines.ranks-per-expert: {ranks}: experts of {ranks} ranks do not fill nodes of {node} "
                f"({division(larger, smaller)}). Use a divisor or a multiple of gpus-per-node"
            )


class Ensemble(_Section):
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
        count_seeds: Whether the equal operations of the variants include those of their seed models.
        machines: Where.
    """

    script: Annotated[RelativePath, AfterValidator(_script)]
    device: Annotated[str, _one_of(("cuda", "cpu"))] = "cuda"
    arguments: Words
    sizes: dict[Name, Size] = Field(min_length=1)
    domains: dict[Name, Domain] = Field(min_length=1)
    held_out: dict[Name, Dataset] = {}
    homogeneous: str
    iterations: int = Field(gt=0, strict=True)
    variants: Annotated[tuple[Annotated[str, _one_of(VARIANTS)], ...], AfterValidator(_different), Field(min_length=1)] = (
        VARIANTS
    )
    count_seeds: bool = False
    machines: Machines

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a description; paths in it are relative to its folder.

        Raises:
            PierConfigError: If it cannot be read or values in it cannot work; with file, keys, values and remedies.
        """
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise PierConfigError(f"{path} cannot be read: {error}") from error
        try:
            ensemble = cls.model_validate(content, context=path.parent)
        except ValidationError as error:
            raise PierConfigError(*(f"{path}: {_said(each)}." for each in error.errors())) from error
        Problems([f"{path}: {problem}." for problem in ensemble._problems()]).report()
        return ensemble

    @property
    def validation(self) -> dict[str, Path]:
        """Path prefixes of all that is scored, by the name of the domain."""
        return {name: domain.validation for name, domain in self.domains.items()} | self.held_out

    def _problems(self) -> Iterator[str]:
        named = {"homogeneous": self.homogeneous} | {f"domains.{name}.size": each.size for name, each in self.domains.items()}
        for key, size in named.items():
            if size not in self.sizes:
                yield f"{key}: {size}: not one of {', '.join(self.sizes)}"
        if twice := sorted(self.domains.keys() & self.held_out.keys()):
            yield f"held-out: {', '.join(twice)}: is among the domains, too. Give it another name"
        yield from self.machines.problems()


def _said(error: Any) -> str:
    """What is wrong, in the words of the file."""
    *outer, key = (str(part) for part in error["loc"] if part != "[key]") if error["loc"] else ("the file",)
    where, given = ".".join((*outer, key)), error["input"]
    if error["type"] == "extra_forbidden":
        sections: dict[str, type[_Section]] = {"sizes": Size, "domains": Domain, "machines": Machines}
        section = sections.get(outer[0] if outer else "", Ensemble)
        known = [field.alias or name for name, field in section.model_fields.items()]
        return f"{where}: no such key{suggestion(key, known) or '.'} Known here: {', '.join(known)}"
    if error["type"] == "value_error":
        return f"{where}: {error['ctx']['error']}"
    return f"{where}: {'' if error['type'] == 'missing' else f'{given!r}: '}{error['msg']}"
