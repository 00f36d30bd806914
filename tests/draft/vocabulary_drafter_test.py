"""A draft with another vocabulary: its distributions are those of its own text, and every method stays exact."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_vocabularies as toy
from canon import SLOTS
from coarse import coarse
from exact import assert_engine_is_exact, p_values

from spectr_jax import METHODS, TokenTree, lookup_beside
from spectr_jax.draft import Commitment, Confident, DraftContext, DraftRequest, growing, vocabulary_drafter
from spectr_jax.draft.shared_vocabulary import SharedVocabulary
from spectr_jax.draft.vocabulary_drafter import VocabularyDrafter
from spectr_jax.models import causal_lm, table, transformer
from spectr_jax.proposal import Independent
from spectr_jax.sampling import SamplingParams
from spectr_jax.testing import ContextTables, enumeration_error, random_tables
from spectr_jax.testing.tables import first_context
from tests.draft.prompts import read as read_prompts
from tests.slow import slow, slow_but

pytestmark = pytest.mark.usefixtures('highest')

_CONFIG = causal_lm.lm1b_config(6, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16, context_length=96)
_TREES = {'chain': TokenTree.chains(1, 3), 'unequal': TokenTree((0, 0, 0, 0, 2, 2, 4, 6))}


@functools.cache
def _draft(max_length=96):
  config = dataclasses.replace(_CONFIG, context_length=max_length)
  params = transformer.init_params(jax.random.key(3), config)
  params = {k: jax.tree.map(lambda x: 3 * x, v) if k.startswith('layer') else v for k, v in params.items()}
  return causal_lm.causal_lm(params, config)


def _drafter(**options):
  return vocabulary_drafter(_draft(**options), toy.vocabulary())


# The tables.


def test_a_text_is_the_tokens_of_each_token():
  rng = np.random.default_rng(0)
  for bos_id in (None, toy.BOS):
    vocabulary = toy.vocabulary(bos_id)
    tokens, lengths = rng.integers(0, 5, (6, 7)), np.array([1, 7, 3, 2, 5, 6])
    texts = vocabulary.texts(tokens, lengths, np.zeros(6, np.int32))
    found = vocabulary.ids_at(texts, jnp.broadcast_to(jnp.arange(24), (6, 24)))
    for row, length, own, size in zip(tokens.tolist(), lengths, found.tolist(), texts.lengths.tolist()):
      assert own[:size] == toy.draft_text(row[:length], bos_id)
    cut = vocabulary.texts(tokens, lengths, lengths - 1)
    for row, length, own, size in zip(
      tokens.tolist(), lengths, vocabulary.ids_at(cut, jnp.zeros((6, 1), int) + jnp.arange(5)).tolist(), cut.lengths
    ):
      assert own[:size] == toy.draft_text(row[length - 1 : length], bos_id)


def test_a_distribution_is_renormalised_on_what_is_shared():
  rng = np.random.default_rng(1)
  probs = rng.dirichlet(np.ones(6), (2, 3))
  probs[1, 1, [0, 1, 3]] = 0  # nothing in common
  with np.errstate(divide='ignore'):
    found = jax.nn.softmax(toy.vocabulary().restrict(jnp.log(probs)), axis=-1)
  wanted = np.array([[toy.restricted(each) for each in row] for row in probs])
  np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_logits_that_are_not_finite_stay_so():
  logits = jnp.zeros((4, 6)).at[0, 2].set(jnp.nan).at[1].set(-jnp.inf).at[2, 4].set(jnp.inf)
  assert jnp.isnan(toy.vocabulary().restrict(logits)).any(axis=-1).tolist() == [True, True, True, False]


@pytest.mark.parametrize(
  ('to_target', 'spelled', 'message'),
  [
    ((-1, -1), ((0,), (1,)), 'share no token'),
    ((1, 1), ((0,), (1,)), 'none of them twice'),
    ((2, -1), ((0,), (1,)), "ids of the target's 2 tokens"),
    ((0, -1), ((0,), ()), 'needs ids of the draft'),
    ((0, -1), ((0,), (2,)), 'needs ids of the draft, from 0 to 1'),
    ((0, -1), ((0,), (0.5,)), 'needs ids of the draft, from 0 to 1'),
    ((0.5, -1), ((0,), (1,)), r'to_target must be integers \[Vd\], got float64'),
    ((2**40, -1), ((0,), (1,)), "ids of the target's 2 tokens"),
  ],
)
def test_tables_that_fit_no_vocabulary_are_refused(to_target, spelled, message):
  with pytest.raises(ValueError, match=message):
    SharedVocabulary.make(to_target, spelled)


def test_tables_are_for_one_draft():
  with pytest.raises(ValueError, match='the shared vocabulary has 6 tokens, the draft 3'):
    vocabulary_drafter(table.table_model(jnp.zeros((3, 3))), toy.vocabulary())


# The drafter's distributions.


@jax.jit
def _init(drafter, prompts, lengths):
  return read_prompts(drafter, DraftContext(lengths, None, prompts), 32)


@functools.partial(jax.jit, static_argnames='tree')
def _propose(drafter, keys, state, text, lengths, given, tree):
  request = DraftRequest(keys, SamplingParams.make(len(lengths)), tree, Independent(), given)
  return drafter.propose(state, DraftContext(lengths, None, text), request)


@functools.partial(jax.jit, static_argnames='tree')
def _commit(drafter, state, text, lengths, path, num_committed, next_token, tree):
  return drafter.commit(state, DraftContext(lengths, None, text), Commitment(path, num_committed, next_token, tree))


@jax.jit
def _uncached(model, tokens):
  causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return model.apply(tokens, positions, causal, model.init_cache_fn(len(tokens), 1)).logits


def _plain(model, texts):
  """The draft's distributions after texts of the target's tokens, by a forward call on its own of them."""
  own = [toy.draft_text(text) for text in texts]
  padded = np.zeros((len(own), 96), np.int32)
  for row, ids in zip(padded, own):
    row[: len(ids)] = ids
  probs = jax.nn.softmax(_uncached(model, padded), axis=-1)
  return np.array([toy.restricted(row[len(ids) - 1]) for row, ids in zip(probs, own)])


def _decoded(drafter, tree, *, num_rounds, given=None, check=lambda *_: None):
  """Decodes at random for some rounds, whatever is drafted, and calls `check(texts, proposal)` in each."""
  rng, lengths = np.random.default_rng(0), np.array([1, 2, 5, 1])
  prompts = rng.integers(0, 5, (4, 5))
  texts = [row[:n].tolist() for row, n in zip(prompts, lengths)]
  state = _init(drafter, prompts, lengths)
  for turn in range(num_rounds):
    keys = jax.random.split(jax.random.key(turn), (4, tree.max_depth + 1))
    proposal = _propose(drafter, keys, state, _padded(texts), np.array([len(text) for text in texts]), given, tree)
    check(texts, proposal)
    nodes = [int(rng.integers(tree.num_nodes + 1)) for _ in texts]
    nodes[turn % 4] = tree.num_nodes  # a deepest one
    counts = np.array([int(tree.depths[node]) + 1 for node in nodes]) * (np.arange(4) != (turn + 2) % 5)
    path = np.maximum(np.pad(tree.paths[nodes], ((0, 0), (1, 0))), 0)
    next_tokens = rng.integers(0, 5, 4)
    for row, text in enumerate(texts):
      if counts[row]:
        text += np.asarray(proposal.tokens)[row, path[row, 1 : counts[row]] - 1].tolist() + [int(next_tokens[row])]
    sizes = np.array([len(text) for text in texts])
    state = _commit(drafter, proposal.state, _padded(texts), sizes, path, counts, next_tokens, tree)
  return texts, state


def _padded(texts):
  padded = np.full((len(texts), 32), 10**6)
  for row, text in zip(padded, texts):
    row[: len(text)] = text
  return padded


def _assert_plain(model, tree, texts, proposal):
  tokens = np.pad(np.asarray(proposal.tokens), ((0, 0), (1, 0)))
  paths = [[n for n in tree.paths[parent].tolist() if n > 0] for parent in tree.parent_nodes]
  continued = [text + row[path].tolist() for text, row in zip(texts, tokens) for path in paths]
  wanted = _plain(model, continued).reshape(proposal.probs.shape)
  np.testing.assert_allclose(proposal.probs, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize('name', ['unequal', slow('chain')])
def test_laws_are_those_of_the_text(name):
  """Of rows whose tokens take one, two or three of the draft's, whatever was accepted before."""
  drafter, tree = _drafter(), _TREES[name]
  _decoded(drafter, tree, num_rounds=6, check=functools.partial(_assert_plain, drafter.model, tree))


