"""Verifiers: draws follow their own laws, laws agree where two methods are one, and what a program is made of."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import METHODS, Proposal, SamplingParams, TokenTree, with_children, with_epsilon
from spectr_jax.couplings import Race
from spectr_jax.row_tree import RowTree
from spectr_jax.sampling import arrivals, first_arrival, logits_to_probs
from spectr_jax.testing import chi_square
from spectr_jax.verify.greedy_block import Modifications
from spectr_jax.verify.race_traversal import RACES_AT_ONCE

# Every method, traversal verification in both its versions.
ALL = {**METHODS, 'traversal_without_replacement': with_children(METHODS['traversal'], 'without_replacement')}
CHAIN, CHAINS = TokenTree.chains(1, 3), TokenTree.chains(2, 3)
# 0 -> (1 -> (3, 4 -> 6), 2 -> 5): leaves at depths 2 and 3, nodes of a depth with 2, 1 and no children.
UNEQUAL = TokenTree((0, 0, 1, 1, 2, 4))
# 0 -> (1 -> 3, 2).
SMALL = TokenTree((0, 0, 1))
# A few sums of float64 products.
EXACT = 1e-12


def _random_law(rng, vocab_size, zero_share=0.0):
  law = rng.dirichlet(np.ones(vocab_size)) * (rng.random(vocab_size) >= zero_share)
  return law / law.sum() if law.any() else np.eye(vocab_size)[rng.integers(vocab_size)]


def _guesses(seed, tree, vocab_size, tokens=None, *, zero_share=0.0, equal_share=0.0, agreement=0.0, laws=None):
  """A proposal and the target's laws for one row, float64; nodes that spell the same have the same laws.

  Args:
    seed: Seed of the laws.
    tree: The tree.
    vocab_size: V.
    tokens: The guesses, or None to draw them from the laws, children independent of each other.
    zero_share: Chance that a probability is 0.
    equal_share: Chance that the target's law is the draft's.
    agreement: How much of it is the draft's otherwise.
    laws: Draft laws of some contexts, by their tokens.
  """
  rng = np.random.default_rng(seed)
  drafts, targets = dict(laws or {}), {}
  spelled, chosen = [()], []
  for node in range(tree.num_nodes + 1):
    if node:
      parent = spelled[tree.parent_of[node]]
      token = rng.choice(vocab_size, p=drafts[parent]) if tokens is None else tokens[node - 1]
      chosen.append(token)
      spelled.append((*parent, token))
    context = spelled[node]
    if context not in targets:
      drafts.setdefault(context, _random_law(rng, vocab_size, zero_share))
      share = 1.0 if rng.random() < equal_share else agreement
      targets[context] = share * drafts[context] + (1 - share) * _random_law(rng, vocab_size, zero_share)
  proposal = Proposal(
    np.array(chosen, np.int32).reshape(tree.num_nodes),
    np.array([drafts[spelled[node]] for node in tree.parent_nodes]).reshape(-1, vocab_size),
  )
  return proposal, np.array([targets[context] for context in spelled])


def _stack(rows):
  return jax.tree.map(lambda *x: np.stack(x), *rows)


# Draws and laws.

_DUPLICATES = [2, 2, 0, 1, 0, 3]  # nodes 1 and 2, and below them 3 and 5, spell the same
_DISTINCT = [2, 4, 0, 1, 0, 3]
_RAN_OUT = [2, -1, 0, 1, 4, 3]  # the root's law has one token ...
_RAN_OUT_BELOW = [2, 4, 0, -1, 0, 3]  # ... or that after it; what stands below a missing node means nothing
_ONE = np.eye(5)
_DRAWS = [
  ('autoregressive', TokenTree(), [], {}),
  ('speculative', CHAIN, [2, 0, 1], {}),
  ('spectr', UNEQUAL, _DUPLICATES, {}),
  ('specinfer', UNEQUAL, _DUPLICATES, {}),
  ('batch', UNEQUAL, _DUPLICATES, {}),
  ('gsd', UNEQUAL, _DISTINCT, {}),
  ('gsd', UNEQUAL, _RAN_OUT, {(): _ONE[2]}),
  ('gsd', UNEQUAL, _RAN_OUT_BELOW, {(2,): _ONE[0]}),
  ('block', CHAIN, [2, 0, 1], {}),
  ('greedy_block', CHAIN, [2, 0, 1], {}),
  ('spectr_gbv', CHAINS, [2, 2, 0, 1, 1, 3], {}),
  ('race', SMALL, [2, 2, 0], {}),
  ('race', SMALL, [4, 2, 0], {}),
  ('race_block', SMALL, [2, 2, 0], {}),
  ('race_block', SMALL, [4, 2, 0], {}),
  ('race_traversal', UNEQUAL, _DUPLICATES, {}),
  ('race_traversal', UNEQUAL, _DISTINCT, {}),
  ('race_traversal', CHAINS, [2, 2, 0, 1, 1, 3], {}),
  ('traversal', UNEQUAL, _DUPLICATES, {}),
  ('traversal_without_replacement', UNEQUAL, _DISTINCT, {}),
  ('traversal_without_replacement', UNEQUAL, _RAN_OUT, {(): _ONE[2]}),
  ('traversal_without_replacement', UNEQUAL, _RAN_OUT_BELOW, {(2,): _ONE[0]}),
  ('decoding_opt', CHAIN, [2, 0, 1], {}),
  ('decoding_uno', CHAIN, [2, 0, 1], {}),
]
# By default one of each kind, the others among the slow tests.
_KINDS = 'speculative', 'spectr', 'gsd', 'greedy_block', 'race_block', 'race_traversal', 'traversal'
_FIRST = [next(case for case in _DRAWS if case[0] == name) for name in _KINDS]
_DRAWS = [pytest.param(*case, marks=() if case in _FIRST else pytest.mark.slow) for case in _DRAWS]
# Two rounds ago a draft of three was cut after its first token, and now one after its root.
_HELD_BACK = Modifications(np.array([1.5, 0.8], np.float32), np.array([1, 2], np.int32))


@functools.partial(jax.jit, static_argnames=('verifier', 'tree', 'num_draws'))
def _draw(key, proposal, target_probs, state, *, verifier, tree, num_draws):
  keys = jax.random.split(key, (num_draws, tree.max_depth + 1))
  verdict = jax.vmap(lambda keys: verifier.verify(keys, tree, proposal, target_probs, state))(keys)
  node = jnp.take_along_axis(jnp.pad(verdict.path, ((0, 0), (1, 0))), verdict.num_accepted[:, None], axis=1)[:, 0]
  return verdict, node


# Laws are long programs that run once: compiling them well would take longer than running them does.
_law_jit = functools.partial(
  jax.jit,
  static_argnames=('verifier', 'tree'),
  compiler_options={'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True},
)


@_law_jit
def _law(proposal, target_probs, state, *, verifier, tree):
  return verifier.law(tree, proposal, target_probs, state)


@_law_jit
def _laws(proposals, target_probs, *, verifier, tree):
  return jax.vmap(lambda proposal, targets: verifier.law(tree, proposal, targets, verifier.init_state(tree)))(
    proposals, target_probs
  )


def _float32(tree):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else x.dtype), tree)


def test_draws_of_every_method_are_tested():
  # What a race with shared noise emits is tested token for token instead.
  assert {case.values[0] for case in _DRAWS} | {'ersd'} == set(ALL)


@pytest.mark.parametrize(('name', 'tree', 'tokens', 'laws'), _DRAWS)
def test_draws_follow_the_law(name, tree, tokens, laws):
  """Given the guesses: how often `verify` stops at each node with each token, and what `law` says of it."""
  verifier = ALL[name].verifier
  proposal, target_probs = _float32(_guesses(13, tree, 5, tokens, agreement=0.5, laws=laws))
  states = [verifier.init_state(tree)] + [_HELD_BACK] * (name in ('greedy_block', 'spectr_gbv'))
  # A race solves its fit for every row anew.
  num_draws = 40_000 if name in ('race', 'race_block') else 200_000
  for state in map(_float32, states):
    law = np.asarray(_law(proposal, target_probs, state, verifier=verifier, tree=tree), np.float64)
    assert law.shape == (tree.num_nodes + 1, 5)
    assert law.sum() == pytest.approx(1, abs=1e-5)
    assert (law >= 0).all()
    verdict, node = _draw(
      jax.random.key(8), proposal, target_probs, state, verifier=verifier, tree=tree, num_draws=num_draws
    )
    assert verdict.next_token.dtype == verdict.num_accepted.dtype == verdict.path.dtype == jnp.int32
    node, token, path = (np.asarray(x) for x in (node, verdict.next_token, verdict.path))
    np.testing.assert_array_equal(verdict.num_accepted, tree.depths[node])
    is_accepted = np.arange(tree.max_depth) < tree.depths[node][:, None]
    np.testing.assert_array_equal(np.where(is_accepted, path, -1), tree.paths[node])
    assert ((path >= 0) & (path <= tree.num_nodes)).all()
    if -1 in tokens:  # nothing below a missing node is reached
      missing = 1 + tokens.index(-1)
      assert not tree.ancestors[node][:, missing].any()
    result = chi_square(np.bincount(node * 5 + token, minlength=law.size), law)
    assert result.num_samples == num_draws
    assert result.num_cells > 4
    assert result.p_value > 1e-3, result


@pytest.mark.parametrize(
  'name',
  [
    'block', 'race_traversal',
    *(pytest.param(name, marks=pytest.mark.slow) for name in ('greedy_block', 'race_block', 'traversal')),
  ],
)  # fmt: skip
def test_a_path_may_be_less_likely_than_any_float32(name):
  """Fourteen tokens that the target likes a thousand times less than the draft, then as many that it likes more."""
  tree = TokenTree.chains(1, 28)
  unlikely, likely = [0.9, 0.1 - 9e-4, 9e-4], [9e-4, 0.1 - 9e-4, 0.9]
  first = np.arange(28)[:, None] < 14
  proposal = Proposal(np.zeros(28, np.int32), np.where(first, unlikely, likely))
  target_probs = np.concatenate([np.where(first, likely, unlikely), [[0.2, 0.3, 0.5]]])
  verifier = ALL[name].verifier
  law = np.asarray(_law(*_float32((proposal, target_probs)), verifier.init_state(tree), verifier=verifier, tree=tree))
  with jax.enable_x64(True):
    exact = np.asarray(_law(proposal, target_probs, verifier.init_state(tree), verifier=verifier, tree=tree))
  assert exact[-1].sum() > 0.9  # what was lost on the way down is made up for: all is kept
  np.testing.assert_allclose(law, exact, rtol=1e-3, atol=1e-6)


def test_draws_that_do_not_follow_the_law_are_noticed():
  """The test can tell: verifiers that all keep the target's law differ in what they accept, given the guesses."""
  proposal, target_probs = _float32(_guesses(13, UNEQUAL, 5, _DUPLICATES, agreement=0.5))
  verdict, node = _draw(
    jax.random.key(8), proposal, target_probs, (), verifier=ALL['spectr'].verifier, tree=UNEQUAL, num_draws=200_000
  )
  counts = np.bincount(np.asarray(node) * 5 + np.asarray(verdict.next_token), minlength=35)
  for name in ('specinfer', 'batch', 'traversal'):
    law = np.asarray(_law(proposal, target_probs, (), verifier=ALL[name].verifier, tree=UNEQUAL))
    assert chi_square(counts, law).p_value < 1e-9


