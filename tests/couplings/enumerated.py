"""Couplings by enumeration: every tuple of candidates, every decision, by the library's own functions."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.couplings import KSeq, Maximal, MaximalAfter, OverAccept, Race, Recursive, SingleDraft
from spectr_jax.proposal import WithoutReplacement

BERNOULLI = np.array([0.75, 0.25]), np.array([0.5, 0.5])
# Sums of at most 4^3 products of float64: 1e-14 each, and a residual's division.
EXACT = 1e-12
# A race's law is an integral by 160 nodes: what it leaves out is below 1e-13, and rounds add a few 1e-14.
INTEGRAL = 1e-11


@dataclasses.dataclass(frozen=True)
class AtGamma(KSeq):
  """K-SEQ at another threshold: `place` 0 is gamma*, 1 is n, below 0 lies between 1 and gamma*."""

  num_rounds: int = 60
  place: float = 0.0

  def gamma(self, draft_probs, target_probs, num_candidates):
    root = super().gamma(draft_probs, target_probs, num_candidates)
    end = num_candidates if self.place >= 0 else 1
    return root + abs(self.place) * (end - root)


# Weights of every quality, since none may cost the law: not fitted, overshooting, in two classes, in a narrow range,
# in classes as wide as an octave.
RACES = [
  Race(), Race(num_rounds=0), Race(step=2.3), Race(num_classes=2, num_rounds=1), Race(log_range=1.0),
  Race(num_classes=6, octave_bits=0, num_rounds=1),
]  # fmt: skip
# For any number of candidates, and for one: each emits the target.
COUPLINGS = [KSeq(), Recursive(), Recursive(with_replacement=False), MaximalAfter(Race())]
ONE_DRAFT = [Maximal(), MaximalAfter(SingleDraft()), OverAccept(epsilon=0.0, has_best_residual=True)]


def assert_close(actual, expected, atol):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def exactness(coupling):
  return INTEGRAL if isinstance(getattr(coupling, 'selection', None), Race) else EXACT


@functools.cache
def jitted(function, axes=(None, None, 0, 0)):
  return jax.jit(jax.vmap(function, axes))


@functools.partial(jax.jit, static_argnums=0)
def apply(coupling, draft_probs, target_probs, candidates, is_valid):
  return coupling(draft_probs, target_probs, candidates, is_valid)


def outcome_of(coupling, draft_probs, target_probs, candidates, is_valid, dtype=np.float64):
  laws = np.asarray(draft_probs, dtype), np.asarray(target_probs, dtype)
  return apply(coupling, *laws, np.asarray(candidates, np.int32), np.asarray(is_valid))


@functools.cache
def _probability(rule):
  return jitted(rule().probability, (None, 0))


def all_candidates(draft_probs, n, rule):
  """All tuples of n candidates and the probability of each; -1 where the law has run out of tokens."""
  lowest = -1 if rule == WithoutReplacement else 0
  tuples = np.array(list(itertools.product(range(lowest, len(draft_probs)), repeat=n)))
  return tuples, np.asarray(_probability(rule)(jnp.asarray(draft_probs), tuples))


def emitted_law(coupling, draft_probs, target_probs, n, places=None):
  """The law of the emitted token and the chance of acceptance, over all tuples of n candidates drawn from the draft.

  There is room for three, so that a coupling is compiled once; the candidates stand at `places`, by default the first,
  and the rest is invalid.
  """
  vocab_size, places = len(draft_probs), list(range(n) if places is None else places)
  tuples, weights = all_candidates(draft_probs, 3, coupling.proposal_rules[0])  # those after the n-th are summed out
  drawn = tuples[:, :n]
  tuples = np.full_like(tuples, np.argmax(target_probs))
  is_valid = np.zeros(tuples.shape, bool)
  tuples[:, places], is_valid[:, places] = np.maximum(drawn, 0), drawn >= 0
  outcome = jitted(coupling)(jnp.asarray(draft_probs), jnp.asarray(target_probs), tuples, is_valid)
  accept, residual = np.asarray(outcome.accept_probs), np.asarray(outcome.residual)
  assert accept.dtype == np.float64
  assert np.isfinite(accept).all()
  assert (accept >= 0).all()
  is_possible = weights > 0
  assert (accept[is_possible].sum(1) <= 1 + exactness(coupling)).all()
  assert (accept[~is_valid] == 0).all()
  assert (residual >= 0).all()
  weights = weights * is_possible
  law = np.zeros(vocab_size)
  np.add.at(law, tuples, weights[:, None] * accept)
  rejected = weights * (1 - accept.sum(1))
  law += rejected @ (residual / residual.sum(1, keepdims=True))
  return law, float(weights @ accept.sum(1))


def law_pairs():
  """Pairs (draft, target): random, with zeros on either side, disjoint, equal, one-hot."""
  rng = np.random.default_rng(0)
  pairs = [(rng.dirichlet(np.full(4, 0.7)), rng.dirichlet(np.full(4, 0.7))) for _ in range(6)]
  pairs += [
    (np.array([0.5, 0.5, 0, 0]), np.array([0.1, 0.2, 0.3, 0.4])),
    (np.array([0.1, 0.2, 0.3, 0.4]), np.array([0, 0, 0.5, 0.5])),
    (np.array([0.3, 0, 0.7, 0]), np.array([0, 0.6, 0.2, 0.2])),
    (np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.9, 0.1])),
    (np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.1, 0.2, 0.3, 0.4])),
    (np.array([0.5, 0, 0, 0.5]), np.array([0.5, 0, 0, 0.5])),
    (np.array([1.0, 0, 0, 0]), np.array([0.25, 0.25, 0.25, 0.25])),
    (np.array([0.25, 0.25, 0.25, 0.25]), np.array([0, 1.0, 0, 0])),
    (np.array([1.0, 0, 0, 0]), np.array([1.0, 0, 0, 0])),
    (np.array([1 - 3e-12, 1e-12, 1e-12, 1e-12]), np.array([1e-12, 1e-12, 1e-12, 1 - 3e-12])),
  ]
  return pairs


def optimal_by_sets(p, q, n):
  """alpha*: the least of 1 + q(A) - p(A)^n over all sets A of tokens."""
  sets = np.array(list(itertools.product((0, 1), repeat=len(p))))
  return (1 + sets @ q - (sets @ p) ** n).min()


def language_laws(seed, count=24, vocab_size=4096):
  """Pairs like those of language models, float32: probabilities by rank as a power law, a draft that errs in logits."""
  rng = np.random.default_rng(seed)
  pairs = []
  for _ in range(count):
    logits = -rng.uniform(0.8, 2.4) * np.log1p(rng.permutation(vocab_size)) + rng.normal(size=vocab_size)
    drafted = logits + rng.uniform(0.3, 1.5) * rng.normal(size=vocab_size)
    pairs.append([np.exp(x - np.logaddexp.reduce(x)) for x in (drafted, logits)])
  return np.swapaxes(np.array(pairs, np.float32), 0, 1)
