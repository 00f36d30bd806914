"""Loading of hub checkpoints: every parameter pulls its part of a tensor, device by device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, SingleDeviceSharding

from spectr_jax.io.hub.families import read_spec
from spectr_jax.io.hub.fused_experts import split_experts
from spectr_jax.io.hub.gguf_tensors import GgufTensors
from spectr_jax.io.hub.redundant import check_model_buffers, settle_head
from spectr_jax.io.hub.scaled_tensors import with_scales
from spectr_jax.io.hub.sources import Source, is_unread, num_more_layers, source_of, telling_names
from spectr_jax.io.hub.tensors import SafetensorsFolder, Tensors, check_tensors
from spectr_jax.io.hub.text_part import text_spec, text_tensors, warn_of_left_out
from spectr_jax.io.untrusted import named, read_object
from spectr_jax.kernels.block_kernel import KINDS, BlockKernel, is_in_blocks, packed, packed_experts
from spectr_jax.kernels.cache_writes import fastest_cache_dtype
from spectr_jax.kernels.dispatch import tracing_for
from spectr_jax.kernels.int8 import BLOCKS, CHANNEL_AXES, Int8Kernel, is_int8, quantize
from spectr_jax.kernels.products import accumulation_dtype
from spectr_jax.model import Model
from spectr_jax.models.causal_lm import causal_lm
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.param_shapes import param_shapes
from spectr_jax.sharding import CAUSAL_LM_RULES, MODEL, only_over, shardings

_MOST_AT_ONCE = 2**22  # numbers quantized together

# Gives the part of a parameter at an index, a slice per dimension.
_ReadPart: TypeAlias = Callable[[Any], np.ndarray]


def _read(index, *, shape, tensors: Tensors, source: Source, dtype: Any) -> np.ndarray:
  if source.num_experts is None:
    return _read_one(index, shape, tensors, source, source.name, dtype)
  sizes = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)]
  stacked = np.empty(sizes, dtype)
  for place, name in zip(stacked, source.names[index[0]], strict=True):
    place[...] = _read_one(index[1:], shape[1:], tensors, source, name, dtype)
  return stacked


def _read_one(index, shape, tensors: Tensors, source: Source, name: str, dtype: Any) -> np.ndarray:
  *inputs, outputs = (slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))
  parts = []
  for rows in source.ranges(outputs):
    where = (rows, *inputs) if source.is_transposed else (*inputs, rows)
    if source.has_axis:
      where = (rows, slice(0, 1), *inputs)
    part = tensors.read(name, where)
    part = part[:, 0] if source.has_axis else part
    parts.append(source.scaled(part.T if source.is_transposed else part, rows).astype(dtype, copy=False))
  return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _quantized_reads(read: _ReadPart, kernel: Int8Kernel) -> tuple[_ReadPart, _ReadPart]:
  """Functions that give a part of a kernel's int8 values, and of its scales, from parts in float32 or wider.

  A scale belongs to a whole channel, so whole channels are read, some at a time, also for a device that holds only some
  of their inputs. They stay here in int8 until the functions go, so that all devices and both functions share a read.
  """
  if len(kernel.shape) == 3:
    return _quantized_experts(read, kernel)
  axis = kernel.channel_axis
  num_channels, num_inputs = kernel.shape[axis], kernel.shape[1 - axis]
  step = max(1, _MOST_AT_ONCE // num_inputs)

  def whole(channels):
    return (slice(None), channels) if axis else (channels, slice(None))

  @functools.cache
  def quantized(start, stop):
    num = stop - start
    values = np.empty((num_inputs, num) if axis else (num, num_inputs), np.int8)
    scale = np.empty(num, kernel.scale.dtype)
    for begin in range(0, num, step):
      part = slice(begin, min(begin + step, num))
      numbers = read(whole(slice(start + part.start, start + part.stop)))
      values[whole(part)], scale[part] = quantize(numbers, axis)
    return values, scale

  def values(index):
    numbers, _ = quantized(*index[axis].indices(num_channels)[:2])
    return numbers[index[0]] if axis else numbers[:, index[1]]

  def scale(index):
    return quantized(*index[0].indices(num_channels)[:2])[1]

  return values, scale


def _quantized_experts(read: _ReadPart, kernel: Int8Kernel) -> tuple[_ReadPart, _ReadPart]:
  """`_quantized_reads` of kernels `[E, in, out]`, one by one."""
  num_experts, num_inputs, num_channels = kernel.shape

  @functools.cache
  def quantized(first, last, start, stop):
    values = np.empty((last - first, num_inputs, stop - start), np.int8)
    scale = np.empty((last - first, stop - start), kernel.scale.dtype)
    for i in range(first, last):
      numbers = read((slice(i, i + 1), slice(0, num_inputs), slice(start, stop)))
      values[i - first], scale[i - first] = quantize(numbers[0], 1)
    return values, scale

  def of(index):
    return quantized(*index[0].indices(num_experts)[:2], *index[-1].indices(num_channels)[:2])

  return lambda index: of(index)[0][:, index[1]], lambda index: of(index)[1]


def _in_blocks(keys, shape, tensors: Tensors, source: Source) -> BlockKernel | None:
  """A matrix, or those of experts, in the blocks of its file; None for other parameters and blocks of another type."""
  name = keys[-1].key
  if name not in CHANNEL_AXES or not isinstance(tensors, GgufTensors):
    return None
  ranges = list(source.ranges(slice(0, shape[0] if name == 'embedding' else shape[-1])))
  first = tensors.blocks(source.names[0], ranges)
  if first is None or first[1] not in KINDS:
    return None
  with named(f'tensor {source.name}'):
    if source.num_experts is None:
      return packed(*first)
    each = (blocks[0] for name in source.names if (blocks := tensors.blocks(name, ranges)))
    return packed_experts(each, source.num_experts, first[1])


def for_platform(config: CausalLMConfig, mesh: Mesh | None) -> CausalLMConfig:
  """The configuration with the caches that the devices of `mesh`, or the default one, write fastest."""
  with tracing_for(mesh):
    return dataclasses.replace(config, cache_dtype=fastest_cache_dtype(config.dtype) or config.cache_dtype)


def make_model(
  spec: Mapping[str, Any],
  tensors: Tensors,
  *,
  dtype: str | None = None,
  weights: str | None = None,
  mesh: Mesh | None = None,
  where: str = 'config.json',
) -> Model:
  """A model of a checkpoint's configuration and tensors.

  Every device reads only its own part of each tensor. For weights in int8 it reads the whole of every output channel
  that it holds a part of, and quantizes some channels at a time. On CPUs the caches of a bfloat16 model are float32,
  which are written in place.

  Args:
    spec: The content of `config.json`.
    tensors: The tensors, by the hub's names.
    dtype: The dtype to hold parameters and to compute in, `float32` or `bfloat16`; None for the checkpoint's, or for
      float32 where that is float16.
    weights: As for `load_model`.
    mesh: The devices whose axis `model` the parameters are sharded over; None for the default device.
    where: Where the configuration stands, for messages.

  Raises:
    ValueError: The configuration or the type of weights is unknown, or a tensor or the mesh does not fit.
  """
  if weights == BLOCKS and (mesh is not None or not isinstance(tensors, GgufTensors)):
    raise ValueError(f'weights={BLOCKS!r} are those of a .gguf file, on one device')
  family, config = read_spec(settle_head(spec, tensors, where), where)
  config = dataclasses.replace(config, dtype=dtype or config.dtype, weights=weights)
  config = for_platform(config if mesh is None else config.for_mesh(mesh), mesh)
  names = tensors.names()
  if config.num_layers > len(names):
    raise ValueError(f'the configuration has {config.num_layers} layers, but the checkpoint {len(names)} tensors')
  num_experts = sum(map(config.experts.are_in, range(config.num_layers))) * config.experts.num if config.experts else 0
  tensors = split_experts(tensors, config)
  if num_experts > len(tensors.names()):
    raise ValueError(f'the configuration has {num_experts} experts, but the checkpoint {len(names)} tensors')
  shapes, names = param_shapes(config), telling_names(family, names)

  def path_of(keys):
    return jax.tree_util.keystr(keys, simple=True, separator='/')

  sources = {
    path_of(keys): source_of(path_of(keys), leaf.shape, family, config, names)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_int8)
  }
  heads = [f'{name}.weight' for name in family.head_names]  # `settle_head` has compared them
  num_more = num_more_layers(family, spec)
  wanted = {name: source.shape for source in sources.values() for name in source.names}
  check_tensors(
    tensors,
    wanted,
    lambda name: name in heads or name.endswith(family.buffers) or is_unread(name, family, config, num_more),
  )
  check_model_buffers(spec, tensors, where)
  if mesh is None:
    places = jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), shapes)
  else:
    places = shardings(mesh, shapes, only_over(MODEL, CAUSAL_LM_RULES))

  def make(keys, leaf, place):
    source = sources[path_of(keys)]
    if config.weights == BLOCKS:
      kernel = _in_blocks(keys, leaf.shape, tensors, source)
      if kernel is not None:
        return kernel
    part = functools.partial(_read, shape=leaf.shape, tensors=tensors, source=source)
    if not is_int8(leaf):
      # Gains are rounded like kernels, as in Transformers; rates and biases of choices keep their type.
      dtype = config.dtype if keys[-1].key == 'gain' else leaf.dtype
      return jax.make_array_from_callback(leaf.shape, place, functools.partial(part, dtype=dtype))
    reads = _quantized_reads(functools.partial(part, dtype=accumulation_dtype(config.dtype)), leaf)
    with named(f'tensor {source.name}'):
      values, scale = (
        jax.make_array_from_callback(shape.shape, sharding, read)
        for shape, sharding, read in zip((leaf.values, leaf.scale), (place.values, place.scale), reads)
      )
    return Int8Kernel(values, scale, leaf.channel_axis)

  params = jax.tree_util.tree_map_with_path(make, shapes, places, is_leaf=is_int8)
  if weights == BLOCKS and not any(map(is_in_blocks, jax.tree.leaves(params, is_leaf=is_in_blocks))):
    raise ValueError(f'no matrix has blocks of {", ".join(KINDS)}: load it without weights={BLOCKS!r}')
  return causal_lm(params, config)


def read_json(folder: epath.PathLike) -> dict[str, Any]:
  """The content of a folder's `config.json`, whose fields `read_spec` checks."""
  path = epath.Path(folder) / 'config.json'
  if not path.exists():
    raise ValueError(f'no model at {folder}: expected a folder with config.json')
  return read_object(path, {})


