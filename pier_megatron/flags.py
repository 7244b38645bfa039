"""The ``--pier-*`` flags, generated from the settings: for Megatron's parser, and to check a job before imports."""

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from typing import NoReturn

from pier_megatron.errors import PierConfigError, Problems, suggestion
from pier_megatron.features import FEATURES
from pier_megatron.settings import PluginSettings, Settings, flag_of
from pier_megatron.values import Choice, Removed

WITH_ANY_OPTIMIZER = tuple(
    setting for kind in (*(feature.Settings for feature in FEATURES), PluginSettings) for setting in dataclasses.fields(kind)
)
"""Settings that work with every ``--optimizer``."""

REMOVED = {
    "--pier-islands": "every kind of inner optimizer, Muon too, trains in groups of one launch without it. Drop it.",
    "--pier-log-codec-errors": "compare the losses of short runs with each codec of --pier-compress. Drop it.",
    "--pier-outlier-zscore": "groups that are not finite are excluded without it. Drop it.",
    "--pier-subgroup-gamma": "groups are pulled to their mean as strongly as they step, by --pier-outer-lr. Drop it.",
}
"""Flags that are no more, with what to do instead."""


def add_pier_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the ``--pier-*`` flags. They default to None, which marks a flag that was not given."""
    group = parser.add_argument_group(
        "pier",
        "Relaxed global communication (arXiv 2511.17849). These flags need --optimizer pier, whose default is AdamW inside.",
    )
    lazy_start = group.add_mutually_exclusive_group()
    for setting in dataclasses.fields(Settings):
        if setting.metadata:
            _add_argument(lazy_start if setting.name in ("lazy_start_fraction", "lazy_start_iters") else group, setting)
    for name, remedy in REMOVED.items():
        refusal = f"argument {name}: no such flag any more: {remedy}"
        group.add_argument(name, action=Removed, nargs="?", const=refusal, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)
    inside = parser.add_argument_group("pier inside a group", "These flags work with every --optimizer.")
    for setting in WITH_ANY_OPTIMIZER:
        _add_argument(inside, setting)


def _add_argument(where: argparse._ActionsContainer, setting: dataclasses.Field[object]) -> None:
    told, metavar, accepts = (setting.metadata[name] for name in ("help", "metavar", "accepts"))
    # Of "int | None" the first.
    kind = next(iter(typing.get_args(setting.type)), setting.type)
    options = {"type": accepts or kind, "metavar": metavar}
    if isinstance(accepts, Choice):
        options["choices"] = accepts.names
    if setting.metadata["alone"] is not None:
        options |= {"nargs": "?", "const": setting.metadata["alone"]}
    if kind is bool:
        options = {"action": "store_true"}
    where.add_argument(flag_of(setting.name), default=None, help=told, **options)


def check_words(words: Sequence[str]) -> argparse.Namespace:
    """Checks the ``--pier-*`` flags among the words of a job; Megatron's parser reads all words together later.

    Returns:
        Values of the flags, None for those that are not given.

    Raises:
        PierConfigError: With a message for each unknown flag and each impossible value.
    """
    sound, problems = sound_words(words)
    problems.report()
    return _Parser().parse_known_args(sound[: _end(sound)])[0]


def sound_words(words: Sequence[str]) -> tuple[list[str], Problems]:
    """The words of a job without the ``--pier-*`` flags that cannot be, and what is wrong with those."""
    end, parser, problems = _end(words), _Parser(), Problems()
    flags, sound = list(words[:end]), list[str]()
    while flags:
        length = next((place for place, word in enumerate(flags) if place and word.startswith("--")), len(flags))
        piece, flags = flags[:length], flags[length:]
        before, name = len(problems.found), piece[0].partition("=")[0]
        if name.startswith("--pier-") and " " not in name:
            with problems.collecting():
                if name not in parser.flags:
                    raise PierConfigError(f"{piece[0]}: no such flag{suggestion(name, parser.flags)}")
                parser.parse_known_args(piece)
        sound += piece if len(problems.found) == before else []
    return [*sound, *words[end:]], problems


def _end(words: Sequence[str]) -> int:
    """Where flags end."""
    return list(words).index("--") if "--" in words else len(words)


class _Parser(argparse.ArgumentParser):
    """A parser of the ``--pier-*`` flags that raises what is wrong."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        add_pier_arguments(self)

    @property
    def flags(self) -> list[str]:
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        raise PierConfigError(message.removeprefix("argument "))
