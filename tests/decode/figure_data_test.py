"""The papers' figures: their data against closed forms and other routes, and pictures that follow from the data."""

import itertools
import math

import numpy as np
import pytest
from commands import finish, start

from decode.auto.prediction import calibrate
from decode.experiment.laws import written_laws
from decode.experiment.options import DecodeOptions
from decode.experiment.run import measure
from decode.experiment.workload import Workload
from decode.papers import (
  ladder_figures,
  method_figures,
  paper_figure,
  plots,
  rejection_figures,
  token_figures,
  tree_figures,
)
from decode.papers.gallery import FIGURES
from decode.papers.paper_figure import by_value, from_csv, select, to_csv
from decode.papers.table import Request
from spectr_jax import METHODS, TokenTree, theory

# Rows in JAX's float64, where K-SEQ's threshold is searched to within 1e-9.
CLOSE = 1e-6


def _request(name, pair=None, prompts=None, **sizes):
  figure = FIGURES[name]
  prompts = {'x': str(prompts)} if figure.has_prompts else {}
  pair = pair or {'target': '', 'draft': ''}
  sizes = figure.sizes.choose(sizes, 'figure')
  return Request(target=pair['target'], drafts={'d': pair['draft']}, prompts=prompts, sizes=sizes)


def _check(name, request, rows):
  """What holds of every figure: one set of columns, a picture that can be drawn again from the file, a paragraph."""
  figure = FIGURES[name]
  assert len({tuple(row) for row in rows}) == 1
  again = from_csv(to_csv(rows))
  assert again == rows
  picture = figure.to_png(rows)
  assert picture.startswith(b'\x89PNG')
  assert picture == figure.to_png(again)
  text = figure.to_markdown(name, rows, paper_figure.describe(figure, request))
  assert text.startswith(f'# {figure.title}\n')
  paragraph = figure.tell(rows)
  assert len(paragraph) > 200
  assert paragraph in text
  assert '\n' not in paragraph
  assert 'nan' not in paragraph
  return rows


def _compute(name, **sizes):
  request = _request(name, **sizes)
  return _check(name, request, FIGURES[name].run(request, lambda *_: None))


def test_every_figure_is_there():
  wanted = (
    'spectr_fig1 spectr_fig2 spectr_fig3 spectr_fig5 batch_fig2 batch_fig3 pareto_fig4 batch_fig5 ersd_fig3 ersd_fig4'
    ' opt_uno methods optimum ladder'
  )
  assert set(FIGURES) == set(wanted.split())


def _linear(color):
  channels = np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)]) / 255
  return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


# Linear RGB as seen without the cones for red or green (Machado et al. 2009).
_SEEN = {
  'all cones': np.eye(3),
  'no red': np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
  'no green': np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
}


def _lab(linear):
  to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
  xyz = to_xyz @ np.clip(linear, 0, 1) / np.array([0.9505, 1, 1.089])
  x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
  return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize('eyes', _SEEN)
def test_methods_look_different_to_everyone(eyes):
  assert set(plots.COLORS) == {*METHODS, plots.OPTIMUM}
  assert len(set(plots.MARKERS.values())) == len(plots.MARKERS)
  seen = {name: _lab(_SEEN[eyes] @ _linear(color)) for name, color in plots.COLORS.items()}
  distances = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in itertools.combinations(seen, 2)}
  # Two and a half is where a difference begins to be seen side by side.
  assert min(distances.values()) > 10, min(distances, key=distances.get)


def test_a_method_that_is_not_lossless_keeps_its_look():
  assert plots.style_of('spectr_gbv (not lossless)') == plots.style_of('spectr_gbv')


