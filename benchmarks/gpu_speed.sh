#!/usr/bin/env bash
# Speed on a GPU: an 8B target with random weights, a draft of 161M and a head of EAGLE-3's sizes (the step beside its
# floor, rounds of 1 x 4, 4 x 8 and 4 x 16 and their parts, a profile, assisted decoding of transformers if torch has
# CUDA); then, by batch size, where speculation stops paying with models from disk. It runs in pieces of a few minutes.
# Existing results are not measured again, and a piece that runs out of time ends with code 3: run it again.
#
#   TARGET=runs/family/97m/model DRAFT=runs/family/6m/model OUT=runs/speed benchmarks/gpu_speed.sh
#
# TARGET, DRAFT  directories of the models; default the pretrained pair
# OUT            directory for all output; sizes.json and sizes_profile.tar.gz are those of the 8B target
# SIZES          arguments of benchmarks.speed for models with random weights; "none" leaves them out; default
#                --target_config=configs/hub/llama_3_8b --head --dtype=bfloat16 --batch_size=1,8,64
# BATCHES        default "1 8 64 256"; "none" leaves the models from disk out
# DECODE         further arguments of decode.main; default --num_prompts=256
# SHAPES         arguments of benchmarks.speed; default --dtype=bfloat16 --batch_size=1,8,64,256 --nopeer; "none" leaves it out
# SECONDS_PER_PIECE   time until a piece ends; default 480
# PYTHON         default python
set -euo pipefail
: "${OUT:?where everything goes}"
: "${SECONDS_PER_PIECE:=480}"
source "${BASH_SOURCE[0]%/*}/pieces.sh"
python=${PYTHON:-python}
read -r -a batches <<<"${BATCHES:-1 8 64 256}"
read -r -a decode <<<"${DECODE:---num_prompts=256}"
read -r -a sizes <<<"${SIZES:---target_config=configs/hub/llama_3_8b --head --dtype=bfloat16 --batch_size=1,8,64}"
read -r -a shapes <<<"${SHAPES:---dtype=bfloat16 --batch_size=1,8,64,256 --nopeer}"
models=(${TARGET:+"--target=$TARGET"} ${DRAFT:+"--draft=$DRAFT"})
mkdir -p "$OUT"
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$OUT/compiled}

# piece FILE COMMAND...: runs the command, which writes the file, unless the file exists.
piece() {
  [[ -e $1 ]] || in_time "${@:2}"
}

if [[ ${sizes[0]} != none && ! -e $OUT/sizes_profile.tar.gz ]]; then
  # It adds to the file what is missing. The peer shares the GPU.
  XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.7} in_time "$python" -m benchmarks.speed "${sizes[@]}" "--output=$OUT/sizes.json"
  tar -czf "$OUT/sizes_profile.part" -C "$OUT" sizes_profile
  mv "$OUT/sizes_profile.part" "$OUT/sizes_profile.tar.gz"
fi
[[ ${shapes[0]} == none ]] || piece "$OUT/shapes.json" "$python" -m benchmarks.speed "${shapes[@]}" "--output=$OUT/shapes.json"
for batch in "${batches[@]}"; do
  [[ $batch == none ]] && break
  profile=()
  [[ $batch == "${batches[0]}" ]] && profile=("--profile_dir=$OUT/profile")
  piece "$OUT/batch_$batch.json" "$python" -m decode.main "${models[@]}" "--batch_size=$batch" --skip_long \
    --method=autoregressive,speculative,block,spectr,race_block,race_traversal --num_drafts=1,4,8 --draft_length=4,8 \
    "${decode[@]}" "${profile[@]}" "--output=$OUT/batch_$batch.json"
done
echo 'all done'
