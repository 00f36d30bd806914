"""Closed forms, and methods that are one method on some trees; in float64, with zeros and with equal distributions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from guesses import ALL, CHAIN, CHAINS, EXACT, UNEQUAL, laws_of, make_guesses, stack

from spectr_jax import METHODS, TokenTree
from spectr_jax.methods import with_epsilon
from spectr_jax.proposal import Proposal
from tests.slow import slow


def _many_guesses(tree, count=40):
  rows = [make_guesses(seed, tree, 4, zero_share=0.25, equal_share=0.2) for seed in range(count)]
  rows += [make_guesses(seed, tree, 4) for seed in range(count, 2 * count)]
  return rows


def _law64(name, tree, rows, **options):
  method = ALL[name] if isinstance(name, str) else name
  with jax.enable_x64(True):
    laws = np.asarray(laws_of(*jax.tree.map(jnp.asarray, stack(rows)), verifier=method.verifier, tree=tree, **options))
  assert laws.dtype == np.float64
  np.testing.assert_allclose(laws.sum((1, 2)), 1, rtol=0, atol=EXACT)
  return laws


def _normalized(weights, otherwise):
  return weights / weights.sum() if weights.sum() > 0 else otherwise


def _one_draft(proposal, targets, chance, left):
  """The distribution of a block method on one draft, from the `chance` of each part and the weights `left` after it."""
  tokens, drafts = proposal.tokens, proposal.probs
  length = len(tokens)
  law, nothing_longer = np.zeros_like(targets), 1.0
  ratios = [targets[i, tokens[i]] / drafts[i, tokens[i]] for i in range(length)]
  for i in reversed(range(length + 1)):
    p = drafts[i] if i < length else None
    kept = chance(i, ratios[:i], p, targets[i]) if i else 1.0
    weights = targets[i] if i == length else left(ratios[:i], p, targets[i])
    law[i] = nothing_longer * kept * _normalized(weights, targets[i])
    nothing_longer *= 1 - kept
  return law


def _clipped(ratios):
  return functools.reduce(lambda kept, ratio: min(1.0, kept * ratio), ratios, 1.0)


def _assert_laws(names, expected, rows):
  for name in names:
    np.testing.assert_allclose(_law64(name, CHAIN, rows), expected, rtol=0, atol=EXACT, err_msg=str(name))


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
  names = 'block', 'race_block', 'race_traversal', 'traversal', 'traversal_without_replacement', 'univer'
  _assert_laws(names, expected, rows)


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
  _assert_laws(('greedy_block', 'spectr_gbv'), expected, rows)


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
  laws = laws_of(*jax.tree.map(jnp.asarray, stack(rows)), verifier=ALL['greedy_block'].verifier, tree=tree)
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
      law[i] = reached * (1 - kept) * _normalized(np.maximum(targets[i] - p, 0), targets[i])
      reached *= kept
    law[-1] = reached * targets[-1]
    expected.append(law)
  without_bias = with_epsilon(METHODS['decoding_opt'], 0.0)
  _assert_laws(('speculative', 'spectr', 'specinfer', 'race', 'batch', 'gsd', without_bias), expected, rows)
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


@pytest.mark.slow
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
    law[nodes_of[text][0]] += left[0] * chance * _normalized(weights, q_of(text))
    left[0] *= 1 - chance

  def q_of(text):
    return targets[nodes_of[text][0]]

  def visit(text, credit):
    q = q_of(text)
    children = [node for node in range(1, tree.num_nodes + 1) if texts[tree.parent_of[node]] == text]
    if not children:
      return keep(text, credit if text else 1.0, q)
    p = proposal.probs[tree.parent_index[tree.parent_of[children[0]]]]
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


@pytest.mark.parametrize(
  'tree', [slow(UNEQUAL), CHAINS, slow(TokenTree.prefix((3, 2)))], ids=['unequal', 'chains', 'prefix']
)
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
