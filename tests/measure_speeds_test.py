"""Which settings are timed, and their speeds; tests/decode/auto_test.py has the command."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import METHODS, Constraint, SamplingParams, auto, lookup_beside
from spectr_jax.auto import measurement
from spectr_jax.auto.observation import Observation, Speed
from spectr_jax.auto.search import promised_speeds, search
from spectr_jax.auto.setting import baseline_of
from spectr_jax.auto.trial import BatchedDecoding
from spectr_jax.draft.model_drafter import ModelDrafter
from spectr_jax.models.table import table_model
from tests.slow import slow

_DRAFT = table_model(jnp.zeros((5, 5)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _ShortDrafter(ModelDrafter):
  max_depth = 4


def test_default_settings():
  settings = auto.default_settings(_DRAFT)
  assert baseline_of(settings) == settings[0]
  names = set(map(str, settings))
  assert {'speculative K=1 L=8', 'block K=1 L=2', 'spectr K=8 L=4', 'race_traversal K=2 L=8', 'ersd K=1 L=2'} <= names
  assert not names & {'spectr K=1 L=4', 'spectr_gbv K=2 L=4', 'decoding_opt K=1 L=4'}
  assert len(names) == len(settings)
  assert auto.default_settings(None) == settings[:1]
  greedy = auto.default_settings(_DRAFT, is_greedy=True)
  assert {setting.num_drafts for setting in greedy} == {0, 1}
  grown = [str(setting).partition(' ')[2] for setting in greedy if setting.growth is not None]
  assert grown == ['likeliest:2,2,2,2', 'likeliest:4,4,4,4', 'likeliest:2,2,2,2,2,2,2,2', 'likeliest:4,4,4,4,4,4,4,4']
  short = auto.default_settings(_ShortDrafter(_DRAFT))
  assert max(setting.draft_length for setting in short) == 4
  beside = auto.default_settings(lookup_beside(_DRAFT), is_greedy=True)
  assert all(setting.method.takes_mixed or not setting.tree.num_nodes for setting in beside)
  assert any(setting.num_drafts == 8 for setting in beside)


def test_something_to_compare_with_is_needed():
  with pytest.raises(ValueError, match='settings need one that drafts nothing'):
    auto.measure_speeds(
      _DRAFT, _DRAFT, np.array([[1]]), max_new_tokens=2,
      settings=[_SPECULATIVE],
    )  # fmt: skip


_SPECULATIVE = auto.Setting.of_chains(METHODS['speculative'], 1, 2)

# One token and an end, and two.
_ONE, _TWO = (Constraint(np.zeros(5, int), [*([i + 1] for i in range(n)), [-1]], np.arange(n + 1) == n) for n in (1, 2))


class _Machine:
  """Times settings by a formula: the parts of a round, in steps without a draft, and what is accepted.

  A round takes `start` more, `draft` for every depth, and `guess` for every guess. A single guess is accepted with
  probability `rate`, one of w with 1 - (1 - rate)^(w^overlap).
  """

  def __init__(self, start, draft, guess, rate, overlap):
    self.parts, self.rate, self.overlap = (start, draft, guess), rate, overlap
    self.random, self.timed = np.random.default_rng(0), []

  def round(self, setting):
    """Seconds, and the probabilities that so many guesses are kept."""
    tree = setting.tree
    widths = np.bincount(tree.depths)[1:]
    kept = 1 - (1 - self.rate ** np.arange(1, tree.max_depth + 1)) ** (widths**self.overlap)
    is_drafting = tree.num_nodes > 0
    return 1 + np.dot(self.parts, (is_drafting, tree.max_depth, tree.num_nodes)), np.minimum.accumulate(kept)

  def speed(self, setting):
    seconds, kept = self.round(setting)
    return 64 / (2 + 64 / (1 + kept.sum()) * seconds)

  def observe(self, settings, turn):
    """12 rows of 64 tokens, with errors of 2% in the time."""
    del turn
    self.timed += settings
    found = {}
    for setting in settings:
      seconds, kept = self.round(setting)
      calls = 64 / (1 + kept.sum()) * self.random.normal(1, 0.05 * bool(len(kept)), 12)
      found[setting] = Observation(
        row_tokens=[64] * 12,
        row_calls=np.maximum(calls, 1).round().astype(int).tolist(),
        kept=(kept * np.maximum(calls, 1).round().sum()).astype(int).tolist(),
        prefill_seconds=[2.0] * 12,
        round_seconds=(seconds * self.random.normal(1, 0.02, 12)).tolist(),
      )
    return found


@pytest.mark.parametrize(('is_greedy', 'most'), [(False, 6), slow(False, 12), slow(True, 6), (True, 12)])
def test_the_fastest_of_a_grid_is_found_on_machines_of_many_kinds(is_greedy, most):
  settings, shares, of_first = auto.default_settings(_DRAFT, is_greedy=is_greedy), [], []
  assert len(settings) > most
  kinds = itertools.product((0, 0.1, 0.5), (0.02, 0.1, 0.3), (0.02, 0.1, 0.3, 1.0), (0.3, 0.6, 0.8, 0.92), (0.2, 0.6))
  for kind in kinds:
    machine = _Machine(*kind)
    seen = search(settings, machine.observe, 1, most)
    assert len(seen) <= most
    assert set(machine.timed) == set(seen)
    found = max(seen, key=lambda setting: Speed.of(setting, seen[setting], 1).tokens_per_second)
    shares.append(machine.speed(found) / max(map(machine.speed, settings)))
    of_first.append(max(map(machine.speed, machine.timed[:4])) / max(map(machine.speed, settings)))
  assert min(shares) > 0.92
  assert min(of_first) < 0.75  # those that are always timed are not enough


def test_few_settings_are_all_timed_and_a_lucky_one_is_timed_again():
  settings = auto.default_settings(_DRAFT)[:5]
  machine = _Machine(0.1, 0.1, 0.1, 0.8, 0.5)
  seen = search(settings, machine.observe, 1)
  assert list(seen) == [settings[0], *reversed(settings[1:])]
  again = machine.timed[len(settings) :]
  assert 3 <= len(again) == len(set(again)) <= 4
  assert settings[0] in again
  assert {setting for setting in seen if len(seen[setting].row_calls) == 24} == set(again)
  assert list(search(settings[:1], machine.observe, 1)) == settings[:1]


def test_a_promise_is_the_speed_where_the_model_is_right():
  """One guess accepted at one rate is nearly what the model assumes, and costs add up."""
  settings = auto.default_settings(_DRAFT)
  machine = _Machine(0.2, 0.1, 0.05, 0.8, 0.5)
  machine.random = types.SimpleNamespace(normal=lambda mean, *_: np.full(12, mean))
  chains = {(each.num_drafts, each.draft_length): each for each in settings if each.method.name == 'race_traversal'}
  chains |= {(1, each.draft_length): each for each in settings if each.method.name == 'block'}
  seen = machine.observe([settings[0], chains[1, 2], chains[1, 4], chains[2, 4]], 0)
  others = [chains[1, 8], chains[2, 2], chains[2, 8], chains[4, 4]]
  promised = promised_speeds(others, seen, settings[0], 1)
  np.testing.assert_allclose(promised, [machine.speed(each) for each in others], rtol=0.05)


def test_batches_wait_for_their_slowest_row_and_seconds_are_medians():
  calls = [4, 9, 6, 6, 3]
  seen = Observation([12] * 5, calls, [20], [1.0, 2.0, 9.0], [0.1, 0.2, 3.0])
  for size in (1, 2, 3, 5):
    assert seen.rounds(size) == pytest.approx(np.mean([max(rows) for rows in itertools.combinations(calls, size)]))
  assert seen.rounds(8) == 9  # there are five prompts
  assert seen.batch_seconds(1) == pytest.approx(2 + 5.6 * 0.2)
  speed = Speed.of(_SPECULATIVE, seen, 2)
  assert speed.tokens_per_second == pytest.approx(2 * 12 / seen.batch_seconds(2))
  assert (speed.tokens_per_call, speed.round_seconds) == (60 / 28, 0.2)
  assert speed.interval[0] < speed.tokens_per_second < speed.interval[1]
  exact = Speed.of(_SPECULATIVE, dataclasses.replace(seen, row_calls=[6] * 5, round_seconds=[0.2] * 3), 2)
  assert exact.interval == pytest.approx((exact.tokens_per_second,) * 2)
  joined = seen.joined(seen)
  assert (joined.kept, joined.row_calls, joined.prefill_seconds) == ([40], calls * 2, seen.prefill_seconds * 2)


def test_seconds_are_those_of_the_first_observation(monkeypatch):
  """A machine that is half as fast later gives the seconds of the first time."""
  clock = types.SimpleNamespace(now=0.0, tick=1.0)

  def look():
    clock.now += clock.tick
    return clock.now

  monkeypatch.setattr(measurement, 'time', types.SimpleNamespace(perf_counter=look))
  prompts = BatchedDecoding(_DRAFT, _DRAFT, np.array([[1, 0], [2, 3], [1, 1]]), np.array([1, 2, 2]), 2, 6)
  alone = auto.default_settings(None)[0]
  keys = jax.random.split(jax.random.key(0, impl='threefry2x32'), 3)
  timer = measurement.Timer(prompts, lambda number: keys, alone, lambda what: None)
  first = timer.observe([alone], 0, None)[alone]
  assert (first.prefill_seconds, first.round_seconds) == ([1.0] * 3, [1 / 6] * 3)
  assert first.row_tokens == first.row_calls == [6] * 5  # the second batch has one row, and a copy
  clock.tick = 2.0
  later = timer.observe([_SPECULATIVE], 0, first)[_SPECULATIVE]
  # Eight rounds were asked for beside it, and six are done.
  assert later.prefill_seconds == [1.0] * 3
  rounds = [max(later.row_calls[i : i + 2]) for i in (0, 2)]
  assert later.round_seconds[:2] == pytest.approx([1 / number for number in rounds])


@pytest.mark.slow
@pytest.mark.parametrize(('constraint', 'kept'), [(None, 3), (_ONE, 2), ([_ONE, _TWO], 2.5)])
def test_speeds_are_measured(constraint, kept):
  """All guesses of a perfect draft are kept: 3 tokens per call with two guesses, or fewer where a row ends then."""
  settings = [auto.Setting(METHODS['autoregressive']), _SPECULATIVE]
  found = auto.measure_speeds(
    _DRAFT, _DRAFT, np.array([[1, 0], [2, 3]]), np.array([1, 2]), max_new_tokens=6, settings=settings,
    sampling=SamplingParams(0.7), eos_id=None if constraint is None else 4, constraint=constraint,
  )  # fmt: skip
  assert {str(each.setting): each.tokens_per_call for each in found} == {
    'autoregressive': 1,
    'speculative K=1 L=2': kept,
  }
  speeds = [each.tokens_per_second for each in found]
  assert speeds == sorted(speeds, reverse=True)
  assert min(speeds) > 0
