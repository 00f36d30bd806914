"""Tables cut from real distributions, and what is measured on them: closed forms."""

import numpy as np
import pytest

from benchmarks.distance_to_optimum import bounds_of_texts, kept_by_methods, means, table
from benchmarks.real_tables import classes_of
from benchmarks.rivals import METHODS_COMPARED, best_of, check_methods
from spectr_jax import theory


def test_classes_keep_the_order_of_ratios_and_are_equal():
  rng = np.random.default_rng(0)
  p, q = rng.dirichlet(np.ones(1000), 2)
  classes = classes_of(p, q, 8)
  ratios = [(q / p)[classes == own] for own in range(8)]
  assert all(low.max() <= high.min() for low, high in zip(ratios, ratios[1:]))
  np.testing.assert_allclose(np.bincount(classes, (p + q) / 2), 1 / 8, atol=0.01)
  # A token that has nearly all mass fills a class of its own.
  assert set(classes_of(np.array([0.98, 0.01, 0.01]), np.array([0.9, 0.02, 0.08]), 4)) == {1, 3}


def test_one_draft():
  """The bound is the optimum, and so is what the best methods keep."""
  rng = np.random.default_rng(1)
  p, q = rng.dirichlet(np.ones(9), 2).reshape(2, 3, 3)
  optimum = theory.stateless_chains_optimum(p, q, 1)
  assert bounds_of_texts(p, q, 1) == pytest.approx({'bound': optimum, 'mean_bound': optimum}, abs=1e-6)
  bounds = bounds_of_texts(p, q, 2)
  assert theory.stateless_chains_optimum(p, q, 2) - 1e-6 < bounds['mean_bound'] < bounds['bound']
  for value, error in kept_by_methods(p, q, 1, ('race_traversal', 'race_layers'), 4096, seed=0).values():
    assert abs(value - optimum) < 4 * error


def test_tables_of_records():
  place = {
    'temperature': 1.0,
    'num_drafts': 2,
    'length': 3,
    'shares': {'bound': 1.0, 'race_layers': 0.25},
    'errors': {},
  }
  other = place | {'num_drafts': 1, 'shares': {'bound': 1.0, 'block': 0.5}}
  records = [place | {'optimum': 2.0}, place | {'optimum': 3.0, 'shares': {'bound': 1.0, 'race_layers': 0.75}}]
  records.append(other | {'optimum': 1.0})
  assert table(records).splitlines() == [
    '| | T 1, 2 x 3 | T 1, 1 x 3 |', '|---|---|---|', '| tokens kept by the optimum | 2.50 | 1.00 |',
    '| bound of each text | 1.000 | 1.000 |', '| `block` |  | 0.500 |', '| `race_layers` | 0.500 |  |',
  ]  # fmt: skip
  row = next(row for row in means(records) if row['of'] == 'race_layers')
  assert (row['tables'], row['low'], row['high']) == (2, 0.25, 0.75)


def test_methods_for_other_drafts_are_no_rivals():
  check_methods(METHODS_COMPARED)
  for name in ('autoregressive', 'gsd', 'ersd', 'spectr_gbv', 'decoding_uno'):
    with pytest.raises(ValueError, match=f'^{name}: the methods for independent drafts that are lossless are specu'):
      check_methods(['block', name])


def test_best_shapes():
  record = {'temperature': 1.0, 'shape': '2 x 8', 'num_nodes': 16, 'method': 'race_traversal', 'tokens': [2.0, 4.0]}
  alone = record | {'shape': '1 x 16', 'method': 'block', 'tokens': [4.0, 4.0]}
  best = best_of([record, alone], 16, 1.0)
  assert best['race_traversal'] is alone  # with a single draft it is `block`
  assert best_of([record], 8, 1.0) == {}
