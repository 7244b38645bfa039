"""The arguments of a job as Megatron and the plugin read them, with everything that is wrong with them."""

import argparse
import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from pier_megatron.commands import planned_job
from pier_megatron.commands.findings import Findings
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.commands.script_sources import ScriptSources
from pier_megatron.errors import Problems, hint, nearest
from pier_megatron.flags import sound_words
from pier_megatron.integration import refusals
from pier_megatron.integration.arguments import unknown_words
from pier_megatron.megatron_api.args import uses_pier

_FORK = ". If it is of a fork or of another release of Megatron, run doctor in that checkout, or drop it."
# Letters in common with a flag, as a share, from which on a word is that flag misspelt. Flags of forks have less in common.
_LIKE = 0.9
# Size of today's vocabularies.
_ASSUMED_TOKENS = 128_000


def read(
    command: LaunchCommand, sources: ScriptSources, findings: Findings, before: Collection[str] = ()
) -> argparse.Namespace | None:
    """Parses and validates a job's arguments; needs no GPU. Flags in ``before`` are of the command that asks, not of the job.

    Returns:
        Megatron's arguments; None if they are refused or, with ``--use-checkpoint-args``, are incomplete.
    """
    sound, problems = sound_words(command.arguments)
    findings.errors += problems.found
    args, parsing = None, Problems()
    with parsing.collecting():
        args = planned_job.parsed_arguments(command.ranks, command.ranks_per_node, [command.script, *sound])
    unknown, known = unknown_words()
    meant = look_at_unknown(unknown, known, sources, findings, before)
    dropped = [name for word in command.arguments if (name := word.partition("=")[0]).startswith("--pier-")]
    dropped = [name for name in dropped if name not in [word.partition("=")[0] for word in sound]]
    doubtful = {*dropped, *(flag for name in dropped for flag in nearest(name, known))}
    findings.errors += [error for error in parsing.found if not doubtful.intersection(re.findall(r"--[\w-]+", error))]
    if args is None or _lacks_flags(args, findings, meant):
        return None
    if doubtful:
        # If defaults replaced the wrong values, other checks would refuse values that nobody gave.
        if uses_pier(args):
            with findings.collecting():
                refusals.refuse_what_cannot_work(args)
        return None
    if not _is_valid(args, command, sources, findings):
        return None
    if args.vocab_size is None and (tokens := _tokens(args)):
        args.vocab_size = tokens
        findings.notes.append(f"--tokenizer-model {args.tokenizer_model}: {tokens:,} tokens")
    return args


def assume_vocabulary(args: argparse.Namespace) -> list[str]:
    """Gives a stand-in vocabulary to a job whose tokenizer cannot be read; returns the notes on it."""
    if args.vocab_size is not None or getattr(args, "padded_vocab_size", None) is not None:
        return []
    args.vocab_size = _ASSUMED_TOKENS
    return [f"the tokenizer cannot be read here: a vocabulary of {_ASSUMED_TOKENS:,} tokens is assumed. Give --vocab-size"]


def _tokens(args: argparse.Namespace) -> int | None:
    """Number of tokens of a Hugging Face tokenizer in a local folder, as its own library counts them; None if unknown."""
    if args.tokenizer_type != "HuggingFaceTokenizer" or args.tokenizer_model is None:
        return None
    try:
        read = json.loads((Path(args.tokenizer_model) / "tokenizer.json").read_text())
        vocabulary, added = read["model"]["vocab"], read.get("added_tokens", ())
        # A list has the tokens in order, each with its score.
        tokens = set(vocabulary if isinstance(vocabulary, dict) else (token for token, _ in vocabulary))
        return len(tokens | {token["content"] for token in added}) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _lacks_flags(args: argparse.Namespace, findings: Findings, meant: Sequence[str]) -> bool:
    """Looks for flags that are missing and not ``meant`` by misspelt ones; returns whether others cannot be checked."""
    lacking = planned_job.missing_flags(args)
    missing = [name for name in lacking if name not in meant]
    if missing:
        # Megatron would name one of them at each start.
        findings.errors.append(
            f"{', '.join(missing)}: not given, and there is no default. Give {'them' if missing[1:] else 'it'}."
        )
    needed = planned_job.missing_flag_of_tokenizer(args)
    if needed is not None and needed not in meant:
        findings.errors.append(f"{needed}: not given; {args.tokenizer_type} needs it. Give it.")
    return bool(lacking)


