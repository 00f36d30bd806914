"""Race layers, and the rule of the highest ratio: closed forms, and their relatives as special cases."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import METHODS, TokenTree, theory
from spectr_jax.couplings import HighestRatio
from spectr_jax.methods import get_method
from spectr_jax.proposal import Proposal
from spectr_jax.testing import constant_tables, enumeration_error, expected_acceptance, random_tables

LAYERS = get_method('race_layers').verifier


def _laws(rng, count, vocab_size):
  return rng.dirichlet(np.ones(vocab_size), count)


def test_one_draft_is_block_verification():
  rng, tree = np.random.default_rng(0), TokenTree.chains(1, 3)
  with jax.enable_x64(True):
    for _ in range(5):
      tokens = jnp.asarray(rng.integers(5, size=3), jnp.int32)
      row = tree, Proposal(tokens, jnp.asarray(_laws(rng, 3, 5))), jnp.asarray(_laws(rng, 4, 5)), ()
      np.testing.assert_allclose(LAYERS.law(*row), METHODS['block'].verifier.law(*row), rtol=0, atol=1e-12)


def test_drafts_of_one_token_are_a_race():
  """Token 1 has the higher ratio: 1 + q(0) - p(0)^2 = .9375 is the optimum, for weights that differ without bound."""
  tables = constant_tables([0.75, 0.25], [0.5, 0.5], 2)
  kept = expected_acceptance(get_method('race_layers'), TokenTree.chains(2, 1), tables)
  assert 0.91 < kept[0] < 0.9375
  for seed in range(3):
    tables = random_tables(seed, 4, 1)
    kept = expected_acceptance(get_method('race_layers'), TokenTree.chains(3, 1), tables)[0]
    optimum = float(theory.optimal_acceptance(tables.draft_probs[0], tables.target_probs[0], 3))
    assert 0.93 * optimum < kept <= optimum + 1e-6


def test_a_branch_leaves_its_mass_to_its_cousin():
  """Two branches of mass 1/2. The first one's token is one that the target never writes; the second takes all."""
  half = np.full(4, 0.25)
  first, second = [0, 0.5, 0.25, 0.25], [0.5, 0.5, 0, 0]
  tree, tokens = TokenTree.chains(2, 2), jnp.array([0, 1, 0, 0], jnp.int32)
  with jax.enable_x64(True):
    draft = jnp.array([half, half, half])
    target = jnp.array([half, first, second, half, half])
    contexts, layers = LAYERS._steps(tree, Proposal(tokens, draft), target)
    masses = np.asarray(layers.masses)
    assert masses[1].sum() == pytest.approx(1, abs=1e-9)
    np.testing.assert_allclose(masses[1], [0.5, 0.5], atol=1e-9)
    assert masses[2, 0] == 0
    # Its ratio is 2, so that it can use its whole 1/2 x 2; alone, race traversal's first branch would have kept 1/2.
    assert masses[2, 1] > 0.8
    law = LAYERS.law(tree, Proposal(tokens, draft), target, ())
    assert law.sum() == pytest.approx(1, abs=1e-12)
    assert law[4].sum() == pytest.approx(masses[2, 1], abs=1e-12)


def test_more_is_kept_than_by_one_branch_after_another():
  """On long drafts of draft and target that differ a little."""
  rng, tree, size = np.random.default_rng(1), TokenTree.chains(3, 6), 12
  kept = {name: 0.0 for name in ('race_block', 'race_traversal', 'race_layers')}

  def law_of(name):
    verifier = get_method(name).verifier
    return jax.jit(jax.vmap(lambda *row: verifier.law(tree, Proposal(*row[:2]), row[2], ())))

  laws = {name: law_of(name) for name in kept}
  draft = _laws(rng, 64 * 16, size).reshape(64, 16, size).astype(np.float32)
  others = _laws(rng, 64 * 19, size).reshape(64, 19, size).astype(np.float32)
  target = np.concatenate([draft, draft[:, -3:]], axis=1) * 0.5 + 0.5 * others
  parents, tokens = tree.parent_index[tree.parent_of[1:]], np.zeros((64, tree.num_nodes), np.int32)
  for node, parent in enumerate(parents):
    sums = draft[:, parent].cumsum(axis=1)
    tokens[:, node] = (rng.random((64, 1)) * sums[:, -1:] >= sums).sum(axis=1)
  for name, law in laws.items():
    kept[name] = float((np.asarray(law(tokens, draft, target)).sum(axis=2) @ tree.depths).mean())
  assert kept['race_layers'] > 1.01 * kept['race_traversal'] > kept['race_block']


@pytest.mark.slow
def test_exact_with_all_classes():
  for seed in range(2):
    assert enumeration_error(get_method('race_layers'), TokenTree.chains(2, 2), random_tables(seed, 3, 6), 4) <= 1e-10


def test_picks_of_the_highest_ratio():
  """Against all tuples of three candidates; ties go to the higher number."""
  p = np.array([0.3, 0.2, 0.25, 0.15, 0.1, 0])
  for q in ([0.1, 0.2, 0.25, 0.3, 0.15, 0], [0, 0.1, 0.5, 0.2, 0.1, 0.1]):
    ranks = np.argsort(np.argsort(np.where(p > 0, q / np.maximum(p, 1e-9), np.inf), kind='stable'))
    expected = np.zeros(6)
    with jax.enable_x64(True):
      pick = jax.jit(HighestRatio())
      for number in (1, 2, 3):
        expected[:] = 0
        for drawn in itertools.product(range(6), repeat=number):
          candidates = np.array((*drawn, *[0] * (3 - number)), np.int32)
          found = pick(jnp.asarray(p), jnp.asarray(q), candidates, np.arange(3) < number)
          winner = max(drawn, key=lambda token: ranks[token])
          shares = np.asarray(found.pick_probs)
          assert shares[np.isin(candidates, winner) & (np.arange(3) < number)].sum() == pytest.approx(1)
          expected[winner] += np.prod(p[list(drawn)])
        np.testing.assert_allclose(found.probs, expected, atol=1e-12)
