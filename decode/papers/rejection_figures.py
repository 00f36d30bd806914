"""Figures about rejections in a whole text, and about a bias that buys fewer: theory, and simulations beside it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np

from decode.experiment.workload import Notify
from decode.papers import plots
from decode.papers.paper_figure import Figure, Row, by_value, column, select
from decode.papers.table import Request, Sizes
from spectr_jax import theory
from spectr_jax.testing import simulated_rejections

YIN = 'A Theoretical Perspective for Speculative Decoding (Yin et al. 2024)'
# The seed that the paper names; how its rows are drawn, it does not say.
CHAINS_SEED = 10
_MANY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_CHECKPOINTS = 40
_NORMAL_95 = 1.959964

# Yin et al. 2024, Figures 2 and 5: rejections of nonstationary chains.


def _running(counts: np.ndarray) -> list[tuple[int, float, float]]:
  """Number of runs, mean and half of its 95% interval, after more and more runs."""
  places = np.unique(np.geomspace(min(20, len(counts)), len(counts), _CHECKPOINTS).astype(int))
  return [
    (int(n), float(counts[:n].mean()), float(_NORMAL_95 * counts[:n].std(ddof=1) / math.sqrt(n)))
    for n in places
    if n > 1
  ]


def _rejection_row(panel: str, line: str, num_drafts, runs, mean: float, half: float | None = None) -> Row:
  low, high = (None, None) if half is None else (mean - half, mean + half)
  row = {'panel': panel, 'line': line, 'M': num_drafts, 'runs': runs, 'rejections': mean}
  return row | {'low': low, 'high': high}


_RUNNING, _SCALING = 'running average', 'number of drafts'


def _compute_rejections(num_tokens: int, request: Request, notify: Notify) -> list[Row]:
  chains = theory.random_chains(CHAINS_SEED, num_tokens=num_tokens)
  rows, last = [], []
  num_drafts, num_runs = request.sizes.num_drafts, request.sizes.num_runs
  for place, number in enumerate(num_drafts):
    notify(f'{num_runs} texts of {num_tokens} tokens with {number} drafts', place, len(num_drafts))
    counts = simulated_rejections(
      jax.random.fold_in(jax.random.key(request.seed), number), chains,
      method='speculative' if number == 1 else 'batch', num_drafts=number, num_runs=num_runs,
    )  # fmt: skip
    expected = float(theory.expected_rejections(chains, number))
    running = _running(counts)
    rows += [_rejection_row(_RUNNING, 'simulation', number, *each) for each in running]
    rows += [_rejection_row(_RUNNING, 'theory', number, runs, expected) for runs in (running[0][0], running[-1][0])]
    last.append(_rejection_row(_SCALING, 'simulation', number, *running[-1]))
  every = sorted({*num_drafts, *_MANY})
  rows += [
    _rejection_row(_SCALING, 'theory', number, None, float(value))
    for number, value in zip(every, theory.expected_rejections(chains, every))
  ]
  limit = float(theory.expected_rejections(chains, math.inf))
  rows += [_rejection_row(_SCALING, 'limit', number, None, limit) for number in (every[0], every[-1])]
  return rows + last


def _draw_rejections(rows: Sequence[Row]):
  running, scaling = (select(rows, panel=panel) for panel in (_RUNNING, _SCALING))
  groups = by_value(running, 'M')
  figure, axes = plots.panels(len(groups) + 1, width=2.5)
  theory_line = {'color': plots.THEORY, 'marker': '', 'linestyle': '--'}
  for each, (number, own) in zip(axes, groups.items()):
    method = 'speculative' if number == 1 else 'batch'
    style = plots.style_of(method) | {'marker': ''}
    name = f'simulation, {method}'
    plots.draw_line(each, select(own, line='simulation'), x='runs', y='rejections', label=name, band=True, **style)
    plots.draw_line(each, select(own, line='theory'), x='runs', y='rejections', label='theory', **theory_line)
    plots.name_axes(each, x='texts simulated', y='rejections per text', title=f'{number} draft{"s" * (number > 1)}')
    each.set_xscale('log')
  last = axes[-1]
  plots.draw_line(last, select(scaling, line='theory'), x='M', y='rejections', label='theory', **theory_line)
  limit = theory_line | {'color': '#555555', 'linestyle': ':'}
  plots.draw_line(last, select(scaling, line='limit'), x='M', y='rejections', label='limit of many drafts', **limit)
  for row in select(scaling, line='simulation'):
    style = plots.style_of('speculative' if row['M'] == 1 else 'batch')
    plots.draw_line(last, [row], x='M', y='rejections', label='', linestyle='', **style)
  plots.name_axes(last, x='drafts M', y='rejections per text', title='over the number of drafts')
  plots.number_ticks(last, column(select(scaling, line='theory'), 'M'))
  plots.legend(figure, axes, title='bands and bars: 95%')
  return figure


def _tell_rejections(num_tokens: int, published: str, rows: Sequence[Row]) -> str:
  expected = {row['M']: row['rejections'] for row in select(rows, panel=_SCALING, line='theory')}
  simulated = select(rows, panel=_SCALING, line='simulation')
  each = ', '.join(
    f'{row["rejections"]:.2f} ± {row["high"] - row["rejections"]:.2f} for M = {row["M"]} ({expected[row["M"]]:.2f})'
    for row in simulated
  )
  limit = select(rows, panel=_SCALING, line='limit')[0]['rejections']
  return (
    f'Texts of {num_tokens} tokens from two nonstationary chains of 7 states, decoded by the real verifier with'
    f' lookahead to the end of the text: rejections per text over {simulated[0]["runs"]} texts, and what theory expects'
    f' in brackets: {each}. Many drafts do not help for ever: the number of rejections falls no lower than'
    f' {limit:.2f}, since after an accepted first token only one draft goes on. {published}'
  )


# Yin et al. 2024, Figure 3: batch improvement.

_UNIFORM_SIZE = 120


def _uniform(size: int) -> np.ndarray:
  return np.where(np.arange(_UNIFORM_SIZE) < size, 1 / size, 0)


def _bernoulli(ones: float) -> np.ndarray:
  return np.array([1 - ones, ones])


_BATCH_BERNOULLIS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_BATCH_RATIOS = (1.5, 2, 4, 6, 10)
_BERNOULLI_PANEL, _UNIFORM_PANEL = 'Bernoulli', 'uniform'


def _compute_improvement(request: Request, notify: Notify) -> list[Row]:
  del notify
  numbers, rows = request.sizes.num_drafts, []
  cases = [(_BERNOULLI_PANEL, u, _bernoulli(u), _bernoulli(0.5)) for u in _BATCH_BERNOULLIS]
  cases += [(_UNIFORM_PANEL, r, _uniform(_UNIFORM_SIZE), _uniform(round(_UNIFORM_SIZE / r))) for r in _BATCH_RATIOS]
  for panel, parameter, draft, target in cases:
    found = theory.batch_improvement(draft, target, numbers)
    rows += [
      {'panel': panel, 'parameter': parameter, 'M': number, 'improvement': float(value)}
      for number, value in zip(numbers, found)
    ]
  return rows


def _draw_improvement(rows: Sequence[Row]):
  figure, axes = plots.panels(2, width=3.3, height=3.4, sharey=True)
  for each, panel, symbol, title in (
    (axes[0], _BERNOULLI_PANEL, 'u', 'draft Ber(u), target Ber(0.5)'),
    (axes[1], _UNIFORM_PANEL, 'r', f'draft U({_UNIFORM_SIZE}), target U({_UNIFORM_SIZE}/r)'),
  ):
    own = [row | {'law': f'{symbol} = {row["parameter"]:g}'} for row in select(rows, panel=panel)]
    scale = plots.scale_of(column(own, 'law'))
    plots.draw_lines(each, own, x='M', y='improvement', by='law', style=scale.get)
    y = 'batch improvement (probability)' if each is axes[0] else ''
    plots.name_axes(each, x='drafts M', y=y, title=title)
    plots.number_ticks(each, column(own, 'M'))
  plots.legend(figure, axes)
  return figure


def _tell_improvement(rows: Sequence[Row]) -> str:
  errors = [
    abs(row['improvement'] - (row['parameter'] - 0.5) * (1 - row['parameter'] ** (row['M'] - 1)))
    for row in select(rows, panel=_BERNOULLI_PANEL)
  ]
  for row in select(rows, panel=_UNIFORM_PANEL):
    missed = 1 - 1 / row['parameter']
    errors.append(abs(row['improvement'] - missed + missed ** row['M']))
  return (
    'How much rarer a rejection is with M candidates than with one, by recursive rejection. For Ber(u) and Ber(1/2) it'
    ' is (u - 1/2)(1 - u^(M-1)), for uniform laws (1 - 1/r) - (1 - 1/r)^M, and what is computed for any laws agrees'
    f' with these to {max(errors):.0e}. In the limit the improvement is the total variation itself, so that batches'
    ' matter only where draft and target differ; the more they do, the more drafts it takes to get there.'
  )


# Yin et al. 2024, Figure 4: the Pareto front of rejections and bias.

_NUM_RULES = 200
_PARETO_EPSILON = tuple(round(0.02 * step, 2) for step in range(26))
_BEST, _ANY = 'random acceptance, best law after a rejection', 'random acceptance, random law after a rejection'
OPT, UNO = 'decoding_opt', 'decoding_uno'


def pareto_laws() -> tuple[np.ndarray, np.ndarray]:
  """Draft and target for one token: the chains' first transition from the first state."""
  chains = theory.random_chains(CHAINS_SEED, num_tokens=50)
  return chains.draft_probs[0, 0], chains.target_probs[0, 0]


