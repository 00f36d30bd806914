"""Probabilities from logits, and draws from them.

Temperature, top-k, top-p and min-p turn logits into the distribution that a token is drawn from. Draft and target use
the same function. A search over the bits of a float finds the thresholds. So nothing is sorted, all ties are kept, and
the result does not depend on the order of the vocabulary. Draws invert a two-level cumulative sum, which needs one
uniform and no noise of the size of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from spectr_jax.kernels.blocks import argmin
from spectr_jax.kernels.draws import draw_several
from spectr_jax.kernels.filters import FILTERS_BY_NAME, filtered
from spectr_jax.kernels.softmax import softmax
from spectr_jax.sharding import fetch

# The parameters that may be None, with the values that change nothing.
COUNTED = {'presence_penalty': 0.0, 'frequency_penalty': 0.0, 'repetition_penalty': 1.0}
_NEUTRAL: dict[str, Any] = {
  **{name: each.keeps_all for name, each in FILTERS_BY_NAME.items()},
  **COUNTED,
  **{'logit_bias': 0.0, 'min_tokens': 0, 'ignore_eos': False},
}
_HIGHEST = 1e6  # of a bias or a penalty, which float32 adds to other logits and keeps finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """Parameters that turn logits into a distribution: for all rows as scalars, or per row as arrays `[B]`.

  `generate` and its relatives take either; in programs they are arrays, see `for_rows`. A filter that is None is not in
  the program at all. One that is there is compiled, several searches in each of the draft and the target. It costs
  nothing else where no row uses it, but on a GPU, which would wait for the host to know.

  The other parameters that may be None change the logits before temperature, by the text so far (`Penalties`), or say
  when a row may end. They are those of vLLM: first `logit_bias` and `min_tokens`, then the repetition, the frequency
  and the presence penalty. A row's text so far has, inside of a tree of guesses, the tokens of the path.
  Words that must not come are constraints (`compile_constraint`).

  Attributes:
    temperature: float, scalar or `[B]`; 0 is the point mass at the first largest logit.
    top_k: int, scalar or `[B]`; keeps the k most probable tokens, 0 keeps all. None keeps all.
    top_p: float in (0, 1], scalar or `[B]`; keeps the fewest most probable tokens that have at least this mass, after
      top-k. None keeps all.
    min_p: float in [0, 1], scalar or `[B]`; keeps the tokens at least this many times as probable as the most probable
      one, after top-p; 0 keeps all. None keeps all.
    presence_penalty: float, scalar or `[B]`; subtracted from the logit of every token that is among the new ones.
    frequency_penalty: float, scalar or `[B]`; subtracted as often as the token is among the new ones.
    repetition_penalty: float above 0, scalar or `[B]`; of tokens in the prompt or among the new ones, logits above 0
      are divided by it and others multiplied (Keskar et al. 2019).
    logit_bias: What is added to logits: a mapping from ids to floats for all rows, or B of them, None for none. In
      programs float32 `[B, V]`.
    min_tokens: int, scalar or `[B]`; an id that ends rows does not come before so many new tokens, unless a constraint
      allows nothing else. Stop texts end rows at any time.
    ignore_eos: bool, scalar or `[B]`; ids that end rows do not end these. Not for rows with a constraint.
  """

  temperature: Any = 1.0
  top_k: Any = None
  top_p: Any = None
  min_p: Any = None
  presence_penalty: Any = None
  frequency_penalty: Any = None
  repetition_penalty: Any = None
  logit_bias: Any = None
  min_tokens: Any = None
  ignore_eos: Any = None

  @classmethod
  def make(cls, batch_size: int, **values: ArrayLike) -> SamplingParams:
    """`SamplingParams(**values).for_rows(batch_size)`."""
    return cls(**values).for_rows(batch_size)

  def for_rows(self, batch_size: int, vocab_size: int | None = None) -> SamplingParams:
    """The parameters of B rows, checked: scalars and arrays `[B]` become arrays `[B]`, in float32, int32 and bool.

    One whose values are known to change nothing for any row is None; of the three penalties, all or none are.
    ValueError for values out of range or of another shape. `logit_bias` needs `vocab_size`, V.
    """
    values: dict[str, Any] = {'logit_bias': _bias_rows(self.logit_bias, batch_size, vocab_size)}
    for name, dtype, is_valid, allowed in (
      ('temperature', jnp.float32, lambda x: np.isfinite(x) & (x >= 0), 'finite and at least 0'),
      ('top_k', jnp.int32, lambda x: x >= 0, 'at least 0 (0 keeps all)'),
      ('top_p', jnp.float32, lambda x: (x > 0) & (x <= 1), 'above 0 and at most 1'),
      ('min_p', jnp.float32, lambda x: (x >= 0) & (x <= 1), 'from 0 to 1 (0 keeps all)'),
      ('presence_penalty', jnp.float32, lambda x: abs(x) <= _HIGHEST, 'from -1e6 to 1e6'),
      ('frequency_penalty', jnp.float32, lambda x: abs(x) <= _HIGHEST, 'from -1e6 to 1e6'),
      ('repetition_penalty', jnp.float32, lambda x: (x >= 1 / _HIGHEST) & (x <= _HIGHEST), 'from 1e-6 to 1e6'),
      ('min_tokens', jnp.int32, lambda x: x >= 0, 'at least 0'),
      ('ignore_eos', jnp.bool_, lambda x: x | ~x, 'true or false'),
    ):
      value = getattr(self, name)
      if value is None and name in _NEUTRAL:
        continue
      is_known = not isinstance(value, Tracer)
      try:
        array = np.asarray(fetch(value), dtype) if is_known else value.astype(dtype)
      except OverflowError as error:
        raise ValueError(f'{name} must be {allowed} and below 2**31, got {value}') from error
      if array.shape not in ((), (batch_size,)):
        raise ValueError(f'{name} must be a scalar or [{batch_size}], got shape {array.shape}')
      if is_known and not is_valid(array).all():
        raise ValueError(f'{name} must be {allowed}, got {value}')
      is_used = not is_known or name not in _NEUTRAL or (array != _NEUTRAL[name]).any()
      broadcast_to = np.broadcast_to if is_known else jnp.broadcast_to
      values[name] = broadcast_to(array, (batch_size,)) if is_used else None
    if any(values.get(name) is not None for name in COUNTED):
      for name, neutral in COUNTED.items():
        values[name] = np.full(batch_size, neutral, np.float32) if values.get(name) is None else values[name]
    return SamplingParams(**values)

  @classmethod
  def of_rows(cls, rows: Sequence[SamplingParams]) -> SamplingParams:
    """The parameters of B rows, as arrays `[B]`, from those of each, which are scalars. They are not checked."""
    values: dict[str, Any] = {'temperature': np.array([row.temperature for row in rows])}
    for name, neutral in _NEUTRAL.items():
      own = [getattr(row, name) for row in rows]
      if any(value is not None for value in own):
        is_bias = name == 'logit_bias'
        values[name] = own if is_bias else np.array([neutral if value is None else value for value in own])
    return cls(**values)

  def with_filters_of(self, other: SamplingParams) -> SamplingParams:
    """These parameters with every one that `other` has and these have not, so that rows of both stand in one batch."""
    full, rows = np.full if isinstance(self.temperature, np.ndarray) else jnp.full, self.temperature.shape
    missing = {
      name: full((*rows, *own.shape[1:]), neutral, own.dtype)
      for name, neutral in _NEUTRAL.items()
      if getattr(self, name) is None and (own := getattr(other, name)) is not None
    }
    return dataclasses.replace(self, **missing)

  @property
  def counts_tokens(self) -> bool:
    """Whether the rows' parameters read which tokens a text has."""
    return any(getattr(self, name) is not None for name in COUNTED)


