"""Decoding sharded over devices and processes: the same tokens as on one device."""

import json
import re

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hub
from hub_specs import SPECS
from jax.sharding import AbstractMesh
from safetensors.numpy import save_file
from small_head import save_head, save_one_pass

from spectr_jax import Tokenizer, TokenTree, generate, save_model
from spectr_jax.draft import model_drafter
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.models import causal_lm, table, transformer
from spectr_jax.sharding import make_mesh
from tests.slow import slow

_TEXT = 'the quick brown fox jumps over the lazy dog while seven wise owls watch from the old oak tree ' * 4
# Rows of unequal length, more than one batch of them.
_PROMPTS = (
  'the quick', 'seven wise owls', 'old', 'the lazy dog while seven', 'jumps', 'watch from the', 'oak', 'fox', 'w',
)  # fmt: skip


_init_params = jax.jit(transformer.init_params, static_argnames='config')


@pytest.fixture(scope='module')
def wide_pair(tmp_path_factory):
  """Flags of a target and a draft that eight devices can divide: 8 heads, 320 tokens; and of prompts."""
  directory = tmp_path_factory.mktemp('wide')
  tokenizer, paths = Tokenizer.train([_TEXT], 320), {}
  for seed, (role, num_layers) in enumerate({'target': 2, 'draft': 1}.items()):
    config = causal_lm.lm1b_config(320, 32, num_layers, num_heads=8, mlp_dim=32, context_length=64)
    params = jax.tree.map(lambda x: 2 * x, _init_params(jax.random.key(seed), config=config))
    paths[role] = directory / role
    save_model(paths[role], causal_lm.causal_lm(params, config), tokenizer)
  prompts = directory / 'prompts.jsonl'
  prompts.write_text('\n'.join(json.dumps({'prompt': text}) for text in _PROMPTS))
  return [f'--{name}={path}' for name, path in {**paths, 'prompts': prompts}.items()]


def decode(*arguments, **options):
  return commands.succeed('decode.main', *arguments, JAX_DEFAULT_MATMUL_PRECISION='highest', **options)


def read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


_SETTINGS = (
  '--method=autoregressive,spectr,race_traversal', '--num_drafts=2', '--draft_length=3', '--batch_size=8',
  '--max_new_tokens=8', '--top_p=0.95',
)  # fmt: skip


@pytest.fixture(scope='module')
def on_one_device(tmp_path_factory, wide_pair):
  path = tmp_path_factory.mktemp('one') / 'generations.jsonl'
  decode(*_SETTINGS, *wide_pair, f'--generations={path}')
  return read(path)


@pytest.mark.slow
@pytest.mark.parametrize(
  'arguments',
  [
    slow(['--mesh=data:8'], id='data'),
    pytest.param(['--mesh=data:4,model:2'], id='data and model'),
    slow(['--mesh=model:8', '--draft_mesh=divided'], id='model, draft divided'),
    slow(['--mesh=data:4,model:-1', '--draft_mesh=divided', '--method=spectr'], id='divided'),
  ],
)
def test_eight_devices_decode_like_one(tmp_path, wide_pair, on_one_device, arguments):
  path = tmp_path / 'generations.jsonl'
  out = decode(*_SETTINGS, *wide_pair, *arguments, f'--generations={path}', num_devices=8)
  assert 'of 8 devices' in out
  methods = ('spectr',) if '--method=spectr' in arguments else ('autoregressive', 'spectr', 'race_traversal')
  assert read(path) == [entry for entry in on_one_device if entry['method'] in methods]


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['data:8', 'data:4,model:2', 'model:8'])
def test_eight_devices_follow_a_constraint_like_one(tmp_path, wide_pair, mesh):
  pytest.importorskip('outlines_core', reason='needs the extra grammar')
  paths, regex = [tmp_path / name for name in ('one.jsonl', 'eight.jsonl')], '( [a-m]{1,3}| quick)+[.!]'
  decode(*_SETTINGS, *wide_pair, f'--regex={regex}', f'--generations={paths[0]}')
  decode(*_SETTINGS, *wide_pair, f'--regex={regex}', f'--mesh={mesh}', f'--generations={paths[1]}', num_devices=8)
  one, eight = map(read, paths)
  assert eight == one
  ended = [line['text'] for line in one if line['finish_reason'] == 'eos']
  assert all(re.fullmatch(regex, text) for text in ended)
  assert all(re.fullmatch('[ a-z.!]*', line['text']) for line in one)
  assert len({line['text'] for line in one}) > len(_PROMPTS)


