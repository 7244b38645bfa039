"""One run of groups by NeMo-Run: ``python nemo_run_groups.py SCRIPT ARGUMENTS...``, here on two emulated devices.

Trains for real on the CPU (make launchers). For a cluster give ``run.SlurmExecutor(account=..., nodes=8, ntasks_per_node=4,
gpus_per_node=4, launcher="torchrun")`` instead of the local executor, and take ``--device cpu`` away; that was not run.
"""

import sys

import nemo_run as run

if __name__ == "__main__":
    executor = run.LocalExecutor(
        launcher="torchrun",
        ntasks_per_node=2,
        env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"},
        # Starts the job again after a failure; it resumes from --load.
        retries=10,
    )
    # -m pier_megatron --device cpu SCRIPT ARGUMENTS
    script = run.Script(path="pier_megatron", m=True, entrypoint="python", args=["--device", "cpu", *sys.argv[1:]])
    run.run(script, executor=executor, name="pier")
