"""Attention over a cache and pending tokens: every platform's form beside the plain one; the GPU's without a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import attention, attention_kernel, native
from spectr_jax.kernels.attention_kernel import attend_by_kernel
from spectr_jax.kernels.dispatch import tracing_for
from tests.slow import slow_but


def _inputs(
  *, batch_size, num_queries, num_heads, num_kv_heads, head_dim, num_new, num_slots, has_window=False,
  dtype='bfloat16', cache_dtype='bfloat16', lengths=None,
):  # fmt: skip
  """Queries, pending keys, values and mask, and the prefix; among the rows are one without a prefix and a full one."""
  rng = np.random.default_rng(0)

  def array(*shape, dtype=dtype):
    return jnp.asarray(rng.normal(size=shape), dtype)

  lengths = np.resize([0, num_slots, num_slots // 3] if lengths is None else lengths, batch_size)
  visible = np.arange(num_slots) < lengths[:, None, None]
  if has_window:
    visible = visible & (rng.random((batch_size, num_queries, num_slots)) < 0.5)
  mask = rng.random((batch_size, num_queries, num_new)) < 0.5
  mask[:, :, rng.integers(num_new)] = True
  prefix = [
    array(batch_size, num_kv_heads, *shape, dtype=cache_dtype)
    for shape in ((head_dim, num_slots), (num_slots, head_dim))
  ]
  return (
    head_dim**-0.5 * array(batch_size, num_queries, num_heads, head_dim),
    array(batch_size, num_kv_heads, head_dim, num_new),
    array(batch_size, num_kv_heads, num_new, head_dim),
    jnp.asarray(mask),
    (*prefix, jnp.asarray(visible), jnp.zeros((batch_size, num_queries), jnp.int32)),
  )


def _in_float64(query, new_keys, new_values, mask, prefix, soft_cap, sinks=None):
  query, new_keys, new_values, old_keys, old_values = (
    np.asarray(x, np.float64) for x in (query, new_keys, new_values, *prefix[:2])
  )
  mask, visible = np.asarray(mask), np.asarray(prefix[2])
  group = query.shape[2] // new_keys.shape[1]
  out = np.zeros(query.shape)
  for row, node, head in np.ndindex(query.shape[:3]):
    own = head // group
    seen = np.concatenate([visible[row, node % visible.shape[1]], mask[row, node]])
    keys = np.concatenate([old_keys[row, own], new_keys[row, own]], axis=1)[:, seen]
    values = np.concatenate([old_values[row, own], new_values[row, own]])[seen]
    scores = query[row, node, head] @ keys
    if soft_cap is not None:
      scores = soft_cap * np.tanh(scores / soft_cap)
    sink = -np.inf if sinks is None else sinks[head]
    top = max(scores.max(), sink)
    weights = np.exp(scores - top)
    out[row, node, head] = weights @ values / (weights.sum() + np.exp(sink - top))
  return out


_SIZES = {
  name: dict(zip(('num_queries', 'num_heads', 'num_kv_heads', 'head_dim', 'num_new', 'num_slots'), sizes))
  for name, sizes in {
    'a tree of grouped heads': (9, 6, 2, 16, 9, 50),
    'one token': (1, 4, 4, 16, 1, 70),
    'more queries than a program has': (40, 4, 2, 16, 40, 30),
    'more pending tokens than a block': (3, 2, 1, 32, 150, 64),
    'slots divided among programs': (2, 2, 1, 16, 5, 900),
    'wide heads': (2, 2, 1, 256, 3, 40),
  }.items()
}


@pytest.mark.parametrize('soft_cap', [None, 1.5])
@pytest.mark.parametrize('has_window', [False, True])
@pytest.mark.parametrize('sizes', _SIZES.values(), ids=_SIZES)
def test_is_attention(sizes, has_window, soft_cap):
  query, new_keys, new_values, mask, prefix = inputs = _inputs(batch_size=3, has_window=has_window, **sizes)
  kernel = functools.partial(attend_by_kernel, soft_cap=soft_cap, interpret=True)
  found = kernel(query, new_keys, new_values, mask, *prefix[:3])
  assert found.shape == query.shape
  assert found.dtype == query.dtype
  expected = _in_float64(*inputs, soft_cap)
  # Weights and results are rounded to bfloat16, 2^-9 of each.
  np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=0.01)
  assert np.abs(expected).max() > 0.4


def test_unused_slots_are_not_read():
  """Also where the slots of a row end within a block."""
  sizes = dict(num_queries=2, num_heads=2, num_kv_heads=1, head_dim=16, num_new=4, num_slots=200)
  query, new_keys, new_values, mask, (keys, values, visible, _) = _inputs(batch_size=3, **sizes)
  is_far = np.arange(200) >= 128  # the third row uses 66 slots, two blocks of 64
  keys, values = jnp.where(is_far, jnp.nan, keys), jnp.where(is_far[:, None], jnp.nan, values)
  found = attend_by_kernel(query, new_keys, new_values, mask, keys, values, visible, soft_cap=None, interpret=True)
  assert np.isfinite(np.asarray(found[2], np.float32)).all()
  assert np.isnan(np.asarray(found[1], np.float32)).any()


@pytest.mark.parametrize(
  ('head_dim', 'query_dtype', 'cache_dtype', 'is_taken'),
  [
    (128, 'bfloat16', 'bfloat16', True),
    (64, 'float16', 'float16', True),
    (96, 'bfloat16', 'bfloat16', False),
    (8, 'bfloat16', 'bfloat16', False),
    (128, 'float32', 'float32', False),
    (128, 'bfloat16', 'float32', False),
  ],
)
def test_which_heads_it_takes(head_dim, query_dtype, cache_dtype, is_taken):
  assert attention_kernel.takes(head_dim, jnp.dtype(query_dtype), jnp.dtype(cache_dtype)) == is_taken


@pytest.mark.parametrize(
  ('platform', 'dtype', 'has_prefix', 'has_kernel'),
  [
    ('gpu', 'bfloat16', True, True),
    ('gpu', 'bfloat16', False, False),
    ('gpu', 'float32', True, False),
    ('tpu', 'bfloat16', True, False),
    ('cpu', 'bfloat16', True, False),
  ],
)
def test_attention_over_a_cache_is_a_kernel_on_gpus(platform, dtype, has_prefix, has_kernel):
  query, new_keys, new_values, mask, prefix = _inputs(batch_size=3, **_SIZES['a tree of grouped heads'])
  arrays = [x.astype(dtype) for x in (query, new_keys, new_values)]
  prefix = (*(x.astype(dtype) for x in prefix[:2]), *prefix[2:])

  def attend(*arrays):
    return attention.attend(*arrays, mask[:1], prefix if has_prefix else None, soft_cap=2.0)

  with tracing_for(platform):
    program = jax.make_jaxpr(attend)(*arrays)
    found = jax.jit(attend)(*arrays)  # where there is no GPU, the plain form
  assert ('platform=gpu' in str(program)) == has_kernel
  np.testing.assert_allclose(
    np.asarray(found, np.float32), np.asarray(attend(*arrays), np.float32), atol=0.02 if dtype == 'bfloat16' else 1e-5
  )


def test_can_be_lowered_for_gpus_that_are_not_there():
  described = {'device_kind': 'NVIDIA H200', 'num_cores': 132, 'platform': 'gpu'}
  names = {field.name for field in dataclasses.fields(jax.sharding.AbstractDevice)}
  device = jax.sharding.AbstractDevice(**{name: described[name] for name in names})
  for sizes in _SIZES.values():
    query, new_keys, new_values, mask, prefix = _inputs(batch_size=2, **sizes)
    attend = jax.jit(functools.partial(attend_by_kernel, soft_cap=2.0))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
      traced = attend.trace(query, new_keys, new_values, mask, *prefix[:3])
      assert 'triton' in traced.lower(lowering_platforms=('cuda',)).as_text()


def test_the_compiler_divides_no_kernel(monkeypatch):
  sizes = dict(num_queries=3, num_heads=2, num_kv_heads=2, head_dim=16, num_new=3, num_slots=8)
  query, new_keys, new_values, mask, prefix = _inputs(batch_size=2, **sizes)
  monkeypatch.setattr(attention, 'dividing_axes', lambda: ['model'])
  with tracing_for('gpu'):
    program = jax.make_jaxpr(lambda query: attention.attend(query, new_keys, new_values, mask, prefix))(query)
  assert 'platform=gpu' not in str(program)


# Ragged rows, one of them without a prefix and one whose prefix fills the cache, which no block size divides.
_RAGGED = dict(
  batch_size=3, num_queries=7, num_heads=2, num_kv_heads=2, head_dim=4, num_new=7, num_slots=21, cache_dtype='float32'
)


@pytest.mark.parametrize('size', [1, 8, 21, 64])
@pytest.mark.parametrize('soft_cap', [None, 2.0])
@pytest.mark.parametrize('has_window', [False, True])
@pytest.mark.parametrize(('dtype', 'atol'), [('float32', 2e-6), ('bfloat16', 2e-2)])
def test_blocks_of_the_prefix_are_the_whole(monkeypatch, size, soft_cap, has_window, dtype, atol):
  monkeypatch.setattr(attention, '_BLOCK_SLOTS', size)
  inputs = _inputs(**_RAGGED, dtype=dtype, has_window=has_window)
  expected = attention._attend(*inputs, soft_cap=soft_cap)
  found = jax.jit(lambda *x: attention._attend_in_blocks(*x, soft_cap=soft_cap))(*inputs)
  assert found.dtype == dtype  # that of the queries
  np.testing.assert_allclose(found.astype('float32'), expected.astype('float32'), atol=atol)


def test_slots_that_no_query_sees_are_not_visited(monkeypatch):
  """NaN behind the committed tokens of the longest row, but for the last block with any of them."""
  monkeypatch.setattr(attention, '_BLOCK_SLOTS', 7)
  inputs = _inputs(**_RAGGED, dtype='float32', lengths=(0, 5, 9))
  query, keys, values, mask, (old_keys, old_values, slots, places) = inputs
  bad = jnp.arange(21) >= 14
  old_keys = jnp.where(bad, jnp.nan, old_keys)
  old_values = jnp.where(bad[:, None], jnp.nan, old_values)
  found = attention._attend_in_blocks(query, keys, values, mask, (old_keys, old_values, slots, places), soft_cap=None)
  assert np.isfinite(found).all()


@pytest.mark.parametrize('positions', [[[0, 0, 0]], [[0, 3, 1000]]])
def test_angles_are_those_of_the_positions(positions):
  """On a CPU they are the result of a branch."""
  positions, frequencies = jnp.array(positions), jnp.array([1.0, 0.1], jnp.float32)
  sin, cos = jax.jit(lambda x: attention.rotary_angles(x, frequencies, magnitude=1.5))(positions)
  angles = np.asarray(positions, np.float32)[:, :, None, None] * np.asarray(frequencies)
  np.testing.assert_allclose(sin, 1.5 * np.sin(angles), atol=1e-5)
  np.testing.assert_allclose(cos, 1.5 * np.cos(angles), atol=1e-5)


@pytest.mark.parametrize('num_tokens', [5, 128, 130, 300])
def test_causal_attention_in_blocks_is_that_of_all_tokens(num_tokens):
  keys = jax.random.split(jax.random.key(0), 3)
  query = jax.random.normal(keys[0], (2, num_tokens, 2, 8))
  new_keys = jax.random.normal(keys[1], (2, 2, 8, num_tokens))
  values = jax.random.normal(keys[2], (2, 2, num_tokens, 8))
  places = jnp.arange(num_tokens)
  document = places >= 3  # two documents
  mask = jnp.broadcast_to(
    (places[:, None] >= places) & (document[:, None] == document), (2, num_tokens, num_tokens)
  )  # fmt: skip

  def loss(attend):
    return lambda *arrays: jnp.sum(jnp.sin(attend(*arrays, mask)))

  found, expected = (
    jax.jit(jax.value_and_grad(loss(attend), (0, 1, 2)))(query, new_keys, values)
    for attend in (attention.attend_causally, attention.attend)
  )
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, expected)


@pytest.fixture
def forms():
  """The forms in C++ that this processor has, each used from when it is asked for; then its best again."""
  best = native.form()
  yield (name for name in ('avx512_bf16', 'avx512', 'avx2') if best and native.use_form(name))
  if best:
    native.use_form(best)


@pytest.mark.skipif(native.form() is None, reason=f'no products in C++: {native.why_not()}')
@pytest.mark.parametrize('soft_cap', [None, 1.5])
@pytest.mark.parametrize('has_window', [False, True])
@pytest.mark.parametrize('sizes', _SIZES.values(), ids=_SIZES)
def test_attention_in_c_is_that_of_every_query(forms, sizes, has_window, soft_cap):
  """In float32, whatever type queries have; a row does not depend on those beside it, up to rounding of a tile."""
  inputs = _inputs(batch_size=3, dtype='float32', cache_dtype='float32', has_window=has_window, **sizes)
  expected = _in_float64(*inputs, soft_cap)
  num_forms = 0
  for _ in forms:
    assert attention.tree_attention.form_for(*inputs, soft_cap=soft_cap).__name__ == '_attend_natively'
    found = np.asarray(attention.tree_attention(*inputs, soft_cap=soft_cap))
    np.testing.assert_allclose(found, expected, atol=5e-6)
    *arrays, prefix = inputs
    row = [array[1:2] for array in arrays], tuple(array[1:2] for array in prefix)
    np.testing.assert_array_equal(attention.tree_attention(*row[0], row[1], soft_cap=soft_cap), found[1:2])
    num_forms += 1
  assert num_forms


@pytest.mark.parametrize('name', slow_but(['a tree of grouped heads', 'slots divided among programs'], _SIZES))
def test_sinks_count_in_the_softmax_and_mix_nothing(forms, name):
  """In every form, large ones and small ones; without a prefix too."""
  sizes = _SIZES[name]
  inputs = _inputs(batch_size=3, dtype='float32', cache_dtype='float32', has_window=True, **sizes)
  sinks = jnp.asarray(np.random.default_rng(1).normal(size=sizes['num_heads']) * 3, jnp.float32)
  expected = _in_float64(*inputs, None, np.asarray(sinks, np.float64))
  assert np.abs(expected - _in_float64(*inputs, None)).max() > 0.02
  options = {'soft_cap': None, 'sinks': sinks}
  found = [attention.tree_attention.plain(*inputs, **options)]
  with native.disabled():
    found.append(attention.tree_attention(*inputs, **options))  # in blocks where there are many queries
  with tracing_for('gpu'):
    found.append(attention.tree_attention(*inputs, **options))
  with tracing_for('tpu'):
    found.append(attention.tree_attention(*inputs, **options))
  for _ in forms:
    found.append(attention.tree_attention(*inputs, **options))
  for each in found:
    np.testing.assert_allclose(each, expected, atol=5e-5)
  *arrays, (keys, values, visible, places) = inputs
  hidden = keys, values, visible & False, places
  alone = attention.tree_attention(*arrays, None, **options)
  np.testing.assert_allclose(alone, _in_float64(*arrays, hidden, None, np.asarray(sinks)), atol=5e-5)


@pytest.mark.skipif(native.form() is None, reason=f'no products in C++: {native.why_not()}')
def test_attention_in_c_keeps_nan_and_large_scores(forms):
  """NaN of a query reaches its own results alone; scores of thousands overflow nothing."""
  query, *others = _inputs(
    batch_size=2, num_queries=5, num_heads=2, num_kv_heads=1, head_dim=32, num_new=5, num_slots=300, dtype='float32',
    cache_dtype='float32', lengths=[300, 40],
  )  # fmt: skip
  for _ in forms:
    found = attention.tree_attention((query * 3000).at[1, 2, 1, 7].set(jnp.nan), *others, soft_cap=None)
    expected = _in_float64(query * 3000, *others, None)
    assert np.isnan(found[1, 2, 1]).all()
    np.testing.assert_allclose(found[0], expected[0], atol=1e-3)
    np.testing.assert_allclose(found[1, :2], expected[1, :2], atol=1e-3)


def test_attention_in_c_takes_what_it_can():
  """Not bfloat16 caches, narrow heads, or what a mesh divides."""
  sizes = dict(batch_size=1, num_queries=2, num_heads=2, num_kv_heads=1, num_new=2, num_slots=8, dtype='float32')

  def is_native(*, head_dim=16, cache_dtype='float32'):
    inputs = _inputs(head_dim=head_dim, cache_dtype=cache_dtype, **sizes)
    return attention.tree_attention.form_for(*inputs, soft_cap=None).__name__ == '_attend_natively'

  assert is_native() == (native.form() is not None)
  assert not any([is_native(head_dim=8), is_native(cache_dtype='bfloat16')])
  with native.disabled():
    assert not is_native()


@pytest.mark.skipif(native.form() is None, reason=f'no products in C++: {native.why_not()}')
@pytest.mark.parametrize('soft_cap', [None, 2.0])
@pytest.mark.parametrize('window', [None, 3, 200])
@pytest.mark.parametrize('length', [1, 11, 250, 509, 520])
def test_attention_in_c_is_a_function_of_the_text_to_the_bit(forms, length, window, soft_cap):
  """The last of a text's tokens, read alone, behind others of its call, as a node of a tree, or in a longer cache."""
  rng = np.random.default_rng(length)
  num_heads, num_kv_heads, width = 6, 2, 32

  def array(*shape):
    return rng.normal(size=shape).astype(np.float32)

  keys, values, query = array(num_kv_heads, width, length), array(num_kv_heads, length, width), array(num_heads, width)

  def attend(num_pending, num_others, cache_size):
    """With the last tokens of the text pending, in order among other ones that are not of it."""
    num_kept, num_new = length - num_pending, num_pending + num_others
    at = np.sort(rng.permutation(num_new)[:num_pending]) if num_others else np.arange(num_pending)
    new_keys, new_values = array(1, num_kv_heads, width, num_new), array(1, num_kv_heads, num_new, width)
    new_keys[0, :, :, at] = np.moveaxis(keys[:, :, num_kept:], 2, 0)
    new_values[0, :, at] = np.moveaxis(values[:, num_kept:], 1, 0)
    old_keys, old_values = array(1, num_kv_heads, width, cache_size), array(1, num_kv_heads, cache_size, width)
    old_keys[0, :, :, :num_kept], old_values[0, :, :num_kept] = keys[:, :, :num_kept], values[:, :num_kept]
    queries = array(1, num_new, num_heads, width)
    node = at[-1]
    queries[0, node] = query
    mask = rng.random((1, num_new, num_new)) < 0.3
    mask[:, np.arange(num_new), np.arange(num_new)] = True
    is_near = np.arange(length)[::-1] < (length if window is None else window)
    mask[0, node] = False
    mask[0, node, at] = is_near[num_kept:]
    visible = np.zeros((1, num_new, cache_size), bool)
    visible[..., :num_kept] = True  # others see all
    visible[0, node, :num_kept] = is_near[:num_kept]
    places = rng.integers(num_kept, num_kept + num_new, (1, num_new)).astype(np.int32)
    places[0, node] = length - 1
    prefix = old_keys, old_values, visible, places
    arrays = jax.tree.map(jnp.asarray, (queries, new_keys, new_values, mask, prefix))
    return np.asarray(attention.tree_attention(*arrays, soft_cap=soft_cap))[0, node]

  for _ in forms:
    expected = attend(1, 0, length)
    assert np.isfinite(expected).all()
    for num_pending in {1, min(2, length), min(9, length), min(length, 70)}:
      for num_others, cache_size in ((0, 1024), (3, length + 5), (40, 700)):
        np.testing.assert_array_equal(attend(num_pending, num_others, max(cache_size, length)), expected)
