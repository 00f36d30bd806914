"""Hub folders: every tensor comes to its place, each device reads its part, and what does not fit is refused."""

import hashlib
import http.server
import json
import pathlib
import threading

import commands
import hostile
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from hub_specs import SPECS
from tiny_hub import Recorded, random_array, tensors_of, write_model

from spectr_jax.io.hub import hub_model
from spectr_jax.io.hub.families import read_spec
from spectr_jax.io.hub.hub_model import load_hub_model, make_model, read_hub_config
from spectr_jax.io.hub.rope import read_rope
from spectr_jax.io.hub.sources import source_of
from spectr_jax.io.model_files import hub_folder, load_model
from spectr_jax.kernels.int8 import quantized
from spectr_jax.models.causal_lm import config_of
from spectr_jax.models.param_shapes import param_shapes
from spectr_jax.sharding import make_mesh

_HERE = pathlib.Path(__file__).parent
_COMMIT = '0123456789abcdef0123456789abcdef01234567'


def _llama_tensors():
  """Tensors of which no two hold the same."""
  return {name: array + place / 16 for place, (name, array) in enumerate(tensors_of(SPECS['llama']).items())}


def _save(folder, tensors, spec=None, num_files=1):
  return write_model(folder, SPECS['llama'] if spec is None else spec, tensors, num_files)


@pytest.mark.parametrize('num_files', [1, 3])
def test_tensors_come_to_their_places(tmp_path, num_files):
  tensors = _llama_tensors()
  params = load_hub_model(_save(tmp_path, tensors, num_files=num_files)).params
  np.testing.assert_array_equal(params['embedding'], tensors['model.embed_tokens.weight'])
  np.testing.assert_array_equal(params['unembedding'], tensors['lm_head.weight'].T)
  block = params['layer_1']
  for ours, theirs in (('attention_norm', 'input_layernorm'), ('mlp_norm', 'post_attention_layernorm')):
    np.testing.assert_array_equal(block[ours]['gain'], tensors[f'model.layers.1.{theirs}.weight'])
  for ours, theirs in (('q', 'q_proj'), ('k', 'k_proj'), ('v', 'v_proj'), ('out', 'o_proj')):
    np.testing.assert_array_equal(
      block['attention'][ours]['kernel'], tensors[f'model.layers.1.self_attn.{theirs}.weight'].T
    )
  for ours in ('gate', 'up', 'down'):
    np.testing.assert_array_equal(block['mlp'][ours]['kernel'], tensors[f'model.layers.1.mlp.{ours}_proj.weight'].T)


def test_fused_heads_by_head():
  tensors = tensors_of(SPECS['gpt_neox'])
  attention = make_model(SPECS['gpt_neox'], Recorded(tensors)).params['layer_0']['attention']
  weight = tensors['gpt_neox.layers.0.attention.query_key_value.weight'].reshape(4, 3, 4, 16)
  bias = tensors['gpt_neox.layers.0.attention.query_key_value.bias'].reshape(4, 3, 4)
  for part, name in enumerate('qkv'):
    np.testing.assert_array_equal(attention[name]['kernel'], weight[:, part].reshape(16, 16).T)
    np.testing.assert_array_equal(attention[name]['bias'], bias[:, part].reshape(16))


@pytest.mark.parametrize('prefix', ['transformer.', ''])
def test_fused_heads_by_part(prefix):
  """Files of the body alone have names without its prefix."""
  tensors = {name.replace('transformer.', prefix): x for name, x in tensors_of(SPECS['gpt2']).items()}
  buffers = {f'{prefix}h.0.attn.bias': np.tri(32, dtype=np.float32)[None, None]}
  attention = make_model(SPECS['gpt2'], Recorded(tensors | buffers)).params['layer_0']['attention']
  weight, bias = (tensors[f'{prefix}h.0.attn.c_attn.{leaf}'] for leaf in ('weight', 'bias'))
  for part, name in enumerate('qkv'):
    np.testing.assert_array_equal(attention[name]['kernel'], weight[:, 16 * part : 16 * part + 16])
    np.testing.assert_array_equal(attention[name]['bias'], bias[16 * part : 16 * part + 16])


