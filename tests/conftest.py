"""Fixtures shared by the tests: a tiny pair of transformers and a forward pass that knows no cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.models import transformer

TEXT_SIZE = 32


def _tiny_model(seed, *, embed_dim, num_layers, max_length=64):
  config = transformer.TransformerConfig(
    vocab_size=17, embed_dim=embed_dim, num_layers=num_layers, num_heads=2, mlp_dim=2 * embed_dim, max_length=max_length
  )
  params = jax.jit(transformer.init_params, static_argnames='config')(jax.random.key(seed), config)
  # Fresh blocks add little to the embedding and every token would predict itself: with larger ones the context counts.
  params = {k: jax.tree.map(lambda x: 3 * x, v) if k.startswith('layer') else v for k, v in params.items()}
  return transformer.transformer_model(params, config)


@pytest.fixture
def highest():
  """Full float32 products, for tests of equality."""
  with jax.default_matmul_precision('highest'):
    yield


@pytest.fixture(scope='session')
def target():
  """A transformer of 2 layers, width 32, vocabulary 17."""
  return _tiny_model(0, embed_dim=32, num_layers=2)


@pytest.fixture(scope='session')
def draft():
  """A smaller transformer with the same vocabulary, in partial agreement with `target`."""
  return _tiny_model(1, embed_dim=16, num_layers=1)


@pytest.fixture(scope='session')
def uncached_logits():
  """`(model, texts) -> [len(texts), V]`: logits after each text (ids), by a causal forward of the whole text."""

  def forward(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    network = transformer.Transformer(transformer.config_of(model))
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    return network.apply({'params': model.params}, tokens, positions, causal)[0]

  forward = jax.jit(forward)

  def uncached_logits(model, texts):
    lengths = np.array([len(text) for text in texts])
    assert lengths.max() <= TEXT_SIZE
    rows = -len(texts) % 8 + len(texts)  # few shapes, few compilations
    tokens = np.zeros((rows, TEXT_SIZE), np.int32)
    for row, text in zip(tokens, texts):
      row[: len(text)] = text
    return np.asarray(forward(model, tokens))[np.arange(len(texts)), lengths - 1]

  return uncached_logits
