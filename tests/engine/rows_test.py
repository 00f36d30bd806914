"""What a row may depend on: its key and its prompt."""

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels.cache_writes import write_rows
from tests.engine.runs import KINDS, LENGTHS, PROMPTS, VERSIONS, assert_same, generate, make_keys
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures('highest')


def _assert_rows_alone(models, method, *, shapes, seed, **options):
  """Row by row the same tokens, whatever the mates, their order and the padding: `shapes` are of further runs."""
  keys = make_keys(seed)
  whole = generate(models, method, keys, **options)
  for rows, size in shapes:
    rows = np.array(rows)
    prompts = np.full((len(rows), size), 10**6)  # padding need not even be an id
    for to, row in enumerate(rows):
      prompts[to, : LENGTHS[row]] = PROMPTS[row, : LENGTHS[row]]
    part = generate(models, method, keys[rows], prompts, LENGTHS[rows], **options)
    assert_same(part, jax.tree.map(lambda x: x[rows], whole))  # noqa: B023
  # Other mates: rows 0 and 1 keep key and prompt, the others change both.
  mates = keys.at[2:].set(make_keys(seed + 100)[2:])
  prompts = PROMPTS.copy()
  prompts[2:] = 1 + (PROMPTS[2:] + 1) % 5
  other = generate(models, method, mates, prompts, np.array([1, 2, 3, 6]), **options)
  assert_same(jax.tree.map(lambda x: x[:2], other), jax.tree.map(lambda x: x[:2], whole))
  assert (other.tokens[2:] != whole.tokens[2:]).any()


@pytest.mark.parametrize('method', slow_but(['greedy_block'], VERSIONS))
def test_table_rows_do_not_depend_on_their_batch(tables, method):
  alone = [((row,), 6) for row in range(4)] if method in KINDS else []
  _assert_rows_alone(tables, method, shapes=[((3, 1, 0, 2), 6), ((2, 0, 1), 9), *alone], seed=0)


@pytest.mark.parametrize('method', slow_but(['autoregressive', 'greedy_block', 'race_traversal'], KINDS))
def test_transformer_rows_do_not_depend_on_their_batch(target, draft, method):
  # A row's sums may be ordered by the shape of its batch. With these keys no uniform is that close to a boundary.
  shapes = [((3, 1, 0, 2), 6)] + ([((2, 0), 9)] if method == 'spectr' else [])
  _assert_rows_alone((target, draft), method, shapes=shapes, seed=0)


@pytest.mark.parametrize('method', slow_but(['ersd', 'greedy_block'], KINDS))
def test_one_key_is_folded_with_the_row(tables, method):
  key = jax.random.key(11)
  folded = jnp.stack([jax.random.fold_in(key, row) for row in range(4)])
  assert_same(generate(tables, method, key), generate(tables, method, folded))
  assert (generate(tables, method, jax.random.key(12)).tokens != generate(tables, method, key).tokens).any()


def test_arguments_survive(tables):
  """The loop donates its own state, nothing a caller holds: every array can be used again."""
  keys, prompts, lengths = make_keys(2), jnp.int32(PROMPTS), jnp.int32(LENGTHS)
  options = {'temperature': jnp.full(4, 0.5), 'top_k': jnp.full(4, 4, jnp.int32), 'top_p': jnp.full(4, 0.9)}
  first = generate(tables, 'speculative', keys, prompts, lengths, **options)
  assert_same(first, generate(tables, 'speculative', keys, prompts, lengths, **options))


@pytest.mark.parametrize('method', slow_but(['race_block'], KINDS))
def test_sampling_parameters_are_per_row(target, draft, method):
  """Each row of a mixed batch is the row of a batch that has its parameters everywhere."""
  temperature, top_k = np.array([1.0, 0.0, 0.6, 1.3]), np.array([0, 0, 3, 5])
  top_p = np.array([0.7, 1.0, 1.0, 0.95])
  mixed = generate((target, draft), method, make_keys(3), temperature=temperature, top_k=top_k, top_p=top_p)
  for row in range(4):
    options = {'temperature': temperature[row], 'top_k': top_k[row], 'top_p': top_p[row]}
    same = generate((target, draft), method, make_keys(3), **options)
    assert_same(jax.tree.map(lambda x: x[row], mixed), jax.tree.map(lambda x: x[row], same))  # noqa: B023


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_values_are_put_at_their_slots_in_every_dtype(dtype):
  rows = jnp.arange(24.0).reshape(2, 4, 3).astype(dtype) / 7
  values = -jnp.arange(12.0).reshape(2, 2, 3).astype(dtype) / 7
  slots = jnp.array([[1, 3], [2, 4]])  # the last one is beyond the rows
  expected = np.array(rows)
  expected[0, [1, 3]], expected[1, 2] = values[0], values[1, 0]
  written = jax.jit(write_rows)(rows, slots, values)
  assert written.dtype == dtype
  np.testing.assert_array_equal(written, expected)


@pytest.mark.slow
def test_rows_do_not_depend_on_their_device():
  assert commands.succeed('tests.engine.another_device', num_devices=2).strip() == 'equal'