@pytest.mark.slow
def test_parts_of_a_round_are_timed_on_a_mesh(wide_pair):
  """On two devices, without filters: each part is run many times, and eight devices would share these cores."""
  arguments = ['--mesh=model:2', '--draft_mesh=divided', '--breakdown', '--method=spectr', '--top_p=1']
  out = decode(*_SETTINGS, *wide_pair, *arguments, num_devices=2)
  times = re.search(r'spectr K=2 L=3: .* draft ([\d.]+), target ([\d.]+), verification ([\d.]+), rest', out)
  assert all(float(milliseconds) > 0 for milliseconds in times.groups())


@pytest.mark.slow
@pytest.mark.parametrize(
  ('draft', 'settings'),
  [
    ('{}', ['--method=spectr,race_traversal', '--num_drafts=2', '--draft_length=3']),
    ('lookup+{}', ['--method=race_traversal', '--num_drafts=2', '--draft_length=3', '--lookup_min=1']),
    ('{}', ['--method=race_traversal', '--tree=confident:3,2,2', '--growth_threshold=0.1']),
    ('{}', ['--method=specinfer', '--tree=likeliest:3,2,2', '--temperature=0']),
    ('one pass', ['--method=spectr,race_traversal', '--num_drafts=2', '--draft_length=3']),
    ('one pass', ['--method=race_traversal', '--tree=estimated:3,2,2', '--growth_threshold=0.1']),
  ],
  ids=['head', 'lookup beside a head', 'confident', 'likeliest', 'one pass', 'one pass, estimated'],
)
def test_eight_devices_decode_like_one_with_a_head(tmp_path, wide_pair, draft, settings):
  save = save_one_pass if draft == 'one pass' else save_head
  folder, written = save(tmp_path / 'head', target_dim=32), []
  head = folder if draft == 'one pass' else draft.format(folder)
  target, _, prompts = wide_pair
  for mesh, num_devices in (([], 1), (['--mesh=data:4,model:2'], 8)):
    path = tmp_path / f'{num_devices}.jsonl'
    # Products of several devices are XLA's, which round otherwise than those of one; by seed 0 this changes a token.
    arguments = [target, prompts, f'--draft={head}', *settings, *mesh, '--max_new_tokens=8', '--seed=1']
    decode(*arguments, '--batch_size=8', f'--generations={path}', num_devices=num_devices)
    written.append(read(path))
  assert written[0] == written[1]
  assert len({tuple(line['tokens']) for line in written[0]}) > 4


@pytest.fixture(scope='module')
def grouped_pair(tmp_path_factory):
  """Flags of a pair in the hub's folders whose target has two heads of keys and values; and of prompts."""
  directory = tmp_path_factory.mktemp('grouped')
  sizes = {'vocab_size': 320, 'max_position_embeddings': 64}
  target = {**SPECS['llama'], **sizes, 'hidden_size': 32, 'num_attention_heads': 8, 'head_dim': 4}
  for role, spec in (('target', target), ('draft', {**SPECS['qwen3'], **sizes})):
    folder = tiny_hub.write(directory / role, config=spec)
    tensors = {name: tensor / 4 if tensor.ndim == 2 else tensor for name, tensor in tiny_hub.tensors_of(spec).items()}
    save_file(tensors, folder / 'model.safetensors')
  prompts = directory / 'prompts.jsonl'
  prompts.write_text('\n'.join(json.dumps({'prompt': text}) for text in _PROMPTS))
  return [f'--{name}={directory / name}' for name in ('target', 'draft')] + [f'--prompts={prompts}']