@pytest.mark.parametrize('name', ['llama', 'gpt_neox', 'gpt2'])
def test_parts_of_parameters_are_read_alone(name):
  """Any range of a parameter's outputs is read without the rest, copies of heads included."""
  family, config = read_spec(SPECS[name])
  if name == 'llama':
    config = config.for_mesh(jax.sharding.AbstractMesh((1, 4), ('data', 'model')))
    assert config.kv_copies == 2
    with pytest.raises(ValueError, match='4 heads with 2 heads of keys and values cannot be sharded over model:8'):
      config.for_mesh(jax.sharding.AbstractMesh((1, 8), ('data', 'model')))
  tensors = Recorded(tensors_of(SPECS[name]))
  shapes = param_shapes(config)['layer_0']['attention']
  for leaf in 'qkv':
    shape = shapes[leaf]['kernel'].shape
    source = source_of(f'layer_0/attention/{leaf}/kernel', shape, family, config, tensors.names())

    def read(*index, shape=shape, source=source):
      return hub_model._read(index, shape=shape, tensors=tensors, source=source, dtype=config.dtype)

    whole = read(slice(None), slice(None))
    assert whole.shape == shape
    if name == 'llama' and leaf != 'q':
      heads = whole.reshape(16, 4, 4)
      np.testing.assert_array_equal(heads[:, 0], heads[:, 1])
      assert (heads[:, 1] != heads[:, 2]).any()
    for begin, end in ((0, 4), (4, 12), (3, 9), (12, 16)):
      tensors.reads.clear()
      np.testing.assert_array_equal(read(slice(2, 7), slice(begin, end)), whole[2:7, begin:end])
      assert sum(size for _, size in tensors.reads) == 5 * (end - begin)


def test_dtypes(tmp_path):
  tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in _llama_tensors().items()}
  folder = _save(tmp_path, tensors, {**SPECS['llama'], 'torch_dtype': 'bfloat16'})
  model = load_hub_model(folder)
  for keys, leaf in jax.tree_util.tree_leaves_with_path(model.params):
    assert leaf.dtype == ('float32' if keys[-1].key == 'gain' else 'bfloat16')
  wide = load_hub_model(folder, dtype='float32', mesh=make_mesh({}, jax.devices()[:1]))
  assert config_of(wide).dtype == 'float32'
  np.testing.assert_array_equal(wide.params['embedding'], tensors['model.embed_tokens.weight'].astype(np.float32))
  # float16 is not computed in; float32 holds its numbers.
  assert read_spec({**SPECS['llama'], 'torch_dtype': 'float16'})[1].dtype == 'float32'
  assert read_hub_config(folder, dtype='float32').dtype == 'float32'


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'model.norm.weight': None}, 'lacks 1 tensors, the first of them model.norm.weight'),
    ({'model.layers.2.mlp.up_proj.weight': random_array(24, 16)}, '1 tensors too many, .* model.layers.2.mlp.up_proj'),
    ({'model.norm.weight': random_array(15)}, r'model.norm.weight must have shape \(16,\), got \(15,\)'),
    ({'model.norm.weight': np.ones(16, np.int8)}, 'model.norm.weight must hold floating point numbers, got int8'),
  ],
)
def test_tensors_that_do_not_fit(change, message):
  tensors = {name: x for name, x in (_llama_tensors() | change).items() if x is not None}
  with pytest.raises(ValueError, match=message):
    make_model(SPECS['llama'], Recorded(tensors))


def test_old_and_new_files_say_the_same():
  old = {'rope_theta': 1e6, 'rope_scaling': {'type': 'linear', 'factor': 4.0}, 'torch_dtype': 'bfloat16'}
  new = {'rope_parameters': {'rope_type': 'linear', 'rope_theta': 1e6, 'factor': 4.0}, 'dtype': 'bfloat16'}
  spec = {key: value for key, value in SPECS['llama'].items() if key not in (*old, *new)}
  assert read_spec(spec | old) == read_spec(spec | new)
  assert read_rope({'rope_theta': 16.0}, 4).frequencies == (1.0, 0.25)


