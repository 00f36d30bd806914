"""Linear recurrences on trees beside states that follow each path token by token, in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import recurrence
from spectr_jax.tree import TokenTree
from tests.slow import slow

_GROUPS, _HEADS, _KEY, _VALUE, _ROWS = 2, 4, 5, 3, 2


@pytest.fixture
def float64():
  with jax.enable_x64(True):
    yield


def _tree(rng, num_nodes):
  return [-1, *(int(rng.integers(0, i)) for i in range(1, num_nodes))]


def _mask(parents):
  mask = np.eye(len(parents), dtype=bool)
  for node, parent in enumerate(parents):
    if parent >= 0:
      mask[node] |= mask[parent]
  return mask


def _inputs(rng, num_nodes):
  key = rng.normal(size=(_ROWS, num_nodes, _GROUPS, _KEY))
  return {
    'query': rng.normal(size=(_ROWS, num_nodes, _GROUPS, _KEY)),
    'key': key / np.linalg.norm(key, axis=-1, keepdims=True),
    'value': rng.normal(size=(_ROWS, num_nodes, _HEADS, _VALUE)),
    'log_decay': -rng.exponential(size=(_ROWS, num_nodes, _HEADS)),
    'gate': rng.uniform(size=(_ROWS, num_nodes, _HEADS)),
  }


def _step(state, inputs, row, node, has_gate):
  """One token of one row: its output `[H, V]` and the state `[H, K, V]` after it."""
  key, query = (np.repeat(inputs[name][row, node], _HEADS // _GROUPS, axis=0) for name in ('key', 'query'))
  state = np.exp(inputs['log_decay'][row, node])[:, None, None] * state
  written = inputs['value'][row, node]
  if has_gate:
    written = inputs['gate'][row, node][:, None] * (written - np.einsum('hkv,hk->hv', state, key))
  state = state + key[:, :, None] * written[:, None]
  return np.einsum('hkv,hk->hv', state, query), state


def _walk(state, inputs, parents, row, has_gate):
  """Outputs and states of all nodes of one row."""
  outputs, states = [], []
  for node, parent in enumerate(parents):
    output, after = _step(state if parent < 0 else states[parent], inputs, row, node, has_gate)
    outputs.append(output)
    states.append(after)
  return np.array(outputs), np.array(states)


def _apply(state, inputs, mask, has_gate, pending=None, num_before=0):
  inputs = {name: jnp.asarray(x) for name, x in inputs.items()}
  inputs['gate'] = inputs['gate'] if has_gate else None
  mask = jnp.asarray(mask if mask.ndim == 3 else mask[None])
  return recurrence.recur(jnp.asarray(state), pending, mask=mask, num_before=num_before, **inputs)


@pytest.mark.parametrize('has_gate', [True, False], ids=['delta', 'plain'])
@pytest.mark.parametrize('num_nodes', [1, 2, 17, slow(40)])
def test_outputs_and_states_are_those_of_each_path(float64, has_gate, num_nodes):
  rng = np.random.default_rng(num_nodes)
  for _ in range(4):
    parents, state = _tree(rng, num_nodes), rng.normal(size=(_ROWS, _HEADS, _KEY, _VALUE))
    inputs = _inputs(rng, num_nodes)
    mask = _mask(parents)
    outputs, pending = _apply(state, inputs, mask, has_gate)
    assert pending.values.shape == (_ROWS, num_nodes, _HEADS, _VALUE)
    ends = rng.integers(0, num_nodes, _ROWS)
    path, numbers = np.zeros((_ROWS, num_nodes), np.int32), np.zeros(_ROWS, np.int32)
    for row, end in enumerate(ends):
      nodes = np.flatnonzero(mask[end])
      path[row, : len(nodes)], numbers[row] = nodes, len(nodes)
    folded = recurrence.fold(jnp.asarray(state), pending, jnp.asarray(path), jnp.asarray(numbers))
    for row in range(_ROWS):
      wanted, states = _walk(state[row], inputs, parents, row, has_gate)
      np.testing.assert_allclose(outputs[row], wanted, atol=1e-10)
      np.testing.assert_allclose(folded[row], states[ends[row]], atol=1e-10)
    same = recurrence.fold(jnp.asarray(state), pending, jnp.asarray(path), jnp.zeros(_ROWS, jnp.int32))
    np.testing.assert_array_equal(same, state)


@pytest.mark.parametrize('has_gate', [True, False], ids=['delta', 'plain'])
def test_calls_of_a_round_continue_each_other(float64, has_gate):
  rng = np.random.default_rng(3)
  parents, state = _tree(rng, 9), rng.normal(size=(_ROWS, _HEADS, _KEY, _VALUE))
  inputs, mask = _inputs(rng, 9), _mask(parents)
  whole, together = _apply(state, inputs, mask, has_gate)
  begun, pending = 0, None
  for end in (1, 4, 9):
    part = {name: x[:, begun:end] for name, x in inputs.items()}
    outputs, pending = jax.jit(_apply, static_argnums=3)(state, part, mask[begun:end], has_gate, pending, begun)
    np.testing.assert_allclose(outputs, whole[:, begun:end], atol=1e-10)
    begun = end
  for one, other in zip(jax.tree.leaves(pending), jax.tree.leaves(together), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-10)


@pytest.mark.parametrize('has_gate', [True, False], ids=['delta', 'plain'])
def test_long_texts_do_not_drift(has_gate):
  """2,000 tokens in commits of 1 to 5, in float32, beside float64 token by token."""
  rng = np.random.default_rng(5)
  exact = np.zeros((_ROWS, _HEADS, _KEY, _VALUE))
  state = jnp.zeros(exact.shape, jnp.float32)
  apply, fold = jax.jit(_apply, static_argnums=3), jax.jit(recurrence.fold)
  mask = np.tril(np.ones((5, 5), bool))
  for _ in range(700):
    inputs = {name: x.astype(np.float32) for name, x in _inputs(rng, 5).items()}
    number = int(rng.integers(1, 6))
    outputs, pending = apply(state, inputs, mask, has_gate)
    state = fold(state, pending, np.tile(np.arange(5, dtype=np.int32), (_ROWS, 1)), np.full(_ROWS, number, np.int32))
    for row in range(_ROWS):
      wanted, states = _walk(exact[row], inputs, [-1, 0, 1, 2, 3], row, has_gate)
      np.testing.assert_allclose(outputs[row], wanted, atol=2e-5)
      exact[row] = states[number - 1]
  assert state.dtype == jnp.float32
  np.testing.assert_allclose(state, exact, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize('has_gate', [True, False], ids=['delta', 'plain'])
def test_no_more_drift_than_token_by_token(has_gate):
  """20,000 tokens with a long memory in commits of 1 to 5, and in NumPy's float32 token by token, beside float64."""
  rng = np.random.default_rng(8)
  exact = np.zeros((_HEADS, _KEY, _VALUE))
  alone, state = exact.astype(np.float32), jnp.zeros((_ROWS, *exact.shape), jnp.float32)
  apply, fold = jax.jit(_apply, static_argnums=3), jax.jit(recurrence.fold)
  mask, path = np.tril(np.ones((5, 5), bool)), np.tile(np.arange(5, dtype=np.int32), (_ROWS, 1))
  num_tokens = 0
  while num_tokens < 20_000:
    inputs = {name: x.astype(np.float32) for name, x in _inputs(rng, 5).items()}
    inputs['log_decay'] /= 1000
    number = int(rng.integers(1, 6))
    num_tokens += number
    _, pending = apply(state, inputs, mask, has_gate)
    state = fold(state, pending, path, np.full(_ROWS, number, np.int32))
    wide = {name: x.astype(np.float64) for name, x in inputs.items()}
    for node in range(number):
      _, exact = _step(exact, wide, 0, node, has_gate)
      _, alone = _step(alone, inputs, 0, node, has_gate)
  assert alone.dtype == np.float32
  drift, usual = (np.abs(each - exact).max() / np.abs(exact).max() for each in (state[0], alone))
  assert drift < max(2 * usual, 1e-6), (drift, usual)


