"""Assistants: their distributions beside a plain computation on whole texts, and decoding with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_engine_is_exact, assert_greedy_is_exact
from hub_specs import SPECS
from tiny_heads import TARGET, D, V, padded, three_layers

from spectr_jax import METHODS, SamplingParams, TokenTree, generate, lookup_drafter
from spectr_jax.draft import Confident, DraftContext, DraftRequest, Likeliest, assistant_drafter, growing
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import run_round
from spectr_jax.engine.reading import init_decode
from spectr_jax.io.hub.families import read_spec
from spectr_jax.methods import why_not, with_gumbel
from spectr_jax.models import assistant, head
from spectr_jax.models.assistant import AssistantConfig
from spectr_jax.models.causal_lm import causal_lm
from spectr_jax.models.causal_lm_config import CausalLMConfig, Rope
from spectr_jax.models.param_shapes import init_params
from spectr_jax.models.table import table_model
from spectr_jax.testing import tiny_transformers
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures('highest')

_BLOCK = CausalLMConfig(
  V, 12, 2, 4, 1, 4, 12, 64, rope=Rope((1.0, 0.1)), windows=(3, None), projections='q', has_qk_norm=True, is_tied=True,
  query_scale=1.0,
)  # fmt: skip
_CONFIG = AssistantConfig(_BLOCK, D, (0, 2))
_CLUSTERS = dataclasses.replace(
  _CONFIG, block=dataclasses.replace(_BLOCK, vocab_size=24), num_centroids=6, num_chosen=2
)


@functools.partial(jax.jit, static_argnames='config')
def _random_params(key, *, config):
  return head.random_params(key, assistant.param_shapes(config))


def _assistant(config=_CONFIG, seed=1, scale=1.0):
  params = _random_params(jax.random.key(seed), config=config)
  params['embedding'] = scale * params['embedding']
  if config.num_centroids:
    order = np.random.default_rng(0).permutation(config.block.vocab_size)
    params['token_ids'] = jnp.asarray(order, jnp.int32)
  return assistant_drafter(params, config, config.block.vocab_size)


def _tiny(num_centroids=0):
  """An assistant of the tiny transformers of `spectr_jax.testing`."""
  block = dataclasses.replace(_BLOCK, vocab_size=5, num_heads=2, num_kv_heads=2, head_dim=8)
  clusters = (5, 3) if num_centroids else (0, 0)
  return _assistant(AssistantConfig(block, 16, (1, 0), *clusters), scale=3.0)


def _rms(x, gain):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * gain


@jax.jit
def _whole(target, tokens):
  """What the target makes of a text: its last hidden states, and the keys and values of every layer."""
  size = len(tokens)
  causal, places = jnp.tril(jnp.ones((size, size), bool)), jnp.arange(size)[None]
  output = target.with_features((-1,)).apply(tokens[None], places, causal, target.init_cache_fn(1, size))
  cache = output.cache.commit(places, jnp.array([size]))
  return output.features[0, :, 0], cache.keys, cache.values, target.embed_fn(target.params, jnp.arange(V))


def _plain(params, target, text, guesses):
  """The logits `[len(guesses), V]` after the last token of a text and after each guess but the last, in float64."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  size = len(text)
  features, *read, embedding = jax.tree.map(np.float64, _whole(target, padded(text)))
  kept = [(keys[0, 0, :, : size - 1], values[0, 0, : size - 1]) for keys, values in zip(*read)][::2]
  hidden = features[size - 2] if size > 1 else np.zeros(D)
  found = []
  for token in (text[-1], *guesses[:-1]):
    x = np.concatenate([embedding[token], hidden]) @ params['before']['kernel']
    for layer, (keys, values) in enumerate(kept):
      own, name = params[f'layer_{layer}'], 'attention'
      query = (_rms(x, own['attention_norm']['gain']) @ own[name]['q']['kernel']).reshape(4, 4)
      query = _rms(query, own[name]['q_norm']['gain'])
      angles = (size - 1) * np.array([1.0, 0.1])
      first, second = query[:, :2], query[:, 2:]
      query = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=1
      )
      from_slot = max(size - 1 - 4, 0) if layer == 0 else 0  # the last one, and the window of 3 before it
      mixed = np.zeros((4, 4))
      if size > 1:
        scores = query @ keys[:, from_slot:]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed = weights / weights.sum(axis=1, keepdims=True) @ values[from_slot:]
      x = x + mixed.reshape(-1) @ own[name]['out']['kernel']
      normed = _rms(x, own['mlp_norm']['gain'])
      gate, up = (normed @ own['mlp'][part]['kernel'] for part in ('gate', 'up'))
      x = x + (gate / (1 + np.exp(-gate)) * up) @ own['mlp']['down']['kernel']
    x = _rms(x, params['final_norm']['gain'])
    hidden = x @ params['after']['kernel']
    found.append(params['embedding'] @ x)
  return np.stack(found)


