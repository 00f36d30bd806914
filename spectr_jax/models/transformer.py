"""The training of a `causal_lm`, with dropout and recomputed blocks; the only module that imports Flax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spectr_jax.kernels.attention import attend_causally
from spectr_jax.model import in_cache_layout
from spectr_jax.models import causal_lm, layers
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.param_shapes import param_shapes


def _draw(key, name: str, shapes: Any, config: CausalLMConfig) -> Any:
  """Fresh parameters of a name in `param_shapes`, in float32: logits have unit variance."""
  leaves, structure = jax.tree_util.tree_flatten_with_path({name: shapes})

  def draw(key, path, shape):
    *_, module, leaf = ['', *(part.key for part in path)]
    if leaf in ('gain', 'bias'):
      return jnp.full(shape.shape, 1.0 - config.gain_offset if leaf == 'gain' else 0.0)
    num_in = shape.shape[1] if leaf == 'embedding' else shape.shape[-2]
    scale = 1.0 / (2 * config.num_layers) if module in ('out', 'down') else 1.0  # of what blocks add
    return jax.random.normal(key, shape.shape) * (scale / num_in) ** 0.5

  keys = jax.random.split(key, len(leaves))
  return jax.tree.unflatten(structure, [draw(key, *leaf) for key, leaf in zip(keys, leaves, strict=True)])[name]


class Transformer(nn.Module):
  """Maps tokens and positions `[B, N]` to float32 logits `[B, N, V]` and the inputs `[B, N, D]` of the output head.

  `mask` is what `attend_fn` takes, by itself bool `[1 or B, N, N]`, the tokens that each token attends to.
  """

  config: CausalLMConfig
  remat: bool = False  # whether a gradient recomputes the activations inside blocks instead of keeping them
  constrain_fn: Callable[[jax.Array], jax.Array] = lambda x: x  # constrains activations to their sharding
  dropout: float = 0.0  # of entries of what a block adds; needs the rng `dropout` unless 0
  attend_fn: Callable[..., jax.Array] = attend_causally  # of queries, keys, values and mask
  arrange_fn: Callable[[jax.Array], jax.Array] = lambda x: x  # arranges each `[B, N, H, head_dim]` of them in memory

  @nn.compact
  def __call__(self, tokens, positions, mask):
    config, rate = self.config, self.dropout
    params = {name: self.param(name, _draw, name, shapes, config) for name, shapes in param_shapes(config).items()}
    key = self.make_rng('dropout') if rate else None

    def mix(config, layer, query, key, value, visible, cache):
      del config, layer, cache
      query, key, value = map(self.arrange_fn, (query, key, value))
      keys, values = in_cache_layout(key, value)
      return self.attend_fn(query, keys, values, visible[0]), keys, values

    def block(params: Mapping[str, Any], config, layer, x, rotation, visible, cache, **more):
      def drop(part, out):
        if key is None:
          return out
        is_kept = jax.random.bernoulli(jax.random.fold_in(key, 2 * layer + (part == 'mlp')), 1 - rate, out.shape)
        return jnp.where(is_kept, out / (1 - rate), 0)

      def run(params, x):
        return causal_lm.block(params, config, layer, x, rotation, visible, cache, mix_fn=mix, drop_fn=drop, **more)

      return (jax.checkpoint(run) if self.remat else run)(params, x)

    mask = mask[None] if mask.ndim == 2 else mask
    streams, _ = causal_lm.streams_of(
      params, config, tokens, positions, mask, block_fn=block, constrain_fn=self.constrain_fn
    )
    return self.constrain_fn(layers.unembed(params, streams[-1])), streams[-1]


@functools.partial(jax.jit, static_argnames='config')
def init_params(key: jax.Array, config: CausalLMConfig) -> Any:
  """Parameters to train, a nested dict of float32 for a typed key: every block adds little to the embedding."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  return Transformer(config).init(key, tokens, tokens, jnp.ones((1, 1), bool))['params']
