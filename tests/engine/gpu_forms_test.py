"""Decoding with the forms for GPUs. Without a GPU they run on a CPU, where their kernels take their plain forms."""

import dataclasses

import jax
import numpy as np
import pytest
from slow import slow_but

import spectr_jax
from spectr_jax import SamplingParams, TokenTree
from spectr_jax.kernels import dispatch, on_demand
from spectr_jax.methods import METHODS
from spectr_jax.models.causal_lm import causal_lm, lm1b_config
from spectr_jax.models.transformer import init_params

_CONFIG = lm1b_config(vocab_size=300, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, context_length=64)
_TREE = {1: TokenTree.chains(1, 3), 3: TokenTree.chains(3, 3)}


@pytest.fixture(autouse=True)
def vocabulary_is_large(monkeypatch):
  """So that positions are worked on in groups, and drawn from blocks."""
  monkeypatch.setattr(on_demand, '_MANY', 100)


@pytest.fixture(scope='module')
def models():
  def make(seed, num_layers):
    config = dataclasses.replace(_CONFIG, num_layers=num_layers)
    return causal_lm(init_params(jax.random.key(seed), config), config)

  return make(0, 2), make(1, 1)


@pytest.mark.parametrize('method', slow_but(('race_traversal',), METHODS))
def test_tokens_are_the_same(models, method, monkeypatch):
  """Of greedy rows and of others, with an end of the text among them, and of rows with filters and without."""

  def decode():
    jax.clear_caches()
    result = spectr_jax.generate(
      jax.random.key(3), *models, np.arange(1, 13).reshape(4, 3), np.array([3, 2, 3, 1]), method=method,
      tree=_TREE[3 if METHODS[method].max_drafts is None else 1], max_new_tokens=12, eos_id=7,
      sampling=SamplingParams(np.array([1.0, 0.0, 0.7, 1.0]), top_p=np.array([1.0, 1.0, 0.9, 0.5])),
    )  # fmt: skip
    return jax.device_get((result.tokens, result.lengths, result.num_target_calls))

  expected = decode()
  monkeypatch.setattr(dispatch, 'default_platform', lambda: 'gpu')
  jax.tree.map(np.testing.assert_array_equal, decode(), expected)