def _bias_rows(bias: Any, batch_size: int, vocab_size: int | None) -> Any:
  """`SamplingParams.logit_bias` as float32 `[B, V]`, or None where it adds nothing."""
  if isinstance(bias, jax.Array | np.ndarray):  # of rows already
    if bias.shape != (batch_size, vocab_size or bias.shape[-1]):
      raise ValueError(f'logit_bias must be a mapping, or [{batch_size}, {vocab_size}], got shape {bias.shape}')
    return bias
  if bias is None:
    return None
  rows = list(bias) if isinstance(bias, list | tuple) else [bias] * batch_size
  if len(rows) != batch_size or not all(row is None or isinstance(row, Mapping) for row in rows):
    raise ValueError(f'logit_bias must map ids to numbers, or be {batch_size} such mappings or None, got {bias!r:.200}')
  if not any(rows):
    return None
  if vocab_size is None:
    raise ValueError('logit_bias is for decoding, where the size of the vocabulary is known')
  values = np.zeros((batch_size, vocab_size), np.float32)
  for own, row in zip(values, rows):
    for token, value in (row or {}).items():
      if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
        raise ValueError(f'logit_bias must name ids from 0 to {vocab_size - 1}, got {token!r:.50}')
      if not isinstance(value, int | float | np.number) or not abs(value) <= _HIGHEST:
        raise ValueError(f'logit_bias must add numbers from -1e6 to 1e6, got {value!r:.50} for {token}')
      own[token] = value
  return values


