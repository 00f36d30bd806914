"""Prompts that settings are tried on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from spectr_jax.auto.setting import Setting
from spectr_jax.constraint import Constraint
from spectr_jax.draft import Drafter, as_drafter
from spectr_jax.engine.decoder import Decoder, choose_cache_size
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.engine.state import DecodeState, init_decode
from spectr_jax.model import Model
from spectr_jax.sampling import SamplingParams

# The current activity, the steps done, and the steps in total.
Notify = Callable[[str, int, int], None]


def batches_of(num_prompts: int, batch_size: int) -> list[np.ndarray]:
  """Indices of the prompts of each batch. The last batch is padded with copies of the last prompt.

  A padding copy never needs more rounds than its original.
  """
  starts = range(0, num_prompts, batch_size)
  return [np.minimum(np.arange(start, start + batch_size), num_prompts - 1) for start in starts]


@jax.jit
def take_keys(keys: jax.Array, rows: jax.Array) -> jax.Array:
  """The keys `[B]` of some of the rows `[P]`, as one program."""
  return keys[rows]


class Batches:
  """Models and P prompts that are decoded in batches.

  Attributes:
    target, draft: The models, on their devices.
    tokens, lengths: The prompts, int32 `[P, longest]`, and their lengths, int32 `[P]`.
    batch_size: B, rows of a batch.
    max_new_tokens: Limit of new tokens per row.
    sampling: Of scalars, for all rows.
    eos_ids: Ids that end a row.
    logprobs: Whether runs return log probabilities.
    sharding: The sharding over devices, or None for one device.
    constraint: What all continuations must follow, or None.
  """

  constraint: Constraint | None = None
  target: Model
  draft: Model | Drafter | None
  tokens: np.ndarray
  lengths: np.ndarray
  batch_size: int
  max_new_tokens: int
  sampling: SamplingParams
  eos_ids: tuple[int, ...]
  logprobs: bool
  sharding: DecodeSharding | None

  @property
  def batches(self) -> list[np.ndarray]:
    """Indices of the prompts of each batch, see `batches_of`."""
    return batches_of(len(self.tokens), self.batch_size)

  @property
  def cache_size(self) -> int:
    """Committed tokens that a row's caches hold."""
    return choose_cache_size(self.target, self.draft, self.tokens.shape[1] + self.max_new_tokens)

  @property
  def is_joint(self) -> bool:
    """True if several processes decode together."""
    return self.sharding is not None and len({device.process_index for device in self.sharding.mesh.devices.flat}) > 1

  @property
  def is_mixed(self) -> bool:
    """True if the draft gives guesses beside drawn ones."""
    drafter = as_drafter(self.draft)
    return drafter is not None and drafter.mixes

  def decoder(self, setting: Setting, *, statistics: bool = False) -> Decoder:
    """The decoder of a setting, with statistics of the positions visited if asked for."""
    return Decoder.make(
      self.target,
      setting.drafter(self.draft),
      method=setting.method,
      tree=setting.tree,
      max_new_tokens=self.max_new_tokens,
      cache_size=self.cache_size,
      eos_id=self.eos_ids,
      statistics=statistics,
      logprobs=self.logprobs,
      sharding=self.sharding,
      constraints=[] if self.constraint is None else [self.constraint],
    )

  def init(self, decoder: Decoder, keys: jax.Array, rows: np.ndarray, *, num_samples: int = 1) -> DecodeState:
    """The state of a batch before its first round.

    Args:
      decoder: A decoder of these prompts.
      keys: `[P]`, one key per prompt.
      rows: int `[B]`, indices of the batch's prompts.
      num_samples: Samples of each prompt, in rows one after another.
    """
    prompts = self.tokens[rows], self.lengths[rows]
    own = {'sampling': self.sampling, 'constraint': None if self.constraint is None else 0}
    return init_decode(decoder, take_keys(keys, rows), *prompts, num_samples=num_samples, **own)


@dataclasses.dataclass(frozen=True)
class Trial(Batches):
  """Prompts that settings are timed on, where there is no run."""

  target: Model
  draft: Model | Drafter | None
  tokens: np.ndarray
  lengths: np.ndarray
  batch_size: int
  max_new_tokens: int
  sampling: SamplingParams = SamplingParams()
  eos_ids: tuple[int, ...] = ()
  logprobs: bool = False
  sharding: DecodeSharding | None = None
