"""Decodes on the second of two devices, as `jax.default_device` says; run by `rows_test`."""

import jax
import numpy as np

from spectr_jax.models.table import table_model
from tests.engine.runs import assert_same, generate, make_keys


def main():
  first, second = jax.devices()
  logits = np.float32(np.random.default_rng(0).normal(size=(2, 6, 6)))
  results = []
  for device in (first, second, first):
    with jax.default_device(device):
      results.append(generate([table_model(jax.numpy.asarray(x)) for x in logits], 'race_traversal', make_keys()))
    assert {x.sharding for x in jax.tree.leaves(results[-1])} == {jax.sharding.SingleDeviceSharding(device)}
  for other in results[1:]:
    assert_same(jax.device_get(other), jax.device_get(results[0]))
  print('equal')


if __name__ == '__main__':
  main()
