#!/usr/bin/env bash
# Other ways to train the carryover stage, from the baselines of recipes/lab-first-grid.yaml (docs/experiments.md, "why DFlash gains less").
#   scripts/lab_variants.sh dflash|markov SEED [OUT]
# first: a loss on the first draft as well; dropout: 30 % of anchors without carry; continued-2x: the control with as many drafts as `first`.
set -euo pipefail
algorithm=$1 seed=$2 out=${3:-runs/lab-first-grid}
block=$([ "$algorithm" = dflash ] && echo 16 || echo 15)
cell=$out/$algorithm-b16-s$seed variants=$out/variants/$algorithm-s$seed
train() { # name, stage, options
    [ -e "$variants/$1/finished" ] && return
    carryover train "recipes/lab-$algorithm.yaml" --stage "$2" --start "$cell/baseline" --out "$variants/$1" --resume \
        --corpus "$out/recorded.jsonl" --set "seed=$seed" --set "drafter.block_size=$block" "${@:3}"
    touch "$variants/$1/finished"
}
train first carryover --set train.carryover.first_pass_loss=0.5
train dropout carryover --set train.carryover.carry_dropout=0.3
train continued-2x continued --set train.continued.anchors=16
for temperature in 0 1; do
    carryover evaluate --target lab --dtype float32 --prompts "${PROMPTS:-runs/lab/eval_prompts.jsonl}" --limit 400 --max-new-tokens 128 \
        --temperature "$temperature" --seed "$seed" --batch-size 32 --out "$variants/t$temperature" \
        --drafter "$cell/continued" --drafter "$variants/continued-2x" --drafter "$cell/carryover" \
        --drafter "$variants/dropout" --drafter "$variants/first"
done
