"""``pier-megatron experts plan``: from a description to jobs, each with an argument file and launch scripts."""

import argparse
import dataclasses
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pier_megatron.commands import job_arguments
from pier_megatron.commands.findings import Findings
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.commands.plan.cluster import CLUSTERS
from pier_megatron.commands.plan.fit import memory_of
from pier_megatron.commands.plan.model import Job, predict
from pier_megatron.commands.script_sources import ScriptSources
from pier_megatron.cpu.preparations import missing_cpu_flags
from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.experts import seeds
from pier_megatron.experiments.experts.budget import BudgetedExpert, shares
from pier_megatron.experiments.experts.ensemble import DENSE, Ensemble, Machines
from pier_megatron.experiments.experts.planned import PLAN, Expert, Model, Plan
from pier_megatron.experiments.experts.scoring_arguments import scoring_arguments
from pier_megatron.integration.arguments import config_from_args
from pier_megatron.megatron_api.args import uses_pier

# One script for a node and for Slurm, so that what was tried on one is what runs on many.
_TRAIN = Path(__file__).with_name("train.sh")

# Saved so often, unless the description says how often, that a failure costs a tenth of a training.
_SAVES = 10

_ELSEWHERE = "Choose another folder, or remove this one"


def run(options: argparse.Namespace) -> int:
    """Plans; returns the exit status."""
    plan = make(Ensemble.read(options.file), options.output.resolve())
    print("\n".join(table(plan)))
    script = shlex.quote(str(plan.folder / "train.sh"))
    print(f"Written to {plan.folder}. Next: bash {script}, or sbatch {script}")
    return 0


def make(ensemble: Ensemble, folder: Path) -> Plan:
    """Writes a plan: one folder per expert with its arguments, and the script that trains them.

    Args:
        ensemble: What was described.
        folder: Folder to write to.

    Raises:
        PierConfigError: If Megatron refuses the arguments of a job, or another plan has been trained in the folder.
    """
    validated = {name: _validated(ensemble, name, ("--train-iters", str(ensemble.iterations))) for name in ensemble.sizes}
    operations = {name: Job.of(args).flops for name, args in validated.items()}
    of_seeds = _operations_of_seeds(ensemble, validated)
    models = {
        name: Model(
            (*ensemble.arguments, *size.arguments),
            None if size.seed is None else str(size.seed),
            validated[name].tensor_model_parallel_size * validated[name].pipeline_model_parallel_size,
            # The last micro-batch may be smaller, which a pipeline does not take.
            validated[name].micro_batch_size if validated[name].pipeline_model_parallel_size == 1 else 1,
        )
        for name, size in ensemble.sizes.items()
    }
    for name, model in models.items():
        check_scoring(ensemble, name, model)
    experts: list[Expert] = []
    arguments_of: dict[str, tuple[str, ...]] = {}
    for variant in ensemble.variants:
        for share in shares(ensemble, variant, operations, of_seeds):
            name = f"{variant}/{share.name}"
            arguments_of[name] = _arguments(ensemble, share, folder / name)
            args = _validated(ensemble, share.size, arguments_of[name])
            memory, hours = _predicted(args, ensemble.machines.cluster)
            total = operations[share.size] * share.iterations
            experts.append(Expert(name, share.domains, share.size, share.iterations, total, memory, hours))
    plan = Plan(
        folder,
        str(ensemble.script),
        ensemble.device,
        ensemble.machines.gpus_per_node,
        ensemble.homogeneous,
        {name: str(prefix) for name, prefix in ensemble.validation.items()},
        tuple(ensemble.domains),
        models,
        tuple(experts),
        of_seeds,
    )
    check_nothing_is_lost(plan)
    for expert in plan.experts:
        (folder / expert.name).mkdir(parents=True, exist_ok=True)
        words = (*models[expert.size].arguments, *arguments_of[expert.name])
        (folder / expert.name / "arguments.txt").write_text("\n".join(words) + "\n")
    write_script(plan, ensemble.machines)
    plan.write()
    return plan


def _validated(ensemble: Ensemble, size: str, more: Iterable[str]) -> argparse.Namespace:
    """Arguments of a job as Megatron understands them."""
    machines = ensemble.machines
    arguments = (*ensemble.arguments, *ensemble.sizes[size].arguments, *more)
    return _understood(ensemble, f"experts of size {size}", machines.nodes_per_expert, machines.ranks_on_node, arguments)


def _operations_of_seeds(ensemble: Ensemble, validated: Mapping[str, argparse.Namespace]) -> dict[str, float]:
    """What the seed models have cost, by size; without those that are not trained yet or are of a kind that cannot be read."""
    found = {}
    for name, size in ensemble.sizes.items():
        try:
            found[name] = 0.0 if size.seed is None else seeds.operations(size.seed, validated[name])
        except PierConfigError as error:
            if ensemble.count_seeds:
                raise PierConfigError(f"count-seeds: what the seed of size {name} has cost is not known: {error}") from error
    return found


def check_scoring(ensemble: Ensemble, size: str, model: Model) -> None:
    """Refuses experts that could be trained, but not scored."""
    scored = list(map(str, ensemble.validation.values()))
    arguments = scoring_arguments(model.arguments, model.micro_batch, "checkpoints", scored)
    _understood(ensemble, f"scoring experts of size {size}", 1, model.ranks, arguments)


