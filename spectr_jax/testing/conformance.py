"""The conformance kit: a verifier of any project, as a plain function, against the distributions that it must give."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from spectr_jax.testing.checks import LEVEL, Check, Notify, chi_square, table_of, worst_of
from spectr_jax.testing.rows import PARAMETERS, ROWS_PER_KIND, Caller, Laws, PlainFn, Sampler, kinds_of_rows, plain_law
from spectr_jax.testing.tables import ContextTables, first_context, random_tables
from spectr_jax.tree import TokenTree

CHILDREN = ('independent', 'without_replacement', 'given')
_DEFAULT_SAMPLES, _FEWEST_SAMPLES, _SECONDS = 200_000, 20_000, 120
_MOST_CELLS = 1100
_ERRORS = {np.dtype(np.float64): 1e-10, np.dtype(np.float32): 1e-5}  # limits of exact comparisons


@dataclasses.dataclass(frozen=True)
class Conformance:
  """The results of a verifier's comparisons. Print it, and `LEGEND`, which explains the table."""

  name: str  # the function's
  checks: tuple[Check, ...]  # one for every kind of rows

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
  is used again in the next round, the residual of another context, the parameters of a neighboring row, filters in
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
    law_fn: The verifier's own distribution, if it can say it: from `tokens` `[N]` and the distributions of draft
      `[R, V]` and target `[N + 1, V]` in float64, at `[v, x]` the probability that v is the deepest node kept and x
      comes next. All drafts and decisions are then enumerated as well.
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
  call = Caller(fn, PARAMETERS, arrays)
  draft = None if draft_fn is None else Caller(draft_fn, ('key', 'seed', 'probs'), arrays)
  notify = notify or (lambda *_: None)
  checks = [] if law_fn is None else list(_exact_checks(law_fn, tree, seed))
  num_tokens = tree.max_depth + 2
  vocab_size = next((size for size in (4, 3) if size**num_tokens <= _MOST_CELLS), 2)
  kinds = kinds_of_rows(seed, vocab_size, num_tokens + tree.max_depth)
  laws = Laws.make(kinds, plain_fn or plain_law)
  sampler = Sampler(call, draft, tree, children, laws, num_tokens, is_ragged)
  wanted = _DEFAULT_SAMPLES if num_samples is None else num_samples
  num_batches, start, counts = -(-wanted // ROWS_PER_KIND), time.monotonic(), np.zeros((), np.int64)
  for batch in range(num_batches):
    is_enough = num_samples is None and batch * ROWS_PER_KIND >= _FEWEST_SAMPLES
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
