"""Figures about one token: acceptance of several candidates by each rule, and the most that is possible."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from decode.experiment.distributions import target_texts, written_distributions
from decode.experiment.workload import Workload
from decode.papers import plots
from decode.papers.exhibit import Request, Results, Row, Sizes
from decode.papers.figure import Figure, by_value, column, ratio_columns, select
from decode.papers.published import YIN
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
  accepted = {n: acceptances(np.broadcast_to(draft, probs.shape), probs, n) for n in request.sizes.num_drafts}
  return Results(
    [
      {'rule': rule, variable: value, 'k': n, 'acceptance': float(accepted[n][rule][index])}
      for rule in RULES for index, value in enumerate(targets) for n in accepted
    ]
  )  # fmt: skip


def _compute_bernoulli(values: Sequence[float]) -> Callable:
  targets = {value: _bernoulli(value) for value in values}
  return functools.partial(_compute_acceptance, _bernoulli(_DRAFT_BERNOULLI), targets, 'b')


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
  """The largest gap between a rule and the optimum, and the rule's row there."""
  pairs = zip(select(rows, rule=plots.OPTIMUM), select(rows, rule=rule))
  return max(((best['acceptance'] - own['acceptance'], own) for best, own in pairs), key=lambda pair: pair[0])


def _tell_uniform(rows: Sequence[Row]) -> str:
  gaps = {rule: _largest_gap(rows, rule)[0] for rule in ('spectr', 'race')}
  error = max(abs(row['acceptance'] - 1 + (1 - 1 / row['r']) ** row['k']) for row in select(rows, rule=plots.OPTIMUM))
  return (
    f'Drafts are uniform on {UNIFORM_SIZE} tokens and the target on a share 1/r of them. The most that any lossless'
    f' rule accepts of k candidates is 1 - (1 - 1/r)^k, to {error:.0e} here: it rises to 1 for every r, but for a'
    ' narrow target only with very many drafts. On these distributions K-SEQ is optimal, as the paper says, and so is'
    f' the race: they are at most {gaps["spectr"]:.0e} and {gaps["race"]:.0e} below.'
  )


def _tell_bernoulli(rows: Sequence[Row]) -> str:
  gap, where = _largest_gap(rows, 'spectr')
  best = where['acceptance'] + gap
  return (
    f'Drafts are Ber({_DRAFT_BERNOULLI:g}) and targets Ber(b). Two equal distributions always agree; the farther b is'
    f' from {_DRAFT_BERNOULLI:g}, the less is accepted of one candidate, and targets that are mostly 1 take the most'
    ' candidates, since few drafts are 1. K-SEQ is not'
    f' optimal here: for b = {where["b"]:g} and k = {where["k"]} it accepts {where["acceptance"]:.3f} where'
    f' {best:.3f} is possible, the widest gap of the figure. The race is at most'
    f' {_largest_gap(rows, "race")[0]:.3f} below the optimum.'
  )


# Yin et al. 2024, Figure 3: batch improvement.

_BATCH_BERNOULLIS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_BATCH_RATIOS = (1.5, 2, 4, 6, 10)
_BERNOULLI_PANEL, _UNIFORM_PANEL = 'Bernoulli', 'uniform'


def _compute_improvement(request: Request, notify: Notify) -> Results:
  del notify
  numbers, rows = request.sizes.num_drafts, []
  cases = [(_BERNOULLI_PANEL, u, _bernoulli(u), _bernoulli(0.5)) for u in _BATCH_BERNOULLIS]
  cases += [(_UNIFORM_PANEL, r, _uniform(UNIFORM_SIZE), _uniform(round(UNIFORM_SIZE / r))) for r in _BATCH_RATIOS]
  for panel, parameter, draft, target in cases:
    improvements = theory.batch_improvement(draft, target, numbers)
    rows += [
      {'panel': panel, 'parameter': parameter, 'M': number, 'improvement': float(value)}
      for number, value in zip(numbers, improvements)
    ]
  return Results(rows)


