"""Models whose matrices stay in the blocks of their `.gguf` file."""

import pathlib
import re

import gguf
import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from spectr_jax import TokenTree, generate, load_drafter, load_model
from spectr_jax.draft import head_drafter
from spectr_jax.io.heads.save import save_drafter
from spectr_jax.io.hub.gguf_header import read_header
from spectr_jax.io.hub.gguf_tensors import GgufTensors
from spectr_jax.io.model_files import open_model
from spectr_jax.kernels import native
from spectr_jax.kernels.block_kernel import is_in_blocks
from spectr_jax.model import Model
from spectr_jax.models.causal_lm_config import CausalLMConfig, Rope
from spectr_jax.models.head import HeadConfig, init_params
from spectr_jax.sampling import SamplingParams
from spectr_jax.sharding import make_mesh
from tests.slow import slow, slow_but


def _load(path, **options):
  return open_model(path).load(dtype='float32', **({'weights': None, 'mesh': None} | options))


def _matrices(model):
  leaves = jax.tree_util.tree_leaves_with_path(model.params, is_leaf=is_in_blocks)
  return {jax.tree_util.keystr(keys, simple=True, separator='/'): leaf for keys, leaf in leaves}


_apply = jax.jit(Model.apply)


def _logits(model, tokens):
  cache, positions = model.init_cache_fn(1, 16), jnp.arange(tokens.shape[1])[None]
  return _apply(model, tokens, positions, np.tri(tokens.shape[1], dtype=bool), cache).logits


# Columns in another order, heads of two widths and experts whose gates are joined, and neither.
_TELLING = 'qwen35', 'gemma4 mixture', 'llama', 'gpt2'


@pytest.mark.parametrize('architecture', slow_but(_TELLING, gguf_files.SPECS))
@pytest.mark.parametrize('kind', slow_but([Type.Q4_1], [Type.Q4_1, Type.Q8_0]), ids=lambda kind: kind.name)
def test_every_matrix_is_that_of_the_file(architecture, kind, tmp_path):
  """Bit for bit, with its outputs in the hub's order; logits differ by the rounding of inputs."""
  path = gguf_files.write_model(tmp_path / 'model.gguf', architecture, kind)
  plain, model = _load(path), _load(path, weights='blocks')
  expected, num_matrices = _matrices(plain), 0
  for name, found in _matrices(model).items():
    if is_in_blocks(found):
      num_matrices += 1
      if len(found.shape) == 3:
        each = [jax.tree.map(lambda x, i=i: x[i], found) for i in range(len(found.weights))]
        found = np.stack([one.columns(jnp.arange(one.num_out)).T for one in each])
      else:
        columns = found.columns(jnp.arange(found.num_out))
        found = columns if name.split('/')[-1] == 'embedding' else columns.T
    np.testing.assert_array_equal(found, expected[name], err_msg=name)
  matrices = [name for name in expected if name.endswith(('kernel', 'embedding')) and 'position' not in name]
  if architecture.startswith('qwen35'):  # whose columns are in another order than the hub's
    matrices = [name for name in matrices if not name.endswith('recurrence/out/kernel')]
  assert num_matrices == len(matrices)
  tokens = jnp.arange(12)[None]
  logits, exact = _logits(model.for_decoding(), tokens), _logits(plain, tokens)
  assert 0 < np.median(np.abs(logits - exact)) < 0.05 * exact.std()


@pytest.mark.skipif(native.form() is None, reason='needs products in C++')
@pytest.mark.parametrize(
  ('architecture', 'kind'), [slow('qwen3moe', Type.Q8_0), ('mixtral', Type.Q4_1), slow('gpt-oss', Type.MXFP4)]
)
def test_experts_in_blocks_give_the_text_alone(architecture, kind, tmp_path):
  """To the bit: in chunks, in a batch, on a tree, token by token."""
  path = gguf_files.write_model(tmp_path / 'model.gguf', architecture, kind)
  model = _load(path, weights='blocks').for_decoding()
  kernel = model.params['layer_0']['mlp']['experts']['up']['kernel']
  assert is_in_blocks(kernel)
  assert kernel.weights.dtype == jnp.uint8
  rng, tree = np.random.default_rng(0), TokenTree((0, 0, 1, 1, 2, 4))
  prompts, lengths, tokens = rng.integers(0, 40, (3, 13)), np.array([13, 6, 1]), rng.integers(0, 40, (3, 7))
  prefill = jax.jit(Model.prefill, static_argnames='chunk_size')

  def of_tree(rows, chunk_size=16):
    empty = model.init_cache_fn(len(prompts[rows]), 24)
    cache, _ = prefill(model, prompts[rows], lengths[rows], empty, chunk_size=chunk_size)
    positions = lengths[rows, None] + tree.depths
    return np.asarray(_apply(model, tokens[rows], positions, jnp.asarray(tree.ancestors)[None], cache).logits)

  whole = of_tree(slice(None))
  np.testing.assert_array_equal(of_tree(slice(None), 3), whole)
  for row in range(3):
    np.testing.assert_array_equal(of_tree(slice(row, row + 1)), whole[row : row + 1])
  cache, _ = prefill(model, prompts, lengths, model.init_cache_fn(3, 24), chunk_size=16)
  for depth, node in enumerate((0, 1, 4, 6)):
    output = _apply(model, tokens[:, node : node + 1], lengths[:, None] + depth, jnp.ones((1, 1), bool), cache)
    np.testing.assert_array_equal(output.logits[:, 0], whole[:, node])
    cache = output.cache.commit(jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32))


