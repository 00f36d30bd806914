"""The seam carries any drafter: given guesses, rows with trees of their own, and the target's hidden states.

Each is proven exact by the whole loop on tiny transformers, grown trees also by enumeration; controls must fail.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coarse import coarse
from exact import assert_engine_is_exact, changed_proposals, p_values
from feature_drafter import FeatureDrafter
from growing_drafter import GrowingDrafter, grow

import spectr_jax
from spectr_jax import METHODS, Decoder, TokenTree, lookup_drafter
from spectr_jax.auto.setting import default_settings
from spectr_jax.draft import DraftContext
from spectr_jax.draft.lookup import Lookup
from spectr_jax.testing import (
  enumeration,
  enumeration_error,
  random_tables,
  tiny_transformers,
)
from spectr_jax.verifiers import GreedyBlock
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures('highest')

_PROMPTS = [1, 2, 1, 2, 1], [3], [0, 4, 4]
_SLOTS = TokenTree.slots((2, 3, 2))
_GROWN = ['spectr', 'specinfer', 'batch', 'race', 'race_block', 'traversal', 'race_traversal']


def _assert_engine_is_exact(drafter, method, tree, **options):
  assert_engine_is_exact(drafter, method, tree, prompts=_PROMPTS, num_tokens=4, **options)


def _logits(seed, vocab_size=5):
  return jnp.asarray(np.random.default_rng(seed).normal(size=(vocab_size, vocab_size)) * 1.5, jnp.float32)


# Guesses that are given; lookup_test.py has the proofs that they change no distribution.


def test_a_guess_counted_as_drawn_is_caught():
  """Accepted with q/p by the draft's p, a guess that was not drawn from it is kept too often or too rarely."""
  tree = TokenTree.chains(1, 2)

  def drawn(text, length):
    return Lookup(longest=1, shortest=1).guesses(DraftContext(jnp.asarray(length)[None], None, text[None]), tree)[0]

  with changed_proposals(lambda *fields: fields[:4]):
    assert enumeration_error(METHODS['speculative'], tree, random_tables(0, 2, 5), 4, guess_fn=drawn) > 1e-2


# Rows with trees of their own.


@pytest.mark.parametrize('slots', slow_but([(2, 2)], ((2, 2), (2, 3, 2))), ids=str)
@pytest.mark.parametrize('method', slow_but(['race_traversal'], _GROWN))
def test_grown_trees_are_exact(method, slots):
  tree = TokenTree.slots(slots)
  grow_fn = functools.partial(grow, tree=tree)
  for seed in range(2):
    assert enumeration_error(coarse(METHODS[method]), tree, random_tables(seed, 2, 5), 3, grow_fn=grow_fn) < 1e-10


@pytest.mark.parametrize('method', slow_but(['race_traversal'], ('spectr', 'race_block', 'race_traversal')))
def test_allocating_after_drawing_is_caught(method, monkeypatch):
  """A second candidate only if the first one is token 0."""
  tree = TokenTree.slots((2, 2))

  def second_if_first(tree, grow_fn, tokens, probs_at):
    del grow_fn, probs_at
    return jnp.where((jnp.arange(4) == 1) & (tokens[0] != 0), -1, jnp.array([0, 0, 1, 1]))

  monkeypatch.setattr(enumeration, 'grown_parents', second_if_first)
  error = max(
    enumeration_error(coarse(METHODS[method]), tree, random_tables(seed, 3, 4), 3, grow_fn=second_if_first)
    for seed in range(3)
  )
  assert error > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize('method', slow_but(['specinfer'], _GROWN))
def test_grown_trees_in_the_loop(method):
  _assert_engine_is_exact(GrowingDrafter(_logits(3)), method, _SLOTS, num_samples=2_500)


@pytest.mark.slow
def test_rows_do_grow_their_own_trees():
  target, _ = tiny_transformers()
  drafter, prompts = GrowingDrafter(_logits(3)), np.random.default_rng(0).integers(0, 5, (16, 3))
  sizes = {'max_new_tokens': 6, 'cache_size': 9, 'statistics': True}
  decoder = Decoder.make(target, drafter, method='race_traversal', tree=_SLOTS, **sizes)
  state = spectr_jax.engine.init_decode(decoder, jax.random.key(0), prompts, np.full(16, 3))
  _, played = jax.jit(spectr_jax.engine.loop.run_round)(decoder, state)
  assert len({tuple(row) for row in played.proposal.parents.tolist()}) > 3
  assert (np.asarray(played.proposal.tokens < 0) == np.asarray(played.proposal.parents < 0)).all()
  result = spectr_jax.engine.decode_rounds(decoder, state).result
  np.testing.assert_array_equal(result.statistics.accepts.sum(-1), result.statistics.accepted_child.sum(-1))


