"""The tensors of a GGUF file as the same model's safetensors file would have them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from spectr_jax.io import untrusted
from spectr_jax.io.hub.families import FAMILIES
from spectr_jax.io.hub.gguf_config import ROPE_FREQS
from spectr_jax.io.hub.gguf_header import GgufHeader, StoredTensor
from spectr_jax.io.hub.tensors import Tensors, check_number

_FREQUENCIES = re.compile(r'blk\.(\d+)\.attn_rot_embd(?:\.weight)?', re.ASCII)
# Numbers beside matrices of Gemma 4, and the hub's names of them.
_SCALES = {'ffn_gate_inp': 'router.scale', 'ffn_down_exps': 'router.per_expert_scale'}
# The hub's module of recurrent layers, the parameters that are no module's, and the modules of Granite 4 H that the
# package has no names for.
_MIXERS = {'granitehybrid': 'mamba', 'qwen35': 'linear_attn', 'qwen35moe': 'linear_attn'}
_PARAMETERS = {('ssm_a', None): 'A_log', ('ssm_d', None): 'D', ('ssm_dt', 'bias'): 'dt_bias'}
_GRANITE = {
  **{f'ffn_{part}{end}': 'shared_mlp.input_linear' for part in ('gate', 'up') for end in ('', '_shexp')},
  **{f'ffn_down{end}': 'shared_mlp.output_linear' for end in ('', '_shexp')},
  **{f'ffn_{part}_exps': f'block_sparse_moe.experts.{{}}.{part}_proj' for part in ('gate', 'up', 'down')},
}
_GATE_UP = 'experts.{}.gate_up_proj'  # all gates before all ups
_OFFSETS = 'gemma', 'gemma2', 'gemma3', 'qwen35', 'qwen35moe'  # whose norms add 1 to what the hub has
_MOST_AT_ONCE = 2**22  # numbers dequantized together


@dataclasses.dataclass(frozen=True)
class _Source:
  """Where a tensor comes from."""

  stored: np.ndarray  # as in the file: `[rows, blocks, bytes of a block]`, `[rows]` or `[rows, columns]`
  shape: tuple[int, ...]  # once dequantized
  quantization: Any  # the type of its blocks, or None
  # Axes of the stored rows, the two that the hub has exchanged, and how many rows stand before; None for their order.
  row_axes: tuple[tuple[int, ...], tuple[int, int], int] | None
  is_transposed: bool  # whether the hub has columns first
  offset: float  # to be added
  is_log: bool = False  # whether the hub has the logarithm of what is stored, negated
  columns: np.ndarray | None = None  # the places of the hub's columns; None for their order

  def stored_rows(self, rows: slice) -> slice | np.ndarray:
    """The places among the stored rows of some rows by the hub's order."""
    if self.row_axes is None:
      return rows
    return _order(*self.row_axes)[rows]


def _order(sizes: tuple[int, ...], exchanged: tuple[int, int], first: int) -> np.ndarray:
  places = np.arange(math.prod(sizes)).reshape(sizes).swapaxes(*exchanged).ravel()
  return np.concatenate([np.arange(first), first + places])


