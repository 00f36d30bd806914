"""The proof of a method: every test for a bias that this library has, for its own methods and for added ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.couplings.coupling import checked_result
from spectr_jax.engine.generate import generate
from spectr_jax.methods import METHODS, Method, get_method, with_gumbel
from spectr_jax.models import table
from spectr_jax.proposal import Proposal
from spectr_jax.testing.checks import LEVEL, POWER, Check, Notify, chi_square, describe_error, table_of, worst_of
from spectr_jax.testing.engine import engine_counts, ordinary_law, sample_counts, tiny_transformers
from spectr_jax.testing.enumeration import enumeration_error
from spectr_jax.testing.tables import random_tables
from spectr_jax.tree import TokenTree
from spectr_jax.verifiers import Verdict

LARGEST_ERROR = 1e-10  # float64 sums of a few thousand terms have errors of 1e-13

# (tree, vocabulary, tokens compared): several rounds each, since a round emits at most L + 1 tokens.
_ENUMERATED = (
  (TokenTree.chains(1, 3), 3, 5),
  (TokenTree.chains(2, 2), 3, 4),
  (TokenTree.chains(3, 2), 2, 5),
  (TokenTree((0, 0, 1, 1, 2, 4)), 2, 5),
)
_NUM_TABLES = 3
_SAMPLED = TokenTree.chains(3, 2), TokenTree.chains(1, 3)
_DEFAULT_SAMPLES, _FEWEST_SAMPLES, _SAMPLES_PER_BATCH = 1_000_000, 50_000, 10_000
_VOCAB_SIZE = 11  # of shapes that are traced; the size of no other axis
_SECONDS = {'sampling': 120, 'engine': 60}

# A Markov chain. In the first context the target can draw a token that the draft cannot, in the second the draft can
# draw one that the target cannot, and in the third both agree. No text of five tokens is rare.
_DRAFT_TABLE = np.array([[0.6, 0.0, 0.4], [0.2, 0.3, 0.5], [0.3, 0.3, 0.4]])
_TARGET_TABLE = np.array([[0.2, 0.5, 0.3], [0.5, 0.5, 0.0], [0.3, 0.3, 0.4]])

_PROMPTS = (3,), (1, 3, 2, 2, 0), (0, 3, 1)
_SAMPLING = {'temperature': 0.8, 'top_k': 3, 'top_p': 0.95}


@dataclasses.dataclass(frozen=True)
class Proof:
  """The results of all checks of a method. Print it, and `LEGEND`, which explains the table."""

  method: Method
  checks: tuple[Check, ...]

  @property
  def is_passed(self) -> bool:
    return all(check.is_passed for check in self.checks)

  def __str__(self) -> str:
    return f'{table_of(self.checks)}\n{self.conclusion}'

  @property
  def conclusion(self) -> str:
    """The overall result, in one line."""
    method = self.method
    if self.is_passed:
      note = '' if method.is_lossless else '; it is registered as not lossless, but nothing here shows it'
      return f'{method.name} passed: lossless in all that was compared{note}'
    failed = [check for check in self.checks if not check.is_passed]
    parts = ' and '.join(dict.fromkeys(check.part for check in failed))
    if not method.is_lossless:
      return f'{method.name} FAILED ({parts}), as registered: not lossless, {method.bias or "for no reason given"}'
    if all(check.measure == 'error' and check.value < 1e-5 for check in failed):
      return f'{method.name} FAILED ({parts}) by so little that something in its distribution may be rounded to float32'
    return f'{method.name} FAILED ({parts}): not lossless, though registered as lossless'


LEGEND = f"""\
exact     the joint distribution of the first tokens over several rounds, every draft and every decision
          enumerated, in float64, for {_NUM_TABLES} pairs of random tables; with keys by position the tokens
          themselves, which are those of Gumbel-max sampling
sampling  the joint distribution of the first tokens of the compiled loop on a Markov chain; a chi-square
          test
engine    the same on transformers with cache, tree attention, rollback, {len(_PROMPTS)} ragged prompts,
          temperature, top-k and top-p, against distributions without a cache; the smallest p-value of the
          prompts
