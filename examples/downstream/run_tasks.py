"""Runs the paper's thirteen downstream tasks on a model, with lm-evaluation-harness.

python examples/downstream/run_tasks.py --model runs/xl/checkpoint --tokenizer gpt2 --tasks piqa winogrande --output scores.json
"""

import argparse
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from export_gpt2 import add_tokenizer_argument, export, name_or_folder, require_packages
from script import main_of

from pier_megatron.commands.trust import TRUSTED_ONLY
from pier_megatron.errors import PierConfigError
from pier_megatron.values import existing_folder, file_to_write, whole

PAPER = {
    "boolq": 0.628,
    "cb": 0.125,
    "copa": 0.730,
    "multirc": 0.539,
    "record": 0.855,
    "rte": 0.549,
    "wic": 0.498,
    "wsc": 0.375,
    "lambada_openai": 0.530,
    "race": 0.351,
    "mathqa": 0.238,
    "piqa": 0.691,
    "winogrande": 0.581,
}
"""Zero-shot results of GPT-2 XL trained with Pier (arXiv 2511.17849), by the harness's names of the tasks."""

# The metric that stands for a task: F1 for ReCoRD, as in the paper, and accuracy elsewhere.
_METRICS = {"record": "f1"}


@dataclasses.dataclass(frozen=True)
class Score:
    """What a model reached in a task.

    Attributes:
        metric: The harness's name of what was measured.
        value: In the metric's unit; a share of 1 for accuracy and F1.
        stderr: Its standard error, or None if the harness gives none.
    """

    metric: str
    value: float
    stderr: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the script's flags."""
    parser.epilog = TRUSTED_ONLY
    parser.add_argument(
        "--model",
        type=name_or_folder,
        required=True,
        metavar="DIR_OR_NAME",
        help="Hugging Face model, such as what export_gpt2.py writes, or a checkpoint that it accepts",
    )
    add_tokenizer_argument(parser)
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that comes with the model, as a mixture of experts needs; read it before",
    )
    parser.add_argument(
        "--tasks", nargs="+", default=list(PAPER), metavar="TASK", help="tasks of the harness (the paper's thirteen)"
    )
    parser.add_argument(
        "--include-path", type=existing_folder, metavar="DIR", help="folder with further tasks in the harness's YAML"
    )
    parser.add_argument(
        "--batch-size",
        type=_batch_size,
        default="8",
        help="number of sequences at a time, or auto for as many as fit a GPU (%(default)s)",
    )
    parser.add_argument("--device", type=_device, help="device: cuda, cuda:1 or cpu (a GPU if there is one)")
    parser.add_argument(
        "--output", type=file_to_write, default=Path("evaluation.json"), metavar="FILE", help="file for results (%(default)s)"
    )


def _batch_size(text: str) -> str:
    return text if text == "auto" else str(whole(1, why="or auto")(text))


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", text):
        raise argparse.ArgumentTypeError(f"{text or '(empty)'}: must be cpu, cuda, or cuda:N with the number of a GPU")
    return text


def run(options: argparse.Namespace) -> int:
    """Evaluates; returns the exit status."""
    require_packages("transformers", "lm_eval", "accelerate")
    results = evaluate(options)
    scores = {task: score(task, measured) for task, measured in results["results"].items()}
    mean = sum(found.value for found in scores.values()) / len(scores)
    summary = {
        "model": options.model,
        "mean": mean,
        "tasks": {task: dataclasses.asdict(found) for task, found in scores.items()},
        "harness": {name: results[name] for name in ("results", "versions", "n-shot", "config")},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(summary, indent=2, default=str) + "\n")
    print("\n".join([*table(scores, mean), str(options.output)]))
    return 0


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the tasks.

    Args:
        options: Options, see :func:`add_arguments`.

    Returns:
        What the harness returns.

    Raises:
        PierConfigError: If a task is not known, the model cannot be loaded, or it is a checkpoint that cannot be exported.
        PierConfigError: See :func:`export_gpt2.export`.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from transformers import AutoConfig

    manager = TaskManager(include_path=options.include_path)
    unknown = sorted(set(options.tasks) - set(manager.all_subtasks))
    if unknown:
        raise PierConfigError(
            f"--tasks {' '.join(unknown)}: not among the {len(manager.all_subtasks):,} single tasks of the harness, which "
            "`lm-eval ls subtasks` lists. Tasks of your own are found with --include-path."
        )
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if Path(model).is_dir() and not (Path(model) / "config.json").exists():
            model = str(Path(folder) / "model")
            print("\n".join(export(Path(options.model), Path(model), options.tokenizer)), flush=True)
        if Path(model).is_dir() and not (options.tokenizer or (Path(model) / "tokenizer_config.json").exists()):
            raise PierConfigError(
                f"--model {options.model} has no tokenizer with it: name the one it was trained with by --tokenizer."
            )
        try:
            AutoConfig.from_pretrained(model, trust_remote_code=options.trust_remote_code)
        except (OSError, ValueError) as error:
            raise PierConfigError(f"--model {options.model} cannot be loaded: {error}") from error
        arguments = {"pretrained": model, "trust_remote_code": options.trust_remote_code}
        arguments |= {"tokenizer": options.tokenizer} if options.tokenizer else {}
        results: dict[str, Any] = simple_evaluate(
            "hf",
            model_args=arguments,
            tasks=options.tasks,
            num_fewshot=0,
            batch_size=options.batch_size,
            device=options.device,
            log_samples=False,
            task_manager=manager,
        )
    return results


def score(task: str, measured: Mapping[str, Any]) -> Score:
    """Picks the metric that stands for a task.

    Args:
        task: The harness's name.
        measured: Values by metric and filter, such as ``acc,none``, as the harness reports them.
    """
    values = {name.partition(",")[0]: value for name, value in measured.items() if "," in name}
    metric = _METRICS.get(task, "acc")
    if metric not in values:
        metric = next(name for name in values if not name.endswith("_stderr"))
    stderr = values.get(f"{metric}_stderr")
    return Score(metric, values[metric], stderr if isinstance(stderr, float) else None)


def table(scores: Mapping[str, Score], mean: float) -> Sequence[str]:
    """Lists the scores and the paper's."""
    rows = [f"{'task, zero-shot':20} {'metric':10} {'score':>16} {'XL, Pier':>10}"]
    for task, found in scores.items():
        error = "" if found.stderr is None else f" +- {found.stderr:.4f}"
        paper = f"{PAPER[task]:.3f}" if task in PAPER else ""
        rows.append(f"{task:20} {found.metric:10} {f'{found.value:.4f}{error}':>16} {paper:>10}".rstrip())
    published = f"{sum(PAPER.values()) / len(PAPER):.4f}" if scores.keys() == PAPER.keys() else ""
    rows.append(f"{'mean':20} {'':10} {f'{mean:.4f}':>16} {published:>10}".rstrip())
    return [*rows, "XL, Pier: GPT-2 XL trained with Pier, published in arXiv 2511.17849"]


main = main_of(__doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
