"""`--method=auto`: predicts the speed of every lossless setting of a grid and chooses the fastest.

The time of a round is modelled as

    round = draft(tree) + target(nodes) + rest,

where the rest is verification, the caches' commit and the loop. Draft and target are timed alone for every tree. The
time and the tokens of whole rounds are measured by decoding some prompts.

Methods that decide token by token are decoded with the longest drafts only, except for one reference method, which is
decoded on every tree. For these methods the acceptance of a position does not depend on later positions. So the tokens
of shorter drafts follow from the run with the longest. The rest of such a method's round is that of the reference on
the same tree, plus the difference of the two on the longest drafts, scaled by the number of nodes. In all

    seconds of a batch = prefill + rounds * round,

where rounds are counted until the batch's last row is done. Rounds in which lookup has no guess are shorter; they are
part of the mean round that is decoded, and lower its rest; so are rounds whose trees stop growing early. docs/auto.md
compares this with the closed form of the literature.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

import spectr_jax
from common.json_file import read_json
from common.output_files import OutputFiles
from common.program_memory import in_groups
from decode.experiment import latency
from decode.experiment.options import AUTO_GRID, AUTO_TREES, DecodeOptions
from decode.experiment.settings import Setting, baseline_of, settings_of
from decode.experiment.workload import Notify, Workload
from spectr_jax import METHODS, Drafter, TokenTree
from spectr_jax.sharding import fetch, is_primary

_FORMAT = 1
_NUM_RUNS = 9
# Tried with the fastest growing tree, besides 0. A threshold is data: none of them is compiled.
_THRESHOLDS = 0.02, 0.05, 0.1


def _with_trees(options: DecodeOptions) -> DecodeOptions:
  """The options with the trees to compare: at temperature 0 also trees of likeliest guesses, and single drafts only.

  There all samples of a draft are equal, so that several keep no more than one. Trees that the user names stay as they
  are, and so do the guesses of lookup, which differ.
  """
  if options.temperature or options.has_lookup or options.tree != ('chains',):
    return options
  is_default = options.num_drafts == AUTO_GRID['num_drafts']
  return dataclasses.replace(
    options, tree=('chains', *AUTO_TREES), num_drafts=(1,) if is_default else options.num_drafts
  )


def grid(options: DecodeOptions, max_depth: int | None = None) -> list[Setting]:
  """Autoregressive decoding, and every lossless method on every tree of the options that it takes.

  With one draft, methods for several drafts equal `speculative` or `block` and are left out, except for seed-exact
  ones. They stay where lookup stands beside a model, since those two do not take its guesses. At temperature 0 every
  method keeps the same of a tree of likeliest guesses, the longest path that the target takes, so the first method
  stands for all.

  Args:
    options: The options.
    max_depth: The deepest tree that the draft guesses for; None for no limit. Deeper ones are left out.

  Raises:
    ValueError: All trees are too deep.
  """
  settings, is_mixed = [], options.has_lookup and bool(options.draft_model)
  options, given = _with_trees(options), set()
  for method in METHODS.values():
    if not method.is_lossless or not options.takes_guesses(method):
      continue
    for setting in settings_of(method, options, skip_unfit=True):
      if not options.temperature and setting.growth is not None and setting.growth.gives:
        if setting.spec in given:
          continue
        given.add(setting.spec)
      is_single = setting.tree.num_nodes > 0 and setting.tree.is_chain
      if is_mixed or not (is_single and method.max_drafts is None and not method.is_seed_exact):
        settings.append(setting)
  fitting = [each for each in settings if max_depth is None or each.tree.max_depth <= max_depth]
  if len(settings) > len(fitting) and not any(each.tree.num_nodes for each in fitting):
    raise ValueError(f'the draft guesses {max_depth} tokens ahead, and all trees are deeper')
  return list(dict.fromkeys(fitting))


def tuned(predictions: list[Prediction]) -> list[Setting]:
  """The fastest setting whose trees grow with further thresholds; nothing if no trees grow, or not from 0.

  Args:
    predictions: Predictions for the grid, the fastest first.
  """
  growing = [found.setting for found in predictions if found.setting.growth is not None]
  if not growing or growing[0].growth.threshold:
    return []
  return [growing[0].with_threshold(threshold) for threshold in _THRESHOLDS]


def _is_chains(setting: Setting) -> bool:
  return setting.spec is not None and setting.spec.name == 'chains'


def _decides_by_token(setting: Setting) -> bool:
  return _is_chains(setting) and setting.method.is_token_level


def reference_of(setting: Setting, settings: list[Setting]) -> Setting:
  """The reference setting on the same chains: the first setting that decides token by token.

  Args:
    setting: A setting that decides token by token.
    settings: All settings of the grid.
  """
  return next(other for other in settings if _decides_by_token(other) and _tree_name(other) == _tree_name(setting))


def source_of(setting: Setting, settings: list[Setting]) -> Setting:
  """The setting whose run gives the tokens of `setting`: itself, or the one with the longest drafts.

  Args:
    setting: A setting.
    settings: All settings of the grid.
  """
  if not _decides_by_token(setting) or reference_of(setting, settings) == setting:
    return setting
  alike = [
    other
    for other in settings
    if _is_chains(other) and (other.method, other.num_drafts) == (setting.method, setting.num_drafts)
  ]
  return max(alike, key=lambda other: other.draft_length)


@dataclasses.dataclass(frozen=True)
class Observation:
  """The time and the tokens of decoding the calibration prompts with one setting.

  Attributes:
    num_prompts, num_batches: Numbers of prompts and batches decoded.
    num_tokens, num_calls: New tokens and target calls of all prompts.
    kept: `[L]`, at `[d]` the number of calls that kept at least d + 1 drafted tokens.
    num_rounds: Rounds of all batches, each counted until its last row was done.
    prefill_seconds, round_seconds: Medians over batches.
  """

  num_prompts: int
  num_batches: int
  num_tokens: int
  num_calls: int
  kept: list[int]
  num_rounds: int
  prefill_seconds: float
  round_seconds: float

  @property
  def tokens_per_call(self) -> float:
    return self.num_tokens / self.num_calls

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
      if content.pop('format') != _FORMAT:
        raise ValueError(f'format {_FORMAT} is read')
      content['target_seconds'] = {int(size): seconds for size, seconds in content['target_seconds'].items()}
      content['observations'] = {name: Observation(**found) for name, found in content['observations'].items()}
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
    missing += [str(s) for s in settings if _tree_name(s) not in self.draft_seconds]
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


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The predicted speed of a setting.

  Attributes:
    setting: The setting.
    tokens_per_call: Tokens per target call and row.
    tokens_per_second: New tokens of all rows over time, prefill included.
    round_seconds: Seconds of a round, the sum of `draft_seconds`, `target_seconds` and `rest_seconds`.
    is_observed: Whether the setting itself was decoded. Otherwise the prediction follows from a run with longer drafts.
  """

  setting: Setting
  tokens_per_call: float
  tokens_per_second: float
  round_seconds: float
  draft_seconds: float
  target_seconds: float
  rest_seconds: float
  is_observed: bool


