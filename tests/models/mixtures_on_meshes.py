"""A program for four virtual devices: mixtures of experts on meshes, each device with its part, decode like one."""

import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax import SamplingParams, TokenTree, generate
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.io.hub.hub_model import load_hub_model
from spectr_jax.model import Model
from spectr_jax.sharding import MODEL, make_mesh

_CASES = (None, {'model': 2}), (None, {'data': 2, 'model': 2}), ('int8', {'model': 4})


def _logits(model, num_tokens):
  tokens = jnp.arange(2 * num_tokens).reshape(2, -1) % 32
  positions = jnp.broadcast_to(jnp.arange(num_tokens), tokens.shape)
  causal = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
  return jax.jit(Model.apply)(model, tokens, positions, causal, model.init_cache_fn(2, 4)).logits


def main(folders):
  prompts, lengths = np.arange(12).reshape(2, 6), np.array([6, 3])
  settings = {'method': 'race_traversal', 'tree': TokenTree.chains(2, 3), 'max_new_tokens': 8}

  def decoded(model, draft, **options):
    sampling = SamplingParams(0.0)
    return generate(jax.random.key(0), model, draft, prompts, lengths, sampling=sampling, **settings, **options).tokens

  for path in folders:
    count = 0
    for weights, sizes in _CASES:
      one, mesh = load_hub_model(path, weights=weights), make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
      model = load_hub_model(path, weights=weights, mesh=mesh)
      of_layer = model.params['layer_1'].get('mixture') or model.params['layer_1']['mlp']
      kernel = of_layer['experts']['up']['kernel']
      values = kernel.values if weights else kernel
      assert values.addressable_shards[0].data.shape[2] == values.shape[2] // mesh.shape[MODEL]
      for num_tokens in (1, 9):  # that gather experts, and that do not
        wanted = _logits(one, num_tokens)
        np.testing.assert_allclose(_logits(model, num_tokens), wanted, atol=1e-4 * np.abs(wanted).max())
      if 'data' in sizes:
        np.testing.assert_array_equal(decoded(one, one), decoded(model, one, sharding=DecodeSharding(mesh)))
      count += 1
    print(f'{path.name}: {count} meshes')


if __name__ == '__main__':
  main(list(map(pathlib.Path, sys.argv[1:])))
