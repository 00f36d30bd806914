"""Times settings by decoding: `time_settings`.

Every setting takes turns with decoding without a draft, batch by batch, and its seconds are scaled by how long that
took at first: machines that are shared drift, and an interrupted measurement goes on later.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from spectr_jax.auto.observation import Observation, Speed
from spectr_jax.auto.search import MOST_OF_SHORT, MOST_SETTINGS, search
from spectr_jax.auto.setting import Setting, baseline_among
from spectr_jax.auto.trial import BatchedDecoding, Notify
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.program_memory import make_room
from spectr_jax.engine.result import Generation
from spectr_jax.sharding import fetch

# Of a setting: the fewest and the most batches, and the seconds of decoding without a draft that they are worth.
_FEWEST_BATCHES, MOST_BATCHES, _SECONDS = 3, 24, 1.5
_ROUNDS_BESIDE = 8  # without a draft, in each batch of another setting

KeysFn = Callable[[int], jax.Array]  # the keys [P] of pass 0, 1, 2 and so on over the prompts


@dataclasses.dataclass(frozen=True)
class Timer:
  """Decodes prompts with settings and measures them."""

  prompts: BatchedDecoding
  keys_fn: KeysFn
  baseline: Setting
  notify: Callable[[str], None]

  def observe(self, settings: Sequence[Setting], turn: int, first: Observation | None) -> dict[Setting, Observation]:
    """Decodes batches with settings in turns; `first` is of the baseline, None if this is the first observation.

    Keys differ with the batch and the turn. Without the baseline among the settings only some of its rounds are timed.
    """
    prompts, limits = self.prompts, dict.fromkeys(settings)
    if self.baseline not in limits:
      limits = {self.baseline: _ROUNDS_BESIDE, **limits}
    number = _FEWEST_BATCHES
    if first is not None:
      number = int(np.clip(_SECONDS / first.batch_seconds(prompts.batch_size), number, MOST_BATCHES))
    batches = prompts.batches
    passes = [self.keys_fn(turn * MOST_BATCHES + each) for each in range(-(-number // len(batches)))]
    runs = [(passes[i // len(batches)], batches[i % len(batches)]) for i in range(number)]
    make_room(is_joint=prompts.is_joint)
    decoders, timed = {setting: prompts.decoder(setting) for setting in limits}, {setting: [] for setting in limits}
    for setting, decoder in decoders.items():
      if setting in settings and not turn:
        self.notify(f'compiling {setting}')
      jax.block_until_ready(decode_rounds(decoder, prompts.init(decoder, *runs[0]), 1))
    self.notify(f'decoding with {", ".join(map(str, settings))}')
    for keys, rows in runs:
      for setting, decoder in decoders.items():
        start = time.perf_counter()
        state = jax.block_until_ready(prompts.init(decoder, keys, rows))
        begun = time.perf_counter()
        result = jax.block_until_ready(decode_rounds(decoder, state, limits[setting])).result
        seconds = time.perf_counter() - begun
        decoder.check(result)
        result = fetch(result)
        num_rows = len(np.unique(rows))  # copies of the last prompt fill its batch
        round_seconds = seconds / int(result.num_target_calls.max())
        timed[setting].append((begun - start, round_seconds, jax.tree.map(lambda x, n=num_rows: x[:n], result)))
    own = float(np.median([seconds for _, seconds, _ in timed[self.baseline]]))
    scale = 1.0 if first is None else float(np.median(first.round_seconds)) / own
    return {setting: observation_of(timed[setting], scale).of_the_first_process() for setting in settings}


def observation_of(runs: Sequence[tuple[float, float, Generation]], scale: float) -> Observation:
  """The observation of batches, from the seconds of prefill and of a round of each, and its result."""
  prefills, rounds, results = zip(*runs)
  return Observation(
    row_tokens=np.concatenate([each.lengths for each in results]).tolist(),
    row_calls=np.concatenate([each.num_target_calls for each in results]).tolist(),
    kept=np.concatenate([each.accepted_by_depth for each in results]).sum(0).tolist(),
    prefill_seconds=[scale * seconds for seconds in prefills],
    round_seconds=[scale * seconds for seconds in rounds],
  )


def time_settings(
  prompts: BatchedDecoding,
  keys_fn: KeysFn,
  settings: Sequence[Setting],
  notify: Notify,
  *,
  is_short: bool = False,
  known: dict[str, Observation] | None = None,
  keep: Callable[[dict[str, Observation]], None] = lambda known: None,
) -> list[Speed]:
  """The speeds of the settings that `search` chooses, the fastest first.

  `known` are the observations of an earlier run on the same prompts, which are not made again. `keep` is called with
  them and the new ones whenever there are some, `notify` with how many settings were timed, and how many are at most.

  ValueError if no setting decodes autoregressively.
  """
  known, timed, baseline = dict(known or {}), {}, baseline_among(settings)
  most = MOST_OF_SHORT if is_short else MOST_SETTINGS

  def observe(some: Sequence[Setting], turn: int) -> dict[Setting, Observation]:
    names = {setting: f'{setting}, again' if turn else str(setting) for setting in some}
    if any(name not in known for name in names.values()):
      timer = Timer(prompts, keys_fn, baseline, lambda what: notify(f'auto: {what}', len(timed), most))
      found = timer.observe(some, turn, known.get(str(baseline)))
      known.update({names[setting]: each for setting, each in found.items()})
      keep(known)
    timed.update(names)
    return {setting: known[name] for setting, name in names.items()}

  seen = search(settings, observe, prompts.batch_size, most)
  speeds = [Speed.of(setting, found, prompts.batch_size) for setting, found in seen.items()]
  return sorted(speeds, key=lambda speed: -speed.tokens_per_second)
