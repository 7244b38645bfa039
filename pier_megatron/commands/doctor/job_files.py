"""Looks at the files and folders that a job names: data, tokenizer, checkpoints."""

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pier_megatron.commands.findings import Findings
from pier_megatron.exchange.authentication import read_secret
from pier_megatron.integration.startup import check_folder
from pier_megatron.megatron_api.tracker import tracker_of
from pier_megatron.values import is_in_object_store

_DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_LIST, _LISTS_BY_SPLIT = "--data-args-path", "--per-split-data-args-path"
_TOKENIZER = ("--tokenizer-model", "--vocab-file", "--merge-file")
_FOLDERS = ("--save", "--tensorboard-dir", "--load", "--pretrained-checkpoint")
_SWITCHES = ("--mock-data", "--sft", "--exit-on-missing-checkpoint")
# Files by their names; what looks like none of them, such as openai-community/gpt2, may be the name of a hub's.
_LOOKS_LIKE_A_FILE = re.compile(r"[/~]|\.{1,2}/|.*\.(model|json|txt|bpe|vocab|tiktoken)$")
_NEXT_WHERE = "Look at it from a node of the job, or correct the path."

Given = dict[str, Any]
"""Values of a job's arguments by flag."""


def paths(arguments: Sequence[str]) -> Given:
    """The paths among a script's arguments, also of arguments that Megatron would refuse."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for flag in _DATA:
        parser.add_argument(flag, dest=flag, nargs="*", default=[])
    for flag in (_LIST, _LISTS_BY_SPLIT, *_TOKENIZER, *_FOLDERS, "--dataloader-type", "--pier-secret-file"):
        parser.add_argument(flag, dest=flag)
    for flag in _SWITCHES:
        parser.add_argument(flag, dest=flag, action="store_true")
    try:
        return vars(parser.parse_known_args(arguments)[0])
    except argparse.ArgumentError:
        # A flag without its value, which Megatron's own parser names. Nothing is left to look at.
        return vars(parser.parse_args(["--mock-data"]))


def look(given: Given, findings: Findings) -> None:
    """Looks at what a job reads, and where it saves."""
    if not given["--mock-data"] and given["--dataloader-type"] != "external":
        named = list(_prefixes(given, findings))
        if not named and given[_LIST] is None and given[_LISTS_BY_SPLIT] is None:
            findings.warnings.append(
                "no data is given, so Megatron trains on made-up tokens. Give --data-path, or --mock-data if that is meant"
            )
        _look_at_data(named, given["--sft"], findings)
    for flag in _TOKENIZER:
        path = given[flag]
        if path is not None and _LOOKS_LIKE_A_FILE.match(path) and not Path(path).exists():
            findings.errors.append(f"{flag} {path}: no such file or folder. {_NEXT_WHERE}")
    _look_at_secret(given["--pier-secret-file"], findings)
    for flag in ("--save", "--tensorboard-dir"):
        with findings.collecting():
            check_folder(flag, given[flag])
    _look_at_load_folders(given, findings)


def _prefixes(given: Given, findings: Findings) -> Iterator[tuple[str, str]]:
    """Prefixes of data, each with the flag that names it."""
    named = {flag: given[flag] for flag in _DATA}
    for flag in (_LIST, _LISTS_BY_SPLIT):
        if given[flag] is not None:
            try:
                named |= _listed(flag, Path(given[flag]))
            except (OSError, ValueError) as error:
                findings.errors.append(f"{flag} {given[flag]}: cannot be read ({error}). {_NEXT_WHERE}")
    for flag, words in named.items():
        # Megatron's get_blend_from_list: every other word of an even number may be a weight.
        are_weighted = len(words) % 2 == 0 and all(map(_is_number, words[::2]))
        yield from ((flag, prefix) for prefix in (words[1::2] if are_weighted else words))


def _listed(flag: str, path: Path) -> dict[str, list[str]]:
    """Words of a file that lists data, by the flag and the split that name them."""
    if flag == _LIST:
        return {f"{flag} {path}:": path.read_text().split()}
    lists = json.loads(path.read_text())
    if not isinstance(lists, dict) or not all(isinstance(words, str | list | None) for words in lists.values()):
        raise ValueError("no lists by the names train, valid and test")
    return {
        f"{flag} {path}, {split}:": words.split() if isinstance(words, str) else [str(word) for word in words or ()]
        for split, words in lists.items()
    }


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _look_at_data(named: Sequence[tuple[str, str]], is_text: bool, findings: Findings) -> None:
    """Looks at prefixes with the flags that name them. Of a blend, those that lack the same are one error."""
    absent: dict[str, list[str]] = {}
    for flag, prefix in named:
        needed = [prefix] if is_text else [f"{prefix}.bin", f"{prefix}.idx"]
        missing = [] if is_in_object_store(prefix) else [path for path in needed if not Path(path).exists()]
        none = f"{flag} {prefix}: there is no {' and no '.join(missing)}"
        if is_in_object_store(prefix):
            continue
        if not missing:
            unreadable = [path for path in needed if not os.access(path, os.R_OK)]
            findings.errors += [f"{flag} {prefix}: {path} may not be read by you." for path in unreadable[:1]]
        elif is_text or not Path(prefix).exists():
            absent.setdefault(flag, []).append(none)
        elif prefix.endswith((".bin", ".idx")):
            findings.errors.append(
                f"{flag} {prefix}: Megatron opens {' and '.join(needed)}. Give the prefix without the suffix."
            )
        else:
            findings.warnings.append(
                f"{none}, which Megatron's data sets open: the job starts only if the script reads its data in another way"
            )
    for flag, lacking in absent.items():
        total = sum(flag == name for name, _ in named)
        others = f", nor the files of {len(lacking) - 1} more of its {total} prefixes" if lacking[1:] else ""
        findings.errors.append(f"{lacking[0]}{others}. {_NEXT_WHERE}")


def _look_at_secret(path: str | None, findings: Findings) -> None:
    if path is not None and not Path(path).exists():
        # Other nodes need no copy.
        findings.warnings.append(
            f"--pier-secret-file {path}: no such file here; the node of the island's first rank needs it. Copy that of the "
            "other islands there"
        )
    else:
        with findings.collecting():
            read_secret(path)


def nearest(path: Path) -> Path:
    """The path itself, or of those above it the nearest that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def _look_at_load_folders(given: Given, findings: Findings) -> None:
    def is_empty(folder: str) -> bool:
        return not is_in_object_store(folder) and not tracker_of(Path(folder)).exists()

    load, pretrained = given["--load"], given["--pretrained-checkpoint"]
    if load is not None and Path(load).exists() and not os.access(load, os.R_OK | os.X_OK):
        findings.errors.append(f"--load {load}: may not be read by you.")
    elif pretrained is not None:
        if is_empty(pretrained) and (load is None or is_empty(load)):
            findings.errors.append(f"--pretrained-checkpoint {pretrained}: there is no checkpoint in it. {_NEXT_WHERE}")
    elif load is not None and is_empty(load):
        if given["--exit-on-missing-checkpoint"]:
            findings.errors.append(
                f"--load {load}: there is no checkpoint in it, and --exit-on-missing-checkpoint is given. Drop that for a "
                "first start, or correct the path."
            )
        elif load != given["--save"]:
            findings.warnings.append(
                f"--load {load}: there is no checkpoint in it, so the run begins from random weights. Correct the path, "
                "or drop --load"
            )
