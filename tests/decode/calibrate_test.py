"""Trees from measured acceptance."""

import json

import numpy as np
import pytest

from decode.calibrate import calibration_trees, choose_tree, measure_acceptance, rates_name, read_acceptance
from decode.options import DecodeOptions
from decode.run import run_decode
from decode.settings import Setting, TreeSpec
from spectr_jax import METHODS, Statistics, TokenTree, with_children


def _statistics(tree, accepted, *, visits=1000):
  """Statistics of one prompt: `visits` times at depth 1, `accepted` of them on the same child at every depth."""
  found = Statistics.zeros(1, tree)
  counts, accepts, children = (np.array(x) for x in (found.visits, found.accepts, found.accepted_child))
  for depth in range(tree.max_depth):
    n = int(tree.num_children[0])
    counts[0, depth, n] = visits
    accepts[0, depth, n] = visits * sum(accepted)
    children[0, depth, : len(accepted)] = np.array(accepted) * visits
  return Statistics(counts, accepts, children, np.zeros(1))


def test_calibration_trees_fit_the_budget():
  trees = calibration_trees(METHODS['race_block'], 20)
  assert list(trees) == [1, 2, 3, 4, 6, 8]
  assert trees[2] == TokenTree.prefix((2, 2, 2))  # 14 nodes; one depth more would have 30
  assert all(tree.num_nodes <= 20 for tree in trees.values())
  assert list(calibration_trees(METHODS['block'], 20)) == [1]


def test_rates_are_shares_of_visits():
  rates = {1: 0.5, 2: 0.7, 3: 0.8, 4: 0.8, 6: 0.8, 8: 0.8}
  found = measure_acceptance(METHODS['race'], 16, lambda tree: _statistics(tree, [rates[int(tree.num_children[0])]]))
  assert found[0] == [0.5, 0.7, 0.8, 0.8, None, 0.8, None, 0.8]
  assert found[-1] == found[0]  # what was measured at fewer depths goes on
  assert len(found) == 16


def test_rare_positions_count_as_not_measured():
  found = measure_acceptance(METHODS['race'], 4, lambda tree: _statistics(tree, [0.5], visits=49))
  assert {rate for row in found for rate in row} == {None}


def test_siblings_without_replacement_have_rates_of_their_own():
  found = measure_acceptance(METHODS['gsd'], 8, lambda tree: _statistics(tree, [0.5, 0.25, 0.125]))
  assert found == [[0.5, 0.25, 0.125, 0, 0, 0, 0, 0]] * 2


def test_the_best_shapes():
  setting = Setting(METHODS['race'], TreeSpec('optimal', (6,)))
  # 2,1,1: .8 + .8 * .5 + .8 * .25 = 1.4 in six nodes; 1 x 6: below 1; 2,2: .8 + .64 = 1.44.
  chosen = choose_tree(setting, [[0.5, 0.8]])
  assert chosen.tree == TokenTree.prefix((2, 2))
  assert chosen.shape == 'prefix:2,2'
  chosen = choose_tree(Setting(METHODS['gsd'], TreeSpec('optimal', (4,))), [[0.6, 0.2], [0.5, 0.1]])
  # The four largest products: .6, .6 * .5 = .3, .2, .6 * .5 * .5 = .15.
  assert chosen.tree == TokenTree((0, 0, 1, 3))
  assert chosen.draft_length == 3


def test_a_tree_has_no_nodes_that_are_never_accepted():
  # As at temperature 0: the first child or none.
  chosen = choose_tree(Setting(METHODS['gsd'], TreeSpec('optimal', (64,))), [[0.6, 0.0], [0.5, 0.0]])
  assert chosen.tree.is_chain
  assert chosen.tree.max_depth == 24


def test_rates_are_of_a_way_to_draw_children():
  assert rates_name(METHODS['traversal']) == 'traversal'
  assert rates_name(with_children(METHODS['traversal'], 'without_replacement')) == 'traversal, without_replacement'


def test_useless_drafts_have_no_tree():
  with pytest.raises(ValueError, match='nothing is ever accepted'):
    choose_tree(Setting(METHODS['race'], TreeSpec('optimal', (6,))), [[0.0, 0.0]])
  with pytest.raises(ValueError, match='gsd optimal:6: nothing is ever accepted'):
    choose_tree(Setting(METHODS['gsd'], TreeSpec('optimal', (6,))), [[0.0, 0.0]])
  with pytest.raises(ValueError, match='too few positions'):
    choose_tree(Setting(METHODS['gsd'], TreeSpec('optimal', (6,))), [[None, None]])


@pytest.mark.parametrize(
  'content',
  ['', '[]', '{"acceptance": {}}', '{"acceptance": {"race": [[2]]}}', '{"acceptance": {"race": [[1], [1, 0]]}}'],
)
def test_files_without_rates_are_refused(tmp_path, content):
  path = tmp_path / 'rates.json'
  path.write_text(content)
  with pytest.raises(ValueError, match=r'rates\.json'):
    read_acceptance(path)


@pytest.mark.slow
@pytest.mark.usefixtures('quickly')
def test_measured_rates_choose_trees_and_can_be_used_again(pair, tmp_path):
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text('the quick brown fox\n' * 12)
  common = {**pair, 'method': ('specinfer', 'gsd'), 'tree': ('optimal:3',), 'prompts': str(prompts)}
  common |= {'batch_size': 12, 'max_new_tokens': 40, 'temperature': 3.0}
  run = run_decode(DecodeOptions(**common))
  assert [setting.tree.num_nodes <= 3 for setting in run.settings] == [True, True]
  assert set(run.acceptance) == {'specinfer', 'gsd'}
  path = tmp_path / 'rates.json'
  path.write_text(json.dumps({'acceptance': run.acceptance}))
  again = run_decode(DecodeOptions(**common, acceptance=str(path)))
  assert [setting.tree for setting in again.settings] == [setting.tree for setting in run.settings]
  for first, second in zip(run.measurements, again.measurements):
    np.testing.assert_array_equal(first.tokens, second.tokens)


def test_files_must_have_the_method(pair, prompt_file, tmp_path):
  path = tmp_path / 'rates.json'
  path.write_text('{"acceptance": {"race": [[0.5]]}}')
  options = DecodeOptions(
    **pair, method=('spectr',), tree=('optimal:4',), acceptance=str(path), prompts=str(prompt_file), max_new_tokens=4
  )
  with pytest.raises(ValueError, match='no acceptance of spectr; it has race'):
    run_decode(options)
