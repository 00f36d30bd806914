"""The most that two ways to plan ahead keep of two chains, by linear programs: what coordination is worth.

Both know all distributions, also those after tokens that were not drafted, and decide in the frame of a method:

divided       credit goes down each branch apart, and branches are visited one after the other, as in `race_traversal`:
              the best division of credit with the best order of visits.
coordinated   the contexts of a depth share one mass, whatever they follow, as in `race_layers`: the best masses.

Variables are masses: the probability of the guesses, times that with which a context is kept or one below it.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from scipy import sparse

from spectr_jax.theory.arguments import as_joint_probs, prefix_probs
from spectr_jax.theory.linear_program import check_size, maximize

_MAX_ROUNDS = 50
_VIOLATION = 1e-6  # tokens


def given_texts(joint: np.ndarray) -> list[np.ndarray]:
  """The distributions `[V^d, V]` after texts of d tokens, of `[V] * L`; uniform after those that cannot occur."""
  probs, laws = [np.ones(1), *prefix_probs(joint)], []
  for above, own in zip(probs, probs[1:]):
    rows = own.reshape(len(above), -1)
    uniform = np.full_like(rows, 1 / rows.shape[1])
    laws.append(np.divide(rows, above[:, None], out=uniform, where=above[:, None] > 0))
  return laws


def _share_of_mass(probs: np.ndarray) -> tuple[sparse.csr_array, np.ndarray]:
  """M(s, t) + M(t, s) for pairs of texts, s <= t, and their probabilities; M is in rows of s."""
  size = len(probs)
  row, other = np.triu_indices(size)
  pair, is_apart = np.arange(len(row)), row != other
  places = np.concatenate([row * size + other, (other * size + row)[is_apart]])
  pairs = np.concatenate([pair, pair[is_apart]])
  matrix = sparse.csr_array((np.ones(len(places)), (pairs, places)), shape=(len(row), size**2))
  return matrix, np.where(is_apart, 2, 1) * probs[row] * probs[other]


def _flow(law: np.ndarray) -> tuple[sparse.sparray, sparse.sparray]:
  """Of the rows (sx, t): the sum of M(sx, ty) over y, and -M(s, t) q(x|s), for the target's distributions after s."""
  above, vocab_size = law.shape
  size, text = above * vocab_size, np.arange(above * vocab_size)
  summed = sparse.kron(sparse.eye_array(size * above), np.ones((1, vocab_size)))
  steps = sparse.csr_array((law.reshape(-1), (text, text // vocab_size)), shape=(size, above))
  return summed, -sparse.kron(steps, sparse.eye_array(above))


def _cuts(draft: np.ndarray, target: np.ndarray, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """What bounds the mass kept of the last tokens x after s and y after t, for pairs s <= t and sets A, B of tokens.

  It is at most M(s, t) q(not A) + M(t, s) q(not B) + P(x in A or y in B), and the least of these (max-flow min-cut);
  sets of the largest q / p are enough. Returns the factors of M(s, t) and of M(t, s), and the last term, `[pairs, C]`.
  """
  with np.errstate(divide='ignore', invalid='ignore'):
    order = np.argsort(-np.where(draft > 0, target / draft, np.inf), axis=1)
  p, q = (np.cumsum(np.take_along_axis(law, order, axis=1), axis=1) for law in (draft, target))
  p, q = (np.pad(sums, ((0, 0), (1, 0))) for sums in (p, q))
  row, other = np.triu_indices(len(draft))
  sets, beside = (each.reshape(-1) for each in np.indices((p.shape[1],) * 2))
  is_same = (row == other)[:, None]
  # Below one text both tokens count alike: A = B, and the text's mass is cut once.
  own = np.where(is_same, 1 - p[row][:, sets], 1 - p[other][:, beside])
  union = 1 - (1 - p[row][:, sets]) * own
  prob = np.where(row == other, 1, 2) * probs[row] * probs[other]
  return 1 - q[row][:, sets], np.where(is_same, 0, 1 - q[other][:, beside]), prob[:, None] * union


def coordinated_optimum(draft_law, target_law) -> float:
  """Tokens that the best masses keep of two drafts, when the contexts of a depth share one mass.

  With M(s, t) the mass of the text s where the other draft spells t, of d tokens both: M(s, t) + M(t, s) is at most the
  probability of the two drafts, and the sum of M(sx, ty) over y at most M(s, t) q(x|s). The last depth needs no masses:
  what can be kept there is the least of `_cuts`, which are added until none is violated.

  Args:
    draft_law, target_law: `[V] * L`, the joint distributions of a draft and of the target's next L tokens.

  Raises:
    ValueError: An argument is no joint distribution, or there are too many pairs of texts.
  """
  joint = as_joint_probs(draft_law, target_law)
  draft, target = ([np.ones(1), *prefix_probs(each)] for each in joint)
  laws = [given_texts(each) for each in joint]
  check_size(len(draft[-2]) ** 2)
  depths = range(len(draft) - 1)  # masses are those of texts of 0 to L - 1 tokens
  offsets = np.cumsum([0] + [len(draft[depth]) ** 2 for depth in depths])
  blocks: list[list] = []
  limits: list[np.ndarray] = []
  for depth in depths:
    matrix, of_pairs = _share_of_mass(draft[depth])
    blocks.append([matrix if each == depth else None for each in depths])
    limits.append(of_pairs)
    if depth:
      summed, steps = _flow(laws[1][depth - 1])
      blocks.append([{depth: summed, depth - 1: steps}.get(each) for each in depths])
      limits.append(np.zeros(summed.shape[0]))
  masses = sparse.block_array(blocks, format='csr')
  size = len(draft[-2])
  row, other = np.triu_indices(size)
  first, second, union = _cuts(laws[0][-1], laws[1][-1], draft[-2])
  last, pair = offsets[-2], np.arange(len(row))
  worths = np.concatenate([[0.0], np.ones(offsets[-1] - 1), np.ones(len(row))])  # the root is no token
  chosen = [(pair, np.full(len(row), cut)) for cut in (0, union.shape[1] - 1)]
  for _ in range(_MAX_ROUNDS):
    pairs, cuts = map(np.concatenate, zip(*chosen))
    number = np.arange(len(pairs))
    values = np.concatenate([np.ones(len(pairs)), -first[pairs, cuts], -second[pairs, cuts]])
    columns = np.concatenate(
      [offsets[-1] + pairs, last + (row * size + other)[pairs], last + (other * size + row)[pairs]]
    )
    rows = sparse.csr_array((values, (np.tile(number, 3), columns)), shape=(len(pairs), len(worths)))
    matrix = sparse.vstack([sparse.hstack([masses, sparse.csr_array((masses.shape[0], len(row)))]), rows])
    value, solution = maximize(worths, matrix, np.concatenate([*limits, union[pairs, cuts]]))
    own = solution[last : offsets[-1]].reshape(size, size)
    bounds = first * own[row, other][:, None] + second * own[other, row][:, None] + union
    least = bounds.argmin(axis=1)
    excess = solution[offsets[-1] :] - bounds[pair, least]
    if excess.sum() < _VIOLATION:
      break
    chosen.append((pair[excess > 0], least[excess > 0]))
  return value


@dataclasses.dataclass
class _Program:
  """A linear program that grows: variables at least 0, of worth 1 each or none, and constraints."""

  worths: list[float] = dataclasses.field(default_factory=list)
  entries: list[tuple[int, int, float]] = dataclasses.field(default_factory=list)
  limits: list[float] = dataclasses.field(default_factory=list)

  def variable(self, worth: float = 1.0) -> int:
    self.worths.append(worth)
    return len(self.worths) - 1

  def at_most(self, limit: float, *terms: tuple[int, float]) -> None:
    self.entries += [(len(self.limits), variable, factor) for variable, factor in terms]
    self.limits.append(limit)

  def solve(self) -> float:
    rows, columns, factors = zip(*self.entries)
    matrix = sparse.csr_array((factors, (rows, columns)), shape=(len(self.limits), len(self.worths)))
    return maximize(np.array(self.worths), matrix, np.array(self.limits))[0]


def _lines_of_one(draft: list[np.ndarray], target: list[np.ndarray], text: int, depth: int) -> list[tuple]:
  """Slopes and heights of lines whose least is what a single draft keeps below a text, as a function of its credit."""
  credits, kept = _one_draft(draft, target, text, depth)
  slopes = np.diff(kept) / np.diff(credits)
  return list(zip(slopes, kept[:-1] - slopes * credits[:-1]))


def _one_draft(draft, target, text: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
  """The ends of the linear pieces, and what is kept there: block verification."""
  if depth == len(draft):
    return np.array([0.0, 1.0]), np.zeros(2)
  p, q = draft[depth][text], target[depth][text]
  size, ends, below = len(p), [np.array([0.0, 1.0])], []
  for token in range(size):
    credits, kept = _one_draft(draft, target, text * size + token, depth + 1)
    below.append((credits, credits + kept))
    if q[token] > 0:
      ends.append(credits * p[token] / q[token])
  ends = np.unique(np.concatenate(ends).clip(0, 1))
  ends = ends[np.append(True, np.diff(ends) > 1e-9)]
  ratios = np.divide(q, p, out=np.zeros_like(q), where=p > 0)
  return ends, sum(weight * np.interp(ends * ratio, *own) for weight, ratio, own in zip(p, ratios, below))


def divided_optimum(draft_law, target_law) -> float:
  """Tokens that the best division of credit with the best order of visits keeps of two drafts.

  Arguments and errors are those of `coordinated_optimum`. A context with one draft below it is verified as a block. Of
  two candidates u and v, u first, the credits m(u) and m(v) / (1 - m(u)) keep m(u) and m(v); each pair of guesses may
  take either order, or choose by chance.
  """
  draft, target = map(given_texts, as_joint_probs(draft_law, target_law))
  program = _Program()

  def visit(text: int, depth: int, prob: float, own: int | None) -> None:
    """A context that both drafts spell, with the variable of its mass; None for the root, which has all."""
    p, q = draft[depth][text], target[depth][text]
    used: list[list[int]] = [[] for _ in p]
    lines = [_lines_of_one(draft, target, text * len(p) + token, depth + 1) for token in range(len(p))]
    for pair in itertools.combinations(range(len(p)), 2):
      orders = [program.variable(0), program.variable(0)]
      program.at_most(2 * prob * p[pair[0]] * p[pair[1]], *((order, 1) for order in orders))
      for order, (first, second) in zip(orders, (pair, pair[::-1])):
        masses, below = (program.variable(), program.variable()), (program.variable(), program.variable())
        used[first].append(masses[0])
        used[second].append(masses[1])
        program.at_most(0, (masses[0], 1), (masses[1], 1), (order, -1))
        for slope, height in lines[first]:
          program.at_most(0, (below[0], 1), (masses[0], -slope), (order, -height))
        for slope, height in lines[second]:
          program.at_most(0, (below[1], 1), (masses[1], -slope), (order, -height), (masses[0], height))
    for token, share in enumerate(p):
      both, both_prob = program.variable(), prob * share**2
      program.at_most(both_prob, (both, 1))
      terms = [(mass, 1.0) for mass in (*used[token], both)]
      if own is None:
        program.at_most(q[token], *terms)
      else:
        program.at_most(0, *terms, (own, -q[token]))
      if depth + 1 < len(draft) and both_prob > 0:
        visit(text * len(p) + token, depth + 1, both_prob, both)

  visit(0, 0, 1.0, None)
  return program.solve()
