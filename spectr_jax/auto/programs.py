"""Which programs are measured, and in which order: those of a whole grid, or the few that the target's slope allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from spectr_jax.auto.calibration import Calibration, Observation
from spectr_jax.auto.setting import Setting, baseline_among, source_of, tree_name_of, tuned, with_thresholds

# Of a short grid: the most settings, the most guesses of a tree, and the fewest batches that a setting decodes.
_MOST_SETTINGS, _MOST_NODES, _FEWEST_BATCHES = 4, 8, 3
# One method stands for all on a tree: the first of these that takes it.
_STAND_INS = 'block', 'race_traversal'
# Until the draft is known: the chance that a guess is accepted, and a step of the draft over a call of the target.
_RATE, _STEP = 0.7, 0.1

TARGET, DRAFT, ROUNDS = 'timing the target on', 'timing the draft on', 'decoding with'


@dataclasses.dataclass(frozen=True)
class Program:
  """A program that is compiled and measured as one."""

  kind: str
  setting: Setting

  def is_in(self, calibration: Calibration) -> bool:
    """Tells whether it has been measured."""
    if self.kind == TARGET:
      return self.setting.tree.num_nodes in calibration.target_seconds
    if self.kind == DRAFT:
      return tree_name_of(self.setting) in calibration.draft_seconds
    return str(self.setting) in calibration.observations

  def __str__(self):
    of = {TARGET: f'{self.setting.tree.num_nodes + 1} tokens', DRAFT: tree_name_of(self.setting)}
    return f'{self.kind} {of.get(self.kind, self.setting)}'


def programs_of(settings: Sequence[Setting]) -> list[Program]:
  """The programs that predictions for a grid follow from: what does not draft first, then what is smaller first."""
  baseline = baseline_among(settings)
  sizes: dict[int, Setting] = {}
  trees: dict[str, Setting] = {}
  for setting in settings:
    sizes.setdefault(setting.tree.num_nodes, setting)
    trees.setdefault(tree_name_of(setting), setting)
  trees.pop(tree_name_of(baseline))
  observed = dict.fromkeys([baseline, *(source_of(setting, settings) for setting in settings)])
  return [
    *(Program(TARGET, sizes[size]) for size in sorted(sizes)),
    *(Program(DRAFT, setting) for setting in trees.values()),
    *(Program(ROUNDS, setting) for setting in observed),
  ]


def candidates_of(settings: Sequence[Setting]) -> list[Setting]:
  """Autoregressive decoding, and for every tree of at most 8 guesses one method that stands for all."""
  baseline = baseline_among(settings)
  on_trees: dict[str, list[Setting]] = {}
  for setting in settings:
    if 0 < setting.tree.num_nodes <= _MOST_NODES:
      on_trees.setdefault(tree_name_of(setting), []).append(setting)
  ranks = {name: rank for rank, name in enumerate(_STAND_INS)}
  chosen = (min(alike, key=lambda each: ranks.get(each.method.name, len(ranks))) for alike in on_trees.values())
  return [baseline, *chosen]


def speed_up_at(
  setting: Setting, kept: np.ndarray, seconds: Sequence[float] | np.ndarray, step_seconds: float
) -> float:
  """The promise of a setting: tokens of a round over its time, in steps of autoregressive decoding.

  A single draft keeps depth d with probability `kept[d - 1]`, each of several on its own. Verification costs nothing
  here, so no setting is faster than this. `seconds` are those of the target's calls on one token and on the tree.
  """
  depth = setting.tree.max_depth
  is_kept = 1 - (1 - kept[:depth]) ** (setting.tree.num_nodes / depth)
  return float((1 + is_kept.sum()) * seconds[0] / (seconds[1] + depth * step_seconds))


def kept_by_depth(seen: Observation) -> np.ndarray:
  """How often a single draft keeps each depth; below the depths that were seen, at the rate of all that were."""
  rate = sum(seen.kept) / max(seen.num_calls + sum(seen.kept[:-1]), 1)
  kept = np.array(seen.kept) / max(seen.num_calls, 1)
  return np.concatenate([kept, kept[-1] * rate ** np.arange(1, _MOST_NODES + 1)])


def of_the_first_process(values: Sequence[float]) -> np.ndarray:
  """Numbers in the first process, whose clock decides for all."""
  own = np.asarray(values, np.float32)
  return own if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(own))


def shortlist(calibration: Calibration, candidates: Sequence[Setting]) -> list[Setting]:
  """The settings of a short grid of `candidates_of`, as far as the measurements determine them.

  Autoregressive decoding comes first; then, once the target is timed, the single draft that its slope favours; then,
  once it is known how much of that is accepted and what drafting costs, the single draft of another length and the
  larger tree that promise most, if they promise a gain.
  """
  baseline, *others = candidates
  times = calibration.target_seconds
  if not others or any(setting.tree.num_nodes not in times for setting in candidates):
    return [baseline]

  def promises(settings: Sequence[Setting], kept: np.ndarray, step: float) -> np.ndarray:
    return of_the_first_process(
      [speed_up_at(each, kept, (times[0], times[each.tree.num_nodes]), step) for each in settings]
    )

  single = [each for each in others if each.tree.is_chain] or others
  first = single[int(promises(single, _RATE ** np.arange(1, _MOST_NODES + 1), _STEP * times[0]).argmax())]
  if any(not Program(kind, first).is_in(calibration) for kind in (DRAFT, ROUNDS)):
    return [baseline, first]
  seen = calibration.observations[str(first)]
  step = calibration.draft_seconds[tree_name_of(first)] / first.tree.max_depth
  kept = kept_by_depth(seen)
  chosen = [baseline, first]
  for alike in (single, [each for each in others if each not in single]):
    rest = [each for each in alike if each != first]
    if rest and (promised := promises(rest, kept, step)).max() > 1:
      chosen.append(rest[int(promised.argmax())])
  return chosen


def plan(
  calibration: Calibration, settings: Sequence[Setting], *, is_short: bool
) -> tuple[list[Setting], list[Program], int]:
  """The settings to compare, their programs, and how many there may be, as far as measurements determine them."""
  if not is_short:
    programs = programs_of(settings)
    return list(settings), programs, len(programs)
  candidates = candidates_of(settings)
  compared = shortlist(calibration, candidates)
  sizes = [each for each in programs_of(candidates) if each.kind == TARGET]
  # One tree tells what a step of the draft costs.
  draft, rounds = ([each for each in programs_of(compared) if each.kind == kind] for kind in (DRAFT, ROUNDS))
  programs = [*sizes, *draft[:1], *rounds]
  return compared, programs, max(len(programs), len(sizes) + min(len(candidates), _MOST_SETTINGS) + 1)


def complete_settings(
  calibration: Calibration, settings: Sequence[Setting], source: str, *, is_short: bool
) -> list[Setting]:
  """The settings that a complete calibration compares, and the thresholds tried; ValueError if it lacks some."""

  def missing(of: Sequence[Program]) -> list[Program]:
    return [each for each in of if not each.is_in(calibration)]

  is_short = is_short and bool(missing(plan(calibration, settings, is_short=False)[1]))
  compared, programs, _ = plan(calibration, settings, is_short=is_short)
  # Those that were measured: the finalists' second run may have made another tree the fastest that grows.
  further = [setting for setting in with_thresholds(compared) if str(setting) in calibration.observations]
  lacked = missing(programs) or missing(programs_of([baseline_among(compared), *(further or tuned(compared))]))
  if lacked:
    of_lacked = [each.setting for each in lacked]
    first = next((each for each in compared if each in of_lacked), of_lacked[0])
    raise ValueError(f'{source} was measured for another grid, without {first}; name a new file')
  return compared + further


def batches_within(seconds: float, calibration: Calibration, max_new_tokens: int) -> int:
  """Batches that autoregressive decoding of so many tokens does in some seconds; no fewer than say something."""
  number = seconds / (calibration.target_seconds[0] * max_new_tokens)
  return max(_FEWEST_BATCHES, int(of_the_first_process([min(number, 1e6)])[0]))
