#!/usr/bin/env bash
# Trains a head for a public model on a GPU and measures it, in pieces of a few minutes: text that the
# target writes, training, then tokens per call on shipped prompts and on Spec-Bench. A piece that runs out of time
# saves its progress and ends with code 3. The same command then continues from there.
#
#   TARGET=SmolLM2-135M-Instruct.Q4_1.gguf OUT=runs/head WORK=/tmp/head SPEC_BENCH=question.jsonl benchmarks/gpu_head.sh
#
# TARGET      the model: a folder, a .gguf file or ORG/NAME
# OUT         directory for the results: head/ (10 MB for SmolLM2), its log, and one JSON file per measurement
# WORK        directory for all that is large: the text with the target's hidden states, checkpoints, compiled programs;
#             default OUT/work. A token takes 4.6 kB for SmolLM2, so the defaults take 18 GB. Where OUT is carried back
#             from another machine, name a directory outside of it. If WORK is lost, a head that is not complete begins
#             anew, with the same text, which is drawn from the same seeds. Once OUT has the head, WORK is not needed
# KIND        eagle3 (default), dspark or dflash
# SPEC_BENCH  question.jsonl of Spec-Bench; without it its prompts are left out
# SECONDS_PER_PIECE   time until a piece ends; default 480
# SHARDS      default 40: files of text, of which the first is held out
# ROWS        default 256: conversations of a file, which are decoded together
# STEPS       default 4000
# BATCH       default 32: conversations of a step
# TRAIN       further arguments of train.head, such as --config.learning_rate=1e-3
# DECODE      further arguments of decode.main; default
#             --num_prompts=80 --max_new_tokens=64 --batch_size=16 --dtype=bfloat16
# PYTHON      default python
set -euo pipefail
: "${TARGET:?the model that the head is for}" "${OUT:?where the results go}"
: "${SECONDS_PER_PIECE:=480}"
source "${BASH_SOURCE[0]%/*}/pieces.sh"
python=${PYTHON:-python}
work=${WORK:-$OUT/work}
kind=${KIND:-eagle3}
case $kind in
  eagle3) own=(--config.num_unrolled=3 --config.learning_rate=8e-4) length=4 tree=likeliest:6,4,3,2,1 ;;
  dspark | dflash) own=(--config.learning_rate=6e-4) length=7 tree=likeliest:4,4,3,2,1,1,1 ;;
  *) echo "KIND must be eagle3, dspark or dflash, got $kind" >&2; exit 2 ;;
esac
read -r -a train <<<"${TRAIN:-}"
read -r -a decode <<<"${DECODE:---num_prompts=80 --max_new_tokens=64 --batch_size=16 --dtype=bfloat16}"
mkdir -p "$OUT" "$work"
# A piece reuses the programs that earlier pieces compiled.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$work/compiled}

if [[ ! -e $OUT/head ]]; then
  in_time "$python" -m train.head "--config=configs/head.py:$kind" "--target=$TARGET" "--workdir=$work/run" \
    "--config.num_shards=${SHARDS:-40}" "--config.rows_per_shard=${ROWS:-256}" "--config.num_steps=${STEPS:-4000}" \
    "--config.batch_size=${BATCH:-32}" "${own[@]}" "${train[@]}" |
    tee "$work/training.log"
  # A run that was ended has saved its state and is no failure, so only the printed line tells that it is complete.
  grep -q '^held-out ' "$work/training.log" || { echo 'out of time: run again'; exit 3; }
  cp "$work/run/metrics.jsonl" "$OUT/training_log.jsonl"
  rm -rf "$OUT/head.part"
  cp -r "$work/run/head" "$OUT/head.part"
  mv "$OUT/head.part" "$OUT/head"
fi

# measure NAME ARGUMENTS...: decodes with the head on every set of prompts, unless its file exists.
measure() {
  local name=$1 set file
  for set in shipped ${SPEC_BENCH:+spec_bench}; do
    file=$OUT/${set}_$name.json
    [[ -e $file ]] && continue
    [[ $set == shipped ]] && prompts=() || prompts=("--prompts=spec_bench:$SPEC_BENCH")
    in_time "$python" -m decode.main "--target=$TARGET" "--draft=$OUT/head" --chat --skip_long "${prompts[@]}" \
      "${decode[@]}" "${@:2}" "--output=$file"
  done
}

chain=(--num_drafts=1 "--draft_length=$length")
measure greedy_chain --temperature=0 --method=autoregressive,speculative "${chain[@]}"
measure greedy_tree --temperature=0 --method=specinfer "--tree=$tree"
measure sampled_chain --temperature=1 --method=autoregressive,speculative,block "${chain[@]}"
measure sampled_tree --temperature=1 --method=spectr,race_traversal --num_drafts=4 "--draft_length=$length"
echo 'all done'
