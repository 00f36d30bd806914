"""What predictions follow from: times of draft and target alone for every tree, and of whole rounds of some prompts.

Every program is timed beside autoregressive decoding, or a call of the target on one token, and its seconds are scaled
by how long that took at first: machines that are shared drift, and an interrupted measurement goes on later.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from spectr_jax.auto import timing
from spectr_jax.auto.setting import Setting, baseline_among, tree_name_of
from spectr_jax.auto.trial import Notify, Trial
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.program_memory import in_groups, make_room
from spectr_jax.methods import METHODS
from spectr_jax.sharding import fetch
from spectr_jax.tree import TokenTree

FORMAT = 2  # of the file that `to_json` writes
_NUM_RUNS = 9
_ROUNDS_BESIDE = 8  # of autoregressive decoding, in each batch of another setting
FEWEST_BATCHES = 6  # that a setting decodes; shared machines are slow for seconds at a time


@dataclasses.dataclass(frozen=True)
class Observation:
  """The time and the tokens of decoding the calibration prompts with one setting.

  Attributes:
    num_batches: Batches decoded.
    num_tokens: New tokens of all rows.
    row_calls: Target calls of each row: of each prompt, once or several times.
    kept: `[L]`, at `[d]` the number of calls that kept at least d + 1 drafted tokens.
    prefill_seconds, round_seconds: Medians over batches.
  """

  num_batches: int
  num_tokens: int
  row_calls: list[int]
  kept: list[int]
  prefill_seconds: float
  round_seconds: float

  @property
  def num_calls(self) -> int:
    return sum(self.row_calls)

  @property
  def tokens_per_call(self) -> float:
    return self.num_tokens / self.num_calls

  @property
  def tokens_per_row(self) -> float:
    return self.num_tokens / len(self.row_calls)

  def rounds(self, batch_size: int) -> float:
    """The mean number of rounds until the last row of a batch is done, over all batches that the rows could form.

    Few batches are decoded, and the slowest row of each says little: all rows together say more.

    Args:
      batch_size: Rows of a batch; with fewer rows than these it is that of all rows.
    """
    calls, size = sorted(self.row_calls), min(batch_size, len(self.row_calls))
    # The n-th smallest is the largest of a batch whose other rows are among the n - 1 smaller ones.
    is_largest = [math.comb(number, size - 1) for number in range(len(calls))]
    return float(np.dot(calls, is_largest) / math.comb(len(calls), size))

  def joined(self, other: Observation) -> Observation:
    """The observation of both, whose seconds are means over batches.

    Args:
      other: The same setting's, of other runs.
    """
    weights = [each.num_batches for each in (self, other)]
    means = {
      name: float(np.average([getattr(each, name) for each in (self, other)], weights=weights))
      for name in ('prefill_seconds', 'round_seconds')
    }
    return Observation(
      num_batches=self.num_batches + other.num_batches,
      num_tokens=self.num_tokens + other.num_tokens,
      row_calls=self.row_calls + other.row_calls,
      kept=[a + b for a, b in zip(self.kept, other.kept, strict=True)],
      **means,
    )

  def share_of_tokens(self, draft_length: int) -> float:
    """The tokens per call with shorter drafts, relative to those observed, for methods that decide token by token."""
    counts = np.array(self.kept) / self.num_calls
    return float((1 + counts[:draft_length].sum()) / (1 + counts.sum()))


@dataclasses.dataclass(frozen=True)
class Calibration:
  """The measurements from which predictions follow.

  Attributes:
    conditions: The conditions of the measurement as JSON values: device, models, sampling, batch size, new tokens.
    draft_seconds: Seconds of drafting, by the tree's name.
    target_seconds: Seconds of a target call, by the tree's number of nodes without the root.
    observations: Observations by setting.
    is_complete: Whether everything was measured that predictions follow from; False if it goes on, or was interrupted.
  """

  conditions: dict[str, Any]
  draft_seconds: dict[str, float]
  target_seconds: dict[int, float]
  observations: dict[str, Observation]
  is_complete: bool = True

  def to_json(self) -> str:
    return json.dumps({'format': FORMAT} | dataclasses.asdict(self), indent=2) + '\n'


def _seconds_beside(trial: Trial, call: Callable[[], Any], paced_by: float | None) -> float:
  """Median seconds of a call.

  Args:
    trial: Models and prompts.
    call: The call.
    paced_by: Seconds of the target's call on one token that the call's are scaled to; None for no scale.
  """
  make_room(is_joint=trial.is_joint)
  calls: dict[Hashable, Callable[[], Any]] = {'call': call}
  if paced_by is not None:
    calls['alone'] = _target_call(trial, TokenTree())
  medians = {name: float(np.median(found)) for name, found in timing.time_in_turns(calls, _NUM_RUNS).items()}
  return medians['call'] if paced_by is None else medians['call'] * paced_by / medians['alone']


def _target_call(trial: Trial, tree: TokenTree) -> Callable[[], Any]:
  sizes = {'cache_size': trial.cache_size, 'sharding': trial.sharding}
  return timing.forward_calls(trial.target, {'target': (tree, trial.batch_size)}, **sizes)['target']


def time_target(calibration: Calibration, trial: Trial, setting: Setting) -> Calibration:
  """The calibration with the time of the target's call on a setting's tree; that on one token is the first.

  Args:
    calibration: The measurements so far.
    trial: Models and prompts.
    setting: The setting.
  """
  seconds = _seconds_beside(trial, _target_call(trial, setting.tree), calibration.target_seconds.get(0))
  times = calibration.target_seconds | {setting.tree.num_nodes: seconds}
  return dataclasses.replace(calibration, target_seconds=times)


def time_draft(calibration: Calibration, trial: Trial, setting: Setting) -> Calibration:
  """The calibration with the time of drafting a setting's tree.

  Args:
    calibration: The measurements so far, with the target's call on one token.
    trial: Models and prompts.
    setting: The setting, which drafts.
  """
  # Drafting depends on the tree alone, so one method per tree is compiled.
  method = METHODS['race' if trial.is_mixed else 'speculative' if setting.tree.is_chain else 'spectr']
  decoder = trial.decoder(dataclasses.replace(setting, method=method))
  state = trial.init(decoder, trial.keys_fn(0), trial.batches[0])
  seconds = _seconds_beside(trial, functools.partial(timing.draft, decoder, state), calibration.target_seconds[0])
  return dataclasses.replace(calibration, draft_seconds=calibration.draft_seconds | {tree_name_of(setting): seconds})


def _observe(
  trial: Trial,
  settings: list[Setting],
  notify: Notify,
  *,
  turn: int = 0,
  pace: float | None = None,
  beside: int | None = None,
  most_batches: int | None = None,
) -> dict[str, Observation]:
  """Decodes the prompts with every setting. Settings take turns as far as their programs fit in one process.

  Few batches are decoded several times, each time with other keys.

  If several groups are needed, the seconds of later groups are scaled to the first by the time of autoregressive
  decoding in each group, since shared machines drift.

  Args:
    trial: Models and prompts.
    settings: The settings, autoregressive decoding among them.
    notify: Called with progress.
    turn: A number that differs between calls whose keys are to differ.
    pace: The seconds of an autoregressive round that all are scaled to; None for those of the first group.
    beside: Rounds of autoregressive decoding in each batch where its time alone counts: it is not observed then. None
      decodes it to its end.
    most_batches: The most batches that a setting decodes; None for as many as say enough.
  """
  batches, baseline, paces = trial.batches, baseline_among(settings), [] if pace is None else [pace]
  num_passes = -(-FEWEST_BATCHES // len(batches))
  keys = [trial.keys_fn(turn * FEWEST_BATCHES + number) for number in range(num_passes)]
  runs = list(itertools.product(keys, batches))[:most_batches]
  num_passes = -(-len(runs) // len(batches))
  observed = [setting for setting in settings if beside is None or setting != baseline]
  done, total, observations, decoders = 0, len(observed) * len(runs), {}, {}

  def prepare(setting):
    if setting in observed:
      notify(f'compiling {setting}', done, total)
    decoder = decoders[setting] = trial.decoder(setting)
    jax.block_until_ready(decode_rounds(decoder, trial.init(decoder, keys[0], batches[0]), 1))

  for group in in_groups(settings, prepare, baseline=baseline, is_joint=trial.is_joint):
    found = {setting: [] for setting in group}
    for (of_prompts, rows), setting in itertools.product(runs, group):
      notify('decoding calibration prompts', done, total)
      start = time.perf_counter()
      state = jax.block_until_ready(trial.init(decoders[setting], of_prompts, rows))
      begun = time.perf_counter()
      limit = beside if setting == baseline else None
      result = jax.block_until_ready(decode_rounds(decoders[setting], state, limit)).result
      seconds = time.perf_counter() - begun
      decoders[setting].check(result)
      result = fetch(result)
      num_rounds = int(result.num_target_calls.max())
      found[setting].append((begun - start, seconds / num_rounds, result))
      done += setting in observed and str(setting) not in observations
    paces.append(np.median([seconds for _, seconds, _ in found[baseline]]))
    for setting in group:
      if setting in observed and str(setting) not in observations:
        observations[str(setting)] = _observation(
          found[setting], len(trial.tokens), num_passes=num_passes, pace=paces[-1] / paces[0]
        )
  return observations


def _observation(runs: list[tuple], num_prompts: int, *, num_passes: int, pace: float) -> Observation:
  """The observation from the batches of several passes, each given as seconds of prefill and of a round and a result.

  Rows that fill up the last batch of a pass do not count.
  """
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


def decode_with(
  calibration: Calibration,
  trial: Trial,
  setting: Setting,
  baseline: Setting,
  notify: Notify,
  *,
  most_batches: int | None = None,
) -> Calibration:
  """The calibration with an observation of a setting, beside autoregressive decoding.

  Args:
    calibration: The measurements so far; those of `baseline` come first.
    trial: Models and prompts.
    setting: The setting.
    baseline: Autoregressive decoding, whose time the seconds are scaled by.
    notify: Called with the current activity, the steps done and the steps in total.
    most_batches: The most batches to decode; None for as many as say enough.
  """
  first = calibration.observations.get(str(baseline))
  scale: dict[str, Any] = {} if first is None else {'pace': first.round_seconds, 'beside': _ROUNDS_BESIDE}
  found = _observe(trial, list(dict.fromkeys([baseline, setting])), notify, **scale, most_batches=most_batches)
  return dataclasses.replace(calibration, observations=calibration.observations | found)


def _observe_more(calibration, trial, settings, baseline, notify, turn) -> dict[str, Observation]:
  """Observations of some settings and of autoregressive decoding beside them, in seconds of the calibration's pace."""
  pace = calibration.observations[str(baseline)].round_seconds
  return _observe(trial, list(dict.fromkeys([baseline, *settings])), notify, turn=turn, pace=pace)


