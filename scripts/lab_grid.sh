#!/usr/bin/env bash
# The main grid of docs/experiments.md: DFlash and Markov x 15 and 7 proposals x three seeds, each with both controls, on 400 held-out prompts.
#   scripts/lab_grid.sh [OUT] [SEED...]
# Run again it goes on where it stopped. About two hours on one core. Then: scripts/lab_table.py OUT docs/results/lab.json
set -euo pipefail
out=${1:-runs/lab}
shift $(($# < 1 ? $# : 1))
seeds=${*:-0 1 2}
[ -e "$out/train_prompts.jsonl" ] || carryover lab --prompts-only --train-prompts 3200 --eval-prompts 400 --out "$out"
carryover record --target lab --dtype float32 --prompts "$out/train_prompts.jsonl" --out "$out/recorded.jsonl" \
    --temperature 0.7 --max-new-tokens 128 --batch-size 64
for seed in $seeds; do
    for proposals in 15 7; do
        for algorithm in markov dflash; do
            [ "$algorithm" = dflash ] && block=$((proposals + 1)) || block=$proposals
            carryover run "recipes/lab-$algorithm.yaml" --out "$out/$algorithm-b$((proposals + 1))-s$seed" \
                --set "seed=$seed" --set "drafter.block_size=$block" --set "data.corpus=$out/recorded.jsonl" \
                --set "evaluate.prompts=$out/eval_prompts.jsonl" --set evaluate.limit=400 --set evaluate.batch_size=32
        done
    done
done
