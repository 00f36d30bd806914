"""The papers' tables and figures, measured here: `TABLES[name].run(request)` gives rows beside published figures."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from decode.papers import published
from decode.papers.table import Panel, Sizes, Table
from decode.papers.table_measurements import (
  HERE,
  PAPER,
  compare_lengths,
  compare_sets,
  measure_breakdown,
  measure_comparison,
  measure_efficiency,
  measure_latency,
  measure_sensitivity,
)
from spectr_jax import get_method

_NOT_LOSSLESS = f'spectr_gbv does not keep the law of the target: {get_method("spectr_gbv").bias}.'
_CUT = 'A round that the limit of new tokens cuts off counts as whole, which takes most from long drafts.'
_GBV_LENGTH = "The paper's continuations have some 520 tokens, by its Table 5."
_BE_PANEL = {'y': ('block efficiency',), 'paper': f'{PAPER}: block efficiency'}
_SR_PANEL = {'y': ('speed-up',), 'paper': f'{PAPER}: speed-up'}
_GBV = 'SpecTr-GBV: Multi-Draft Block Verification Accelerating Speculative Decoding'
_SPECTR = 'SpecTr: Fast Speculative Decoding via Optimal Transport'
_PAPER_SPREAD = 'in the paper: standard deviation, where it prints one'
_GBV_SPREADS = (
  '± and ranges here: 95% intervals, of block efficiency over prompts, of speed-up over batches, timed in turns;'
  f' {_PAPER_SPREAD}'
)
# Derived: Table 5 prints tokens per second and seconds.
_GBV_TOKENS = {'max_new_tokens': 520}
_HUMANEVAL = {'num_prompts': 164}


def _latency_table(number: int, role: str, figures) -> Table:
  name = {'target': '97M transformer', 'draft': '6M transformer'}[role]
  return Table(
    title=f'{_SPECTR}, Table {number}: relative latency of the {role}',
    setup=f'{name}, GPU, relative to the 97M transformer at length 4 and batch 1',
    spreads='medians ± standard deviation over runs, here; mean ± standard deviation, in the paper',
    sizes=Sizes(num_runs=200, context=256, num_drafts=(1, 2, 4, 8), draft_length=(4, 8)),
    full={'num_runs': 1000},
    measure=functools.partial(measure_latency, role, figures),
    panels=(Panel(x='batch', y=('relative latency',), by=('length', 'drafts as'), paper=PAPER),),
    notes=(
      'A call on a draft of L tokens scores L + 1: the last committed token comes with it. "tree" is one row with the'
      ' drafts of a batch as branches.',
    ),
  )


def _efficiency_table(number: int, columns: Mapping[str, str], drafts: str) -> Table:
  paper = next(iter(columns)) if len(columns) == 1 else PAPER
  return Table(
    title=f'{_SPECTR}, Table {number}: tokens per target call',
    setup=f'97M target and {drafts} on LM1B, temperature 1',
    spreads=f'± here: 95% interval over prompts; {_PAPER_SPREAD}',
    sizes=Sizes(
      num_prompts=64, num_seeds=1, max_new_tokens=32, batch_size=16, num_drafts=(2, 4, 8), draft_length=(4, 8)
    ),
    full={'num_prompts': 1000, 'num_seeds': 3},
    measure=functools.partial(measure_efficiency, columns),
    panels=(Panel(x='K', y=('block efficiency',), by=('draft', 'prompts', 'method', 'L'), paper=paper),),
    notes=(_CUT,),
  )


def _length_table(number: int, target: str) -> Table:
  lengths = tuple(published.BY_LENGTH[target])
  by = 'prompts', 'method', 'K'
  return Table(
    title=f'{_GBV}, Table {number}: block efficiency and speed-up over L',
    setup=f'{target} and 1.3B, HumanEval, K=3, temperature 0.4',
    spreads=_GBV_SPREADS,
    sizes=Sizes(num_prompts=16, num_seeds=1, max_new_tokens=64, batch_size=1, num_drafts=(3,), draft_length=lengths),
    full=_HUMANEVAL | {'num_seeds': 5} | _GBV_TOKENS,
    measure=functools.partial(measure_comparison, functools.partial(compare_lengths, target)),
    panels=(Panel(x='L', by=by, **_BE_PANEL), Panel(x='L', by=by, **_SR_PANEL)),
    notes=(_NOT_LOSSLESS, _CUT, _GBV_LENGTH),
  )


TABLES = {
  'spectr_table1': _latency_table(1, 'target', published.TARGET_LATENCY),
  'spectr_table2': _efficiency_table(2, {f'{PAPER}: 6M': '6M'}, '6M draft'),
  'spectr_table3': _latency_table(3, 'draft', published.DRAFT_LATENCY),
  'spectr_table4': _efficiency_table(
    4, {f'{PAPER}: {name}': name for name in published.BLOCK_EFFICIENCY}, 'drafts of 2M, 6M and 20M'
  ),
  'gbv_table1': Table(
    title=f'{_GBV}, Table 1: block efficiency and speed-up',
    setup='DeepSeek-33B with 1.3B at L=12 and DeepSeek-6.7B with 1.3B at L=8, K=3, temperature 0.4',
    spreads=_GBV_SPREADS,
    sizes=Sizes(num_prompts=32, num_seeds=1, max_new_tokens=64, batch_size=1, num_drafts=(3,), draft_length=(12, 8)),
    full={'num_prompts': 1000} | _GBV_TOKENS,
    measure=functools.partial(measure_comparison, compare_sets),
    panels=(
      Panel(x='prompts', by=('method', 'K', 'L'), kind='bar', **_BE_PANEL),
      Panel(x='prompts', by=('method', 'K', 'L'), kind='bar', **_SR_PANEL),
    ),
    notes=(
      _NOT_LOSSLESS,
      _CUT,
      _GBV_LENGTH,
      "Sets of prompts that have the name of one of the paper's are compared with it, others with its average.",
    ),
  ),
  'gbv_table2': _length_table(2, published.LARGE),
  'gbv_table4': _length_table(4, published.SMALL),
  'gbv_figure2': Table(
    title=f'{_GBV}, Figure 2: acceptance over K, block efficiency and speed-up over temperature',
    setup=f'{published.LARGE} and 1.3B, HumanEval',
    spreads=_GBV_SPREADS,
    sizes=Sizes(
      num_prompts=12, num_seeds=1, max_new_tokens=64, batch_size=1, num_drafts=(1, 3, 5, 7), draft_length=(12, 16)
    ),
    full=_HUMANEVAL | {'num_seeds': 5} | _GBV_TOKENS,
    measure=measure_sensitivity,
    panels=(
      Panel(
        x='K', y=('accepted',), by=('prompts', 'method', 'L'), paper=f'{PAPER}: accepted', where={'temperature': 0.4}
      ),
      Panel(x='temperature', by=('prompts', 'method', 'L'), where={'K': published.NUM_DRAFTS}, **_BE_PANEL),
      Panel(x='temperature', by=('prompts', 'method', 'L'), where={'K': published.NUM_DRAFTS}, **_SR_PANEL),
    ),
    notes=(
      _NOT_LOSSLESS,
      _CUT,
      _GBV_LENGTH,
      'The paper draws this figure without printing its numbers; where its Table 2 has the same point, that stands'
      ' beside it. "accepted" is of L drafted tokens, in the paper (block efficiency - 1) / L.',
    ),
  ),
  'gbv_table5': Table(
    title=f'{_GBV}, Table 5: seconds per prompt of draft, target, verification and the rest',
    setup='DeepSeek-33B with 1.3B at L=12 and DeepSeek-6.7B with 1.3B at L=8, K=3, temperature 0.4',
    spreads='± here: 95% interval over prompts',
    sizes=Sizes(num_prompts=32, num_seeds=1, max_new_tokens=64, batch_size=1, num_drafts=(3,), draft_length=(12, 8)),
    full=_GBV_TOKENS,
    measure=measure_breakdown,
    panels=(
      Panel(
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
