#!/usr/bin/env bash
# Does it matter at which temperature the responses were recorded? The Markov cell of recipes/lab-small.yaml (15 proposals, seed 0) with responses of T=0
# and T=1; T=0.7 is the grid itself.
#   scripts/lab_temperatures.sh [OUT]      after `carryover lab --prompts-only ...` as in the recipe; 15 minutes of one core each; goes on where it stopped
# Results: OUT/recorded-tT/markov-b16-s0/{t0,t1}/results.json
set -euo pipefail
out=${1:-runs/lab-small}
shift $(($# < 1 ? $# : 1))
for temperature in 0 1; do
    carryover run recipes/lab-small.yaml --out "$out/recorded-t$temperature" --cell markov-b16-s0 --set "record.temperature=$temperature" "$@"
done
