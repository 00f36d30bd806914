"""A call of a decoder with recurrent layers on a tree, beside a state of every node and beside attention alone.

Command   python -m benchmarks.recurrent
          python -m benchmarks.recurrent --num_layers=32 --vocab_size=248320
Models    random weights in the sizes of Qwen3.5-4B, of which the defaults have a quarter of the layers and a small
          vocabulary; *attention* has attention in all layers, as wide
Calls     one row behind 64 tokens, and the commit of the deepest path: chains, and trees of two children at a node
Output    One line for each size: milliseconds, medians of runs in turns, of what is kept here, of a state of every node
          and of attention; and what is pending between call and commit beside the states of all nodes, in MiB
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import timing
from common import command_line
from spectr_jax import TokenTree
from spectr_jax.model import Model
from spectr_jax.models import recurrent
from spectr_jax.models.causal_lm import causal_lm
from spectr_jax.models.causal_lm_config import CausalLMConfig, Rope
from spectr_jax.models.param_shapes import init_params
from spectr_jax.models.recurrent import Recurrence

_BEFORE = 64
COLUMNS = 'tree', 'tokens', 'ms', 'states', 'attention', 'ratio', 'to attention', 'MiB', 'states, MiB'


def config_of(num_layers: int, vocab_size: int, dtype: str) -> CausalLMConfig:
  """Qwen3.5-4B's sizes with another number of layers and tokens."""
  layers = tuple((i + 1) % 4 != 0 for i in range(num_layers))
  recurrence = Recurrence('delta', layers, num_heads=32, num_groups=16, key_dim=128, value_dim=128)
  rope = Rope(tuple(1e7 ** (-i / 32) for i in range(32)))
  return CausalLMConfig(
    vocab_size, 2560, num_layers, 16, 4, 256, 9216, 32768, dtype, rope=rope, gain_offset=1.0, has_qk_norm=True,
    has_output_gate=True, is_tied=True, recurrence=recurrence,
  )  # fmt: skip


