"""Optimal transport from n independent candidates to one token of the target, as a linear program for small cases."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from spectr_jax.couplings.coupling import Coupling, Outcome
from spectr_jax.proposal import Independent
from spectr_jax.sampling import positive_part_or
from spectr_jax.theory.arguments import as_pair, whole_number
from spectr_jax.theory.linear_program import maximize

MAX_PLAN_SIZE = 10**5
MAX_BOUND_SIZE = 10**7
_TOLERANCE = 1e-9  # of a sum from 1


@dataclasses.dataclass(frozen=True, eq=False)
class TransportPlan:
  """A joint distribution of n candidates and the emitted token, with marginals p^n and q.

  Plans are compared and hashed by identity.

  Attributes:
    plan: float64 `[V] * n + [V]`, read-only; the last axis is the emitted token.
    value: P(Y is one of the candidates).
    num_drafts: n.
  """

  plan: np.ndarray
  value: float
  num_drafts: int

  @functools.cached_property
  def conditional(self) -> np.ndarray:
    """The emitted token's distribution given the candidates, float64 `[V] * n + [V]`; 0 for impossible candidates."""
    mass = self.plan.sum(axis=-1, keepdims=True)
    return np.divide(self.plan, mass, out=np.zeros_like(self.plan), where=mass > 0)

  def coupling(self) -> TransportCoupling:
    """The plan as a `Coupling`. It is hashable, and couplings of the same plan are equal."""
    return TransportCoupling(self)


@dataclasses.dataclass(frozen=True)
class TransportCoupling(Coupling):
  """Accepts according to a transport plan (SpecTr, section 5: OTM-k). It is for proofs and figures, not for decoding.

  The emitted token's distribution given the candidates is looked up in the plan, which becomes a constant of the
  program. So the coupling is correct only for the two distributions that the plan was made for, and only if all n
  candidates are valid. It does not compare the distributions of a call with the plan's. A token held by several
  candidates is credited to the first of them. If some candidates are invalid or the tuple cannot be drawn, no candidate
  is accepted and the token is drawn from the target.
  """

  transport: TransportPlan
  proposal_rules = (Independent,)

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    shape = self.transport.plan.shape
    sizes = draft_probs.shape, target_probs.shape
    if sizes != (shape[-1:],) * 2 or candidates.shape != (self.transport.num_drafts,):
      raise ValueError(
        f'the plan is for {self.transport.num_drafts} candidates and distributions [{shape[-1]}], got'
        f' candidates {list(candidates.shape)} and distributions {list(sizes[0])} and {list(sizes[1])}'
      )
    emitted = jnp.asarray(self.transport.conditional, target_probs.dtype)[tuple(candidates)]
    is_planned = jnp.all(is_valid) & jnp.any(emitted > 0)
    is_repeated = jnp.any(jnp.tril(candidates[:, None] == candidates, -1), axis=-1)
    accept_probs = jnp.where(is_planned & ~is_repeated, emitted[candidates], 0)
    residual = jnp.where(is_planned, emitted.at[candidates].set(0), 0)
    return Outcome(accept_probs, positive_part_or(residual, target_probs))


def _check(draft_probs, target_probs, num_drafts: int) -> tuple[np.ndarray, np.ndarray]:
  """Both distributions in float64 `[V]`, normalized again; ValueError if an argument does not fit."""
  for name, probs in (('draft_probs', draft_probs), ('target_probs', target_probs)):
    if np.ndim(probs) != 1 or not np.size(probs):
      raise ValueError(f'{name} must have shape [V], V at least 1; got {np.shape(probs)}')
  whole_number(num_drafts, 'num_drafts')
  return as_pair(draft_probs, target_probs, tolerance=_TOLERANCE)


def _tuples(vocab_size: int, num_drafts: int) -> tuple[np.ndarray, np.ndarray]:
  """All tuples of candidates, `[n, V^n]`, and the tokens that each holds, bool `[V^n, V]`."""
  tuples = np.indices((vocab_size,) * num_drafts).reshape(num_drafts, -1)
  return tuples, (tuples[:, :, None] == np.arange(vocab_size)).any(axis=0)


