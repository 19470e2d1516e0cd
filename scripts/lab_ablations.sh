#!/usr/bin/env bash
# Other ways to carry and to train it, from the baseline of a cell of recipes/lab.yaml (docs/experiments.md).
#   scripts/lab_ablations.sh [OUT] [CELL] [NAME...]      after `carryover run recipes/lab.yaml --out OUT`; five minutes each on one core
# Run again it goes on where it stopped. Results: OUT/ablations-CELL/{t0,t1}/results.json
set -euo pipefail
out=${1:-runs/lab-grid} name=${2:-markov-b16-s0}
shift $(($# < 2 ? $# : 2))
cell=$out/$name all=$out/ablations-$name seed=${name##*-s}
declare -A change=(
    [plain]="carry.interface=plain"                                  # carry rows look like context rows
    [projector]="carry.interface=projector"                          # a second fusion instead of one vector
    [post-norm]="carry.site=post_norm"                               # the vector behind the norm
    [hint]="carry.interface=hint"                                    # rejected tokens in the block's embeddings, no carry rows
    [hint-target]="carry.interface=hint carry.hint=target_top1"      # what the target would say behind them
    [guarded]="train.carryover.acceptance=target_guarded"            # V2g: anchors on which both acceptance rules agree
    [drawn]="train.carryover.proposal_temperature=1"                 # first drafts drawn, not argmax
    [unrolled]="train.carryover.unroll=2"                            # first drafts with carry, as when decoding
    [drawn-unrolled]="train.carryover.proposal_temperature=1 train.carryover.unroll=2"
    [drawn-unrolled-first]="train.carryover.proposal_temperature=1 train.carryover.unroll=2 train.carryover.first_pass_loss=0.5"
    [first]="train.carryover.first_pass_loss=0.5"                    # a loss on the first draft as well
    [dropout]="train.carryover.carry_dropout=0.3"                    # 30 % of anchors without carry
    [anchors-4]="train.carryover.anchors=4"
    [anchors-16]="train.carryover.anchors=16"
    [continued-16]="train.continued.anchors=16"                      # the control of `first` and `anchors-16`
    [gamma-4]="train.carryover.loss.gamma=4"                         # weights that fall as fast as those of a short block
    [continued-gamma-4]="train.continued.loss.gamma=4"
)
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(plain projector hint hint-target post-norm guarded drawn unrolled drawn-unrolled first dropout anchors-4 anchors-16 continued-16)
drafters=(--drafter "$cell/continued" --drafter "$cell/carryover")
for name in "${names[@]}"; do
    stage=carryover
    [[ $name == continued-* ]] && stage=continued
    if [ ! -e "$all/$name/finished" ]; then
        settings=()
        for setting in ${change[$name]}; do settings+=(--set "$setting"); done
        carryover train "$cell/recipe.yaml" --stage "$stage" --start "$cell/baseline" --out "$all/$name" --resume "${settings[@]}"
        touch "$all/$name/finished"
    fi
    drafters+=(--drafter "$all/$name")
done
rows=(--carry-rows 1 --carry-rows 2 --carry-rows 4 --carry-rows 8)
carryover evaluate --target lab --dtype float32 --prompts "${PROMPTS:-runs/lab/eval_prompts.jsonl}" --limit 400 --max-new-tokens 128 \
    --seed "$seed" --batch-size 100 --out "$all/rows" --drafter "$cell/carryover" --carry-off "${rows[@]}"
carryover evaluate --target lab --dtype float32 --prompts "${PROMPTS:-runs/lab/eval_prompts.jsonl}" --limit 400 --max-new-tokens 128 \
    --seed "$seed" --batch-size 100 --out "$all/proposals" --proposals 3 --proposals 7 "${drafters[@]}"
for temperature in 0 1; do
    carryover evaluate --target lab --dtype float32 --prompts "${PROMPTS:-runs/lab/eval_prompts.jsonl}" --limit 400 --max-new-tokens 128 \
        --temperature "$temperature" --seed "$seed" --batch-size 100 --out "$all/t$temperature" "${drafters[@]}"
done
