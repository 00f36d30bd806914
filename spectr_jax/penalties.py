"""Penalties: what a text so far does to the logits of its next token; on a tree of guesses, the text of the path."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from spectr_jax.sampling import COUNTED, SamplingParams
from spectr_jax.tree import TokenTree

# In place of the logit of a token that must not come while another may: what allows nothing else still allows it.
_LAST = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCounts:
  """The tokens of rows' committed texts.

  Attributes:
    new: int32 `[B, V]`, how often each is among the new tokens.
    in_prompt: bool `[B, V]`, whether each is in the prompt.
  """

  new: jax.Array
  in_prompt: jax.Array

  @classmethod
  def of_prompts(cls, tokens: jax.Array, lengths: jax.Array, vocab_size: int) -> TokenCounts:
    """Those of prompts int32 `[B, P]`, right-padded, of `lengths` `[B]`."""
    places = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, vocab_size)
    nothing = jnp.zeros((len(tokens), vocab_size), bool)
    in_prompt = jax.vmap(lambda row, at: row.at[at].set(True, mode='drop'))(nothing, places)
    return cls(jnp.zeros(nothing.shape, jnp.int32), in_prompt)

  def add(self, tokens: jax.Array, is_new: jax.Array) -> TokenCounts:
    """Those with new tokens `[B, W]`, where bool `[B, W]` says so."""
    places = jnp.where(is_new, tokens, self.new.shape[1])
    return dataclasses.replace(self, new=jax.vmap(lambda row, at: row.at[at].add(1, mode='drop'))(self.new, places))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Penalties:
  """What the sampling parameters of rows and their committed texts do to logits, in one round.

  Attributes:
    sampling: The rows' parameters, of which temperature and filters are not read.
    counts: The rows' tokens; None if the parameters do not read them.
    num_new: int32 `[B]`, the new tokens of each row.
    eos_ids: Ids that end a row; -1 is none.
  """

  sampling: SamplingParams
  counts: TokenCounts | None
  num_new: jax.Array
  eos_ids: Sequence[ArrayLike]

  @classmethod
  def of(
    cls, sampling: SamplingParams, counts: TokenCounts | None, num_new: jax.Array, eos_ids: Sequence[ArrayLike]
  ) -> Penalties | None:
    """The penalties, or None where the parameters change no logits."""
    is_used = counts is not None or sampling.logit_bias is not None or sampling.min_tokens is not None
    return cls(sampling, counts, num_new, tuple(eos_ids)) if is_used else None

  def apply(self, logits: jax.Array, paths: jax.Array) -> jax.Array:
    """The logits `[B, W, V]` that temperature and filters take, in at least float32.

    In this order: bias, ends that would come too early, repetition, frequency, presence.

    Args:
      logits: `[B, W, V]`, under the rows' constraints, after W nodes of each row's tree.
      paths: int32 `[B, W, L]`, the tokens from the root's children down to each node, in any order; -1 for none.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jax.lax.cond(self.is_asked, self._apply, lambda logits, paths: logits, logits, paths)

  @property
  def is_asked(self) -> jax.Array:
    """Whether any row's parameters change a logit: rows that may have penalties cost little until one has."""
    neutral = COUNTED | {'logit_bias': 0.0, 'min_tokens': 0}
    own = [(getattr(self.sampling, name), value) for name, value in neutral.items()]
    return jnp.stack([jnp.any(found != value) for found, value in own if found is not None]).any()

  def _apply(self, logits: jax.Array, paths: jax.Array) -> jax.Array:
    sampling, vocab_size = self.sampling, logits.shape[-1]
    if sampling.logit_bias is not None:
      logits += sampling.logit_bias[:, None]
    if sampling.min_tokens is not None:
      num_new = self.num_new[:, None] + jnp.sum(paths >= 0, axis=2)
      is_end = jnp.any(jnp.arange(vocab_size) == jnp.asarray(self.eos_ids)[:, None], axis=0)
      is_early = (num_new < sampling.min_tokens[:, None])[..., None]
      logits = jnp.where(is_early & is_end, jnp.minimum(logits, _LAST), logits)
    counts = self.counts
    if counts is None:
      return logits
    presence, frequency, repetition = (getattr(sampling, name)[:, None, None] for name in COUNTED)

    def penalized(logits, num_new, is_seen):
      repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
      return jnp.where(is_seen, repeated, logits) - frequency * num_new - presence * (num_new > 0)

    of_text = penalized(logits, counts.new[:, None], (counts.in_prompt | (counts.new > 0))[:, None])
    if not paths.shape[2]:
      return of_text
    # All tokens as the committed text has them, and those of the path once more: they are few.
    own = jnp.maximum(paths, 0)
    before = jax.vmap(lambda row, at: row[at])(counts.new, own)
    on_path = jnp.sum(paths[..., :, None] == paths[..., None, :], axis=-1)
    values = penalized(jnp.take_along_axis(logits, own, axis=2), before + on_path, True)
    places = jnp.where(paths < 0, vocab_size, paths)
    write = jax.vmap(jax.vmap(lambda row, at, values: row.at[at].set(values, mode='drop')))
    return write(of_text, places, values)


def path_tokens(tree: TokenTree, tokens: jax.Array, parents: jax.Array | None = None) -> jax.Array:
  """The tokens int32 `[B, N + 1, L]` on the path to each node, itself included, -1 for none.

  Args:
    tree: The tree, or the bounds of the rows' trees.
    tokens: int32 `[B, N]`, the guesses.
    parents: int32 `[B, N]`, as in `Proposal`.
  """

  def of_row(tokens, parents):
    paths = tree.of_row(parents).paths
    return jnp.where(paths > 0, tokens[jnp.maximum(paths - 1, 0)], -1)

  if not tree.num_nodes:
    return jnp.zeros((len(tokens), 1, 0), jnp.int32)
  return jax.vmap(of_row)(tokens, parents)
