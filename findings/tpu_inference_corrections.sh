#!/usr/bin/env bash
# Library: tpu-inference 0.32.0 with jax 0.10.2, on a CPU; its rejection sampler alone, without the engine.
# Behavior: where a guess is rejected, the token is the argmax of weight / (E + 1e-9) with E from
#   jax.random.exponential, which is 0 once in 2^23 draws in float32. A token with E = 0 wins unless its weight is below
#   1e-9 or so. So a share of V / 2^23 of the corrections is uniform over the tokens of positive weight: 1 in 64 with
#   131,072 tokens. With 131,070 tokens that share .0013, about 35 of 2,048 corrections are theirs, where 2.7 are right.
# Output seen: 31 rare tokens in 2,048 corrections.
# The sampler is imported by file; a stand-in gives the name of the mesh's axis, which its package takes from the engine.
# Exits with 1 if the count is no longer so.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
"$work/venv/bin/pip" install --quiet --no-deps tpu-inference==0.32.0
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PYTHON'
import importlib.metadata
import importlib.util
import pathlib
import sys
import types

import jax
import jax.numpy as jnp

folder = pathlib.Path(importlib.util.find_spec('tpu_inference').submodule_search_locations[0])
for name in ('', 'layers', 'layers.common', 'layers.jax', 'layers.jax.sample', 'runner'):
  module = sys.modules['.'.join(filter(None, ('tpu_inference', name)))] = types.ModuleType(name)
  module.__path__ = [str(folder.joinpath(*name.split('.')))]
for name, values in (
  ('layers.common.sharding', {'ShardingAxisName': types.SimpleNamespace(ATTN_DATA='data', MLP_TENSOR='model')}),
  ('runner.input_batch', {'InputBatch': object}),
  ('utils', {'device_array': None}),
):
  module = sys.modules[f'tpu_inference.{name}'] = types.ModuleType(name)
  vars(module).update(values)
from tpu_inference.layers.jax.sample.rejection_sampler import rejection_sample

SIZE, ROWS, BATCHES = 2**17, 64, 32
target = jnp.full(SIZE, 1e-8).at[0].set(1 - 1e-8 * (SIZE - 2)).at[-1].set(0)
draft = jnp.zeros(SIZE).at[-1].set(1)  # always guesses what the target never emits


@jax.jit
def correct(key):
  """The corrections of one batch of guesses, all of which are rejected."""
  rows = jnp.full(ROWS, SIZE - 1)
  laws = (jnp.broadcast_to(law, (ROWS, SIZE)) for law in (draft, target))
  return rejection_sample(rows, jnp.ones(ROWS, int), *laws, jnp.zeros(ROWS, int), True, key)[:ROWS]


print(f'tpu-inference {importlib.metadata.version("tpu-inference")}, jax {jax.__version__}')
found = jnp.concatenate([correct(jax.random.key(number)) for number in range(BATCHES)])
rare, right = int(jnp.sum(found > 0)), ROWS * BATCHES * float(jnp.sum(target[1:]))
print(f'of {len(found):,} corrections {rare} are rare tokens, right are {right:.1f}')
print(f'V / 2^23 of them are {ROWS * BATCHES * SIZE / 2**23:.0f}')
sys.exit(0 if int(jnp.min(found)) >= 0 and rare > 5 * right else 1)
PYTHON
