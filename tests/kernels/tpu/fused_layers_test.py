"""The kernel of all layers, run operation by operation, beside the transformer's own calls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from spectr_jax.kernels import dispatch
from spectr_jax.kernels.dispatch import round_on_one_device, tracing_for
from spectr_jax.kernels.int8 import quantized
from spectr_jax.kernels.tpu import fused_layers
from spectr_jax.models.causal_lm import causal_lm, config_of, lm1b_config
from spectr_jax.models.transformer import init_params
from spectr_jax.tree import TokenTree


@pytest.fixture
def calls(monkeypatch):
  shapes, apply_layers = [], fused_layers.apply_layers

  def counted(*args, **kwargs):
    shapes.append(args[1].shape)
    return apply_layers(*args, **kwargs)

  monkeypatch.setattr(fused_layers, 'apply_layers', counted)
  return shapes


def _model(dtype='float32', seed=0, **sizes):
  sizes = dict(vocab_size=64, embed_dim=24, num_layers=3, num_heads=2, mlp_dim=40, context_length=64) | sizes
  config = lm1b_config(**sizes, dtype=dtype)
  return causal_lm(init_params(jax.random.key(seed), config), config)


@jax.jit
def _round(model, cache, lengths):
  """Logits of a round's two calls, on a chain of two tokens and on four of its children, and the cache thereafter."""
  batch_size = len(lengths)
  chain = jax.random.randint(jax.random.key(2), (batch_size, 2), 0, model.vocab_size)
  leaves = jax.random.randint(jax.random.key(3), (batch_size, 4), 0, model.vocab_size)
  causal = jnp.pad(jnp.tril(jnp.ones((2, 2), bool)), ((0, 0), (0, 4)))
  mask = jnp.concatenate([jnp.ones((4, 2), bool), jnp.eye(4, dtype=bool)], axis=1)
  first = model.apply(chain, lengths[:, None] + jnp.arange(2), causal, cache)
  second = model.apply(leaves, jnp.broadcast_to(lengths[:, None] + 2, leaves.shape), mask, first.cache)
  path = jnp.array([[0, 1, 3], [0, 1, 5], [0, 1, 2]])
  return first.logits, second.logits, model.commit_fn(second.cache, path, jnp.array([3, 2, 0]))


def _both_rounds(model, cache, lengths):
  """A round's outcome by the plain form and by the kernel."""
  plain = _round(model, cache, lengths)
  with tracing_for('tpu'), round_on_one_device():
    return plain, _round(model, cache, lengths)


@pytest.mark.slow
# In float32 sums are added up in another order; in bfloat16 each of them may round to a neighbor, eight bits apart.
@pytest.mark.parametrize(('dtype', 'atol'), [('float32', 1e-5), ('bfloat16', 0.06)])
def test_a_round_equals_that_of_the_plain_form(calls, dtype, atol):
  model = _model(dtype)
  prompts, lengths = jax.random.randint(jax.random.key(1), (3, 10), 0, 64), jnp.array([10, 4, 0])
  cache, _ = model.prefill(prompts, lengths, model.init_cache_fn(3, 32))
  plain, fused = _both_rounds(model, cache, lengths)
  assert calls == [(3, 2, 24), (3, 4, 24)]
  for one, other in zip(plain[:2], fused[:2]):
    assert jnp.abs(one).max() > 1
    np.testing.assert_allclose(one, other, atol=atol)
  for one, other in zip(jax.tree.leaves(plain[2]), jax.tree.leaves(fused[2])):
    np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), atol=atol)
  assert plain[2].lengths.tolist() == fused[2].lengths.tolist() == [13, 6, 0]


@pytest.mark.slow
def test_a_full_cache_drops_the_same_tokens(calls):
  model = _model()
  prompts, lengths = jax.random.randint(jax.random.key(1), (3, 10), 0, 64), jnp.array([10, 9, 5])
  cache, _ = model.prefill(prompts, lengths, model.init_cache_fn(3, 11))
  plain, fused = (found[2] for found in _both_rounds(model, cache, lengths))
  assert plain.lengths.tolist() == fused.lengths.tolist() == [11, 11, 5]
  for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(fused)):
    np.testing.assert_allclose(one, other, atol=1e-5)


def _generate(draft, tree):
  target = _model(seed=1, embed_dim=32)
  prompts, lengths = jax.random.randint(jax.random.key(1), (2, 6), 0, 64), jnp.array([6, 1])
  return spectr_jax.generate(
    jax.random.key(5), target, draft, prompts, lengths, method='race_traversal', tree=tree, max_new_tokens=12
  )


@pytest.mark.slow
@pytest.mark.parametrize('tree', [TokenTree.chains(3, 3), TokenTree.prefix((2, 1, 2))])
def test_a_draft_on_one_tpu_guesses_the_same_tokens(calls, monkeypatch, tree):
  expected = _generate(_model(), tree)
  assert not calls
  monkeypatch.setattr(dispatch, 'default_platform', lambda: 'tpu')
  # Another static field, so that the loop is traced anew.
  found = _generate(dataclasses.replace(_model(), context_length=63), tree)
  assert calls
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  np.testing.assert_array_equal(found.num_target_calls, expected.num_target_calls)


@pytest.mark.slow
def test_what_does_not_fit_is_computed_by_the_plain_form(calls):
  config = config_of(_model())
  assert fused_layers.fits(config, 3, 6, 32)
  assert not fused_layers.fits(config, 17, 6, 32)
  assert not fused_layers.fits(config, 3, 6, 2**20)
  model = _model()
  model = causal_lm(quantized(model.params), dataclasses.replace(config, weights='int8'))
  lengths = jnp.zeros(3, jnp.int32)
  plain, same = _both_rounds(model, model.init_cache_fn(3, 32), lengths)
  # The forms of other operations, such as products in int8, differ between platforms in the last bits.
  np.testing.assert_allclose(plain[1], same[1], rtol=0, atol=1e-5)
  assert not calls