def _compute_pareto(request: Request, notify: Notify) -> list[Row]:
  del notify, request
  p, q = pareto_laws()
  least = theory.over_acceptance(p, q, 0.0)
  rng = np.random.default_rng(0)
  rows = []

  def add(line, accept, law, epsilon=None):
    bias = theory.total_variation(theory.emitted_law(p, accept, law), q)
    rejection = float(theory.rejection_prob(p, accept))
    rows.append({'line': line, 'epsilon': epsilon, 'rejection': rejection, 'bias': float(bias)})

  for _ in range(_NUM_RULES):
    accept = least + (1 - least) * rng.random() * rng.random(len(p)) ** rng.uniform(0.2, 5)
    add(_BEST, accept, theory.best_rejection_law(p, q, accept))
    accept = rng.random(len(p)) ** rng.uniform(0.1, 3)
    add(_ANY, accept, rng.dirichlet(np.ones(len(p))))
  for epsilon in _PARETO_EPSILON:
    accept = theory.over_acceptance(p, q, epsilon)
    add(OPT, accept, theory.best_rejection_law(p, q, accept), epsilon)
    add(UNO, accept, q, epsilon)
  for rejection in (0.0, float(theory.total_variation(p, q)), 1.0):
    bias = float(theory.pareto_bias(p, q, rejection))
    rows.append({'line': 'front', 'epsilon': None, 'rejection': rejection, 'bias': bias})
  return rows


