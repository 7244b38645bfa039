"""Asks of every training in a folder whether it runs with Pier, and prints the answers as a page.

``python tools/survey.py FOLDER [--recipes]``: of a checkout of Megatron-LM the functional tests and the example scripts, of
any other folder all launch scripts; each with ``--optimizer pier --pier-groups 2``, twice the ranks and twice the batch; with
``--recipes`` the recipes of an installed Megatron-Bridge too. Nothing trains: a script runs with stand-ins for everything that
it would start, its lines are read as ``pier-megatron doctor`` reads them, and the arguments pass Megatron's parser and checks
and the plugin's. Flags that this Megatron does not know are left out and counted apart: doctor knows them in the checkout of
the fork that has them. ``--words NAME`` prints one of the command lines instead.
"""

import argparse
import collections
import contextlib
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import io
import itertools
import math
import os
import pkgutil
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from launch_lines import SUFFIXES, allocation, launch_lines

from pier_megatron.cpu import emulation
from pier_megatron.errors import PierConfigError
from pier_megatron.megatron_api import versions

_ON_A_NODE = 8
_SCRIPT = re.compile(r"(pre)?train(_\w+)?\.py|finetune_\w+\.py")
_KINDS = {"hybrid": "hybrid", "mamba": "hybrid"}
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
# What a variable holds that a script finds in its cluster.
_OF_TORCHRUN = {"nproc-per-node": "8", "nnodes": "1", "node-rank": "0", "master-addr": "node0", "master-port": "29500"}
# Models of recipes by the beginning of what transformers calls their configuration and their class.
_FAMILIES = (
    ("Qwen3-Next", "Qwen3Next", "Qwen3Next"),
    (r"Qwen3-.*-A\d", "Qwen3Moe", "Qwen3Moe"),
    ("Qwen/Qwen3-", "Qwen3", "Qwen3"),
    ("Qwen/Qwen2", "Qwen2", "Qwen2"),
    ("[Ll]lama", "Llama", "Llama"),
    ("DeepSeek-V2", "DeepseekV2", "DeepseekV2"),
    ("DeepSeek-V3|Kimi-K2-|Moonlight", "DeepseekV3", "DeepseekV3"),
    ("gemma-2", "Gemma2", "Gemma2"),
    ("gemma-3", "Gemma3Text", "Gemma3"),
    ("GLM-4.5", "Glm4Moe", "Glm4Moe"),
    ("gpt-oss", "GptOss", "GptOss"),
    ("OLMoE", "Olmoe", "Olmoe"),
    ("Nemotron", "NemotronH", "NemotronH"),
)


@dataclasses.dataclass
class Line:
    """One command line.

    Attributes:
        arguments: Words after the script; those of the whole line if it cannot be read.
        ranks: Number of ranks that the line starts, None if it does not say it.
        unread: Why the line cannot be read; None if it can.
        queues: Value of ``CUDA_DEVICE_MAX_CONNECTIONS`` that it sets, None for the default.
    """

    arguments: list[str]
    ranks: int | None = None
    unread: str | None = None
    queues: str | None = None


@dataclasses.dataclass
class Answer:
    """What became of one command line.

    Attributes:
        name: File that it is from, below the folder.
        kind: Kind of its model.
        verdict: Column of the table.
        reasons: Messages of the refusal.
    """

    name: str
    kind: str
    verdict: str
    reasons: Sequence[str] = ()


