"""Expected rejections against sums over all texts, the verifier enumerated and simulated, and a linear program."""

import itertools
import math

import jax
import numpy as np
import pytest
from scipy import optimize

from spectr_jax import METHODS
from spectr_jax.testing import ContextTables, constant_tables, enumerated_rejections, simulated_rejections
from spectr_jax.theory import (
  MarkovChains,
  batch_improvement,
  expected_rejections,
  expected_target_calls,
  random_chains,
  recursive_acceptance,
  rejection_probs,
  total_variation,
)
from tests.slow import slow

EXACT = 1e-12


def _chains(seed, *, num_tokens, vocab_size):
  """With zeros on either side, so that the draft does not cover the target."""
  rng = np.random.default_rng(seed)
  laws = rng.dirichlet(np.full(vocab_size, 0.7), (2, num_tokens, vocab_size))
  laws[rng.random(laws.shape) < 0.25] = 0
  laws[laws.sum(axis=-1) == 0] = 1
  return MarkovChains(rng.dirichlet(np.ones(vocab_size)), *laws / laws.sum(axis=-1, keepdims=True))


def _published_recursion(chains, num_drafts):
  """Theorem 3 word for word: f by equation (22) for every text, r_m and q^{M+1} as laws; `[T]`."""
  vocab_size = chains.vocab_size
  rejected = np.zeros(chains.num_tokens)
  f = {(x,): prob for x, prob in enumerate(chains.prompt_probs)}
  reach = dict(f)
  for n in range(chains.num_tokens):
    next_f, next_reach = {}, {}
    for text, prob in reach.items():
      p, q = chains.draft_probs[n, text[-1]], chains.target_probs[n, text[-1]]
      law, product = q, 1.0
      for _ in range(num_drafts):
        excess = np.maximum(law - p, 0)
        product *= excess.sum()
        law = excess / excess.sum() if excess.sum() > 0 else law
      h = np.maximum(q - p, 0)
      for a in range(vocab_size):
        next_f[*text, a] = h[a] * prob - (h[a] - product * law[a]) * f[text]
        next_reach[*text, a] = prob * q[a]
    f, reach = next_f, next_reach
    rejected[n] = sum(f.values())
  return rejected


@pytest.mark.parametrize('num_drafts', [1, 2, 3, 7])
def test_sums_over_earlier_tokens_are_those_of_the_published_recursion(num_drafts):
  for seed in range(4):
    chains = _chains(seed, num_tokens=5, vocab_size=3)
    np.testing.assert_allclose(
      rejection_probs(chains, num_drafts), _published_recursion(chains, num_drafts), rtol=0, atol=EXACT
    )


def test_one_draft_is_the_sum_of_total_variations():
  """Theorem 1, over all texts."""
  chains = _chains(0, num_tokens=4, vocab_size=3)
  expected = 0
  for length in range(4):
    for text in itertools.product(range(3), repeat=length + 1):
      reach = chains.prompt_probs[text[0]]
      for n in range(length):
        reach *= chains.target_probs[n, text[n], text[n + 1]]
      expected += reach * total_variation(
        *(laws[length, text[-1]] for laws in (chains.draft_probs, chains.target_probs))
      )
  assert expected_rejections(chains) == pytest.approx(expected, abs=EXACT)


def _published_limit(chains):
  """Proposition 1 word for word: f(xa) = h(a) (q(x) - f(x)), without what the draft cannot draw."""
  total, corrected = 0, chains.prompt_probs
  for context, h in zip(chains.context_probs, np.maximum(chains.target_probs - chains.draft_probs, 0)):
    corrected = (context - corrected) @ h
    total += corrected.sum()
  return total


def test_the_limit_is_reached_and_is_not_zero():
  for seed in range(3):
    chains = _chains(seed, num_tokens=8, vocab_size=4)
    found = expected_rejections(chains, [1, 2, 3, 10, 20_000, math.inf])
    assert (np.diff(found) <= EXACT).all()
    assert found[-2] == pytest.approx(found[-1], abs=1e-3)
    assert found[-1] > 0.5
    assert abs(_published_limit(chains) - found[-1]) > 1e-2
  # Where the draft covers the target the limit is the published one.
  chains = random_chains(1, num_tokens=20)
  assert expected_rejections(chains, math.inf) == pytest.approx(_published_limit(chains), abs=EXACT)


