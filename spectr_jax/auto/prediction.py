"""Predicts the speed of every setting of a grid, to choose the fastest.

The time of a round is modelled as

    round = draft(tree) + target(nodes) + rest,

where the rest is verification, the caches' commit and the loop. Draft and target are timed alone for every tree. The
time and the tokens of whole rounds are measured by decoding some prompts.

Methods that decide token by token are decoded with the longest drafts only, except for one reference method, which is
decoded on every tree. For these methods the acceptance of a position does not depend on later positions. So the tokens
of shorter drafts follow from the run with the longest. The rest of such a method's round is that of the reference on
the same tree, plus the difference of the two on the longest drafts, scaled by the number of nodes. In all

    seconds of a batch = prefill + rounds * round,

where rounds are those until the last row of a batch is done, on average over all batches that the rows could form.
Rounds in which lookup has no guess are shorter; they are part of the mean round that is decoded, and lower its rest; so
are rounds whose trees stop growing early. docs/performance.md compares this with the closed form of the literature.

The settings that are predicted to be the fastest are decoded once more, side by side, before one is chosen.
"""

from __future__ import annotations

import dataclasses

from spectr_jax.auto.calibration import Calibration
from spectr_jax.auto.programs import of_the_first_process
from spectr_jax.auto.setting import Setting, reference_of, source_of, tree_name_of

_NUM_FINALISTS = 6  # settings that are observed again


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


def predict(calibration: Calibration, settings: list[Setting]) -> list[Prediction]:
  """Predictions for a grid, the fastest first."""
  drafting = [setting for setting in settings if setting.tree.num_nodes]
  timed = [setting for setting in drafting if tree_name_of(setting) in calibration.draft_seconds]

  def draft_seconds(setting):
    # In a short grid one tree is timed: steps of the others count as long.
    name, other = tree_name_of(setting), timed[-1]
    seconds = calibration.draft_seconds.get(name)
    if seconds is None:
      seconds = calibration.draft_seconds[tree_name_of(other)] * setting.tree.max_depth / other.tree.max_depth
    return seconds

  def parts(setting):
    draft = draft_seconds(setting) if setting.tree.num_nodes else 0.0
    return draft, calibration.target_seconds[setting.tree.num_nodes]

  def rest(setting):
    return calibration.observations[str(setting)].round_seconds - sum(parts(setting))

  predictions, batch_size = [], calibration.conditions['batch_size']
  for setting in settings:
    is_observed = str(setting) in calibration.observations
    source = setting if is_observed else source_of(setting, settings)
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
    batch_seconds = seen.prefill_seconds + seen.rounds(batch_size) / yields * seconds
    predictions.append(
      Prediction(
        setting=setting,
        tokens_per_call=yields * seen.tokens_per_call,
        tokens_per_second=batch_size * seen.tokens_per_row / batch_seconds,
        round_seconds=seconds,
        draft_seconds=draft,
        target_seconds=target,
        rest_seconds=rest_seconds,
        is_observed=is_observed,
      )
    )
  return sorted(predictions, key=lambda each: -each.tokens_per_second)


def ranked(predictions: list[Prediction]) -> list[Setting]:
  """The settings, the fastest first: in all processes, whose clocks differ, in the order that the first one found."""
  by_name = sorted((each.setting for each in predictions), key=str)
  order = of_the_first_process([by_name.index(each.setting) for each in predictions])
  return [by_name[int(place)] for place in order]


def finalists_of(predictions: list[Prediction]) -> list[Setting]:
  """The settings to observe again: the fastest ones, at most a quarter of all, or none if that is fewer than two."""
  number = min(_NUM_FINALISTS, len(predictions) // 4)
  return ranked(predictions)[:number] if number > 1 else []


def choose(predictions: list[Prediction]) -> Setting:
  """The fastest setting, the same in all processes."""
  return ranked(predictions)[0]
