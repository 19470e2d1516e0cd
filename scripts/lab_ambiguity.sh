#!/usr/bin/env bash
# Is the gain made by the language? The Markov cell of recipes/lab-small.yaml (15 proposals, seed 0) on lab targets whose rates of choice are scaled.
#   scripts/lab_ambiguity.sh [OUT] [FACTOR...]      half an hour for each factor on one core; goes on where it stopped
# Results: OUT/ambiguity-FACTOR/markov-b16-s0/{t0,t1}/results.json; factor 1 is the cell of the grid itself.
set -euo pipefail
out=${1:-runs/lab-small}
shift $(($# < 1 ? $# : 1))
for factor in ${*:-0 0.5}; do
    here=$out/ambiguity-$factor
    if [ ! -e "$here/target/card.json" ]; then
        carryover lab --ambiguity "$factor" --train-prompts 3200 --eval-prompts 400 --out "$here/target"
    fi
    [ -e "$here/cell.yaml" ] || python - "$here" <<'PY'
import sys, yaml
from pathlib import Path
from carryover.config import Recipe
here = Path(sys.argv[1])
recipe = Recipe.load_grid("recipes/lab-small.yaml")["markov-b16-s0"].model_dump(mode="json")
recipe["target"] = str(here / "target")
recipe["record"]["prompts"] = [str(here / "target/train_prompts.jsonl")]
recipe["evaluate"] |= {"prompts": [str(here / "target/eval_prompts.jsonl")], "batch_size": 100}
(here / "cell.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
PY
    carryover run "$here/cell.yaml" --out "$here/markov-b16-s0"
done
