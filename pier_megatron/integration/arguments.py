"""The command line: ``--optimizer pier`` and its flags, inside Megatron's own parser.

Megatron treats every optimizer it does not know as one of the "emerging optimizers" and switches the distributed optimizer
off for it. So the name never reaches Megatron's validation: parsing turns ``pier`` into the optimizer inside a group, AdamW
under the distributed optimizer by default.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Concatenate

from pier_megatron import features
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError, Problems, division
from pier_megatron.flags import WITH_ANY_OPTIMIZER, add_pier_arguments
from pier_megatron.integration import cautions, nccl_options, own_world, refusals
from pier_megatron.megatron_api import run, versions
from pier_megatron.megatron_api.args import uses_pier
from pier_megatron.outer.rules import rule_class
from pier_megatron.settings import Settings, flag_of, given, settings_of


def uses_group_settings(args: argparse.Namespace) -> bool:
    """Whether this run was started with a flag that acts inside a group, with whatever optimizer."""
    return any(getattr(args, f"pier_{setting.name}", None) is not None for setting in WITH_ANY_OPTIMIZER)


def config_from_args(args: argparse.Namespace) -> PierConfig:
    """Builds the configuration of a run from Megatron's arguments; ``train_iters`` must be set.

    Raises:
        PierConfigError: See :class:`PierConfig`.
    """
    return PierConfig(**given(PierConfig, args) | {"train_iters": args.train_iters, "marks_embeddings": True})


@dataclasses.dataclass
class _Unknown:
    words: list[str] = dataclasses.field(default_factory=list)
    flags: list[str] = dataclasses.field(default_factory=list)


def unknown_words() -> tuple[list[str], list[str]]:
    """Words of the command line that Megatron's parser has found and does not know, and the flags that it knows."""
    found = run.part(_Unknown)
    return found.words, found.flags


def add_flags(
    add_megatron_arguments: Callable[[argparse.ArgumentParser], argparse.ArgumentParser], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """Adds the ``--pier-*`` flags and the optimizer ``pier`` to Megatron's parser."""
    parser = add_megatron_arguments(parser)
    add_pier_arguments(parser)
    optimizer = next(action for action in parser._actions if action.dest == "optimizer")
    optimizer.choices = [*(optimizer.choices or ()), "pier"]
    print_help = parser.format_help

    def format_help() -> str:
        _make_help_printable(parser)
        return print_help()

    parser.format_help = format_help  # type: ignore[method-assign]
    parse = parser.parse_known_args

    def parse_known_args(
        args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found = run.part(_Unknown)
        found.words, found.flags = [], list(parser._option_string_actions)
        parsed, found.words = parse(args, namespace)
        translate(parsed)
        return parsed, found.words

    # parse_args calls parse_known_args, so this is the one place behind both.
    parser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]
    return parser


def _make_help_printable(parser: argparse.ArgumentParser) -> None:
    """Escapes per-cent signs in help texts: megatron-core 0.19 has a bare one, and its --help fails on it."""
    for action in parser._actions:
        try:
            parser._get_formatter()._expand_help(action)
        except ValueError:
            action.help = str(action.help).replace("%", "%%")


def check_release(args: argparse.Namespace) -> None:
    """Refuses a release of Megatron on which nothing has been tested, in runs that use anything of the plugin's."""
    if not (uses_pier(args) or uses_group_settings(args)) or args.pier_try_any_megatron:
        return
    if versions.release() not in versions.SUPPORTED:
        raise PierConfigError(
            f"Megatron {versions.megatron_version()} is not one of the supported releases {', '.join(versions.SUPPORTED)}. "
            f"Install one of them, such as pip install 'megatron-core=={versions.SUPPORTED[-1]}.*'. To try this one, add "
            "--pier-try-any-megatron: everything that Pier looks up by name is there, what it computes has not been tested."
        )


def translate(args: argparse.Namespace) -> None:
    """Turns ``--optimizer pier`` into what Megatron knows, in place."""
    args.pier = args.optimizer == "pier"
    problems = Problems()
    with problems.collecting():
        check_release(args)
    if not args.pier:
        if without_effect := ", ".join(map(flag_of, given(Settings, args))):
            problems.found.append(f"{without_effect} has no effect with --optimizer {args.optimizer}: add --optimizer pier.")
        if args.yaml_cfg is not None and (dropped := ", ".join(features.settings(args))):
            problems.found.append(
                f"{dropped} has no effect with --yaml-cfg {args.yaml_cfg}: Megatron then takes all settings from the file, and "
                "checks them without Pier. Pass the settings as flags."
            )
        problems.report()
        return
    with problems.collecting():
        if args.yaml_cfg is not None:
            raise PierConfigError("--optimizer pier does not read --yaml-cfg; pass the same settings as flags.")
    if args.pier_lighthouse is not None:
        with problems.collecting():
            _check_job(args)
    with problems.collecting():
        refusals.refuse_for_inner_optimizer(args)
    with problems.collecting():
        args.pier_groups = number_of_groups(args.pier_groups, args.pier_ranks_per_domain)
    if problems.found:
        with problems.collecting():
            refusals.refuse_what_cannot_work(args)
        problems.report()
    args.optimizer = args.pier_inner_optimizer or "adam"
    if args.optimizer == "adam":
        args.use_distributed_optimizer = True


def number_of_groups(given: int | None, ranks_per_domain: int | None) -> int:
    """How many groups a launch has: those given, or one for each fast network.

    Args:
        given: Number that the user has given, or None.
        ranks_per_domain: Ranks of a fast network, or None if that is the node.

    Raises:
        PierConfigError: If the fast networks have different sizes, or their number is unknown.
    """
    domains = _number_of_domains(ranks_per_domain)
    if given is not None:
        return given
    return _number_of_nodes() if domains is None else domains


def _number_of_domains(ranks: int | None) -> int | None:
    """Number of fast networks with ``ranks`` ranks each, or None if they are the nodes."""
    if ranks is None:
        return None
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world % ranks:
        raise PierConfigError(
            f"--pier-ranks-per-domain {ranks} does not divide the world size {world}: {division(world, ranks)}. Every fast "
            f"network needs the same number of ranks: use one of {_divisors(world)}."
        )
    return world // ranks


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _check_job(args: argparse.Namespace) -> None:
    groups, island = args.pier_groups, args.pier_island
    if groups is None or island is None:
        raise PierConfigError(
            f"--pier-lighthouse {args.pier_lighthouse}: also say with --pier-groups how many islands there may be at most, and "
            f"with --pier-island which of them this job is, from 0; given are --pier-groups {groups} and "
            f"--pier-island {island}."
        )
    if island >= groups:
        raise PierConfigError(f"--pier-island {island}: must be from 0 to {groups - 1}, below --pier-groups {groups}.")


def _number_of_nodes() -> int:
    """How many nodes the launcher started, from its environment."""
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun
        return int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ["LOCAL_WORLD_SIZE"])
    # Those of a job step may be fewer than those of the allocation.
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"):
        if name in os.environ:
            return int(os.environ[name])
    raise PierConfigError(
        "--pier-groups: the number of nodes is unknown (neither LOCAL_WORLD_SIZE nor SLURM_NNODES is set), so there is no "
        "default. Give the number of groups."
    )


