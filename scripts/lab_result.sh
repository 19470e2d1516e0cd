#!/usr/bin/env bash
# One result on the lab target: a drafter, its control and its Carryover, by equal steps, on 160 held-out prompts at T=0 and T=1.
#   scripts/lab_result.sh dflash|markov SEED [OUT] [extra `carryover train` options, such as --set train.carryover.steps=1000]
# Run again it goes on where it stopped. About ten minutes on one core, and the recording once more.
set -euo pipefail
algorithm=$1 seed=$2 out=${3:-runs/lab}
shift $(($# < 3 ? $# : 3))
recipe=recipes/lab-$algorithm.yaml run=$out/$algorithm-$seed
[ -e "$out/train_prompts.jsonl" ] || carryover lab --prompts-only --train-prompts 3200 --out "$out"
carryover record --target lab --dtype float32 --prompts "$out/train_prompts.jsonl" --out "$out/recorded.jsonl" \
    --temperature 0.7 --max-new-tokens 128 --batch-size 64
train() { # stage, options
    [ -e "$run/$1/finished" ] && return
    carryover train "$recipe" --stage "$1" --out "$run/$1" --corpus "$out/recorded.jsonl" --resume \
        --set "seed=$seed" "${@:2}"
    touch "$run/$1/finished"
}
train baseline "${@}"
train continued --start "$run/baseline" "${@}"
train carryover --start "$run/baseline" "${@}"
for temperature in 0 1; do
    carryover evaluate --target lab --dtype float32 --prompts "$out/eval_prompts.jsonl" --limit 160 \
        --max-new-tokens 128 --temperature "$temperature" --seed "$seed" --carry-off --out "$run/t$temperature" \
        --drafter "$run/baseline" --drafter "$run/continued" --drafter "$run/carryover"
done
carryover report "$run"
