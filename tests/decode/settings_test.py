"""The grid of methods and trees."""

import jax.numpy as jnp
import pytest

from decode.experiment.options import DecodeOptions
from decode.experiment.settings import TreeSpec, expand
from spectr_jax import METHODS, Confident, Estimated, Likeliest, TokenTree
from spectr_jax.models.table import table_model


@pytest.fixture(scope='module')
def draft():
  return table_model(jnp.zeros((3, 3)))


def _shapes(**options):
  return [(setting.method.name, str(setting.spec), setting.tree) for setting in expand(DecodeOptions(**options))]


def test_every_tree_with_every_method():
  trees = 'chains', 'prefix:2,1', 'specinfer'
  found = _shapes(method=('spectr', 'gsd'), tree=trees, num_drafts=(2, 3), draft_length=(4,))
  expected = [TokenTree.chains(2, 4), TokenTree.chains(3, 4), TokenTree.prefix((2, 1)), TokenTree.specinfer(4)]
  assert [(method, tree) for method, _, tree in found] == [(m, tree) for m in ('spectr', 'gsd') for tree in expected]


def test_a_chain_may_be_written_as_factors():
  ((_, _, tree),) = _shapes(method=('block',), tree=('prefix:1,1,1',))
  assert tree == TokenTree.chains(1, 3)


def test_methods_that_draft_nothing_stand_once():
  found = _shapes(method=('autoregressive',), tree=('chains', 'prefix:2,1'), num_drafts=(2, 4))
  assert found == [('autoregressive', 'None', TokenTree())]


def test_optimal_trees_are_left_open():
  (setting,) = expand(DecodeOptions(method=('race_block',), tree=('optimal: 24',)))
  assert (setting.spec, setting.tree) == (TreeSpec('optimal', (24,)), TokenTree())
  assert str(setting) == 'race_block optimal:24'


def test_grown_trees_have_widths_and_a_drafter_of_their_own(draft):
  (setting,) = expand(DecodeOptions(method=('specinfer',), tree=('likeliest:4,3,1',)))
  assert (setting.tree, setting.draft_length) == (TokenTree.slots((4, 3, 1)), 3)
  assert str(setting) == 'specinfer likeliest:4,3,1'
  drafter = setting.drafter(draft)
  assert isinstance(drafter.growth, Likeliest)
  assert (drafter.grows, drafter.gives) == (True, True)
  (drawn,) = expand(DecodeOptions(method=('traversal',), tree=('confident:4,3',), growth_threshold=0.1))
  assert drawn.growth == Confident(threshold=0.1)
  assert not drawn.drafter(draft).gives
  (by_estimates,) = expand(DecodeOptions(method=('traversal',), tree=('estimated:4,3',), growth_threshold=0.1))
  assert (by_estimates.growth, str(by_estimates)) == (Estimated(threshold=0.1), 'traversal estimated:4,3 from 0.1')
  with pytest.raises(ValueError, match='reads estimates of acceptance, and this draft makes none'):
    by_estimates.drafter(draft)
  (other,) = expand(DecodeOptions(method=('specinfer',), tree=('prefix:4,3,1',)))
  assert other.drafter(draft) is draft


_BAD = (
  '',
  'chains:2',
  'prefix:',
  'specinfer:3',
  'optimal',
  'optimal:1,2',
  'optimal:0',
  'x',
  'likeliest',
  'likeliest:2,0',
)


@pytest.mark.parametrize('text', _BAD)
def test_bad_specifications_are_refused(text):
  with pytest.raises(ValueError, match='tree'):
    TreeSpec.parse(text)


@pytest.mark.parametrize(
  ('options', 'reason'),
  [
    ({'method': ('speculative',), 'tree': ('prefix:2,1',)}, 'single draft'),
    ({'method': ('spectr_gbv',), 'tree': ('specinfer',)}, 'chains'),
    ({'method': ('spectr_gbv',), 'tree': ('optimal:8',)}, 'chains only'),
    ({'method': ('spectr',), 'tree': ('optimal:1025',)}, 'at most 1024'),
    ({'method': ('spectr',), 'tree': ('likeliest:1000,25',)}, 'at most 1024'),
    ({'method': ('traversal',), 'tree': ('likeliest:4,4',)}, 'does not take guesses that are not drawn'),
    ({'method': ('speculative',), 'tree': ('likeliest:4,4',)}, 'single draft'),
    ({'method': ('spectr',), 'growth_threshold': 0.1}, 'is for --tree=likeliest:WIDTHS'),
    ({'method': ('spectr',), 'growth_threshold': 1.5}, 'from 0 to 1'),
    ({'method': ('spectr',), 'tree': ('prefix:32,32,2',)}, 'at most 1024'),
    ({'method': ('spectr',), 'tree': ('specinfer',), 'draft_length': (2,)}, 'at least 3'),
    ({'method': ('spectr',), 'children': 'triplets'}, "children must be one of .* got 'triplets'"),
    ({'method': ('race',), 'children': 'without_replacement'}, 'drawn independent, not without_replacement'),
    ({'method': ('decoding_opt',), 'epsilon': -1.0}, 'epsilon must be finite and at least 0'),
    ({'method': ('spectr',), 'epsilon': 0.1}, 'epsilon is for decoding_opt, decoding_uno'),
    ({'method': ('spectr',), 'gumbel': True}, 'gumbel is for autoregressive'),
  ],
)
def test_what_a_theory_does_not_cover_is_refused(options, reason):
  with pytest.raises(ValueError, match=reason):
    expand(DecodeOptions(**options))


def test_children_epsilon_and_gumbel_reach_the_methods():
  options = DecodeOptions(method=('traversal', 'autoregressive'), children='without_replacement', gumbel=True)
  traversal, autoregressive = options.methods
  assert traversal.proposal_rule.name == 'without_replacement'
  assert autoregressive.is_seed_exact
  assert autoregressive.verifier == METHODS['ersd'].verifier
  opt, spectr = DecodeOptions(method=('decoding_opt', 'spectr'), epsilon=0.25).methods
  assert opt.verifier.coupling.epsilon == 0.25
  assert spectr == METHODS['spectr']