@pytest.mark.usefixtures('quickly')
def test_uniform_laws_against_the_closed_form():
  rows = _compute('spectr_fig1', num_drafts=(3,))
  assert {row['rule'] for row in rows} == {'optimum', 'spectr', 'race'}
  assert {row['k'] for row in rows} == {3}
  for row in rows:
    assert row['acceptance'] == pytest.approx(1 - (1 - 1 / row['r']) ** row['k'], abs=CLOSE)


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize(
  ('name', 'num_laws'), [pytest.param('spectr_fig2', 6, marks=pytest.mark.slow), ('spectr_fig3', 41)]
)
def test_bernoulli_laws_against_the_closed_form(name, num_laws):
  rows = _compute(name, num_drafts=(1, 2))
  optimum = select(rows, rule='optimum')
  assert len(optimum) == 2 * num_laws
  p = 0.25
  for row in optimum:
    b, k = row['b'], row['k']
    # SpecTr, Appendix B.2.
    assert row['acceptance'] == pytest.approx(min(b, 1 - (1 - p) ** k) + min(1 - b, 1 - p**k), abs=CLOSE)
  for rule in ('spectr', 'race'):
    for own, best in zip(select(rows, rule=rule), optimum, strict=True):
      assert own['acceptance'] <= best['acceptance'] + CLOSE
      if own['k'] == 1:
        assert own['acceptance'] == pytest.approx(best['acceptance'], abs=CLOSE)
  [kseq], [race] = (select(rows, rule=rule, b=0.5, k=2) for rule in ('spectr', 'race'))
  assert kseq['acceptance'] == pytest.approx(0.8476, abs=1e-4)
  assert race['acceptance'] == pytest.approx(0.9375, abs=1e-2)


def test_batch_improvement_against_the_closed_forms():
  rows = _compute('batch_fig3', num_drafts=(1, 2, 8))
  for row in select(rows, panel='Bernoulli'):
    u = row['parameter']
    assert row['improvement'] == pytest.approx((u - 0.5) * (1 - u ** (row['M'] - 1)), abs=CLOSE)
  for row in select(rows, panel='uniform'):
    missed = 1 - 1 / row['parameter']
    assert row['improvement'] == pytest.approx(missed - missed ** row['M'], abs=CLOSE)
  assert {row['panel'] for row in rows} == {'Bernoulli', 'uniform'}


def test_the_front_is_a_straight_line_that_nothing_crosses():
  rows = _compute('pareto_fig4')
  p, q = rejection_figures.pareto_laws()
  distance = 1 - np.minimum(p, q).sum()
  lines = by_value(rows, 'line')
  sums = {line: np.array([row['rejection'] + row['bias'] for row in own]) for line, own in lines.items()}
  np.testing.assert_allclose(sums['decoding_opt'], distance, atol=CLOSE)
  assert all(own.min() >= distance - CLOSE for own in sums.values())
  assert sums['decoding_uno'][0] > distance + 0.1
  # With the best law every random acceptance above min(1, q/p) is on the front, and covers it.
  best = [row for row in rows if row['line'].endswith('best law after a rejection')]
  on_front = [row['rejection'] for row in best if abs(row['rejection'] + row['bias'] - distance) < CLOSE]
  assert len(on_front) == len(best)
  assert min(on_front) < 0.3 * distance < 0.9 * distance < max(on_front)


@pytest.mark.slow
@pytest.mark.usefixtures('quickly')
def test_what_is_simulated_agrees_with_what_is_expected():
  rows = _compute('batch_fig2', num_runs=300, num_drafts=(3,))
  chains = theory.random_chains(10, num_tokens=50)
  [simulated] = select(rows, panel='number of drafts', line='simulation')
  [expected] = select(rows, panel='number of drafts', line='theory', M=3)
  assert (simulated['M'], simulated['runs']) == (3, 300)
  error = (simulated['high'] - simulated['rejections']) / 1.96
  assert abs(simulated['rejections'] - expected['rejections']) < 4 * error < 2
  assert expected['rejections'] == pytest.approx(float(theory.expected_rejections(chains, 3)))
  p, q = chains.draft_probs, chains.target_probs
  # One draft: Theorem 1, the sum of expected total variations, written out.
  distances = np.abs(p - q).sum(-1) / 2
  law, total = np.full(7, 1 / 7), 0
  for step in range(50):
    total += law @ distances[step]
    law = law @ q[step]
  assert select(rows, panel='number of drafts', line='theory', M=1)[0]['rejections'] == pytest.approx(total)
  running = select(rows, panel='running average', line='simulation', M=3)
  widths = [row['high'] - row['low'] for row in running]
  assert widths[-1] < widths[0]


def test_running_averages():
  counts = np.array([3.0, 5, 4, 8])
  number, mean, half = rejection_figures._running(counts)[-1]
  assert (number, mean) == (4, 5)
  assert half == pytest.approx(1.959964 * counts.std(ddof=1) / 2)


