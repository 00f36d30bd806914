"""Probabilities from logits, and draws from them.

Temperature, top-k, top-p and min-p turn logits into the distribution that a token is drawn from. Draft and target use
the same function. A search over the bits of a float finds the thresholds. So nothing is sorted, all ties are kept, and
the result does not depend on the order of the vocabulary. Draws invert a two-level cumulative sum, which needs one
uniform and no noise of the size of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from spectr_jax.kernels.dispatch import by_platform
from spectr_jax.kernels.filters import FILTERS_BY_NAME, filtered
from spectr_jax.kernels.first_above import first_above, search
from spectr_jax.kernels.launch import launch
from spectr_jax.sharding import dividing_axes, fetch, shards_in_program

_BLOCK = 128  # tokens whose sum or minimum is taken at a time
_SMALL = 4 * _BLOCK  # vocabularies that are not cut into blocks
_MOST_DRAWS = 16  # from one distribution that a kernel takes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """Parameters that turn logits into a distribution, per row.

  A filter that is None is not in the program at all. One that is there is compiled, several searches in each of the
  draft and the target. It costs nothing else where no row uses it, but on a GPU, which would wait for the host to know.

  Attributes:
    temperature: float `[B]`; 0 is the point mass at the first largest logit.
    top_k: int32 `[B]`; keeps the k most probable tokens, 0 keeps all. None keeps all.
    top_p: float `[B]` in (0, 1]; keeps the fewest most probable tokens that have at least this mass, after top-k. None
      keeps all.
    min_p: float `[B]` in [0, 1]; keeps the tokens at least this many times as probable as the most probable one, after
      top-p; 0 keeps all. None keeps all.
  """

  temperature: jax.Array
  top_k: jax.Array | None = None
  top_p: jax.Array | None = None
  min_p: jax.Array | None = None

  @classmethod
  def make(
    cls,
    batch_size: int,
    *,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
    min_p: ArrayLike = 0.0,
  ) -> SamplingParams:
    """Broadcasts scalars or `[B]` arrays to `[B]`.

    Args:
      batch_size: B.
      temperature: Scalar or `[B]`, finite and at least 0.
      top_k: Scalar or `[B]`, at least 0.
      top_p: Scalar or `[B]`, above 0 and at most 1.
      min_p: Scalar or `[B]`, from 0 to 1.

    Returns:
      The parameters of B rows. A filter whose values are known to keep all tokens of all rows is None.

    Raises:
      ValueError: A value is out of range or of another shape.
    """
    values = {}
    for name, value, dtype, is_valid, allowed in (
      ('temperature', temperature, jnp.float32, lambda x: np.isfinite(x) & (x >= 0), 'finite and at least 0'),
      ('top_k', top_k, jnp.int32, lambda x: x >= 0, 'at least 0 (0 keeps all)'),
      ('top_p', top_p, jnp.float32, lambda x: (x > 0) & (x <= 1), 'above 0 and at most 1'),
      ('min_p', min_p, jnp.float32, lambda x: (x >= 0) & (x <= 1), 'from 0 to 1 (0 keeps all)'),
    ):
      is_known = not isinstance(value, Tracer)
      try:
        array = np.asarray(fetch(value), dtype) if is_known else value.astype(dtype)
      except OverflowError as error:
        raise ValueError(f'{name} must be {allowed} and below 2**31, got {value}') from error
      if array.shape not in ((), (batch_size,)):
        raise ValueError(f'{name} must be a scalar or [{batch_size}], got shape {array.shape}')
      if is_known and not is_valid(array).all():
        raise ValueError(f'{name} must be {allowed}, got {value}')
      is_used = not is_known or name not in FILTERS_BY_NAME or (array != FILTERS_BY_NAME[name].keeps_all).any()
      values[name] = jnp.broadcast_to(array, (batch_size,)) if is_used else None
    return cls(**values)

  def with_filters_of(self, other: SamplingParams) -> SamplingParams:
    """These parameters with every filter that `other` has, so that rows of both can stand in one batch."""
    missing = {
      name: jnp.full(self.temperature.shape, each.keeps_all, getattr(other, name).dtype)
      for name, each in FILTERS_BY_NAME.items()
      if getattr(self, name) is None and getattr(other, name) is not None
    }
    return dataclasses.replace(self, **missing)


SAMPLING_NAMES = tuple(field.name for field in dataclasses.fields(SamplingParams))


def logits_to_probs(logits: jax.Array, sampling: SamplingParams) -> jax.Array:
  """Computes the distributions that tokens are drawn from, for draft and target alike.

  Temperature comes first, then top-k, then top-p of the remaining tokens, then min-p, as in Hugging Face Transformers.
  Only the order of top-p and its neighbours matters: top-k and min-p keep the same tokens in either order.

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
  probs = _softmax(logits, scale, is_greedy)
  return filtered(probs, {name: getattr(sampling, name) for name in FILTERS_BY_NAME})