def test_a_given_token_that_is_not_shared_is_read_in_full_later():
  """Below it the draft has seen one of its tokens only; once it is committed, it has seen all."""
  drafter, tree = _drafter(), _TREES['chain']
  given = np.array([[4, -1, -1], [-1, 3, -1], [-1, -1, 4], [4, 3, 4]])

  def check(texts, proposal):
    np.testing.assert_allclose(proposal.probs[:, 0], _plain(drafter.model, texts), atol=1e-4, rtol=0)
    np.testing.assert_array_equal(np.where(given < 0, -1, proposal.tokens), given)

  _decoded(drafter, tree, num_rounds=6, given=given, check=check)


def test_a_text_longer_than_the_drafts_context_is_cut():
  drafter, tree = _drafter(max_length=16), _TREES['chain']

  def check(texts, proposal):
    assert np.isfinite(np.asarray(proposal.probs)).all()
    for row, (text, start) in enumerate(zip(texts, np.asarray(proposal.state.start).tolist())):
      own = _plain(_draft(), [text[start:]])[0]
      np.testing.assert_allclose(proposal.probs[row, 0], own, atol=1e-4, rtol=0)
      assert len(toy.draft_text(text[start:])) <= 16

  texts, state = _decoded(drafter, tree, num_rounds=8, check=check)
  assert max(len(toy.draft_text(text)) for text in texts) > 16
  assert (np.asarray(state.start) > 0).any()