@pytest.mark.slow
def test_heads_are_copied_where_devices_are_more(tmp_path, grouped_pair):
  by_mesh = {}
  for mesh, num_devices in (('', 1), ('data:1,model:8', 8)):
    path = tmp_path / f'{num_devices}{mesh}.jsonl'
    arguments = [f'--mesh={mesh}'] if mesh else []
    decode(*_SETTINGS, *grouped_pair, *arguments, f'--generations={path}', num_devices=num_devices)
    by_mesh[mesh] = read(path)
  plain = by_mesh.pop('')
  assert len({tuple(line['tokens']) for line in plain}) > len(_PROMPTS)
  assert all(lines == plain for lines in by_mesh.values())


@pytest.mark.slow
def test_two_processes_decode_like_one(tmp_path, wide_pair, on_one_device):
  path = tmp_path / 'generations.jsonl'
  processes = commands.start_two(
    'decode.main', *_SETTINGS, *wide_pair, '--mesh=data:4,model:2', f'--generations={path}', num_devices=4,
    JAX_DEFAULT_MATMUL_PRECISION='highest',
  )  # fmt: skip
  first, second = [commands.finish(process) for process in processes]
  assert 'of 8 devices' in first
  assert 'race_traversal' in first
  assert 'race_traversal' not in second
  assert read(path) == on_one_device


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--mesh=data:4'], 'mesh data:4 needs 4 devices, and there are 1'),
    (['--mesh=rows:1'], 'a mesh is like data:8,model:2'),
    (['--mesh=data'], 'expected names with one number each'),
    (['--draft_mesh=divided'], 'draft_mesh is for a mesh, and none is given'),
    (['--mesh=data:1', '--draft_mesh=half'], "draft_mesh must be whole or divided, got 'half'"),
  ],
)
def test_bad_meshes_are_refused(wide_pair, arguments, message):
  assert message in commands.refuse('decode.main', *_SETTINGS, *wide_pair, *arguments)


def _model(num_heads=2, vocab_size=6):
  config = causal_lm.lm1b_config(vocab_size, 8 * num_heads, 1, num_heads, 16, 32)
  return causal_lm.causal_lm(_init_params(jax.random.key(0), config=config), config)


_MESH = AbstractMesh((2, 4), ('data', 'model'))


@pytest.mark.parametrize(
  ('rows', 'target_heads', 'draft_heads', 'message'),
  [
    (3, 4, 4, '3 rows cannot be sharded over data:2'),
    (2, 2, 4, "the target's 2 heads cannot be sharded over model:4"),
    (2, 4, 2, "the draft's 2 heads cannot be sharded over model:4"),
  ],
)
def test_what_cannot_be_divided_is_refused(rows, target_heads, draft_heads, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    _place_caches(DecodeSharding(_MESH, is_draft_divided=True), rows, target_heads, draft_heads)


def test_a_draft_that_is_whole_may_have_any_heads():
  _place_caches(DecodeSharding(_MESH), 2, 4, 3)


def _place_caches(sharding, rows, target_heads, draft_heads):
  target, drafter = _model(target_heads), model_drafter(_model(draft_heads))
  sharding.check_rows(rows)
  sharding.of_cache(jax.eval_shape(lambda: target.init_cache_fn(rows, 8)), target)
  sharding.of_draft_state(jax.eval_shape(lambda: drafter.init(rows, 8)), drafter)


@pytest.mark.slow
def test_models_without_rules_stay_whole():
  sharding = DecodeSharding(make_mesh({}, jax.devices()[:1]))
  models = [
    table.table_model(jnp.asarray(np.random.default_rng(seed).normal(size=(6, 6)), jnp.float32)) for seed in (0, 1)
  ]
  options = dict(method='spectr', tree=TokenTree.chains(2, 2), max_new_tokens=6)
  key, prompts, lengths = jax.random.key(0), np.zeros((4, 2), np.int32), np.array([1, 2, 1, 2])
  sharded = generate(key, *models, prompts, lengths, **options, sharding=sharding)
  np.testing.assert_array_equal(sharded.tokens, generate(key, *models, prompts, lengths, **options).tokens)
