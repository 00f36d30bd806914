"""Beginnings of texts, kept by last use: a prompt that begins like a text which rows held before reads the rest.

Texts are cut into blocks of tokens. The key of a block is a hash of all tokens down to its end, so blocks of equal keys
hold the same, and texts share those that they begin with. What cannot go back to a block's end, as recurrent states, is
kept where texts ended, with the tokens behind the last block.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.draft import Drafter
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.reading import constrain_held
from spectr_jax.engine.state import Held
from spectr_jax.model import LENGTH, NO_SLOTS
from spectr_jax.sharding import replicated

BLOCK = 16  # tokens
_AT_A_TIME = 16  # blocks that a program copies at most; so one serves every number


class Found(NamedTuple):
  """What is kept of the beginning of a prompt.

  Attributes:
    num_tokens: The number of its tokens.
    keys: The blocks, in order.
  """

  num_tokens: int = 0
  keys: Sequence[bytes] = ()


class _Entry(NamedTuple):
  """A block, its slots of all caches in one array of each type, and what a text's end has besides."""

  slots: tuple[jax.Array, ...]
  end: tuple[jax.Array, ...]

  @property
  def num_bytes(self) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(self))


class _Leaf(NamedTuple):
  """Where an array of `Held` has its tokens.

  Attributes:
    axis: That of tokens, `LENGTH`, or `NO_SLOTS`.
    lookahead: See `Drafter.lookahead`.
  """

  axis: int
  lookahead: int


def why_not(decoder: Decoder) -> str | None:
  """The reason why nothing is kept of a decoder's texts, or None."""
  cache = jax.eval_shape(functools.partial(decoder.target.init_cache_fn, 1, decoder.cache_size))
  if not hasattr(cache, 'slot_axes'):
    return 'the cache of the target does not say where its tokens are (slot_axes)'
  if not (decoder.can_truncate or decoder.keeps_ends):
    return 'the state of the draft can neither go back nor be continued where it ends'
  return None


def keeps_draft(drafter: Drafter | None) -> bool:
  """Whether a drafter's state is kept as well; if not, the draft reads prompts from their start."""
  if drafter is None:
    return True
  state = jax.eval_shape(functools.partial(drafter.init, 1, BLOCK))
  has_slots = any(hasattr(each, 'slot_axes') for each in _caches(state))
  return not jax.tree.leaves(state) or drafter.lookahead is not None and has_slots


def _caches(state: Any) -> list[Any]:
  return jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, 'slot_axes'))


def _axes(state: Any, lookahead: int) -> list[_Leaf]:
  """One for each array of a state; those outside of caches have no slots."""
  return [
    _Leaf(axis, lookahead)
    for each in _caches(state)
    for axis in (jax.tree.leaves(each.slot_axes()) if hasattr(each, 'slot_axes') else [NO_SLOTS])
  ]


def _layout(decoder: Decoder, held: Held) -> list[_Leaf | None]:
  """One for each array of what rows hold; None for those that are not kept."""
  has_features, drafter = held.features is not None, decoder.drafter
  leaves: list[_Leaf | None] = [*_axes(held.target_cache, 0), *[_Leaf(1, 0)] * has_features]
  if drafter is not None and keeps_draft(drafter):
    leaves += _axes(held.draft_state, drafter.lookahead or 0)
  arrays = jax.tree.leaves(held)
  leaves += [None] * (len(arrays) - len(leaves))
  is_end = not decoder.can_truncate
  return [
    leaf if leaf and array.ndim and (leaf.axis >= 0 or leaf.axis == LENGTH or is_end) else None
    for leaf, array in zip(leaves, arrays, strict=True)
  ]


def _slots(leaf: _Leaf, array: jax.Array, row: Any, block: Any) -> tuple[list[Any], tuple[int, ...]]:
  """Where a block's slots of an array begin, and their shape.

  A block before the end of the caches begins earlier, and the first one of a drafter that looks ahead as well. They
  overlap with those before them, or hold slots that `read` drops; blocks are copied in order.
  """
  width = min(BLOCK, array.shape[leaf.axis])
  begin: list[Any] = [row, *[0] * (array.ndim - 1)]
  begin[leaf.axis] = jnp.clip(block * BLOCK - leaf.lookahead, 0, array.shape[leaf.axis] - width)
  shape = [1, *array.shape[1:]]
  shape[leaf.axis] = width
  return begin, tuple(shape)


def _kept(decoder: Decoder, held: Held, is_kept: Any) -> Iterator[tuple[int, _Leaf, jax.Array]]:
  for place, (leaf, array) in enumerate(zip(_layout(decoder, held), jax.tree.leaves(held), strict=True)):
    if leaf is not None and is_kept(leaf.axis):
      yield place, leaf, array


