"""A drafter without a cache that reads the target's (Gemma 4's assistants)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from spectr_jax.draft.drafter import DraftContext, DraftRequest
from spectr_jax.draft.drawing import ScoredNodes, draw_tree
from spectr_jax.draft.new_features import NetworkDrafter
from spectr_jax.kernels.matrices import params_for_decoding
from spectr_jax.model import static_field
from spectr_jax.models import assistant, layers
from spectr_jax.models.assistant import AssistantConfig
from spectr_jax.proposal import Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AssistantDrafter(NetworkDrafter):
  """A drafter that draws from an assistant, see `assistant_drafter`; it has no state."""

  config: AssistantConfig = static_field()
  reads_target = True
  feature_layers = (-1,)

  @property
  def kv_layers(self) -> tuple[int, ...]:
    return self.config.kv_layers

  def propose(self, state: Any, context: DraftContext, request: DraftRequest) -> Proposal:
    params, config, target = self.params, self.config, context.target
    embed, target_kv = target.embed_fn, context.target_kv
    if context.tokens is None or context.features is None or target_kv is None or embed is None:
      raise ValueError("an assistant reads the text and the target's hidden states, keys, values and embedding")

    def run(tokens, hidden):
      embedded = embed(target.params, tokens)
      hidden, features = assistant.apply(params, config, embedded, hidden, target_kv, context.lengths)
      return hidden, assistant.logits(params, config, features)

    last = context.lengths - 1
    root = jnp.take_along_axis(context.tokens, last[:, None], axis=1)
    before = jax.vmap(lambda row, place: row[place])(context.features[:, :, 0], jnp.maximum(last - 1, 0))
    before = jnp.where((last > 0)[:, None], before, 0)[:, None]  # a text of one token has none
    hidden, logits = run(root, before)
    num_parents = len(request.tree.parent_nodes)
    states = jnp.zeros((len(last), num_parents, config.target_dim), hidden.dtype).at[:, :1].set(hidden)

    def score(states, nodes: ScoredNodes):
      above = jnp.take_along_axis(states, nodes.above[..., None], axis=1)
      hidden, logits = run(nodes.tokens, above)
      return jax.lax.dynamic_update_slice_in_dim(states, hidden, nodes.first, axis=1), logits

    proposal, _ = draw_tree(request, logits[:, 0], states, score, growth=self.growth)
    return dataclasses.replace(proposal, state=state)

  def for_decoding(self) -> Self:
    params = params_for_decoding(self.params)
    if self.config.num_centroids:  # whose tokens are rows of the embedding
      params = {name: leaf for name, leaf in params.items() if name != 'unembedding'}
    return dataclasses.replace(self, params=params)


def assistant_drafter(params: Mapping[str, Any], config: AssistantConfig, vocab_size: int) -> AssistantDrafter:
  """A drafter that draws from an assistant, depth by depth, with the committed keys and values of its target.

  Args:
    params: The assistant's parameters, see `assistant.param_shapes`.
    config: The assistant.
    vocab_size: V, the target's.

  Raises:
    ValueError: A parameter is missing, surplus, or of another shape, or the target has other tokens.
  """
  layers.check_params(params, assistant.param_shapes(config))
  if config.block.vocab_size != vocab_size:
    raise ValueError(f'the assistant guesses {config.block.vocab_size} tokens, and the target has {vocab_size}')
  return AssistantDrafter(params, config, vocab_size)
