#!/usr/bin/env bash
# What makes a drafter good in few steps? Baselines of a cell of recipes/lab.yaml after 1,000 steps, with one setting changed each.
#   scripts/lab_levers.sh [OUT] [CELL] [NAME...]      after that cell of the grid; two minutes each on one core; goes on where it stopped
# Results: OUT/levers-CELL/t0/results.json
set -euo pipefail
out=${1:-runs/lab-grid} name=${2:-markov-b16-s0}
shift $(($# < 2 ? $# : 2))
cell=$out/$name all=$out/levers-$name
declare -A change=(
    [muon]=""                                                   # as in the recipe, 1e-2
    [adamw-1e-3]="train.baseline.optimizer=adamw train.baseline.learning_rate=0.001"
    [adamw-3e-3]="train.baseline.optimizer=adamw train.baseline.learning_rate=0.003"
    [dpace]="train.baseline.loss.weighting=dpace"               # slot weights from the drafter's own confidence
    [anchors-4]="train.baseline.anchors=4"
    [anchors-16]="train.baseline.anchors=16"                    # more drafts of the same target forward
    [anchors-32]="train.baseline.anchors=32"
)
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(muon adamw-1e-3 adamw-3e-3 dpace anchors-4 anchors-16 anchors-32)
drafters=()
for lever in "${names[@]}"; do
    if [ ! -e "$all/$lever/finished" ]; then
        settings=(--set train.baseline.steps=1000)
        for setting in ${change[$lever]}; do settings+=(--set "$setting"); done
        carryover train "$cell/recipe.yaml" --stage baseline --out "$all/$lever" --resume "${settings[@]}"
        touch "$all/$lever/finished"
    fi
    drafters+=(--drafter "$all/$lever")
done
carryover evaluate --target lab --dtype float32 --prompts "${PROMPTS:-runs/lab/eval_prompts.jsonl}" --limit 400 --max-new-tokens 128 \
    --seed "${name##*-s}" --batch-size 100 --out "$all/t0" "${drafters[@]}"
