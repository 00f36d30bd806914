"""`measure_speeds`: times settings by decoding, and puts the fastest first."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import ArrayLike

from spectr_jax.auto.measurement import time_settings
from spectr_jax.auto.observation import Speed
from spectr_jax.auto.setting import Setting, default_settings
from spectr_jax.auto.trial import BatchedDecoding, Notify
from spectr_jax.constraint import Constraint
from spectr_jax.draft import Drafter, as_drafter
from spectr_jax.engine import checks
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.model import Model
from spectr_jax.sampling import SamplingParams


def measure_speeds(
  target: Model,
  draft: Model | Drafter | None,
  prompts: checks.Prompts,
  prompt_lengths: ArrayLike | None = None,
  *,
  max_new_tokens: int,
  batch_size: int = 1,
  sampling: SamplingParams | None = None,
  constraint: Constraint | Sequence[Constraint | None] | None = None,
  eos_id: int | Sequence[int] | None = None,
  settings: Sequence[Setting] | None = None,
  seed: int = 0,
  sharding: DecodeSharding | None = None,
  notify: Notify | None = None,
) -> list[Speed]:
  """Times at most a dozen methods and trees by decoding some prompts; on a CPU at most six by default.

  `speeds[0].setting` is the fastest: pass its `method` and `tree`, and its `drafter(draft)`, to `generate`. The command
  `decode.main --method=auto` does the same and keeps the measurements in a file.

  Args:
    target, draft, prompt_lengths, constraint, eos_id, sharding: As for `generate`.
    prompts: As for `generate`, like those to come: eight, or two batches, say enough.
    max_new_tokens: Limit of new tokens per row, as in the runs to come.
    batch_size: B, rows of a batch, as in the runs to come.
    sampling: Of scalars, as for `generate`.
    settings: Settings to choose from, autoregressive decoding among them; None for `default_settings`.
    seed: From 0 to 2**32 - 1.
    notify: Called with the current activity, the settings timed, and how many there may be.

  Returns:
    The speeds of the settings that were timed, the fastest first.

  Raises:
    ValueError: As for `generate`; or no setting decodes autoregressively.
  """
  tokens, lengths = map(np.asarray, checks.as_prompts(prompts, prompt_lengths))
  sampling = SamplingParams() if sampling is None else sampling
  is_greedy = bool(np.all(np.asarray(sampling.temperature) == 0))
  is_short = settings is None and jax.default_backend() == 'cpu'
  settings = default_settings(draft, is_greedy=is_greedy) if settings is None else list(settings)
  key = jax.random.key(seed, impl='threefry2x32')
  eos_ids = () if eos_id is None else (eos_id,) if isinstance(eos_id, int | np.integer) else tuple(eos_id)
  drafter = as_drafter(draft)
  if sharding is not None:
    target, drafter = sharding.put_models(target, drafter)
  batch_size = min(batch_size, len(tokens))
  trial = BatchedDecoding(
    target=target,
    draft=drafter,
    tokens=tokens,
    lengths=lengths,
    batch_size=batch_size if sharding is None else sharding.round_up(batch_size),
    max_new_tokens=max_new_tokens,
    sampling=sampling,
    eos_ids=eos_ids,
    sharding=sharding,
    constraint=constraint,
  )
  notify = notify or (lambda what, done, total: None)

  def keys_fn(number: int) -> jax.Array:
    return jax.random.split(jax.random.fold_in(key, number), len(tokens))

  return time_settings(trial, keys_fn, settings, notify, is_short=is_short)