def test_convolutions_follow_paths(float64):
  rng, width, channels = np.random.default_rng(7), 4, 3
  for num_nodes in (1, 2, 12):
    parents = _tree(rng, num_nodes)
    mask = _mask(parents)
    committed, pending = rng.normal(size=(_ROWS, width - 1, channels)), rng.normal(size=(_ROWS, num_nodes, channels))
    taps = rng.normal(size=(width, channels))
    places = recurrence.path_inputs(jnp.asarray(mask[None]), width)
    found = recurrence.convolve(*map(jnp.asarray, (committed, pending, taps)), places)
    for row in range(_ROWS):
      for node in range(num_nodes):
        text = np.concatenate([committed[row], pending[row, np.flatnonzero(mask[node])]])
        np.testing.assert_allclose(found[row, node], (text[-width:] * taps).sum(0), atol=1e-12)
    path = np.zeros((_ROWS, num_nodes), np.int32)
    nodes = np.flatnonzero(mask[-1])
    path[:, : len(nodes)] = nodes
    numbers = np.array([0, len(nodes)], np.int32)
    kept = recurrence.last_inputs(jnp.asarray(committed), jnp.asarray(pending), jnp.asarray(path), jnp.asarray(numbers))
    np.testing.assert_array_equal(kept[0], committed[0])
    np.testing.assert_array_equal(kept[1], np.concatenate([committed[1], pending[1, nodes]])[-width + 1 :])


def test_padding_has_places():
  """Tokens that no path holds, as those beyond a row's own tree, read some input and no missing one."""
  places = recurrence.path_inputs(jnp.zeros((1, 3, 5), bool), 4)
  assert ((places >= 0) & (places < 8)).all()


def test_masks_of_trees_are_in_order():
  """The parents of `TokenTree` come before their children, which a triangular system needs."""
  tree = TokenTree.chains(3, 4)
  assert not np.triu(tree.ancestors, 1).any()