@pytest.mark.parametrize(('name', 'tree'), [('greedy_block', CHAIN), ('spectr_gbv', CHAINS)])
def test_the_state_is_advanced_as_the_law_assumes(name, tree):
  verifier = ALL[name].verifier
  tokens = [2, 0, 1] if tree is CHAIN else [2, 2, 0, 1, 1, 3]
  proposal, target_probs = _float32(_guesses(13, tree, 5, tokens, agreement=0.5))
  for state in (verifier.init_state(tree), _HELD_BACK):
    verdict, node = _draw(
      jax.random.key(9), proposal, target_probs, state, verifier=verifier, tree=tree, num_draws=2000
    )
    after = jax.jit(
      jax.vmap(lambda node, token: verifier.advance(tree, proposal, target_probs, state, node, token))  # noqa: B023
    )(node, verdict.next_token)
    np.testing.assert_array_equal(verdict.state.left, after.left)
    np.testing.assert_allclose(verdict.state.log_ratio, after.log_ratio, rtol=1e-6, atol=1e-6)
    # Stopping d short of the end leaves d - 1 positions to modify; after a whole path all is as if new.
    np.testing.assert_array_equal(after.left[:, -1], np.maximum(tree.max_depth - tree.depths[node] - 1, 0))
    is_whole = np.asarray(tree.depths[node] == tree.max_depth)
    assert is_whole.any()
    assert (np.asarray(after.left)[is_whole] == 0).all()


