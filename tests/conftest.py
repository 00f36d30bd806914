"""Fixtures shared by the tests: a tiny pair of transformers and a forward pass that knows no cache."""

import collections
import dataclasses
import gc
import importlib.metadata
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_budget import LoopBudget

from spectr_jax.io import compilation_cache
from spectr_jax.kernels import native
from spectr_jax.models import causal_lm, transformer

TEXT_SIZE = 32
CONFIG = causal_lm.lm1b_config(vocab_size=17, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, context_length=64)


def pytest_configure(config):
  """Prepares this process, the workers that it starts, and the commands that tests run.

  They share one directory of compiled programs, also with the next run, until `--cache-clear`. Most programs of tests
  run for milliseconds, so optimizing them would take most of a test's time.
  """
  if 'not slow' in config.option.markexpr:
    budget = LoopBudget()
    config.pluginmanager.register(budget)
    jax.monitoring.register_event_duration_secs_listener(budget.note)
  if 'PYTEST_XDIST_WORKER' in os.environ:
    return
  options = {
    'jax_compilation_cache_max_size': 2**30,  # with a limit JAX locks what it writes
    'jax_persistent_cache_min_compile_time_secs': 0.05,
    'jax_persistent_cache_enable_xla_caches': 'none',  # else programs are found in the same directory only
    'jax_traceback_in_locations_limit': 0,  # writing down where each operation was called takes a tenth of a run
  }
  if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    options['jax_compilation_cache_dir'] = _directory_of_programs(config)
  if config.option.markexpr != 'tpu':  # these tests measure programs as users compile them
    options['jax_disable_most_optimizations'] = True
    # XLA takes a value that does not begin with -- for the name of a file, a blank one as well.
    os.environ['XLA_FLAGS'] = f'{_xla_flags()} {os.environ.get("XLA_FLAGS", "")}'.strip()
  for name, value in options.items():
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)


def _directory_of_programs(config):
  """A directory beside pytest's other caches, of this kind of CPU; one of this run alone with `-p no:cacheprovider`."""
  if hasattr(config, 'cache'):
    return str(config.cache.mkdir(f'programs_{compilation_cache._machine()}'))
  directory = tempfile.TemporaryDirectory(prefix='spectr_jax_programs_', ignore_cleanup_errors=True)
  config.add_cleanup(directory.cleanup)
  return directory.name


def _xla_flags():
  """Flags that make compiling cheaper, where XLA knows them.

  Its older code for fusions compiles in half the time. Compiling a program in parts gains nothing while the tests keep
  all cores busy. Moving code out of loops takes a sixth of a compilation.
  """
  is_known = (0, 8) <= tuple(map(int, importlib.metadata.version('jaxlib').split('.')[:2])) < (0, 11)
  fusions, parts = '--xla_cpu_use_fusion_emitters=false', '--xla_cpu_parallel_codegen_split_count=1'
  return f'{fusions} {parts} --xla_disable_hlo_passes=while-loop-invariant-code-motion' if is_known else ''


# Their slow tests enumerate and sample: they run for far longer than an optimization takes.
_RUN_FOR_LONG = (
  'draft/drafters_test.py', 'draft/lookup_test.py', 'lossless_test.py',
  'theory/stateless_test.py', 'verifiers/draws_test.py', 'verifiers/given_candidates_test.py',
  'verifiers/grown_trees_test.py', 'verifiers/programs_test.py',
)  # fmt: skip


def pytest_addoption(parser):
  parser.addoption('--turn', help='I/N: of the tests of each file that are selected, run every N-th, in turn I')
  parser.addoption('--cases', type=int, default=150, help='cases of fuzz_test.py')


def _in_turn(turn, items):
  """Of each file's tests every N-th from the turn on; at least one."""
  turn, step = map(int, turn.split('/'))
  by_file = collections.defaultdict(list)
  for item in items:
    by_file[item.path].append(item)
  return {item for each in by_file.values() for item in each[turn % min(step, len(each)) :: step]}


@pytest.hookimpl(trylast=True)  # of what is selected
def pytest_collection_modifyitems(config, items):
  """Takes tests in turn where that is asked for, and optimizes the programs of those that run for long."""
  if turn := config.getoption('turn'):
    kept = _in_turn(turn, items)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
  for item in items:
    is_long = item.path.as_posix().endswith(_RUN_FOR_LONG) and item.get_closest_marker('slow')
    if is_long and 'optimized' not in item.fixturenames:
      item.fixturenames.append('optimized')


def pytest_collection_finish():
  """Makes garbage collection rare, and keeps what was imported out of it: tracing makes many objects, few in cycles."""
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 50)


@pytest.fixture
def own_programs(tmp_path, monkeypatch):
  """For commands that are killed: what they leave half-written is no other test's."""
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'programs'))


@pytest.fixture(autouse=True, scope='module')
def _forget_programs():
  """Forgets compiled programs when there are many: they take memory, and Linux allows a process 65,530 maps of it."""
  yield
  maps = pathlib.Path('/proc/self/maps')
  if not maps.exists() or maps.read_bytes().count(b'\n') > 12_000:
    jax.clear_caches()


@pytest.fixture
def optimized():
  """Optimizes programs while it is active, for those that run for seconds."""
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', before)


@pytest.fixture
def products_of_xla():
  """Products as on a machine without a compiler."""
  with native.disabled():
    yield


@pytest.fixture
def highest():
  """Full float32 products, for tests of equality."""
  with jax.default_matmul_precision('highest'):
    yield


@pytest.fixture(scope='session')
def target():
  """A transformer of 2 layers, width 32, vocabulary 17."""
  params = transformer.init_params(jax.random.key(0), CONFIG)
  # Fresh blocks add little to the embedding and every token would predict itself: with larger ones the context counts.
  params = {k: jax.tree.map(lambda x: 3 * x, v) if k.startswith('layer') else v for k, v in params.items()}
  return causal_lm.causal_lm(params, CONFIG)


@pytest.fixture(scope='session')
def draft(target):
  """The target without its second layer: probs overlap by 0.7, likeliest tokens are the same a third of the time."""
  params = {k: v for k, v in target.params.items() if k != 'layer_1'}
  return causal_lm.causal_lm(params, dataclasses.replace(CONFIG, num_layers=1))


@pytest.fixture(scope='session')
def uncached_logits():
  """`(model, texts) -> [len(texts), V]`: logits after each text (ids), by a causal forward of the whole text."""

  def forward(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    network = transformer.Transformer(causal_lm.config_of(model))
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
