"""Tables of SpecTr-GBV: block efficiency and speed-up by prompts, L, K and temperature, and the parts of a round."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from decode.experiment import metrics
from decode.experiment.settings import Setting
from decode.papers import published
from decode.papers.exhibit import (
  CUT_ROUNDS,
  HERE,
  PAPER,
  PAPER_SPREAD,
  Request,
  Results,
  Table,
  block_efficiency,
  decode_sets,
  method_label,
  published_value,
  setting_columns,
)
from decode.plots import Bars
from decode.study import Row, Value
from spectr_jax.auto.trial import Notify
from spectr_jax.methods import get_method

METHODS = (*published.GBV_METHODS, 'race_block', 'race_traversal')
DRAFTING_METHODS = ('spectr', 'spectr_gbv', 'race_block', 'race_traversal')
_TEMPERATURE = 0.4

# Published means and standard deviations by method.
_Printed = Mapping[str, tuple[float, float | None]]


def _accepted(summary: Row) -> Value | None:
  """The share of L drafted tokens that is kept, as SpecTr-GBV defines it; None where nothing is drafted."""
  length, interval = summary['draft_length'], summary['block_efficiency_ci95']
  if not length:
    return None
  share = float(np.mean(summary['acceptance_by_position']))
  ends = None if interval is None else [(end - summary['block_efficiency']) / length for end in interval]
  return Value.of(share, None if ends is None else metrics.within((share + ends[0], share + ends[1]), 0, 1))


def _measured(summary: Row) -> dict[str, Value]:
  speedup = Value(summary['speedup'], interval=summary['speedup_ci95'])
  return {'block efficiency': block_efficiency(summary), 'speed-up': speedup}


def _is_printed(setting: Setting) -> bool:
  """Tells whether the paper's tables can have a setting: three drafts, or a method that takes one or none."""
  return setting.num_drafts == published.NUM_DRAFTS or setting.method.max_drafts is not None


def _beside(setting: Setting, measured: Mapping[str, Value], printed: Sequence[_Printed]) -> Row:
  """Columns of each measured quantity and of its published value, which stand by method in `printed`."""
  method = setting.method.name if _is_printed(setting) else None
  row: Row = {}
  for (name, value), by_method in zip(measured.items(), printed, strict=True):
    row |= {name: value, f'{PAPER}: {name}': published_value(by_method.get(method))}
  return row


def _published_set(sets: Mapping[str, Any], prompts: str, default: str) -> str:
  """The published set of prompts to compare with: that of the same name, else the default."""
  return next((name for name in sets if name.lower() == prompts.lower()), default)


# Tables 1, 2 and 4: block efficiency and speed-up.


def compare_sets(prompts: str, length: int) -> tuple[str | None, _Printed, _Printed]:
  """Name, block efficiencies and speed-ups by method of the row of Table 1 to compare with; none for another L."""
  for (target, printed_length), sets in published.COMPARISON.items():
    if printed_length == length:
      name = _published_set(sets, prompts, 'Average')
      return f'{target}, {name}', *sets[name]
  return None, {}, {}


def _compare_lengths(target: str, prompts: str, length: int) -> tuple[str | None, _Printed, _Printed]:
  """The entries of Tables 2 and 4, of a target on HumanEval whatever the prompts; see `compare_sets`."""
  del prompts
  printed = published.BY_LENGTH[target].get(length)
  return (f'{target}, HumanEval', *printed) if printed else (None, {}, {})


def _measure_comparison(find: Callable, request: Request, notify: Notify) -> Results:
  """Block efficiency and speed-up by prompt set, L, K and method; of several sets also the average."""
  results, measured = Results(), {}
  for prompts, run in decode_sets(request, notify, results, method=METHODS, temperature=_TEMPERATURE):
    for length in request.sizes['draft_length']:
      for summary in map(run.summarize, run.settings):
        if summary['draft_length'] in (0, length):  # 0: nothing is drafted
          measured[prompts, length, summary['setting']] = _measured(summary)
  if len(request.prompts) > 1:
    measured |= _averages(measured)
  for (prompts, length, setting), values in measured.items():
    printed_row, *printed = find(prompts, length)
    row = setting_columns(setting, prompts=prompts) | {'L': length} | _beside(setting, values, printed)
    results.rows.append(row | {f'{PAPER}: on': printed_row if _is_printed(setting) else None})
  return results


def _averages(measured: Mapping[tuple[str, int, Setting], Mapping[str, Value]]) -> dict:
  groups = collections.defaultdict(list)
  for (_, length, setting), values in measured.items():
    groups[length, setting].append(values)
  return {
    ('Average', *key): {name: Value(float(np.mean([each[name].number for each in group]))) for name in group[0]}
    for key, group in groups.items()
  }


