"""Reads what ``mpirun`` and its relatives start: how many processes on how many nodes, and which variables they find."""

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("mpirun", "mpiexec", "mpiexec.hydra", "aprun")
"""Starters of MPI. Those of Open MPI, MPICH, Intel and Cray share the options that are read here."""

_TASKS = ("-np", "--np", "-n", "--n", "-c")
_PER_NODE = ("-N", "-npernode", "--npernode", "-ppn", "--ppn", "-perhost")
_HOSTS = ("-H", "-host", "--host", "-hosts", "--hosts")
_FILES = ("-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f")


def size(words: Sequence[str]) -> tuple[int | None, int | None]:
    """Numbers of nodes and of processes on each that some options ask for; None where they do not say it."""
    tasks, per_node, hosts = _number(words, _TASKS), _number(words, _PER_NODE), _value(words, _HOSTS)
    if mapped := re.search(r"\bppr:(\d+):node", " ".join(words)):
        per_node = int(mapped[1])
    nodes = tasks // per_node if tasks and per_node else None
    if hosts is not None:
        nodes = len({host.partition(":")[0] for host in hosts.split(",")})
    elif (file := _value(words, _FILES) or os.environ.get("PBS_NODEFILE")) is not None:
        lines = Path(file).read_text().splitlines() if Path(file).is_file() else []
        nodes = len({line.split()[0] for line in lines if line.strip() and not line.startswith("#")}) or nodes
    elif nodes is None:
        # Outside of an allocation and without hosts, all processes are on this one.
        nodes = int(os.environ.get("SLURM_NNODES", "1"))
    return nodes, per_node or (tasks // nodes if tasks and nodes else None)


def exported(words: Sequence[str]) -> set[str]:
    """Variables that some options set or pass on."""
    pairs = itertools.pairwise(words)
    return {name.partition("=")[0] for flag, name in pairs if flag in ("-x", "-genv", "-env", "-e")}


def _number(words: Sequence[str], flags: Sequence[str]) -> int | None:
    value = _value(words, flags)
    return int(value) if value and value.isdigit() and int(value) else None


def _value(words: Sequence[str], flags: Sequence[str]) -> str | None:
    return next((words[place + 1] for place, word in enumerate(words[:-1]) if word in flags), None)
