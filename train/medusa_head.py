"""Training of Medusa heads (Cai et al. 2024): each guesses one token further ahead, all from one hidden state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.draft import Drafter, medusa_drafter
from spectr_jax.draft.medusa_drafter import MedusaConfig, config_of, head_output, output_kernel, param_shapes
from spectr_jax.model import Model
from spectr_jax.models.causal_lm import CausalLMConfig
from train.config_rules import Rule
from train.head_kind import cast
from train.head_step import HeadBatch, Step


def _sizes(config: MedusaConfig) -> dict[str, Any]:
  return {name: value for name, value in vars(config).items() if name != 'dtype'}


@dataclasses.dataclass(frozen=True)
class MedusaKind:
  """Medusa heads, a `HeadKind`. They guess all tokens, since their format has no reduced vocabulary.

  Attributes:
    config: The heads.
  """

  rules: ClassVar[tuple[Rule, ...]] = ()

  config: MedusaConfig

  @property
  def num_ids(self) -> int | None:
    """As for `HeadKind`."""
    return None

  @property
  def feature_layers(self) -> tuple[int, ...]:
    """As for `HeadKind`."""
    return (-1,)

  @property
  def sizes(self) -> dict[str, Any]:
    """As for `HeadKind`."""
    return _sizes(self.config)

  @classmethod
  def of(cls, config, target: CausalLMConfig) -> MedusaKind:
    """As for `HeadKind`."""
    own = config.has_unembedding
    return cls(MedusaConfig(config.num_unrolled, target.embed_dim, target.vocab_size, config.dtype, own))

  @staticmethod
  def sizes_of(drafter: Drafter) -> dict[str, Any]:
    """As for `HeadKind`."""
    return _sizes(config_of(drafter))

  def init_params(self, key: jax.Array, target: Model, unembedding: jax.Array) -> dict[str, Any]:
    """Heads that all say what the target's output head says, as published."""
    del key, target
    shapes = param_shapes(self.config)
    params = {'residual': jax.tree.map(lambda shape: jnp.zeros(shape.shape), shapes['residual'])}
    if self.config.has_unembedding:
      params['unembedding'] = jnp.broadcast_to(unembedding.astype(jnp.float32), shapes['unembedding'].shape)
    return params

  def frozen_params(self, target: Model) -> dict[str, jax.Array]:
    """Nothing."""
    del target
    return {}

  def steps(self, params: Mapping[str, Any], frozen: Mapping[str, Any], batch: HeadBatch) -> list[Step]:
    """As for `HeadKind`."""
    hidden = batch.features[:, :-2, -1].astype(self.config.dtype)
    unembedding = params.get('unembedding', frozen['unembedding'])
    return [
      (jnp.roll(head_output(params, hidden, i), i, axis=1), output_kernel(unembedding, i))
      for i in range(self.config.num_heads)
    ]

  def drafter(self, params: Mapping[str, Any], target_ids: np.ndarray | None, vocab_size: int) -> Drafter:
    """As for `HeadKind`."""
    del target_ids, vocab_size
    return medusa_drafter(cast(params, param_shapes(self.config)), self.config)