rows      those drawn: if num_samples is not given a million, or as many as fit into two minutes
detects   the smallest bias, in total variation, that fails with probability {POWER:g}, whatever it looks like
limit     one seed in {1 / LEVEL:,.0f} gives a lossless method a p-value below it; to tell chance from a bias,
          repeat with another seed and twice the samples\
"""


def _name_of(tree: TokenTree) -> str:
  if not tree.num_nodes:
    return 'no drafts'
  if tree.is_chains:
    length = tree.max_depth
    return f'chains {tree.num_nodes // length}x{length}'
  return f'tree of {tree.num_nodes}'


def _allows(method: Method, tree: TokenTree) -> bool:
  try:
    return method.tree_for(tree) == tree
  except ValueError:
    return False


def _trees_for(method: Method, trees) -> list[TokenTree]:
  """The trees that the method is defined for, at least one; the empty tree for a method that drafts nothing."""
  allowed = [tree for tree in ([TokenTree()] if method.max_drafts == 0 else trees) if _allows(method, tree)]
  if not allowed:
    raise ValueError(f'{method.name} allows none of the trees of the proof: {", ".join(map(_name_of, trees))}')
  return allowed


def _check_array(what: str, result: Any, shape: tuple[int, ...]) -> None:
  if not isinstance(result, jax.Array) or result.shape != shape:
    own = list(result.shape) if isinstance(result, jax.Array) else type(result).__name__
    raise ValueError(f'{what} must return an array {list(shape)}, got {own}')


def _trace(method: Method, tree: TokenTree) -> None:
  """Calls a method's rule and verifier on one row of a tree."""
  rule, verifier = method.proposal_rule, method.verifier
  keys = jax.random.split(jax.random.key(0), tree.max_depth + 1)
  laws = jnp.full((tree.num_nodes + 1, _VOCAB_SIZE), 1 / _VOCAB_SIZE, jnp.float32)
  tokens = jnp.zeros(tree.num_nodes, jnp.int32)
  for node in tree.parent_nodes:
    count, first = int(tree.num_children[node]), int(tree.first_child[node])
    drawn = rule(keys[0], laws[0], jnp.int32(first), count)
    _check_array(f'{type(rule).__name__}', drawn, (count,))
    _check_array(f'{type(rule).__name__}.probability', rule.probability(laws[0], drawn), ())
    tokens = tokens.at[first - 1 : first - 1 + count].set(drawn)
  row = tree, Proposal(tokens, laws[: len(tree.parent_nodes)]), laws, verifier.init_state(tree)
  verdict = verifier.verify(keys, *row)
  checked_result(verifier, verdict, Verdict, path=(tree.max_depth,), num_accepted=(), next_token=())
  for what, state in (('verify', verdict.state), ('advance', verifier.advance(*row, *2 * [jnp.int32(0)]))):
    own, begun = (jax.tree.map(jnp.shape, each) for each in (state, row[-1]))
    if own != begun:
      raise ValueError(f'{type(verifier).__name__}.{what} must return a state of the shapes {begun}, got {own}')
  if not method.is_seed_exact:  # whose law is no finite sum
    _check_array(f'{type(verifier).__name__}.law', verifier.law(*row), laws.shape)


def _check_shapes(method: Method, trees: Iterable[TokenTree]) -> None:
  """ValueError, by tracing alone, if a method's rule or verifier returns other types or shapes than it must."""
  for tree in trees:
    jax.eval_shape(functools.partial(_trace, method, tree))


@contextlib.contextmanager
def _during(method: Method, part: str) -> Iterator[None]:
  try:
    yield
  except Exception as error:  # a verifier may raise anything
    raise ValueError(f'{method.name} raised in part {part}: {describe_error(error)}') from error


class _Progress:
  """Counts steps and reports them to a callback."""

  def __init__(self, name: str, notify: Notify, total: int):
    self._name, self._notify, self._total = name, notify, total
    self._done, self._what = 0, ''

  def begin(self, what: str) -> None:
    self._what = f'{self._name}: {what}'
    self._notify(self._what, self._done, self._total)

  def advance(self, steps: int = 1) -> None:
    self._done += steps
    self._notify(self._what, self._done, self._total)


