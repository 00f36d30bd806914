"""One race among the candidates of several contexts, which share a mass: the weights, and what is picked."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from spectr_jax.couplings.race import Race

_LEAST = 1e-30  # of probabilities whose ratio is taken


class LayerRace(NamedTuple):
  """The result of a race among contexts, by context and class of q/p.

  Attributes:
    log_weights: `[W, C]`.
    scale: `[W, C]`, the probability that a token of a context is picked, in units of its p.
  """

  log_weights: jax.Array
  scale: jax.Array


def _goal(number: jax.Array, draft: jax.Array, target: jax.Array) -> jax.Array:
  """The best probability that each cell, a class of a context, is picked; `[W, C]`, as `draft` and `target`.

  Cells are sorted by their ratio. A set A of low cells is picked at least when all candidates lie in it, with
  probability S(A), and its tokens can be used at most Q(A) of the time. So E = [S - Q]+ at the worst set is lost, and
  the goal takes this excess from the cells below that set, and leaves the cells above it as they are.
  """
  size = draft.size
  is_possible = draft > 0
  order = jnp.argsort(jnp.where(is_possible, target / jnp.where(is_possible, draft, 1), jnp.inf).reshape(-1))
  context = order // draft.shape[1]
  own = jnp.where(context[:, None] == jnp.arange(len(draft)), draft.reshape(-1)[order][:, None], 0)
  inside = jnp.minimum(jnp.cumsum(own, axis=0), 1)
  all_inside = jnp.exp(jnp.sum(number * jnp.log(jnp.maximum(inside, jnp.finfo(draft.dtype).tiny)), axis=1))
  used = target.reshape(-1)[order]
  excess = jnp.maximum(all_inside - jnp.cumsum(used), 0)
  worst = jnp.argmax(excess)
  rising, falling = jax.lax.cummax(excess), jax.lax.cummax(excess, reverse=True)
  excess = jnp.where(jnp.arange(size) <= worst, rising, falling)
  goal = used + excess - jnp.concatenate([jnp.zeros_like(excess[:1]), excess[:-1]])
  return jnp.zeros(size, draft.dtype).at[order].set(goal).reshape(draft.shape)


def fit_layer_race(
  race: Race, masses: jax.Array, number: jax.Array, credits: jax.Array, num_rounds: jax.Array
) -> LayerRace:
  """The race among all candidates of a layer, whose winner comes close to what the contexts can use.

  Context c has n_c candidates drawn from p_c, and can use a token y with probability P_c q_c(y). A candidate of class b
  has the weight w_cb and is picked with probability proportional to it. So a token y of class b is picked from c with

      pt_c(y) = n_c p_c(y) w_cb Int_0^inf e^{-w_cb z} phi_c(z)^{n_c - 1} prod over others of phi(z)^n dz,

  where phi_c(z) is the sum over classes of p_cb e^{-w_cb z}. The weights begin in proportion to P_c q_c / p_c. Rounds
  of fitting bring the classes' probabilities towards the best that all sets of classes allow. Whatever the weights,
  `scale` is exact up to the integral, a trapezoidal sum.

  Args:
    race: Classes, steps and the range of weights.
    masses: `[W, C, 2]`, the masses of p and q by context and class.
    number: `[W]`, candidates of each context; 0 for those that take no part.
    credits: `[W]`, P of each context; their sum is at most 1.
    num_rounds: int32 scalar, rounds of fitting, in place of the race's own.
  """
  dtype = masses.dtype
  takes_part = (number > 0)[:, None]
  draft = jnp.where(takes_part, masses[..., 0], 0)
  target = jnp.where(takes_part, credits[:, None] * masses[..., 1], 0)
  goal = _goal(number, draft, target)
  options = race.fit_options(dtype)
  nodes, spacing = options['nodes'], options['spacing']
  tiny = jnp.finfo(dtype).tiny

  def scale_of(log_weights):
    weights = jnp.exp(log_weights)
    decay = jnp.exp(-weights[..., None] * nodes)  # [W, C, Z]
    phi = jnp.maximum(jnp.sum(draft[..., None] * decay, axis=1), tiny)  # [W, Z]
    log_phi = jnp.where(takes_part, jnp.log(phi), 0)
    others = jnp.exp(jnp.sum(number[:, None] * log_phi, axis=0) - log_phi) * spacing
    return number[:, None] * weights * jnp.sum(others[:, None] * decay, axis=-1)

  def improve(_, log_weights):
    missing = jnp.log(jnp.maximum(goal, _LEAST)) - jnp.log(jnp.maximum(draft * scale_of(log_weights), _LEAST))
    log_weights += jnp.where(draft > 0, race.step * missing, 0)
    log_weights -= jnp.max(jnp.where(draft > 0, log_weights, -jnp.inf))
    return jnp.maximum(log_weights, -race.log_range)

  # Weights in proportion to what a candidate could use, P q/p: who wins is then the likeliest to be right.
  is_possible = (draft > 0) & (target > 0)
  start = jnp.log(jnp.where(is_possible, target, 1)) - jnp.log(jnp.where(is_possible, draft, 1))
  start = jnp.where(is_possible, start, -jnp.inf)
  # Where draft and target of all contexts are disjoint, no weight is better than another.
  start = jnp.where(jnp.any(is_possible), jnp.maximum(start - jnp.max(start), -race.log_range), 0)
  log_weights = jax.lax.fori_loop(0, num_rounds, improve, start)
  is_alone = jnp.sum(number) <= 1  # the only candidate is always picked
  return LayerRace(log_weights, jnp.where(is_alone, 1, scale_of(log_weights)))
