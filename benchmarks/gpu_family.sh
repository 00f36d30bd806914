#!/usr/bin/env bash
# Trains the four models of configs/public_text.py and measures the papers' tables on them, in pieces of a few minutes.
# A piece that runs out of time saves its progress and ends with code 3. The same command then continues from there.
#
#   FILES='corpus/*.txt.bz2' OUT=runs/family PROMPTS=HumanEval=HumanEval.jsonl.gz benchmarks/gpu_family.sh
#
# FILES    plain text, paths or globs separated by commas
# OUT      directory for all output
# PROMPTS  files of prompts, NAME=FILE separated by commas, for the tables of SpecTr-GBV; default the shipped prompts
# TEXTS    the same for those of SpecTr
# SECONDS_PER_PIECE   time until a piece ends; default 540
# SIZES    default "97m 6m 2m 20m": the first is the target, the others are drafts distilled from it; tables with a
#          single draft use the second
# TRAIN    further arguments of train.main, such as --config.num_steps=1000
# TABLES   default: all
# LATENCY  further arguments of decode.reproduce for tables of latency
# DECODE   further arguments of decode.reproduce for all other tables; a table that does not fit into a whole piece
#          twice ends with code 4
# PEAK     peak of the device in TFLOP/s, bfloat16, for model FLOP utilisation without the teacher's FLOPs; default 989
#          (H100, H200)
# PYTHON   default python
set -euo pipefail
: "${FILES:?plain text to train on}" "${OUT:?where everything goes}"
: "${SECONDS_PER_PIECE:=540}"
source "${BASH_SOURCE[0]%/*}/pieces.sh"
python=${PYTHON:-python}
read -r -a sizes <<<"${SIZES:-97m 6m 2m 20m}"
read -r -a train <<<"${TRAIN:-}"
all='spectr_table1 spectr_table3 spectr_table2 spectr_table4 gbv_table1 gbv_table2 gbv_table4 gbv_figure2 gbv_table5'
read -r -a tables <<<"${TABLES:-$all}"
read -r -a latency <<<"${LATENCY:---num_runs=1000}"
read -r -a decode <<<"${DECODE:---num_prompts=128 --num_seeds=3}"
((${#sizes[@]} > 1)) || { echo 'SIZES must name a target and at least one draft' >&2; exit 1; }
target=${sizes[0]}
mkdir -p "$OUT"
# A piece reuses the programs that earlier pieces compiled.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$OUT/compiled}

common=("--config.files=$FILES" "--config.tokenizer=$OUT/tokenizer.json" "--config.cache_dir=$OUT/data" "${train[@]}")
[[ -e $OUT/tokenizer.json ]] || in_time "$python" -m train.tokenizer "--config=configs/public_text.py:$target" "${common[@]}"

for size in "${sizes[@]}"; do
  [[ -e $OUT/$size/done ]] && continue
  distilled=()
  [[ $size == "$target" ]] || distilled=("--config.distill_from=$OUT/$target/model")
  # With early stopping the model exists before the run ends, so only the printed line tells that the run is done.
  in_time "$python" -m train.main "--config=configs/public_text.py:$size" "--workdir=$OUT/$size" "${common[@]}" \
    "${distilled[@]}" | tee "$OUT/$size.log"
  grep -q '^held-out ' "$OUT/$size.log" || { echo 'out of time: run again'; exit 3; }
  touch "$OUT/$size/done"
done

"$python" - "$OUT" "${PEAK:-989}" "${sizes[@]}" <<'END' | tee "$OUT/utilisation.txt"
import json, pathlib, statistics, sys
out, peak, *sizes = sys.argv[1:]
for size in sizes:
  lines = map(json.loads, (pathlib.Path(out) / size / 'metrics.jsonl').read_text().splitlines())
  speeds = [line['teraflops_per_device'] for line in lines if 'teraflops_per_device' in line]
  if not speeds:
    print(f'{size}: no speed was recorded')
    continue
  speed = statistics.median(speeds)
  print(f'{size}: {speed:.4g} TFLOP/s per device, median over log intervals: {speed / float(peak):.1%} of {peak}')
END

drafts=
for size in "${sizes[@]:1}"; do drafts+=${drafts:+,}$size=$OUT/$size/model; done
for table in "${tables[@]}"; do
  [[ -e $OUT/tables/$table.json ]] && continue
  arguments=("--table=$table" "--target=$OUT/$target/model" "--output=$OUT/tables" "--draft=$OUT/${sizes[1]}/model")
  case $table in
    spectr_table1 | spectr_table3) arguments+=("${latency[@]}") ;;
    spectr_table4) arguments+=("--draft=$drafts" "${decode[@]}" ${TEXTS:+"--prompts=$TEXTS"}) ;;
    spectr_table2) arguments+=("${decode[@]}" ${TEXTS:+"--prompts=$TEXTS"}) ;;
    *) arguments+=("${decode[@]}" ${PROMPTS:+"--prompts=$PROMPTS"}) ;;
  esac
  begun=$SECONDS
  # A subshell, so that a table that does not fit into any piece is told from one that started late. The first whole
  # piece may have been spent on compiling, which the second does not repeat.
  (in_time "$python" -m decode.reproduce "${arguments[@]}") || {
    code=$?
    if ((code == 3 && begun * 10 < SECONDS_PER_PIECE)); then
      [[ -e $OUT/$table.tried ]] && { echo "$table: $SECONDS_PER_PIECE seconds are too short; ask for less"; exit 4; }
      touch "$OUT/$table.tried"
    fi
    exit "$code"
  }
done
echo 'all done'
