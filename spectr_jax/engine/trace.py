"""A run on one prompt, recorded round by round, with the decisions of other methods on the same drafts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spectr_jax.constraint import Constraint, numbered
from spectr_jax.draft import Drafter
from spectr_jax.engine import checks
from spectr_jax.engine.decoder import Decoder, choose_cache_size
from spectr_jax.engine.loop import Round, run_round
from spectr_jax.engine.reading import init_decode
from spectr_jax.engine.result import Generation
from spectr_jax.engine.state import DecodeState
from spectr_jax.methods import Guesses, Method, check_fit, get_method, with_children
from spectr_jax.model import Model
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import SamplingParams
from spectr_jax.tree import TokenTree
from spectr_jax.verifiers import Record, Verdict


@dataclasses.dataclass(frozen=True)
class Judge:
  """A method and the part of the tree that it judges.

  Attributes:
    method: The method.
    tree: The part, as a tree of its own with n nodes.
    nodes: int32 `[n + 1]`, the number of each of its nodes in the whole tree, the root first.
  """

  method: Method
  tree: TokenTree
  nodes: np.ndarray

  def part_of(self, whole: TokenTree, proposal: Proposal, target_probs: jax.Array) -> tuple[Proposal, jax.Array]:
    """The part of one row's round that it judges: the proposal, and the target's distributions `[n + 1, V]`."""
    tokens = proposal.tokens[self.nodes[1:] - 1]
    places = whole.parent_index[self.nodes[self.tree.parent_nodes]]
    is_given = None if proposal.is_given is None else proposal.is_given[self.nodes[1:] - 1]
    return Proposal(tokens, proposal.probs[places], is_given=is_given), target_probs[self.nodes]


@dataclasses.dataclass(frozen=True)
class Judgement:
  """A method's decision on a round's drafts, as NumPy arrays; nodes are numbered as in the judge's own tree.

  Attributes:
    verdict: The verifier's decision.
    record: The record of how it was made; None if the verifier keeps no record.
  """

  verdict: Verdict
  record: Record | None


@dataclasses.dataclass(frozen=True)
class TracedRound:
  """A round, as NumPy arrays.

  Attributes:
    root: The last token before the round.
    tokens: int32 `[N]`, the guesses; -1 for a node that does not exist.
    is_given: bool `[N]`, which of them are given and not drawn.
    draft_probs: `[R, V]`, the draft's distributions after `tree.parent_nodes`; 0 for a drafter without any.
    target_probs: `[N + 1, V]`, the target's distributions after all nodes.
    judgements: One per judge, that of the run first.
    emitted: int32 `[number of tokens]`, the tokens that the round added to the text, up to EOS or the limit.
    origins: int32 `[number of tokens]`, the origin of each of them, as in `Generation`.
  """

  root: int
  tokens: np.ndarray
  is_given: np.ndarray
  draft_probs: np.ndarray
  target_probs: np.ndarray
  judgements: tuple[Judgement, ...]
  emitted: np.ndarray
  origins: np.ndarray


@dataclasses.dataclass(frozen=True)
class Trace:
  """A recorded run.

  Attributes:
    tree: The tree of every round.
    judges: The run's method, then the others that judge its drafts.
    rounds: The rounds.
    generation: The result as of `generate`, of one row, as NumPy arrays.
  """

  tree: TokenTree
  judges: tuple[Judge, ...]
  rounds: tuple[TracedRound, ...]
  generation: Generation


def make_judge(method: Method, run_method: Method, tree: TokenTree, guesses: Drafter | Guesses | None = None) -> Judge:
  """The judge for a method on the drafts of another method's run.

  It judges the whole tree, or the first path of it if the method takes a single draft.

  Args:
    method, run_method, tree: The method that judges, and those of the run.
    guesses: The run's drafter or the kind of its guesses, given ones or given beside drawn ones; None if all are drawn.

  Raises:
    ValueError: The drafts were not drawn as the method needs them, it does not take given ones, it does not cover the
      tree, or it keeps a state between rounds, which would be that of another text.
  """
  rule = run_method.proposal_rule
  if method.proposal_rule != rule:
    method = with_children(method, rule.name)
  nodes = np.arange(tree.num_nodes + 1, dtype=np.int32)
  if method.max_drafts == 1 and not tree.is_chain:
    first = [0]
    while tree.num_children[first[-1]]:
      first.append(int(tree.first_child[first[-1]]))
    nodes, tree = np.array(first, np.int32), TokenTree.chains(1, len(first) - 1)
  if method.max_drafts == 0:
    raise ValueError(f'{method.name} drafts nothing: there is nothing to judge')
  guesses = Guesses() if guesses is None else guesses
  is_mixed = guesses.has_mixed_positions and not tree.is_chain
  check_fit(method, tree, Guesses(guesses.has_given_candidates, is_mixed))
  if method != run_method and jax.tree.leaves(method.verifier.init_state(tree)):
    raise ValueError(f'{method.name} keeps a state between rounds, which would be that of another text')
  return Judge(method, tree, nodes)


@jax.jit
def _play(decoder: Decoder, state: DecodeState) -> tuple[DecodeState, Round]:
  return run_round(decoder, state, is_explained=True)


@functools.partial(jax.jit, static_argnames=('method', 'tree'))
def _explain(method: Method, tree: TokenTree, keys, proposal, target_probs) -> tuple[Verdict, Record | None]:
  verifier = method.verifier
  return verifier.explain(keys, tree, proposal, target_probs, verifier.init_state(tree))


def _judgement(judge: Judge, whole: TokenTree, played: Round) -> Judgement:
  """The judgement of a method other than the run's on one row's round."""
  part = judge.part_of(whole, played.proposal, played.target_probs)
  return Judgement(*jax.device_get(_explain(judge.method, judge.tree, played.keys, *part)))


def trace_decode(
  rng_key: jax.Array,
  target: Model,
  draft: Model | Drafter,
  prompt: Sequence[int],
  *,
  method: str | Method,
  tree: TokenTree,
  max_new_tokens: int,
  others: Sequence[str | Method] = (),
  sampling: SamplingParams | None = None,
  constraint: Constraint | None = None,
  notify: Callable[[str, int, int], None] = lambda what, done, total: None,
  **request: Any,
) -> Trace:
  """Continues one prompt as `generate` does, and records every round.

  Other methods judge the drafts of every round with the round's own keys. The text goes on with the tokens that the
  run's method kept, so the other methods' decisions are not those of their own runs, whose texts would differ.

  Args:
    rng_key: A key array `[1]`, or one key, as for `generate`.
    target, draft, sampling: As for `generate`.
    prompt: Integers `[P]`.
    method, tree: The run's method, one that drafts, and its tree, the same for all rounds.
    max_new_tokens: Limit of new tokens.
    others: Methods that judge the same drafts; see `make_judge`.
    constraint: What the continuation must follow, as for `generate`.
    notify: Called with the current activity, the steps done and the steps in total: programs in the first round, each
      of which is compiled then, and tokens from then on.
    **request: Other options of `generate`.

  Returns:
    The run. It holds the distributions of every round, `[R, V]` and `[N + 1, V]` numbers each.

  Raises:
    ValueError: As for `generate` and `make_judge`; or the method drafts nothing, or the tree grows with every round.
  """
  method = get_method(method)
  if method.max_drafts == 0:
    raise ValueError(f'{method.name} drafts nothing: there is nothing to trace')
  if tree.is_grown:
    raise ValueError('a trace shows one tree for all rounds; this one grows with every round')
  prompt_tokens = checks.as_ids('the prompt', prompt, target.vocab_size)
  guesses = draft if isinstance(draft, Drafter) else None
  judges = tuple(make_judge(get_method(each), method, tree, guesses) for each in (method, *others))
  cache_size = choose_cache_size(target, draft, len(prompt_tokens) + max_new_tokens)
  sizes = {'max_new_tokens': max_new_tokens, 'cache_size': cache_size}
  constraints, numbers = numbered(constraint, 1)
  decoder = Decoder.make(target, draft, method=method, tree=tree, constraints=constraints, **sizes, **request)
  programs = ['the prompt', *(judge.method.name for judge in judges)]

  def begin(number: int) -> None:
    if not rounds:
      notify(f'compiling {number + 1} of {len(programs)}: {programs[number]}', number, len(programs))

  rounds: list[TracedRound] = []
  begin(0)
  own = {'sampling': sampling, 'constraint': numbers}
  state = init_decode(decoder, rng_key, prompt_tokens[None], np.array([len(prompt_tokens)]), **own)
  begin(1)
  while not bool(state.is_done[0]):
    before = state
    state, played = _play(decoder, state)
    decoder.check(state.result)
    played = jax.tree.map(lambda x: x[0], played)
    judgements = [Judgement(*jax.device_get((played.verdict, played.record)))]
    for number, judge in enumerate(judges[1:], 2):
      begin(number)
      judgements.append(_judgement(judge, tree, played))
    old, new = int(before.result.lengths[0]), int(state.result.lengths[0])
    proposal, target_probs = jax.device_get((played.proposal, played.target_probs))
    is_given = np.zeros(len(proposal.tokens), bool) if proposal.is_given is None else proposal.is_given
    rounds.append(
      TracedRound(
        root=int(before.last_token[0]),
        tokens=proposal.tokens,
        is_given=is_given,
        draft_probs=proposal.probs,
        target_probs=target_probs,
        judgements=tuple(judgements),
        emitted=np.asarray(state.result.tokens[0, old:new]),
        origins=np.asarray(state.result.origins[0, old:new]),
      )
    )
    notify('decoding', new, max_new_tokens)
  return Trace(tree, judges, tuple(rounds), jax.device_get(state.result).of_size(max_new_tokens))
