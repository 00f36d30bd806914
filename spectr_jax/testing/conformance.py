"""The conformance kit: a verifier of any project, as a plain function, against the distributions that it must give."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.sampling import SamplingParams, logits_to_probs
from spectr_jax.testing.checks import LEVEL, Check, Notify, describe_error, table_of, worst_of
from spectr_jax.testing.chi_square import chi_square
from spectr_jax.testing.tables import ContextTables, first_context, random_tables
from spectr_jax.tree import TokenTree

CHILDREN = ('independent', 'without_replacement', 'given')
PARAMETERS = (
  'key', 'seed', 'row_keys', 'positions', 'tree', 'parents', 'tokens', 'lengths', 'draft_probs', 'target_probs',
  'draft_logits', 'target_logits', 'temperature', 'top_k', 'top_p', 'state',
)  # fmt: skip
_ROWS_PER_KIND = 1024  # in a batch
_DEFAULT_SAMPLES, _FEWEST_SAMPLES, _SECONDS = 200_000, 20_000, 120
_MOST_CELLS = 1100
_ERRORS = {np.dtype(np.float64): 1e-10, np.dtype(np.float32): 1e-5}  # limits of exact comparisons

# The distributions `[M, V]` of logits `[M, V]` and the parameters `[M]`.
PlainFn = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Any]


@dataclasses.dataclass(frozen=True)
class Conformance:
  """The results of a verifier's comparisons. Print it, and `LEGEND`, which explains the table.

  Attributes:
    name: The function's name.
    checks: The comparisons, one for every kind of rows.
  """

  name: str
  checks: tuple[Check, ...]

  @property
  def is_passed(self) -> bool:
    return all(check.is_passed for check in self.checks)

  @property
  def conclusion(self) -> str:
    """The overall result, in one line."""
    failed = [check.compared for check in self.checks if not check.is_passed]
    if not failed:
      return f'{self.name} passed: lossless in all that was compared'
    return f'{self.name} FAILED: not lossless on {"; ".join(failed)}'

  def __str__(self) -> str:
    return f'{table_of(self.checks)}\n{self.conclusion}'


LEGEND = """\
exact     the joint distribution of the first tokens over several rounds, every draft and every decision
          enumerated, if the function's own distribution is given
sampling  the joint distribution of the first tokens over several rounds of the function itself, one line for
          every kind of rows; all kinds stand side by side in one batch; a chi-square test
detects   the smallest bias, in total variation, that fails with probability 0.95, whatever it looks like\
"""


@dataclasses.dataclass(frozen=True)
class _Kind:
  """Rows of one kind: logits of draft and target after every context, and sampling parameters."""

  name: str
  tables: ContextTables
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0


def _kinds(seed: int, vocab_size: int, max_length: int) -> list[_Kind]:
  """The kinds of rows of a batch."""
  sizes = vocab_size, max_length
  dense = random_tables(3 * seed, *sizes, zero_share=0, equal_share=0)
  sparse = random_tables(3 * seed + 1, *sizes)
  other = random_tables(3 * seed + 2, *sizes, zero_share=0, equal_share=0)
  noise = 1 + 1e-3 * np.sin(np.arange(dense.draft_probs.size)).reshape(dense.draft_probs.shape)
  near = dense.draft_probs * noise
  halves = np.arange(vocab_size) < (vocab_size + 1) // 2
  apart = [np.where(side, laws, 0) for side, laws in ((halves, other.draft_probs), (~halves, other.target_probs))]
  apart = [laws / laws.sum(axis=1, keepdims=True) for laws in apart]
  return [
    _Kind('zeros, some contexts with p = q', sparse),
    _Kind('no zeros', dense),
    _Kind('p = q', ContextTables(dense.draft_probs, dense.draft_probs, max_length)),
    _Kind('p nearly q', ContextTables(dense.draft_probs, near / near.sum(axis=1, keepdims=True), max_length)),
    _Kind('disjoint supports', ContextTables(*apart, max_length)),
    _Kind('temperature 0', other, temperature=0.0),
    _Kind('temperature 0.7, top-p 0.8', other, temperature=0.7, top_p=0.8),
    _Kind('temperature 0.5, top-k 2', other, temperature=0.5, top_k=2),
  ]


def _plain_law(logits, temperature, top_k, top_p) -> np.ndarray:
  """The distributions of this library's own sampling: temperature, top-k, then top-p of the tokens that are left."""
  sampling = SamplingParams(jnp.asarray(temperature), top_k=jnp.asarray(top_k), top_p=jnp.asarray(top_p))
  return np.asarray(logits_to_probs(jnp.asarray(logits)[:, None], sampling))[:, 0]


