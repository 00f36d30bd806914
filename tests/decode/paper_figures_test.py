"""All figures: against closed forms, sums written out, simulations, and runs of a tiny pair."""

import math

import numpy as np
import pytest
from exhibit_checks import CLOSE, SMALL_FIGURES, check_figure, measure_figure, measure_small, request_of

from decode.experiment.distributions import written_distributions
from decode.experiment.options import DecodeOptions
from decode.experiment.run import measure
from decode.experiment.workload import Workload
from decode.papers import method_figures, rejection_figures, token_figures, tree_figures
from decode.papers.exhibits import FIGURES
from decode.study import by_value, select
from spectr_jax import METHODS, TokenTree, theory
from spectr_jax.methods import FURTHER_METHODS
from tests.slow import slow

# Figures about one token, against closed forms and a linear program.


def test_uniform_distributions_against_the_closed_form():
  rows = measure_figure('spectr_fig1', num_drafts=(3,))
  assert {row['rule'] for row in rows} == {'optimum', 'spectr', 'race'}
  assert {row['k'] for row in rows} == {3}
  for row in rows:
    assert row['acceptance'] == pytest.approx(1 - (1 - 1 / row['r']) ** row['k'], abs=CLOSE)


@pytest.mark.parametrize(('name', 'num_targets'), [slow('spectr_fig2', 6), ('spectr_fig3', 41)])
def test_bernoulli_distributions_against_the_closed_form(name, num_targets):
  rows = measure_figure(name, num_drafts=(1, 2))
  optimum = select(rows, rule='optimum')
  assert len(optimum) == 2 * num_targets
  p = 0.25
  for row in optimum:
    b, k = row['b'], row['k']
    # SpecTr, Appendix B.2.
    assert row['acceptance'] == pytest.approx(min(b, 1 - (1 - p) ** k) + min(1 - b, 1 - p**k), abs=CLOSE)
  for rule in ('spectr', 'race'):
    for own, best in zip(select(rows, rule=rule), optimum, strict=True):
      assert own['acceptance'] <= best['acceptance'] + CLOSE
      if own['k'] == 1:
        assert own['acceptance'] == pytest.approx(best['acceptance'], abs=CLOSE)
  [kseq], [race] = (select(rows, rule=rule, b=0.5, k=2) for rule in ('spectr', 'race'))
  assert kseq['acceptance'] == pytest.approx(0.8476, abs=1e-4)
  assert race['acceptance'] == pytest.approx(0.9375, abs=1e-2)


def test_batch_improvement_against_the_closed_forms():
  rows = measure_figure('batch_fig3', num_drafts=(1, 2, 8))
  for row in select(rows, panel='Bernoulli'):
    u = row['parameter']
    assert row['improvement'] == pytest.approx((u - 0.5) * (1 - u ** (row['M'] - 1)), abs=CLOSE)
  for row in select(rows, panel='uniform'):
    missed = 1 - 1 / row['parameter']
    assert row['improvement'] == pytest.approx(missed - missed ** row['M'], abs=CLOSE)
  assert {row['panel'] for row in rows} == {'Bernoulli', 'uniform'}


def test_the_likeliest_tokens_of_both():
  draft, target = np.full(30, 0.001), np.full(30, 0.002)
  draft[:10] += 0.097
  target[5:15] += 0.094
  kept, p, q = token_figures.likeliest_tokens(draft, target)
  assert sorted(kept) == list(range(15))
  assert list(kept[:10]) == list(range(5, 15))  # the target's own first
  np.testing.assert_allclose([p.sum(), q.sum()], 1)
  np.testing.assert_allclose(p[kept == 0] / p[kept == 12], 98)


