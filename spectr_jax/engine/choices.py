"""The probabilities of choices: trees of their tokens, each of which the target reads in one call."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from spectr_jax.engine import checks
from spectr_jax.engine.result import FAILED_TARGET, NotFiniteError
from spectr_jax.model import NO_LIMIT, Model
from spectr_jax.unicode import check_unicode

_SHORTEST = 16  # tokens that prompts and trees are padded to, and to its doublings
_ROWS_AT_A_TIME = 8
_MOST_NODES = 512  # of a tree; attention's memory grows with their product with the prompt's length
_MOST_LOGITS = 2**28  # of a call, 1 GiB
_MOST_TOKENS = 2**16  # of all choices


class ChoiceTokenizer(Protocol):
  """A tokenizer that encodes texts to continue, and texts that continue them."""

  @property
  def eos_ids(self) -> tuple[int, ...]: ...

  def encode(self, text: str) -> list[int]: ...

  def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]: ...

  def token_bytes(self, ids: Sequence[int]) -> list[bytes]: ...


class ChoiceProbs(NamedTuple):
  """How likely each of C choices is behind each of B prompts, at temperature 1 without filters.

  A choice is the tokens that its text encodes to, without an end of the text. Where these begin another choice's, an
  end of the text (any of the tokenizer's `eos_ids`) is part of it, so that no continuation is two choices.

  Attributes:
    choices: The C texts.
    logprobs: float64 `[B, C]`, the target's log likelihood of each choice, in nats, as `log_likelihood` gives it.
    probs: float64 `[B, C]`, these likelihoods divided by their sum: how likely a choice is, given that it is one. A
      constraint draws by other laws, since it divides at every token.
  """

  choices: tuple[str, ...]
  logprobs: np.ndarray
  probs: np.ndarray


@dataclasses.dataclass(frozen=True)
class Choices:
  """Choices as tokens.

  Attributes:
    texts: C texts.
    ways: For each text the ids `[T]` that it may be: one way, or one for each end of the text.
  """

  texts: tuple[str, ...]
  ways: tuple[tuple[tuple[int, ...], ...], ...]

  @classmethod
  def of(cls, tokenizer: ChoiceTokenizer, choices: Sequence[str]) -> Choices:
    """Encodes choices.

    Raises:
      ValueError: There is none, one is empty or comes twice, it cannot be spelled behind another text, or one begins
        another and no id ends a text; or they are too many, or too long.
    """
    is_several = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_several or not choices or not all(isinstance(each, str) and each for each in choices):
      raise ValueError(f'choices must be a list of texts that are not empty, got {choices!r:.200}')
    if len(set(choices)) < len(choices):
      raise ValueError('choices must differ from each other')
    if len(choices) > _MOST_TOKENS:
      raise ValueError(f'there are {len(choices):,} choices, allowed are {_MOST_TOKENS:,}')
    encoded = [tuple(_continuing(tokenizer, each)) for each in choices]
    if (longest := max(map(len, encoded))) >= _MOST_NODES:
      raise ValueError(f'a choice has {longest:,} tokens, allowed are {_MOST_NODES - 1}')
    if (total := sum(map(len, encoded))) > _MOST_TOKENS:
      raise ValueError(f'the choices have {total:,} tokens, allowed are {_MOST_TOKENS:,}')
    # What ids begin stands behind them in their order.
    beginnings = {one for one, other in itertools.pairwise(sorted(encoded)) if other[: len(one)] == one}
    ends = sorted(set(tokenizer.eos_ids))
    if not ends and (both := [text for text, ids in zip(choices, encoded) if ids in beginnings]):
      raise ValueError(f'the choice {both[0]!r:.200} begins another one, and the tokenizer has no id that ends a text')
    ways = (tuple((*ids, end) for end in ends) if ids in beginnings else (ids,) for ids in encoded)
    return cls(tuple(choices), tuple(ways))

  @property
  def depth(self) -> int:
    """The most tokens of a way."""
    return max(len(way) for ways in self.ways for way in ways)

  @property
  def num_tokens(self) -> int:
    """The tokens of all ways."""
    return sum(len(way) for ways in self.ways for way in ways)

  def trees(self, most_nodes: int, most_edges: int) -> Iterator[_Tree]:
    """The ways in their order as trees of so many nodes and edges, which hold the longest way; one, if all fit."""
    tree = _Tree({(): 0}, {})
    for way in sorted(way for ways in self.ways for way in ways):
      beginnings = [way[:size] for size in range(len(way) + 1)]
      num_nodes = len(tree.nodes) + sum(each not in tree.nodes for each in beginnings[:-1])
      num_edges = len(tree.edges) + sum(each not in tree.edges for each in beginnings[1:])
      if num_nodes > most_nodes or num_edges > most_edges:
        yield tree
        tree = _Tree({(): 0}, {})
      for node, edge in itertools.pairwise(beginnings):
        tree.nodes.setdefault(node, len(tree.nodes))
        tree.edges.setdefault(edge, len(tree.edges))
    yield tree


class _Tree(NamedTuple):
  """Tokens below the last token of a prompt: beginnings of ways by number."""

  nodes: dict[tuple[int, ...], int]  # those that something follows, the empty one 0; a parent comes first
  edges: dict[tuple[int, ...], int]  # those of at least one token, which follows a node

  def arrays(self, num_nodes: int, num_edges: int) -> tuple[np.ndarray, ...]:
    """Of padded nodes the tokens `[N]`, depths `[N]` and ancestors bool `[N, N]`; of edges node and token `[E, 2]`."""
    tokens, depths, mask = np.zeros(num_nodes, np.int32), np.zeros(num_nodes, np.int32), np.eye(num_nodes, dtype=bool)
    for way, node in self.nodes.items():
      if way:
        tokens[node], depths[node] = way[-1], len(way)
        mask[node] |= mask[self.nodes[way[:-1]]]
    edges = np.zeros((num_edges, 2), np.int32)
    for way, edge in self.edges.items():
      edges[edge] = self.nodes[way[:-1]], way[-1]
    return tokens, depths, mask, edges


def _continuing(tokenizer: ChoiceTokenizer, text: str) -> list[int]:
  """The ids of a text that continues another: some tokenizers put a space in front of one that stands alone."""
  check_unicode(text, 'a choice')
  wanted = text.encode()
  for before in ('', '\n'):
    ids = tokenizer.encode(before + text)
    contents = tokenizer.token_bytes(ids)
    size = start = 0
    while size < len(wanted) and start < len(ids):
      start += 1
      size += len(contents[-start])
    if start and b''.join(contents[-start:]) == wanted:
      return ids[-start:]
  raise ValueError(f'the choice {text!r:.200} has no tokens that spell it behind another text')


def score_choices(
  target: Model,
  prompts: Sequence[ArrayLike | Sequence[int]],
  choices: Choices,
  *,
  width: int | None = None,
  num_nodes: int | None = None,
) -> ChoiceProbs:
  """`choice_probs` of prompts of ids `[P]` each; it raises the same.

  `width`, which prompts are padded to, and `num_nodes`, which trees have, fix the programs; None for few sizes.
  """
  limit, depth = target.context_length, choices.depth
  if limit is not None and limit <= depth:
    raise ValueError(f'a choice has {depth} tokens, and the model takes {limit} with the prompt')
  room = None if limit is None else limit - depth
  rows = [checks.as_ids(f'prompt {number}', each, target.vocab_size, room) for number, each in enumerate(prompts)]
  if not rows:
    raise ValueError('there is no prompt')
  if (highest := max(max(way) for ways in choices.ways for way in ways)) >= target.vocab_size:
    raise ValueError(f'a choice has the id {highest}, the vocabulary is 0 to {target.vocab_size - 1}')
  most = min(num_nodes or _MOST_NODES, max(depth, _MOST_LOGITS // target.vocab_size))
  trees = [
    (tree, tree.arrays(num_nodes or _padded(len(tree.nodes)), 4 * num_nodes if num_nodes else _padded(len(tree.edges))))
    for tree in choices.trees(most, 4 * most)
  ]
  # Positions beyond the context may have no embedding.
  width = min(_padded(max(map(len, rows))), limit or 2**31) if width is None else width
  at_a_time = min(_ROWS_AT_A_TIME, max(1, _MOST_LOGITS // (target.vocab_size * max(len(x[0]) for _, x in trees))))
  found = []
  for start in range(0, len(rows), at_a_time):
    part = rows[start : start + at_a_time]
    tokens, lengths = np.zeros((len(part), width), np.int32), np.array([len(each) for each in part], np.int32)
    for row, each in zip(tokens, part):
      row[: len(each)] = each
    # log p of each beginning of a way, given the one before it.
    steps, cache = {}, _read(target, tokens, lengths)
    for tree, arrays in trees:
      last = tokens[np.arange(len(part)), lengths - 1]
      logprobs, is_finite = jax.device_get(_score(target, cache, last, lengths, *arrays))
      if not is_finite.all():
        error = NotFiniteError(start + int(np.argmin(is_finite)), 0, FAILED_TARGET)
        raise error if limit is not None else error.with_hint(NO_LIMIT)
      steps |= {way: logprobs[:, edge].astype(np.float64) for way, edge in tree.edges.items()}
    of_ways = [[sum(steps[way[:size]] for size in range(1, len(way) + 1)) for way in ways] for ways in choices.ways]
    found.append(np.stack([np.logaddexp.reduce(each, axis=0) for each in of_ways], axis=1))
  logprobs = np.concatenate(found)
  # Where none is possible none is likelier than another.
  relative = np.where(np.isneginf(logprobs).all(axis=1, keepdims=True), 0.0, logprobs)
  return ChoiceProbs(choices.texts, logprobs, np.exp(relative - np.logaddexp.reduce(relative, axis=1, keepdims=True)))


def _padded(size: int) -> int:
  return max(_SHORTEST, 1 << (size - 1).bit_length())


@jax.jit
def _read(target: Model, tokens: jax.Array, lengths: jax.Array) -> Any:
  """The cache of prompts `[B, P]` without their last tokens."""
  return target.prefill(tokens, lengths - 1, target.init_cache_fn(*tokens.shape))[0]


@jax.jit
def _score(target: Model, cache: Any, last, lengths, tokens, depths, mask, edges) -> tuple[jax.Array, jax.Array]:
  """The log probabilities float32 `[B, E]` of the edges, and which rows are finite."""
  below = jnp.concatenate([last[:, None], jnp.broadcast_to(tokens[1:], (len(last), len(tokens) - 1))], axis=1)
  logits = target.apply(below, lengths[:, None] - 1 + depths, mask, cache).logits
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  own = logits[:, edges[:, 0], edges[:, 1]] - jax.nn.logsumexp(logits, axis=-1)[:, edges[:, 0]]
  # Nodes that pad have no edge.
  is_finite = jnp.all(jnp.isfinite(jnp.max(logits, axis=-1))[:, edges[:, 0]], axis=1)
  return own.astype(jnp.float32), is_finite


def choice_probs(
  target: Model, tokenizer: ChoiceTokenizer, texts: str | Sequence[str], choices: Sequence[str]
) -> ChoiceProbs:
  """How likely a text goes on with each of several choices.

  The target reads the texts, and then a tree of the choices' tokens in one call; in few calls where there are more than
  512 of them.

  Args:
    target: The model.
    tokenizer: The target's tokenizer, as `load_model` gives it.
    texts: B texts to continue, or one text.
    choices: C texts, of which a continuation is one.

  Raises:
    ValueError: There is no text or no choice, one is empty, a choice comes twice, or begins another where no id ends a
      text, or they are too many or too long.
    NotFiniteError: The model's logits are not finite.
  """
  prompts = tokenizer.encode_prompts([texts] if isinstance(texts, str) else list(texts))
  return score_choices(target, prompts, Choices.of(tokenizer, choices))
