"""Theory against closed forms, brute force over sets of tokens, and the linear program as it is published."""

import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, sparse

from spectr_jax.couplings import KSeq, MaximalAfter, Race, Recursive
from spectr_jax.proposal import Independent
from spectr_jax.theory import (
  TransportCoupling,
  given_optimum,
  kseq_acceptance,
  kseq_gamma,
  optimal_acceptance,
  optimal_transport,
  race_acceptance,
  recursive_acceptance,
  transport_bound,
)
from tests.slow import slow_but

BERNOULLI = np.array([0.75, 0.25]), np.array([0.5, 0.5])
# Sums of a few products of float64.
EXACT = 1e-12
# The linear program is solved to 1e-13 of the total mass per constraint; there are 19 of them, or a few hundred.
SOLVED, SOLVED_LARGE = 1e-11, 1e-10
SIZES = [(vocab_size, n) for vocab_size in (2, 3, 4) for n in (1, 2, 3, 4)]


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def _assert_close(actual, expected, atol):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def _laws(vocab_size, num_random=4):
  """Pairs (draft, target) over at least 2 tokens: random and peaked, zeros on either side, disjoint, equal, one-hot."""
  rng = np.random.default_rng(vocab_size)
  one_hot = np.eye(vocab_size)
  half = np.where(np.arange(vocab_size) < vocab_size // 2, 1.0, 0)
  half, other_half = half / half.sum(), (1 - half) / (1 - half).sum()

  def random(concentration=0.7):
    # Without the floor a peaked law may be 0/0.
    weights = rng.gamma(concentration, size=vocab_size) + 1e-12
    return weights / weights.sum()

  def holey():
    weights = random() * (rng.random(vocab_size) < 0.6)
    weights[rng.integers(vocab_size)] += 0.1
    return weights / weights.sum()

  pairs = [(random(), random()) for _ in range(num_random)]
  pairs += [(random(0.1), random(0.1)) for _ in range(num_random)]
  pairs += [(holey(), holey()) for _ in range(num_random)]
  equal = random()
  pairs += [(half, other_half), (half, random()), (random(), half), (equal, equal), (holey(),) * 2]
  first, last = one_hot[0], one_hot[-1]
  return [*pairs, (first, equal), (equal, first), (first, first), (first, last)]


def _all_sets(vocab_size):
  return np.array(list(itertools.product((0, 1), repeat=vocab_size)))


def _tuples(vocab_size, n):
  return np.array(list(itertools.product(range(vocab_size), repeat=n)))


_optimum = jax.jit(optimal_acceptance)


@pytest.mark.parametrize('n', [1, 2, 5])
def test_extremes(n):
  p = np.array([0.1, 0.2, 0.7])
  assert float(_optimum(p, p, n)) == pytest.approx(1, abs=EXACT)
  # Nothing of the target can be drawn: exactly 0.
  assert float(_optimum(np.array([0.4, 0.6, 0]), np.array([0, 0, 1.0]), n)) == 0
  # What the draft does not cover is lost, however many drafts.
  assert float(_optimum(np.array([0.5, 0.5, 0]), np.array([0.3, 0.3, 0.4]), 64)) == pytest.approx(0.6, abs=EXACT)


@pytest.mark.parametrize('vocab_size', [2, 3, 4, 5, 6])
def test_no_set_of_tokens_gives_less(vocab_size):
  sets = _all_sets(vocab_size)
  for p, q in _laws(vocab_size, num_random=8):
    for n in (1, 2, 3, 8):
      least = (1 + sets @ q - (sets @ p) ** n).min()
      assert float(_optimum(p, q, n)) == pytest.approx(least, abs=EXACT)
      if vocab_size**n < 65:  # Theorem 1 holds with equality
        assert transport_bound(p, q, n) == pytest.approx(least, abs=EXACT)
    assert float(_optimum(p, q, 0)) == 0
    np.testing.assert_array_equal(_optimum(p, q, np.array([0, 1]))[0], 0)
    # More drafts accept more, up to the share of the target that can be drawn.
    values = np.asarray(_optimum(p, q, np.array([*range(33), 10**6])))
    assert (np.diff(values) >= -EXACT).all()
    assert values[-1] <= q[p > 0].sum() + EXACT


def test_theorem_1_by_hand():
  # Ber(1/4) to Ber(1/2), two drafts: the set of both tokens gives 1/2 + 7/16, the empty set 1, others more.
  assert transport_bound(*BERNOULLI, 2) == pytest.approx(15 / 16, abs=EXACT)
  assert transport_bound([1, 0], [0, 1], 3) == 0
  for arguments, message in (
    ((np.ones(12) / 12, np.ones(12) / 12, 4), 'at most 10000000 pairs'),
    ((*BERNOULLI, 0), 'num_drafts must be integers from 1 on, got 0'),
  ):
    with pytest.raises(ValueError, match=message):
      transport_bound(*arguments)


def _given_program(p, q, n, given):
  """The largest P(Y is given or drawn) by linear programming: masses of (set of candidates, token in it)."""
  sets, supply = [], []
  for drawn in itertools.product(range(len(p)), repeat=n):
    sets.append(sorted({*drawn, *given}))
    supply.append(math.prod(p[token] for token in drawn))
  pairs = [(i, token) for i, tokens in enumerate(sets) for token in tokens]
  use = np.zeros((len(sets) + len(q), len(pairs)))
  for k, (i, token) in enumerate(pairs):
    use[i, k] = use[len(sets) + token, k] = 1
  # Masses times 2^10: the solver's tolerances are absolute.
  options = {'primal_feasibility_tolerance': 1e-10, 'dual_feasibility_tolerance': 1e-10}
  limits = 1024 * np.array([*supply, *q])
  found = optimize.linprog(-np.ones(len(pairs)), A_ub=use, b_ub=limits, method='highs', options=options)
  return -found.fun / 1024


@pytest.mark.parametrize('n', [0, 1, 2, 3])
def test_given_tokens_beside_drawn_ones(n):
  for index, (p, q) in enumerate(_laws(3)):
    for given in ([index % 3], [0, 2], [0, 1, 2]):
      is_given = np.isin(np.arange(3), given)
      found = float(given_optimum(p, q, n, is_given))
      assert found == pytest.approx(_given_program(p, q, n, given), abs=SOLVED)
      if n == 1:  # what is given is worth what the target likes it more than the draft does
        assert found == pytest.approx(np.minimum(p, q).sum() + np.maximum(q - p, 0)[is_given].sum(), abs=EXACT)
    if n:
      assert float(given_optimum(p, q, n, np.zeros(3, bool))) == pytest.approx(float(_optimum(p, q, n)), abs=EXACT)


def test_leading_axes_and_number_of_drafts_broadcast():
  p, q = (np.stack(laws).reshape(3, 7, 4) for laws in zip(*_laws(4)))
  numbers = np.array([[1], [3], [4]])
  expected = np.array([[float(_optimum(p[i, j], q[i, j], int(numbers[i, 0]))) for j in range(7)] for i in range(3)])
  _assert_close(optimal_acceptance(p, q, numbers), expected, atol=EXACT)
  _assert_close(_optimum(p, q, numbers), expected, atol=EXACT)
  _assert_close(jax.jit(jax.vmap(optimal_acceptance))(p, q, numbers[:, 0]), expected, atol=EXACT)
  per_number = _optimum(p[0, 0], q[0, 0], jnp.arange(6))
  assert per_number.shape == (6,)
  _assert_close(per_number, [_optimum(p[0, 0], q[0, 0], n) for n in range(6)], atol=EXACT)
  # The dtype is that of the distributions.
  assert _optimum(*BERNOULLI, 2).dtype == jnp.float64
  for numbers in (2, np.arange(3, dtype=np.int64)):
    assert optimal_acceptance(*(law.astype(np.float32) for law in BERNOULLI), numbers).dtype == jnp.float32


@pytest.mark.parametrize('noise', [0.01, 1.0, 4.0])
def test_float32_on_a_large_vocabulary(noise):
  # Each term is a sum of 32000 positive numbers by a tree and so right to a few roundings of 6e-8, and no n multiplies
  # them: 1 - (1 - x)^n changes by at most dx/x times 1/e or so.
  rng = np.random.default_rng(0)
  logits = 3 * rng.standard_normal(32000)
  laws = [np.exp(x - x.max()) for x in (logits, logits + noise * rng.standard_normal(32000))]
  narrow = [(law / law.sum()).astype(np.float32) for law in laws]
  wide = [law.astype(np.float64) / law.astype(np.float64).sum() for law in narrow]
  numbers = np.array([1, 2, 8, 64, 4096], np.int32)
  values = _optimum(*narrow, numbers)
  assert values.dtype == jnp.float32
  # In float64 and by the definition: sorted by NumPy, p(A) from the near end.
  p, q = (law[np.argsort(wide[1] / wide[0])] for law in wide)
  expected = [min(1, (1 + np.cumsum(q) - np.cumsum(p) ** n).min()) for n in numbers]
  _assert_close(values, expected, atol=5e-7)
  # 4096 times the rounding of p(A), in the definition.
  _assert_close(_optimum(*wide, numbers), expected, atol=1e-9)


ACCEPTANCE = {
  'kseq': (kseq_acceptance, KSeq()),
  'recursive': (recursive_acceptance, Recursive()),
  'race': (race_acceptance, MaximalAfter(Race())),
}


@jax.jit(static_argnames='coupling')
def _accepted(p, q, tuples, *, coupling):
  outcomes = jax.vmap(lambda candidates: coupling(p, q, candidates, jnp.ones(candidates.shape, bool)))(tuples)
  return jnp.sum(jnp.prod(p[tuples], axis=1) * jnp.sum(outcomes.accept_probs, axis=1))


@pytest.mark.parametrize('name', slow_but(['recursive', 'kseq'], ACCEPTANCE))
def test_acceptance_is_that_of_the_coupling(name):
  """What the laws alone give, against the couplings' outcomes summed over all tuples of candidates."""
  function, coupling = ACCEPTANCE[name]
  for vocab_size, n in ((2, 1), (2, 4), (3, 3), (4, 2)):
    p, q = map(np.stack, zip(*_laws(vocab_size, num_random=2)))
    tuples = _tuples(vocab_size, n)
    expected = [_accepted(*laws, tuples, coupling=coupling) for laws in zip(p, q)]
    _assert_close(function(p, q, n), expected, EXACT)


@pytest.mark.parametrize(('size', 'ratio', 'n'), [(6, 2, 2), (6, 3, 4), (120, 10, 8)])
def test_uniform_laws_have_closed_forms(size, ratio, n):
  """SpecTr, Appendices B.2 and D.1: gamma* = r (1 - (1 - 1/r)^n), where K-SEQ is as good as any rule."""
  p, q = np.full(size, 1 / size), np.where(np.arange(size) < size // ratio, ratio / size, 0)
  accepted = 1 - (1 - 1 / ratio) ** n
  coupling = KSeq(num_rounds=60)
  assert float(kseq_gamma(p, q, n, coupling=coupling)) == pytest.approx(ratio * accepted, abs=1e-11)
  assert float(kseq_acceptance(p, q, n, coupling=coupling)) == pytest.approx(accepted, abs=1e-11)
  assert float(_optimum(p, q, n)) == pytest.approx(accepted, abs=EXACT)


def test_kseq_accepts_at_least_its_share_of_the_optimum():
  """(1 - 1/e) alpha* <= K-SEQ <= alpha* (SpecTr, Theorem 2), at its own threshold."""
  is_less = []
  for vocab_size in (2, 4, 30):
    p, q = map(np.stack, zip(*_laws(vocab_size, num_random=20)))
    for n in (1, 2, 3, 8):
      accepted = np.asarray(kseq_acceptance(p, q, n, coupling=KSeq(num_rounds=60)))
      optimum = np.asarray(_optimum(p, q, np.full(len(p), n)))
      assert (accepted <= optimum + EXACT).all()
      assert (accepted >= (1 - 1 / np.e) * optimum - EXACT).all()
      is_less.append(accepted < optimum - 1e-3)
  # Neither is just the other.
  assert 0.1 < np.concatenate(is_less).mean() < 0.9


@jax.jit
def _outcomes(conditional, p, q, tuples):
  """The coupling's outcomes; the plan is an argument here, so that one program serves all plans of a size."""
  transport = types.SimpleNamespace(plan=conditional, conditional=conditional, num_drafts=tuples.shape[1])
  coupling = TransportCoupling(transport)
  return jax.vmap(lambda candidates: coupling(p, q, candidates, jnp.ones(candidates.shape, bool)))(tuples)


def _emitted(transport, p, q):
  """The law of the emitted token and the chance of acceptance over all tuples, by the coupling's own outcomes."""
  tuples = _tuples(len(p), transport.num_drafts)
  weights = p[tuples].prod(1)
  outcomes = _outcomes(transport.conditional, p, q, tuples)
  accept, residual = np.asarray(outcomes.accept_probs), np.asarray(outcomes.residual)
  assert accept.dtype == residual.dtype == np.float64
  assert (accept >= 0).all()
  assert (accept.sum(1) <= 1 + EXACT).all()
  assert (residual >= 0).all()
  law = np.zeros(len(p))
  np.add.at(law, tuples, weights[:, None] * accept)
  law += (weights * (1 - accept.sum(1))) @ (residual / residual.sum(1, keepdims=True))
  return law, float(weights @ accept.sum(1))


@pytest.mark.parametrize(('vocab_size', 'n'), SIZES)
def test_a_plan_and_its_coupling_give_the_target_and_attain_the_optimum(vocab_size, n):
  tuples = _tuples(vocab_size, n)
  holds = (tuples[:, :, None] == np.arange(vocab_size)).any(1)
  for p, q in _laws(vocab_size):
    transport = optimal_transport(p, q, n)
    assert (transport.num_drafts, transport.plan.dtype) == (n, np.float64)
    assert transport.plan.shape == (vocab_size,) * (n + 1)
    plan = transport.plan.reshape(-1, vocab_size)
    assert (plan >= 0).all()
    _assert_close(plan.sum(1), p[tuples].prod(1), atol=SOLVED)
    _assert_close(plan.sum(0), q, atol=SOLVED)
    assert transport.value == pytest.approx(plan[holds].sum(), abs=EXACT)
    assert transport.value == pytest.approx(float(_optimum(p, q, n)), abs=SOLVED)
    law, acceptance = _emitted(transport, p, q)
    _assert_close(law, q, atol=SOLVED)
    assert acceptance == pytest.approx(transport.value, abs=SOLVED)


def test_the_enumeration_can_tell():
  """With another draft than the plan's the target is missed. Masses within the tolerance are normalized."""
  p, q = BERNOULLI
  law, _ = _emitted(optimal_transport(p, q, 2), p[::-1], q)
  assert np.abs(law - q).max() > 1e-2
  transport = optimal_transport(p * (1 + 5e-10), q * (1 - 5e-10), 2)
  _assert_close(transport.plan, optimal_transport(p, q, 2).plan, atol=SOLVED)


@pytest.mark.parametrize(('vocab_size', 'n'), [(2, 4), (4, 4), (10, 3)])
def test_small_masses_count(vocab_size, n):
  """Peaked laws: most tuples are rarer than the 1e-7 that the solver tolerates unless it is told otherwise."""
  for seed in range(24):
    rng = np.random.default_rng(seed)
    p, q = rng.gamma(0.05 if seed % 2 else 0.3, size=(2, vocab_size)) + 1e-12
    p, q = p / p.sum(), q / q.sum()
    assert optimal_transport(p, q, n).value == pytest.approx(float(_optimum(p, q, n)), abs=SOLVED)


@pytest.mark.parametrize(('vocab_size', 'n'), [(2, 1), (2, 3), (3, 2), (4, 2)])
def test_plan_is_as_good_as_the_published_program(vocab_size, n):
  """SpecTr, equation (4), word for word: V^(n + 1) variables, V^n + V equations."""
  tuples = _tuples(vocab_size, n)
  misses = (tuples[:, :, None] != np.arange(vocab_size)).all(1)
  equations = sparse.vstack(
    [
      sparse.kron(sparse.eye_array(len(tuples)), np.ones((1, vocab_size))),
      sparse.kron(np.ones((1, len(tuples))), sparse.eye_array(vocab_size)),
    ]
  )
  for p, q in _laws(vocab_size, num_random=2):
    masses = np.concatenate([p[tuples].prod(1), q])
    result = optimize.linprog(misses.ravel().astype(float), A_eq=equations.tocsr(), b_eq=masses, method='highs')
    # Each of its at most 20 constraints holds to 1e-7, the solver's tolerance.
    assert optimal_transport(p, q, n).value == pytest.approx(1 - result.fun, abs=2e-6)


@pytest.mark.parametrize('function', [kseq_acceptance, race_acceptance, recursive_acceptance, optimal_transport])
def test_numbers_of_drafts_that_are_none_are_refused(function):
  for number in (0, 1.5, math.nan, '2', None, [1, 2]):
    with pytest.raises(ValueError, match='num_drafts must be'):
      function(*BERNOULLI, number)
  for number in (1.5, '2', None):
    with pytest.raises(ValueError, match='num_drafts must be of integers'):
      optimal_acceptance(*BERNOULLI, number)


@pytest.mark.parametrize('function', [kseq_acceptance, race_acceptance, recursive_acceptance])
def test_distributions_of_whole_numbers_are_distributions(function):
  assert [float(function([1, 0], other, 2)) for other in ([1, 0], [0, 1])] == [1, 0]
  with pytest.raises(ValueError, match='V at least 1'):
    function([], [], 2)


def test_a_coupling_follows_its_plan():
  p, q = BERNOULLI
  transport = optimal_transport(p, q, 3)
  coupling = transport.coupling()
  outcome = coupling(p, q, jnp.array([0, 1, 0]), jnp.ones(3, bool))
  conditional = transport.plan[0, 1, 0] / transport.plan[0, 1, 0].sum()
  _assert_close(outcome.accept_probs, [conditional[0], conditional[1], 0], atol=EXACT)  # repeated: to the first
  assert outcome.residual.sum() > 0  # both tokens are candidates: nothing is left but the fallback
  for size, num_candidates in ((2, 2), (3, 3)):
    message = rf'3 candidates and distributions \[2\], got candidates \[{num_candidates}\] and distributions \[{size}\]'
    with pytest.raises(ValueError, match=message):
      coupling(*2 * [np.ones(size) / size], jnp.zeros(num_candidates, jnp.int32), jnp.ones(num_candidates, bool))


def test_what_is_not_in_the_plan_gets_the_target():
  p, q = np.array([0.5, 0.5, 0]), np.array([0.2, 0.5, 0.3])
  coupling = optimal_transport(p, q, 2).coupling()
  # A tuple that cannot be drawn, and some with an invalid candidate.
  for candidates, is_valid in (([0, 2], [True, True]), ([0, 1], [True, False]), ([-1, -1], [False, False])):
    outcome = coupling(p, q, jnp.array(candidates), jnp.array(is_valid))
    np.testing.assert_array_equal(outcome.accept_probs, 0)
    np.testing.assert_array_equal(outcome.residual, q)


def test_coupling_is_static_and_keeps_the_dtype():
  p, q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.5, 0.3])
  transport = optimal_transport(p, q, 2)
  coupling, num_traces = transport.coupling(), 0
  assert isinstance(coupling, TransportCoupling)
  assert coupling.proposal_rules == (Independent,)
  assert coupling != optimal_transport(p, q, 2).coupling()

  def apply(coupling, *arguments):
    nonlocal num_traces
    num_traces += 1
    return coupling(*arguments)

  jitted = jax.jit(apply, static_argnums=0)
  arguments = np.array([0, 1], np.int32), np.ones(2, bool)
  for equal in (coupling, transport.coupling()):
    narrow = jitted(equal, p.astype(np.float32), q.astype(np.float32), *arguments)
  assert num_traces == 1
  wide = jitted(coupling, p, q, *arguments)
  assert narrow.accept_probs.dtype == narrow.residual.dtype == jnp.float32
  assert wide.accept_probs.dtype == wide.residual.dtype == jnp.float64
  # One rounding of numbers up to 1.
  _assert_close(narrow.accept_probs, wide.accept_probs, atol=1e-7)
  np.testing.assert_array_equal(coupling(p, q, *map(jnp.asarray, arguments)).accept_probs, wide.accept_probs)
  with pytest.raises(ValueError, match='read-only'):
    transport.plan[0, 0, 0] = 1


@pytest.mark.parametrize(('vocab_size', 'n'), [(1, 5), (2, 15), (10, 4), (316, 1)])
def test_the_largest_plans(vocab_size, n):
  rng = np.random.default_rng(0)
  p, q = rng.dirichlet(np.ones(vocab_size)), rng.dirichlet(np.ones(vocab_size))
  transport = optimal_transport(p, q, n)
  assert transport.value == pytest.approx(float(_optimum(p, q, n)), abs=SOLVED_LARGE)
  _assert_close(transport.plan.reshape(-1, vocab_size).sum(0), q, atol=SOLVED_LARGE)
