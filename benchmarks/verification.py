"""Time and memory of one verification by every method: the cost in addition to the target's call.

Command   python -m benchmarks.verification --num_drafts=8 --draft_length=8 --rows=1,8
Models    none: random distributions shaped like a language model's, one per context
Guesses   drawn by the method's own rule; single-draft methods get one draft

Each context's target logits are Gaussian with a standard deviation that is uniform in [3, 6]. The draft's logits are
the same plus Gaussian noise with standard deviation 0.9. At a vocabulary of 32000 the distributions overlap by 1 - TV =
.70 on average and have an entropy of 3.6 nats. Equal prefixes have equal distributions, as in decoding. Several
proposals are verified one after another, so that walks end at all depths. The results are means over the proposals: the
median and range of repeats in which all methods take turns. Two further cases are measured:

all kept    equal distributions and, if the rule allows it, equal drafts: every position has K candidates and the walk
            reaches the end
none kept   distributions without a common token: every candidate is rejected
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import command
from benchmarks.timing import spread
from common import command_line
from common.output_files import OutputFiles
from spectr_jax import METHODS, SamplingParams, TokenTree, logits_to_probs
from spectr_jax.methods import Method, get_method
from spectr_jax.proposal import Proposal

NUM_CONTEXTS = 256
SEED = 0  # of distributions and proposals
FILTERS = {'off': {}, 'on': {'top_k': 50, 'top_p': 0.9}}
CASES = ('random', 'all kept', 'none kept')


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What is measured."""

  vocab_size: int
  num_drafts: int  # methods that take fewer drafts have as many as they take
  draft_length: int
  rows: tuple[int, ...]  # numbers of rows that are verified together
  repeats: int
  num_proposals: int  # per repeat, over all rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Distributions:
  """The models' distributions by context, `[NUM_CONTEXTS, V]`."""

  draft_probs: jax.Array
  target_probs: jax.Array
  target_logits: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guesses:
  """Proposals for a batch of rows, without their distributions."""

  keys: jax.Array  # `[B, L + 1]`, typed keys for verification
  tokens: jax.Array  # int32 `[B, N]`
  contexts: jax.Array  # int32 `[B, N + 1]`, the context of each node


@functools.partial(jax.jit, static_argnames=('vocab_size', 'case', 'top_k', 'top_p'))
def make_distributions(
  key: jax.Array, *, vocab_size: int, case: str, top_k: int = 0, top_p: float = 1.0
) -> Distributions:
  """Random distributions of one of `CASES` behind sampling filters, as the module describes them."""
  keys = jax.random.split(key, 3)
  shape = (NUM_CONTEXTS, vocab_size)
  deviations = jax.random.uniform(keys[0], (NUM_CONTEXTS, 1), minval=3.0, maxval=6.0)
  target_logits = deviations * jax.random.normal(keys[1], shape)
  draft_logits = target_logits + 0.9 * jax.random.normal(keys[2], shape)
  if case == 'all kept':
    draft_logits = target_logits
  elif case == 'none kept':
    is_draft = jnp.arange(vocab_size) % 2 == 0
    draft_logits = jnp.where(is_draft, draft_logits, -jnp.inf)
    target_logits = jnp.where(is_draft, -jnp.inf, target_logits)
  sampling = SamplingParams.make(1, top_k=top_k, top_p=top_p)
  draft_probs, target_probs = (logits_to_probs(logits[None], sampling)[0] for logits in (draft_logits, target_logits))
  return Distributions(draft_probs, target_probs, target_logits)


@functools.partial(jax.jit, static_argnames=('method', 'tree', 'are_drafts_equal'))
def guess(
  keys: jax.Array, draft_probs: jax.Array, *, method: Method, tree: TokenTree, are_drafts_equal: bool
) -> Guesses:
  """Proposals of typed keys `[B]` on chains or the empty tree: tokens by the method's rule, and the contexts that they
  lead to. With `are_drafts_equal` all drafts are copies of the first, unless the rule's siblings differ.
  """
  num_drafts, rule = int(tree.num_children[0]), method.proposal_rule
  are_drafts_equal &= not rule.may_run_out

  def follow(contexts, tokens):
    tokens = jnp.where(are_drafts_equal, tokens[0], tokens)
    return (contexts * 31 + tokens * 7 + 1) % NUM_CONTEXTS, tokens

  def one(key):
    keys = jax.random.split(key, 2 * (tree.max_depth + 1) + 1)
    draft_keys, verify_keys = keys[1 : tree.max_depth + 2], keys[tree.max_depth + 2 :]
    verify_keys = draft_keys if method.is_seed_exact else verify_keys
    root = jax.random.randint(keys[0], (1,), 0, NUM_CONTEXTS)
    if not num_drafts:
      return Guesses(verify_keys, jnp.zeros(0, jnp.int32), root)
    first = follow(root, rule(draft_keys[0], draft_probs[root[0]], 1, num_drafts))

    def deeper(contexts, at):
      key, level = at
      drawn = jax.vmap(lambda probs, child: rule(key, probs, child, 1)[0])(draft_probs[contexts], level)
      after = follow(contexts, drawn)
      return after[0], after

    levels = jnp.arange(1, tree.num_nodes + 1).reshape(tree.max_depth, num_drafts)
    _, (contexts, tokens) = jax.lax.scan(deeper, first[0], (draft_keys[1:-1], levels[1:]))
    return Guesses(
      verify_keys,
      jnp.concatenate([first[1], tokens.reshape(-1)]),
      jnp.concatenate([root, first[0], contexts.reshape(-1)]),
    )

  return jax.vmap(one)(keys)