def _exact(method: Method, seed: int, progress: _Progress) -> list[Check]:
  """Enumerates every draft and every decision over several rounds, in float64."""
  if method.max_drafts == 0:
    cases = [(TokenTree(), 3, 4)]
  else:
    allowed = _trees_for(method, [tree for tree, _, _ in _ENUMERATED])
    cases = [case for case in _ENUMERATED if case[0] in allowed]
  checks = []
  for tree, vocab_size, num_tokens in cases:
    progress.begin(f'exact, {_name_of(tree)}')
    errors = []
    for index in range(_NUM_TABLES):
      tables = random_tables(_NUM_TABLES * seed + index, vocab_size, num_tokens + tree.max_depth)
      errors.append(enumeration_error(method, tree, tables, num_tokens))
    compared = f'{_name_of(tree)}, {num_tokens} tokens, V={vocab_size}'
    # numpy's maximum, unlike Python's, keeps a NaN.
    checks.append(Check('exact', compared, 'error', float(np.max(errors)), LARGEST_ERROR, 0, LARGEST_ERROR))
    progress.advance()
  return checks


def _markov_models():
  with np.errstate(divide='ignore'):
    return [table.table_model(jnp.asarray(np.log(laws), jnp.float32)) for laws in (_TARGET_TABLE, _DRAFT_TABLE)]


def _token_for_token(method: Method, num_rows: int, seed: int, progress: _Progress) -> list[Check]:
  """Compares tokens with those of Gumbel-max sampling with the same keys."""
  num_tokens = 8
  target, draft = _markov_models()

  def tokens_of(method, tree):
    prompts = jnp.zeros((num_rows, 1), jnp.int32), jnp.ones(num_rows, jnp.int32)
    sampled = generate(
      jax.random.key(seed), target, draft, *prompts, method=method, tree=tree, max_new_tokens=num_tokens
    )
    return np.asarray(sampled.tokens)

  reference = tokens_of(with_gumbel(METHODS['autoregressive']), TokenTree())
  checks = []
  for tree in _trees_for(method, [tree for tree, _, _ in _ENUMERATED]):
    progress.begin(f'exact, {_name_of(tree)}')
    differing = int((tokens_of(method, tree) != reference).sum())
    compared = f'{_name_of(tree)}, {num_tokens} tokens, V={target.vocab_size}'
    # If a row differs with probability d, all n agree with probability (1 - d)^n.
    detected = 1 - (1 - POWER) ** (1 / num_rows)
    checks.append(Check('exact', compared, 'differing tokens', differing, 0, num_rows, detected))
    progress.advance()
  return checks