@pytest.mark.slow
def test_acceptance_on_the_distributions_of_a_pair(pair, prompt_file):
  rows = measure_small('spectr_fig5', pair, prompt_file)
  tokens = select(rows, panel='distributions')
  assert 10 <= len(tokens) <= 20
  p, q = (np.array([row[model] for row in tokens]) for model in ('draft', 'target'))
  np.testing.assert_allclose([p.sum(), q.sum()], 1)
  plan = theory.optimal_transport(p, q, 2)
  accepted = {(row['rule'], row['k']): row['acceptance'] for row in select(rows, panel='acceptance')}
  assert accepted['optimum', 2] == pytest.approx(plan.value, abs=CLOSE)
  for rule in ('optimum', 'spectr', 'race'):
    assert accepted[rule, 1] == pytest.approx(np.minimum(p, q).sum(), abs=CLOSE)
    assert accepted[rule, 1] < accepted[rule, 2] <= accepted['optimum', 2] + CLOSE


@pytest.mark.slow
def test_shares_of_the_optimum(pair, prompt_file):
  rows = measure_small('optimum', pair, prompt_file)
  acceptance = {(row['rule'], row['n']): row['value'] for row in select(rows, quantity='acceptance')}
  for row in select(rows, quantity='share of the optimum'):
    assert row['value'] == pytest.approx(acceptance[row['rule'], row['n']] / acceptance['optimum', row['n']])
    assert row['value'] <= 1 + 1e-5  # float32
    if row['n'] == 1:
      assert row['value'] == pytest.approx(1, abs=1e-5)
  assert acceptance['optimum', 2] > acceptance['optimum', 1]


# Figures about rejections and bias: theory written out, simulations beside it, and over-acceptance on a tiny pair.


def test_the_front_is_a_straight_line_that_nothing_crosses():
  rows = measure_figure('pareto_fig4')
  p, q = rejection_figures.pareto_probs()
  distance = 1 - np.minimum(p, q).sum()
  lines = by_value(rows, 'line')
  sums = {line: np.array([row['rejection'] + row['bias'] for row in own]) for line, own in lines.items()}
  np.testing.assert_allclose(sums['decoding_opt'], distance, atol=CLOSE)
  assert all(own.min() >= distance - CLOSE for own in sums.values())
  assert sums['decoding_uno'][0] > distance + 0.1
  # With the best distribution every random acceptance above min(1, q/p) is on the front, and covers it.
  best = [row for row in rows if row['line'].endswith('best distribution after a rejection')]
  on_front = [row['rejection'] for row in best if abs(row['rejection'] + row['bias'] - distance) < CLOSE]
  assert len(on_front) == len(best)
  assert min(on_front) < 0.3 * distance < 0.9 * distance < max(on_front)


@pytest.mark.slow
def test_what_is_simulated_agrees_with_what_is_expected():
  rows = measure_figure('batch_fig2', num_runs=300, num_drafts=(3,))
  chains = theory.random_chains(10, num_tokens=50)
  [simulated] = select(rows, panel='number of drafts', line='simulation')
  [expected] = select(rows, panel='number of drafts', line='theory', M=3)
  assert (simulated['M'], simulated['runs']) == (3, 300)
  error = (simulated['high'] - simulated['rejections']) / 1.96
  assert abs(simulated['rejections'] - expected['rejections']) < 4 * error < 2
  assert expected['rejections'] == pytest.approx(float(theory.expected_rejections(chains, 3)))
  p, q = chains.draft_probs, chains.target_probs
  # One draft: Theorem 1, the sum of expected total variations, written out.
  distances = np.abs(p - q).sum(-1) / 2
  state, total = np.full(7, 1 / 7), 0
  for step in range(50):
    total += state @ distances[step]
    state = state @ q[step]
  assert select(rows, panel='number of drafts', line='theory', M=1)[0]['rejections'] == pytest.approx(total)
  running = select(rows, panel='running average', line='simulation', M=3)
  widths = [row['high'] - row['low'] for row in running]
  assert widths[-1] < widths[0]


