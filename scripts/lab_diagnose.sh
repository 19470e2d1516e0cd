#!/usr/bin/env bash
# Diagnostics of docs/experiments.md on drafters of a lab grid, against `continued`. Three minutes each on one core; goes on where it stopped.
#   scripts/lab_diagnose.sh [OUT] [CELL...]
set -euo pipefail
out=${1:-runs/lab-grid}
shift $(($# < 1 ? $# : 1))
for cell in ${*:-markov-b16-s0 dflash-b16-s0}; do
    OMP_NUM_THREADS=1 carryover diagnose --target lab --dtype float32 --drafter "$out/$cell/carryover" --baseline "$out/$cell/continued" \
        --prompts "${PROMPTS:-runs/lab/eval_prompts.jsonl}" --max-new-tokens 128 --out "$out/$cell/diagnostics"
done