def _softmax(logits: jax.Array, scale: jax.Array, is_greedy: jax.Array) -> jax.Array:
  """The softmax of logits `[B, N, V]` divided by `[B, 1]`; or, where `is_greedy` `[B, 1]`, the first largest."""

  def of_rows(logits, scale):
    # The maximum is subtracted before the division. After it, logits at a small temperature could overflow; and a fused
    # program may divide twice with different rounding, so that logits would differ from their own maximum.
    weights = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / scale[..., None])
    return (weights / jnp.sum(weights, axis=-1, keepdims=True),)

  def find_points(logits, is_greedy):
    return jnp.where(is_greedy, _first_largest(logits), -1)

  def at_points(probs, points):
    points = points[..., None]
    is_point = jax.lax.broadcasted_iota(jnp.int32, probs.shape, probs.ndim - 1) == points
    return jnp.where(points < 0, probs, is_point.astype(probs.dtype))

  def plain(logits, scale, is_greedy):
    # Only indices pass through the choice: one between distributions would copy them.
    none = functools.partial(jnp.full, logits.shape[:-1], -1, jnp.int32)
    points = jax.lax.cond(jnp.any(is_greedy), lambda: find_points(logits, is_greedy), none)
    return at_points(of_rows(logits, scale)[0], points)

  def by_kernel(logits, scale, is_greedy):
    # XLA hands the kernel the logits in fast memory if nothing else needs them, and copies no result of a kernel.
    scales = jnp.broadcast_to(scale, logits.shape[:-1]).reshape(-1)
    probs = launch(of_rows, scaled, logits.reshape(-1, logits.shape[-1]), scales)[0].reshape(logits.shape)
    return jax.lax.cond(
      jnp.any(is_greedy), lambda probs: at_points(probs, find_points(logits, is_greedy)), lambda probs: probs, probs
    )

  def scaled(logits, scale):
    from spectr_jax.kernels.softmax import scaled_softmax

    return (scaled_softmax(logits, scale),)

  def without_choice(logits, scale, is_greedy):
    # A GPU waits for the host at a choice, longer than the search takes.
    return at_points(of_rows(logits, scale)[0], find_points(logits, is_greedy))

  forms = {'tpu': by_kernel} if _fits_kernels(logits) else {}
  return by_platform(logits, scale, is_greedy, gpu=without_choice, default=plain, **forms)


def _fits_kernels(weights: jax.Array) -> bool:
  """Whether kernels take distributions `[..., V]`: in float32, of whole registers, and not divided over devices."""
  width = weights.shape[-1]
  return weights.dtype == jnp.float32 and width > _SMALL and width % _BLOCK == 0 and not dividing_axes()


def _first_largest(logits: jax.Array) -> jax.Array:
  """The index of the first largest of `logits` `[B, N, V]`, int32 `[B, N]`; -1 where the largest is not finite."""
  largest = jnp.max(logits, axis=-1, keepdims=True)

  def in_blocks(logits, largest):  # an argmin over a whole vocabulary is not vectorised on CPU
    del largest
    return jax.vmap(jax.vmap(_argmin))(-logits)

  def by_comparison(logits, largest):
    place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    return jnp.min(jnp.where(logits == largest, place, logits.shape[-1] - 1), axis=-1)

  first = by_platform(logits, largest, cpu=in_blocks, default=by_comparison)
  return jnp.where(jnp.isfinite(largest[..., 0]), first, -1).astype(jnp.int32)