def test_tokens_of_trees_against_sums():
  acceptance = np.array([0.6, 0.2, 0.05, 0.05])
  numbers = range(1, 13)
  rows = tree_figures.theory_rows('gsd', numbers, acceptance)
  for row in select(rows, line='batch'):
    assert row['tokens'] == pytest.approx(1 + acceptance[: row['N']].sum())
  for row in select(rows, line='sequence'):
    assert row['tokens'] == pytest.approx(sum(0.6**depth for depth in range(row['N'] + 1)))
    assert row['marginal'] == pytest.approx(0.6 ** row['N'])
  for row in select(rows, line="SpecInfer's tree"):
    length = (row['N'] - 2) // 3 + 2
    below = 0.6**2 * 0.85 * sum(0.6**depth for depth in range(length - 2))  # three branches, each a chain
    assert row['tokens'] == pytest.approx(1 + 0.6 + 0.36 + below)
  assert {row['N'] for row in select(rows, line="SpecInfer's tree")} == {5, 8, 11}
  best = {row['N']: row['tokens'] for row in select(rows, line='optimal tree')}
  assert list(best) == list(numbers)
  for row in rows:
    if row['kind'] == 'theory':
      assert row['tokens'] <= best[row['N']] + CLOSE
    else:
      assert row['tokens'] >= best[row['N']] - CLOSE
  marginals = [row['marginal'] for row in select(rows, line='optimal tree')]
  assert marginals == sorted(marginals, reverse=True)


def test_slopes_are_between_what_was_measured():
  rows = tree_figures.with_marginals([{'N': 2, 'tokens': 2.0}, {'N': 6, 'tokens': 3.0}])
  assert [row['marginal'] for row in rows] == [0.5, 0.25]
  # Tokens 1 and 2, then 3 to 6.
  assert [row['N'] for row in tree_figures._between(rows)] == [1.5, 4.5]


def test_the_likeliest_tokens_of_both():
  draft, target = np.full(30, 0.001), np.full(30, 0.002)
  draft[:10] += 0.097
  target[5:15] += 0.094
  kept, p, q = token_figures.likeliest_laws(draft, target)
  assert sorted(kept) == list(range(15))
  assert list(kept[:10]) == list(range(5, 15))  # the target's own first
  np.testing.assert_allclose([p.sum(), q.sum()], 1)
  np.testing.assert_allclose(p[kept == 0] / p[kept == 12], 98)


def test_a_ladder_has_trees_of_every_size():
  budgets = FIGURES['ladder'].sizes.num_nodes
  grids = [ladder_figures.settings_of_grid(number) for number in budgets]
  assert [max(each.tree.num_nodes for own in grid.values() for each in own) for grid in grids] == list(budgets)
  for grid, larger in zip(grids, grids[1:]):
    assert all(
      grid[name] and set(grid[name]) < set(larger[name]) for name in ('spectr', 'race_block', 'race_traversal')
    )
  alone = {name: [str(each) for each in own if each.tree.is_chain] for name, own in grids[0].items()}
  single = {'speculative': ['speculative K=1 L=16'], 'block': ['block K=1 L=16']}
  assert alone == {name: single['speculative' if name in ('speculative', 'spectr') else 'block'] for name in grids[0]}
  trees = {each.tree for own in grids[1].values() for each in own}
  assert trees < set(ladder_figures.bound_trees(32))
  assert TokenTree.chains(5, 6) in ladder_figures.bound_trees(32)
  assert all(tree.num_nodes <= 32 for tree in ladder_figures.bound_trees(32))
  assert max(tree.max_depth for tree in ladder_figures.bound_trees(64)) == 32
  request = _request('ladder', {'target': '', 'draft': ''}, 'x', num_nodes=(64, 15))
  with pytest.raises(ValueError, match='no tree of at most 15 nodes is measured of speculative, spectr, '):
    FIGURES['ladder'].compute(request, None)


def test_shapes_have_names():
  names = {
    '1 x 3': TokenTree.chains(1, 3), '4 x 1': TokenTree.chains(4, 1), '3 x 2': TokenTree.prefix((3, 1)),
    'prefix:3,2,1': TokenTree.prefix((3, 2, 1)), 'prefix:1,2': TokenTree.prefix((1, 2)),
  }  # fmt: skip
  assert {ladder_figures.shape_name(tree): tree for tree in names.values()} == names


