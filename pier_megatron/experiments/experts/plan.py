"""``pier-megatron experts plan``: from a description to jobs, each with an argument file and launch scripts."""

import argparse
import dataclasses
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.commands.plan import ways
from pier_megatron.commands.plan.cluster import CLUSTERS
from pier_megatron.commands.plan.model import predict
from pier_megatron.commands.plan.sizes import outer_memory, sizes_of
from pier_megatron.cpu.preparations import missing_cpu_flags
from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.experts import seeds
from pier_megatron.experiments.experts.budget import BudgetedExpert, shares
from pier_megatron.experiments.experts.ensemble import DENSE, Ensemble, Machines
from pier_megatron.experiments.experts.planned import PLAN, Expert, Model, Plan
from pier_megatron.experiments.experts.scoring_arguments import scoring_arguments

# Saved so often, unless the description says how often, that a failure costs a tenth of a training.
_SAVES = 10


def run(options: argparse.Namespace) -> int:
    """Plans; returns the exit status."""
    plan = make(Ensemble.read(options.file), options.output.resolve())
    print("\n".join(table(plan)))
    print(f"Written to {plan.folder}. Next: pier-megatron experts train {options.output}")
    return 0


def make(ensemble: Ensemble, folder: Path) -> Plan:
    """Writes a plan: one folder per expert with its arguments and launch scripts.

    Args:
        ensemble: What was described.
        folder: Folder to write to.

    Raises:
        PierConfigError: If Megatron refuses the arguments of a job, or another plan has been trained in the folder.
    """
    validated = {name: _validated(ensemble, name, ("--train-iters", str(ensemble.iterations))) for name in ensemble.sizes}
    operations = {name: sizes_of(args).flops for name, args in validated.items()}
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
            place = places_on_nodes(ensemble.machines, len(experts))
            total = operations[share.size] * share.iterations
            experts.append(Expert(name, share.domains, share.size, share.iterations, total, *place, memory, hours))
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
        write_scripts(plan, expert, arguments_of[expert.name])
    plan.write()
    return plan


