"""How the papers' tables are measured: rows of what was found, beside what was published."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from decode.experiment import latency
from decode.experiment.options import DecodeOptions
from decode.experiment.run import DecodeRun, Summary, run_decode
from decode.experiment.settings import Setting
from decode.experiment.workload import Notify, describe, load_models
from decode.papers import published
from decode.papers.table import Found, Request, Row, Value
from spectr_jax import TokenTree

SPECTR_METHODS = ('autoregressive', 'speculative', 'block', 'spectr', 'race_block', 'race_traversal')
GBV_METHODS = (*published.GBV_METHODS, 'race_block', 'race_traversal')
DRAFTING_METHODS = ('spectr', 'spectr_gbv', 'race_block', 'race_traversal')
HERE, PAPER = 'here', 'paper'

_Figures = Mapping[str, tuple[float, float | None]]


def _value(figure: tuple[float, float | None] | None) -> Value | None:
  return None if figure is None else Value(*figure)


def _half(interval: tuple[float, float] | None) -> float | None:
  return None if interval is None else (interval[1] - interval[0]) / 2


def method_label(setting: Setting) -> str:
  """The method, marked where it is not lossless."""
  method = setting.method
  return method.name if method.is_lossless_on(setting.tree) else f'{method.name} (not lossless)'


def _decode(
  request: Request, notify: Notify, found: Found, *, draft: str, **options
) -> Iterator[tuple[str, DecodeRun]]:
  """Decodes every set of prompts with one draft, and adds what was run to what is found."""
  sizes = request.sizes
  options = {'num_drafts': sizes.num_drafts, 'draft_length': sizes.draft_length} | options
  for name, path in request.prompts.items():
    run = run_decode(
      DecodeOptions(
        target=request.target,
        draft=draft,
        dtype=request.dtype,
        prompts=path,
        num_prompts=sizes.num_prompts,
        skip_long=True,
        num_seeds=sizes.num_seeds,
        seed=request.seed,
        max_new_tokens=sizes.max_new_tokens,
        batch_size=sizes.batch_size,
        **options,
      ),
      lambda what, done, total, name=name: notify(f'{name}: {what}', done, total),
    )
    found.info.append(run.info | {'prompts': name, 'num_prompts': len(run.prompts)})
    yield name, run


def _setting_columns(setting: Setting, **more) -> Row:
  return {**more, 'method': method_label(setting), 'K': setting.num_drafts, 'L': setting.draft_length}


def _efficiency(summary: Summary) -> Value:
  return Value(summary.block_efficiency, _half(summary.interval))


def _accepted(summary: Summary) -> Value | None:
  """The share of L drafted tokens that is kept, as SpecTr-GBV defines it."""
  length = summary.setting.draft_length
  if not length:
    return None
  spread = _half(summary.interval)
  return Value(float(np.mean(summary.acceptance_by_position)), None if spread is None else spread / length)


def _is_printed(setting: Setting) -> bool:
  """Whether SpecTr-GBV's tables can have the setting: they are of three drafts, or of methods that have one or none."""
  return setting.num_drafts == published.NUM_DRAFTS or setting.method.max_drafts is not None


def _measured(summary: Summary) -> dict[str, Value]:
  speedup = Value(summary.speedup, interval=summary.speedup_interval)
  return {'block efficiency': _efficiency(summary), 'speed-up': speedup}


def _beside(setting: Setting, measured: Mapping[str, Value], printed: Sequence[_Figures]) -> Row:
  """Each quantity that is measured, with what is published of the method."""
  method = setting.method.name if _is_printed(setting) else None
  row: Row = {}
  for (name, value), figures in zip(measured.items(), printed, strict=True):
    row |= {name: value, f'{PAPER}: {name}': _value(figures.get(method))}
  return row


