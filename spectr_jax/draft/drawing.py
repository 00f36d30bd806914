"""The guesses of a tree, depth by depth: what drafters share that score one depth before they draw the next."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.draft.drafter import Drafter, DraftRequest, Growth
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import logits_to_probs
from spectr_jax.tree import TokenTree

Carry = TypeVar('Carry')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawingDrafter(Drafter):
  """A drafter that draws by `draw_tree`, with its own `growth`: it takes given tokens, and can be made to grow trees.

  Attributes:
    growth: The rule by which it grows a tree for every row, see `growing`; None if it draws one tree for all rows.
    estimates: Whether it estimates itself the chance that its guesses are accepted, for rules that read it
      (`Growth.reads_estimates`).
  """

  growth: Growth | None = None
  estimates = False

  @property
  def has_given_candidates(self) -> bool:
    """True if the rule of growth chooses its guesses and draws none."""
    return self.growth is not None and self.growth.has_given_candidates

  @property
  def has_grown_trees(self) -> bool:
    """True if there is a rule of growth."""
    return self.growth is not None


class ScoredNodes(NamedTuple):
  """W nodes of one depth that a drafter scores together: neighbors among the R of `tree.parent_nodes`."""

  tokens: jax.Array  # int32 [B, W]
  first: jax.Array  # int32 scalar, the place of the first among `tree.parent_nodes`
  depth: jax.Array  # int32 scalar
  above: jax.Array  # int32 [B, W], the place of each node's parent among `tree.parent_nodes`
  seen: jax.Array  # bool [B, W, R], the parent nodes that each attends to: those on its path, itself included


# `(carry, nodes) -> (carry, logits[B, W, V])`.
ScoreFn = Callable[[Carry, ScoredNodes], tuple[Carry, jax.Array]]


class Estimates(NamedTuple):
  """A drafter's own estimates of the chance that a guess is accepted; they must not read that guess or a later one."""

  root: jax.Array  # [B], for guesses after the root
  of_nodes: Callable[[ScoredNodes], jax.Array]  # [B, W], for guesses after W nodes


@dataclasses.dataclass(frozen=True)
class _Level:
  """The parents of one depth: their number, whether no leaf stands between two, and runs with equally many children.

  In `TokenTree.from_parents((0, 0, 0, 1, 1, 2, 3, 3))` depth 1 has the groups (0, 1, 2), (1, 1, 1) and (2, 1, 2).
  """

  width: int
  is_range: bool
  groups: tuple[tuple[int, int, int], ...]  # start, width, number of children


def _levels(tree: TokenTree) -> list[_Level]:
  levels = []
  for _, of_depth in itertools.groupby(tree.parent_nodes.tolist(), key=lambda node: tree.depths[node]):
    nodes, groups, start = list(of_depth), [], 0
    for num_children, group in itertools.groupby(nodes, key=lambda node: int(tree.num_children[node])):
      width = len(list(group))
      groups.append((start, width, num_children))
      start += width
    levels.append(_Level(start, nodes[-1] - nodes[0] == len(nodes) - 1, tuple(groups)))
  return levels


