"""The MLP of a mixture of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.kernels.expert_products import expert_product
from spectr_jax.kernels.products import accumulation_dtype, rounded
from spectr_jax.models.routing import Experts, route


def _linear(params, x, chosen):
  products = expert_product(x, params['kernel'], chosen)
  return rounded(products + params['bias'][chosen] if 'bias' in params else products, x.dtype)


def _gated(experts: Experts, activation_fn, gate, up):
  if experts.limit is None:
    return activation_fn(gate) * up
  wide = accumulation_dtype(gate.dtype)
  bounded = jnp.minimum(gate.astype(wide), experts.limit)
  up = jnp.clip(up.astype(wide), -experts.limit, experts.limit)
  activated = rounded(bounded * jax.nn.sigmoid(experts.gate_factor * bounded), wide)
  return rounded((up + 1) * activated, gate.dtype)


def mix(
  params: Mapping[str, Any],
  experts: Experts,
  activation_fn: Callable[[jax.Array], jax.Array],
  x: jax.Array,
  chosen: jax.Array,
  weights: jax.Array,
) -> jax.Array:
  """The weighted outputs of the chosen experts, `[N, D]` in the type of `x`, each token's added in its own order.

  Args:
    params: `up`, `down` and perhaps `gate`, with kernels `[E, in, out]` and perhaps biases `[E, out]`.
    experts: Their sizes.
    activation_fn: The activation of gates, or of hidden units without gates.
    x: `[N, D]`.
    chosen, weights: `[N, k]`, as of `route`.
  """
  num_tokens, k = chosen.shape
  of_rows, rows = chosen.reshape(-1), jnp.repeat(x, k, axis=0)
  into = [_linear(params[name], rows, of_rows) for name in ('gate', 'up') if name in params]
  hidden = _gated(experts, activation_fn, *into) if 'gate' in params else activation_fn(*into)
  out = _linear(params['down'], hidden, of_rows).reshape(num_tokens, k, -1)
  wide = weights.dtype
  parts = (rounded(out[:, i].astype(wide) * weights[:, i, None], wide) for i in range(k))
  return rounded(functools.reduce(jnp.add, parts), x.dtype)


def mixture(
  params: Mapping[str, Any],
  experts: Experts,
  activation_fn: Callable[[jax.Array], jax.Array],
  x: jax.Array,
  routed_by: jax.Array | None = None,
) -> jax.Array:
  """The output of an MLP with a `router` and `experts`, `[..., D]`, for `x` of that shape.

  The router reads `routed_by`, of that shape as well; None for `x`.
  """
  rows = x.reshape(-1, x.shape[-1])
  chosen, weights = route(params['router'], experts, rows if routed_by is None else routed_by.reshape(rows.shape))
  return mix(params['experts'], experts, activation_fn, rows, chosen, weights).reshape(x.shape)