def test_an_exponential_race_has_no_finite_law():
  proposal, target_probs = _guesses(0, UNEQUAL, 5, _DISTINCT)
  with pytest.raises(NotImplementedError, match='proven token for token'):
    ALL['ersd'].verifier.law(UNEQUAL, proposal, target_probs, ())


# Closed forms, and methods that are one method on some trees; in float64, with zeros and with laws that agree.


def _many_guesses(tree, count=40):
  rows = [_guesses(seed, tree, 4, zero_share=0.25, equal_share=0.2) for seed in range(count)]
  rows += [_guesses(seed, tree, 4) for seed in range(count, 2 * count)]
  return rows


def _law64(name, tree, rows, **options):
  method = ALL[name] if isinstance(name, str) else name
  with jax.enable_x64(True):
    laws = np.asarray(_laws(*jax.tree.map(jnp.asarray, _stack(rows)), verifier=method.verifier, tree=tree, **options))
  assert laws.dtype == np.float64
  np.testing.assert_allclose(laws.sum((1, 2)), 1, rtol=0, atol=EXACT)
  return laws


def _normalised(weights, otherwise):
  return weights / weights.sum() if weights.sum() > 0 else otherwise


def _one_draft(proposal, targets, chance, left):
  """The law of a block method on one draft: the longest part kept, each kept with its own chance.

  `chance(i, v, p, q)` keeps the first i tokens, where v says how likely they are and the laws follow them;
  `left(v, p, q)` are the weights of the next token.
  """
  tokens, drafts = proposal.tokens, proposal.probs
  length = len(tokens)
  law, nothing_longer = np.zeros_like(targets), 1.0
  ratios = [targets[i, tokens[i]] / drafts[i, tokens[i]] for i in range(length)]
  for i in reversed(range(length + 1)):
    p = drafts[i] if i < length else None
    kept = chance(i, ratios[:i], p, targets[i]) if i else 1.0
    weights = targets[i] if i == length else left(ratios[:i], p, targets[i])
    law[i] = nothing_longer * kept * _normalised(weights, targets[i])
    nothing_longer *= 1 - kept
  return law


def _clipped(ratios):
  return functools.reduce(lambda kept, ratio: min(1.0, kept * ratio), ratios, 1.0)


def test_block_verification_in_closed_form():
  """P is the clipped product of ratios, h = S/(S + 1 - P) with S the sum of [P q - p]+ (Sun et al. 2024)."""

  def left(ratios, p, q):
    return np.maximum(_clipped(ratios) * q - p, 0)

  def chance(i, ratios, p, q):
    kept = _clipped(ratios)
    if p is None:
      return kept
    mass = left(ratios, p, q).sum()
    return mass / (mass + 1 - kept) if mass + 1 - kept > 1e-13 else 1.0

  rows = _many_guesses(CHAIN)
  expected = [_one_draft(*row, chance, left) for row in rows]
  for name in ('block', 'race_block', 'race_traversal', 'traversal', 'traversal_without_replacement'):
    np.testing.assert_allclose(_law64(name, CHAIN, rows), expected, rtol=0, atol=EXACT, err_msg=name)


def test_greedy_block_verification_in_closed_form():
  """v is the product of ratios, h = min(1, sum of [v q - p]+ / sum of [p - v q]+), and at the end min(1, v)."""

  def left(ratios, p, q):
    return np.maximum(np.prod(ratios) * q - p, 0)

  def chance(i, ratios, p, q):
    v = np.prod(ratios)
    if p is None:
      return min(1.0, v)
    gained, lost = left(ratios, p, q).sum(), np.maximum(p - v * q, 0).sum()
    return min(1.0, gained / lost) if lost > 1e-13 else 1.0

  rows = _many_guesses(CHAIN)
  expected = [_one_draft(*row, chance, left) for row in rows]
  for name in ('greedy_block', 'spectr_gbv'):
    np.testing.assert_allclose(_law64(name, CHAIN, rows), expected, rtol=0, atol=EXACT, err_msg=name)