def draw_tree(
  request: DraftRequest,
  root_logits: jax.Array,
  carry: Carry,
  score_fn: ScoreFn,
  *,
  growth: Growth | None,
  estimates: Estimates | None = None,
) -> tuple[Proposal, Carry]:
  """Draws a tree, scoring every node that has children, given ones too; with `growth`, a tree of its own for every row.

  `root_logits` are `[B, V]`, after the root; `carry` is any pytree of arrays that `score_fn` takes from depth to depth.
  The proposal's state is `()`.
  """
  if growth is not None:
    return _grow_tree(request, growth, root_logits, carry, score_fn, estimates)
  tree, sampling, keys, given = request.tree, request.sampling, request.keys, request.given
  batch_size, vocab_size = root_logits.shape
  # By place among the parents: those of a range of places are a slice, where those of nodes are gathered.
  parents = jnp.asarray(tree.parent_nodes)
  first_child, depths = (jnp.asarray(of_nodes[tree.parent_nodes]) for of_nodes in (tree.first_child, tree.depths))
  above = jnp.asarray(tree.parent_index[tree.parent_of[tree.parent_nodes]])
  seen = jnp.asarray(tree.ancestors[np.ix_(tree.parent_nodes, tree.parent_nodes)])

  def score(state, first, width, is_range):
    """Computes the distributions `[B, width, V]` of parent nodes from number `first` on, beside the new state."""
    carry, tokens, probs, texts = state
    if is_range:
      own = jax.lax.dynamic_slice_in_dim(tokens, parents[first] - 1, width, axis=1)
    else:
      own = tokens[:, jax.lax.dynamic_slice_in_dim(parents, first, width) - 1]
    # A node that does not exist has the token -1; nothing below it is ever accepted, so any valid id will do.
    own = jnp.maximum(own, 0)
    above_own, seen_own = (
      jnp.broadcast_to(rows, (batch_size, *rows.shape))
      for rows in (jax.lax.dynamic_slice_in_dim(array, first, width) for array in (above, seen))
    )
    carry, logits = score_fn(carry, ScoredNodes(own, first, depths[first], above_own, seen_own))
    logits, texts = _limited(request, logits, texts, above_own, own, first, depths[first])
    new_probs = logits_to_probs(logits, sampling)
    return (carry, tokens, jax.lax.dynamic_update_slice_in_dim(probs, new_probs, first, axis=1), texts), new_probs

  def draw(state, new_probs, first, num_children):
    """Draws `num_children` children for each of the parent nodes of `new_probs`, from number `first` on."""
    carry, tokens, probs, texts = state
    width = new_probs.shape[1]
    children = jax.lax.dynamic_slice_in_dim(first_child, first, width)
    draw_row = jax.vmap(lambda row_key, probs, child: request.rule(row_key, probs, child, num_children), (None, 0, 0))
    drawn = jax.vmap(draw_row, (0, 0, None))(keys[:, depths[first]], new_probs, children).reshape(batch_size, -1)
    if given is not None:
      own = jax.lax.dynamic_slice_in_dim(given, children[0] - 1, width * num_children, axis=1)
      drawn = jnp.where(own >= 0, own, drawn)
    return carry, jax.lax.dynamic_update_slice_in_dim(tokens, drawn, children[0] - 1, axis=1), probs, texts

  def descend(state, new_probs, first, level):
    for start, width, num_children in level.groups:
      state = draw(state, new_probs[:, start : start + width], first + start, num_children)
    return state

  root_logits, texts = _limited_root(request, root_logits[:, None], len(tree.parent_nodes))
  new_probs = logits_to_probs(root_logits, sampling)
  tokens = jnp.zeros((batch_size, tree.num_nodes), jnp.int32)
  # Every row is written before it is read.
  probs = jax.lax.empty((batch_size, len(tree.parent_nodes), vocab_size), new_probs.dtype).at[:, :1].set(new_probs)
  root, *levels = _levels(tree)
  state = descend((carry, tokens, probs, texts), new_probs, 0, root)
  first = 1
  for level, run in itertools.groupby(levels):
    # Neighboring depths of one shape, as in long chains, are one loop, so the program does not grow with the depth.
    count = len(list(run))

    def one_depth(i, state, level=level, first=first):
      at = first + i * level.width
      return descend(*score(state, at, level.width, level.is_range), at, level)

    with jax.named_scope('depths'):
      state = jax.lax.fori_loop(0, count, one_depth, state)
    first += count * level.width
  last, tokens, probs, _ = state
  proposal = Proposal(tokens, probs, (), is_given=None if given is None else given >= 0)
  return proposal, cast(Carry, last)


class _Texts(NamedTuple):
  """What the texts of parent nodes come to; None where no row asks for it."""

  states: jax.Array | None  # int32 [B, R], under the rows' constraints
  paths: jax.Array | None  # int32 [B, R, L], the tokens on the path to each node, -1 for none; for penalties


