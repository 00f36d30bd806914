"""Constraints: automata over tokens that continuations must follow, as tables that are data of the compiled loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.tree import TokenTree

_MOST_CELLS = 2**28  # of all transitions of a batch, 1 GiB
_ROWS_AT_A_TIME = 64


class TableSizes(NamedTuple):
  """What tables have room for. They grow by factors of 4, so that most constraints share programs."""

  constraints: int = 4
  transitions: int = 2**16
  states: int = 2**10
  masks: int = 2**8


FEWEST = TableSizes()


@dataclasses.dataclass(frozen=True, eq=False)
class Constraint:
  """A deterministic automaton over tokens, which continuations follow.

  A continuation begins in state 0. A token with class c leads from state s to `next_state[s, c]`. An id that ends rows
  is allowed in final states alone, whatever its class, and it is all that is allowed in a final state without a way on.
  `spectr_jax.compile_constraint` makes constraints of regular expressions, JSON schemas and choices.

  Attributes:
    class_of: int32 `[V]`, the class of each token; tokens of a class lead to the same states.
    next_state: int32 `[S, C]`, the state after a token of each class; -1 where it is not allowed.
    is_final: bool `[S]`, the states in which a continuation may end.
    narrower: What was asked for and is not allowed all the same, in words.

  Raises:
    ValueError: A shape or a number does not fit, or there is a state in which nothing may follow and nothing may end.
  """

  class_of: np.ndarray
  next_state: np.ndarray
  is_final: np.ndarray
  narrower: tuple[str, ...] = ()

  def __post_init__(self):
    for name, dtype, num_axes in (('class_of', np.int32, 1), ('next_state', np.int32, 2), ('is_final', bool, 1)):
      array = np.asarray(getattr(self, name))
      is_fitting = array.dtype.kind in ('b' if dtype is bool else 'iu') and np.array_equal(array, array.astype(dtype))
      if array.ndim != num_axes or 0 in array.shape or not is_fitting:
        wanted = f'bools of {num_axes} axes' if dtype is bool else f'integers of {num_axes} axes below 2**31'
        raise ValueError(f'{name} of a constraint must be {wanted}, got {array.dtype} {list(array.shape)}')
      object.__setattr__(self, name, array.astype(dtype))
    num_states, num_classes = self.next_state.shape
    if len(self.is_final) != num_states:
      raise ValueError(f'is_final must be [{num_states}], as next_state has states, got [{len(self.is_final)}]')
    if self.class_of.min() < 0 or self.class_of.max() >= num_classes:
      raise ValueError(
        f'class_of must be from 0 to {num_classes - 1}, got {self.class_of.min()} to {self.class_of.max()}'
      )
    if self.next_state.min() < -1 or self.next_state.max() >= num_states:
      raise ValueError(
        f'next_state must be from -1 to {num_states - 1}, got {self.next_state.min()} to {self.next_state.max()}'
      )
    is_used = np.isin(np.arange(num_classes), self.class_of)
    is_stuck = ~self.is_final & ~(self.next_state[:, is_used] >= 0).any(axis=1)
    if is_stuck.any():
      raise ValueError(f'state {is_stuck.argmax()} of a constraint is not final, and no token leads on from it')

  @property
  def vocab_size(self) -> int:
    """V."""
    return len(self.class_of)

  @property
  def num_states(self) -> int:
    """S."""
    return len(self.next_state)

  @property
  def nbytes(self) -> int:
    """Bytes of the arrays; the masks that decoding makes of them come on top, V / 8 for each set of allowed tokens."""
    return self.class_of.nbytes + self.next_state.nbytes + self.is_final.nbytes

  def accepts(self, tokens: Sequence[int]) -> bool:
    """Whether tokens, without an id that ends them, are a whole continuation."""
    state = 0
    for token in tokens:
      state = int(self.next_state[state, self.class_of[token]]) if 0 <= token < self.vocab_size else -1
      if state < 0:
        return False
    return bool(self.is_final[state])


def num_planes(vocab_size: int) -> int:
  """The bits of a word of a mask that are used: the largest divisor of V up to 32."""
  return max(planes for planes in range(1, 33) if vocab_size % planes == 0)


def _packed(is_allowed: np.ndarray) -> np.ndarray:
  """Masks of bool `[M, V]`; token v is bit v // W of word v % W, so that words are unpacked side by side."""
  planes = num_planes(is_allowed.shape[1])
  words = np.zeros((len(is_allowed), is_allowed.shape[1] // planes), np.uint8 if planes <= 8 else np.uint32)
  for plane, part in enumerate(np.split(is_allowed, planes, axis=1)):
    words |= part.astype(words.dtype) << words.dtype.type(plane)
  return words


def _masks(constraint: Constraint, eos_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
  """The number of each state's mask, int32 `[S]`, and the masks `[M, W]`."""
  rows = np.concatenate([constraint.next_state >= 0, constraint.is_final[:, None]], axis=1)
  _, first, numbers = np.unique(np.packbits(rows, axis=1), axis=0, return_index=True, return_inverse=True)
  parts = []
  for start in range(0, len(first), _ROWS_AT_A_TIME):
    own = rows[first[start : start + _ROWS_AT_A_TIME]]
    is_allowed = own[:, constraint.class_of]
    is_allowed[:, eos_ids] = own[:, -1:]
    parts.append(_packed(is_allowed))
    if not is_allowed.any(axis=1).all():
      raise ValueError('a constraint needs eos_id: it has a state in which nothing but the end may follow')
  return numbers.reshape(-1).astype(np.int32), np.concatenate(parts)


def _room(size: int, least: int) -> int:
  while least < size:
    least *= 4
  return least


def numbered(
  constraint: Constraint | Sequence[Constraint | None] | None, batch_size: int
) -> tuple[list[Constraint], np.ndarray | None]:
  """The different constraints of B rows, and which of them each has, int32 `[B]`, -1 for none; None for none at all.

  Args:
    constraint: One for all rows, or one for each, or None.
    batch_size: B.

  Raises:
    ValueError: There are not as many as rows.
  """
  if constraint is None:
    return [], None
  rows = list(constraint) if isinstance(constraint, Iterable) else [constraint] * batch_size
  if len(rows) != batch_size:
    raise ValueError(f'constraint must be one Constraint, or a list of {batch_size}, one per prompt; got {len(rows)}')
  different = list({id(each): each for each in rows if each is not None}.values())
  return different, np.array([place_of(each, different) for each in rows], np.int32)


def place_of(constraint: Constraint | None, constraints: Sequence[Constraint]) -> int:
  """The place of a constraint, the very object, among others; -1 if it is not there."""
  return next((place for place, each in enumerate(constraints) if each is constraint), -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConstraintTables:
  """The constraints of a batch, joined: states have numbers of their own, and state 0 allows everything.

  It is the state of rows without a constraint, and of nodes below an end or below a token that is not allowed, which
  are never part of a continuation. Arrays are padded to few sizes.

  Attributes:
    class_of: int32 `[G, V]`, the class of each token under each constraint.
    next_state: int32 `[T]`, the transitions of all states; 0 where a token is not allowed.
    first: int32 `[S]`, where the transitions of each state begin.
    constraint_of: int32 `[S]`, the constraint of each state.
    mask_of: int32 `[S]`, the mask of each state.
    masks: `[M, W]`, sets of allowed tokens; token v is bit v // W of word v % W.
    starts: int32 `[G]`, the state in which each constraint begins.
  """

  class_of: jax.Array
  next_state: jax.Array
  first: jax.Array
  constraint_of: jax.Array
  mask_of: jax.Array
  masks: jax.Array
  starts: jax.Array

  @classmethod
  def join(
    cls,
    constraints: Sequence[Constraint],
    vocab_size: int,
    eos_ids: Sequence[int],
    sizes: TableSizes = FEWEST,
  ) -> ConstraintTables:
    """Joins the constraints of a batch.

    Args:
      constraints: G of them.
      vocab_size: V.
      eos_ids: Ids that end a row.
      sizes: Those that the tables have at least. Tables of equal sizes share programs.

    Raises:
      ValueError: A constraint is of another vocabulary or needs an id that ends rows, or all are too large together.
    """
    for constraint in constraints:
      if not isinstance(constraint, Constraint):
        raise ValueError(f'a constraint must be a Constraint, as compile_constraint makes, got {constraint!r}')
      if constraint.vocab_size != vocab_size:
        raise ValueError(f'a constraint is of {constraint.vocab_size} tokens, and the vocabulary has {vocab_size}')
    # The first row of transitions is that of state 0, which stays where it is whatever the class.
    free = max((each.next_state.shape[1] for each in constraints), default=1)
    num_cells = free + sum(each.next_state.size for each in constraints)
    if num_cells > _MOST_CELLS:
      raise ValueError(f'the constraints of a batch have {num_cells:,} transitions, allowed are {_MOST_CELLS:,}')
    everything = _packed(np.ones((1, vocab_size), bool))
    cells, masks = [np.zeros(free, np.int32)], [everything]
    first, constraint_of, mask_of = ([np.zeros(1, np.int32)] for _ in range(3))
    starts = []
    num_states, num_cells, num_masks = 1, free, 1
    for number, each in enumerate(constraints):
      own_mask_of, own_masks = _masks(each, [token for token in eos_ids if token >= 0])
      states, classes = each.next_state.shape
      starts.append(num_states)
      cells.append(np.where(each.next_state < 0, 0, each.next_state + num_states).astype(np.int32).reshape(-1))
      masks.append(own_masks)
      first.append(num_cells + classes * np.arange(states))
      constraint_of.append(np.full(states, number))
      mask_of.append(num_masks + own_mask_of)
      num_states, num_cells, num_masks = num_states + states, num_cells + states * classes, num_masks + len(own_masks)
    rooms = [_room(*pair) for pair in zip((len(constraints), num_cells, num_states, num_masks), sizes)]

    @jax.ensure_compile_time_eval()
    def padded(parts, room, dtype: Any = np.int32):
      whole = np.concatenate([np.asarray(part, dtype) for part in parts])
      return jnp.asarray(np.pad(whole, [(0, room - len(whole))] + [(0, 0)] * (whole.ndim - 1)))

    return cls(
      class_of=padded([np.zeros((0, vocab_size)), *(each.class_of[None] for each in constraints)], rooms[0]),
      next_state=padded(cells, rooms[1]),
      first=padded(first, rooms[2]),
      constraint_of=padded(constraint_of, rooms[2]),
      mask_of=padded(mask_of, rooms[2]),
      masks=padded(masks, rooms[3], everything.dtype),
      starts=padded([starts], rooms[0]),
    )

  @property
  def sizes(self) -> TableSizes:
    return TableSizes(len(self.class_of), len(self.next_state), len(self.first), len(self.masks))

  def after(self, states: jax.Array, tokens: jax.Array) -> jax.Array:
    """The states after tokens, of any shape; 0 for tokens below 0, for those not allowed, and for an end."""
    classes = self.class_of[self.constraint_of[states], jnp.maximum(tokens, 0)]
    return jnp.where(tokens < 0, 0, self.next_state[self.first[states] + classes])

  def allows(self, states: jax.Array, tokens: jax.Array) -> jax.Array:
    """Whether tokens of at least 0, of any shape, are allowed in states of the same shape."""
    width = self.masks.shape[1]
    words = self.masks[self.mask_of[states], tokens % width]
    return (words >> (tokens // width).astype(words.dtype)) & 1 != 0

  def mask(self, logits: jax.Array, states: jax.Array) -> jax.Array:
    """Logits `[B, W, V]` with -inf for tokens that are not allowed in the states `[B, W]`.

    An allowed token whose own logit is -inf counts only where no allowed token has another. So a draft that has none of
    them guesses any of them.
    """
    words = self.masks[self.mask_of[states]]
    width, planes = words.shape[-1], logits.shape[-1] // words.shape[-1]
    bits = words[..., None, :] >> jnp.arange(planes, dtype=words.dtype)[:, None]
    apart = logits.reshape(*states.shape, planes, width)
    masked = jnp.where(bits & 1 != 0, jnp.maximum(apart, -1e30), -jnp.inf)
    return masked.reshape(logits.shape)

  def of_nodes(
    self, states: jax.Array, tokens: jax.Array, tree: TokenTree, parents: jax.Array | None = None
  ) -> jax.Array:
    """The states `[B, N + 1]` of all nodes.

    Args:
      states: int32 `[B]`, those of the roots.
      tokens: int32 `[B, N]`, -1 for nodes that do not exist.
      tree: The tree, or the bounds of the rows' trees.
      parents: int32 `[B, N]`, as in `Proposal`.
    """
    return self._descend(states, tokens, tree, parents)[0]

  def allowed_guesses(self, states: jax.Array, tokens: jax.Array, tree: TokenTree) -> jax.Array:
    """`tokens` `[B, N]` with -1 for those that are not allowed, and for all below them; arguments as of `of_nodes`."""
    return self._descend(states, tokens, tree, None, drops=True)[1]

  def _descend(self, states, tokens, tree, parents, *, drops=False):
    """The states of nodes, and their tokens, depth by depth; `drops` drops tokens that are not allowed."""
    of_nodes, kept = states[:, None], jnp.zeros((len(states), 1), jnp.int32)
    for depth in range(1, tree.max_depth + 1):
      nodes = np.flatnonzero(tree.depths == depth)
      own = tokens[:, nodes - 1]
      if parents is None:
        above = tree.parent_of[nodes]
        before, is_below = of_nodes[:, above], kept[:, above] >= 0
      else:
        above = jnp.maximum(parents[:, nodes - 1], 0)
        before, is_below = (jnp.take_along_axis(rows, above, axis=1) for rows in (of_nodes, kept >= 0))
      if drops:
        own = jnp.where(is_below & (own >= 0) & self.allows(before, jnp.maximum(own, 0)), own, -1)
      of_nodes = jnp.concatenate([of_nodes, self.after(before, own)], axis=1)
      kept = jnp.concatenate([kept, own], axis=1)
    return of_nodes, kept[:, 1:]


def masked(constraints: ConstraintTables | None, logits: jax.Array, states: jax.Array | None) -> jax.Array:
  """`ConstraintTables.mask`; the logits themselves without constraints."""
  return logits if constraints is None or states is None else constraints.mask(logits, states)
