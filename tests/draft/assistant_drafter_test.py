"""Assistants: their distributions beside a plain computation on whole texts, and decoding with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_engine_is_exact, assert_greedy_is_exact
from tiny_heads import TARGET, D, V, all_features, padded, three_layers

from spectr_jax import SamplingParams, TokenTree, lookup_drafter
from spectr_jax.draft import Confident, DraftContext, DraftRequest, Likeliest, assistant_drafter, growing
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import noise_keys, propose, run_round
from spectr_jax.engine.reading import init_decode
from spectr_jax.models import assistant, head
from spectr_jax.models.assistant import AssistantConfig
from spectr_jax.models.causal_lm_config import CausalLMConfig, Rope
from spectr_jax.models.table import table_model

pytestmark = pytest.mark.usefixtures('highest')

_BLOCK = CausalLMConfig(
  V, 12, 2, 4, 1, 4, 12, 64, rope=Rope((1.0, 0.1)), windows=(3, None), projections='q', has_qk_norm=True, is_tied=True,
  query_scale=1.0,
)  # fmt: skip
_CONFIG = AssistantConfig(_BLOCK, D, (0, 2))
_CLUSTERS = dataclasses.replace(
  _CONFIG, block=dataclasses.replace(_BLOCK, vocab_size=24), num_centroids=6, num_chosen=2
)


def _assistant(config=_CONFIG, seed=1, scale=1.0):
  params = head.random_params(jax.random.key(seed), assistant.param_shapes(config))
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


def _plain(params, target, text, guesses):
  """The logits `[len(guesses), V]` after the last token of a text and after each guess but the last, in float64."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  size = len(text)
  cache, _ = target.prefill(padded(text)[None], jnp.array([size - 1]), target.init_cache_fn(1, 40))
  kept = [
    (np.float64(cache.keys[i][0, 0, :, : size - 1]), np.float64(cache.values[i][0, 0, : size - 1])) for i in (0, 2)
  ]
  hidden = np.float64(all_features(target, padded(text), layers=(-1,))[size - 2, 0]) if size > 1 else np.zeros(D)
  found = []
  for token in (text[-1], *guesses[:-1]):
    embedded = np.float64(target.embed_fn(target.params, jnp.asarray(token)))
    x = np.concatenate([embedded, hidden]) @ params['before']['kernel']
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
  prompts, lengths = jax.random.randint(jax.random.key(3), (4, 9), 0, V), jnp.array([9, 6, 1, 2])
  state = init_decode(decoder, jax.random.key(2), prompts, lengths, sampling=SamplingParams(temperature))
  draft, advance, kept = jax.jit(propose), jax.jit(run_round), set()
  for _ in range(4):
    proposal = draft(decoder, state, noise_keys(decoder, state)[0])
    for row, length in enumerate(lengths.tolist()):
      text = [*prompts[row, :length].tolist(), *state.result.tokens[row, : state.result.lengths[row]].tolist()]
      logits = _plain(drafter.params, target, text, proposal.tokens[row].tolist()) / temperature
      probs = np.exp(logits - logits.max(axis=1, keepdims=True))
      np.testing.assert_allclose(proposal.probs[row], probs / probs.sum(axis=1, keepdims=True), atol=2e-5)
    before = state.root_position
    state, _ = advance(decoder, state)
    kept |= set((state.root_position - before).tolist())
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


@pytest.mark.parametrize('shape', _TREES)
def test_greedy_text_is_that_without_a_draft(shape):
  drafter = _assistant()
  drafter = growing(drafter, _GROWTHS[shape]) if shape in _GROWTHS else drafter
  prompts, lengths = jax.random.randint(jax.random.key(5), (3, 5), 0, V), jnp.array([5, 1, 3])
  assert_greedy_is_exact(three_layers(), drafter, prompts, lengths, method='specinfer', tree=_TREES[shape])


@pytest.mark.slow
@pytest.mark.parametrize(
  ('num_centroids', 'method', 'tree'),
  [
    (0, 'block', TokenTree.chains(1, 3)),
    (0, 'spectr', TokenTree.chains(2, 2)),
    (0, 'race_traversal', TokenTree.chains(2, 2)),
    (5, 'traversal', TokenTree.from_parents((0, 0, 1, 2, 2))),
    (5, 'specinfer', TokenTree.chains(2, 2)),
  ],
)
def test_the_loop_is_exact(num_centroids, method, tree):
  assert_engine_is_exact(_tiny(num_centroids), method, tree)


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
