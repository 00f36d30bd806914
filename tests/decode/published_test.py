"""Published numbers agree wherever a paper prints one number in two forms."""

import numpy as np
import pytest

from decode.papers import published, spec_bench

_TARGETS = list(published.COMPARISON)


@pytest.mark.parametrize('key', _TARGETS)
@pytest.mark.parametrize('column', [0, 1])
@pytest.mark.parametrize('method', published.GBV_METHODS)
def test_averages_are_those_of_the_sets(key, column, method):
  sets = published.COMPARISON[key]
  each = [figures[column][method][0] for name, figures in sets.items() if name != 'Average']
  assert len(each) == 5
  assert sets['Average'][column][method][0] == pytest.approx(np.mean(each), abs=0.0105)  # rounded, and at times cut off


@pytest.mark.parametrize('key', _TARGETS)
def test_both_tables_print_the_same_of_humaneval(key):
  target, length = key
  for column in (0, 1):
    shared = published.COMPARISON[key]['HumanEval'][column]
    by_length = published.BY_LENGTH[target][length][column]
    assert {method: by_length[method][0] for method in published.GBV_METHODS} == {
      method: shared[method][0] for method in published.GBV_METHODS
    }


@pytest.mark.parametrize('key', _TARGETS)
@pytest.mark.parametrize('prompts', ['GSM8K', 'HumanEval'])
@pytest.mark.parametrize('method', ['spectr', 'spectr_gbv'])
def test_the_breakdown_adds_up(key, prompts, method):
  found = dict(zip(published.BREAKDOWN_COLUMNS, published.BREAKDOWN[key][prompts][method]))
  parts = sum(found[part] for part in ('draft', 'target', 'verification', 'rest'))
  assert parts == pytest.approx(found['total'], abs=0.025)
  efficiency = published.COMPARISON[key][prompts][0][method][0]
  assert found['accepted'] == pytest.approx((efficiency - 1) / key[1], abs=0.0015)
  assert found['tokens/s'] * found['total'] == pytest.approx(found['rounds'] * efficiency, rel=0.01)


def test_the_smaller_table_of_spectr_is_the_larger_one_rounded():
  # Table 2, in the order of its rows.
  printed = [1.0, 2.2, 2.4, 2.7, 3.0, 2.3, 2.6, 3.0, 3.3]
  assert [round(mean, 1) for mean, _ in published.BLOCK_EFFICIENCY['6M'].values()] == printed
  settings = {name: list(column) for name, column in published.BLOCK_EFFICIENCY.items()}
  assert settings['2M'] == settings['6M'] == settings['20M']


def test_latencies_are_of_every_shape():
  shapes = {(length, batch) for length in (4, 8) for batch in (1, 2, 4, 8)}
  assert set(published.TARGET_LATENCY) == set(published.DRAFT_LATENCY) == shapes
  assert published.TARGET_LATENCY[4, 1][0] == 1


@pytest.mark.parametrize('name', published.SPEC_BENCH)
def test_the_leaderboard_weighs_its_tasks_alike(name):
  (*by_task, overall), _ = published.SPEC_BENCH[name]
  # Every task has 80 prompts; the means of speeds have other weights than those of their ratios, but not by much.
  assert overall == pytest.approx(np.mean(by_task), abs=0.015)
  assert (*spec_bench.TASKS, spec_bench.OVERALL) == published.SPEC_BENCH_COLUMNS