@dataclasses.dataclass(frozen=True)
class _Laws:
  """All kinds in one table, for rows `[B]` of these kinds in turn.

  Attributes:
    kinds: The kinds.
    vocab_size: V.
    num_contexts: C, of each kind.
    logits: float32, of draft and of target, `[kinds * C, V]`.
    probs: float32, the distributions that follow from them and from the kinds' parameters.
  """

  kinds: list[_Kind]
  vocab_size: int
  num_contexts: int
  logits: tuple[np.ndarray, np.ndarray]
  probs: tuple[np.ndarray, np.ndarray]

  @classmethod
  def make(cls, kinds: list[_Kind], plain_fn: PlainFn) -> _Laws:
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


class _Caller:
  """Calls a function with those arguments that its parameters name."""

  def __init__(self, fn: Callable[..., Any], allowed: tuple[str, ...], arrays: str):
    found = inspect.signature(fn).parameters.values()
    self.name, self._fn, self._arrays = getattr(fn, '__name__', type(fn).__name__), fn, arrays
    takes_all = any(each.kind == each.VAR_KEYWORD for each in found)
    named = [each for each in found if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    wrong = [each.name for each in named if each.name not in allowed and each.default is each.empty]
    if wrong:
      raise ValueError(f'{self.name} takes {wrong[0]!r}, which is not known; allowed are {", ".join(allowed)}')
    self.names = set(allowed) if takes_all else {each.name for each in named} & set(allowed)

  def _given(self, value):
    if self._arrays == 'torch' and isinstance(value, np.ndarray):
      import torch

      return torch.from_numpy(np.ascontiguousarray(value))
    return value

  def __call__(self, arguments: dict[str, Callable[[], Any]]) -> Any:
    own = {name: self._given(make()) for name, make in arguments.items() if name in self.names}
    try:
      return self._fn(**own)
    except Exception as error:  # the function may raise anything
      raise ValueError(f'{self.name} raised {describe_error(error)}') from error


@dataclasses.dataclass
class _Sampler:
  """Batches of rows, each of which goes on for several rounds."""

  call: _Caller
  draft: _Caller | None
  tree: TokenTree
  children: str
  laws: _Laws
  num_tokens: int
  is_ragged: bool

  def counts(self, batch: int, seed: int) -> np.ndarray:
    """Counts `[kinds, V ** num_tokens]` of the first tokens of a batch of rows."""
    num_kinds, vocab_size = len(self.laws.kinds), self.laws.vocab_size
    kinds = np.arange(_ROWS_PER_KIND * num_kinds) % num_kinds
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
    found = np.zeros((num_kinds, vocab_size**self.num_tokens), np.int64)
    np.add.at(found, (kinds, numbers), 1)
    return found

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
    found = self.call(
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
      found, state = found
    return self._checked(np.asarray(found), most), state

  def _child(self, rng, probs, place):
    if self.children == 'given':
      # The likeliest that no sibling before it is.
      return np.where(probs.max(axis=1) > 0, probs.argmax(axis=1), -1)
    if self.draft is None:
      return _draw(rng, probs)
    seed = int(np.random.default_rng(place).integers(2**31))
    drawn = self.draft({'key': lambda: jax.random.key(seed), 'seed': lambda: seed, 'probs': lambda: probs})
    return np.asarray(drawn).astype(np.int32)

  def _checked(self, found: np.ndarray, most: np.ndarray) -> np.ndarray:
    """The tokens of a round, once they are tokens."""
    name, num_rows, vocab_size = self.call.name, len(most), self.laws.vocab_size
    if found.ndim != 2 or len(found) != num_rows or found.dtype.kind not in 'iu' or not found.shape[1]:
      raise ValueError(
        f'{name} must return tokens as whole numbers [{num_rows}, up to {self.tree.max_depth + 1}], -1 behind each'
        f" row's; got {found.dtype}{list(found.shape)}"
      )
    count = (np.cumsum(found < 0, axis=1) == 0).sum(axis=1)
    if (found >= vocab_size).any() or (count < 1).any() or (count > most + 1).any():
      row = int(np.argmax((found >= vocab_size).any(axis=1) | (count < 1) | (count > most + 1)))
      raise ValueError(
        f'{name} returned {found[row].tolist()} for a row with guesses down to depth {most[row]}: expected at least one'
        f' token, at most one more than these, each below {vocab_size}'
      )
    return found.astype(np.int64)


def _exact(law_fn, tree: TokenTree, tables: ContextTables, num_tokens: int) -> tuple[float, float]:
  """The largest error of the joint distribution of the first tokens, every draft enumerated, and its limit."""
  size, own, limit = tables.vocab_size, tree.num_nodes, 0.0
  drafts = np.stack(np.unravel_index(np.arange(size**own), (size,) * own), axis=1).astype(np.int32)
  reached = [np.zeros(size**length) for length in range(num_tokens + 1)]
  reached[0][0] = 1
  for length in range(num_tokens):
    for number in np.flatnonzero(reached[length]):
      spelled = np.full((len(drafts), own + 1), number, np.int64)
      chance = np.ones(len(drafts))
      for node in range(1, own + 1):
        parent = tree.parents[node - 1]
        above = first_context(size, length + int(tree.depths[parent])) + spelled[:, parent]
        chance *= tables.draft_probs[above, drafts[:, node - 1]]
        spelled[:, node] = spelled[:, parent] * size + drafts[:, node - 1]
      contexts = np.array([first_context(size, length + int(depth)) for depth in tree.depths]) + spelled
      for draft in np.flatnonzero(chance):
        own_laws = tables.draft_probs[contexts[draft, tree.parent_nodes]], tables.target_probs[contexts[draft]]
        law = np.asarray(law_fn(drafts[draft], *own_laws))
        limit = max(limit, _ERRORS.get(law.dtype, 1e-5))
        for node in range(own + 1):
          end = length + int(tree.depths[node]) + 1
          emitted = spelled[draft, node] * size + np.arange(size)
          mass = reached[length][number] * chance[draft] * law[node].astype(np.float64)
          np.add.at(reached[min(end, num_tokens)], emitted // size ** max(end - num_tokens, 0), mass)
  return float(np.abs(reached[num_tokens] - tables.joint_target_law(num_tokens).reshape(-1)).max()), limit


def _exact_checks(law_fn, tree: TokenTree, seed: int) -> Iterator[Check]:
  num_tokens, size = min(tree.max_depth + 1, 4), 3 if tree.num_nodes <= 5 else 2
  for index in range(2):
    tables = random_tables(2 * seed + index, size, num_tokens + tree.max_depth)
    error, limit = _exact(law_fn, tree, tables, num_tokens)
    yield Check('exact', f'{num_tokens} tokens, V={size}, table {index}', 'error', error, limit, 0, limit)


def check_verifier(
  fn: Callable[..., Any],
  *,
  tree: TokenTree | None = None,
  children: str = 'independent',
  draft_fn: Callable[..., Any] | None = None,
  law_fn: Callable[..., Any] | None = None,
  plain_fn: PlainFn | None = None,
  is_ragged: bool = True,
  arrays: str = 'numpy',
  num_samples: int | None = None,
  seed: int = 0,
  notify: Notify | None = None,
) -> Conformance:
  """Tests a verifier of any project for bias: a function of a round's guesses that returns the tokens that are kept.

  Rows of eight kinds stand in one batch in turn: distributions with and without zeros, draft and target equal, nearly
  equal and on disjoint supports, temperature 0, and two settings of the filters. Every row goes on for several rounds
  over tables whose distributions depend on the whole context. A chi-square test for every kind compares the joint
  distribution of its first L + 2 tokens with the target's. Tests of single positions miss what this finds: noise that
  is used again in the next round, the residual of another context, the parameters of a neighbouring row, filters in
  another order than in plain sampling, and guesses drawn from another distribution than the reported one.

  The tests share the level `LEVEL`, so a lossless verifier fails once in a thousand seeds.

  Args:
    fn: Returns the tokens of a round, whole numbers `[B, W]`: the guesses that are kept and one token after them, -1
      behind. It is called with those of the following arguments that its parameters name.

      - `key`, `seed`: A typed key of JAX or a number, new in every call.
      - `row_keys`, `positions`: Keys `[B]` that a row keeps in all rounds, and int32 `[B]`, its tokens so far.
      - `tree`, `parents`: The tree, and int32 `[N]`, the parents of its nodes 1..N.
      - `tokens`: int32 `[B, N]`; -1 for nodes that a row does not use.
      - `lengths`: int32 `[B]`, the depth of a row's guesses.
      - `draft_probs`: float32 `[B, R, V]`, after the R nodes with children; None for given guesses.
      - `target_probs`: float32 `[B, N + 1, V]`, after the root and every node.
      - `draft_logits`, `target_logits`: The same before temperature and filters.
      - `temperature`, `top_k`, `top_p`: `[B]`, the parameters of the rows; top-k 0 and top-p 1 keep all tokens.
      - `state`: What it returned in the round before, None at first; it then returns the tokens and a new state.
    tree: The tree of the guesses, at most 5 deep; by default a chain of three.
    children: How they are drawn: `independent`, `without_replacement`, or `given` for the draft's likeliest tokens.
    draft_fn: Draws the guesses in place of the kit: from `key` or `seed` and `probs` `[M, V]`, tokens `[M]`.
    law_fn: The verifier's own distribution, if it can say it: from `tokens` `[N]`, draft laws `[R, V]` and target laws
      `[N + 1, V]` in float64, at `[v, x]` the probability that v is the deepest node kept and x comes next. All drafts
      and decisions are then enumerated as well.
    plain_fn: The distributions `[M, V]` of plain sampling from logits `[M, V]`, `temperature`, `top_k` and `top_p`
      `[M]`; None for this library's, where the temperature comes first, then top-k, then top-p of what is left.
    is_ragged: Whether rows have different numbers of guesses.
    arrays: `numpy`, which functions of JAX take as well, or `torch`.
    num_samples: Rows of every kind, rounded up to whole batches. None for 200,000, or as many as fit into two minutes,
      but at least 20,000.
    seed: Seed of tables and samples.
    notify: Called with the current activity, the steps done and the steps in total.

  Raises:
    ValueError: An argument is not one of those allowed, or `fn` raises, takes an unknown argument or returns what are
      no tokens; the message says which.
  """
  tree = TokenTree.chains(1, 3) if tree is None else tree
  if children not in CHILDREN or arrays not in ('numpy', 'torch'):
    raise ValueError(f'children must be one of {", ".join(CHILDREN)}, arrays numpy or torch; got {children}, {arrays}')
  if not tree.num_nodes or tree.is_grown or tree.max_depth > 5:
    raise ValueError(f'the tree must be one for all rows, from 1 to 5 deep, got one of depth {tree.max_depth}')
  if law_fn is not None and (children != 'independent' or tree.num_nodes > 8):
    raise ValueError('drafts are enumerated if they are independent, on trees of at most 8 nodes')
  if num_samples is not None and not 1 <= num_samples <= 10**9:
    raise ValueError(f'num_samples must be from 1 to 10**9, got {num_samples}')
  if not 0 <= seed < 2**31:
    raise ValueError(f'seed must be from 0 to 2**31 - 1, got {seed}')
  call = _Caller(fn, PARAMETERS, arrays)
  draft = None if draft_fn is None else _Caller(draft_fn, ('key', 'seed', 'probs'), arrays)
  notify = notify or (lambda *_: None)
  checks = [] if law_fn is None else list(_exact_checks(law_fn, tree, seed))
  num_tokens = tree.max_depth + 2
  vocab_size = next((size for size in (4, 3) if size**num_tokens <= _MOST_CELLS), 2)
  kinds = _kinds(seed, vocab_size, num_tokens + tree.max_depth)
  laws = _Laws.make(kinds, plain_fn or _plain_law)
  sampler = _Sampler(call, draft, tree, children, laws, num_tokens, is_ragged)
  wanted = _DEFAULT_SAMPLES if num_samples is None else num_samples
  num_batches, start, counts = -(-wanted // _ROWS_PER_KIND), time.monotonic(), np.zeros((), np.int64)
  for batch in range(num_batches):
    is_enough = num_samples is None and batch * _ROWS_PER_KIND >= _FEWEST_SAMPLES
    if is_enough and time.monotonic() - start > _SECONDS:
      break
    notify(f'{call.name}: sampling', batch, num_batches)
    counts = counts + sampler.counts(batch, seed)
  notify(f'{call.name}: sampling', num_batches, num_batches)
  for index, kind in enumerate(kinds):
    law = laws.joint_law(index, num_tokens)
    result = chi_square(counts[index], law)
    if np.count_nonzero(law) == 1:  # of temperature 0: one text alone is right
      wrong = int(counts[index][law == 0].sum())
      num_rows = int(counts[index].sum())
      checks.append(Check('sampling', kind.name, 'differing texts', wrong, 0, num_rows, 3 / num_rows))
    else:
      checks.append(worst_of('sampling', f'{kind.name}', [result], level=LEVEL / len(kinds)))
  return Conformance(call.name, tuple(checks))