def main() -> int:
    """Prints the page; returns 1 if something breaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes", action="store_true", help="the recipes of the installed Megatron-Bridge too")
    parser.add_argument("--words", metavar="NAME", help="print one of the command lines instead")
    options = parser.parse_args()
    found = dict(command_lines(options.folder.resolve()))
    if options.words:
        print(" ".join(found[options.words].arguments))
        return 0
    warnings.filterwarnings("ignore")
    emulation.install()
    # Its scripts log to it where they come from.
    sys.modules.setdefault("wandb", importlib.util.module_from_spec(importlib.machinery.ModuleSpec("wandb", None)))
    answers = [asked(name, line) for name, line in _distinct(found).items()]
    if options.recipes:
        answers += recipes()
    print(page(answers))
    return int(any(answer.verdict == "broken" for answer in answers))


def command_lines(folder: Path) -> Iterator[tuple[str, Line]]:
    """Yields each training, by the file that it is from."""
    cases = sorted(folder.glob("tests/functional_tests/test_cases/*/*/model_config.yaml"))
    for path in cases:
        case = yaml.safe_load(path.read_text())
        settings = case.get("MODEL_ARGS") or {}
        queues = str((case.get("ENV_VARS") or {}).get("CUDA_DEVICE_MAX_CONNECTIONS", "")) or None
        # NeMo's have arguments of their own.
        if case.get("MODE", "pretraining") == "pretraining" and re.search(r"--num-layers|--hybrid", str(settings)):
            yield str(path.parent.relative_to(path.parents[2])), Line(list(_flags(settings)), queues=queues)
    for path in sorted((folder / "examples" if cases else folder).rglob("*")):
        if path.suffix in SUFFIXES and path.is_file() and _SCRIPT.search(path.read_text(errors="replace")):
            for number, words in enumerate(launch_lines(path)):
                name = f"{path.relative_to(folder)}{f' ({number + 1})' if number else ''}"
                with contextlib.chdir(path.parent):
                    line = _read(words, allocation(path.read_text(errors="replace")))
                if line is not None:
                    yield name, line


def _filled(words: Sequence[str]) -> Iterator[str]:
    """Words with stand-ins where a variable of torchrun's options stands empty, or holds an argument that is no number."""
    previous = ""
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("/data/") and _OF_TORCHRUN.get(previous):
            yield _OF_TORCHRUN[previous]
        else:
            yield word
        previous = word.lstrip("-").replace("_", "-")
        if word.startswith("--") and previous in _OF_TORCHRUN and (after.startswith("--") or after.endswith(".py")):
            yield _OF_TORCHRUN[previous]


def _read(words: list[str], variables: Mapping[str, str]) -> Line | None:
    """The training in a launch line, None without one; ``variables`` are those of its allocation."""
    from pier_megatron.commands.launch_command import LaunchCommand

    text = shlex.join(words)
    if not (re.search(r"--num-layers|--hybrid", text) and _SCRIPT.search(text)):
        return None
    queues = next(iter(re.findall(r"CUDA_DEVICE_MAX_CONNECTIONS=(\w+)", text)), None)
    os.environ |= variables
    try:
        command = LaunchCommand.parse(list(_filled(words)))
    except PierConfigError as error:
        return Line(words, None, " ".join(map(str, error.args)), queues)
    is_training = _SCRIPT.fullmatch(Path(command.script).name)
    return Line([word for word in command.arguments if word], command.ranks, None, queues) if is_training else None


def _flags(settings: Mapping[str, object]) -> Iterator[str]:
    for flag, value in settings.items():
        if value is False or value is None:
            continue
        yield flag
        if value is not True:
            # Several words may be one text, in brackets too.
            words = value if isinstance(value, list) else str(value).strip("[]").split() if flag in _SEVERAL else [value]
            yield from (str(word).replace("${REPEAT}", "1") for word in words)


_SEVERAL = (
    "--rampup-batch-size",
    "--data-path",
    "--cuda-graph-scope",
    "--cuda-graph-modules",
    "--recompute-modules",
    "--hierarchical-context-parallel-sizes",
    "--offload-modules",
)


def _distinct(found: Mapping[str, Line]) -> dict[str, Line]:
    """Drops command lines that differ from another one only in names of files."""
    seen: dict[tuple[str, ...], str] = {}
    for name, line in found.items():
        seen.setdefault(tuple(re.sub(r".*[/$].*", "PATH", word) for word in line.arguments), name)
    return {name: found[name] for name in seen.values()}


