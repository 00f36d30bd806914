"""Trees from measured acceptance."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from decode.experiment import distributions, optimal_trees
from decode.experiment.optimal_trees import bound_kept, choose_tree, kept_bounds, measure_acceptance
from decode.experiment.options import DecodeOptions
from decode.experiment.prompts import Prompt
from decode.experiment.run import run_decode
from decode.experiment.settings import Setting, TreeSpec
from decode.experiment.workload import Workload
from spectr_jax import METHODS, Statistics, TokenTree
from spectr_jax.methods import with_children
from spectr_jax.models import table
from spectr_jax.sampling import SamplingParams, logits_to_probs
from spectr_jax.theory import stateless_kept_bound
from tests.slow import slow


def _statistics(tree, accepted, *, visits=1000):
  """Statistics of one prompt: `visits` times at depth 1, `accepted` of them on the same child at every depth."""
  zeros = Statistics.zeros(1, tree)
  counts, accepts, children = (np.array(x) for x in (zeros.visits, zeros.accepts, zeros.accepted_child))
  for depth in range(tree.max_depth):
    n = int(tree.num_children[0])
    counts[0, depth, n] = visits
    accepts[0, depth, n] = visits * sum(accepted)
    children[0, depth, : len(accepted)] = np.array(accepted) * visits
  return Statistics(counts, accepts, children, np.zeros(1))


def test_rates_are_shares_of_visits_that_are_not_rare():
  trees = optimal_trees.calibration_trees(METHODS['race_block'], 20)
  assert list(trees) == [1, 2, 3, 4, 6, 8]
  assert trees[2] == TokenTree.prefix((2, 2, 2))  # 14 nodes; one depth more would have 30
  assert all(tree.num_nodes <= 20 for tree in trees.values())
  assert list(optimal_trees.calibration_trees(METHODS['block'], 20)) == [1]
  rates = {1: 0.5, 2: 0.7, 3: 0.8, 4: 0.8, 6: 0.8, 8: 0.8}
  rates_by_depth = measure_acceptance(
    METHODS['race'], 16, lambda tree: _statistics(tree, [rates[int(tree.num_children[0])]])
  )
  assert rates_by_depth[0] == [0.5, 0.7, 0.8, 0.8, None, 0.8, None, 0.8]
  assert rates_by_depth[-1] == rates_by_depth[0]  # what was measured at fewer depths goes on
  assert len(rates_by_depth) == 16
  rates_by_depth = measure_acceptance(METHODS['race'], 4, lambda tree: _statistics(tree, [0.5], visits=49))
  assert {rate for row in rates_by_depth for rate in row} == {None}
  rates_by_depth = measure_acceptance(METHODS['gsd'], 8, lambda tree: _statistics(tree, [0.5, 0.25, 0.125]))
  assert rates_by_depth == [[0.5, 0.25, 0.125, 0, 0, 0, 0, 0]] * 2


def _chosen(method, budget, rates):
  return choose_tree(Setting(METHODS[method], label=f'optimal:{budget}', budget=budget), rates)


def _shape(setting):
  return setting.label.partition(' = ')[2]


def test_the_best_shapes_and_chains():
  # 2,1,1: .8 + .8 * .5 + .8 * .25 = 1.4 in six nodes; 1 x 6: below 1; 2,2: .8 + .64 = 1.44.
  chosen = _chosen('race', 6, [[0.5, 0.8]])
  assert (chosen.tree, _shape(chosen)) == (TokenTree.prefix((2, 2)), 'prefix:2,2')
  # The four largest products: .6, .6 * .5 = .3, .2, .6 * .5 * .5 = .15.
  chosen = _chosen('gsd', 4, [[0.6, 0.2], [0.5, 0.1]])
  assert (chosen.tree, chosen.draft_length) == (TokenTree((0, 0, 1, 3)), 3)
  # As at temperature 0, the first child or none: no node that is never accepted.
  chosen = _chosen('gsd', 64, [[0.6, 0.0], [0.5, 0.0]])
  assert chosen.tree.is_chain
  assert chosen.tree.max_depth == 24
  assert [name for name, method in METHODS.items() if optimal_trees.is_chosen_by_bound(method)] == ['race_traversal']
  # 1 x 4: .8 + .5 + .1 + .1 = 1.5; 2 x 2: .9 + .7 = 1.6; 4 x 1: .95.
  rates = [[0.8, 0.9, None, 0.95], [0.5, 0.7, None, 0.9], [0.1, 0.2, None, 0.4], [0.1, 0.1, None, 0.1]]
  chosen = _chosen('race_traversal', 4, rates)
  assert chosen.tree == TokenTree.chains(2, 2)
  assert (_shape(chosen), chosen.draft_length) == ('prefix:2,1', 2)
  assert TreeSpec.parse(_shape(chosen)).numbers == (2, 1)
  # The same rates as chances per depth: branching everywhere would seem best.
  assert _shape(_chosen('race', 6, rates)) == 'prefix:2,2'
  assert _shape(_chosen('race_traversal', 6, rates)) == 'prefix:2,1,1'
  assert optimal_trees.rates_name(METHODS['traversal']) == 'traversal'
  method = with_children(METHODS['traversal'], 'without_replacement')
  assert optimal_trees.rates_name(method) == 'traversal, without_replacement'


@pytest.mark.parametrize(
  ('method', 'rate', 'message'),
  [
    *((method, 0.0, f'{method} optimal:6: nothing is ever accepted') for method in ('race', 'gsd', 'race_traversal')),
    *((method, None, 'too few positions') for method in ('gsd', 'race_traversal')),
  ],
)
def test_useless_drafts_have_no_tree(method, rate, message):
  with pytest.raises(ValueError, match=message):
    _chosen(method, 6, [[rate, rate]])


# What the distributions allow to be kept.


def _texts(seed, num_texts=40, length=9):
  """Log probabilities of texts of unequal length, draft and target; some tokens the draft never draws."""
  rng = np.random.default_rng(seed)
  draft, target = np.log(rng.uniform(0.05, 1, (2, num_texts, length)))
  draft[rng.random(draft.shape) < 0.1] = -np.inf
  is_missing = np.arange(length) >= rng.integers(3, length + 1, (num_texts, 1))
  return np.where(is_missing, np.nan, draft), np.where(is_missing, np.nan, target)


@pytest.mark.parametrize(
  'tree', [TokenTree.chains(3, 4), TokenTree.prefix((2, 1, 2)), TokenTree.chains(1, 12)], ids=str
)
def test_every_place_has_the_bound_of_what_follows(tree):
  draft, target = _texts(0)
  bounds = kept_bounds(tree, draft, target)
  assert bounds.shape == (*draft.shape, tree.max_depth)
  ends = np.isfinite(target).sum(axis=1)
  for text, end in enumerate(ends):
    for place in range(draft.shape[1]):
      length = max(min(end - place, tree.max_depth), 0)
      assert np.isnan(bounds[text, place, length:]).all()
      if length:
        # Of a shallower tree, which holds no more than the tokens that are there.
        cut = TokenTree.from_parents(tree.parents[: np.count_nonzero(tree.depths <= length) - 1])
        window = slice(place, place + length)
        expected = stateless_kept_bound(cut, draft[text, window], target[text, window])
        np.testing.assert_allclose(bounds[text, place, :length], expected, rtol=1e-12)


def test_rates_are_means_over_all_places():
  draft, target = _texts(1)
  rates = bound_kept(draft, target)
  assert (len(rates), len(rates[0])) == (9, 16)
  ends = np.isfinite(target).sum(axis=1)
  for depth, row in enumerate(rates):
    assert row[6] is None  # 7 chains
    for number in (1, 3, 16):
      bounds = []
      for text, place in ((text, place) for text, end in enumerate(ends) for place in range(end - depth)):
        p, q = (np.exp(np.cumsum(values[text, place : place + depth + 1])) for values in (draft, target))
        bounds.append(min(1, np.min((1 - (1 - p) ** number) / q)))
      # What is missing after the end is not kept.
      assert row[number - 1] == pytest.approx(np.sum(bounds) / ends.sum(), rel=1e-9)
  assert len(bound_kept(*(np.zeros((2, 50)),) * 2)) == optimal_trees.LONGEST_CHAIN
  few = bound_kept(draft[:5], target[:5])
  assert {rate for row in few for rate in row} == {None}


def _tables(prompts, **options):
  """A workload on two Markov chains of three tokens, and their distributions."""
  probs = {
    'target': np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]),
    'draft': np.array([[0.3, 0.3, 0.4], [0.5, 0.1, 0.4], [0.2, 0.7, 0.1]]),
  }
  models = {name: table.table_model(np.log(each).astype(np.float32)) for name, each in probs.items()}
  options = DecodeOptions.of(batch_size=400, **options)
  workload = Workload(
    options=options, sampling=options.sampling.params, max_new_tokens=options.prompts.max_new_tokens, info={},
    batch_size=min(400, len(prompts)), tokenizer=SimpleNamespace(eos_ids=()),
    prompts=[Prompt('x', index, index) for index in range(len(prompts))], tokens=np.array(prompts, np.int32)[:, None],
    lengths=np.ones(len(prompts), np.int32), **models,
  )  # fmt: skip
  return workload, probs


@pytest.mark.parametrize(
  'options',
  [
    {}, *map(slow, ({'temperature': 0.5}, {'top_k': 2}, {'top_p': 0.6})),
    {'temperature': 2.0, 'top_k': 2, 'top_p': 0.9},
  ],
  ids=str,
)  # fmt: skip
def test_the_bound_is_that_of_the_distributions_tokens_are_drawn_from(options):
  """Markov chains: the expectation over two tokens of the target in closed form."""
  number, num_prompts = 2, 800
  workload, probs_by_role = _tables([0] * num_prompts, max_new_tokens=2, **options)
  params = SamplingParams.make(1, **options)
  p, q = (
    np.asarray(logits_to_probs(np.log(probs_by_role[role]).astype(np.float32)[None], params)[0], np.float64)
    for role in ('draft', 'target')
  )
  texts = distributions.target_texts(workload, seed=3)
  draft, target = distributions.written_log_probs(workload, (workload.draft, workload.target), texts)
  with np.errstate(divide='ignore'):
    np.testing.assert_allclose(draft, np.log([[p[0, a], p[a, b]] for a, b in texts]), rtol=1e-5)
    np.testing.assert_allclose(target, np.log([[q[0, a], q[a, b]] for a, b in texts]), rtol=1e-5)
  bounds = np.array(kept_bounds(TokenTree.chains(number, 2), draft, target))[:, 0]
  joint_p, joint_q = p[0, :, None] * p, q[0, :, None] * q
  with np.errstate(invalid='ignore', divide='ignore'):
    first = np.minimum(1, (1 - (1 - p[0]) ** number) / q[0])[:, None]
    second = np.minimum(first, (1 - (1 - joint_p) ** number) / joint_q)
  expected = [np.nansum(joint_q * first), np.nansum(joint_q * second)]
  error = bounds.std(axis=0) / np.sqrt(num_prompts)
  assert (error < 0.02).all()
  np.testing.assert_array_less(np.abs(bounds.mean(axis=0) - expected), 4 * error + 1e-6)


def test_tokens_after_the_end_have_no_distribution():
  workload, probs_by_role = _tables([0, 1], max_new_tokens=3)
  cold = workload.at(0.25)
  assert cold.options.sampling.temperature == cold.sampling.temperature == 0.25
  assert workload.sampling.temperature == 1
  tokens = np.array([[1, 2, 2], [0, -1, -1]], np.int32)
  [log_probs] = distributions.written_log_probs(workload, (workload.draft,), tokens)
  p = np.log(probs_by_role['draft'])
  np.testing.assert_allclose(log_probs, [[p[0, 1], p[1, 2], p[2, 2]], [p[1, 0], np.nan, np.nan]], rtol=1e-5)
  broken = dataclasses.replace(workload, draft=table.table_model(np.full((3, 3), np.nan, np.float32)))
  with pytest.raises(ValueError, match='prompt 0: the logits of a model are not finite'):
    distributions.written_log_probs(broken, (broken.draft,), tokens)


@pytest.mark.parametrize(
  'content',
  ['', '[]', '{"acceptance": {}}', '{"acceptance": {"race": [["1"]]}}', '{"acceptance": {"race": [[1], [1, 0]]}}'],
)
def test_files_without_rates_are_refused(tmp_path, content):
  path = tmp_path / 'rates.json'
  path.write_text(content)
  with pytest.raises(ValueError, match=r'rates\.json'):
    optimal_trees.read_acceptance(path)


@pytest.fixture
def repeated(pair, tmp_path):
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text('the quick brown fox\n' * 12)
  return {**pair, 'prompts': str(prompts), 'batch_size': 12, 'max_new_tokens': 40, 'temperature': 3.0}


@pytest.mark.slow
def test_measured_rates_choose_trees_and_can_be_used_again(repeated, tmp_path):
  common = repeated | {'method': ('specinfer', 'gsd'), 'tree': ('optimal:3',)}
  run = run_decode(DecodeOptions.of(**common))
  assert [setting.tree.num_nodes <= 3 for setting in run.settings] == [True, True]
  assert set(run.acceptance) == {'specinfer', 'gsd'}
  path = tmp_path / 'rates.json'
  path.write_text(json.dumps({'acceptance': run.acceptance}))
  again = run_decode(DecodeOptions.of(**common, acceptance=str(path)))
  assert [setting.tree for setting in again.settings] == [setting.tree for setting in run.settings]
  for first, second in zip(run.measurements, again.measurements):
    np.testing.assert_array_equal(first.tokens, second.tokens)


@pytest.mark.slow
def test_a_bound_chooses_chains_and_can_be_used_again(repeated, tmp_path, monkeypatch):
  common = repeated | {'method': ('race_traversal',), 'top_k': 30, 'seed': 5}
  seen, seeds = [], []
  own = optimal_trees.target_texts
  monkeypatch.setattr(optimal_trees, 'target_texts', lambda workload, seed: seeds.append(seed) or own(workload, seed))
  run = run_decode(DecodeOptions.of(**common, tree=('optimal:8', 'optimal:3')), lambda what, *_: seen.append(what))
  assert seeds == [6]
  assert [what for what in seen if 'own texts' in what] == [
    "race_traversal: bounding what is kept of chains, on the target's own texts"
  ]
  workload = Workload.load(run.options)
  texts = distributions.target_texts(workload, 6)
  rates = bound_kept(*distributions.written_log_probs(workload, (workload.draft, workload.target), texts))
  assert run.acceptance == {'race_traversal': rates}
  for setting, budget in zip(run.settings, (8, 3)):
    kept = np.array(rates, float)
    assert setting.tree == TokenTree.optimal_chains(kept, budget, tolerance=optimal_trees.TOLERANCE)
    assert setting.draft_length == setting.tree.max_depth
    shape = _shape(setting)
    assert shape == f'prefix:{",".join(map(str, setting.tree.num_children[:1]))}' + ',1' * (setting.draft_length - 1)
  path = tmp_path / 'rates.json'
  path.write_text(json.dumps({'acceptance': run.acceptance}))
  monkeypatch.setattr(optimal_trees, 'target_texts', None)
  again = run_decode(DecodeOptions.of(**common, tree=('optimal:8',), acceptance=str(path)))
  assert again.settings == run.settings[:1]
  np.testing.assert_array_equal(again.measurements[0].tokens, run.measurements[0].tokens)
  # What was printed gives the same run.
  monkeypatch.undo()
  pasted = run_decode(DecodeOptions.of(**common, tree=(shape,)))
  np.testing.assert_array_equal(pasted.measurements[0].tokens, run.measurements[1].tokens)


def test_files_must_have_the_method(pair, prompt_file, tmp_path):
  path = tmp_path / 'rates.json'
  path.write_text('{"acceptance": {"race": [[0.5]]}}')
  options = DecodeOptions.of(
    **pair, method=('spectr',), tree=('optimal:4',), acceptance=str(path), prompts=str(prompt_file), max_new_tokens=4
  )
  with pytest.raises(ValueError, match='no acceptance of spectr; it has race'):
    run_decode(options)
