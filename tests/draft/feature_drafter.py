"""A drafter that reads the target's hidden states: the last one, and the target's embedding of what follows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from spectr_jax import Drafter
from spectr_jax.model import static_field
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import logits_to_probs


def distributions(context, sampling, tokens):
  """The draft's distributions along a chain, `[B, L, V]`, each from the tokens before it.

  Args:
    context: The context, with features of one layer.
    sampling: The rows' sampling parameters.
    tokens: int32 `[B, L - 1]`, the guesses but the last.
  """
  target, places = context.target, jnp.arange(len(context.lengths))
  last = context.tokens[places, context.lengths - 1]
  # The root's own features are not known yet; a prompt of one token has none at all.
  hidden = context.features[places, jnp.maximum(context.lengths - 2, 0), 0]
  hidden = jnp.where((context.lengths > 1)[:, None], hidden, 0)
  read = target.embed_fn(target.params, jnp.concatenate([last[:, None], tokens], axis=1))
  hidden = hidden[:, None] + jnp.cumsum(read, axis=1)
  return logits_to_probs(target.unembed_fn(target.params, hidden), sampling)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FeatureDrafter(Drafter):
  """A drafter of single chains without parameters of its own."""

  vocab_size: int = static_field()
  reads_tokens = True
  feature_layers = (-1,)

  def propose(self, state, context, request):
    length = request.tree.num_nodes
    tokens = jnp.zeros((len(context.lengths), length), jnp.int32)
    draw = jax.vmap(functools.partial(request.rule, num_children=1))
    for depth in range(length):
      probs = distributions(context, request.sampling, tokens[:, :-1])
      drawn = draw(request.keys[:, depth], probs[:, depth], jnp.full(len(tokens), depth + 1))[:, 0]
      tokens = tokens.at[:, depth].set(drawn)
    return Proposal(tokens, probs, state)