def test_running_averages_and_wins():
  counts = np.array([3.0, 5, 4, 8])
  number, mean, half = rejection_figures._running(counts)[-1]
  assert (number, mean) == (4, 5)
  assert half == pytest.approx(1.959964 * counts.std(ddof=1) / 2)
  np.testing.assert_array_equal(rejection_figures._wins(np.array([1.0, 2, 3]), np.array([0.0, 2, 4])), [1, 0.5, 0])


def test_likelihood_is_that_of_the_targets_distributions(monkeypatch):
  probs = np.array([[[0.5, 0.5, 0], [0.25, 0.5, 0.25]]])
  monkeypatch.setattr(rejection_figures, 'written_distributions', lambda *_: [(np.array([0]), (probs,))])
  workload = type('Workload', (), {'target': None})
  tokens = np.array([[1, 2]])
  assert rejection_figures._log_likelihood(workload, tokens)[0] == pytest.approx(math.log(0.5) + math.log(0.25))
  assert rejection_figures._log_likelihood(workload, np.array([[1, -1]]))[0] == pytest.approx(math.log(0.5))


@pytest.mark.slow
def test_over_acceptance_is_measured(pair, prompt_file):
  rows = measure_small('opt_uno', pair, prompt_file)
  values = {(row['quantity'], row['method'], row['epsilon']): row['value'] for row in rows}
  assert values['bias', 'decoding_opt', 0] == pytest.approx(0, abs=CLOSE)
  assert values['bias', 'decoding_uno', 0] > 0.01
  for epsilon in (0, 0.5):
    total = values['bias', 'decoding_opt', epsilon] + values['rejection', 'both', epsilon]
    assert total == pytest.approx(values['rejection', 'both', 0])  # the front: it is the total variation
    assert values['bias', 'decoding_opt', epsilon] <= values['bias', 'decoding_uno', epsilon] + CLOSE
    assert 0 <= values['win rate', 'decoding_opt', epsilon] <= 1
    for method in ('decoding_opt', 'decoding_uno', 'autoregressive'):
      assert -math.log(320) * 2 < values['log-likelihood', method, epsilon] < 0
  # With so much over-acceptance nothing is rejected: both keep the same drafts, and nobody wins.
  assert values['rejection', 'both', 0.5] == pytest.approx(0, abs=CLOSE)
  assert values['win rate', 'decoding_opt', 0.5] == 0.5


# Figures about trees: expected tokens against sums written out, and measured trees of a tiny pair.


def test_tokens_of_trees_against_sums_and_slopes_between():
  acceptance = np.array([0.6, 0.2, 0.05, 0.05])
  numbers = range(1, 13)
  rows = tree_figures.theory_rows('gsd', numbers, acceptance)
  for row in select(rows, line='batch'):
    assert row['tokens'] == pytest.approx(1 + acceptance[: row['N']].sum())
  for row in select(rows, line='sequence'):
    assert row['tokens'] == pytest.approx(sum(0.6**depth for depth in range(row['N'] + 1)))
    assert row['marginal'] == pytest.approx(0.6 ** row['N'])
  for row in select(rows, line="SpecInfer's tree"):
    length = (row['N'] - 2) // 3 + 2
    below = 0.6**2 * 0.85 * sum(0.6**depth for depth in range(length - 2))  # three branches, each a chain
    assert row['tokens'] == pytest.approx(1 + 0.6 + 0.36 + below)
  assert {row['N'] for row in select(rows, line="SpecInfer's tree")} == {5, 8, 11}
  best = {row['N']: row['tokens'] for row in select(rows, line='optimal tree')}
  assert list(best) == list(numbers)
  for row in rows:
    if row['kind'] == 'theory':
      assert row['tokens'] <= best[row['N']] + CLOSE
    else:
      assert row['tokens'] >= best[row['N']] - CLOSE
  marginals = [row['marginal'] for row in select(rows, line='optimal tree')]
  assert marginals == sorted(marginals, reverse=True)
  rows = tree_figures.with_marginals([{'N': 2, 'tokens': 2.0}, {'N': 6, 'tokens': 3.0}])
  assert [row['marginal'] for row in rows] == [0.5, 0.25]
  # Tokens 1 and 2, then 3 to 6.
  assert [row['N'] for row in tree_figures._between(rows)] == [1.5, 4.5]


