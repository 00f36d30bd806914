"""Training of Medusa heads (Cai et al. 2024): each guesses one token further ahead, all from one hidden state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax import Drafter, Model
from spectr_jax.draft import medusa_drafter
from spectr_jax.draft.medusa_drafter import MedusaConfig, config_of, head_output, output_kernel, param_shapes
from spectr_jax.io.model_files import ModelFiles
from spectr_jax.io.untrusted import whole
from spectr_jax.models.causal_lm_config import CausalLMConfig
from train.draft_kind import Head, cast
from train.head_step import Guesses, HeadBatch, guesses_ahead


@dataclasses.dataclass(frozen=True)
class MedusaKind(Head):
  """Medusa heads; they guess all tokens, since their format has no reduced vocabulary."""

  fields = {'num_unrolled': whole(1)}
  config_of = staticmethod(config_of)

  config: MedusaConfig

  @property
  def num_depths(self) -> int:
    return self.config.num_heads

  @classmethod
  def of(cls, config, target: CausalLMConfig, files: ModelFiles) -> MedusaKind:
    del files
    own = config.has_unembedding
    return cls(MedusaConfig(config.num_unrolled, target.embed_dim, target.vocab_size, config.dtype, own))

  def init_params(self, key: jax.Array, target: Model, unembedding: jax.Array) -> dict[str, Any]:
    """Heads that all say what the target's output head says, as published."""
    del key, target
    shapes = param_shapes(self.config)
    params = {'residual': jax.tree.map(lambda shape: jnp.zeros(shape.shape), shapes['residual'])}
    if self.config.has_unembedding:
      params['unembedding'] = jnp.broadcast_to(unembedding.astype(jnp.float32), shapes['unembedding'].shape)
    return params

  def guesses(self, params: Mapping[str, Any], frozen: Mapping[str, Any], batch: HeadBatch) -> list[Guesses]:
    hidden = batch.features[:, :-2, -1].astype(self.config.dtype)
    unembedding = params.get('unembedding', frozen['unembedding'])
    return [
      guesses_ahead(jnp.roll(head_output(params, hidden, i), i, axis=1), output_kernel(unembedding, i), i)
      for i in range(self.config.num_heads)
    ]

  def drafter(
    self, params: Mapping[str, Any], frozen: Mapping[str, Any], target_ids: np.ndarray | None, vocab_size: int
  ) -> Drafter:
    del target_ids, vocab_size
    params = {'unembedding': frozen['unembedding'], **params}
    return medusa_drafter(cast(params, param_shapes(self.config)), self.config)
