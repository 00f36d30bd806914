"""Files with all experts of a layer in one tensor, read as files with a tensor for each expert.

Gate and up take turns in gpt-oss's `gate_up_proj`. It is `[E, D, 2 F]` in floating point numbers, and in MXFP4 (Open
Compute Project 2023) `_blocks`, uint8 `[E, 2 F, D / 32, 16]`, with `_scales`, `[E, 2 F, D / 32]`: numbers of 4 bits,
the lower half of a byte first, times 2^(scale - 127). Those of other families, and Granite's `input_linear`, are
`[E, 2 F, D]`, all gates first.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from spectr_jax.io.hub.tensors import Tensors, check_number
from spectr_jax.io.untrusted import name_shown
from spectr_jax.models.causal_lm_config import CausalLMConfig

_FUSED = re.compile(r'(.+\.(mlp|\d+)\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)', re.ASCII)
_LINEAR = re.compile(r'(.+\.(block_sparse_moe))\.(input|output)_linear(\.weight)')
_PARTS = {'gate_up': ('gate', 'up'), 'input': ('gate', 'up'), 'down': ('down',), 'output': ('down',)}
_BLOCK = 32  # numbers with one scale
_NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_NUMBERS, -_NUMBERS])  # of 4 bits


class _Place(NamedTuple):
  """Where an expert's tensor is."""

  fused: str  # the tensor of all, or its blocks
  expert: int
  part: range  # of the outputs
  kind: str  # what the name ends with; `_rows` for a matrix whose outputs are the first axis


def _match(name: str) -> re.Match[str] | None:
  return _FUSED.fullmatch(name) or _LINEAR.fullmatch(name)


class FusedExperts(Tensors):
  """The tensors of a file, with those of experts for each expert. Reading a part reads no more than twice as much."""

  def __init__(self, tensors: Tensors, num_experts: int, *, take_turns: bool = True):
    self._tensors, self._others = tensors, tensors.names()
    self._places: dict[str, _Place] = {}
    for name in sorted(self._others):
      match = _match(name)
      if match is None:
        continue
      self._others.discard(name)
      module, above, matrix, kind = match.groups()
      are_halves = not take_turns
      module += '.experts' * (above == 'block_sparse_moe')
      kind = '_rows' if kind == '.weight' or (are_halves and not kind) else kind
      shape = tensors.shape(name)
      if kind == '_scales':
        if name.removesuffix('_scales') + '_blocks' not in tensors.names():
          raise ValueError(f'tensor {name_shown(name)} is there without its blocks')
        continue
      if kind == '_blocks':
        self._check_blocks(name, shape)
      elif len(shape) != (num_axes := 2 if kind == '_bias' else 3):
        raise ValueError(f'tensor {name_shown(name)} has {len(shape)} axes, expected {num_axes}')
      if shape[0] != num_experts:
        raise ValueError(f'tensor {name_shown(name)} has {shape[0]} experts, the configuration {num_experts}')
      check_number(len(self._places))
      num_outputs, ours = shape[1 if kind else 2], _PARTS[matrix]
      if num_outputs % len(ours):
        raise ValueError(f'tensor {name_shown(name)} has gates without an up: its shape is {shape}')
      size = num_outputs // len(ours)
      for i, part in enumerate(ours):
        outputs = range(i * size, (i + 1) * size) if are_halves else range(i, num_outputs, len(ours))
        for expert in range(num_experts):
          own = f'{module}.{expert}.{part}_proj.{"bias" if kind == "_bias" else "weight"}'
          if own in self._others or own in self._places:
            raise ValueError(f'tensor {name_shown(own)} is there as a part of {name_shown(name)} as well')
          self._places[own] = _Place(name, expert, outputs, kind)

  def _check_blocks(self, name: str, shape: tuple[int, ...]) -> None:
    scales = name.removesuffix('_blocks') + '_scales'
    if scales not in self._tensors.names():
      raise ValueError(f'tensor {name_shown(name)} is there without its scales')
    if len(shape) != 4 or shape[3] != _BLOCK // 2 or self._tensors.shape(scales) != shape[:3]:
      raise ValueError(
        f'tensors {name_shown(name)} {shape} and {name_shown(scales)} {self._tensors.shape(scales)} are no MXFP4:'
        ' expected [E, out, blocks, 16] and [E, out, blocks]'
      )
    for each in (name, scales):
      if self._tensors.dtype(each) != np.uint8:
        raise ValueError(f'tensor {name_shown(each)} must hold bytes, got {self._tensors.dtype(each)}')

  def names(self) -> set[str]:
    return self._others | set(self._places)

  def shape(self, name: str) -> tuple[int, ...]:
    if name not in self._places:
      return self._tensors.shape(name)
    fused, _, part, kind = self._places[name]
    shape = self._tensors.shape(fused)[1:]
    if kind == '':
      shape = shape[::-1]
    elif kind == '_blocks':
      shape = shape[0], shape[1] * _BLOCK
    return len(part), *shape[1:]

  def dtype(self, name: str) -> np.dtype:
    if name not in self._places:
      return self._tensors.dtype(name)
    fused, _, _, kind = self._places[name]
    return np.dtype(np.float32) if kind == '_blocks' else self._tensors.dtype(fused)

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    if name not in self._places:
      return self._tensors.read(name, index)
    fused, expert, part, kind = self._places[name]
    rows, *columns = (slice(*each.indices(size)[:2]) for each, size in zip(index, self.shape(name), strict=True))
    places, own = part[rows], slice(expert, expert + 1)
    outputs, some = slice(places.start, min(places.stop, part.stop)), slice(None, None, part.step)
    if kind == '_blocks':
      return self._dequantized(fused, own, outputs, columns[0])[some]
    if kind:
      return self._tensors.read(fused, (own, outputs, *columns))[0, some]
    return self._tensors.read(fused, (own, columns[0], outputs))[0, :, some].T

  def _dequantized(self, name: str, expert: slice, rows: slice, columns: slice) -> np.ndarray:
    blocks = slice(columns.start // _BLOCK, -(-columns.stop // _BLOCK))
    stored = self._tensors.read(name, (expert, rows, blocks, slice(0, _BLOCK // 2)))[0]
    scales = self._tensors.read(name.removesuffix('_blocks') + '_scales', (expert, rows, blocks))[0]
    if (scales == 255).any():
      raise ValueError(f'a scale of tensor {name_shown(name)} is 255, which is no number')
    values = np.empty((*stored.shape, 2), np.float32)
    values[..., 0], values[..., 1] = _VALUES[stored & 15], _VALUES[stored >> 4]
    numbers = np.ldexp(values, scales[..., None, None].astype(np.int32) - 127).reshape(len(stored), -1)
    first = columns.start - blocks.start * _BLOCK
    return numbers[:, first : first + columns.stop - columns.start]


def split_experts(tensors: Any, config: CausalLMConfig) -> Tensors:
  """The tensors of a checkpoint with a tensor for each expert; as they are where there are no others."""
  if config.experts is None or not any(map(_match, tensors.names())):
    return tensors
  return FusedExperts(tensors, config.experts.num, take_turns=config.experts.limit is not None)  # of gpt-oss