def test_guesses_have_the_distributions_of_the_whole_text():
  """Before and after rounds that keep none, some or all guesses, of prompts of one token and of more."""
  target, drafter, temperature = three_layers(), _assistant(), 2.0
  tree = TokenTree.chains(1, 3)
  decoder = Decoder.make(target, drafter, method='block', tree=tree, max_new_tokens=20, cache_size=40)
  prompts, lengths = np.random.default_rng(3).integers(0, V, (4, 9)), np.array([9, 6, 1, 2])
  state = init_decode(decoder, jax.random.key(2), prompts, lengths, sampling=SamplingParams(temperature))
  advance, kept = jax.jit(run_round), set()
  for _ in range(4):
    result, before = state.result, state.root_position
    state, done = advance(decoder, state)
    proposal, result, before = jax.device_get((done.proposal, result, before))
    for row, length in enumerate(lengths.tolist()):
      text = [*prompts[row, :length].tolist(), *result.tokens[row, : result.lengths[row]].tolist()]
      logits = _plain(drafter.params, target, text, proposal.tokens[row].tolist()) / temperature
      probs = np.exp(logits - logits.max(axis=1, keepdims=True))
      np.testing.assert_allclose(proposal.probs[row], probs / probs.sum(axis=1, keepdims=True), atol=2e-5)
    kept |= set((np.asarray(state.root_position) - before).tolist())
  assert len(kept) > 2


def test_tokens_outside_of_the_chosen_clusters_have_no_mass():
  """Others have the logits of all clusters together; a row does not depend on the rows beside it."""
  drafter = _assistant(_CLUSTERS)
  features = jax.random.normal(jax.random.key(0), (3, 2, 12)) * jnp.array([1.0, 30.0, 0.1])[:, None, None]
  logits = np.asarray(assistant.logits(drafter.params, _CLUSTERS, features))
  whole = np.asarray(features @ drafter.params['embedding'].T)
  chosen = np.argsort(-np.asarray(features @ drafter.params['centroids']['kernel']), axis=-1)[..., :2]
  cluster = np.argsort(np.asarray(drafter.params['token_ids'])) // 4
  is_chosen = (cluster == chosen[..., :1]) | (cluster == chosen[..., 1:])
  np.testing.assert_array_equal(np.isfinite(logits), is_chosen)
  assert is_chosen.sum() == 6 * 8
  np.testing.assert_allclose(logits[is_chosen], whole[is_chosen], rtol=1e-5, atol=1e-6)
  for row in range(3):
    alone = assistant.logits(drafter.params, _CLUSTERS, features[row : row + 1])
    np.testing.assert_array_equal(alone[0], logits[row])


_TREES = {
  'chain': TokenTree.chains(1, 4), 'tree': TokenTree.from_parents((0, 0, 1, 1, 2, 4)),
  'likeliest': TokenTree.slots((3, 3, 2)), 'confident': TokenTree.slots((2, 2, 2)),
}  # fmt: skip
_GROWTHS = {'likeliest': Likeliest(), 'confident': Confident()}


@pytest.mark.parametrize('shape', slow_but(['tree', 'confident'], _TREES))
def test_greedy_text_is_that_without_a_draft(shape):
  drafter = _assistant()
  drafter = growing(drafter, _GROWTHS[shape]) if shape in _GROWTHS else drafter
  prompts, lengths = jax.random.randint(jax.random.key(5), (3, 5), 0, V), jnp.array([5, 1, 3])
  assert_greedy_is_exact(three_layers(), drafter, prompts, lengths, method='specinfer', tree=_TREES[shape])


_SMALL = {
  'chain': TokenTree.chains(1, 3), 'chains': TokenTree.chains(2, 2), 'tree': TokenTree.from_parents((0, 0, 1, 2, 2)),
  'likeliest': TokenTree.slots((2, 2)), 'confident': TokenTree.slots((2, 2)),
}  # fmt: skip
_SAMPLED = [name for name, method in METHODS.items() if method.is_lossless and method.max_drafts != 0]


def _fitting(name):
  """The shapes on which a method takes an assistant: all chains and trees, or a chain, and those that grow."""
  shapes = 'chain' if METHODS[name].max_drafts == 1 else 'chains tree likeliest confident'
  drafters = {shape: growing(_tiny(), _GROWTHS[shape]) if shape in _GROWTHS else _tiny() for shape in shapes.split()}
  return [shape for shape in drafters if not why_not(METHODS[name], _SMALL[shape], drafters[shape])]


