#!/usr/bin/env bash
# The SmolLM2 experiment on one GPU without network, in steps of under ten minutes; every step goes on where the last one stopped.
#   scripts/gpu_experiment.sh pack TRAIN_PROMPTS EVAL_FOLDER [PROMPTS]    here: inputs to runs/gpu/in, in files under 60 MB
#   scripts/gpu_experiment.sh step                                       there: what is next; exit code 75 while more is left
#   scripts/gpu_experiment.sh out FOLDER                                 there: drafters (bf16), logs and results, files under 16 MB
#   cat FOLDER/drafters.tar.* | tar x -C runs/gpu-results                here, to join what came back
# LIMIT: seconds a step may take (540). SET: further recipe settings, for a dry run: SET="train.baseline.epochs=null train.baseline.steps=2 ..."
set -euo pipefail
in=runs/gpu/in out=runs/gpu recipe=${RECIPE:-recipes/smollm2-gpu.yaml} deadline=$((SECONDS + ${LIMIT:-540}))
settings=()
for setting in ${SET:-}; do settings+=(--set "$setting"); done

pack() { # train prompts, evaluation folder, number of train prompts
    mkdir -p "$in/eval"
    python - "$1" "$in/train.jsonl.gz" "${3:-20000}" <<'PY'
import gzip, json, sys
from carryover.data.prompts import load_prompts
prompts = [p for p in load_prompts(sys.argv[1]) if sum(map(len, p.turns)) < 1200]
keep = set(p.id for p in prompts[:: max(1, len(prompts) // int(sys.argv[3]))][: int(sys.argv[3])])
with gzip.open(sys.argv[2], "wt") as f:
    for p in prompts:
        if p.id in keep:
            f.write(json.dumps({"id": p.id, "task": p.task, "turns": p.turns, "source": p.source, "licence": p.licence}) + "\n")
PY
    cp "$2"/*.jsonl "$in/eval/"
    python -c "from carryover.embedded import EMBEDDED; print(EMBEDDED['smollm2']())" > "$in/.target"
    tar c -C "$(cat "$in/.target")" . | split -b 55m - "$in/target.tar."
    ls -l "$in"
}

unpack() { # the target, from its parts; a whole one only, even if this is stopped
    [ -e "$in/target/config.json" ] && return
    rm -rf "$in/target.new" && mkdir "$in/target.new"
    cat "$in"/target.tar.* | tar x -C "$in/target.new"
    mv "$in/target.new" "$in/target"
}

within() { # name, command: unless it is done, as long as time is left
    [ -e "$out/$1.done" ] && return
    left=$((deadline - SECONDS))
    [ "$left" -gt 15 ] || exit 75
    echo "== $1"
    code=0
    timeout --signal=INT --kill-after=30 "$left" "${@:2}" || code=$?
    case $code in 0) touch "$out/$1.done" ;; 124 | 130 | 137) exit 75 ;; *) exit "$code" ;; esac
}

step() {
    unpack
    device=$(python -c "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')")
    local set=(--set "target=$in/target" ${settings[@]+"${settings[@]}"})
    within run carryover run "$recipe" --out "$out/run" "${set[@]}"
    for temperature in 0 1; do # speed needs a batch of one; few prompts, so that the methods take turns within a step
        within "speed-$temperature" carryover evaluate --target "$in/target" --dtype bfloat16 --device "$device" --prompts "$in/eval" \
            --limit "${SPEED_PROMPTS:-54}" --max-new-tokens "${SPEED_TOKENS:-256}" --temperature "$temperature" --stop-loops --carry-off \
            --drafter "$out/run/baseline" --drafter "$out/run/continued" --drafter "$out/run/carryover" --out "$out/speed-t$temperature"
    done
    echo "== all done"
}

collect() { # folder
    mkdir -p "$1" "$out/bf16"
    for stage in baseline continued carryover; do
        [ -e "$out/bf16/$stage" ] || carryover convert "$out/run/$stage" "$out/bf16/$stage" --to carryover --dtype bfloat16
    done
    tar c -C "$out/bf16" . | split -b 15m - "$1/drafters.tar."
    (cd "$out" && tar cz $(find run speed-t* -name results.json -o -name train_log.jsonl -o -name recipe.yaml)) > "$1/results.tar.gz"
    ls -l "$1"
}

case ${1:-} in
    pack) pack "${@:2}" ;;
    step) step ;;
    out) collect "$2" ;;
    *) sed -n '2,8p' "$0" && exit 2 ;;
esac