@pytest.mark.slow
def test_trees_are_measured(pair, prompt_file, monkeypatch):
  assert tree_figures.METHODS == ('gsd', 'ersd')
  monkeypatch.setattr(tree_figures, 'METHODS', ('gsd',))
  rows = measure_small('ersd_fig3', pair, prompt_file)
  # Both figures show the same rows.
  assert FIGURES['ersd_fig4'].measure is FIGURES['ersd_fig3'].measure
  check_figure('ersd_fig4', request_of('ersd_fig4', pair, prompt_file, **SMALL_FIGURES['ersd_fig4']), rows)
  own = select(rows, kind='measured')
  by_line = {line: [row['N'] for row in own_rows] for line, own_rows in by_value(own, 'line').items()}
  assert by_line == {'batch': [5], 'sequence': [5], "SpecInfer's tree": [5], 'optimal tree': [5]}
  deepest = {'batch': 1, 'sequence': 5, "SpecInfer's tree": 3, 'optimal tree': 5}
  assert all(1 <= row['tokens'] <= 1 + deepest[row['line']] for row in own)
  # A batch's theory is what was counted in a batch of five: both were decoded with the same keys.
  [expected] = select(rows, kind='theory', line='batch', N=5)
  assert select(own, line='batch')[0]['tokens'] == pytest.approx(expected['tokens'], abs=0.3)


# Figures about whole runs: the shapes that are decoded, and runs of a tiny pair beside a bound worked out here.


def test_a_ladder_has_trees_of_every_size_with_names():
  budgets = FIGURES['ladder'].sizes['num_nodes']
  grids = [method_figures.settings_of_grid(number) for number in budgets]
  assert [max(each.tree.num_nodes for own in grid.values() for each in own) for grid in grids] == list(budgets)
  for grid, larger in zip(grids, grids[1:]):
    assert all(
      grid[name] and set(grid[name]) < set(larger[name]) for name in ('spectr', 'race_block', 'race_traversal')
    )
  alone = {name: [str(each) for each in own if each.tree.is_chain] for name, own in grids[0].items()}
  single = {'speculative': ['speculative K=1 L=16'], 'block': ['block K=1 L=16']}
  assert alone == {name: single['speculative' if name in ('speculative', 'spectr') else 'block'] for name in grids[0]}
  trees = {each.tree for own in grids[1].values() for each in own}
  assert trees < set(method_figures.bound_trees(32))
  assert TokenTree.chains(5, 6) in method_figures.bound_trees(32)
  assert all(tree.num_nodes <= 32 for tree in method_figures.bound_trees(32))
  assert max(tree.max_depth for tree in method_figures.bound_trees(64)) == 32
  request = request_of('ladder', num_nodes=(64, 15))
  with pytest.raises(ValueError, match='no tree of at most 15 nodes is measured of speculative, spectr, '):
    FIGURES['ladder'].measure(request, None)
  for factors in ((1, 1, 1), (4,), (3, 1), (3, 2, 1), (1, 2)):
    assert method_figures.factors_of(TokenTree.prefix(factors)) == factors


