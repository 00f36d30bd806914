"""Which settings are timed: at most a dozen, the next one by what those before it show.

Three trees of different depth and width come first. They say how much more a round takes with every depth and with
every guess, and how the guesses kept decrease with the depth and increase with the width. The tree that promises most
is timed next, and corrects both, until none promises more than the fastest so far. On the fastest tree other methods
and thresholds follow. The fastest ones are timed again, side by side, since the winner of several was probably lucky.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spectr_jax.auto.observation import Observation, Speed
from spectr_jax.auto.setting import Setting, baseline_among

MOST_SETTINGS, MOST_OF_SHORT = 12, 6  # a quarter of them with another method or threshold alone
_SLACK = 1.1  # by which a promise may fall short
_NUM_FINALISTS = 3
# Depth and nodes of the trees that come first, as far as there are similar ones.
_FIRST = (2, 2), (4, 4), (4, 8)
# One method stands for all on a tree, the first of these that takes it; then others are tried, the last ones first.
_METHODS = 'block', 'race_traversal', 'speculative', 'race', 'spectr', 'traversal'
# A threshold of growing trees is data: none of them is compiled.
_THRESHOLDS = 0.02, 0.05, 0.1

# Times settings in turns, in the first turn or the second, when others were timed with the same prompts.
Observe = Callable[[Sequence[Setting], int], Mapping[Setting, Observation]]


def promised_speeds(
  settings: Sequence[Setting], seen: Mapping[Setting, Observation], baseline: Setting, batch_size: int
) -> np.ndarray:
  """Tokens per second that settings promise, from those of some others that were timed.

  The seconds of a round without a draft, and a start, every depth and every guess of a tree add up to those of a round.
  A guess of depth d among w nodes is kept with probability 1 - (1 - a)^(w^t) of a given d, where log(-log(1 - a))
  changes linearly with d and log d: nearly so if every guess is accepted at one rate.
  """
  from scipy import optimize  # takes a third of a second, which decoding need not wait for

  alone, drafted = seen[baseline], [each for each in seen if each.tree.num_nodes]
  first, shape = np.median(alone.round_seconds), [(1, each.tree.max_depth, each.tree.num_nodes) for each in drafted]
  more = np.array([np.median(seen[each].round_seconds) for each in drafted]) - first
  costs, _ = optimize.nnls(np.array(shape, float), more)

  def features(setting: Setting) -> np.ndarray:
    depths = np.arange(1, setting.tree.max_depth + 1)
    widths = np.bincount(setting.tree.depths)[1:]
    return np.stack([np.ones_like(depths), depths, np.log(depths), np.log(widths)], axis=1)

  rows, values, weights = [], [], []
  for setting in drafted:
    calls, kept = sum(seen[setting].row_calls), np.array(seen[setting].kept)
    shares = np.clip(kept / calls, 0.5 / calls, 1 - 0.5 / calls)
    rows.append(features(setting))
    values.append(np.log(-np.log1p(-shares)))
    weights.append(np.sqrt(kept + 1.0))
  weight = np.concatenate(weights)
  fit = np.linalg.lstsq(np.concatenate(rows) * weight[:, None], np.concatenate(values) * weight, rcond=None)[0]
  # Rows of a batch wait for the slowest one.
  waits = [seen[each].rounds(batch_size) / np.mean(seen[each].row_calls) for each in drafted]
  tokens, prefill = np.mean(alone.row_tokens), np.median(alone.prefill_seconds)
  speeds = []
  for setting in settings:
    kept = np.minimum.accumulate(-np.expm1(-np.exp(np.minimum(features(setting) @ fit, 30))))
    seconds = first + np.dot(costs, (1, setting.tree.max_depth, setting.tree.num_nodes))
    speeds.append(batch_size * tokens / (prefill + tokens / (1 + kept.sum()) * np.mean(waits) * seconds))
  return np.array(speeds)


def _rank(setting: Setting) -> int:
  return _METHODS.index(setting.method.name) if setting.method.name in _METHODS else len(_METHODS)


def _first_of(trees: list[Setting]) -> list[Setting]:
  """Settings of the trees that are most like `_FIRST`."""
  sizes = np.log([(each.tree.max_depth, each.tree.num_nodes) for each in trees])
  nearest = [int(np.sum((sizes - np.log(size)) ** 2, axis=1).argmin()) for size in _FIRST]
  return [trees[place] for place in dict.fromkeys(nearest)]


def search(
  settings: Sequence[Setting], observe: Observe, batch_size: int, most: int = MOST_SETTINGS
) -> dict[Setting, Observation]:
  """Times at most so many of any number of settings, and returns what was seen of them.

  ValueError if no setting decodes autoregressively.
  """
  baseline = baseline_among(settings)
  seen = dict(observe([baseline], 0))

  def see(setting: Setting) -> None:
    seen.update(observe([setting], 0))

  def speed(setting: Setting) -> float:
    return Speed.of(setting, seen[setting], batch_size).tokens_per_second

  # Of equal rank the last registered first.
  others = sorted(reversed([each for each in settings if each.tree.num_nodes]), key=_rank)
  by_tree: dict[Any, list[Setting]] = {}
  for setting in others:
    by_tree.setdefault((setting.tree, setting.growth), []).append(setting)
  trees = [alike[0] for alike in by_tree.values()]
  for setting in others if len(others) < most else _first_of(trees):
    see(setting)
  while len(seen) < most - most // 4:
    largest = 2 * max(each.tree.num_nodes for each in seen)  # of what was timed little follows for much larger trees
    left = [each for each in trees if each not in seen and each.tree.num_nodes <= largest]
    if not left:
      break
    promised = promised_speeds(left, seen, baseline, batch_size)
    if _SLACK * promised.max() <= max(map(speed, seen)):
      break
    see(left[int(promised.argmax())])
  if drafting := [each for each in seen if each.tree.num_nodes]:
    fastest = max(drafting, key=speed)
    has_thresholds = fastest.growth is not None and not fastest.growth.threshold
    alike = [fastest.with_threshold(threshold) for threshold in _THRESHOLDS if has_thresholds]
    alike += by_tree[fastest.tree, fastest.growth]
    for setting in [each for each in alike if each not in seen][: min(most // 4, most - len(seen))]:
      see(setting)
    finalists = sorted(seen, key=speed, reverse=True)[:_NUM_FINALISTS]
    for setting, again in observe(list(dict.fromkeys([baseline, *finalists])), 1).items():
      seen[setting] = seen[setting].joined(again)
  return seen