# Figure 2: over K and temperature.


def _measure_sensitivity(request: Request, notify: Notify) -> Results:
  """Acceptance over K, and block efficiency and speed-up over temperature at K = 3, always measured.

  The paper draws both and prints neither. Where its Table 2 has the same point, that stands beside it.
  """
  results = Results()
  middle = published.NUM_DRAFTS
  every_k = tuple(sorted({*request.sizes['num_drafts'], middle}))
  for temperature in (0.1, _TEMPERATURE, 0.7):
    is_printed = temperature == _TEMPERATURE
    num_drafts = every_k if is_printed else (middle,)
    options = {'method': ('autoregressive', *DRAFTING_METHODS), 'temperature': temperature, 'num_drafts': num_drafts}
    for prompts, run in decode_sets(request, notify, results, **options):
      for summary in map(run.summarize, run.settings):
        setting = summary['setting']
        if not setting.draft_length:
          continue
        printed = {}, {}
        if is_printed:
          printed = published.BY_LENGTH[published.LARGE].get(setting.draft_length, printed)
        beside = _beside(setting, _measured(summary), printed)
        efficiency = beside[f'{PAPER}: block efficiency']
        row = setting_columns(setting, prompts=prompts, temperature=temperature) | {'accepted': _accepted(summary)}
        row[f'{PAPER}: accepted'] = Value((efficiency.number - 1) / setting.draft_length) if efficiency else None
        results.rows.append(row | beside)
  return results


# Table 5: the parts of a round.


def _breakdown(summary: Row, num_continuations: int) -> Row:
  """The columns of Table 5, per prompt: its share of the time of its batch."""
  rounds = summary['num_rounds'] / num_continuations
  parts = {part: Value(rounds * seconds) for part, seconds in summary['seconds_per_round'].items()}
  values = parts | {
    'total': Value(summary['seconds'] / num_continuations),
    'rounds': Value(summary['target_calls'] / num_continuations),
    'tokens/s': Value(summary['tokens_per_second']),
    'accepted': _accepted(summary),
  }
  return {name: values[name] for name in published.BREAKDOWN_COLUMNS}


def _change(value: Value, base: Value) -> str | None:
  """The change from the base in percent; None where the base is not positive."""
  return f'{100 * (value.number / base.number - 1):+.1f}%' if base.number > 0 else None


def _published_breakdowns(prompts: str, settings: Sequence[Setting]) -> dict[str, dict[str, Row]]:
  """Rows of the paper by source and method, for settings of equal K and L; none if the paper has other K and L."""
  labels = {setting.method.name: method_label(setting) for setting in settings}
  tables = {}
  for (target, length), sets in published.BREAKDOWN.items():
    if (settings[0].num_drafts, settings[0].draft_length) == (published.NUM_DRAFTS, length):
      name = _published_set(sets, prompts, 'HumanEval')
      tables[f'{PAPER}: {target}, {name}'] = {
        labels.get(method, method): dict(zip(published.BREAKDOWN_COLUMNS, map(Value, printed)))
        for method, printed in sets[name].items()
      }
  return tables


def _with_changes(by_method: Mapping[str, Row]) -> dict[str, Row]:
  """The rows of all methods, and of every other method its changes from the first."""
  first, *others = by_method
  changes = {
    f'{method} to {first}': {
      column: _change(value, by_method[first][column]) for column, value in by_method[method].items()
    }
    for method in others
  }
  return {**by_method, **changes}


def _measure_breakdown(request: Request, notify: Notify) -> Results:
  results = Results()
  options = {'method': DRAFTING_METHODS, 'temperature': _TEMPERATURE, 'breakdown': True}
  for prompts, run in decode_sets(request, notify, results, **options):
    num_continuations = len(run.prompts) * request.sizes['num_seeds']
    groups = collections.defaultdict(list)
    for setting in run.settings:
      groups[setting.num_drafts, setting.draft_length].append(setting)
    for (number, length), settings in groups.items():
      here = {method_label(each): _breakdown(run.summarize(each), num_continuations) for each in settings}
      for source, by_method in ({HERE: here} | _published_breakdowns(prompts, settings)).items():
        same = {'prompts': prompts, 'K': number, 'L': length, 'of': source}
        results.rows += [same | {'method': label} | row for label, row in _with_changes(by_method).items()]
  return results


# The tables.

