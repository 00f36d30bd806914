"""Rounds that keep no guess: beside rounds of a method they tell what its verification takes within the loop.

As a program of its own a verification includes its launch, and on a GPU waits for the host that other parts of a round
would hide.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.methods import Method
from spectr_jax.proposal import Independent, Proposal
from spectr_jax.sampling import draw
from spectr_jax.verifiers import Verdict, Verifier


@dataclasses.dataclass(frozen=True)
class KeepNothing(Verifier):
  """Draws the next token from the target's distribution after the root, and keeps no guess.

  Guesses and all distributions are computed nevertheless, since a round looks for logits that are not finite.
  """

  proposal_rules = (object,)

  def verify(self, keys, tree, proposal: Proposal, target_probs, state) -> Verdict:
    del proposal
    token = draw(jax.random.uniform(keys[0], dtype=target_probs.dtype), target_probs[0])
    return Verdict.at(tree, jnp.zeros((), jnp.int32), token, state)

  def law(self, tree, proposal: Proposal, target_probs, state) -> jax.Array:
    del tree, proposal, state
    return jnp.zeros_like(target_probs).at[0].set(target_probs[0])


UNVERIFIED = Method('no verification', KeepNothing(), Independent(), is_lossless=True, source='')
