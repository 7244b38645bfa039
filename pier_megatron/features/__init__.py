"""What happens inside a group, with every optimizer: a folder each, and a line in :data:`FEATURES`.

Parsing, start-up, ``doctor``, ``plan``, the documentation and the tests find a feature by that list. Importing it is cheap.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from pier_megatron.features.compression import feature as _compression
from pier_megatron.features.feature import Cost, Feature
from pier_megatron.features.layered import feature as _layered
from pier_megatron.features.skipping import feature as _skipping
from pier_megatron.settings import flag_of, given

__all__ = ["ENTRY", "FEATURES", "Cost", "Feature", "changes", "settings", "used"]

ENTRY = "pier_features"
"""Key of Megatron's content metadata that holds :func:`settings` of the run that saved."""

FEATURES: tuple[Feature, ...] = (_layered, _skipping, _compression)
"""All features, in the order in which they check a run and speak of it."""


def used(args: argparse.Namespace) -> list[Feature]:
    """The features that a run was started with."""
    return [feature for feature in FEATURES if feature.is_used(args)]


def settings(args: argparse.Namespace) -> dict[str, object]:
    """The settings of features that a run was started with, by flag; without those of what is logged."""
    return {
        flag_of(name): value
        for feature in FEATURES
        for name, value in given(feature.Settings, args).items()
        if not name.startswith("log_")
    }


def changes(metadata: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """Settings of features that differ from those of the run that saved a checkpoint, one phrase each.

    Args:
        metadata: Content metadata of the checkpoint; older plugins say nothing of features there.
        args: Megatron's arguments of the run that loads.
    """
    now = settings(args)
    then = metadata.get(ENTRY, now)
    return [f"{flag} {then.get(flag)} is now {now.get(flag)}" for flag in {**then, **now} if then.get(flag) != now.get(flag)]
