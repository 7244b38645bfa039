"""Options of the plugin's NCCL communicators, from the file in which Megatron has those of its own."""

import argparse
import datetime
import importlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.megatron_api import versions

BETWEEN_GROUPS, INSIDE_SITES = "pier", "pier_inside_sites"
"""Names in the file: of communicators between groups and between sites, and of those inside a site."""

_FILE, _PRIORITY = "--nccl-communicator-config-path", "--high-priority-stream-groups"

# What Megatron reads of an entry, and what NCCL accepts. Megatron hands other values to NCCL, and ignores other names; the
# plugin sets the policy itself. By "zero", collectives between registered buffers leave the multiprocessors to training.
_WHOLE_NUMBERS = {"cga_cluster_size": range(9), "min_ctas": range(1, 65), "max_ctas": range(1, 65)}
_NETWORKS = ("ib", "socket")
_POLICY, _POLICIES = "cta_policy", ("default", "efficiency", "zero")


def check(args: argparse.Namespace, config: PierConfig) -> None:
    """Refuses options of the plugin's communicators that would be passed over, or fail where the communicator is made.

    Args:
        args: Megatron's arguments.
        config: Settings of the run.

    Raises:
        PierConfigError: With the flag, the value and a remedy.
    """
    of_file = _entries_of_file(args)
    names = {name: f"{_FILE} {args.nccl_communicator_config_path}" for name in of_file if _is_ours(name)}
    names |= {name: f"{_PRIORITY} {name}" for name in _with_priority(args) if _is_ours(name)}
    for name, where in names.items():
        if name not in (BETWEEN_GROUPS, INSIDE_SITES):
            raise PierConfigError(f"{where}: Pier has no communicator {name!r}. Use {BETWEEN_GROUPS} or {INSIDE_SITES}.")
        if name == INSIDE_SITES and config.sites is None:
            raise PierConfigError(f"{where}: {name!r} has no effect without --pier-sites. Drop it, or use {BETWEEN_GROUPS}.")
        if config.lighthouse is not None:
            raise PierConfigError(
                f"{where}: {name!r} has no effect with --pier-lighthouse: islands exchange over gloo. Drop it; "
                "NCCL_MAX_CTAS in the environment limits those of all communicators."
            )
    for name, entry in of_file.items():
        if _is_ours(name):
            _check_entry(f"{names[name]}: {name}", entry)


def options(args: argparse.Namespace, name: str, timeout: datetime.timedelta) -> object:
    """Options of a communicator of the plugin's.

    Args:
        args: Megatron's arguments, which :func:`check` has accepted.
        name: Name in the file.
        timeout: Timeout of its collectives, which PyTorch wants here too.

    Returns:
        ``ProcessGroupNCCL.Options``; None where the file does not name the communicator, or the backend is another one.
    """
    of_file = _entries_of_file(args).get(name)
    entry = dict(of_file) if isinstance(of_file, dict) else {}
    if name in _with_priority(args):
        entry["is_high_priority_stream"] = True
    if not entry or dist.get_backend() != "nccl":
        return None
    found = versions.require("megatron.core.parallel_state", "get_nccl_options")(name, {name: entry})
    found._timeout = timeout
    if _POLICY in entry:
        found.config.cta_policy = _policy(entry[_POLICY])
    return found


def _policy(name: object) -> int | None:
    return getattr(getattr(dist, "ProcessGroupNCCL", None), f"NCCL_CTA_POLICY_{str(name).upper()}", None)


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and (name == BETWEEN_GROUPS or name.startswith(f"{BETWEEN_GROUPS}_"))


def _with_priority(args: argparse.Namespace) -> Sequence[str]:
    # Not every loop around Megatron has this setting, or the file.
    return getattr(args, "high_priority_stream_groups", None) or ()


def _entries_of_file(args: argparse.Namespace) -> Mapping[str, object]:
    path = getattr(args, "nccl_communicator_config_path", None)
    if path is None:
        return {}
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise PierConfigError(f"{_FILE} {path} needs PyYAML, which is missing. Run pip install pyyaml.") from error
    try:
        with open(path) as file:
            found = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PierConfigError(f"{_FILE} {path} cannot be read: {error}. Name a YAML file that all ranks see.") from error
    if not isinstance(found, dict):
        raise PierConfigError(f"{_FILE} {path} holds no names of communicators. Write 'pier: {{max_ctas: 4}}', for example.")
    return found


def _check_entry(where: str, entry: object) -> None:
    if not isinstance(entry, dict):
        raise PierConfigError(f"{where} is {entry!r}, must be options by name. Write {{max_ctas: 4}}, for example.")
    known = ("is_high_priority_stream", *_WHOLE_NUMBERS, "net_name", _POLICY)
    for option, value in entry.items():
        if option not in known:
            raise PierConfigError(f"{where} has an option {option!r}, which Megatron passes over. Use {', '.join(known)}.")
        if option == "is_high_priority_stream" and not isinstance(value, bool):
            raise PierConfigError(f"{where}: {option} is {value!r}. Use true or false.")
        if option == "net_name" and str(value).lower() not in _NETWORKS:
            raise PierConfigError(f"{where}: {option} is {value!r}. Use {' or '.join(_NETWORKS)}.")
        if option == _POLICY and value not in _POLICIES:
            raise PierConfigError(f"{where}: {option} is {value!r}. Use {', '.join(_POLICIES)}.")
        if option == _POLICY and _policy(value) is None:
            raise PierConfigError(f"{where}: {option} is {value!r}, which PyTorch {torch.__version__} does not offer. Drop it.")
        if option in _WHOLE_NUMBERS and (type(value) is not int or value not in _WHOLE_NUMBERS[option]):
            accepted = _WHOLE_NUMBERS[option]
            raise PierConfigError(f"{where}: {option} is {value!r}. Use a whole number from {accepted[0]} to {accepted[-1]}.")
    least, most = entry.get("min_ctas"), entry.get("max_ctas")
    if least is not None and most is not None and least > most:
        raise PierConfigError(f"{where}: min_ctas {least} is above max_ctas {most}. Lower min_ctas.")
