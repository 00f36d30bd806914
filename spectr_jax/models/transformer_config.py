"""The sizes of a transformer."""

from __future__ import annotations

import dataclasses

from spectr_jax.models.causal_lm_config import check_sizes


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Sizes of a transformer.

  Attributes:
    vocab_size: V.
    embed_dim: Width of the residual stream.
    num_layers: Number of blocks.
    num_heads: Attention heads; must divide `embed_dim` into even parts.
    mlp_dim: Hidden width of the MLP.
    max_length: Longest context it is trained for, in tokens.
    dtype: Type of activations, caches and of kernels when multiplied. Softmaxes, norms and logits are float32.

  Raises:
    ValueError: A size or the type is not allowed, or `embed_dim` is not an even multiple of `num_heads`.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  mlp_dim: int
  max_length: int
  dtype: str = 'float32'

  def __post_init__(self):
    check_sizes(self, 'vocab_size', 'embed_dim', 'num_layers', 'num_heads', 'mlp_dim')
    check_sizes(self, 'max_length', most=2**31 - 1)  # positions are int32
    if self.embed_dim % (2 * self.num_heads):
      raise ValueError(f'embed_dim {self.embed_dim} must be an even multiple of num_heads {self.num_heads}')
    if self.dtype not in ('float32', 'bfloat16', 'float64'):
      raise ValueError(f'dtype must be float32, bfloat16 or float64, got {self.dtype!r}')

  @property
  def head_dim(self) -> int:
    """Width of an attention head."""
    return self.embed_dim // self.num_heads

  @property
  def num_params(self) -> int:
    """The exact number of parameters."""
    per_layer = 4 * self.embed_dim**2 + 2 * self.embed_dim * self.mlp_dim + 2 * self.embed_dim
    return self.vocab_size * self.embed_dim + self.num_layers * per_layer + self.embed_dim
