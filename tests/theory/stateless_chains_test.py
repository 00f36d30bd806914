"""The optimum of K chains: against the program over sets of guesses, closed forms, and what it must not fall below."""

import numpy as np
import pytest
from coarse import coarse

from spectr_jax import TokenTree
from spectr_jax.methods import get_method
from spectr_jax.testing import expected_acceptance, random_tables
from spectr_jax.theory import (
  optimal_acceptance,
  optimal_block_acceptance,
  stateless_chains_optimum,
  stateless_optimum,
)

SOLVED = 1e-6


def _laws(seed, vocab_size, length):
  """Tables, and the joint distributions of draft and target."""
  tables = random_tables(seed, vocab_size, length)
  draft, target = np.ones(1), np.ones(1)
  for depth in range(length):
    first = (vocab_size**depth - 1) // (vocab_size - 1)
    own = slice(first, first + vocab_size**depth)
    draft = (draft[:, None] * tables.draft_probs[own]).reshape(-1)
    target = (target[:, None] * tables.target_probs[own]).reshape(-1)
  shape = (vocab_size,) * length
  return tables, draft.reshape(shape), target.reshape(shape)


@pytest.mark.parametrize(('vocab_size', 'num_drafts', 'length'), [(2, 2, 3), (3, 2, 2), (2, 3, 2), (3, 1, 3)])
def test_it_is_the_optimum_over_sets_of_guesses(vocab_size, num_drafts, length):
  """With state as well."""
  for seed in range(4):
    _, draft, target = _laws(seed, vocab_size, length)
    found = stateless_chains_optimum(draft, target, num_drafts)
    assert found == pytest.approx(stateless_optimum(TokenTree.chains(num_drafts, length), draft, target), abs=SOLVED)
    found = stateless_chains_optimum(draft, target, num_drafts, has_state=True)
    assert found == pytest.approx(optimal_block_acceptance(draft, target, num_drafts), abs=SOLVED)


def test_one_token_of_many_drafts():
  for seed in range(3):
    _, draft, target = _laws(seed, 8, 1)
    for num_drafts in (1, 3, 16):
      found = stateless_chains_optimum(draft, target, num_drafts)
      assert found == pytest.approx(float(optimal_acceptance(draft, target, num_drafts)), abs=5e-6)  # float32


def test_correlated_drafts_by_hand():
  """Ber(1/4) to Ber(1/2): of two drafts one can be 1 with probability 1/2, and one 0 with probability 1."""
  draft, target = [0.75, 0.25], [0.5, 0.5]
  assert stateless_chains_optimum(draft, target, 2) == pytest.approx(0.9375, abs=SOLVED)
  assert stateless_chains_optimum(draft, target, 2, is_correlated=True) == pytest.approx(1, abs=SOLVED)
  # Two tokens: 11 is drafted with 1/16 each, so at most 1/8 of the target's 1/4 is kept whole.
  draft, target = np.outer(draft, draft), np.outer(target, target)
  assert stateless_chains_optimum(draft, target, 2, is_correlated=True) == pytest.approx(2 - 1 / 8, abs=0.07)


def test_order():
  """More drafts, correlation and state never cost anything; somewhere each gains."""
  gains = []
  for seed in range(4):
    _, draft, target = _laws(seed, 3, 2)
    own = stateless_chains_optimum(draft, target, 2)
    more = [
      stateless_chains_optimum(draft, target, 3),
      stateless_chains_optimum(draft, target, 2, is_correlated=True),
      stateless_chains_optimum(draft, target, 2, has_state=True),
    ]
    gains.append(np.array(more) - own)
  assert np.min(gains) > -SOLVED
  assert (np.max(gains, axis=0) > 1e-3).all()


@pytest.mark.parametrize('name', ['race_layers', pytest.param('race_traversal', marks=pytest.mark.slow)])
def test_no_method_keeps_more(name):
  for seed in range(4):
    tables, draft, target = _laws(seed, 3, 2)
    kept = expected_acceptance(coarse(get_method(name)), TokenTree.chains(2, 2), tables).sum()
    assert 0.85 < kept / stateless_chains_optimum(draft, target, 2) < 1 + SOLVED


def test_refusals():
  with pytest.raises(ValueError, match='at most 20000 texts of 1 to L tokens are allowed, got 37448'):
    stateless_chains_optimum(np.full((8,) * 5, 8.0**-5), np.full((8,) * 5, 8.0**-5), 2)
  with pytest.raises(ValueError, match='num_drafts must be integers from 1 on'):
    stateless_chains_optimum([0.5, 0.5], [0.5, 0.5], 0)