_GBV = 'SpecTr-GBV: Multi-Draft Block Verification Accelerating Speculative Decoding'
_SPREADS = (
  '± and ranges here: 95% intervals, of block efficiency over prompts, of speed-up over batches, timed in turns;'
  f' {PAPER_SPREAD}'
)
_NOT_LOSSLESS = f'spectr_gbv does not keep the distribution of the target: {get_method("spectr_gbv").bias}.'
_LONG_TEXTS = "The paper's continuations have some 520 tokens, by its Table 5."
# Derived from Table 5, which prints tokens per second and seconds.
_NUM_TOKENS = {'max_new_tokens': 520}
_HUMANEVAL = {'num_prompts': 164, 'num_seeds': 5} | _NUM_TOKENS
_BOTH_TARGETS = 'DeepSeek-33B with 1.3B at L=12 and DeepSeek-6.7B with 1.3B at L=8, K=3, temperature 0.4'


def _both_panels(x: str, by: tuple[str, ...], **more) -> tuple[Bars, Bars]:
  """A panel of block efficiency and one of speed-up."""
  return tuple(Bars(x=x, y=(y,), by=by, paper=f'{PAPER}: {y}', **more) for y in ('block efficiency', 'speed-up'))


def _length_table(number: int, target: str) -> Table:
  lengths = tuple(published.BY_LENGTH[target])
  return Table(
    title=f'{_GBV}, Table {number}: block efficiency and speed-up over L',
    setup=f'{target} and 1.3B, HumanEval, K=3, temperature 0.4',
    spreads=_SPREADS,
    sizes=dict(num_prompts=16, num_seeds=1, max_new_tokens=64, batch_size=1, num_drafts=(3,), draft_length=lengths),
    full=_HUMANEVAL,
    measure=functools.partial(_measure_comparison, functools.partial(_compare_lengths, target)),
    panels=_both_panels('L', ('prompts', 'method', 'K')),
    notes=(_NOT_LOSSLESS, CUT_ROUNDS, _LONG_TEXTS),
  )


TABLES = {
  'gbv_table1': Table(
    title=f'{_GBV}, Table 1: block efficiency and speed-up',
    setup=_BOTH_TARGETS,
    spreads=_SPREADS,
    sizes=dict(num_prompts=32, num_seeds=1, max_new_tokens=64, batch_size=1, num_drafts=(3,), draft_length=(12, 8)),
    full={'num_prompts': 1000} | _NUM_TOKENS,
    measure=functools.partial(_measure_comparison, compare_sets),
    panels=_both_panels('prompts', ('method', 'K', 'L'), kind='bar'),
    notes=(
      _NOT_LOSSLESS,
      CUT_ROUNDS,
      _LONG_TEXTS,
      "Sets of prompts that have the name of one of the paper's are compared with it, others with its average.",
    ),
  ),
  'gbv_table2': _length_table(2, published.LARGE),
  'gbv_table4': _length_table(4, published.SMALL),
  'gbv_figure2': Table(
    title=f'{_GBV}, Figure 2: acceptance over K, block efficiency and speed-up over temperature',
    setup=f'{published.LARGE} and 1.3B, HumanEval',
    spreads=_SPREADS,
    sizes=dict(
      num_prompts=12, num_seeds=1, max_new_tokens=64, batch_size=1, num_drafts=(1, 3, 5, 7), draft_length=(12, 16)
    ),
    full=_HUMANEVAL,
    measure=_measure_sensitivity,
    panels=(
      Bars(
        x='K', y=('accepted',), by=('prompts', 'method', 'L'), paper=f'{PAPER}: accepted',
        where={'temperature': _TEMPERATURE},
      ),
      *_both_panels('temperature', ('prompts', 'method', 'L'), where={'K': published.NUM_DRAFTS}),
    ),
    notes=(
      _NOT_LOSSLESS,
      CUT_ROUNDS,
      _LONG_TEXTS,
      'The paper draws this figure without printing its numbers; where its Table 2 has the same point, that stands'
      ' beside it. "accepted" is of L drafted tokens, in the paper (block efficiency - 1) / L.',
    ),
  ),
  'gbv_table5': Table(
    title=f'{_GBV}, Table 5: seconds per prompt of draft, target, verification and the rest',
    setup=_BOTH_TARGETS,
    spreads='± here: 95% interval over prompts',
    sizes=dict(num_prompts=32, num_seeds=1, max_new_tokens=64, batch_size=1, num_drafts=(3,), draft_length=(12, 8)),
    full=_NUM_TOKENS,
    measure=_measure_breakdown,
    panels=(
      Bars(
        x='method', y=('draft', 'target', 'verification', 'rest'), by=('prompts', 'K', 'L'), where={'of': HERE},
        kind='stack',
      ),
    ),
    notes=(
      _NOT_LOSSLESS,
      'Parts are timed as programs of their own, so the rest, which is what the loop takes beyond them, holds the'
      ' prefill and may be below zero.',
      'Sets of prompts that the paper has no row for stand beside its HumanEval.',
    ),
  ),
}  # fmt: skip
