"""One race for draft and target (ERSD): how often both have the same winner."""

from __future__ import annotations

import numpy as np

from spectr_jax.theory.laws import as_pair


def race_match_prob(draft_probs, target_probs) -> np.ndarray:
  """P(argmin E/p = argmin E/q) for independent E ~ Exp(1): how often `ersd` accepts the first of the drafted tokens.

  Both races are won by x if E_y > E_x max(p(y)/p(x), q(y)/q(x)) for every other y, so the chance is

      sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x)).

  The maximum is the first ratio where p(y)/q(y) is at least p(x)/q(x) and the second elsewhere: with tokens sorted by
  p/q the inner sums are cumulative, O(V log V) in all. This is the probability Jaccard similarity of p and q (Moulton
  and Jiang 2018). It is at least `race_match_bound` and at most 1 - TV(p, q), which speculative decoding has.

  Args:
    draft_probs: `[..., V]`, the laws p.
    target_probs: `[..., V]`, the laws q.

  Returns:
    float64 `[...]`.

  Raises:
    ValueError: The laws are none or do not fit.
  """
  draft, target = as_pair(draft_probs, target_probs)
  # Increasing in p/q and never 0/0 where one of the two is possible; tokens that neither can draw go anywhere.
  total = draft + target
  share = np.divide(draft, total, out=np.zeros_like(total), where=total > 0)
  order = np.argsort(share, axis=-1, kind='stable')
  p, q = np.take_along_axis(draft, order, axis=-1), np.take_along_axis(target, order, axis=-1)
  above = np.cumsum(p[..., ::-1], axis=-1)[..., ::-1]  # itself included, where both ratios are 1
  below = np.cumsum(q, axis=-1) - q
  # 1 / (above/p + below/q), and 0 where either cannot draw the token.
  rate = above * q + below * p
  return np.divide(p * q, rate, out=np.zeros_like(rate), where=(p > 0) & (q > 0)).sum(axis=-1)


def race_match_bound(draft_probs, target_probs) -> np.ndarray:
  """sum_x p q / (p + q), a lower bound of `race_match_prob`; 1/2 where p = q.

  Source: "Speculative Decoding via Exponential Races", Lemma 3.1, from the Poisson matching lemma (Li and Anantharam
  2021): given the draft's winner x, the target's is the same with probability at least 1 / (1 + p(x)/q(x)).

  Args:
    draft_probs: `[..., V]`, the laws p.
    target_probs: `[..., V]`, the laws q.

  Returns:
    float64 `[...]`.

  Raises:
    ValueError: The laws are none or do not fit.
  """
  draft, target = as_pair(draft_probs, target_probs)
  total = draft + target
  return np.divide(draft * target, total, out=np.zeros_like(total), where=total > 0).sum(axis=-1)
