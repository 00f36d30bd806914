"""UniVer: the plan for the likeliest tokens and one drawn, in closed form and beside a slow reference."""

import dataclasses

import jax
import numpy as np
import pytest
from guesses import ALL, EXACT, UNEQUAL, laws_of, make_guesses, stack

from spectr_jax import METHODS, TokenTree
from spectr_jax.proposal import LikeliestAndOne

_SIBLINGS = [[2, 4, 0, 1, 0, 3], [0, 1, 3, 2, 4, 4], [3, 0, 1, 4, 2, 1]]
_WIDE = TokenTree((0, 0, 0, 1, 1, 1, 2, 4))


def _rows(tree, tokens, num_seeds=12, **options):
  return [make_guesses(seed, tree, 5, tokens, equal_share=0.1, **options) for seed in range(num_seeds)]


def _law64(tree, rows):
  with jax.enable_x64(True):
    return np.asarray(laws_of(*stack(rows), verifier=METHODS['univer'].verifier, tree=tree))


def _masses(tokens, p, q, credit):
  """m of each candidate, and what is left of P q for the next token; the last candidate is the drawn one."""
  *given, drawn = tokens
  others = np.setdiff1d(np.arange(len(p)), given)
  left = np.zeros_like(p)
  left[others] = p[others] / p[others].sum()
  kept = min(1.0, credit * q[drawn] / left[drawn])
  room = 1 - np.minimum(left[others], credit * q[others]).sum()
  masses = [(1 - kept) * credit * q[token] / room if kept < 1 else 0.0 for token in given] + [kept]
  rest = np.zeros_like(q)
  rest[others] = np.maximum(credit * q[others] - left[others], 0)
  return masses, rest


def _reference(tree, proposal, targets):
  """The law `[N + 1, V]` of a decision, by visits in turn."""
  law = np.zeros_like(targets)

  def visit(node, credit):
    """Adds what is kept from here on, given that the visit happens; returns the chance that something is."""
    nonlocal reach
    children = np.flatnonzero(tree.parent_of[1:] == node) + 1
    if not len(children):
      stop, rest = credit if node else 1.0, targets[node]
    else:
      row = proposal.probs[tree.parent_index[node]]
      masses, rest = _masses(proposal.tokens[children - 1], row, targets[node], credit)
      spent = 0.0
      for place in sorted(range(len(children)), key=lambda place: round(256 * masses[place])):
        visit(children[place], masses[place] / (1 - spent) if masses[place] else 0.0)
        spent += masses[place]
      excess = rest.sum()
      stop = 1.0 if not node or excess + 1 - credit < 1e-13 else excess / (excess + 1 - credit)
    weights = rest if rest.sum() > 0 else targets[node]
    law[node] += reach * stop * weights / weights.sum()
    reach *= 1 - stop

  reach = 1.0
  visit(0, 1.0)
  return law


@pytest.mark.parametrize('tokens', _SIBLINGS)
def test_the_law_is_that_of_visits_in_turn(tokens):
  rows = _rows(UNEQUAL, tokens)
  expected = [_reference(UNEQUAL, *row) for row in rows]
  np.testing.assert_allclose(_law64(UNEQUAL, rows), expected, rtol=0, atol=EXACT)


def test_three_siblings_two_of_them_given():
  rows = _rows(_WIDE, [0, 3, 1, 2, 4, 0, 1, 3], agreement=0.5)
  np.testing.assert_allclose(_law64(_WIDE, rows), [_reference(_WIDE, *row) for row in rows], rtol=0, atol=EXACT)


def test_no_rule_keeps_more_of_these_candidates():
  """One position: a given token comes out as often as under the target, any other at most as often as it is drawn."""
  tree, rng = TokenTree.chains(3, 1), np.random.default_rng(0)
  for _ in range(5):
    p, q = rng.dirichlet(np.ones(5), 2)
    given = np.argsort(-p)[:2]
    others = np.setdiff1d(np.arange(5), given)
    drawn_probs = p[others] / p[others].sum()
    kept = 0.0
    for token, chance in zip(others, drawn_probs):
      proposal, targets = make_guesses(0, tree, 5, [*given, token])
      proposal, targets = dataclasses.replace(proposal, probs=p[None]), np.concatenate([q[None], targets[1:]])
      kept += chance * _law64(tree, [(proposal, targets)])[0, 1:].sum()
    np.testing.assert_allclose(kept, q[given].sum() + np.minimum(drawn_probs, q[others]).sum(), atol=EXACT)


def test_long_drafts_do_not_underflow():
  """A path whose credit is far below the smallest float32 is not kept, and nothing is NaN."""
  tree, vocab_size = TokenTree.chains(2, 24), 5
  p, q = np.array([[0.6, 0.39, 0.004, 0.003, 0.003], [1e-6, 1e-6, 0.4, 0.3, 0.3]], np.float32)
  proposal, targets = make_guesses(0, tree, vocab_size, [0, 1] * 24)
  proposal = dataclasses.replace(proposal, probs=np.tile(p, (len(tree.parent_nodes), 1)))
  targets = np.tile(q / q.sum(), (tree.num_nodes + 1, 1))
  law = np.asarray(laws_of(*stack([(proposal, targets)]), verifier=METHODS['univer'].verifier, tree=tree))[0]
  assert np.isfinite(law).all()
  np.testing.assert_allclose(law.sum(), 1, atol=1e-5)
  assert law[0].sum() > 0.99


def test_an_only_child_is_drawn():
  probs = np.array([0.5, 0.3, 0.2], np.float32)
  drawn = jax.vmap(lambda key: LikeliestAndOne()(key, probs, 1, 1))(jax.random.split(jax.random.key(0), 200))
  assert set(np.asarray(drawn).ravel()) == {0, 1, 2}
  assert ALL['univer'].proposal_rule == LikeliestAndOne()
