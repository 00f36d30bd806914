"""The registry: what a method says of itself, and combinations that would not keep the law are refused."""

import dataclasses
import re

import pytest

from spectr_jax import METHODS, TokenTree
from spectr_jax.couplings import (
  Coupling,
  Explanation,
  KSeq,
  Maximal,
  MaximalAfter,
  Outcome,
  OverAccept,
  Pick,
  Race,
  Recursive,
  Selection,
  SingleDraft,
)
from spectr_jax.methods import (
  FURTHER_METHODS,
  Guesses,
  Method,
  check_fit,
  get_method,
  register,
  why_not,
  with_children,
  with_epsilon,
  with_gumbel,
)
from spectr_jax.proposal import FirstArrivals, Independent, LikeliestAndOne, WithoutReplacement
from spectr_jax.testing import CONTROLS
from spectr_jax.verifiers import Block, GreedyBlock, SeedExact, Traversal, Verifier, Walk

CHAIN, CHAINS, PREFIX, UNEQUAL = (
  TokenTree.chains(1, 3),
  TokenTree.chains(2, 3),
  TokenTree.prefix((2, 2)),
  TokenTree((0, 0, 1, 1, 2, 4)),
)
RULES = {rule.name: rule for rule in (Independent(), WithoutReplacement(), FirstArrivals(), LikeliestAndOne())}
# What each method's children may be; only traversal verification has two versions.
CHILDREN = {name: {'independent'} for name in METHODS} | {
  'gsd': {'without_replacement'},
  'ersd': {'first_arrivals'},
  'traversal': {'independent', 'without_replacement'},
  'univer': {'likeliest_and_one'},
}


def test_the_methods():
  assert list(METHODS)[:17] == [  # others may have been registered
    'autoregressive', 'speculative', 'spectr', 'specinfer', 'batch', 'gsd', 'ersd', 'block', 'greedy_block',
    'spectr_gbv', 'race', 'race_block', 'traversal', 'univer', 'race_traversal', 'decoding_opt', 'decoding_uno',
  ]  # fmt: skip
  assert not METHODS.keys() & CONTROLS.keys()
  # Twice the same would be two names for one thing.
  assert len({dataclasses.replace(method, name='', source='', bias='') for method in METHODS.values()}) == len(METHODS)


@pytest.mark.parametrize('method', METHODS.values(), ids=lambda method: method.name)
def test_what_a_method_says_of_itself(method):
  assert METHODS[method.name] is method
  assert get_method(method.name) is method
  assert get_method(method) is method
  assert method.source
  assert bool(method.bias) == (not method.is_lossless)
  # The one method for which keys by position are right is the one whose verifier shares its noise with drafting.
  assert method.is_seed_exact == isinstance(method.verifier, SeedExact)
  assert hash(method) == hash(dataclasses.replace(method))


def _names(attribute):
  return {name for name, method in METHODS.items() if getattr(method, attribute)}


def test_what_a_method_takes():
  blocks = {'block', 'race_block', 'traversal', 'univer', 'race_traversal'}
  greedy, biased = {'greedy_block', 'spectr_gbv'}, {'decoding_opt', 'decoding_uno'}
  token_level = METHODS.keys() - blocks - greedy
  assert _names('takes_given') == token_level | {'race_block', 'race_traversal'}
  assert _names('takes_mixed') == {'race', 'race_block', 'race_traversal'}
  assert _names('takes_grown') == METHODS.keys() - greedy - {'univer'}
  assert _names('tries_every_branch') == {'univer', 'race_traversal'}
  assert {name for name, method in METHODS.items() if method.verifier.is_biased} == biased
  assert _names('is_lossless') == METHODS.keys() - biased - {'spectr_gbv'}
  assert not any(method.is_lossless for method in CONTROLS.values())


@pytest.mark.parametrize('name', list(METHODS))
def test_trees_that_grow(name):
  method, bounds = METHODS[name], TokenTree.slots((1, 1) if METHODS[name].max_drafts == 1 else (2, 3))
  if method.takes_grown:
    assert method.tree_for(bounds) == (TokenTree() if method.max_drafts == 0 else bounds)
    return
  with pytest.raises(ValueError, match=f'^{name} needs one tree for all rows: it does not take trees that grow'):
    method.tree_for(bounds)


