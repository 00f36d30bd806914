"""Tests of settings that are measured from Python; tests/decode/auto_test.py has those of the predictions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import METHODS, Constraint, SamplingParams, auto, lookup_beside
from spectr_jax.auto.setting import baseline_of
from spectr_jax.draft.model_drafter import ModelDrafter
from spectr_jax.models.table import table_model

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
    auto.predict_speeds(
      _DRAFT, _DRAFT, np.array([[1]]), max_new_tokens=2,
      settings=[auto.Setting.of_chains(METHODS['speculative'], 1, 2)],
    )  # fmt: skip


# One token and an end, and two.
_ONE, _TWO = (Constraint(np.zeros(5, int), [*([i + 1] for i in range(n)), [-1]], np.arange(n + 1) == n) for n in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(('constraint', 'kept'), [(None, 3), (_ONE, 2), ([_ONE, _TWO], 2.5)])
def test_speeds_are_predicted(constraint, kept):
  """All guesses of a perfect draft are kept: 3 tokens per call with two guesses, or fewer where a row ends then."""
  settings = [auto.Setting(METHODS['autoregressive']), auto.Setting.of_chains(METHODS['speculative'], 1, 2)]
  found = auto.predict_speeds(
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