def _median(values: np.ndarray) -> Value:
  """With the standard deviation over runs."""
  return Value(float(np.median(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def measure_latency(role: str, figures, request: Request, notify: Notify) -> Found:
  """Time of a call on K drafts of L tokens, as rows of a batch and as one tree, over the target's on one of four."""
  options = DecodeOptions(target=request.target, draft=request.draft, dtype=request.dtype)
  target, draft, _, models = load_models(options)
  sizes = request.sizes
  unit = 4, 1, 'rows'
  shapes = {}
  for length in sizes.draft_length:
    for number in sizes.num_drafts:
      shapes[length, number, 'rows'] = TokenTree.chains(1, length), number
      if number > 1:
        shapes[length, number, 'tree'] = TokenTree.chains(number, length), 1
  calls = {}
  for name, model, wanted in (
    ('target', target, {unit: (TokenTree.chains(1, unit[0]), 1)}),
    (role, {'target': target, 'draft': draft}[role], shapes),
  ):
    forwards = latency.forward_calls(model, wanted, cache_size=sizes.context)
    calls |= {(name, key): call for key, call in forwards.items()}
  notify(f'{len(calls)} calls, {sizes.num_runs} times each', 0, 1)
  times = latency.time_in_turns(calls, sizes.num_runs)
  one = float(np.median(times['target', unit]))
  info = describe(options, models)
  used = ('target', 'draft', 'dtype')
  found = Found(info=[info | {'flags': {name: info['flags'][name] for name in used}}])
  for key, (tree, batch_size) in shapes.items():
    length, number, form = key
    seconds = times[role, key]
    found.rows.append(
      {
        'length': length,
        'batch': number,
        'drafts as': form,
        'tokens in the call': (tree.num_nodes + 1) * batch_size,
        'milliseconds': _median(1e3 * seconds),
        'relative latency': _median(seconds / one),
        PAPER: _value(figures.get((length, number))) if form == 'rows' else None,
      }
    )
  return found


def measure_efficiency(columns: Mapping[str, str], request: Request, notify: Notify) -> Found:
  """Block efficiency by draft, method, K and L.

  Args:
    columns: Published drafts by the name of the column that they go into. A draft that has the name of a published one
      is also put beside that, in the column `paper`.
    request: What to measure.
    notify: Progress.
  """
  found = Found()
  by_name = {name.lower(): figures for name, figures in published.BLOCK_EFFICIENCY.items()}
  for draft, path in request.drafts.items():
    own = by_name.get(draft.lower(), {})
    for prompts, run in _decode(request, notify, found, draft=path, method=SPECTR_METHODS, temperature=1.0):
      for summary in map(run.summarize, run.settings):
        setting = summary.setting
        key = setting.method.name, setting.num_drafts, setting.draft_length
        row = _setting_columns(setting, draft=draft, prompts=prompts)
        row |= {'block efficiency': _efficiency(summary), PAPER: _value(own.get(key))}
        row |= {column: _value(published.BLOCK_EFFICIENCY[of].get(key)) for column, of in columns.items()}
        found.rows.append(row)
  return found


def _published_set(figures: Mapping[str, Any], prompts: str, default: str) -> str:
  """The published set of prompts to compare with: that of the same name, else the default."""
  return next((name for name in figures if name.lower() == prompts.lower()), default)


def compare_sets(prompts: str, length: int) -> tuple[str | None, _Figures, _Figures]:
  """Table 1 of SpecTr-GBV at some L: the row to compare a set of prompts with, and its figures."""
  for (target, printed_length), sets in published.COMPARISON.items():
    if printed_length == length:
      name = _published_set(sets, prompts, 'Average')
      return f'{target}, {name}', *sets[name]
  return None, {}, {}


def compare_lengths(target: str, prompts: str, length: int) -> tuple[str | None, _Figures, _Figures]:
  """Tables 2 and 4 of SpecTr-GBV: whatever the prompts, they are compared with HumanEval."""
  del prompts
  figures = published.BY_LENGTH[target].get(length)
  return (f'{target}, HumanEval', *figures) if figures else (None, {}, {})


def measure_comparison(find: Callable, request: Request, notify: Notify) -> Found:
  """Block efficiency and speed-up by prompt set, L, K and method; of several sets also the average.

  Args:
    find: `(prompts, length) -> (row of the paper, its block efficiencies, its speed-ups)`, by method.
    request: What to measure.
    notify: Progress.
  """
  found, measured = Found(), {}
  for prompts, run in _decode(request, notify, found, draft=request.draft, method=GBV_METHODS, temperature=0.4):
    for length in request.sizes.draft_length:
      for summary in map(run.summarize, run.settings):
        if summary.setting.draft_length in (0, length):  # 0: nothing is drafted
          measured[prompts, length, summary.setting] = _measured(summary)
  if len(request.prompts) > 1:
    measured |= _averages(measured)
  for (prompts, length, setting), values in measured.items():
    printed_row, *printed = find(prompts, length)
    row = _setting_columns(setting, prompts=prompts) | {'L': length} | _beside(setting, values, printed)
    found.rows.append(row | {f'{PAPER}: on': printed_row if _is_printed(setting) else None})
  return found


def _averages(measured: Mapping[tuple[str, int, Setting], Mapping[str, Value]]) -> dict:
  """The mean over sets of prompts, each set counting as much."""
  groups = collections.defaultdict(list)
  for (_, length, setting), values in measured.items():
    groups[length, setting].append(values)
  return {
    ('Average', *key): {name: Value(float(np.mean([each[name].number for each in group]))) for name in group[0]}
    for key, group in groups.items()
  }


def measure_sensitivity(request: Request, notify: Notify) -> Found:
  """Acceptance over K, and block efficiency and speed-up over temperature at K = 3, which is always measured.

  The paper draws both and prints neither; what its Table 2 says of the same points stands beside them.
  """
  found = Found()
  middle = published.NUM_DRAFTS
  every_k = tuple(sorted({*request.sizes.num_drafts, middle}))
  for temperature in (0.1, 0.4, 0.7):
    num_drafts = every_k if temperature == 0.4 else (middle,)
    methods = 'autoregressive', *DRAFTING_METHODS
    for prompts, run in _decode(
      request, notify, found, draft=request.draft, method=methods, temperature=temperature, num_drafts=num_drafts
    ):
      for summary in map(run.summarize, run.settings):
        setting = summary.setting
        if not setting.draft_length:
          continue
        printed = {}, {}
        if temperature == 0.4:
          printed = published.BY_LENGTH[published.LARGE].get(setting.draft_length, printed)
        beside = _beside(setting, _measured(summary), printed)
        efficiency = beside[f'{PAPER}: block efficiency']
        row = _setting_columns(setting, prompts=prompts, temperature=temperature) | {'accepted': _accepted(summary)}
        row[f'{PAPER}: accepted'] = Value((efficiency.number - 1) / setting.draft_length) if efficiency else None
        found.rows.append(row | beside)
  return found


def _breakdown(summary: Summary, num_continuations: int) -> Row:
  """The columns of Table 5 of SpecTr-GBV, of one prompt on average: its share of what its batch takes."""
  rounds = summary.num_rounds / num_continuations
  parts = {part: Value(rounds * seconds) for part, seconds in summary.seconds_per_round.items()}
  values = parts | {
    'total': Value(summary.seconds / num_continuations),
    'rounds': Value(summary.num_calls / num_continuations),
    'tokens/s': Value(summary.tokens_per_second),
    'accepted': _accepted(summary),
  }
  return {name: values[name] for name in published.BREAKDOWN_COLUMNS}


def _change(value: Value, base: Value) -> str | None:
  """How much more than the base, in percent; None where there is no such share."""
  return f'{100 * (value.number / base.number - 1):+.1f}%' if base.number > 0 else None


def measure_breakdown(request: Request, notify: Notify) -> Found:
  """Seconds per prompt of draft, target, verification and the rest."""
  found = Found()
  for prompts, run in _decode(
    request, notify, found, draft=request.draft, method=DRAFTING_METHODS, temperature=0.4, breakdown=True
  ):
    num_continuations = len(run.prompts) * request.sizes.num_seeds
    groups: dict[tuple[int, int], list[Setting]] = {}
    for setting in run.settings:
      groups.setdefault((setting.num_drafts, setting.draft_length), []).append(setting)
    for (number, length), settings in groups.items():
      tables = {HERE: {method_label(s): _breakdown(run.summarize(s), num_continuations) for s in settings}}
      labels = {setting.method.name: method_label(setting) for setting in settings}
      for (target, printed_length), sets in published.BREAKDOWN.items():
        if (number, length) == (published.NUM_DRAFTS, printed_length):
          name = _published_set(sets, prompts, 'HumanEval')
          tables[f'{PAPER}: {target}, {name}'] = {
            labels.get(method, method): dict(zip(published.BREAKDOWN_COLUMNS, map(Value, figures)))
            for method, figures in sets[name].items()
          }
      for source, by_method in tables.items():
        first, *others = by_method
        rows = by_method | {
          f'{method} to {first}': {
            column: _change(value, by_method[first][column]) for column, value in by_method[method].items()
          }
          for method in others
        }
        same = {'prompts': prompts, 'K': number, 'L': length, 'of': source}
        found.rows += [same | {'method': label} | row for label, row in rows.items()]
  return found
