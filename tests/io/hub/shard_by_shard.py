"""A program for eight virtual devices: loads a folder onto a mesh, and prints the sizes of reads and the tokens."""

import json
import sys

import jax
import numpy as np

from spectr_jax import TokenTree, generate
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.io.hub.load import load_hub_model, make_model
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
  found = {}
  plain = load_hub_model(folder)
  found['plain'] = generate(jax.random.key(0), plain, plain, prompts, lengths, **settings).tokens.tolist()
  int8 = load_hub_model(folder, weights='int8')
  found['plain_int8'] = generate(jax.random.key(0), int8, plain, prompts, lengths, **settings).tokens.tolist()
  for sizes in ({'model': 8}, {'data': 2, 'model': 4}):
    mesh, tensors = make_mesh(sizes), Recorded(folder)
    target = make_model(spec, tensors, mesh=mesh)
    sharding = DecodeSharding(mesh)
    new = generate(jax.random.key(0), target, plain, prompts, lengths, sharding=sharding, **settings)
    quantized = make_model(spec, SafetensorsFolder(folder), weights='int8', mesh=mesh)
    new_int8 = generate(jax.random.key(0), quantized, plain, prompts, lengths, sharding=sharding, **settings)
    kernels = quantized.params['layer_0'], int8.params['layer_0']
    same = [
      np.array_equal(*pair)
      for place in (('attention', 'q'), ('attention', 'out'), ('mlp', 'up'), ('mlp', 'down'))
      for pair in zip(*(jax.tree.leaves(block[place[0]][place[1]]) for block in kernels))
    ]
    same += [
      np.array_equal(*pair) for pair in zip(*(jax.tree.leaves(x.params['embedding']) for x in (quantized, int8)))
    ]
    kernel = target.params['layer_0']['attention']['k']['kernel']
    found[f'model:{sizes["model"]}'] = {
      'tokens': new.tokens.tolist(),
      'largest': tensors.largest,
      'whole': {name: int(np.prod(tensors.shape(name))) for name in tensors.names()},
      'k_shape': kernel.shape,
      'k_shard': kernel.addressable_shards[0].data.shape,
      'int8': {
        'tokens': new_int8.tokens.tolist(),
        'is_equal': all(same),
        'out_shard': kernels[0]['attention']['out']['kernel'].values.addressable_shards[0].data.shape,
      },
      'is_moved': sharding.put_models(target, None)[0].params['embedding'] is not target.params['embedding'],
    }
  print(json.dumps(found))


if __name__ == '__main__':
  main(sys.argv[1], json.loads(sys.argv[2]))
