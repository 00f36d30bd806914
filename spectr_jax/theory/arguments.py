"""Arguments as checked float64 arrays, for everything in the theory that is computed on the host."""

from __future__ import annotations

import numpy as np

# The outputs of float32 softmaxes pass. They are normalized again.
TOLERANCE = 1e-5


def as_probs(probs, name: str, *, tolerance: float = TOLERANCE) -> np.ndarray:
  """The distributions `[..., V]` in float64, normalized again along the last axis.

  ValueError, with the argument's `name`, for other shapes, negative or NaN entries and sums off by `tolerance`.
  """
  checked = np.asarray(probs, np.float64)
  if checked.ndim == 0 or not checked.size:
    raise ValueError(f'{name} must have shape [..., V], V at least 1; got {checked.shape}')
  # A NaN fails this comparison, and the next one.
  if not checked.min() >= 0:
    raise ValueError(f'{name} must not be negative, got {checked.min()}')
  sums = checked.sum(axis=-1, keepdims=True)
  if not (np.abs(sums - 1) <= tolerance).all():
    worst = sums.flat[np.argmax(np.abs(sums - 1))]
    raise ValueError(f'{name} must sum to 1 within {tolerance} (in float64), got {worst}')
  return checked / sums


def as_pair(draft_probs, target_probs, *, tolerance: float = TOLERANCE) -> tuple[np.ndarray, np.ndarray]:
  """Two distributions `[..., V]` in float64, leading axes broadcast against each other; ValueError as `as_probs`."""
  draft = as_probs(draft_probs, 'draft_probs', tolerance=tolerance)
  target = as_probs(target_probs, 'target_probs', tolerance=tolerance)
  if draft.shape[-1] != target.shape[-1]:
    raise ValueError(f'distributions must have the same length, got {draft.shape[-1]} and {target.shape[-1]}')
  draft, target = np.broadcast_arrays(draft, target)  # the error names both shapes
  return draft, target


def as_joint_probs(draft_law, target_law) -> tuple[np.ndarray, np.ndarray]:
  """Two joint distributions of L tokens, `[V] * L`, in float64, normalized again; ValueError as `as_probs`."""
  shapes = np.shape(draft_law), np.shape(target_law)
  if shapes[0] != shapes[1] or not shapes[0] or len(set(shapes[0])) > 1:
    raise ValueError(f'draft_law and target_law must both be [V] * L, got shapes {shapes[0]} and {shapes[1]}')
  draft = as_probs(np.reshape(draft_law, -1), 'draft_law').reshape(shapes[0])
  return draft, as_probs(np.reshape(target_law, -1), 'target_law').reshape(shapes[0])


def prefix_probs(joint: np.ndarray) -> list[np.ndarray]:
  """The distributions of the first 1, 2, ..., L tokens under a joint distribution `[V] * L`, each flat."""
  return [joint.sum(axis=tuple(range(length, joint.ndim))).reshape(-1) for length in range(1, joint.ndim + 1)]


def in_unit(values, name: str) -> np.ndarray:
  """The values in float64, each from 0 to 1; `ValueError` names the argument."""
  values = np.asarray(values, np.float64)
  if not ((values >= 0) & (values <= 1)).all():
    raise ValueError(f'{name} must be from 0 to 1, got {values.min()} to {values.max()}')
  return values


def whole_numbers(values, name: str) -> np.ndarray:
  """The values as an array of integers from 1 on; `ValueError` names the argument."""
  numbers = np.asarray(values)
  if not np.issubdtype(numbers.dtype, np.integer) or (numbers < 1).any():
    raise ValueError(f'{name} must be integers from 1 on, got {values}')
  return numbers


def whole_number(value, name: str) -> int:
  """The value as an integer from 1 on; `ValueError` names the argument."""
  number = whole_numbers(value, name)
  if number.ndim:
    raise ValueError(f'{name} must be one integer, got {value}')
  return int(number)


def total_variation(draft_probs, target_probs) -> np.ndarray:
  """The total variation TV(p, q) = 1/2 sum |p - q| = 1 - sum min(p, q).

  It is float64 `[...]` for distributions p and q, `[..., V]`; ValueError for other arguments.
  """
  draft, target = as_pair(draft_probs, target_probs)
  return np.abs(draft - target).sum(axis=-1) / 2