def _draw_pareto(rows: Sequence[Row]):
  figure, axes = plots.panels(3, width=3.0, height=3.4)
  front = select(rows, line='front')
  distance = front[0]['bias']
  region, curve, over = axes
  for each, limit in ((region, 1.0), (curve, 1.2 * distance)):
    xs, ys = [row['rejection'] for row in front], [row['bias'] for row in front]
    each.fill_between(xs, ys, 1, color='#56B4E9', alpha=0.2, linewidth=0, label='possible')
    each.fill_between(xs, 0, ys, color='#D55E00', alpha=0.25, linewidth=0, label='impossible')
    each.plot(xs, ys, color='#000000', linewidth=1.2, label='front: bias + rejection = TV')
    each.set(xlim=(0, limit), ylim=(0, limit))
  for line, color in ((_ANY, '#999999'), (_BEST, '#0072B2')):
    own = select(rows, line=line)
    xs, ys = column(own, 'rejection'), column(own, 'bias')
    region.plot(xs, ys, '.', color=color, markersize=3, label=line.replace(', ', ',\n'))
  for name in (UNO, OPT):
    own, style = select(rows, line=name), plots.style_of(name)
    curve.plot(column(own, 'rejection'), column(own, 'bias'), markersize=4, label=name, **style)
    plots.draw_line(over, own, x='epsilon', y='bias', label=name, **style)
  speculative = plots.style_of('speculative') | {'markersize': 8, 'linestyle': ''}
  curve.plot([distance], [0], label='speculative', clip_on=False, zorder=5, **speculative)
  own = [row | {'sum': row['bias'] + row['rejection']} for row in select(rows, line=OPT)]
  plots.draw_line(over, own, x='epsilon', y='rejection', label='P(reject), both', color='#555555', linestyle='--')
  plots.draw_line(over, own, x='epsilon', y='sum', label='bias + P(reject) of decoding_opt', color='k', linestyle=':')
  plots.name_axes(region, x='probability of rejection', y='bias (total variation from the target)', title='any rule')
  plots.name_axes(curve, x='probability of rejection', y='bias (total variation)', title='b = min(1, (q + ε)/p)')
  plots.name_axes(over, x='over-acceptance ε', y='probability, total variation', title='the same over ε')
  plots.legend(figure, axes)
  return figure