def _draw_improvement(rows: Sequence[Row]):
  figure, axes = plots.panels(2, width=3.3, height=3.4, sharey=True)
  for each, panel, symbol, title in (
    (axes[0], _BERNOULLI_PANEL, 'u', 'draft Ber(u), target Ber(0.5)'),
    (axes[1], _UNIFORM_PANEL, 'r', f'draft U({UNIFORM_SIZE}), target U({UNIFORM_SIZE}/r)'),
  ):
    own = [row | {'target': f'{symbol} = {row["parameter"]:g}'} for row in select(rows, panel=panel)]
    scale = plots.scale_of(column(own, 'target'))
    plots.draw_lines(each, own, x='M', y='improvement', by='target', style=scale.get)
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
    ' is (u - 1/2)(1 - u^(M-1)), for uniform distributions (1 - 1/r) - (1 - 1/r)^M, and what is computed for any'
    f' distributions agrees with these to {max(errors):.0e}. In the limit the improvement is the total variation'
    ' itself, so that batches matter only where draft and target differ; the more they do, the more drafts it takes to'
    ' get there.'
  )


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
  for n in request.sizes.num_drafts:
    for rule, value in acceptances(p, q, n).items():
      rows.append(empty | {'panel': _ACCEPTANCE, 'rule': rule, 'k': n, 'acceptance': float(value)})
  return Results(rows)


def _draw_by_rule(axes, rows: Sequence[Row], *, x: str, y: str) -> None:
  for rule, own in by_value(rows, 'rule').items():
    style = plots.style_of(rule) | ({'markersize': 8} if rule == plots.OPTIMUM else {})
    plots.draw_line(axes, own, x=x, y=y, label=RULE_NAMES[rule], **style)


def _draw_pair(rows: Sequence[Row]):
  figure, (bars, curves) = plots.panels(2, width=4.2, height=3.6)
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
  _draw_by_rule(curves, own, x='k', y='acceptance')
  plots.name_axes(curves, x='candidates k', y='acceptance probability', title='what is accepted')
  plots.number_ticks(curves, column(own, 'k'))
  plots.legend(figure, [bars, curves])
  return figure


def _tell_pair(rows: Sequence[Row]) -> str:
  own = select(rows, panel=_ACCEPTANCE)
  most = max(column(own, 'k'))
  first = {row['rule']: row['acceptance'] for row in select(own, k=min(column(own, 'k')))}
  gap, where = _largest_gap(own, 'spectr')
  race_gap, race_where = _largest_gap(own, 'race')
  last = {row['rule']: row['acceptance'] for row in select(own, k=most)}
  return (
    f"Distributions of both models after the paper's prompt, on the {len(select(rows, panel=_PAIR))} tokens that are"
    f' among the {_NUM_LIKELIEST} likeliest of either. The optimum is {first[plots.OPTIMUM]:.3f} for k ='
    f' {min(column(own, "k"))} and {last[plots.OPTIMUM]:.3f} for k = {most}. K-SEQ stays below it, by {gap:.3f} at most'
    f' (k = {where["k"]}): the gap that the paper leaves as future work. The race closes it to {race_gap:.3f} at most'
    f' (k = {race_where["k"]}).'
  )


def acceptance_on_text(
  workload: Workload,
  seed: int,
  rules: Mapping[str, Callable],
  num_drafts: Sequence[int],
  *,
  given: str = 'none',
  notify: Notify = lambda *_: None,
) -> tuple[np.ndarray, np.ndarray, dict[tuple[int, str], np.ndarray]]:
  """Acceptance at every position of the target's own continuations, from the distributions of both models.

  `rules` are by name functions of draft and target distributions, n, and the token that is `given`, if there is one:
  'text', the text's next one, or 'draft', the draft's likeliest. Returns which positions there are, bool `[prompts,
  max_new_tokens]`; at these 1 - TV; and the acceptance by n and rule, float64 of the same shape.
  """
  tokens = target_texts(workload, seed)
  overlaps = np.zeros(tokens.shape)
  accepted = {(n, name): np.zeros(tokens.shape) for n in num_drafts for name in rules}
  batches = written_distributions(workload, (workload.draft, workload.target), tokens)
  for done, (rows, (p, q)) in enumerate(batches):
    notify(f'seed {seed}: acceptance at {rows.size} prompts at a time', done, len(workload.batches))
    overlaps[rows] = jnp.sum(jnp.minimum(p, q), axis=-1)
    beside = ()
    if given != 'none':
      beside = (np.maximum(tokens[rows], 0) if given == 'text' else jnp.argmax(p, axis=-1),)
    for n in num_drafts:
      for name, rule in rules.items():
        accepted[n, name][rows] = _compiled(rule)(p, q, n, *beside)
  return tokens >= 0, overlaps, accepted


def _compute_optimum(request: Request, notify: Notify) -> Results:
  workload = Workload.load(request.decode_options())
  sums, counts = collections.Counter(), 0
  for seed in workload.options.seeds:
    is_there, _, accepted = acceptance_on_text(workload, seed, _PAIR_RULES, request.sizes.num_drafts, notify=notify)
    counts += is_there.sum(axis=1)
    for key, values in accepted.items():
      sums[key] = sums[key] + (values * is_there).sum(axis=1)
  rows = []
  for (n, rule), own in sums.items():
    for quantity, whole in ((_ACCEPTANCE, counts), (_SHARE, sums[n, plots.OPTIMUM])):
      rows.append({'quantity': quantity, 'rule': rule, 'n': n} | ratio_columns(own, whole))
  return Results(rows)


