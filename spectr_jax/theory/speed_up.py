"""From acceptance to time: the expected tokens of a chain in closed form, and a model of the cost of a round."""

from __future__ import annotations

import numpy as np

from spectr_jax.theory.arguments import in_unit


def expected_chain_tokens(acceptance_rate, draft_length) -> np.ndarray:
  """Tokens per target call if each of L drafted tokens is accepted with probability a: (1 - a^{L+1}) / (1 - a).

  This is 1 + a + ... + a^L. It is exact for a constant rate. Source: Leviathan et al. 2023, equation (1).

  It is float64 of the shape of a, from 0 to 1, and L, at least 0, together; ValueError for other arguments.
  """
  rate, length = in_unit(acceptance_rate, 'acceptance_rate'), np.asarray(draft_length, np.float64)
  if not (length >= 0).all():
    raise ValueError(f'draft_length must be at least 0, got {length.min()}')
  is_certain = rate == 1
  rate, length = np.broadcast_arrays(rate, length)
  missing = np.where(is_certain, 1, 1 - rate)
  # expm1 avoids the cancellation of 1 - a^{L+1} near 1. The logarithm of a = 0 is -inf, which gives the right result.
  with np.errstate(divide='ignore'):
    reached = -np.expm1((length + 1) * np.log(rate))
  return np.where(is_certain, length + 1, reached / missing)


def speed_up(tokens_per_call, num_draft_steps, *, draft_cost, call_cost=1.0) -> np.ndarray:
  """The speed-up over one target call per token: E / (L c_draft + c).

  A round is L steps of the draft and one call of the target on all guesses. Costs are in units of a target call on a
  single token. The costs of verification and memory are not in the model.

  Source: the common model, as in Leviathan et al. 2023, Theorem 3.8, with a cost for the wider call.

  Args:
    tokens_per_call: E, at least 1; from `expected_chain_tokens`, `expected_tokens` or a measurement.
    num_draft_steps: L, the depth of the tree.
    draft_cost: c_draft, the cost of one step of the draft.
    call_cost: c, the cost of a target call on all guesses.

  Returns:
    float64 of the broadcast shape.

  Raises:
    ValueError: E is below 1, another argument is negative, or the cost of the call is 0.
  """
  tokens, steps, draft, call = (
    np.asarray(x, np.float64) for x in (tokens_per_call, num_draft_steps, draft_cost, call_cost)
  )
  if not (tokens >= 1).all():
    raise ValueError(f'tokens_per_call must be at least 1, got {tokens.min()}')
  if not ((steps >= 0).all() and (draft >= 0).all() and (call > 0).all()):
    raise ValueError(
      'num_draft_steps and draft_cost must be at least 0 and call_cost above 0, got'
      f' {num_draft_steps}, {draft_cost} and {call_cost}'
    )
  return tokens / (steps * draft + call)
