"""Where the parameters of a model stand among the tensors of its family's files, to read them and to write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from spectr_jax.io.hub.families import Factors, Family
from spectr_jax.models.causal_lm_config import CausalLMConfig

_LEAVES = {'kernel': 'weight', 'gain': 'weight', 'embedding': 'weight', 'bias': 'bias'}


@dataclasses.dataclass(frozen=True)
class Source:
  """The tensor, or the part of one, that a parameter is read from; or a tensor for each expert."""

  name: str  # of experts with {} for the number
  shape: tuple[int, ...]  # of a tensor
  is_transposed: bool  # whether the parameter is its transpose
  part: int | None  # 0, 1, 2 for queries, keys, values, whose heads may lie anywhere along the outputs; else None
  family: Family
  config: CausalLMConfig
  num_experts: int | None = None  # that the parameter is stacked of; None for one tensor
  module: str = ''  # of `Family.fused`, where the parameter shares the tensor by one of these rules
  has_axis: bool = False  # whether the tensor has an axis of 1 behind its outputs, as convolutions of channels have
  factors: Factors | None = None  # of its outputs

  @property
  def names(self) -> list[str]:
    """The names of the tensors."""
    return (
      [self.name] if self.num_experts is None else [self.name.replace('{}', str(i)) for i in range(self.num_experts)]
    )

  def ranges(self, outputs: slice) -> Iterator[slice]:
    """Ranges of the tensor's outputs that, joined, are a range of the parameter's; neighbors are one."""
    if self.part is None and not self.module:
      yield outputs
      return
    own = np.arange(outputs.start, outputs.stop)
    if self.part is None:
      places, _ = self.family.fused[self.module](self.module.split('/')[-1], own, self.config)
    else:
      heads, offsets = np.divmod(own, self.config.head_dim)
      places = self.family.head_start(self.part, heads, self.config) + offsets
    for each in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
      yield slice(int(each[0]), int(each[-1]) + 1)

  def scaled(self, values: np.ndarray, outputs: slice) -> np.ndarray:
    """A range of the tensor's outputs, the last axis of `values`, times their factors."""
    if self.factors is None:
      return values
    ends, factors = self.factors
    parts = np.searchsorted(ends, np.arange(outputs.start, outputs.stop), side='right')
    return values.astype(np.float32) * np.asarray(factors, np.float32)[parts]


def num_more_layers(family: Family, spec: Mapping[str, Any]) -> int:
  """How many layers of a checkpoint come after the last of its model; one where `config.json` does not say."""
  number = spec.get(family.more_layers) if family.more_layers else 0
  return 1 if number is None else number


def is_unread(name: str, family: Family, config: CausalLMConfig, num_more: int = 0) -> bool:
  """Whether a tensor belongs to keys and values that a layer has no use for, since it shares those of another one, or
  to one of `num_more` layers after the last; or it stands beside the model.
  """
  if name.startswith(family.beside):
    return True
  stem, _, rest = name.partition(f'{family.blocks}.')
  layer, _, module = rest.partition('.')
  if stem not in ('', family.prefix) or not (layer.isascii() and layer.isdecimal()) or len(layer) > 5:
    return False
  unread = tuple(f'{family.modules[f"attention/{part}"]}.' for part in ('k', 'v', 'k_norm') if config.num_shared_layers)
  is_shared = config.num_own_layers <= int(layer) < config.num_layers
  return is_shared and module.startswith(unread) or 0 <= int(layer) - config.num_layers < num_more


def telling_names(family: Family, names: Collection[str]) -> set[str]:
  """Those names, at most a few, that say how a checkpoint names its tensors."""
  ends = (*family.head_names, family.modules['embedding'], f'{family.prefix}{family.modules["embedding"]}')
  telling = {f'{name}.weight' for name in ends} & set(names)
  return telling | ({family.prefix} if any(name.startswith(family.prefix) for name in names) else set())


def source_of(path: str, shape: tuple[int, ...], family: Family, config: CausalLMConfig, names: set[str]) -> Source:
  """The source of the parameter of a shape at a path of a `causal_lm`.

  `names` are what `telling_names` gives: they may lack the family's prefix and have one of its output heads. A model
  whose embedding is the output head may be stored with the head alone.
  """
  heads = [f'{name}.weight' for name in family.head_names if f'{name}.weight' in names]
  if path == 'unembedding':
    return Source([*heads, f'{family.head_names[0]}.weight'][0], shape[::-1], True, None, family, config)
  *modules, leaf = path.split('/')
  prefix = family.prefix if any(name.startswith(family.prefix) for name in names) else ''
  if not modules:
    name = f'{prefix}{family.modules[leaf]}.weight'
    is_head = leaf == 'embedding' and config.is_tied and heads and name not in names
    return Source(heads[0] if is_head else name, shape, False, None, family, config)
  if modules[0].startswith('layer_'):
    layer = modules.pop(0).removeprefix('layer_')
    prefix, config = f'{prefix}{family.blocks}.{layer}.', config.of_layer(int(layer))
  if not modules:
    return Source(f'{prefix}{family.modules[leaf]}', shape, False, None, family, config)  # a number beside modules
  module = '/'.join(modules)
  if leaf == 'taps':
    name = f'{prefix}{family.modules[f"{module}/{leaf}"]}'
    return Source(name, (shape[1], 1, shape[0]), True, None, family, config, has_axis=True)
  if f'{module}/{leaf}' in family.modules:  # a parameter that is no module's
    return Source(f'{prefix}{family.modules[f"{module}/{leaf}"]}', shape, False, None, family, config)
  num_experts = None
  if module.startswith(('mlp/experts/', 'mixture/experts/')):
    num_experts, shape = shape[0], shape[1:]
  is_key_norm = module == 'attention/k_norm' and config.has_wide_qk_norm  # has the copies that keys have
  part = 1 if is_key_norm else None
  if module in ('attention/q', 'attention/k', 'attention/v'):
    part = 'qkv'.index(module[-1])
  if part is not None:
    num_heads = config.num_query_parts if part == 0 else config.num_kv_heads
    is_fused = len({family.modules[f'attention/{name}'] for name in 'qkv'}) == 1
    shape = *shape[:-1], (3 if is_fused else 1) * num_heads * config.head_dim
  fused = module if module in family.fused else ''
  if fused:
    shape = *shape[:-1], family.fused[module](modules[-1], np.arange(1), config)[1]
  is_transposed = family.is_transposed and leaf == 'kernel'
  name = f'{prefix}{family.modules[module]}.{_LEAVES[leaf]}'
  shape = shape[::-1] if is_transposed else shape
  factors = family.factors.get(f'{module}/{leaf}')
  return Source(name, shape, is_transposed, part, family, config, num_experts, fused, factors=factors)