def _log(probs):
  with np.errstate(divide='ignore'):
    return np.log(probs)


def test_the_fewest_calls_by_hand():
  """Texts of three tokens, one and none; two drafts of two tokens."""
  p = _log([[0.5, 0.25, 0.5], [0.5, np.nan, np.nan], [np.nan] * 3])
  q = _log([[0.8, 0.5, 0.5], [1, np.nan, np.nan], [np.nan] * 3])
  # The first place: .75 of .8 and 1 - (1 - 1/8)^2 of .4; the second: .4375 of .5 are kept, and a call ends the text.
  first, both, second = 0.75 / 0.8, (1 - 0.875**2) / 0.4, 0.4375 / 0.5
  from_second = 1 + (1 - second)
  expected = 1 + (1 - first) * from_second + (first - both)
  np.testing.assert_allclose(ladder_figures.fewest_calls(TokenTree.chains(2, 2), p, q), [expected, 1, 0])


def test_the_fewest_calls_keep_what_suits_the_rest():
  """The first token can be kept, but only the second's place sees the rest of the text in one call."""
  q = np.full((1, 4), 0.5)
  draft = _log([[1, 0, 1, 0]])
  assert ladder_figures.fewest_calls(TokenTree.chains(1, 1), draft, _log(q)) == 2
  # Before the third token nothing is kept, before the second two tokens are.
  bounds = np.full((1, 4, 2), np.nan)
  bounds[0, 0], bounds[0, 1], bounds[0, 2, 0] = (1, 0), (1, 1), 0
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(ladder_figures, 'kept_bounds', lambda *_: bounds)
    assert ladder_figures.fewest_calls(TokenTree.chains(1, 2), draft, _log(q)) == 2  # not 3


def test_no_rule_takes_fewer_calls():
  """Any chances below the bound, and what they lead to."""
  rng = np.random.default_rng(0)
  p, q = _log(rng.uniform(0.1, 1, (2, 5, 8)))
  tree = TokenTree.prefix((2, 1, 1))
  bounds, fewest = calibrate.kept_bounds(tree, p, q), ladder_figures.fewest_calls(tree, p, q)
  lowest = np.full(5, np.inf)
  for trial in range(200):
    share = (
      np.ones((5, 8, 3)) if not trial else np.cumprod(rng.choice([0, 0.5, 1], (5, 8, 3), p=[0.1, 0.1, 0.8]), axis=2)
    )
    at_least = np.concatenate([np.ones((5, 8, 1)), np.nan_to_num(bounds) * share, np.zeros((5, 8, 1))], axis=2)
    calls = np.zeros((5, 12))
    for place in reversed(range(8)):
      chances = at_least[:, place, :-1] - at_least[:, place, 1:]
      calls[:, place] = 1 + (chances * calls[:, place + 1 : place + 5]).sum(axis=1)
    assert (calls[:, 0] > fewest - 1e-12).all()
    lowest = np.minimum(lowest, calls[:, 0])
  assert (lowest < 1.1 * fewest).all()


