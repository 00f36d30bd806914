"""The decoder that is trained here, beside its definition in NumPy and the logits of its first implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT

from spectr_jax import load_model
from spectr_jax.models.causal_lm import causal_lm, hidden_states, lm1b_config
from spectr_jax.models.transformer import Transformer, init_params
from tests.slow import slow

pytestmark = pytest.mark.usefixtures('highest')
CONFIG = lm1b_config(17, 24, num_layers=2, num_heads=2, mlp_dim=40, context_length=16)
TOKENS = np.random.default_rng(0).integers(0, 17, (2, 9))
# Logits after a random text of 64 tokens by the module `Transformer` of 2026, of the first five tokens.
GOLDEN = {
  'target': [-6.356106, -3.701287, -3.610759, -8.645945, -7.465147],
  'draft': [-7.133545, -3.000816, -3.321173, -7.190641, -7.443209],
  'draft_undistilled': [-9.920094, -4.802921, -2.911664, -9.799695, -10.139103],
}


def _params():
  params = init_params(jax.random.key(0), CONFIG)
  return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)


def _causal(size):
  return jnp.broadcast_to(jnp.arange(size), (2, size)), jnp.tril(jnp.ones((size, size), bool))


def _reference(params, tokens):
  """Logits after every token of one text, in float64."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  size, width = len(tokens), CONFIG.head_dim

  def norm(x, own):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * own['gain']

  def turned(x):  # pairs of entries as complex numbers
    angles = np.arange(size)[:, None] * 10000.0 ** (-np.arange(width // 2) / (width // 2))
    pairs = (x[:, : width // 2] + 1j * x[:, width // 2 :]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], -1)

  x = params['embedding'][tokens] * np.sqrt(CONFIG.embed_dim)
  for layer in range(CONFIG.num_layers):
    own = params[f'layer_{layer}']
    normed, heads = norm(x, own['attention_norm']), []
    for head in range(CONFIG.num_heads):
      part = slice(head * width, (head + 1) * width)
      query, key, value = (normed @ own['attention'][name]['kernel'][:, part] for name in 'qkv')
      scores = np.where(np.tri(size), turned(query) @ turned(key).T / np.sqrt(width), -np.inf)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      heads.append(weights / weights.sum(-1, keepdims=True) @ value)
    x = x + np.concatenate(heads, -1) @ own['attention']['out']['kernel']
    hidden = norm(x, own['mlp_norm']) @ own['mlp']['up']['kernel']
    gelu = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    x = x + gelu @ own['mlp']['down']['kernel']
  return norm(x, params['final_norm']) @ params['embedding'].T


def test_logits_are_those_of_the_definition():
  params = _params()
  model, (positions, causal) = causal_lm(params, CONFIG), _causal(9)
  found = model.apply(TOKENS, positions, causal, model.init_cache_fn(2, 1)).logits
  np.testing.assert_allclose(found, [_reference(params, text) for text in TOKENS], atol=1e-4)


@pytest.mark.parametrize('options', [slow({}), {'remat': True}])
def test_the_module_that_trains_computes_the_same(options):
  params, (positions, causal) = _params(), _causal(9)
  network = Transformer(CONFIG, **options)

  def loss(params, hidden_of):
    return jnp.sum(jnp.sin(hidden_of(params)))

  def by_module(params):
    return network.apply({'params': params}, TOKENS, positions, causal)[1]

  found = jax.value_and_grad(loss)(params, by_module)
  wanted = jax.value_and_grad(loss)(params, lambda params: hidden_states(params, CONFIG, jnp.asarray(TOKENS)))
  jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=2e-4), found, wanted)


def test_dropout_keeps_the_mean_and_depends_on_the_key():
  params, (positions, causal) = _params(), _causal(9)

  def hidden(rate, seed):
    rngs = {'dropout': jax.random.key(seed)}
    return Transformer(CONFIG, dropout=rate).apply({'params': params}, TOKENS, positions, causal, rngs=rngs)[1]

  assert not np.allclose(hidden(0.5, 0), hidden(0.5, 1))
  np.testing.assert_array_equal(hidden(0.5, 0), hidden(0.5, 0))
  np.testing.assert_allclose(hidden(1e-6, 0), hidden(0.0, 0), atol=1e-3)


def test_fresh_parameters():
  """Logits have unit variance, and a block adds little."""
  params = init_params(
    jax.random.key(0), lm1b_config(512, 64, num_layers=4, num_heads=2, mlp_dim=256, context_length=8)
  )
  assert np.std(params['embedding']) == pytest.approx(1 / 8, rel=0.02)
  assert np.std(params['layer_0']['mlp']['down']['kernel']) == pytest.approx((256 * 8) ** -0.5, rel=0.02)
  assert np.std(params['layer_0']['attention']['q']['kernel']) == pytest.approx(1 / 8, rel=0.05)
  assert (params['final_norm']['gain'] == 1).all()


@pytest.mark.parametrize('name', GOLDEN)
def test_the_pretrained_models_are_those_that_were_trained(name):
  model, _ = load_model(ROOT / 'pretrained' / name)
  tokens, (positions, causal) = np.random.default_rng(0).integers(3, 4096, (2, 64)), _causal(64)
  logits = jax.jit(lambda model: model.apply(tokens, positions, causal, model.init_cache_fn(2, 1)).logits)(model)
  np.testing.assert_allclose(logits[1, -1, :5], GOLDEN[name], atol=1e-4)
