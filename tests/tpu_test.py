"""Decoding and training compile for TPUs ahead of time and fit their memory; with the extra `tpu`, `pytest -m tpu`."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import jax
import pytest
from commands import ROOT
from hub_specs import SPECS

from configs import lm1b
from decode import aot as decode_aot
from decode.experiment.model_options import SHIPPED_TARGET
from spectr_jax.aot import tpu_slices as topology
from spectr_jax.aot.compile import compile_decode
from spectr_jax.aot.hlo_report import Memory
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import PARTS
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.sharding import make_mesh
from spectr_jax.tree import TokenTree
from train import aot, plan
from train.run import make_config_mesh
from train.train import check_config

pytestmark = pytest.mark.tpu


@pytest.fixture(scope='module')
def chips():
  if not topology.is_compiler_installed():
    pytest.skip('needs the extra tpu')
  return topology.describe_topology('v5e:4x4')


@pytest.fixture(scope='module')
def pair():
  """Sizes of the pair of SpecTr's experiments, for longer texts."""
  return {
    role: dataclasses.replace(check_config(lm1b.get_config(size)), dtype='bfloat16', context_length=2**14)
    for role, size in (('target', '97m'), ('draft', '6m'))
  }


def _small(pair, **sizes):
  """The pair with other sizes."""
  return {role: dataclasses.replace(config, **sizes) for role, config in pair.items()}


def _analyse(chips, method, tree, pair, *, mesh, rows, prompt_length=32, max_new_tokens=32, is_draft_divided=False):
  """The report of a program, also shown."""
  report = decode_aot.analyse(
    DecodeSharding(make_mesh(mesh, chips), is_draft_divided=is_draft_divided), method, tree, **pair,
    batch_size=rows, prompt_length=prompt_length, max_new_tokens=max_new_tokens,
  )  # fmt: skip
  print(f'\n{method}, {rows} rows, {mesh}\n' + decode_aot.describe(report, (3.0,)))
  return report


def _compile_round(chips, pair, method, tree, filters):
  """The text of the program of the loop, for two rows on each of eight devices."""
  decoder = Decoder.make(
    *(decode_aot.abstract_model(pair[role]) for role in ('target', 'draft')),
    method=method, tree=tree, max_new_tokens=32, cache_size=64,
    sharding=DecodeSharding(make_mesh(_MESH, chips)),
  )  # fmt: skip
  return compile_decode(decoder, batch_size=16, prompt_length=32, filters=filters).as_text()


_MESH = {'data': 8, 'model': 2}
_COMPILE = """
import jax, numpy as np
from spectr_jax.aot.tpu_slices import describe_topology
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.sharding.Mesh(np.array(describe_topology('v5e:2x2')), ('data',))
x = jax.ShapeDtypeStruct((8, 128), np.float32, sharding=NamedSharding(mesh, PartitionSpec('data')))
print(jax.jit(lambda x: x + 1).lower(x).compile().memory_analysis().output_size_in_bytes)
"""


