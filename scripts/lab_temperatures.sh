#!/usr/bin/env bash
# Does it matter at which temperature the responses were recorded? Both stages behind the baseline of a cell of recipes/lab.yaml, on responses to
# the same prompts recorded at T=0 and at T=1 (the grid's: T=0.7).
#   scripts/lab_temperatures.sh [OUT] [CELL]     after that cell of the grid; 15 minutes on one core; goes on where it stopped
# Results: OUT/recorded-CELL/{t0,t1}/results.json
set -euo pipefail
out=${1:-runs/lab-grid} name=${2:-markov-b16-s0}
cell=$out/$name all=$out/recorded-$name
drafters=(--drafter "$cell/continued" --drafter "$cell/carryover")
mkdir -p "$all"
for temperature in 0 1; do
    corpus=$all/recorded-t$temperature.jsonl
    carryover record --target lab --dtype float32 --prompts "${TRAIN_PROMPTS:-runs/lab/train_prompts.jsonl}" --out "$corpus" \
        --temperature "$temperature" --max-new-tokens 128 --batch-size 64
    for stage in continued carryover; do
        if [ ! -e "$all/$stage-t$temperature/finished" ]; then
            carryover train "$cell/recipe.yaml" --stage "$stage" --start "$cell/baseline" --corpus "$corpus" --out "$all/$stage-t$temperature" --resume
            touch "$all/$stage-t$temperature/finished"
        fi
        drafters+=(--drafter "$all/$stage-t$temperature")
    done
done
for temperature in 0 1; do
    carryover evaluate --target lab --dtype float32 --prompts "${PROMPTS:-runs/lab/eval_prompts.jsonl}" --limit 400 --max-new-tokens 128 \
        --temperature "$temperature" --seed "${name##*-s}" --batch-size 100 --out "$all/t$temperature" "${drafters[@]}"
done
