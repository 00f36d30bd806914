"""Matrices of parameters in every form, their products, and the forms that CPUs and GPUs decode fastest.

Where `kernels.native` has products, large kernels for a CPU are packed for them, once. Elsewhere they are for XLA. Its
CPU backend reads a kernel `[out, in]` as it stands, where it rearranges one of the other order at every product, and a
product of few rows takes some 50 microseconds beside the time of its bytes. So kernels that do not stay in the caches
are transposed, and those that multiply the same input become one. Without units for bfloat16 products (AMX) a single
token takes half as long in the order `[in, out]`, and several take two thirds as long in the other one, prompts longer:
there bfloat16 kernels are kept in both. `kernels.products` has the forms of the product; jax 0.10 was measured.

On a GPU, too, kernels of the same input become one. XLA would multiply by all of them at once, and may copy them side
by side for it in every step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from spectr_jax.kernels import native, products
from spectr_jax.kernels.block_kernel import BlockKernel, fit_side_by_side, is_in_blocks, side_by_side
from spectr_jax.kernels.dispatch import operation
from spectr_jax.kernels.expert_products import PackedExperts, packed_experts
from spectr_jax.kernels.int8 import Int8Kernel, is_int8
from spectr_jax.kernels.products import MANY_TOKENS, int8_product, multiply, rounded
from spectr_jax.sharding import MODEL, automatic_axes

# The name of the products that become one, by theirs.
JOINED = {('q', 'k', 'v'): 'qkv', ('gate', 'up'): 'gate_up'}
# Numbers of a kernel. Smaller ones are multiplied faster than a call is made.
_LEAST_PACKED = 2**13
# For TPUs: numbers of kernels, and tokens of a row; chunks of prompts have more.
_MOST_JOINED, _MOST_TOKENS_JOINED = 2**23, 127
MOST_DOUBLED = 2**31  # bytes of kernels that a model keeps in both orders; with more, it keeps them in their own


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransposedKernel:
  """A kernel `[in, out]` that is stored in the other order."""

  out_in: Any  # `[out, in]`
  in_out: Any = None  # for single tokens and prompts; None where `out_in` serves

  @property
  def shape(self) -> tuple[int, ...]:
    """`(in, out)`."""
    return self.out_in.shape[::-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedKernel:
  """A kernel `[in, out]` in the order in which `native.product` reads it."""

  panels: jax.Array  # what `native.pack` returned
  num_out: int = dataclasses.field(metadata={'static': True})  # the number of outputs
  scale: jax.Array | None = None  # `[out]`, the scales of a kernel in int8; None for others

  @property
  def shape(self) -> tuple[int, ...]:
    """`(in, out)`."""
    return (math.prod(self.panels.shape[1:]) // native.PANEL, self.num_out)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OrderedGain:
  """The gain of a norm whose sums have one order, those of `native.norm`."""

  values: jax.Array  # float32 `[D]`


Kernel: TypeAlias = jax.Array | Int8Kernel | BlockKernel | TransposedKernel | PackedKernel


def matmul(x: jax.Array, kernel: Kernel, *, axis: int = 0) -> jax.Array:
  """The product `[..., out]`, multiplied in the activations' dtype, accumulated in float32 or wider.

  The kernel is `[in, out]` for axis 0, `[out, in]` for axis 1, of any float dtype; or in another form.
  """
  if isinstance(kernel, BlockKernel):
    return kernel.product(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], kernel.num_out)
  if isinstance(kernel, PackedKernel):
    out = native.product(x.reshape(-1, x.shape[-1]), kernel.panels, kernel.num_out)
    return _scaled(out.reshape(*x.shape[:-1], kernel.num_out), kernel.scale)
  if isinstance(kernel, TransposedKernel):
    has_many_tokens = x.ndim == 3 and x.shape[1] >= MANY_TOKENS
    if kernel.in_out is not None and (x.size == x.shape[-1] or has_many_tokens):
      return matmul(x, kernel.in_out)
    return matmul(x, kernel.out_in, axis=1)
  if isinstance(kernel, Int8Kernel):
    return _scaled(int8_product(x, kernel.values, axis), kernel.scale)
  return multiply(x, kernel, axis)


def _scaled(sums, scale):
  return sums if scale is None else rounded(sums * scale, sums.dtype)  # a channel's scale is a factor of its sums


def _side_by_side(kernels: Sequence[Any]):
  """Kernels `[in, out]`, or biases `[out]`, as one."""
  if is_in_blocks(kernels[0]):
    return side_by_side(kernels)
  if not is_int8(kernels[0]):
    return _concatenated(kernels)
  values, scales = zip(*((kernel.values, kernel.scale) for kernel in kernels), strict=True)
  return Int8Kernel(_concatenated(values), _concatenated(scales), kernels[0].channel_axis)


def _concatenated(arrays: Sequence[jax.Array]) -> jax.Array:
  """Arrays as one, along their last axis. NumPy joins those of a CPU: it needs no program for their shapes."""
  first = arrays[0]
  if isinstance(first, Tracer) or [device.platform for device in first.devices()] != ['cpu']:
    return jnp.concatenate(arrays, axis=-1)
  return jax.device_put(np.concatenate(arrays, axis=-1), first.sharding if first.committed else None)


@operation
def joined_in_loop(parts: Sequence[Mapping[str, Any]], num_tokens: int) -> tuple[Mapping[str, Any] | None, int]:
  """The parameters of products of one input with `num_tokens` of each row as those of one product, or None for as they
  are; and in how many parts it has the columns of all.
  """
  del parts, num_tokens
  return None, 1


def _are_few_and_small(parts, num_tokens):
  kernels, num_devices = [part['kernel'] for part in parts], automatic_axes().get(MODEL, 1)
  is_plain = all(isinstance(kernel, jax.Array) and kernel.shape[1] % num_devices == 0 for kernel in kernels)
  is_small = num_tokens <= _MOST_TOKENS_JOINED and sum(kernel.size for kernel in kernels) <= _MOST_JOINED
  return len(parts) > 1 and is_plain and is_small


@joined_in_loop.form('tpu', takes=_are_few_and_small)
def _joined_by_device(parts, num_tokens):
  """One launch in place of several, and fewer kernels that the compiler must bring to the vector memory ahead of time.

  The compiler joins them before the loop. The columns that a device holds stay on it.
  """
  del num_tokens
  num_devices = automatic_axes().get(MODEL, 1)

  def join(leaf):
    pieces = [part[leaf].reshape(*part[leaf].shape[:-1], num_devices, -1) for part in parts]
    joined = jnp.concatenate(pieces, axis=-1)
    return joined.reshape(*joined.shape[:-2], -1)

  return {leaf: join(leaf) for leaf in parts[0]}, num_devices


def _can_join(parts: Sequence[Mapping[str, Any]]) -> bool:
  """Whether kernels are of one kind. Those of experts stay apart: to join all would be a copy of most of a model."""
  kernels = [part.get('kernel') for part in parts]
  if any(kernel is not None and len(kernel.shape) > 2 for kernel in kernels):
    return False
  return fit_side_by_side(kernels) or not any(map(is_in_blocks, kernels))


def _joined(params: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters of products and others, with those of `JOINED` as one, at every level of a nested dict."""
  params = {name: _joined(node) if isinstance(node, Mapping) else node for name, node in params.items()}
  for names, joined in JOINED.items():
    parts = [params[name] for name in names if isinstance(params.get(name), Mapping)]
    if len(parts) == len(names) and all(part.keys() == parts[0].keys() for part in parts) and _can_join(parts):
      params[joined] = {leaf: _side_by_side([part[leaf] for part in parts]) for leaf in parts[0]}
      for name in names:
        del params[name]
  return params


