#!/usr/bin/env bash
# GPT-2 small with Pier, the recipe of arXiv 2511.17849: OpenWebText, 100k iterations, one group per node.
# Run it on each node, from a Megatron-LM checkout, with
#   NODES=8 NODE_RANK=0 MASTER_ADDR=node0 DATA=/data/openwebtext_text_document VOCABULARY=/data/gpt2 CHECKPOINTS=/scratch/small
# in the environment. The lines marked "Pier" are all that differs from a stock run.
set -euo pipefail

launch=(
    torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"
    --nproc-per-node "${GPUS_PER_NODE:-4}"
)
model=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024
    --attention-dropout 0.1 --hidden-dropout 0.1 --bf16
)
training=(
    --micro-batch-size 8 --global-batch-size 512 --train-iters 100000
    --lr 4e-4 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --lr-decay-iters 100000
    --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
data=(
    --data-path "$DATA" --split 949,50,1 --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCABULARY/vocab.json" --merge-file "$VOCABULARY/merges.txt"
)
logging=(
    --log-interval 50 --eval-interval 1000 --eval-iters 20
    --save "$CHECKPOINTS" --save-interval 5000 --tensorboard-dir "$CHECKPOINTS/tensorboard"
)
pier=(--optimizer pier --pier-sync-interval 50)                                                                       # Pier

exec "${launch[@]}" -m pier_megatron pretrain_gpt.py \
    "${model[@]}" "${training[@]}" "${data[@]}" "${logging[@]}" "${pier[@]}"                                          # Pier: -m
