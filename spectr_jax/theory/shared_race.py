"""The probability that a race shared by draft and target (ERSD) has the same winner for both."""

from __future__ import annotations

import numpy as np

from spectr_jax.theory.arguments import as_pair


def race_match_prob(draft_probs, target_probs) -> np.ndarray:
  """The probability that `ersd` accepts the first drafted token: P(argmin E/p = argmin E/q), E i.i.d. Exp(1).

  Token x wins both races if E_y > E_x max(p(y)/p(x), q(y)/q(x)) for every other y. So the probability is

      sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x)).

  The maximum is the first ratio if p(y)/q(y) is at least p(x)/q(x), else the second. So with tokens sorted by p/q the
  inner sums are cumulative, and the cost is O(V log V). The value is the probability Jaccard similarity of p and q
  (Moulton and Jiang 2018). It is at least `race_match_bound` and at most 1 - TV(p, q), the acceptance of speculative
  decoding.

  It is float64 `[...]` for distributions p and q, `[..., V]`; ValueError for other arguments.
  """
  draft, target = as_pair(draft_probs, target_probs)
  # This increases in p/q and is defined unless both are 0. The place of tokens that neither model can draw is
  # arbitrary.
  total = draft + target
  share = np.divide(draft, total, out=np.zeros_like(total), where=total > 0)
  order = np.argsort(share, axis=-1, kind='stable')
  p, q = np.take_along_axis(draft, order, axis=-1), np.take_along_axis(target, order, axis=-1)
  above = np.cumsum(p[..., ::-1], axis=-1)[..., ::-1]  # includes the token itself, whose ratios are both 1
  below = np.cumsum(q, axis=-1) - q
  # The term is 1 / (above/p + below/q), and 0 for tokens that one of the models cannot draw.
  rate = above * q + below * p
  return np.divide(p * q, rate, out=np.zeros_like(rate), where=(p > 0) & (q > 0)).sum(axis=-1)


def race_match_bound(draft_probs, target_probs) -> np.ndarray:
  """A lower bound of `race_match_prob`: sum_x p q / (p + q), which is 1/2 for p = q.

  Source: "Speculative Decoding via Exponential Races", Lemma 3.1, from the Poisson matching lemma (Li and Anantharam
  2021): given the draft's winner x, the target's is the same with probability at least 1 / (1 + p(x)/q(x)).

  It is float64 `[...]` for distributions p and q, `[..., V]`; ValueError for other arguments.
  """
  draft, target = as_pair(draft_probs, target_probs)
  total = draft + target
  return np.divide(draft * target, total, out=np.zeros_like(total), where=total > 0).sum(axis=-1)
