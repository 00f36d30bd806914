"""The accuracy of `--method=auto`: predicted against measured tokens per second, over the whole grid.

Command   python -m benchmarks.auto --num_prompts=32 --batch_size=1 --output=auto.json
Models    the pretrained pair, or --target and --draft; with --shapes random weights in the shapes A and B of
          benchmarks/README.md, whose distributions overlap by 0.4 on average
Prompts   --num_prompts of --prompts, from the first; `auto` is calibrated on the first of them with another seed

Every setting that `auto` compares is then decoded. Settings take turns batch by batch as far as their programs fit in
one process. Otherwise they form groups. Every group includes autoregressive decoding, and its speed scales those of
later groups to the first.

The output is the largest and the median error of the predictions, in tokens per second and as multiples of
autoregressive decoding, which a machine's speed since the calibration does not change; and the chosen setting beside
the fastest measured one, with the ratio of their speeds and its 95% interval over batches. If the two are in different
groups, the interval does not include the error of the scale.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from benchmarks.speed_models import SHAPES, make_model
from common import command_line
from common.output_files import OutputFiles
from decode.experiment import metrics
from decode.experiment.auto_choice import predict_all
from decode.experiment.console import show_progress
from decode.experiment.options import AUTO
from decode.experiment.run import measure
from decode.experiment.workload import Workload
from spectr_jax.auto.setting import baseline_of
from spectr_jax.engine.program_memory import describe_groups


def with_shapes(workload: Workload) -> Workload:
  """The same prompts, whose ids are in both vocabularies, with models of the shapes A (target) and B (draft)."""
  dtype = workload.options.dtype or 'float32'
  described = {
    role: {'shape': shape, 'num_params': SHAPES[shape].num_params, 'dtype': dtype}
    for role, shape in (('target', 'A'), ('draft', 'B'))
  }
  info = workload.info | {'models': described}
  return dataclasses.replace(workload, target=make_model('A', dtype), draft=make_model('B', dtype), info=info)


def compare_predictions(workload: Workload, predictions, notify) -> dict:
  """JSON values about predicted settings, the fastest first, beside their speeds when decoded."""
  run = measure(workload, [each.setting for each in predictions], notify)
  summaries = {setting: run.summarize(setting) for setting in run.settings}
  baseline = baseline_of(run.settings)
  speed = summaries[baseline].tokens_per_second
  rows = [
    {
      'setting': str(each.setting), 'is_observed': each.is_observed, 'predicted': each.tokens_per_second,
      'measured': speed * summaries[each.setting].speedup, 'predicted_tokens_per_call': each.tokens_per_call,
      'tokens_per_call': summaries[each.setting].block_efficiency,
    }
    for each in predictions
  ]  # fmt: skip

  def batch_speeds(setting):
    (tokens, seconds), (_, beside) = run.batch_speeds(setting)
    return tokens, seconds * (summaries[baseline].seconds / beside.sum())

  chosen = predictions[0].setting
  best = max(run.settings, key=lambda setting: summaries[setting].speedup)
  factor, low, high = metrics.compare(batch_speeds(chosen), batch_speeds(best))
  ratios = {each.setting: row['predicted'] / row['measured'] for each, row in zip(predictions, rows)}
  drift = ratios[baseline]

  def errors(ratios):
    of = {setting: abs(ratio - 1) for setting, ratio in ratios.items()}
    values = np.array(list(of.values()))
    return {
      'median': float(np.median(values)), 'largest': float(values.max()),
      'share_within_10_percent': float(np.mean(values <= 0.1)), 'of_the_chosen': of.get(chosen, 0.0),
    }  # fmt: skip

  return {
    'run': run.info,
    'settings': rows,
    'errors': errors(ratios),
    'errors_of_speedups': errors({s: ratio / drift for s, ratio in ratios.items() if s != baseline}),
    'chosen': str(chosen),
    'best': str(best),
    'chosen_over_best': factor,
    'chosen_over_best_ci95': [low, high],
  }


def print_comparison(comparison: dict) -> None:
  for row in sorted(comparison['settings'], key=lambda row: -row['measured']):
    predicted, measured = row['predicted'], row['measured']
    ratio = predicted / measured
    print(f'{row["setting"]:28} predicted {predicted:7.1f}, measured {measured:7.1f} tokens/s: {ratio:.2f}')
  for line in describe_groups(comparison['run']['timed_together']):
    print(line)
  low, high = comparison['chosen_over_best_ci95']
  for what, field in (('tokens/s', 'errors'), ('multiples of autoregressive decoding', 'errors_of_speedups')):
    of = comparison[field]
    print(
      f'{what}: errors of {of["median"]:.1%} in the median, {of["largest"]:.1%} at most, {of["of_the_chosen"]:.1%} of'
      f' the chosen; within 10% for {of["share_within_10_percent"]:.0%} of {len(comparison["settings"])} settings'
    )
  print(
    f'chosen {comparison["chosen"]}, fastest measured {comparison["best"]}:'
    f' {comparison["chosen_over_best"]:.3f} ({low:.3f} to {high:.3f}) times as fast'
  )


if __name__ == '__main__':
  from absl import flags

  from decode.experiment.option_flags import read_options

  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the results.')
  _SHAPES = flags.DEFINE_bool('shapes', False, 'Random weights in the shapes A and B in place of --target and --draft.')

  def main(argv):
    del argv
    options = read_options(method=(AUTO,))
    if _SHAPES.value and options.mesh:
      raise ValueError('shapes are for one device, without a mesh')
    with OutputFiles(output=_OUTPUT.value).apart_from(options.inputs()) as outputs:
      with show_progress() as notify:
        workload = Workload.load(options)
        if _SHAPES.value:
          workload = with_shapes(workload)
        if len(workload.batches) < 2:
          raise ValueError(f'intervals are over batches: num_prompts must be above batch_size {options.batch_size}')
        comparison = compare_predictions(workload, predict_all(workload, notify), notify)
      outputs.write_after(lambda: print_comparison(comparison), output=json.dumps(comparison, indent=2) + '\n')

  command_line.run(main)
