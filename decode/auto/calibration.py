"""What `--method=auto` measures: draft and target alone for every tree, and whole rounds of decoding some prompts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import time
from typing import Any

import jax
import numpy as np
from etils import epath

import spectr_jax
from common.json_file import read_json
from common.program_memory import in_groups
from decode.auto.grid import source_of, tree_name_of
from decode.experiment import latency
from decode.experiment.settings import Setting, baseline_of
from decode.experiment.workload import Notify, Workload
from spectr_jax import METHODS, TokenTree
from spectr_jax.io.foreign import check_object, list_of, map_of, object_of, real, whole
from spectr_jax.sharding import fetch

_FORMAT = 2
_NUM_RUNS = 9
_FEWEST_BATCHES = 6  # that a setting decodes; shared machines are slow for seconds at a time


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


_FIELDS = {
  'conditions': object_of({}),
  'draft_seconds': map_of(real(0)),
  'target_seconds': map_of(real(above=0)),
  'observations': map_of(
    object_of(
      {
        'num_batches': whole(1),
        'num_tokens': whole(1),
        'row_calls': list_of(whole(1)),
        'kept': list_of(whole()),
        'prefill_seconds': real(0),
        'round_seconds': real(above=0),
      }
    )
  ),
}


@dataclasses.dataclass(frozen=True)
class Calibration:
  """The measurements from which predictions follow.

  Attributes:
    conditions: The conditions of the measurement as JSON values: device, models, sampling, batch size, new tokens.
    draft_seconds: Seconds of drafting, by the tree's name.
    target_seconds: Seconds of a target call, by the tree's number of nodes without the root.
    observations: Observations by setting.
  """

  conditions: dict[str, Any]
  draft_seconds: dict[str, float]
  target_seconds: dict[int, float]
  observations: dict[str, Observation]

  def to_json(self) -> str:
    return json.dumps({'format': _FORMAT} | dataclasses.asdict(self), indent=2) + '\n'

  @classmethod
  def read(cls, path: epath.PathLike) -> Calibration:
    """Reads a file that `--calibration` wrote.

    Raises:
      ValueError: The file cannot be read or is not a calibration.
    """
    content = read_json(path, 'calibration', '--calibration writes one')
    try:
      content = check_object(content, _FIELDS, 'it')
      if content.pop('format') != _FORMAT:
        raise ValueError(f'format {_FORMAT} is read')
      content['target_seconds'] = {int(size): seconds for size, seconds in content['target_seconds'].items()}
      content['observations'] = {name: Observation(**found) for name, found in content['observations'].items()}
      if not all(content.values()) or any(None in vars(found).values() for found in content['observations'].values()):
        raise ValueError('something is missing')
      return cls(**content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise ValueError(f'{path} is no calibration ({error!r}); --calibration writes one') from error

  def check(self, conditions: dict[str, Any], settings: list[Setting], path: epath.PathLike) -> None:
    """Checks that the calibration is for these conditions and settings.

    Args:
      conditions: The conditions of this run, from `conditions_of`.
      settings: All settings of the grid.
      path: The calibration's file, for messages.

    Raises:
      ValueError: The calibration is for something else; the message names the difference.
    """
    for name, value in conditions.items():
      if self.conditions.get(name) != value:
        raise ValueError(f'{path} was measured with {name} {self.conditions.get(name)}, not {value}; name a new file')
    missing = [str(s) for s in settings if str(source_of(s, settings)) not in self.observations]
    missing += [str(s) for s in settings if tree_name_of(s) not in self.draft_seconds]
    missing += [str(s) for s in settings if s.tree.num_nodes not in self.target_seconds]
    if missing:
      raise ValueError(f'{path} was measured for another grid, without {missing[0]}; name a new file')


def conditions_of(workload: Workload) -> dict[str, Any]:
  """The conditions that a calibration depends on, as JSON values."""
  options, info = workload.options, workload.info
  names = 'mesh', 'draft_mesh', 'temperature', 'top_k', 'top_p', 'min_p', 'max_new_tokens'
  return {
    'device': info['device'],
    'models': info['models'],
    'batch_size': workload.batch_size,
    'lookup': [options.lookup_max, options.lookup_min] if options.has_lookup else None,
    **{name: getattr(options, name) for name in names},
  }


def _measure_costs(workload: Workload, settings: list[Setting]) -> tuple[dict[str, float], dict[int, float]]:
  """Median seconds of drafting by tree name, and of the target's call by number of nodes."""
  trees = {tree_name_of(setting): setting for setting in settings}
  by_size: dict[int, TokenTree] = {setting.tree.num_nodes: setting.tree for setting in settings}
  calls: dict[Any, Any] = latency.forward_calls(
    workload.target,
    {size: (tree, workload.batch_size) for size, tree in by_size.items()},
    cache_size=workload.cache_size,
    sharding=workload.sharding,
  )
  keys, rows = workload.keys(workload.options.seed), workload.batches[0]
  for name, setting in trees.items():
    if setting.tree.num_nodes:
      # Drafting depends on the tree alone, so one method per tree is compiled.
      options = workload.options
      is_mixed = options.has_lookup and options.draft_model
      method = METHODS['race' if is_mixed else 'speculative' if setting.tree.is_chain else 'spectr']
      decoder = workload.decoder(dataclasses.replace(setting, method=method))
      calls[name] = functools.partial(latency.draft, decoder, workload.init(decoder, keys, rows))
  medians = {}
  for names in in_groups(list(calls), lambda name: jax.block_until_ready(calls[name]()), is_joint=workload.is_joint):
    found = latency.time_in_turns({name: calls[name] for name in names}, _NUM_RUNS)
    medians |= {name: float(np.median(seconds)) for name, seconds in found.items()}
  return {name: medians.get(name, 0.0) for name in trees}, {size: medians[size] for size in by_size}


