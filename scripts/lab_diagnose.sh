#!/usr/bin/env bash
# Diagnostics of docs/experiments.md on drafters of a lab grid, against `continued`. Seven minutes each on one core; goes on where it stopped.
#   scripts/lab_diagnose.sh [OUT] [SEED]
set -euo pipefail
out=${1:-runs/lab}
seed=${2:-0}
for algorithm in markov dflash; do
    run=$out/$algorithm-b16-s$seed
    OMP_NUM_THREADS=1 carryover diagnose --target lab --dtype float32 --drafter "$run/carryover" --baseline "$run/continued" \
        --prompts "$out/eval_prompts.jsonl" --max-new-tokens 128 --out "$run/diagnostics"
done
