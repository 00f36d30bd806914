"""Medusa heads as a drafter: each guesses one token further ahead, all from the same hidden state of the target.

Source: Medusa (Cai et al. 2024), section 2.1. Head i computes x + SiLU(x W_i + b_i) of the target's last hidden state
x, and a linear output head. The state is that of the last token that the target has seen, the one before the root. The
target's own head has spoken about the root, so head 0 speaks about the token after the root, head i about depth i + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.draft.drafter import DraftContext, Drafter, DraftRequest
from spectr_jax.draft.drawing import DrawingDrafter, draw_by_depth
from spectr_jax.kernels.matrices import matmul
from spectr_jax.model import static_field
from spectr_jax.models import layers
from spectr_jax.models.causal_lm_config import check_sizes
from spectr_jax.proposal import Proposal


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
  """The sizes of Medusa heads; ValueError if one is not a positive integer, or the type is unknown."""

  num_heads: int  # H, the tokens that are guessed ahead
  embed_dim: int  # D, of the target's hidden states
  vocab_size: int
  dtype: str = 'float32'
  has_unembedding: bool = True  # whether each head has an output head of its own; else all take the target's rows

  def __post_init__(self):
    check_sizes(self, 'num_heads', 'embed_dim', 'vocab_size')
    if self.dtype not in ('float32', 'bfloat16', 'float64'):
      raise ValueError(f'dtype must be float32, bfloat16 or float64, got {self.dtype!r}')


def param_shapes(config: MedusaConfig) -> dict[str, Any]:
  """The shapes of all parameters, a nested dict of `jax.ShapeDtypeStruct`."""
  num_heads, width = config.num_heads, config.embed_dim
  each = (num_heads,) if config.has_unembedding else ()

  def array(*shape):
    return jax.ShapeDtypeStruct(shape, config.dtype)

  return {
    'residual': {'kernel': array(num_heads, width, width), 'bias': array(num_heads, width)},
    'unembedding': array(*each, width, config.vocab_size),
  }


def head_output(params: Mapping[str, Any], hidden: jax.Array, head: int) -> jax.Array:
  """The input of the output head of a head, from 0, by the target's hidden states `[..., D]`; of equal shape."""
  residual = params['residual']
  product = matmul(hidden, residual['kernel'][head]) + residual['bias'][head]
  return hidden + jax.nn.silu(product).astype(hidden.dtype)


def output_kernel(unembedding: jax.Array, head: int) -> jax.Array:
  """The output head `[D, V]` of a head, from 0; `unembedding` is `[H, D, V]`, or `[D, V]` for all heads."""
  return unembedding[head] if unembedding.ndim == 3 else unembedding


def _head_logits(params: Mapping[str, Any], hidden: jax.Array, num_heads: int) -> jax.Array:
  """Logits of the first heads, `[B, num_heads, V]`, in float32 or wider, by hidden states `[B, D]`."""
  each = [
    matmul(head_output(params, hidden, head), output_kernel(params['unembedding'], head)) for head in range(num_heads)
  ]
  return jnp.stack(each, axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MedusaDrafter(DrawingDrafter):
  """A drafter that draws from Medusa heads, see `medusa_drafter`; it has no state."""

  params: Mapping[str, Any]
  config: MedusaConfig = static_field()
  feature_layers = (-1,)

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def max_depth(self) -> int:
    return self.config.num_heads

  def propose(self, state: Any, context: DraftContext, request: DraftRequest) -> Proposal:
    del state
    if context.features is None:
      raise ValueError("Medusa heads read the target's hidden states: the context must hold features")
    last = jnp.maximum(context.lengths - 2, 0)
    hidden = jax.vmap(lambda row, place: row[place, 0])(context.features, last)
    # A text of one token has no hidden state yet. What stands there may be anything, so it must not be NaN.
    hidden = jnp.where((context.lengths > 1)[:, None], hidden, 0).astype(self.config.dtype)
    logits = _head_logits(self.params, hidden, request.tree.max_depth)
    return draw_by_depth(request, logits, growth=self.growth)


def medusa_drafter(params: Mapping[str, Any], config: MedusaConfig) -> MedusaDrafter:
  """A drafter that draws from Medusa heads. They run once per round, since their guesses depend on the depth alone.

  Args:
    params: The parameters, see `param_shapes`.
    config: The heads. Trees are at most `num_heads` deep.

  Raises:
    ValueError: A parameter is missing, surplus, or of another shape.
  """
  layers.check_params(params, param_shapes(config))
  return MedusaDrafter(params, config)


def config_of(drafter: Drafter) -> MedusaConfig:
  """The configuration of a drafter that `medusa_drafter` made; ValueError for others."""
  if not isinstance(drafter, MedusaDrafter):
    raise ValueError('not a drafter made by medusa_drafter')
  return drafter.config
