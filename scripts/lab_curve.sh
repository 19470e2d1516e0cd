#!/usr/bin/env bash
# Learning curves: tokens per verification on 24 development prompts (none of the 400) every 50 steps of `continued` and `carryover`.
#   scripts/lab_curve.sh [OUT] [CELL]      after that cell of recipes/lab.yaml; eight minutes on one core
# Results: `decode_acceptance` in OUT/curve-CELL/{continued,carryover}/train_log.jsonl
set -euo pipefail
out=${1:-runs/lab-grid} cell=${2:-markov-b16-s0}
curve=$out/curve-$cell
mkdir -p "$curve"
python - "$curve/prompts.jsonl" <<'PY'
import json, sys
from carryover.lab import lab_prompts
taken = {row["prompt"] for row in lab_prompts("eval", 400)}
rows = [row for row in lab_prompts("eval", 40, seed=1) if row["prompt"] not in taken][:24]
open(sys.argv[1], "w").writelines(json.dumps(row) + "\n" for row in rows)
PY
for stage in carryover continued; do
    carryover train "$out/$cell/recipe.yaml" --stage "$stage" --start "$out/$cell/baseline" --out "$curve/$stage" --resume \
        --set "train.$stage.eval_steps=50" --set "train.$stage.eval_prompts=$curve/prompts.jsonl"
done
