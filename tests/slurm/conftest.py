"""What the tests of this folder share with those that start jobs without Slurm."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))
# What Slurm starts here and doctor reads are jobs on the CPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
