"""Sums over tokens that two devices share, by the kernel; run by `token_sums_test`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spectr_jax.kernels import class_sums, token_sums
from spectr_jax.kernels.dispatch import tracing_for
from tests.kernels.interpreted import launch_into


def main():
  shapes = []

  token_sums.launch = launch_into(shapes)
  rng = np.random.default_rng(0)
  p, q = np.float32(rng.dirichlet(np.full(512, 0.1), 2))
  classes = np.int32(rng.integers(0, 5, 512))
  mesh = jax.make_mesh((2,), ('model',), axis_types=(AxisType.Auto,))
  with jax.set_mesh(mesh), tracing_for('tpu'):
    arrays = [jax.device_put(x, NamedSharding(mesh, PartitionSpec('model'))) for x in (p, q, classes)]
    found = jax.jit(lambda p, q, classes: class_sums.sums_by_class((p, q), classes, 5))(*arrays)
  assert shapes == [(1, 256)], shapes
  expected = [np.bincount(classes, own.astype(np.float64), 5) for own in (p, q)]
  np.testing.assert_allclose(found, np.transpose(expected), rtol=2e-6)

  tables = np.float32(rng.dirichlet(np.full(512, 0.1), (2, 6)))
  rows, params = [np.arange(5), np.arange(1, 6)], np.float32(rng.random((5, 1)))
  with jax.set_mesh(mesh), tracing_for('tpu'):
    arrays = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, 'model'))) for x in tables]
    found = jax.jit(lambda *tables: token_sums.sums_of_rows(_overlap_fn, tables, rows, params))(*arrays)
  assert shapes[1:] == [(1, 6, 256)], shapes
  expected = np.minimum(tables[0][rows[0]], params * tables[1][rows[1]]).sum(axis=1)
  np.testing.assert_allclose(found, expected, rtol=2e-6)
  print('equal')


def _overlap_fn(params):
  return lambda token: [jnp.minimum(token[0], params[0] * token[1])]


if __name__ == '__main__':
  main()
