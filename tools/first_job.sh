#!/usr/bin/env bash
# A stranger's way, printed whole: from a clone of this repository to a job of two groups on a CPU that is checked, trained,
# stopped and resumed. tools/first_job.sh MEGATRON_LM, a checkout whose pretrain_gpt.py trains.
set -u
repository=$(cd "$(dirname "$0")/.." && pwd)
megatron=$(cd "$1" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

run() {
	printf '\n$ %s\n' "$*"
	local begun=$SECONDS
	"$@"
	printf '(status %s, %s s)\n' $? $((SECONDS - begun))
}

cd "$folder" || exit
run git clone -q "$repository" pier_megatron
cd pier_megatron || exit
if [ -d "$repository/.venv" ]; then
	export PATH=$repository/.venv/bin:$PATH PYTHONPATH=$PWD
else
	run make .venv/.ready-demo
	export PATH=$PWD/.venv/bin:$PATH
fi
launch=(torchrun --standalone --nproc-per-node 2 -m pier_megatron --device cpu "$megatron/pretrain_gpt.py")
model=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
	--micro-batch-size 4 --global-batch-size 8 --train-iters 200 --eval-interval 100 --lr 3e-4 --lr-decay-style cosine
	--mock-data --tokenizer-type NullTokenizer --vocab-size 257 --log-interval 10 --optimizer pier --pier-groups 2
	--pier-sync-interval 20)
saves=(--save "$folder/checkpoints" --save-interval 50)

run pier-megatron
run pier-megatron doctor "${launch[@]}" "${model[@]}" "${saves[@]}"
run pier-megatron doctor "${launch[@]}" "${model[@]}" --pier-sinc-interval 10
run pier-megatron plan --cluster perlmutter torchrun --nnodes 8 --nproc-per-node 4 --node-rank 0 --master-addr node0 \
	-m pier_megatron "$megatron/pretrain_gpt.py" --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
	--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 8 --global-batch-size 512 --train-iters 100000 \
	--eval-interval 1000 --lr 3e-4 --lr-decay-style cosine --bf16 --mock-data --tokenizer-type NullTokenizer \
	--vocab-size 50257 --overlap-grad-reduce --overlap-param-gather --optimizer pier
# Stopped by Ctrl-C; what it saved is not what is resumed below.
run timeout --foreground --signal INT 45 "${launch[@]}" "${model[@]}" "${saves[@]}" --train-iters 100000
run rm -rf "$folder/checkpoints"
run "${launch[@]}" "${model[@]}" "${saves[@]}" --exit-interval 130
run "${launch[@]}" "${model[@]}" "${saves[@]}" --load "$folder/checkpoints" --pier-sync-interval 10
run "${launch[@]}" "${model[@]}" "${saves[@]}" --load "$folder/checkpoints"