def validate[**P, R](
    validate_args: Callable[Concatenate[argparse.Namespace, P], R],
    args: argparse.Namespace,
    /,
    *rest: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Checks Pier's settings and those of features before and after Megatron checks its own."""
    run.begin()
    # Megatron fills them in as well, but later than they are looked at here.
    defaults = versions.given(validate_args, (args, *rest), kwargs).get("defaults", {})
    ours = {name: value for name, value in defaults.items() if name.startswith("pier_")}
    vars(args).update({name: value for name, value in ours.items() if getattr(args, name, None) is None})
    used = features.used(args)
    for feature in used:
        feature.prepare(args)
    if uses_pier(args):
        # Before Megatron's own checks, which refuse some of these for reasons that would not help a user of Pier.
        problems = Problems()
        with problems.collecting():
            refusals.refuse_what_cannot_work(args)
        with problems.collecting():
            refusals.refuse_division_by_none(args)
        if args.train_iters is not None:
            with problems.collecting():
                config_from_args(args)
        problems.found += refusals.refused(args, settings_of(args))
        problems.report()
        cautions.turn_off_what_has_no_use(args)
    saves_behind = args.async_save
    # The arguments of an island that is a job speak of the whole run, as if all islands were there.
    with versions.replaced(args, {"world_size": args.world_size * settings_of(args).launches}):
        result = validate_args(args, *rest, **kwargs)
    if uses_pier(args):
        if saves_behind and not args.async_save:
            args.pier_waits_for_saves = True
        check_arguments(args)
        if args.pier_groups > 1 and args.pier_lighthouse is None:
            own_world.name_files(args)
    for feature in used:
        feature.check(args)
    if args.rank == 0:
        for feature in used:
            print("\n".join([*feature.describe(args), *(f"  WARNING: {told}" for told in feature.warnings(args))]), flush=True)
    return result


def settle_iterations(args: argparse.Namespace) -> None:
    """Derives the iterations of a sample-based run, which Megatron knows only when it builds the optimizer, and checks them.

    Raises:
        PierConfigError: As :func:`check_arguments`.
    """
    versions.require("megatron.training.training", "update_train_iters")(args)
    if uses_pier(args):
        check_arguments(args)


def check_arguments(args: argparse.Namespace) -> None:
    """Checks what needs the sizes and intervals of Megatron's validation.

    Raises:
        PierConfigError: With the flag, the values, the arithmetic and a remedy.
    """
    # Megatron derives the iterations of sample-based training later, and the optimizer is built after that.
    if args.train_iters is not None:
        config, problems = config_from_args(args), Problems()
        for check in (refusals.check_sizes_and_intervals, nccl_options.check):
            with problems.collecting():
                check(args, config)
        with problems.collecting():
            rule_class(config)
        problems.report()
