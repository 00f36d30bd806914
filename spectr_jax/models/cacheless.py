"""Networks without a cache as a `Model`: their cache is the text, and every call runs them on whole texts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from spectr_jax.model import NO_LIMIT, Model, ModelOutput
from spectr_jax.sharding import fetch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextCache:
  """The committed text of each row, and the pending tokens after it."""

  tokens: jax.Array  # int32 [B, S]; from a row's length on they are valid ids that no result depends on
  lengths: jax.Array  # int32 [B], committed tokens
  pending: Any  # int32 [B, M], or () when nothing is pending
  num_pending: jax.Array  # int32 scalar, pending tokens already written

  def append(self, new: jax.Array, num_slots: int) -> TextCache:
    """The cache with a call's tokens `[B, N]` pending, of `num_slots` in the whole round."""
    pending = jnp.zeros((len(new), num_slots), jnp.int32) if isinstance(self.pending, tuple) else self.pending
    pending = jax.lax.dynamic_update_slice_in_dim(pending, new.astype(jnp.int32), self.num_pending, axis=1)
    return dataclasses.replace(self, pending=pending, num_pending=self.num_pending + new.shape[1])

  def commit(self, path: jax.Array, num_committed: jax.Array) -> TextCache:
    """As `KVCache.commit`."""
    places = jnp.arange(path.shape[1])
    size = self.tokens.shape[1]
    slots = jnp.where(places < num_committed[:, None], self.lengths[:, None] + places, size)
    return TextCache(
      tokens=_put(self.tokens, slots, jnp.take_along_axis(self.pending, path, axis=1)),
      lengths=jnp.minimum(self.lengths + num_committed, size),
      pending=(),
      num_pending=jnp.zeros((), jnp.int32),
    )

  def truncate(self, lengths: jax.Array) -> TextCache:
    """As `KVCache.truncate`."""
    return dataclasses.replace(self, lengths=lengths)


def _put(texts: jax.Array, places: jax.Array, tokens: jax.Array) -> jax.Array:
  """`texts` `[..., S]` with `tokens` `[..., D]` at `places` `[..., D]`; places from S on are dropped."""
  put = jnp.vectorize(lambda text, at, new: text.at[at].set(new, mode='drop'), signature='(s),(d),(d)->(s)')
  return put(texts, places, tokens)


