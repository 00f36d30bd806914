"""Runs decoding methods over prompts and measures them: `run_decode(DecodeOptions.of(...))`."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

import spectr_jax
from decode.experiment import latency
from decode.experiment.auto_choice import speeds_of
from decode.experiment.latency import CompilingClock
from decode.experiment.measurements import DecodeRun, Measurement
from decode.experiment.optimal_trees import choose_trees, read_acceptance
from decode.experiment.options import DecodeOptions
from decode.experiment.prompts import take_first
from decode.experiment.settings import Setting, expand
from decode.experiment.workload import Pick, Workload
from spectr_jax import Generation, TokenTree
from spectr_jax.auto import timing
from spectr_jax.auto.setting import baseline_of
from spectr_jax.auto.trial import Notify
from spectr_jax.engine.program_memory import in_groups
from spectr_jax.sharding import fetch


def _measure_node_costs(workload: Workload, trees: list[TokenTree]) -> dict[int, float]:
  """Median time of a target call on each tree with its root, relative to a call on a single token."""
  num_rows = workload.batch_size * workload.options.sampling.num_samples
  shapes = {tree.num_nodes + 1: (tree, num_rows) for tree in (TokenTree(), *trees)}
  calls = timing.forward_calls(workload.target, shapes, cache_size=workload.cache_size, sharding=workload.sharding)
  times = timing.time_in_turns(calls, 15)
  medians = {size: float(np.median(seconds)) for size, seconds in times.items()}
  return {size: median / medians[1] for size, median in medians.items()}


def measure(workload: Workload, settings: list[Setting], notify: Notify) -> DecodeRun:
  """Decodes every prompt with every setting and every seed of the workload's options. Settings take turns.

  If the programs do not fit in one process, settings are split into groups that run one after another, each with
  autoregressive decoding if that is one of the settings.
  """
  options = workload.options
  batches, prompts = workload.batches, workload.prompts
  num_rows = len(prompts) * options.sampling.num_samples
  done, total = 0, len(settings) * options.sampling.num_seeds * len(batches)
  keys = {seed: workload.keys(seed) for seed in options.sampling.seeds}
  baseline, part_seconds, groups, reading = baseline_of(settings), {}, [], []

  def prepare(setting):
    place, number = settings.index(setting), len(settings)
    notify(f'compiling {place + 1} of {number}: {setting}', place, number)
    # One round compiles the program that `generate` runs.
    decoder = workload.decoder(setting, statistics=options.prompts.share_of_optimum)
    for _ in range(1 if reading else 2):  # the second time nothing is compiled
      state = None  # before there is another one
      start = time.perf_counter()
      state = workload.init(decoder, keys[options.sampling.seed], batches[0], num_samples=options.sampling.num_samples)
      jax.block_until_ready(state)
      seconds = time.perf_counter() - start
    reading.append(seconds)
    state = jax.block_until_ready(spectr_jax.engine.decode_rounds(decoder, state, 1))
    jax.block_until_ready(state.result.of_size(options.prompts.max_new_tokens))  # as `generate` cuts it
    if options.prompts.breakdown and setting.tree.num_nodes:
      notify(f'{setting}: timing its parts', done, total)
      part_seconds[setting] = latency.time_parts(decoder, state)
    if options.prompts.profile_dir is not None and not (groups and setting == baseline):
      notify(f'{setting}: profiling', done, total)
      name = str(setting).replace(' ', '_').replace(':', '_')
      latency.profile(decoder, state, epath.Path(options.prompts.profile_dir) / name)

  measured = {}
  for group in in_groups(settings, prepare, baseline=baseline, is_joint=workload.is_joint):
    groups.append([str(setting) for setting in group])
    seconds: dict[tuple[Setting, int], list[float]] = collections.defaultdict(list)
    generations: dict[tuple[Setting, int], list[Generation]] = collections.defaultdict(list)
    # Settings take turns, so that other load on the machine affects all of them alike.
    for seed, rows, setting in itertools.product(options.sampling.seeds, batches, group):
      notify(f'decoding, seed {seed}', done, total)
      start = time.perf_counter()
      generation = workload.generate(
        setting, keys[seed], rows, statistics=options.prompts.share_of_optimum, num_samples=options.sampling.num_samples
      )
      jax.block_until_ready(generation)
      seconds[setting, seed].append(time.perf_counter() - start)
      generations[setting, seed].append(fetch(generation))
      done += (setting, seed) not in measured
    for setting, seed in seconds.keys() - measured.keys():
      parts, beside = generations[setting, seed], seconds.get((baseline, seed))
      # The batches joined, without the padding copies of the last one.
      every: Generation = jax.tree.map(lambda *arrays: np.concatenate(arrays)[:num_rows], *parts)
      measured[setting, seed] = Measurement(
        **vars(every),
        setting=setting,
        seed=seed,
        batch_seconds=np.array(seconds[setting, seed]),
        baseline_seconds=None if beside is None else np.array(beside),
        rounds=sum(int(part.num_target_calls.max()) for part in parts),
      )
  measurements = [measured[setting, seed] for setting in settings for seed in options.sampling.seeds]
  times = {'prompts': reading[0], 'prompt_tokens': int(workload.lengths[batches[0]].sum())}
  info = workload.info | {'timed_together': groups, 'seconds': times}
  run = DecodeRun(options, info, prompts, workload.tokenizer, settings, measurements, part_seconds=part_seconds)
  is_slow = np.array([bool(each.tree.num_nodes) and (run.summarize(each)['speedup'] or 1) < 1 for each in settings])
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
    pick: Takes `options.prompts.num_prompts` of the prompts that fit.

  Raises:
    ValueError: Prompts or models are unusable; the message says why.
  """
  notify = notify or (lambda what, done, total: None)
  settings = expand(options)
  given = None if options.methods.acceptance is None else read_acceptance(options.methods.acceptance)
  start = time.perf_counter()
  workload = Workload.load(options, pick=pick)
  loading = time.perf_counter() - start
  with CompilingClock() as clock:
    speeds, left_out = speeds_of(workload, notify) if options.methods.is_auto else ([], {})
    settings = list(dict.fromkeys([*settings, *(each.setting for each in speeds[:1])]))
    settings, acceptance = choose_trees(workload, settings, given, notify)
    run = measure(workload, settings, notify)
  info = run.info | {'seconds': {'loading': loading, 'compiling': clock.seconds} | run.info['seconds']}
  return dataclasses.replace(run, info=info, acceptance=acceptance, speeds=speeds, left_out=left_out)