def test_a_ladder_tells_the_best_shapes_and_their_ratios():
  measured = {'speculative': 2.0, 'spectr': 2.5, 'block': 3.0, 'race_traversal': 6.0, ladder_figures.BOUND: 8.0}
  wide, long = TokenTree.chains(8, 1), TokenTree.prefix((2, 2, 1, 1, 1, 1, 1))
  rows = []
  for number in (16, 64):
    for method, tokens in measured.items():
      tokens *= number / 64
      found = {wide: (0.9 * tokens, None), long: (tokens, (tokens - 0.1, tokens + 0.1))}
      rows += ladder_figures._rows_of(method, number, found)
  assert [row['is best'] for row in rows] == [0, 1] * (len(rows) // 2)
  assert rows[0]['low'] is None
  rows = _check('ladder', _request('ladder', {'target': '', 'draft': ''}, 'x'), rows)
  paragraph = FIGURES['ladder'].tell(rows)
  assert 'With 64 nodes: speculative 2.00 on prefix:2,2,1,...,1, spectr 2.50' in paragraph
  assert 'is 3.00 times that of speculative, 2.40 times that of spectr, 2.00 times that of block.' in paragraph
  assert 'is 8.00, on prefix:2,2,1,...,1: on none of them' in paragraph
  assert 'reaches 75% at 16, 75% at 64 nodes' in paragraph


def test_wins_count_half_where_nobody_wins():
  np.testing.assert_array_equal(method_figures.wins(np.array([1.0, 2, 3]), np.array([0.0, 2, 4])), [1, 0.5, 0])


def test_cells_read_as_they_were_written():
  rows = [{'a': 1, 'b': 0.1 + 0.2, 'c': "' 7'", 'd': None}, {'a': 2, 'b': 1e-300, 'c': 'x, "y"', 'd': 3}]
  assert from_csv(to_csv(rows)) == rows


def _errors_of(*arguments, output):
  process = start('decode.reproduce', *arguments, f'--output={output}')
  out, err = process.communicate(timeout=300)
  assert process.returncode == 1, out
  return [line for line in err.splitlines() if not line.startswith('[')]


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--figure=spectr_fig4'], 'error: figure must be one of spectr_fig1, '),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        (['--figure=batch_fig3', '--table=gbv_table1'], 'error: give --table=NAME or --figure=NAME, one of the two'),
        (['--figure=all', '--context=3'], 'error: context: no figure has such a size'),
      )
    ),
  ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path):
  kept = tmp_path / 'batch_fig3.csv'
  kept.write_text('kept')
  [error] = _errors_of(*arguments, output=tmp_path)
  assert error.startswith(message)
  assert kept.read_text() == 'kept'
  assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize(
  ('name', 'sizes', 'message'),
  [
    ('batch_fig3', {'num_runs': 3}, 'num_runs is not for this figure, whose sizes are num_drafts'),
    ('pareto_fig4', {'num_runs': 3}, 'num_runs is not for this figure, which has none'),
  ],
)
def test_sizes_that_a_figure_has_not(name, sizes, message):
  with pytest.raises(ValueError, match=message):
    _request(name, **sizes)


def test_the_command_writes_what_was_computed(tmp_path):
  out = finish(start('decode.reproduce', '--figure=batch_fig3', '--num_drafts=1,2', f'--output={tmp_path}'))
  assert sorted(path.name for path in tmp_path.iterdir()) == [f'batch_fig3.{kind}' for kind in ('csv', 'md', 'png')]
  rows = from_csv((tmp_path / 'batch_fig3.csv').read_text())
  assert rows == FIGURES['batch_fig3'].run(_request('batch_fig3', num_drafts=(1, 2)), None)
  figure = FIGURES['batch_fig3']
  assert (tmp_path / 'batch_fig3.png').read_bytes() == figure.to_png(rows)
  assert figure.tell(rows) in out


# What each figure is measured on: tiny models, and sizes as small as they can be.
_SMALL = {'num_prompts': 3, 'num_seeds': 1, 'max_new_tokens': 6, 'batch_size': 2}
_MEASURED = {
  'spectr_fig5': {'num_drafts': (1, 2)},
  'optimum': _SMALL | {'num_drafts': (1, 2)},
  'ersd_fig3': _SMALL | {'num_nodes': (5,)},
  'ersd_fig4': _SMALL | {'num_nodes': (5,)},
  'opt_uno': _SMALL | {'draft_length': (2,), 'epsilon': (0, 0.5), 'num_seeds': 2},
  'methods': _SMALL | {'num_drafts': (2,), 'draft_length': (2,)},
  'ladder': _SMALL | {'num_nodes': (4, 2)},
}


@pytest.fixture(scope='module')
def measured(pair, prompt_file):
  """`name -> rows` of a figure about a pair of models, computed once."""
  found = {}

  def measured(name):
    if name not in found:
      request = _request(name, pair, prompt_file, **_MEASURED[name])
      found[name] = _check(name, request, FIGURES[name].run(request, lambda *_: None))
    return found[name]

  return measured


def test_all_figures_about_models_are_measured_below():
  assert set(_MEASURED) == {name for name, figure in FIGURES.items() if figure.has_models}


