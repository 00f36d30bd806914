"""Spec-Bench: tokens per target call, speed and speed-up by task, beside its published leaderboard."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decode.experiment import metrics
from decode.experiment.measurements import DecodeRun
from decode.experiment.model_options import AUTO
from decode.experiment.options import fitting
from decode.experiment.prompt_options import PromptOptions
from decode.experiment.prompt_sets import SPEC_BENCH_TASKS
from decode.experiment.prompts import Prompt, take_evenly
from decode.experiment.settings import Setting
from decode.papers import published
from decode.papers.exhibit import (
  CUT_ROUNDS,
  HERE,
  Request,
  Results,
  Table,
  block_efficiency,
  decode_sets,
  setting_columns,
)
from decode.plots import Bars
from decode.study import Row, Value
from spectr_jax.auto.trial import Notify
from spectr_jax.methods import get_method

TASKS = tuple(dict.fromkeys(SPEC_BENCH_TASKS.values()))
OVERALL = 'overall'
_LEADERBOARD = 'leaderboard: A100, Vicuna-13B'


def _task_of(prompt: Prompt) -> str:
  return SPEC_BENCH_TASKS[prompt.task]


def _check_prompts(request: Request) -> None:
  """Refuses prompts that have no tasks of Spec-Bench, or are of several files."""
  prompts = [prompt for path in request.prompts.values() for prompt in PromptOptions(prompts=path).read()]
  if len(request.prompts) != 1 or any(prompt.task not in SPEC_BENCH_TASKS for prompt in prompts):
    raise ValueError('this table is about the tasks of Spec-Bench: give one file, as --prompts=spec_bench:FILE')


def _methods(names: Sequence[str]) -> tuple[str, ...]:
  """The methods, led by autoregressive decoding if none of them decodes without drafts."""
  if not names:
    raise ValueError('no method given; autoregressive decoding alone is --method=autoregressive')
  has_baseline = any(name != AUTO and get_method(name).max_drafts == 0 for name in names)
  return tuple(names) if has_baseline else ('autoregressive', *names)


def _fitting(drafts: Mapping[str, str], options: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
  """The methods and trees to run with each draft, and a line for each draft that does not take all of them.

  A draft alone has all of them, so that the run refuses what does not fit.
  """
  every, trees = _methods(options['method']), options['tree']
  if len(drafts) == 1:
    return dict.fromkeys(drafts, {'method': every, 'tree': trees}), []
  taken, lines = {}, []
  for name, path in drafts.items():
    methods, kept = fitting(path, every, trees)
    taken[name] = {'method': methods, 'tree': kept}
    if missing := [each for each in (*every, *trees) if each not in (*methods, *kept)]:
      lines.append(f'{name}: without {", ".join(missing)}, which its guesses are not for')
  return taken, lines


def _rows_by_task(prompts: Sequence[Prompt]) -> dict[str, np.ndarray]:
  """Indices of the prompts of each task that has any, and of all prompts as `overall`."""
  tasks = np.array([_task_of(prompt) for prompt in prompts])
  return {task: np.flatnonzero(tasks == task) for task in TASKS if task in tasks} | {OVERALL: np.arange(len(tasks))}


def _speed_columns(run: DecodeRun, setting: Setting) -> Row:
  """Speed and speed-up by Spec-Bench's definition: means of each prompt's tokens per second, in batches of one."""
  speeds, others = ((tokens / seconds, np.ones(len(tokens))) for tokens, seconds in run.batch_speeds(setting))
  interval = (
    metrics.compare(speeds, others)[1:] if len(run.prompts) >= metrics.MIN_UNITS and setting.tree.num_nodes else None
  )
  return {
    'tokens/s': Value.of(metrics.ratio(*speeds), metrics.within(metrics.ratio_interval(*speeds), 0)),
    'speed-up': Value(metrics.ratio(*speeds) / metrics.ratio(*others), interval=interval),
  }


def _measured_row(run: DecodeRun, setting: Setting, task: str, draft: str) -> Row:
  summary = run.summarize(setting)
  row: Row = {'task': task, 'of': HERE, 'prompts': len(run.prompts)} | setting_columns(setting, draft=draft)
  row |= {
    'tree': setting.tree_name,
    'temperature': run.options.sampling.temperature,
    'mean accepted tokens': block_efficiency(summary),
  }
  row |= _speed_columns(run, setting)
  shares = ' '.join(f'{share:.2f}' for share in summary['acceptance_by_position'])
  return row | {'acceptance by position': shares or None}


def _published_rows(task: str, columns: Sequence[str]) -> list[Row]:
  """The leaderboard's rows of a task; it prints the mean accepted tokens over all prompts only."""
  rows = []
  for method, (speedups, accepted) in published.SPEC_BENCH.items():
    row: Row = dict.fromkeys(columns) | {'task': task, 'of': _LEADERBOARD, 'method': method, 'temperature': 0.0}
    row['speed-up'] = Value(speedups[published.SPEC_BENCH_COLUMNS.index(task)])
    row['mean accepted tokens'] = Value(accepted) if task == OVERALL else None
    rows.append(row)
  return rows


