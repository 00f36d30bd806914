"""Whether `--method=auto` finds the fastest setting: its choice beside every setting of its grid, decoded.

Command   python -m benchmarks.auto --num_prompts=32 --batch_size=1 --output=auto.json
Models    the pretrained pair, or --target and --draft; with --shapes random weights in the shapes A and B of
          benchmarks/README.md, whose distributions overlap by 0.4 on average
Prompts   --num_prompts of --prompts, from the first; `auto` times settings on the first of them with another seed

Every setting of the grid is then decoded. Settings take turns batch by batch as far as their programs fit in one
process. Otherwise they form groups. Every group includes autoregressive decoding, and its speed scales those of later
groups to the first.

The output is the chosen setting beside the fastest one, with the ratio of their speeds and its 95% interval over
batches, and all speeds, with those that `auto` timed. If the two are in different groups, the interval does not include
the error of the scale.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from benchmarks.speed_models import SHAPES, make_model
from common import command_line
from common.output_files import OutputFiles
from decode.experiment import metrics
from decode.experiment.auto_choice import grid, speeds_of
from decode.experiment.console import show_progress
from decode.experiment.model_options import AUTO
from decode.experiment.run import measure
from decode.experiment.workload import Workload
from spectr_jax.auto import Setting, Speed
from spectr_jax.auto.setting import baseline_among
from spectr_jax.auto.trial import Notify
from spectr_jax.draft import as_drafter
from spectr_jax.engine.program_memory import describe_groups


def with_shapes(workload: Workload) -> Workload:
  """The same prompts, whose ids are in both vocabularies, with models of the shapes A (target) and B (draft)."""
  dtype = workload.options.models.dtype or 'float32'
  described = {
    role: {'shape': shape, 'num_params': SHAPES[shape].num_params, 'dtype': dtype}
    for role, shape in (('target', 'A'), ('draft', 'B'))
  }
  info = workload.info | {'models': described}
  return dataclasses.replace(workload, target=make_model('A', dtype), draft=make_model('B', dtype), info=info)


def compare_choice(workload: Workload, speeds: Sequence[Speed], settings: Sequence[Setting], notify: Notify) -> dict:
  """JSON values about what `auto` timed, the fastest first, beside the speeds of all settings when decoded."""
  timed = {each.setting: each.tokens_per_second for each in speeds}
  run = measure(workload, list(dict.fromkeys([*settings, *timed])), notify)
  summaries = {setting: run.summarize(setting) for setting in run.settings}
  baseline = baseline_among(run.settings)

  def batch_speeds(setting):
    (tokens, seconds), (_, beside) = run.batch_speeds(setting)
    return tokens, seconds * (summaries[baseline]['seconds'] / beside.sum())

  chosen, best = speeds[0].setting, max(run.settings, key=lambda setting: summaries[setting]['speedup'])
  factor, low, high = metrics.compare(batch_speeds(chosen), batch_speeds(best))
  rows = [
    {
      'setting': str(each),
      'timed': timed.get(each),
      'measured': summaries[baseline]['tokens_per_second'] * summaries[each]['speedup'],
      'tokens_per_call': summaries[each]['block_efficiency'],
    }
    for each in run.settings
  ]
  return {
    'run': run.info,
    'settings': sorted(rows, key=lambda row: -row['measured']),
    'chosen': str(chosen),
    'best': str(best),
    'chosen_over_best': factor,
    'chosen_over_best_ci95': [low, high],
  }


def print_comparison(comparison: dict) -> None:
  for row in comparison['settings']:
    timed = '' if row['timed'] is None else f', timed {row["timed"]:7.1f}'
    print(f'{row["setting"]:28} {row["measured"]:7.1f} tokens/s{timed}')
  for line in describe_groups(comparison['run']['timed_together']):
    print(line)
  low, high = comparison['chosen_over_best_ci95']
  print(
    f'chosen {comparison["chosen"]}, the fastest of {len(comparison["settings"])} {comparison["best"]}:'
    f' {comparison["chosen_over_best"]:.3f} ({low:.3f} to {high:.3f}) times as fast'
  )


if __name__ == '__main__':
  from absl import flags

  from decode.experiment.option_flags import read_options

  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the results.')
  _SHAPES = flags.DEFINE_bool('shapes', False, 'Random weights in the shapes A and B in place of --target and --draft.')

  def main():
    options = read_options(method=(AUTO,))
    if _SHAPES.value and options.models.mesh:
      raise ValueError('shapes are for one device, without a mesh')
    with OutputFiles(output=_OUTPUT.value).apart_from(options.inputs()) as outputs:
      with show_progress() as notify:
        workload = Workload.load(options)
        if _SHAPES.value:
          workload = with_shapes(workload)
        if len(workload.batches) < 2:
          raise ValueError(
            f'intervals are over batches: num_prompts must be above batch_size {options.prompts.batch_size}'
          )
        speeds, _ = speeds_of(workload, notify)
        settings, _ = grid(options, as_drafter(workload.draft))
        comparison = compare_choice(workload, speeds, settings, notify)
      outputs.write_after(lambda: print_comparison(comparison), output=json.dumps(comparison, indent=2) + '\n')

  command_line.run(main)