def optimal_transport(draft_probs, target_probs, num_drafts: int) -> TransportPlan:
  """A plan with the largest probability that the emitted token is one of n independent candidates.

  This is the linear program (4) of SpecTr (Sun et al. 2023) in a smaller form. Tuples of candidates that hold the same
  set of tokens have the same cost. So each set is one source, shared by its tuples in proportion to p^n. Only pairs
  (set, token in it) contribute to the acceptance. They are the variables of a maximum flow, bounded by the masses of
  the sets and tokens. The rest of p^n and q is coupled independently.

  It runs on the host in float64, for small vocabularies, and serves proofs and figures. `optimal_acceptance` gives the
  value for any V.

  It is any of the optimal plans, for distributions p and q, `[V]`, and n of at least 1; ValueError for other arguments,
  and for plans too large; RuntimeError if the solver fails.
  """
  from scipy import sparse

  draft_probs, target_probs = _check(draft_probs, target_probs, num_drafts)
  vocab_size = len(draft_probs)
  if vocab_size ** (num_drafts + 1) > MAX_PLAN_SIZE:
    raise ValueError(
      f'a plan has V^(n + 1) entries, at most {MAX_PLAN_SIZE} are allowed; got V = {vocab_size} and n = {num_drafts}'
    )

  tuples, is_candidate = _tuples(vocab_size, num_drafts)
  drafted = draft_probs[tuples].prod(axis=0)
  sets, set_of = np.unique(is_candidate, axis=0, return_inverse=True)
  set_of = set_of.reshape(-1)
  set_probs = np.bincount(set_of, drafted)

  set_index, token = np.nonzero(sets)
  ones, variable = np.ones(len(token)), np.arange(len(token))
  incidence = sparse.vstack(
    [sparse.csr_array((ones, (set_index, variable))), sparse.csr_array((ones, (token, variable)))]
  )
  _, flow = maximize(ones, incidence, np.concatenate([set_probs, target_probs]))
  joint = np.zeros(sets.shape)
  joint[set_index, token] = flow
  set_left = np.maximum(set_probs - joint.sum(axis=1), 0)
  token_left = np.maximum(target_probs - joint.sum(axis=0), 0)
  if token_left.sum() > 0:
    joint += np.outer(set_left, token_left / token_left.sum())

  share = np.divide(drafted, set_probs[set_of], out=np.zeros_like(drafted), where=drafted > 0)
  plan = share[:, None] * joint[set_of]
  value = float(plan[is_candidate].sum())
  plan = plan.reshape((vocab_size,) * (num_drafts + 1))
  plan.setflags(write=False)  # plans are hashed by identity
  return TransportPlan(plan, value, num_drafts)


def transport_bound(draft_probs, target_probs, num_drafts: int) -> float:
  """The information-theoretic bound on the acceptance of n independent candidates, a minimum over sets of tokens.

  The minimum over sets O of tokens of

      sum over y in O of min(q(y), 1 - (1 - p(y))^n)  +  sum over tuples x of min(p^n(x), q(tokens of x outside O)).

  It equals `optimal_acceptance`, which needs one sort. This is the formula as published, for small vocabularies.

  Source: SpecTr (Sun et al. 2023), Theorem 1.

  It is a number from 0 to 1, for distributions p and q, `[V]`, and n of at least 1; ValueError for other arguments, and
  for too many sets.
  """
  draft_probs, target_probs = _check(draft_probs, target_probs, num_drafts)
  vocab_size = len(draft_probs)
  if (size := 2**vocab_size * vocab_size**num_drafts) > MAX_BOUND_SIZE:
    raise ValueError(f'at most {MAX_BOUND_SIZE} pairs of a set and a tuple are allowed, 2^V V^n; got {size}')
  tuples, is_candidate = _tuples(vocab_size, num_drafts)
  is_inside = np.indices((2,) * vocab_size).reshape(vocab_size, -1)
  reached = np.minimum(target_probs, 1 - (1 - draft_probs) ** num_drafts) @ is_inside
  outside = is_candidate @ (target_probs[:, None] * (1 - is_inside))
  return float(np.min(reached + np.minimum(draft_probs[tuples].prod(axis=0)[:, None], outside).sum(axis=0)))