def _transposed(kernel) -> TransposedKernel:
  if is_int8(kernel):
    return TransposedKernel(Int8Kernel(kernel.values.T, kernel.scale, 1 - kernel.channel_axis))
  return TransposedKernel(kernel.T)


def _wants_both(kernel: Any) -> bool:
  """Whether the fastest products with a kernel read it in both orders."""
  return not is_int8(kernel) and kernel.dtype == jnp.bfloat16 and not products.multiplies_bfloat16()


def _has_room_twice(arrays: Sequence[jax.Array]) -> bool:
  """Whether all arrays are on one device, which could hold them twice."""
  devices = {device for array in arrays for device in array.devices()}
  if len(devices) > 1:  # the parts of a joined kernel would not be where they are multiplied
    return False
  memory = devices.pop().memory_stats() or {}
  return 2 * sum(array.nbytes for array in arrays) <= memory.get('bytes_limit', math.inf)


@operation
def kernels_for_decoding(params: Mapping[str, Any]) -> Mapping[str, Any]:
  """Parameters, nested dicts, whose matrices are in the form that the default device multiplies fastest.

  For CPUs large matrices `kernel` and `unembedding` are joined, and packed or transposed. Kernels in both orders take
  twice the memory; a model with more than `MOST_DOUBLED` bytes of them keeps their order. For GPUs kernels are joined,
  if all parameters are on one device that could hold them twice.
  """
  return params


@operation
def params_for_decoding(params: Mapping[str, Any]) -> Mapping[str, Any]:
  """The parameters of a network, a nested dict with `embedding` `[V, D]`, in the form that decodes fastest.

  Beside `kernels_for_decoding`, on a CPU the output head becomes an array of its own if it is tied. And a bfloat16
  embedding becomes integers of the same bits: to take rows of bfloat16, XLA would convert all of them to float32, once
  in every program.
  """
  return kernels_for_decoding(params)


