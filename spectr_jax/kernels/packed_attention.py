"""Attention within packed documents, for training: JAX's splash attention on TPUs, blocks of queries elsewhere."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from spectr_jax.kernels.attention import attend_causally
from spectr_jax.kernels.dispatch import operation
from spectr_jax.sharding import DATA, MODEL

_LANES = 128  # the kernel's blocks are multiples
_MAX_BLOCK = 512  # of queries and of keys; with 256 the kernel takes 1.3 times the cycles


@operation
def attend_packed(
  query: jax.Array, keys: jax.Array, values: jax.Array, documents: jax.Array, *, mesh: Mesh | None = None
) -> jax.Array:
  """Causal attention within documents that share rows, equal to `attend_causally` up to rounding.

  The kernel for TPUs keeps scores on the chip, where XLA writes them to memory, and so do its gradients. It needs a
  multiple of 128 tokens; other lengths, float64 and other backends take `attend_causally`.

  `query` is `[B, N, H, head_dim]`, like the result; `keys` and `values` are `[B, H, head_dim, N]` and
  `[B, H, N, head_dim]`; `documents`, int32 `[B, 1, N]`, is the document of each token. Rows are sharded over the mesh,
  with heads over `model`; None for one device.
  """
  places = jnp.arange(documents.shape[-1])
  mask = (jnp.swapaxes(documents, 1, 2) == documents) & (places[:, None] >= places)
  return attend_causally(query, keys, values, mask)


def _takes_queries(query, *arguments, mesh=None):
  return _takes(query.shape[1], query.dtype)


@attend_packed.form('tpu', takes=_takes_queries)
def _attend_by_kernel(query, keys, values, documents, *, mesh=None):
  if mesh is None:
    return by_kernel(query, keys, values, documents)
  heads = _axis_of_heads(query.shape[2], mesh)
  by_head = PartitionSpec(DATA, heads)
  return jax.shard_map(  # XLA does not divide kernels
    by_kernel, mesh=mesh, in_specs=(PartitionSpec(DATA, None, heads), by_head, by_head, PartitionSpec(DATA)),
    out_specs=PartitionSpec(DATA, None, heads), check_vma=False,
  )(query, keys, values, documents)  # fmt: skip


@operation
def arrange_packed(x: jax.Array, *, mesh: Mesh | None = None) -> jax.Array:
  """Puts the tokens of queries, keys or values `[B, N, H, head_dim]`, and of their gradients, side by side on TPUs, as
  the kernel reads them.

  The compiler itself would put the entries of a head side by side, padded to 128.
  """
  return x


@arrange_packed.form('tpu', takes=lambda x, *, mesh=None: _takes(x.shape[1], x.dtype))
def _side_by_side(x, *, mesh=None):
  def arrange(x):
    return with_layout_constraint(x, Layout(major_to_minor=(0, 2, 3, 1)))

  if mesh is not None:
    divided = PartitionSpec(DATA, None, _axis_of_heads(x.shape[2], mesh))
    arrange = jax.shard_map(arrange, mesh=mesh, in_specs=divided, out_specs=divided, check_vma=False)
  return arrange(x)


def _takes(num_tokens: int, dtype: DTypeLike) -> bool:
  """Whether the kernel takes so many tokens of a type."""
  return num_tokens % _LANES == 0 and dtype != jnp.float64


def _axis_of_heads(num_heads: int, mesh: Mesh | None) -> str | None:
  """The axis that heads are sharded over. If they are no multiple of it, each of its devices attends to all of them."""
  return None if mesh is None or num_heads % mesh.shape[MODEL] else MODEL


def by_kernel(
  query: jax.Array, keys: jax.Array, values: jax.Array, documents: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """`attend_packed` by the kernel, on one device, of a multiple of 128 tokens; `interpret` runs it without a TPU."""
  # Takes seconds to import.
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

  num_tokens, num_heads, head_dim = query.shape[1:]
  size = max(size for size in range(_LANES, _MAX_BLOCK + 1, _LANES) if num_tokens % size == 0)
  # Tokens are the minor axis in memory, since heads narrower than the 128 lanes would be padded.
  minor = splash.QKVLayout.SEQ_MINOR
  blocks = splash.BlockSizes(
    block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, use_fused_bwd_kernel=True,
    q_layout=minor, k_layout=minor, v_layout=minor,
  )  # fmt: skip
  mask = splash_attention_mask.CausalMask((num_tokens, num_tokens))
  attend = splash.make_splash_mha(
    splash_attention_mask.MultiHeadMask([mask] * num_heads),
    block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=interpret,
  )  # fmt: skip

  def attend_row(query, keys, values, documents):
    # Without residuals the result is the array alone.
    return cast(jax.Array, attend(query, keys, values, segment_ids=splash.SegmentIds(documents, documents)))

  scaled = jnp.swapaxes(query * head_dim**-0.5, 1, 2)
  mixed = jax.vmap(attend_row)(scaled, jnp.swapaxes(keys, 2, 3), values, documents[:, 0])
  return jnp.swapaxes(mixed, 1, 2).astype(query.dtype)
