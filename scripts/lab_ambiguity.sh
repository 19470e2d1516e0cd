#!/usr/bin/env bash
# Is the gain made by the language? The Markov cell of recipes/lab.yaml (15 proposals, its seeds) on lab targets whose rates of choice are scaled.
#   scripts/lab_ambiguity.sh [OUT] [FACTOR...]      an hour of one core for each factor; goes on where it stopped
# Results: OUT/ambiguity-FACTOR/markov-b16-sSEED/{t0,t1}/results.json and OUT/ambiguity-FACTOR/grid.md; factor 1 is the cell of the grid itself.
set -euo pipefail
out=${1:-runs/lab-grid}
shift $(($# < 1 ? $# : 1))
for factor in ${*:-0 0.5}; do
    here=$out/ambiguity-$factor
    if [ ! -e "$here/target/card.json" ]; then
        carryover lab --ambiguity "$factor" --train-prompts 3200 --eval-prompts 400 --out "$here/target"
    fi
    [ -e "$here/grid.yaml" ] || python - "$here" <<'PY'
import sys, yaml
from pathlib import Path
here = Path(sys.argv[1])
grid = yaml.safe_load(Path("recipes/lab.yaml").read_text())
grid["cells"] = {"markov-b16": grid["cells"]["markov-b16"]}
grid["target"] = str(here / "target")
grid["record"]["prompts"] = str(here / "target/train_prompts.jsonl")
grid["evaluate"] |= {"prompts": str(here / "target/eval_prompts.jsonl"), "batch_size": 100}
(here / "grid.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))
PY
    carryover run "$here/grid.yaml" --out "$here"
done
