"""Experts that a mixture's MLP reads on several tokens, and its time beside the floor: to read them once.

Command   python -m benchmarks.experts
          python -m benchmarks.experts --num_experts=32 --num_chosen=4 --model_dim=2880 --hidden_dim=2880
Models    one layer of random weights in the form that decodes fastest here; the defaults are a layer of Qwen3-30B-A3B
Routing   *random*: every expert as likely as another; *skewed*: the router's logits fall with the logarithm of an
          expert's rank, times --skew. All runs route other tokens
Output    One line for each routing and number of tokens: experts read; milliseconds, median, and of the floor; and the
          tokens that a round must emit to pay for them, if its other parts took no time: the time beside one token's
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import timing
from common import command_line
from spectr_jax.kernels.matrices import kernels_for_decoding
from spectr_jax.models.experts import mix
from spectr_jax.models.routing import Experts, route

_SKEWS = 'random', 'skewed'
COLUMNS = 'routing', 'tokens', 'experts', 'ms', 'floor, ms', 'ratio', 'must emit'


def make_layer(experts: Experts, model_dim: int, dtype: str) -> dict:
  """The parameters of an MLP's experts with random weights, made one kernel at a time."""
  sizes = {'gate': (model_dim, experts.hidden_dim), 'up': (model_dim, experts.hidden_dim)}
  sizes['down'] = experts.hidden_dim, model_dim

  def kernel(name: str, seed: int):
    values = jax.random.normal(jax.random.key(seed), (experts.num, *sizes[name]), dtype) / np.sqrt(sizes[name][0])
    return kernels_for_decoding({name: {'kernel': values.astype(dtype)}})[name]

  return {name: kernel(name, seed) for seed, name in enumerate(sizes)}


def make_router(experts: Experts, model_dim: int, skew: float) -> dict:
  """A router whose logits fall by `skew` times the logarithm of an expert's rank."""
  kernel = jax.random.normal(jax.random.key(7), (model_dim, experts.num)) / np.sqrt(model_dim)
  return {'kernel': kernel, 'bias': -skew * np.log1p(np.arange(experts.num, dtype=np.float32))}


def measure(
  layer: dict, router: dict, experts: Experts, model_dim: int, num_tokens: int, num_runs: int, rate: float
) -> dict[str, float]:
  """Experts read, seconds of the MLP, medians over runs of other tokens, and of the floor at a memory's rate."""
  dtype = jnp.bfloat16
  choose = jax.jit(lambda x: route(router, experts, x))
  call = jax.jit(lambda layer, x, chosen, weights: mix(layer, experts, jax.nn.silu, x, chosen, weights))
  rows = jax.random.normal(jax.random.key(8), (num_runs + 1, num_tokens, model_dim), dtype)
  routed = [choose(x) for x in rows]
  counts = [len(np.unique(chosen)) for chosen, _ in routed]
  arguments = iter([(x, *each) for x, each in zip(rows, routed, strict=True)])
  seconds = timing.time_in_turns({'': lambda: call(layer, *next(arguments))}, num_runs)['']
  num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(layer)) / experts.num
  return {
    'experts': float(np.mean(counts[1:])),
    'seconds': float(np.median(seconds)),
    'floor': float(np.median(counts[1:])) * num_bytes / rate,
  }


def compare(
  experts: Experts, model_dim: int, dtype: str, skew: float, sizes: Sequence[int], num_runs: int
) -> Iterator[tuple]:
  """Rows of `COLUMNS`."""
  layer, rate = make_layer(experts, model_dim, dtype), timing.read_rate()
  for name, slope in zip(_SKEWS, (0.0, skew), strict=True):
    router, first = make_router(experts, model_dim, slope), None
    for size in sizes:
      found = measure(layer, router, experts, model_dim, size, num_runs, rate)
      first = first or found['seconds']
      times = found['seconds'], found['floor']
      yield name, size, found['experts'], *(1e3 * each for each in times), times[0] / times[1], times[0] / first


if __name__ == '__main__':
  _NUM_EXPERTS = flags.DEFINE_integer('num_experts', 128, 'Experts of the layer.', lower_bound=1)
  _NUM_CHOSEN = flags.DEFINE_integer('num_chosen', 8, 'Experts of a token.', lower_bound=1)
  _MODEL_DIM = flags.DEFINE_integer('model_dim', 2048, 'Width of the model.', lower_bound=1)
  _HIDDEN_DIM = flags.DEFINE_integer('hidden_dim', 768, 'Hidden width of an expert.', lower_bound=1)
  _DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['float32', 'bfloat16'], 'Type of the weights.')
  _SKEW = flags.DEFINE_float('skew', 1.0, 'See Routing.', lower_bound=0)
  _SIZES = flags.DEFINE_list('sizes', ['1', '2', '5', '9', '17', '65'], 'Numbers of tokens, the first for one step.')
  _NUM_RUNS = flags.DEFINE_integer('num_runs', 15, 'Runs of which the median is taken.', lower_bound=1)

  def main():
    experts = Experts(_NUM_EXPERTS.value, _NUM_CHOSEN.value, _HIDDEN_DIM.value)
    sizes = [int(size) for size in _SIZES.value]
    print(timing.line(COLUMNS))
    for row in compare(experts, _MODEL_DIM.value, _DTYPE.value, _SKEW.value, sizes, _NUM_RUNS.value):
      print(timing.line(row, digits=2), flush=True)

  command_line.run(main)