def _observe(
  workload: Workload, settings: list[Setting], notify: Notify, pace: float | None = None
) -> dict[str, Observation]:
  """Decodes the workload with every setting. Settings take turns as far as their programs fit in one process.

  A workload of few batches is decoded several times, each time with the next seed.

  If several groups are needed, the seconds of later groups are scaled to the first by the time of autoregressive
  decoding in each group, since shared machines drift.

  Args:
    workload: The prompts to decode.
    settings: The settings, autoregressive decoding among them.
    notify: Called with progress.
    pace: The seconds of an autoregressive round that all are scaled to; None for those of the first group.
  """
  batches, baseline, paces = workload.batches, baseline_of(settings), [] if pace is None else [pace]
  seed, num_passes = workload.options.seed, -(-_FEWEST_BATCHES // len(batches))
  keys = [workload.keys((seed + number) % 2**32) for number in range(num_passes)]
  done, total, observations, decoders = 0, len(settings) * len(batches) * num_passes, {}, {}

  def prepare(setting):
    notify(f'auto: compiling {setting}', done, total)
    decoder = decoders[setting] = workload.decoder(setting)
    jax.block_until_ready(spectr_jax.decode_rounds(decoder, workload.init(decoder, keys[0], batches[0]), 1))

  for group in in_groups(settings, prepare, baseline=baseline, is_joint=workload.is_joint):
    found = {setting: [] for setting in group}
    for of_prompts, rows, setting in itertools.product(keys, batches, group):
      notify('auto: decoding calibration prompts', done, total)
      start = time.perf_counter()
      state = jax.block_until_ready(workload.init(decoders[setting], of_prompts, rows))
      begun = time.perf_counter()
      result = jax.block_until_ready(spectr_jax.decode_rounds(decoders[setting], state)).result
      seconds = time.perf_counter() - begun
      result.check()
      result = fetch(result)
      num_rounds = int(result.num_target_calls.max())
      found[setting].append((begun - start, seconds / num_rounds, result))
      done += str(setting) not in observations
    paces.append(np.median([seconds for _, seconds, _ in found[baseline]]))
    for setting in group:
      if str(setting) not in observations:
        observations[str(setting)] = _observation(
          found[setting], len(workload.prompts), num_passes=num_passes, pace=paces[-1] / paces[0]
        )
  return observations


def _observation(runs: list[tuple], num_prompts: int, *, num_passes: int, pace: float) -> Observation:
  """The observation from the batches of several passes, each given as seconds of prefill and of a round and a result.

  Rows that fill up the last batch of a pass do not count.
  """
  prefill_seconds, round_seconds, results = zip(*runs)
  num_batches = len(runs) // num_passes
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


def _first_prompts(workload: Workload, turn: int = 0) -> Workload:
  """The first prompts, with a seed that neither the options' runs nor other turns use."""
  options = workload.options
  some = workload.take(max(options.calibration_prompts, 2 * workload.batch_size))
  # The first unused seed is for acceptance rates, and a turn takes some.
  seed = (options.seeds[-1] + 2 + turn * _FEWEST_BATCHES) % 2**32
  return dataclasses.replace(some, options=dataclasses.replace(options, seed=seed, num_seeds=1))


def calibrate(workload: Workload, settings: list[Setting], notify: Notify) -> Calibration:
  """Measures what predictions need, on the first prompts, with a seed that the options' runs do not use.

  Args:
    workload: Models and prompts.
    settings: All settings of the grid.
    notify: Called with the current activity, the steps done and the steps in total.
  """
  some = _first_prompts(workload)
  notify('auto: timing draft and target', 0, 1)
  costs = _measure_costs(some, settings)
  observed = list(dict.fromkeys(source_of(setting, settings) for setting in settings))
  return Calibration(conditions_of(workload), *costs, _observe(some, observed, notify))


def _observe_more(calibration, workload, settings, baseline, notify) -> dict[str, Observation]:
  """Observations of some settings and of autoregressive decoding beside them, in seconds of the calibration's pace."""
  pace = calibration.observations[str(baseline)].round_seconds
  return _observe(workload, list(dict.fromkeys([baseline, *settings])), notify, pace=pace)


def observe_thresholds(
  calibration: Calibration, workload: Workload, settings: list[Setting], baseline: Setting, notify: Notify
) -> Calibration:
  """The calibration with measurements of a growing tree from other thresholds, on the same prompts.

  Args:
    calibration: The measurements of the grid.
    workload: Models and prompts.
    settings: The tree with other thresholds, from `tuned`.
    baseline: Autoregressive decoding, whose time the seconds are scaled by.
    notify: Called with the current activity, the steps done and the steps in total.
  """
  some = _first_prompts(workload)
  notify('auto: timing growth from other thresholds', 0, 1)
  draft_seconds, _ = _measure_costs(some, settings)
  observations = _observe_more(calibration, some, settings, baseline, notify)
  return dataclasses.replace(
    calibration,
    draft_seconds=draft_seconds | calibration.draft_seconds,
    observations=observations | calibration.observations,
  )


def observe_finalists(
  calibration: Calibration, workload: Workload, settings: list[Setting], baseline: Setting, notify: Notify
) -> Calibration:
  """The calibration with a second observation of the fastest settings, with another seed.

  The largest of many predictions is too large on average: its setting was lucky. And the fastest settings may have been
  timed in different groups, minutes apart. Here they take turns.

  Args:
    calibration: The measurements of the grid.
    workload: Models and prompts.
    settings: The settings predicted to be the fastest.
    baseline: Autoregressive decoding, whose time the seconds are scaled by.
    notify: Called with the current activity, the steps done and the steps in total.
  """
  observations = dict(calibration.observations)
  for name, found in _observe_more(calibration, _first_prompts(workload, 1), settings, baseline, notify).items():
    observations[name] = observations[name].joined(found) if name in observations else found
  return dataclasses.replace(calibration, observations=observations)