@pytest.mark.parametrize(
  ('name', 'old', 'new'),
  [
    (
      'gemma3',
      {
        'rope_theta': 1e6, 'rope_local_base_freq': 100.0, 'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
        'sliding_window_pattern': 2,
      },
      {
        'rope_parameters': {
          'full_attention': {'rope_type': 'linear', 'rope_theta': 1e6, 'factor': 8.0},
          'sliding_attention': {'rope_type': 'default', 'rope_theta': 100.0},
        },
        'layer_types': ['sliding_attention', 'full_attention'],
      },
    ),
    (
      'gpt_neox',
      {'rotary_pct': 1.0, 'rotary_emb_base': 1e5},
      {'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e5, 'partial_rotary_factor': 1.0}},
    ),
    (
      'qwen2',
      {'use_sliding_window': True, 'sliding_window': 4, 'max_window_layers': 1},
      {'use_sliding_window': True, 'sliding_window': 4, 'layer_types': ['full_attention', 'sliding_attention']},
    ),
  ],
)  # fmt: skip
def test_old_and_new_files_of_a_family_say_the_same(name, old, new):
  spec = {key: value for key, value in SPECS[name].items() if key not in (*old, *new)}
  assert read_spec(spec | old) == read_spec(spec | new)
  assert read_spec(spec | old) != read_spec(spec)


def test_damaged_files(tmp_path):
  tensors = _llama_tensors()
  with pytest.raises(ValueError, match='no model at .*: expected a folder with config.json'):
    read_hub_config(tmp_path)

  def refuse(folder, message):
    hostile.refusal(lambda: load_hub_model(folder), folder, message)

  folder = _save(tmp_path / 'whole', tensors)
  file = folder / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:-100])
  refuse(folder, 'model.safetensors is damaged')
  file.unlink()
  refuse(folder, 'no weights in .*: expected model.safetensors or model.safetensors.index.json')
  (folder / 'config.json').write_text('{')
  refuse(folder, 'config.json is damaged')
  folder = _save(tmp_path / 'shards', tensors, num_files=2)
  index = folder / 'model.safetensors.index.json'
  weight_map = json.loads(index.read_text())['weight_map']
  index.write_text(json.dumps({'weight_map': {**weight_map, 'model.extra': 'model-1.safetensors'}}))
  refuse(folder, 'model-1.safetensors has no tensor model.extra, which model.safetensors.index')
  (folder / 'model-1.safetensors').unlink()
  refuse(folder, 'model-1.safetensors is missing')
  index.write_text('[]')
  refuse(folder, 'index.json must hold an object')


class _Hub(http.server.BaseHTTPRequestHandler):
  """The hub's addresses for one repository, whose files stand in `server.folder`; counts what is sent."""

  def log_message(self, *arguments):
    pass

  def do_HEAD(self):
    self._answer(has_body=False)

  def do_GET(self):
    self._answer(has_body=True)

  def _answer(self, has_body):
    path = self.path.split('?')[0]
    names = [file.relative_to(self.server.folder).as_posix() for file in self.server.folder.rglob('*.*')]
    name = path.removeprefix(f'/org/tiny/resolve/{_COMMIT}/')
    if path.startswith('/api/models/org/tiny/tree/'):
      content = json.dumps([{'type': 'file', 'path': name, 'size': 1, 'oid': name} for name in names]).encode()
    elif path.startswith('/api/models/org/tiny'):
      found = {'id': 'org/tiny', 'sha': _COMMIT, 'siblings': [{'rfilename': name} for name in names]}
      content = json.dumps(found).encode()
    elif name in names:
      content = (self.server.folder / name).read_bytes()
      self.server.sent.add(name)
    else:
      self.send_response(404)
      self.send_header('X-Error-Code', 'RepoNotFound')
      self.send_header('Content-Length', '0')
      self.end_headers()
      return
    self.send_response(200)
    self.send_header('Content-Length', str(len(content)))
    self.send_header('ETag', f'"{hashlib.sha1(content).hexdigest()}"')
    self.send_header('X-Repo-Commit', _COMMIT)
    self.end_headers()
    if has_body:
      self.wfile.write(content)


@pytest.fixture
def hub(tmp_path, monkeypatch):
  """A server in place of the hub, with an empty cache."""
  server = http.server.ThreadingHTTPServer(('localhost', 0), _Hub)
  server.folder, server.sent = tmp_path / 'served', set()
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  address = f'http://localhost:{server.server_address[1]}'
  monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', address)
  template = address + '/{repo_id}/resolve/{revision}/{filename}'
  monkeypatch.setattr('huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE', template)
  # Before version 1 the module that downloads had a copy of it, made when it was imported: by the first of these tests.
  monkeypatch.setattr('huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE', template, raising=False)
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path / 'cache'))
  monkeypatch.chdir(tmp_path)
  yield server
  server.shutdown()
  server.server_close()


