"""Rounds of a verifier of any project over tables: rows of all kinds side by side, and what it is called with."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from spectr_jax.sampling import SamplingParams, logits_to_probs
from spectr_jax.testing.checks import describe_error
from spectr_jax.testing.tables import ContextTables, random_tables
from spectr_jax.tree import TokenTree

PARAMETERS = (
  'key', 'seed', 'row_keys', 'positions', 'tree', 'parents', 'tokens', 'lengths', 'draft_probs', 'target_probs',
  'draft_logits', 'target_logits', 'temperature', 'top_k', 'top_p', 'state',
)  # fmt: skip
ROWS_PER_KIND = 1024  # in a batch

# The distributions `[M, V]` of logits `[M, V]` and the parameters `[M]`.
PlainFn = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Any]


@dataclasses.dataclass(frozen=True)
class Kind:
  """Rows of one kind: logits of draft and target after every context, and sampling parameters."""

  name: str
  tables: ContextTables
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0


def kinds_of_rows(seed: int, vocab_size: int, max_length: int) -> list[Kind]:
  """The kinds of rows of a batch."""
  dense = random_tables(3 * seed, vocab_size, max_length, zero_share=0, equal_share=0)
  sparse = random_tables(3 * seed + 1, vocab_size, max_length)
  other = random_tables(3 * seed + 2, vocab_size, max_length, zero_share=0, equal_share=0)
  noise = 1 + 1e-3 * np.sin(np.arange(dense.draft_probs.size)).reshape(dense.draft_probs.shape)
  near = dense.draft_probs * noise
  halves = np.arange(vocab_size) < (vocab_size + 1) // 2
  left, right = np.where(halves, other.draft_probs, 0), np.where(halves, 0, other.target_probs)
  left, right = (laws / laws.sum(axis=1, keepdims=True) for laws in (left, right))
  return [
    Kind('zeros, some contexts with p = q', sparse),
    Kind('no zeros', dense),
    Kind('p = q', ContextTables(dense.draft_probs, dense.draft_probs, max_length)),
    Kind('p nearly q', ContextTables(dense.draft_probs, near / near.sum(axis=1, keepdims=True), max_length)),
    Kind('disjoint supports', ContextTables(left, right, max_length)),
    Kind('temperature 0', other, temperature=0.0),
    Kind('temperature 0.7, top-p 0.8', other, temperature=0.7, top_p=0.8),
    Kind('temperature 0.5, top-k 2', other, temperature=0.5, top_k=2),
  ]


@jax.jit
def plain_law(logits, temperature, top_k, top_p) -> jax.Array:
  """The distributions of this library's own sampling: temperature, top-k, then top-p of the tokens that are left."""
  return logits_to_probs(logits[:, None], SamplingParams(temperature, top_k=top_k, top_p=top_p))[:, 0]


@dataclasses.dataclass(frozen=True)
class Laws:
  """All kinds in one table, for rows `[B]` of these kinds in turn."""

  kinds: list[Kind]
  vocab_size: int
  num_contexts: int  # C, of each kind
  logits: tuple[np.ndarray, np.ndarray]  # float32, of draft and of target, `[kinds * C, V]`
  probs: tuple[np.ndarray, np.ndarray]  # float32, the distributions that follow from them and the parameters

  @classmethod
  def make(cls, kinds: list[Kind], plain_fn: PlainFn) -> Laws:
    num_contexts, vocab_size = kinds[0].tables.draft_probs.shape
    logits, probs = [], []
    for side in ('draft_probs', 'target_probs'):
      with np.errstate(divide='ignore'):
        own = [np.log(getattr(kind.tables, side)).astype(np.float32) for kind in kinds]
      parameters = [
        np.repeat(np.array([getattr(kind, name) for kind in kinds], dtype), num_contexts)
        for name, dtype in (('temperature', np.float32), ('top_k', np.int32), ('top_p', np.float32))
      ]
      logits.append(np.concatenate(own))
      probs.append(np.array(plain_fn(logits[-1], *parameters), np.float32))
    return cls(kinds, vocab_size, num_contexts, tuple(logits), tuple(probs))

  def joint_law(self, kind: int, num_tokens: int) -> np.ndarray:
    """The target's joint distribution of the first tokens of a kind, `[V ** num_tokens]`."""
    part = slice(kind * self.num_contexts, (kind + 1) * self.num_contexts)
    target = self.probs[1][part].astype(np.float64)
    target /= target.sum(axis=1, keepdims=True)
    return ContextTables(target, target, 0).joint_target_law(num_tokens).reshape(-1)


