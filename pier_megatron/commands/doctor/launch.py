"""Looks at the launch line: the script, the plugin, and what scheduler and torchrun give the processes."""

import os
import re

from pier_megatron.commands.findings import Findings
from pier_megatron.commands.job_arguments import look_at_plugin
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.commands.script_sources import ScriptSources

# What Megatron and torch.distributed read, and whether each process needs another value.
_VARIABLES = {"RANK": True, "LOCAL_RANK": True, "WORLD_SIZE": False, "MASTER_ADDR": False, "MASTER_PORT": False}
_WRAPPER = (
    "bash -c 'export RANK={} LOCAL_RANK={} WORLD_SIZE={} LOCAL_WORLD_SIZE={ranks} MASTER_ADDR=FIRST_NODE MASTER_PORT=29500; "
    "exec python ...'"
)
# What starters call the same. Of MPI's, Open MPI's names are given; MPICH's and Intel's begin with PMI_ and MPI_.
_OF_SRUN = ("$SLURM_PROCID", "$SLURM_LOCALID", "$SLURM_NTASKS")
_OF_MPI = ("$OMPI_COMM_WORLD_RANK", "$OMPI_COMM_WORLD_LOCAL_RANK", "$OMPI_COMM_WORLD_SIZE")
_RANKS = re.compile(r"SLURM_(PROCID|NODEID)|OMPI_COMM_WORLD_RANK|PMI_RANK|PMIX_RANK|ALPS_APP_PE")


def look(command: LaunchCommand, sources: ScriptSources, findings: Findings) -> None:
    """Looks at everything but the script's own arguments."""
    if sources.script is None:
        what = "no such module" if command.is_module else "no such file"
        findings.errors.append(f"SCRIPT {command.script}: {what}, seen from {os.getcwd()}. Give its path.")
    look_at_plugin(command, sources, findings)
    if command.launcher == "python":
        _look_at_variables(command, sources, findings)
    else:
        _look_at_torchrun(command, findings)


def _look_at_variables(command: LaunchCommand, sources: ScriptSources, findings: Findings) -> None:
    """What the processes find in their environment where no torchrun sets it."""
    around = command.surroundings
    # A script may read Slurm's variables by itself.
    translates = sources.script is not None and _RANKS.search(sources.texts[sources.script])
    needed = _VARIABLES if around.starter is not None else dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), False)
    missing = [name for name, differs in needed.items() if not around.provides(name, differs)]
    if missing and not translates:
        names, starter = ", ".join(missing), around.starter
        if starter is None:
            findings.errors.append(
                f"python without torchrun: {names} not set, so no process group can form. Write torchrun --nproc-per-node 1 "
                "instead of python."
            )
        elif around.unread is None:
            findings.errors.append(
                f"{starter} without torchrun: Megatron reads {names}, which {starter} does not set. Start one torchrun on each "
                f"node, or let {starter} start "
                + _WRAPPER.format(*(_OF_SRUN if starter == "srun" else _OF_MPI), ranks=command.ranks_per_node)
            )
        else:
            findings.warnings.append(
                f"{starter} without torchrun: Megatron reads {names}, which {starter} does not set. Make sure that "
                f"{around.unread}, which cannot be read from here, sets them"
            )


def _look_at_torchrun(command: LaunchCommand, findings: Findings) -> None:
    around, where = command.surroundings, f"--nnodes {command.nodes}"
    if command.nodes > 1 and command.rendezvous is None:
        findings.warnings.append(
            f"{where} without --master-addr or --rdzv-endpoint: each node would wait for itself. Give all nodes the address of "
            "the first one"
        )
    if command.restarts and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        findings.warnings.append(
            f"--max-restarts {command.restarts}: a restarted job may meet at the addresses of the one that has died. Set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        )
    starter, is_srun = around.starter, around.starter == "srun"
    if starter is None:
        return
    if (around.tasks_per_node or 1) > 1:
        findings.errors.append(
            f"{starter} starts torchrun {around.tasks_per_node} times on each node, and each of them {command.ranks_per_node} "
            f"ranks there (--nproc-per-node). Use {starter} {'--ntasks-per-node' if is_srun else '--npernode'} 1."
        )
    if around.nodes is not None and around.nodes not in range(command.fewest_nodes or command.nodes, command.nodes + 1):
        findings.errors.append(
            f"{where}, but {starter} starts torchrun on {around.nodes}: it would wait for the others, or refuse those that are "
            f"too many. Use --nnodes {around.nodes}, or {starter} {'--nodes' if is_srun else '-np'} {command.nodes}."
        )
    if command.nodes > 1 and command.rendezvous == "static" and not _RANKS.search(around.wrapper):
        node = "$SLURM_NODEID" if is_srun else _OF_MPI[0]
        findings.errors.append(
            f"{starter} gives torchrun the same --node-rank on all {command.nodes} nodes. Replace --master-addr by "
            f"--rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500, or use {starter} ... bash -c 'torchrun --node-rank "
            f"{node} ...'."
        )