@pytest.mark.slow
@pytest.mark.usefixtures('quickly')
def test_acceptance_on_the_laws_of_a_pair(measured):
  rows = measured('spectr_fig5')
  laws = select(rows, panel='laws')
  assert 10 <= len(laws) <= 20
  p, q = (np.array([row[model] for row in laws]) for model in ('draft', 'target'))
  np.testing.assert_allclose([p.sum(), q.sum()], 1)
  plan = theory.optimal_transport(p, q, 2)
  accepted = {(row['rule'], row['k']): row['acceptance'] for row in select(rows, panel='acceptance')}
  assert accepted['optimum', 2] == pytest.approx(plan.value, abs=CLOSE)
  for rule in ('optimum', 'spectr', 'race'):
    assert accepted[rule, 1] == pytest.approx(np.minimum(p, q).sum(), abs=CLOSE)
    assert accepted[rule, 1] < accepted[rule, 2] <= accepted['optimum', 2] + CLOSE


@pytest.mark.slow
@pytest.mark.usefixtures('quickly')
def test_shares_of_the_optimum(measured):
  rows = measured('optimum')
  acceptance = {(row['rule'], row['n']): row['value'] for row in select(rows, quantity='acceptance')}
  for row in select(rows, quantity='share of the optimum'):
    assert row['value'] == pytest.approx(acceptance[row['rule'], row['n']] / acceptance['optimum', row['n']])
    assert row['value'] <= 1 + 1e-5  # float32
    if row['n'] == 1:
      assert row['value'] == pytest.approx(1, abs=1e-5)
  assert acceptance['optimum', 2] > acceptance['optimum', 1]


@pytest.mark.slow
@pytest.mark.usefixtures('quickly')
def test_trees_are_measured(measured, monkeypatch):
  assert tree_figures.METHODS == ('gsd', 'ersd')
  monkeypatch.setattr(tree_figures, 'METHODS', ('gsd',))
  rows = measured('ersd_fig3')
  assert measured('ersd_fig4') == rows
  own = select(rows, kind='measured')
  by_line = {line: [row['N'] for row in found] for line, found in by_value(own, 'line').items()}
  assert by_line == {'batch': [5], 'sequence': [5], "SpecInfer's tree": [5], 'optimal tree': [5]}
  deepest = {'batch': 1, 'sequence': 5, "SpecInfer's tree": 3, 'optimal tree': 5}
  assert all(1 <= row['tokens'] <= 1 + deepest[row['line']] for row in own)
  # A batch's theory is what was counted in a batch of five: both were decoded with the same keys.
  [expected] = select(rows, kind='theory', line='batch', N=5)
  assert select(own, line='batch')[0]['tokens'] == pytest.approx(expected['tokens'], abs=0.3)


@pytest.mark.slow
@pytest.mark.usefixtures('quickly')
def test_over_acceptance_is_measured(measured):
  rows = measured('opt_uno')
  values = {(row['quantity'], row['method'], row['epsilon']): row['value'] for row in rows}
  assert values['bias', 'decoding_opt', 0] == pytest.approx(0, abs=CLOSE)
  assert values['bias', 'decoding_uno', 0] > 0.01
  for epsilon in (0, 0.5):
    total = values['bias', 'decoding_opt', epsilon] + values['rejection', 'both', epsilon]
    assert total == pytest.approx(values['rejection', 'both', 0])  # the front: it is the total variation
    assert values['bias', 'decoding_opt', epsilon] <= values['bias', 'decoding_uno', epsilon] + CLOSE
    assert 0 <= values['win rate', 'decoding_opt', epsilon] <= 1
    for method in ('decoding_opt', 'decoding_uno', 'autoregressive'):
      assert -math.log(320) * 2 < values['log-likelihood', method, epsilon] < 0
  # With so much over-acceptance nothing is rejected: both keep the same drafts, and nobody wins.
  assert values['rejection', 'both', 0.5] == pytest.approx(0, abs=CLOSE)
  assert values['win rate', 'decoding_opt', 0.5] == 0.5


