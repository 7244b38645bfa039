#!/usr/bin/env bash
# Trains a published model:   train.sh small|medium|xl|7b [MORE MEGATRON FLAGS, which win]
#
# Run it on every node, with the same environment but for NODE_RANK; under Slurm use train.slurm, which sets the second block.
#   MEGATRON_LM_PATH  checkout of Megatron-LM, 0.17 to 0.19
#   DATA              folder that prepare_openwebtext.py has written
#   RUNS              folder for checkpoints and TensorBoard logs: the run goes to $RUNS/MODEL-OPTIMIZER, and on from what is there
#   OPTIMIZER         pier (default), or adam: the same run without Pier
#   DEVICE            cuda (default), or cpu: rehearse the run on emulated devices, with smaller flags behind MODEL
#   DRY_RUN=1         print the command, examine it and plan it on CLUSTER (default: perlmutter); needs neither GPUs nor data
#   CHECK             command that gets the torchrun command instead: pier-megatron doctor train.sh MODEL sets it
#
#   GPUS_PER_NODE     default 4
#   NNODES            default 1; with more, NODE_RANK (0 on MASTER_ADDR) and MASTER_ADDR are needed, MASTER_PORT is 29500
set -euo pipefail

fail() {
    echo "train.sh: $1" >&2
    exit 2
}

examples=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
model=${1:-}
flags=$examples/models/$model.args
[[ -n $model && -f $flags ]] || fail "MODEL '$model': there is no $flags. Give one of: $(cd "$examples/models" && echo *.args | sed 's/\.args//g')"
shift

: "${MEGATRON_LM_PATH:?is unset: set it to a checkout of Megatron-LM, 0.17 to 0.19}"
: "${DATA:?is unset: set it to the folder that prepare_openwebtext.py has written (its --output)}"
: "${RUNS:?is unset: set it to a folder that all nodes see, for checkpoints and TensorBoard logs}"
[[ -f $MEGATRON_LM_PATH/pretrain_gpt.py ]] || fail "MEGATRON_LM_PATH=$MEGATRON_LM_PATH: no pretrain_gpt.py in it"
nodes=${NNODES:-1}
if [[ -z ${DRY_RUN:-}${CHECK:-} ]]; then
    [[ -f $DATA/text.idx && -d $DATA/tokenizer ]] ||
        fail "DATA=$DATA: no text.idx or no tokenizer/ in it. Write them with prepare_openwebtext.py --output $DATA"
    if ((nodes > 1)); then
        : "${NODE_RANK:?is unset, and NNODES=$nodes: set it to 0 on MASTER_ADDR, to 1 ... $((nodes - 1)) on the other nodes}"
        : "${MASTER_ADDR:?is unset, and NNODES=$nodes: set it to the address of the node with NODE_RANK=0, on all nodes}"
    fi
fi

# Pier: the launcher that makes --optimizer pier known, and its flags.
optimizer=${OPTIMIZER:-pier}
case $optimizer in
    pier) launcher=(-m pier_megatron) optimizer_flags=("$examples/pier.args") ;;
    adam) launcher=() optimizer_flags=() ;;
    *) fail "OPTIMIZER=$optimizer: give pier or adam" ;;
esac
case ${DEVICE:-cuda} in
    cuda) ;;
    cpu) launcher=(-m pier_megatron --device cpu) ;;
    *) fail "DEVICE=$DEVICE: give cuda or cpu" ;;
esac

mapfile -t published < <(sed 's/#.*//' "$examples/common.args" "$flags" "${optimizer_flags[@]}" | xargs printf '%s\n')
run=$RUNS/$model-$optimizer
command=(
    torchrun --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${GPUS_PER_NODE:-4}"
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}"
    "${launcher[@]}" "$MEGATRON_LM_PATH/pretrain_gpt.py"
    --data-path "$DATA/text" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$DATA/tokenizer"
    --save "$run/checkpoints" --load "$run/checkpoints" --tensorboard-dir "$run/tensorboard"
    "${published[@]}" "$@"
)

# Megatron needs it for tensor parallelism and overlap: communication is then queued in the order of the compute it waits for.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

if [[ -z ${DRY_RUN:-} ]]; then
    # Megatron 0.17 opens its progress log there before it makes the folder.
    [[ -n ${CHECK:-} ]] || mkdir -p "$run/checkpoints"
    # shellcheck disable=SC2086 # a command of several words
    exec ${CHECK:-} "${command[@]}"
fi
for word in "${command[@]}"; do
    [[ $word != --* ]] || printf '\\\n    '
    printf '%q ' "$word"
done
printf '\n\n'
[[ $optimizer == pier ]] || exit 0
# The checkout's own parser, which may know other flags than an installed megatron-core.
export PYTHONPATH=$MEGATRON_LM_PATH${PYTHONPATH:+:$PYTHONPATH}
# Before the data is there doctor says that the job will not start, and why; the plan does without.
pier-megatron doctor "${command[@]}" || true
echo
exec pier-megatron plan --cluster "${CLUSTER:-perlmutter}" "${command[@]}"
