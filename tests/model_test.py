"""The cache and the network behind the seam: whatever is cached, logits are those of a plain forward of the text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import products
from spectr_jax.kernels.matrices import matmul
from spectr_jax.model import KVCache, Model
from spectr_jax.models import causal_lm, table, transformer
from spectr_jax.models.causal_lm import lm1b_config
from spectr_jax.testing import chi_square
from spectr_jax.testing.engine import sample_counts
from spectr_jax.tree import TokenTree
from tests.slow import slow, slow_but

pytestmark = pytest.mark.usefixtures('highest')

TREE = TokenTree((0, 0, 1, 1, 2, 4))  # depths 0, 1, 1, 2, 2, 2, 3
# Two orders of float32 summation, amplified by the sharp attention of these models; in float64 the same differences are
# below 1e-10 (tested). A wrong mask or position moves logits of size 1 by more than 1e-2.
TOLERANCE = 1e-4


@jax.jit
def _prefill(model, prompts, lengths):
  return model.prefill(prompts, lengths, model.init_cache_fn(prompts.shape[0], 20))[0]


@jax.jit
def _forward(model, tokens, root_positions, cache):
  """Logits and cache after one call for root and guesses `[B, N + 1]`."""
  output = model.apply(tokens, root_positions[:, None] + TREE.depths, jnp.asarray(TREE.ancestors), cache)
  return output.logits, output.cache


@jax.jit
def _commit(cache, path, num_committed):
  return cache.commit(path, num_committed)


def _node_texts(prefixes, tokens):
  """The text of every row and node: its prefix and the tokens from the root down to the node."""
  return [
    [*prefix, *(row[node] for node in (0, *path) if node >= 0)]
    for prefix, row in zip(prefixes, np.asarray(tokens).tolist())
    for path in TREE.paths.tolist()
  ]


def _assert_logits(uncached_logits, model, prefixes, tokens, logits, atol=TOLERANCE, rtol=0):
  expected = uncached_logits(model, _node_texts(prefixes, tokens)).reshape(logits.shape)
  np.testing.assert_allclose(logits, expected, atol=atol, rtol=0)


def _slots(cache):
  """Every layer's keys and values as numpy `[B, S, H * head_dim]`."""
  keys = [np.asarray(jnp.moveaxis(k, -1, 1)).reshape(*k.shape[:1], k.shape[-1], -1) for k in cache.keys]
  values = [np.asarray(jnp.moveaxis(v, 2, 1)).reshape(*v.shape[:1], v.shape[2], -1) for v in cache.values]
  return keys + values


def test_float64_shows_that_the_rest_is_rounding(target, uncached_logits):
  with jax.enable_x64(True):
    model = causal_lm.causal_lm(target.params, dataclasses.replace(causal_lm.config_of(target), dtype='float64'))
    rng = np.random.default_rng(0)
    prompts, lengths, tokens = rng.integers(0, 17, (3, 8)), np.array([8, 3, 0]), rng.integers(0, 17, (3, 7))
    logits, cache = _forward(model, tokens, lengths, _prefill(model, prompts, lengths))
    prefixes = [row[:n].tolist() for row, n in zip(prompts, lengths)]
    assert logits.dtype == jnp.float64
    _assert_logits(uncached_logits, model, prefixes, tokens, logits, atol=1e-10)
    cache = _commit(cache, np.array([[0, 1, 4, 6], [0, 2, 5, 0], [0, 0, 0, 0]]), np.array([4, 2, 0]))
    prefixes[0] += tokens[0, [0, 1, 4, 6]].tolist()
    prefixes[1] += tokens[1, [0, 2]].tolist()
    logits, _ = _forward(model, tokens, lengths + np.array([4, 2, 0]), cache)
    _assert_logits(uncached_logits, model, prefixes, tokens, logits, atol=1e-10)


@pytest.mark.parametrize('padding', [-1, 16, 17, 10**6])
def test_prefill_does_not_read_padding(target, padding):
  prompts, lengths = np.random.default_rng(1).integers(0, 17, (3, 8)), np.array([5, 1, 0])
  is_padding = np.arange(8) >= lengths[:, None]
  expected = _prefill(target, np.where(is_padding, 0, prompts), lengths)
  found = _prefill(target, np.where(is_padding, padding, prompts), lengths)
  for a, b in zip(_slots(expected), _slots(found)):
    np.testing.assert_array_equal(a, b)


