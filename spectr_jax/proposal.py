"""Candidates: a drafter's `Proposal` to a verifier, and the rules that draw children from a distribution."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from spectr_jax.sampling import arrivals, draw, draw_several


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
  """Guesses for every node of a tree, and the distributions they were drawn from.

  A drafter makes it for a batch; a verifier sees one row, without the leading axis and with `state` None.

  A row may shape its own tree within the bounds of a `TokenTree.slots`. One rule keeps every method lossless: the
  children of a node are *allocated before they are drawn*. How many candidates a node gets, and whether it gets any, is
  fixed before the first of them is drawn, and no node is expanded twice or dropped afterwards. Which nodes are
  expanded, in what order and how far, may depend on everything drawn until then, on the draft's distributions and on
  budgets. A second candidate that is drawn only if the first is likely, or a tree pruned by the tokens in it, biases
  the output.

  A candidate may also be *given*: chosen by a rule and not sampled, as a matched n-gram or the draft's likeliest tokens
  are. Its distribution is a point mass. All candidates of a position are given, or all are drawn, unless the
  method takes both beside each other (`Method.takes_mixed`). Given candidates must not depend on the draws of their
  position or of deeper ones, nor on the verification's randomness.

  Attributes:
    tokens: int32 `[B, N]`, the tokens of nodes 1..N; -1 for a node that does not exist, because its distribution had
      fewer tokens than the parent has children, or because the row does not use the slot.
    probs: `[B, R, V]`, the distributions that the children of `tree.parent_nodes` were drawn from, exactly as used:
      after temperature, top-k and top-p, in float32 or wider. Rows of nodes whose children are given, or that have
      none, are not read.
    state: The drafter's state while the guesses are pending.
    parents: int32 `[B, N]`, the parent of each node, a node of the depth above, or -1 for a slot that the row does not
      use; None where all rows have the parents of the tree.
    is_given: bool `[B, N]`, True for given candidates; None where all are drawn.
  """

  tokens: jax.Array
  probs: jax.Array
  state: Any = None
  parents: jax.Array | None = None
  is_given: jax.Array | None = None


class ProposalRule(Protocol):
  """Draws the children of a node from its distribution; part of a method, since losslessness rests on it.

  It is hashable, and its options are fields. A field or a class attribute will do for each property.
  """

  @property
  def name(self) -> str:
    """Its name in messages and results."""
    ...

  @property
  def may_run_out(self) -> bool:
    """True if there can be fewer children than asked for; the others are -1."""
    ...

  @property
  def are_exchangeable(self) -> bool:
    """True if siblings are independent draws, so that the best tree gives all nodes of a depth equally many."""
    ...

  def __call__(self, key: jax.Array, probs: jax.Array, first_child: jax.Array, num_children: int) -> jax.Array:
    """Draws `num_children` children, int32; -1 for a child that could not be drawn.

    `key` is that for drafting of this round and depth; separate draws are keyed by node numbers, from `first_child` on.
    `probs` `[V]` is the distribution after the parent.
    """
    ...

  def probability(self, probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """The probability of drawing `tokens`, int32 `[num_children]`, in this order, from `probs` `[V]`; for proofs."""
    ...


@dataclasses.dataclass(frozen=True)
class Independent:
  """Draws children independently, with replacement."""

  name: str = 'independent'
  may_run_out: bool = dataclasses.field(default=False, init=False)
  are_exchangeable: bool = dataclasses.field(default=True, init=False)

  def __call__(self, key, probs, first_child, num_children):
    children = first_child + jnp.arange(num_children)
    uniforms = jax.vmap(lambda child: jax.random.uniform(jax.random.fold_in(key, child), dtype=probs.dtype))(children)
    return draw_several(uniforms, probs)

  def probability(self, probs, tokens):
    """The product of the tokens' probabilities, of `probs` `[V]` after the parent."""
    return jnp.prod(probs[tokens])


def _in_order_without_replacement(probs, tokens):
  """Probability of `tokens` by successive draws without the earlier tokens; -1 where nothing is left."""
  probability, left = jnp.ones((), probs.dtype), probs
  for i in range(tokens.shape[0]):
    token = tokens[i]
    mass = jnp.sum(left)
    drawn = jnp.where(mass > 0, left[token] / jnp.where(mass > 0, mass, 1), 0)
    probability *= jnp.where(token < 0, (mass == 0).astype(probs.dtype), drawn)
    left = jnp.where(jnp.arange(left.shape[0]) == token, 0, left)
  return probability


