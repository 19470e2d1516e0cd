#!/usr/bin/env bash
# The run behind the packaged drafters for mathematics: a baseline, its control, and carry with a projector and with one vector.
#   scripts/smollm2_math.sh OUT [baseline | continued | projector | embedding | evaluate]...     default: all, one after the other
# Goes on where it stopped. The three later stages may run side by side, one thread each (OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE).
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1 && shift
recipe=recipes/smollm2-math.yaml
train() { # NAME STAGE [OPTION...]
  local name=$1 stage=$2 && shift 2
  carryover train "$recipe" --stage "$stage" --out "$out/$name" --corpus recordings/smollm2-math --resume "$@"
}
for step in "${@:-baseline continued projector embedding evaluate}"; do
  for name in $step; do
    case $name in
      baseline) train baseline baseline ;;
      continued) train continued continued --start "$out/baseline" ;;
      projector | embedding) train "$name" carryover --start "$out/baseline" --set "carry.interface=$name" ;;
      evaluate)
        for t in 0 1; do
          carryover evaluate --target smollm2 --dtype float32 --prompts gsm8k_test --max-new-tokens 128 --batch-size 16 --stop-loops --temperature "$t" \
            --carry-off --drafter "$out/baseline" --drafter "$out/continued" --drafter "$out/embedding" --drafter "$out/projector" --out "$out/t$t"
        done ;;
      *) echo "unknown step $name" >&2 && exit 2 ;;
    esac
  done
done
