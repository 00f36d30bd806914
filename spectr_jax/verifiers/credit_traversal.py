"""Methods that try every branch of a tree, leaves first, by credit that flows down from the root: what they share."""

from __future__ import annotations

import abc
import dataclasses
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.kernels.on_demand import map_needed
from spectr_jax.kernels.token_sums import sums_of_rows
from spectr_jax.kernels.tree_steps import first_kept
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import draw, positive_part
from spectr_jax.tree import Tree
from spectr_jax.verifiers.contexts import Contexts, contexts_of, slots_of
from spectr_jax.verifiers.verifier import Decisions, Record, RecordedVerifier, Verdict, stop_at, uniforms_of_nodes

# Masses are compared in steps of 1 over this. Finer steps keep no more tokens; the bounds between two steps, such as
# 1.5/256, are no shares k/n of fewer than 512 candidates, so rounding never decides between two of these.
_ORDER_STEPS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
  """How the contexts of a row share their credit; entries of slots that stand for no context are arbitrary."""

  is_before: jax.Array  # bool `[L, W, W]`, at `[d, j, k]` whether k of depth d + 1 is visited before its sibling j
  num_contestants: jax.Array  # int32 `[R]`, candidates that share; 0 for rows that stand for no context


AnyPlan = TypeVar('AnyPlan', bound=Plan)


def siblings(contexts: Contexts) -> jax.Array:
  """bool `[L, W, W]`: whether two contexts follow the same one; each is its own sibling."""
  above, stands = contexts.above[1:], contexts.stands[1:]
  return (above[:, :, None] == above[:, None, :]) & stands[:, :, None] & stands[:, None, :]


def ascending(values: jax.Array, is_sibling: jax.Array) -> jax.Array:
  """bool, whether k comes before j: the smaller of `values` `[..., W]` in [0, 1], and of equal ones the lower slot.

  Values are rounded to 1/256, so that those equal up to rounding keep their order whatever the batch.
  """
  place, values = jnp.arange(values.shape[-1]), jnp.round(_ORDER_STEPS * values)
  mine, other = values[..., :, None], values[..., None, :]
  return is_sibling & ((other < mine) | ((other == mine) & (place < place[:, None])))


def law_rows(tree: Tree, proposal: Proposal, target_probs: jax.Array):
  """The draft's and the target's distributions after nodes that may have children, as `map_needed` takes them."""
  nodes = tree.parent_nodes
  return (proposal.probs, np.arange(len(nodes))), (target_probs, nodes)


def excess_of_single(laws, credits: jax.Array, is_single: jax.Array, otherwise: jax.Array) -> jax.Array:
  """S = sum of [P q - p]+ where a single candidate was drawn from p, else `otherwise`; `[R]`, as all but `laws`."""

  def of_one(p, q, credit):
    (excess,) = _excess_of_token([credit])([p, q])
    return jnp.sum(excess)

  def of_all(probs, target_probs, credits):
    rows = [places for _, places in laws]
    return sums_of_rows(_excess_of_token, (probs, target_probs), rows, credits[:, None])

  return map_needed(of_one, is_single, otherwise, laws, (credits,), all_fn=of_all)


def _excess_of_token(params):
  """[P q - p]+ of a token with the credit P as the parameter, as `sums_of_rows` takes it."""
  (credit,) = params
  return lambda token: [positive_part(credit * token[1] - token[0])]


