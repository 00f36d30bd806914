"""Writes of accepted tokens into a cache, and of logits into a vocabulary: every platform's form by a plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import cache_writes, vocabulary


@pytest.mark.parametrize(
  ('way', 'dtype'),
  [
    (cache_writes.write_slots.plain, 'float32'),
    (cache_writes._write_slots_as_integers, 'bfloat16'),
    (cache_writes._select_of_all, 'float32'),
    (cache_writes._select_of_all, 'bfloat16'),
    (cache_writes.write_slots, 'float32'),  # in C++ where it is built
    (cache_writes.write_slots, 'bfloat16'),
  ],
)
@pytest.mark.parametrize('axis', [1, 2, 3])
def test_every_way_to_write_a_cache_writes_the_same(way, dtype, axis):
  """Platforms write in ways of their own; here all are run on one."""
  rng = np.random.default_rng(axis)
  size, num_pending, depth = 11, 6, 4
  shapes = [[3, 2, 5, 5], [3, 2, 5, 5]]
  shapes[0][axis], shapes[1][axis] = size, num_pending
  array, pending = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
  path = jnp.asarray(np.stack([rng.permutation(num_pending)[:depth] for _ in range(3)]))
  slots = jnp.asarray([[2, 3, 4, size], [size] * depth, [9, 10, 11, 12]])
  # What is not kept may be anything.
  not_kept = np.zeros((3, num_pending), bool)
  for row in range(3):
    not_kept[row] = ~np.isin(np.arange(num_pending), np.asarray(path[row])[np.asarray(slots[row]) < size])
  others = tuple({1, 2, 3} - {axis})
  pending = jnp.where(jnp.expand_dims(jnp.asarray(not_kept), others), jnp.nan, pending)
  expected = np.array(array)
  for row, (nodes, places) in enumerate(zip(np.asarray(path), np.asarray(slots))):
    for node, place in zip(nodes, places):
      if place < size:
        np.moveaxis(expected[row], axis - 1, 0)[place] = np.moveaxis(np.asarray(pending)[row], axis - 1, 0)[node]
  write = jax.jit(lambda arrays, pending: way(arrays, pending, path, slots, [axis, axis]))
  written, others = write([array, array], [pending, pending + 1])
  assert written.dtype == array.dtype
  np.testing.assert_array_equal(written, expected)
  np.testing.assert_array_equal(array == others, array == expected)


@pytest.mark.parametrize('shape', [(4,), (2, 4), (2, 3, 4)])
def test_logits_reach_their_places_by_either_form(shape):
  logits, ids = np.random.default_rng(0).normal(size=shape).astype(np.float32), np.array([5, 0, 7, 2], np.int32)
  found = np.asarray(vocabulary.over_vocabulary(jnp.asarray(logits), jnp.asarray(ids), 9))
  np.testing.assert_array_equal(found[..., ids], logits)
  assert np.isneginf(np.delete(found, ids, axis=-1)).all()
  np.testing.assert_array_equal(vocabulary._scattered(jnp.asarray(logits), jnp.asarray(ids), 9), found)


def test_all_tokens_stay_as_they_are():
  logits = jnp.ones((2, 9))
  assert vocabulary.over_vocabulary(logits, None, 9) is logits
