"""Fixtures shared by the tests: a tiny pair of transformers and a forward pass that knows no cache."""

import dataclasses
import importlib.metadata
import os

# Before JAX is imported, and for commands that tests run: nothing is left in the cache of whoever runs them (commands
# get one of their own below), and XLA compiles for CPUs with its older code for fusions, where it knows this flag: in
# half the time.
os.environ['JAX_COMPILATION_CACHE_DIR'] = ''
if (0, 8) <= tuple(map(int, importlib.metadata.version('jaxlib').split('.')[:2])) < (0, 11):
  os.environ['XLA_FLAGS'] = f'--xla_cpu_use_fusion_emitters=false {os.environ.get("XLA_FLAGS", "")}'

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.models import transformer

# Here, since pytest looks for the profile of its flag before it collects tests.
hypothesis.settings.register_profile('long')

TEXT_SIZE = 32
CONFIG = transformer.TransformerConfig(
  vocab_size=17, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, max_length=64
)


@pytest.fixture(autouse=True, scope='session')
def _programs_of_commands(tmp_path_factory):
  """Commands that tests run compile nothing that one before them has."""
  os.environ['JAX_COMPILATION_CACHE_DIR'] = str(tmp_path_factory.mktemp('programs'))
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.1'
  os.environ['JAX_COMPILATION_CACHE_MAX_SIZE'] = str(2**30)  # with a limit JAX locks what it writes


@pytest.fixture
def own_programs(tmp_path, monkeypatch):
  """For commands that are killed: what they leave half-written is no other test's."""
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'programs'))


@pytest.fixture(autouse=True, scope='module')
def _forget_programs():
  """Every compiled program maps memory, and Linux allows a process 65,530 maps: a whole run in one would crash."""
  yield
  jax.clear_caches()


@pytest.fixture
def quickly():
  """For programs that run for milliseconds: to compile them well would take most of a test's time."""
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', before)


@pytest.fixture
def highest():
  """Full float32 products, for tests of equality."""
  with jax.default_matmul_precision('highest'):
    yield


@pytest.fixture(scope='session')
def target():
  """A transformer of 2 layers, width 32, vocabulary 17."""
  params = jax.jit(transformer.init_params, static_argnames='config')(jax.random.key(0), config=CONFIG)
  # Fresh blocks add little to the embedding and every token would predict itself: with larger ones the context counts.
  params = {k: jax.tree.map(lambda x: 3 * x, v) if k.startswith('layer') else v for k, v in params.items()}
  return transformer.transformer_model(params, CONFIG)


@pytest.fixture(scope='session')
def draft(target):
  """The target without its second layer: laws that overlap by 0.7, the same likeliest token a third of the time."""
  params = {k: v for k, v in target.params.items() if k != 'layer_1'}
  return transformer.transformer_model(params, dataclasses.replace(CONFIG, num_layers=1))


@pytest.fixture(scope='session')
def uncached_logits():
  """`(model, texts) -> [len(texts), V]`: logits after each text (ids), by a causal forward of the whole text."""

  def forward(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    network = transformer.Transformer(transformer.config_of(model))
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    return network.apply({'params': model.params}, tokens, positions, causal)[0]

  forward = jax.jit(forward)

  def uncached_logits(model, texts):
    lengths = np.array([len(text) for text in texts])
    assert lengths.max() <= TEXT_SIZE
    rows = -len(texts) % 8 + len(texts)  # few shapes, few compilations
    tokens = np.zeros((rows, TEXT_SIZE), np.int32)
    for row, text in zip(tokens, texts):
      row[: len(text)] = text
    return np.asarray(forward(model, tokens))[np.arange(len(texts)), lengths - 1]

  return uncached_logits
