"""Tables of SpecTr: latency of a call by its size, and tokens per target call by method, K and L."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from decode.experiment.workload import describe, load_models
from decode.papers import published
from decode.papers.exhibit import (
  CUT_ROUNDS,
  PAPER,
  PAPER_SPREAD,
  Request,
  Results,
  Table,
  block_efficiency,
  decode_sets,
  published_value,
  setting_columns,
)
from decode.plots import Bars
from decode.study import Value
from spectr_jax import Model, TokenTree
from spectr_jax.auto import timing
from spectr_jax.auto.trial import Notify

METHODS = ('autoregressive', 'speculative', 'block', 'spectr', 'race_block', 'race_traversal')
_SPECTR = 'SpecTr: Fast Speculative Decoding via Optimal Transport'

# Tables 1 and 3: relative latency.

# Draft length, batch size and form of the target's call that latencies are relative to.
_UNIT = 4, 1, 'rows'


def _call_shapes(sizes: Mapping[str, Any]) -> dict[tuple[int, int, str], tuple[TokenTree, int]]:
  """Tree and batch size by draft length, number of drafts and form: rows of a batch, or branches of one tree."""
  shapes = {}
  for length in sizes['draft_length']:
    for number in sizes['num_drafts']:
      shapes[length, number, 'rows'] = TokenTree.chains(1, length), number
      if number > 1:
        shapes[length, number, 'tree'] = TokenTree.chains(number, length), 1
  return shapes


def _median(values: np.ndarray) -> Value:
  return Value(float(np.median(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def _measure_latency(role: str, printed: Mapping, request: Request, notify: Notify) -> Results:
  """Time of a call of the target or the draft on K drafts of L tokens, over the target's on one of four."""
  options = request.decode_options()
  models = load_models(options)
  if not isinstance(models.draft, Model):
    raise ValueError(f'this table times the calls of a draft model, and {request.draft} is not a model')
  sizes = request.sizes
  shapes = _call_shapes(sizes)
  calls = {}
  for name, model, wanted in (
    ('target', models.target, {_UNIT: (TokenTree.chains(1, _UNIT[0]), 1)}),
    (role, getattr(models, role), shapes),
  ):
    forwards = timing.forward_calls(model, wanted, cache_size=sizes['context'])
    calls |= {(name, key): call for key, call in forwards.items()}
  notify(f'{len(calls)} calls, {sizes["num_runs"]} times each', 0, 1)
  times = timing.time_in_turns(calls, sizes['num_runs'])
  one = float(np.median(times['target', _UNIT]))
  info = describe(options, models.info)
  results = Results(runs=[info | {'flags': {name: info['flags'][name] for name in ('target', 'draft', 'dtype')}}])
  for (length, number, form), (tree, batch_size) in shapes.items():
    seconds = times[role, (length, number, form)]
    results.rows.append(
      {
        'length': length,
        'batch': number,
        'drafts as': form,
        'tokens in the call': (tree.num_nodes + 1) * batch_size,
        'milliseconds': _median(1e3 * seconds),
        'relative latency': _median(seconds / one),
        PAPER: published_value(printed.get((length, number))) if form == 'rows' else None,
      }
    )
  return results


def _latency_table(number: int, role: str, printed: Mapping) -> Table:
  name = {'target': '97M transformer', 'draft': '6M transformer'}[role]
  return Table(
    title=f'{_SPECTR}, Table {number}: relative latency of the {role}',
    setup=f'{name}, GPU, relative to the 97M transformer at length 4 and batch 1',
    spreads='medians ± standard deviation over runs, here; mean ± standard deviation, in the paper',
    sizes=dict(num_runs=200, context=256, num_drafts=(1, 2, 4, 8), draft_length=(4, 8)),
    full={'num_runs': 1000},
    measure=functools.partial(_measure_latency, role, printed),
    panels=(Bars(x='batch', y=('relative latency',), by=('length', 'drafts as'), paper=PAPER),),
    notes=(
      'A call on a draft of L tokens scores L + 1: the last committed token comes with it. "tree" is one row with the'
      ' drafts of a batch as branches.',
    ),
  )


# Tables 2 and 4: tokens per target call.


def _measure_efficiency(columns: Mapping[str, str], request: Request, notify: Notify) -> Results:
  """Block efficiency by draft, method, K and L, beside `columns` and the published draft of the same name."""
  results = Results()
  by_name = {name.lower(): printed for name, printed in published.BLOCK_EFFICIENCY.items()}
  for draft, path in request.drafts.items():
    own = by_name.get(draft.lower(), {})
    for prompts, run in decode_sets(request, notify, results, draft=path, method=METHODS, temperature=1.0):
      for summary in map(run.summarize, run.settings):
        setting = summary['setting']
        key = setting.method.name, setting.num_drafts, setting.draft_length
        row = setting_columns(setting, draft=draft, prompts=prompts)
        row |= {'block efficiency': block_efficiency(summary), PAPER: published_value(own.get(key))}
        row |= {name: published_value(published.BLOCK_EFFICIENCY[of].get(key)) for name, of in columns.items()}
        results.rows.append(row)
  return results


def _efficiency_table(number: int, columns: Mapping[str, str], drafts: str) -> Table:
  paper = next(iter(columns)) if len(columns) == 1 else PAPER
  return Table(
    title=f'{_SPECTR}, Table {number}: tokens per target call',
    setup=f'97M target and {drafts} on LM1B, temperature 1',
    spreads=f'± here: 95% interval over prompts; {PAPER_SPREAD}',
    sizes=dict(
      num_prompts=64, num_seeds=1, max_new_tokens=32, batch_size=16, num_drafts=(2, 4, 8), draft_length=(4, 8)
    ),
    full={'num_prompts': 1000, 'num_seeds': 3},
    measure=functools.partial(_measure_efficiency, columns),
    compares_drafts=True,
    panels=(Bars(x='K', y=('block efficiency',), by=('draft', 'prompts', 'method', 'L'), paper=paper),),
    notes=(CUT_ROUNDS,),
  )


TABLES = {
  'spectr_table1': _latency_table(1, 'target', published.TARGET_LATENCY),
  'spectr_table2': _efficiency_table(2, {f'{PAPER}: 6M': '6M'}, '6M draft'),
  'spectr_table3': _latency_table(3, 'draft', published.DRAFT_LATENCY),
  'spectr_table4': _efficiency_table(
    4, {f'{PAPER}: {name}': name for name in published.BLOCK_EFFICIENCY}, 'drafts of 2M, 6M and 20M'
  ),
}
