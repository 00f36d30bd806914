"""Weights of 8 bits (E4M3) with scales, read as the numbers that they stand for.

DeepSeek's `weight_scale_inv` has a factor for each block of 128 x 128 numbers. The `weight_scale` of compressed-tensors
has one for a whole matrix, for each of its outputs, or for each block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from spectr_jax.io.hub.tensors import Tensors
from spectr_jax.io.untrusted import TEXT, check_object, list_of, map_of, name_shown, object_of, shown, whole

_SCALES = {'fp8': '_scale_inv', 'compressed-tensors': '_scale'}  # what names end with, by the method
METHODS = tuple(_SCALES)
_UNREAD = ('.input_scale', '.activation_scale')  # of activations, which are not rounded here
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_VALUES = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)
_BLOCK = list_of(whole(1, 2**20), 2)
_GROUPS = map_of(object_of({'weights': object_of({'block_structure': _BLOCK})}))
_FIELDS = {'weight_block_size': _BLOCK, 'format': TEXT, 'sparsity_config': object_of({}), 'config_groups': _GROUPS}


def block_of(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
  """The outputs and inputs of a block with one scale; None for scales of whole matrices, or of their outputs.

  Args:
    quantization: The `quantization_config` of a `config.json`, of one of `METHODS`.

  Raises:
    ValueError: The weights are in another format than the one that is read.
  """
  fields = check_object(quantization, _FIELDS, 'quantization_config')
  if fields['quant_method'] == 'fp8':
    blocks = [fields.get('weight_block_size')]
  else:
    sparsity = (fields.get('sparsity_config') or {}).get('format') or 'dense'
    kinds = fields.get('format'), sparsity
    if kinds != ('float-quantized', 'dense'):
      raise ValueError(
        f'weights quantized by compressed-tensors as {shown(" and ".join(map(str, kinds)))} are not read; known are'
        ' float-quantized and dense'
      )
    groups = (fields.get('config_groups') or {}).values()
    blocks = [(group.get('weights') or {}).get('block_structure') for group in groups] or [None]
  if any(block != blocks[0] for block in blocks) or blocks[0] is not None and len(blocks[0]) != 2:
    raise ValueError(f'blocks of weights must have two sizes, the same in all, got {shown(blocks)}')
  return None if blocks[0] is None else tuple(blocks[0])


class ScaledTensors(Tensors):
  """The tensors of a file, those with scales multiplied by these, in float32. Reading a part reads no more of either.

  ValueError if scales and their tensors do not fit each other, and when a part is read, if one is not finite.
  """

  def __init__(self, tensors: Tensors, ending: str, block: tuple[int, int] | None):
    names, self._tensors, self._ending = tensors.names(), tensors, ending
    scaled = {name.removesuffix(ending) for name in names if name.endswith(f'.weight{ending}')}
    self._steps = {name: self._step(name, names, block) for name in sorted(scaled)}
    self._names = {name for name in names - {f'{name}{ending}' for name in scaled} if not name.endswith(_UNREAD)}

  def _step(self, name: str, names: set[str], block: tuple[int, int] | None) -> tuple[int, int]:
    """The outputs and inputs with one scale."""
    stored = f'{name}{self._ending}'
    if name not in names:
      raise ValueError(f'tensor {name_shown(stored)} is there without its weights')
    shape, of_scales = self._tensors.shape(name), self._tensors.shape(stored)
    kind, kind_of_scales = self._tensors.dtype(name), self._tensors.dtype(stored)
    if kind != _E4M3 or kind_of_scales.itemsize < 2 or not jnp.issubdtype(kind_of_scales, np.floating):
      raise ValueError(
        f'tensors {name_shown(name)} and {name_shown(stored)} must be of float8_e4m3fn and of a larger type, got'
        f' {kind} and {kind_of_scales}'
      )
    if len(shape) == 2 and 0 not in shape:
      if block is not None:
        if of_scales == tuple(-(-size // step) for size, step in zip(shape, block)):
          return block
      elif len(of_scales) <= 2 and math.prod(of_scales) == 1:
        return shape
      elif of_scales in (shape[:1], (shape[0], 1)):
        return 1, shape[1]
    raise ValueError(
      f'tensors {name_shown(name)} {shape} and {name_shown(stored)} {of_scales} do not fit each other: expected a scale'
      f' for each {f"block of {block}" if block else "matrix or output"}'
    )

  def names(self) -> set[str]:
    return set(self._names)

  def shape(self, name: str) -> tuple[int, ...]:
    return self._tensors.shape(name)

  def dtype(self, name: str) -> np.dtype:
    return np.dtype(np.float32) if name in self._steps else self._tensors.dtype(name)

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    part = self._tensors.read(name, index)
    if name not in self._steps:
      return part
    stored, ranges = f'{name}{self._ending}', []
    for each, size, step in zip(index, self.shape(name), self._steps[name], strict=True):
      first, end, _ = each.indices(size)
      ranges.append((first, end, step, slice(first // step, -(-end // step))))
    some = tuple(some for *_, some in ranges)[: len(self._tensors.shape(stored))]
    scales = self._tensors.read(stored, some).astype(np.float32)
    if not np.isfinite(scales).all():
      raise ValueError(f'a scale of tensor {name_shown(stored)} is not finite')
    scales = scales.reshape(*scales.shape, *[1] * (2 - scales.ndim))
    for axis, (first, end, step, some) in enumerate(ranges):
      if scales.shape[axis] > 1:
        scales = scales.take(np.arange(first, end) // step - some.start, axis)
    return _VALUES[part.view(np.uint8)] * scales


def with_scales(tensors: Tensors, quantization: Mapping[str, Any] | None) -> Tensors:
  """The tensors of a checkpoint with a `quantization_config`, as they would be without; those of other methods stay."""
  if not quantization or quantization.get('quant_method') not in METHODS:
    return tensors
  return ScaledTensors(tensors, _SCALES[quantization['quant_method']], block_of(quantization))
