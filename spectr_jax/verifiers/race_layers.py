"""Layer verification by races: the contexts of a depth share one mass, and the deepest layer that keeps one wins."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.couplings.coupling import Explanation, ratio
from spectr_jax.couplings.layer_race import fit_layer_race
from spectr_jax.couplings.race import Race
from spectr_jax.kernels.class_sums import entries_of
from spectr_jax.kernels.on_demand import map_needed
from spectr_jax.proposal import Independent, Proposal
from spectr_jax.sampling import positive_part
from spectr_jax.tree import Tree
from spectr_jax.verifiers.contexts import Contexts, contexts_of, slots_of
from spectr_jax.verifiers.credit_traversal import law_rows
from spectr_jax.verifiers.verifier import Decisions, DepthVerifier, Record, Verdict, stop_at


class _Layers(NamedTuple):
  """The masses of all contexts.

  Attributes:
    masses: `[L + 1, W]`, P by slot; 0 for slots that stand for no context.
    scale: `[R, C]`, the distributions pt by row of `Proposal.probs`, in units of p by class.
    number: int32 `[R]`, the candidates after each of these nodes; 0 for those that stand for no context.
  """

  masses: jax.Array
  scale: jax.Array
  number: jax.Array


@dataclasses.dataclass(frozen=True)
class RaceLayers(DepthVerifier):
  """Layer verification by races: lossless on any tree with i.i.d. children; beyond the papers.

  Nodes that spell the same are one *context*. Every context c has a mass P(c), 1 at the root: the probability that c or
  a context below it is kept, given the guesses down to its depth. The masses of a depth sum to at most 1. All
  candidates of the next depth, whatever their context, run one race. It picks a candidate with token x after c with
  probability s, and pt_c(x) is the average of s over the candidates. Then

      P(cx) = s min(1, P(c) q_c(x) / pt_c(x)),    S(c) = sum over y of [P(c) q_c(y) - pt_c(y)]+.

  From the deepest layer up, one context of a layer or none is kept; c with probability

      h(c) = S(c) / (1 - sum of P + sum of S),    sums over the contexts of its layer,

  and the next token comes from [P(c) q_c - pt_c]+. A context without candidates has pt = 0, so that S = P.

  It is lossless because c or a context below it is kept with probability P(c), and the text after c then follows q. By
  induction from the deepest layer: below c something is kept with probability sum of min(pt, P q) = P - S. So nothing
  deeper than the layer is kept with probability 1 - sum of P + sum of S, which times h is S. A mass may depend on all
  guesses down to its depth, since only averages over deeper ones enter.

  The races' weights begin in proportion to P q/p, and are fitted in as many rounds as the race says, divided by the
  number of layers from there on. A full fit keeps the most of the next depth, which is best in the last layer. Further
  up it gives nearly all mass to one branch, and what that branch loses later is lost to all.

  So a branch whose tokens turn out unlikely leaves its mass to the others of its depth at once, in `RaceTraversal` only
  to siblings that are visited later. With one draft it is block verification; with drafts of one token it is a race.

  "Layer Verification" (Cha, Cho, Yun 2026) has masses shared among the nodes of a depth, by its abstract, which gives
  no formulas.

  A record has the decisions layer by layer, from the deepest; they are named `keep`.

  Attributes:
    race: Classes and fit of the races.
  """

  race: Race = Race(log_range=14.0, num_rounds=8)
  proposal_rules = (Independent,)
  takes_grown = True
  tries_every_branch = True
  explanation = Explanation(
    'Nodes that spell the same are one. The root has the mass P = 1. All candidates of a depth run one weighted race,'
    ' which would pick each with probability s; p̃ is the distribution of what it picks. A candidate has the mass'
    ' s · min(1, P · q/p̃), with P of the node above. From the deepest layer up, one node or none is kept: each with'
    ' h = S/(1 − Σ P + Σ S), sums over its layer, where S = Σ [Pq − p̃]₊ at the next position, and S = P at a leaf.',
    '[Pq − p̃]₊',
    'The nodes of a depth share the chance that one of them is kept; what one branch cannot use goes to the others.'
    ' Layers are tried from the deepest up, and the first that keeps a node wins.',
  )

  def _steps(self, tree: Tree, proposal: Proposal, target_probs) -> tuple[Contexts, _Layers]:
    contexts, slots, race = contexts_of(tree, proposal), slots_of(tree), self.race
    dtype, num_rows = target_probs.dtype, len(proposal.probs)
    number = jnp.where(contexts.stands[:-1], contexts.num_candidates, 0)  # [L, W]
    of_rows = jnp.zeros(num_rows, jnp.int32)
    is_inner = slots.of_parents[0] < len(number)
    of_rows = jnp.where(
      is_inner, number[jnp.minimum(slots.of_parents[0], len(number) - 1), slots.of_parents[1]], of_rows
    )

    def masses_of(p, q):
      return race.masses(p, q, race.classes(p, q))

    none = jnp.zeros((num_rows, race.num_classes, 2), dtype)
    by_class = map_needed(masses_of, of_rows > 0, none, law_rows(tree, proposal, target_probs))
    tokens = jnp.where(slots.is_node, jnp.maximum(proposal.tokens[slots.nodes - 1], 0), 0)[1:]
    rows = jnp.take_along_axis(jnp.asarray(slots.parent_index[:-1]), contexts.above[1:], axis=1)
    p = proposal.probs[rows, tokens]
    q = target_probs[jnp.take_along_axis(jnp.asarray(slots.nodes[:-1]), contexts.above[1:], axis=1), tokens]
    own_class = race.classes(p, q)
    own_rows = jnp.maximum(jnp.asarray(slots.parent_index[:-1]), 0)
    is_wide = slots.nodes.shape[1] > 1

    def next_layer(masses, layer):
      number, own_rows, above, classes, p, q, is_same, stands, is_candidate, num_rounds = layer
      number = jnp.where(masses > 0, number, 0)
      if is_wide:
        fitted = fit_layer_race(race, by_class[own_rows], number.astype(dtype), masses, num_rounds)
        is_there = jnp.any(is_candidate, axis=0) & (number[above] > 0)
        log_weights = jnp.where(is_there, fitted.log_weights[above, classes], -jnp.inf)
        top = jnp.max(log_weights)
        tickets = jnp.where(is_there, jnp.exp(log_weights - jnp.where(is_there.any(), top, 0)), 0)
        total = jnp.sum(tickets)
        shares = tickets / jnp.where(total > 0, total, 1)
        scale = fitted.scale
      else:
        shares = (is_candidate[0] & (number > 0)).astype(dtype)
        scale = jnp.ones((1, race.num_classes), dtype)
      # Infinite where a token cannot be picked at all; bounded, so that a mass of 0 stays 0.
      factor = jnp.minimum(ratio(q, p * scale[above, classes]), jnp.finfo(dtype).max)
      own = shares * jnp.minimum(1, masses[above] * factor)
      following = jnp.where(stands, self._together(own, is_same), 0)
      return following, (following, scale)

    root = (jnp.arange(slots.nodes.shape[1]) == 0).astype(dtype)
    num_rounds = np.maximum(race.num_rounds // np.arange(len(number), 0, -1), 1)
    layers = (
      number, own_rows, contexts.above[1:], own_class, p, q, contexts.is_same[1:], contexts.stands[1:],
      contexts.is_candidate, jnp.asarray(num_rounds),
    )  # fmt: skip
    with jax.named_scope('layers'):
      _, (below, scales) = jax.lax.scan(next_layer, root, layers)
    masses = jnp.concatenate([root[None], below])
    scale = scales[slots.of_parents]
    return contexts, _Layers(masses, scale, of_rows)

  def _together(self, own, is_same):
    """The masses `[W]` of tokens, from those of their copies."""
    return jnp.sum(jnp.where(is_same, own, 0), axis=1)

  def _picked(self, p, q, scale):
    """pt of a row, `[V]`."""
    return p * entries_of(scale, self.race.classes(p, q))

  def _keep_probs(self, tree: Tree, proposal: Proposal, target_probs, contexts: Contexts, layers: _Layers):
    """h by slot, `[L + 1, W]`."""
    slots = slots_of(tree)
    own = layers.masses[slots.of_parents]

    def excess_of(p, q, mass, scale):
      return jnp.sum(positive_part(mass * q - self._picked(p, q, scale)))

    is_needed = (layers.number > 0) & (own > 0)
    laws = law_rows(tree, proposal, target_probs)
    with jax.named_scope('excess'):
      by_row = map_needed(excess_of, is_needed, jnp.zeros_like(own), laws, (own, layers.scale))
    rows = jnp.asarray(slots.parent_index)
    is_leaf = (rows < 0) | (layers.number[rows] == 0)
    excess = jnp.where(contexts.stands, jnp.where(is_leaf, layers.masses, by_row[rows]), 0)
    unkept = self._unkept(layers.masses, excess)
    return jnp.where(unkept > 0, ratio(excess, unkept), 0).at[0].set(jnp.arange(rows.shape[1]) == 0)

  def _unkept(self, masses, excess):
    """The probability that nothing deeper than a layer is kept, `[L + 1, 1]`."""
    return jnp.maximum(1 - jnp.sum(masses, axis=1, keepdims=True), 0) + jnp.sum(excess, axis=1, keepdims=True)

  def _weights(self, tree: Tree, proposal: Proposal, target_probs, layers: _Layers, node):
    """Weights `[V]` of the next token after the context that `node` stands for."""
    slots, row = slots_of(tree), jnp.asarray(tree.parent_index)[node]
    mass = layers.masses[jnp.asarray(tree.depths)[node], jnp.asarray(slots.of_nodes)[node]]
    q = target_probs[node]
    residual = positive_part(mass * q - self._picked(proposal.probs[row], q, layers.scale[row]))
    is_left = (row >= 0) & (layers.number[row] > 0) & (jnp.sum(residual) > 0)
    return jnp.where(is_left, residual, q)

  def decide(
    self, keys, tree: Tree, proposal: Proposal, target_probs, state, *, is_explained: bool
  ) -> tuple[Verdict, Record]:
    uniforms = self.uniforms(keys, target_probs.dtype)  # for keeping a context of a layer, and for the token after it
    if tree.num_nodes == 0:
      return stop_at(tree, 0, target_probs[0], uniforms[0, 1], state, {})
    contexts, layers = self._steps(tree, proposal, target_probs)
    keep_probs = self._keep_probs(tree, proposal, target_probs, contexts, layers)
    is_chosen = (uniforms[:, :1] < jnp.cumsum(keep_probs, axis=1)) & (keep_probs > 0)
    is_kept = jnp.any(is_chosen, axis=1).at[0].set(True)
    depth = jnp.max(jnp.where(is_kept, jnp.arange(len(is_kept)), 0))
    nodes = jnp.asarray(slots_of(tree).nodes, jnp.int32)
    chosen = jnp.take_along_axis(nodes, jnp.argmax(is_chosen, axis=1)[:, None], axis=1)[:, 0]
    node = jnp.where(depth > 0, chosen[depth], 0)
    weights = self._weights(tree, proposal, target_probs, layers, node)
    decisions = {}
    if is_explained:
      up = jnp.arange(len(nodes))[::-1]
      decisions['keep'] = Decisions(
        is_made=(up >= depth) & jnp.any(contexts.stands, axis=1)[up] & (up > 0),
        node=jnp.where(is_kept[up], chosen[up], nodes[up, 0]),
        nodes=nodes[up],
        is_valid=contexts.stands[up],
        shares=keep_probs[up],
        uniform=uniforms[up, 0],
        chosen=jnp.where(is_kept[up], chosen[up], -1),
        numbers={'log_kept': jnp.log(layers.masses)[up]},
      )
    return stop_at(tree, node, weights, uniforms[depth, 1], state, decisions)

  def law(self, tree, proposal, target_probs, state):
    del state
    if tree.num_nodes == 0:
      return target_probs
    slots = slots_of(tree)
    contexts, layers = self._steps(tree, proposal, target_probs)
    keep_probs = self._keep_probs(tree, proposal, target_probs, contexts, layers)
    nothing = 1 - jnp.sum(keep_probs, axis=1)
    deeper = jnp.concatenate([jnp.cumprod(nothing[::-1])[::-1][1:], jnp.ones_like(nothing[:1])])
    stops = deeper[:, None] * keep_probs
    stop = jnp.zeros(tree.num_nodes + 1, stops.dtype).at[slots.nodes].add(jnp.where(slots.is_node, stops, 0))

    def weights(node):
      residual = self._weights(tree, proposal, target_probs, layers, node)
      return residual / jnp.sum(residual)

    return stop[:, None] * jax.vmap(weights)(jnp.arange(tree.num_nodes + 1))
