"""A job that has not been started: its arguments through Megatron's own parser, its ranks through Megatron's own order."""

import argparse
import contextlib
import importlib.util
import io
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from pier_megatron import features
from pier_megatron.config import PierConfig
from pier_megatron.cpu import emulation
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.topology import Rank, Topology, domain_name
from pier_megatron.integration.arguments import settle_iterations
from pier_megatron.integration.checkpoint.content import layout_of
from pier_megatron.integration.checkpoint.description import ENTRY, SCHEDULES, Description
from pier_megatron.integration.checkpoint.files import names_nothing, newest_whole, refusal
from pier_megatron.integration.inner.requirements import scaled
from pier_megatron.integration.refusals import check_experts, refuse_division_by_none
from pier_megatron.integration.seams import register
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.args import flag
from pier_megatron.megatron_api.batches import counted
from pier_megatron.megatron_api.tracker import stored_checkpoint
from pier_megatron.settings import settings_of

_ARGUMENTS = "megatron.training.arguments"

CONFIGURATION = "core_transformer_config_from_args"
"""Function of Megatron's that makes a model's configuration of arguments."""

# What tokenizers cannot be built without.
_NEEDED_BY_TOKENIZER = {
    "vocab_size": ("NullTokenizer", "NullMultimodalTokenizer"),
    "tokenizer_model": (
        "HuggingFaceTokenizer TikTokenizer SFTTokenizer SentencePieceTokenizer GPTSentencePieceTokenizer Llama2Tokenizer"
    ).split(),
}

