"""A run on one prompt that is looked at round by round, and what other methods make of the same drafts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spectr_jax.draft import Drafter
from spectr_jax.engine.loop import Round, run_round
from spectr_jax.engine.result import Generation
from spectr_jax.engine.state import init_decode
from spectr_jax.methods import Method, get_method, with_children
from spectr_jax.model import Model
from spectr_jax.proposal import Proposal
from spectr_jax.tree import TokenTree
from spectr_jax.verify import Record, Verdict


@dataclasses.dataclass(frozen=True)
class Judge:
  """A method and the part of the tree that it judges.

  Attributes:
    method: The method.
    tree: The tree that it sees.
    nodes: int32 `[n + 1]`, the place of each of its nodes in the whole tree, the root first.
  """

  method: Method
  tree: TokenTree
  nodes: np.ndarray

  def part_of(self, whole: TokenTree, proposal: Proposal, target_probs) -> tuple[Proposal, Any]:
    """What it sees of a row: its proposal and the target's laws `[n + 1, V]`."""
    tokens = proposal.tokens[self.nodes[1:] - 1]
    laws = whole.law_index[self.nodes[self.tree.parent_nodes]]
    return Proposal(tokens, proposal.probs[laws]), target_probs[self.nodes]


@dataclasses.dataclass(frozen=True)
class Judgement:
  """What a method decided on a round's drafts, as numpy arrays; nodes are numbered as in the method's own tree.

  Attributes:
    verdict: What its verifier kept.
    record: How it came about; None if the verifier keeps no record, or if rounding has let the record, which is another
      program, decide otherwise.
  """

  verdict: Verdict
  record: Record | None


@dataclasses.dataclass(frozen=True)
class TracedRound:
  """A round, as numpy arrays.

  Attributes:
    root: The last token before the round.
    tokens: int32 `[N]`, the guesses; -1 for a node that does not exist.
    draft_probs: `[R, V]`, the draft's laws after `tree.parent_nodes`.
    target_probs: `[N + 1, V]`, the target's laws after all nodes.
    judgements: One per judge, that of the run first.
    emitted: int32 `[number of tokens]`, what the round added to the text: the end of a text, or the limit, may have cut
      it short.
    origins: int32, where each of them came from, as in `Generation`.
  """

  root: int
  tokens: np.ndarray
  draft_probs: np.ndarray
  target_probs: np.ndarray
  judgements: tuple[Judgement, ...]
  emitted: np.ndarray
  origins: np.ndarray


@dataclasses.dataclass(frozen=True)
class Trace:
  """A run.

  Attributes:
    tree: The tree of every round.
    judges: The run's method, then those that judge its drafts.
    rounds: The rounds.
    generation: What `generate` returns, of one row, as numpy arrays.
  """

  tree: TokenTree
  judges: tuple[Judge, ...]
  rounds: tuple[TracedRound, ...]
  generation: Generation