@functools.partial(jax.jit, static_argnames='tree')
def look_up(
  distributions: Distributions, guesses: Guesses, *, tree: TokenTree
) -> tuple[Proposal, jax.Array, jax.Array]:
  """Proposals with the draft's distributions, and the target's distributions and logits `[B, N + 1, V]`."""
  contexts = guesses.contexts
  probs = distributions.draft_probs[contexts[:, tree.parent_nodes]]
  return Proposal(guesses.tokens, probs), distributions.target_probs[contexts], distributions.target_logits[contexts]


def initial_state(method: Method, tree: TokenTree, rows: int) -> Any:
  return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), method.verifier.init_state(tree))


@dataclasses.dataclass
class Program:
  """The compiled verification of one method for a number of rows."""

  method: Method
  tree: TokenTree
  sampling: SamplingParams  # of the rows that are verified together
  guesses: dict[str, list[Guesses]]  # proposals by case
  verify: Any  # from keys, proposals, target distributions and state to a verdict
  verify_logits: Any  # the same from the target's logits
  temporaries: int  # scratch memory of `verify` at its peak, in bytes

  @classmethod
  def compile(
    cls, method: Method, sizes: Sizes, rows: int, distributions: dict[str, Distributions], filters: dict[str, Any]
  ) -> Program:
    """Compiles verification, alone and behind `logits_to_probs` with sampling filters, on distributions by case."""
    num_drafts = sizes.num_drafts if method.max_drafts is None else min(sizes.num_drafts, method.max_drafts)
    tree = TokenTree.chains(num_drafts, sizes.draft_length) if num_drafts else TokenTree()

    def verify(keys, proposal, target_probs, state):
      def one(keys, proposal, target_probs, state):
        return method.verifier.verify(keys, tree, proposal, target_probs, state)

      return jax.vmap(one)(keys, proposal, target_probs, state)

    def verify_logits(keys, proposal, target_logits, state, sampling):
      return verify(keys, proposal, logits_to_probs(target_logits, sampling), state)

    every_keys = [jax.random.split(jax.random.key(SEED + i), rows) for i in range(max(sizes.num_proposals // rows, 2))]
    guesses = {
      case: [
        guess(keys, own.draft_probs, method=method, tree=tree, are_drafts_equal=case == 'all kept')
        for keys in every_keys
      ]
      for case, own in distributions.items()
    }
    sampling, state = SamplingParams.make(rows, **filters), initial_state(method, tree, rows)
    first = guesses['random'][0]
    proposal, probs, logits = look_up(distributions['random'], first, tree=tree)
    alone = jax.jit(verify).lower(first.keys, proposal, probs, state).compile()
    both = jax.jit(verify_logits).lower(first.keys, proposal, logits, state, sampling).compile()
    return cls(method, tree, sampling, guesses, alone, both, alone.memory_analysis().temp_size_in_bytes)


def measure(programs: list[Program], distributions: dict[str, Distributions], repeats: int) -> list[dict[str, Any]]:
  """Times programs, which take turns, on distributions by case.

  As in decoding, a verification starts from the state that the previous one left. The distributions are looked up right
  before and not timed, since in decoding they have also just been computed. Returns of each program by case seconds of
  verification, `alone`, and with `logits_to_probs`, `with_logits`, one per repeat and each a mean over the proposals;
  and the mean number of `tokens` that a verification emits per row.
  """
  results = [
    {name: {case: [] for case in distributions} for name in ('alone', 'with_logits', 'tokens')} for _ in programs
  ]
  for repeat in range(repeats + 1):  # the first warms up
    for (program, result), case in itertools.product(zip(programs, results), distributions):
      guesses, totals = program.guesses[case], np.zeros(3)
      state = initial_state(program.method, program.tree, len(guesses[0].tokens))
      for guessed in guesses:
        looked_up = look_up(distributions[case], guessed, tree=program.tree)
        proposal, target_probs, target_logits = jax.block_until_ready(looked_up)
        seconds, verdict = _timed(program.verify, guessed.keys, proposal, target_probs, state)
        both = 0.0
        if case == 'random':
          both, _ = _timed(program.verify_logits, guessed.keys, proposal, target_logits, state, program.sampling)
        totals += seconds, both, np.mean(verdict.num_accepted) + 1
        state = verdict.state
      if repeat:
        for values, total in zip(result.values(), totals / len(guesses)):
          values[case].append(float(total))
  return results


def _timed(function, *arguments):
  start = time.perf_counter()
  result = jax.block_until_ready(function(*arguments))
  return time.perf_counter() - start, result


def run(methods: list[Method], sizes: Sizes) -> list[dict[str, Any]]:
  """One record per method, number of rows and filter."""
  records = []
  for filter_name, filters in FILTERS.items():
    key = jax.random.key(SEED)
    distributions = {case: make_distributions(key, vocab_size=sizes.vocab_size, case=case, **filters) for case in CASES}
    random = distributions['random']
    overlap = float(jnp.mean(jnp.sum(jnp.minimum(random.draft_probs, random.target_probs), axis=-1)))
    for number in sizes.rows:
      programs = [Program.compile(method, sizes, number, distributions, filters) for method in methods]
      for program, own in zip(programs, measure(programs, distributions, sizes.repeats)):
        records.append(
          {
            'method': program.method.name,
            'rows': number,
            'filters': filters,
            'overlap': overlap,
            'num_guesses': program.tree.num_nodes,
            'microseconds': {case: spread(own['alone'][case], 1e-6) for case in CASES},
            'microseconds_with_logits_to_probs': spread(own['with_logits']['random'], 1e-6),
            'tokens': {case: own['tokens'][case][-1] for case in CASES},
            'temporary_bytes': program.temporaries,
            'law_bytes': 4 * number * (program.tree.num_nodes + 1) * sizes.vocab_size,
          }
        )
      print(_table(records[-len(programs) :], filter_name), flush=True)
  return records


def _table(records: list[dict[str, Any]], filter_name: str) -> str:
  first = records[0]
  lines = [
    f'\n{first["rows"]} row(s), top-k and top-p {filter_name}, 1 - TV = {first["overlap"]:.3f}; microseconds, median'
    ' [low, high] over repeats',
    f'{"method":<14}{"guesses":>8}{"tokens":>8}{"verification":>24}{"and logits_to_probs":>28}{"all kept":>10}'
    f'{"none kept":>11}{"temporaries / probs":>24}',
  ]
  for record in records:
    alone, both = record['microseconds'], record['microseconds_with_logits_to_probs']
    random = alone['random']
    lines.append(
      f'{record["method"]:<14}{record["num_guesses"]:>8}{record["tokens"]["random"]:>8.2f}'
      f'{random["median"]:>9.0f} [{random["low"]:5.0f}, {random["high"]:5.0f}]'
      f'{both["median"]:>12.0f} [{both["low"]:6.0f}, {both["high"]:6.0f}]'
      f'{alone["all kept"]["median"]:>10.0f}{alone["none kept"]["median"]:>11.0f}'
      f'{record["temporary_bytes"] / 2**20:>14.3f} / {record["law_bytes"] / 2**20:.1f} MiB'
    )
  return '\n'.join(lines)


if __name__ == '__main__':
  _VOCAB_SIZE = flags.DEFINE_integer('vocab_size', 32000, 'Vocabulary.', lower_bound=2)
  _NUM_DRAFTS = flags.DEFINE_integer('num_drafts', 8, 'K, drafts per row.', lower_bound=1)
  _DRAFT_LENGTH = flags.DEFINE_integer('draft_length', 8, 'L, tokens per draft.', lower_bound=1)
  _ROWS = command.define_numbers('rows', '1,8', 'Rows verified together.')
  _REPEATS = flags.DEFINE_integer('repeats', 5, 'Repeats, after one that warms up.', lower_bound=1)
  _NUM_PROPOSALS = flags.DEFINE_integer(
    'num_proposals', 16, 'Proposals verified in turn, over all rows.', lower_bound=1
  )
  _METHODS = flags.DEFINE_list('methods', list(METHODS), 'Methods.')
  _OUTPUT = command.define_output()

  def main():
    grid = _VOCAB_SIZE.value, _NUM_DRAFTS.value, _DRAFT_LENGTH.value
    sizes = Sizes(*grid, _ROWS(), _REPEATS.value, _NUM_PROPOSALS.value)
    with OutputFiles(output=_OUTPUT.value) as files:
      records = run([get_method(name) for name in _METHODS.value], sizes)
      files.write(output=command.to_json(records, **dataclasses.asdict(sizes)))

  command_line.run(main)