def _in_blocks(values: jax.Array, fill: float) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
  """`values` `[V]` in order in blocks `[R, _BLOCK]`, and a function from the index of a block to its first token.

  Args:
    values: `[V]`.
    fill: Value of the padding at the end of each shard.
  """
  num_shards = shards_in_program(values.shape[0])
  width = values.shape[0] // num_shards
  padded = jnp.pad(values.reshape(num_shards, width), ((0, 0), (0, -width % _BLOCK)), constant_values=fill)
  num_blocks = padded.shape[1] // _BLOCK
  return padded.reshape(-1, _BLOCK), lambda row: row // num_blocks * width + row % num_blocks * _BLOCK


def _on_each_device(values: jax.Array) -> jax.Array:
  """`values` of the blocks of a distribution, sent to every device at once; each then goes on by itself."""
  if not dividing_axes():
    return values
  return jax.lax.with_sharding_constraint(values, PartitionSpec())


def draw(uniform: jax.Array, weights: jax.Array) -> jax.Array:
  """Draws a token with probability proportional to its weight, by inversion of the cumulative sum.

  Args:
    uniform: Scalar in [0, 1).
    weights: `[V]`, not negative, with any positive sum.

  Returns:
    The token, int32 scalar; never one of weight 0.
  """
  return draw_several(uniform[None], weights)[0]


def draw_several(uniforms: jax.Array, weights: jax.Array) -> jax.Array:
  """Draws tokens from one distribution, each as `draw` does.

  Args:
    uniforms: `[K]`, in [0, 1).
    weights: `[V]`, not negative, with any positive sum.

  Returns:
    int32 `[K]`; never a token of weight 0.
  """

  def plain(uniforms, weights):
    return jax.vmap(_draw, (0, None))(uniforms, weights)

  def kernel(uniforms, laws):
    from spectr_jax.kernels.token_draws import draw_tokens

    return (draw_tokens(uniforms, laws),)

  if not _fits_kernels(weights) or len(uniforms) > _MOST_DRAWS:
    return plain(uniforms, weights)
  plain_rows = jax.vmap(lambda *row: (plain(*row),))
  return launch(plain_rows, kernel, uniforms[None].astype(weights.dtype), weights[None])[0][0]


def _draw(uniform: jax.Array, weights: jax.Array) -> jax.Array:
  if weights.shape[0] <= _SMALL:
    return search(weights, uniform * jnp.sum(weights))[0]
  blocks, first_of = _in_blocks(weights, 0)
  sums = _on_each_device(jnp.sum(blocks, axis=-1))
  level = uniform * jnp.sum(sums)
  row, before = first_above(sums, level)
  column, _ = first_above(blocks[row], level - before)
  return (first_of(row) + column).astype(jnp.int32)


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

  The first token to arrive has the distribution `probs`. This is Gumbel-max sampling: -log E is a Gumbel variable.

  Args:
    key: A typed key.
    probs: `[V]`.

  Returns:
    Times `[V]`, inf where the probability is 0.
  """
  exponentials = _exponentials(key, probs.shape, probs.dtype)
  is_possible = probs > 0
  return jnp.where(is_possible, exponentials / jnp.where(is_possible, probs, 1), jnp.inf)


def _argmin(values: jax.Array) -> jax.Array:
  """The index of the smallest of `values` `[V]`, int32 scalar; of equal ones the lowest.

  It takes the minimum of every block, then the index within the first block that has the smallest. An argmin over the
  whole vocabulary is not vectorised on CPU.
  """
  blocks, first_of = _in_blocks(values, jnp.inf)
  row = jnp.argmin(_on_each_device(jnp.min(blocks, axis=-1)))
  return (first_of(row) + jnp.argmin(blocks[row])).astype(jnp.int32)


def first_arrival(times: jax.Array) -> jax.Array:
  """The token that arrives first, int32 scalar; of equal times `[V]` the one with the lowest index."""
  return _argmin(times)


def positive_part(weights: jax.Array) -> jax.Array:
  """`[weights]+`, of any shape.

  A `where` and not a `maximum`: XLA on CPU hands a sum over a maximum to a matrix library, and copies its input.
  """
  return jnp.where(weights > 0, weights, 0)


def positive_part_or(weights: jax.Array, fallback: jax.Array) -> jax.Array:
  """`[weights]+`, or `fallback` if rounding or equal distributions leave no mass.

  Args:
    weights: `[V]`.
    fallback: `[V]`.

  Returns:
    `[V]`, not normalised.
  """
  positive = positive_part(weights)
  return jnp.where(jnp.sum(positive) > 0, positive, fallback)
