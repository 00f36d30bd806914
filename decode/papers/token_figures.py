"""Figures about one token: acceptance of several candidates by each rule, and the most that is possible."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from decode import plots
from decode.experiment.distributions import target_texts, written_distributions
from decode.experiment.workload import Workload
from decode.papers.exhibit import Figure, Request, Results
from decode.papers.published import YIN
from decode.plots import Lines, Panel
from decode.study import Row, column, ratio_columns, select
from spectr_jax import theory
from spectr_jax.auto.trial import Notify

SPECTR = 'SpecTr (Sun et al. 2023)'
RULES = {plots.OPTIMUM: theory.optimal_acceptance, 'spectr': theory.kseq_acceptance, 'race': theory.race_acceptance}
RULE_NAMES = {
  plots.OPTIMUM: 'optimum (OTM-k)', 'spectr': 'spectr (K-SEQ)', 'race': 'race', 'specinfer': 'specinfer (recursive)',
}  # fmt: skip


@functools.cache
def _compiled(rule):
  return jax.jit(rule, static_argnums=2)


def acceptances(draft_probs, target_probs, num_drafts: int) -> dict[str, np.ndarray]:
  """Acceptance probability of n candidates of distributions `[..., V]` by rule of `RULES`, float64 `[...]`."""
  with jax.enable_x64(True):
    pair = np.asarray(draft_probs, np.float64), np.asarray(target_probs, np.float64)
    return {name: np.asarray(_compiled(rule)(*pair, num_drafts)) for name, rule in RULES.items()}


# SpecTr, Figures 1 to 3: uniform and Bernoulli distributions.

UNIFORM_SIZE = 120
_RATIOS = (1.5, 2, 4, 8, 30)
_DRAFT_BERNOULLI = 0.25
_TARGET_BERNOULLIS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
_MANY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def _uniform(size: int) -> np.ndarray:
  return np.where(np.arange(UNIFORM_SIZE) < size, 1 / size, 0)


def _bernoulli(ones) -> np.ndarray:
  return np.stack([1 - np.asarray(ones), np.asarray(ones)], axis=-1)


def _compute_acceptance(draft, targets: dict[float, np.ndarray], variable: str, request: Request, _) -> Results:
  """Acceptance by rule, target and number of candidates; targets `[V]` are by their value in the column `variable`."""
  probs = np.stack(list(targets.values()))
  accepted = {n: acceptances(np.broadcast_to(draft, probs.shape), probs, n) for n in request.sizes['num_drafts']}
  return Results(
    [
      {'rule': rule, variable: value, 'k': n, 'acceptance': float(accepted[n][rule][index])}
      for rule in RULES for index, value in enumerate(targets) for n in accepted
    ]
  )  # fmt: skip


def _compute_bernoulli(values: Sequence[float]) -> Callable:
  targets = {value: _bernoulli(value) for value in values}
  return functools.partial(_compute_acceptance, _bernoulli(_DRAFT_BERNOULLI), targets, 'b')


def _rules(x: str, by: str, x_name: str, title: str) -> Callable[[Sequence[Row]], Any]:
  """A panel for each rule, with a line for each value of `by`."""
  lines = Lines(x=x, y='acceptance', by=by, style=None, more={'marker': ''} if by == 'k' else {})
  names = {'each': 'rule', 'x': x_name, 'y': 'acceptance probability', 'title': '{}'}
  panel = Panel(lines=(lines,), are_ticks_numbers=x == 'k', more={'ylim': (-0.03, 1.03)}, **names)
  return functools.partial(plots.draw, [panel], names=RULE_NAMES, title=title, sharey=True, width=2.7)


# Yin et al. 2024, Figure 3: batch improvement.

_BATCH_BERNOULLIS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_BATCH_RATIOS = (1.5, 2, 4, 6, 10)
_BERNOULLI_PANEL, _UNIFORM_PANEL = 'Bernoulli', 'uniform'


def _compute_improvement(request: Request, notify: Notify) -> Results:
  del notify
  numbers, rows = request.sizes['num_drafts'], []
  cases = [(_BERNOULLI_PANEL, u, _bernoulli(u), _bernoulli(0.5)) for u in _BATCH_BERNOULLIS]
  cases += [(_UNIFORM_PANEL, r, _uniform(UNIFORM_SIZE), _uniform(round(UNIFORM_SIZE / r))) for r in _BATCH_RATIOS]
  for panel, parameter, draft, target in cases:
    improvements = theory.batch_improvement(draft, target, numbers)
    rows += [
      {'panel': panel, 'parameter': parameter, 'M': number, 'improvement': float(value)}
      for number, value in zip(numbers, improvements)
    ]
  return Results(rows)


def _improvement(panel: str, label: str, title: str) -> Panel:
  lines = Lines(x='M', y='improvement', by='parameter', label=label, style=None)
  y = 'batch improvement (probability)'
  return Panel(where={'panel': panel}, lines=(lines,), x='drafts M', y=y, title=title)


# Of a pair of models: SpecTr, Figure 5, and the share of the optimum.

# The prompt that the paper names.
PROMPT = 'He said he also has asked prosecutors to'
_NUM_LIKELIEST = 10
_PAIR, _ACCEPTANCE, _SHARE = 'distributions', 'acceptance', 'share of the optimum'
_PAIR_RULES = RULES | {'specinfer': theory.recursive_acceptance}


def likeliest_tokens(draft_probs: np.ndarray, target_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """The tokens among the ten likeliest of draft or target, and both distributions `[V]` restricted to them.

  As in SpecTr, Appendix D.2, where ten of each make the linear program small enough. Returns int `[n]`, by falling
  probability under the target, and float64 `[n]` that sum to 1 under draft and target.
  """
  kept = np.union1d(*(np.argsort(-probs, kind='stable')[:_NUM_LIKELIEST] for probs in (draft_probs, target_probs)))
  kept = kept[np.argsort(-target_probs[kept], kind='stable')]
  p, q = (probs[kept].astype(np.float64) for probs in (draft_probs, target_probs))
  return kept, p / p.sum(), q / q.sum()


def _compute_pair(request: Request, notify: Notify) -> Results:
  notify('distributions after the prompt', 0, 1)
  workload = Workload.load(request.decode_options(prompt=PROMPT, max_new_tokens=1))
  [(_, distributions)] = written_distributions(workload, (workload.draft, workload.target), np.zeros((1, 1), np.int32))
  kept, p, q = likeliest_tokens(*(np.asarray(probs[0, 0]) for probs in distributions))
  empty = dict.fromkeys(('panel', 'token', 'draft', 'target', 'rule', 'k', 'acceptance'))
  rows = [
    # In quotes: spaces count, and no token is a number.
    empty | {'panel': _PAIR, 'token': repr(workload.tokenizer.decode([token])), 'draft': float(a), 'target': float(b)}
    for token, a, b in zip(kept.tolist(), p, q)
  ]
  for n in request.sizes['num_drafts']:
    for rule, value in acceptances(p, q, n).items():
      rows.append(empty | {'panel': _ACCEPTANCE, 'rule': rule, 'k': n, 'acceptance': float(value)})
  return Results(rows)


def _by_rule(x: str, y: str) -> Lines:
  big = {plots.OPTIMUM: {'markersize': 8}}
  return Lines(x=x, y=y, by='rule', style=lambda rule: plots.style_of(rule) | big.get(rule, {}))


def _draw_pair(rows: Sequence[Row]):
  figure, (bars, curves) = plots.panels_of(2, width=4.2, height=3.6)
  own = select(rows, panel=_PAIR)
  places = np.arange(len(own))
  for shift, model, color in ((-0.2, 'target', '#0072B2'), (0.2, 'draft', '#E69F00')):
    bars.bar(places + shift, column(own, model), 0.4, color=color, label=f'{model}: its distribution')
  bars.set_xticks(places, [row['token'] for row in own], rotation=60, ha='right', rotation_mode='anchor')
  title = f'after "{PROMPT}"'
  plots.name_axes(bars, x='token (likeliest ten of either model)', y='probability', title=title)
  bars.tick_params(axis='x', labelsize=7)
  bars.grid(axis='x', visible=False)
  own = select(rows, panel=_ACCEPTANCE)
  plots.draw_lines(curves, _by_rule('k', 'acceptance'), own, RULE_NAMES)
  plots.name_axes(curves, x='candidates k', y='acceptance probability', title='what is accepted')
  plots.number_ticks(curves, column(own, 'k'))
  plots.legend(figure, [bars, curves])
  return figure


def _compute_optimum(request: Request, notify: Notify) -> Results:
  """Acceptance at every position of the target's own continuations, from the distributions of both models."""
  workload = Workload.load(request.decode_options())
  num_drafts, num_prompts = request.sizes['num_drafts'], len(workload.prompts)
  sums, counts = {(n, rule): np.zeros(num_prompts) for n in num_drafts for rule in _PAIR_RULES}, 0
  for seed in workload.seeds:
    tokens = target_texts(workload, seed)
    batches = written_distributions(workload, (workload.draft, workload.target), tokens)
    for done, (prompts, pair) in enumerate(batches):
      notify(f'seed {seed}: acceptance at {prompts.size} prompts at a time', done, len(workload.batches))
      for (n, rule), own in sums.items():
        accepted = np.asarray(_compiled(_PAIR_RULES[rule])(*pair, n), np.float64)
        own[prompts] += (accepted * (tokens[prompts] >= 0)).sum(axis=1)
    counts += (tokens >= 0).sum(axis=1)
  rows = []
  for (n, rule), own in sums.items():
    for quantity, whole in ((_ACCEPTANCE, counts), (_SHARE, sums[n, plots.OPTIMUM])):
      rows.append({'quantity': quantity, 'rule': rule, 'n': n} | ratio_columns(own, whole))
  return Results(rows)


