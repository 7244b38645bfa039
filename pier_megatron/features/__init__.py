"""What happens inside a group, with every optimizer: a folder each, and a line in :data:`FEATURES`.

Parsing, start-up, ``doctor``, ``plan``, the documentation and the tests find a feature by that list. Importing it is cheap.
"""

import argparse

from pier_megatron.features.compression import feature as _compression
from pier_megatron.features.feature import Cost, Feature
from pier_megatron.features.layered import feature as _layered
from pier_megatron.features.skipping import feature as _skipping

__all__ = ["FEATURES", "Cost", "Feature", "used"]

FEATURES: tuple[Feature, ...] = (_layered, _skipping, _compression)
"""All features, in the order in which they check a run and speak of it."""


def used(args: argparse.Namespace) -> list[Feature]:
    """The features that a run was started with."""
    return [feature for feature in FEATURES if feature.is_used(args)]