class CreditTraversal(RecordedVerifier, Generic[AnyPlan]):
  """Visits every branch, leaves first, and keeps the first context that its credit pays for.

  Nodes that spell the same are one *context*, whose candidates are the children of all of them. Every context c has a
  credit P, 1 at the root. A *plan* divides it: each distinct candidate x gets a mass m(x). The masses of a position sum
  to at most 1, and on average over the candidates a token y gets M(y) of at most P(c) q(y). Then

      P(cx) = m(x) / (1 - sum of m over the candidates before x).

  Contexts are visited in this order, children before parents, and the first with u < h is kept, where

      S(c) = sum over y of P(c) q(y) - M(y),    h(c) = S(c) / (S(c) + 1 - P(c)).

  The next token comes from P(c) q - M. A context without candidates has h = P and the residual q; the root has h = 1.

  It is lossless because a visit of c with credit P keeps a context from c on with probability P, and then emits tokens
  that follow q. The proof is by induction. Candidate x is reached with probability 1 - sum of earlier m, so the mass
  through x is m(x), which averages to M. Nothing below c is kept with probability 1 - sum of M = S + 1 - P, so c itself
  adds S times the residual. The sum of both is P q. The order enters nowhere: it may be any function of the candidates
  of c and of the distributions up to there. It must not depend on the uniforms or on deeper tokens, since then P would
  depend on what it decides about.

  The frame was published as UniVer (Weng, Hu, Yairi 2026) and found here independently. Subclasses differ in the plan.

  A record has the decisions context by context as visited; they are named `keep`, and the first that is kept is the
  last.
  """

  tries_every_branch = True

  def _contexts(self, tree: Tree, proposal: Proposal) -> Contexts:
    return contexts_of(tree, proposal)

  @abc.abstractmethod
  def _steps(self, tree: Tree, proposal: Proposal, target_probs) -> tuple[Contexts, AnyPlan, jax.Array]:
    """The contexts, the plan, and log P by slot, `[L + 1, W]`."""

  @abc.abstractmethod
  def _excess(self, tree: Tree, proposal: Proposal, target_probs, plan: AnyPlan, log_credits, is_open) -> jax.Array:
    """S by row of `Proposal.probs`, `[R]`; arbitrary without candidates and where `is_open` `[R]` is False."""

  @abc.abstractmethod
  def _residual(self, tree: Tree, proposal: Proposal, target_probs, plan: AnyPlan, log_credit, node) -> jax.Array:
    """P q - M after a node with candidates, `[V]`."""

  @abc.abstractmethod
  def _numbers(self, plan: AnyPlan, log_above: jax.Array) -> dict[str, jax.Array]:
    """Numbers `[L, W]` of contexts below the root, from log P above each, for display: m as `mass`, and more."""

  def _keep_probs(self, tree: Tree, proposal: Proposal, target_probs, contexts, plan, log_credits, uniforms=None):
    """h by slot, `[L + 1, W]`; given uniforms, 0 for contexts with u >= P, which cannot be kept since h <= P."""
    slots = slots_of(tree)
    is_open = contexts.stands
    if uniforms is not None:
      is_open &= (uniforms < jnp.exp(log_credits)) | (jnp.arange(len(log_credits)) == 0)[:, None]
    own = log_credits[slots.of_parents]
    is_needed = is_open[slots.of_parents] & (slots.of_parents[0] > 0)
    excess = self._excess(tree, proposal, target_probs, plan, own, is_needed)
    total = excess - jnp.expm1(own)
    # With P = 1 and no excess, draft and target agree.
    is_agreed = total <= 0
    inner = jnp.where(is_agreed, 1, excess / jnp.where(is_agreed, 1, total))
    rows = jnp.asarray(slots.parent_index)
    is_leaf = (rows < 0) | (plan.num_contestants[rows] == 0)
    probs = jnp.where(is_leaf, jnp.exp(log_credits), jnp.minimum(inner[rows], jnp.exp(log_credits)))
    probs = probs.at[0, 0].set(1)
    return jnp.where(is_open, probs, 0)

  def _weights(self, tree: Tree, proposal: Proposal, target_probs, plan: AnyPlan, log_credit, node):
    """Weights `[V]` of the next token after the context that `node` stands for."""
    row = jnp.asarray(tree.parent_index)[node]
    residual = self._residual(tree, proposal, target_probs, plan, log_credit, node)
    is_left = (row >= 0) & (plan.num_contestants[row] > 0) & (jnp.sum(residual) > 0)
    return jnp.where(is_left, residual, target_probs[node])

  def _first_kept(self, tree: Tree, contexts: Contexts, plan: AnyPlan, is_kept):
    """The node of the first context in the order of visits that is kept; int32 scalar."""
    return first_kept(contexts.is_child, plan.is_before, is_kept, jnp.asarray(slots_of(tree).nodes, jnp.int32))

  def _arrivals(self, contexts: Contexts, plan: AnyPlan, keep_probs):
    """The probability that each context is visited, that is, that all before it are rejected, by slot `[L + 1, W]`."""

    def shallower(nothing_from, depth):
      """The probability that nothing is kept from each context on, given that all before were rejected."""
      is_child, keep_probs = depth
      below = jnp.prod(jnp.where(is_child, nothing_from, 1), axis=-1)
      nothing_from = (1 - keep_probs) * below
      return nothing_from, (nothing_from, below)

    ones = jnp.ones_like(keep_probs[-1])
    leaves = 1 - keep_probs[-1]
    _, (nothing_from, below) = jax.lax.scan(shallower, leaves, (contexts.is_child, keep_probs[:-1]), reverse=True)
    nothing_from = jnp.concatenate([nothing_from, leaves[None]])

    def deeper(arrive, depth):
      above, is_before, nothing_from = depth
      arrive = arrive[above] * jnp.prod(jnp.where(is_before, nothing_from, 1), axis=-1)
      return arrive, arrive

    _, arrive = jax.lax.scan(deeper, ones, (contexts.above[1:], plan.is_before, nothing_from[1:]))
    return jnp.concatenate([ones[None], arrive]) * jnp.concatenate([below, ones[None]])

  def _credit_of(self, tree: Tree, log_credits, node):
    """log P of the context that `node` stands for."""
    return log_credits[jnp.asarray(tree.depths)[node], jnp.asarray(slots_of(tree).of_nodes)[node]]

  def without_candidates(self, keys, tree: Tree, target_probs, state) -> Verdict:
    return Verdict.at(
      tree, jnp.zeros((), jnp.int32), draw(uniforms_of_nodes(keys, tree, target_probs.dtype)[-1], target_probs), state
    )

  def decide(
    self, keys, tree: Tree, proposal: Proposal, target_probs, state, *, is_explained: bool
  ) -> tuple[Verdict, Record]:
    uniforms = uniforms_of_nodes(keys, tree, target_probs.dtype)
    if tree.num_nodes == 0:
      return stop_at(tree, 0, target_probs[0], uniforms[-1], state, {})
    contexts, plan, log_credits = self._steps(tree, proposal, target_probs)
    own = uniforms[slots_of(tree).nodes]
    # An explanation shows every h; a verdict needs only those that its uniforms do not exclude.
    laws = tree, proposal, target_probs
    keep_probs = self._keep_probs(*laws, contexts, plan, log_credits, None if is_explained else own)
    node = self._first_kept(tree, contexts, plan, own < keep_probs)
    weights = self._weights(*laws, plan, self._credit_of(tree, log_credits, node), node)
    decisions = {}
    if is_explained:
      decisions['keep'] = self._decisions(tree, contexts, plan, log_credits, keep_probs, own, node)
    verdict, record = stop_at(tree, node, weights, uniforms[-1], state, decisions)
    if is_explained:
      record = dataclasses.replace(record, credits=self._credits(tree, contexts, log_credits))
    return verdict, record

  def _credits(self, tree: Tree, contexts: Contexts, log_credits) -> jax.Array:
    """P by node, `[N + 1]`: nodes that spell the same have that of their context, and missing ones 0."""
    is_own = contexts.is_same & contexts.stands[:, None, :]
    credits = jnp.sum(jnp.where(is_own, jnp.exp(log_credits)[:, None, :], 0), axis=-1)
    return credits[jnp.asarray(tree.depths), jnp.asarray(slots_of(tree).of_nodes)]

  def _decisions(self, tree: Tree, contexts: Contexts, plan: AnyPlan, log_credits, keep_probs, own, node) -> Decisions:
    """The contexts in the order of visits, up to the first that is kept, for display; `own` holds uniforms by slot."""
    slots = slots_of(tree)
    visit = jnp.where(contexts.stands, _visits(contexts, plan), tree.num_nodes + 1)

    def in_order(values, fill):
      """Values by slot, `[L + 1, W]`, in the order of visits, `[N + 1]`."""
      empty = jnp.full(tree.num_nodes + 1, fill, values.dtype)
      return empty.at[visit].set(values, mode='drop')

    nodes, log_above = (
      in_order(jnp.asarray(slots.nodes), 0),
      jnp.take_along_axis(log_credits[:-1], contexts.above[1:], 1),
    )
    more = self._numbers(plan, log_above)
    more |= {'log_above': log_above, 'before': jnp.sum(jnp.where(plan.is_before, more['mass'][:, None, :], 0), axis=-1)}
    is_visited = jnp.arange(tree.num_nodes + 1) <= jnp.argmax(nodes == node)
    return jax.vmap(Decisions.of_one)(
      is_made=is_visited & (nodes > 0),
      node=nodes,
      share=in_order(keep_probs, 0),
      uniform=in_order(own, 0),
      is_chosen=nodes == node,
      numbers={'log_kept': in_order(log_credits, 0)}
      | {k: in_order(jnp.pad(x, ((1, 0), (0, 0))), 0) for k, x in more.items()},
    )

  def law(self, tree, proposal, target_probs, state):
    del state
    if tree.num_nodes == 0:
      return target_probs
    slots = slots_of(tree)
    contexts, plan, log_credits = self._steps(tree, proposal, target_probs)
    keep_probs = self._keep_probs(tree, proposal, target_probs, contexts, plan, log_credits)
    stops = self._arrivals(contexts, plan, keep_probs) * keep_probs
    stop = jnp.zeros(tree.num_nodes + 1, stops.dtype).at[slots.nodes].add(jnp.where(slots.is_node, stops, 0))

    def weights(node):
      own = self._credit_of(tree, log_credits, node)
      residual = self._weights(tree, proposal, target_probs, plan, own, node)
      return residual / jnp.sum(residual)

    return stop[:, None] * jax.vmap(weights)(jnp.arange(tree.num_nodes + 1))


def _visits(contexts: Contexts, plan: Plan) -> jax.Array:
  """The number of each context in the order of visits, by slot; int32 `[L + 1, W]`."""
  stands = contexts.stands.astype(jnp.int32)

  def shallower(size, depth):
    is_child, stands = depth
    size = stands + jnp.sum(jnp.where(is_child, size, 0), axis=-1, dtype=jnp.int32)
    return size, size

  _, sizes = jax.lax.scan(shallower, stands[-1], (contexts.is_child, stands[:-1]), reverse=True)
  sizes = jnp.concatenate([sizes, stands[-1:]])

  def deeper(begin, depth):
    above, is_before, size = depth
    begin = begin[above] + jnp.sum(jnp.where(is_before, size, 0), axis=-1, dtype=jnp.int32)
    return begin, begin

  _, begins = jax.lax.scan(deeper, jnp.zeros_like(sizes[0]), (contexts.above[1:], plan.is_before, sizes[1:]))
  # A context comes after all contexts below it.
  return jnp.concatenate([jnp.zeros_like(sizes[:1]), begins]) + sizes - 1
