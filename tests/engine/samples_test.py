"""Several samples of each prompt: which keys they have, and that no sample depends on the others or the batch."""

import jax
import numpy as np
import pytest

from spectr_jax.engine import sample_keys
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.sharding import make_mesh
from tests.engine.runs import KINDS, LENGTHS, PROMPTS, assert_same, generate, make_keys
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures('highest')


def _rows(result, rows):
  return jax.tree.map(lambda x: np.asarray(x)[rows], result)


def test_keys_are_those_of_no_round():
  keys = make_keys()
  samples = sample_keys(keys, 3)
  assert samples.shape == (12,)
  data = np.asarray(jax.random.key_data(samples)).reshape(4, 3, -1)
  np.testing.assert_array_equal(data[:, 0], jax.random.key_data(keys))
  np.testing.assert_array_equal(data[:, :2].reshape(8, -1), jax.random.key_data(sample_keys(keys, 2)))
  # A round folds in the length of the text, then a purpose.
  rounds = jax.vmap(lambda key: jax.vmap(lambda length: jax.random.fold_in(key, length))(np.arange(1, 200)))(keys)
  every = np.concatenate([data.reshape(12, -1), np.asarray(jax.random.key_data(rounds)).reshape(4 * 199, -1)])
  assert len(np.unique(every, axis=0)) == len(every)


@pytest.mark.parametrize('method', slow_but(('race_traversal',), KINDS))
def test_each_is_what_its_key_gives(target, draft, method):
  """By itself, in a ragged batch with sampling parameters of its own, whatever the number of samples."""
  options = {'temperature': np.array([0.7, 1.0, 1.3, 0.9]), 'top_k': 6, 'logprobs': True}
  samples = generate((target, draft), method, make_keys(), num_samples=3, **options)
  assert samples.tokens.shape == (12, 12)
  assert not np.array_equal(samples.tokens[0], samples.tokens[1])
  repeated = {'temperature': np.repeat(options['temperature'], 3), 'top_k': 6, 'logprobs': True}
  keys = sample_keys(make_keys(), 3)
  alone = generate((target, draft), method, keys, np.repeat(PROMPTS, 3, axis=0), np.repeat(LENGTHS, 3), **repeated)
  np.testing.assert_allclose(samples.logprobs, alone.logprobs, rtol=1e-4, atol=1e-5)
  assert_same(samples.tokens, alone.tokens)
  assert_same(samples.num_target_calls, alone.num_target_calls)


@pytest.mark.slow
def test_number_of_samples_does_not_matter(tables):
  single = generate(tables, 'spectr', make_keys(1))
  samples = generate(tables, 'spectr', make_keys(1), num_samples=3)
  assert_same(_rows(samples, np.arange(0, 12, 3)), jax.device_get(single))
  sharding = DecodeSharding(make_mesh({}, jax.devices()[:1]))
  assert_same(samples, generate(tables, 'spectr', make_keys(1), num_samples=3, sharding=sharding))


def test_one_key_of_all_rows(tables):
  """The samples are of the rows' keys."""
  rows = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(4), i))(np.arange(4))
  samples = generate(tables, 'spectr', jax.random.key(4), num_samples=3)
  assert_same(samples, generate(tables, 'spectr', rows, num_samples=3))


@pytest.mark.parametrize('num_samples', [0, -1, 2.0])
def test_numbers_that_are_refused(tables, num_samples):
  with pytest.raises(ValueError, match='num_samples must be a positive int'):
    generate(tables, 'spectr', make_keys(), num_samples=num_samples)