@pytest.mark.usefixtures('chips')
def test_programs_that_cannot_be_read_back_are_not_kept(tmp_path):
  env = {**os.environ, 'JAX_COMPILATION_CACHE_DIR': str(tmp_path), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
  for _ in range(2):
    ran = subprocess.run(
      [sys.executable, '-c', _COMPILE], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == 1024
    assert 'persistent' not in ran.stderr
  assert not list(tmp_path.iterdir())


def test_the_pair_of_the_paper_decodes_on_one_chip(chips, pair):
  options = {'mesh': {}, 'rows': 8, 'prompt_length': 128, 'max_new_tokens': 128}
  report = _analyse(chips[:1], 'spectr', TokenTree.chains(8, 8), pair, **options)
  weights = 2 * (pair['target'].num_params + pair['draft'].num_params)
  assert weights < report.memory.arguments < 2 * weights
  # All of the state that comes out stands where it went in.
  assert report.memory.outputs < 2**20
  assert report.memory.total < report.chip.memory
  # Well below the 16 GiB: a copy of the caches per draft, or of the distributions per node, would show.
  assert report.memory.temporaries < 2**30
  assert not report.cost.collectives
  assert report.autoregressive.seconds < report.cost.seconds
  # Weights are read at least once, and a round has all of its parts.
  assert report.autoregressive.seconds > 2 * pair['target'].num_params / report.chip.memory_bandwidth
  assert {name for name, cost in report.parts.items() if cost.launches} >= set(PARTS)
  assert not report.uncounted


@pytest.mark.parametrize(('method', 'tree'), [('autoregressive', TokenTree()), ('speculative', TokenTree.chains(1, 4))])
@pytest.mark.parametrize(('rows', 'is_draft_divided'), [(16, False), (32, False), (32, True)])
def test_decoding_compiles_for_a_slice(chips, pair, method, tree, rows, is_draft_divided):
  heads = {'num_heads': 4, 'num_kv_heads': 4, 'head_dim': 64}
  small = _small(pair, vocab_size=4096, embed_dim=256, num_layers=1, mlp_dim=256, **heads)
  report = _analyse(chips, method, tree, small, mesh=_MESH, rows=rows, is_draft_divided=is_draft_divided)
  # Half of the matrices, a whole draft, and a little for everything else.
  weights = 2 * small['target'].num_params * (1 if method == 'autoregressive' else 2 if is_draft_divided else 3) / 2
  assert weights < report.memory.arguments < 1.3 * weights + 2**19
  assert report.cost.collectives['all-reduce'] > 0
  assert report.cost.cycles > 0
  if method == 'autoregressive':
    assert report.cost == report.autoregressive
  elif rows == 16 and not is_draft_divided:
    assert sum(report.parts['draft'].collectives.values()) <= 1  # for two rows each device drafts alone


def test_a_row_of_its_own_is_computed_on_the_matrix_units(chips, pair):
  """One row per device, of eight in all: nothing takes much longer than for two rows per device."""
  one, two = (_analyse(chips, 'autoregressive', TokenTree(), pair, mesh=_MESH, rows=rows) for rows in (8, 16))
  assert one.cost.cycles < 1.1 * two.cost.cycles
  # On the vector units products would take most of 1.2 million cycles.
  assert one.cost.cycles < 0.7e6


def test_caches_are_neither_copied_nor_padded(chips, pair):
  small = _small(pair, vocab_size=4096, num_layers=2, mlp_dim=256)
  options = {'mesh': _MESH, 'rows': 64, 'prompt_length': 4096, 'max_new_tokens': 128}
  report = _analyse(chips, 'speculative', TokenTree.chains(1, 4), small, **options)
  per_layer = [2 * 2 * 8 * 4224 * width for width in (pair['target'].embed_dim // 2, pair['draft'].embed_dim)]
  assert report.memory.temporaries < 2 * sum(per_layer)
  assert report.memory.arguments > 2 * sum(per_layer)


def test_decoding_that_does_not_fit_is_refused(chips, pair):
  options = {'mesh': {'data': -1}, 'rows': 2**13, 'prompt_length': 4096, 'max_new_tokens': 4096}
  with pytest.raises(ValueError, match='does not fit .*fewer rows'):
    _analyse(chips, 'speculative', TokenTree.chains(1, 4), pair, **options)


def _moved_sizes(program, kinds='all-gather|all-to-all|collective-permute'):
  """The numbers of entries of the arrays that move between devices in these ways, sums apart."""
  moved = re.findall(rf'= .*?(?:{kinds})(?:-start)?\(', program)
  return [math.prod(map(int, shape.split(','))) for text in moved for shape in re.findall(r'\[([\d,]+)\]', text)]


@pytest.mark.parametrize('filters', [(), ('top_k', 'top_p', 'min_p')])
def test_no_device_holds_all_laws_whole(chips, pair, filters):
  """Divided over `model`, distributions are not gathered. To filter them, each device gets some of the rows whole."""
  program = _compile_round(chips, _small(pair, num_layers=1), 'spectr', TokenTree.chains(2, 2), filters)
  # The distributions of two rows have 2 x 5 x 32000 numbers.
  assert max(_moved_sizes(program, 'all-gather|collective-permute')) < 32000
  sent = _moved_sizes(program, 'all-to-all')
  if filters:
    assert set(sent) == {5 * 32000}  # half of them
  else:
    assert not sent


_OF_ALL = {'transformer_layers', 'softmax', 'draw_tokens', 'first_above'}
_OF_FILTERS = {'keep_in_rows', 'find_in_rows'}


@pytest.mark.parametrize(
  ('method', 'filters', 'own'),
  [
    ('race_traversal', (), {'token_sums', 'fit_races', 'race_credits', 'sums_of_rows', 'first_kept'}),
    ('spectr', ('top_k', 'top_p', 'min_p'), {'token_sums', 'narrow_sections'} | _OF_FILTERS),
  ],
)
def test_a_round_runs_its_kernels(chips, pair, method, filters, own):
  """What does not fit a kernel takes its plain form, which is right and slow: only the program shows it."""
  small = _small(pair, vocab_size=4096, num_layers=1, mlp_dim=256)
  program = _compile_round(chips, small, method, TokenTree.chains(8, 2), filters)
  names = re.findall(r'%([a-z_]+)[.\d]* = [^\n]*custom_call_target="tpu_custom_call"', program)
  assert set(names) == _OF_ALL | own


@pytest.fixture(scope='module')
def train_config():
  config = lm1b.get_config('6m')
  config.model.num_layers = 2
  config.update(vocab_size=4096, batch_size=64, num_microbatches=2, mesh='data:8,model:2')
  return config


@pytest.mark.parametrize('teacher', ['', SHIPPED_TARGET])
def test_the_train_step_compiles_for_a_slice(chips, train_config, teacher):
  train_config = train_config.copy_and_resolve_references()
  train_config.distill_from = teacher
  mesh = make_config_mesh(train_config, chips)
  report = aot.analyse(train_config, mesh)
  print('\n' + aot.describe(report))
  state = sum(entry.device_bytes for entry in plan.state_entries(train_config, check_config(train_config), mesh))
  # Small arrays are padded; a teacher is divided as well.
  assert state < report.memory.arguments < 1.1 * state + (4 if teacher else 1) * 2**20
  # Matrix products, and a little for everything else; a loop counted once would leave much of them out.
  assert 1 < report.flops / report.closed_form_flops < 1.1
  # Four rows per device at a time: were all rows of a microbatch on every device, eight times as much.
  logits = 4 * 4 * 512 * 4096 / 2
  assert report.memory.temporaries < (6 if teacher else 2) * logits  # the teacher has larger activations, in float32
  assert 0 < report.cost.seconds < 1
  assert not report.uncounted
  # Matrices are gathered whole, not sent around part by part.
  assert report.cost.collectives['all-gather'] > 0


def _computations(program, name):
  """The texts of the computations of a compiled program whose names begin with `name`."""
  return re.findall(rf'^%{name}.*?^}}', program, re.MULTILINE | re.DOTALL)


def test_gradients_move_beside_the_work(chips):
  """Of the target's layers: those of two layers of a small draft are too few to be worth it to the compiler."""
  config = lm1b.get_config('97m')
  config.model.num_layers = 2
  config.update(vocab_size=4096, batch_size=64, num_microbatches=2, mesh='data:16')
  program = aot.compile_step(config, make_config_mesh(config, chips))[0].as_text()
  assert 'collective-permute' not in program
  # A matrix's gradient is added up over devices within a fusion that computes something else.
  beside = ''.join(_computations(program, 'async_collective_fusion'))
  assert re.search(r'= f32\[\d+,\d+\]\S* all-reduce\(', beside)


def test_a_train_step_that_does_not_fit_is_refused(chips, train_config):
  config = train_config.copy_and_resolve_references()
  config.update(batch_size=2**18, num_microbatches=1)
  mesh = make_config_mesh(config, chips)
  with pytest.raises(ValueError, match='does not fit .*more microbatches'):
    aot.compile_step(config, mesh)


_GROUPED = {
  **SPECS['llama'], 'vocab_size': 8200, 'hidden_size': 256, 'num_attention_heads': 8, 'head_dim': 32,
  'intermediate_size': 512, 'max_position_embeddings': 128,
}  # fmt: skip


def test_a_public_model_compiles_from_its_config_alone(tmp_path):
  """Two heads of keys and values on four devices: each is there twice; weights and distributions stay on shards."""
  if not topology.is_compiler_installed():
    pytest.skip('needs the extra tpu')
  (tmp_path / 'config.json').write_text(json.dumps(_GROUPED))
  config = decode_aot.read_config(str(tmp_path), 'bfloat16')
  draft = dataclasses.replace(config, vocab_size=8100, num_layers=1, num_kv_heads=8)
  sharding = DecodeSharding(make_mesh({'model': 4}, topology.describe_topology('v5e:2x2')))
  target, small = decode_aot.abstract_pair(config, draft, sharding)
  rows, tree = 8, TokenTree.chains(2, 2)
  decoder = Decoder.make(
    target, small, method='race_traversal', tree=tree, max_new_tokens=64, cache_size=128, sharding=sharding
  )
  compiled = compile_decode(decoder, batch_size=rows, prompt_length=64)
  assert target.params['layer_0']['attention']['k']['kernel'].shape == (256, 4 * 32)
  weights, small_weights = (
    2 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.params)) for model in (target, small)
  )
  caches = 2 * 2 * rows * 128 * 32 * (2 + 8)  # one head in each of two layers, and all eight of the draft
  needed = weights / 4 + small_weights + caches
  assert needed < Memory.of(compiled).arguments < 1.05 * needed + 2**17
  # The activations of all nodes are largest. Kernels are larger, and so is a quarter of the distributions.
  sizes = _moved_sizes(compiled.as_text())
  assert sizes
  assert max(sizes) <= rows * (tree.num_nodes + 1) * 256


def test_a_mixture_of_experts_compiles_for_a_mesh_and_is_counted(tmp_path):
  """Experts are divided by their hidden units; XLA's kernels of ragged products have loops that nothing limits."""
  if not topology.is_compiler_installed():
    pytest.skip('needs the extra tpu')
  sizes = {
    'hidden_size': 256,
    'intermediate_size': 512,
    'vocab_size': 2048,
    'head_dim': 32,
    'max_position_embeddings': 256,
  }
  (tmp_path / 'config.json').write_text(json.dumps({**SPECS['gpt_oss'], **sizes, 'num_attention_heads': 8}))
  options = (
    'method=race_traversal',
    'num_drafts=2',
    'draft_length=2',
    'batch_size=8',
    'topology=v5e:2x2',
    'mesh=model:4',
  )
  models = (f'{role}_config={tmp_path}' for role in ('target', 'draft'))
  ran = subprocess.run(
    [sys.executable, '-m', 'decode.aot', *(f'--{option}' for option in (*models, *options))],
    cwd=ROOT, capture_output=True, text=True, timeout=600,
  )  # fmt: skip
  assert ran.returncode == 0, ran.stderr
  target = next(line for line in ran.stdout.splitlines() if line.startswith('target  '))
  assert re.search(r' [1-9]\d* all-reduce', target)