def test_random_commits_and_rollbacks(target, uncached_logits):
  """After any sequence of rounds the cache stands for the committed text, and a commit touches nothing before it."""
  rng = np.random.default_rng(2)
  prompts, lengths = rng.integers(0, 17, (3, 8)), np.array([4, 2, 0])
  cache = _prefill(target, prompts, lengths)
  texts = [row[:n].tolist() for row, n in zip(prompts, lengths)]
  seen = set()
  for _ in range(6):
    tokens = rng.integers(0, 17, (3, 7))
    old_lengths = np.array([len(text) for text in texts])
    before = _slots(cache)
    logits, cache = _forward(target, tokens, old_lengths, cache)
    assert logits.dtype == jnp.float32
    _assert_logits(uncached_logits, target, texts, tokens, logits)
    nodes = rng.integers(0, 7, 3)
    path = np.maximum(np.pad(TREE.paths[nodes], ((0, 0), (1, 0))), 0)
    longest = np.minimum(TREE.depths[nodes] + 1, 20 - old_lengths)
    num_accepted = rng.integers(0, longest + 1)
    cache = _commit(cache, path, num_accepted)
    seen |= set(num_accepted.tolist())
    for text, row, way, count in zip(texts, tokens.tolist(), path, num_accepted):
      text += [row[node] for node in way[:count]]
    np.testing.assert_array_equal(cache.lengths, old_lengths + num_accepted)
    assert not cache.pending_keys
    for old, new in zip(before, _slots(cache)):
      for row in range(3):
        untouched = slice(None) if num_accepted[row] == 0 else slice(0, old_lengths[row])
        np.testing.assert_array_equal(old[row, untouched], new[row, untouched])
  assert {0, 1, 2, 3} <= seen
  assert len({len(text) for text in texts}) > 1


def _numbered_cache(lengths, size, num_pending):
  """A cache whose entries say where they come from: slot s holds s, pending entry m holds 100 + m."""
  lengths = jnp.asarray(lengths, jnp.int32)
  slots = jnp.broadcast_to(jnp.arange(size, dtype=jnp.float32), (lengths.shape[0], 1, 1, size))
  pending = jnp.broadcast_to(100 + jnp.arange(num_pending, dtype=jnp.float32), (lengths.shape[0], 1, 1, num_pending))
  swap = lambda x: jnp.swapaxes(x, 2, 3)  # noqa: E731
  return KVCache((slots,), (swap(slots),), lengths, (pending,), (swap(pending),), jnp.asarray(num_pending, jnp.int32))


def test_commit_gathers_the_path():
  cache = _numbered_cache([2, 0, 5, 6], 6, 4).commit(
    jnp.array([[0, 3, 1], [2, 2, 0], [3, 1, 0], [1, 2, 3]]), jnp.array([3, 0, 3, 2])
  )
  expected = np.array(
    [
      [0, 1, 100, 103, 101, 5],
      [0, 1, 2, 3, 4, 5],  # nothing accepted: untouched
      [0, 1, 2, 3, 4, 103],  # one fits, the others are dropped
      [0, 1, 2, 3, 4, 5],  # full: untouched
    ]
  )
  np.testing.assert_array_equal(cache.keys[0][:, 0, 0], expected)
  np.testing.assert_array_equal(cache.values[0][:, 0, :, 0], expected)
  np.testing.assert_array_equal(cache.lengths, [5, 0, 6, 6])
  assert (cache.pending_keys, cache.pending_values, int(cache.num_pending)) == ((), (), 0)


@pytest.mark.parametrize('num_in', [64, 60])  # only 64 inputs make eight parts
def test_one_bfloat16_row_is_one_of_two(num_in):
  keys = jax.random.split(jax.random.key(0))
  x = jax.random.normal(keys[0], (2, num_in), jnp.bfloat16)
  kernel = jax.random.normal(keys[1], (num_in, 48), jnp.bfloat16)
  alone, together = matmul(x[:1], kernel), matmul(x, kernel)[:1]
  assert alone.dtype == together.dtype == jnp.float32
  assert alone.shape == (1, 48)
  # Products of bfloat16 are exact in float32; what is left is the order of a sum of 64 terms of size 1.
  np.testing.assert_allclose(alone, together, atol=1e-4)
  exact = np.asarray(x[:1], np.float64) @ np.asarray(kernel, np.float64)
  np.testing.assert_allclose(alone, exact, atol=1e-4)
  assert matmul(x[None, :1], kernel).shape == (1, 1, 48)


