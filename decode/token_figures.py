"""Figures about one token: what each rule accepts of several candidates, and what is possible."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from decode import plots
from decode.paper_figure import Figure, Row, column, select
from decode.table import Request, Sizes
from decode.workload import Notify
from spectr_jax import theory

SPECTR = 'SpecTr (Sun et al. 2023)'
RULES = {plots.OPTIMUM: theory.optimal_acceptance, 'spectr': theory.kseq_acceptance, 'race': theory.race_acceptance}
RULE_NAMES = {
  plots.OPTIMUM: 'optimum (OTM-k)', 'spectr': 'spectr (K-SEQ)', 'race': 'race', 'specinfer': 'specinfer (recursive)',
}  # fmt: skip


@functools.cache
def _compiled(rule):
  return jax.jit(rule, static_argnums=2)


def acceptances(draft_probs, target_probs, num_drafts: int, rules=RULES) -> dict[str, np.ndarray]:
  """What each rule accepts of n candidates, in float64, for laws `[..., V]`."""
  with jax.enable_x64(True):
    pair = np.asarray(draft_probs, np.float64), np.asarray(target_probs, np.float64)
    return {name: np.asarray(_compiled(rule)(*pair, num_drafts)) for name, rule in rules.items()}


# SpecTr, Figures 1 to 3.

UNIFORM_SIZE = 120
_RATIOS = (1.5, 2, 4, 8, 30)
_DRAFT_BERNOULLI = 0.25
_TARGET_BERNOULLIS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
_MANY = (1, 2, 3, 4, 6, 8, 16, 32)


def _uniform(size: int) -> np.ndarray:
  return np.where(np.arange(UNIFORM_SIZE) < size, 1 / size, 0)


def _bernoulli(ones) -> np.ndarray:
  return np.stack([1 - np.asarray(ones), np.asarray(ones)], axis=-1)


def _acceptance_rows(draft, targets: dict[float, np.ndarray], variable: str, request: Request) -> list[Row]:
  laws = np.stack(list(targets.values()))
  found = {n: acceptances(np.broadcast_to(draft, laws.shape), laws, n) for n in request.sizes.num_drafts}
  return [
    {'rule': rule, variable: value, 'k': n, 'acceptance': float(found[n][rule][index])}
    for rule in RULES for index, value in enumerate(targets) for n in found
  ]  # fmt: skip


def _compute_uniform(request: Request, notify: Notify) -> list[Row]:
  del notify
  targets = {ratio: _uniform(round(UNIFORM_SIZE / ratio)) for ratio in _RATIOS}
  return _acceptance_rows(_uniform(UNIFORM_SIZE), targets, 'r', request)


def _compute_bernoulli(values: Sequence[float], request: Request, notify: Notify) -> list[Row]:
  del notify
  return _acceptance_rows(_bernoulli(_DRAFT_BERNOULLI), {b: _bernoulli(b) for b in values}, 'b', request)


def _draw_rules(x: str, by: str, x_name: str, by_name: str, rows: Sequence[Row]):
  figure, axes = plots.panels(len(RULES), width=2.7, sharey=True)
  for place, (each, rule) in enumerate(zip(axes, RULES)):
    plots.name_axes(each, x=x_name, y='acceptance probability' if not place else '', title=RULE_NAMES[rule])
    each.title.set_color(plots.COLORS[rule])
    own = select(rows, rule=rule)
    scale = plots.scale_of(column(own, by))
    markers = {'marker': ''} if by == 'k' else {}
    plots.draw_lines(each, own, x=x, y='acceptance', by=by, style=scale.get, **markers)
    each.set_ylim(-0.03, 1.03)
    if x == 'k':
      plots.number_ticks(each, column(own, 'k'))
  plots.legend(figure, axes, title=by_name)
  return figure


def _largest_gap(rows: Sequence[Row], rule: str) -> tuple[float, Row]:
  """How far a rule stays below the optimum at most, and where."""
  pairs = zip(select(rows, rule=plots.OPTIMUM), select(rows, rule=rule))
  return max(((best['acceptance'] - own['acceptance'], own) for best, own in pairs), key=lambda pair: pair[0])


def _tell_uniform(rows: Sequence[Row]) -> str:
  gaps = {rule: _largest_gap(rows, rule)[0] for rule in ('spectr', 'race')}
  error = max(abs(row['acceptance'] - 1 + (1 - 1 / row['r']) ** row['k']) for row in select(rows, rule=plots.OPTIMUM))
  return (
    f'Drafts are uniform on {UNIFORM_SIZE} tokens and the target on a share 1/r of them. The most that any lossless'
    f' rule accepts of k candidates is 1 - (1 - 1/r)^k, to {error:.0e} here: it rises to 1 for every r, but for a'
    ' narrow target only with very many drafts. On these laws K-SEQ is optimal, as the paper says, and so is the race:'
    f' they are at most {gaps["spectr"]:.0e} and {gaps["race"]:.0e} below.'
  )


def _tell_bernoulli(rows: Sequence[Row]) -> str:
  gap, where = _largest_gap(rows, 'spectr')
  best = where['acceptance'] + gap
  return (
    f'Drafts are Ber({_DRAFT_BERNOULLI:g}) and targets Ber(b). Two equal laws always agree; the farther b is from'
    f' {_DRAFT_BERNOULLI:g}, the less is accepted, and a b above it takes more candidates than one below. K-SEQ is not'
    f' optimal here: for b = {where["b"]:g} and k = {where["k"]} it accepts {where["acceptance"]:.3f} where'
    f' {best:.3f} is possible, the widest gap of the figure. The race is at most'
    f' {_largest_gap(rows, "race")[0]:.3f} below the optimum.'
  )


FIGURES = {
  'spectr_fig1': Figure(
    title=f'{SPECTR}, Figure 1: acceptance of k candidates, uniform laws',
    compute=_compute_uniform,
    draw=functools.partial(_draw_rules, 'k', 'r', 'candidates k', 'target\nU(120/r), r ='),
    tell=_tell_uniform,
    sizes=Sizes(num_drafts=_MANY),
  ),
  'spectr_fig2': Figure(
    title=f'{SPECTR}, Figure 2: acceptance of k candidates, Ber(0.25) against Ber(b)',
    compute=functools.partial(_compute_bernoulli, _TARGET_BERNOULLIS),
    draw=functools.partial(_draw_rules, 'k', 'b', 'candidates k', 'target\nBer(b), b ='),
    tell=_tell_bernoulli,
    sizes=Sizes(num_drafts=_MANY),
  ),
  'spectr_fig3': Figure(
    title=f'{SPECTR}, Figure 3: acceptance over the target, Ber(0.25) against Ber(b)',
    compute=functools.partial(_compute_bernoulli, tuple(np.linspace(0, 1, 41).round(3).tolist())),
    draw=functools.partial(_draw_rules, 'b', 'k', 'target Ber(b): b', 'candidates k ='),
    tell=_tell_bernoulli,
    sizes=Sizes(num_drafts=(1, 2, 4, 8)),
  ),
}
