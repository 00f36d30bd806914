"""Several drafts of several tokens in one call: what any lossless rule can keep, and what was claimed."""

from __future__ import annotations

import itertools

import numpy as np

from spectr_jax.theory.laws import as_joint_laws, prefix_laws

MAX_PROGRAM_SIZE = 10**5
# As for one token: masses are scaled up, since the solver's tolerances are absolute.
_SCALE, _TOLERANCE = 2.0**10, 1e-10


def _numbers(num_drafts) -> np.ndarray:
  numbers = np.asarray(num_drafts)
  if not np.issubdtype(numbers.dtype, np.integer) or (numbers < 1).any():
    raise ValueError(f'num_drafts must be integers from 1 on, got {num_drafts}')
  return numbers


def _expected_found(draft_law, target_law, num_drafts, found_fn) -> np.ndarray:
  """Sum over sub-blocks of q (1 - (1 - c)^K), c being the probability `found_fn(p, q)` that one draft has it."""
  draft, target = as_joint_laws(draft_law, target_law)
  numbers = _numbers(num_drafts)[..., None]
  pairs = zip(prefix_laws(draft), prefix_laws(target))
  found = ((q * (1 - (1 - found_fn(p, q)) ** numbers)).sum(axis=-1) for p, q in pairs)
  return sum(found, start=np.zeros(numbers.shape[:-1]))


def published_block_bound(draft_law, target_law, num_drafts) -> np.ndarray:
  """Lemma 5.1 of SpecTr-GBV: sum over sub-blocks x of q(x) (1 - (1 - min(p(x)/q(x), 1))^K), of 1 to L tokens.

  Published as the most tokens that K drafts can have accepted, and as what SpecTr-GBV reaches. For K = 1 it is both.
  For K > 1 it bounds nothing: other lossless rules keep more. For one token it never exceeds `optimal_acceptance`,
  since 1 - (1 - t)^K is concave; of blocks no laws were found where it exceeds `optimal_block_acceptance`. And
  SpecTr-GBV as published neither reaches it nor keeps the target's law.

  The proof gives every draft the same law c(. | y) given the target's block y, independently, and takes for c the
  maximal coupling of one draft with the target. Then two drafts are both x with probability E_y c(x|y)^2, but they were
  drawn independently of each other, so that it must be p(x)^2 = (E_y c(x|y))^2. By Jensen's inequality c(x|y) is then
  the same for all y: draft and target are independent, and nothing but `independent_block_acceptance` can be attained
  in that class. By how much the drafts' law is missed otherwise is `conditional_coupling_error`.

  Source: SpecTr-GBV, "Multi-Draft Block Verification Accelerating Speculative Decoding", Lemma 5.1 and Definition 4.1.

  Args:
    draft_law: `[V] * L`, the joint law p of a draft.
    target_law: `[V] * L`, the joint law q of the target's next L tokens.
    num_drafts: K, an integer or an array of them.

  Returns:
    float64 of K's shape: tokens, from 0 to L.

  Raises:
    ValueError: Something is no joint law, their shapes differ, or K is below 1.
  """

  def maximal_coupling(p, q):
    return np.divide(np.minimum(p, q), q, out=np.ones_like(q), where=q > 0)

  return _expected_found(draft_law, target_law, num_drafts, maximal_coupling)


def independent_block_acceptance(draft_law, target_law, num_drafts) -> np.ndarray:
  """sum over sub-blocks x of q(x) (1 - (1 - p(x))^K): tokens of the target's block that drafts have by mere chance.

  All that couplings of Definition 4.1 of SpecTr-GBV can attain with the same conditional law for every draft, and K > 1
  (see `published_block_bound`).

  Args:
    draft_law: `[V] * L`, the joint law p of a draft.
    target_law: `[V] * L`, the joint law q of the target's next L tokens.
    num_drafts: K, an integer or an array of them.

  Returns:
    float64 of K's shape: tokens, from 0 to L.

  Raises:
    ValueError: Something is no joint law, their shapes differ, or K is below 1.
  """
  return _expected_found(draft_law, target_law, num_drafts, lambda p, q: p)


def check_size(num_combinations: int) -> None:
  """Refuses what would take too long to solve.

  Raises:
    ValueError: There are more than `MAX_PROGRAM_SIZE` combinations.
  """
  if num_combinations > MAX_PROGRAM_SIZE:
    raise ValueError(
      f'at most {MAX_PROGRAM_SIZE} combinations of guesses and texts are allowed, got {num_combinations}'
    )


def largest_value(values, matrix, limits) -> float:
  """max values . x over x >= 0 with matrix x <= limits, where x and the limits are probabilities.

  Args:
    values: `[X]`.
    matrix: `[C, X]`, sparse.
    limits: `[C]`.

  Raises:
    RuntimeError: The solver failed.
  """
  from scipy import optimize

  result = optimize.linprog(
    -np.asarray(values, np.float64),
    A_ub=matrix,
    b_ub=_SCALE * limits,
    method='highs',
    options={'primal_feasibility_tolerance': _TOLERANCE, 'dual_feasibility_tolerance': _TOLERANCE},
  )
  if not result.success:
    raise RuntimeError(f'linear program failed: {result.message}')
  return float(-result.fun / _SCALE)


def conditional_coupling_error(draft_law, target_law, num_drafts: int) -> float:
  """How far K drafts, each coupled maximally with the target's block and otherwise independent, are from p^K.

  In total variation. Above 0 the coupling that Lemma 5.1 of SpecTr-GBV assumes does not exist; drafts are drawn from
  p^K.

  Args:
    draft_law: `[V] * L`, the joint law p of a draft.
    target_law: `[V] * L`, the joint law q of the target's next L tokens.
    num_drafts: K.

  Returns:
    From 0 to 1.

  Raises:
    ValueError: Something is no joint law, their shapes differ, K is below 1, or there are too many combinations.
  """
  p, q = (law.reshape(-1) for law in as_joint_laws(draft_law, target_law))
  num_drafts = int(_numbers(num_drafts))
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
  """The most tokens of K independent drafts that a lossless rule can keep in one call, on average: an oracle.

  The largest expected length of what some draft and the target's block agree on from the start, over all joint laws of
  the drafts, p^K, and the block, q: the problem of SpecTr-GBV without its Definition 4.1, by linear programming.
  Whatever a rule keeps is a part of the text that both share, so this is a bound for every rule whose output, followed
  by ordinary sampling, has the target's law. For L = 1 it is `optimal_acceptance`, and for K = 1 greedy block
  verification attains it. Nothing is said of rules for longer blocks of several drafts: they may stay below.

  Args:
    draft_law: `[V] * L`, the joint law p of a draft.
    target_law: `[V] * L`, the joint law q of the target's next L tokens.
    num_drafts: K.

  Returns:
    Tokens, from 0 to L.

  Raises:
    ValueError: Something is no joint law, their shapes differ, K is below 1, or there are too many combinations.
    RuntimeError: The solver failed.
  """
  from scipy import sparse

  draft, target = as_joint_laws(draft_law, target_law)
  num_drafts = int(_numbers(num_drafts))
  p, q = draft.reshape(-1), target.reshape(-1)
  check_size(len(p) ** (num_drafts + 1))
  blocks = np.array(list(itertools.product(range(draft.shape[0]), repeat=draft.ndim)))
  agreed = np.cumprod(blocks[:, None] == blocks, axis=-1).sum(axis=-1)

  # Only which blocks were drafted matters, not how often or in what order.
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
  return largest_value(value[set_index, block], incidence, np.concatenate([set_probs, q]))