def _fewest_texts(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The fewest paths that hold the path of every token, by a mask bool `[N, M]`, and where in them the tokens stand.

  A causal network gives the logits after every token of a text at once, so the path of a node comes with that of any
  node below it. Two chains of two after a root, whose rows are 1, 11, 101, 1101, 10101, take two paths of three. The
  results are int `[T, D]`, the pending tokens of each path, -1 after its end, and int `[N, 2]`, each token's path and
  place.
  """
  own = [tuple(np.flatnonzero(row).tolist()) for row in mask]
  paths, place_of = [], {}
  for path in sorted(own, key=len, reverse=True):
    if path not in place_of:
      place_of |= {path[: i + 1]: (len(paths), i) for i in range(len(path))}
      paths.append(path)
  depth = max(map(len, paths))
  return np.array([[*path, *[-1] * (depth - len(path))] for path in paths]), np.array([place_of[path] for path in own])


def _run(network: Callable[[jax.Array], jax.Array], texts: jax.Array, context_length: int | None) -> jax.Array:
  """The network's logits; `ValueError` for texts that are too long for it, unless it states how long they may be."""
  try:
    return network(texts)
  except (IndexError, TypeError, ValueError) as error:
    if context_length is not None:
      raise
    cause = (str(error).strip() or type(error).__name__).splitlines()[0]
    size = texts.shape[1]
    raise ValueError(f'apply_fn fails on texts of {size} tokens, padding included: {cause}; {NO_LIMIT}') from error


def _apply(params, tokens, positions, mask, cache, *, apply_fn, has_params, context_length):
  del positions  # a text's tokens stand at 0, 1, 2 and so on
  cache = cache.append(tokens, mask.shape[-1])
  batch_size, num_tokens = tokens.shape
  if isinstance(mask, Tracer) or mask.ndim == 3:
    # Every token's path as a text of its own.
    mask = jnp.broadcast_to(mask, (batch_size, *mask.shape[-2:]))
    places = jnp.cumsum(mask, axis=-1) - 1  # of each pending token in the path
    offsets = jnp.where(mask, places, mask.shape[-1] + cache.tokens.shape[1])  # those beside the path are dropped
    chosen = jnp.broadcast_to(cache.pending[:, None], mask.shape)
    text_of, place_of = jnp.arange(num_tokens), places[..., -1]
  else:
    paths, places_of = _fewest_texts(np.asarray(mask))
    offsets = np.where(paths >= 0, np.arange(paths.shape[1]), mask.shape[-1] + cache.tokens.shape[1])
    chosen, (text_of, place_of) = cache.pending[:, paths], places_of.T
  # The text and the longest path; nothing is kept of guesses beyond the longest text that the network takes.
  width = cache.tokens.shape[1] + offsets.shape[-1]
  width = width if context_length is None else min(width, context_length)
  texts = jnp.pad(cache.tokens, ((0, 0), (0, max(0, width - cache.tokens.shape[1]))))[:, :width]
  texts = jnp.broadcast_to(texts[:, None], (*chosen.shape[:2], width))
  texts = _put(texts, cache.lengths[:, None, None] + offsets, chosen)
  network = functools.partial(apply_fn, params) if has_params else apply_fn
  logits = _run(network, texts.reshape(-1, width), context_length)
  logits = logits.reshape(*texts.shape, -1)
  at = jnp.minimum(cache.lengths[:, None] + place_of, width - 1)
  return ModelOutput(logits[jnp.arange(batch_size)[:, None], text_of, at], cache)


def _init_cache(batch_size, cache_size):
  zeros = jnp.zeros((batch_size, cache_size), jnp.int32)
  return TextCache(zeros, zeros[:, 0], (), jnp.zeros((), jnp.int32))


@functools.lru_cache
def _apply_fn(apply_fn, has_params, context_length):
  """One object per network, so that equal models share compiled programs."""
  return functools.partial(_apply, apply_fn=apply_fn, has_params=has_params, context_length=context_length)


_COMPARED = 8  # tokens of the texts by which a network shows whether it is causal


def _check_causal(network: Callable[[jax.Array], jax.Array], vocab_size: int, context_length: int | None) -> None:
  """Compares the logits of a prefix that goes on in two ways, and of the prefix alone; ValueError if they differ, or
  for NaN.

  Texts of one length are computed alike and differ by no rounding; the prefix alone may.
  """
  size = _COMPARED if context_length is None else min(_COMPARED, context_length)
  half = size // 2
  if not half or vocab_size < 2:
    return
  rng = np.random.default_rng(0)
  text = rng.integers(vocab_size, size=(1, size), dtype=np.int32)
  other = (text + np.where(np.arange(size) < half, 0, rng.integers(1, vocab_size, size=size))) % vocab_size
  texts = text, other, text[:, :half]
  outputs = [_run(network, jnp.asarray(tokens, jnp.int32), context_length) for tokens in texts]
  if any(isinstance(logits, Tracer) for logits in outputs):
    return
  outputs = [np.asarray(fetch(logits), np.float64) for logits in outputs]
  if np.isnan(outputs[0]).any() and not np.isnan(outputs[2]).any():
    raise ValueError(f'apply_fn gives logits that are NaN for texts of {size} tokens; {NO_LIMIT}')
  one, *others = (logits[:, :half] for logits in outputs)
  values = one[np.isfinite(one)]
  spread = np.ptp(values) if values.size else 0
  for logits, rounding in zip(others, (1e-3, 1 / 16)):
    # What is finite nowhere is reported where it is sampled from.
    with np.errstate(invalid='ignore'):
      difference = np.where(np.isfinite(one) | np.isfinite(logits), np.abs(logits - one), 0)
    if not np.max(difference) <= rounding * spread:
      raise ValueError(
        f'apply_fn is not causal: the logits after the first {half} tokens of a text change by up to'
        f' {np.max(difference):.3g} with the tokens that follow; a network must not look ahead'
      )


def uncached(
  apply_fn: Callable[..., jax.Array], vocab_size: int, *, params: Any = None, context_length: int | None = None
) -> Model:
  """Makes a target or a draft of any causal network that has no cache.

  Every call runs the network on whole texts of `cache_size` tokens and the guesses. A round's call takes one text per
  row for each leaf of its tree: a chain of guesses costs as much as one step without a draft, K chains as much as K
  rows. A draft takes a text for each node that has children, and grown trees take one for each slot. Logits of all
  places are in memory, `[texts, tokens, vocab_size]`. A network with a cache of keys and values is faster; give it the
  functions of `Model`.

  The tokens are those of the same network with a cache, up to rounding, for all trees and ragged rows: a text is the
  row's own tokens from position 0 on, then a path of the tree, then ids that a causal network does not let them see.

  ```python
  graph, state = flax.nnx.split(network)
  target = uncached(lambda state, tokens: flax.nnx.merge(graph, state)(tokens), 50_257, params=state)
  ```

  Args:
    apply_fn: `(params, tokens[B, T]) -> logits[B, T, V]`, of tokens int32 from position 0 on; or `tokens -> logits` if
      there are no `params`. The logits at a place may depend on the tokens up to it only. Programs are compiled for the
      function: pass the same object each time.
    vocab_size: V.
    params: Any pytree of arrays, passed to programs as arguments; None for a function that has its own. Those become
      constants of every program, which is for small ones.
    context_length: The longest text that the network takes, such as the length of its table of positions, or None for
      any. Prompts whose continuations may be longer are refused.

  Raises:
    ValueError: The function does not give logits `[1, 2, V]` of floats for two tokens; or it is not causal: with
      parameters that are arrays it is run on three short texts to see whether logits depend on later tokens.
  """
  has_params = params is not None
  arguments = (params, jax.ShapeDtypeStruct((1, 2), jnp.int32))[not has_params :]
  given = jax.eval_shape(apply_fn, *arguments)
  shape = getattr(given, 'shape', None)
  if shape != (1, 2, vocab_size) or not jnp.issubdtype(given.dtype, jnp.floating):
    what = type(given).__name__ if shape is None else f'{given.dtype} {shape}'
    raise ValueError(f'apply_fn must give logits [1, 2, {vocab_size}] of floats for tokens [1, 2], got {what}')
  if not any(isinstance(leaf, jax.ShapeDtypeStruct | Tracer) for leaf in jax.tree.leaves(params)):
    compiled = jax.jit(apply_fn)
    network = functools.partial(compiled, params) if has_params else compiled
    _check_causal(network, vocab_size, context_length)
  return Model(
    params,
    apply_fn=_apply_fn(apply_fn, has_params, context_length),
    init_cache_fn=_init_cache,
    vocab_size=vocab_size,
    context_length=context_length,
  )
