"""Runs decoding methods over prompts and measures them: `run_decode(DecodeOptions(...))`."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

import spectr_jax
from common.program_memory import in_groups, make_room
from decode.auto.calibrate import (
  Acceptance,
  bound_kept,
  choose_tree,
  has_independent_children,
  is_chosen_by_bound,
  measure_acceptance,
  rates_name,
  read_acceptance,
)
from decode.auto.prediction import Prediction, choose, predict_all
from decode.experiment import latency, metrics
from decode.experiment.laws import target_texts, written_log_probs
from decode.experiment.options import DecodeOptions
from decode.experiment.prompts import Prompt, take_first
from decode.experiment.settings import Setting, baseline_of, expand
from decode.experiment.workload import Notify, Pick, Workload
from spectr_jax import Generation, Statistics, TokenTree
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.sharding import fetch


@dataclasses.dataclass(frozen=True)
class Measurement:
  """The results of one setting on all P prompts with one seed, in R = P * num_samples rows.

  The samples of a prompt are one after another.

  Attributes:
    setting, seed: The setting and seed.
    tokens: int32 `[R, max_new_tokens]`, -1 after a row's end.
    origins: int32 `[R, max_new_tokens]`, as in `spectr_jax.Generation`.
    lengths: int32 `[R]`, tokens emitted.
    calls: int32 `[R]`, target calls.
    accepted_by_depth: int32 `[R, L]`, at `[i, d]` the rounds of row i that kept at least d + 1 drafted tokens.
    batch_seconds: `[number of batches]`, wall time of each batch, with prefill and without compilation.
    baseline_seconds: `[number of batches]`, wall time of autoregressive decoding (`baseline_of` the settings), in turns
      with this setting; None if that was not run.
    rounds: Rounds that the device ran, without those after stop texts. A batch runs until its last row is done.
    statistics: Statistics of each row, or None if not requested.
    logprobs: float32 `[R, max_new_tokens]`, as in `spectr_jax.Generation`, or None if not requested.
  """

  setting: Setting
  seed: int
  tokens: np.ndarray
  origins: np.ndarray
  lengths: np.ndarray
  calls: np.ndarray
  accepted_by_depth: np.ndarray
  batch_seconds: np.ndarray
  baseline_seconds: np.ndarray | None
  rounds: int
  statistics: Statistics | None = None
  logprobs: np.ndarray | None = None

  @property
  def seconds(self) -> float:
    return float(self.batch_seconds.sum())

  def take(self, rows: np.ndarray) -> Measurement:
    """The results of some prompts, where every batch is one prompt.

    Args:
      rows: int `[N]`, indices of prompts.
    """
    names = (
      'tokens',
      'origins',
      'lengths',
      'calls',
      'accepted_by_depth',
      'batch_seconds',
      'baseline_seconds',
      'logprobs',
    )
    arrays = {name: getattr(self, name) for name in names}
    taken = {name: None if array is None else array[rows] for name, array in arrays.items()}
    statistics = jax.tree.map(lambda array: array[rows], self.statistics)
    return dataclasses.replace(self, **taken, rounds=int(taken['calls'].sum()), statistics=statistics)


@dataclasses.dataclass(frozen=True)
class Summary:
  """A setting's results over one seed or several.

  Attributes:
    setting: The setting.
    num_tokens, num_calls: Numbers of emitted tokens and target calls.
    block_efficiency: `num_tokens / num_calls`.
    interval: The 95% interval of `block_efficiency` over prompts, None for a single prompt.
    acceptance_by_position: `[L]`, the share of rounds that kept at least d + 1 drafted tokens.
    seconds: Time of all batches, without compilation.
    num_rounds: Rounds that the device ran, each for a whole batch.
    tokens_per_second: New tokens per second. Settings that were not timed together compare less reliably.
    speedup: Tokens per second relative to autoregressive decoding in turns with the setting, None if that was not run.
    speedup_interval: The 95% interval of `speedup` over batches, None for a single batch and for autoregressive
      decoding itself.
    round_cost: Time of a round relative to an autoregressive step, None if that was not run.
    tokens_per_round: Tokens per round and row, where rows that wait for the rest of their batch count.
    share_of_optimum: Accepted tokens relative to the most that token-level verification could accept on average at the
      positions visited; None if not requested, or for methods without several i.i.d. candidates.
    share_interval: The 95% interval of `share_of_optimum` over prompts.
    seconds_per_round: Seconds of the whole `round`, with its share of the prefill, of its parts `draft`, `target` and
      `verification`, and of the `rest`; empty if not requested. The rest may be negative, since parts are timed alone.
  """

  setting: Setting
  num_tokens: int
  num_calls: int
  block_efficiency: float
  interval: tuple[float, float] | None
  acceptance_by_position: list[float]
  seconds: float
  num_rounds: int
  tokens_per_second: float
  speedup: float | None
  speedup_interval: tuple[float, float] | None
  round_cost: float | None
  tokens_per_round: float
  share_of_optimum: float | None = None
  share_interval: tuple[float, float] | None = None
  seconds_per_round: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class DecodeRun:
  """All results of a run.

  Attributes:
    options: The options.
    info: Flags, versions, device, models, number of prompts that were too long, and groups of settings that took turns
      (`timed_together`), as JSON values.
    prompts: The prompts.
    tokenizer: The models' tokenizer.
    settings: The settings that were run: the grid with all trees chosen.
    measurements: One per setting and seed.
    acceptance: The rates by method that `optimal` trees were chosen from; see `decode.auto.calibrate`.
    node_costs: Time of a target call by its number of tokens, relative to a call on one token; only for settings slower
      than autoregressive decoding.
    part_seconds: Seconds of a round's parts by setting, see `decode.experiment.latency.time_parts`; empty if not
      requested.
    predictions: The predictions that `auto` chose from, the fastest first; empty without `auto`.
  """

  options: DecodeOptions
  info: dict[str, Any]
  prompts: list[Prompt]
  tokenizer: TokenizerBase
  settings: list[Setting]
  measurements: list[Measurement]
  acceptance: dict[str, Acceptance] = dataclasses.field(default_factory=dict)
  node_costs: dict[int, float] = dataclasses.field(default_factory=dict)
  part_seconds: dict[Setting, dict[str, float]] = dataclasses.field(default_factory=dict)
  predictions: list[Prediction] = dataclasses.field(default_factory=list)

  def _of(self, setting: Setting | None, seeds) -> list[Measurement]:
    seeds = self.options.seeds if seeds is None else seeds
    return [found for found in self.measurements if found.seed in seeds and found.setting == setting]

  def take(self, rows: np.ndarray) -> DecodeRun:
    """The same run on some of its prompts.

    Args:
      rows: int `[N]`, indices of prompts.

    Raises:
      ValueError: Prompts or samples were decoded together, so that none has a time of its own.
    """
    if self.options.num_samples > 1:
      raise ValueError(f'samples are timed together: num_samples must be 1, got {self.options.num_samples}')
    if min(self.options.batch_size, len(self.prompts)) > 1:
      raise ValueError(f'prompts are timed by batch: batch_size must be 1, got {self.options.batch_size}')
    measurements = [found.take(rows) for found in self.measurements]
    return dataclasses.replace(self, prompts=[self.prompts[row] for row in rows], measurements=measurements)

  def _per_prompt(self, values: np.ndarray) -> np.ndarray:
    """The sum over the samples of each prompt, `[P]`, of values `[R]`."""
    return values.reshape(len(self.prompts), self.options.num_samples).sum(axis=1)

  def batch_speeds(self, setting: Setting, seeds=None) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Tokens and seconds of each batch, for the setting and, if it was run, for autoregressive decoding.

    Args:
      setting: The setting.
      seeds: Seeds to add up; None for all.

    Returns:
      One pair of arrays `[number of batches]` for the setting, and one for autoregressive decoding if that was run.
    """
    starts = range(0, len(self.prompts), self.options.batch_size)
    own, baseline = self._of(setting, seeds), self._of(baseline_of(self.settings), seeds)

    def tokens(group):
      return np.add.reduceat(self._per_prompt(sum(found.lengths for found in group)), starts)

    speeds = tokens(own), sum(found.batch_seconds for found in own)
    return (speeds, (tokens(baseline), sum(found.baseline_seconds for found in own))) if baseline else (speeds,)

  def summarize(self, setting: Setting, seeds=None) -> Summary:
    """The results of one setting.

    Args:
      setting: The setting.
      seeds: Seeds to combine; None for all.
    """
    own, baseline = self._of(setting, seeds), self._of(baseline_of(self.settings), seeds)
    num_rounds, seconds = sum(found.rounds for found in own), sum(found.seconds for found in own)
    speedup, speedup_interval, round_cost = None, None, None
    if baseline:
      speeds, others = self.batch_speeds(setting, seeds)
      speedup = metrics.ratio(*speeds) / metrics.ratio(*others)
      if len(speeds[0]) > 1 and setting != baseline_of(self.settings):
        speedup_interval = metrics.compare(speeds, others)[1:]
      round_cost = seconds / num_rounds / (float(others[1].sum()) / sum(found.rounds for found in baseline))
    # The continuations of one prompt are one unit of the sample.
    tokens = self._per_prompt(sum(found.lengths for found in own))
    calls = self._per_prompt(sum(found.calls for found in own))
    parts = self.part_seconds.get(setting, {})
    if parts:
      whole = seconds / num_rounds
      parts = {'round': whole} | parts | {'rest': whole - sum(parts.values())}
    num_batches = -(-len(self.prompts) // self.options.batch_size)
    rows_per_batch = len(self.prompts) * self.options.num_samples / num_batches
    share, share_interval = None, None
    is_compared = setting.method.max_drafts is None and has_independent_children(setting.method)
    if self.options.share_of_optimum and is_compared:
      accepted = self._per_prompt(sum(found.statistics.accepts.sum((1, 2)) for found in own))
      optimum = self._per_prompt(sum(found.statistics.optimum for found in own))
      share = metrics.ratio(accepted, optimum)
      share_interval = metrics.ratio_interval(accepted, optimum)
    return Summary(
      setting=setting,
      num_tokens=int(tokens.sum()),
      num_calls=int(calls.sum()),
      block_efficiency=metrics.ratio(tokens, calls),
      interval=metrics.ratio_interval(tokens, calls),
      acceptance_by_position=metrics.acceptance_by_position(sum(found.accepted_by_depth for found in own), calls),
      seconds=seconds,
      num_rounds=num_rounds,
      tokens_per_second=int(tokens.sum()) / seconds,
      speedup=speedup,
      speedup_interval=speedup_interval,
      round_cost=round_cost,
      tokens_per_round=int(tokens.sum()) / (num_rounds * rows_per_batch),
      share_of_optimum=share,
      share_interval=share_interval,
      seconds_per_round=parts,
    )


def _measure_node_costs(workload: Workload, trees: list[TokenTree], num_runs: int = 15) -> dict[int, float]:
  """Median time of a target call on each tree with its root, relative to a call on a single token."""
  num_rows = workload.batch_size * workload.options.num_samples
  shapes = {tree.num_nodes + 1: (tree, num_rows) for tree in (TokenTree(), *trees)}
  calls = latency.forward_calls(workload.target, shapes, cache_size=workload.cache_size, sharding=workload.sharding)
  times = latency.time_in_turns(calls, num_runs)
  medians = {size: float(np.median(found)) for size, found in times.items()}
  return {size: median / medians[1] for size, median in medians.items()}


def _choose_trees(workload: Workload, settings: list[Setting], given, notify: Notify):
  """The settings with `optimal` trees chosen, and the rates by method that they were chosen from.

  Rates that no file gives are measured, or bounded, on the prompts, with a seed that the options do not use.
  """
  options = workload.options
  budgets = {}
  for setting in settings:
    if setting.spec is not None and setting.spec.name == 'optimal':
      method = setting.method
      budgets[method] = max(budgets.get(method, 0), setting.spec.numbers[0])
  if not budgets:
    return settings, {}
  acceptance: dict[str, Acceptance] = {}
  seed = (options.seeds[-1] + 1) % 2**32
  keys = workload.keys(seed)
  for method, budget in budgets.items():

    def measure(tree: TokenTree, method=method) -> Statistics:
      notify(f'{method.name}: measuring acceptance on a tree of {tree.num_nodes} nodes', 0, len(settings))
      setting = Setting(method, tree=tree)
      found = [fetch(workload.generate(setting, keys, rows, statistics=True).statistics) for rows in workload.batches]
      return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(workload.prompts)], *found)

    name = rates_name(method)
    make_room(is_joint=workload.is_joint)
    if given is None and is_chosen_by_bound(method):
      notify(f"{method.name}: bounding what is kept of chains, on the target's own texts", 0, len(settings))
      texts = target_texts(workload, seed)
      acceptance[name] = bound_kept(*written_log_probs(workload, (workload.draft, workload.target), texts))
    elif given is None:
      acceptance[name] = measure_acceptance(method, budget, measure)
    elif name in given:
      acceptance[name] = given[name]
    else:
      raise ValueError(f'{options.acceptance} has no acceptance of {name}; it has {"; ".join(given)}')
  chosen = [
    choose_tree(setting, acceptance[rates_name(setting.method)])
    if setting.spec is not None and setting.spec.name == 'optimal'
    else setting
    for setting in settings
  ]
  return chosen, acceptance