def test_numbers_of_drafts_keep_their_shape():
  chains = _chains(0, num_tokens=3, vocab_size=2)
  numbers = np.array([[3, 1], [math.inf, 3]])
  probs = rejection_probs(chains, numbers)
  assert probs.shape == (2, 2, 3)
  for place in np.ndindex(2, 2):
    np.testing.assert_array_equal(probs[place], rejection_probs(chains, numbers[place]))
  assert expected_rejections(chains, numbers).shape == (2, 2)
  assert expected_target_calls(chains, numbers).shape == (2, 2)


def test_target_calls_of_simple_chains():
  rows, prompt, numbers = np.array([[0.3, 0.7, 0], [0.6, 0.4, 0], [0.5, 0.5, 0]]), np.ones(3) / 3, [1, 4, math.inf]
  same, disjoint = np.tile(rows, (6, 1, 1)), np.tile(np.eye(3)[2], (6, 3, 1))
  for chains, expected in (
    # One call for all, or one for each.
    (MarkovChains(prompt, same, same), 1),
    (MarkovChains(prompt, disjoint, same), 6),
    # A text of one token takes one call, rejected or not; the last token of a longer one as well.
    (_chains(0, num_tokens=1, vocab_size=3), 1),
  ):
    np.testing.assert_allclose(expected_target_calls(chains, numbers), expected, rtol=0, atol=EXACT)
  # Of two tokens the second takes a call of its own after a rejection.
  chains = _chains(0, num_tokens=2, vocab_size=3)
  expected = 1 + chains.prompt_probs @ total_variation(chains.draft_probs[0], chains.target_probs[0])
  assert expected_target_calls(chains) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize(('name', 'num_drafts'), [slow('speculative', 1), ('batch', 2)])
def test_the_verifier_rejects_as_often(name, num_drafts):
  """Every draft and decision of the library's own verifier over three tokens."""
  num_tokens = 3
  chains = _chains(5, num_tokens=num_tokens, vocab_size=2)
  chains = MarkovChains([0, 1], chains.draft_probs, chains.target_probs)
  tables = []
  for laws in (chains.draft_probs, chains.target_probs):
    # After a text of l tokens the law is that of place l; what lies beyond the horizon does not matter.
    contexts = [
      laws[min(length, num_tokens - 1), text[-1] if text else 1]
      for length in range(2 * num_tokens)
      for text in itertools.product(range(2), repeat=length)
    ]
    tables.append(np.array(contexts))
  found = enumerated_rejections(
    METHODS[name], num_drafts, ContextTables(*tables, max_length=2 * num_tokens - 1), num_tokens
  )
  assert found == pytest.approx(float(expected_rejections(chains, num_drafts)), abs=EXACT)


def test_enumeration_and_simulation_refuse():
  for size, method, num_tokens, message in (
    (2, 'batch', 2, 'contexts of 3 tokens, got 2'),
    (3, 'greedy_block', 2, 'greedy_block keeps state'),
  ):
    tables = constant_tables([0.5, 0.5], [0.5, 0.5], max_length=size)
    with pytest.raises(ValueError, match=message):
      enumerated_rejections(METHODS[method], 1, tables, num_tokens)
  with pytest.raises(ValueError, match='at least 1, got 0 and 512'):
    simulated_rejections(jax.random.key(0), random_chains(0, num_tokens=2), num_runs=0)


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'num_drafts'), [slow('speculative', 1), ('batch', 3)])
def test_decoding_rejects_as_often(name, num_drafts):
  """The engine on nonstationary chains, within 4.5 standard errors; another draft would show."""
  chains = random_chains(10, num_tokens=8)
  found = simulated_rejections(
    jax.random.key(0), chains, method=name, num_drafts=num_drafts, num_runs=6000, batch_size=3000
  )
  assert found.shape == (6000,)
  error = found.std() / math.sqrt(len(found))
  assert abs(found.mean() - expected_rejections(chains, num_drafts)) < 4.5 * error
  assert abs(found.mean() - expected_rejections(chains, num_drafts + 1)) > 4.5 * error