def test_methods_that_take_an_assistant():
  fitting = {name: set(_fitting(name)) for name in _SAMPLED}
  assert [name for name in fitting if not fitting[name]] == ['greedy_block']  # whose draft must not change
  assert {name for name in fitting if 'tree' in fitting[name]} == {
    name for name in _SAMPLED if METHODS[name].max_drafts is None
  }
  assert {name for name in fitting if 'likeliest' in fitting[name]} >= {'specinfer', 'race_traversal'}
  assert {name for name in fitting if 'confident' in fitting[name]} >= {'spectr', 'specinfer', 'gsd', 'race_traversal'}


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name in _SAMPLED if name != 'greedy_block'])
def test_the_loop_is_exact(name):
  """On every shape: sampled text by a chi-square test, and greedy text."""
  target, prompts, lengths = tiny_transformers()[0], np.array([[1, 2, 1], [3, 0, 0]]), np.array([3, 1])
  for shape in _fitting(name):
    drafter = _tiny(5 if shape == 'tree' else 0)
    drafter = growing(drafter, _GROWTHS[shape]) if shape in _GROWTHS else drafter
    assert_engine_is_exact(drafter, name, _SMALL[shape])
    assert_greedy_is_exact(target, drafter, prompts, lengths, method=name, tree=_SMALL[shape])


@pytest.mark.slow
@pytest.mark.parametrize('shape', ['chain', 'tree'])
def test_seed_exact_texts_are_those_without_a_draft(shape):
  target, prompts, lengths = tiny_transformers()[0], np.array([[1, 2, 1], [3, 0, 0]]), np.array([3, 1])
  options = {'max_new_tokens': 12, 'sampling': SamplingParams(0.9)}
  texts = [
    generate(jax.random.key(4), target, drafter, prompts, lengths, method=method, tree=tree, **options).tokens
    for drafter, method, tree in (
      (None, with_gumbel(METHODS['autoregressive']), None), (_tiny(), 'ersd', _SMALL[shape]),
    )
  ]  # fmt: skip
  np.testing.assert_array_equal(*texts)


# A mixture, with an assistant that reads its keys and values.


@pytest.mark.slow
@pytest.mark.parametrize('method', ['spectr', 'race_traversal'])
def test_the_loop_is_exact_for_a_mixture(method):
  sizes = {'vocab_size': 5, 'num_hidden_layers': 2, 'layer_types': ['sliding_attention', 'full_attention']}
  config = read_spec(SPECS['gemma4_mixture'] | sizes)[1]
  target = causal_lm(init_params(jax.random.key(3), config), config)
  block = dataclasses.replace(config, projections='q', experts=None, logit_soft_cap=None)
  drafter = _assistant(AssistantConfig(block, config.embed_dim, (0, 1)), scale=3.0)
  assert_engine_is_exact(drafter, method, TokenTree.chains(2, 2), target=target)


def test_targets_whose_keys_it_cannot_read():
  drafter, options = _assistant(), {'tree': TokenTree.chains(1, 2), 'max_new_tokens': 4, 'cache_size': 16}
  two = dataclasses.replace(drafter, config=dataclasses.replace(_CONFIG, kv_layers=(0, 3)))
  with pytest.raises(ValueError, match="keys and values of the target's layers 0, 3, and it has those of 3"):
    Decoder.make(three_layers(), two, method='block', **options)
  table = dataclasses.replace(table_model(jnp.ones((V, V)) / V), features_fn=lambda layers: None)
  with pytest.raises(ValueError, match='layers 0, 2, and it has those of 0'):
    Decoder.make(table, drafter, method='block', **options)
  request = DraftRequest(jax.random.split(jax.random.key(0), (1, 3)), SamplingParams.make(1), options['tree'], None)
  with pytest.raises(ValueError, match='an assistant reads the text'):
    drafter.propose((), DraftContext(jnp.array([2]), three_layers()), request)
  assert lookup_drafter(V).kv_layers == ()


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'block': TARGET}, 'layers of queries alone'),
    ({'kv_layers': (0,)}, 'reads a layer of the target in each'),
    ({'num_centroids': 5, 'num_chosen': 2}, '23 tokens in 5 clusters, of which 2 are chosen, do not fit'),
    ({'num_centroids': 23, 'num_chosen': 24}, 'of which 24 are chosen'),
  ],
)
def test_sizes_that_do_not_fit(fields, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_CONFIG, **fields)