def _validated(ensemble: Ensemble, size: str, more: Iterable[str]) -> argparse.Namespace:
    """Arguments of a job as Megatron understands them."""
    machines = ensemble.machines
    on_node = min(machines.ranks_per_expert, machines.gpus_per_node)
    arguments = (*ensemble.arguments, *ensemble.sizes[size].arguments, *more)
    return _understood(ensemble, f"experts of size {size}", machines.ranks_per_expert // on_node, on_node, arguments)


def _operations_of_seeds(ensemble: Ensemble, validated: Mapping[str, argparse.Namespace]) -> dict[str, float]:
    """What the seed models have cost, by size; without those that are not trained yet or are of a kind that cannot be read."""
    found = {}
    for name, size in ensemble.sizes.items():
        try:
            found[name] = 0.0 if size.seed is None else seeds.operations(size.seed, validated[name])
        except PierConfigError as error:
            if ensemble.counts_seeds:
                raise PierConfigError(f"count-seeds: what the seed of size {name} has cost is not known: {error}") from error
    return found


def check_scoring(ensemble: Ensemble, size: str, model: Model) -> None:
    """Refuses experts that could be trained, but not scored."""
    arguments = scoring_arguments(
        model.arguments, model.micro_batch, "checkpoints", list(map(str, ensemble.validation.values()))
    )
    _understood(ensemble, f"scoring experts of size {size}", 1, model.ranks, arguments)


def _understood(ensemble: Ensemble, what: str, nodes: int, ranks_per_node: int, arguments: Sequence[str]) -> argparse.Namespace:
    if ensemble.device == "cpu":
        arguments = (*arguments, *missing_cpu_flags(arguments))
    try:
        return LaunchCommand(nodes, ranks_per_node, str(ensemble.script), tuple(arguments)).validated_arguments()
    except PierConfigError as error:
        raise PierConfigError(f"{what}: {error}") from error


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
    from pier_megatron.commands import planned_sizes
    from pier_megatron.integration.arguments import config_from_args
    from pier_megatron.megatron_api.args import uses_pier

    job = sizes_of(args)
    config = config_from_args(args) if uses_pier(args) else None
    memory = planned_sizes.memory(args) | (outer_memory(args, config) if config else {})
    if cluster is None:
        return sum(memory.values()), None
    prediction = predict(job, CLUSTERS[cluster])
    iteration = prediction.mean_iteration(ways.of_job(config)) if config else prediction.synchronous
    return sum(memory.values()), iteration * args.train_iters / 3600


def places_on_nodes(machines: Machines, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Devices and nodes of a job: jobs fill the machines in order, then start again at the first rank."""
    ranks, node = machines.ranks_per_expert, machines.gpus_per_node
    first = number % (machines.nodes * node // ranks) * ranks
    if ranks >= node:
        return tuple(range(node)), tuple(range(first // node, (first + ranks) // node))
    return tuple(range(first % node, first % node + ranks)), (first // node,)


def check_nothing_is_lost(plan: Plan) -> None:
    """Refuses to put another plan over one that has been trained, unless all that is trained is as it was."""
    if not (plan.folder / PLAN).exists():
        return
    before = Plan.read(plan.folder)
    trained = [expert for expert in before.experts if before.checkpoints(expert.name).exists()]
    others = dataclasses.replace(before, experts=plan.experts)
    if not trained or (others == plan and all(expert in plan.experts for expert in trained)):
        return
    raise PierConfigError(
        f"--output {plan.folder}: another plan has been trained there. Choose another folder, remove this one, or only add "
        "variants at the end of the list."
    )


def write_scripts(plan: Plan, expert: Expert, arguments: Sequence[str]) -> None:
    """Writes what starts an expert's training: its arguments, a script for one node, and one for Slurm."""
    folder = plan.folder / expert.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arguments.txt").write_text("\n".join((*plan.models[expert.size].arguments, *arguments)) + "\n")
    head = f"# Expert {expert.name}: {expert.iterations} iterations; started again, it resumes from its last checkpoint."
    common = ["set -euo pipefail", f"mapfile -t arguments < {shlex.quote(str(folder / 'arguments.txt'))}"]
    common += ["export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"]
    script = f'-m pier_megatron --device {plan.device} {shlex.quote(plan.script)} "${{arguments[@]}}"'
    python, devices = shlex.quote(sys.executable), len(expert.devices)
    planned = ",".join(map(str, expert.devices))
    # Whoever starts it may show it others.
    visible = [f"export CUDA_VISIBLE_DEVICES=${{CUDA_VISIBLE_DEVICES-{planned}}}"] if plan.device == "cuda" else []
    here = f"exec {python} -m torch.distributed.run --standalone --nproc-per-node {devices} {script}"
    if len(expert.nodes) == 1:
        _write(folder / "launch.sh", ["#!/usr/bin/env bash", head, *common, *visible, here])
    takes = [f"#SBATCH --gpus-per-node {devices}"] if plan.device == "cuda" else []
    takes += ["#SBATCH --exclusive"] if devices == plan.gpus_per_node else []
    log, whole_name = shlex.quote(str(folder / "log.txt")), shlex.quote(str(folder))
    _write(
        folder / "launch.slurm",
        [
            *("#!/usr/bin/env bash", head),
            # Jobs of one name wait for each other: submitted twice, the second resumes where the first one ended. No other
            # expert has this path as its name.
            *(f"#SBATCH --job-name {whole_name}", "#SBATCH --dependency singleton"),
            *(f"#SBATCH --nodes {len(expert.nodes)}", "#SBATCH --ntasks-per-node 1", *takes),
            *(f"#SBATCH --output {log}", "#SBATCH --open-mode append", "#SBATCH --requeue"),
            *common,
            'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "export MASTER_ADDR=${hosts[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
            # The script's own arguments reach the nodes as those of bash, since an array cannot be exported. When one ends,
            # well or not, the others have 2 minutes: a dead one does not hold the allocation.
            "exec srun --kill-on-bad-exit=0 --wait=120 bash -c "
            f'\'exec "$0" -m torch.distributed.run --nnodes {len(expert.nodes)} --nproc-per-node {devices} '
            '--node-rank "$SLURM_NODEID" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" '
            f'-m pier_megatron --device {plan.device} "$@"\' {python} {shlex.quote(plan.script)} "${{arguments[@]}}"',
        ],
    )


def _write(path: Path, lines: Sequence[str]) -> None:
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)


def table(plan: Plan) -> list[str]:
    """A plan for people: one line per expert, one per variant."""
    lines = [f"{'expert':28} {'size':>10} {'iterations':>10} {'operations':>11} {'memory/rank':>12} {'hours':>8}  ranks"]
    for variant, members in plan.by_variant.items():
        for expert in members:
            hours = "-" if expert.hours is None else f"{expert.hours:.2f}"
            where = ", ".join(f"{expert.devices[0]}-{expert.devices[-1]} of node {node}" for node in expert.nodes)
            lines.append(
                f"{expert.name:28} {expert.size:>10} {expert.iterations:10} {expert.operations:11.3e} "
                f"{expert.memory / 1e9:9.2f} GB {hours:>8}  {where}"
            )
        what = "one model" if variant == DENSE else f"{len(members)} experts"
        total, of_seeds = plan.operations(variant)
        lines.append(f"{f'{variant} together, {what}':50} {total:11.3e}")
        if any(plan.models[expert.size].seed for expert in members):
            sizes = ", ".join(dict.fromkeys(expert.size for expert in members))
            with_seeds = "unknown: no checkpoint that can be read" if of_seeds is None else f"{total + of_seeds:11.3e}"
            lines.append(f"{f'  and its seeds, {sizes}':50} {with_seeds}")
    return lines
