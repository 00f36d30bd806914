"""Maps that skip work: every platform's form against a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import on_demand
from spectr_jax.kernels.dispatch import tracing_for
from spectr_jax.kernels.on_demand import map_needed, where_needed


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


@pytest.mark.parametrize('vocab_size', [5, 5000])
@pytest.mark.parametrize('platform', ['cpu', 'default'])
def test_where_needed_is_the_function_where_it_is_needed(vocab_size, platform):
  """A CPU's loop over rows and an accelerator's pass over all, on a small and a large vocabulary, and one row alone."""
  rng = np.random.default_rng(0)
  laws, scales, otherwise = rng.random((4, vocab_size)), rng.random(4), np.full(4, -1.0)

  def function(law, scale):
    return jnp.sum(law) * scale

  def one_row(is_needed, otherwise, *operands):
    return where_needed(is_needed, function, otherwise, *operands)

  rows, alone = jax.jit(jax.vmap(one_row)), jax.jit(one_row)
  with tracing_for(platform):
    for is_needed in ([False] * 4, [False, True, False, True], [True] * 4):
      expected = np.where(is_needed, laws.sum(1) * scales, otherwise)
      np.testing.assert_allclose(rows(np.array(is_needed), otherwise, laws, scales), expected, rtol=1e-12)
      np.testing.assert_allclose(alone(is_needed[1], otherwise[1], laws[1], scales[1]), expected[1], rtol=1e-12)


@pytest.mark.parametrize('at_once', [None, 3])
@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'default'])
def test_map_needed_is_the_function_where_it_is_needed(at_once, platform):
  """A CPU's loop, an accelerator's parts and its one pass, alone and for several rows, against a loop in NumPy."""
  vocab_size, num_rows, places = 5000, 4, (np.arange(7), np.array([0, 1, 2, 4, 5, 6, 8]))
  rng = np.random.default_rng(0)
  arrays = rng.random((num_rows, 7, vocab_size)), rng.random((num_rows, 9, vocab_size))
  items = rng.random((num_rows, 7)), rng.random((num_rows, 7, 3))
  is_needed = rng.random((num_rows, 7)) < np.array([0.0, 0.3, 0.7, 1.0])[:, None]
  otherwise = np.full((num_rows, 7), -1.0), np.full((num_rows, 7, 3), -2.0)

  def function(first, second, scalar, vector):
    return jnp.sum(first * second) * scalar, vector + jnp.max(second)

  def one_row(is_needed, otherwise, arrays, items):
    return map_needed(function, is_needed, otherwise, tuple(zip(arrays, places)), items, at_once=at_once)

  arguments = is_needed, otherwise, arrays, items
  with tracing_for(platform):
    batched = jax.jit(jax.vmap(one_row))(*arguments)
    single = [jax.jit(one_row)(*jax.tree.map(lambda x, row=row: x[row], arguments)) for row in range(num_rows)]
  for found in (batched, jax.tree.map(lambda *x: np.stack(x), *single)):
    for row, entry in np.ndindex(num_rows, 7):
      first, second = arrays[0][row, places[0][entry]], arrays[1][row, places[1][entry]]
      expected = (first @ second) * items[0][row, entry], items[1][row, entry] + second.max()
      for own, wanted, other in zip(found, expected, otherwise):
        value = wanted if is_needed[row, entry] else other[row, entry]
        np.testing.assert_allclose(own[row, entry], value, rtol=1e-12)


@pytest.mark.parametrize(('platform', 'num_bodies'), [('tpu', 1), ('gpu', 2)])
def test_a_gpu_computes_the_first_entries_without_asking(platform, num_bodies):
  def function(is_needed, laws):
    return map_needed(jnp.max, is_needed, jnp.zeros(7), ((laws, np.arange(7)),), at_once=3)

  with tracing_for(platform):
    program = str(jax.make_jaxpr(function)(np.zeros(7, bool), np.zeros((7, 5000))))
  assert program.count('reduce_max') == num_bodies
  assert program.count(' while[') == 1


def test_map_needed_leaves_out_what_is_not_needed():
  """The program has a loop whose turns are the needed entries, in rows together, and no array of all laws."""

  def count(is_needed, laws):
    return map_needed(lambda law: jnp.sum(law), is_needed, jnp.zeros(8), ((laws, np.arange(8)),))

  shapes = jax.ShapeDtypeStruct((4, 8), bool), jax.ShapeDtypeStruct((4, 8, 5000), jnp.float64)
  compiled = jax.jit(jax.vmap(count)).lower(*shapes).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * 8 * 5000
  assert ' while(' in compiled.as_text()


def test_a_tpu_picks_rows_by_a_product_that_keeps_every_bit():
  rng = np.random.default_rng(2)
  laws = rng.dirichlet(np.full(3000, 0.05), 6).astype(np.float32)
  laws[laws < 1e-30] = 0
  rows = np.array([5, 0, 0, 3])
  np.testing.assert_array_equal(jax.jit(on_demand._pick_by_product)(laws, rows), laws[rows])


@pytest.mark.parametrize('num_rows', [1, 3])
def test_rows_of_a_batch_are_picked(num_rows):
  rng = np.random.default_rng(3)
  laws, rows = rng.random((num_rows, 5, 7)), rng.integers(0, 5, (num_rows, 4))
  with tracing_for('tpu'):
    found = jax.jit(jax.vmap(on_demand.pick))(laws, rows)
    of_one = jax.jit(jax.vmap(on_demand.pick, (None, 0)))(laws[0], rows)
  np.testing.assert_array_equal(found, np.take_along_axis(laws, rows[:, :, None], axis=1))
  np.testing.assert_array_equal(of_one, laws[0][rows])
