"""Linear recurrences on trees of pending tokens, without a state of any of them.

A head's state `S` `[key_dim, value_dim]` follows a text: every token multiplies it by its decay `a` and adds what it
writes, `S <- a S + k u'`; its output is `S' q`. Mamba-2 (Dao and Gu 2024) writes its input, the gated delta rule
(Yang et al. 2025) `u = b (v - S' k)` of the decayed state, with the gate `b`.

Of pending tokens their keys, writes and decays are kept. With `A_i` the product of the decays from the committed state
to token i, and sums over the pending ancestors j of i,

    u_i = b_i (v_i - A_i S0' k_i - sum_j A_i / A_j (k_j . k_i) u_j)
    o_i = A_i S0' q_i + sum_{j or i} A_i / A_j (k_j . q_i) u_j

where S0 is the committed state. Ancestors come before their descendants, so the first line is a triangular system. A
path is committed by adding its `A_n / A_j k_j u_j'` to the decayed state. All sums are in float32 or wider, and no
quotient exceeds 1.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Writes:
  """What pending tokens write to the states of a layer with H heads, of which groups share keys.

  Attributes:
    keys: `[B, M, G, key_dim]`, with G a divisor of H.
    values: `[B, M, H, value_dim]`, what is written along the keys.
    log_decays: `[B, M, H]`, at most 0.
    totals: `[B, M, H]`, the sums of `log_decays` from the committed state on.
  """

  keys: jax.Array
  values: jax.Array
  log_decays: jax.Array
  totals: jax.Array


def placed(old: jax.Array | None, new: jax.Array, num_before: jax.Array | int, num_slots: int) -> jax.Array:
  """`new` `[B, N, ...]` behind the first `num_before` slots of `old` `[B, num_slots, ...]`, or None for none yet."""
  if old is not None:
    return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), num_before, axis=1)
  spare = num_slots - new.shape[1]
  return jnp.pad(new, [(0, 0), (0, spare), *[(0, 0)] * (new.ndim - 2)]) if spare else new


def _inverse(system: jax.Array) -> jax.Array:
  """The inverse of `1 + system` `[..., N, N]`, by what is below the diagonal: from blocks on it to twice their size.

  The library of a CPU would solve it with threads that wait in a loop for those of XLA.
  """
  num = system.shape[-1]
  size, batch = 1 << (num - 1).bit_length(), system.shape[:-2]
  system = jnp.pad(system, [(0, 0)] * len(batch) + [(0, size - num)] * 2)
  inverse, width = jnp.ones((*batch, size, 1, 1), system.dtype), 1
  while width < size:
    blocks = system.reshape(*batch, size // width // 2, 2 * width, size // width // 2, 2 * width)
    below = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., width:, :width]
    first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
    below = -_matmul(_matmul(second, below), first)
    inverse = jnp.block([[first, jnp.zeros_like(first)], [below, second]])
    width *= 2
  return inverse[..., 0, :num, :num]


def recur(
  state: jax.Array,
  pending: Writes | None,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  log_decay: jax.Array,
  gate: jax.Array | None,
  mask: jax.Array,
  num_before: jax.Array | int,
) -> tuple[jax.Array, Writes]:
  """The outputs of tokens, and what is pending with them.

  Args:
    state: `[B, H, key_dim, value_dim]`, committed, in float32 or wider, the type of all results.
    pending: What earlier calls of a round left, or None.
    query, key: `[B, N, G, key_dim]`.
    value: `[B, N, H, value_dim]`.
    log_decay: `[B, N, H]`, at most 0.
    gate: `[B, N, H]` of the delta rule, or None where the value itself is written.
    mask: bool `[1 or B, N, M]`, the pending tokens on each token's path, itself included.
    num_before: The number of pending tokens of earlier calls.

  Returns:
    `[B, N, H, value_dim]`, and `Writes` of M tokens.
  """
  dtype, num_new, num_slots, num_groups = state.dtype, key.shape[1], mask.shape[-1], key.shape[2]
  query, key, value, log_decay = jax.lax.optimization_barrier(
    tuple(x.astype(dtype) for x in (query, key, value, log_decay))
  )

  def by_group(x, axis):  # heads `H` as `G, H / G`
    return x.reshape(*x.shape[:axis], num_groups, -1, *x.shape[axis + 1 :])

  def kept(name, new):
    return placed(pending and getattr(pending, name), new, num_before, num_slots)

  keys, decays = kept('keys', key), kept('log_decays', log_decay)
  total = _einsum('bnm,bmh->bnh', jnp.broadcast_to(mask, (len(key), *mask.shape[1:])).astype(dtype), decays)
  totals = kept('totals', total)

  # From here on heads are `g, r` and tokens come after them: n are a call's, m all that are pending.
  heads = functools.partial(jnp.moveaxis, source=1, destination=3)
  of_new, of_all = heads(by_group(total, 2)), heads(by_group(totals, 2))
  shares = jnp.exp(jnp.where(mask[:, None, None], of_new[..., None] - of_all[..., None, :], -jnp.inf))
  decay, states = jnp.exp(of_new)[..., None], by_group(state, 1)
  written = jnp.moveaxis(by_group(value, 2), 1, 3)
  if gate is not None:
    gates = heads(by_group(gate.astype(dtype), 2))[..., None]
    system = gates * _einsum('bngk,bmgk->bgnm', key, keys)[:, :, None] * shares
    written = gates * (written - decay * _einsum('bngk,bgrkv->bgrnv', key, states))
    if pending is not None:
      written -= _einsum('bgrnm,bmgrv->bgrnv', system, by_group(pending.values, 2))
    own = jax.lax.dynamic_slice_in_dim(system, num_before, num_new, axis=-1)
    written = _matmul(_inverse(own), written)
  written = jnp.moveaxis(written, 3, 1).reshape(value.shape)
  values = kept('values', written)
  scores = _einsum('bngk,bmgk->bgnm', query, keys)[:, :, None] * shares
  out = decay * _einsum('bngk,bgrkv->bgrnv', query, states) + _einsum('bgrnm,bmgrv->bgrnv', scores, by_group(values, 2))
  return jnp.moveaxis(out, 3, 1).reshape(value.shape), Writes(keys, values, decays, totals)


def fold(state: jax.Array, pending: Writes, path: jax.Array, num_committed: jax.Array) -> jax.Array:
  """The state after the pending tokens `path[b, :num_committed[b]]`, int32 `[B, D]` and `[B]`; of 0 it stays."""

  def row(state, pending, path, number):
    on_path = jax.tree.map(lambda x: x[path], pending)
    total = jnp.where(number > 0, on_path.totals[jnp.maximum(number - 1, 0)], 0)
    is_kept = (jnp.arange(len(path)) < number)[:, None]
    shares = jnp.exp(jnp.where(is_kept, total - on_path.totals, -jnp.inf))
    num_heads, num_groups = state.shape[0], pending.keys.shape[1]
    keys = jnp.repeat(on_path.keys, num_heads // num_groups, axis=1)
    added = _einsum('dhk,dhv->hkv', keys, shares[..., None] * on_path.values)
    return jnp.exp(total)[:, None, None] * state + added

  return jax.vmap(row)(state, pending, path, num_committed)


def path_inputs(mask: jax.Array, width: int) -> jax.Array:
  """Where a convolution over a token's last `width` inputs finds them, int32 `[1 or B, N, width]`, its own one last.

  Places are those in `width - 1` committed inputs with the pending ones behind. `mask` is as for `recur`.
  """
  rank = jnp.cumsum(mask, axis=-1)
  depth = rank[..., -1:]  # the tokens on a path
  distances = width - 1 - jnp.arange(width)
  is_there = mask[..., None, :] & (depth[..., None] - rank[..., None, :] == distances[:, None])
  pending = width - 1 + jnp.argmax(is_there, axis=-1)
  return jnp.where(depth > distances, pending, jnp.maximum(width - 2 + depth - distances, 0)).astype(jnp.int32)


def convolve(committed: jax.Array, pending: jax.Array, taps: jax.Array, places: jax.Array) -> jax.Array:
  """A convolution of each channel along the paths of tokens, `[B, N, C]` in float32 or wider.

  Args:
    committed: `[B, width - 1, C]`, the last inputs of the committed text.
    pending: `[B, M, C]`.
    taps: `[width, C]`, that of a token itself last.
    places: As of `path_inputs`.
  """
  inputs = jnp.concatenate([committed, pending], axis=1)
  places = jnp.broadcast_to(places, (len(inputs), *places.shape[1:]))
  wide = jnp.promote_types(inputs.dtype, jnp.float32)
  inputs, taps = inputs.astype(wide), taps.astype(wide)
  terms = (jax.vmap(lambda row, at: row[at])(inputs, places[..., i]) * tap for i, tap in enumerate(taps))
  # Without the barrier XLA computes it anew for every product that reads it.
  return jax.lax.optimization_barrier(functools.reduce(jnp.add, terms))


def last_inputs(committed: jax.Array, pending: jax.Array, path: jax.Array, num_committed: jax.Array) -> jax.Array:
  """The `committed` inputs of `convolve` after the pending tokens `path[b, :num_committed[b]]`."""

  def row(committed, pending, path, number):
    inputs = jnp.concatenate([committed, pending[path]])
    return jax.lax.dynamic_slice_in_dim(inputs, number, len(committed))

  return jax.vmap(row)(committed, pending, path, num_committed)
