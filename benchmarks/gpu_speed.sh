#!/usr/bin/env bash
# Speed on a GPU by batch size: where speculation stops paying, race_block against spectr, the share of the bandwidth that
# a step uses, and a profile of some rounds. It runs in pieces of a few minutes. Existing results are not measured again,
# and a piece that runs out of time ends with code 3.
#
#   TARGET=runs/family/97m/model DRAFT=runs/family/6m/model OUT=runs/speed benchmarks/gpu_speed.sh
#
# TARGET, DRAFT  directories of the models; default the pretrained pair
# OUT            directory for all output
# BATCHES        default "1 8 64 256"
# DECODE         further arguments of decode.main; default --num_prompts=256
# SHAPES         arguments of benchmarks.speed; default --dtype=bfloat16 --batch_size=1,8,64,256 --nopeer; "none" leaves it out
# SECONDS_PER_PIECE   time until a piece ends; default 540
# PYTHON         default python
set -euo pipefail
: "${OUT:?where everything goes}"
limit=${SECONDS_PER_PIECE:-540}
python=${PYTHON:-python}
read -r -a batches <<<"${BATCHES:-1 8 64 256}"
read -r -a decode <<<"${DECODE:---num_prompts=256}"
read -r -a shapes <<<"${SHAPES:---dtype=bfloat16 --batch_size=1,8,64,256 --nopeer}"
models=(${TARGET:+"--target=$TARGET"} ${DRAFT:+"--draft=$DRAFT"})
mkdir -p "$OUT"
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$OUT/compiled}

# piece FILE COMMAND...: runs the command, which writes the file, unless the file exists.
piece() {
  local file=$1 left=$((limit - SECONDS)) code=0
  shift
  [[ -e $file ]] && return
  ((left > 0)) || { echo 'out of time: run again'; exit 3; }
  timeout --signal=TERM --kill-after=60 "$left" "$@" || code=$?
  ((code == 0)) && return
  ((SECONDS >= limit)) && { echo 'out of time: run again'; exit 3; }
  exit "$code"
}

[[ ${shapes[0]} == none ]] || piece "$OUT/shapes.json" "$python" -m benchmarks.speed "${shapes[@]}" "--output=$OUT/shapes.json"
for batch in "${batches[@]}"; do
  profile=()
  [[ $batch == "${batches[0]}" ]] && profile=("--profile_dir=$OUT/profile")
  piece "$OUT/batch_$batch.json" "$python" -m decode.main "${models[@]}" "--batch_size=$batch" --skip_long \
    --method=autoregressive,speculative,block,spectr,race_block,race_traversal --num_drafts=1,4,8 --draft_length=4,8 \
    "${decode[@]}" "${profile[@]}" "--output=$OUT/batch_$batch.json"
done
echo 'all done'
