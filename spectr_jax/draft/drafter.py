"""The seam between the loop and drafters: `Drafter`, and the `DraftContext` that it may read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

from spectr_jax.model import Model, static_field
from spectr_jax.proposal import Proposal, ProposalRule
from spectr_jax.sampling import SamplingParams
from spectr_jax.tree import TokenTree


class Growth(Protocol):
  """Fills the slots of one depth after the other, for each row by itself. A pytree whose leaves are its parameters."""

  @property
  def gives(self) -> bool:
    """True if its guesses are given (`Proposal.is_given`), False if they are drawn."""
    ...

  @property
  def reads_estimates(self) -> bool:
    """True if it reads the drafter's own estimates of acceptance, which few drafters make (`Drafter.estimates`)."""
    ...

  def sampling(self, sampling: SamplingParams) -> SamplingParams:
    """The parameters of the distributions that `expand` reads.

    Args:
      sampling: The rows' own.
    """
    ...

  def expand(
    self,
    key: jax.Array,
    rule: ProposalRule,
    laws: jax.Array,
    chances: jax.Array,
    slots: jax.Array,
    estimates: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Guesses for the slots of the next depth.

    Which node a slot stands below must be decided before any of these guesses is drawn.

    Args:
      key: The row's key for drafting at this depth.
      rule: The rule that draws children.
      laws: `[W, V]`, the draft's distributions after the nodes of this depth.
      chances: `[W]`, the logarithm of each node's estimated chance to be accepted; -inf for slots that are not used.
      slots: int32 `[S]`, the nodes of the next depth.
      estimates: `[W]`, the drafter's own estimate of the chance that a guess after each node is accepted; None if it
        makes none.

    Returns:
      int32 `[S]`, the place of each slot's parent among the W nodes, or -1 for a slot that is not used; int32 `[S]`,
      the tokens, -1 likewise; `[S]`, the logarithms of their chances.
    """
    ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftContext:
  """The text and hidden states that a drafter may read; the loop keeps those that the drafter asks for.

  Attributes:
    lengths: int32 `[B]`, committed tokens of each row. The last of them is the root of the next tree.
    target: The target model, by reference: `embed` and `unembed` share its embedding and its output head.
    tokens: int32 `[B, S]`, the committed tokens; entries behind a row's length are arbitrary. None in `propose_fn` and
      `commit_fn` unless `Drafter.reads_tokens`.
    features: `[B, S, F, D]`, the target's hidden states of the layers `Drafter.feature_layers` at every committed token
      but the last, which the target has not seen yet. None if `Drafter.feature_layers` is empty.
  """

  lengths: jax.Array
  target: Model
  tokens: jax.Array | None = None
  features: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftRequest:
  """The request of a round to a drafter.

  Attributes:
    keys: Keys `[B, L + 1]`, one per row and depth of the parent; the last depth draws nothing.
    sampling: The rows' sampling parameters, the same as the target's.
    tree: The tree, static, with at least one node; the bounds of every row's tree if the drafter grows trees.
    rule: The rule that draws children, static.
    growth: The rule by which rows grow their trees, `Drafter.growth`.
    given: int32 `[B, N]`, tokens fixed before anything is drawn; -1 for nodes that are drawn. None if all are drawn,
      and where trees grow. A drafter that draws by `draw_tree` takes them.
  """

  keys: jax.Array
  sampling: SamplingParams
  tree: TokenTree = static_field()
  rule: ProposalRule = static_field()
  growth: Growth | None = None
  given: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Commitment:
  """The outcome of a round's guesses.

  Attributes:
    path: int32 `[B, L + 1]`, the committed nodes: the root, then the accepted ones.
    num_committed: int32 `[B]`, the number of entries of `path` that are committed, the root included; 0 leaves a row
      untouched.
    next_token: int32 `[B]`, the token after the path, the next round's root; it has no node.
    tree: The tree of the round, static.
  """

  path: jax.Array
  num_committed: jax.Array
  next_token: jax.Array
  tree: TokenTree = static_field()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafter:
  """A source of guesses as data and static functions, like `Model`.

  All functions are batched. The functions must be module-level or otherwise compare equal between calls, or every call
  compiles anew. A drafter's state is any pytree of arrays with the batch in front.

  Attributes:
    params: The parameters, any pytree of arrays.
    init_fn: `(params, context, cache_size) -> state` after the prompts, which `context.tokens` `[B, P]` always holds;
      up to `cache_size` tokens per row will be committed.
    propose_fn: `(params, state, context, request) -> Proposal`, with a guess for every node of `request.tree`.
    commit_fn: `(params, state, context, commitment) -> state` after a round. It is given the round's `Proposal.state`,
      and a context that already holds the committed tokens.
    vocab_size: V, equal to the target's.
    reprompt_fn: `(params, state, context, num_kept, num_new) -> state` after other prompts, which `context.tokens`
      `[B, S]` always holds. The first `num_kept[b]` tokens are those of the text that `state` belongs to, and at most
      `num_new` (static) come after them. None for a drafter that begins anew, by `init_fn`.
    context_length: The longest prompt plus continuation that it was made for, in tokens, or None for no limit.
    max_depth: The most tokens that it guesses ahead, or None for no limit.
    reads_tokens: Whether it reads the committed text.
    reads_target: Whether it reads parameters of `DraftContext.target`. If it does not, the devices of a mesh may draft
      alone (`DecodeSharding.drafts_alone`).
    feature_layers: The target's layers whose hidden states it reads, numbered as in `Model.features_fn`.
    gives: Whether candidates may be given in place of drawn (`Proposal.is_given`).
    mixes: Whether given candidates stand beside drawn ones at a position; a drafter that mixes also gives.
    may_pass: Whether rounds in which it has no guess for any row run the target on the last tokens alone. All
      candidates must be given.
    grows: Whether rows have trees of their own (`Proposal.parents`).
    estimates: Whether it estimates itself the chance that its guesses are accepted, for rules that read it
      (`Growth.reads_estimates`).
    growth: The rule by which `draw_tree` grows its trees, see `growing`. None if it draws one tree for all rows, or has
      a rule of its own.
    param_shardings_fn: `(sharding, params) -> shardings` for a `DecodeSharding`; None keeps the parameters whole on
      every device.
    state_shardings_fn: `(sharding, params, state) -> shardings`; None shards the rows of all arrays over `data`.
    for_decoding_fn: `params -> params` in the form that the default device decodes fastest, or None.
  """

  params: Any
  init_fn: Callable[[Any, DraftContext, int], Any] = static_field()
  propose_fn: Callable[[Any, Any, DraftContext, DraftRequest], Proposal] = static_field()
  commit_fn: Callable[[Any, Any, DraftContext, Commitment], Any] = static_field()
  vocab_size: int = static_field()
  reprompt_fn: Callable[[Any, Any, DraftContext, jax.Array, int], Any] | None = static_field(None)
  context_length: int | None = static_field(None)
  max_depth: int | None = static_field(None)
  reads_tokens: bool = static_field(False)
  reads_target: bool = static_field(False)
  feature_layers: tuple[int, ...] = static_field(())
  gives: bool = static_field(False)
  mixes: bool = static_field(False)
  may_pass: bool = static_field(False)
  grows: bool = static_field(False)
  estimates: bool = static_field(False)
  growth: Growth | None = None
  param_shardings_fn: Callable[[Any, Any], Any] | None = static_field(None)
  state_shardings_fn: Callable[[Any, Any, Any], Any] | None = static_field(None)
  for_decoding_fn: Callable[[Any], Any] | None = static_field(None)

  def for_decoding(self) -> Drafter:
    """The same drafter in the form that the default device decodes fastest, as `Model.for_decoding`."""
    params = self.params if self.for_decoding_fn is None else self.for_decoding_fn(self.params)
    return self if params is self.params else dataclasses.replace(self, params=params)

  def init(self, context: DraftContext, cache_size: int) -> Any:
    """The state after the prompts.

    Args:
      context: The prompts, int32 `[B, P]`, and their lengths.
      cache_size: The committed tokens that a row must be able to hold.
    """
    return self.init_fn(self.params, context, cache_size)

  def reprompt(self, state: Any, context: DraftContext, num_kept: jax.Array, num_new: int, cache_size: int) -> Any:
    """The state after other prompts that begin like the texts of a state.

    Args:
      state: Between two rounds.
      context: The prompts, int32 `[B, S]`, and their lengths.
      num_kept: int32 `[B]`, the number of tokens that prompt and text share at their beginning; more may be equal.
      num_new: The most tokens of a prompt after these.
      cache_size: The committed tokens that a row must be able to hold.
    """
    if self.reprompt_fn is None:
      return self.init(context, cache_size)
    return self.reprompt_fn(self.params, state, context, num_kept, num_new)

  def propose(self, state: Any, context: DraftContext, request: DraftRequest) -> Proposal:
    """A round's guesses.

    Args:
      state: Between two rounds, any pytree of arrays with B in front.
      context: The text and hidden states so far.
      request: Keys, sampling parameters, tree and rule of the round.
    """
    return self.propose_fn(self.params, state, context, request)

  def commit(self, state: Any, context: DraftContext, commitment: Commitment) -> Any:
    """The state after a round.

    Args:
      state: `Proposal.state` of the round.
      context: The text and hidden states, with those of the round.
      commitment: The outcome of the round's guesses.
    """
    return self.commit_fn(self.params, state, context, commitment)
