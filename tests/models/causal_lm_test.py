"""The decoder of public checkpoints: whatever is cached, logits are those of a plain forward of the text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hub_specs import SPECS

from spectr_jax.io.hub.families import FAMILIES, OWN, read_spec
from spectr_jax.kernels import matrices, native, products
from spectr_jax.kernels.dispatch import tracing_for
from spectr_jax.kernels.matrices import PackedKernel
from spectr_jax.model import Model
from spectr_jax.models import table
from spectr_jax.models.causal_lm import causal_lm, config_of, hidden_states, linears, mlp
from spectr_jax.models.causal_lm_config import CausalLMConfig, Rope
from spectr_jax.models.param_shapes import init_params
from spectr_jax.tree import TokenTree
from tests.slow import slow, slow_but

pytestmark = pytest.mark.usefixtures('highest')

TREE = TokenTree((0, 0, 1, 1, 2, 4))  # depths 0, 1, 1, 2, 2, 2, 3
PATH = (0, 1, 4, 6)
LENGTHS = np.array([9, 6, 0])
TOLERANCE = 1e-4  # of logits near 1
_QUICK = 'gemma3', 'gpt_neox', 'gpt2'  # together they have all that distinguishes the others
LLAMA = read_spec(SPECS['llama'])[1]


_apply = jax.jit(Model.apply)


@functools.cache
def _model(name):
  config = read_spec(SPECS[name])[1]
  params = init_params(jax.random.key(0), config)
  scale = 0.5 if config.query_scale == 1 else 2  # large scores would amplify rounding
  return causal_lm(jax.tree.map(lambda x: scale * x if x.ndim == 2 else x, params), config)


def _texts():
  """Prompts, the tokens of a tree after them, and the text of every row and node, padded, with its length."""
  rng = np.random.default_rng(0)
  prompts, tokens = rng.integers(0, 32, (3, 9)), rng.integers(0, 32, (3, 7))
  texts = [
    [*prompt[:length], *(row[node] for node in (0, *path) if node >= 0)]
    for prompt, length, row in zip(prompts.tolist(), LENGTHS, tokens.tolist())
    for path in TREE.paths.tolist()
  ]
  padded = np.array([text + [0] * (13 - len(text)) for text in texts])
  return prompts, tokens, padded, np.array([len(text) for text in texts])


@jax.jit
def _logits(model, prompts, tokens, texts):
  """Logits of whole texts, of a tree after chunks of the prompts, and of one path of it token by token."""
  positions = jnp.broadcast_to(jnp.arange(texts.shape[1]), texts.shape)
  causal = jnp.tril(jnp.ones((texts.shape[1],) * 2, bool))
  whole = model.apply(texts, positions, causal, model.init_cache_fn(len(texts), 1)).logits
  cache, _ = model.prefill(prompts, LENGTHS, model.init_cache_fn(3, 16), chunk_size=4)
  mask = jnp.broadcast_to(jnp.asarray(TREE.ancestors), (3, 7, 7))
  tree = model.apply(tokens, LENGTHS[:, None] + TREE.depths, mask, cache).logits

  def step(cache, depth_token):
    depth, token = depth_token
    output = model.apply(token[:, None], LENGTHS[:, None] + depth, jnp.ones((1, 1), bool), cache)
    return output.cache.commit(jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32)), output.logits[:, 0]

  path = jnp.asarray(PATH)
  _, steps = jax.lax.scan(step, cache, (jnp.arange(len(PATH)), tokens[:, path].T))
  return whole, tree, steps


def _plain(model, tokens):
  """A call on whole texts from their first tokens on, with an empty cache."""
  causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return _apply(model, tokens, positions, causal, model.init_cache_fn(len(tokens), 16))


@pytest.mark.parametrize('name', slow_but(_QUICK, SPECS))
def test_cached_logits_are_those_of_the_whole_text(name):
  prompts, tokens, texts, lengths = _texts()
  whole, tree, steps = _logits(_model(name), prompts, tokens, texts)
  assert whole.dtype == jnp.float32
  expected = np.asarray(whole)[np.arange(len(texts)), lengths - 1].reshape(3, 7, -1)
  assert expected.std() > 0.1
  np.testing.assert_allclose(tree, expected, atol=TOLERANCE, rtol=0)
  np.testing.assert_allclose(steps, expected[:, list(PATH)].swapaxes(0, 1), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize('name', slow_but(_QUICK, SPECS))
def test_hidden_states_of_whole_texts(name):
  """Without a cache, and with a gradient: of what follows none, by its own token some."""
  model, texts = _model(name), _texts()[2]
  config = config_of(model)

  @jax.jit
  def run(params):
    embedding = params['embedding']
    hidden, pull = jax.vjp(lambda x: hidden_states({**params, 'embedding': x}, config, texts), embedding)
    place = jnp.zeros_like(hidden).at[0, 5].set(1.0)
    return model.unembed_fn(params, hidden), pull(place)[0]

  logits, gradient = run(model.params)
  np.testing.assert_allclose(logits, _plain(model, texts).logits, atol=TOLERANCE, rtol=0)
  moved = np.abs(gradient).max(1) > 0
  assert moved[texts[0, 5]]
  assert set(np.flatnonzero(moved)) <= set(texts[0, :6])


def test_every_family_is_tested():
  assert {spec['architectures'][0] for spec in SPECS.values()} == set(FAMILIES) - {OWN}


def test_a_window_hides_what_is_before_it():
  """The logits of the last token depend on no token that all windows together cannot reach, and on others."""
  model, tokens = _model('mistral'), jnp.arange(9)[None]  # two layers of windows of 4: six tokens back
  texts = tokens, tokens.at[0, :2].set(20), tokens.at[0, 2].set(20)
  logits, same, other = (_plain(model, text).logits[0, -1] for text in texts)
  np.testing.assert_array_equal(same, logits)
  assert np.abs(other - logits).max() > 1e-4


def test_copies_of_heads_change_nothing():
  config, params = LLAMA, _model('llama').params
  copied = dataclasses.replace(config, kv_copies=2)

  def repeat(path, x):
    if path[-2:-1] and path[-2].key in 'kv':
      return jnp.repeat(x.reshape(-1, 2, 4), 2, axis=1).reshape(x.shape[0], -1)
    return x

  wide = causal_lm(jax.tree_util.tree_map_with_path(repeat, params), copied)
  assert wide.init_cache_fn(1, 4).keys[0].shape[1] == 4
  assert copied.num_params == config.num_params
  copied_logits, expected = (_plain(model, jnp.arange(5)[None]).logits for model in (wide, _model('llama')))
  np.testing.assert_allclose(copied_logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize('name', ['gemma2', 'gpt2'])
def test_what_drafters_share(name):
  model, tokens = _model(name), jnp.array([[1, 2, 3]])
  output = _plain(model.with_features((0, -1)), tokens)
  np.testing.assert_array_equal(model.unembed_fn(model.params, output.features[:, :, 1]), output.logits)
  if name == 'gpt2':  # learned positions are part of what is embedded
    assert model.embed_fn is None
  else:
    np.testing.assert_array_equal(model.embed_fn(model.params, tokens), output.features[:, :, 0])
  with pytest.raises(ValueError, match='feature layers must be from 0 to 3'):
    model.with_features((4,))


def test_parameters_are_of_one_dtype_but_for_gains():
  model = causal_lm(_model('llama').params, dataclasses.replace(LLAMA, dtype='bfloat16'))
  for keys, leaf in jax.tree_util.tree_leaves_with_path(model.params):
    assert leaf.dtype == ('float32' if keys[-1].key == 'gain' else 'bfloat16')
  output = _plain(model, jnp.array([[1]]))
  assert output.logits.dtype == jnp.float32
  assert output.cache.keys[0].dtype == jnp.bfloat16


# Products in C++, and those of XLA on processors with units for bfloat16 products and on others.
_FORMS = [('float32', 'native'), ('float32', 'xla'), *(('bfloat16', form) for form in ('native', 'xla', 'units'))]
_FAST = ('llama', 'float32', 'native'), ('gpt2', 'bfloat16', 'units')


@pytest.mark.parametrize(
  ('name', 'dtype', 'form'),
  [  # of models that are tied and not, with biases, without gates
    each if each in _FAST else slow(*each)
    for each in ((name, *form) for name in ('llama', 'gemma2', 'qwen2', 'gpt2') for form in _FORMS)
  ],
)
def test_a_model_for_decoding_has_the_same_logits(name, dtype, form, monkeypatch):
  monkeypatch.setattr(products, 'LARGE', 1)
  monkeypatch.setattr(products, 'multiplies_bfloat16', lambda: form == 'units')
  if form != 'native':
    monkeypatch.setattr(native, 'form', lambda: None)
  config = dataclasses.replace(read_spec(SPECS[name])[1], dtype=dtype)
  model = causal_lm(_model(name).params, config)
  fast = model.for_decoding()
  assert fast.for_decoding() is fast
  for kernel in (fast.params['layer_0']['attention']['out']['kernel'], fast.params.get('unembedding')):
    if native.form() is not None:
      assert kernel is None or isinstance(kernel, PackedKernel)
    else:
      assert kernel is None or (kernel.in_out is not None) == (dtype == 'bfloat16' and form == 'xla')
  assert 'qkv' in fast.params['layer_0']['attention']
  assert 'q' not in fast.params['layer_0']['attention']
  assert ('gate_up' in fast.params['layer_0']['mlp']) == config.is_gated
  if dtype == 'bfloat16':
    assert fast.params['embedding'].dtype == jnp.uint16  # no program converts the whole embedding
  for num_tokens in (1, 3, 14):
    tokens = jnp.arange(num_tokens)[None]
    if model.embed_fn is not None:
      np.testing.assert_array_equal(fast.embed_fn(fast.params, tokens), model.embed_fn(model.params, tokens))
    tolerance = TOLERANCE if dtype == 'float32' else 0.05
    np.testing.assert_allclose(_plain(fast, tokens).logits, _plain(model, tokens).logits, atol=tolerance)


def test_activations_are_rounded_once():
  config = dataclasses.replace(LLAMA, dtype='bfloat16')
  x = jnp.linspace(-4, 4, 64).reshape(1, 64, 1).astype('bfloat16')
  one = {'kernel': jnp.ones((1, 1), 'bfloat16')}
  outputs = jax.jit(lambda x: mlp({'gate': one, 'up': one, 'down': one}, config, x))(x)
  unit = jax.nn.silu(np.float32(x)).astype('bfloat16')
  np.testing.assert_array_equal(outputs, (unit * x).astype('bfloat16'))


def test_a_float32_cache_holds_the_keys_of_a_bfloat16_model():
  made = {}
  for cache_dtype in (None, 'float32'):
    config = dataclasses.replace(LLAMA, dtype='bfloat16', cache_dtype=cache_dtype)
    model = causal_lm(_model('llama').params, config)
    cache, _ = jax.jit(Model.prefill)(model, jnp.array([[1, 2, 3]]), jnp.array([3]), model.init_cache_fn(1, 4))
    made[cache_dtype] = (
      cache,
      _apply(model, jnp.array([[4]]), jnp.array([[3]]), jnp.ones((1, 1), bool), cache).logits,
    )
  (narrow, narrow_logits), (wide, wide_logits) = made.values()
  assert (narrow.keys[0].dtype, wide.keys[0].dtype) == (jnp.bfloat16, jnp.float32)
  np.testing.assert_array_equal(wide.keys[0], narrow.keys[0].astype(jnp.float32))
  np.testing.assert_allclose(wide_logits, narrow_logits, atol=0.02 * np.abs(narrow_logits).max())


@pytest.mark.slow
@pytest.mark.parametrize('cache_dtype', ['float32', 'bfloat16'])
def test_memory_of_a_prefill_is_linear_in_the_prompt(cache_dtype):
  """With the heads of SmolLM2-135M, nine that read three, whose scores take the most memory."""
  config = CausalLMConfig(
    vocab_size=64, embed_dim=576, num_layers=2, num_heads=9, num_kv_heads=3, head_dim=64, mlp_dim=64,
    context_length=8192, dtype=cache_dtype, cache_dtype=cache_dtype, rope=Rope((1.0,)), is_tied=True,
  )  # fmt: skip
  params = init_params(jax.random.key(0), config)

  def temporaries(num_tokens):
    def prefill(params, tokens):
      model = causal_lm(params, config)
      return model.prefill(tokens, jnp.array([num_tokens]), model.init_cache_fn(1, num_tokens))[0]

    tokens = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32)
    return jax.jit(prefill).lower(params, tokens).compile().memory_analysis().temp_size_in_bytes

  assert temporaries(8192) < 2.2 * temporaries(4096)


def test_equal_configurations_share_programs():
  again = causal_lm(_model('llama').params, read_spec(SPECS['llama'])[1])
  assert jax.tree.structure(again) == jax.tree.structure(_model('llama'))
  assert config_of(again) == LLAMA
  with pytest.raises(ValueError, match='not a model made by causal_lm'):
    config_of(table.table_model(jnp.zeros((3, 3))))


def test_wrong_parameters_are_refused():
  params = _model('llama').params
  without = {name: value for name, value in params.items() if name != 'final_norm'}
  for own, config, message in (
    (params, dataclasses.replace(LLAMA, vocab_size=33), r'unembedding must be \(16, 33\), got|embedding must be \(33'),
    (params, dataclasses.replace(LLAMA, num_layers=1), 'layer_1/attention/k/kernel must be absent'),
    (without, LLAMA, 'final_norm/gain must be .* got nothing'),
  ):
    with pytest.raises(ValueError, match=message):
      causal_lm(own, config)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'vocab_size': 0}, 'vocab_size must be a positive integer'),
    ({'vocab_size': True}, 'vocab_size must be a positive integer'),
    ({'context_length': 2**31}, 'context_length must be at most 2147483647'),
    ({'norm_epsilon': -1.0}, 'norm_epsilon must be finite and at least 0'),
    ({'query_scale': float('inf')}, 'query_scale must be finite and above 0'),
    ({'attention_soft_cap': 0.0}, 'attention_soft_cap must be finite and above 0'),
    ({'logit_soft_cap': float('nan')}, 'logit_soft_cap must be finite and above 0'),
    ({'windows': (0, None)}, 'windows must be positive integers or None'),
    ({'windows': (2.0, None)}, 'windows must be positive integers or None'),
    ({'num_kv_heads': 3}, 'must be a multiple of the 3 heads'),
    ({'kv_copies': 3}, 'must be a multiple of the 6 heads'),
    ({'dtype': 'float16'}, 'dtype must be one of'),
    ({'activation': 'tanh'}, 'activation must be one of'),
    ({'norm': 'batch'}, 'norm must be one of'),
    ({'windows': (4,)}, 'all 2 layers or none'),
    ({'rope': Rope((1.0,) * 5)}, '5 rotary frequencies'),
  ],
)
def test_config_is_validated(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(LLAMA, **change)


def test_rotary_numbers_are_validated():
  for frequencies in ((float('inf'),), (1.0, float('nan'))):
    with pytest.raises(ValueError, match='rotary frequencies must be finite'):
      Rope(frequencies)
  for magnitude in (0.0, -1.0, float('inf'), float('nan')):
    with pytest.raises(ValueError, match='magnitude of rotary positions must be finite and above 0'):
      Rope((1.0,), magnitude)


@pytest.mark.parametrize('num_devices', [slow(1), 2])
def test_kernels_that_tpus_join(monkeypatch, num_devices):
  """Columns of two devices stand side by side; biases with them."""
  monkeypatch.setattr(matrices, 'automatic_axes', lambda: {'model': num_devices})
  keys, widths = jax.random.split(jax.random.key(3), 7), (8, 4, 4)
  params = {
    name: {'kernel': jax.random.normal(kernel_key, (6, width)), 'bias': jax.random.normal(bias_key, (width,))}
    for name, width, kernel_key, bias_key in zip('qkv', widths, keys[:3], keys[3:6])
  }
  x = jax.random.normal(keys[6], (2, 3, 6))
  apart = linears(params, ('q', 'k', 'v'), x, widths)
  with tracing_for('tpu'):
    joined, num_parts = matrices.joined_in_loop(list(params.values()), 3)
    products = linears(params, ('q', 'k', 'v'), x, widths)
  assert num_parts == num_devices
  assert joined['kernel'].shape == (6, 16)
  for product, expected in zip(products, apart, strict=True):
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-6)
  with tracing_for('tpu'):
    assert matrices.joined_in_loop(list(params.values()), 128) == (None, 1)  # a chunk of a prompt
