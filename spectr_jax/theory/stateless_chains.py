"""The exact optimum of stateless lossless rules on K chains, by a linear program over texts instead of sets of guesses.

A rule keeps the text m with probability kept(m). Guesses D and texts kept of them form a transport problem: a rule with
these probabilities exists if and only if no set of texts is kept more often than the guesses hold one of them (Gale
1957). Guesses that hold a text hold its beginnings, so sets M of texts of which none begins another are enough:

    sum over m in M of kept(m) <= P(some draft begins with a text of M) = 1 - (1 - p(M))^K =: phi(p(M)).

Only the total p(M) counts, since drafts are independent and each begins with at most one text of M. As phi is concave,
it is the smallest of its tangents. So the constraints are, for every slope t from 0 to K,

    max over M of the sum of kept(m) - t p(m) <= c(t),    c(t) = max over s of phi(s) - t s.

The maximum over M is a recursion over the tree of texts: w(m) = max(kept(m) - t p(m), sum of w over the texts that are
one token longer). The program takes a few slopes, finds by the recursion those that its solution violates, and adds
them, until there are none.
"""

from __future__ import annotations

import numpy as np

from spectr_jax.theory.arguments import as_joint_probs, prefix_probs, whole_number
from spectr_jax.theory.linear_program import maximize

MAX_TEXTS = 20_000
_NUM_SLOPES, _NUM_CHECKED, _MAX_ROUNDS = 8, 2000, 12
_VIOLATION = 1e-7


def _conjugate(slopes: np.ndarray, num_drafts: int, is_correlated: bool) -> np.ndarray:
  """c(t): for independent drafts by phi'(s) = K (1 - s)^(K - 1) = t; phi is min(1, K s) for correlated ones."""
  if is_correlated or num_drafts == 1:
    return np.maximum(0, 1 - slopes / num_drafts)
  reached = 1 - np.clip(slopes / num_drafts, 0, 1) ** (1 / (num_drafts - 1))
  return 1 - (1 - reached) ** num_drafts - slopes * reached


def _largest_sums(kept: np.ndarray, draft: np.ndarray, slopes: np.ndarray, vocab_size: int) -> np.ndarray:
  """The largest sum of kept - t p over sets of texts of which none begins another, for every slope, `[T]`."""
  gains = np.maximum(kept[:, None] - draft[:, None] * slopes, 0)
  end, size = len(kept), vocab_size
  sizes = []
  while end > 0:
    sizes.append(size)
    end, size = end - size, size * vocab_size
  begin = len(kept) - sizes[-1]
  best = gains[begin:]
  for size in reversed(sizes[:-1]):
    begin -= size
    best = np.maximum(gains[begin : begin + size], best.reshape(size, vocab_size, -1).sum(axis=1))
  return best.sum(axis=0)


def _program(draft, target, vocab_size: int, slopes, limits, has_state: bool):
  """Matrix and limits of the program: kept of every text, then w of every text for each slope."""
  from scipy import sparse

  size = len(draft)
  text = np.arange(size)
  above = text // vocab_size - 1  # -1 for texts of one token
  child, top = np.flatnonzero(above >= 0), np.flatnonzero(above < 0)
  own = sparse.csr_array((np.ones(size), (text, text)), shape=(size, size))
  ones = np.ones(len(child))
  below = sparse.csr_array((ones, (above[child], child)), shape=(size, size))[np.unique(above[child])]
  itself = own[np.unique(above[child])]
  if has_state:  # a text is kept at most as often as it is written, and its continuations at most as often as itself
    of_kept, kept_limits = sparse.vstack([own, below - itself]), np.concatenate([target, np.zeros(below.shape[0])])
  else:  # kept(xy) <= kept(x) q(y|x)
    before = np.where(above >= 0, target[np.maximum(above, 0)], 1)
    given = np.divide(target, before, out=np.zeros(size), where=before > 0)
    allowed = sparse.csr_array((given[child], (child, above[child])), shape=(size, size))
    of_kept, kept_limits = own - allowed, np.where(above < 0, target, 0)
  each, every = sparse.csr_array(np.eye(len(slopes))), sparse.csr_array(np.ones((len(slopes), 1)))
  top_row = sparse.csr_array((np.ones(len(top)), (np.zeros(len(top), int), top)), shape=(1, size))
  matrix = sparse.block_array(
    [
      [of_kept, None],
      [sparse.kron(every, own), -sparse.kron(each, own)],  # w(m) >= kept(m) - t p(m)
      [None, sparse.kron(each, below - itself)],
      [None, sparse.kron(each, top_row)],
    ],
    format='csr',
  )
  no_limit = np.zeros(len(slopes) * below.shape[0])
  return matrix, np.concatenate([kept_limits, np.outer(slopes, draft).reshape(-1), no_limit, limits])


