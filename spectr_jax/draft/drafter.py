"""The seam between the loop and drafters: `Drafter`, and the `DraftContext` that it may read."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Self

import jax

from spectr_jax.constraint import ConstraintTables
from spectr_jax.model import Model, static_field
from spectr_jax.penalties import Penalties
from spectr_jax.proposal import Proposal, ProposalRule
from spectr_jax.sampling import SamplingParams
from spectr_jax.sharding import replicated
from spectr_jax.tree import TokenTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftContext:
  """The text and hidden states that a drafter may read; the loop keeps those that the drafter asks for.

  Attributes:
    lengths: int32 `[B]`, committed tokens of each row. The last of them is the root of the next tree.
    target: The target model, by reference: `embed_fn` and `unembed_fn` share its embedding and its output head.
    tokens: int32 `[B, S]`, the committed tokens; entries behind a row's length are arbitrary. None in `propose` and
      `commit` unless `Drafter.reads_tokens`.
    features: `[B, S, F, D]`, the target's hidden states of the layers `Drafter.feature_layers` at every committed token
      but the last, which the target has not seen yet. None if `Drafter.feature_layers` is empty.
    target_kv: For each of `Drafter.kv_layers` the target's keys `[B, K, head_dim, S]` and values `[B, K, S, head_dim]`
      of the same tokens, as in its `KVCache`. None in `read`, and if there are no such layers.
  """

  lengths: jax.Array
  target: Model
  tokens: jax.Array | None = None
  features: jax.Array | None = None
  target_kv: tuple[tuple[jax.Array, jax.Array], ...] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftRequest:
  """The request of a round to a drafter.

  Attributes:
    keys: Keys `[B, L + 1]`, one per row and depth of the parent; the last depth draws nothing.
    sampling: The rows' sampling parameters, the same as the target's.
    tree: The tree, static, with at least one node; the bounds of every row's tree if the drafter grows trees.
    rule: The rule that draws children, static.
    given: int32 `[B, N]`, tokens fixed before anything is drawn; -1 for nodes that are drawn. None if all are drawn,
      and where trees grow. A `DrawingDrafter` takes them.
    constraints: The constraints of the rows, or None if none has one. `draw_tree` and lookup keep to them. A drafter
      that does not guesses tokens that the target never keeps.
    states: int32 `[B]`, the states of the roots under these constraints, or None.
    penalties: The penalties of the rows, or None. `draw_tree` applies them; guesses of others are kept less often.
  """

  keys: jax.Array
  sampling: SamplingParams
  tree: TokenTree = static_field()
  rule: ProposalRule = static_field()
  given: jax.Array | None = None
  constraints: ConstraintTables | None = None
  states: jax.Array | None = None
  penalties: Penalties | None = None


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


class Growth(abc.ABC):
  """A rule by which rows grow trees: it fills the slots of one depth after the other, for each row by itself.

  A frozen dataclass, registered as a pytree, whose leaves are its parameters.

  Attributes:
    has_given_candidates: Whether its guesses are given (`Proposal.is_given`) and not drawn.
    reads_estimates: Whether it reads the drafter's own estimates of acceptance, which few drafters make
      (`DrawingDrafter.estimates`).
  """

  has_given_candidates: bool = False
  reads_estimates: bool = False

  def sampling(self, sampling: SamplingParams) -> SamplingParams:
    """The parameters of the distributions that `expand` reads; by default the rows' own, `sampling`."""
    return sampling

  @abc.abstractmethod
  def expand(
    self,
    key: jax.Array,
    rule: ProposalRule,
    probs: jax.Array,
    chances: jax.Array,
    slots: jax.Array,
    estimates: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Guesses for the slots of the next depth.

    Which node a slot stands below must be decided before any of these guesses is drawn.

    Args:
      key: The row's key for drafting at this depth.
      rule: The rule that draws children.
      probs: `[W, V]`, the draft's distributions after the nodes of this depth.
      chances: `[W]`, the logarithm of each node's estimated chance to be accepted; -inf for slots that are not used.
      slots: int32 `[S]`, the nodes of the next depth.
      estimates: `[W]`, the drafter's own estimate of the chance that a guess after each node is accepted; None if it
        makes none.

    Returns:
      int32 `[S]`, the place of each slot's parent among the W nodes, or -1 for a slot that is not used; int32 `[S]`,
      the tokens, -1 likewise; `[S]`, the logarithms of their chances.
    """


class Drafter(abc.ABC):
  """A source of guesses; a frozen dataclass, registered as a pytree.

  Its fields are its parameters, any pytrees of arrays; programs are compiled for those made by `static_field`. All
  methods are of a batch. A drafter's state is any pytree of arrays with the batch in front.

  Attributes below are declarations, which a `Method` checks: class attributes, properties or fields of a subclass.

  Attributes:
    vocab_size: V, equal to the target's.
    context_length: The longest prompt plus continuation that it was made for, in tokens, or None for no limit.
    max_depth: The most tokens that it guesses ahead, or None for no limit.
    reads_tokens: Whether it reads the committed text.
    reads_target: Whether it reads parameters of `DraftContext.target`. If it does not, the devices of a mesh may draft
      alone (`DecodeSharding.drafts_alone`).
    feature_layers: The target's layers whose hidden states it reads, numbered as in `Model.features_fn`.
    kv_layers: The layers of the target's `KVCache` whose committed keys and values it reads.
    has_given_candidates: Whether candidates may be given in place of drawn (`Proposal.is_given`).
    has_mixed_positions: Whether given candidates stand beside drawn ones at a position; `has_given_candidates` then.
    can_skip_trees: Whether rounds in which it has no guess for any row run the target on the last tokens alone,
      without the tree. All candidates must be given.
    can_truncate: Whether its state can go back to a beginning of its text. If not, `read` begins with `num_kept` 0.
    keeps_ends: Whether its state, if it can't, can be continued where it ends: `read` begins with all of it or none.
    has_grown_trees: Whether rows have trees of their own (`Proposal.parents`).
    lookahead: How many tokens behind its own a slot of the caches in its state depends on: 0 for a model, 1 for a head
      that reads the next token. Such caches can be kept beyond their row, and `read` rebuilds the rest of the state.
      None for a state of another kind: then the drafter reads prompts that begin like a kept text from their start.
  """

  vocab_size: int
  context_length: int | None = None
  max_depth: int | None = None
  reads_tokens: bool = False
  reads_target: bool = False
  feature_layers: tuple[int, ...] = ()
  kv_layers: tuple[int, ...] = ()
  has_given_candidates: bool = False
  has_mixed_positions: bool = False
  can_skip_trees: bool = False
  can_truncate: bool = True
  keeps_ends: bool = False
  has_grown_trees: bool = False
  lookahead: int | None = None

  def init(self, batch_size: int, cache_size: int) -> Any:
    """The state of rows without a text, which can hold so many committed tokens each; by default `()`, for no state."""
    del batch_size, cache_size
    return ()

  def read(self, state: Any, context: DraftContext, num_kept: jax.Array, num_new: int) -> Any:
    """The state after prompts that begin like the texts of a state; by default `state`, for a drafter that has none.

    Args:
      state: Between two rounds, or of `init`.
      context: Its `tokens` always hold the whole prompts, int32 `[B, cache_size]`.
      num_kept: int32 `[B]`, the number of tokens that prompt and text share at their beginning; more may be equal. 0
        for a row whose text is not to be used.
      num_new: The most tokens of a prompt after these, static.
    """
    del context, num_kept, num_new
    return state

  @abc.abstractmethod
  def propose(self, state: Any, context: DraftContext, request: DraftRequest) -> Proposal:
    """A round's guesses, for every node of `request.tree`.

    Args:
      state: Between two rounds.
      context: The text and hidden states so far.
      request: Keys, sampling parameters, tree and rule of the round.
    """

  def commit(self, state: Any, context: DraftContext, commitment: Commitment) -> Any:
    """The state after a round; by default that of the proposal.

    Args:
      state: `Proposal.state` of the round.
      context: The text and hidden states, with those of the round.
      commitment: The outcome of the round's guesses.
    """
    del context, commitment
    return state

  def shardings(self, sharding: Any) -> Self:
    """The shardings in place of its arrays, by a `DecodeSharding`; by default every device has them whole."""
    return jax.tree.map(lambda _: replicated(sharding.mesh), self)

  def state_shardings(self, sharding: Any, state: Any) -> Any:
    """The shardings in place of a state's arrays, by a `DecodeSharding`; by default rows are sharded over `data`."""
    return sharding.of_rows(state)

  def for_decoding(self) -> Drafter:
    """The same drafter in the form that the default device decodes fastest, as `Model.for_decoding`."""
    return self
