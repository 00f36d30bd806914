"""Gemma 4 beside `transformers` where it differs from other families: its cache, and its multimodal folders."""

import dataclasses
import json

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hub

from spectr_jax import METHODS, SamplingParams, TokenTree, generate
from spectr_jax.io.hub.load import load_hub_model
from spectr_jax.io.load import load_model
from spectr_jax.model import Model

torch = pytest.importorskip('torch', reason='needs the extra parity')
transformers = pytest.importorskip('transformers', reason='needs the extra parity')
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures('highest')]

from tests.parity import families_test  # noqa: E402 (which needs torch)

_VISION = {
  'hidden_size': 16, 'intermediate_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2,
  'num_key_value_heads': 2, 'head_dim': 8, 'position_embedding_size': 16, 'patch_size': 4, 'image_size': 16,
}  # fmt: skip
_UNIFIED_VISION = {'hidden_size': 16, 'intermediate_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2}
_AUDIO = {
  'hidden_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2, 'output_proj_dims': 16,
  'subsampling_conv_channels': [4, 4],
}  # fmt: skip
_CASES = ('gemma4_small', 'gemma4_large')


def _reference(name):
  return families_test.random_reference(*families_test._class_and_config(name))


@pytest.fixture(scope='module', params=_CASES)
def case(request, tmp_path_factory):
  reference, folder = _reference(request.param), tmp_path_factory.mktemp(request.param)
  reference.save_pretrained(folder)
  return reference, folder


def _near(found, reference, texts):
  families_test._assert_near(found, families_test._reference_logits(reference, texts), 'float32')


@pytest.mark.parametrize('chunk', [1, 3, 8, 32])
def test_prompts_in_chunks(case, chunk):
  """Texts of four windows and more, after which the window has moved on, of unequal length."""
  reference, folder = case
  model = load_hub_model(folder).for_decoding()
  tokens, lengths = np.random.default_rng(0).integers(3, 61, (3, 32)), np.array([31, 12, 1])

  @jax.jit
  def read(model, tokens, lengths):
    cache, _ = model.prefill(tokens, lengths - 1, model.init_cache_fn(3, 40), chunk_size=chunk)
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    return model.apply(last, lengths[:, None] - 1, jnp.ones((1, 1), bool), cache).logits[:, 0]

  _near(read(model, tokens, lengths), reference, [row[:n] for row, n in zip(tokens.tolist(), lengths)])


def test_a_round_after_a_partial_acceptance(case):
  """What a tree left in no cache is gone: rows keep 1, 3 and 2 of its nodes, then read another tree."""
  reference, folder = case
  model, tree = load_hub_model(folder), families_test.TREE
  prompts, tokens, _ = families_test._texts()
  lengths, apply = families_test.LENGTHS, jax.jit(Model.apply)
  cache = families_test._prefill(model, prompts, lengths)
  output = apply(model, tokens, lengths[:, None] + tree.depths, jnp.asarray(tree.ancestors), cache)
  paths, kept = np.array([[0, 1, 4, 6], [0, 2, 5, 6], [0, 1, 3, 6]]), np.array([1, 3, 2])
  cache = output.cache.commit(jnp.asarray(paths), jnp.asarray(kept))
  texts = [
    [*prompt[:length], *row[path[:count]]]
    for prompt, length, row, path, count in zip(prompts, lengths, tokens, paths, kept)
  ]
  more = np.random.default_rng(1).integers(3, 61, tokens.shape)
  positions = (lengths + kept)[:, None] + tree.depths
  logits = apply(model, more, positions, jnp.asarray(tree.ancestors), cache).logits
  below = [(0, *path) for path in tree.paths.tolist()]
  whole = [[*text, *(row[node] for node in nodes if node >= 0)] for text, row in zip(texts, more) for nodes in below]
  _near(np.asarray(logits).reshape(len(whole), -1), reference, whole)


def test_greedy_text_without_a_draft(case):
  reference, folder = case
  model, (prompts, _, _) = load_hub_model(folder).for_decoding(), families_test._texts()
  lengths, sampling = families_test.LENGTHS, SamplingParams(0.0)
  found = generate(
    jax.random.key(0), model, None, prompts, lengths, method='autoregressive', max_new_tokens=10, sampling=sampling
  )
  texts = [row[:n] for row, n in zip(prompts.tolist(), lengths)]
  for _ in range(10):
    texts = [
      [*text, int(row.argmax())] for text, row in zip(texts, families_test._reference_logits(reference, texts))
    ]
  np.testing.assert_array_equal(found.tokens, [text[-10:] for text in texts])


def _whole(name):
  """A multimodal model, the class of its text model and the prefix of its tensors."""
  text = families_test.SIZES | families_test.CASES['gemma4_small'][1]
  gemma3 = families_test.SIZES | families_test.CASES['gemma3'][1]
  make, text, vision, more = {
    'gemma4': ('Gemma4', text, _VISION, {'audio_config': _AUDIO}),
    'gemma4_unified': ('Gemma4Unified', families_test.SIZES | families_test._GEMMA4, _UNIFIED_VISION, {}),
    'gemma3': ('Gemma3', gemma3, _VISION, {'mm_tokens_per_image': 4}),
    'mistral3': ('Mistral3', {'model_type': 'mistral', **families_test.SIZES}, {'model_type': 'pixtral', **_VISION}, {}),
  }[name]
  config = getattr(transformers, f'{make}Config')(text_config=text, vision_config=vision, **more)
  return families_test.random_reference(getattr(transformers, f'{make}ForConditionalGeneration'), config)


@pytest.mark.parametrize('name', ['gemma4', 'gemma4_unified', 'gemma3', 'mistral3'])
def test_folders_of_multimodal_classes(name, tmp_path):
  whole = _whole(name)
  whole.save_pretrained(tmp_path / 'whole')
  with pytest.warns(UserWarning, match='config.json: the text model alone is read; left out are .*vision_'):
    model = load_hub_model(tmp_path / 'whole')
  texts = np.random.default_rng(0).integers(3, 61, (2, 16))
  positions = jnp.broadcast_to(jnp.arange(16), texts.shape)
  output = jax.jit(Model.apply)(model, texts, positions, jnp.tril(jnp.ones((16, 16), bool)), model.init_cache_fn(2, 1))
  with torch.no_grad():
    expected = whole(input_ids=torch.tensor(texts)).logits.float().numpy()
  families_test._assert_near(output.logits, expected, 'float32')


def test_two_devices_write_the_text_of_one(tmp_path):
  """`decode.main` on a multimodal folder with a tokenizer, over a mesh of two and on one device."""
  config = families_test._class_and_config('gemma4_large')[1]
  config.vocab_size = 320
  reference = families_test.random_reference(transformers.Gemma4ForCausalLM, config)
  reference.save_pretrained(tmp_path / 'target')
  tiny_hub.write(tmp_path / 'target', generation_config={'eos_token_id': 41})
  prompts = tmp_path / 'prompts.jsonl'
  prompts.write_text('\n'.join(json.dumps({'prompt': text}) for text in ('the owl', 'he', 'the the the owl the owl')))
  texts = []
  for mesh in ('', 'model:2'):
    path = tmp_path / f'{len(texts)}.jsonl'
    commands.succeed(
      'decode.main', f'--target={tmp_path / "target"}', '--draft=lookup', f'--prompts={prompts}', '--temperature=0',
      '--method=race_traversal', '--num_drafts=2', '--draft_length=3', '--max_new_tokens=12', f'--generations={path}',
      *([f'--mesh={mesh}'] if mesh else []), JAX_DEFAULT_MATMUL_PRECISION='highest', num_devices=1 + bool(mesh),
    )  # fmt: skip
    texts.append([json.loads(line)['tokens'] for line in path.read_text().splitlines()])
  assert texts[0] == texts[1]