def _limited_root(request: DraftRequest, logits: jax.Array, num_parents: int) -> tuple[jax.Array, _Texts]:
  """Logits `[B, 1, V]` after the root under the rows' constraints and penalties, and room for all parent nodes."""
  states = paths = None
  if request.constraints is not None and request.states is not None:
    roots = request.states[:, None]
    logits = request.constraints.mask(logits, roots)
    states = jnp.zeros((len(roots), num_parents), jnp.int32).at[:, :1].set(roots)
  if request.penalties is not None:
    paths = jnp.full((len(logits), num_parents, request.tree.max_depth), -1, jnp.int32)
    logits = request.penalties.apply(logits, paths[:, :1])
  return logits, _Texts(states, paths)


def _limited(
  request: DraftRequest,
  logits: jax.Array,
  texts: _Texts,
  above: jax.Array,
  tokens: jax.Array,
  first: jax.Array,
  depth: jax.Array,
) -> tuple[jax.Array, _Texts]:
  """Logits `[B, W, V]` after nodes of one depth under constraints and penalties, and the texts with those of the nodes.

  Args:
    request, logits: The rows' request, and what the drafter computed.
    texts: Those of the parent nodes of all depths above.
    above, tokens, first, depth: As of `ScoredNodes`.
  """
  states, paths = texts
  if request.constraints is not None and states is not None:
    own = request.constraints.after(jnp.take_along_axis(states, above, axis=1), tokens)
    logits = request.constraints.mask(logits, own)
    states = jax.lax.dynamic_update_slice_in_dim(states, own, first, axis=1)
  if request.penalties is not None and paths is not None:
    own = jnp.take_along_axis(paths, above[..., None], axis=1)
    own = jax.lax.dynamic_update_slice_in_dim(own, tokens[..., None], depth - 1, axis=2)
    logits = request.penalties.apply(logits, own)
    paths = jax.lax.dynamic_update_slice_in_dim(paths, own, first, axis=1)
  return logits, _Texts(states, paths)


def draw_by_depth(request: DraftRequest, logits: jax.Array, *, growth: Growth | None) -> Proposal:
  """Draws a tree from logits `[B, L, V]` by depth, whatever is guessed above; the proposal's state is `()`."""

  def score(carry, nodes: ScoredNodes):
    own = jax.lax.dynamic_index_in_dim(logits, nodes.depth, axis=1)
    return carry, jnp.broadcast_to(own, (*nodes.tokens.shape, logits.shape[-1]))

  return draw_tree(request, logits[:, 0], (), score, growth=growth)[0]


class _Growing(NamedTuple):
  """Trees while they grow; what the slots below the depth in progress hold is not used yet."""

  carry: Any
  tokens: jax.Array  # int32 [B, N], as in `Proposal`
  parents: jax.Array  # likewise
  chances: jax.Array  # [B, N + 1], the logarithm of each node's chance to be accepted; -inf for unused slots
  probs: jax.Array  # [B, R, V], as in `Proposal`
  seen: jax.Array  # bool [B, R, R], see `ScoredNodes`
  texts: _Texts
  estimates: jax.Array | None  # [B, R], for guesses after each parent node