def make_judge(method: Method, run_method: Method, tree: TokenTree) -> Judge:
  """How a method judges the drafts of another one's run: all of them, or the first if it takes a single draft.

  Args:
    method: The method.
    run_method: The method of the run.
    tree: Its tree.

  Raises:
    ValueError: The drafts were not drawn as the method needs them, the tree is none for it, or it keeps a state between
      rounds, which would be that of another text.
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
  if method.tree_for(tree) != tree:
    raise ValueError(f'{method.name} drafts nothing: there is nothing to judge')
  if method != run_method and jax.tree.leaves(method.verifier.init_state(tree)):
    raise ValueError(f'{method.name} keeps a state between rounds, which would be that of another text')
  return Judge(method, tree, nodes)


@jax.jit
def _play(target: Model, drafter: Any, carry: Any) -> tuple[Any, Round]:
  """A round of a state without its models."""
  state, played = run_round(dataclasses.replace(carry, target=target, drafter=drafter))
  return dataclasses.replace(state, target=None, drafter=None), played


@functools.partial(jax.jit, static_argnames=('method', 'tree'))
def _verify(method: Method, tree: TokenTree, keys, proposal, target_probs, state) -> Verdict:
  return method.verifier.verify(keys, tree, proposal, target_probs, state)


@functools.partial(jax.jit, static_argnames=('method', 'tree'))
def _record(method: Method, tree: TokenTree, keys, proposal, target_probs, state) -> Record | None:
  if not hasattr(method.verifier, 'record'):
    return None
  return method.verifier.record(keys, tree, proposal, target_probs, state)


def _agrees(tree: TokenTree, tokens: np.ndarray, verdict: Verdict, record: Record) -> bool:
  """Whether a record is of this verdict; a node that spells the same may stand for the deepest one."""
  path = tree.paths[record.node]
  spelled = tokens[path[path > 0] - 1], tokens[verdict.path[: verdict.num_accepted] - 1]
  return np.array_equal(*spelled) and bool(record.weights[verdict.next_token] > 0)


def _judgement(judge: Judge, whole: TokenTree, keys, proposal, target_probs, state, verdict=None) -> Judgement:
  part = judge.part_of(whole, proposal, target_probs)
  if verdict is None:
    verdict = _verify(judge.method, judge.tree, keys, *part, state)
  verdict, record = jax.device_get((verdict, _record(judge.method, judge.tree, keys, *part, state)))
  if record is not None and not _agrees(judge.tree, np.asarray(part[0].tokens), verdict, record):
    record = None
  return Judgement(verdict, record)


def trace_decode(
  rng_key: jax.Array,
  target: Model,
  draft: Model | Drafter,
  prompt: Sequence[int],
  *,
  method: str | Method,
  tree: TokenTree,
  others: Sequence[str | Method] = (),
  **request: Any,
) -> Trace:
  """Continues one prompt as `generate` does, round by round, and keeps what each round saw.

  Other methods judge the drafts of every round with the round's own keys; the text goes on with what the run's method
  kept. So their decisions are not those of their own runs, whose texts would be others.

  Args:
    rng_key: A key array `[1]`, or one key, as of `generate`.
    target, draft: As of `generate`.
    prompt: Integers `[P]`.
    method: The run's method, one that drafts.
    tree: Its tree.
    others: Methods that judge the same drafts; see `make_judge`.
    **request: Options of `generate`.

  Returns:
    The run; memory grows by all laws of every round.

  Raises:
    ValueError: As `generate` and `make_judge`; or the method drafts nothing.
  """
  method = get_method(method)
  if method.max_drafts == 0:
    raise ValueError(f'{method.name} drafts nothing: there is nothing to trace')
  prompt = np.asarray(prompt, np.int32)
  judges = tuple(make_judge(get_method(each), method, tree) for each in (method, *others))
  state = init_decode(
    rng_key, target, draft, prompt[None], np.array([len(prompt)]), method=method, tree=tree, **request
  )
  target, drafter = state.target, state.drafter
  carry, rounds = dataclasses.replace(state, target=None, drafter=None), []
  while not bool(carry.is_done[0]):
    before = carry
    carry, played = _play(target, drafter, carry)
    carry.result.check()
    keys, proposal, target_probs, verdict = jax.tree.map(
      lambda x: x[0], (played.keys, played.proposal, played.target_probs, played.verdict)
    )
    row = tree, keys, proposal, target_probs
    own_state = jax.tree.map(lambda x: x[0], before.verifier_state)
    judgements = [_judgement(judges[0], *row, own_state, verdict)]
    judgements += [_judgement(judge, *row, judge.method.verifier.init_state(judge.tree)) for judge in judges[1:]]
    old, new = int(before.result.lengths[0]), int(carry.result.lengths[0])
    tokens, laws, target_laws = jax.device_get((proposal.tokens, proposal.probs, target_probs))
    rounds.append(
      TracedRound(
        root=int(before.last_token[0]),
        tokens=tokens,
        draft_probs=laws,
        target_probs=target_laws,
        judgements=tuple(judgements),
        emitted=np.asarray(carry.result.tokens[0, old:new]),
        origins=np.asarray(carry.result.origins[0, old:new]),
      )
    )
  return Trace(tree, judges, tuple(rounds), jax.device_get(carry.result))
