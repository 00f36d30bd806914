"""An example of a user's verifier: it picks the guess with the largest ratio of target to draft probability.

At each position the candidate with the largest q/p of the n candidates is picked, and the picked path is verified as a
block. A token x is picked if it is a candidate and no candidate has a larger ratio. Let F be the draft's mass of tokens
whose ratio is at most that of x, and f the mass of tokens whose ratio is smaller. Then the picked token has the
distribution

    p(x) (F^n - f^n) / (F - f) = p(x) (F^(n-1) + F^(n-2) f + ... + f^(n-1)).

Prove it with `python -m decode.prove --module=examples.best_ratio`, and decode with it by `import examples.best_ratio`
and `spectr_jax.generate(..., method='best_ratio')`.
"""

import dataclasses

import jax.numpy as jnp

from spectr_jax.couplings import Pick, Selection, SelectionExplanation
from spectr_jax.couplings.coupling import ratio
from spectr_jax.methods import Method, register
from spectr_jax.proposal import Independent
from spectr_jax.verifiers import Block


@dataclasses.dataclass(frozen=True)
class BestRatio(Selection):
  """Picks the candidate with the largest q/p, and one at random with equal probability if several are equal."""

  explanation = SelectionExplanation(
    path='At each position the candidate with the largest q/p is picked; p̃ is the distribution of what is picked.',
    law='p̃',
  )

  def __call__(self, draft_probs, target_probs, candidates, is_valid):
    ratios = ratio(target_probs, draft_probs)
    best = jnp.max(jnp.where(is_valid, ratios[candidates], -1))
    is_best = is_valid & (ratios[candidates] == best)
    order = jnp.argsort(ratios)
    mass = jnp.pad(jnp.cumsum(draft_probs[order]), (1, 0))
    below, up_to = (mass[jnp.searchsorted(ratios[order], ratios, side=side)] for side in ('left', 'right'))
    power, total = jnp.ones_like(mass[1:]), jnp.zeros_like(mass[1:])
    for exists in is_valid:  # F^(n-1) + F^(n-2) f + ... + f^(n-1), for n valid candidates
      power, total = jnp.where(exists, power * up_to, power), jnp.where(exists, total * below + power, total)
    probs = draft_probs * total
    return Pick(is_best / jnp.maximum(jnp.sum(is_best), 1), probs, jnp.where(is_valid, probs[candidates], 0))


register(Method('best_ratio', Block(BestRatio()), Independent(), is_lossless=True, source='examples/best_ratio.py'))