# What Megatron has no default for, and refuses with one error after the other.
_NEEDED = ("micro_batch_size", "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "lr")


def parsed_arguments(ranks: int, ranks_per_node: int, argv: Sequence[str]) -> argparse.Namespace:
    """Parses a script and its arguments as rank 0 of a job would; needs no GPU.

    Raises:
        PierConfigError: If Megatron's parser or the plugin refuses them.
    """
    # Megatron decorates functions with it, but none of them runs here; its compiler takes as long to import as Megatron.
    torch.compile = lambda model=None, **_: model or (lambda function: function)  # type: ignore[assignment]
    if not torch.cuda.is_available():
        emulation.install()
    register()
    with as_rank_0(ranks, ranks_per_node), versions.replaced(sys, {"argv": list(argv)}):
        args: argparse.Namespace = versions.require(_ARGUMENTS, "parse_args")(ignore_unknown_args=True)
    return args


def validate(args: argparse.Namespace, ranks_per_node: int) -> None:
    """Has Megatron and the plugin fill in and check parsed arguments, in place.

    Raises:
        PierConfigError: If one of them refuses the arguments.
    """
    with as_rank_0(args.world_size, ranks_per_node):
        versions.require(_ARGUMENTS, "validate_args")(args)
        if args.train_samples is not None:
            # Batch sizes may change on the way.
            with counted(args):
                settle_iterations(args)
        elif args.train_iters is None:
            raise PierConfigError("the job says neither --train-iters nor --train-samples.")
        refuse_division_by_none(args)
        if args.num_experts is not None:
            check_experts(args, args.pier_groups // settings_of(args).launches if args.pier else 1)


def may_start_elsewhere(args: argparse.Namespace, message: str) -> bool:
    """Whether Megatron, and not Pier, wants a package that this machine without GPU lacks, and another one may have."""
    is_elsewhere = emulation.is_installed() and args.distributed_backend == "nccl"
    if not is_elsewhere or importlib.util.find_spec("transformer_engine") is not None:
        return False
    # PyTorch's LayerNorm is what Megatron takes where Apex is missing.
    packages = r"\bTE\b|Transformer Engine|(?i:apex|torch LayerNorm|not available|pip install)"
    if args.transformer_impl == "transformer_engine":  # Where another is given, Megatron asks for this one.
        packages += "|(?i:transformer.?engine)"
    return re.match(rf"(Megatron|--transformer-impl) (?s:.*)({packages})", message) is not None


def configuration(args: argparse.Namespace, ranks_per_node: int) -> object:
    """Builds the model's configuration from validated arguments, by Megatron's own function.

    Raises:
        PierConfigError: If Megatron refuses it.
    """
    with as_rank_0(args.world_size, ranks_per_node):
        made: object = versions.require(_ARGUMENTS, CONFIGURATION)(args)
    return made


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def as_rank_0(ranks: int, ranks_per_node: int, where: str = "Megatron refuses the arguments") -> Iterator[None]:
    """Inside, the environment is that of a job's rank 0, refusals become errors, and what Megatron prints is kept back."""
    environment = {
        "RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
    }
    output = io.StringIO()
    with _environment(environment), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            yield
        except PierConfigError:
            raise
        except SystemExit:
            # Below the usage, or last.
            said, _, error = output.getvalue().strip().rpartition(": error: ")
            raise PierConfigError(*error.splitlines()[0 if said else -1 :]) from None
        except (AssertionError, ValueError, RuntimeError, TypeError, LookupError, OSError) as error:
            raise PierConfigError(f"{where}: {str(error).strip() or _failed_check(error)}") from error


def _failed_check(error: Exception) -> str:
    """The check behind an error without a text, and the flags that it looks at."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    last = traceback.extract_tb(error.__traceback__)[-1]
    lines = (linecache.getline(last.filename, number) for number in range(last.lineno or 1, (last.end_lineno or 1) + 1))
    check = " ".join("".join(lines).split())
    args = frame.f_locals.get("args")
    values = {flag(name): getattr(args, name, None) for name in re.findall(r"\bargs\.(\w+)", check)}
    found = f"its check {check!r} ({Path(last.filename).name}, line {last.lineno}) fails"
    if not values:
        return f"{found}."
    missing = [name for name, value in values.items() if value is None]
    said = ", ".join(f"{name} is {value}" for name, value in values.items())
    return f"{found}: {said}. {f'Give {missing[0]}' if missing else f'Change {next(iter(values))}'}."


def missing_flags(args: argparse.Namespace) -> list[str]:
    """Flags without a default that parsed arguments lack, unless a file of the job may give them."""
    if args.use_checkpoint_args or args.yaml_cfg is not None or args.heterogeneous_layers_config_path is not None:
        return []
    needed = [*_NEEDED, *(["seq_length"] if args.encoder_seq_length is None else [])]
    if args.hybrid_layer_pattern is not None or args.hybrid_override_pattern is not None:
        # Megatron counts the layers of the pattern.
        needed.remove("num_layers")
    needed += [] if args.train_samples is not None else ["train_iters"]
    return [flag(name) for name in needed if getattr(args, name) is None]


def missing_flag_of_tokenizer(args: argparse.Namespace) -> str | None:
    """The flag without which a job's tokenizer cannot be built, None if it is given or a file of the job may give it."""
    if args.use_checkpoint_args or args.yaml_cfg is not None or getattr(args, "metadata_path", None):
        return None
    needed = (name for name, kinds in _NEEDED_BY_TOKENIZER.items() if args.tokenizer_type in kinds)
    return next((flag(name) for name in needed if getattr(args, name) is None), None)


def check_checkpoint(args: argparse.Namespace, config: PierConfig, ranks_in_group: int) -> str | None:
    """Looks at the checkpoint that a validated job would load, and says what it is; None if there is none.

    Raises:
        PierConfigError: If the job would refuse it, or files of it are damaged.
    """
    takes_newest = config.load_newest_whole and not args.ckpt_step
    if args.load is not None and not takes_newest and (unnamed := names_nothing(Path(args.load))):
        raise PierConfigError(unnamed)
    folder = None if args.load is None else stored_checkpoint(Path(args.load), args.ckpt_step)
    if folder is None:
        return None
    if takes_newest and (found := newest_whole(Path(args.load))):
        folder = stored_checkpoint(Path(args.load), found[0]) or folder
    if refused := refusal(folder):
        raise PierConfigError(refused)
    metadata = versions.require("megatron.core", "dist_checkpointing").load_content_metadata(str(folder)) or {}
    if ENTRY not in metadata:
        return f"{folder}: a stock checkpoint; Pier begins from its weights, without outer momentum"
    for weights_only in ("finetune", "no_load_optim"):
        if getattr(args, weights_only, None):
            # Megatron then reads the weights alone, whoever has saved them.
            return f"{folder}: with {flag(weights_only)}, Pier begins from its weights, without outer momentum"
    saved = Description.from_metadata(metadata[ENTRY])
    if (no := saved.refusal_in_one_launch(config, args.load)) is not None:
        raise PierConfigError(no)
    present = Description.of_run(config, saved.iteration, layout_of(args, ranks_in_group), "cuda")
    changes = saved.check(present, config.override_checkpoint) + features.changes(metadata, args)
    exactly = "up to rounding" if scaled(args) else "exactly"
    resumes = f"and the job resumes {exactly}, if gradient buckets are the same"
    how = f"with changes: {', '.join(changes)}" if changes else resumes
    is_chosen = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    if present.settings["train_iters"] != saved.settings["train_iters"] and not is_chosen:
        how += f"; if that changes the length of its schedules, Megatron asks for {SCHEDULES}"
    return f"{folder}: whole, of iteration {saved.iteration}, by pier_megatron {saved.version}, {how}"


def planned_topology(args: argparse.Namespace, ranks_per_node: int) -> Topology:
    """Where the ranks of a validated job will stand, if the launcher numbers them node by node."""
    ranks_of_run, tensor_parallel = args.world_size * settings_of(args).launches, args.tensor_model_parallel_size
    planned = []
    for rank in range(ranks_of_run):
        node = f"node {rank // ranks_per_node}"
        domain = domain_name(rank, node, args.pier_ranks_per_domain)
        # Megatron numbers tensor-parallel ranks first.
        planned.append(Rank(rank, node, domain, rank * args.pier_groups // ranks_of_run, rank - rank % tensor_parallel))
    return Topology(planned)