def _tell_pareto(rows: Sequence[Row]) -> str:
  distance = select(rows, line='front')[0]['bias']
  best = [row['rejection'] + row['bias'] for row in select(rows, line=OPT)]
  anything = [row['rejection'] + row['bias'] for row in rows]
  pairs = zip(select(rows, line=OPT), select(rows, line=UNO))
  worst = max(pairs, key=lambda pair: pair[1]['bias'] - pair[0]['bias'])
  return (
    f'One token of two chains of 7 states with a total variation TV of {distance:.3f}. No rule rejects and is biased by'
    f' less than TV together: the least sum among {2 * _NUM_RULES} random rules and all others here is'
    f' {min(anything):.3f}. Decoding-OPT, with the best law after a rejection, is on that front for every ε, from'
    ' speculative decoding (no bias) to keeping whatever was drafted (no rejections): its sums differ from TV by at'
    f" most {max(abs(each - distance) for each in best):.0e}. Decoding-UNO, which redraws from the target's whole law,"
    f' is off the front, at ε = {worst[0]["epsilon"]:g} with a bias of {worst[1]["bias"]:.3f} instead of'
    f' {worst[0]["bias"]:.3f}.'
  )


_NOT_PUBLISHED = 'Size and seed of the chains are those of the paper, which does not say how their rows are drawn'

FIGURES = {
  'batch_fig2': Figure(
    title=f'{YIN}, Figure 2: rejections in 50 tokens',
    compute=functools.partial(_compute_rejections, 50),
    draw=_draw_rejections,
    tell=functools.partial(_tell_rejections, 50, f'{_NOT_PUBLISHED}: it has 16.41 rejections for one draft.'),
    sizes=Sizes(num_runs=5000, num_drafts=(1, 4, 5)),
  ),
  'batch_fig3': Figure(
    title=f'{YIN}, Figure 3: batch improvement',
    compute=_compute_improvement,
    draw=_draw_improvement,
    tell=_tell_improvement,
    sizes=Sizes(num_drafts=_MANY),
  ),
  'pareto_fig4': Figure(
    title=f'{YIN}, Figure 4: the front of rejections and bias',
    compute=_compute_pareto,
    draw=_draw_pareto,
    tell=_tell_pareto,
  ),
  'batch_fig5': Figure(
    title=f'{YIN}, Figure 5: rejections in 100 tokens',
    compute=functools.partial(_compute_rejections, 100),
    draw=_draw_rejections,
    tell=functools.partial(_tell_rejections, 100, f'{_NOT_PUBLISHED}.'),
    sizes=Sizes(num_runs=5000, num_drafts=(1, 2)),
  ),
}  # fmt: skip
