"""Kernels for TPUs run on a CPU here, operation by operation."""

import pytest

from spectr_jax.kernels.tpu import calls


@pytest.fixture(autouse=True)
def interpreted():
  with calls.interpreted():
    yield