def _tree_name(setting: Setting) -> str:
  return setting.tree_name if not _is_chains(setting) else f'chains {setting.num_drafts}x{setting.draft_length}'


def predict(calibration: Calibration, settings: list[Setting]) -> list[Prediction]:
  """Predictions for a grid, the fastest first.

  Args:
    calibration: The measurements.
    settings: All settings of the grid.
  """

  def parts(setting):
    return calibration.draft_seconds[_tree_name(setting)], calibration.target_seconds[setting.tree.num_nodes]

  def rest(setting):
    return calibration.observations[str(setting)].round_seconds - sum(parts(setting))

  predictions = []
  for setting in settings:
    source = source_of(setting, settings)
    seen = calibration.observations[str(source)]
    draft, target = parts(setting)
    rest_seconds, yields = rest(source), 1.0
    if source != setting:
      # The rest of this method's round minus the reference's rest is attributed to verification.
      share = setting.tree.num_nodes / source.tree.num_nodes
      more = rest(source) - rest(reference_of(source, settings))
      rest_seconds = rest(reference_of(setting, settings)) + share * more
      yields = seen.share_of_tokens(setting.draft_length)
    seconds = draft + target + rest_seconds
    batch_seconds = seen.prefill_seconds + seen.num_rounds / seen.num_batches / yields * seconds
    predictions.append(
      Prediction(
        setting=setting,
        tokens_per_call=yields * seen.tokens_per_call,
        tokens_per_second=seen.num_tokens / seen.num_batches / batch_seconds,
        round_seconds=seconds,
        draft_seconds=draft,
        target_seconds=target,
        rest_seconds=rest_seconds,
        is_observed=source == setting,
      )
    )
  return sorted(predictions, key=lambda found: -found.tokens_per_second)