@pytest.mark.slow
@pytest.mark.usefixtures('quickly')
def test_methods_are_measured(measured, monkeypatch):
  every = {name for name, method in METHODS.items() if method.max_drafts != 0}
  assert set(method_figures.DRAFTING) == every - {'decoding_opt', 'decoding_uno'}
  monkeypatch.setattr(method_figures, 'DRAFTING', ('speculative', 'spectr', 'spectr_gbv'))
  rows = measured('methods')
  found = {(row['method'], row['K']) for row in rows}
  assert found == {('speculative', 1), ('spectr', 2), ('spectr_gbv (not lossless)', 2)}
  assert all(1 <= row['block efficiency'] <= 3 and row['low'] <= row['block efficiency'] <= row['high'] for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures('quickly')
def test_a_ladder_is_measured(measured, monkeypatch, pair, prompt_file):
  grid = {'speculative': ((1, 1),), 'block': ((1, 1),), 'race_traversal': ((2, 1),)}
  monkeypatch.setattr(ladder_figures, 'GRID', grid)
  runs = []
  monkeypatch.setattr(ladder_figures, 'measure', lambda *what: runs.append(measure(*what)) or runs[-1])
  rows = measured('ladder')
  shapes = {key: [row['shape'] for row in own] for key, own in _by_method_and_nodes(rows).items()}
  assert {key: own for key, own in shapes.items() if key[0] != ladder_figures.BOUND} == {
    ('speculative', 2): ['1 x 2'],
    ('speculative', 4): ['1 x 2'],
    ('block', 2): ['1 x 2'],
    ('block', 4): ['1 x 2'],
    ('race_traversal', 2): ['1 x 2'],
    ('race_traversal', 4): ['2 x 2', '1 x 2'],
  }
  assert shapes[ladder_figures.BOUND, 2] == ['1 x 2', '2 x 1']
  assert shapes[ladder_figures.BOUND, 4] == ['1 x 2', '2 x 2', '1 x 4', '3 x 1', '4 x 1']
  for own in _by_method_and_nodes(rows).values():
    [best] = select(own, **{'is best': 1})
    assert best['tokens per call'] == max(row['tokens per call'] for row in own)
  for row in rows:
    assert 1 <= row['tokens per call'] <= 5
    assert row['low'] <= row['tokens per call'] <= row['high']
  # What is decoded once stands wherever it belongs, and a larger budget has what a smaller one has.
  alone = [
    row['tokens per call'] for row in select(rows, shape='1 x 2') if row['method'] in ('block', 'race_traversal')
  ]
  assert len(alone) == 4
  assert len(set(alone)) == 1
  # The bound of two drafts of one token, from the laws along what was decoded with block and race_traversal.
  workload = Workload.load(
    DecodeOptions(**pair, method=('block',), prompts=str(prompt_file), batch_size=2, max_new_tokens=6)
  )
  num_tokens, num_calls = 0, 0.0
  for found in runs[0].measurements[1:]:
    calls, texts = np.zeros((3, 8)), found.tokens
    for numbers, (p, q) in written_laws(workload, (workload.draft, workload.target), texts):
      for own, text in enumerate(numbers):
        for place in reversed(range(found.lengths[text])):
          p_own, q_own = (float(law[own, place, texts[text, place]]) for law in (p, q))
          kept, (after, later) = min(1, (1 - (1 - p_own) ** 2) / q_own), calls[text, place + 1 : place + 3]
          calls[text, place] = 1 + (1 - kept) * after + kept * min(after, later)
    num_tokens += found.lengths.sum()
    num_calls += calls[:, 0].sum()
  [row] = select(rows, method=ladder_figures.BOUND, nodes=2, shape='2 x 1')
  assert row['tokens per call'] == pytest.approx(num_tokens / num_calls, rel=1e-5)


def _by_method_and_nodes(rows):
  return by_value([row | {'key': (row['method'], row['nodes'])} for row in rows], 'key')


def test_likelihood_is_that_of_the_targets_laws(monkeypatch):
  laws = np.array([[[0.5, 0.5, 0], [0.25, 0.5, 0.25]]])
  monkeypatch.setattr(method_figures, 'written_laws', lambda *_: [(np.array([0]), (laws,))])
  workload = type('Workload', (), {'target': None})
  tokens = np.array([[1, 2]])
  assert method_figures._log_likelihood(workload, tokens)[0] == pytest.approx(math.log(0.5) + math.log(0.25))
  assert method_figures._log_likelihood(workload, np.array([[1, -1]]))[0] == pytest.approx(math.log(0.5))
