"""Race selection: a weighted race picks one of n i.i.d. candidates; its winner's exact distribution is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from spectr_jax.couplings.coupling import SelectionExplanation, ratio
from spectr_jax.couplings.given import given_set, with_given
from spectr_jax.couplings.selection import Pick, Selection
from spectr_jax.kernels.class_sums import entries_of, sums_by_class
from spectr_jax.kernels.on_demand import where_needed
from spectr_jax.kernels.race_fit import fit_race

_FINER_BITS = 2  # by which the octaves near 1 are finer


def _classes(
  draft_probs: jax.Array,
  target_probs: jax.Array,
  *,
  lowest: float,
  octave_bits: int,
  fine_octaves: int,
  num_classes: int,
) -> jax.Array:
  """The class of each token by its ratio q/p; int32, non-decreasing in the ratio, the highest where p is 0.

  The leading bits of a positive float are a piecewise linear logarithm of it. So the exponent and `octave_bits` bits of
  the mantissa cut every octave into 2^octave_bits classes, without a logarithm or a sort; two bits more where the
  octave is one of the `fine_octaves` on either side of 1. Ratios outside the range go to the first or last class.
  """
  ratios = target_probs / jnp.maximum(draft_probs, jnp.finfo(draft_probs.dtype).tiny)
  bits_dtype, mantissa = (jnp.int32, 23) if ratios.dtype.itemsize == 4 else (jnp.int64, 52)

  def leading(x, octave_bits):
    return jax.lax.bitcast_convert_type(jnp.asarray(x, ratios.dtype), bits_dtype) >> (mantissa - octave_bits)

  classes = leading(ratios, octave_bits) - leading(lowest, octave_bits)
  if fine_octaves:
    first, last = (leading(2.0**exponent, octave_bits + _FINER_BITS) for exponent in (-fine_octaves, fine_octaves))
    passed = jnp.clip(leading(ratios, octave_bits + _FINER_BITS), first, last) - first
    classes += passed - (passed >> _FINER_BITS)
  return jnp.clip(classes, 0, num_classes - 1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Race(Selection):
  """Picks a candidate with weights that depend on its ratio q/p, chosen so that the winner comes close to the target.

  The race approaches SpecTr's optimal transport (Sun et al. 2023, eq. 4); it is not in the papers. Tokens are put in
  classes by q/p. The optimal acceptance is the minimum over sets A of 1 + q(A) - p(A)^n, and a set of low classes
  attains it. Candidates of classes above A always win against those in A. On either side one candidate is picked with
  probability proportional to its class's weight w, like the smallest of independent Exp(w); a token drawn twice has two
  tickets. So the winner's distribution is, for x above A,

      n p(x) w(x) Int_0^inf e^{-w(x) z} phi(z)^{n-1} dz,    phi(z) = sum of p e^{-w z} above, plus p(A),

  and for x in A the same with phi summed over A alone. Within a class it is proportional to p, so the class masses are
  enough to compute it. A few multiplicative rounds fit the weights to the best distribution of the picked class. For
  any weights `Pick.probs` is the distribution that they give. It is exact up to the integral, a trapezoidal sum with a
  relative error below 1e-6.

  Given candidates, the set D, may stand beside the n drawn ones. The optimal acceptance is then the minimum over sets A
  that contain D, or 1, since a pick lies in A if all drawn candidates do. So D is the lowest class, whatever its ratio.
  It holds one ticket of weight W on its side of the cut, and drawn candidates that fall in D hold none. On that side

      pt(x) = n p(x) w(x) Int e^{-w(x) z} phi(z)^{n-1} e^{-W z} dz    for x outside D,
      pt(d) = q(d) / q(D) Int W e^{-W z} phi(z)^n dz                  for d in D,

  with phi as before, and e^{-w z} replaced by 1 on D. Within D the pick is proportional to q. D competes with every
  class of its side, at very different odds. So positions that may have given candidates take the finer race of
  `beside_given`.

  Attributes:
    num_classes: Number of classes of q/p, from 1/23 upwards. It limits how close the acceptance comes to the optimum.
    octave_bits: Each octave of q/p is cut into 2^octave_bits classes.
    fine_octaves: This many octaves on either side of 1, where most tokens are, are cut four times finer.
    num_rounds: Rounds of fitting.
    step: The change of a log weight per round, as a multiple of the log of the missing factor, at most 2; beside given
      candidates, of the factor that the odds lack, at most 1.
    log_range: Weights on one side differ at most by e^log_range.
  """

  num_classes: int = 40
  octave_bits: int = 2
  fine_octaves: int = 0
  num_rounds: int = 6
  step: float = 1.4
  log_range: float = 12.0
  takes_mixed = True
  explanation = SelectionExplanation(
    path='At each position a weighted race picks one candidate; p̃ is the distribution of what it picks.',
    token='A weighted race picks one candidate; it is accepted with min(1, q/p̃), where p̃ is the distribution of what'
    ' the race picks.',
    law='p̃',
    plain_path='At each position the candidates run a race, weighted towards what the target wants, and the winners'
    ' form one path.',
    plain_token='The candidates run a race, weighted towards what the target wants, and only the winner is judged. It'
    ' is accepted as often as the target covers its chance to win; otherwise the token is drawn from what the target'
    ' still lacks.',
  )

  def beside_given(self) -> Race:
    """The race for positions that may have given candidates: finer classes of the same ratios, and more rounds."""
    octave_bits, fine_octaves = self.octave_bits + 1, 3
    num_finer = 2 * fine_octaves * 2**octave_bits * (2**_FINER_BITS - 1)
    return dataclasses.replace(
      self,
      num_classes=2 * self.num_classes + num_finer,
      octave_bits=octave_bits,
      fine_octaves=fine_octaves,
      num_rounds=self.num_rounds * 5 // 3,
      step=self.step / 2,
      log_range=self.log_range + 4,
    )

  def __call__(self, draft_probs, target_probs, candidates, is_valid, is_given=None) -> Pick:
    if is_given is not None:
      race = self.beside_given()
      return race._pick_mixed(draft_probs, target_probs, candidates, is_valid, is_given & is_valid)
    num_valid = jnp.sum(is_valid)
    is_some, is_many = num_valid > 0, num_valid > 1
    # With one candidate the picked token has the draft's distribution.
    alone = is_valid.astype(draft_probs.dtype), jnp.zeros(self.num_classes, draft_probs.dtype)
    pick_probs, scale = where_needed(is_many, self.select, alone, draft_probs, target_probs, candidates, is_valid)
    alone = jnp.where(is_some, draft_probs, 0)
    probs = where_needed(is_many, self.picked_probs, alone, draft_probs, target_probs, scale)
    p, q = draft_probs[candidates], target_probs[candidates]
    own = jnp.where(is_many, self.picked_probs(p, q, scale), p)
    return Pick(pick_probs, probs, jnp.where(is_valid, own, 0))

  def _pick_mixed(self, draft_probs, target_probs, candidates, is_valid, is_given) -> Pick:
    """The pick among candidates of which some may be given."""
    num_drawn, has_given = jnp.sum(is_valid & ~is_given), jnp.any(is_given)
    is_raced = num_drawn + has_given > 1
    p, q = draft_probs[candidates], target_probs[candidates]
    laws = draft_probs, target_probs
    pick_probs, scale = where_needed(
      is_raced, self.select, self.without_race(q, candidates, is_valid, is_given), *laws, candidates, is_valid, is_given
    )
    is_alone = (num_drawn > 0) & ~has_given
    alone = jnp.where(is_alone, draft_probs, 0)
    probs = where_needed(is_raced, self.picked_probs, alone, *laws, scale[1:])
    probs = with_given(probs, target_probs, jnp.where(is_given, candidates, len(probs)), scale[0])
    own = jnp.where(is_raced, self.picked_probs(p, q, scale[1:]), jnp.where(is_alone, p, 0))
    is_member = jnp.any((candidates[:, None] == candidates) & is_given, axis=-1)
    return Pick(pick_probs, probs, jnp.where(is_valid, jnp.where(is_member, q * scale[0], own), 0))

  def without_race(
    self, target_probs: jax.Array, candidates: jax.Array, is_valid: jax.Array, is_given: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The pick, as of `select`, where nothing competes: at most one candidate is drawn and none is given, or all are.

    All arguments are `[n]`; `target_probs` are those of the candidates.
    """
    given = given_set(candidates, target_probs, is_given)
    scale = jnp.full(self.num_classes, ~given.is_there, target_probs.dtype)
    pick_probs = jnp.where(given.is_there, given.shares, is_valid)
    return pick_probs, jnp.concatenate([ratio(given.is_there, given.mass)[None], scale]).astype(target_probs.dtype)

  def classes(self, draft_probs: jax.Array, target_probs: jax.Array) -> jax.Array:
    """The class of each token, int32 of the shape of p and q."""
    return _classes(
      draft_probs,
      target_probs,
      lowest=1 / 23,
      octave_bits=self.octave_bits,
      fine_octaves=self.fine_octaves,
      num_classes=self.num_classes,
    )

  def picked_probs(self, draft_probs: jax.Array, target_probs: jax.Array, scale: jax.Array) -> jax.Array:
    """The probability that a token is the picked one, from its p and q, of any shape; proportional to p in a class.

    `scale` `[C]` is from `select`, without the entry of given candidates. Ones give the draft's distribution, that of a
    single candidate.
    """
    classes = self.classes(draft_probs, target_probs)
    return draft_probs * entries_of(scale, classes)

  def select(
    self,
    draft_probs: jax.Array,
    target_probs: jax.Array,
    candidates: jax.Array,
    is_valid: jax.Array,
    is_given: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """The pick among candidates that compete, and the scale from which `picked_probs` gives its distribution.

    Args:
      draft_probs, target_probs, candidates, is_valid: As in `Coupling.__call__`; at least two candidates are valid.
      is_given: bool `[n]`, which of the valid candidates are given, while at least one is drawn; None if all are drawn.

    Returns:
      `[n]`, the probability that each candidate is picked; `[C]`, the picked token's distribution in units of p, by
      class. With `is_given` it is `[1 + C]`: the first entry belongs to the given candidates and is in units of q.
    """
    dtype = draft_probs.dtype
    classes = self.classes(draft_probs, target_probs)
    own = self.classes(draft_probs[candidates], target_probs[candidates])
    if is_given is None:
      masses = self.masses(draft_probs, target_probs, classes)
      log_weights, is_high, picked = self.fit(masses, jnp.sum(is_valid).astype(dtype))
      tickets = jnp.exp(log_weights[own])
      units = masses[:, 0]
    else:
      given = given_set(candidates, target_probs[candidates], is_given)
      # Drawn candidates that fall in the set hold no ticket, so the set is taken out of the other classes.
      tokens = jnp.where(is_given, candidates, len(draft_probs))
      rest, target_rest = (probs.at[tokens].set(0, mode='drop') for probs in (draft_probs, target_probs))
      set_masses = jnp.stack([jnp.sum(jnp.where(given.is_first, draft_probs[candidates], 0)), given.mass])
      masses = jnp.concatenate([set_masses[None], self.masses(rest, target_rest, classes)])
      num_drawn = jnp.sum(is_valid & ~is_given).astype(dtype)
      log_weights, is_high, picked = self.fit(masses, num_drawn, given.is_there)
      own = jnp.where(given.is_member, 0, own + 1)
      tickets = jnp.exp(log_weights[own]) * jnp.where(given.is_member, given.shares, 1)
      is_valid &= given.is_first | ~given.is_member
      units = masses[:, 0].at[0].set(given.mass)
    is_eligible = is_valid & (is_high[own] | ~jnp.any(is_valid & is_high[own]))
    tickets = jnp.where(is_eligible, tickets, 0)
    return tickets / jnp.sum(tickets), ratio(picked, units)

  def masses(self, draft_probs: jax.Array, target_probs: jax.Array, classes: jax.Array) -> jax.Array:
    """The masses of draft and target by class, `[C, 2]`."""
    return sums_by_class((draft_probs, target_probs), classes, self.num_classes)

  def fit(
    self, masses: jax.Array, num_candidates: jax.Array, has_given: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`kernels.race_fit.fit_race` with the options of this race; arguments and results as there."""
    given = () if has_given is None else (has_given,)
    return fit_race(masses, num_candidates, *given, **self.fit_options(masses.dtype))

  def fit_options(self, dtype: DTypeLike) -> dict[str, Any]:
    """The options of `fit_race` for masses of a type."""
    nodes, spacing = self._integral(dtype)
    options = {'num_rounds': self.num_rounds, 'step': self.step, 'log_range': self.log_range}
    return {'nodes': nodes, 'spacing': spacing, **options}

  def _integral(self, dtype):
    """The points of the integral and their weights, of a trapezoidal sum."""
    distance, pad = (0.4683, 14.0) if jnp.dtype(dtype).itemsize == 4 else (0.2988, 32.0)
    # Substituting z = e^y makes the integrand smooth and small at both ends, where a trapezoidal sum is most accurate.
    # In the left tail e^{-w z} is 1; the right tail is below e^{-e^3.5}.
    last = self.log_range + 3.5
    y = np.linspace(-pad, last, 1 + round((last + pad) / distance))
    nodes = np.exp(y)
    spacing = nodes * (y[1] - y[0])
    spacing[[0, -1]] /= 2
    spacing[0] += nodes[0]
    return nodes.astype(dtype), spacing.astype(dtype)