_DRAFTING = METHODS.keys() - {'autoregressive'}
_SINGLE = {'speculative', 'block', 'greedy_block', 'decoding_opt', 'decoding_uno'}
_MIXED = {'race', 'race_block', 'race_traversal'}


@pytest.mark.parametrize(
  ('tree', 'guesses', 'taken_by'),
  [
    (None, None, _DRAFTING),
    (TokenTree(), None, set()),
    (TokenTree.chains(1, 2), Guesses(max_depth=2), _DRAFTING),
    (TokenTree.chains(1, 3), Guesses(max_depth=2), set()),
    (TokenTree.chains(2, 2), Guesses(), _DRAFTING - _SINGLE),
    (TokenTree.prefix((2, 2)), Guesses(), _DRAFTING - _SINGLE - {'spectr_gbv'}),
    (TokenTree.slots((2, 2)), Guesses(has_grown_trees=True), _DRAFTING - _SINGLE - {'spectr_gbv', 'univer'}),
    (TokenTree.slots((2, 2)), Guesses(), set()),
    (TokenTree.chains(2, 2), Guesses(has_grown_trees=True), set()),
    (None, Guesses(has_given_candidates=True, has_mixed_positions=True), _MIXED),
    (
      TokenTree.chains(2, 2),
      Guesses(has_given_candidates=True),
      _MIXED | {'spectr', 'specinfer', 'batch', 'gsd', 'ersd'},
    ),
    (None, Guesses(feature_layers=(1,)), _DRAFTING - {'greedy_block', 'spectr_gbv'}),
    (None, Guesses(kv_layers=(1,)), _DRAFTING - {'greedy_block', 'spectr_gbv'}),
  ],
)
def test_why_not(tree, guesses, taken_by):
  assert {name for name in _DRAFTING if not why_not(METHODS[name], tree, guesses)} == taken_by
  check_fit(METHODS['autoregressive'], tree, guesses)
  for name in _DRAFTING - taken_by:
    with pytest.raises(ValueError, match=f'^{re.escape(why_not(METHODS[name], tree, guesses))}') as refusal:
      check_fit(METHODS[name], tree, guesses)
    allowed = str(refusal.value).partition('; allowed: ')[2]
    assert set(allowed.split(', ')) == (taken_by or {''})


class _Silent(Coupling):
  proposal_rules = (Independent,)

  def __call__(self, draft_probs, target_probs, candidates, is_valid):
    return Outcome(0 * is_valid, target_probs)


class _SilentSelection(Selection):
  def __call__(self, draft_probs, target_probs, candidates, is_valid):
    return Pick(0 * is_valid, target_probs, 0 * is_valid)


class _Telling(_Silent):
  explanation = Explanation('Nothing is accepted.', 'q')


def test_words_of_a_rule_of_ones_own_are_shown():
  after, block = (kind(_SilentSelection()) for kind in (MaximalAfter, Block))
  for verifier in (Walk(_Silent()), Walk(after), block, Walk(_Silent(), is_pooled=False)):
    assert verifier.explanation == Explanation()
  assert Walk(_Telling()).explanation == _Telling.explanation
  alone = Walk(_Telling(), is_pooled=False).explanation
  assert alone.rule == 'Nothing is accepted. After the first position only the accepted draft goes on.'
  # Siblings that differ have no copies to pool.
  assert METHODS['gsd'].verifier.explanation == Recursive(with_replacement=False).explanation
  assert Walk(MaximalAfter(SingleDraft())).explanation == Maximal().explanation
  assert Block(Race()).explanation.residual == '[Pq − p̃]₊'


@dataclasses.dataclass(frozen=True)
class Nothing(Verifier):
  """Keeps nothing: what a verifier of one's own has to write, and no more."""

  proposal_rules = (Independent, WithoutReplacement)

  def verify(self, keys, tree, proposal, target_probs, state):
    return 'verdict', keys, tree, proposal, target_probs, state

  def law(self, tree, proposal, target_probs, state):
    raise NotImplementedError


