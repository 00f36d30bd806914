"""A program for eight virtual devices: loads a folder onto a mesh, each device its part, and decodes with it."""

import json
import math
import sys

import jax
import numpy as np

from spectr_jax import TokenTree, generate
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.io.hub.hub_model import load_hub_model, make_model
from spectr_jax.io.hub.tensors import SafetensorsFolder
from spectr_jax.sharding import make_mesh


class Recorded(SafetensorsFolder):
  """Tensors of a folder that record the largest part that is read of each."""

  def __init__(self, folder):
    super().__init__(folder)
    self.largest = {}

  def read(self, name, index):
    part = super().read(name, index)
    self.largest[name] = max(self.largest.get(name, 0), part.size)
    return part


def main(folder, spec):
  prompts, lengths = np.arange(12).reshape(2, 6), np.array([6, 3])
  settings = {'method': 'race_traversal', 'tree': TokenTree.chains(2, 2), 'max_new_tokens': 8}
  plain, int8 = load_hub_model(folder), load_hub_model(folder, weights='int8')

  def decoded(target, **options):
    return generate(jax.random.key(0), target, plain, prompts, lengths, **settings, **options).tokens

  for sizes in ({'model': 8}, {'data': 2, 'model': 4}):
    mesh, tensors, num_shards = make_mesh(sizes), Recorded(folder), sizes['model']
    target, sharding = make_model(spec, tensors, mesh=mesh), DecodeSharding(mesh)
    np.testing.assert_array_equal(decoded(target, sharding=sharding), decoded(plain))
    assert sharding.put_models(target, None)[0].params['embedding'] is target.params['embedding']  # stays where it is
    kernel = target.params['layer_0']['attention']['k']['kernel']
    assert kernel.shape == (32, 4 * num_shards)  # each head is there often
    assert kernel.addressable_shards[0].data.shape == (32, 4)
    for name in tensors.names():
      # Two heads of keys and values cannot be read in more than two parts.
      shards = 1 if 'norm' in name else 2 if 'k_proj' in name or 'v_proj' in name else num_shards
      assert tensors.largest[name] == math.prod(tensors.shape(name)) // shards, name
    quantized = make_model(spec, SafetensorsFolder(folder), weights='int8', mesh=mesh)
    np.testing.assert_array_equal(decoded(quantized, sharding=sharding), decoded(int8))
    own, whole = quantized.params['layer_0'], int8.params['layer_0']
    for module, part in (('attention', 'q'), ('attention', 'out'), ('mlp', 'up'), ('mlp', 'down')):
      jax.tree.map(np.testing.assert_array_equal, own[module][part], whole[module][part])
    jax.tree.map(np.testing.assert_array_equal, quantized.params['embedding'], int8.params['embedding'])
    # Its inputs are sharded, and scales are those of whole channels.
    assert own['attention']['out']['kernel'].values.addressable_shards[0].data.shape == (32 // num_shards, 32)
    print(sizes)


if __name__ == '__main__':
  main(sys.argv[1], json.loads(sys.argv[2]))