def test_a_ladder_marks_the_best_shapes():
  measured = {'speculative': 2.0, 'spectr': 2.5, 'block': 3.0, 'race_traversal': 6.0, method_figures.BOUND: 8.0}
  wide, long = TokenTree.chains(8, 1), TokenTree.prefix((2, 2, 1, 1, 1, 1, 1))
  rows = []
  for number in (16, 64):
    for method, tokens in measured.items():
      tokens *= number / 64
      yields = {wide: (0.9 * tokens, None), long: (tokens, (tokens - 0.1, tokens + 0.1))}
      rows += method_figures._rows_of(method, number, yields)
  assert [row['is best'] for row in rows] == [0, 1] * (len(rows) // 2)
  assert rows[0]['low'] is None
  check_figure('ladder', request_of('ladder'), rows)


@pytest.mark.slow
def test_methods_are_measured(pair, prompt_file, monkeypatch):
  every = {name for name, method in (METHODS | FURTHER_METHODS).items() if method.max_drafts != 0}
  assert set(method_figures.DRAFTING) == every - {'decoding_opt', 'decoding_uno'}
  monkeypatch.setattr(method_figures, 'DRAFTING', ('speculative', 'spectr', 'spectr_gbv'))
  rows = measure_small('methods', pair, prompt_file)
  methods = {(row['method'], row['K']) for row in rows}
  assert methods == {('speculative', 1), ('spectr', 2), ('spectr_gbv (not lossless)', 2)}
  assert all(1 <= row['block efficiency'] <= 3 and row['low'] <= row['block efficiency'] <= row['high'] for row in rows)


@pytest.mark.slow
def test_a_ladder_is_measured(monkeypatch, pair, prompt_file):
  grid = {'speculative': ((1, 1),), 'block': ((1, 1),), 'race_traversal': ((2, 1),)}
  monkeypatch.setattr(method_figures, 'GRID', grid)
  runs = []
  monkeypatch.setattr(method_figures, 'measure', lambda *what: runs.append(measure(*what)) or runs[-1])
  rows = measure_small('ladder', pair, prompt_file)
  shapes = {key: [row['shape'] for row in own] for key, own in by_value(rows, 'method', 'nodes').items()}
  assert {key: own for key, own in shapes.items() if key[0] != method_figures.BOUND} == {
    ('speculative', 2): ['1 x 2'], ('speculative', 4): ['1 x 2'], ('block', 2): ['1 x 2'], ('block', 4): ['1 x 2'],
    ('race_traversal', 2): ['1 x 2'], ('race_traversal', 4): ['2 x 2', '1 x 2'],
  }  # fmt: skip
  assert shapes[method_figures.BOUND, 2] == ['1 x 2', '2 x 1']
  assert shapes[method_figures.BOUND, 4] == ['1 x 2', '2 x 2', '1 x 4', '3 x 1', '4 x 1']
  for own in by_value(rows, 'method', 'nodes').values():
    [best] = select(own, **{'is best': 1})
    assert best['tokens per call'] == max(row['tokens per call'] for row in own)
  for row in rows:
    assert 1 <= row['tokens per call'] <= 5
    assert row['low'] <= row['tokens per call'] <= row['high']
  # What is decoded once stands wherever it belongs, and a larger budget has what a smaller one has.
  alone = [
    row['tokens per call'] for row in select(rows, shape='1 x 2') if row['method'] in ('block', 'race_traversal')
  ]
  assert len(alone) == 4
  assert len(set(alone)) == 1
  # The bound of two drafts of one token, from the distributions along what was decoded with block and race_traversal.
  workload = Workload.load(
    DecodeOptions.of(**pair, method=('block',), prompts=str(prompt_file), batch_size=2, max_new_tokens=6)
  )
  num_tokens, num_calls = 0, 0.0
  for measured in runs[0].measurements[1:]:
    calls, texts = np.zeros((3, 8)), measured.tokens
    for numbers, (p, q) in written_distributions(workload, (workload.draft, workload.target), texts):
      for own, text in enumerate(numbers):
        for place in reversed(range(measured.lengths[text])):
          p_own, q_own = (float(probs[own, place, texts[text, place]]) for probs in (p, q))
          kept, (after, later) = min(1, (1 - (1 - p_own) ** 2) / q_own), calls[text, place + 1 : place + 3]
          calls[text, place] = 1 + (1 - kept) * after + kept * min(after, later)
    num_tokens += measured.lengths.sum()
    num_calls += calls[:, 0].sum()
  [row] = select(rows, method=method_figures.BOUND, nodes=2, shape='2 x 1')
  assert row['tokens per call'] == pytest.approx(num_tokens / num_calls, rel=1e-5)