def test_bfloat16_follows_float32(target):
  """A bfloat16 model is the float32 one up to its rounding: 8 bits, amplified through two layers."""
  config = dataclasses.replace(causal_lm.config_of(target), dtype='bfloat16')
  model = causal_lm.causal_lm(target.params, config)
  assert model.params['embedding'].dtype == jnp.bfloat16
  rng = np.random.default_rng(2)
  prompts, lengths, tokens = rng.integers(0, 17, (3, 8)), np.array([8, 3, 0]), rng.integers(0, 17, (3, 7))
  cache = _prefill(model, prompts, lengths)
  assert cache.keys[0].dtype == jnp.bfloat16
  narrow, _ = _forward(model, tokens, lengths, cache)
  wide, _ = _forward(target, tokens, lengths, _prefill(target, prompts, lengths))
  assert narrow.dtype == jnp.float32
  error = np.asarray(narrow - wide)
  assert np.sqrt(np.mean(error**2)) < 0.1 * np.sqrt(np.mean(np.asarray(wide) ** 2))


@pytest.mark.parametrize(('dtype', 'tolerance'), [('float32', TOLERANCE), ('bfloat16', 0.05)])
@pytest.mark.parametrize(
  'num_tokens', slow_but([13], [1, 2, 12, 13, 40])
)  # products have forms of their own for few rows
@pytest.mark.usefixtures('products_of_xla')
def test_a_model_for_decoding_has_the_same_logits(target, num_tokens, dtype, tolerance, monkeypatch):
  monkeypatch.setattr(products, 'LARGE', 1)
  monkeypatch.setattr(products, 'multiplies_bfloat16', lambda: True)
  config = dataclasses.replace(causal_lm.config_of(target), dtype=dtype)
  plain = causal_lm.causal_lm(target.params, config)
  fast = plain.for_decoding()
  tokens = jax.random.randint(jax.random.key(0), (1, num_tokens), 0, 17)
  positions, mask = jnp.arange(num_tokens)[None], jnp.tril(jnp.ones((num_tokens, num_tokens), bool))

  def logits(model):
    return model.apply(tokens, positions, mask, model.init_cache_fn(1, 64)).logits

  np.testing.assert_allclose(logits(fast), logits(plain), atol=tolerance)
  # They are computed by the parameters in the other form.
  kernel = fast.params['layer_0']['mlp']['up']['kernel']
  np.testing.assert_array_equal(kernel.out_in, plain.params['layer_0']['mlp']['up']['kernel'].T)
  halved = jax.tree.map(lambda x: x / 2, {'layer_0': fast.params['layer_0']})
  assert np.abs(logits(dataclasses.replace(fast, params=fast.params | halved)) - logits(plain)).max() > 2 * tolerance


def test_a_model_for_decoding_is_so_already(target, monkeypatch):
  monkeypatch.setattr(products, 'LARGE', 1)
  fast = target.for_decoding()
  assert fast.for_decoding() is fast
  with pytest.raises(ValueError, match='not a model made by causal_lm'):
    causal_lm.config_of(table.table_model(jnp.zeros((3, 3))))


def test_model_is_a_pytree_of_its_params(target):
  leaves, structure = jax.tree.flatten(target)
  assert len(leaves) == len(jax.tree.leaves(target.params))
  assert all(a is b for a, b in zip(leaves, jax.tree.leaves(target.params)))
  same = causal_lm.causal_lm(jax.tree.map(lambda x: x + 1, target.params), causal_lm.config_of(target))
  assert jax.tree.structure(same) == structure
  traces = []
  count = jax.jit(lambda model: traces.append(1))
  count(target)
  count(same)
  assert len(traces) == 1  # equal models share compiled programs
  doubled = jax.tree.map(lambda x: 2 * x, target)
  assert doubled.apply_fn is target.apply_fn
  assert doubled.vocab_size == 17


def test_features_are_those_of_their_layers(target):
  """Layer 0 is what is embedded, the last one what the output head reads; nobody who does not ask gets any."""
  tokens = jnp.array([[1, 2, 3], [4, 5, 6]])
  call = tokens, jnp.broadcast_to(jnp.arange(3), (2, 3)), jnp.tril(jnp.ones((3, 3), bool)), target.init_cache_fn(2, 8)
  plain, found = target.apply(*call), target.with_features((0, 1, 2, -1)).apply(*call)
  assert plain.features is None
  assert found.features.shape == (2, 3, 4, 32)
  np.testing.assert_array_equal(found.logits, plain.logits)
  np.testing.assert_array_equal(found.features[:, :, 0], target.embed_fn(target.params, tokens))
  np.testing.assert_array_equal(target.unembed_fn(target.params, found.features[:, :, -1]), plain.logits)
  # What enters block 1 is what a network of block 0 alone gives to its final norm.
  one = {name: value for name, value in target.params.items() if name != 'layer_1'}
  config = dataclasses.replace(causal_lm.config_of(target), num_layers=1)
  alone = causal_lm.causal_lm(one, config).with_features((1,))
  cache = alone.init_cache_fn(2, 8)
  np.testing.assert_array_equal(alone.apply(*call[:3], cache).features[:, :, 0], found.features[:, :, 1])
  with pytest.raises(ValueError, match='feature layers must be from 0 to 3'):
    target.with_features((4,))
  with pytest.raises(ValueError, match='features_fn is None'):
    table.table_model(jnp.zeros((3, 3))).with_features((0,))