def tree_of(kind: str, num_tokens: int) -> TokenTree:
  """A tree of `num_tokens` with its root: a chain, or two children at every node, the shallowest first."""
  nodes = range(1, num_tokens)
  return TokenTree(tuple(i - 1 if kind == 'chain' else (i - 1) // 2 for i in nodes))


def states_of_nodes(state, pending, query, key, value, log_decay, gate, mask, num_before):
  """`recurrence.recur` by a state of every node, which is pending in place of what the node writes."""
  del pending, num_before
  depth = mask[0].sum(axis=-1)
  is_ancestor = mask[0] & ~np.eye(mask.shape[-1], dtype=bool)
  parents = np.where(depth > 1, np.argmax(is_ancestor * depth, axis=-1), -1)
  size = state.shape[1] // key.shape[2]
  query, key = (jnp.repeat(x.astype(state.dtype), size, axis=2) for x in (query, key))
  states, outputs = [], []
  for node, parent in enumerate(parents):
    before = state if parent < 0 else states[parent]
    after = jnp.exp(log_decay[:, node])[..., None, None] * before
    written = gate[:, node][..., None] * (value[:, node] - jnp.einsum('bhkv,bhk->bhv', after, key[:, node]))
    states.append(after + key[:, node][..., None] * written[:, :, None])
    outputs.append(jnp.einsum('bhkv,bhk->bhv', states[-1], query[:, node]))
  return jnp.stack(outputs, axis=1), jnp.stack(states, axis=1)


def fold_states(state, pending, path, num_committed):
  """`recurrence.fold` of `states_of_nodes`."""
  last = jnp.take_along_axis(path, jnp.maximum(num_committed - 1, 0)[:, None], axis=1)
  taken = jax.vmap(lambda states, node: states[node[0]])(pending, last)
  return jnp.where((num_committed > 0)[:, None, None, None], taken, state)


def _round(model: Model, tree: TokenTree, cache):
  """A call and its commit, and the bytes that are pending between them."""
  tokens = np.arange(tree.num_nodes + 1, dtype=np.int32)[None] % model.vocab_size
  positions, path = _BEFORE + np.asarray(tree.depths, np.int32)[None], np.zeros((1, tree.max_depth + 1), np.int32)
  end = int(np.argmax(tree.depths))
  nodes = np.flatnonzero(tree.ancestors[end])
  path[0, : len(nodes)] = nodes

  def call(model, cache):
    return model.apply(tokens, positions, tree.ancestors, cache)

  def run(model, cache):
    output = call(model, cache)
    return output.logits, model.commit_fn(output.cache, path, jnp.array([len(nodes)]))

  pending = jax.eval_shape(call, model, cache).cache
  states = pending.recurrent if isinstance(pending, recurrent.HybridCache) else ()
  num_bytes = sum(x.size * x.dtype.itemsize for each in states for x in jax.tree.leaves(each.writes))
  return jax.jit(run).lower(model, cache).compile(), num_bytes


def measure(config: CausalLMConfig, kinds, sizes, num_runs: int) -> Iterator[tuple]:
  """Rows of `COLUMNS`."""
  hybrid = causal_lm(init_params(jax.random.key(0), config), config).for_decoding()
  plain = dataclasses.replace(config, recurrence=None)
  attention = causal_lm(init_params(jax.random.key(0), plain), plain).for_decoding()
  prompt, lengths = np.zeros((1, _BEFORE), np.int32), jnp.array([_BEFORE])
  caches = [
    jax.jit(lambda model: model.prefill(prompt, lengths, model.init_cache_fn(1, 256))[0])(model)
    for model in (hybrid, attention)
  ]
  forms = mock.patch.multiple(recurrent, recur=states_of_nodes, fold=fold_states)
  for kind in kinds:
    for size in sizes:
      tree = tree_of(kind, size)
      ours, num_bytes = _round(hybrid, tree, caches[0])
      with forms:
        theirs, num_theirs = _round(hybrid, tree, caches[0])
      plain_round, _ = _round(attention, tree, caches[1])
      np.testing.assert_allclose(ours(hybrid, caches[0])[0], theirs(hybrid, caches[0])[0], atol=0.3)
      calls = {
        'ours': functools.partial(ours, hybrid, caches[0]),
        'theirs': functools.partial(theirs, hybrid, caches[0]),
        'attention': functools.partial(plain_round, attention, caches[1]),
      }
      seconds = {name: np.median(times) for name, times in timing.time_in_turns(calls, num_runs).items()}
      ratios = seconds['ours'] / seconds['theirs'], seconds['ours'] / seconds['attention']
      yield kind, size, *(1e3 * each for each in seconds.values()), *ratios, num_bytes / 2**20, num_theirs / 2**20


if __name__ == '__main__':
  _NUM_LAYERS = flags.DEFINE_integer('num_layers', 8, 'Layers, a multiple of 4.', lower_bound=4)
  _VOCAB_SIZE = flags.DEFINE_integer('vocab_size', 32000, 'Tokens of the vocabulary.', lower_bound=2)
  _DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['float32', 'bfloat16'], 'Type of the weights.')
  _SIZES = flags.DEFINE_list('sizes', ['1', '5', '17', '65'], 'Tokens of a call.')
  _NUM_RUNS = flags.DEFINE_integer('num_runs', 9, 'Runs of which the median is taken.', lower_bound=1)

  def main():
    config = config_of(_NUM_LAYERS.value, _VOCAB_SIZE.value, _DTYPE.value)
    sizes = [int(size) for size in _SIZES.value]
    print(timing.line(COLUMNS))
    for row in measure(config, ('chain', 'tree'), sizes, _NUM_RUNS.value):
      print(timing.line(row), flush=True)

  command_line.run(main)
