"""An example of a user's model: a network with a cache of its own, which is not one of keys and values.

A text is a sum of embeddings that fade, h = sum of decay^age e(token), and the next token's logits are the products of
h with all embeddings. The cache holds h after the committed text, and the tokens that are pending since then.

`python -m examples.fading_model` compares it with a plain forward of the text, without a cache: at temperature 0 every
lossless method must give that one's text.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax import Model, ModelOutput, SamplingParams, TokenTree, generate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FadingCache:
  """`hidden` `[B, D]` after the committed text, its `lengths` `[B]`, and the M tokens pending since then."""

  hidden: jax.Array
  lengths: jax.Array
  num_pending: jax.Array
  embedded: Any = None  # [B, M, D]
  positions: Any = None  # [B, M]


def embed_fading(params, tokens):
  """Embeddings of tokens, `[B, N, D]`."""
  return params['embed'][tokens]


def unembed_fading(params, hidden):
  """Logits `[..., V]`."""
  return jnp.einsum('...d,vd->...v', hidden, params['embed'], precision=jax.lax.Precision.HIGHEST)


def apply_fading(params, tokens, positions, mask, cache, *, decay, layers=()):
  """Logits of tokens that stand after the committed text, and the cache with these tokens pending."""
  num_pending_slots = mask.shape[-1]
  embedded = embed_fading(params, tokens)
  pending, places = cache.embedded, cache.positions
  if pending is None:
    pending = jnp.zeros((len(tokens), num_pending_slots, embedded.shape[-1]))
    places = jnp.zeros((len(tokens), num_pending_slots), jnp.int32)
  pending = jax.lax.dynamic_update_slice(pending, embedded, (0, cache.num_pending, 0))
  places = jax.lax.dynamic_update_slice(places, positions.astype(jnp.int32), (0, cache.num_pending))
  ages = positions[:, :, None] - places[:, None]
  weights = jnp.where(mask, decay ** jnp.where(mask, ages, 0.0), 0)
  since = positions - (cache.lengths[:, None] - 1)
  hidden = decay ** since[..., None] * cache.hidden[:, None] + jnp.einsum('bnm,bmd->bnd', weights, pending)
  num_pending = cache.num_pending + tokens.shape[1]
  cache = dataclasses.replace(cache, num_pending=num_pending, embedded=pending, positions=places)
  features = jnp.stack([(embedded, hidden)[layer] for layer in layers], axis=2) if layers else None
  return ModelOutput(unembed_fading(params, hidden), cache, features)


def init_fading(batch_size, cache_size, *, width):
  """The cache of empty texts."""
  zero = jnp.zeros((), jnp.int32)
  return FadingCache(jnp.zeros((batch_size, width)), jnp.zeros(batch_size, jnp.int32), zero)


def commit_fading(cache, path, num_committed, *, decay):
  """The cache after the pending tokens `path[b, :num_committed[b]]` of each row; the others are dropped."""
  kept = jnp.take_along_axis(cache.embedded, path[:, :, None], axis=1)
  ages = num_committed[:, None] - 1 - jnp.arange(path.shape[1])
  weights = jnp.where(ages >= 0, decay ** jnp.maximum(ages, 0.0), 0)
  hidden = decay ** num_committed[:, None] * cache.hidden + jnp.einsum('bm,bmd->bd', weights, kept)
  return FadingCache(hidden, cache.lengths + num_committed, jnp.zeros((), jnp.int32))


# The same function objects for the same sizes: others would be compiled again.


@functools.cache
def apply_fn_of(decay, layers):
  """The `apply_fn` that also returns the features of some layers."""
  return functools.partial(apply_fading, decay=decay, layers=layers)


@functools.cache
def fading_functions(width, decay):
  """The static functions of the model."""
  return {
    'apply_fn': apply_fn_of(decay, ()),
    'init_cache_fn': functools.partial(init_fading, width=width),
    'commit_fn': functools.partial(commit_fading, decay=decay),
    'features_fn': functools.partial(apply_fn_of, decay),
    'embed_fn': embed_fading,
    'unembed_fn': unembed_fading,
  }


def fading_model(embed, decay=0.8):
  """A model of the embeddings `[V, D]`."""
  vocab_size, width = embed.shape
  return Model({'embed': embed}, vocab_size=vocab_size, **fading_functions(width, decay))


def main():
  """Compares a greedy text with one of a plain forward, and features with what they stand for."""
  embed = np.asarray(jax.random.normal(jax.random.key(1), (12, 16)))
  target = fading_model(jnp.asarray(embed))
  draft = fading_model(jnp.asarray(embed + 0.3 * np.asarray(jax.random.normal(jax.random.key(2), (12, 16)))))

  text = [3, 1, 4]
  for _ in range(10):
    ages = np.arange(len(text))[::-1]
    text.append(int(np.argmax(embed @ (0.8**ages @ embed[text]))))

  new = generate(
    jax.random.key(0), target, draft, np.array([text[:3]]), np.array([3]),
    method='specinfer', tree=TokenTree.prefix((2, 2, 1)), max_new_tokens=10, sampling=SamplingParams(temperature=0.0),
  )  # fmt: skip
  print('equal texts:', new.tokens[0].tolist() == text[3:])
  print('target calls for 10 tokens:', int(new.num_target_calls[0]))

  # The features at the last token of a text give the logits of the next one.
  cache, features = target.with_features((0, -1)).prefill(
    np.array([text]), np.array([len(text)]), target.init_cache_fn(1, len(text))
  )  # [B, P, 2, D]
  assert jnp.allclose(features[0, :, 0], embed[np.array(text)])
  assert jnp.allclose(features[0, -1, 1], cache.hidden[0], rtol=1e-4)
  assert jnp.argmax(target.unembed_fn(target.params, features[0, -2, 1])) == text[-1]


if __name__ == '__main__':
  main()
