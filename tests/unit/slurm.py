"""Slurm's commands on one machine, as far as a job of an expert needs them: what it does depends on the name it is called by.

Nodes are numbers, and a queue is a folder, ``$QUEUE``. ``torchrun`` stands in for a training: it prints its arguments, insists
on having its checkpoints for itself, does not end while its queue has a file ``hold``, and fails where its queue has a file
``fail-NAME``, NAME being that of the expert's folder.
"""

import argparse
import fcntl
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

QUEUE = Path(os.environ["QUEUE"])


def sbatch(script: str) -> int:
    parser = argparse.ArgumentParser(prog="sbatch", allow_abbrev=False)
    for name in ("job-name", "dependency", "ntasks-per-node", "gpus-per-node", "output", "open-mode"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--requeue", action="store_true")
    parser.add_argument("--exclusive", action="store_true")
    words: list[str] = []
    for line in Path(script).read_text().splitlines():
        if not line.startswith("#"):
            # By the manual, nothing below the first command is read.
            break
        if line.startswith("#SBATCH "):
            words += shlex.split(line)[1:]
    options = parser.parse_args(words)
    if (QUEUE / f"refuse-{Path(script).parent.name}").exists():
        print("sbatch: error: Batch job submission failed: Invalid account", file=sys.stderr)
        return 1
    with (QUEUE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        number = len(list(QUEUE.glob("*.job")))
        (QUEUE / f"{number}.job").write_text(json.dumps(vars(options) | {"script": script}))
    nothing = subprocess.DEVNULL
    subprocess.Popen([Path(__file__).with_name("job"), str(number)], stdout=nothing, stderr=nothing, start_new_session=True)
    print(f"Submitted batch job {number}")
    return 0


def job(number: str) -> int:
    options = json.loads((QUEUE / f"{number}.job").read_text())
    with (QUEUE / f"{options['job_name'].replace('/', '.')}.name").open("w") as name:
        if options["dependency"] == "singleton":
            fcntl.flock(name, fcntl.LOCK_EX)
        nodes = {"SLURM_NNODES": str(options["nodes"]), "SLURM_JOB_NODELIST": ",".join(map(str, range(options["nodes"])))}
        with Path(options["output"]).open(options["open_mode"][0]) as log:
            environment = os.environ | nodes | {"SLURM_JOB_ID": number}
            status = subprocess.run(["bash", options["script"]], stdout=log, stderr=log, env=environment).returncode
        (QUEUE / f"{number}.status").write_text(str(status))
    return status


def scontrol(_show: str, _hostnames: str, nodes: str) -> int:
    print("\n".join(f"node{node}" for node in nodes.split(",")))
    return 0


def srun(*words: str) -> int:
    command = list(itertools.dropwhile(lambda word: word.startswith("--"), words))
    nodes = range(int(os.environ["SLURM_NNODES"]))
    tasks = [subprocess.Popen(command, env=os.environ | {"SLURM_NODEID": str(node)}) for node in nodes]
    return max(task.wait() for task in tasks)


def torchrun(*words: str) -> int:
    # At once, since two nodes write here.
    os.write(sys.stdout.fileno(), f"{json.dumps([os.environ['SLURM_JOB_ID'], os.environ['MASTER_ADDR'], words])}\n".encode())
    if os.environ["SLURM_NODEID"] != "0":
        return 0
    checkpoints = Path(words[words.index("--save") + 1])
    is_used = checkpoints / "is_used"
    checkpoints.mkdir(exist_ok=True)
    is_used.touch(exist_ok=False)
    time.sleep(0.5)
    while (QUEUE / "hold").exists():
        time.sleep(0.05)
    failing = QUEUE / f"fail-{checkpoints.parent.name}"
    if failing.exists():
        failing.unlink()
    else:
        (checkpoints / "latest_checkpointed_iteration.txt").write_text(words[words.index("--train-iters") + 1])
    is_used.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(globals()[Path(sys.argv[0]).name](*sys.argv[1:]))
