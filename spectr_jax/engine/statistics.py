"""Counts over the positions that verifications visited, for calibration and for comparison with the optimum."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.optimum import given_optimum, optimal_acceptance
from spectr_jax.proposal import Proposal
from spectr_jax.tree import TokenTree, Tree
from spectr_jax.verifiers import Verdict
from spectr_jax.verifiers.contexts import preferences, spellings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
  """Counts over the positions visited: those below the root and below every accepted node that have candidates.

  The candidates of a position are the children of all nodes that spell the accepted prefix.

  Attributes:
    visits: int32 `[B, L, W + 1]`, at `[d, n]` the visits of the position at depth d + 1 with n candidates.
    accepts: int32 `[B, L, W + 1]`, the visits among them that accepted a candidate.
    accepted_child: int32 `[B, L, C]`, at `[d, i]` the accepted candidates at depth d + 1 that were their parent's child
      i, in the order drawn.
    optimum: float32 `[B]`, the sum over the positions of the largest acceptance probability that any token-level
      verification reaches with the i.i.d. and the given candidates. Block methods can accept more, because they
      accept a token in view of those after it.
  """

  visits: jax.Array
  accepts: jax.Array
  accepted_child: jax.Array
  optimum: jax.Array

  @classmethod
  def zeros(cls, batch_size: int, tree: TokenTree) -> Statistics:
    """The counts before any visit, of B rows on a tree or within its bounds."""
    shape = batch_size, tree.max_depth, tree.levels.shape[1] + 1
    children = batch_size, tree.max_depth, tree.most_children
    return cls(
      jnp.zeros(shape, jnp.int32),
      jnp.zeros(shape, jnp.int32),
      jnp.zeros(children, jnp.int32),
      jnp.zeros(batch_size, jnp.float32),
    )

  def __add__(self, other: Statistics) -> Statistics:
    return jax.tree.map(jnp.add, self, other)


def round_statistics(tree: Tree, proposal: Proposal, target_probs: jax.Array, verdict: Verdict) -> Statistics:
  """The statistics of a round on one row, without the leading axis; its tree has at least one node."""
  depths, parents = jnp.asarray(tree.depths), jnp.asarray(tree.parent_of)
  places = jnp.arange(tree.max_depth)
  paths = jnp.asarray(tree.paths)
  spelled = spellings(paths, proposal.tokens)
  kept = jnp.where(places < verdict.num_accepted, proposal.tokens[verdict.path - 1], -3)
  is_active = jnp.all((spelled == kept) | (paths < 0), axis=-1)
  is_candidate = is_active[parents] & (jnp.pad(proposal.tokens, (1, 0)) >= 0) & (depths > 0)
  num_candidates = jnp.zeros(tree.max_depth, jnp.int32).at[depths - 1].add(is_candidate)
  is_visited = (places <= verdict.num_accepted) & (num_candidates > 0)
  is_accepted = places < verdict.num_accepted

  width = tree.levels.shape[1] + 1
  by_count = jnp.arange(width) == num_candidates[:, None]
  child = jnp.asarray(tree.child_index)[verdict.path]
  by_child = jnp.arange(tree.most_children) == child[:, None]

  parent_index = jnp.asarray(tree.parent_index)
  nodes = jnp.argmax(is_active * preferences(tree, proposal) * (depths == places[:, None]), axis=-1)
  distributions = proposal.probs[parent_index[nodes]], target_probs[nodes]
  if proposal.is_given is None:
    optima = optimal_acceptance(*distributions, num_candidates)
  else:
    is_drawn = is_candidate & ~jnp.pad(proposal.is_given, (1, 0))
    num_drawn = jnp.zeros(tree.max_depth, jnp.int32).at[depths - 1].add(is_drawn)
    optima = given_optimum(*distributions, num_drawn, _is_given_token(tree, proposal, is_candidate & ~is_drawn))
  return Statistics(
    visits=(by_count & is_visited[:, None]).astype(jnp.int32),
    accepts=(by_count & (is_visited & is_accepted)[:, None]).astype(jnp.int32),
    accepted_child=(by_child & is_accepted[:, None]).astype(jnp.int32),
    optimum=jnp.sum(jnp.where(is_visited, optima, 0)).astype(jnp.float32),
  )


def _is_given_token(tree: Tree, proposal: Proposal, is_given: jax.Array) -> jax.Array:
  """bool `[L, V]`: the tokens of the given candidates of each depth; `is_given` is bool `[N + 1]`, by node."""
  nodes, vocab_size = jnp.asarray(tree.levels[1:-1]), proposal.probs.shape[-1]
  at = jnp.where((nodes >= 0) & is_given[nodes], proposal.tokens[nodes - 1], vocab_size)
  return jax.vmap(lambda at: jnp.zeros(vocab_size, bool).at[at].set(True, mode='drop'))(at)