def _draw(part: str, num_samples: int, num_batches: int, is_limited: bool, progress: _Progress, draw_batch):
  """Sums the counts of batches by `draw_batch(index, size)`; stops early if time is limited and runs out."""
  size = -(-num_samples // num_batches)
  fewest = -(-_FEWEST_SAMPLES * num_batches // _DEFAULT_SAMPLES)
  counts, start = np.zeros((), np.int64), time.monotonic()
  for batch in range(num_batches):
    if is_limited and batch >= fewest and time.monotonic() - start > _SECONDS[part]:
      progress.advance(num_batches - batch)
      break
    counts = counts + draw_batch(batch, size)
    if batch == 0:
      start = time.monotonic()  # the first batch is not counted: it compiles
    progress.advance()
  return counts


def prove(
  method: str | Method, *, num_samples: int | None = None, seed: int = 0, notify: Notify | None = None
) -> Proof:
  """Tests a method for bias, in three parts, once the shapes of what it returns are right.

  1. Exact: every draft and decision over several rounds is enumerated in float64, with the verifier's own `law` and
     `advance`. This gives the joint distribution of the first tokens for several trees and random tables; the tables
     hold zeros, and contexts where draft and target agree. A seed-exact method's law given the guesses is not a finite
     sum. So its tokens are compared with those of Gumbel-max sampling under the same keys instead.
  2. Sampling: the compiled loop, including the verifier's `verify`, runs on a Markov chain. A chi-square test compares
     the joint distribution of the first L + 2 tokens.
  3. Engine: the loop runs on tiny transformers with cache, tree attention, rollback, ragged prompts, temperature, top-k
     and top-p. Chi-square tests compare it with ordinary sampling, whose distribution is computed without a cache.

  The tests share the level `LEVEL`, so a lossless method fails once in a thousand seeds. `Check.detectable_bias` says
  which bias they find with probability `POWER`.

  Args:
    num_samples: Rows of the second part, rounded up to whole batches. The third part draws a twentieth of them for each
      of three prompts. None draws a million. For a slow method None draws as many as fit into two minutes (one minute
      for the third part), but at least 50,000.
    seed: Seed of tables and samples.
    notify: Called with the current activity, the steps done and the steps in total.

  Raises:
    ValueError: There is no such method; `num_samples` is not from 10,000 to 10**9; the seed is not from 0 to 2**31 - 1;
      the method allows none of the trees; or it raises an error, and the message says where.
  """
  method = get_method(method)
  if num_samples is not None and not 10_000 <= num_samples <= 10**9:
    raise ValueError(f'num_samples must be from 10,000 to 10**9, got {num_samples:,}')
  if not 0 <= seed < 2**31:
    raise ValueError(f'seed must be from 0 to 2**31 - 1, got {seed}')
  is_limited = num_samples is None
  num_samples = _DEFAULT_SAMPLES if is_limited else num_samples
  num_batches = -(-num_samples // _SAMPLES_PER_BATCH)
  num_engine_batches = -(-num_batches // 4)
  enumerated, tree = _trees_for(method, [tree for tree, _, _ in _ENUMERATED]), _trees_for(method, _SAMPLED)[0]
  progress = _Progress(method.name, notify or (lambda *_: None), len(enumerated) + num_batches + num_engine_batches)
  key = jax.random.key(seed)

  with _during(method, 'shapes'):
    _check_shapes(method, dict.fromkeys([*enumerated, tree]))

  with _during(method, 'exact'):
    if method.is_seed_exact:
      checks = _token_for_token(method, min(num_samples, 2**16), seed, progress)
    else:
      checks = _exact(method, seed, progress)

  num_tokens = tree.max_depth + 2
  common = {'method': method, 'tree': tree, 'num_tokens': num_tokens}
  compared = f'{_name_of(tree)}, {num_tokens} tokens, V='

  progress.begin(f'sampling, {_name_of(tree)}')
  with _during(method, 'sampling'):
    target, draft = _markov_models()

    def draw_rows(batch, size):
      batch_key = jax.random.fold_in(key, batch)
      return sample_counts(batch_key, target, draft, [0], num_samples=size, batch_size=size, **common)

    counts = _draw('sampling', num_samples, num_batches, is_limited, progress, draw_rows)
  law = _TARGET_TABLE[0]
  for _ in range(num_tokens - 1):
    law = law[..., None] * _TARGET_TABLE
  checks.append(worst_of('sampling', f'{compared}{target.vocab_size}', [chi_square(counts, law)]))

  progress.begin(f'engine, {_name_of(tree)}')
  # Low-precision products on accelerators would make the target's distribution depend on the shape of a call.
  with _during(method, 'engine'), jax.default_matmul_precision('highest'):
    target, draft = tiny_transformers(vocab_size=4)

    def draw_prompts(batch, size):
      batch_key = jax.random.fold_in(key, num_batches + batch)
      return engine_counts(batch_key, target, draft, _PROMPTS, num_samples=size, batch_size=size, **common, **_SAMPLING)

    counts = _draw('engine', num_samples // 20, num_engine_batches, is_limited, progress, draw_prompts)
    laws = [ordinary_law(target, prompt, num_tokens, **_SAMPLING) for prompt in _PROMPTS]
  results = [chi_square(*pair) for pair in zip(counts, laws)]
  checks.append(worst_of('engine', f'{compared}{target.vocab_size}', results))
  return Proof(method, tuple(checks))
