"""Gemma 4's assistants: networks without keys and values, which draft from those of their target.

An assistant reads a token as the target embeds it, beside a hidden state of the target's width: for the root that of
the token before it, and for a guess its own output at the node above. Its layers have queries alone. They read the
committed keys and values of the target's last layer of their kind that has some, from the position of the last
committed token, whatever the depth of a guess: so its guesses leave nothing behind.

With centroids a product chooses clusters of tokens, and only their tokens are scored. In Transformers 5.19 all others
have a logit below the least of the batch; here they have none, so that a row does not depend on others.

Source: `gemma4_assistant` of Transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.kernels.products import accumulation_dtype
from spectr_jax.model import KVCache
from spectr_jax.models import causal_lm, layers
from spectr_jax.models.causal_lm_config import CausalLMConfig, check_sizes
from spectr_jax.models.param_shapes import param_shapes as decoder_shapes


@dataclasses.dataclass(frozen=True)
class AssistantConfig:
  """The sizes of an assistant.

  Attributes:
    block: Sizes of its layers, of which attention begins with queries alone.
    target_dim: D, the width of the target's embedded tokens and hidden states.
    kv_layers: For each layer, the layer of the target whose keys and values it reads.
    num_centroids: Clusters of tokens, all of one size; 0 for none, and all tokens are scored.
    num_chosen: Clusters whose tokens are scored.

  Raises:
    ValueError: Sizes do not fit each other.
  """

  block: CausalLMConfig
  target_dim: int
  kv_layers: tuple[int, ...]
  num_centroids: int = 0
  num_chosen: int = 0

  def __post_init__(self):
    check_sizes(self, 'target_dim')
    if self.block.projections != 'q' or len(self.kv_layers) != self.block.num_layers:
      raise ValueError('an assistant has layers of queries alone, and reads a layer of the target in each')
    if self.num_centroids:
      check_sizes(self, 'num_centroids', 'num_chosen')
      if self.block.vocab_size % self.num_centroids or self.num_chosen > self.num_centroids:
        raise ValueError(
          f'{self.block.vocab_size} tokens in {self.num_centroids} clusters, of which {self.num_chosen} are chosen, do'
          ' not fit'
        )


def param_shapes(config: AssistantConfig) -> dict[str, Any]:
  """The shapes of all parameters; the tokens of a cluster are neighbors in `token_ids`."""
  block = config.block

  def kernel(num_in, num_out):
    return {'kernel': jax.ShapeDtypeStruct((num_in, num_out), block.dtype)}

  shapes = {name: leaf for name, leaf in decoder_shapes(block).items() if name != 'unembedding'}
  shapes |= {'before': kernel(2 * config.target_dim, block.embed_dim)}
  shapes |= {'after': kernel(block.embed_dim, config.target_dim)}
  if config.num_centroids:
    shapes['centroids'] = kernel(block.embed_dim, config.num_centroids)
    shapes['token_ids'] = jax.ShapeDtypeStruct((block.vocab_size,), jnp.int32)
  return shapes


def logits(params: Mapping[str, Any], config: AssistantConfig, features: jax.Array) -> jax.Array:
  """Logits `[B, N, V]` in float32 or wider of `features` `[B, N, embed_dim]`; -inf outside of the chosen clusters."""
  if not config.num_centroids:
    return layers.unembed(params, features)
  _, chosen = jax.lax.top_k(causal_lm.linear(params['centroids'], features), config.num_chosen)
  ids = params['token_ids'].reshape(config.num_centroids, -1)[chosen].reshape(*features.shape[:2], -1)
  rows = layers.take_rows(params['embedding'], ids)
  wide = accumulation_dtype(features.dtype)
  own = jnp.einsum('bnd,bnkd->bnk', features, rows.astype(features.dtype), preferred_element_type=wide)
  nothing = jnp.full((*features.shape[:2], config.block.vocab_size), -jnp.inf, wide)
  return jnp.put_along_axis(nothing, ids, own, axis=-1, inplace=False)


def apply(
  params: Mapping[str, Any],
  config: AssistantConfig,
  embedded: jax.Array,
  hidden: jax.Array,
  target_kv: tuple[tuple[jax.Array, jax.Array], ...],
  lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The hidden states `[B, N, D]` after nodes, for the nodes below, and what `logits` reads.

  Args:
    params, config: Of the assistant.
    embedded: `[B, N, D]`, the nodes' tokens, embedded by the target.
    hidden: `[B, N, D]`, the hidden state above each.
    target_kv: For each layer, keys and values as of `KVCache`, of committed tokens but the last.
    lengths: int32 `[B]`, the number of committed tokens.
  """
  num_kept, size = lengths - 1, target_kv[0][0].shape[-1]
  # The last one that is kept stands for pending tokens, of which every query must see one. Without any it is 0.
  last = jnp.maximum(num_kept - 1, 0)[:, None, None, None]
  is_any = (num_kept > 0)[:, None, None, None]
  keys, values = zip(*target_kv, strict=True)
  cache = KVCache(keys, values, num_kept, (), (), jnp.zeros((), jnp.int32))
  ends = [
    (
      jnp.where(is_any, jnp.take_along_axis(keys, last, 3), 0),
      jnp.where(is_any, jnp.take_along_axis(values, last, 2), 0),
    )
    for keys, values in target_kv
  ]
  x = causal_lm.linear(params['before'], jnp.concatenate([embedded, hidden], axis=-1).astype(config.block.dtype))
  positions = jnp.broadcast_to(num_kept[:, None], x.shape[:2])
  slots = jnp.arange(size)
  for layer in range(config.block.num_layers):
    own, window = config.block.of_layer(layer), config.block.window(layer)
    # As in Transformers a window counts back from the last kept token, itself not included.
    seen = slots < (num_kept - 1)[:, None]
    if window is not None:
      seen &= (num_kept - 1)[:, None] - slots <= window
    visible = jnp.ones((1, x.shape[1], 1), bool), seen[:, None], positions - 1
    rotation = causal_lm.rotation_of(own.rope, positions)
    x, _, _ = causal_lm.block(params[f'layer_{layer}'], own, layer, x, rotation, visible, cache, shared=ends[layer])
  features = causal_lm.norm(params['final_norm'], x, config.block)
  return causal_lm.linear(params['after'], features), features
