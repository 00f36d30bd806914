"""Greedy block verification, and SpecTr-GBV as published, which is the same algorithm on several chains."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.couplings.coupling import Explanation
from spectr_jax.proposal import Independent, Proposal
from spectr_jax.sampling import positive_part, positive_part_or
from spectr_jax.tree import Tree
from spectr_jax.verifiers.verifier import Decisions, Record, RecordedVerifier, Verdict, stop_at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Modifications:
  """The pending changes to the target's distribution, from rounds that stopped before the end of their draft.

  Level k turns the distribution q that the levels below it leave into one proportional to
  q (1 - min(1, p / (v q)))^K, which for K = 1 is [v q - p]+. Modifications nest, since a round works with distributions
  that are modified already. With each token a level loses one of its positions, so at most L - 1 levels are alive.

  For example, with one level v = 2, p = (.5, .5) and q = (.25, .75), the distribution is [2q - p]+ = (0, 1): token 1
  follows, and v becomes 2 * .75 / .5 = 3 for the position after it.
  """

  log_ratio: jax.Array  # `[M]`, log v of each level, oldest first
  left: jax.Array  # int32 `[M]`, the number of positions that a level still applies to; 0 or less for a dead level


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Context:
  """The state of the method at a node of a draft's path."""

  modifications: Modifications  # advanced along the path
  log_ratio: jax.Array  # log v, where v is the product of q/p over the path, with q as modified, not clipped
  log_draft: jax.Array  # the logarithm of the path's probability under the draft


