"""A Slurm of the tests' own: munge, a controller and node daemons on this machine, in a folder and on ports of their own."""

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import psutil

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

# Names of nodes are addresses of this machine, so they lead to it without an entry in its hosts file. GPUs are files, and there
# are enough for two jobs of four on each node. Requeued jobs wait until their old credential has expired.
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
MessageTimeout=5
MpiDefault=none
GresTypes=gpu
KillWait=5
NodeName=127.0.0.[1-{nodes}] NodeAddr=127.0.0.1 NodeHostname=localhost Port=[{ports[1]}-{ports[2]}] CPUs=8 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def missing() -> list[str]:
    """Programs of Slurm and munge that this machine lacks."""
    return [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]


class Cluster:
    """Runs while the ``with`` block lasts; ends what it has started, and what Slurm has.

    Attributes:
        folder: Folder of the daemons' files and logs.
        environment: Variables with which Slurm's commands find this cluster.
    """

    def __init__(self, nodes: int) -> None:
        """Plans a cluster of nodes 127.0.0.1 to 127.0.0.N."""
        self.folder = Path(tempfile.mkdtemp(prefix="slurm"))
        # munge wants to reach its socket through folders that all may enter.
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)
        for number in range(8):
            (self.folder / f"gpu{number}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        user = psutil.Process().username()
        self._configuration = self.folder / "slurm.conf"
        first = _free_ports(nodes + 1)
        self._configuration.write_text(
            _CONFIGURATION.format(folder=self.folder, user=user, nodes=nodes, ports=(first, first + 1, first + nodes))
        )
        self.environment = {"SLURM_CONF": str(self._configuration), "PATH": _PATH}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._nodes = [f"127.0.0.{number}" for number in range(1, nodes + 1)]

    def __enter__(self) -> "Cluster":
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        self._start("munged", "--foreground", *(f"--{flag}={self.folder / name}" for flag, name in files.items()))
        self._until(lambda: (self.folder / "munge.socket").exists(), "munge.socket")
        self._start("slurmctld", "-D", "-f", str(self._configuration))
        for node in self._nodes:
            self.start_node(node)
        self._until(lambda: self.slurm("sinfo", "-h", "-o", "%t").split() == ["idle"], "idle nodes")
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(AssertionError):
            self.slurm("scancel", "--user", psutil.Process().username())
        for process in self._daemons.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                _kill(psutil.Process(process.pid).children(recursive=True))
            process.kill()
            process.wait()
        _kill(self.processes_of())
        shutil.rmtree(self.folder, ignore_errors=True)

    def slurm(self, *words: str, **variables: str) -> str:
        """Runs one of Slurm's commands; returns what it prints."""
        run = subprocess.run(words, env=os.environ | self.environment | variables, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, f"{words}: {run.stderr}"
        return run.stdout

    def submit(self, *words: str, folder: Path, **variables: str) -> str:
        """Submits a job from a folder; returns its number."""
        return self.slurm("sbatch", "--parsable", "--chdir", str(folder), *words, **variables).strip()

    def job(self, number: str) -> Mapping[str, str]:
        """What ``scontrol show job`` says of a job, or of one task of an array."""
        said = self.slurm("scontrol", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", said))

    def wait(self, number: str, *states: str, seconds: float = 900) -> Mapping[str, str]:
        """Waits until a job is in one of some states."""
        self._until(lambda: self.job(number)["JobState"] in states, f"job {number} {' or '.join(states)}", seconds)
        return self.job(number)

    def start_node(self, node: str) -> None:
        """Starts the daemon of a node."""
        self._start("slurmd", "-D", "-N", node, "-f", str(self._configuration))

    def processes_of(self, *nodes: str) -> Iterator[psutil.Process]:
        """Processes of the jobs on some nodes, or of all, and what watches over them; they leave the daemons' trees."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                is_of_node = not nodes or variables.get("SLURMD_NODENAME") in nodes
                if variables.get("SLURM_CONF") == str(self._configuration) and is_of_node:
                    parent = process.parent()
                    yield from [parent] if parent is not None and parent.name() == "slurmstepd" else []
                    yield process

    def kill_node(self, node: str) -> None:
        """Ends a node as if its power were gone; the controller finds out."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        _kill(self.processes_of(node))
        daemon.wait()
        self.slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")

    def resume_node(self, node: str) -> None:
        """Starts a node again."""
        self.start_node(node)
        self.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def _start(self, program: str, *words: str) -> None:
        name = words[words.index("-N") + 1] if "-N" in words else program
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                # It ends with a test run that is killed, too.
                ["setpriv", "--pdeathsig", "TERM", shutil.which(program, path=_PATH) or program, *words],
                env=os.environ | self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _until(self, reached: Callable[[], bool], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(AssertionError):
                if reached():
                    return
            assert time.monotonic() < deadline, f"no {what} in {seconds} s: {self.folder}\n{self.slurm('squeue')}"
            time.sleep(0.2)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _free_ports(number: int) -> int:
    """First of several ports on which nothing listens, below those that connections are given."""
    while True:
        first = random.SystemRandom().randrange(20000, 30000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + number):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
