"""The grid of methods and trees."""

import jax.numpy as jnp
import pytest

from decode.experiment.options import DecodeOptions
from decode.experiment.settings import TreeSpec, expand, parse_shape, shape_name
from spectr_jax import METHODS, TokenTree
from spectr_jax.draft import Confident, Estimated, Likeliest
from spectr_jax.models.table import table_model


@pytest.fixture(scope='module')
def draft():
  return table_model(jnp.zeros((3, 3)))


def _shapes(**options):
  return [(setting.method.name, setting.tree_name, setting.tree) for setting in expand(DecodeOptions.of(**options))]


def test_the_grid_has_every_tree_of_every_method_once():
  methods = 'autoregressive', 'speculative', 'spectr'
  settings = expand(DecodeOptions.of(method=methods, num_drafts=(2, 4, 2), draft_length=(3, 5)))
  assert [str(setting) for setting in settings] == [
    'autoregressive', 'speculative K=1 L=3', 'speculative K=1 L=5', 'spectr K=2 L=3', 'spectr K=4 L=3',
    'spectr K=2 L=5', 'spectr K=4 L=5',
  ]  # fmt: skip
  trees = 'chains', 'prefix:2,1', 'specinfer'
  shapes = _shapes(method=('spectr', 'gsd'), tree=trees, num_drafts=(2, 3), draft_length=(4,))
  expected = [TokenTree.chains(2, 4), TokenTree.chains(3, 4), TokenTree.prefix((2, 1)), TokenTree.specinfer(4)]
  assert [(method, tree) for method, _, tree in shapes] == [(m, tree) for m in ('spectr', 'gsd') for tree in expected]
  ((_, _, tree),) = _shapes(method=('block',), tree=('prefix:1,1,1',))
  assert tree == TokenTree.chains(1, 3)
  shapes = _shapes(method=('autoregressive',), tree=('chains', 'prefix:2,1'), num_drafts=(2, 4))
  assert shapes == [('autoregressive', 'none', TokenTree())]
  (setting,) = expand(DecodeOptions.of(method=('race_block',), tree=('optimal: 24',)))
  assert (setting.budget, setting.tree) == (24, TokenTree())
  assert str(setting) == 'race_block optimal:24'


def test_shapes_are_named_and_read():
  for name, factors in (('4 x 3', (4, 1, 1)), ('1 x 1', (1,)), ('prefix:2,2,1', (2, 2, 1))):
    assert (shape_name(factors), parse_shape(name)) == (name, factors)
  for text in ('4x3', '4 x 0', '0 x 4', 'prefix:', 'prefix:2,0'):
    with pytest.raises(ValueError, match='a shape is written as'):
      parse_shape(text)


def test_grown_trees_have_widths_and_a_drafter_of_their_own(draft):
  (setting,) = expand(DecodeOptions.of(method=('specinfer',), tree=('likeliest:4,3,1',)))
  assert (setting.tree, setting.draft_length) == (TokenTree.slots((4, 3, 1)), 3)
  assert str(setting) == 'specinfer likeliest:4,3,1'
  drafter = setting.drafter(draft)
  assert isinstance(drafter.growth, Likeliest)
  assert (drafter.has_grown_trees, drafter.has_given_candidates) == (True, True)
  (drawn,) = expand(DecodeOptions.of(method=('traversal',), tree=('confident:4,3',), growth_threshold=0.1))
  assert drawn.growth == Confident(threshold=0.1)
  assert not drawn.drafter(draft).has_given_candidates
  (by_estimates,) = expand(DecodeOptions.of(method=('traversal',), tree=('estimated:4,3',), growth_threshold=0.1))
  assert (by_estimates.growth, str(by_estimates)) == (Estimated(threshold=0.1), 'traversal estimated:4,3 from 0.1')
  with pytest.raises(ValueError, match='reads estimates of acceptance, and this draft makes none'):
    by_estimates.drafter(draft)
  (other,) = expand(DecodeOptions.of(method=('specinfer',), tree=('prefix:4,3,1',)))
  assert other.drafter(draft) is draft


@pytest.mark.parametrize(
  'text',
  ['', 'chains:2', 'prefix:', 'specinfer:3', 'optimal', 'optimal:1,2', 'optimal:0', 'x', 'likeliest', 'likeliest:2,0'],
)
def test_bad_specifications_are_refused(text):
  with pytest.raises(ValueError, match='tree'):
    TreeSpec.parse(text)


_SPECTR, _AUTO, _LOOKUP = {'method': ('spectr',)}, {'method': ('auto',)}, {'draft': 'lookup'}


