"""A Markov chain as a drafter that grows a tree of its own for every row: likelier guesses get more candidates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax import Drafter
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import logits_to_probs


def grow(tokens, parents, probs, depth, *, tree):
  """Allocates the slots of one depth: two to the likeliest guess, one to the next; one to the root if it is sure.

  Arguments are those of `spectr_jax.testing.enumeration.GrowFn`, and `TokenTree.slots`.
  """
  nodes, slots = (level[level >= 0] for level in tree.levels[depth : depth + 2])
  if depth == 0:
    num_used = jnp.where(jnp.max(probs[0]) > 0.6, 1, len(slots))
    chosen = jnp.where(np.arange(len(slots)) < num_used, 0, -1)
  else:
    exists = tokens[nodes - 1] >= 0
    chance = probs[jnp.asarray(tree.parent_index)[parents[nodes - 1]], tokens[nodes - 1]]
    order = jnp.argsort(-jnp.where(exists, chance, -1), stable=True)
    rank = np.minimum(np.maximum(np.arange(len(slots)) - 1, 0), len(nodes) - 1)
    chosen = jnp.where(exists[order[rank]] & (np.arange(len(slots)) <= len(nodes)), jnp.asarray(nodes)[order[rank]], -1)
  return jnp.full(tree.num_nodes, -1, jnp.int32).at[slots - 1].set(chosen.astype(jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GrowingDrafter(Drafter):
  """A drafter from a table of logits `[V, V]`, the row of the token before."""

  logits: jax.Array
  reads_tokens = True
  has_grown_trees = True

  @property
  def vocab_size(self):
    return len(self.logits)

  def propose(self, state, context, request):
    tree, batch_size = request.tree, len(context.lengths)
    last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
    tokens = parents = jnp.full((batch_size, tree.num_nodes), -1, jnp.int32)
    probs = jnp.zeros((batch_size, len(tree.parent_nodes), self.vocab_size), jnp.float32)
    for depth in range(tree.max_depth):
      nodes, slots = (level[level >= 0] for level in tree.levels[depth : depth + 2])
      above = jnp.maximum(jnp.concatenate([last, tokens], axis=1)[:, nodes], 0)
      probs = probs.at[:, tree.parent_index[nodes]].set(logits_to_probs(self.logits[above], request.sampling))
      grown = jax.vmap(functools.partial(grow, depth=depth, tree=tree))(tokens, parents, probs)
      parents = jnp.where(tree.depths[1:] == depth + 1, grown, parents)

      def draw(key, probs, slot):
        return request.rule(key, probs, slot, 1)[0]

      own = jax.vmap(lambda probs, own: probs[jnp.asarray(tree.parent_index)[own]])(probs, parents[:, slots - 1])
      drawn = jax.vmap(jax.vmap(draw, (None, 0, 0)), (0, 0, None))(request.keys[:, depth], own, jnp.asarray(slots))
      tokens = tokens.at[:, slots - 1].set(jnp.where(parents[:, slots - 1] < 0, -1, drawn))
    return Proposal(tokens, probs, state, parents=parents)
