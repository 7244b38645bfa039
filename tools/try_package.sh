#!/usr/bin/env bash
# Installs the wheel in dist/ out of sight of the checkout, on top of the packages of its environment, and uses it.
#   try_package.sh PYTHON     of that environment
set -euo pipefail
environment=$(dirname "$(dirname "$1")")
wheel=$(realpath dist/*.whl)

clean=$environment/clean
"$1" -m venv --clear "$clean"
"$clean/bin/pip" install --quiet --no-deps "$wheel"
# Not a site folder of its own: what is installed there as editable, this project, stays out.
library='import sysconfig; print(sysconfig.get_path("purelib"))'
"$1" -c "$library" >"$("$clean/bin/python" -c "$library")/environment.pth"

cd "$clean"
bin/python -c "
import importlib.resources, pier_megatron, sys
assert pier_megatron.__file__.startswith(sys.prefix), pier_megatron.__file__
for name in ('py.typed', 'experiments/experts/train.sh'):
    assert (importlib.resources.files(pier_megatron) / name).is_file(), name
"
touch pretrain_gpt.py
bin/pier-megatron doctor torchrun --nproc-per-node 2 -m pier_megatron --device cpu pretrain_gpt.py \
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 \
    --micro-batch-size 2 --train-iters 1000 --eval-interval 1000 --lr 1e-3 --mock-data --optimizer pier --pier-groups 2
bin/pip check
# Transformer Engine's part for PyTorch is compiled at the user's and asks the PyTorch that is there what it needs.
bin/pip install --quiet --dry-run --no-build-isolation 'pier-megatron[te,data,downstream]'
echo "Extras resolve."