@pytest.mark.parametrize(
  ('options', 'reason'),
  [
    # Single values.
    ({'method': ()}, f'no method given; allowed: {", ".join(METHODS)}'),
    ({'method': ('spectr', 'magic')}, f"unknown method 'magic'.*{', '.join(METHODS)}"),
    ({'num_drafts': ()}, 'num_drafts must be whole numbers of at least 1'),
    ({'num_drafts': (2, 0)}, 'num_drafts must be whole numbers of at least 1, got 2, 0'),
    ({'draft_length': (-1,)}, 'draft_length must be whole numbers of at least 1, got -1'),
    ({'temperature': -0.1}, 'temperature must be finite and at least 0, got -0.1'),
    ({'temperature': float('inf')}, 'temperature must be'),
    ({'top_p': 0.0}, 'top_p must be above 0 and at most 1'),
    ({'top_p': float('nan')}, 'top_p must be'),
    ({'min_p': 1.5}, 'min_p must be from 0 to 1'),
    ({'min_p': float('nan')}, 'min_p must be'),
    ({'top_k': -1}, 'top_k must be at least 0'),
    *(({name: 0}, f'{name} must be at least 1') for name in (
      'num_prompts', 'batch_size', 'max_new_tokens', 'num_samples', 'num_seeds', 'calibration_prompts'
    )),
    ({'stop': ('\n', '')}, 'stop.* must be'),
    ({'seed': -1}, 'seeds must be from 0'),
    ({'seed': 2**32 - 1, 'num_seeds': 2}, 'seeds must be from 0'),
    ({'dtype': 'int8'}, 'dtype must be float32 or bfloat16'),
    ({'weights': 'int4'}, 'weights must be int8'),
    ({'prompt': 'x', 'prompts': 'y'}, 'prompt and prompts are both given'),
    # Methods and trees.
    ({'tree': ('bush',)}, "tree must be chains.* got 'bush'"),
    ({'num_drafts': (1000,), 'draft_length': (1000,)}, 'at most 1024'),
    ({'method': ('speculative',), 'tree': ('prefix:2,1',)}, 'single draft'),
    ({'method': ('spectr_gbv',), 'tree': ('specinfer',)}, 'chains'),
    ({'method': ('spectr_gbv',), 'tree': ('optimal:8',)}, 'chains only'),
    (_SPECTR | {'tree': ('optimal:1025',)}, 'at most 1024'),
    (_SPECTR | {'tree': ('likeliest:1000,25',)}, 'at most 1024'),
    ({'method': ('traversal',), 'tree': ('likeliest:4,4',)}, 'takes drawn candidates only, .*; allowed: spectr,'),
    ({'method': ('speculative',), 'tree': ('likeliest:4,4',)}, 'single draft'),
    (_SPECTR | {'growth_threshold': 0.1}, 'is for --tree=likeliest:WIDTHS'),
    (_SPECTR | {'growth_threshold': 1.5}, 'from 0 to 1'),
    (_SPECTR | {'tree': ('prefix:32,32,2',)}, 'at most 1024'),
    (_SPECTR | {'tree': ('specinfer',), 'draft_length': (2,)}, 'at least 3'),
    (_SPECTR | {'children': 'triplets'}, "children must be one of .* got 'triplets'"),
    (_SPECTR | {'children': 'without_replacement'}, 'spectr .*independent, not without_replacement'),
    ({'method': ('race',), 'children': 'without_replacement'}, 'drawn independent, not without_replacement'),
    ({'method': ('decoding_opt',), 'epsilon': -1.0}, 'epsilon must be finite and at least 0'),
    (_SPECTR | {'epsilon': 0.1}, 'epsilon is for decoding_opt, decoding_uno'),
    (_SPECTR | {'gumbel': True}, 'gumbel is for autoregressive'),
    # `auto`.
    ({'method': ('auto', 'spectr')}, 'only autoregressive can stand beside it, not spectr'),
    (_AUTO | {'children': 'without_replacement'}, 'its own children'),
    (_AUTO | {'tree': ('optimal:8',)}, 'chooses no optimal ones'),
    (_SPECTR | {'calibration': 'x'}, 'calibration is for --method=auto'),
    (_SPECTR | {'grid': 'short'}, 'grid is for --method=auto'),
    (_AUTO | {'grid': 'long'}, "grid must be short or full, or '' for short on CPUs, got 'long'"),
    # Lookup.
    (_LOOKUP | {'method': ('block',)}, '^block takes drawn candidates only, .*; allowed: speculative,'),
    (
      {'draft': 'lookup+here', 'method': ('spectr',)},
      '^spectr takes .* this draft mixes them; allowed: race, race_block, race_traversal$',
    ),
    (_LOOKUP | _AUTO | {'tree': ('chains', 'prefix:2,2')}, 'lookup guesses chains, and the tree is prefix:2,2'),
    (_LOOKUP | _SPECTR | {'tree': ('prefix:2,2',)}, 'lookup guesses chains'),
    (_LOOKUP | _SPECTR | {'lookup_min': 9}, 'lookup_min at most lookup_max; got 9 and 8'),
    ({'lookup_max': 4}, 'are for --draft=lookup'),
    ({'lookup_corpus': ('a.txt',)}, 'lookup_corpus is for --draft=lookup'),
    # Prompts.
    ({'system': 'be brief'}, 'system is for --chat'),
    ({'prompt': '\udcff'}, '^prompt is not valid Unicode: byte 0xff is not UTF-8$'),
    ({'system': '\udcff', 'chat': True}, '^system is not valid Unicode: byte 0xff is not UTF-8$'),
    ({'stop': ('a', '\udcff')}, "^stop '.udcff' is not valid Unicode: byte 0xff is not UTF-8$"),
  ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(options, reason):
  with pytest.raises(ValueError, match=reason):
    expand(DecodeOptions.of(**options))


def test_children_epsilon_and_gumbel_reach_the_methods():
  options = DecodeOptions.of(method=('traversal', 'autoregressive'), children='without_replacement', gumbel=True)
  traversal, autoregressive = options.methods.make()
  assert traversal.proposal_rule.name == 'without_replacement'
  assert autoregressive.is_seed_exact
  assert autoregressive.verifier == METHODS['ersd'].verifier
  opt, spectr = DecodeOptions.of(method=('decoding_opt', 'spectr'), epsilon=0.25).methods.make()
  assert opt.verifier.coupling.epsilon == 0.25
  assert spectr == METHODS['spectr']