def test_what_a_verifier_of_ones_own_has_without_writing_it():
  verifier = Nothing()
  method = Method('mine', verifier, Independent(), is_lossless=True, source='none')
  assert not any((method.takes_given, method.takes_mixed, method.takes_grown, method.tries_every_branch))
  assert verifier.init_state(CHAIN) == ()
  assert verifier.advance(CHAIN, None, None, (), 0, 0) == ()
  assert verifier.explain(1, CHAIN, 2, 3, ()) == (('verdict', 1, CHAIN, 2, 3, ()), None)
  assert verifier.explanation == Explanation('', '')
  assert with_epsilon(method, 0.1) is method
  assert with_children(method, 'without_replacement').verifier is verifier
  with pytest.raises(TypeError, match='abstract'):
    Verifier()


def test_verifiers_are_built_on_couplings_and_selections():
  for build, part in ((Walk, 'coupling'), (Block, 'selection'), (MaximalAfter, 'selection')):
    with pytest.raises(ValueError, match=f'^{part} must be a subclass of spectr_jax.couplings.{part.title()}, got <'):
      build(lambda *_: None)


@pytest.mark.parametrize(
  ('verifier', 'rule', 'allowed'),
  [
    (Walk(Maximal()), WithoutReplacement(), 'independent'),
    (Walk(KSeq()), WithoutReplacement(), 'independent'),
    (Walk(KSeq()), FirstArrivals(), 'independent'),
    (Walk(Recursive()), WithoutReplacement(), 'independent'),
    (Walk(Recursive(with_replacement=False)), Independent(), 'without_replacement'),
    (Walk(Recursive(with_replacement=False)), FirstArrivals(), 'without_replacement'),
    (METHODS['race'].verifier, WithoutReplacement(), 'independent'),
    (METHODS['race_block'].verifier, WithoutReplacement(), 'independent'),
    (METHODS['block'].verifier, FirstArrivals(), 'independent'),
    (GreedyBlock(), WithoutReplacement(), 'independent'),
    (Traversal(), WithoutReplacement(), 'independent'),
    (Traversal(with_replacement=False), Independent(), 'without_replacement'),
    (SeedExact(), Independent(), 'first_arrivals'),
    (SeedExact(), WithoutReplacement(), 'first_arrivals'),
    (Walk(OverAccept(0.1, has_best_residual=True)), WithoutReplacement(), 'independent'),
  ],
)
def test_children_that_a_verifier_is_not_right_for_are_refused(verifier, rule, allowed):
  message = f"mine has the target's distribution only if children are drawn {allowed}, not {rule.name}"
  with pytest.raises(ValueError, match=message):
    Method('mine', verifier, rule, is_lossless=True, source='none')
  Method('mine', verifier, RULES[allowed], is_lossless=True, source='none')


@pytest.mark.parametrize('name', list(METHODS))
def test_trees_that_a_theory_does_not_cover_are_refused(name):
  method = METHODS[name]
  if name == 'autoregressive':
    for tree in (None, TokenTree(), CHAIN, CHAINS):
      assert method.tree_for(tree) == TokenTree()
    return
  refused = dict.fromkeys((None, TokenTree()), f'{name} needs guesses: give it a tree, such as')
  if name in ('speculative', 'block', 'greedy_block', 'decoding_opt', 'decoding_uno'):
    message = f'{name} verifies a single draft: the tree must be a chain'
    refused |= dict.fromkeys((CHAINS, PREFIX, UNEQUAL, TokenTree.chains(2, 1)), message)
  elif name == 'spectr_gbv':
    message = f'{name} is defined for drafts of equal length .* the tree must be chains'
    refused |= dict.fromkeys((PREFIX, UNEQUAL), message)
  for tree, message in refused.items():
    with pytest.raises(ValueError, match=message):
      method.tree_for(tree)
  for tree in {CHAIN, CHAINS, PREFIX, UNEQUAL} - refused.keys():
    assert method.tree_for(tree) is tree