def observe_thresholds(
  calibration: Calibration, trial: Trial, settings: list[Setting], baseline: Setting, notify: Notify
) -> Calibration:
  """The calibration with measurements of a growing tree from other thresholds, with the same keys.

  Args:
    calibration: The measurements of the grid.
    trial: Models and prompts.
    settings: The tree with other thresholds, from `tuned`.
    baseline: Autoregressive decoding, whose time the seconds are scaled by.
    notify: Called with the current activity, the steps done and the steps in total.
  """
  notify('timing growth from other thresholds', 0, 1)
  for setting in settings:
    calibration = time_draft(calibration, trial, setting)
  observations = _observe_more(calibration, trial, settings, baseline, notify, 0)
  return dataclasses.replace(calibration, observations=observations | calibration.observations)


def observe_finalists(
  calibration: Calibration, trial: Trial, settings: list[Setting], baseline: Setting, notify: Notify
) -> Calibration:
  """The calibration with a second observation of the fastest settings, with other keys.

  The largest of many predictions is too large on average: its setting was lucky. And the fastest settings may have been
  timed in different groups, minutes apart. Here they take turns.

  Args:
    calibration: The measurements of the grid.
    trial: Models and prompts.
    settings: The settings predicted to be the fastest.
    baseline: Autoregressive decoding, whose time the seconds are scaled by.
    notify: Called with the current activity, the steps done and the steps in total.
  """
  observations = dict(calibration.observations)
  for name, found in _observe_more(calibration, trial, settings, baseline, notify, 1).items():
    observations[name] = observations[name].joined(found) if name in observations else found
  return dataclasses.replace(calibration, observations=observations)
