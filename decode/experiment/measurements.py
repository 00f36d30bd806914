"""The measurements of a run: `DecodeRun`, with one `Measurement` per setting and seed, and rows of what they say."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from decode.experiment import metrics
from decode.experiment.optimal_trees import Acceptance, has_independent_children
from decode.experiment.options import DecodeOptions
from decode.experiment.prompts import Prompt
from decode.experiment.settings import Setting, describe_setting
from decode.study import Row
from spectr_jax import Generation
from spectr_jax.auto import Speed
from spectr_jax.auto.setting import baseline_of
from spectr_jax.io.tokenizer import TokenizerBase

# Columns of rows that JSON does not have.
BESIDE = 'setting', 'seconds', 'num_rounds', 'round_cost', 'tokens_per_round'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement(Generation):
  """The texts of one setting for all P prompts with one seed, in R = P * num_samples rows, and their times.

  The arrays are NumPy arrays. The samples of a prompt are one after another.
  """

  setting: Setting
  seed: int
  batch_seconds: np.ndarray  # `[batches]`, with prefill, without compilation
  baseline_seconds: np.ndarray | None  # of autoregressive decoding in turns with it
  rounds: int  # that the device ran, each batch until its last row is done

  @property
  def seconds(self) -> float:
    return float(self.batch_seconds.sum())

  def take(self, rows: np.ndarray) -> Measurement:
    """The results of some prompts by index, int `[N]`, where every batch is one prompt."""
    names = {field.name for field in dataclasses.fields(self)} - {'setting', 'seed', 'rounds'}
    taken = jax.tree.map(lambda array: array[rows], {name: getattr(self, name) for name in names})
    return dataclasses.replace(self, **taken, rounds=int(taken['num_target_calls'].sum()))


@dataclasses.dataclass(frozen=True)
class DecodeRun:
  options: DecodeOptions
  info: dict[str, Any]  # flags, versions, device, models, groups of settings that took turns, as JSON values
  prompts: list[Prompt]
  tokenizer: TokenizerBase
  settings: list[Setting]  # the grid, with all trees chosen
  measurements: list[Measurement]  # one per setting and seed
  # rates by method that `optimal` trees were chosen from
  acceptance: dict[str, Acceptance] = dataclasses.field(default_factory=dict)
  # time of a target call by its tokens, over one token's, if slow
  node_costs: dict[int, float] = dataclasses.field(default_factory=dict)
  part_seconds: dict[Setting, dict[str, float]] = dataclasses.field(default_factory=dict)  # see `latency.time_parts`
  speeds: list[Speed] = dataclasses.field(default_factory=list)  # that `auto` chose from, the fastest first
  left_out: dict[str, str] = dataclasses.field(default_factory=dict)  # why `auto` could not choose methods, by name

  def _of(self, setting: Setting | None, seeds) -> list[Measurement]:
    seeds = self.options.sampling.seeds if seeds is None else seeds
    return [each for each in self.measurements if each.seed in seeds and each.setting == setting]

  def take(self, rows: np.ndarray) -> DecodeRun:
    """The same run on some of its prompts by index, int `[N]`, each of which needs a time of its own."""
    if self.options.sampling.num_samples > 1:
      raise ValueError(f'samples are timed together: num_samples must be 1, got {self.options.sampling.num_samples}')
    if min(self.options.prompts.batch_size, len(self.prompts)) > 1:
      raise ValueError(f'prompts are timed by batch: batch_size must be 1, got {self.options.prompts.batch_size}')
    measurements = [each.take(rows) for each in self.measurements]
    return dataclasses.replace(self, prompts=[self.prompts[row] for row in rows], measurements=measurements)

  @property
  def num_batches(self) -> int:
    return -(-len(self.prompts) // self.options.prompts.batch_size)

  def _per_prompt(self, values: np.ndarray) -> np.ndarray:
    """The sum over the samples of each prompt, `[P]`, of values `[R]`."""
    return values.reshape(len(self.prompts), self.options.sampling.num_samples).sum(axis=1)

  def batch_speeds(self, setting: Setting, seeds=None) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Tokens and seconds `[batches]` of a setting, and of autoregressive decoding if that was run."""
    starts = range(0, len(self.prompts), self.options.prompts.batch_size)
    own, baseline = self._of(setting, seeds), self._of(baseline_of(self.settings), seeds)

    def tokens(group):
      return np.add.reduceat(self._per_prompt(sum(each.lengths for each in group)), starts)

    speeds = tokens(own), sum(each.batch_seconds for each in own)
    return (speeds, (tokens(baseline), sum(each.baseline_seconds for each in own))) if baseline else (speeds,)

  @property
  def summaries(self) -> dict[Setting, Row]:
    return {setting: self.summarize(setting) for setting in self.settings}

  def summarize(self, setting: Setting, seeds=None) -> Row:
    """A row of the results, over one seed or several, by the names in JSON; see `exports.to_json`.

    Columns `BESIDE` are not in JSON: the `setting`, `seconds` of all batches without compilation, `num_rounds` that the
    device ran, each for a whole batch, the `round_cost` in autoregressive steps, and `tokens_per_round` of a row, where
    rows that wait for the rest of their batch count.
    """
    own, baseline = self._of(setting, seeds), self._of(baseline_of(self.settings), seeds)
    num_rounds, seconds = sum(each.rounds for each in own), sum(each.seconds for each in own)
    speedup, speedup_interval, round_cost = None, None, None
    if baseline:
      speeds, others = self.batch_speeds(setting, seeds)
      speedup = metrics.ratio(*speeds) / metrics.ratio(*others)
      if len(speeds[0]) >= metrics.MIN_UNITS and setting != baseline_of(self.settings):
        speedup_interval = metrics.compare(speeds, others)[1:]
      round_cost = seconds / num_rounds / (float(others[1].sum()) / sum(each.rounds for each in baseline))
    # The continuations of one prompt are one unit of the sample.
    tokens = self._per_prompt(sum(each.lengths for each in own))
    calls = self._per_prompt(sum(each.num_target_calls for each in own))
    parts = self.part_seconds.get(setting)
    if parts:
      whole = seconds / num_rounds
      parts = {'round': whole} | parts | {'rest': whole - sum(parts.values())}
    rows_per_batch = len(self.prompts) * self.options.sampling.num_samples / self.num_batches
    share, share_interval = None, None
    is_compared = setting.method.max_drafts is None and has_independent_children(setting.method)
    if self.options.prompts.share_of_optimum and is_compared:
      accepted = self._per_prompt(sum(each.statistics.accepts.sum((1, 2)) for each in own))
      optimum = self._per_prompt(sum(each.statistics.optimum for each in own))
      share = metrics.ratio(accepted, optimum)
      share_interval = metrics.within(metrics.ratio_interval(accepted, optimum), 0)
    return describe_setting(self.options, setting) | {
      'num_nodes': setting.tree.num_nodes,
      'seed': own[0].seed,
      'num_prompts': len(self.prompts),
      'tokens': int(tokens.sum()),
      'target_calls': int(calls.sum()),
      'block_efficiency': metrics.ratio(tokens, calls),
      'block_efficiency_ci95': metrics.within(metrics.ratio_interval(tokens, calls), 1, setting.tree.max_depth + 1),
      'acceptance_by_position': metrics.acceptance_by_position(sum(each.accepted_by_depth for each in own), calls),
      'tokens_per_second': int(tokens.sum()) / seconds,
      'speedup': speedup,
      'speedup_ci95': speedup_interval,
      'seconds_per_round': parts,
      'share_of_optimum': share,
      'share_of_optimum_ci95': share_interval,
      'setting': setting,
      'seconds': seconds,
      'num_rounds': num_rounds,
      'round_cost': round_cost,
      'tokens_per_round': int(tokens.sum()) / (num_rounds * rows_per_batch),
    }
