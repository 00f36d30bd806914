#!/usr/bin/env bash
# Trains the four models of configs/public_text.py and compares decoding methods on them, in pieces of a few minutes:
# a piece that runs out of time saves a checkpoint and ends with code 3, and the same command goes on from there.
#
#   FILES='corpus/*.txt.bz2' OUT=runs/family benchmarks/gpu_family.sh
#
# FILES    plain text, paths or globs separated by commas
# OUT      where everything goes
# SECONDS_PER_PIECE   time until a piece ends; default 540
# SIZES    default "97m 6m 2m 20m": the first is the target, the others are its drafts, distilled from it
# TRAIN    further arguments of train.main, such as --config.num_steps=1000
# DECODE   further arguments of decode.main
# PYTHON   default python
set -euo pipefail
: "${FILES:?plain text to train on}" "${OUT:?where everything goes}"
limit=${SECONDS_PER_PIECE:-540}
python=${PYTHON:-python}
read -r -a sizes <<<"${SIZES:-97m 6m 2m 20m}"
read -r -a train <<<"${TRAIN:-}"
read -r -a decode <<<"${DECODE:---num_drafts=8 --draft_length=8 --num_prompts=96 --batch_size=32 --num_seeds=3}"
target=${sizes[0]}
mkdir -p "$OUT"

# in_time COMMAND...: ends with code 3 if the piece's time is over before or while the command runs.
in_time() {
  local left=$((limit - SECONDS))
  ((left > 0)) || { echo 'out of time: run again'; exit 3; }
  timeout --signal=TERM --kill-after=60 "$left" "$@" || {
    local code=$?
    ((SECONDS >= limit)) && { echo 'out of time: run again'; exit 3; }
    exit "$code"
  }
}

common=("--config.files=$FILES" "--config.tokenizer=$OUT/tokenizer.json" "--config.cache_dir=$OUT/data" "${train[@]}")
[[ -e $OUT/tokenizer.json ]] || in_time "$python" -m train.tokenizer "--config=configs/public_text.py:$target" "${common[@]}"

for size in "${sizes[@]}"; do
  [[ -e $OUT/$size/done ]] && continue
  distilled=()
  [[ $size == "$target" ]] || distilled=("--config.distill_from=$OUT/$target/model")
  # The model of a run that stopped early is there before its end: only what it prints says that it is done.
  in_time "$python" -m train.main "--config=configs/public_text.py:$size" "--workdir=$OUT/$size" "${common[@]}" \
    "${distilled[@]}" | tee "$OUT/$size.log"
  grep -q '^held-out ' "$OUT/$size.log" || { echo 'out of time: run again'; exit 3; }
  touch "$OUT/$size/done"
done

for size in "${sizes[@]:1}"; do
  [[ -e $OUT/decode_$size.json ]] && continue
  in_time "$python" -m decode.main "--target=$OUT/$target/model" "--draft=$OUT/$size/model" \
    --method=autoregressive,speculative,block,spectr,race_block "${decode[@]}" \
    "--output=$OUT/decode_$size.json" | tee "$OUT/decode_$size.txt"
done
echo 'all done'