def asked(name: str, line: Line) -> Answer:
    """Asks stock Megatron and then the plugin about a command line."""
    kind = next((kind for part, kind in _KINDS.items() if part in name), "GPT and MoE")
    if any(part in name for part in ("bert", "t5", "mimo", "multimodal", "retro", "vision")):
        kind = "other"
    if line.unread is not None:
        # What a script takes from its user or its cluster stands empty, or is what the survey gives instead.
        is_empty = re.search(r"expected one argument|invalid int value|give the number|unrecognized", line.unread)
        return Answer(name, kind, "incomplete" if is_empty else "not read", [line.unread])
    try:
        words = _completed(line.arguments)
        doubled = _with(words, "--global-batch-size", lambda size: str(2 * int(size)) if size.isdigit() else size)
        own = [line.ranks] if line.ranks and line.ranks % _least_ranks(words, 1) == 0 else []
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = line.queues or ("8" if "fsdp" in " ".join(doubled) else "1")
        # A script may count its ranks from hosts that are not there.
        for ranks in (2 * each for each in (*own, _least_ranks(words))):
            problems, unknown = _problems(doubled, ranks)
            if not problems:
                break
        if problems:
            return Answer(name, kind, "refused by stock", problems)
        problems, _ = _problems([*_with_pier(doubled), "--pier-groups", "2"], ranks)
    except Exception as error:
        return Answer(name, kind, "broken", [f"{type(error).__name__}: {error}"])
    if problems:
        return Answer(name, kind, "refused", problems)
    return Answer(name, kind, "flags of a fork" if unknown else "accepted", unknown)


def _completed(words: list[str]) -> list[str]:
    """A line with stand-ins for what its script wants of its user or its cluster: a path, and the number 8."""
    from pier_megatron.commands.planned_job import parsed_arguments

    for _ in range(len(words)):
        try:
            parsed_arguments(_ON_A_NODE, _ON_A_NODE, ["pretrain_gpt.py", *words])
        except PierConfigError as error:
            wrong = re.search(r"argument (--[\w-]+).*: (expected .*argument|invalid \w+ value: '(.*)')", str(error))
            if wrong and wrong[3] is None:
                place = max((place for place, word in enumerate(words) if word == wrong[1]), default=len(words))
                words = [*words[: place + 1], "/data/1", *words[place + 1 :]]
                continue
            if wrong and wrong[3].startswith("/data/"):
                words = ["8" if (words[place - 1], word) == (wrong[1], wrong[3]) else word for place, word in enumerate(words)]
                continue
        break
    return words


def _problems(words: list[str], ranks: int) -> tuple[list[str], list[str]]:
    """What is refused of a line, and the flags that this Megatron does not know."""
    from pier_megatron.commands import planned_job
    from pier_megatron.integration.arguments import unknown_words

    unknown, args, on_a_node = list[str](), None, min(ranks, _ON_A_NODE)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            args = planned_job.parsed_arguments(ranks, on_a_node, ["pretrain_gpt.py", *words])
            unknown = [word.partition("=")[0] for word in unknown_words()[0] if word.startswith("--")]
            if missing := planned_job.missing_flags(args):
                return [f"{', '.join(missing)}: not given, and there is no default"], unknown
            planned_job.validate(args, on_a_node)
            planned_job.configuration(args, on_a_node)
        except PierConfigError as error:
            # What is not installed here may be where the line is from.
            found = list(map(str, error.args))
            return [each for each in found if args is None or not planned_job.may_start_elsewhere(args, each)], unknown
    return [], unknown


def _least_ranks(words: Sequence[str], on_a_node: int = _ON_A_NODE) -> int:
    given = (_value(words, f"--{size.replace('_', '-')}") for size in _SIZES)
    return _ranks(*(int(size) if size and size.isdigit() else None for size in given), on_a_node=on_a_node)


def _ranks(
    tensor: int | None,
    stages: int | None,
    context: int | None,
    experts: int | None,
    of_expert: int | None,
    on_a_node: int = _ON_A_NODE,
) -> int:
    tensor, stages = tensor or 1, stages or 1
    return math.lcm(on_a_node, tensor * stages * (context or 1), (of_expert or tensor) * (experts or 1) * stages)


def _value(words: Sequence[str], flag: str) -> str | None:
    return next((words[place + 1] for place, word in enumerate(words[:-1]) if word == flag), None)


def _with(words: list[str], flag: str, change: collections.abc.Callable[[str], str]) -> list[str]:
    return [change(word) if place and words[place - 1] == flag else word for place, word in enumerate(words)]


def _with_pier(words: list[str]) -> list[str]:
    chosen = _value(words, "--optimizer")
    place = words.index("--optimizer") if chosen else len(words)
    inner = ["--pier-inner-optimizer", "muon"] if chosen and "muon" in chosen else []
    any_release = [] if versions.release() in versions.SUPPORTED else ["--pier-try-any-megatron"]
    return [*words[:place], *words[place + 2 :], "--optimizer", "pier", *inner, *any_release]