def _understood(ensemble: Ensemble, what: str, nodes: int, ranks_per_node: int, arguments: Sequence[str]) -> argparse.Namespace:
    words = (*arguments, *(missing_cpu_flags(arguments) if ensemble.device == "cpu" else ()))
    command, findings = LaunchCommand(nodes, ranks_per_node, str(ensemble.script), words), Findings()
    args = job_arguments.read(command, ScriptSources.of(command), findings)
    if args is None or findings.errors:
        raise PierConfigError(*(f"{what}: {wrong}" for wrong in findings.errors or findings.warnings))
    return args


def _arguments(ensemble: Ensemble, share: BudgetedExpert, folder: Path) -> tuple[str, ...]:
    """Megatron's arguments for the schedule, the data and the checkpoints of one expert."""
    size = ensemble.sizes[share.size]
    domains = [ensemble.domains[name] for name in share.domains]
    # A blend of several datasets says how much of each.
    weight = ("1",) if len(domains) > 1 else ()
    train = [word for domain in domains for word in (*weight, str(domain.train))]
    validation = [word for domain in domains for word in (*weight, str(domain.validation))]
    words = ["--train-iters", str(share.iterations), "--train-data-path", *train, "--valid-data-path", *validation]
    words += ["--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")]
    if "--save-interval" not in (*ensemble.arguments, *size.arguments):
        words += ["--save-interval", str(math.ceil(share.iterations / _SAVES))]
    if size.seed is not None:
        # Megatron reads it only if --load finds no checkpoint, so a second start resumes.
        words += ["--pretrained-checkpoint", str(size.seed)]
    return tuple(words)


def _predicted(args: argparse.Namespace, cluster: str | None) -> tuple[float, float | None]:
    """Memory of a rank in bytes, and hours of the training, by the planner."""
    config = config_from_args(args) if uses_pier(args) else None
    memory = sum(memory_of(args, config).values())
    if cluster is None:
        return memory, None
    prediction = predict(Job.of(args), CLUSTERS[cluster])
    iteration = prediction.mean_iteration(config) if config else prediction.synchronous
    return memory, iteration * args.train_iters / 3600


def check_nothing_is_lost(plan: Plan) -> None:
    """Refuses to put another plan over one that has been trained, unless all that is trained is as it was."""
    if not (plan.folder / PLAN).exists():
        return
    try:
        before = Plan.read(plan.folder, f"{_ELSEWHERE}.")
    except PierConfigError:
        if any(plan.folder.glob("*/*/checkpoints")):
            raise
        return
    trained = [expert for expert in before.experts if before.checkpoints(expert.name).exists()]
    others = dataclasses.replace(before, experts=plan.experts)
    if not trained or (others == plan and all(expert in plan.experts for expert in trained)):
        return
    raise PierConfigError(
        f"--output {plan.folder}: another plan has been trained there. {_ELSEWHERE}, or only add variants at the end of the "
        "list."
    )


def write_script(plan: Plan, machines: Machines) -> None:
    """Writes ``train.sh``, which trains the experts: on this node, or as an array of Slurm's."""
    nodes, ranks = machines.nodes_per_expert, machines.ranks_on_node
    takes = [f"#SBATCH --gpus-per-node {ranks}"] if plan.device == "cuda" else []
    takes += ["#SBATCH --exclusive"] if ranks == machines.gpus_per_node else []
    head = [
        "#!/usr/bin/env bash",
        "# Trains experts. Those that are trained are left out, those that were begun resume from their last save.",
        "#   sbatch train.sh       all, as an array; account, partition and time by SBATCH_ACCOUNT and the like",
        "#   bash train.sh         all, on this node",
        "#   bash train.sh 0 3     some, on this node",
        f"#SBATCH --job-name experts --array 0-{len(plan.experts) - 1} --requeue",
        f"#SBATCH --nodes {nodes} --ntasks-per-node 1",
        *takes,
        f"#SBATCH --output {shlex.quote(str(plan.folder / 'train-%A_%a.log'))} --open-mode append",
        "set -uo pipefail",
        f"folder={shlex.quote(str(plan.folder))}",
        f"names=({' '.join(expert.name for expert in plan.experts)})",
        f"iterations=({' '.join(str(expert.iterations) for expert in plan.experts)})",
        f"nodes={nodes} ranks={ranks} devices={','.join(map(str, range(machines.gpus_per_node)))} device={plan.device}",
        f"python={shlex.quote(sys.executable)} script={shlex.quote(plan.script)}",
        "export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}",
    ]
    file = plan.folder / "train.sh"
    new = file.with_suffix(".new")
    new.write_text("\n".join((*head, _TRAIN.read_text())))
    new.chmod(0o755)
    # One that runs is read on from its file.
    new.replace(file)


def table(plan: Plan) -> list[str]:
    """A plan for people: one line per expert, one per variant."""
    lines = [f"{'expert':28} {'size':>10} {'iterations':>10} {'operations':>11} {'memory/rank':>12} {'hours':>8}"]
    for variant, members in plan.by_variant.items():
        for expert in members:
            hours = "-" if expert.hours is None else f"{expert.hours:.2f}"
            lines.append(
                f"{expert.name:28} {expert.size:>10} {expert.iterations:10} {expert.operations:11.3e} "
                f"{expert.memory / 1e9:9.2f} GB {hours:>8}"
            )
        what = "one model" if variant == DENSE else f"{len(members)} experts"
        total, of_seeds = plan.operations(variant)
        lines.append(f"{f'{variant} together, {what}':50} {total:11.3e}")
        if any(plan.models[expert.size].seed for expert in members):
            sizes = ", ".join(dict.fromkeys(expert.size for expert in members))
            with_seeds = "unknown: no checkpoint that can be read" if of_seeds is None else f"{total + of_seeds:11.3e}"
            lines.append(f"{f'  and its seeds, {sizes}':50} {with_seeds}")
    return lines