def _measurement(
  setting: Setting,
  seed: int,
  generations: list[Generation],
  batch_seconds: list[float],
  baseline_seconds: list[float] | None,
  num_rows: int,
) -> Measurement:
  """The batches joined, without the padding copies of the last batch."""
  every: Generation = jax.tree.map(lambda *parts: np.concatenate(parts)[:num_rows], *generations)
  return Measurement(
    setting=setting,
    seed=seed,
    tokens=every.tokens,
    origins=every.origins,
    lengths=every.lengths,
    calls=every.num_target_calls,
    accepted_by_depth=every.accepted_by_depth,
    batch_seconds=np.array(batch_seconds),
    baseline_seconds=None if baseline_seconds is None else np.array(baseline_seconds),
    rounds=sum(int(generation.num_target_calls.max()) for generation in generations),
    statistics=every.statistics,
    logprobs=every.logprobs,
  )


def measure(workload: Workload, settings: list[Setting], notify: Notify) -> DecodeRun:
  """Decodes every prompt with every setting and every seed of the workload's options. Settings take turns.

  If the programs do not fit in one process, settings are split into groups that run one after another. The settings of
  a group take turns. Every group includes autoregressive decoding if that is one of the settings.

  Args:
    workload: Models and prompts.
    settings: The settings.
    notify: Called with the current activity, batches done and batches in total.

  Raises:
    ValueError: A model gives logits that are not finite.
  """
  options = workload.options
  batches, prompts = workload.batches, workload.prompts
  num_rows = len(prompts) * options.num_samples
  done, total = 0, len(settings) * options.num_seeds * len(batches)
  keys = {seed: workload.keys(seed) for seed in options.seeds}
  baseline, part_seconds, groups = baseline_of(settings), {}, []

  def prepare(setting):
    notify(f'{setting}: compiling', done, total)
    # One round compiles the program that `generate` runs.
    decoder = workload.decoder(setting, statistics=options.share_of_optimum)
    state = workload.init(decoder, keys[options.seed], batches[0], num_samples=options.num_samples)
    state = jax.block_until_ready(spectr_jax.decode_rounds(decoder, state, 1))
    if options.breakdown and setting.tree.num_nodes:
      notify(f'{setting}: timing its parts', done, total)
      part_seconds[setting] = latency.time_parts(decoder, state)
    if options.profile_dir is not None and not (groups and setting == baseline):
      notify(f'{setting}: profiling', done, total)
      name = str(setting).replace(' ', '_').replace(':', '_')
      latency.profile(decoder, state, epath.Path(options.profile_dir) / name)

  found = {}
  for group in in_groups(settings, prepare, baseline=baseline, is_joint=workload.is_joint):
    groups.append([str(setting) for setting in group])
    seconds: dict[tuple[Setting, int], list[float]] = collections.defaultdict(list)
    generations: dict[tuple[Setting, int], list[Generation]] = collections.defaultdict(list)
    # Settings take turns, so that other load on the machine affects all of them alike.
    for seed, rows, setting in itertools.product(options.seeds, batches, group):
      notify(f'decoding, seed {seed}', done, total)
      start = time.perf_counter()
      generation = workload.generate(
        setting, keys[seed], rows, statistics=options.share_of_optimum, num_samples=options.num_samples
      )
      jax.block_until_ready(generation)
      seconds[setting, seed].append(time.perf_counter() - start)
      generations[setting, seed].append(fetch(generation))
      done += (setting, seed) not in found
    for setting, seed in seconds.keys() - found.keys():
      times = seconds[setting, seed], seconds.get((baseline, seed))
      found[setting, seed] = _measurement(setting, seed, generations[setting, seed], *times, num_rows)
  measurements = [found[setting, seed] for setting in settings for seed in options.seeds]
  info = workload.info | {'timed_together': groups}
  run = DecodeRun(options, info, prompts, workload.tokenizer, settings, measurements, part_seconds=part_seconds)
  is_slow = np.array([bool(each.tree.num_nodes) and (run.summarize(each).speedup or 1) < 1 for each in settings])
  if workload.is_joint:  # the processes' clocks differ
    is_slow = multihost_utils.broadcast_one_to_all(is_slow)
  slow = [setting for setting, value in zip(settings, is_slow) if value]
  if slow:
    notify("measuring the target's cost of a call", done, total)
    trees = {setting.tree.num_nodes: setting.tree for setting in slow}
    run = dataclasses.replace(run, node_costs=_measure_node_costs(workload, list(trees.values())))
  notify('done', total, total)
  return run


def run_decode(options: DecodeOptions, notify: Notify | None = None, pick: Pick = take_first) -> DecodeRun:
  """Decodes every prompt with every setting and seed.

  A continuation depends on its prompt, the prompt's index in the file, the seed and the setting. It does not depend on
  the rest of the grid, and on the batch size only through rounding.

  Args:
    options: The options.
    notify: Called with the current activity, batches done and batches in total.
    pick: Takes `options.num_prompts` of the prompts that fit.

  Returns:
    The continuations and their measurements.

  Raises:
    ValueError: Prompts or models are unusable; the message says why.
  """
  notify = notify or (lambda what, done, total: None)
  settings = expand(options)
  given = None if options.acceptance is None else read_acceptance(options.acceptance)
  workload = Workload.load(options, pick=pick)
  predictions = predict_all(workload, notify) if options.is_auto else []
  if predictions:
    settings = list(dict.fromkeys([*settings, choose(predictions)]))
  settings, acceptance = _choose_trees(workload, settings, given, notify)
  run = measure(workload, settings, notify)
  return dataclasses.replace(run, acceptance=acceptance, predictions=predictions)
