"""Training of Medusa heads (Cai et al. 2024): each guesses one token further ahead, all from one hidden state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spectr_jax.draft import Drafter, medusa_drafter
from spectr_jax.draft.medusa_drafter import MedusaConfig, config_of, head_output, output_kernel, param_shapes
from spectr_jax.io.load import ModelFiles
from spectr_jax.model import Model
from spectr_jax.models.causal_lm_config import CausalLMConfig
from train.config_rules import Rule, at_least
from train.draft_kind import Head, cast, load_head_params
from train.head_step import HeadBatch, Step


def _sizes(config: MedusaConfig) -> dict[str, Any]:
  return {name: value for name, value in vars(config).items() if name != 'dtype'}


@dataclasses.dataclass(frozen=True)
class MedusaKind(Head):
  """Medusa heads, a `DraftKind`. They guess all tokens, since their format has no reduced vocabulary.

  Attributes:
    config: The heads.
  """

  rules: ClassVar[tuple[Rule, ...]] = at_least(1, 'num_unrolled')

  config: MedusaConfig

  @property
  def num_ids(self) -> int | None:
    """As for `DraftKind`."""
    return None

  @property
  def feature_layers(self) -> tuple[int, ...]:
    """As for `DraftKind`."""
    return (-1,)

  @classmethod
  def of(cls, config, target: CausalLMConfig, files: ModelFiles) -> MedusaKind:
    """As for `DraftKind`."""
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

  def load_params(self, path: epath.PathLike, target: Model) -> tuple[dict[str, Any], np.ndarray | None]:
    """As for `DraftKind`."""
    return load_head_params(path, target, sizes=_sizes(self.config), sizes_of=lambda found: _sizes(config_of(found)))

  def frozen_params(self, target: Model) -> dict[str, Any]:
    """Nothing."""
    del target
    return {}

  def steps(self, params: Mapping[str, Any], frozen: Mapping[str, Any], batch: HeadBatch) -> list[Step]:
    """As for `DraftKind`."""
    hidden = batch.features[:, :-2, -1].astype(self.config.dtype)
    unembedding = params.get('unembedding', frozen['unembedding'])
    return [
      (jnp.roll(head_output(params, hidden, i), i, axis=1), output_kernel(unembedding, i))
      for i in range(self.config.num_heads)
    ]

  def drafter(
    self, params: Mapping[str, Any], frozen: Mapping[str, Any], target_ids: np.ndarray | None, vocab_size: int
  ) -> Drafter:
    """As for `DraftKind`."""
    del target_ids, vocab_size
    params = {'unembedding': frozen['unembedding'], **params}
    return medusa_drafter(cast(params, param_shapes(self.config)), self.config)