def stateless_chains_optimum(
  draft_law, target_law, num_drafts: int, *, is_correlated: bool = False, has_state: bool = False
) -> float:
  """The largest mean number of tokens of K chains that a stateless lossless rule keeps in one round.

  It equals `stateless_optimum` on K chains, within 1e-6, and takes V + ... + V^L variables per slope instead of one for
  every set of guesses: V = 8, L = 4 and any K are a matter of seconds. The rule that attains it may know all
  distributions, also those after tokens that were not drafted.

  Two relatives bound rules beyond it. With `is_correlated` the drafts may depend on each other, each still drawn from
  p: then some draft begins with a text of M with probability at most min(1, K p(M)), and the value is an upper bound
  for all such drafts. With `has_state` the rule may let the text after a round depend on the round, as greedy block
  verification does: kept(m) is at most q(m), and kept(xy) <= kept(x) q(y|x) need not hold. The value is then
  `optimal_block_acceptance`: the most of a single round, not of several in a row.

  Source: this library.

  Args:
    draft_law, target_law: `[V] * L`, the joint distributions p of a draft and q of the target's next L tokens.
    num_drafts: K.
    is_correlated: Whether drafts may depend on each other.
    has_state: Whether rules may carry state over to the next round.

  Returns:
    A number of tokens, from 0 to L.

  Raises:
    ValueError: An argument is not a joint distribution, the shapes differ, K is below 1, or there are too many texts.
    RuntimeError: The solver failed.
  """
  draft, target = as_joint_probs(draft_law, target_law)
  num_drafts, vocab_size = whole_number(num_drafts, 'num_drafts'), draft.shape[0]
  draft, target = (np.concatenate(prefix_probs(joint)) for joint in (draft, target))
  if len(draft) > MAX_TEXTS:
    raise ValueError(f'at most {MAX_TEXTS} texts of 1 to L tokens are allowed, got {len(draft)}')
  has_one_slope = is_correlated or num_drafts == 1
  slopes = [float(num_drafts)] if has_one_slope else list(num_drafts * np.linspace(0, 1, _NUM_SLOPES + 1)[1:])
  checked = num_drafts * np.linspace(0, 1, _NUM_CHECKED + 1)[1:]
  value = 0.0
  for _ in range(_MAX_ROUNDS):
    limits = _conjugate(np.array(slopes), num_drafts, is_correlated)
    matrix, right = _program(draft, target, vocab_size, slopes, limits, has_state)
    objective = np.zeros(matrix.shape[1])
    objective[: len(draft)] = 1
    value, solution = maximize(objective, matrix, right)
    if has_one_slope:
      break
    excess = _largest_sums(solution[: len(draft)], draft, checked, vocab_size)
    excess -= _conjugate(checked, num_drafts, is_correlated)
    if excess.max() < _VIOLATION:
      break
    padded = np.pad(excess, 1, constant_values=-1)
    is_peak = (excess >= _VIOLATION) & (excess >= padded[:-2]) & (excess >= padded[2:])
    slopes = sorted({*slopes, *checked[is_peak].tolist()})
  return value