def _draw(rng: np.random.Generator, probs: np.ndarray) -> np.ndarray:
  """A token of each of the distributions `[M, V]`; -1 where all are 0."""
  sums = np.cumsum(probs.astype(np.float64), axis=1)
  tokens = (rng.random(len(probs))[:, None] * sums[:, -1:] >= sums).sum(axis=1)
  return np.where(sums[:, -1] > 0, tokens, -1)


class Caller:
  """Calls a function with those arguments that its parameters name."""

  def __init__(self, fn: Callable[..., Any], allowed: tuple[str, ...], arrays: str):
    parameters = inspect.signature(fn).parameters.values()
    self.name, self._fn, self._arrays = getattr(fn, '__name__', type(fn).__name__), fn, arrays
    takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters)
    named = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    wrong = [each.name for each in named if each.name not in allowed and each.default is each.empty]
    if wrong:
      raise ValueError(f'{self.name} takes {wrong[0]!r}, which is not known; allowed are {", ".join(allowed)}')
    self.names = set(allowed) if takes_all else {each.name for each in named} & set(allowed)

  def _given(self, value):
    if self._arrays == 'torch' and isinstance(value, np.ndarray):
      import torch  # pyright: ignore[reportMissingImports], which the callers bring

      return torch.from_numpy(np.ascontiguousarray(value))
    return value

  def __call__(self, arguments: dict[str, Callable[[], Any]]) -> Any:
    own = {name: self._given(make()) for name, make in arguments.items() if name in self.names}
    try:
      return self._fn(**own)
    except Exception as error:  # the function may raise anything
      raise ValueError(f'{self.name} raised {describe_error(error)}') from error