def _draw_optimum(rows: Sequence[Row]):
  figure, axes = plots.panels(2, width=3.4, height=3.4)
  for each, quantity in zip(axes, (_ACCEPTANCE, _SHARE)):
    own = select(rows, quantity=quantity)
    _draw_by_rule(each, own, x='n', y='value')
    y = 'acceptance probability' if quantity == _ACCEPTANCE else 'acceptance / optimum'
    plots.name_axes(each, x='candidates n', y=y, title=quantity)
    plots.number_ticks(each, column(own, 'n'))
  plots.legend(figure, axes, title='bars: 95% over prompts')
  return figure


def _tell_optimum(rows: Sequence[Row]) -> str:
  shares = {(row['rule'], row['n']): row['value'] for row in select(rows, quantity=_SHARE) if row['n'] > 1}
  best = {row['n']: row['value'] for row in select(rows, quantity=_ACCEPTANCE, rule=plots.OPTIMUM)}
  ranges = ', '.join(
    f'{RULE_NAMES[rule]} {min(values):.3f} to {max(values):.3f}'
    for rule in ('race', 'spectr', 'specinfer')
    if (values := [share for (name, _), share in shares.items() if name == rule])
  )
  return (
    'Acceptance of the next token from n independent candidates, computed from the distributions of both models at'
    " every position of the target's own continuations: no candidate is drawn, so that intervals are over prompts"
    f' alone. The optimum is {best[min(best)]:.3f} for n = {min(best)} and {best[max(best)]:.3f} for n = {max(best)}.'
    f' The share of it that rules reach with several candidates: {ranges}. For K-SEQ 1 - 1/e = .632 is guaranteed.'
  )


FIGURES = {
  'spectr_fig1': Figure(
    title=f'{SPECTR}, Figure 1: acceptance of k candidates, uniform distributions',
    measure=functools.partial(
      _compute_acceptance, _uniform(UNIFORM_SIZE), {r: _uniform(round(UNIFORM_SIZE / r)) for r in _RATIOS}, 'r'
    ),
    draw=functools.partial(_draw_rules, 'k', 'r', 'candidates k', 'target\nU(120/r), r ='),
    tell=_tell_uniform,
    sizes=Sizes(num_drafts=_MANY),
    has_models=False,
  ),
  'spectr_fig2': Figure(
    title=f'{SPECTR}, Figure 2: acceptance of k candidates, Ber(0.25) against Ber(b)',
    measure=_compute_bernoulli(_TARGET_BERNOULLIS),
    draw=functools.partial(_draw_rules, 'k', 'b', 'candidates k', 'target\nBer(b), b ='),
    tell=_tell_bernoulli,
    sizes=Sizes(num_drafts=_MANY),
    has_models=False,
  ),
  'spectr_fig3': Figure(
    title=f'{SPECTR}, Figure 3: acceptance over the target, Ber(0.25) against Ber(b)',
    measure=_compute_bernoulli(np.linspace(0, 1, 41).round(3).tolist()),
    draw=functools.partial(_draw_rules, 'b', 'k', 'target Ber(b): b', 'candidates k ='),
    tell=_tell_bernoulli,
    sizes=Sizes(num_drafts=(1, 2, 4, 8)),
    has_models=False,
  ),
  'spectr_fig5': Figure(
    title=f'{SPECTR}, Figure 5: acceptance of k candidates, distributions of a pair of models',
    measure=_compute_pair,
    draw=_draw_pair,
    tell=_tell_pair,
    sizes=Sizes(num_drafts=_MANY),
  ),
  'optimum': Figure(
    title='The share of the optimum that rules reach, over the number of candidates',
    measure=_compute_optimum,
    draw=_draw_optimum,
    tell=_tell_optimum,
    sizes=Sizes(num_prompts=32, num_seeds=1, max_new_tokens=32, batch_size=8, num_drafts=(1, 2, 4, 8, 16)),
  ),
  'batch_fig3': Figure(
    title=f'{YIN}, Figure 3: batch improvement',
    measure=_compute_improvement,
    draw=_draw_improvement,
    tell=_tell_improvement,
    sizes=Sizes(num_drafts=(*_MANY, 64)),
    has_models=False,
  ),
}