SAMPLING_NAMES = tuple(field.name for field in dataclasses.fields(SamplingParams))


def logits_to_probs(logits: jax.Array, sampling: SamplingParams) -> jax.Array:
  """Computes the distributions that tokens are drawn from, for draft and target alike.

  Temperature comes first, then top-k, then top-p of the remaining tokens, then min-p, as in Hugging Face Transformers.
  Only the order of top-p and its neighbors matters: top-k and min-p keep the same tokens in either order. What depends
  on the text comes before (`Penalties`).

  Args:
    logits: `[B, N, V]`; -inf for tokens that must not occur.
    sampling: Parameters of the B rows.

  Returns:
    Probabilities `[B, N, V]` in the logits' dtype, or in float32 if that is narrower, since sums and draws of fewer
    bits are biased; NaN throughout where the largest logit is not finite.
  """
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  temperature = sampling.temperature[:, None]
  is_greedy = temperature == 0
  scale = jnp.where(is_greedy, 1, jnp.maximum(temperature, 1e-30)).astype(logits.dtype)  # 1/scale must be finite
  probs = softmax(logits, scale, is_greedy)
  return filtered(probs, {name: getattr(sampling, name) for name in FILTERS_BY_NAME})


def draw(uniform: jax.Array, weights: jax.Array) -> jax.Array:
  """Draws a token with probability proportional to its weight, by inversion of the cumulative sum.

  `uniform` is a scalar in [0, 1); `weights` `[V]` are not negative, with any positive sum. The token, int32, is never
  one of weight 0.
  """
  return draw_several(uniform[None], weights)[0]


def _exponentials(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
  """Independent Exp(1) variables that are accurate where they are small, since the smallest wins a race.

  In float32 `jax.random.exponential` is 0 once in 2^23 draws, and a token with 0 wins whatever its probability. Here
  the smallest value is 2^-33. So with V tokens less than V / 2^33 of the mass is displaced.
  """
  num_bits = 8 * jnp.dtype(dtype).itemsize
  bits = jax.random.bits(key, shape, jnp.uint32 if num_bits == 32 else jnp.uint64)
  uniforms = (bits.astype(dtype) + 0.5) * jnp.asarray(2.0**-num_bits, dtype)
  return -jnp.log1p(-jnp.minimum(uniforms, 1 - jnp.finfo(dtype).epsneg))


def arrivals(key: jax.Array, probs: jax.Array) -> jax.Array:
  """Arrival times of an exponential race: E_x / p(x) with independent E_x ~ Exp(1) that depend on the key alone.

  They are `[V]`, inf where the probability is 0. The first token to arrive has the distribution `probs` `[V]`. This is
  Gumbel-max sampling: -log E is a Gumbel variable.
  """
  exponentials = _exponentials(key, probs.shape, probs.dtype)
  is_possible = probs > 0
  return jnp.where(is_possible, exponentials / jnp.where(is_possible, probs, 1), jnp.inf)


def first_arrival(times: jax.Array) -> jax.Array:
  """The token that arrives first, int32 scalar; of equal times `[V]` the one with the lowest index."""
  return argmin(times)


def positive_part(weights: jax.Array) -> jax.Array:
  """`[weights]+`, of any shape.

  A `where` and not a `maximum`: XLA on CPU hands a sum over a maximum to a matrix library, and copies its input.
  """
  return jnp.where(weights > 0, weights, 0)


def positive_part_or(weights: jax.Array, fallback: jax.Array) -> jax.Array:
  """`[weights]+`, or `fallback` if rounding or equal distributions leave no mass. Both are `[V]`, not normalized."""
  positive = positive_part(weights)
  return jnp.where(jnp.sum(positive) > 0, positive, fallback)
