"""`verify` on two devices, with rows or the vocabulary divided, decides as on one; run by `verify_test`."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spectr_jax import TokenTree, verify


def main():
  tree, rng, batch_size, vocab_size = TokenTree.chains(2, 2), np.random.default_rng(0), 16, 8
  keys = jax.random.split(jax.random.key(1), batch_size)
  tokens = rng.integers(vocab_size, size=(batch_size, tree.num_nodes)).astype(np.int32)
  laws = [
    rng.dirichlet(np.ones(vocab_size), (batch_size, number)).astype(np.float32)
    for number in (len(tree.parent_nodes), tree.num_nodes + 1)
  ]

  def decide(keys, tokens, *laws):
    return verify(keys, tree, tokens, *laws)

  mesh = jax.sharding.Mesh(np.array(jax.devices()), 'shard')
  rows = PartitionSpec('shard')
  by_row, by_token = NamedSharding(mesh, rows), NamedSharding(mesh, PartitionSpec(None, None, 'shard'))
  jitted, whole = jax.jit(decide), (keys, tokens, *laws)
  found = {
    'rows': jitted(*jax.device_put(whole, by_row)),
    'vocabulary': jitted(keys, tokens, *jax.device_put(laws, by_token)),
    'shard_map': jax.jit(jax.shard_map(decide, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))(*whole),
  }
  expected = jax.device_get(jitted(*whole))
  assert len({*expected.num_accepted.tolist()}) > 1
  for divided, verification in found.items():
    assert divided == 'vocabulary' or len(verification.tokens.sharding.device_set) == 2
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(verification), expected)
  print('equal')


if __name__ == '__main__':
  main()
