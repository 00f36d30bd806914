"""Kernels for distributions that several devices share: sums over tokens, and filters; run by `token_sums_test`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spectr_jax.kernels import class_sums, filters, token_sums
from spectr_jax.kernels.dispatch import tracing_for
from tests.kernels.interpreted import launch_into


def check_sums():
  shapes = []

  token_sums.launch = launch_into(shapes)
  rng = np.random.default_rng(0)
  p, q = np.float32(rng.dirichlet(np.full(512, 0.1), 2))
  classes = np.int32(rng.integers(0, 5, 512))
  mesh = jax.make_mesh((2,), ('model',), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  with jax.set_mesh(mesh), tracing_for('tpu'):
    arrays = [jax.device_put(x, NamedSharding(mesh, PartitionSpec('model'))) for x in (p, q, classes)]
    found = jax.jit(lambda p, q, classes: class_sums.sums_by_class((p, q), classes, 5))(*arrays)
  assert [each[0] for each in shapes] == [(1, 256)], shapes
  expected = [np.bincount(classes, own.astype(np.float64), 5) for own in (p, q)]
  np.testing.assert_allclose(found, np.transpose(expected), rtol=2e-6)

  tables = np.float32(rng.dirichlet(np.full(512, 0.1), (2, 6)))
  rows, params = [np.arange(5), np.arange(1, 6)], np.float32(rng.random((5, 1)))
  with jax.set_mesh(mesh), tracing_for('tpu'):
    arrays = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, 'model'))) for x in tables]
    found = jax.jit(lambda *tables: token_sums.sums_of_rows(_overlap_fn, tables, rows, params))(*arrays)
  assert [each[0] for each in shapes[1:]] == [(1, 6, 256)], shapes
  expected = np.minimum(tables[0][rows[0]], params * tables[1][rows[1]]).sum(axis=1)
  np.testing.assert_allclose(found, expected, rtol=2e-6)


def _overlap_fn(params):
  return lambda token: [jnp.minimum(token[0], params[0] * token[1])]


def check_filters():
  shapes = []

  filters.launch = launch_into(shapes)
  mesh = jax.make_mesh((4,), ('model',), axis_types=(AxisType.Auto,))
  rng = np.random.default_rng(0)
  # One row in all, fewer than devices, some for each, and more than eight for each.
  for num_rows, num_nodes, own in ((1, 1, 1), (2, 1, 1), (3, 5, 4), (7, 6, 16)):
    probs = np.float32(rng.dirichlet(np.full(512, 0.1), (num_rows, num_nodes)))
    values = {
      'top_k': jnp.arange(num_rows) * 7 % 20,
      'top_p': jnp.linspace(0.5, 1, num_rows, dtype=jnp.float32),
      'min_p': None if num_rows == 2 else jnp.full(num_rows, 0.01, jnp.float32),
    }

    def run(platform, probs, values):
      with tracing_for(platform):
        return filters.filtered(probs, values)

    expected = np.asarray(jax.jit(run, static_argnums=0)('cpu', probs, values))
    with jax.set_mesh(mesh):
      divided = jax.device_put(probs, NamedSharding(mesh, PartitionSpec(None, None, 'model')))
      found = jax.jit(run, static_argnums=0)('tpu', divided, values)
    assert shapes.pop()[0] == (own, 4, 128)
    np.testing.assert_array_equal(np.asarray(found) > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


if __name__ == '__main__':
  check_sums()
  check_filters()
  print('equal')
