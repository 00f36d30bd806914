"""Parameters in Orbax's layout that were made to do harm: each is refused in one line. Folders are in `io_test`."""

import hostile
import numpy as np
import pytest
from binary_mutations import SHAPES, write_params

from spectr_jax.io.stored_params import StoredParams


def test_params(tmp_path):
  write_params(tmp_path)
  found = StoredParams(tmp_path).read(SHAPES, np.dtype(np.float32))
  assert {name: array.shape for name, array in found.items()} == SHAPES
  np.testing.assert_array_equal(found['embedding'][0], [1, 2, 3, 4])


@pytest.mark.parametrize(
  ('changes', 'problem'),
  [
    ({'shape': [6, 4], 'chunks': [2**40, 4]}, 'has chunks of shape (1099511627776, 4)'),
    ({'shape': [2**40, 4]}, 'parameter embedding is float32 of shape (1099511627776, 4), expected float32'),
    ({'dtype': '<f8'}, 'is float64 of shape (6, 4)'),
    ({'compressor': {'id': 'blosc'}}, 'is compressed in an unknown way'),
    ({'compressor': None}, 'is compressed in an unknown way'),
  ],
)
def test_descriptions_of_params(changes, problem, tmp_path):
  write_params(tmp_path, **changes)
  assert problem in hostile.refusal(lambda: StoredParams(tmp_path).read(SHAPES, np.dtype(np.float32)), tmp_path)


def test_params_in_too_many_chunks(tmp_path):
  write_params(tmp_path, shape=[2000, 4], chunks=[1, 4])
  shapes = SHAPES | {'embedding': (2000, 4)}
  message = hostile.refusal(lambda: StoredParams(tmp_path).read(shapes, np.dtype(np.float32)), tmp_path)
  assert 'has too many chunks' in message
