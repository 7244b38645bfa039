"""What may happen inside a group, with every optimizer: the same few things of each, in a module.

Parsing, start-up, ``doctor``, ``plan``, the documentation and the tests find features by :data:`FEATURES`, into which the
package registers those of its experiments. Importing one is cheap.
"""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pier_megatron.errors import PierConfigError
from pier_megatron.megatron_api.args import flag
from pier_megatron.megatron_api.seam import Seam
from pier_megatron.settings import flag_of, given

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclasses.dataclass(frozen=True)
class Cost:
    """Memory that a feature adds to Megatron's on the fullest rank.

    Attributes:
        activations: Activations as a multiple of Megatron's.
        per_parameter: Bytes for each parameter that the rank holds a gradient of, by what they hold.
    """

    activations: float = 1.0
    per_parameter: Mapping[str, float] = dataclasses.field(default_factory=dict)


def refuse(args: argparse.Namespace, refused: Mapping[str, str], beside: str, of_graphs: str | None = None) -> None:
    """Refuses flags that a feature does not go with.

    ``refused`` has reasons by attribute, ``beside`` names the feature's flags, ``of_graphs`` is a reason against CUDA graphs.

    Raises:
        PierConfigError: With the flag, the reason and a remedy.
    """
    for name, reason in refused.items():
        if getattr(args, name, None):
            raise PierConfigError(f"{flag(name)} cannot be used with {beside}: {reason}. Drop one of them.")
    graphs = getattr(args, "cuda_graph_impl", None) or "none"
    if of_graphs is not None and graphs != "none":
        raise PierConfigError(f"--cuda-graph-impl {graphs} cannot be used with {beside}: {of_graphs}. Drop one of them.")


class Feature(Protocol):
    """Something that happens inside a group, with every optimizer. A module is one that has all of this by these names.

    The functions take Megatron's arguments; all but the first two take them validated, and are called in runs that use the
    feature.
    """

    @property
    def Settings(self) -> "type[DataclassInstance]":  # noqa: N802
        """Dataclass of its settings, which become flags."""

    @property
    def REFUSED(self) -> Collection[str]:  # noqa: N802
        """Attributes of Megatron's arguments that it refuses, some of them in some runs only; its page names their flags."""

    def is_used(self, args: argparse.Namespace) -> bool:
        """Whether a run was started with it."""

    def prepare(self, args: argparse.Namespace) -> None:
        """Refuses what is known before Megatron's own checks, and sets what these shall see.

        Raises:
            PierConfigError: With the flag, the values and a remedy.
        """

    def check(self, args: argparse.Namespace) -> None:
        """Refuses what cannot work, and sets what the training shall see.

        Raises:
            PierConfigError: With the flag, the values, the arithmetic and a remedy.
        """

    def describe(self, args: argparse.Namespace) -> list[str]:
        """Says what it will do, line by line."""

    def warnings(self, args: argparse.Namespace) -> list[str]:
        """Says where it gains less than its user may expect, one sentence each."""

    def cost(self, args: argparse.Namespace) -> Cost:
        """Says what it takes."""

    def seams(self) -> Sequence[Seam]:
        """Says what it puts around functions of Megatron, around everything of the outer loop's."""

    def look(self) -> Callable[[], list[str]]:
        """Begins to look at an iteration for ``doctor``; returns what says, line by line, what the feature did in it."""


ENTRY = "pier_features"
"""Key of Megatron's content metadata that holds :func:`settings` of the run that saved."""

FEATURES: list[Feature] = []
"""All features, in the order in which they check a run and speak of it; the package adds those of its experiments."""


def used(args: argparse.Namespace) -> list[Feature]:
    """The features that a run was started with."""
    return [feature for feature in FEATURES if feature.is_used(args)]


def settings(args: argparse.Namespace) -> dict[str, object]:
    """The settings of features that a run was started with, by flag."""
    return {flag_of(name): value for feature in FEATURES for name, value in given(feature.Settings, args).items()}


def changes(metadata: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """Settings of features that the run of a checkpoint had otherwise, one phrase each; a stock run's says nothing of them."""
    now = settings(args)
    then = metadata.get(ENTRY, now)
    return [f"{flag} {then.get(flag)} is now {now.get(flag)}" for flag in {**then, **now} if then.get(flag) != now.get(flag)]