def test_drafts_change_no_token(tmp_path):
  """A row's products do not depend on the rows beside it, so neither do its tokens."""
  path = gguf_files.write_model(tmp_path / 'model.gguf', 'llama', Type.Q4_1)
  target, draft = _load(path, weights='blocks').for_decoding(), _load(path).for_decoding()
  request = {'max_new_tokens': 24, 'sampling': SamplingParams.make(2, temperature=0)}
  prompts = np.array([[1, 2, 3], [4, 5, 6]])
  alone = generate(jax.random.key(0), target, None, prompts, **request)
  drafted = generate(jax.random.key(0), target, draft, prompts, method='block', tree=TokenTree.chains(1, 3), **request)
  np.testing.assert_array_equal(drafted.tokens, alone.tokens)
  assert int(drafted.num_target_calls.sum()) < int(alone.num_target_calls.sum())


def test_a_head_is_in_blocks_as_its_target_is(tmp_path, monkeypatch):
  """Its large matrices alone; the target's greedy tokens stay."""
  monkeypatch.setattr('spectr_jax.io.heads.head_files.LARGE', 64 * 64)
  path = gguf_files.write_model(tmp_path / 'model.gguf', 'llama', Type.Q8_0)
  target, plain = _load(path, weights='blocks'), _load(path)
  sizes = CausalLMConfig(20, 64, 1, 4, 2, 16, 96, 128, rope=Rope((1.0, 0.1)))
  config = HeadConfig(sizes, 64, 64, (0, 1, 2), has_unembedding=False)
  params = init_params(jax.random.key(0), config) | {'target_ids': jnp.arange(3, 23)}
  save_drafter(tmp_path / 'head', head_drafter(params, config, gguf_files.VOCAB), param_dtype='float32')
  head = load_drafter(tmp_path / 'head', target)
  kernels = [leaf for leaf in jax.tree.leaves(head.params, is_leaf=is_in_blocks) if is_in_blocks(leaf)]
  assert {kernel.shape for kernel in kernels} == {(64, 64), (64, 96), (96, 64), (128, 32), (128, 64), (192, 64)}
  request = {'max_new_tokens': 24, 'sampling': SamplingParams.make(2, temperature=0)}
  prompts, tree = np.array([[1, 2, 3], [4, 5, 6]]), TokenTree.chains(1, 3)
  alone = generate(jax.random.key(0), target, None, prompts, **request)
  drafted = generate(jax.random.key(0), target, head, prompts, method='block', tree=tree, **request)
  np.testing.assert_array_equal(drafted.tokens, alone.tokens)
  exact = load_drafter(tmp_path / 'head', plain)
  assert not any(map(is_in_blocks, jax.tree.leaves(exact.params, is_leaf=is_in_blocks)))
  with pytest.raises(ValueError, match='in int8 or in blocks is not saved'):
    save_drafter(tmp_path / 'other', head)


def test_what_has_no_blocks_is_refused(tmp_path):
  path = gguf_files.write_model(tmp_path / 'model.gguf', 'llama', Type.F32)
  with pytest.raises(ValueError, match="no matrix has blocks of Q4_0, .*: load it without weights='blocks'"):
    _load(path, weights='blocks')
  with pytest.raises(ValueError, match='those of a .gguf file, on one device'):
    _load(path, weights='blocks', mesh=make_mesh({'model': 1}))
  with pytest.raises(ValueError, match='are those of a .gguf file'):
    load_model('pretrained/draft', weights='blocks')
  with pytest.raises(ValueError, match='weights must be int8, blocks, or None'):
    load_model('pretrained/draft', weights='int4')


@pytest.mark.filterwarnings('ignore:overflow')
def test_bad_scales_are_named(tmp_path):
  tensors = gguf_files.tensors_of('llama')
  name = next(name for name in tensors if 'down_proj' in name)
  tensors[name] = np.full_like(tensors[name], 1e9)  # beyond float16
  path = gguf_files.write_model(tmp_path / 'model.gguf', 'llama', Type.Q8_0, tensors=tensors)
  with pytest.raises(ValueError, match=f'tensor {name}: a scale of its Q8_0 blocks is not finite'):
    _load(path, weights='blocks')


@pytest.mark.skipif(not pathlib.Path('/proc/self/status').exists(), reason='memory is read from /proc')
def test_what_was_read_of_a_file_is_given_back(tmp_path):
  """All tensors together are 32 MiB; no more of the file than one of them stays in memory."""
  writer = gguf.GGUFWriter(tmp_path / 'large.gguf', 'llama')
  for layer in range(32):
    writer.add_tensor(f'blk.{layer}.ffn_up.weight', np.ones((512, 512), np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()

  def resident():  # MiB of files
    return int(re.search(r'RssFile:\s+(\d+) kB', pathlib.Path('/proc/self/status').read_text())[1]) / 1024

  config = {'architectures': ['LlamaForCausalLM'], 'num_hidden_layers': 32}
  tensors = GgufTensors(read_header(tmp_path / 'large.gguf'), config, 'llama')
  before, whole = resident(), (slice(None), slice(None))
  assert all(tensors.read(name, whole).sum() == 512 * 512 for name in tensors.names())
  assert resident() < before + 8
