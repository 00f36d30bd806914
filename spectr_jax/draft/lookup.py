"""Prompt lookup: guesses are what followed occurrences of the text's last tokens, in the text itself or in a corpus."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.draft.corpus import LookupCorpus, corpus_continuations, most_frequent
from spectr_jax.draft.drafter import Commitment, DraftContext, Drafter, DraftRequest
from spectr_jax.draft.drawing import DrawingDrafter
from spectr_jax.draft.model_drafter import model_drafter
from spectr_jax.model import Model, static_field
from spectr_jax.proposal import Proposal
from spectr_jax.tree import TokenTree

LOOKUP_MAX, LOOKUP_MIN = 8, 2


def _match_lengths(text: jax.Array, length: jax.Array, longest: int) -> jax.Array:
  """The number of tokens, up to `longest`, that agree at a text's end and at each earlier place, int32 `[S]`.

  It is 0 from the last token on: in the text 3 1 2 3 1 it is 0 2 0 0 0, since the tokens 3 1 end at place 1, too.
  """
  padded = jnp.pad(text, (longest - 1, 0), constant_values=-1)
  is_match = jnp.arange(len(text)) < length - 1
  matches = jnp.zeros(text.shape, jnp.int32)
  for back in range(longest):
    token = text[jnp.maximum(length - 1 - back, 0)]
    is_match &= (padded[longest - 1 - back :][: len(text)] == token) & (back < length)
    matches += is_match
  return matches


def continuations(
  text: jax.Array,
  length: jax.Array,
  num_chains: int,
  num_tokens: int,
  longest: int,
  shortest: int,
  corpus: LookupCorpus | None = None,
) -> jax.Array:
  """What followed the occurrences of the longest suffix of a text that occurred before, or occurs in a corpus.

  Of the places where as many tokens as possible agree with the text's end, the latest is taken, then the latest with
  another next token, and so on; where there are no more of them, places where fewer tokens agree follow. A continuation
  that reaches the text's end goes on with its own beginning, as a text of that period would.

  The corpus adds its occurrences. Those of as many tokens come after the text's own, and before those of fewer tokens.
  Of the tokens that follow in it the most frequent one is taken, and so on down the chain, among the occurrences that
  `corpus_continuations` looks at; then the most frequent other one.

  Of int32 `[S]` texts, entries from `length` on are arbitrary. The result is int32 `[num_chains, num_tokens]` with
  different first tokens: rows of -1 where nothing was found, entries of -1 behind the end of a corpus's document.
  """
  places = jnp.arange(len(text))
  matches = _match_lengths(text, length, longest)
  ranks = jnp.where(matches >= shortest, matches * len(text) + places, -1)
  followers = jnp.roll(text, -1)
  others = None if corpus is None else corpus_continuations(corpus, text, length, num_tokens, longest, shortest)

  def find(carry, _):
    ranks, is_open = carry
    place = jnp.argmax(ranks)
    is_found = ranks[place] >= 0
    period = jnp.maximum(length - 1 - place, 1)
    source = place + 1 + jnp.arange(num_tokens) % period
    chain = jnp.where(is_found, text[jnp.minimum(source, len(text) - 1)], -1)
    if others is not None:
      occurs = jnp.any(is_open, axis=1)
      row = jnp.argmax(occurs)
      is_longer = occurs[row] & (longest - row > jnp.where(is_found, matches[place], 0))
      chain = jnp.where(is_longer, most_frequent(others[row], is_open[row]), chain)
      is_open &= others[..., 0] != chain[0]
    return (jnp.where(followers == chain[0], -1, ranks), is_open), chain

  is_open = jnp.zeros((), bool) if others is None else others[..., 0] >= 0
  return jax.lax.scan(find, (ranks, is_open), length=num_chains)[1].astype(jnp.int32)


@functools.lru_cache(maxsize=64)
def _chain_places(tree: TokenTree) -> tuple[np.ndarray, np.ndarray]:
  """The chain and the place in it of every node, int32 `[N]` each; ValueError for a tree that is no set of chains."""
  if tree.is_grown or (tree.num_children[1:] > 1).any():
    raise ValueError(
      'prompt lookup guesses chains: give it a tree that branches at the root alone, such as chains(2, 8)'
    )
  return tree.paths[1:, 0] - 1, tree.depths[1:] - 1


@dataclasses.dataclass(frozen=True)
class Lookup:
  """Prompt lookup as a function of the committed text; hashable, so that equal ones share compiled programs.

  It keeps nothing between rounds. Its memory and time grow linearly with the text, and its time with the logarithm of
  the corpus.
  """

  longest: int = LOOKUP_MAX  # tokens of a suffix that are compared
  shortest: int = LOOKUP_MIN  # tokens that count as an occurrence
  num_chains: int | None = None  # chains of the tree that hold guesses, from the first one on; None for all

  def __post_init__(self):
    if not 1 <= self.shortest <= self.longest:
      raise ValueError(
        f'lookup_min and lookup_max must be at least 1, lookup_min at most lookup_max; got {self.shortest} and'
        f' {self.longest}'
      )
    if self.num_chains is not None and self.num_chains < 1:
      raise ValueError(f'num_given must be at least 1, got {self.num_chains}')

  def guesses(self, context: DraftContext, tree: TokenTree, corpus: LookupCorpus | None = None) -> jax.Array:
    """The guesses, int32 `[B, N]`, of a tree that branches at the root alone; -1 for nodes without one."""
    if context.tokens is None:
      raise ValueError('prompt lookup reads the committed text: the context must hold tokens')
    chain, place = _chain_places(tree)
    num_chains = int(tree.num_children[0])
    num_found = num_chains if self.num_chains is None else min(self.num_chains, num_chains)

    def of_row(text, length):
      chains = continuations(text, length, num_found, tree.max_depth, self.longest, self.shortest, corpus)
      return jnp.pad(chains, ((0, num_chains - num_found), (0, 0)), constant_values=-1)[chain, place]

    return jax.vmap(of_row)(context.tokens, context.lengths)


def _allowed(tokens: jax.Array, request: DraftRequest) -> jax.Array:
  """Guesses `[B, N]` without those that the rows' constraints do not allow, and without what stands below these."""
  if request.constraints is None or request.states is None:
    return tokens
  return request.constraints.allowed_guesses(request.states, tokens, request.tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookupDrafter(Drafter):
  """Prompt lookup alone, see `lookup_drafter`; it has no state."""

  corpus: LookupCorpus | None
  lookup: Lookup = static_field()
  vocab_size: int = static_field()
  can_skip_trees: bool = static_field(True)
  reads_tokens = True
  has_given_candidates = True

  def propose(self, state: Any, context: DraftContext, request: DraftRequest) -> Proposal:
    tokens = _allowed(self.lookup.guesses(context, request.tree, self.corpus), request)
    # Nothing is drawn, so the distributions are not read.
    probs = jnp.zeros((len(tokens), len(request.tree.parent_nodes), self.vocab_size))
    return Proposal(tokens, probs, state, is_given=tokens >= 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookupBeside(Drafter):
  """Prompt lookup beside the samples of another drafter, see `lookup_beside`; the state is that of the other."""

  drafter: DrawingDrafter
  corpus: LookupCorpus | None
  lookup: Lookup = static_field()
  reads_tokens = True
  has_given_candidates = True
  has_mixed_positions = True

  @property
  def vocab_size(self) -> int:
    return self.drafter.vocab_size

  @property
  def context_length(self) -> int | None:
    return self.drafter.context_length

  @property
  def max_depth(self) -> int | None:
    return self.drafter.max_depth

  @property
  def can_truncate(self) -> bool:
    return self.drafter.can_truncate

  @property
  def keeps_ends(self) -> bool:
    return self.drafter.keeps_ends

  @property
  def lookahead(self) -> int | None:
    return self.drafter.lookahead

  @property
  def reads_target(self) -> bool:
    return self.drafter.reads_target

  @property
  def feature_layers(self) -> tuple[int, ...]:
    return self.drafter.feature_layers

  def init(self, batch_size: int, cache_size: int) -> Any:
    return self.drafter.init(batch_size, cache_size)

  def read(self, state: Any, context: DraftContext, num_kept: jax.Array, num_new: int) -> Any:
    return self.drafter.read(state, context, num_kept, num_new)

  def propose(self, state: Any, context: DraftContext, request: DraftRequest) -> Proposal:
    given = _allowed(self.lookup.guesses(context, request.tree, self.corpus), request)
    return self.drafter.propose(state, context, dataclasses.replace(request, given=given))

  def commit(self, state: Any, context: DraftContext, commitment: Commitment) -> Any:
    return self.drafter.commit(state, context, commitment)

  def shardings(self, sharding) -> LookupBeside:
    return dataclasses.replace(super().shardings(sharding), drafter=self.drafter.shardings(sharding))

  def state_shardings(self, sharding, state: Any) -> Any:
    return self.drafter.state_shardings(sharding, state)

  def for_decoding(self) -> LookupBeside:
    return dataclasses.replace(self, drafter=self.drafter.for_decoding())


def _check_corpus(corpus: LookupCorpus | None, vocab_size: int) -> None:
  if corpus is not None and (largest := int(corpus.tokens.max())) >= vocab_size:
    raise ValueError(f'the lookup corpus holds ids up to {largest}, the vocabulary is 0 to {vocab_size - 1}')


def lookup_drafter(
  vocab_size: int, *, lookup_max: int = LOOKUP_MAX, lookup_min: int = LOOKUP_MIN, corpus: LookupCorpus | None = None
) -> LookupDrafter:
  """A drafter without a model: it guesses that the text goes on as it did after earlier occurrences of its last tokens.

  The chains of the tree hold different continuations. Where the last tokens have not occurred before there are no
  guesses, and if no row has any, the target's call is that of an autoregressive step. For methods with `takes_given`.

  With a corpus, occurrences in other texts count as well ("REST: Retrieval-Based Speculative Decoding", He et al.
  2024), if more tokens agree there than in the text itself; see `continuations`.

  Args:
    vocab_size: V, the target's.
    lookup_max: The most tokens of a suffix that are compared.
    lookup_min: The fewest tokens of a suffix that count as an occurrence.
    corpus: Texts to look in besides the row's own, from `lookup_corpus`, or None.

  Raises:
    ValueError: A bound is below 1, `lookup_max` is below `lookup_min`, or the corpus holds ids from V on.
  """
  _check_corpus(corpus, vocab_size)
  return LookupDrafter(corpus, Lookup(lookup_max, lookup_min), vocab_size)


def lookup_beside(
  draft: Model | Drafter,
  *,
  num_given: int = 1,
  lookup_max: int = LOOKUP_MAX,
  lookup_min: int = LOOKUP_MIN,
  corpus: LookupCorpus | None = None,
) -> LookupBeside:
  """A drafter that guesses by prompt lookup on some chains of the tree and draws the others from a model or a head.

  A node for which lookup finds nothing is drawn as well, so no node is wasted. This is decided before anything is
  drawn. For methods with `takes_mixed`.

  Args:
    draft: A model with the target's vocabulary, or a drafter that draws by `draw_tree`.
    num_given: The most chains that lookup fills.
    lookup_max: The most tokens of a suffix that are compared.
    lookup_min: The fewest tokens of a suffix that count as an occurrence.
    corpus: Texts to look in besides the row's own, as for `lookup_drafter`, or None.

  Raises:
    ValueError: A bound is below 1, `lookup_max` is below `lookup_min`, the corpus holds ids that the draft has not, or
      the draft grows trees or does not draw by `draw_tree`.
  """
  drafter = model_drafter(draft) if isinstance(draft, Model) else draft
  _check_corpus(corpus, drafter.vocab_size)
  if not isinstance(drafter, DrawingDrafter) or drafter.has_grown_trees:
    raise ValueError('lookup stands beside a drafter that draws all guesses of one tree, by draw_tree')
  return LookupBeside(drafter, corpus, Lookup(lookup_max, lookup_min, num_given))