@pytest.mark.parametrize('chunk_size', [1, 3, 4, 8])
def test_prompts_in_chunks_are_prompts_at_once(target, chunk_size):
  model = target.with_features((0, -1))
  prompts, lengths = np.random.default_rng(7).integers(0, 17, (3, 8)), np.array([8, 3, 0])
  prefill = jax.jit(Model.prefill, static_argnames='chunk_size')
  whole, features = prefill(model, prompts, lengths, model.init_cache_fn(3, 20), chunk_size=8)
  cache, found = prefill(model, prompts, lengths, model.init_cache_fn(3, 20), chunk_size=chunk_size)
  np.testing.assert_array_equal(cache.lengths, lengths)
  for row, length in enumerate(lengths):
    for a, b in zip(_slots(whole), _slots(cache)):
      np.testing.assert_allclose(a[row, :length], b[row, :length], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(found[row, :length], features[row, :length], atol=TOLERANCE, rtol=0)


def test_a_prefill_ends_with_the_longest_prompt(target):
  prompts, calls = np.zeros((2, 12), int), []

  def apply(*arguments):
    jax.debug.callback(lambda: calls.append(1))
    return target.apply_fn(*arguments)

  model = dataclasses.replace(target, apply_fn=apply)
  init = model.init_cache_fn
  prefill = jax.jit(lambda lengths: model.prefill(prompts, lengths, init(2, 16), chunk_size=2)[0].lengths)
  for lengths, num_calls in (((5, 1), 3), ((2, 2), 1), ((0, 0), 0), ((12, 3), 6)):
    calls.clear()
    np.testing.assert_array_equal(prefill(np.array(lengths)), lengths)
    jax.effects_barrier()
    assert len(calls) == num_calls


def test_memory_of_a_prefill_is_linear_in_the_prompt(target):
  def temporaries(num_tokens):
    def prefill(model, prompts, lengths):
      return model.prefill(prompts, lengths, model.init_cache_fn(1, num_tokens))[0]

    shapes = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    return jax.jit(prefill).lower(target, *shapes).compile().memory_analysis().temp_size_in_bytes

  assert temporaries(8192) < 2.2 * temporaries(4096)


@pytest.mark.parametrize(('num_layers', 'num_heads'), [(1, 1), (3, 4)])
def test_num_params_is_exact(num_layers, num_heads):
  config = lm1b_config(19, 24, num_layers, num_heads, mlp_dim=40, context_length=8)
  params = jax.eval_shape(lambda key: transformer.init_params(key, config), jax.random.key(0))
  assert config.num_params == sum(x.size for x in jax.tree.leaves(params))


def test_wrong_params_are_refused(target):
  config = causal_lm.config_of(target)
  without = {k: v for k, v in target.params.items() if k != 'final_norm'}
  for params, change in ((target.params, {'vocab_size': 18}), (target.params, {'num_layers': 3}), (without, {})):
    with pytest.raises(ValueError, match='do not fit the configuration'):
      causal_lm.causal_lm(params, dataclasses.replace(config, **change))


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'vocab_size': 0}, 'vocab_size must be a positive integer'),
    ({'num_layers': -1}, 'num_layers must be a positive integer'),
    ({'mlp_dim': 2.5}, 'mlp_dim must be a positive integer'),
    ({'num_heads': 3}, 'even multiple'),
    ({'embed_dim': 6}, 'even multiple'),  # heads of 3: rotary positions pair their halves
    ({'dtype': 'float16'}, 'dtype must be'),
  ],
)
def test_config_is_validated(change, message):
  sizes = {'vocab_size': 17, 'embed_dim': 32, 'num_layers': 2, 'num_heads': 2, 'mlp_dim': 64, 'context_length': 8}
  with pytest.raises(ValueError, match=message):
    lm1b_config(**{**sizes, **change})


