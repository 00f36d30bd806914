"""Recursions along a tree: the kernels, interpreted, and the unrolled forms for GPUs against the scans."""

import jax
import numpy as np
import pytest

from spectr_jax.kernels import tree_steps
from spectr_jax.kernels.dispatch import tracing_for
from spectr_jax.kernels.tpu import recursions
from tests.slow import slow


def _trees(num_rows, num_depths, width):
  """Random contexts and races of rows: most slots stand for a context, below a random one of the depth above."""
  rng = np.random.default_rng(width)
  stands = rng.random((num_rows, num_depths + 1, width)) < 0.8
  stands[:, 0] = np.arange(width) == 0
  above = np.zeros((num_rows, num_depths, width), int)
  for row, depth in np.ndindex(num_rows, num_depths):
    parents = np.flatnonzero(stands[row, depth])
    stands[row, depth + 1] &= len(parents) > 0
    if len(parents):
      above[row, depth] = rng.choice(parents, width)
  stands_below = stands[:, 1:]
  is_child = (above[:, :, None, :] == np.arange(width)[:, None]) & stands_below[:, :, None, :]
  is_sibling = (above[..., None] == above[:, :, None, :]) & stands_below[..., None] & stands_below[:, :, None, :]
  shares = np.where(stands_below, rng.choice([0, 0.2, 0.5, 0.9, 1e-6], stands_below.shape), 0)
  total = np.einsum('bdjk,bdk->bdj', is_sibling, shares)
  shares = np.float32(shares / np.where(total > 0, total, 1))
  place = np.arange(width)
  mine, other = shares[..., :, None], shares[..., None, :]
  is_before = is_sibling & ((other < mine) | ((other == mine) & (place < place[:, None])))
  return rng, stands, is_child, is_before, is_sibling, shares


def _unrolled(function):
  def apply(*arguments):
    with tracing_for('gpu'):
      rows = jax.jit(jax.vmap(function))
      # XLA removes a loop of one iteration.
      assert arguments[0].shape[1] == 1 or 'stablehlo.while' not in rows.lower(*arguments).as_text()
      return rows(*arguments)

  return apply


# Rows are taken eight at a time, or as many as divide their number.
@pytest.mark.parametrize('shape', [(3, 4, 5), slow((2, 1, 8)), slow((1, 6, 1)), (16, 3, 4)])
def test_credits_of_the_kernel_are_those_of_the_scan(shape):
  rng, _, is_child, is_before, is_sibling, shares = _trees(*shape)
  log_ratios = np.float32(rng.normal(size=shares.shape))
  log_ratios[rng.random(shares.shape) < 0.2] = -np.inf
  log_ratios[rng.random(shares.shape) < 0.3] = 1e-7
  arguments = is_child, is_before, is_sibling, shares, log_ratios
  expected = jax.vmap(tree_steps.race_credits)(*arguments)
  found = recursions.race_credits(*arguments)
  np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-7)
  np.testing.assert_allclose(_unrolled(tree_steps.race_credits)(*arguments), expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize('shape', [(5, 4, 5), slow((4, 1, 8)), slow((3, 6, 1)), (16, 3, 4)])
def test_the_first_kept_node_of_the_kernel_is_that_of_the_scan(shape):
  rng, stands, is_child, is_before, *_ = _trees(*shape)
  for share in (0.0, 0.1, 0.5):
    is_kept = stands & (rng.random(stands.shape) < share)
    is_kept[:, 0, 0] = True
    nodes = np.broadcast_to(rng.permutation(stands[0].size).reshape(stands[0].shape), stands.shape).astype(np.int32)
    expected = jax.vmap(tree_steps.first_kept)(is_child, is_before, is_kept, nodes)
    found = recursions.first_kept(is_child, is_before, is_kept, nodes)
    np.testing.assert_array_equal(found, expected)
    unrolled = _unrolled(tree_steps.first_kept)(is_child, is_before, is_kept, nodes)
    np.testing.assert_array_equal(unrolled, expected)
    # Beside the scan a walk: the best child first, the node itself last.
    for row, expected_node in enumerate(np.asarray(expected)):
      assert _walk(is_child[row], is_before[row], is_kept[row], nodes[row], 0, 0) == expected_node


@pytest.mark.parametrize(
  ('num_rows', 'num_depths', 'width', 'expected'), [(64, 8, 8, 8), (12, 8, 8, 4), (3, 8, 8, 1), (64, 16, 128, 1)]
)
def test_rows_are_together_as_far_as_memory_goes(num_rows, num_depths, width, expected):
  masks = [np.zeros((num_rows, num_depths, width, width), np.int32)] * 3
  rows = [np.zeros((num_rows, num_depths, width), np.float32)] * 2
  assert recursions._rows_together(num_rows, masks + rows) == expected


def _walk(is_child, is_before, is_kept, nodes, depth, slot):
  if depth < len(is_child):
    children = np.flatnonzero(is_child[depth, slot])
    for child in sorted(children, key=lambda child: is_before[depth, child].sum()):
      if (found := _walk(is_child, is_before, is_kept, nodes, depth + 1, child)) is not None:
        return found
  return nodes[depth, slot] if is_kept[depth, slot] else None
