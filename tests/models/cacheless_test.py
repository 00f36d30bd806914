"""Tests of networks without a cache: their logits and tokens are those of the same network with one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from spectr_jax import NotFiniteError, TokenTree
from spectr_jax.draft import Likeliest, growing, model_drafter
from spectr_jax.models import causal_lm, table, transformer, uncached
from spectr_jax.models.cacheless import _fewest_texts
from tests.slow import slow

_LENGTHS = np.array([1, 6, 3])
_PROMPTS = np.random.default_rng(0).integers(0, 17, (3, 6))


@functools.cache
def _whole_texts(config):
  """The transformer on whole texts."""

  def apply(params, tokens):
    size = tokens.shape[1]
    positions, causal = jnp.broadcast_to(jnp.arange(size), tokens.shape), jnp.tril(jnp.ones((size, size), bool))
    return transformer.Transformer(config).apply({'params': params}, tokens, positions, causal)[0]

  return apply


def _without_cache(model):
  config = causal_lm.config_of(model)
  return uncached(_whole_texts(config), model.vocab_size, params=model.params, context_length=config.context_length)


def test_fewest_texts():
  """Two chains of two share the root only; in a tree a text for each leaf."""
  paths, places = _fewest_texts(TokenTree.chains(2, 2).ancestors)
  assert sorted(paths.tolist()) == [[0, 1, 3], [0, 2, 4]]
  for tree in (TokenTree.prefix((2, 3, 1)), TokenTree.chains(1, 5), TokenTree.from_parents((0, 0, 0, 1, 1, 2, 3, 3))):
    paths, places = _fewest_texts(tree.ancestors)
    assert len(paths) == (tree.num_children == 0).sum()
    for node, (path, place) in enumerate(places):
      assert paths[path, : place + 1].tolist() == np.flatnonzero(tree.ancestors[node]).tolist()


@pytest.mark.usefixtures('highest')
def test_logits_are_those_with_a_cache(target):
  """A tree after ragged prompts, with the mask known and traced, and another after a path of it was committed."""
  tree = TokenTree.prefix((2, 2, 1))
  guesses = np.random.default_rng(1).integers(0, 17, (2, 3, tree.num_nodes + 1))

  @jax.jit
  def calls(model, prompts, mask):
    cache, _ = model.prefill(prompts, _LENGTHS - 1, model.init_cache_fn(3, 12))
    first = model.apply(guesses[0], _LENGTHS[:, None] - 1 + tree.depths, mask, cache)
    path, kept = np.array([[0, 2, 5], [0, 1, 4], [0, 1, 3]]), np.array([3, 1, 0])
    cache = model.truncate_fn(model.commit_fn(first.cache, path, kept), np.array([2, 6, 2]))
    # The second call comes in two parts, as a draft's do, with a mask for each row.
    rows, starts = jnp.broadcast_to(tree.ancestors, (3, *tree.ancestors.shape)), np.array([2, 6, 2])[:, None]
    begun = model.apply(guesses[1][:, :3], starts + tree.depths[:3], rows[:, :3], cache)
    ended = model.apply(guesses[1][:, 3:], starts + tree.depths[3:], rows[:, 3:], begun.cache)
    return first.logits, begun.logits, ended.logits

  known = jax.jit(lambda model, prompts: calls.__wrapped__(model, prompts, tree.ancestors))
  expected = known(target, _PROMPTS)
  padded = np.where(np.arange(6) < _LENGTHS[:, None], _PROMPTS, 10**6)
  for logits in (known(_without_cache(target), padded), calls(_without_cache(target), padded, tree.ancestors)):
    for one, other in zip(logits, expected):
      np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.usefixtures('highest')
@pytest.mark.parametrize(
  ('method', 'tree', 'kinds'),
  [
    ('speculative', TokenTree.chains(1, 3), 'both'),
    slow('race_traversal', TokenTree.prefix((3, 1, 1)), 'target'),
    slow('gsd', TokenTree.prefix((2, 2)), 'draft'),
    slow('specinfer', TokenTree.slots((2, 2, 2)), 'both'),
  ],
)
def test_tokens_are_those_with_a_cache(target, draft, method, tree, kinds):
  def decode(target, draft):
    draft = growing(model_drafter(draft), Likeliest()) if tree.is_grown else draft
    options = {'method': method, 'tree': tree, 'max_new_tokens': 8}
    return spectr_jax.generate(jax.random.key(3), target, draft, _PROMPTS, _LENGTHS, **options)

  without = [_without_cache(model) if kinds in (role, 'both') else model
             for role, model in (('target', target), ('draft', draft))]  # fmt: skip
  jax.tree.map(np.testing.assert_array_equal, decode(*without), decode(target, draft))


@pytest.mark.parametrize(('tree', 'num_texts'), [(TokenTree.chains(1, 4), 3), slow(TokenTree.prefix((2, 2, 1)), 12)])
def test_a_round_takes_one_text_for_each_leaf(tree, num_texts):
  """Three rows; a function that is its own data; texts end where the network does, at 9 tokens."""
  logits, seen = jax.random.normal(jax.random.key(0), (5, 5)), []

  def apply(tokens):
    seen.append(tokens.shape)
    assert tokens.shape[1] <= 9
    return logits[tokens]

  model = uncached(apply, 5, context_length=9)
  seen.clear()
  options = {'method': 'specinfer', 'tree': tree, 'max_new_tokens': 5}
  prompts, lengths = np.array([[1, 0], [2, 3], [4, 0]]), np.array([1, 2, 1])
  result = spectr_jax.generate(jax.random.key(1), model, table.table_model(logits), prompts, lengths, **options)
  assert seen[-1] == (num_texts, 9)
  expected = spectr_jax.generate(jax.random.key(1), *[table.table_model(logits)] * 2, prompts, lengths, **options)
  np.testing.assert_array_equal(result.tokens, expected.tokens)


def _by_mean(tokens):
  """A network that looks ahead by a thousandth of its logits."""
  return jax.nn.one_hot(tokens, 5) * (1 + 0.01 * tokens.mean(axis=1)[:, None, None])


@pytest.mark.parametrize(
  'apply_fn',
  [
    _by_mean,
    lambda tokens: jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), 5),
    lambda tokens: jnp.cumsum(jax.nn.one_hot(tokens, 5)[:, ::-1], axis=1)[:, ::-1],
    # From the end of the text, which every further token moves.
    lambda tokens: jax.nn.one_hot(tokens, 5) * jnp.arange(tokens.shape[1], 0, -1)[:, None],
    lambda tokens: jnp.where(jax.nn.one_hot(tokens, 5) * tokens[:, -1:, None] > 0, 0, -jnp.inf),
  ],
)
def test_a_network_that_looks_ahead_is_refused(apply_fn):
  with pytest.raises(ValueError, match='apply_fn is not causal: the logits after the first 4 tokens'):
    uncached(apply_fn, 5)
  params = {'scale': jnp.ones(5)}
  with pytest.raises(ValueError, match='apply_fn is not causal'):
    uncached(lambda params, tokens: apply_fn(tokens) * params['scale'], 5, params=params, context_length=9)
  # Shapes without numbers are for compilation, and show nothing.
  shapes = jax.eval_shape(lambda: params)
  assert uncached(lambda params, tokens: apply_fn(tokens) * params['scale'], 5, params=shapes).vocab_size == 5


@pytest.mark.parametrize(
  ('apply_fn', 'vocab_size'),
  [
    (lambda tokens: jnp.cumsum(jax.nn.one_hot(tokens, 5), axis=1).astype(jnp.bfloat16), 5),
    (lambda tokens: jnp.log(jax.nn.one_hot(tokens, 5)), 5),
    (lambda tokens: jnp.zeros((*tokens.shape, 5)), 5),
    (lambda tokens: jnp.full((*tokens.shape, 5), jnp.nan), 5),  # named by whoever samples from it
    (lambda tokens: jnp.zeros((*tokens.shape, 1)), 1),
  ],
)
def test_causal_networks_are_taken(apply_fn, vocab_size):
  assert uncached(apply_fn, vocab_size).vocab_size == vocab_size
  assert uncached(apply_fn, vocab_size, context_length=1).context_length == 1


def _with_positions(table, *, is_sliced=False, **options):
  def apply(tokens):
    size = tokens.shape[1]
    own = table[:size] if is_sliced else jnp.take(table, jnp.arange(size), axis=0, mode='fill')
    # Attention over all tokens up to there spreads what one place lacks to the places after it.
    return jnp.cumsum(jax.nn.one_hot(tokens, 5) + own, axis=1)

  return uncached(apply, 5, **options)


def test_positions_end_where_the_table_does():
  """What takes no longer texts says so; what does not say so fails with a line that asks for it."""
  table = jax.random.normal(jax.random.key(0), (12, 5))
  prompt = np.arange(7)[None] % 5
  asked = 'some length only must state it as context_length, and this one states none'

  def decode(model, max_new_tokens):
    options = {'method': 'autoregressive', 'max_new_tokens': max_new_tokens}
    return spectr_jax.generate(jax.random.key(0), model, None, prompt, **options)

  for is_sliced in (False, True):
    own = {'is_sliced': is_sliced}
    assert decode(_with_positions(table, context_length=12, **own), 5).lengths[0] == 5
    with pytest.raises(ValueError, match="7 tokens; with 6 new ones that exceeds the models' limit of 12"):
      decode(_with_positions(table, context_length=12, **own), 6)
    with pytest.raises(ValueError, match=asked):
      decode(_with_positions(table, **own), 8)
    with pytest.raises(ValueError, match='for texts of 8 tokens; a model that|on texts of 8 tokens, .*; a model that'):
      _with_positions(table[:6], **own)
  with pytest.raises(NotFiniteError, match='logits of the target are not finite; a model that takes texts.*' + asked):
    decode(_with_positions(table), 8)
  with pytest.raises(ValueError, match='apply_fn fails on texts of 22 tokens, padding included: .*' + asked):
    decode(_with_positions(table, is_sliced=True), 8)
  with pytest.raises(NotFiniteError, match='logits of the target are not finite; a model that takes texts.*' + asked):
    spectr_jax.log_likelihood(_with_positions(table), [np.arange(14) % 5])


@pytest.mark.parametrize(
  ('apply_fn', 'message'),
  [
    (lambda tokens: jnp.zeros((*tokens.shape, 6)), r'float32 \(1, 2, 6\)'),
    (lambda tokens: jnp.zeros((*tokens.shape, 5), jnp.int32), r'int32 \(1, 2, 5\)'),
    (lambda tokens: (jnp.zeros((*tokens.shape, 5)), None), 'got tuple'),
  ],
)
def test_what_gives_no_logits_is_refused(apply_fn, message):
  with pytest.raises(ValueError, match=r'apply_fn must give logits \[1, 2, 5\].*' + message):
    uncached(apply_fn, 5)
