#!/usr/bin/env bash
# A public model from disk on a GPU, in pieces of a few minutes: prompt lookup and a head beside no draft and beside
# Hugging Face's transformers, greedily and at temperature 1, one row and eight; then steps of autoregressive decoding
# beside transformers' with a static cache, compiled. Existing results are not measured again, and a piece that runs out
# of time ends with code 3: run it again.
#
#   TARGET=SmolLM2-135M-Instruct.Q4_1.gguf OUT=runs/public PROMPTS=spec_bench:question.jsonl benchmarks/gpu_public.sh
#
# TARGET    the model: a .gguf file
# DRAFTERS  as for --drafters of benchmarks.drafters; default lookup,pretrained/smollm2_head
# OUT       directory for all output
# PROMPTS   as for --prompts of decode.main; default the shipped prompts
# BATCHES   default "1 8"
# DECODE    further arguments of benchmarks.drafters; default
#           --num_prompts=12 --max_new_tokens=64 --dtype=bfloat16 --peer_device=cuda
# STEPS     arguments of benchmarks.speed; default --dtype=bfloat16 --batch_size=1,8 --peer_device=cuda; "none" leaves
#           it out
# SECONDS_PER_PIECE   time until a piece ends; default 480
# PYTHON    default python
set -euo pipefail
: "${TARGET:?a .gguf file}" "${OUT:?where everything goes}"
: "${SECONDS_PER_PIECE:=480}"
source "${BASH_SOURCE[0]%/*}/pieces.sh"
python=${PYTHON:-python}
read -r -a batches <<<"${BATCHES:-1 8}"
read -r -a decode <<<"${DECODE:---num_prompts=12 --max_new_tokens=64 --dtype=bfloat16 --peer_device=cuda}"
read -r -a steps <<<"${STEPS:---dtype=bfloat16 --batch_size=1,8 --peer_device=cuda}"
mkdir -p "$OUT"
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$OUT/compiled}
# The peer shares the GPU.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.4}

greedy=(--temperature=0 --method=autoregressive,speculative,race_traversal --num_drafts=1 --tree=chains
  --tree=likeliest:6,4,3,2,1)
sampled=(--temperature=1 --method=autoregressive,speculative,block,race_traversal --num_drafts=1,4)
for batch in "${batches[@]}"; do
  for name in greedy sampled; do
    declare -n how=$name
    file=$OUT/${name}_$batch.json
    [[ -e $file ]] || in_time "$python" -m benchmarks.drafters "--target=$TARGET" --chat --skip_long \
      "--drafters=${DRAFTERS:-lookup,pretrained/smollm2_head}" ${PROMPTS:+"--prompts=$PROMPTS"} "--batch_size=$batch" \
      --draft_length=4 "${how[@]}" "${decode[@]}" "--output=$file"
  done
done
if [[ ${steps[0]} != none && ! -e $OUT/steps.json ]]; then
  in_time "$python" -m benchmarks.speed "--target=$TARGET" --part=peer --part=steps "${steps[@]}" \
    "--output=$OUT/steps.json"
fi
echo 'all done'