def _is_valid(args: argparse.Namespace, command: LaunchCommand, sources: ScriptSources, findings: Findings) -> bool:
    """Has Megatron and the plugin check parsed arguments; returns whether they have filled them in."""
    checks = Problems()
    with checks.collecting():
        planned_job.validate(args, command.ranks_per_node)
    is_filled_in = not checks.found
    if is_filled_in and sources.files_with(planned_job.CONFIGURATION):
        with checks.collecting():
            planned_job.configuration(args, command.ranks_per_node)
    absent = [found for found in checks.found if planned_job.may_start_elsewhere(args, found)]
    findings.warnings += [f"here: {each}" for each in absent]
    checks.found = [each for each in checks.found if each not in absent]
    if args.use_checkpoint_args:
        findings.warnings += [
            f"{error} If the checkpoint in --load gives what is missing, the job starts: --use-checkpoint-args is not read here"
            for error in checks.found
        ]
    else:
        findings.errors += checks.found
    return is_filled_in and not checks.found


def look_at_plugin(command: LaunchCommand, sources: ScriptSources, findings: Findings) -> None:
    """Looks for what makes the plugin known to Megatron."""
    script, needing = command.script, None if command.has_plugin else _needing_plugin(command.arguments)
    if needing is None:
        return
    registering = sources.files_with("pier_megatron", "register(") or sources.files_with("from pier_megatron import register")
    without = f"{needing}: {script} is started without -m pier_megatron"
    if registering:
        findings.notes.append(f"{needing} is made known by {registering[0]}")
    elif sources.script is None:
        findings.errors.append(
            f"{without}, and cannot be read from {os.getcwd()}. Put -m pier_megatron before it, or give its path if it calls "
            "pier_megatron.register() by itself."
        )
    else:
        findings.errors.append(
            f"{without}, and neither it nor what it imports calls pier_megatron.register(), so that Megatron would refuse the "
            f"flag. Put -m pier_megatron before {script}."
        )


def _needing_plugin(arguments: tuple[str, ...]) -> str | None:
    """The first flag that only the plugin knows, with the optimizer's value."""
    for place, word in enumerate(arguments):
        if word == "--optimizer=pier" or arguments[place : place + 2] == ("--optimizer", "pier"):
            return "--optimizer pier"
    return next((word for word in arguments if word.startswith("--pier-")), None)


def look_at_unknown(
    unknown: list[str], known: list[str], sources: ScriptSources, findings: Findings, before: Collection[str] = ()
) -> list[str]:
    """Looks at words that Megatron's parser does not know: flags of the script's own, or misspelt ones.

    Returns:
        Known flags that misspelt ones seem to be.
    """
    misspelt = list[str]()
    # Values of unknown flags follow them; one in front belongs to no flag.
    flags = [word.partition("=")[0] for word in unknown if re.match(r"--?[A-Za-z]", word)]
    stray = [] if flags and unknown[0].startswith("-") else unknown[:1]
    for word in stray:
        findings.errors.append(f"{word}: belongs to no flag, and Megatron would refuse it. Drop it, or name its flag.")
    may_be_added = sources.may_add_unseen_flags()
    for flag in flags:
        quoted = [files[0] for quote in "\"'" if (files := sources.files_with(f"{quote}{flag}{quote}"))]
        meant = nearest(flag, known, _LIKE)
        if flag in before:
            findings.errors.append(f"{flag}: Megatron does not know it. Put it before the launch command of the job.")
        elif quoted:
            findings.notes.append(f"{flag}: not Megatron's; {quoted[0]} adds it")
        elif may_be_added and not flag.startswith("--pier-"):
            misspelt += meant
            findings.warnings.append(
                f"{flag}: Megatron does not know it, and it is not in the text of {sources.script or 'the script'} or of what "
                f"that imports: the job starts only if the script adds it in another way{hint(meant)}"
            )
        else:
            misspelt += meant
            findings.errors.append(f"{flag}: Megatron does not know it, and no script adds it{hint(meant) or _FORK}")
    return misspelt
