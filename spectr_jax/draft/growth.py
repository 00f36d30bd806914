"""Trees that grow while they are drafted, wider and deeper where the draft is confident."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.draft.drafter import Drafter, Growth
from spectr_jax.draft.drawing import DrawingDrafter
from spectr_jax.kernels.filters import FILTERS_BY_NAME
from spectr_jax.sampling import SamplingParams


def _allocate(
  accepted: jax.Array, chances: jax.Array, num_slots: int, threshold: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
  """The first and the last result of `Growth.expand`, before anything is drawn.

  With c a node's worth (`[W]`, `chances` is its logarithm) and a the chance that a guess after it is accepted (`[W]`),
  its j-th child is worth c a (1 - a)^(j - 1), the chance that it is the first accepted one. The children worth most
  fill the slots, the worthiest first: nodes worth (1, .5) with a = (.5, .8) have children worth (.5, .25, ...) and (.4,
  ...).
  """
  # With a = 1, a second child is worth next to nothing.
  accepted = jnp.minimum(accepted, 1 - 1e-6)
  worth = (chances + jnp.log(accepted))[:, None] + jnp.arange(num_slots) * jnp.log1p(-accepted)[:, None]
  most, places = jax.lax.top_k(worth.reshape(-1), num_slots)
  is_used = jnp.isfinite(most) & (most >= jnp.log(threshold))
  return jnp.where(is_used, places // num_slots, -1).astype(jnp.int32), jnp.where(is_used, most, -jnp.inf)


def _drawn(key, rule, probs, slots, above, worth):
  """The results of `Growth.expand` for slots whose parents are allocated."""
  num_slots, own = len(slots), jnp.maximum(above, 0)
  if rule.are_exchangeable:
    drawn = jax.vmap(lambda probs, slot: rule(key, probs, slot, 1)[0])(probs[own], slots)
  else:
    # Siblings are drawn together, as many as there may be of each node; a node uses the first ones.
    first = jnp.arange(len(probs)) * num_slots
    siblings = jax.vmap(lambda probs, first: rule(key, probs, first, num_slots))(probs, first)
    is_earlier = (above[:, None] == above) & jnp.tri(num_slots, k=-1, dtype=bool)
    drawn = siblings[own, jnp.sum(is_earlier, axis=1)]
  tokens = jnp.where(above < 0, -1, drawn).astype(jnp.int32)
  return above, tokens, jnp.where(tokens < 0, -jnp.inf, worth)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Likeliest(Growth):
  """The likeliest guesses, given and not drawn: for greedy decoding, in which all samples of a draft are equal.

  Of all children of a depth's nodes, those with the most probable paths under the draft fill the next depth, the most
  probable first: the beam of EAGLE-2 (Li et al. 2024, section 4.1). The distribution that a greedy row's tokens come
  from is a point mass and tells nothing of the second likeliest, so its paths have their probabilities at another
  temperature. Those at temperature 1 are too flat: a token of probability .3 that is the draft's first choice is the
  target's first choice far more often. Rows that sample have those of their own sampling parameters.

  Nothing is drawn, so any choice is lossless, at any temperature: a position's guesses S are accepted with the target's
  probability of S.

  Attributes:
    temperature: The temperature for greedy rows. At .25 the pretrained draft predicts its target's greedy tokens best:
      their mean log probability is -.62, and -2.04 at 1.
    threshold: A slot is used if the probability of its path is at least this. A row whose paths are all less probable
      is drafted no further.
  """

  temperature: jax.Array | float = 0.25
  threshold: jax.Array | float = 0.0
  has_given_candidates = True

  def sampling(self, sampling: SamplingParams) -> SamplingParams:
    """The rows' own parameters; for greedy rows the temperature alone, without filters."""
    is_greedy = sampling.temperature == 0
    plain = SamplingParams.make(len(is_greedy), temperature=self.temperature).with_filters_of(sampling)
    names = [name for name in ('temperature', *FILTERS_BY_NAME) if getattr(sampling, name) is not None]
    own = {name: jnp.where(is_greedy, getattr(plain, name), getattr(sampling, name)) for name in names}
    return dataclasses.replace(sampling, **own)

  def expand(self, key, rule, probs, chances, slots, estimates=None):
    """The likeliest children, see `Growth.expand`; nothing is drawn."""
    del key, rule, estimates
    num_slots, vocab_size = len(slots), probs.shape[1]
    # No more than `num_slots` children of one node can be among the likeliest.
    likeliest, tokens = jax.lax.top_k(probs, min(num_slots, vocab_size))
    paths = (chances[:, None] + jnp.log(likeliest)).reshape(-1)
    paths = jnp.pad(paths, (0, max(num_slots - len(paths), 0)), constant_values=-jnp.inf)
    chosen, places = jax.lax.top_k(paths, num_slots)
    is_used = jnp.isfinite(chosen) & (chosen >= jnp.log(self.threshold))
    above = jnp.where(is_used, places // tokens.shape[1], -1).astype(jnp.int32)
    tokens = jnp.where(is_used, tokens.reshape(-1)[jnp.minimum(places, tokens.size - 1)], -1).astype(jnp.int32)
    return above, tokens, jnp.where(is_used, chosen, -jnp.inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Confident(Growth):
  """Samples where the draft is confident, allocated before they are drawn: for rows that sample.

  A guess after a node with the draft's distribution p is taken to be accepted with probability a = b + (1 - b) sum p^2,
  so with b where the draft knows nothing, and surely where it is sure. With c the node's own worth, 1 for the root, its
  j-th child is worth c a (1 - a)^(j - 1), the chance that it is the first accepted one. The children worth most fill
  the next depth, the worthiest first. So a sure node gets one child, an unsure one several, and an unlikely one none.
  All this is fixed before the depth is drawn, which keeps every method with `takes_grown` lossless.

  Source: this library.

  Attributes:
    acceptance: b, from 0 to 1; .75 fits the pretrained pair at temperature 1.
    threshold: A slot is used if its child is worth at least this. A row in which none is, is drafted no further.
  """

  acceptance: jax.Array | float = 0.75
  threshold: jax.Array | float = 0.0

  def allocate(self, probs: jax.Array, chances: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last result of `Growth.expand`, by its `probs` and `chances`, before anything is drawn."""
    sureness = jnp.sum(probs**2, axis=1)
    return _allocate(self.acceptance + (1 - self.acceptance) * sureness, chances, num_slots, self.threshold)

  def expand(self, key, rule, probs, chances, slots, estimates=None):
    """Allocated and drawn children, see `Growth.expand`."""
    del estimates
    return _drawn(key, rule, probs, slots, *self.allocate(probs, chances, len(slots)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Estimated(Growth):
  """Samples where the drafter itself expects them to be accepted, allocated before they are drawn.

  Like `Confident`, with the drafter's own estimate of a, as the confidence head of DSpark gives it (arXiv:2607.05147,
  section 3). In a chain the k-th guess is worth a_1 ... a_k, so drafting goes from left to right and ends with the
  first guess that is worth too little.

  The estimate of a guess must read neither that guess nor a later one. That of DSpark reads the token before it. A
  search over all lengths, which makes the first guess or not by what is worth after it, would not be lossless: with the
  target (.7, .3), the draft (.5, .5) and a first guess that is kept only if it is token 0, the output is (.85, .15).

  Attributes:
    threshold: A slot is used if its child is worth at least this. A row in which none is, is drafted no further.
  """

  threshold: jax.Array | float = 0.0
  reads_estimates = True

  def allocate(self, estimates: jax.Array, chances: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last result of `Growth.expand`, by its `estimates` and `chances`, before anything is drawn."""
    return _allocate(estimates, chances, num_slots, self.threshold)

  def expand(self, key, rule, probs, chances, slots, estimates=None):
    """Allocated and drawn children, see `Growth.expand`."""
    if estimates is None:
      raise ValueError('Estimated reads estimates of acceptance, and this draft makes none')
    return _drawn(key, rule, probs, slots, *self.allocate(estimates, chances, len(slots)))


def growing(drafter: Drafter, growth: Growth) -> DrawingDrafter:
  """A drafter whose rows grow trees of their own.

  Args:
    drafter: A drafter that scores one depth after the other, such as `model_drafter` or `head_drafter` makes.
    growth: The rule.

  Raises:
    ValueError: The drafter gives guesses of its own or grows trees already, or makes no estimates that the rule reads.
  """
  if not isinstance(drafter, DrawingDrafter) or drafter.has_grown_trees:
    raise ValueError('only a drafter that draws all guesses of one tree can be made to grow trees')
  if growth.reads_estimates and not drafter.estimates:
    name = type(growth).__name__
    raise ValueError(f'{name} reads estimates of acceptance, and this draft makes none: it has no confidence head')
  growth = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), growth)
  return dataclasses.replace(drafter, growth=growth)
