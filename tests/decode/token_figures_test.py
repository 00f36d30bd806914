"""Figures about one token, against closed forms and a linear program."""

import numpy as np
import pytest
from exhibit_checks import CLOSE, measure_figure, measure_small

from decode.papers import token_figures
from decode.papers.figure import select
from spectr_jax import theory
from tests.slow import slow


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
  laws = select(rows, panel='distributions')
  assert 10 <= len(laws) <= 20
  p, q = (np.array([row[model] for row in laws]) for model in ('draft', 'target'))
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