def _is_slots(axis: int) -> bool:
  return axis >= 0


def _ends(decoder: Decoder):
  """Which arrays are those of a text's end, by their axes."""
  return (lambda axis: False) if decoder.can_truncate else (lambda axis: axis < 0)


def _sizes(decoder: Decoder, held: Held) -> dict[Any, int]:
  """The numbers of values of a block, by their types."""
  sizes: dict[Any, int] = collections.defaultdict(int)
  for _, leaf, array in _kept(decoder, held, _is_slots):
    sizes[array.dtype] += math.prod(_slots(leaf, array, 0, 0)[1])
  return dict(sizes)


@jax.jit
def _copy_out(decoder: Decoder, held: Held, row: jax.Array, first: jax.Array) -> tuple[_Entry, ...]:
  """The blocks of a row from `first` on; those behind its text hold anything. All have what the end has besides."""
  if decoder.sharding is not None:  # every device keeps all
    whole = replicated(decoder.sharding.mesh)
    held = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x.at[row[None]].get(), whole) if x.ndim else x, held)
    row = jnp.zeros_like(row)

  def block(number):
    parts = {dtype: [] for dtype in _sizes(decoder, held)}
    for _, leaf, array in _kept(decoder, held, _is_slots):
      parts[array.dtype].append(jax.lax.dynamic_slice(array, *_slots(leaf, array, row, number)).reshape(-1))
    return tuple(map(jnp.concatenate, parts.values()))

  blocks = jax.lax.map(block, first + jnp.arange(_AT_A_TIME))
  end = tuple(array[row] for _, _, array in _kept(decoder, held, _ends(decoder)))
  return tuple(_Entry(tuple(each[i] for each in blocks), end) for i in range(_AT_A_TIME))


@functools.partial(jax.jit, donate_argnames='held')
def _copy_in(
  decoder: Decoder,
  held: Held,
  blocks: Sequence[tuple[jax.Array, ...]],
  end: tuple[jax.Array, ...],
  row: jax.Array,
  first: jax.Array,
  num_blocks: jax.Array,
) -> Held:
  """`held` with the slots of the first `num_blocks` of some blocks in a row, from block `first` on, and its end."""
  leaves, tree = jax.tree.flatten(held)
  slots = list(_kept(decoder, held, _is_slots))
  stacked = dict(zip(_sizes(decoder, held), map(jnp.stack, zip(*blocks))))

  def put(i, arrays):
    at, new = dict.fromkeys(stacked, 0), []
    for (_, leaf, _), array in zip(slots, arrays, strict=True):
      begin, shape = _slots(leaf, array, row, first + i)
      size = math.prod(shape)
      part = jax.lax.dynamic_slice(stacked[array.dtype], (i, at[array.dtype]), (1, size))
      at[array.dtype] += size
      new.append(jax.lax.dynamic_update_slice(array, part.reshape(shape), begin))
    return new

  new = jax.lax.fori_loop(0, num_blocks, put, [array for _, _, array in slots])
  for (place, _, _), array in zip(slots, new, strict=True):
    leaves[place] = array
  if decoder.can_truncate:
    for place, leaf, array in _kept(decoder, held, lambda axis: axis == LENGTH):
      leaves[place] = array.at[row].set(((first + num_blocks) * BLOCK - leaf.lookahead).astype(array.dtype))
  for (place, _, array), own in zip(_kept(decoder, held, _ends(decoder)), end, strict=True):
    leaves[place] = array.at[row].set(own)
  held = jax.tree.unflatten(tree, leaves)
  return constrain_held(decoder.sharding, decoder.target, decoder.drafter, held)