def _optimum(quantity: str, y: str) -> Panel:
  return Panel(where={'quantity': quantity}, lines=(_by_rule('n', 'value'),), x='candidates n', y=y, title=quantity)


FIGURES = {
  'spectr_fig1': Figure(
    title=f'{SPECTR}, Figure 1: acceptance of k candidates, uniform distributions',
    measure=functools.partial(
      _compute_acceptance, _uniform(UNIFORM_SIZE), {r: _uniform(round(UNIFORM_SIZE / r)) for r in _RATIOS}, 'r'
    ),
    draw=_rules('k', 'r', 'candidates k', 'target\nU(120/r), r ='),
    sizes=dict(num_drafts=_MANY),
    has_models=False,
  ),
  'spectr_fig2': Figure(
    title=f'{SPECTR}, Figure 2: acceptance of k candidates, Ber(0.25) against Ber(b)',
    measure=_compute_bernoulli(_TARGET_BERNOULLIS),
    draw=_rules('k', 'b', 'candidates k', 'target\nBer(b), b ='),
    sizes=dict(num_drafts=_MANY),
    has_models=False,
  ),
  'spectr_fig3': Figure(
    title=f'{SPECTR}, Figure 3: acceptance over the target, Ber(0.25) against Ber(b)',
    measure=_compute_bernoulli(np.linspace(0, 1, 41).round(3).tolist()),
    draw=_rules('b', 'k', 'target Ber(b): b', 'candidates k ='),
    sizes=dict(num_drafts=(1, 2, 4, 8)),
    has_models=False,
  ),
  'spectr_fig5': Figure(
    title=f'{SPECTR}, Figure 5: acceptance of k candidates, distributions of a pair of models',
    measure=_compute_pair,
    draw=_draw_pair,
    sizes=dict(num_drafts=_MANY),
  ),
  'optimum': Figure(
    title='The share of the optimum that rules reach, over the number of candidates',
    measure=_compute_optimum,
    draw=functools.partial(
      plots.draw,
      [_optimum(_ACCEPTANCE, 'acceptance probability'), _optimum(_SHARE, 'acceptance / optimum')],
      names=RULE_NAMES, title='bars: 95% over prompts', height=3.4,
    ),
    sizes=dict(num_prompts=32, num_seeds=1, max_new_tokens=32, batch_size=8, num_drafts=(1, 2, 4, 8, 16)),
  ),
  'batch_fig3': Figure(
    title=f'{YIN}, Figure 3: batch improvement',
    measure=_compute_improvement,
    draw=functools.partial(
      plots.draw,
      [
        _improvement(_BERNOULLI_PANEL, 'u = {:g}', 'draft Ber(u), target Ber(0.5)'),
        _improvement(_UNIFORM_PANEL, 'r = {:g}', f'draft U({UNIFORM_SIZE}), target U({UNIFORM_SIZE}/r)'),
      ],
      sharey=True, width=3.3, height=3.4,
    ),
    sizes=dict(num_drafts=(*_MANY, 64)),
    has_models=False,
  ),
}  # fmt: skip