def _grow_tree(
  request: DraftRequest,
  growth: Growth,
  root_logits: jax.Array,
  carry: Carry,
  score_fn: ScoreFn,
  estimates: Estimates | None,
) -> tuple[Proposal, Carry]:
  """`draw_tree` by a rule of growth. All nodes but the deepest are parents: a node's place among them is its number."""
  tree, keys = request.tree, request.keys
  sampling = growth.sampling(request.sampling)
  batch_size, vocab_size = root_logits.shape
  num_parents = len(tree.parent_nodes)
  widths = np.bincount(tree.depths).tolist()

  def score(state: _Growing, first, width, depth):
    """Computes the distributions after the nodes of a depth."""
    nodes = first + jnp.arange(width)
    # An unused slot runs on token 0 below the root; nothing below it is ever used.
    tokens, above = (jnp.maximum(rows[:, nodes - 1], 0) for rows in (state.tokens, state.parents))
    scored = ScoredNodes(tokens, first, depth, above, state.seen[:, nodes])
    carry, logits = score_fn(state.carry, scored)
    logits, texts = _limited(request, logits, state.texts, above, tokens, first, depth)
    if estimates is not None and state.estimates is not None:
      own = estimates.of_nodes(scored).astype(state.estimates.dtype)
      state = state._replace(estimates=jax.lax.dynamic_update_slice_in_dim(state.estimates, own, first, axis=1))
    new_probs = logits_to_probs(logits, sampling)
    probs = jax.lax.dynamic_update_slice_in_dim(state.probs, new_probs, first, axis=1)
    return state._replace(carry=carry, probs=probs, texts=texts)

  def expand(state: _Growing, first, width, num_slots, depth):
    """Fills the slots of the next depth."""
    slots = first + width + jnp.arange(num_slots)
    probs, chances, own = (
      None if rows is None else jax.lax.dynamic_slice_in_dim(rows, first, width, axis=1)
      for rows in (state.probs, state.chances, state.estimates)
    )
    above, tokens, worth = jax.vmap(
      lambda key, probs, chances, own: growth.expand(key, request.rule, probs, chances, slots, own)
    )(keys[:, depth], probs, chances, own)
    parents = jnp.where(above < 0, -1, first + above).astype(jnp.int32)
    seen = jax.vmap(lambda seen, parents: seen[parents])(state.seen, jnp.maximum(parents, 0))
    return state._replace(
      tokens=state.tokens.at[:, slots - 1].set(tokens),
      parents=state.parents.at[:, slots - 1].set(parents),
      chances=state.chances.at[:, slots].set(worth),
      # The slots of the last depth are not scored, and have no place here.
      seen=state.seen.at[:, slots].set(seen | (slots[:, None] == jnp.arange(num_parents)), mode='drop'),
    )

  root_logits, texts = _limited_root(request, root_logits[:, None], num_parents)
  new_probs = logits_to_probs(root_logits, sampling)
  unused = jnp.full((batch_size, tree.num_nodes), -1, jnp.int32)
  state = _Growing(
    carry=carry,
    tokens=unused,
    parents=unused,
    chances=jnp.full((batch_size, tree.num_nodes + 1), -jnp.inf, new_probs.dtype).at[:, 0].set(0),
    probs=jnp.zeros((batch_size, num_parents, vocab_size), new_probs.dtype).at[:, :1].set(new_probs),
    seen=jnp.zeros((batch_size, num_parents, num_parents), bool).at[:, 0, 0].set(True),
    texts=texts,
    estimates=None if estimates is None else jnp.zeros((batch_size, num_parents)).at[:, 0].set(estimates.root),
  )
  state = expand(state, 0, 1, widths[1], 0)
  first, depth = 1, 1
  for (width, num_slots), run in itertools.groupby(zip(widths[1:], widths[2:])):
    # Neighboring depths of one width are one loop, which ends early where no row has a node to go on from.
    end = depth + len(list(run))

    def goes_on(loop, width=width, first=first, start=depth, end=end):
      state, depth = loop
      at = first + (depth - start) * width
      return (depth < end) & jnp.any(jax.lax.dynamic_slice_in_dim(state.chances, at, width, axis=1) > -jnp.inf)

    def one_depth(loop, width=width, num_slots=num_slots, first=first, start=depth):
      state, depth = loop
      at = first + (depth - start) * width
      return expand(score(state, at, width, depth), at, width, num_slots, depth), depth + 1

    with jax.named_scope('depths'):
      state, _ = jax.lax.while_loop(goes_on, one_depth, (state, jnp.int32(depth)))
    first, depth = first + (end - depth) * width, end
  is_given = state.parents >= 0 if growth.has_given_candidates else None
  return Proposal(state.tokens, state.probs, (), state.parents, is_given), state.carry
