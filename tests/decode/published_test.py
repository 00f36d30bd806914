"""Published numbers agree wherever a paper prints one number in two forms."""

import numpy as np
import pytest

from decode.papers import published, spec_bench


@pytest.mark.parametrize('key', published.COMPARISON)
def test_tables_of_spectr_gbv_agree(key):
  sets, by_length = published.COMPARISON[key], published.BY_LENGTH[key[0]][key[1]]
  for column in (0, 1):
    for method in published.GBV_METHODS:
      each = [printed[column][method][0] for name, printed in sets.items() if name != 'Average']
      assert len(each) == 5
      # Rounded, and at times cut off.
      assert sets['Average'][column][method][0] == pytest.approx(np.mean(each), abs=0.0105)
      assert by_length[column][method][0] == sets['HumanEval'][column][method][0]
  for prompts in ('GSM8K', 'HumanEval'):
    for method in ('spectr', 'spectr_gbv'):
      columns = dict(zip(published.BREAKDOWN_COLUMNS, published.BREAKDOWN[key][prompts][method]))
      parts = sum(columns[part] for part in ('draft', 'target', 'verification', 'rest'))
      assert parts == pytest.approx(columns['total'], abs=0.025)
      efficiency = sets[prompts][0][method][0]
      assert columns['accepted'] == pytest.approx((efficiency - 1) / key[1], abs=0.0015)
      assert columns['tokens/s'] * columns['total'] == pytest.approx(columns['rounds'] * efficiency, rel=0.01)


def test_tables_and_latencies_of_spectr():
  # Table 2, in the order of its rows.
  printed = [1.0, 2.2, 2.4, 2.7, 3.0, 2.3, 2.6, 3.0, 3.3]
  assert [round(mean, 1) for mean, _ in published.BLOCK_EFFICIENCY['6M'].values()] == printed
  settings = {name: list(column) for name, column in published.BLOCK_EFFICIENCY.items()}
  assert settings['2M'] == settings['6M'] == settings['20M']
  shapes = {(length, batch) for length in (4, 8) for batch in (1, 2, 4, 8)}
  assert set(published.TARGET_LATENCY) == set(published.DRAFT_LATENCY) == shapes
  assert published.TARGET_LATENCY[4, 1][0] == 1


def test_the_leaderboard_weighs_its_tasks_alike():
  assert (*spec_bench.TASKS, spec_bench.OVERALL) == published.SPEC_BENCH_COLUMNS
  for name, ((*by_task, overall), _) in published.SPEC_BENCH.items():
    # Every task has 80 prompts; the means of speeds have other weights than those of their ratios, but not by much.
    assert overall == pytest.approx(np.mean(by_task), abs=0.015), name
