"""The needs of a training run, computed from shapes alone: mesh, shardings, bytes and operations."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import Mesh

from spectr_jax.kernels.attention import CAUSAL_BLOCK
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.sharding import shardings
from train.step import init_state, make_optimizer


@dataclasses.dataclass(frozen=True)
class Entry:
  """An array of the train state."""

  path: str  # in the state, with slashes
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]  # the mesh axis of each dimension
  bytes: int  # of the whole array
  device_bytes: int  # of one device's shard


def state_entries(config, model_config: CausalLMConfig, mesh: Mesh) -> list[Entry]:
  """Every array of an experiment's train state, with the size of its shards on the mesh."""
  state = jax.eval_shape(lambda: init_state(0, make_optimizer(config), model_config))
  places = jax.tree.leaves(shardings(mesh, state))
  entries = []
  for (keys, array), place in zip(jax.tree_util.tree_flatten_with_path(state)[0], places, strict=True):
    device_shape = place.shard_shape(array.shape)
    sizes = (math.prod(shape) * array.dtype.itemsize for shape in (array.shape, device_shape))
    path = jax.tree_util.keystr(keys, simple=True, separator='/')
    entries.append(Entry(path, array.shape, tuple(place.spec), *sizes))
  return entries


def attention_flops(config: CausalLMConfig, num_rows: int, seq_len: int) -> float:
  """Floating-point operations of attention's products in a forward pass, as `attend_causally` computes them."""
  ends = [min(start + CAUSAL_BLOCK, seq_len) for start in range(0, seq_len, CAUSAL_BLOCK)]
  num_keys = sum((end - start) * end for start, end in zip([0, *ends], ends)) / seq_len  # that a query reads
  return num_rows * seq_len * config.num_layers * 4 * num_keys * config.embed_dim


def forward_flops(config: CausalLMConfig, num_rows: int, seq_len: int) -> float:
  """Floating-point operations of the products of a forward pass, with attention as `attention_flops` counts it."""
  per_layer = 2 * (4 * config.embed_dim**2 + 2 * config.embed_dim * config.mlp_dim)
  of_tokens = num_rows * seq_len * (config.num_layers * per_layer + 2 * config.vocab_size * config.embed_dim)
  return of_tokens + attention_flops(config, num_rows, seq_len)


def train_flops(config: CausalLMConfig, num_rows: int, seq_len: int, *, remat: bool = False) -> float:
  """Floating-point operations of the products of a training step: the backward pass has twice those of the forward
  pass, and with `remat` the forward pass of the blocks runs once more.
  """
  forward = forward_flops(config, num_rows, seq_len)
  head = 2 * num_rows * seq_len * config.vocab_size * config.embed_dim
  return 3 * forward + (forward - head if remat else 0)


def describe(config, model_config: CausalLMConfig, mesh: Mesh) -> str:
  """The plan as lines of text: the mesh, a table of parameters, and bytes per device of the whole train state."""
  entries = state_entries(config, model_config, mesh)
  params = [entry for entry in entries if entry.path.startswith('params/')]
  rows = config.batch_size // config.num_microbatches
  lines = [
    'mesh ' + ' x '.join(f'{name} {size}' for name, size in mesh.shape.items())
    + f': {mesh.size} devices, {mesh.devices.flat[0].device_kind}',
    f'batch {config.batch_size} rows of {config.seq_len} tokens, {config.num_microbatches} microbatches of {rows},'
    f' {rows // mesh.shape["data"]} rows per device at a time',
    '',
    f'{"parameter":<32}{"shape":>16}{"sharded over":>20}{"KiB per device":>16}',
  ]  # fmt: skip
  for entry in params:
    axes = ', '.join(axis or '-' for axis in entry.axes) or 'whole'
    lines.append(
      f'{entry.path.removeprefix("params/"):<32}{" x ".join(map(str, entry.shape)):>16}{axes:>20}'
      f'{entry.device_bytes / 2**10:>16.1f}'
    )
  total, per_device = (sum(getattr(entry, name) for entry in entries) for name in ('bytes', 'device_bytes'))
  tokens = config.batch_size * config.seq_len
  lines += [
    '',
    f'{model_config.num_params:,} parameters; parameters and optimizer {total / 2**20:,.1f} MiB,'
    f' {per_device / 2**20:,.1f} MiB per device',
    f'{tokens:,} tokens and {train_flops(model_config, config.batch_size, config.seq_len, remat=config.remat):.4g}'
    f' FLOPs per step; {tokens * config.num_steps:,} tokens in {config.num_steps:,} steps',
  ]
  return '\n'.join(lines)