def test_greedy_block_keeps_whatever_is_likelier_under_the_target():
  """h is 1 for v >= 1; as a quotient of float32 sums that nearly vanish it would now and then be anything."""
  tree, vocab_size, rows = TokenTree.chains(1, 2), 4096, []
  for seed in range(40):
    rng = np.random.default_rng(seed)
    targets = rng.dirichlet(np.ones(vocab_size), 3)
    drafts = targets[:2] * np.exp(0.05 * rng.normal(size=(2, vocab_size)))
    first = np.argmax(targets[0] / drafts[0])
    drafts /= drafts.sum(axis=1, keepdims=True)
    second = np.argmin(drafts[1])
    targets[1, second] = 0  # the second guess is never kept, so that what is left at the root is 1 - h of the first
    tokens = np.array([first, second], np.int32)
    rows.append((Proposal(tokens, np.float32(drafts)), np.float32(targets)))
  laws = _laws(*jax.tree.map(jnp.asarray, _stack(rows)), verifier=ALL['greedy_block'].verifier, tree=tree)
  np.testing.assert_array_equal(laws[:, 0], 0)
  np.testing.assert_allclose(np.sum(laws, axis=(1, 2)), 1, rtol=0, atol=1e-5)


def test_token_by_token_in_closed_form():
  """Each token kept with min(1, q/p), given those before it; the next from [q - p]+. All token-level methods agree."""
  rows = _many_guesses(CHAIN)
  expected = []
  for proposal, targets in rows:
    law, reached = np.zeros_like(targets), 1.0
    for i, (token, p) in enumerate(zip(proposal.tokens, proposal.probs)):
      kept = min(1.0, targets[i, token] / p[token])
      law[i] = reached * (1 - kept) * _normalised(np.maximum(targets[i] - p, 0), targets[i])
      reached *= kept
    law[-1] = reached * targets[-1]
    expected.append(law)
  for name in ('speculative', 'spectr', 'specinfer', 'race', 'batch', 'gsd'):
    np.testing.assert_allclose(_law64(name, CHAIN, rows), expected, rtol=0, atol=EXACT, err_msg=name)
  without_bias = with_epsilon(METHODS['decoding_opt'], 0.0)
  np.testing.assert_allclose(_law64(without_bias, CHAIN, rows), expected, rtol=0, atol=EXACT)
  # With a bias, and with more than one draft, they differ.
  for name in ('decoding_opt', 'decoding_uno'):
    assert np.abs(_law64(name, CHAIN, rows) - expected).max() > 0.05


def _by_text(law, proposal, tree):
  """A law `[N + 1, V]` with what nodes that spell the same have at the first of them."""
  tokens = np.pad(proposal.tokens, (1, 0))
  firsts, merged = {}, np.zeros_like(law)
  for node, path in enumerate(tree.paths):
    merged[firsts.setdefault(tuple(tokens[path[path >= 0]]), node)] += law[node]
  return merged


def test_blocks_of_one_token_are_token_by_token():
  """One position: nothing deeper can make up for a token, so race block verification is race selection."""
  tree = TokenTree.chains(3, 1)
  rows = _many_guesses(tree)
  np.testing.assert_allclose(_law64('race_block', tree, rows), _law64('race', tree, rows), rtol=0, atol=EXACT)
  assert np.abs(_law64('spectr', tree, rows) - _law64('race', tree, rows)).max() > 0.05
  # Race traversal keeps a token that was drawn twice at one of its nodes, a walk at either.
  race, traversal = (
    [_by_text(law, proposal, tree) for law, (proposal, _) in zip(_law64(name, tree, rows), rows)]
    for name in ('race', 'race_traversal')
  )
  np.testing.assert_allclose(traversal, race, rtol=0, atol=EXACT)
  # ... and visiting leaves in order is trying candidates in order.
  np.testing.assert_allclose(_law64('traversal', tree, rows), _law64('specinfer', tree, rows), rtol=0, atol=EXACT)


def _race_traversal(proposal, targets, tree, select):
  """The law of race traversal, context by context in the order of visits; recursive, over texts in dictionaries."""
  tokens = np.pad(proposal.tokens, (1, 0))
  texts = [tuple(tokens[path[path >= 0]]) for path in tree.paths]
  nodes_of = {}
  for node, text in enumerate(texts):
    nodes_of.setdefault(text, []).append(node)
  law, left = np.zeros_like(targets), [1.0]

  def keep(text, chance, weights):
    law[nodes_of[text][0]] += left[0] * chance * _normalised(weights, q_of(text))
    left[0] *= 1 - chance

  def q_of(text):
    return targets[nodes_of[text][0]]

  def visit(text, credit):
    q = q_of(text)
    children = [node for node in range(1, tree.num_nodes + 1) if texts[tree.parent_of[node]] == text]
    if not children:
      return keep(text, credit if text else 1.0, q)
    p = proposal.probs[tree.law_index[tree.parent_of[children[0]]]]
    pick = select(p, q, tokens[children])
    law_of_pick = np.asarray(pick.probs)
    shares = {}
    for node, share in zip(children, np.asarray(pick.pick_probs)):
      shares[tokens[node]] = shares.get(tokens[node], 0.0) + share
    spent = 0.0
    for token in sorted(shares, key=lambda token: (shares[token], nodes_of[(*text, token)][0])):
      passed = shares[token] * min(1.0, credit * q[token] / law_of_pick[token])
      if shares[token] > 0:
        visit((*text, token), passed / (1 - spent))
      spent += passed
    weights = np.maximum(credit * q - law_of_pick, 0)
    total = weights.sum() + 1 - credit
    return keep(text, 1.0 if not text or total <= 1e-13 else weights.sum() / total, weights)

  visit((), 1.0)
  return law


@pytest.mark.parametrize('tree', [UNEQUAL, CHAINS, TokenTree.prefix((3, 2))], ids=['unequal', 'chains', 'prefix'])
def test_race_traversal_by_another_route(tree):
  rows = _many_guesses(tree, count=15)
  race = ALL['race_traversal'].verifier.race
  with jax.enable_x64(True):
    pick = jax.jit(race)

    def select(p, q, candidates):
      return jax.device_get(pick(p, q, candidates, np.ones(len(candidates), bool)))

    expected = [_race_traversal(*row, tree, select) for row in rows]
  found = [_by_text(law, proposal, tree) for law, (proposal, _) in zip(_law64('race_traversal', tree, rows), rows)]
  # Races are solved in float64 by both, in programs of their own; ties of shares may fall either way.
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
  token_level = [_by_text(law, proposal, tree) for law, (proposal, _) in zip(_law64('race', tree, rows), rows)]
  assert np.abs(np.array(found) - token_level).max() > 0.05


