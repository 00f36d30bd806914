"""Given candidates, which are not samples, and drawn ones beside them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from guesses import ALL, EXACT, as_float32, laws_of, make_guesses, random_law

from spectr_jax import Proposal, TokenTree
from spectr_jax.sampling import arrivals, first_arrival
from tests.slow import slow


def _given_error(verifier, *, is_counted_as_drawn=False):
  """Largest difference between the joint law of the first three tokens and the target's, with given candidates.

  The root's two candidates are given. Below the first two are drawn, below the second two are given. All that can be
  drawn is enumerated; what a round leaves of the three tokens comes from the target.
  """
  tree, vocab_size = TokenTree.prefix((2, 2)), 3
  is_given = np.array([True, True, False, False, True, True])

  def then(q, known):
    """The law of the first three tokens after those known, by the target alone."""
    if len(known) == 3:
      return np.ones(())
    return np.stack([q[known][x] * then(q, (*known, x)) for x in range(vocab_size)])

  worst = 0.0
  for seed, given in enumerate([(0, 1, 2, 2), (1, 2, 0, 1), (2, 0, 1, 0)]):
    rng = np.random.default_rng(seed)
    contexts = [()] + [(x,) for x in range(3)] + [(x, y) for x in range(3) for y in range(3)]
    p, q = ({context: random_law(rng, vocab_size, 0.15) for context in contexts} for _ in range(2))
    first, second, *below = given
    drawn = [(x, y) for x in range(3) for y in range(3)]
    tokens = np.array([[first, second, x, y, *below] for x, y in drawn], np.int32)
    weights = np.array([p[first,][x] * p[first,][y] for x, y in drawn])
    texts = [[(), (first,), (second,), (first, x), (first, y), *((second, z) for z in below)] for x, y in drawn]
    probs = np.array([[p[text] for text in row[:3]] for row in texts])
    targets = np.array([[q[text] for text in row] for row in texts])
    given_rows = None if is_counted_as_drawn else np.tile(is_given, (len(tokens), 1))
    with jax.enable_x64(True):
      proposals = Proposal(jnp.asarray(tokens), jnp.asarray(probs), is_given=given_rows)
      laws = np.asarray(laws_of(proposals, jnp.asarray(targets), verifier=verifier, tree=tree))
    emitted = np.zeros((vocab_size,) * 3)
    for weight, row, law in zip(weights, texts, laws):
      for text, out in zip(row, law):
        for token, share in enumerate(out):
          known = (*text, token)
          emitted[known] += weight * share * then(q, known)
    worst = max(worst, np.abs(emitted - then(q, ())).max())
  return worst


_GIVEN = 'spectr', 'specinfer', 'batch', 'race'


@pytest.mark.parametrize('name', [_GIVEN[0], *(slow(name) for name in _GIVEN[1:])])
def test_given_and_drawn_candidates_beside_each_other(name):
  verifier = ALL[name].verifier
  assert verifier.takes_given
  assert _given_error(verifier) <= (1e-11 if name == 'race' else EXACT)
  # Counted as drawn they are not right: this is what `is_given` is for.
  assert _given_error(verifier, is_counted_as_drawn=True) > 0.02


def _winners(key, laws):
  """The winner of the race with each law, on one set of exponentials."""
  return jax.vmap(lambda law: first_arrival(arrivals(key, law)))(laws)


def test_a_given_candidate_is_shown_as_a_draw_from_a_point_mass():
  tree, tokens = TokenTree.prefix((2, 2)), [2, 1, 0, 0, 3, 1]
  proposal, targets = as_float32(make_guesses(3, tree, 5, tokens, agreement=0.5))
  # Only the candidates of the root are given.
  proposal = dataclasses.replace(proposal, is_given=jnp.arange(6) < 2)
  keys = jax.random.split(jax.random.key(6), (64, 3))
  row = tree, proposal, targets, ()
  verifier = ALL['spectr'].verifier
  verdict, record = jax.device_get(jax.jit(jax.vmap(lambda keys: verifier.explain(keys, *row)))(keys))
  made = record.decisions['accept']
  q = targets[0][jnp.array([2, 1])]
  for values in (made.shares[:, 0, :2], made.numbers['target_prob'][:, 0, :2], made.numbers['ratio'][:, 0, :2]):
    np.testing.assert_allclose(values, np.broadcast_to(q, (64, 2)), rtol=1e-6)
  np.testing.assert_array_equal(made.numbers['draft_prob'][:, 0, :2], 1)
  kept = verdict.num_accepted > 0
  np.testing.assert_array_equal(kept, made.uniform[:, 0] < np.sum(q))
  assert 0 < kept.sum() < 64
  # Below them the draft's law is the draft's.
  parents = verdict.path[kept, 0]
  for place, parent in zip(np.flatnonzero(kept), parents):
    drawn = [node for node in range(1, 7) if tree.parent_of[node] == parent]
    law = proposal.probs[tree.law_index[parent]]
    found = made.numbers['draft_prob'][place, 1][made.is_valid[place, 1]]
    np.testing.assert_allclose(found, [law[tokens[node - 1]] for node in drawn], rtol=1e-6)


def test_a_shared_race_takes_given_candidates():
  """Whatever is given, copies included: tokens are the target's own winners, up to the first that is no candidate."""
  verifier, tree = ALL['ersd'].verifier, TokenTree.prefix((3, 2))
  tokens = [2, 2, 0, 1, 1, 3, 0, 2, 4]
  proposal, targets = as_float32(make_guesses(5, tree, 5, tokens))
  proposal = dataclasses.replace(proposal, is_given=jnp.ones(9, bool), probs=jnp.full_like(proposal.probs, jnp.nan))
  keys = jax.random.split(jax.random.key(7), (200, 3))
  verdict = jax.device_get(jax.jit(jax.vmap(lambda keys: verifier.verify(keys, tree, proposal, targets, ())))(keys))
  winners = np.asarray(jax.jit(jax.vmap(lambda keys: jax.vmap(lambda key: _winners(key, targets))(keys)))(keys))
  for row in range(200):
    node = 0
    for depth in range(3):
      winner = winners[row, depth, node]
      children = [child for child in range(1, 10) if tree.parent_of[child] == node and tokens[child - 1] == winner]
      if not children:
        break
      assert verdict.path[row, depth] == children[0]
      node = children[0]
    assert verdict.num_accepted[row] == tree.depths[node]
    assert verdict.next_token[row] == winner
  assert len(np.unique(verdict.num_accepted)) == 3
