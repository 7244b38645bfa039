"""``tools/survey.py`` reads launch scripts of any folder: which lines are accepted, refused, a fork's, or cannot be read."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPOSITORY

pytestmark = pytest.mark.processes

_MODEL = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 4 --global-batch-size 512 --train-iters 100000 --eval-interval 1000 --lr 6e-4 --bf16 "
    "--vocab-size 50257 --tokenizer-type NullTokenizer --mock-data"
)
_SCRIPTS = {
    "plain.sh": "set -e\nmodule load cuda\nmkdir -p /x\n"
    f'torchrun --nproc-per-node 8 pretrain_gpt.py {_MODEL} --wandb-project p | tee "$LOG"\n',
    "slurm.sbatch": f"#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\nARGS='{_MODEL} --swiglu'\n"
    "srun singularity exec -B /data x.sif ./launch.sh pretrain_gpt.py $ARGS\n",
    "launch.sh": '#!/bin/bash\nexport RANK=$SLURM_PROCID\npython -u "$@"\n',
    "mpi.sh": f"mpirun -np 32 --map-by ppr:8:node bash -x -c 'python pretrain_gpt.py {_MODEL} --use-flash-attn-triton'\n",
    "hopeless.sh": f"srun ./other.sh pretrain_gpt.py {_MODEL} --seed 7\n",
    "fork.sh": f"deepspeed pretrain_gpt.py {_MODEL}\n",
    "unfilled.sh": f"torchrun --nproc-per-node $GPUS --max-restarts $MOST pretrain_gpt.py {_MODEL} --seed 8\n",
    "refused.sh": f"python pretrain_gpt.py {_MODEL} --no-gradient-accumulation-fusion "
    "--use-torch-fsdp2 --ckpt-format torch_dcp "
    "--untie-embeddings-and-output-weights\n",
    "other.py": "pretrain_gpt.py --num-layers\n",
}


def test_launch_scripts_of_a_folder(tmp_path: Path) -> None:
    for name, text in _SCRIPTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "launch.sh").chmod(0o755)
    # The scripts run with the rights of another user.
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o55)
    command = [sys.executable, str(REPOSITORY / "tools" / "survey.py"), str(tmp_path)]
    page = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "| GPT and MoE | 2 | 1 | 1 | 0 | 1 | 2 | 0 | 0 |" in page, page
    for found in (
        r"--use-flash-attn-triton \| 1 \(1\) \| mpi.sh",
        r"--use-torch-fsdp2 cannot be used with --optimizer pier.*\| refused.sh",
        r"no torchrun in this command, and no python; ./other.sh cannot be read .*\| hopeless.sh",
        r"deepspeed starts Megatron-DeepSpeed, a fork.*\| fork.sh",
        r"invalid int value: 'pretrain_gpt.py' \| 1 \(1\) \| unfilled.sh",
    ):
        assert re.search(found, page), page