class PrefixCache:
  """Blocks of texts that rows of a decoder held, those used last, within so many bytes on every device.

  Attributes:
    keeps_draft: Whether they have the drafter's state.
    least_bytes: Those that a short text takes.
    num_bytes: What they take.
    num_hits: The prompts that began with some.
    num_tokens: The tokens of prompts that were taken from here.
  """

  def __init__(self, decoder: Decoder, held: Held, max_bytes: int):
    """Begins without a block.

    Args:
      decoder: Its models must stay; `why_not` must be None.
      held: Of its rows, any.
      max_bytes: The most bytes.
    """
    self._decoder, self._max_bytes = dataclasses.replace(decoder, constraints=None), max_bytes
    self._entries: collections.OrderedDict[bytes, _Entry] = collections.OrderedDict()  # the one used last is the last
    self.keeps_draft = keeps_draft(decoder.drafter)
    self._block_bytes = sum(size * dtype.itemsize for dtype, size in _sizes(decoder, held).items())
    ends = _kept(decoder, held, _ends(decoder))
    self._end_bytes = sum(array.nbytes // len(array) for _, _, array in ends)
    self.least_bytes = self._block_bytes + self._end_bytes
    self.num_bytes = self.num_hits = self.num_tokens = 0

  def compile(self, held: Held) -> Held:
    """`held`, which is donated, once both programs were run on it."""
    entries = _copy_out(self._decoder, held, np.int32(0), np.int32(0))
    return self._copy_in(held, 0, entries, 0, entries[0].end)

  def find(self, tokens: np.ndarray) -> Found:
    """The longest beginning of a prompt int32 `[P]` that is kept, without its last token, which is always read."""
    keys = []
    for key in _keys(tokens[:-1]):
      if key not in self._entries:
        break
      keys.append(key)
    if self._decoder.can_truncate:
      return Found(len(keys) * BLOCK, keys)
    for num_blocks in range(len(keys), -1, -1):
      at = num_blocks * BLOCK
      for end in range(min(at + BLOCK, len(tokens) - 1), at, -1):
        if (key := _end_key(keys[:num_blocks], tokens[at:end])) in self._entries:
          return Found(end, [*keys[:num_blocks], key])
    return Found()

  def load(self, held: Held, row: int, found: Found) -> Held:
    """`held`, which is donated, with a beginning that was found in a row."""
    entries = [self._entries[key] for key in found.keys]
    for key in reversed(found.keys):
      self._entries.move_to_end(key)
    for first in range(0, len(entries), _AT_A_TIME):
      held = self._copy_in(held, row, entries[first : first + _AT_A_TIME], first, entries[-1].end)
    self.num_hits, self.num_tokens = self.num_hits + 1, self.num_tokens + found.num_tokens
    return held

  def _copy_in(self, held: Held, row: int, entries: Sequence[_Entry], first: int, end: tuple[jax.Array, ...]) -> Held:
    # Behind the last block stands what fills the shape.
    slots = [entry.slots for entry in [*entries, *[entries[-1]] * (_AT_A_TIME - len(entries))]]
    return _copy_in(self._decoder, held, slots, end, np.int32(row), np.int32(first), np.int32(len(entries)))

  def keep(self, held: Held, row: int, text: np.ndarray, *, is_end: bool) -> None:
    """Keeps a row's text int32 `[T]`, of which the caches hold all but the last token, and a model's draft two less.

    `is_end` says whether they end there, and not behind it; else a state that cannot go back is not kept.
    """
    if not self._decoder.can_truncate and not is_end:
      return
    keys = list(_keys(text[:-2]))
    if self._decoder.can_truncate:
      keys = keys[: self._max_bytes // self._block_bytes]
    elif len(text) < 2 or len(keys) * self._block_bytes + self._block_bytes + self._end_bytes > self._max_bytes:
      return
    else:
      keys.append(_end_key(keys, text[len(keys) * BLOCK : -1]))
    new: dict[int, _Entry] = {}
    missing = [place for place, key in enumerate(keys) if key not in self._entries]
    last = len(keys) - 1
    num_more = len(missing) * self._block_bytes + self._end_bytes * (last in missing)
    for key in keys:  # which stay, where others make room
      if key in self._entries:
        self._entries.move_to_end(key)
    while missing and self.num_bytes + num_more > self._max_bytes:
      self.num_bytes -= self._entries.popitem(last=False)[1].num_bytes
    for place in missing:
      if place not in new:
        entries = _copy_out(self._decoder, held, np.int32(row), np.int32(place))
        new |= dict(enumerate(entries, place))
    for place in range(last, -1, -1):  # so that the last block of a text goes first
      if (entry := self._entries.pop(keys[place], None)) is None:
        entry = new[place] if place == last else new[place]._replace(end=())
        self.num_bytes += entry.num_bytes
      self._entries[keys[place]] = entry


def _keys(tokens: np.ndarray) -> Iterator[bytes]:
  """The keys of a text's whole blocks."""
  key = b''
  for end in range(BLOCK, len(tokens) + 1, BLOCK):
    yield (key := _hashed(key, tokens[end - BLOCK : end]))


def _hashed(before: bytes, tokens: np.ndarray, mark: bytes = b'') -> bytes:
  return hashlib.sha256(before + tokens.astype('<i4').tobytes() + mark).digest()


def _end_key(keys: Sequence[bytes], tokens: np.ndarray) -> bytes:
  """The key of a text's end: what stands behind its blocks."""
  return _hashed(keys[-1] if keys else b'', tokens, b'end')