class GgufTensors(Tensors):
  """The tensors of a GGUF file, by the hub's names and in its layout. Reading a part reads no more of the file."""

  def __init__(self, header: GgufHeader, config: dict[str, Any], architecture: str):
    self._header = header
    self._sources: dict[str, _Source] = {}
    self._second: dict[str, _Source] = {}  # the rows behind these, where two tensors are one of the hub's
    end = 0
    for name, stored in sorted(header.tensors.items(), key=lambda item: item[1].offset):
      layer = re.match(r'blk\.(\d+)\.', name, re.ASCII)
      if architecture.startswith('qwen35') and layer and int(layer[1]) >= config['num_hidden_layers']:
        continue  # layers that guess
      if name == ROPE_FREQS and architecture != 'gpt2':  # a part of the configuration, where positions are rotary
        continue
      with untrusted.named(f'{header.path}: tensor {untrusted.name_shown(name)}'):
        hub_name = _hub_name(name, config['architectures'][0], architecture)
        num_experts = config.get('num_experts', 0) if '{}' in hub_name else None
        source = _source(name, stored, header, config, architecture, is_stacked=num_experts is not None)
        if stored.offset < end:
          raise ValueError('begins within another tensor')
        end = stored.offset + source.stored.nbytes
        sources = {hub_name: source} if num_experts is None else _by_expert(hub_name, source, num_experts)
        is_second = hub_name.endswith('shared_mlp.input_linear.weight') and 'ffn_up' in name
        known = self._second if is_second else self._sources
        if not known.keys().isdisjoint(sources):
          raise ValueError('is there under another name as well')
        known |= sources
        check_number(len(self._sources))
    for name, second in self._second.items():
      first = self._sources.get(name)
      if first is None or first.shape != second.shape or first.quantization != second.quantization:
        raise ValueError(f'{header.path}: gates and ups of {name} are not of one shape and type')

  def names(self) -> set[str]:
    return set(self._sources)

  def shape(self, name: str) -> tuple[int, ...]:
    source = self._sources[name]
    rows, *columns = source.shape
    shape = rows * (1 + (name in self._second)), *columns
    return shape[::-1] if source.is_transposed else shape

  def dtype(self, name: str) -> np.dtype:
    """The stored dtype, or float32 for what is quantized or computed."""
    source = self._sources[name]
    is_computed = source.quantization is not None or source.offset or source.is_log
    return np.dtype(np.float32) if is_computed else source.stored.dtype

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    source = self._sources[name]
    self._header.forget()
    if source.is_transposed:
      return _read(source, index[::-1]).T
    parts = [_read(each, (rows, *index[1:])) for each, rows in self._parts(name, index[0])]
    return np.concatenate(parts) if len(parts) > 1 else parts[0]

  def _parts(self, name: str, rows: slice) -> list[tuple[_Source, slice]]:
    """The sources of some rows of a tensor, and which rows of each."""
    source, second = self._sources[name], self._second.get(name)
    if second is None:
      return [(source, rows)]
    size, (start, stop, _) = source.shape[0], rows.indices(2 * source.shape[0])
    return [
      (source, slice(min(start, size), min(stop, size))),
      (second, slice(max(start - size, 0), max(stop - size, 0))),
    ]

  def blocks(self, name: str, rows: Sequence[slice]) -> tuple[np.ndarray, str] | None:
    """The blocks of some rows of a matrix as in the file, uint8 `[rows, blocks, bytes]`, and their type's name; None if
    it has none.
    """
    source = self._sources[name]
    if source.quantization is None or len(source.shape) != 2 or source.columns is not None:
      return None
    self._header.forget()
    parts = [each.stored[each.stored_rows(part)] for some in rows for each, part in self._parts(name, some)]
    return np.concatenate(parts) if len(parts) > 1 else parts[0], source.quantization.name


def _by_expert(hub_name: str, source: _Source, num_experts: int) -> dict[str, _Source]:
  """The tensors that one of all experts is made of."""
  num, num_rows, *columns = source.shape
  if num != num_experts:
    raise ValueError(f'it has {num} experts, and the metadata {num_experts}')
  if source.quantization is not None and len(columns) != 1:
    raise ValueError('a bias in blocks')
  parts = [hub_name.replace('gate_up', part) for part in (('gate', 'up') if _GATE_UP in hub_name else ('gate_up',))]
  size, rest = divmod(num_rows, len(parts))
  if rest:
    raise ValueError(f'{num_rows} rows are gates without an up')
  return {
    name.replace('{}', str(i)): dataclasses.replace(source, stored=one[j * size :][:size], shape=(size, *columns))
    for i, one in enumerate(source.stored)
    for j, name in enumerate(parts)
  }


@functools.cache
def _module_names(family_name: str, architecture: str) -> dict[str, str]:
  """The hub's names of modules by llama.cpp's, as the package `gguf` converts them; `blk.0.` for the first block."""
  import gguf

  family = FAMILIES[family_name]
  kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
  hub_names, stored_name = {'output': family.head_names[0]}, gguf.get_tensor_name_map(kind, 1).get_name
  for module in (*family.modules.values(), _GATE_UP):
    module = module.removesuffix('.weight').removesuffix('.bias')
    for name in (f'{family.prefix}{module}', f'{family.prefix}{family.blocks}.0.{module}'):
      if stored := stored_name(name.replace('.{}', '')):
        hub_names[stored] = name
  if architecture == 'granitehybrid':
    hub_names |= {f'blk.0.{part}': f'{family.prefix}{family.blocks}.0.{name}' for part, name in _GRANITE.items()}
  return hub_names


