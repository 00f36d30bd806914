"""The trade of bias against rejections in over-acceptance, and the best possible trade."""

from __future__ import annotations

import numpy as np

from spectr_jax.theory.arguments import as_pair, as_probs, in_unit, total_variation


def over_acceptance(draft_probs, target_probs, epsilon) -> np.ndarray:
  """The acceptance b(x) = min(1, (q(x) + epsilon) / p(x)) of Decoding-OPT and Decoding-UNO.

  Source: "A Theoretical Perspective for Speculative Decoding Algorithm" (Yin et al. 2024), section 4.1.

  It is float64 `[..., V]`, 1 where p is 0, for distributions p and q, `[..., V]`, and an `epsilon` of at least 0 that
  broadcasts against the leading axes; ValueError for other arguments.
  """
  draft, target = as_pair(draft_probs, target_probs)
  epsilon = np.asarray(epsilon, np.float64)[..., None]
  if not (epsilon >= 0).all():
    raise ValueError(f'epsilon must be at least 0, got {epsilon.min()}')
  allowed = target + epsilon
  # The comparison comes before the division, since a quotient of tiny numbers may overflow.
  is_certain = allowed >= draft
  return np.where(is_certain, 1, allowed / np.where(is_certain, 1, draft))


def _checked(draft_probs, target_probs, accept_probs):
  draft, target = as_pair(draft_probs, target_probs)
  return np.broadcast_arrays(draft, target, in_unit(accept_probs, 'accept_probs'))


def rejection_prob(draft_probs, accept_probs) -> np.ndarray:
  """The probability of rejection, P(reject) = sum_x (1 - b(x)) p(x) (Yin et al. 2024, Theorem 5).

  It is float64 `[...]` for distributions p and probabilities b, both `[..., V]`; ValueError for other arguments.
  """
  draft, _, accept = _checked(draft_probs, draft_probs, accept_probs)
  return ((1 - accept) * draft).sum(axis=-1)


def emitted_law(draft_probs, accept_probs, rejection_law) -> np.ndarray:
  """The distribution of a token that is drafted from p, kept with probability b, and otherwise drawn from P.

  It is b p + P(reject) P, the distribution of one step of Algorithm 2 of Yin et al. 2024.

  It is float64 `[..., V]` for distributions p and P and probabilities b, all `[..., V]`; ValueError for others.
  """
  draft, rejection, accept = _checked(draft_probs, as_probs(rejection_law, 'rejection_law'), accept_probs)
  return accept * draft + ((1 - accept) * draft).sum(axis=-1, keepdims=True) * rejection


def best_rejection_law(draft_probs, target_probs, accept_probs) -> np.ndarray:
  """The best distribution P* to draw from after a rejection: the output is as close to the target as b allows.

  Let A = (q - b p) / P(reject). A distribution is best if it is at most A where A is positive, and 0 elsewhere. This
  function returns the positive part of A, normalized. If b is at least min(1, q/p), that is [q - p]+, normalized,
  whatever b is.

  Source: Yin et al. 2024, Theorem 4.

  It is float64 `[..., V]` for distributions p and q and probabilities b, all `[..., V]`; ValueError for others.
  If nothing is rejected every distribution is best, and q is returned.
  """
  draft, target, accept = _checked(draft_probs, target_probs, accept_probs)
  missing = np.maximum(target - accept * draft, 0)
  mass = missing.sum(axis=-1, keepdims=True)
  return np.where(mass > 0, missing / np.where(mass > 0, mass, 1), target)


def minimal_bias(draft_probs, target_probs, accept_probs) -> np.ndarray:
  """The least bias with acceptance b: Loss*(b) = 1/2 sum |q - b p| - 1/2 sum (1 - b) p, in total variation.

  If b is at least min(1, q/p), the least bias and P(reject) add up to TV(p, q).

  Source: Yin et al. 2024, Theorems 4 and 5.

  It is float64 `[...]` for distributions p and q and probabilities b, all `[..., V]`; ValueError for other arguments.
  """
  draft, target, accept = _checked(draft_probs, target_probs, accept_probs)
  # This is the mass accepted in excess. It equals Loss*(b), since |a| = 2 [-a]+ + a and q - b p sums to P(reject), and
  # it does not cancel.
  return np.maximum(accept * draft - target, 0).sum(axis=-1)


def pareto_bias(draft_probs, target_probs, rejection) -> np.ndarray:
  """The Pareto front: the least bias, in total variation, of any rule with a given probability of rejection.

  It is [TV(p, q) - P(reject)]+, a straight line from (0, TV) to (TV, 0). Speculative decoding is the point (TV, 0).

  Source: Yin et al. 2024, Theorem 5 and Figure 4.

  It is float64 `[...]` for distributions p and q, `[..., V]`, and a P(reject) from 0 to 1 that broadcasts against the
  leading axes; ValueError for other arguments.
  """
  return np.maximum(total_variation(draft_probs, target_probs) - in_unit(rejection, 'rejection'), 0)
