"""Exact expected numbers of rejected tokens over a whole text, with one draft or several."""

from __future__ import annotations

import math

import numpy as np

from spectr_jax.theory.arguments import as_pair
from spectr_jax.theory.chains import MarkovChains


def _numbers(num_drafts) -> np.ndarray:
  """The numbers of drafts in float64, of any shape; each is a whole number of at least 1, or infinite."""
  numbers = np.asarray(num_drafts, np.float64)
  if not ((numbers >= 1) & ((numbers == np.floor(numbers)) | np.isinf(numbers))).all():
    raise ValueError(f'num_drafts must be whole numbers from 1 on, or math.inf; got {num_drafts}')
  return numbers


def _left_when_all_rejected(draft, target, numbers):
  """For each number M, the probability `[..., V]` that M i.i.d. candidates are all rejected and x is emitted.

  This is recursive rejection without the normalization. With u_0 = q and R = sum u, the function u_{m+1} = [u_m - R_m
  p]+ has the mass r_1 ... r_{m+1} and is q^{m+2} times that mass. In the limit only tokens that p cannot draw are left.
  """
  left, done, wanted = target, 0, {}
  for number in sorted(set(numbers.flat)):
    if math.isinf(number):
      left = np.where(draft > 0, 0, target)
    while done < number and not math.isinf(number):
      left = np.maximum(left - left.sum(axis=-1, keepdims=True) * draft, 0)
      done += 1
    wanted[number] = left
  return wanted


def rejection_probs(chains: MarkovChains, num_drafts=1) -> np.ndarray:
  """The probability that the n-th token is a correction, if M drafts compete for the first token of a round.

  This is batch speculative decoding with lookahead to the horizon. After one of M first tokens is accepted, its own
  draft continues alone, by plain speculative decoding. So a position right after a rejection has M candidates, and any
  other position has one. Let F_n(x) be the probability that the n-th token is x and a correction, Q_n the target's
  distribution of the n-th token, h = [q - p]+, and u the mass left after M rejections (h for M = 1). Then

      F_n(a) = sum_x (Q_{n-1}(x) - F_{n-1}(x)) h_n(a|x) + F_{n-1}(x) u_n(a|x),      F_0 = Q_0.

  Source: "A Theoretical Perspective for Speculative Decoding Algorithm" (Yin et al. 2024), Theorem 1 (M = 1) and
  Theorem 3 with equation (22); F is the sum of the latter over the earlier tokens. In the limit of many drafts
  (Proposition 1) u is q where p = 0. The paper omits this term, which is not 0 if p does not cover q.

  `num_drafts` is M, whole and at least 1 or `math.inf`, or an array of such numbers, else ValueError; 1 is speculative
  decoding. The result is float64 of M's shape with a last axis `[T]` added.
  """
  numbers = _numbers(num_drafts)
  draft, target = chains.draft_probs, chains.target_probs
  excess = np.maximum(target - draft, 0)
  by_number = {}
  for number, left in _left_when_all_rejected(draft, target, numbers).items():
    corrected, rejected = chains.prompt_probs, []
    for n, context in enumerate(chains.context_probs):
      corrected = (context - corrected) @ excess[n] + corrected @ left[n]
      rejected.append(corrected.sum())
    by_number[number] = rejected
  return np.array([by_number[number] for number in numbers.flat]).reshape(*numbers.shape, chains.num_tokens)


def expected_rejections(chains: MarkovChains, num_drafts=1) -> np.ndarray:
  """The expected number of rejections E[N_rej] over T tokens: the sum of `rejection_probs`.

  For one draft it is the sum over n of E_q TV(p_n, q_n) (Yin et al. 2024, Theorem 1). No lossless rule that decides
  token by token can reject fewer (Theorem 2). Rules that look at later tokens first, such as block verification, are
  not covered by that theorem.

  `num_drafts` is M as for `rejection_probs`; the result is float64 of its shape.
  """
  return rejection_probs(chains, num_drafts).sum(axis=-1)


def expected_target_calls(chains: MarkovChains, num_drafts=1) -> np.ndarray:
  """The expected target calls for T tokens: one per rejection, and one more unless the last token is a correction.

  The paper (Yin et al. 2024, section 2.2) counts one call per rejection and omits the call that ends the text.

  `num_drafts` is M as for `rejection_probs`; the result is float64 of its shape.
  """
  probs = rejection_probs(chains, num_drafts)
  return probs.sum(axis=-1) + 1 - probs[..., -1]


def batch_improvement(draft_probs, target_probs, num_drafts) -> np.ndarray:
  """The batch improvement BI = TV(q, p) - prod_m TV(q^m, p): the drop in rejection probability from 1 to M candidates.

  Source: Yin et al. 2024, Theorem 3 and Figure 3. For Ber(u) and Ber(v), u >= v, it is (u - v)(1 - u^{M-1}); for
  U(V) and U(V/r) it is (1 - 1/r) - (1 - 1/r)^M.

  p and q are distributions `[..., V]` and `num_drafts` is M as for `rejection_probs`, else ValueError. The result is
  float64 of M's shape followed by the leading axes.
  """
  draft, target = as_pair(draft_probs, target_probs)
  numbers = _numbers(num_drafts)
  left = _left_when_all_rejected(draft, target, numbers)
  rejected = np.array([left[number].sum(axis=-1) for number in numbers.flat])
  return np.maximum(target - draft, 0).sum(axis=-1) - rejected.reshape(numbers.shape + draft.shape[:-1])
