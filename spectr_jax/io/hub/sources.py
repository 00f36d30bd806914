"""Where the parameters of a model stand among the tensors of a hub checkpoint, to read them and to write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from spectr_jax.io.hub.families import Family
from spectr_jax.models.causal_lm_config import CausalLMConfig

_LEAVES = {'kernel': 'weight', 'gain': 'weight', 'bias': 'bias'}


@dataclasses.dataclass(frozen=True)
class Source:
  """The tensor, or the part of one, that a parameter is read from."""

  name: str
  shape: tuple[int, ...]  # of the tensor
  is_transposed: bool  # whether the parameter is its transpose
  part: int | None  # 0, 1, 2 for queries, keys, values, whose heads may lie anywhere along the outputs; else None


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
    return Source([*heads, f'{family.head_names[0]}.weight'][0], shape[::-1], True, None)
  *modules, leaf = path.split('/')
  prefix = family.prefix if any(name.startswith(family.prefix) for name in names) else ''
  if not modules:
    name = f'{prefix}{family.modules[leaf]}.weight'
    is_head = leaf == 'embedding' and config.is_tied and heads and name not in names
    return Source(heads[0] if is_head else name, shape, False, None)
  if modules[0].startswith('layer_'):
    prefix = f'{prefix}{family.blocks}.{modules.pop(0).removeprefix("layer_")}.'
  module = '/'.join(modules)
  part = 'qkv'.index(module[-1]) if module in ('attention/q', 'attention/k', 'attention/v') else None
  if part is not None:
    num_heads = config.num_heads if part == 0 else config.num_kv_heads
    is_fused = len({family.modules[f'attention/{name}'] for name in 'qkv'}) == 1
    shape = *shape[:-1], (3 if is_fused else 1) * num_heads * config.head_dim
  is_transposed = family.is_transposed and leaf == 'kernel'
  name = f'{prefix}{family.modules[module]}.{_LEAVES[leaf]}'
  return Source(name, shape[::-1] if is_transposed else shape, is_transposed, part)


def output_ranges(outputs: slice, source: Source, family: Family, config: CausalLMConfig) -> Iterator[slice]:
  """Ranges of the tensor's outputs that, joined, are a range of the parameter's; neighbors are one."""
  if source.part is None:
    yield outputs
    return
  at, width = outputs.start, config.head_dim
  begin = end = None
  while at < outputs.stop:
    head, offset = divmod(at, width)
    num = min(width - offset, outputs.stop - at)
    start = family.head_start(source.part, head, config) + offset
    if start != end:
      if end is not None:
        yield slice(begin, end)
      begin = start
    end = start + num
    at += num
  yield slice(begin, end)