@dataclasses.dataclass
class Sampler:
  """Batches of rows, each of which goes on for several rounds."""

  call: Caller
  draft: Caller | None
  tree: TokenTree
  children: str
  laws: Laws
  num_tokens: int
  is_ragged: bool

  def counts(self, batch: int, seed: int) -> np.ndarray:
    """Counts `[kinds, V ** num_tokens]` of the first tokens of a batch of rows."""
    num_kinds, vocab_size = len(self.laws.kinds), self.laws.vocab_size
    kinds = np.arange(ROWS_PER_KIND * num_kinds) % num_kinds
    rng = np.random.default_rng((seed, batch))
    numbers, lengths, state = np.zeros(len(kinds), np.int64), np.zeros(len(kinds), np.int64), None
    place = number = 0
    while (lengths < self.num_tokens).any():
      is_done = lengths >= self.num_tokens
      rows = np.where(is_done, 0, numbers), np.where(is_done, 0, lengths)
      # Row by row another number of guesses, which depends on nothing that is drawn.
      turn = np.arange(len(kinds)) // num_kinds + place
      most = turn % (self.tree.max_depth + 1) if self.is_ragged else np.full(len(kinds), self.tree.max_depth)
      emitted, state = self._round(rng, kinds, *rows, most, (seed, batch, place), state)
      place += 1
      for number in range(emitted.shape[1]):
        is_new = (lengths < self.num_tokens) & (emitted[:, : number + 1] >= 0).all(axis=1)
        numbers = np.where(is_new, numbers * vocab_size + emitted[:, number], numbers)
        lengths += is_new
    counts = np.zeros((num_kinds, vocab_size**self.num_tokens), np.int64)
    np.add.at(counts, (kinds, numbers), 1)
    return counts

  def _round(self, rng, kinds, numbers, lengths, most, place, state):
    """The tokens `[B, W]` of a round, and the state after it; -1 behind each row's."""
    tree, laws, size = self.tree, self.laws, self.laws.vocab_size
    depths, own = tree.depths, tree.num_nodes
    spelled = np.repeat(numbers[:, None], own + 1, axis=1)
    tokens = np.full((len(kinds), own), -1, np.int32)

    def contexts(nodes):
      first = (size ** (lengths[:, None] + depths[nodes]) - 1) // (size - 1)
      return kinds[:, None] * laws.num_contexts + first + spelled[:, nodes]

    for node in range(1, own + 1):
      parent = tree.parents[node - 1]
      probs = laws.probs[0][contexts([parent])[:, 0]].copy()
      if self.children != 'independent':
        for sibling in range(tree.first_child[parent], node):
          probs[np.arange(len(kinds)), tokens[:, sibling - 1]] = 0
      drawn = self._child(rng, probs, (*place, node))
      is_there = (depths[node] <= most) & ((parent == 0) | (tokens[:, parent - 1] >= 0))
      tokens[:, node - 1] = np.where(is_there, drawn, -1)
      spelled[:, node] = spelled[:, parent] * size + np.maximum(tokens[:, node - 1], 0)
    drafted, after = contexts(tree.parent_nodes), contexts(np.arange(own + 1))
    exists = np.concatenate([np.ones((len(kinds), 1), bool), tokens >= 0], axis=1)
    # Behind the guesses of a row stands what no verifier may read.
    blank = np.full(size, 1 / size, np.float32)

    def table(values, index, is_real):
      return np.where(is_real[:, :, None], values[index], blank)

    seed = int(np.random.default_rng(place).integers(2**31))
    each = {name: np.array([getattr(kind, name) for kind in laws.kinds]) for name in ('temperature', 'top_k', 'top_p')}
    result = self.call(
      {
        'key': lambda: jax.random.key(seed),
        'seed': lambda: seed,
        'row_keys': lambda: jax.random.split(jax.random.key(place[0] * 2**16 + place[1]), len(kinds)),
        'positions': lambda: lengths.astype(np.int32),
        'tree': lambda: tree,
        'parents': lambda: np.array(tree.parents, np.int32),
        'tokens': lambda: tokens,
        'lengths': lambda: (np.where(tokens >= 0, depths[1:], 0).max(axis=1, initial=0)).astype(np.int32),
        'draft_probs': lambda: None if self.children == 'given' else table(
          laws.probs[0], drafted, exists[:, tree.parent_nodes]),
        'target_probs': lambda: table(laws.probs[1], after, exists),
        'draft_logits': lambda: table(laws.logits[0], drafted, exists[:, tree.parent_nodes]),
        'target_logits': lambda: table(laws.logits[1], after, exists),
        'temperature': lambda: each['temperature'][kinds].astype(np.float32),
        'top_k': lambda: each['top_k'][kinds].astype(np.int32),
        'top_p': lambda: each['top_p'][kinds].astype(np.float32),
        'state': lambda: state,
      }
    )  # fmt: skip
    if 'state' in self.call.names:
      result, state = result
    return self._checked(np.asarray(result), most), state

  def _child(self, rng, probs, place):
    if self.children == 'given':
      # The likeliest that no sibling before it is.
      return np.where(probs.max(axis=1) > 0, probs.argmax(axis=1), -1)
    if self.draft is None:
      return _draw(rng, probs)
    seed = int(np.random.default_rng(place).integers(2**31))
    drawn = self.draft({'key': lambda: jax.random.key(seed), 'seed': lambda: seed, 'probs': lambda: probs})
    return np.asarray(drawn).astype(np.int32)

  def _checked(self, tokens: np.ndarray, most: np.ndarray) -> np.ndarray:
    """The tokens of a round, once they are tokens."""
    name, num_rows, vocab_size = self.call.name, len(most), self.laws.vocab_size
    if tokens.ndim != 2 or len(tokens) != num_rows or tokens.dtype.kind not in 'iu' or not tokens.shape[1]:
      raise ValueError(
        f'{name} must return tokens as whole numbers [{num_rows}, up to {self.tree.max_depth + 1}], -1 behind each'
        f" row's; got {tokens.dtype}{list(tokens.shape)}"
      )
    count = (np.cumsum(tokens < 0, axis=1) == 0).sum(axis=1)
    if (tokens >= vocab_size).any() or (count < 1).any() or (count > most + 1).any():
      row = int(np.argmax((tokens >= vocab_size).any(axis=1) | (count < 1) | (count > most + 1)))
      raise ValueError(
        f'{name} returned {tokens[row].tolist()} for a row with guesses down to depth {most[row]}: expected at least'
        f' one token, at most one more than these, each below {vocab_size}'
      )
    return tokens.astype(np.int64)