def recipes() -> list[Answer]:
    """Asks about the pretraining recipes of the installed Megatron-Bridge."""
    from pier_megatron.commands.doctor import recipe
    from pier_megatron.commands.findings import Findings

    if importlib.util.find_spec("transformer_engine") is None:
        importlib.import_module("pier_megatron.cpu.bridge").install()
    _answer_for_the_hub()
    package = importlib.import_module("megatron.bridge.recipes")
    found: dict[str, str] = {}
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name in dir(importlib.import_module(module.name)):
            if name.endswith("_pretrain_config"):
                found.setdefault(name, module.name)
    return [_asked_of_recipe(module, name, recipe.examine, Findings) for name, module in sorted(found.items())]


def _answer_for_the_hub() -> None:
    """Gives recipes the configurations of models that they ask a hub for: those that transformers has for the family.

    Numbers of layers, heads and experts are then the family's, not the model's.
    """
    transformers = importlib.import_module("transformers")
    ask = transformers.AutoConfig.from_pretrained

    def answer(name: str, *args: object, **kwargs: object) -> object:
        for pattern, config, model in _FAMILIES:
            if re.search(pattern, name):
                return getattr(transformers, f"{config}Config")(architectures=[f"{model}ForCausalLM"])
        return ask(name, *args, **kwargs)

    transformers.AutoConfig.from_pretrained = answer


def _asked_of_recipe(module: str, name: str, examine: collections.abc.Callable[..., None], findings: type) -> Answer:
    surveyed = sys.modules.setdefault("surveyed_recipe", type(sys)("surveyed_recipe"))
    found = findings()
    try:
        config = getattr(importlib.import_module(module), name)()
        config.train.global_batch_size *= 2
        surveyed.recipe = lambda: importlib.import_module("pier_megatron.bridge").with_pier(  # type: ignore[attr-defined]
            config, sync_interval=50, groups=2
        )
        nodes = 2 * _ranks(*(getattr(config.model, size, None) for size in _SIZES)) // _ON_A_NODE
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            examine("surveyed_recipe:recipe", nodes, _ON_A_NODE, found)
    except PierConfigError as error:
        # doctor names the recipe that failed Megatron-Bridge's own checks.
        verdict = "refused by stock" if str(error).startswith("--recipe") else "refused"
        return Answer(name, "recipe", verdict, [str(message) for message in error.args])
    except Exception as error:
        verdict = "not known without the network" if re.search(r"huggingface\.co|config\.json", str(error)) else "broken"
        return Answer(name, "recipe", verdict, [f"{type(error).__name__}: {error}"])
    return Answer(name, "recipe", "refused" if found.errors else "accepted", found.errors)


def page(answers: Sequence[Answer]) -> str:
    """Writes the page."""
    kinds = list(dict.fromkeys(answer.kind for answer in answers))
    verdicts = ("accepted", "flags of a fork", "refused", "refused by stock", "incomplete", "not read", "broken")
    verdicts += ("not known without the network",)
    count = collections.Counter((answer.kind, answer.verdict) for answer in answers)
    lines = [f"| kind | {' | '.join(verdicts)} |", "|---" * (len(verdicts) + 1) + "|"]
    lines += [f"| {kind} | {' | '.join(str(count[kind, verdict]) for verdict in verdicts)} |" for kind in kinds]
    for verdict in ("refused", "broken", "not read", "refused by stock", "flags of a fork", "incomplete"):
        reasons: dict[str, list[Answer]] = collections.defaultdict(list)
        for answer in (answer for answer in answers if answer.verdict == verdict):
            for reason in dict.fromkeys(_short(message) for message in answer.reasons):
                reasons[reason].append(answer)
        if reasons:
            lines += ["", f"| {verdict} because of | lines (alone) | for example |", "|---|---|---|"]
            for reason, of in sorted(reasons.items(), key=lambda item: -len(item[1])):
                alone = sum(len({_short(message) for message in answer.reasons}) == 1 for answer in of)
                lines.append(f"| {reason} | {len(of)} ({alone}) | {of[0].name} |")
    return "\n".join(lines)


def _short(message: str) -> str:
    """The beginning of a message, without its values."""
    return re.sub(r"\s+", " ", message).replace("|", "/")[:110]


if __name__ == "__main__":
    sys.exit(main())
