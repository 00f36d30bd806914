"""Heads with random parameters for the tiny transformers of `spectr_jax.testing`; and a target of three layers."""

import functools

import jax
import jax.numpy as jnp

from spectr_jax.draft import head_drafter, medusa_drafter, one_pass_drafter
from spectr_jax.draft.medusa_drafter import MedusaConfig, param_shapes
from spectr_jax.models import causal_lm, head, one_pass
from spectr_jax.models.one_pass_config import Markov, OnePassConfig

V, D = 23, 8
TARGET = causal_lm.CausalLMConfig(V, D, 3, 2, 1, 4, 12, 64, rope=causal_lm.Rope((1.0, 0.1)), is_tied=True)


@functools.cache
def three_layers():
  """A target with random parameters."""

  @jax.jit
  def params():
    return jax.tree.map(lambda x: 2 * x, causal_lm.init_params(jax.random.key(0), TARGET))

  return causal_lm.causal_lm(params(), TARGET)


@functools.partial(jax.jit, static_argnames='layers')
def all_features(target, tokens, *, layers):
  """The target's hidden states `[S, F, D]` of a whole text at once; what is causal does not see padding."""
  model, size = target.with_features(layers), len(tokens)
  causal = jnp.tril(jnp.ones((size, size), bool))
  return model.apply(tokens[None], jnp.arange(size)[None], causal, model.init_cache_fn(1, size)).features[0]


def padded(tokens, size=40):
  """Tokens of one size, so that one program serves all."""
  return jnp.zeros(size, jnp.int32).at[: len(tokens)].set(jnp.array(tokens))


def tiny_head(vocab_size=5, width=16, feature_layers=(0, -1), seed=4, *, num_layers=1, mask_id=None):
  """A head that guesses all tokens but the first, and reads two layers; with `mask_id` in one pass."""
  block = causal_lm.CausalLMConfig(vocab_size - 1, 8, num_layers, 2, 1, 4, 12, 64, rope=causal_lm.Rope((1.0, 0.1)))
  config = head.HeadConfig(block, width, width, feature_layers, mask_id=mask_id)
  params = head.init_params(jax.random.key(seed), config)
  params['target_ids'] = jnp.arange(1, vocab_size, dtype=jnp.int32)
  params['unembedding'] *= 2
  return head_drafter(params, config, vocab_size)


def tiny_medusa(vocab_size=5, width=16, num_heads=3, seed=5):
  """Medusa heads."""
  config = MedusaConfig(num_heads, width, vocab_size)
  shapes, structure = jax.tree.flatten(param_shapes(config))
  keys = jax.random.split(jax.random.key(seed), len(shapes))
  return medusa_drafter(
    structure.unflatten(0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, shapes)), config
  )


def tiny_one_pass(vocab_size=5, width=16, num_slots=3, seed=6, scale=2.0, **options):
  """A network of two layers that guesses in one pass, with a Markov chain and an estimate of acceptance."""
  backbone = causal_lm.CausalLMConfig(vocab_size, 8, 2, 2, 1, 4, 12, 64, rope=causal_lm.Rope((1.0, 0.1)))
  options = {
    'guesses_at_root': True, 'markov': Markov(4, vocab_size), 'confidence': 'markov',
    'num_embedded': vocab_size,
  } | options  # fmt: skip
  config = OnePassConfig(backbone, width, (0, -1), num_slots, 1, **options)
  params = head.random_params(jax.random.key(seed), one_pass.param_shapes(config))
  params['unembedding'] *= scale
  if config.markov is not None:
    params['markov'] |= {name: scale * params['markov'][name] for name in ('embedding', 'unembedding')}
  return one_pass_drafter(params, config, vocab_size)