@dataclasses.dataclass(frozen=True)
class WithoutReplacement:
  """Draws siblings one after another, each from the distribution without the earlier ones, so they differ.

  They are distributed as the first arrivals of an exponential race, or Gumbel top-n ("Speculative Decoding via
  Exponential Races", section 2), without noise of the size of the vocabulary.
  """

  name: str = 'without_replacement'
  may_run_out: bool = dataclasses.field(default=True, init=False)
  are_exchangeable: bool = dataclasses.field(default=False, init=False)

  def __call__(self, key, probs, first_child, num_children):
    def draw_next(left, child):
      token = draw(jax.random.uniform(jax.random.fold_in(key, child), dtype=probs.dtype), left)
      is_there = left[token] > 0
      return left.at[token].set(0), jnp.where(is_there, token, -1)

    return jax.lax.scan(draw_next, probs, first_child + jnp.arange(num_children))[1]

  def probability(self, probs, tokens):
    """The probability of drawing `tokens` in this order, -1 where nothing is left to draw; see `ProposalRule`."""
    return _in_order_without_replacement(probs, tokens)


@dataclasses.dataclass(frozen=True)
class FirstArrivals:
  """Takes the first arrivals of an exponential race as siblings.

  Source: "Speculative Decoding via Exponential Races", Algorithm 5. All nodes of a depth share one race: the
  exponentials come from the depth's key alone, so that a verifier with the same key meets the same ones.
  """

  name: str = 'first_arrivals'
  may_run_out: bool = dataclasses.field(default=True, init=False)
  are_exchangeable: bool = dataclasses.field(default=False, init=False)

  def __call__(self, key, probs, first_child, num_children):
    del first_child
    times = arrivals(key, probs)
    if num_children > probs.shape[-1]:
      times = jnp.pad(times, (0, num_children - probs.shape[-1]), constant_values=jnp.inf)
    negated, tokens = jax.lax.top_k(-times, num_children)
    return jnp.where(jnp.isfinite(negated), tokens, -1).astype(jnp.int32)

  def probability(self, probs, tokens):
    """The probability that `tokens` arrive first, in this order, -1 where none is left; see `ProposalRule`."""
    return _in_order_without_replacement(probs, tokens)


@dataclasses.dataclass(frozen=True)
class LikeliestAndOne:
  """Takes the likeliest tokens as siblings, and draws the last one from the distribution without them.

  The candidates of UniVer (Weng, Hu, Yairi 2026). An only child is drawn. Of equally likely tokens the lower ones are
  taken; tokens of probability 0 never.
  """

  name: str = 'likeliest_and_one'
  may_run_out: bool = dataclasses.field(default=True, init=False)
  are_exchangeable: bool = dataclasses.field(default=False, init=False)

  def _likeliest(self, probs, count):
    """The tokens `[count]`, -1 where there is none, and the weights `[V]` of what is left."""
    probs = jnp.asarray(probs)
    weights, tokens = jax.lax.top_k(probs, min(count, probs.shape[-1]))
    tokens = jnp.where(weights > 0, tokens, -1).astype(jnp.int32)
    tokens = jnp.pad(tokens, (0, count - len(tokens)), constant_values=-1)
    return tokens, probs.at[jnp.where(tokens < 0, probs.shape[-1], tokens)].set(0, mode='drop')

  def __call__(self, key, probs, first_child, num_children):
    likeliest, left = self._likeliest(probs, num_children - 1)
    uniform = jax.random.uniform(jax.random.fold_in(key, first_child + num_children - 1), dtype=probs.dtype)
    token = draw(uniform, left)
    return jnp.append(likeliest, jnp.where(left[token] > 0, token, -1)).astype(jnp.int32)

  def probability(self, probs, tokens):
    """The probability of these siblings: that of the last one, if the others are the likeliest; see `ProposalRule`."""
    likeliest, left = self._likeliest(probs, len(tokens) - 1)
    drawn = _in_order_without_replacement(left, tokens[-1:])
    return jnp.where(jnp.all(likeliest == tokens[:-1]), drawn, 0)