def _measure_costs(workload: Workload, settings: list[Setting]) -> tuple[dict[str, float], dict[int, float]]:
  """Median seconds of drafting by tree name, and of the target's call by number of nodes."""
  trees = {_tree_name(setting): setting for setting in settings}
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

  If several groups are needed, the seconds of later groups are scaled to the first by the time of autoregressive
  decoding in each group, since shared machines drift.

  Args:
    workload: The prompts to decode.
    settings: The settings, autoregressive decoding among them.
    notify: Called with progress.
    pace: The seconds of an autoregressive round that all are scaled to; None for those of the first group.
  """
  keys, batches, num_prompts = workload.keys(workload.options.seed), workload.batches, len(workload.prompts)
  baseline, paces = baseline_of(settings), [] if pace is None else [pace]
  done, total, observations, decoders = 0, len(settings) * len(batches), {}, {}

  def prepare(setting):
    notify(f'auto: compiling {setting}', done, total)
    decoder = decoders[setting] = workload.decoder(setting)
    jax.block_until_ready(spectr_jax.decode_rounds(decoder, workload.init(decoder, keys, batches[0]), 1))

  for group in in_groups(settings, prepare, baseline=baseline, is_joint=workload.is_joint):
    found = {setting: [] for setting in group}
    for rows, setting in itertools.product(batches, group):
      notify('auto: decoding calibration prompts', done, total)
      start = time.perf_counter()
      state = jax.block_until_ready(workload.init(decoders[setting], keys, rows))
      begun = time.perf_counter()
      result = jax.block_until_ready(spectr_jax.decode_rounds(decoders[setting], state)).result
      seconds = time.perf_counter() - begun
      result.check()
      result = fetch(result)
      num_rounds = int(result.num_target_calls.max())
      found[setting].append((begun - start, seconds / num_rounds, num_rounds, result))
      done += str(setting) not in observations
    paces.append(np.median([seconds for _, seconds, _, _ in found[baseline]]))
    for setting in group:
      if str(setting) not in observations:
        observations[str(setting)] = _observation(found[setting], num_prompts, pace=paces[-1] / paces[0])
  return observations


def _observation(runs: list[tuple], num_prompts: int, *, pace: float) -> Observation:
  """The observation from several batches, each given as seconds of prefill and of a round, rounds and a result."""
  prefill_seconds, round_seconds, num_rounds, results = zip(*runs)
  every = jax.tree.map(lambda *parts: np.concatenate(parts)[:num_prompts], *results)
  return Observation(
    num_prompts=num_prompts,
    num_batches=len(runs),
    num_tokens=int(every.lengths.sum()),
    num_calls=int(every.num_target_calls.sum()),
    kept=every.accepted_by_depth.sum(0).tolist(),
    num_rounds=sum(num_rounds),
    prefill_seconds=float(np.median(prefill_seconds) / pace),
    round_seconds=float(np.median(round_seconds) / pace),
  )


def calibrate(workload: Workload, settings: list[Setting], notify: Notify) -> Calibration:
  """Measures what predictions need, on the first prompts, with a seed that the options' runs do not use.

  Args:
    workload: Models and prompts.
    settings: All settings of the grid.
    notify: Called with the current activity, the steps done and the steps in total.
  """
  options = workload.options
  some = workload.take(max(options.calibration_prompts, 2 * workload.batch_size))
  seed = (options.seeds[-1] + 2) % 2**32  # the first unused seed is for acceptance rates
  some = dataclasses.replace(some, options=dataclasses.replace(options, seed=seed, num_seeds=1))
  notify('auto: timing draft and target', 0, 1)
  costs = _measure_costs(some, settings)
  observed = list(dict.fromkeys(source_of(setting, settings) for setting in settings))
  found = Calibration(conditions_of(workload), *costs, _observe(some, observed, notify))
  further = tuned(predict(found, settings))
  if not further:
    return found
  notify('auto: timing growth from other thresholds', 0, 1)
  draft_seconds, _ = _measure_costs(some, further)
  alone = baseline_of(settings)
  observations = _observe(some, [alone, *further], notify, pace=found.observations[str(alone)].round_seconds)
  return dataclasses.replace(
    found, draft_seconds=draft_seconds | found.draft_seconds, observations=observations | found.observations
  )


def predict_all(workload: Workload, notify: Notify) -> list[Prediction]:
  """Predictions for the options' grid, the fastest first, from new measurements or the file of an earlier run.

  Args:
    workload: Models and prompts.
    notify: Called with the current activity, the steps done and the steps in total.

  Raises:
    ValueError: The file is unusable, or was measured under other conditions.
  """
  options = workload.options
  settings = grid(options, workload.draft.max_depth if isinstance(workload.draft, Drafter) else None)
  conditions = conditions_of(workload)
  if options.calibration and epath.Path(options.calibration).exists():
    calibration = Calibration.read(options.calibration)
    calibration.check(conditions, settings, options.calibration)
    calibration.check(conditions, tuned(predict(calibration, settings)), options.calibration)
  else:
    # The file is opened before anything is measured, to find out whether it is writable. One process writes.
    with OutputFiles(calibration=options.calibration if is_primary() else None) as files:
      calibration = calibrate(workload, settings, notify)
      files.write(calibration=calibration.to_json())
  return predict(calibration, settings + tuned(predict(calibration, settings)))


def choose(predictions: list[Prediction]) -> Setting:
  """The fastest setting. Several processes, whose clocks differ, take the first process's choice."""
  settings = sorted((prediction.setting for prediction in predictions), key=str)
  best = settings.index(predictions[0].setting)
  if jax.process_count() > 1:
    best = int(multihost_utils.broadcast_one_to_all(np.int32(best)))
  return settings[best]
