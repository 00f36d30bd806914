"""What two vocabularies share, as tables on the device: a draft's tokens as the target's, and texts the other way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.kernels.vocabulary import over_vocabulary


class DraftTexts(NamedTuple):
  """Committed texts in the draft's tokens, of which none is written down: each is looked up by its place.

  Attributes:
    tokens: int32 `[B, S]`, the committed texts in the target's tokens; those outside of a text are 0.
    ends: int32 `[B, S]`, the number of the draft's tokens down to each of the target's.
    lengths: int32 `[B]`, the number of the draft's tokens of each text, at least 1.
  """

  tokens: jax.Array
  ends: jax.Array
  lengths: jax.Array

  def num_down_to(self, num_tokens: jax.Array) -> jax.Array:
    """int32 `[B]`, the number of the draft's tokens in the first `num_tokens` `[B]` of the target's."""
    last = jnp.take_along_axis(self.ends, jnp.maximum(num_tokens - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where(num_tokens > 0, last, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedVocabulary:
  """The tokens of a draft and of a target that stand for each other.

  Attributes:
    to_target: int32 `[Vd]`, the target's id of each of the draft's tokens, no id twice; -1 for tokens that the target
      has not, which are never guessed.
    draft_ids: int32 `[V, M]`, each of the target's tokens as the draft reads it; a shared one is one token.
    num_draft_ids: int32 `[V]`, the number of entries of each row of `draft_ids`, from 1 to M.
    bos_id: int32 scalar, the draft's token that begins every text, or -1 for none.
  """

  to_target: jax.Array
  draft_ids: jax.Array
  num_draft_ids: jax.Array
  bos_id: jax.Array

  @classmethod
  def make(
    cls, to_target: Sequence[int] | np.ndarray, draft_ids: Sequence[Sequence[int]], *, bos_id: int | None = None
  ) -> SharedVocabulary:
    """Puts tables together.

    Args:
      to_target: Integers `[Vd]`, as the attribute.
      draft_ids: The draft's ids of each of the target's V tokens, at least one each. Those of shared tokens are not
        read: each stands for the one that it is shared with.
      bos_id: The draft's token that begins every text, or None.

    Raises:
      ValueError: No token is shared, one is shared twice, an id is in no vocabulary, or a token has no ids.
    """
    to_target = np.asarray(to_target)
    if to_target.ndim != 1 or to_target.dtype.kind not in 'iu':
      raise ValueError(f'to_target must be integers [Vd], got {to_target.dtype} {list(to_target.shape)}')
    num_draft, num_target = len(to_target), len(draft_ids)
    shared = np.flatnonzero(to_target >= 0)
    if not len(shared):
      raise ValueError('draft and target share no token: no guess of this draft could be kept')
    if to_target.max() >= num_target or len(np.unique(to_target[shared])) < len(shared):
      raise ValueError(f"to_target must hold ids of the target's {num_target} tokens, none of them twice")
    rows: list[Sequence[int]] = list(draft_ids)
    for draft_id in shared.tolist():
      rows[to_target[draft_id]] = [draft_id]
    used = [index for row in rows for index in row] + ([] if bos_id is None else [bos_id])
    are_ids = all(isinstance(index, int | np.integer) and 0 <= index < num_draft for index in used)
    if not all(len(row) for row in rows) or not are_ids:
      raise ValueError(f"each of the target's tokens needs ids of the draft, from 0 to {num_draft - 1}")
    table = np.zeros((num_target, max(map(len, rows))), np.int32)
    for own, row in zip(table, rows):
      own[: len(row)] = row
    counts = np.array([len(row) for row in rows], np.int32)
    return cls(
      *map(jnp.asarray, (to_target.astype(np.int32), table, counts, np.int32(-1 if bos_id is None else bos_id)))
    )

  @property
  def num_shared(self) -> int:
    """The number of tokens that both have."""
    return int(np.sum(np.asarray(self.to_target) >= 0))

  def describe(self) -> dict[str, int]:
    """The sizes of both vocabularies and the number of tokens in common, as JSON values."""
    num_draft, num_target = len(self.to_target), len(self.num_draft_ids)
    return {'num_shared': self.num_shared, 'num_draft': num_draft, 'num_target': num_target}

  def is_shared(self, tokens: jax.Array) -> jax.Array:
    """bool `[...]`: which of the target's tokens, int32 `[...]`, the draft has as well."""
    return self.to_target[self.draft_ids[tokens, 0]] == tokens

  def last_ids(self, tokens: jax.Array) -> jax.Array:
    """int32 `[...]`: the last of the draft's ids of each of the target's tokens; the only one of shared tokens."""
    return self.draft_ids[tokens, self.num_draft_ids[tokens] - 1]

  def restrict(self, logits: jax.Array) -> jax.Array:
    """The draft's distribution on shared tokens, in the target's ids; probabilities add up to 1 after a softmax.

    Where no shared token has any mass, all of them are equally likely, so that there is a distribution to draw from.

    Args:
      logits: `[..., Vd]`, the draft's.

    Returns:
      Logits `[..., V]`, -inf for tokens that are not shared; NaN where the draft's largest logit is not finite.
    """
    num_target = self.num_draft_ids.shape[0]
    ids = jnp.where(self.to_target < 0, num_target, self.to_target)  # beyond the last, where nothing is written
    own = over_vocabulary(logits, ids, num_target)
    any_shared = jnp.full(num_target, -jnp.inf, own.dtype).at[ids].set(0, mode='drop')
    is_empty = jnp.max(own, axis=-1, keepdims=True) == -jnp.inf
    is_finite = jnp.isfinite(jnp.max(logits, axis=-1, keepdims=True))
    return jnp.where(is_finite, jnp.where(is_empty, any_shared, own), jnp.nan)

  def texts(self, tokens: jax.Array, lengths: jax.Array, start: jax.Array) -> DraftTexts:
    """Committed texts in the draft's tokens.

    Args:
      tokens: int32 `[B, S]`, in the target's tokens; entries behind a row's length are arbitrary.
      lengths: int32 `[B]`.
      start: int32 `[B]`, the first of the target's tokens that the draft reads.
    """
    places = jnp.arange(tokens.shape[1])
    is_read = (places >= start[:, None]) & (places < lengths[:, None])
    tokens = jnp.where(is_read, tokens, 0)
    begins = jnp.take_along_axis(tokens, start[:, None], axis=1)
    has_bos = (self.bos_id >= 0) & (self.draft_ids[begins, 0] != self.bos_id)
    counts = jnp.where(is_read, self.num_draft_ids[tokens], 0) + (has_bos & (places == start[:, None]))
    ends = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
    return DraftTexts(tokens, ends, ends[:, -1])

  def ids_at(self, texts: DraftTexts, places: jax.Array) -> jax.Array:
    """int32 `[B, W]`: the draft's tokens of texts at some places, int32 `[B, W]`; any id behind a text."""
    index = jnp.sum(texts.ends[:, None] <= places[:, :, None], axis=-1)
    index = jnp.minimum(index, texts.tokens.shape[1] - 1)
    tokens, ends = (jnp.take_along_axis(array, index, axis=1) for array in (texts.tokens, texts.ends))
    # Counted from the end of a token, so that what begins a text stands in front of its first token.
    offset = self.num_draft_ids[tokens] - (ends - places)
    ids = self.draft_ids[tokens, jnp.clip(offset, 0, self.draft_ids.shape[1] - 1)]
    return jnp.where(offset < 0, self.bos_id, ids)