# Exactness, by enumeration.


def _shared_tables(seed, max_length, *, draft_probs=toy.restricted):
  """Tables of a target of 5 tokens, and of a draft of 6 that depends on its own text, with nothing shared at times."""
  rng, count = np.random.default_rng(seed), first_context(5, max_length + 1)
  target = random_tables(seed, 5, max_length).target_probs
  draft = np.zeros((count, 5))
  for length in range(max_length + 1):
    first = first_context(5, length)
    for number in range(5**length):
      text = [number // 5**place % 5 for place in range(length - 1, -1, -1)]
      own = np.random.default_rng([seed, *toy.draft_text(text)]).dirichlet(np.full(6, 0.7))
      own[rng.random(6) < 0.2] = 0
      if (number + length) % 7 == 0:
        own[[0, 1, 3]] = 0
      with np.errstate(divide='ignore'):
        draft[first + number] = draft_probs(own if own.sum() else np.full(6, 1 / 6))
  return ContextTables(draft, target, max_length)


def _library(probs):
  with jax.enable_x64(True), np.errstate(divide='ignore'):
    return np.asarray(jax.nn.softmax(toy.vocabulary().restrict(jnp.log(jnp.asarray(probs)))))


_ENUMERATED = [name for name, method in METHODS.items() if method.is_lossless and not method.is_seed_exact]


@pytest.mark.parametrize('name', slow_but(['race_traversal'], _ENUMERATED))
def test_exact(name):
  method = coarse(METHODS[name])
  tree = TokenTree() if method.max_drafts == 0 else TokenTree.chains(1, 2)
  if method.max_drafts is None:
    tree = TokenTree.chains(2, 1)
  assert enumeration_error(method, tree, _shared_tables(0, 3, draft_probs=_library), 2) < 1e-10


def test_mass_that_is_not_renormalised_is_caught():
  """The probabilities of what was drawn, as the draft had them before the others were left out."""

  def as_they_were(probs):
    return [float(probs[toy.TO_TARGET.index(token)]) if token in toy.TO_TARGET else 0.0 for token in range(5)]

  tables = _shared_tables(0, 3)
  drawn = [row / row.sum() for row in tables.draft_probs]
  np.testing.assert_allclose(drawn, tables.draft_probs)
  broken = _shared_tables(0, 3, draft_probs=as_they_were)
  assert enumeration_error(METHODS['speculative'], TokenTree.chains(1, 2), broken, 2) > 1e-2


# Exactness, by sampling in the loop.


@dataclasses.dataclass(frozen=True)
class _NotRenormalised(VocabularyDrafter):
  """Draws as it should, and reports what the draft had before the other tokens were left out."""

  def propose(self, state, context, request):
    proposal = super().propose(state, context, request)
    return dataclasses.replace(proposal, probs=0.5 * proposal.probs)


jax.tree_util.register_dataclass(_NotRenormalised)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('method', 'tree'),
  [
    ('speculative', TokenTree.chains(1, 3)),
    ('greedy_block', TokenTree.chains(1, 3)),
    ('gsd', TokenTree.prefix((2, 2))),
    ('spectr', TokenTree.chains(2, 2)),
    ('univer', TokenTree.chains(2, 2)),
    ('ersd', TokenTree.chains(2, 2)),
    ('race_traversal', TokenTree.prefix((2, 2))),
  ],
)
def test_in_the_loop(method, tree):
  assert_engine_is_exact(_drafter(), method, tree)


@pytest.mark.slow
def test_grown_trees_in_the_loop():
  assert_engine_is_exact(growing(_drafter(), Confident()), 'race_traversal', SLOTS, num_samples=2_500)


@pytest.mark.slow
def test_lookup_beside_it_in_the_loop():
  drafter = lookup_beside(_drafter(), lookup_max=1, lookup_min=1)
  assert_engine_is_exact(drafter, 'race_traversal', TokenTree.chains(2, 2), prompts=([1, 4, 1], [4, 3, 4, 3, 4]))


@pytest.mark.slow
def test_a_draft_that_is_not_renormalised_is_caught_in_the_loop():
  broken = _NotRenormalised(_draft(), toy.vocabulary())
  assert min(p_values(broken, 'speculative', TokenTree.chains(1, 3))) < 1e-6