def test_models_on_the_hub(hub, monkeypatch):
  folder = _save(hub.folder, _llama_tensors())
  vocab = {f't{index}': index for index in range(32)}
  tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token='t0')).save(str(folder / 'tokenizer.json'))
  (folder / 'pytorch_model.bin').write_bytes(b'not wanted')
  (folder / 'other').mkdir()
  (folder / 'other' / 'model.safetensors').write_bytes(b'not wanted')
  assert read_hub_config(hub_folder('org/tiny', files=('config.json',))) == read_spec(SPECS['llama'])[1]
  assert hub.sent == {'config.json'}
  model, tokenizer = load_model('org/tiny')
  np.testing.assert_array_equal(model.params['final_norm']['gain'], _llama_tensors()['model.norm.weight'])
  assert tokenizer.vocab_size == 32
  assert hub.sent == {'config.json', 'model.safetensors', 'tokenizer.json'}
  hostile.refusal(lambda: load_model('org/none'), '', '^no model at org/none, neither a folder nor on the hub: .*404')
  hub.shutdown()
  hub.server_close()
  # Without the network the cache is enough.
  assert load_model('org/tiny')[0].vocab_size == 32
  hostile.refusal(lambda: load_model('org/other'), '', '^no model at org/other, neither a folder nor .*[Cc]onn')


@pytest.mark.slow
def test_every_device_reads_its_shard(tmp_path):
  """On eight devices: the tokens of one, and no read is larger than the shard of a device."""
  spec = {**SPECS['llama'], 'hidden_size': 32, 'num_attention_heads': 8, 'head_dim': 4}
  folder = _save(tmp_path, tensors_of(spec), spec)
  options = {'cwd': _HERE, 'num_devices': 8, 'JAX_DEFAULT_MATMUL_PRECISION': 'highest'}
  ran = commands.finish(commands.start('shard_by_shard', folder, json.dumps(spec), **options))
  assert ran.splitlines()[-2:] == ["{'model': 8}", "{'data': 2, 'model': 4}"]


@pytest.mark.parametrize('name', ['llama', 'gpt_neox', 'gpt2'])
def test_weights_are_quantized_in_pieces_while_they_are_read(monkeypatch, name):
  """Every number is read once, few together, and the result is that of the whole kernel."""
  monkeypatch.setattr(hub_model, '_MOST_AT_ONCE', 100)
  tensors = Recorded(tensors_of(SPECS[name]))
  plain = make_model(SPECS[name], Recorded(tensors.tensors))
  model = make_model(SPECS[name], tensors, weights='int8')
  assert config_of(model).weights == 'int8'
  jax.tree.map(np.testing.assert_array_equal, model.params, quantized(plain.params))
  assert sum(size for _, size in tensors.reads) == config_of(plain).num_params
  assert max(size for tensor, size in tensors.reads if tensors.shape(tensor)[1:] and 'wpe' not in tensor) <= 100


def test_quantized_weights_of_bfloat16_and_those_that_cannot_be(tmp_path):
  """Numbers are rounded once, and scales stay in float32."""
  tensors = _llama_tensors()
  folder = _save(tmp_path, tensors)
  model = load_hub_model(folder, dtype='bfloat16', weights='int8')
  expected = make_model(SPECS['llama'], Recorded(tensors), weights='int8').params
  found = model.params['layer_1']['attention']['out']['kernel']
  jax.tree.map(np.testing.assert_array_equal, found, expected['layer_1']['attention']['out']['kernel'])
  assert model.params['embedding'].scale.dtype == model.params['final_norm']['gain'].dtype == jnp.float32
  assert read_hub_config(folder, weights='int8').weights == 'int8'
  tensors['model.layers.1.mlp.up_proj.weight'][2, 3] = np.nan
  with pytest.raises(ValueError, match='^tensor model.layers.1.mlp.up_proj.weight: weights that are not finite'):
    make_model(SPECS['llama'], Recorded(tensors), weights='int8')