def _describe_sample(prompts: Sequence[Prompt]) -> list[str]:
  """A line on the sample, and one on tasks without a prompt."""
  counts = {task: len(rows) for task, rows in _rows_by_task(prompts).items() if task != OVERALL}
  each = ', '.join(f'{task} {count}' for task, count in counts.items())
  missing = [task for task in TASKS if task not in counts]
  lines = [f'sample: taken evenly over the tasks and spread over each, not from the start of the file: {each}']
  if missing:
    lines.append(f'without a prompt: {", ".join(missing)}; the models hold none of theirs, or num_prompts is too small')
  return lines


def _measure(request: Request, notify: Notify) -> Results:
  """Every setting on every task and overall, then the leaderboard's row of that task."""
  _check_prompts(request)
  results = Results()
  pick = functools.partial(take_evenly, group=_task_of)
  taken, lines = _fitting(request.drafts, request.options)
  by_task: dict[str, list[Row]] = {}
  for (draft, path), temperature in itertools.product(request.drafts.items(), request.options['temperature']):
    own = taken[draft] | {'draft': path, 'temperature': temperature, 'batch_size': 1}
    for _, run in decode_sets(request, notify, results, pick=pick, **own):
      for task, rows in _rows_by_task(run.prompts).items():
        part = run.take(rows)
        by_task.setdefault(task, []).extend(_measured_row(part, setting, task, draft) for setting in run.settings)
      if len(results.runs) == 1:
        results.runs[0]['notes'] = _describe_sample(run.prompts) + lines
        results.runs[0]['notes'].append(
          "first turns, as turns of the user in the target's chat template"
          if request.options['chat']
          else 'first turns, continued as plain text, without a chat template'
        )
  for task, rows in by_task.items():
    results.rows += [*rows, *_published_rows(task, list(rows[0]))]
  return results


def _panel(column: str) -> Bars:
  return Bars(
    x='task', y=(column,), by=('draft', 'method', 'K', 'L', 'tree', 'temperature'), where={'of': HERE}, kind='bar'
  )


TABLES = {
  'spec_bench': Table(
    title='Spec-Bench: tokens per target call and speed-up by task',
    setup=(
      "Spec-Bench's leaderboard for Vicuna-13B-v1.3 on one A100 of 80 GB, greedy, float16, one prompt at a time, all"
      ' turns in a chat template'
    ),
    difference='other hardware, models and drafters, so what compares is the pattern over tasks',
    spreads='± and ranges here: 95% intervals over prompts, which all settings decode in turns',
    sizes=dict(num_prompts=60, num_seeds=1, max_new_tokens=64, num_drafts=(2,), draft_length=(8,)),
    options={'method': ('autoregressive', 'speculative'), 'tree': ('chains',), 'temperature': (0.0,), 'chat': False},
    full={'num_prompts': 480, 'num_seeds': 3, 'max_new_tokens': 1024},
    measure=_measure,
    compares_drafts=True,
    panels=(_panel('mean accepted tokens'), _panel('speed-up')),
    notes=(
      "As Spec-Bench's scripts compute them: mean accepted tokens are the new tokens over the target calls; tokens/s is"
      " the mean over prompts of each prompt's new tokens over its seconds, with prefill; speed-up is that mean over"
      ' the one of autoregressive decoding. overall weighs every prompt alike.',
      'Caches hold the longest prompt of the run, for autoregressive decoding too, which lowers the speed-up of'
      ' short prompts beside long ones.',
      'At temperature 0 candidates drawn alike are equal, so that more of them keep no more.',
      CUT_ROUNDS,
    ),
  )
}