@dataclasses.dataclass(frozen=True)
class GreedyBlock(RecordedVerifier):
  """Greedy block verification on one draft; SpecTr-GBV ("SpecTr-GBV: Multi-Draft Block Verification Accelerating
  Speculative Decoding", Algorithms 1 to 3) on K chains.

  With v_i the product of q/p over the first i tokens and P_i their probability under the draft,

      R_i = sum of v_i q (1 - min(1, p / (v_i q)))^K over the token at i + 1,    a_i = v_i (1 - min(1, 1 / v_i))^K,
      g_i = (1 - (1 - P_i)^K) / P_i,    h_i = (R_i - a_i) / (g_i - v_i + R_i),    h_L = (v_L - a_L) / g_L,

  which are equations 2 and 3 divided by P_i, each sub-block that no earlier draft has is accepted with probability
  h. The longest accepted one is kept, and the next token has weights q (1 - min(1, p / (v q)))^K. After a round that
  stopped at tau < L, the distributions of the next L - tau - 1 positions are modified in the same way.

  With K = 1 this is greedy block verification, and lossless if the draft's distribution after a text is the same in
  every round: the modifications take p at later contexts from the next round, where that of this one is meant. It is
  for models, not for drafters that see more of a text once it is committed, such as heads. With K > 1 it is not
  lossless: the derivation treats each sub-block as if the drafts did not compete for it.

  The tree must be chains of equal length, the same for all rows: the modifications last as long as the drafts.

  A record has the decisions draft by draft; they are named `keep`, and the deepest that is kept wins. A sub-block that
  an earlier draft has as well is not decided on again.

  Attributes:
    num_levels_dropped: The number of newest modifications that are forgotten; above 0 in negative controls only.
  """

  num_levels_dropped: int = 0
  proposal_rules = (Independent,)
  needs_constant_draft = True
  explanation = Explanation(
    'Every beginning of every draft is accepted with probability h; the longest accepted one is kept.',
    'q (1 − min(1, p/(vq)))ᴷ',
    'Every beginning of every draft passes or fails, and the longest that passes is kept. What it keeps beyond its'
    ' share is paid back by other distributions at the next positions.',
  )

  def init_state(self, tree) -> Modifications:
    num_levels = max(tree.max_depth - 1, 1)
    return Modifications(jnp.zeros(num_levels), jnp.zeros(num_levels, jnp.int32))

  def _kept(self, num_drafts: int, draft_probs, target_probs, log_ratio):
    """q (1 - min(1, p / (v q)))^K, `[V]`: the part of the target that K drafts leave."""
    scale = jnp.exp(jnp.minimum(-log_ratio, 80.0))
    share = positive_part(target_probs - scale * draft_probs)
    if num_drafts == 1:
      return share
    is_possible = target_probs > 0
    return share * (share / jnp.where(is_possible, target_probs, 1)) ** (num_drafts - 1)

  def _law(self, num_drafts: int, modifications: Modifications, draft_probs, target_probs, token):
    """The modified distribution after a context, and the modifications once `token` follows.

    Each level, oldest first, turns the distribution into the next, and its v grows by q(token) / p(token), q as found.
    """
    levels = modifications.left.shape[0]

    def modify(level, carry):
      law, log_ratio = carry
      is_alive = modifications.left[level] > 0
      v = modifications.log_ratio[level]
      p = draft_probs[token]
      # The draft cannot have drawn a token with p = 0: v becomes infinite, and the level has no effect from here on.
      gained = jnp.where(p > 0, jnp.log(law[token]) - jnp.log(jnp.where(p > 0, p, 1)), jnp.inf)
      kept = positive_part_or(self._kept(num_drafts, draft_probs, law, v), law)
      return (
        jnp.where(is_alive, kept / jnp.sum(kept), law),
        log_ratio.at[level].set(jnp.where(is_alive, jnp.where(jnp.isposinf(v), v, v + gained), 0)),
      )

    # Old levels die first, so dead levels stand at the front and are skipped.
    is_alive = modifications.left > 0
    first = jnp.where(jnp.any(is_alive), jnp.argmax(is_alive), levels)
    law, log_ratio = jax.lax.fori_loop(first, levels, modify, (target_probs, modifications.log_ratio))
    return law, Modifications(log_ratio, modifications.left - 1)

  def _push(self, modifications: Modifications, log_ratio, left) -> Modifications:
    """Adds a level and drops the oldest, which has been here for at least as many rounds as it had positions."""
    return Modifications(
      jnp.concatenate([modifications.log_ratio[1:], log_ratio[None].astype(modifications.log_ratio.dtype)]),
      jnp.concatenate([modifications.left[1:], left[None].astype(jnp.int32)]),
    )

  def _chains(self, tree: Tree) -> np.ndarray:
    """int32 `[K, L]`, the nodes of each draft."""
    return np.arange(1, tree.num_nodes + 1, dtype=np.int32).reshape(tree.max_depth, -1).T

  def _start(self, state: Modifications, dtype) -> _Context:
    left = state.left
    if self.num_levels_dropped:
      alive = jnp.cumsum((left > 0)[::-1])[::-1]
      left = jnp.where(alive <= self.num_levels_dropped, 0, left)
    zero = jnp.zeros((), dtype)
    return _Context(Modifications(state.log_ratio.astype(dtype), left), zero, zero)

  def _follow(self, tree: Tree, proposal: Proposal, target_probs, context: _Context, node, token):
    """The modified distribution after `node`, and the context once `token` follows."""
    num_drafts = tree.num_nodes // tree.max_depth
    draft_probs = proposal.probs[jnp.asarray(tree.parent_index)[node]]
    law, modifications = self._law(num_drafts, context.modifications, draft_probs, target_probs[node], token)
    p, q = draft_probs[token], law[token]
    gained = jnp.where(p > 0, jnp.log(q) - jnp.log(jnp.where(p > 0, p, 1)), jnp.inf)
    return law, _Context(
      modifications,
      context.log_ratio + gained,
      context.log_draft + jnp.log(p),
    )

  def _accept(self, tree: Tree, proposal: Proposal, target_probs, state) -> jax.Array:
    """h of every sub-block, `[K, L]`; 0 where an earlier draft has the same one.

    Below, `excess` is a, `covered` is g, and `gain` is R - a. For K = 1, where a = max(v - 1, 0) and g = 1, this is
    h = min(1, sum of [v q - p]+ / sum of [p - v q]+). For example, v = .5, p = (.5, .5) and q = (1, 0) at the next
    position give R = 0 and h = 0; p = (.25, .75) gives R = .25 and h = .25 / (1 - .5 + .25) = 1/3.
    """
    chains = self._chains(tree)
    num_drafts, draft_length = chains.shape
    tokens = proposal.tokens[chains - 1]
    parents = np.pad(chains[:, :-1], ((0, 0), (1, 0)))

    def along(arguments):
      chain, parent_of, spelled = arguments

      def step(context, at):
        node, parent, token, is_last = at
        _, context = self._follow(tree, proposal, target_probs, context, parent, token)
        log_v = jnp.minimum(context.log_ratio, 60.0)
        v = jnp.exp(log_v)
        excess = jnp.maximum(v - 1, 0) * jnp.maximum(-jnp.expm1(-log_v), 0) ** (num_drafts - 1)
        path = jnp.exp(context.log_draft)
        covered = jnp.where(
          path > 0, -jnp.expm1(num_drafts * jnp.log1p(-path)) / jnp.where(path > 0, path, 1), num_drafts
        )
        draft_probs = proposal.probs[jnp.asarray(tree.parent_index)[node]]
        law, _ = self._law(num_drafts, context.modifications, draft_probs, target_probs[node], 0)
        gain = v * jnp.sum(self._kept(num_drafts, draft_probs, law, context.log_ratio)) - excess
        total = gain + ((covered - v) + excess)
        inside = jnp.where(total > 0, gain / jnp.where(total > 0, total, 1), 1)
        if num_drafts == 1:  # exact where v >= 1, but a quotient of rounding errors if p <= v q nearly everywhere
          inside = jnp.where(log_v >= 0, 1, inside)
        return context, jnp.clip(jnp.where(is_last, (v - excess) / covered, inside), 0, 1)

      is_last = jnp.arange(draft_length) == draft_length - 1
      return jax.lax.scan(step, self._start(state, target_probs.dtype), (chain, parent_of, spelled, is_last))[1]

    accept = jax.lax.map(along, (jnp.asarray(chains), jnp.asarray(parents), tokens))
    return jnp.where(self._is_repeated(tree, proposal), 0, accept)

  def _is_repeated(self, tree: Tree, proposal: Proposal) -> jax.Array:
    """bool `[K, L]`: the sub-blocks that an earlier draft has as well."""
    tokens = proposal.tokens[self._chains(tree) - 1]
    is_equal = jnp.cumprod(tokens[:, None] == tokens[None], axis=-1) > 0
    is_earlier = np.tri(len(tokens), k=-1, dtype=bool)
    return jnp.any(is_equal & is_earlier[:, :, None], axis=1)

  def _stop(self, tree: Tree, proposal: Proposal, target_probs, state, node) -> tuple[_Context, jax.Array]:
    """The context at `node`, and the weights `[V]` of the token after it."""
    path = jnp.asarray(tree.paths)[node]
    depth = jnp.asarray(tree.depths)[node]

    def step(i, context):
      parent = jnp.where(i > 0, path[i - 1], 0)
      return self._follow(tree, proposal, target_probs, context, parent, proposal.tokens[path[i] - 1])[1]

    context = jax.lax.fori_loop(0, depth, step, self._start(state, target_probs.dtype))
    num_drafts = tree.num_nodes // tree.max_depth
    draft_probs = proposal.probs[jnp.asarray(tree.parent_index)[node]]
    law, _ = self._law(num_drafts, context.modifications, draft_probs, target_probs[node], 0)
    weights = positive_part_or(self._kept(num_drafts, draft_probs, law, context.log_ratio), law)
    return context, jnp.where(depth == tree.max_depth, target_probs[node], weights)

  def _longest(self, tree: Tree, uniforms, accept):
    """The deepest node whose sub-block is accepted, and bool `[K, L]`, which sub-blocks are."""
    is_accepted = uniforms[:-1].reshape(accept.shape) < accept
    is_any = jnp.any(is_accepted, axis=0)
    depth = jnp.max(jnp.where(is_any, jnp.arange(1, tree.max_depth + 1), 0))
    draft = jnp.argmax(is_accepted[:, depth - 1])
    return jnp.where(depth > 0, jnp.asarray(self._chains(tree))[draft, depth - 1], 0), is_accepted

  def decide(
    self, keys, tree: Tree, proposal: Proposal, target_probs, state, *, is_explained: bool
  ) -> tuple[Verdict, Record]:
    accept = self._accept(tree, proposal, target_probs, state)
    uniforms = jax.random.uniform(keys[0], (accept.size + 1,), target_probs.dtype)
    node, is_accepted = self._longest(tree, uniforms, accept)
    _, weights = self._stop(tree, proposal, target_probs, state, node)
    decisions = {}
    if is_explained:
      decisions['keep'] = jax.vmap(Decisions.of_one)(
        is_made=~self._is_repeated(tree, proposal).reshape(-1),
        node=jnp.asarray(self._chains(tree)).reshape(-1),
        share=accept.reshape(-1),
        uniform=uniforms[:-1],
        is_chosen=is_accepted.reshape(-1),
        numbers={},
      )
    verdict, record = stop_at(tree, node, weights, uniforms[-1], state, decisions)
    next_state = self.advance(tree, proposal, target_probs, state, node, verdict.next_token)
    return dataclasses.replace(verdict, state=next_state), record

  def advance(self, tree, proposal, target_probs, state, node, token) -> Modifications:
    context, _ = self._stop(tree, proposal, target_probs, state, node)
    left = tree.max_depth - jnp.asarray(tree.depths)[node] - 1
    _, after = self._follow(tree, proposal, target_probs, context, node, token)
    pushed = self._push(after.modifications, after.log_ratio, left)
    # After a whole path no level has positions left, and no draft distribution is known, so log v is set to 0.
    log_ratio = jnp.where(pushed.left > 0, pushed.log_ratio, 0).astype(state.log_ratio.dtype)
    return Modifications(log_ratio, jnp.maximum(pushed.left, 0))

  def law(self, tree, proposal, target_probs, state):
    accept = self._accept(tree, proposal, target_probs, state)
    # The deepest accepted sub-block wins, and of equally deep ones that of the first draft; the root comes last.
    nodes = np.append(self._chains(tree).T[::-1].reshape(-1), 0)
    chances = jnp.append(accept.T[::-1].reshape(-1), 1)
    nothing_before = jnp.cumprod(jnp.append(jnp.ones((), chances.dtype), 1 - chances[:-1]))

    def of_stop(node):
      _, weights = self._stop(tree, proposal, target_probs, state, node)
      return weights / jnp.sum(weights)

    laws = jax.lax.map(of_stop, jnp.asarray(nodes))
    return jnp.zeros_like(target_probs).at[nodes].set((nothing_before * chances)[:, None] * laws)
