"""One run of groups by NeMo-Run: ``python nemo_run_groups.py SCRIPT ARGUMENTS...``, here on two emulated devices.

Trains for real on the CPU (make launchers). For a cluster give ``run.SlurmExecutor(account=..., nodes=8, ntasks_per_node=4,
gpus_per_node=4, launcher="torchrun", retries=10)`` instead of the local executor, which starts a job once, and take ``--device
cpu`` away; that was not run. After a failure a job started again resumes from --load.
"""

import sys

import nemo_run as run

if __name__ == "__main__":
    executor = run.LocalExecutor(
        launcher="torchrun",
        ntasks_per_node=2,
        env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"},
    )
    # -m pier_megatron --device cpu SCRIPT ARGUMENTS
    script = run.Script(path="pier_megatron", m=True, entrypoint="python", args=["--device", "cpu", *sys.argv[1:]])
    with run.Experiment("pier", executor=executor) as experiment:
        experiment.add(script, name="pier", tail_logs=True)
        experiment.run()
    # run.run() ends with status 0 though the job has failed.
    sys.exit(any(job.state.name != "SUCCEEDED" for job in experiment.jobs))
