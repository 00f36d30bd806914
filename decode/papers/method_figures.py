"""Figures about whole runs: all methods over K and L, and over-acceptance with the best law and with the target's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decode.experiment import metrics
from decode.experiment.laws import target_texts, written_laws
from decode.experiment.options import DecodeOptions
from decode.experiment.run import measure, run_decode
from decode.experiment.settings import settings_of
from decode.experiment.workload import Notify, Workload
from decode.papers import plots
from decode.papers.paper_figure import Figure, Row, by_value, column, select
from decode.papers.table import Request, Sizes
from spectr_jax import METHODS, theory, with_epsilon

# All that draft, but for those that over-accept: these have a figure of their own.
OPT, UNO = 'decoding_opt', 'decoding_uno'
DRAFTING = tuple(name for name, method in METHODS.items() if method.max_drafts != 0 and name not in (OPT, UNO))
_TV, _REJECTION, _LIKELIHOOD, _WIN_RATE, _TOKENS = (
  'bias', 'rejection', 'log-likelihood', 'win rate', 'tokens per call',
)  # fmt: skip
TARGET = 'autoregressive'


def _options(request: Request, **options) -> DecodeOptions:
  sizes = request.sizes
  [path] = request.prompts.values()
  return DecodeOptions(
    target=request.target, draft=request.draft, dtype=request.dtype, seed=request.seed, prompts=path, skip_long=True,
    num_prompts=sizes.num_prompts, num_seeds=sizes.num_seeds, max_new_tokens=sizes.max_new_tokens,
    batch_size=sizes.batch_size, draft_length=sizes.draft_length, **options,
  )  # fmt: skip


# All methods over K and L.


def _compute_methods(request: Request, notify: Notify) -> list[Row]:
  run = run_decode(_options(request, method=DRAFTING, num_drafts=request.sizes.num_drafts), notify)
  rows = []
  for setting in run.settings:
    summary = run.summarize(setting)
    low, high = summary.interval or (None, None)
    name = setting.method.name
    rows.append(
      {
        'method': name if setting.method.is_lossless_on(setting.tree) else f'{name} (not lossless)',
        'K': setting.num_drafts,
        'L': setting.draft_length,
        'block efficiency': summary.block_efficiency,
        'low': low,
        'high': high,
      }
    )
  return rows


def _spread(rows: Sequence[Row]) -> list[Row]:
  """Methods moved a little apart from each other, so that their intervals can be told apart."""
  methods = list(dict.fromkeys(column(rows, 'method')))
  return [row | {'K': row['K'] * 1.03 ** (methods.index(row['method']) - len(methods) / 2)} for row in rows]


def _draw_methods(rows: Sequence[Row]):
  groups = by_value(rows, 'L')
  figure, axes = plots.panels(len(groups), width=4.0, height=4.2, sharey=True)
  for each, (length, own) in zip(axes, groups.items()):
    plots.draw_lines(each, _spread(own), x='K', y='block efficiency', by='method', markersize=5)
    y = 'block efficiency (tokens per target call)' if each is axes[0] else ''
    plots.name_axes(each, x='drafts K', y=y, title=f'drafts of L = {length} tokens')
    plots.number_ticks(each, column(own, 'K'))
  plots.legend(figure, axes, title='bars: 95% over prompts')
  return figure


def _tell_methods(rows: Sequence[Row]) -> str:
  parts = []
  for (length, number), own in by_value([row | {'at': (row['L'], row['K'])} for row in rows], 'at').items():
    own = sorted(own, key=lambda row: -row['block efficiency'])
    lossless = [row for row in own if 'not lossless' not in row['method']]
    best = ', '.join(f'{row["method"]} {row["block efficiency"]:.2f}' for row in lossless[:3])
    parts.append(f'K = {number}, L = {length}: {best}')
  return (
    'Tokens per target call of every method that drafts; sampling from the target alone has 1. The best three that are'
    f' lossless, {"; ".join(parts)}. Intervals are over prompts, which all methods share, so that differences are surer'
    " than they look. spectr_gbv does not keep the target's law with several drafts, and is drawn for comparison."
  )


# Over-acceptance.


def _interval(sums: np.ndarray, counts: np.ndarray) -> dict[str, float | None]:
  low, high = metrics.ratio_interval(sums, counts) or (None, None)
  return {'value': metrics.ratio(sums, counts), 'low': low, 'high': high}


def _law_rows(workload: Workload, epsilons: Sequence[float], seed: int) -> list[Row]:
  """Bias and rejections at the positions of the target's own texts, exactly, from both models' laws."""
  tokens = target_texts(workload, seed)
  sums = {(line, epsilon): np.zeros(len(tokens)) for line in (OPT, UNO, _REJECTION) for epsilon in epsilons}
  for rows, (p, q) in written_laws(workload, (workload.draft, workload.target), tokens):
    p, q = (np.asarray(law, np.float64) for law in (p, q))
    p, q = (law / law.sum(axis=-1, keepdims=True) for law in (p, q))
    is_there = tokens[rows] >= 0
    for epsilon in epsilons:
      accept = theory.over_acceptance(p, q, epsilon)
      found = {
        OPT: theory.minimal_bias(p, q, accept),
        UNO: theory.total_variation(theory.emitted_law(p, accept, q), q),
        _REJECTION: theory.rejection_prob(p, accept),
      }
      for line, values in found.items():
        sums[line, epsilon][rows] += (values * is_there).sum(axis=1)
  counts = (tokens >= 0).sum(axis=1)
  return [
    {'quantity': _REJECTION if line == _REJECTION else _TV, 'method': 'both' if line == _REJECTION else line}
    | {'epsilon': epsilon}
    | _interval(own, counts)
    for (line, epsilon), own in sums.items()
  ]


def _log_likelihood(workload: Workload, tokens: np.ndarray) -> np.ndarray:
  """Log-likelihood `[prompts]` of the continuations under the target, in nats."""
  found = np.zeros(len(tokens))
  for rows, [q] in written_laws(workload, (workload.target,), tokens):
    own = tokens[rows]
    probs = np.take_along_axis(np.asarray(q), np.maximum(own, 0)[..., None], axis=-1)[..., 0]
    # A token of probability 0, which the draft may well draw, would decide everything.
    found[rows] = (np.log(np.maximum(probs.astype(np.float64), 1e-12)) * (own >= 0)).sum(axis=1)
  return found


def wins(first: np.ndarray, second: np.ndarray) -> np.ndarray:
  """1 where the first score is higher, 0 where the second is, 1/2 where they are equal."""
  return (1 + np.sign(first - second)) / 2


def _compute_over_acceptance(request: Request, notify: Notify) -> list[Row]:
  options = _options(request, method=(OPT, UNO), num_drafts=(1,))
  workload = Workload.load(options)
  epsilons = sorted(set(request.sizes.epsilon))
  notify('bias at the positions of texts', 0, 1)
  rows = _law_rows(workload, epsilons, options.seed)
  settings = {
    (name, epsilon): settings_of(with_epsilon(METHODS[name], epsilon), options)[0]
    for epsilon in epsilons for name in (OPT, UNO)
  }  # fmt: skip
  alone = settings_of(METHODS[TARGET], options)[0]
  run = measure(workload, [alone, *settings.values()], notify)
  scores, lengths = {}, {}
  for found in run.measurements:
    scores.setdefault(found.setting, []).append(_log_likelihood(workload, found.tokens))
    lengths.setdefault(found.setting, []).append(found.lengths)
  scores, lengths = ({key: np.stack(each) for key, each in found.items()} for found in (scores, lengths))
  for (name, epsilon), setting in settings.items():
    row = {'method': name, 'epsilon': epsilon}
    rows.append({'quantity': _LIKELIHOOD} | row | _interval(scores[setting].sum(axis=0), lengths[setting].sum(axis=0)))
    summary = run.summarize(setting)
    low, high = summary.interval or (None, None)
    rows.append({'quantity': _TOKENS} | row | {'value': summary.block_efficiency, 'low': low, 'high': high})
  for epsilon in epsilons:
    own = _interval(scores[alone].sum(axis=0), lengths[alone].sum(axis=0))
    rows.append({'quantity': _LIKELIHOOD, 'method': TARGET, 'epsilon': epsilon} | own)
    first, second = (scores[settings[name, epsilon]] / lengths[settings[name, epsilon]] for name in (OPT, UNO))
    won = wins(first, second)
    row = {'quantity': _WIN_RATE, 'method': OPT, 'epsilon': epsilon}
    rows.append(row | _interval(won.sum(axis=0), np.full(won.shape[1], len(won))))
  return rows


def _draw_over_acceptance(rows: Sequence[Row]):
  figure, (bias, likelihood, rate) = plots.panels(3, width=2.9, height=3.4)
  for axes, quantity, y, title in (
    (bias, _TV, 'total variation from the target', 'bias of one token'),
    (likelihood, _LIKELIHOOD, 'nats per token', 'log-likelihood under the target'),
    (rate, _WIN_RATE, 'share of comparisons won', 'win rate, the target as scorer'),
  ):
    own = select(rows, quantity=quantity)
    plots.draw_lines(axes, own, x='epsilon', y='value', by='method')
    plots.name_axes(axes, x='over-acceptance ε', y=y, title=title)
    axes.set_xscale('symlog', linthresh=1e-3)
    axes.set_xticks([0, 0.001, 0.01, 0.1, 1], ['0', '.001', '.01', '.1', '1'])
    axes.minorticks_off()
  own = select(rows, quantity=_REJECTION)
  plots.draw_line(bias, own, x='epsilon', y='value', label='P(reject), both', color='#D55E00', linestyle='--')
  rate.axhline(0.5, color='#555555', linestyle=':', linewidth=1, label='no difference')
  rate.set_ylim(0, 1)
  plots.legend(figure, [bias, likelihood, rate], title='bars: 95% over prompts')
  return figure


def _tell_over_acceptance(rows: Sequence[Row]) -> str:
  def numbers(quantity, method):
    return {row['epsilon']: row['value'] for row in select(rows, quantity=quantity, method=method)}

  opt, uno = numbers(_TV, OPT), numbers(_TV, UNO)
  own = numbers(_LIKELIHOOD, TARGET)
  likelihood = {name: numbers(_LIKELIHOOD, name) for name in (OPT, UNO)}
  won = select(rows, quantity=_WIN_RATE)
  each = ', '.join(f'{row["value"]:.0%} at ε = {row["epsilon"]:g}' for row in won)
  clear = [row for row in won if row['low'] is not None and (row['low'] > 0.5 or row['high'] < 0.5)]
  biases = ', '.join(f'{opt[epsilon]:.3f} and {uno[epsilon]:.3f} at ε = {epsilon:g}' for epsilon in opt)
  first, last = min(opt), max(opt)
  rejection = numbers(_REJECTION, 'both')
  few = [epsilon for epsilon in opt if rejection[epsilon] < 0.01]
  alike = f', below 1% from ε = {few[0]:g} on, where both keep whatever was drafted' if few else ''
  return (
    "Decoding-OPT redraws a rejected token from the best law, Decoding-UNO from the target's whole law. Their biases,"
    f' in total variation: {biases}. Both reject equally often{alike}. Text of OPT has {likelihood[OPT][first]:.2f}'
    f' nats per token under the target at ε = {first:g} and {likelihood[OPT][last]:.2f} at {last:g}, that of UNO'
    f" {likelihood[UNO][first]:.2f} and {likelihood[UNO][last]:.2f}, the target's own text {own[first]:.2f}: to be"
    f' likelier than that is a bias too. With the target as scorer OPT wins {each};'
    f' {len(clear)} of {len(won)} differ from one half by more than chance (95%). The paper, whose scorers are reward'
    ' models and which compares 500 texts of each prompt, prints 52.5% to 57.5%.'
  )


FIGURES = {
  'opt_uno': Figure(
    title='Decoding-OPT against Decoding-UNO over ε (Yin et al. 2024, section 4.2 and Table 1)',
    compute=_compute_over_acceptance,
    draw=_draw_over_acceptance,
    tell=_tell_over_acceptance,
    sizes=Sizes(
      num_prompts=64, num_seeds=2, max_new_tokens=32, batch_size=32, draft_length=(4,),
      epsilon=(0, 0.001, 0.01, 0.1, 0.2, 0.4, 0.8),
    ),
    has_models=True,
  ),
  'methods': Figure(
    title='Block efficiency of all methods over K and L',
    compute=_compute_methods,
    draw=_draw_methods,
    tell=_tell_methods,
    sizes=Sizes(
      num_prompts=32, num_seeds=1, max_new_tokens=48, batch_size=32, num_drafts=(2, 8), draft_length=(4, 8)
    ),
    has_models=True,
  ),
}  # fmt: skip