def _hub_name(name: str, family_name: str, architecture: str) -> str:
  family = FAMILIES[family_name]
  if match := _FREQUENCIES.fullmatch(name):
    return f'{family.prefix}{family.blocks}.{match[1]}.rotary_emb.inv_freq'
  match = re.fullmatch(r'(?:blk\.(\d+)\.)?(\w+(?:\.\w+)??)(?:\.(weight|bias|scale))?', name, re.ASCII)
  layer, part, kind = match.groups() if match else (None, '', '')
  if layer is not None and architecture in _MIXERS and (part, kind) in _PARAMETERS:
    return f'{family.prefix}{family.blocks}.{layer}.{_MIXERS[architecture]}.{_PARAMETERS[part, kind]}'
  if kind == 'scale' and architecture == 'gemma4' and part in _SCALES:
    return f'{family.prefix}{family.blocks}.{layer}.{_SCALES[part]}'
  module = _module_names(family_name, architecture).get(part if layer is None else f'blk.0.{part}')
  if module is None or kind not in ('weight', 'bias'):
    raise ValueError('unknown for this architecture')
  name = module if module.endswith(('.sinks', '.layer_scalar')) else f'{module}.{kind}'
  return name.replace(f'{family.blocks}.0.', f'{family.blocks}.{layer}.', 1)


