"""Rates at which a device reads and copies its memory, for the floors of steps."""

from __future__ import annotations

import concurrent.futures
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

COPIED, NUM_COPIES = 2**28, 16  # numbers of a copy, and copies in one program


def read_rate() -> float:
  """The device's read rate in bytes per second, the best of several passes over 1 GiB."""

  def rate(largest, num_bytes):
    def seconds():
      start = time.perf_counter()
      largest()
      return time.perf_counter() - start

    return num_bytes / min(seconds() for _ in range(10))

  if jax.default_backend() != 'cpu':
    array, largest = jnp.ones(2**28, jnp.float32), jax.jit(jnp.max)
    return rate(lambda: jax.block_until_ready(largest(array)), array.nbytes)
  num_cpus = os.cpu_count()
  parts = np.split(np.ones(2**28 // num_cpus * num_cpus, np.float32), num_cpus)
  with concurrent.futures.ThreadPoolExecutor(num_cpus) as pool:
    return rate(lambda: list(pool.map(np.max, parts)), sum(part.nbytes for part in parts))


def copy_rate() -> float:
  """Bytes per second that copies of 1 GiB read and write, one after another in one program; the best of five runs."""
  array = jnp.ones(COPIED, jnp.float32)
  copied = jax.jit(lambda x: jax.lax.fori_loop(0, NUM_COPIES, lambda _, x: x + 1, x))

  def seconds():
    start = time.perf_counter()
    jax.block_until_ready(copied(array))
    return time.perf_counter() - start

  seconds()
  return NUM_COPIES * 2 * array.nbytes / min(seconds() for _ in range(5))
