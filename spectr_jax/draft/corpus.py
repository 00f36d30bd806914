"""Texts in which prompt lookup searches besides the row's own: a suffix array, searched on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Occurrences of a suffix that are looked at; of more, as many that are evenly spaced in the suffix array.
NUM_SAMPLED = 64
_END = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookupCorpus:
  """Documents as one text, and the order of its suffixes; made by `lookup_corpus`.

  Both arrays are data: corpora of one size share compiled programs. A token takes 8 bytes on the device.

  Attributes:
    tokens: int32 `[T]`, the documents one after another, each followed by -1.
    suffixes: int32 `[T]`, all places of `tokens`, sorted by the text from there to the end of the document.
  """

  tokens: jax.Array
  suffixes: jax.Array


def _suffix_order(tokens: np.ndarray) -> np.ndarray:
  """The places of a text, sorted by what follows them up to the next -1, which comes before all tokens, int32 `[T]`.

  Equal suffixes are sorted by place. The whole suffix counts, by prefix doubling ("Suffix Arrays: A New Method for
  On-Line String Searches", Manber and Myers): the ranks of the first 1, 2, 4, ... tokens follow from each other, one
  sort each, until twice as many tokens tell no more suffixes apart. The last token must be -1.
  """
  size = len(tokens)
  places = np.arange(size)
  ends = np.flatnonzero(tokens == _END)
  num_left = ends[np.searchsorted(ends, places)] + 1 - places
  _, ranks = np.unique(tokens, return_inverse=True)
  length = 1
  while True:
    following = np.zeros(size, np.int64)
    is_longer = num_left > length
    following[is_longer] = ranks[places[is_longer] + length] + 1
    keys = ranks * np.int64(size + 1) + following
    order = np.argsort(keys, kind='stable')
    is_new = np.diff(keys[order], prepend=-1) != 0
    if is_new.sum() == ranks.max() + 1:
      return order.astype(np.int32)
    ranks = np.empty(size, np.int64)
    ranks[order] = np.cumsum(is_new) - 1
    length *= 2


def lookup_corpus(documents: Iterable[Sequence[int] | np.ndarray]) -> LookupCorpus:
  """A corpus for `lookup_drafter` and `lookup_beside`; its suffixes are sorted here, on the host.

  Args:
    documents: The token ids of each document. What is found never spans two of them. Empty ones are left out.

  Raises:
    ValueError: There are no tokens, there are too many for int32 places, or a document is not a sequence of ids.
  """
  parts = []
  for document in documents:
    ids = np.asarray(document)
    if not ids.size:
      continue
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= 2**31:
      raise ValueError(f'a document of a lookup corpus is a sequence of token ids of at least 0, got {document!r:.60}')
    parts += [ids.astype(np.int32), np.array([_END], np.int32)]
  if not parts:
    raise ValueError('a lookup corpus needs at least one token')
  tokens = np.concatenate(parts)
  if len(tokens) > np.iinfo(np.int32).max:
    raise ValueError(f'a lookup corpus holds at most 2**31 - 1 tokens and ends of documents, got {len(tokens)}')
  return LookupCorpus(jnp.asarray(tokens), jnp.asarray(_suffix_order(tokens)))


def _suffix_ranges(
  corpus: LookupCorpus, text: jax.Array, length: jax.Array, longest: int, shortest: int
) -> tuple[jax.Array, jax.Array]:
  """The entries of the suffix array that begin with the last tokens of a text, all lengths at once in log2(T) steps.

  Returns int32 `[H]`, the first entry for each number of tokens, `longest` first, and int32 `[H]`, how many follow.
  """
  sizes = jnp.arange(longest, shortest - 1, -1)
  offsets = jnp.arange(longest)
  wanted = text[jnp.clip(length - sizes[:, None] + offsets, 0, len(text) - 1)][:, None]
  is_compared = (offsets < sizes[:, None])[:, None]
  is_upper = jnp.array([False, True])
  last = len(corpus.tokens) - 1

  def halve(_, bounds):
    low, high = bounds
    middle = low + (high - low) // 2
    # The last token is -1. No token is, so the comparison is decided before a place behind it is read.
    tokens = corpus.tokens[jnp.minimum(corpus.suffixes[middle][..., None] + offsets, last)]
    order = jnp.where(is_compared, jnp.sign(tokens - wanted), 0)
    first = jnp.argmax(order != 0, axis=-1, keepdims=True)
    order = jnp.take_along_axis(order, first, axis=-1)[..., 0]
    is_right = (order < is_upper) & (low < high)
    return jnp.where(is_right, middle + 1, low), jnp.where(is_right, high, middle)

  low = jnp.zeros((len(sizes), 2), jnp.int32)
  high = jnp.full_like(low, last + 1)
  ends, _ = jax.lax.fori_loop(0, (last + 1).bit_length(), halve, (low, high))
  return ends[:, 0], jnp.where(sizes <= length, ends[:, 1] - ends[:, 0], 0)


def corpus_continuations(
  corpus: LookupCorpus, text: jax.Array, length: jax.Array, num_tokens: int, longest: int, shortest: int
) -> jax.Array:
  """What follows occurrences of a text's last tokens in a corpus, int32 `[H, NUM_SAMPLED, L]`, `longest` suffix first.

  Of more than `NUM_SAMPLED` occurrences as many are taken, evenly spaced in the suffix array. That sorts them by what
  follows, so that frequent continuations have their share among them. Tokens are -1 at the end of a document, behind
  which they are arbitrary, and for occurrences that there are not.
  """
  firsts, counts = _suffix_ranges(corpus, text, length, longest, shortest)
  steps, counts = jnp.arange(NUM_SAMPLED), counts[:, None]
  # counts * steps // NUM_SAMPLED, of which the product may exceed int32.
  spaced = counts // NUM_SAMPLED * steps + counts % NUM_SAMPLED * steps // NUM_SAMPLED
  entries = firsts[:, None] + jnp.where(counts > NUM_SAMPLED, spaced, steps)
  last = len(corpus.tokens) - 1
  sizes = jnp.arange(longest, shortest - 1, -1)
  places = corpus.suffixes[jnp.minimum(entries, last)] + sizes[:, None]
  tokens = corpus.tokens[jnp.minimum(places[..., None] + jnp.arange(num_tokens), last)]
  return jnp.where((steps < counts)[..., None], tokens, _END)


def most_frequent(continuations: jax.Array, is_open: jax.Array) -> jax.Array:
  """A frequent continuation `[L]` of `[M, L]`: each token is the most frequent one among the open ones that agree so
  far.

  Of equally frequent tokens the one of the earliest continuation is taken; -1 where no continuation is left.
  """

  def follow(agrees, tokens):
    agrees &= tokens != _END
    counts = jnp.where(agrees, jnp.sum((tokens[:, None] == tokens) & agrees, axis=1), 0)
    best = jnp.argmax(counts)
    token = jnp.where(counts[best] > 0, tokens[best], _END)
    return agrees & (tokens == token), token

  return jax.lax.scan(follow, is_open, continuations.T)[1]