@params_for_decoding.form('cpu')
def _with_output_head(params):
  embedding = params['embedding']
  if is_int8(embedding):
    head = Int8Kernel(embedding.values.T, embedding.scale, 1 - embedding.channel_axis)
    is_own = 'unembedding' in params or not _is_packed(head)
    return kernels_for_decoding(params if is_own else {'unembedding': head, **params})
  if 'unembedding' not in params and _is_packed(embedding) and embedding.dtype == jnp.float32:
    return kernels_for_decoding({'unembedding': embedding.T, **params})
  if is_in_blocks(embedding) or embedding.dtype != jnp.bfloat16:
    return kernels_for_decoding(params)
  head, bits = _head_and_bits(embedding)
  tables: dict[str, Any] = {'embedding': bits}
  if 'per_layer' in params:
    tables['per_layer'] = {**params['per_layer'], 'embedding': _bits_of(params['per_layer']['embedding'])}
  return kernels_for_decoding({'unembedding': head, **params, **tables})


@jax.jit
def _bits_of(embedding: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(embedding, jnp.uint16)


@jax.jit
def _head_and_bits(embedding: jax.Array) -> tuple[jax.Array, jax.Array]:
  return embedding.T, _bits_of(embedding)


@kernels_for_decoding.form('gpu')
def _joined_for_gpu(params: Mapping[str, Any]) -> Mapping[str, Any]:
  is_joined = jax.tree.structure(jax.eval_shape(_joined, params)) == jax.tree.structure(params)
  return params if is_joined or not _has_room_twice(jax.tree.leaves(params)) else _joined(params)


def _is_packed(node: Any) -> bool:
  """Whether products with a kernel are those of `native`: it is whole on one device, and in float32.

  It may also be in bfloat16 or int8 where the processor has no units for bfloat16, with which XLA is as fast.
  """
  values = node.values if is_int8(node) else node
  if not isinstance(values, jax.Array) or isinstance(values, Tracer) or len(values.devices()) > 1:
    return False
  has_units = values.dtype != jnp.float32 and products.multiplies_bfloat16()
  return not has_units and native.packs(_in_out(node)) and native.form() is not None


def _in_out(kernel: jax.Array | Int8Kernel) -> jax.Array:
  """The numbers of a kernel as `[in, out]`."""
  if not isinstance(kernel, Int8Kernel):
    return kernel
  return kernel.values if kernel.channel_axis else kernel.values.T


def _packed(kernel: jax.Array | Int8Kernel) -> PackedKernel:
  values = _in_out(kernel)
  return PackedKernel(native.pack(values), values.shape[1], kernel.scale if isinstance(kernel, Int8Kernel) else None)


def _is_gain(keys: Any, node: Any) -> bool:
  """Whether a parameter is the gain of a norm for `native`: it is whole on one device, of at most 32 bits."""
  if keys[-1].key != 'gain' or not isinstance(node, jax.Array) or isinstance(node, Tracer) or len(node.devices()) > 1:
    return False
  return node.dtype != jnp.float64 and native.form() is not None


@kernels_for_decoding.form('cpu')
def _converted_for_cpu(params: Mapping[str, Any]) -> Mapping[str, Any]:
  def is_made(node):
    return isinstance(node, (BlockKernel, TransposedKernel, PackedKernel, PackedExperts, OrderedGain))

  def is_whole(node):
    return is_int8(node) or is_made(node)

  def is_product(keys, node, num_axes=2):
    return not is_made(node) and keys[-1].key in ('kernel', 'unembedding') and len(node.shape) == num_axes

  def is_packed(keys, node):
    return is_product(keys, node) and node.size >= min(products.LARGE, _LEAST_PACKED) and _is_packed(node)

  def is_slow(keys, node):
    return is_product(keys, node) and node.size >= products.LARGE and not is_packed(keys, node)

  def convert(keys, node):
    if _is_gain(keys, node):
      return OrderedGain(node.astype(jnp.float32))
    if is_packed(keys, node):
      return _packed(node)
    if is_product(keys, node, num_axes=3):
      return packed_experts(node) or node
    if not is_slow(keys, node):
      return node
    return _transposed(node) if not _wants_both(node) else TransposedKernel(node.T, node) if is_doubled else node

  joined = _joined(params)
  leaves = jax.tree_util.tree_leaves_with_path(joined, is_leaf=is_whole)
  is_doubled = sum(node.nbytes for keys, node in leaves if is_slow(keys, node) and _wants_both(node)) <= MOST_DOUBLED
  converted = jax.tree_util.tree_map_with_path(convert, joined, is_leaf=is_whole)
  return params if jax.tree.structure(converted) == jax.tree.structure(params) else converted