def test_siblings_that_share_no_prefix_need_no_pool():
  """`batch` is `specinfer` without the children of rejected duplicates: the same where no two nodes spell the same."""
  rows = _many_guesses(UNEQUAL)

  def spells_twice(proposal):
    tokens = np.pad(proposal.tokens, (1, 0))
    spelled = [tuple(tokens[path[path >= 0]]) for path in UNEQUAL.paths]
    return len(set(spelled)) < len(spelled)

  twice = np.array([spells_twice(proposal) for proposal, _ in rows])
  difference = np.abs(_law64('batch', UNEQUAL, rows) - _law64('specinfer', UNEQUAL, rows)).max((1, 2))
  assert difference[~twice].max() <= EXACT
  assert 10 < twice.sum() < 70
  assert difference[twice].max() > 0.05


# Trees that are data.


def _placed(tree, bounds, places, proposal, targets):
  """The guesses of a tree in slots of wider bounds: parents, proposal and the target's laws there.

  Args:
    tree: The tree.
    bounds: The bounds.
    places: int `[n + 1]`, the slot of each of its nodes, the root's 0.
    proposal, targets: The guesses on the tree.
  """
  vocab_size = targets.shape[1]
  parents, tokens = np.full((2, bounds.num_nodes), -1, np.int32)
  parents[places[1:] - 1] = places[tree.parent_of[1:]]
  tokens[places[1:] - 1] = proposal.tokens
  # Draft laws of nodes without children are never read.
  probs = np.full((bounds.num_nodes + 1, vocab_size), np.nan)
  probs[places[tree.parent_nodes]] = proposal.probs
  laws = np.full((bounds.num_nodes + 1, vocab_size), 1 / vocab_size)
  laws[places] = targets
  return parents, Proposal(tokens, probs[bounds.parent_nodes]), laws


def _grown_rows(tree, bounds, places, tokens, num_rows=6):
  """Several rows of guesses on a tree, and the same in slots of the bounds; `tokens` holds rows, or None to draw."""
  own, more = ([{'tokens': row} for row in tokens], 0) if tokens else ([], num_rows)
  rows = [
    _guesses(seed, tree, 5, zero_share=0.0 if tokens else 0.2, equal_share=0.15, **options)
    for seed, options in enumerate(own + [{}] * more)
  ]
  return rows, [_placed(tree, bounds, np.array(places), *row) for row in rows]


_GROWN = [name for name, method in METHODS.items() if method.takes_grown and method.max_drafts is None]
_GROWN += ['traversal_without_replacement']
_GROWN_KINDS = 'spectr', 'gsd', 'ersd', 'race_block', 'race_traversal', 'traversal_without_replacement'
_grown_methods = pytest.mark.parametrize(
  'name', [name if name in _GROWN_KINDS else pytest.param(name, marks=pytest.mark.slow) for name in _GROWN]
)


def _tokens_for(name, *choices):
  """Those that the method's proposal rule can draw: siblings that differ, or that may be equal."""
  return [tokens for tokens, is_distinct in choices if is_distinct or not ALL[name].proposal_rule.may_run_out]