@pytest.mark.parametrize(
  ('drafter', 'tree', 'method', 'message'),
  [
    (GrowingDrafter(_logits(0)), TokenTree.chains(2, 3), 'spectr', 'grows trees of its own'),
    (lookup_drafter(5), _SLOTS, 'spectr', 'drafts one tree for all rows'),
    (GrowingDrafter(_logits(0)), TokenTree.slots((1, 1)), 'greedy_block', 'greedy_block'),
  ],
)
def test_trees_that_do_not_fit_are_refused(drafter, tree, method, message):
  with pytest.raises(ValueError, match=message):
    Decoder.make(tiny_transformers()[0], drafter, method=method, tree=tree, max_new_tokens=4, cache_size=8)


# The target's hidden states.


@pytest.mark.slow
@pytest.mark.parametrize('method', ['speculative', 'block'])
def test_features_in_the_loop(method):
  _assert_engine_is_exact(FeatureDrafter(5), method, TokenTree.chains(1, 3))


@pytest.mark.parametrize('method', ['greedy_block', 'spectr_gbv'])
def test_methods_that_need_a_constant_draft_refuse_one_that_reads_features(method):
  with pytest.raises(ValueError, match='to be the same in every round'):
    Decoder.make(
      tiny_transformers()[0], FeatureDrafter(5), method=method, tree=TokenTree.chains(1, 2), max_new_tokens=4,
      cache_size=8,
    )  # fmt: skip
  names = {setting.method.name for setting in default_settings(FeatureDrafter(5))}
  assert method not in names
  assert 'block' in names


@pytest.mark.slow
def test_greedy_block_would_be_biased_with_features(monkeypatch):
  """What it carries over asks for the distributions of the round before, which features change."""
  monkeypatch.setattr(GreedyBlock, 'needs_constant_draft', False)
  values = p_values(
    FeatureDrafter(5), 'greedy_block', TokenTree.chains(1, 3), prompts=_PROMPTS, num_tokens=4, num_samples=20_000
  )
  assert min(values) < 1e-3, values


@pytest.mark.slow
def test_features_of_the_context_are_those_of_the_text():
  """In every round, also those of the prompt, for rows of unequal length."""
  target, _ = tiny_transformers()
  prompts, lengths = np.array([[1, 2, 3, 4], [2, 0, 0, 0]]), np.array([4, 1])
  decoder = Decoder.make(
    target, FeatureDrafter(5), method='block', tree=TokenTree.chains(1, 3), max_new_tokens=9, cache_size=13
  )
  state = spectr_jax.engine.init_decode(decoder, jax.random.key(1), prompts, lengths)
  prefill = jax.jit(lambda model, text, lengths: model.prefill(text, lengths, model.init_cache_fn(2, 16))[1])
  for _ in range(4):
    wanted = prefill(decoder.target, state.text, state.root_position)
    for row, length in enumerate(np.asarray(state.root_position)):
      emitted = np.asarray(state.result.tokens[row, : state.result.lengths[row]])
      np.testing.assert_array_equal(state.text[row, lengths[row] : lengths[row] + len(emitted)], emitted)
      assert state.text[row, length] == state.last_token[row]
      np.testing.assert_allclose(state.features[row, :length], wanted[row, :length], atol=1e-4)
    state = spectr_jax.engine.decode_rounds(decoder, state, 1)


def test_a_drafter_that_asks_for_nothing_pays_nothing():
  """No text and no features are kept: the program of the loop has neither."""
  target, draft = tiny_transformers()
  sizes = {'method': 'block', 'tree': TokenTree.chains(1, 3), 'max_new_tokens': 9, 'cache_size': 13}
  for drafter, is_asked in ((draft, False), (FeatureDrafter(5), True)):
    decoder = Decoder.make(target, drafter, **sizes)
    state = spectr_jax.engine.init_decode(decoder, jax.random.key(1), np.array([[1, 2, 3, 4]]), np.array([4]))
    program = spectr_jax.engine.loop.run_rounds.lower(decoder, state, np.int32(1)).as_text()
    for array, tensor in ((state.text, '1x13xi32'), (state.features, '1x13x1x16xf32')):
      assert (array is not None) == (f'tensor<{tensor}>' in program) == is_asked
