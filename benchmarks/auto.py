"""Whether `--method=auto` predicts well: predicted tokens per second against measured, over the whole grid.

Command   python -m benchmarks.auto --num_prompts=32 --batch_size=1 --output=auto.json
Models    the pretrained pair, or --target and --draft
Prompts   --num_prompts of --prompts, from the first; `auto` is calibrated on the first of them with another seed

Every setting that `auto` compares is then decoded, in turns, batch by batch, as far as their programs fit in one
process. Printed: the largest and the median error of the predictions, the setting that was chosen, the fastest that was
measured, and the speed of the one over the other's with its 95% interval over batches.
"""

from __future__ import annotations

import json

import numpy as np
from absl import flags

from decode import auto, metrics, report
from decode.option_flags import read_options
from decode.options import AUTO
from decode.output_files import OutputFiles
from decode.program_memory import describe_groups
from decode.run import measure
from decode.workload import Workload
from spectr_jax.io import command_line

_OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the results.')


def compare_predictions(workload: Workload, predictions, notify) -> dict:
  """Decodes all that was predicted; JSON values."""
  run = measure(workload, [found.setting for found in predictions], notify)
  summaries = {setting: run.summarize(setting) for setting in run.settings}
  rows = [
    {
      'setting': str(found.setting),
      'is_observed': found.is_observed,
      'predicted': found.tokens_per_second,
      'measured': summaries[found.setting].tokens_per_second,
      'predicted_tokens_per_call': found.tokens_per_call,
      'tokens_per_call': summaries[found.setting].block_efficiency,
    }
    for found in predictions
  ]

  def batch_speeds(setting):
    own = [found for found in run.measurements if found.setting == setting]
    starts = range(0, len(run.prompts), workload.batch_size)
    return np.add.reduceat(sum(found.lengths for found in own), starts), sum(found.batch_seconds for found in own)

  chosen = predictions[0].setting
  best = max(run.settings, key=lambda setting: summaries[setting].tokens_per_second)
  factor, low, high = metrics.compare(batch_speeds(chosen), batch_speeds(best))
  errors = np.array([abs(row['predicted'] / row['measured'] - 1) for row in rows])
  return {
    'run': run.info,
    'settings': rows,
    'largest_error': float(errors.max()),
    'median_error': float(np.median(errors)),
    'share_within_10_percent': float(np.mean(errors <= 0.1)),
    'error_of_the_chosen': float(errors[0]),
    'chosen': str(chosen),
    'best': str(best),
    'chosen_over_best': factor,
    'chosen_over_best_ci95': [low, high],
  }


def main(argv):
  del argv
  options = read_options(method=(AUTO,))
  with OutputFiles(output=_OUTPUT.value) as outputs:
    with report.show_progress() as notify:
      workload = Workload.load(options)
      found = compare_predictions(workload, auto.predict_all(workload, notify), notify)
    outputs.write(output=json.dumps(found, indent=2) + '\n')
  for row in sorted(found['settings'], key=lambda row: -row['measured']):
    predicted, measured = row['predicted'], row['measured']
    ratio = predicted / measured
    print(f'{row["setting"]:28} predicted {predicted:7.1f}, measured {measured:7.1f} tokens/s: {ratio:.2f}')
  for line in describe_groups(found['run']['timed_together']):
    print(line)
  low, high = found['chosen_over_best_ci95']
  print(
    f'\nerror: median {found["median_error"]:.1%}, largest {found["largest_error"]:.1%}, at most 10% for'
    f' {found["share_within_10_percent"]:.0%} of {len(found["settings"])}; of the chosen'
    f' {found["error_of_the_chosen"]:.1%}\nchosen {found["chosen"]}, fastest measured {found["best"]}:'
    f' {found["chosen_over_best"]:.3f} ({low:.3f} to {high:.3f}) times as fast'
  )


if __name__ == '__main__':
  command_line.run(main)