@_grown_methods
@pytest.mark.parametrize('is_bound', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_row_with_the_parents_of_a_tree_is_verified_like_it(name, is_bound):
  """Verdict, law and explanation: with the tree itself as its bounds, and with bounds in which every node may have
  children.
  """
  verifier = ALL[name].verifier
  bounds = UNEQUAL if is_bound else TokenTree.slots([2, 3, 1])
  tokens = _tokens_for(name, (_DUPLICATES, False), (_DISTINCT, True), ([2, 4, 0, 1, 3, 3], True))
  if ALL[name].proposal_rule.may_run_out:
    tokens += [_RAN_OUT, _RAN_OUT_BELOW]
  rows, placed = _grown_rows(UNEQUAL, bounds, range(7), 2 * tokens)
  keys = jax.random.split(jax.random.key(2), (len(rows), 20, UNEQUAL.max_depth + 1))

  def judge(keys, *row):
    verdict, explained = (
      jax.vmap(lambda key, decide=decide: decide(key, *row, ()))(keys) for decide in (verifier.verify, verifier.explain)
    )
    return verdict, explained, verifier.law(*row, ()) if name != 'ersd' else ()

  with jax.enable_x64(True):
    fixed = jax.jit(jax.vmap(lambda keys, *row: judge(keys, UNEQUAL, *row)))(keys, *_stack(rows))
    grown = jax.jit(jax.vmap(lambda keys, parents, *row: judge(keys, RowTree(parents, bounds), *row)))(
      keys, *_stack(placed)
    )
  for verdict, (explained, _), _ in (fixed, grown):
    jax.tree.map(np.testing.assert_array_equal, verdict, explained)
  jax.tree.map(np.testing.assert_array_equal, grown[0], fixed[0])
  assert len(np.unique(fixed[0].num_accepted)) > 1
  # Races are fitted in two programs, and rounding grows in their rounds.
  np.testing.assert_allclose(grown[2], fixed[2], rtol=0, atol=1e-9 if 'race' in name else EXACT)
  found, expected = grown[1][1], fixed[1][1]
  np.testing.assert_array_equal(found.node, expected.node)
  np.testing.assert_allclose(found.weights, expected.weights, atol=1e-9)
  num_made = 0
  for kind, made in expected.decisions.items():
    mine = found.decisions[kind]
    np.testing.assert_array_equal(mine.is_made, made.is_made)
    num_made += np.sum(made.is_made)
    for field in ('node', 'chosen', 'uniform'):
      if getattr(made, field) is not None:
        np.testing.assert_array_equal(*(np.asarray(getattr(each, field))[made.is_made] for each in (mine, made)))
    is_shown = np.asarray(made.is_made)[..., None] & np.asarray(made.is_valid)
    np.testing.assert_array_equal(np.asarray(mine.is_made)[..., None] & np.asarray(mine.is_valid), is_shown)
    pairs = [(mine.nodes, made.nodes)] + ([(mine.shares, made.shares)] if made.shares is not None else [])
    for mine_, made_ in pairs + [(mine.numbers[key], made.numbers[key]) for key in made.numbers]:
      at = is_shown if np.ndim(made_) == np.ndim(is_shown) else np.asarray(made.is_made)
      np.testing.assert_allclose(np.asarray(mine_)[at], np.asarray(made_)[at], rtol=1e-7, atol=1e-9)
  assert num_made > 20


# Shapes in bounds of 3, 4 and 3 slots, with some left out before, between and behind those in use. In the last one the
# nodes of depth 2 stand in another order than their parents; siblings keep theirs, and no two nodes spell the same.
_WIDE = TokenTree.slots([3, 4, 3])
_SHAPES = [
  (UNEQUAL, (0, 2, 3, 4, 6, 7, 9), None),
  (TokenTree.chains(2, 2), (0, 1, 3, 5, 7), None),
  (TokenTree.prefix((3, 1, 1)), (0, 1, 2, 3, 4, 6, 7, 8, 9, 10), None),
  (TokenTree.chains(1, 3), (0, 3, 5, 10), None),
  (TokenTree.chains(3, 1), (0, 1, 2, 3), None),
  (UNEQUAL, (0, 1, 3, 6, 7, 4, 8), [[2, 4, 0, 1, 3, 3], [0, 1, 4, 2, 4, 0]]),
]


@_grown_methods
def test_slots_that_a_row_does_not_use_change_nothing(name):
  """Rows of many shapes in one program, each with the law of its own tree; a shared race, token for token."""
  verifier = ALL[name].verifier
  shapes = _SHAPES if ALL[name].proposal_rule.name == 'independent' else [
    (tree, places, tokens or [[2, 4, 0, 1, 3, 3], [0, 1, 4, 2, 4, 0]])
    for tree, places, tokens in _SHAPES
    if tree is UNEQUAL
  ]  # fmt: skip
  keys = jax.random.split(jax.random.key(4), (50, _WIDE.max_depth + 1))

  def judge(tree, proposal, targets):
    if name != 'ersd':
      return verifier.law(tree, proposal, targets, ())
    verdict = jax.vmap(lambda key: verifier.verify(key, tree, proposal, targets, ()))(keys)
    return verdict.next_token, verdict.path, verdict.num_accepted

  with jax.enable_x64(True):
    in_slots = jax.jit(jax.vmap(lambda parents, *row: judge(RowTree(parents, _WIDE), *row)))
    alone = jax.jit(judge, static_argnums=0)
    cases = [(tree, np.array(places), *_grown_rows(tree, _WIDE, places, tokens)) for tree, places, tokens in shapes]
    placed = _stack([row for *_, rows in cases for row in rows])
    leaves, structure = jax.tree.flatten(jax.device_get(in_slots(*placed)))
    found = (jax.tree.unflatten(structure, row) for row in zip(*leaves))
    for tree, places, rows, _ in cases:
      for row in rows:
        mine, expected = next(found), jax.device_get(alone(tree, *row))
        if name == 'ersd':
          (token, path, number), (own_token, own_path, own_number) = mine, expected
          np.testing.assert_array_equal(token, own_token)
          np.testing.assert_array_equal(number, own_number)
          is_kept = np.arange(tree.max_depth) < number[:, None]
          np.testing.assert_array_equal(path[:, : tree.max_depth][is_kept], places[own_path][is_kept])
          continue
        np.testing.assert_allclose(mine[places], expected, rtol=0, atol=1e-9 if 'race' in name else EXACT)
        assert mine.sum() == pytest.approx(1, abs=EXACT)


# Given candidates.


def _given_error(verifier, *, is_counted_as_drawn=False):
  """Largest difference between the joint law of the first three tokens and the target's, with given candidates.

  The root's two candidates are given. Below the first two are drawn, below the second two are given. All that can be
  drawn is enumerated; what a round leaves of the three tokens comes from the target.
  """
  tree, vocab_size = TokenTree.prefix((2, 2)), 3
  is_given = np.array([True, True, False, False, True, True])

  def then(q, known):
    """The law of the first three tokens after those known, by the target alone."""
    if len(known) == 3:
      return np.ones(())
    return np.stack([q[known][x] * then(q, (*known, x)) for x in range(vocab_size)])

  worst = 0.0
  for seed, given in enumerate([(0, 1, 2, 2), (1, 2, 0, 1), (2, 0, 1, 0)]):
    rng = np.random.default_rng(seed)
    contexts = [()] + [(x,) for x in range(3)] + [(x, y) for x in range(3) for y in range(3)]
    p, q = ({context: _random_law(rng, vocab_size, 0.15) for context in contexts} for _ in range(2))
    first, second, *below = given
    drawn = [(x, y) for x in range(3) for y in range(3)]
    tokens = np.array([[first, second, x, y, *below] for x, y in drawn], np.int32)
    weights = np.array([p[first,][x] * p[first,][y] for x, y in drawn])
    texts = [[(), (first,), (second,), (first, x), (first, y), *((second, z) for z in below)] for x, y in drawn]
    probs = np.array([[p[text] for text in row[:3]] for row in texts])
    targets = np.array([[q[text] for text in row] for row in texts])
    given_rows = None if is_counted_as_drawn else np.tile(is_given, (len(tokens), 1))
    with jax.enable_x64(True):
      proposals = Proposal(jnp.asarray(tokens), jnp.asarray(probs), is_given=given_rows)
      laws = np.asarray(_laws(proposals, jnp.asarray(targets), verifier=verifier, tree=tree))
    emitted = np.zeros((vocab_size,) * 3)
    for weight, row, law in zip(weights, texts, laws):
      for text, out in zip(row, law):
        for token, share in enumerate(out):
          known = (*text, token)
          emitted[known] += weight * share * then(q, known)
    worst = max(worst, np.abs(emitted - then(q, ())).max())
  return worst


_GIVEN = 'spectr', 'specinfer', 'batch', 'race'


@pytest.mark.parametrize('name', [_GIVEN[0], *(pytest.param(name, marks=pytest.mark.slow) for name in _GIVEN[1:])])
def test_given_and_drawn_candidates_beside_each_other(name):
  verifier = ALL[name].verifier
  assert verifier.takes_given
  assert _given_error(verifier) <= (1e-11 if name == 'race' else EXACT)
  # Counted as drawn they are not right: this is what `is_given` is for.
  assert _given_error(verifier, is_counted_as_drawn=True) > 0.02


def _winners(key, laws):
  """The winner of the race with each law, on one set of exponentials."""
  return jax.vmap(lambda law: first_arrival(arrivals(key, law)))(laws)


def test_a_given_candidate_is_shown_as_a_draw_from_a_point_mass():
  tree, tokens = TokenTree.prefix((2, 2)), [2, 1, 0, 0, 3, 1]
  proposal, targets = _float32(_guesses(3, tree, 5, tokens, agreement=0.5))
  # Only the candidates of the root are given.
  proposal = dataclasses.replace(proposal, is_given=jnp.arange(6) < 2)
  keys = jax.random.split(jax.random.key(6), (64, 3))
  row = tree, proposal, targets, ()
  verifier = ALL['spectr'].verifier
  verdict, record = jax.device_get(jax.jit(jax.vmap(lambda keys: verifier.explain(keys, *row)))(keys))
  made = record.decisions['accept']
  q = targets[0][jnp.array([2, 1])]
  for values in (made.shares[:, 0, :2], made.numbers['target_prob'][:, 0, :2], made.numbers['ratio'][:, 0, :2]):
    np.testing.assert_allclose(values, np.broadcast_to(q, (64, 2)), rtol=1e-6)
  np.testing.assert_array_equal(made.numbers['draft_prob'][:, 0, :2], 1)
  kept = verdict.num_accepted > 0
  np.testing.assert_array_equal(kept, made.uniform[:, 0] < np.sum(q))
  assert 0 < kept.sum() < 64
  # Below them the draft's law is the draft's.
  parents = verdict.path[kept, 0]
  for place, parent in zip(np.flatnonzero(kept), parents):
    drawn = [node for node in range(1, 7) if tree.parent_of[node] == parent]
    law = proposal.probs[tree.law_index[parent]]
    found = made.numbers['draft_prob'][place, 1][made.is_valid[place, 1]]
    np.testing.assert_allclose(found, [law[tokens[node - 1]] for node in drawn], rtol=1e-6)


def test_a_shared_race_takes_given_candidates():
  """Whatever is given, copies included: tokens are the target's own winners, up to the first that is no candidate."""
  verifier, tree = ALL['ersd'].verifier, TokenTree.prefix((3, 2))
  tokens = [2, 2, 0, 1, 1, 3, 0, 2, 4]
  proposal, targets = _float32(_guesses(5, tree, 5, tokens))
  proposal = dataclasses.replace(proposal, is_given=jnp.ones(9, bool), probs=jnp.full_like(proposal.probs, jnp.nan))
  keys = jax.random.split(jax.random.key(7), (200, 3))
  verdict = jax.device_get(jax.jit(jax.vmap(lambda keys: verifier.verify(keys, tree, proposal, targets, ())))(keys))
  winners = np.asarray(jax.jit(jax.vmap(lambda keys: jax.vmap(lambda key: _winners(key, targets))(keys)))(keys))
  for row in range(200):
    node = 0
    for depth in range(3):
      winner = winners[row, depth, node]
      children = [child for child in range(1, 10) if tree.parent_of[child] == node and tokens[child - 1] == winner]
      if not children:
        break
      assert verdict.path[row, depth] == children[0]
      node = children[0]
    assert verdict.num_accepted[row] == tree.depths[node]
    assert verdict.next_token[row] == winner
  assert len(np.unique(verdict.num_accepted)) == 3


# What a verification is made of, read off its program.


def _tree(method, num_drafts, draft_length):
  return {0: TokenTree()}.get(method.max_drafts, TokenTree.chains(method.max_drafts or num_drafts, draft_length))


def _equations(jaxpr):
  """All equations, those inside loops, branches and calls included."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')
    ):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        yield from _equations(inner)


def _is_in_low_precision(equation):
  """Whether it is a product that may round its factors: anything but the highest precision, for both of them."""
  if equation.primitive.name not in ('dot_general', 'conv_general_dilated'):
    return False
  return equation.params['precision'] != (jax.lax.Precision.HIGHEST,) * 2


def _arguments(method, tree, vocab_size, batch_size):
  """Shapes of a batch of rows to verify: keys, proposal, the target's laws, state."""
  keys = jax.random.split(jax.random.key(0), (batch_size, tree.max_depth + 1))
  proposal = Proposal(
    jax.ShapeDtypeStruct((batch_size, tree.num_nodes), jnp.int32),
    jax.ShapeDtypeStruct((batch_size, len(tree.parent_nodes), vocab_size), jnp.float32),
  )
  targets = jax.ShapeDtypeStruct((batch_size, tree.num_nodes + 1, vocab_size), jnp.float32)
  state = jax.tree.map(lambda x: jnp.tile(x, (batch_size, *[1] * x.ndim)), method.verifier.init_state(tree))
  return keys, proposal, targets, state


def _verification(method, tree):
  return jax.vmap(lambda keys, *row: method.verifier.verify(keys, tree, *row))


@pytest.mark.parametrize('name', list(ALL))
def test_no_product_in_low_precision_no_sort_and_no_large_array(name):
  """Matrix units round float32 to bfloat16 unless told otherwise, sorts over the vocabulary are slow everywhere, and
  the memory must grow neither with V^2 nor with K^L.
  """
  method, vocab_size, batch_size = ALL[name], 4096, 2
  tree = _tree(method, 8, 8)

  def verify(keys, proposal, logits, state):
    target_probs = logits_to_probs(logits, SamplingParams.make(batch_size, top_k=50, top_p=0.9))
    return _verification(method, tree)(keys, proposal, target_probs, state)

  program = jax.make_jaxpr(verify)(*_arguments(method, tree, vocab_size, batch_size))
  equations = list(_equations(program.jaxpr))
  primitives = {equation.primitive.name for equation in equations}
  assert {'exp', 'reduce_sum', 'while', 'argmax' if name != 'ersd' else 'argmin'} <= primitives  # loops are entered
  assert not primitives & {'sort', 'top_k', 'approx_top_k'}
  assert not any(map(_is_in_low_precision, equations))
  largest = max(np.prod(out.aval.shape) for equation in equations for out in equation.outvars)
  # The laws themselves, or for a race what tells classes apart, [C, V], on an accelerator of several races at once; it
  # is part of a sum and never stored. V^2 and K^L would be 16 million per row.
  num_races = RACES_AT_ONCE if name == 'race_traversal' else 1
  assert largest <= batch_size * vocab_size * max(tree.num_nodes + 1, 64, num_races * Race().num_classes)


def test_what_must_not_be_there_would_be_seen():
  def products(x, precision=None):
    return jax.lax.fori_loop(0, 3, lambda _, y: jax.jit(lambda z: jnp.dot(z, z, precision=precision))(y), x)

  for precision, is_low in ((None, True), ('high', True), ('highest', False)):
    program = jax.make_jaxpr(functools.partial(products, precision=precision))(jnp.eye(2))
    equations = list(_equations(program.jaxpr))
    assert 'dot_general' in {equation.primitive.name for equation in equations}
    assert any(map(_is_in_low_precision, equations)) == is_low


@functools.cache
def _compiled(name, batch_size):
  """The verification of rows with eight drafts of eight tokens from a vocabulary of 4096, compiled."""
  method = ALL[name]
  tree = _tree(method, 8, 8)
  return tree, jax.jit(_verification(method, tree)).lower(*_arguments(method, tree, 4096, batch_size)).compile()


_COMPILED = ['speculative', 'spectr', 'gsd', 'ersd', 'greedy_block', 'race_block', 'race_traversal', 'traversal']


@pytest.mark.parametrize(
  'name', [name if name in _COMPILED else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
)
def test_no_second_copy_of_the_laws(name):
  """All that is made on the way takes less memory than the target's laws, which are there anyway."""
  batch_size = 4
  tree, compiled = _compiled(name, batch_size)
  analysis = compiled.memory_analysis()
  if analysis is None:
    pytest.skip('this backend does not say how much memory a program takes')
  assert analysis.temp_size_in_bytes < batch_size * (tree.num_nodes + 1) * 4096 * 4


_LOOPS_OVER_ROWS = ['spectr', 'race_block', 'race_traversal']


@pytest.mark.parametrize(
  'name', [name if name in _LOOPS_OVER_ROWS else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
)
def test_rows_do_not_depend_on_their_batch(name):
  """On a vocabulary large enough for work that goes row by row: rows stop at different depths and are what they are
  alone.
  """
  rng = np.random.default_rng(0)
  (tree, together), (_, alone) = _compiled(name, 4), _compiled(name, 1)
  # A draft that agrees with the target more and more from row to row.
  logits = rng.normal(size=(4, tree.num_nodes + 1, 4096)) * 2 - 1.1 * np.log1p(np.arange(4096))
  noise = rng.normal(size=(4, len(tree.parent_nodes), 4096)) * np.array([2.0, 1.0, 0.5, 0.1])[:, None, None]
  # Of chains each node has its own law; only the children of the root share a context.
  targets = np.float32(jax.nn.softmax(logits, axis=-1))
  drafts = np.float32(jax.nn.softmax(logits[:, tree.parent_nodes] + noise, axis=-1))
  tokens = np.zeros((4, tree.num_nodes), np.int32)
  for row, law in zip(tokens, drafts):
    for node in range(1, tree.num_nodes + 1):
      p = law[tree.law_index[tree.parent_of[node]]].astype(np.float64)
      row[node - 1] = rng.choice(4096, p=p / p.sum())
  keys = jax.random.split(jax.random.key(5), (4, tree.max_depth + 1))
  state = jax.tree.map(lambda x: jnp.tile(x, (4, *[1] * x.ndim)), ALL[name].verifier.init_state(tree))
  arguments = keys, Proposal(jnp.asarray(tokens), jnp.asarray(drafts)), jnp.asarray(targets), state
  batched = together(*arguments)
  for row in range(4):
    single = alone(*jax.tree.map(lambda x: x[row : row + 1], arguments))  # noqa: B023
    # With these keys no uniform is within a float32 rounding of where a decision changes.
    assert int(single.next_token[0]) == int(batched.next_token[row])
    assert int(single.num_accepted[0]) == int(batched.num_accepted[row])
    np.testing.assert_array_equal(single.path[0], batched.path[row])
  if tree.num_nodes:
    assert len(np.unique(batched.num_accepted)) > 1