@pytest.mark.parametrize('name', list(METHODS))
@pytest.mark.parametrize('children', list(RULES))
def test_other_children(name, children):
  if children not in CHILDREN[name]:
    with pytest.raises(ValueError, match=f'{name} .* only if children are drawn .* not {children}'):
      with_children(METHODS[name], children)
    return
  method = with_children(METHODS[name], children)
  assert method.proposal_rule == RULES[children]
  assert with_children(method, children) == method
  assert (method == METHODS[name]) == (METHODS[name].proposal_rule.name == children)
  if name == 'traversal':
    assert method.verifier == Traversal(with_replacement=children == 'independent')
    assert with_children(method, 'independent') == METHODS['traversal']


def test_unknown_names_are_refused():
  message = 'children must be one of independent, without_replacement, first_arrivals, likeliest_and_one, got .sorted.'
  with pytest.raises(ValueError, match=message):
    with_children(METHODS['traversal'], 'sorted')
  with pytest.raises(ValueError, match='unknown method .guessing.; allowed: autoregressive, speculative, spectr'):
    get_method('guessing')


def test_a_number_of_candidates_may_be_limited():
  method = Method('mine', Walk(KSeq()), Independent(), is_lossless=True, source='none', max_drafts=2)
  assert method.tree_for(TokenTree.chains(2, 3)) == TokenTree.chains(2, 3)
  for tree in (TokenTree.chains(3, 2), TokenTree.prefix((2, 2))):  # four nodes below two equal tokens are one pool
    with pytest.raises(ValueError, match=r'at most 2 candidates of a position, but the tree has [34] nodes'):
      method.tree_for(tree)


def test_epsilon():
  for name in ('decoding_opt', 'decoding_uno'):
    method = with_epsilon(METHODS[name], 0.3)
    assert method.verifier.coupling == OverAccept(0.3, has_best_residual=name == 'decoding_opt')
    assert with_epsilon(method, METHODS[name].verifier.coupling.epsilon) == METHODS[name]
    with pytest.raises(ValueError, match='epsilon must be at least 0, got -0.1'):
      with_epsilon(METHODS[name], -0.1)
  # With none of it, the best residual alone is lossless.
  opt, uno = (with_epsilon(METHODS[name], 0.0) for name in ('decoding_opt', 'decoding_uno'))
  assert (opt.is_lossless, opt.bias, uno.is_lossless, bool(uno.bias)) == (True, '', False, True)
  # Nothing else accepts more than it may, by however much.
  for name in METHODS.keys() - {'decoding_opt', 'decoding_uno'}:
    assert with_epsilon(METHODS[name], 0.3) is METHODS[name]


def test_gumbel():
  method, ersd = with_gumbel(METHODS['autoregressive']), METHODS['ersd']
  assert method.is_seed_exact
  assert method.is_lossless
  assert (method.verifier, method.proposal_rule) == (ersd.verifier, ersd.proposal_rule)
  assert method.tree_for(CHAINS) == TokenTree()
  for name in METHODS.keys() - {'autoregressive'}:
    with pytest.raises(ValueError, match=f'{name} drafts; Gumbel-max sampling with shared keys is autoregressive'):
      with_gumbel(METHODS[name])


def test_a_control_differs_from_a_method_in_what_is_broken_alone():
  for name, keyed in (('block', 'block_keyed_by_position'), ('race_block', 'race_block_keyed_by_position')):
    control = CONTROLS[keyed]
    same = {field: getattr(METHODS[name], field) for field in ('name', 'source', 'is_lossless')}
    assert dataclasses.replace(control, **same, is_seed_exact=False) == METHODS[name]
  assert isinstance(CONTROLS['race_block_one_ticket'].verifier, Block)


def test_further_methods_are_found_by_name():
  assert list(FURTHER_METHODS) == ['ratio_block', 'race_layers']
  assert not FURTHER_METHODS.keys() & (METHODS.keys() | CONTROLS.keys())
  for name, method in FURTHER_METHODS.items():
    assert get_method(name) is method
    assert method.name == name
    assert method.is_lossless
    with pytest.raises(ValueError, match=f"there is another method named '{name}'"):
      register(dataclasses.replace(METHODS['block'], name=name))
