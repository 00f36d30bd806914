"""Given candidates, which are not samples: at positions of their own, and beside drawn ones."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coarse import COARSE_RACE
from guesses import ALL, EXACT, as_float32, make_guesses, random_law

from spectr_jax import METHODS, TokenTree
from spectr_jax.couplings import MaximalAfter, Race
from spectr_jax.methods import Method
from spectr_jax.proposal import Independent
from spectr_jax.sampling import arrivals, first_arrival
from spectr_jax.testing import enumeration, enumeration_error, random_tables
from spectr_jax.theory import given_optimum
from spectr_jax.verifiers import Block, RaceTraversal, Walk
from tests.slow import slow, slow_but

_FINE = Race(num_classes=80, octave_bits=3, num_rounds=60)
_MIXING = {
  'race': Walk(MaximalAfter(COARSE_RACE)),
  'race_block': Block(COARSE_RACE),
  'race_traversal': RaceTraversal(COARSE_RACE),
}
_GIVEN = {name: ALL[name].verifier for name in ('spectr', 'specinfer', 'batch')}
_PLACES = 5


def _error(verifier, tree, vocab_size, num_tokens, seeds=1, *, guess_fn, drawn_nodes, name='mixed'):
  method = Method(name, verifier, Independent(), is_lossless=True, source='test')
  return max(
    enumeration_error(
      method, tree, random_tables(seed, vocab_size, num_tokens + tree.max_depth), num_tokens,
      guess_fn=guess_fn, drawn_nodes=drawn_nodes,
    )
    for seed in range(seeds)
  )  # fmt: skip


@pytest.fixture
def counted_as_drawn(monkeypatch):
  """Given candidates that are not said to be given."""
  proposal = enumeration.Proposal
  monkeypatch.setattr(enumeration, 'Proposal', lambda *fields: proposal(*fields[:4]))


# The candidates of the root are given; below the first the children are drawn, below the second given; copies occur.
_APART = {
  'tree': TokenTree.prefix((2, 2)),
  'guess_fn': lambda text, length: jnp.array([length % 3, 1, 0, 0, (length + 1) % 3, 2]),
  'drawn_nodes': (3, 4),
  'vocab_size': 3,
  'num_tokens': 4,
}


@pytest.mark.parametrize('name', ['spectr', slow('specinfer'), slow('batch'), slow('race'), 'race_traversal'])
def test_given_and_drawn_candidates_at_positions_of_their_own(name):
  assert ALL[name].verifier.takes_given
  assert _error((_GIVEN | _MIXING)[name], **_APART) <= (EXACT if name in _GIVEN else 1e-11)


@pytest.mark.parametrize('name', ['spectr', slow('specinfer'), slow('batch'), slow('race'), slow('race_traversal')])
def test_given_counted_as_drawn_is_not_right(name, counted_as_drawn):
  # Under a name of its own, so that no test gets the program of the other.
  assert _error((_GIVEN | _MIXING)[name], **_APART, name='counted as drawn') > 0.02


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
    law = proposal.probs[tree.parent_index[parent]]
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


# Given candidates beside drawn ones at one position.


class _AsItIs(Race):
  """A race that is the same beside given candidates."""

  def beside_given(self):
    return self


def _positions(seed, count, vocab_size):
  """Laws, a set of given tokens and a number of drawn candidates; zeros and given tokens without mass among them."""
  rng = np.random.default_rng(seed)
  for index in range(count):
    p, q = random_law(rng, vocab_size, 0.2), random_law(rng, vocab_size, 0.2)
    yield p, q, rng.integers(0, vocab_size, 1 + index % 2), index % 4


@functools.cache
def _mapped(function):
  return jax.jit(jax.vmap(function, (None, None, 0, None, None)))


def _all_candidates(vocab_size, num_drawn, given):
  """Every tuple of drawn candidates with the given ones behind; `[M, 5]`, and which places are valid and given."""
  drawn = np.array(
    list(itertools.product(range(vocab_size), repeat=3)), np.int32
  )  # those after the n-th are summed out
  candidates = np.zeros((len(drawn), _PLACES), np.int32)
  candidates[:, :num_drawn] = drawn[:, :num_drawn]
  candidates[:, num_drawn : num_drawn + len(given)] = given
  place = np.arange(_PLACES)
  return drawn, candidates, place < num_drawn + len(given), (place >= num_drawn) & (place < num_drawn + len(given))


def test_one_position_is_exact():
  for p, q, given, num_drawn in _positions(0, 6, vocab_size=4):
    drawn, candidates, is_valid, is_given = _all_candidates(4, num_drawn, given)
    weights = np.prod(p[drawn], axis=1)
    with jax.enable_x64(True):
      arguments = jnp.asarray(p), jnp.asarray(q), candidates, is_valid, is_given
      pick, outcome = jax.device_get((_mapped(Race())(*arguments), _mapped(MaximalAfter(Race()))(*arguments)))
    picked, law = np.zeros(4), np.zeros(4)
    np.add.at(picked, candidates, weights[:, None] * pick.pick_probs)
    if q[given].sum() > 0:  # without mass they are never kept, and have no entry
      np.testing.assert_allclose(pick.probs, np.broadcast_to(picked, pick.probs.shape), rtol=0, atol=EXACT)
    np.add.at(law, candidates, weights[:, None] * outcome.accept_probs)
    residual = outcome.residual / outcome.residual.sum(1, keepdims=True)
    law += (weights * (1 - outcome.accept_probs.sum(1))) @ residual
    np.testing.assert_allclose(law, q, rtol=0, atol=EXACT)


def _language_laws(count, vocab_size=300):
  """Laws as of language models, at temperatures of 1 and .25, with a given token: the target's, the draft's, or any."""
  rng = np.random.default_rng(0)
  for index in range(count):
    logits = rng.normal(size=vocab_size) * rng.uniform(2, 4) / (1, 0.25)[index % 2]
    drafted = logits + 0.7 * rng.normal(size=vocab_size) / (1, 0.25)[index % 2]
    p, q = np.asarray(jax.nn.softmax(jnp.stack([drafted, logits])), np.float64)
    p, q = p / p.sum(), q / q.sum()
    given = (rng.choice(vocab_size, p=q), np.argmax(p), rng.integers(vocab_size))[index % 3]
    yield p, q, np.array([given]), 1 + index // 2 % 4


def _shares(race, positions):
  """The accepted shares of the optimum."""
  shares = []
  with jax.enable_x64(True):
    for p, q, given, num_drawn in positions:
      best = float(given_optimum(p, q, num_drawn, jnp.zeros(len(p), bool).at[given].set(True)))
      place = np.arange(_PLACES)
      candidates = np.zeros((1, _PLACES), np.int32)
      candidates[:, num_drawn : num_drawn + len(given)] = given
      # The distribution of the picked token does not depend on the tokens drawn.
      is_valid = place < num_drawn + len(given)
      picked = _mapped(race)(jnp.asarray(p), jnp.asarray(q), candidates, is_valid, is_valid & (place >= num_drawn))
      accepted = float(np.minimum(picked.probs[0], q).sum())
      assert accepted <= best + EXACT
      shares.append(accepted / best if best > 0 else 1.0)
  return np.array(shares)


@pytest.mark.slow
def test_one_position_is_close_to_the_optimum():
  """The worst has two tokens of ratios below the lowest class, which finer classes and more rounds do not part."""
  shares, fine = (_shares(race, _positions(0, 48, vocab_size=4)) for race in (Race(), _FINE))
  for found in (shares, fine):
    assert np.mean(found) > 0.9999
    assert np.min(found) > 0.996


def test_positions_of_language_models_are_close_to_the_optimum():
  shares = _shares(Race(), _language_laws(96))
  assert np.mean(shares) > 0.9995
  assert np.min(shares) > 0.996


def test_flat_distributions_need_the_fine_classes_near_one():
  """Where most of the mass has a ratio near 1, the width of the classes there decides."""
  rng, positions = np.random.default_rng(0), []
  for index in range(24):
    logits = 1.5 * rng.normal(size=300)
    p, q = np.asarray(jax.nn.softmax(jnp.stack([logits + 0.7 * rng.normal(size=300), logits])), np.float64)
    positions.append((p / p.sum(), q / q.sum(), np.array([np.argmax(p)]), 2 + index % 3))
  plain = Race().beside_given()
  coarse = _AsItIs(**dataclasses.asdict(dataclasses.replace(plain, num_classes=80, fine_octaves=0)))
  assert np.mean(_shares(coarse, positions)) < 0.998
  assert np.mean(_shares(Race(), positions)) > 0.999


def _guess(text, length, tree):
  """What followed the last token before, on the first chain; some texts have no guess."""
  width = int(np.sum(tree.depths == 1))
  places = jnp.arange(len(text))
  found = jnp.max(jnp.where((places < length - 1) & (text == text[jnp.maximum(length - 1, 0)]), places, -1))
  # With no text so far, token 1 is given, then 0.
  tokens = [
    jnp.where(length == 0, depth % 2, jnp.where((found >= 0) & (found + depth < length), text[found + depth], -1))
    for depth in tree.depths[1:].tolist()
  ]
  first = np.array([(node - 1) % width == 0 for node in range(1, tree.num_nodes + 1)])
  return jnp.where(first, jnp.stack(tokens).astype(jnp.int32), -1)


def _drawn(tree):
  width = int(np.sum(tree.depths == 1))
  return tuple(node for node in range(1, tree.num_nodes + 1) if (node - 1) % width)


def _beside(verifier, chains, vocab_size, num_tokens, seeds=1):
  """The error with a given chain beside drawn ones."""
  tree = TokenTree.chains(*chains)
  guess_fn = functools.partial(_guess, tree=tree)
  return _error(verifier, tree, vocab_size, num_tokens, seeds, guess_fn=guess_fn, drawn_nodes=_drawn(tree))


@pytest.mark.parametrize('name', slow_but(['race_traversal'], _MIXING))
def test_a_given_chain_beside_drawn_chains(name):
  assert METHODS[name].takes_mixed
  assert _beside(_MIXING[name], (2, 2), 2, 4) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
  ('chains', 'vocab_size', 'num_tokens'), [((2, 2), 3, 4), ((3, 2), 2, 4), ((2, 3), 3, 4), ((3, 2), 3, 3)]
)
@pytest.mark.parametrize('name', _MIXING)
def test_more_given_chains_beside_drawn_ones(name, chains, vocab_size, num_tokens):
  assert _beside(_MIXING[name], chains, vocab_size, num_tokens, seeds=3) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize('name', _MIXING)
def test_with_all_classes(name):
  assert _beside(METHODS[name].verifier, (3, 2), 2, 4, seeds=3) < EXACT


@pytest.mark.parametrize('name', slow_but(['race_traversal'], _MIXING))
def test_given_beside_drawn_counted_as_drawn_is_caught(name, counted_as_drawn):
  assert _beside(_MIXING[name], (2, 2 if name != 'race' else 1), 3, 2) > 0.05
