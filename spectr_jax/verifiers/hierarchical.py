"""Hierarchical speculative decoding (HSD) on one draft, with capped ratios, as its authors' code has it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from spectr_jax.couplings.coupling import Explanation, ratio
from spectr_jax.proposal import Proposal
from spectr_jax.tree import Tree
from spectr_jax.verifiers.block import Block


@dataclasses.dataclass(frozen=True)
class Hierarchical(Block):
  """HSD with capped prefix ratios on one draft, as published: not lossless for drafts of two tokens or more.

  The joint ratio of a prefix, divided by the largest one before it if that is above 1, is the P of block verification
  (`Block`), and so are its step-back probabilities, max(0, 1 - S / (S + 1 - P)). The whole draft however is kept with
  probability min(1, q(draft) / p(draft)), a ratio that is not capped. Where a prefix had a ratio above 1, that is more
  than P: the target's mass is then used twice. With the capped ratio in its place it is `Block`, to the last digit.

  Source: "HSD: Hierarchical Speculative Decoding" (2026); the function `_speculative_sampling` with `backward` and
  `clever` of its authors' repository, for a single draft.
  """

  takes_grown = False
  explanation = Explanation(
    'As in block verification, P = min(1, P · q/p) along the draft, and its parts are kept with h = S/(S + 1 − P). The'
    ' whole draft is kept with min(1, Π q/p), which is not capped on the way.',
    '[Pq − p]₊',
    'The draft is judged as a whole first, then its beginnings, the longest first.',
  )

  def _step(self, tree: Tree, proposal: Proposal, target_probs, node, log_kept):
    step = super()._step(tree, proposal, target_probs, node, log_kept)
    parents, own = jnp.asarray(tree.parent_of)[1:], jnp.maximum(proposal.tokens, 0)
    p = proposal.probs[jnp.asarray(tree.law_index)[parents], own]
    ratios = ratio(target_probs[parents, own], p)
    whole = jnp.exp(jnp.minimum(0, jnp.sum(jnp.log(jnp.where(proposal.tokens >= 0, ratios, 1)))))
    is_end = ~jnp.any(step.position.is_valid)
    return dataclasses.replace(step, accept=jnp.where(is_end, whole, step.accept))
