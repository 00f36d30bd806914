"""Filters of distributions that four devices share, by the kernel; run by `filters_test`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spectr_jax.kernels import filters
from spectr_jax.kernels.dispatch import tracing_for
from tests.kernels.interpreted import launch_into


def main():
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
    assert shapes.pop() == (own, 4, 128)
    np.testing.assert_array_equal(np.asarray(found) > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
  print('equal')


if __name__ == '__main__':
  main()