def _source(
  name: str, tensor: StoredTensor, header: GgufHeader, config: dict[str, Any], architecture: str, *, is_stacked: bool
) -> _Source:
  stored, quantization = _stored(tensor, header, (2, 3) if is_stacked else (1, 2))
  part = name.removesuffix('.weight').removesuffix('.bias').split('.')[-1]
  row_axes, columns, shape = None, None, tensor.shape
  if 'ssm_conv1d.weight' in name or 'shortconv.conv.weight' in name:
    shape = *shape[:1], 1, *shape[1:]
  elif name.endswith(('.ssm_a', '.ssm_d', '.ssm_norm.weight')):
    shape = (math.prod(shape),)
  elif part == 'ffn_gate_inp_shexp':
    shape = 1, shape[-1]
  if shape != tensor.shape and quantization is not None:
    raise ValueError('is in blocks, which are read of matrices alone')
  if architecture in ('llama', 'granitehybrid') and part in ('attn_q', 'attn_k'):
    num_heads = config['num_attention_heads' if part == 'attn_q' else 'num_key_value_heads']
    # llama.cpp rotates neighbors, the hub the two halves of a head: the first axis of a pair moves to the front.
    row_axes = (num_heads, config['head_dim'] // 2, 2), (1, 2), 0
  elif architecture == 'gptneox' and part == 'attn_qkv':
    # By query, key and value first; the hub has them by head first.
    num_heads = config['num_attention_heads']
    row_axes = (3, num_heads, config['hidden_size'] // num_heads), (0, 1), 0
  elif architecture in ('qwen35', 'qwen35moe'):
    row_axes, columns = _orders_of_values(part, tensor.shape, config)
  if row_axes is not None and tensor.shape[0] != row_axes[2] + math.prod(row_axes[0]):
    before = f'{row_axes[2]} + ' if row_axes[2] else ''
    raise ValueError(f'{tensor.shape[0]} rows, expected {before}{" x ".join(map(str, row_axes[0]))}')
  return _Source(
    stored if shape == tensor.shape else stored.reshape(shape),
    shape,
    quantization,
    row_axes,
    is_transposed=architecture == 'gpt2' and name.startswith('blk.') and len(tensor.shape) == 2,
    # llama.cpp stores the gain of norms, the hub what is added to 1.
    offset=-1.0 if architecture in _OFFSETS and part.endswith('norm') and part != 'ssm_norm' else 0.0,
    is_log=name.endswith('.ssm_a'),
    columns=columns,
  )


def _orders_of_values(part: str, shape: tuple[int, ...], config: dict[str, Any]):
  """The order of rows and of columns by the heads of values of Qwen 3.5: llama.cpp has the first of every head of keys,
  then the second, the hub all of a head of keys together.
  """
  num_keys, num_values, width = (
    config[f'linear_{name}'] for name in ('num_key_heads', 'num_value_heads', 'value_head_dim')
  )
  heads, keys = (num_values // num_keys, num_keys), 2 * num_keys * config['linear_key_head_dim']
  if part in ('attn_qkv', 'attn_gate', 'ssm_conv1d'):
    return ((*heads, width), (0, 1), 0 if part == 'attn_gate' else keys), None
  if part in ('ssm_alpha', 'ssm_beta', 'ssm_a', 'ssm_dt'):
    return (heads, (0, 1), 0), None
  if part != 'ssm_out':
    return None, None
  if shape[-1] != num_values * width:
    raise ValueError(f'{shape[-1]} columns, expected {num_values} x {width}')
  return None, _order((*heads, width), (0, 1), 0)


def _stored(tensor: StoredTensor, header: GgufHeader, allowed_axes: tuple[int, int]) -> tuple[np.ndarray, Any]:
  """The data of a tensor as it is in the file, and the type of its blocks if it has any."""
  import gguf

  if len(tensor.shape) not in allowed_axes:
    raise ValueError(f'{len(tensor.shape)} axes, expected {" or ".join(map(str, allowed_axes))}')
  kind, dtype = _known_type(tensor.type_id)
  block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
  *rows, columns = tensor.shape
  if columns % block_size or (dtype is None and not rows):
    raise ValueError(f'shape {tensor.shape} does not divide into rows of whole {kind.name} blocks of {block_size}')
  num_blocks = columns // block_size
  end = tensor.offset + math.prod(rows) * num_blocks * block_bytes
  if end > len(header.data):
    raise ValueError(f'ends at byte {end}, the file at {len(header.data)}: the file is truncated')
  data = header.data[tensor.offset : end]
  if dtype is not None:
    return data.view(dtype).reshape(tensor.shape), None
  return data.reshape(*rows, num_blocks, block_bytes), kind


def _known_type(type_id: int) -> tuple[Any, np.dtype | None]:
  """A type by its number, and its dtype if it is not quantized."""
  import gguf

  types = gguf.GGMLQuantizationType
  plain = {types.F32: np.float32, types.F16: np.float16, types.BF16: ml_dtypes.bfloat16}
  kind = types(type_id) if type_id in {int(known) for known in types} else None
  if kind is not None and (kind in plain or _is_dequantizable(kind)):
    return kind, np.dtype(plain[kind]) if kind in plain else None
  name = f'number {type_id}' if kind is None else kind.name
  known = ', '.join(known.name for known in types if known in plain or _is_dequantizable(known))
  raise ValueError(f'unknown type {name}; known are {known}')


@functools.cache
def _is_dequantizable(kind: Any) -> bool:
  import gguf

  try:
    gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
  except NotImplementedError:
    return False
  return True


def _read(source: _Source, index: tuple[slice, ...]) -> np.ndarray:
  if source.columns is not None:
    order = source.columns[index[1]]
    return _read(dataclasses.replace(source, columns=None), (index[0], slice(None)))[:, order]
  rows = source.stored_rows(index[0])
  if source.quantization is None:
    values = source.stored[rows][(slice(None), *index[1:])]
  else:
    values = _dequantized(source, rows, index[1])
  if source.is_log:
    if not (values < 0).all():
      raise ValueError('a rate of decay must be below 0')
    return np.log(-values.astype(np.float32))
  return values.astype(np.float32) + np.float32(source.offset) if source.offset else values


def _dequantized(source: _Source, rows: slice | np.ndarray, columns: slice) -> np.ndarray:
  """Some rows and columns of a quantized tensor, float32, from the blocks that they stand in."""
  import gguf

  first, end, _ = columns.indices(source.shape[1])
  size = gguf.GGML_QUANT_SIZES[source.quantization][0]
  blocks = source.stored[rows, first // size : -(-end // size)]
  values = np.empty((len(blocks), max(end - first, 0)), np.float32)
  if not values.size:
    return values
  step = max(1, _MOST_AT_ONCE // (blocks.shape[1] * size))
  for start in range(0, len(blocks), step):
    some = np.ascontiguousarray(blocks[start : start + step])
    if source.quantization.name == 'MXFP4' and (some[..., 0] == 255).any():
      raise ValueError('a scale of MXFP4 blocks is 255, which is no number')
    numbers = gguf.quants.dequantize(some.reshape(len(some), -1), source.quantization)
    values[start : start + step] = numbers[:, first % size :][:, : values.shape[1]]
  return values