def test_table_model():
  log_probs = jax.random.normal(jax.random.key(0), (5, 5))
  model = table.table_model(log_probs)
  cache, _ = model.prefill(jnp.array([[1, 2, 3], [4, 0, 0]]), jnp.array([3, 1]), model.init_cache_fn(2, 9))
  output = model.apply(jnp.array([[3, 1], [0, 4]]), jnp.zeros((2, 2), jnp.int32), jnp.eye(2, dtype=bool), cache)
  np.testing.assert_array_equal(output.logits, log_probs[jnp.array([[3, 1], [0, 4]])])
  np.testing.assert_array_equal(model.commit_fn(output.cache, None, jnp.array([2, 0])), [5, 1])
  # One table per position; the last one holds for all that follow.
  log_probs = jax.random.normal(jax.random.key(0), (3, 5, 5))
  model = table.table_model(log_probs)
  call = jnp.array([[3, 1, 2]]), jnp.array([[0, 2, 7]]), jnp.eye(3, dtype=bool), model.init_cache_fn(1, 9)
  expected = [log_probs[0, 3], log_probs[2, 1], log_probs[2, 2]]
  np.testing.assert_array_equal(model.apply(*call).logits[0], expected)
  for shape, dtype, message in (
    ((3, 4), 'float32', r'\[V, V\]'),
    ((0, 3, 3), 'float32', r'\[T, V, V\]'),
    ((2, 3, 4), 'float32', r'\[T, V, V\]'),
    ((3,), 'float32', r'\[V, V\]'),
    ((3, 3), 'bfloat16', 'float32 or float64'),
    ((3, 3), 'int32', 'float32 or float64'),
  ):
    with pytest.raises(ValueError, match=message):
      table.table_model(jnp.zeros(shape, dtype))


# Pairs whose vocabularies are padded to different sizes: one size, and still the target's distribution.
_PROBS = np.random.default_rng(0).dirichlet(np.ones(5), 5)


def _draft(vocab_size):
  return table.table_model(np.log(np.random.default_rng(1).dirichlet(np.ones(vocab_size), vocab_size)).astype('f4'))


@pytest.mark.parametrize('own_size', [slow(3), 7])
def test_the_output_has_the_distribution_of_the_target(own_size):
  """The draft never guesses some tokens that the target emits and that it then reads; or knows more than can occur."""
  target = table.table_model(jnp.log(_PROBS.astype('f4')))
  draft = _draft(own_size).with_vocab_size(5)
  counts = sample_counts(
    jax.random.key(own_size), target, draft, [2],
    method='speculative', tree=TokenTree.chains(1, 1),
    num_tokens=2, num_samples=20_000, batch_size=20_000,
  )  # fmt: skip
  law = _PROBS[2][:, None] * _PROBS
  assert chi_square(counts.reshape(-1), law.reshape(-1)).p_value > 1e-4
  if own_size < 5:
    assert counts[own_size:].sum() > 1000


@jax.jit
def _outputs(model, tokens):
  """Logits, hidden states, the logits that the output head makes of them, and what enters block 0."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
  output = model.with_features((0, -1)).apply(tokens, positions, causal, model.init_cache_fn(len(tokens), 8))
  unembedded = model.unembed_fn(model.params, output.features[:, :, 1])
  return output.logits, output.features, unembedded, model.embed_fn(model.params, tokens)


@pytest.mark.parametrize('added', [3, -2])
def test_all_functions_have_the_new_size(target, added):
  size = target.vocab_size
  model = target.with_vocab_size(size + added)
  assert model.vocab_size == size + added
  assert target.with_vocab_size(size + added).apply_fn is model.apply_fn  # equal models share programs
  tokens = jnp.array([[3, 0, 14, 1]])
  plain, kept = _outputs(target, tokens), min(size, size + added)
  read = tokens.at[0, 1].set(size + added - 1) if added > 0 else tokens  # an id that the model lacks is read as 0
  logits, features, unembedded, embedded = _outputs(model, read)
  for found in (logits, unembedded):
    assert found.shape == (*tokens.shape, size + added)
    np.testing.assert_allclose(found[..., :kept], plain[0][..., :kept], atol=1e-5)
    assert (np.asarray(found[..., kept:]) == -np.inf).all()
    assert (np.asarray(jax.nn.softmax(found))[..., kept:] == 0).all()
  np.testing.assert_allclose(features, plain[1], atol=1e-5)
  np.testing.assert_array_equal(embedded, plain[3])
  assert target.with_vocab_size(size) is target
  with pytest.raises(ValueError, match='vocab_size must be a positive int, got 0'):
    target.with_vocab_size(0)
