"""Functions with a kernel, lowered for platforms that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels.dispatch import launch


@pytest.mark.parametrize(
  ('platform', 'lowered_for', 'has_kernel'),
  [
    ('tpu', 'tpu', True),
    ('tpu', 'cuda', False),
    ('tpu', 'rocm', False),
    ('tpu', 'cpu', False),
    ('gpu', 'cuda', True),
    ('gpu', 'rocm', True),
    ('gpu', 'tpu', False),
    ('gpu', 'cpu', False),
  ],
)
def test_a_kernel_is_lowered_for_its_platform_alone(platform, lowered_for, has_kernel):
  called = []

  def kernel(x):
    called.append(x.shape)
    return x + 1

  @jax.jit
  def apply(x):
    return launch(lambda x: x + 1, kernel, x, platform=platform)

  apply.trace(jnp.zeros((3, 2))).lower(lowering_platforms=(lowered_for,))
  assert called == ([(3, 2)] if has_kernel else [])


def test_entries_of_rows_are_entries_of_one_call():
  """Also where no platform has the kernel, and the plain form takes its place."""
  found = jax.vmap(lambda x, y: launch(lambda x, y: x * y, None, x, y, platform='gpu'), (0, None))(
    jnp.arange(12.0).reshape(2, 3, 2), jnp.full((3, 2), 2.0)
  )
  np.testing.assert_array_equal(found, 2 * np.arange(12).reshape(2, 3, 2))
