"""Figures about rejections in a text and the bias that buys fewer of them: theory, and runs beside it."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np

from decode import plots
from decode.experiment.distributions import target_texts, written_distributions
from decode.experiment.run import measure
from decode.experiment.settings import settings_of
from decode.experiment.workload import Workload
from decode.papers.exhibit import Figure, Request, Results
from decode.papers.published import YIN
from decode.plots import Lines, Panel
from decode.study import Row, by_value, column, low_high, ratio_columns, select
from spectr_jax import METHODS, theory
from spectr_jax.auto.trial import Notify
from spectr_jax.methods import with_epsilon
from spectr_jax.testing import simulated_rejections

# The seed that the paper names; it does not say how the rows of its chains are drawn.
CHAINS_SEED = 10
_MANY_DRAFTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_CHECKPOINTS = 40
_NORMAL_95 = 1.959964
OPT, UNO, TARGET = 'decoding_opt', 'decoding_uno', 'autoregressive'


# Yin et al. 2024, Figures 2 and 5: rejections of nonstationary chains.


def _running(counts: np.ndarray) -> list[tuple[int, float, float]]:
  """Number of runs, mean and half width of its 95% interval, over growing starts of the runs."""
  places = np.unique(np.geomspace(min(20, len(counts)), len(counts), _CHECKPOINTS).astype(int))
  return [
    (int(n), float(counts[:n].mean()), float(_NORMAL_95 * counts[:n].std(ddof=1) / math.sqrt(n)))
    for n in places
    if n > 1
  ]


def _rejection_row(panel: str, line: str, num_drafts, runs, mean: float, half: float | None = None) -> Row:
  row = {'panel': panel, 'line': line, 'M': num_drafts, 'runs': runs, 'rejections': mean}
  return row | low_high(None if half is None else (mean - half, mean + half))


_RUNNING, _SCALING = 'running average', 'number of drafts'


def _compute_rejections(num_tokens: int, request: Request, notify: Notify) -> Results:
  chains = theory.random_chains(CHAINS_SEED, num_tokens=num_tokens)
  rows, last = [], []
  num_drafts, num_runs = request.sizes['num_drafts'], request.sizes['num_runs']
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
  every = sorted({*num_drafts, *_MANY_DRAFTS})
  rows += [
    _rejection_row(_SCALING, 'theory', number, None, float(value))
    for number, value in zip(every, theory.expected_rejections(chains, every))
  ]
  limit = float(theory.expected_rejections(chains, math.inf))
  rows += [_rejection_row(_SCALING, 'limit', number, None, limit) for number in (every[0], every[-1])]
  return Results(rows + last)


def _draw_rejections(rows: Sequence[Row]):
  running, scaling = (select(rows, panel=panel) for panel in (_RUNNING, _SCALING))
  groups = by_value(running, 'M')
  figure, axes = plots.panels_of(len(groups) + 1, width=2.5)
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


# Yin et al. 2024, Figure 4: the Pareto front of rejections and bias.

_NUM_RULES = 200
_PARETO_EPSILON = tuple(round(0.02 * step, 2) for step in range(26))
_BEST, _ANY = (f'random acceptance, {kind} distribution after a rejection' for kind in ('best', 'random'))


def pareto_probs() -> tuple[np.ndarray, np.ndarray]:
  """Distributions of draft and target for one token: the first transition of the chains from the first state."""
  chains = theory.random_chains(CHAINS_SEED, num_tokens=50)
  return chains.draft_probs[0, 0], chains.target_probs[0, 0]


def _compute_pareto(request: Request, notify: Notify) -> Results:
  del notify, request
  p, q = pareto_probs()
  least = theory.over_acceptance(p, q, 0.0)
  rng = np.random.default_rng(0)
  rows = []

  def add(line, accept, rejected_probs, epsilon=None):
    bias = theory.total_variation(theory.emitted_law(p, accept, rejected_probs), q)
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
  return Results(rows)


def _draw_pareto(rows: Sequence[Row]):
  figure, axes = plots.panels_of(3, width=3.0, height=3.4)
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


# Yin et al. 2024, section 4.2 and Table 1: over-acceptance on a pair of models.

_TV, _REJECTION, _LIKELIHOOD, _WIN_RATE, _TOKENS = (
  'bias', 'rejection', 'log-likelihood', 'win rate', 'tokens per call',
)  # fmt: skip


def _exact_rows(workload: Workload, epsilons: Sequence[float], seed: int) -> list[Row]:
  """Bias and rejections at the positions of the target's own texts, computed from both models' distributions."""
  tokens = target_texts(workload, seed)
  sums = {(line, epsilon): np.zeros(len(tokens)) for line in (OPT, UNO, _REJECTION) for epsilon in epsilons}
  for rows, (p, q) in written_distributions(workload, (workload.draft, workload.target), tokens):
    p, q = (np.asarray(probs, np.float64) for probs in (p, q))
    p, q = (probs / probs.sum(axis=-1, keepdims=True) for probs in (p, q))
    is_there = tokens[rows] >= 0
    for epsilon in epsilons:
      accept = theory.over_acceptance(p, q, epsilon)
      by_line = {
        OPT: theory.minimal_bias(p, q, accept),
        UNO: theory.total_variation(theory.emitted_law(p, accept, q), q),
        _REJECTION: theory.rejection_prob(p, accept),
      }
      for line, values in by_line.items():
        sums[line, epsilon][rows] += (values * is_there).sum(axis=1)
  counts = (tokens >= 0).sum(axis=1)
  return [
    {'quantity': _REJECTION if line == _REJECTION else _TV, 'method': 'both' if line == _REJECTION else line}
    | {'epsilon': epsilon}
    | ratio_columns(own, counts)
    for (line, epsilon), own in sums.items()
  ]


def _log_likelihood(workload: Workload, tokens: np.ndarray) -> np.ndarray:
  """Log-likelihood `[prompts]` under the target of continuations `[prompts, max_new_tokens]`, in nats."""
  likelihoods = np.zeros(len(tokens))
  for rows, [q] in written_distributions(workload, (workload.target,), tokens):
    own = tokens[rows]
    probs = np.take_along_axis(np.asarray(q), np.maximum(own, 0)[..., None], axis=-1)[..., 0]
    # The draft may draw a token of probability 0, which alone would decide the comparison.
    likelihoods[rows] = (np.log(np.maximum(probs.astype(np.float64), 1e-12)) * (own >= 0)).sum(axis=1)
  return likelihoods


def _wins(first: np.ndarray, second: np.ndarray) -> np.ndarray:
  """1 where the first score is higher, 0 where the second is, 1/2 where they are equal."""
  return (1 + np.sign(first - second)) / 2


def _compute_over_acceptance(request: Request, notify: Notify) -> Results:
  options = request.decode_options(method=(OPT, UNO), num_drafts=(1,))
  workload = Workload.load(options)
  epsilons = sorted(set(request.sizes['epsilon']))
  notify('bias at the positions of texts', 0, 1)
  rows = _exact_rows(workload, epsilons, workload.seeds[0])
  settings = {
    (name, epsilon): settings_of(with_epsilon(METHODS[name], epsilon), options.methods)[0]
    for epsilon in epsilons for name in (OPT, UNO)
  }  # fmt: skip
  alone = settings_of(METHODS[TARGET], options.methods)[0]
  run = measure(workload, [alone, *settings.values()], notify)
  scores, lengths = collections.defaultdict(list), collections.defaultdict(list)
  for measurement in run.measurements:
    scores[measurement.setting].append(_log_likelihood(workload, measurement.tokens))
    lengths[measurement.setting].append(measurement.lengths)
  # `[seeds, prompts]` by setting.
  scores, lengths = ({key: np.stack(each) for key, each in parts.items()} for parts in (scores, lengths))

  def likelihood_row(method, epsilon, setting):
    columns = ratio_columns(scores[setting].sum(axis=0), lengths[setting].sum(axis=0))
    return {'quantity': _LIKELIHOOD, 'method': method, 'epsilon': epsilon} | columns

  for (name, epsilon), setting in settings.items():
    rows.append(likelihood_row(name, epsilon, setting))
    summary = run.summarize(setting)
    row = {'quantity': _TOKENS, 'method': name, 'epsilon': epsilon, 'value': summary['block_efficiency']}
    rows.append(row | low_high(summary['block_efficiency_ci95']))
  for epsilon in epsilons:
    rows.append(likelihood_row(TARGET, epsilon, alone))
    won = _wins(*(scores[each] / lengths[each] for each in (settings[OPT, epsilon], settings[UNO, epsilon])))
    row = {'quantity': _WIN_RATE, 'method': OPT, 'epsilon': epsilon}
    rows.append(row | ratio_columns(won.sum(axis=0), np.full(won.shape[1], len(won))))
  return Results(rows)


def _number_epsilon(axes) -> None:
  axes.set_xscale('symlog', linthresh=1e-3)
  axes.set_xticks([0, 0.001, 0.01, 0.1, 1], ['0', '.001', '.01', '.1', '1'])
  axes.minorticks_off()


def _draw_middle(axes) -> None:
  _number_epsilon(axes)
  axes.axhline(0.5, color='#555555', linestyle=':', linewidth=1, label='no difference')
  axes.set_ylim(0, 1)


def _over_acceptance(quantity: str, y: str, title: str, *others: Lines, finish=_number_epsilon) -> Panel:
  lines = Lines(x='epsilon', y='value', by='method', where={'quantity': quantity}), *others
  return Panel(lines=lines, x='over-acceptance ε', y=y, title=title, are_ticks_numbers=False, finish=finish)


_REJECTED = Lines(
  x='epsilon', y='value', where={'quantity': _REJECTION}, label='P(reject), both',
  more={'color': '#D55E00', 'linestyle': '--'},
)  # fmt: skip
_OVER_ACCEPTANCE = (
  _over_acceptance(_TV, 'total variation from the target', 'bias of one token', _REJECTED),
  _over_acceptance(_LIKELIHOOD, 'nats per token', 'log-likelihood under the target'),
  _over_acceptance(_WIN_RATE, 'share of comparisons won', 'win rate, the target as scorer', finish=_draw_middle),
)


FIGURES = {
  'batch_fig2': Figure(
    title=f'{YIN}, Figure 2: rejections in 50 tokens',
    measure=functools.partial(_compute_rejections, 50),
    draw=_draw_rejections,
    sizes=dict(num_runs=5000, num_drafts=(1, 4, 5)),
    has_models=False,
    is_simulated=True,
  ),
  'batch_fig5': Figure(
    title=f'{YIN}, Figure 5: rejections in 100 tokens',
    measure=functools.partial(_compute_rejections, 100),
    draw=_draw_rejections,
    sizes=dict(num_runs=5000, num_drafts=(1, 2)),
    has_models=False,
    is_simulated=True,
  ),
  'pareto_fig4': Figure(
    title=f'{YIN}, Figure 4: the front of rejections and bias',
    measure=_compute_pareto,
    draw=_draw_pareto,
    has_models=False,
  ),
  'opt_uno': Figure(
    title='Decoding-OPT against Decoding-UNO over ε (Yin et al. 2024, section 4.2 and Table 1)',
    measure=_compute_over_acceptance,
    draw=functools.partial(plots.draw, _OVER_ACCEPTANCE, title='bars: 95% over prompts', width=2.9, height=3.4),
    sizes=dict(
      num_prompts=64, num_seeds=2, max_new_tokens=32, batch_size=32, draft_length=(4,),
      epsilon=(0, 0.001, 0.01, 0.1, 0.2, 0.4, 0.8),
    ),
  ),
}  # fmt: skip