def read_folder(folder: epath.PathLike) -> tuple[dict[str, Any], Tensors]:
  """The content of a folder's `config.json`, and its tensors; those of the text model, if it is multimodal."""
  spec, where = read_json(folder), f'{folder}/config.json'
  text = text_spec(spec, where)
  read_spec(text, where)  # what is refused is refused before a file of tensors is opened
  return text, text_tensors(spec, with_scales(SafetensorsFolder(folder), text.get('quantization_config')))


def read_hub_config(folder: epath.PathLike, *, dtype: str | None = None, weights: str | None = None) -> CausalLMConfig:
  """The configuration of a hub folder, by its `config.json` alone.

  With `causal_lm.param_shapes` it is enough to compile for a model whose weights are not there. The options are those
  of `load_hub_model`. Raises `ValueError` if the file is missing, damaged or of an unknown architecture, or the type of
  weights is unknown.
  """
  where = f'{folder}/config.json'
  _, config = read_spec(text_spec(read_json(folder), where), where)
  return dataclasses.replace(config, dtype=dtype or config.dtype, weights=weights)


def load_hub_model(
  folder: epath.PathLike, *, dtype: str | None = None, weights: str | None = None, mesh: Mesh | None = None
) -> Model:
  """The model of a folder as the hub serves it, without its tokenizer.

  The folder has `config.json` and safetensors files; of a multimodal model the text model is read. The options are
  those of `make_model`, as are the reasons for a `ValueError`; or a file is missing or damaged.
  """
  with named(folder):
    (spec, tensors), where = read_folder(folder), f'{folder}/config.json'
    warn_of_left_out(tensors, where)
    return make_model(spec, tensors, dtype=dtype, weights=weights, mesh=mesh, where=where)
