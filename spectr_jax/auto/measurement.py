"""Measures what predictions follow from: times of draft and target alone for every tree, and of whole rounds.

Every program is timed beside autoregressive decoding, or a call of the target on one token, and its seconds are scaled
by how long that took at first: machines that are shared drift, and an interrupted measurement goes on later.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from spectr_jax.auto import programs, timing
from spectr_jax.auto.calibration import Calibration, Observation
from spectr_jax.auto.prediction import Prediction, finalists_of, predict, ranked
from spectr_jax.auto.setting import Setting, baseline_among, tree_name_of, tuned
from spectr_jax.auto.trial import Batches, Notify
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.program_memory import in_groups, make_room
from spectr_jax.methods import METHODS
from spectr_jax.sharding import fetch
from spectr_jax.tree import TokenTree

FEWEST_BATCHES = 6  # that a setting decodes; shared machines are slow for seconds at a time
_NUM_RUNS = 9
_ROUNDS_BESIDE = 8  # of autoregressive decoding, in each batch of another setting
_SECONDS_OF_A_SHORT_RUN = 2.0  # of autoregressive decoding, for each setting of a short grid


KeysFn = Callable[[int], jax.Array]  # the keys [P] of pass 0, 1, 2 and so on over the prompts


@dataclasses.dataclass(frozen=True)
class Measurer:
  """Measures settings; its methods return the calibration with the result."""

  prompts: Batches
  keys_fn: KeysFn
  baseline: Setting  # autoregressive decoding, whose time the seconds are scaled by
  notify: Notify

  def measure(self, program: programs.Program, calibration: Calibration, *, is_short: bool) -> Calibration:
    """Measures one program; the target's call on one token comes first. A short grid decodes fewer batches."""
    if program.kind == programs.TARGET:
      return self.time_target(program.setting, calibration)
    if program.kind == programs.DRAFT:
      return self.time_draft(program.setting, calibration)
    most_batches = None
    if is_short:
      most_batches = programs.batches_within(_SECONDS_OF_A_SHORT_RUN, calibration, self.prompts.max_new_tokens)
    first = calibration.observations.get(str(self.baseline))
    scale: dict[str, Any] = {} if first is None else {'pace': first.round_seconds, 'beside': _ROUNDS_BESIDE}
    observations = self.observe([program.setting], **scale, most_batches=most_batches)
    return dataclasses.replace(calibration, observations=calibration.observations | observations)

  def time_target(self, setting: Setting, calibration: Calibration) -> Calibration:
    """Times the target's call on a setting's tree."""
    seconds = self._seconds_beside(self._target_call(setting.tree), calibration.target_seconds.get(0))
    times = calibration.target_seconds | {setting.tree.num_nodes: seconds}
    return dataclasses.replace(calibration, target_seconds=times)

  def time_draft(self, setting: Setting, calibration: Calibration) -> Calibration:
    """Times the drafting of a setting's tree."""
    # Drafting depends on the tree alone, so one method per tree is compiled.
    method = METHODS['race' if self.prompts.is_mixed else 'speculative' if setting.tree.is_chain else 'spectr']
    decoder = self.prompts.decoder(dataclasses.replace(setting, method=method))
    state = self.prompts.init(decoder, self.keys_fn(0), self.prompts.batches[0])
    seconds = self._seconds_beside(functools.partial(timing.draft, decoder, state), calibration.target_seconds[0])
    return dataclasses.replace(calibration, draft_seconds=calibration.draft_seconds | {tree_name_of(setting): seconds})

  def observe_thresholds(self, settings: list[Setting], calibration: Calibration) -> Calibration:
    """Measures a growing tree with other thresholds, those of `tuned`, with the same keys."""
    self.notify('timing growth from other thresholds', 0, 1)
    for setting in settings:
      calibration = self.time_draft(setting, calibration)
    observations = self.observe(settings, pace=calibration.observations[str(self.baseline)].round_seconds)
    return dataclasses.replace(calibration, observations=observations | calibration.observations)

  def observe_finalists(self, settings: list[Setting], calibration: Calibration) -> Calibration:
    """Observes the fastest settings again, in turns, with other keys: the largest prediction was a lucky one."""
    observations = dict(calibration.observations)
    again = self.observe(settings, turn=1, pace=observations[str(self.baseline)].round_seconds)
    for name, observation in again.items():
      observations[name] = observations[name].joined(observation) if name in observations else observation
    return dataclasses.replace(calibration, observations=observations)

  def _seconds_beside(self, call: Callable[[], Any], paced_by: float | None) -> float:
    """Median seconds of a call, scaled to the given seconds of the target's call on one token, if there are any."""
    make_room(is_joint=self.prompts.is_joint)
    calls: dict[Hashable, Callable[[], Any]] = {'call': call}
    if paced_by is not None:
      calls['alone'] = self._target_call(TokenTree())
    medians = {name: float(np.median(seconds)) for name, seconds in timing.time_in_turns(calls, _NUM_RUNS).items()}
    return medians['call'] if paced_by is None else medians['call'] * paced_by / medians['alone']

  def _target_call(self, tree: TokenTree) -> Callable[[], Any]:
    prompts = self.prompts
    sizes = {'cache_size': prompts.cache_size, 'sharding': prompts.sharding}
    return timing.forward_calls(prompts.target, {'target': (tree, prompts.batch_size)}, **sizes)['target']

  def observe(
    self,
    settings: Sequence[Setting],
    *,
    turn: int = 0,
    pace: float | None = None,
    beside: int | None = None,
    most_batches: int | None = None,
  ) -> dict[str, Observation]:
    """Decodes the prompts with every setting and autoregressively, in turns as far as the programs fit in one process.

    Few batches are decoded several times, each time with other keys, which also depend on `turn`; `most_batches` bounds
    their number. Seconds are scaled to `pace`, of an autoregressive round, or to the first group of programs, by the
    time of autoregressive decoding in each group. With `beside` only so many of its rounds are timed in each batch.
    """
    prompts, baseline, batches = self.prompts, self.baseline, self.prompts.batches
    settings = list(dict.fromkeys([baseline, *settings]))
    paces = [] if pace is None else [pace]
    num_passes = -(-FEWEST_BATCHES // len(batches))
    keys = [self.keys_fn(turn * FEWEST_BATCHES + number) for number in range(num_passes)]
    runs = list(itertools.product(keys, batches))[:most_batches]
    num_passes = -(-len(runs) // len(batches))
    observed = settings if beside is None else settings[1:]
    done, total, observations, decoders = 0, len(observed) * len(runs), {}, {}

    def prepare(setting):
      if setting in observed:
        self.notify(f'compiling {setting}', done, total)
      decoder = decoders[setting] = prompts.decoder(setting)
      jax.block_until_ready(decode_rounds(decoder, prompts.init(decoder, keys[0], batches[0]), 1))

    for group in in_groups(settings, prepare, baseline=baseline, is_joint=prompts.is_joint):
      timed = {setting: [] for setting in group}
      for (of_prompts, rows), setting in itertools.product(runs, group):
        self.notify('decoding calibration prompts', done, total)
        start = time.perf_counter()
        state = jax.block_until_ready(prompts.init(decoders[setting], of_prompts, rows))
        begun = time.perf_counter()
        limit = beside if setting == baseline else None
        result = jax.block_until_ready(decode_rounds(decoders[setting], state, limit)).result
        seconds = time.perf_counter() - begun
        decoders[setting].check(result)
        result = fetch(result)
        timed[setting].append((begun - start, seconds / int(result.num_target_calls.max()), result))
        done += setting in observed and str(setting) not in observations
      paces.append(np.median([seconds for _, seconds, _ in timed[baseline]]))
      for setting in group:
        if setting in observed and str(setting) not in observations:
          observations[str(setting)] = observation_of(
            timed[setting], len(prompts.tokens), num_passes=num_passes, pace=paces[-1] / paces[0]
          )
    return observations


def observation_of(runs: list[tuple], num_prompts: int, *, num_passes: int, pace: float) -> Observation:
  """The observation of several passes from each batch's seconds of prefill and of a round, and its result."""
  prefill_seconds, round_seconds, results = zip(*runs)
  num_batches = -(-len(runs) // num_passes)  # of a pass; the last pass may have been cut
  every = jax.tree.map(
    lambda *parts: np.concatenate(
      [np.concatenate(parts[i : i + num_batches])[:num_prompts] for i in range(0, len(parts), num_batches)]
    ),
    *results,
  )
  return Observation(
    num_batches=len(runs),
    num_tokens=int(every.lengths.sum()),
    row_calls=every.num_target_calls.tolist(),
    kept=every.accepted_by_depth.sum(0).tolist(),
    prefill_seconds=float(np.median(prefill_seconds) / pace),
    round_seconds=float(np.median(round_seconds) / pace),
  )


def predict_settings(
  prompts: Batches,
  keys_fn: KeysFn,
  settings: list[Setting],
  conditions: dict[str, Any],
  notify: Notify,
  *,
  is_short: bool = False,
  known: Calibration | None = None,
  source: str = 'the calibration',
  keep: Callable[[Calibration], None] = lambda calibration: None,
) -> list[Prediction]:
  """Measures what is not known yet, and predicts how fast settings decode, the fastest first.

  `settings` are those of the grid, autoregressive decoding among them, of which a short one compares
  `programs.shortlist`. `known` are the measurements of an earlier run, which may have been interrupted, in what
  messages call `source`. `keep` is called with all measurements after each program, `notify` with the programs measured
  and their number.

  Raises:
    ValueError: The known measurements are of other conditions, or complete and of another grid; or no setting decodes
      autoregressively.
  """
  baseline, conditions = baseline_among(settings), conditions | {'batch_size': prompts.batch_size}
  if known is not None:
    known.check_conditions(conditions, source)
    if known.is_complete:
      return predict(known, programs.complete_settings(known, settings, source, is_short=is_short))
  calibration = known or Calibration(conditions, {}, {}, {}, is_complete=False)
  while True:
    compared, needed, most = programs.plan(calibration, settings, is_short=is_short)
    missing = [each for each in needed if not each.is_in(calibration)]
    if not missing:
      break
    done = len(needed) - len(missing)

    def of_one(what, *_, prefix=f'auto: program {done + 1} of {most}, ', steps=(done, most)):
      notify(prefix + what, *steps)

    if missing[0].kind != programs.ROUNDS:
      of_one(str(missing[0]))
    calibration = Measurer(prompts, keys_fn, baseline, of_one).measure(missing[0], calibration, is_short=is_short)
    keep(calibration)
  measurer = Measurer(prompts, keys_fn, baseline, lambda what, *steps: notify(f'auto: {what}', *steps))
  further = tuned(ranked(predict(calibration, compared)))
  if any(str(setting) not in calibration.observations for setting in further):
    calibration = measurer.observe_thresholds(further, calibration)
    keep(calibration)
  if finalists := finalists_of(predict(calibration, compared + further)):
    calibration = measurer.observe_finalists(finalists, calibration)
  calibration = dataclasses.replace(calibration, is_complete=True)
  keep(calibration)
  return predict(calibration, compared + further)
