"""Bounds on the tokens that lossless rules keep of several drafts of several tokens, and a published claim."""

from __future__ import annotations

import itertools

import numpy as np

from spectr_jax.theory.arguments import as_joint_probs, prefix_probs, whole_number, whole_numbers
from spectr_jax.theory.linear_program import check_size, maximize


def _expected_matches(draft_law, target_law, num_drafts, match_fn) -> np.ndarray:
  """Sum over sub-blocks of q (1 - (1 - c)^K), where c = `match_fn(p, q)` is the probability that one draft has it."""
  draft, target = as_joint_probs(draft_law, target_law)
  numbers = whole_numbers(num_drafts, 'num_drafts')[..., None]
  pairs = zip(prefix_probs(draft), prefix_probs(target))
  terms = ((q * (1 - (1 - match_fn(p, q)) ** numbers)).sum(axis=-1) for p, q in pairs)
  return sum(terms, start=np.zeros(numbers.shape[:-1]))


def published_block_bound(draft_law, target_law, num_drafts) -> np.ndarray:
  """Lemma 5.1 of SpecTr-GBV: sum over sub-blocks x of q(x) (1 - (1 - min(p(x)/q(x), 1))^K), of 1 to L tokens.

  The paper states it as the most tokens of K drafts that can be accepted, and as the number that SpecTr-GBV attains.
  For K = 1 both statements hold. For K > 1 it is not a bound: other lossless rules keep more. For one token it never
  exceeds `optimal_acceptance`, since 1 - (1 - t)^K is concave. For longer blocks no distributions were found where it
  exceeds `optimal_block_acceptance`. SpecTr-GBV as published neither attains it nor keeps the target's distribution.

  The proof gives every draft the same distribution c(. | y) given the target's block y, independently of the other
  drafts. For c it takes the maximal coupling of one draft with the target. Then two drafts are both x with probability
  E_y c(x|y)^2. But drafts are drawn independently of each other, so this must be p(x)^2 = (E_y c(x|y))^2. By Jensen's
  inequality c(x|y) is then the same for all y. So draft and target are independent, and that class attains
  `independent_block_acceptance` and no more. For any other c the drafts do not have the distribution p^K;
  `conditional_coupling_error` says by how much they miss it.

  Source: SpecTr-GBV, "Multi-Draft Block Verification Accelerating Speculative Decoding", Lemma 5.1 and Definition 4.1.

  It is a number of tokens from 0 to L, float64 of K's shape, for joint distributions p of a draft and q of the target's
  next L tokens, `[V] * L`, and `num_drafts` K, an integer or an array of them; ValueError for other arguments.
  """

  def maximal_coupling(p, q):
    return np.divide(np.minimum(p, q), q, out=np.ones_like(q), where=q > 0)

  return _expected_matches(draft_law, target_law, num_drafts, maximal_coupling)


def independent_block_acceptance(draft_law, target_law, num_drafts) -> np.ndarray:
  """Expected tokens of the target's block that independent drafts match: sum over sub-blocks x of q (1 - (1 - p)^K).

  For K > 1 this is the most that couplings of Definition 4.1 of SpecTr-GBV attain with the same conditional
  distribution for every draft (see `published_block_bound`).

  Arguments and the result are those of `published_block_bound`.
  """
  return _expected_matches(draft_law, target_law, num_drafts, lambda p, q: p)


def conditional_coupling_error(draft_law, target_law, num_drafts: int) -> float:
  """The total variation from p^K of K drafts that are coupled maximally with the target's block, else independent.

  Drafts are drawn from p^K. So if this is above 0, the coupling that Lemma 5.1 of SpecTr-GBV assumes does not exist.

  It is a number from 0 to 1, for arguments of `published_block_bound` with one K; ValueError for others, and for too
  many combinations.
  """
  p, q = (joint_probs.reshape(-1) for joint_probs in as_joint_probs(draft_law, target_law))
  num_drafts = whole_number(num_drafts, 'num_drafts')
  check_size(len(p) ** (num_drafts + 1))
  both = np.minimum(p, q)
  excess = q - both
  rest = excess.sum()
  joint = np.diag(both) + (np.outer(excess, p - both) / rest if rest > 0 else 0)
  given = np.divide(joint, q[:, None], out=np.zeros_like(joint), where=q[:, None] > 0)
  drafts, independent = q[:, None], np.ones(1)
  for _ in range(num_drafts):
    drafts = (drafts[:, :, None] * given[:, None, :]).reshape(len(q), -1)
    independent = np.outer(independent, p).reshape(-1)
  return float(np.abs(drafts.sum(axis=0) - independent).sum() / 2)


def optimal_block_acceptance(draft_law, target_law, num_drafts: int) -> float:
  """An upper bound on the mean number of tokens of K independent drafts that a lossless rule keeps in one call.

  It maximises the expected length of the longest prefix that the target's block shares with some draft. The maximum is
  over all joint distributions with marginals p^K, of the drafts, and q, of the block. This is the problem of SpecTr-GBV
  without its Definition 4.1, solved by linear programming.

  The tokens that a rule keeps are a prefix of the text and of a draft. So the value bounds every rule whose output,
  followed by ordinary sampling, has the target's distribution. For L = 1 it is `optimal_acceptance`, and for K = 1
  greedy block verification attains it. For several drafts of longer blocks it may be out of reach.

  It is a number of tokens from 0 to L, for arguments of `published_block_bound` with one K; ValueError for others, and
  for too many combinations; RuntimeError if the solver fails.
  """
  from scipy import sparse

  draft, target = as_joint_probs(draft_law, target_law)
  num_drafts = whole_number(num_drafts, 'num_drafts')
  p, q = draft.reshape(-1), target.reshape(-1)
  check_size(len(p) ** (num_drafts + 1))
  blocks = np.array(list(itertools.product(range(draft.shape[0]), repeat=draft.ndim)))
  agreed = np.cumprod(blocks[:, None] == blocks, axis=-1).sum(axis=-1)

  # The value depends on the set of drafted blocks, not on their number or order.
  tuples = np.indices((len(p),) * num_drafts).reshape(num_drafts, -1)
  is_drafted = (tuples[:, :, None] == np.arange(len(p))).any(axis=0)
  sets, set_of = np.unique(is_drafted, axis=0, return_inverse=True)
  set_probs = np.bincount(set_of.reshape(-1), p[tuples].prod(axis=0))
  value = np.max(np.where(sets[:, :, None], agreed, 0), axis=1)
  set_index, block = np.nonzero(value)
  if not len(block):
    return 0.0
  ones, variable = np.ones(len(block)), np.arange(len(block))
  incidence = sparse.vstack(
    [
      sparse.csr_array((ones, (set_index, variable)), shape=(len(sets), len(block))),
      sparse.csr_array((ones, (block, variable)), shape=(len(q), len(block))),
    ]
  )
  return maximize(value[set_index, block], incidence, np.concatenate([set_probs, q]))[0]
