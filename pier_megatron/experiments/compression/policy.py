"""Which traffic is compressed how: a codec for each parallel dimension, as text and as names for what belongs together.

Reference: "Accelerating Large Language Model Training with Hybrid GPU-based Compression", arXiv 2409.02423: gradients bear much
compression, activations little; compressing all alike is faster and costs loss.
"""

import argparse
from collections.abc import Mapping

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.codecs import CODECS, Codec

DIMENSIONS: Mapping[str, str] = {
    "dp": "gradients between data-parallel ranks, in the lazy start also between groups",
    "pp": "activations and their gradients between pipeline stages",
    "gather": "parameters of the distributed optimizer",
    "tp": "activations and their gradients between tensor-parallel ranks",
    "outer": "pseudo-gradients between groups",
}
"""What travels in a parallel dimension."""

_OUTER = tuple(name for name, codec in CODECS.items() if not codec.lossless)

# What does not cross groups has no error feedback, or loses it at each save.
INSIDE = tuple(name for name in _OUTER if not CODECS[name].needs_error_feedback)
"""Codecs of what travels inside a group, from the most bits on."""

OFF = "off"
"""What leaves a dimension of a policy uncompressed."""

POLICIES: Mapping[str, Mapping[str, str]] = {
    "hybrid": {"dp": "int8", "pp": "bf16", "outer": "int8"},
    "aggressive": {"dp": "int4", "pp": "bf16", "outer": "int8"},
    "naive": {"dp": "int8", "pp": "int8", "gather": "int8", "tp": "int8", "outer": "int8"},
}


def parse_policy(text: str) -> tuple[dict[str, Codec], set[str]]:
    """Reads what ``--pier-compress`` is given: ``POLICY``, ``DIMENSION=CODEC``, or some of them behind each other.

    Args:
        text: Separated by commas; what comes later counts.

    Returns:
        The codec of each dimension that is compressed, and the dimensions that are named, rather than part of a policy.

    Raises:
        PierConfigError: With the values that are allowed.
    """
    codecs: dict[str, Codec] = {}
    named = set()
    for part in text.split(","):
        dimension, equals, codec = part.strip().partition("=")
        if not equals:
            if dimension not in POLICIES:
                raise PierConfigError(
                    f"--pier-compress {text}: {dimension!r} is no policy. Use one of {', '.join(POLICIES)}, or "
                    f"DIMENSION=CODEC with one of {', '.join(DIMENSIONS)}."
                )
            codecs |= {name: CODECS[of_policy] for name, of_policy in POLICIES[dimension].items()}
            continue
        if dimension not in DIMENSIONS:
            raise PierConfigError(f"--pier-compress {text}: {dimension!r} is no dimension. Use one of {', '.join(DIMENSIONS)}.")
        possible = (*(_OUTER if dimension == "outer" else INSIDE), OFF)
        if codec not in possible:
            raise PierConfigError(f"--pier-compress {text}: {dimension} cannot be {codec!r}. Use one of {', '.join(possible)}.")
        codecs.pop(dimension, None)
        named.add(dimension)
        if codec != OFF:
            codecs[dimension] = CODECS[codec]
    return codecs, named


def policy(text: str) -> str:
    """What ``--pier-compress`` is given, as the ``type`` of an argparse argument.

    Raises:
        argparse.ArgumentTypeError: As :func:`parse_policy`; argparse adds the flag.
    """
    try:
        parse_policy(text)
    except PierConfigError as error:
        reason = str(error).removeprefix(f"--pier-compress {text}: ")
        raise argparse.ArgumentTypeError(f"{text or '(empty)'}: {reason}") from error
    return text


def has_feedback(codec: Codec) -> bool:
    """Whether what a codec drops of gradients is kept for the next ones: from 8 bits on it drops too little to matter."""
    return codec.bits < 8