def _fewest_rejections(chains):
  """The linear program of all rules that decide on one drafted token after another and keep the target's distribution.

  Variables are the chances of a text and of which of its tokens were corrections, which all decisions may depend on.
  """
  start = [((x,), ()) for x in range(chains.vocab_size)]
  places, upper, equal = {}, [], []
  before = start
  for n in range(chains.num_tokens):
    after, of_text = [], {}
    for text, record in before:
      # What is there to share: a number at first, then the variable of the text and record.
      given = chains.prompt_probs[text[0]] if not record else 0
      reach = {places[text, record]: 1.0} if record else {}
      children = []
      for a, is_rejection in itertools.product(range(chains.vocab_size), (False, True)):
        key = (*text, a), (*record, is_rejection)
        places[key] = len(places)
        children.append(places[key])
        of_text.setdefault(key[0], []).append(places[key])
        after.append(key)
        if not is_rejection:
          p = chains.draft_probs[n, text[-1], a]
          upper.append(({places[key]: 1.0} | {i: -p for i in reach}, p * given))
      equal.append((dict.fromkeys(children, 1.0) | dict.fromkeys(reach, -1.0), given))
    for text, indices in of_text.items():
      steps = zip(chains.target_probs, text, text[1:])
      probability = chains.prompt_probs[text[0]] * math.prod(table[x, a] for table, x, a in steps)
      equal.append((dict.fromkeys(indices, 1.0), probability))
    before = after

  def matrix(rows):
    dense = np.zeros((len(rows), len(places)))
    for row, (terms, _) in zip(dense, rows):
      row[list(terms)] = list(terms.values())
    return dense, [bound for _, bound in rows]

  cost = [float(record[-1]) for _, record in places]
  result = optimize.linprog(cost, *matrix(upper), *matrix(equal), method='highs')
  assert result.success
  return result.fun


def test_no_unbiased_rule_rejects_fewer():
  """Theorem 2."""
  for seed in range(4):
    chains = _chains(seed, num_tokens=3, vocab_size=2)
    assert _fewest_rejections(chains) == pytest.approx(float(expected_rejections(chains)), abs=1e-6)


def test_batch_improvement_has_the_published_closed_forms():
  numbers = np.array([1, 2, 5, 40])
  for u, v in ((0.9, 0.5), (0.6, 0.5), (0.5, 0.1)):
    found = batch_improvement([1 - u, u], [1 - v, v], numbers)
    np.testing.assert_allclose(found, (u - v) * (1 - u ** (numbers - 1.0)), rtol=0, atol=EXACT)
  for size, ratio in ((12, 2), (12, 3), (12, 12)):
    p, q = np.full(size, 1 / size), np.where(np.arange(size) < size // ratio, ratio / size, 0)
    found = batch_improvement(p, q, [*numbers, math.inf])
    miss = 1 - 1 / ratio
    np.testing.assert_allclose(found, [*(miss - miss**numbers), miss], rtol=0, atol=EXACT)


def test_batch_improvement_is_that_of_recursive_rejection():
  rng = np.random.default_rng(0)
  p, q = rng.dirichlet(np.ones(6), 5), rng.dirichlet(np.ones(6), 5)
  found = batch_improvement(p, q, [1, 2, 4])
  assert found.shape == (3, 5)
  one = batch_improvement(p[0], q[0], 4)
  assert one.shape == ()
  assert one == found[2, 0]
  with jax.enable_x64(True):
    accepted = [np.asarray(recursive_acceptance(p, q, n)) for n in (1, 2, 4)]
  np.testing.assert_allclose(found, [x - accepted[0] for x in accepted], rtol=0, atol=EXACT)
