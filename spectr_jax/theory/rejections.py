"""How many drafted tokens are rejected over a whole text, by one draft or by several: expectations, exactly."""

from __future__ import annotations

import math

import numpy as np

from spectr_jax.theory.chains import MarkovChains
from spectr_jax.theory.laws import as_pair


def _numbers(num_drafts) -> np.ndarray:
  """float64, of any shape: whole numbers from 1 on, or infinite."""
  numbers = np.asarray(num_drafts, np.float64)
  if not ((numbers >= 1) & ((numbers == np.floor(numbers)) | np.isinf(numbers))).all():
    raise ValueError(f'num_drafts must be whole numbers from 1 on, or math.inf; got {num_drafts}')
  return numbers


def _left_when_all_rejected(draft, target, numbers):
  """For each number M, the chance that M i.i.d. candidates are all rejected and a token x emitted, `[..., V]`.

  Recursive rejection without the normalisation: with u_0 = q and R = sum u, u_{m+1} = [u_m - R_m p]+ has the mass
  r_1 ... r_{m+1} and is q^{m+2} times that. In the limit what p cannot draw is left, and nothing else.
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
  """The chance that the n-th token is a correction, where M drafts compete for the first token of a round.

  Batch speculative decoding with lookahead to the horizon: after the acceptance of one of M first tokens its own draft
  goes on alone, by plain speculative decoding, so that a position right after a rejection has M candidates and any
  other has one. With F_n(x) the chance that the n-th token is x and a correction, Q_n the target's law of it, h =
  [q - p]+ and u what M rejections leave (`[q - p]+` for M = 1),

      F_n(a) = sum_x (Q_{n-1}(x) - F_{n-1}(x)) h_n(a|x) + F_{n-1}(x) u_n(a|x),      F_0 = Q_0.

  Source: "A Theoretical Perspective for Speculative Decoding Algorithm" (Yin et al. 2024), Theorem 1 (M = 1) and
  Theorem 3 with equation (22), of which F is the sum over the earlier tokens. In the limit of many drafts
  (Proposition 1) u is q where p = 0: the paper leaves this out, which matters where p does not cover q.

  Args:
    chains: Draft and target.
    num_drafts: M, a whole number or `math.inf`, or an array of them; 1 is speculative decoding.

  Returns:
    float64, M's shape with an axis `[T]` behind it.

  Raises:
    ValueError: A number of drafts is not whole, or below 1.
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
  """E[N_rej] over T tokens: `rejection_probs` summed.

  For one draft it is the sum over n of E_q TV(p_n, q_n) (Yin et al. 2024, Theorem 1), and no rule that decides on one
  drafted token after another and keeps the target's law can reject fewer (Theorem 2). Rules that look at the tokens
  behind, such as block verification, are not among those.

  Args:
    chains: Draft and target.
    num_drafts: M, or `math.inf`, or an array of them.

  Returns:
    float64 of M's shape.

  Raises:
    ValueError: A number of drafts is not whole, or below 1.
  """
  return rejection_probs(chains, num_drafts).sum(axis=-1)


def expected_target_calls(chains: MarkovChains, num_drafts=1) -> np.ndarray:
  """Calls of the target for T tokens: one for every rejection, and one more unless the last token is a correction.

  The paper (Yin et al. 2024, section 2.2) counts calls as rejections, without the one that ends the text.

  Args:
    chains: Draft and target.
    num_drafts: M, or `math.inf`, or an array of them.

  Returns:
    float64 of M's shape.

  Raises:
    ValueError: A number of drafts is not whole, or below 1.
  """
  probs = rejection_probs(chains, num_drafts)
  return probs.sum(axis=-1) + 1 - probs[..., -1]


def batch_improvement(draft_probs, target_probs, num_drafts) -> np.ndarray:
  """BI = TV(q, p) - prod_m TV(q^m, p): how much rarer a rejection is with M i.i.d. candidates than with one.

  Source: Yin et al. 2024, Theorem 3 and Figure 3. For Ber(u) and Ber(v), u >= v, it is (u - v)(1 - u^{M-1}); for
  U(V) and U(V/r) it is (1 - 1/r) - (1 - 1/r)^M.

  Args:
    draft_probs: `[..., V]`, the laws p.
    target_probs: `[..., V]`, the laws q.
    num_drafts: M, a whole number or `math.inf`, or an array of them.

  Returns:
    float64, M's shape with the leading axes behind it.

  Raises:
    ValueError: The laws are none or do not fit, or a number of drafts is not whole, or below 1.
  """
  draft, target = as_pair(draft_probs, target_probs)
  numbers = _numbers(num_drafts)
  left = _left_when_all_rejected(draft, target, numbers)
  rejected = np.array([left[number].sum(axis=-1) for number in numbers.flat])
  return np.maximum(target - draft, 0).sum(axis=-1) - rejected.reshape(*numbers.shape, *draft.shape[:-1])
