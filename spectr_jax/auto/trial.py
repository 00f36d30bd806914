"""Prompts that settings are tried on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from spectr_jax.auto.setting import Setting
from spectr_jax.constraint import Constraint, numbered
from spectr_jax.draft import Drafter, as_drafter
from spectr_jax.engine.decoder import Decoder, choose_cache_size
from spectr_jax.engine.reading import init_decode
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.engine.state import DecodeState
from spectr_jax.model import Model
from spectr_jax.sampling import SamplingParams

# The current activity, the steps done, and the steps in total.
Notify = Callable[[str, int, int], None]


@jax.jit
def take_keys(keys: jax.Array, rows: jax.Array) -> jax.Array:
  """The keys `[B]` of some of the rows `[P]`, as one program."""
  return keys[rows]


@dataclasses.dataclass(frozen=True)
class BatchedDecoding:
  """Models on their devices, and P prompts that are decoded in batches."""

  target: Model
  draft: Model | Drafter | None
  tokens: np.ndarray  # int32 [P, longest]
  lengths: np.ndarray  # int32 [P]
  batch_size: int  # rows of a batch
  max_new_tokens: int  # per row
  sampling: SamplingParams = SamplingParams()  # of scalars, for all rows
  eos_ids: tuple[int, ...] = ()
  logprobs: bool = False
  sharding: DecodeSharding | None = None
  constraint: Constraint | Sequence[Constraint | None] | None = None  # of all prompts, or one for each

  @property
  def batches(self) -> list[np.ndarray]:
    """Indices of the prompts of each batch; copies of the last prompt fill the last, and need no more rounds."""
    starts = range(0, len(self.tokens), self.batch_size)
    return [np.minimum(np.arange(start, start + self.batch_size), len(self.tokens) - 1) for start in starts]

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
    """True if given candidates of the draft stand beside drawn ones."""
    drafter = as_drafter(self.draft)
    return drafter is not None and drafter.has_mixed_positions

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
      constraints=numbered(self.constraint, len(self.tokens))[0],
    )

  def init(self, decoder: Decoder, keys: jax.Array, rows: np.ndarray, *, num_samples: int = 1) -> DecodeState:
    """The state of a batch before its first round, by keys `[P]` and the indices `[B]` of its prompts."""
    prompts = self.tokens[rows], self.lengths[rows]
    _, numbers = numbered(self.constraint, len(self.tokens))
    own = {'sampling': self.sampling, 'constraint': None if numbers is None else numbers[rows]}
    return init_decode(decoder, take_keys(keys, rows), *prompts, num_samples=num_samples, **own)
