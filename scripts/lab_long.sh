#!/usr/bin/env bash
# Does the gain survive a longer baseline? DFlash 6,000 and Markov 5,000 steps, then 1,000 and 700 of `continued` and of `carryover` at a lower rate.
#   scripts/lab_long.sh dflash|markov [OUT] [SEED]        after `carryover run recipes/lab-first-grid.yaml --out OUT` has recorded; half an hour on one core
set -euo pipefail
algorithm=$1 out=${2:-runs/lab-first-grid} seed=${3:-0}
if [ "$algorithm" = dflash ]; then block=16 long=6000 more=1000; else block=15 long=5000 more=700; fi
cell=$out/long/$algorithm-b16-s$seed
train() { # stage, options
    [ -e "$cell/$1/finished" ] && return
    carryover train "recipes/lab-$algorithm.yaml" --stage "$1" --out "$cell/$1" --resume --corpus "$out/recorded.jsonl" \
        --set "seed=$seed" --set "drafter.block_size=$block" "${@:2}"
    touch "$cell/$1/finished"
}
train baseline --set "train.baseline.steps=$long" --set train.save_steps=1000
for stage in continued carryover; do
    train "$stage" --start "$cell/baseline" --set train.learning_rate=2.0e-3 --set "train.carryover.steps=$more"
done
for temperature in 0 1; do
    carryover evaluate --target lab --dtype float32 --prompts "${PROMPTS:-runs/lab/eval_prompts.jsonl}" --limit 400 --max-new-tokens 128 \
        --temperature "$temperature" --seed "$seed" --batch-size 32 --carry-off --out "$cell/t$temperature" \
        --drafter "$cell/baseline" --drafter "$cell/continued" --drafter "$cell/carryover"
done
