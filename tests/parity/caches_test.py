"""Caches of Gemma 4 and of recurrent layers, and multimodal folders, beside `transformers`."""

import copy
import dataclasses
import importlib
import json

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hub

from spectr_jax import SamplingParams, TokenTree, generate, load_drafter
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import noise_keys, propose, run_round
from spectr_jax.engine.reading import init_decode
from spectr_jax.io.hub.hub_model import load_hub_model
from spectr_jax.model import Model

torch = pytest.importorskip('torch', reason='needs the extra parity')
transformers = pytest.importorskip('transformers', reason='needs the extra parity')
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures('highest')]

from tests.parity import families_test  # noqa: E402 (which needs torch)

_VISION = {
  'hidden_size': 16, 'intermediate_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2,
  'num_key_value_heads': 2, 'head_dim': 8, 'position_embedding_size': 16, 'patch_size': 4, 'image_size': 16,
}  # fmt: skip
_QWEN3_5_VISION = {
  'depth': 1, 'hidden_size': 16, 'intermediate_size': 16, 'num_heads': 2, 'out_hidden_size': 32, 'patch_size': 4,
}  # fmt: skip
_UNIFIED_VISION = {'hidden_size': 16, 'intermediate_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2}
_AUDIO = {
  'hidden_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2, 'output_proj_dims': 16,
  'subsampling_conv_channels': [4, 4],
}  # fmt: skip
_CASES = ('gemma4_small', 'gemma4_large', 'gemma4_mixture', 'qwen3_5', 'lfm2', 'lfm2_moe', 'falcon_h1', 'nemotron_h')
_SHARED = {'num_kv_shared_layers': 2, 'hidden_size_per_layer_input': 8}


def _reference(name):
  return families_test.random_reference(*families_test._class_and_config(name))


@pytest.fixture(scope='module', params=_CASES)
def case(request, tmp_path_factory):
  reference, folder = _reference(request.param), tmp_path_factory.mktemp(request.param)
  reference.save_pretrained(folder)
  return reference, folder


def _near(found, reference, texts):
  families_test._assert_near(found, families_test._reference_logits(reference, texts), reference, 'float32')


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


def test_bfloat16_is_as_near_to_float32_as_the_reference(case):
  reference, folder = case
  model, (_, _, texts) = load_hub_model(folder, dtype='bfloat16'), families_test._texts()
  tokens, lengths = np.array([text + [0] * (15 - len(text)) for text in texts]), np.array(list(map(len, texts)))
  positions, causal = jnp.broadcast_to(jnp.arange(15), tokens.shape), jnp.tril(jnp.ones((15, 15), bool))
  logits = jax.jit(Model.apply)(model, tokens, positions, causal, model.init_cache_fn(len(tokens), 1)).logits
  exact = families_test._reference_logits(reference, texts)
  theirs = families_test._reference_logits(copy.deepcopy(reference).to(torch.bfloat16), texts) - exact
  ours = np.asarray(logits)[np.arange(len(texts)), lengths - 1] - exact
  # Of the median text: in 16 bits a token between two experts may be sent to another one.
  our_error, their_error = (np.median(error.std(axis=1)) for error in (ours, theirs))
  assert our_error < 1.25 * their_error
  assert their_error < 0.3 * exact.std()


def test_greedy_text_with_and_without_a_draft(case):
  reference, folder = case
  model, (prompts, _, _) = load_hub_model(folder).for_decoding(), families_test._texts()
  lengths, sampling = families_test.LENGTHS, SamplingParams(0.0)
  found = generate(
    jax.random.key(0), model, None, prompts, lengths, method='autoregressive', max_new_tokens=10, sampling=sampling
  )
  draft, tree = load_hub_model(folder), TokenTree.chains(1, 4)
  near = jax.tree.map(lambda x: x + 0.02 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), draft.params)
  draft, options = dataclasses.replace(draft, params=near), {'max_new_tokens': 10, 'sampling': sampling}
  drafted = generate(jax.random.key(0), model, draft, prompts, lengths, method='block', tree=tree, **options)
  np.testing.assert_array_equal(drafted.tokens, found.tokens)
  texts = [row[:n] for row, n in zip(prompts.tolist(), lengths)]
  for _ in range(10):
    texts = [[*text, int(row.argmax())] for text, row in zip(texts, families_test._reference_logits(reference, texts))]
  np.testing.assert_array_equal(found.tokens, [text[-10:] for text in texts])


def _whole(name):
  """A multimodal model, the class of its text model and the prefix of its tensors."""
  small, mixture = (families_test.SIZES | families_test.CASES[name][1] for name in ('gemma4_small', 'gemma4_mixture'))
  mistral = {'model_type': 'mistral', **families_test.SIZES}
  gemma3 = families_test.SIZES | families_test.CASES['gemma3'][1]
  make, text, vision, more = {
    'gemma4': ('Gemma4', small, _VISION, {'audio_config': _AUDIO}),
    'gemma4_mixture': ('Gemma4', mixture, _VISION, {}),
    'gemma4_unified': ('Gemma4Unified', families_test.SIZES | families_test._GEMMA4, _UNIFIED_VISION, {}),
    'gemma3': ('Gemma3', gemma3, _VISION, {'mm_tokens_per_image': 4}),
    'qwen3_5': ('Qwen3_5', families_test.SIZES | families_test.CASES['qwen3_5'][1], _QWEN3_5_VISION, {}),
    'mistral3': ('Mistral3', mistral, {'model_type': 'pixtral', **_VISION}, {}),
  }[name]
  config = getattr(transformers, f'{make}Config')(text_config=text, vision_config=vision, **more)
  return families_test.random_reference(getattr(transformers, f'{make}ForConditionalGeneration'), config)


@pytest.mark.parametrize('name', ['gemma4', 'gemma4_mixture', 'gemma4_unified', 'gemma3', 'qwen3_5', 'mistral3'])
def test_folders_of_multimodal_classes(name, tmp_path):
  whole = _whole(name)
  whole.save_pretrained(tmp_path / 'whole')
  with pytest.warns(UserWarning, match='config.json: the text model alone is read; left out are .*(vision_|visual)'):
    model = load_hub_model(tmp_path / 'whole')
  texts = np.random.default_rng(0).integers(3, 61, (2, 16))
  positions = jnp.broadcast_to(jnp.arange(16), texts.shape)
  output = jax.jit(Model.apply)(model, texts, positions, jnp.tril(jnp.ones((16, 16), bool)), model.init_cache_fn(2, 1))
  with torch.no_grad():
    expected = whole(input_ids=torch.tensor(texts)).logits.float().numpy()
  families_test._assert_near(output.logits, expected, whole, 'float32')


@pytest.mark.parametrize('name', _CASES[1:])
def test_two_devices_write_the_text_of_one(name, tmp_path):
  """`decode.main` on a multimodal folder with a tokenizer, over a mesh of two and on one device."""
  model_class, config = families_test._class_and_config(name)
  config.vocab_size = 320
  reference = families_test.random_reference(model_class, config)
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


def _assistant_pair(has_clusters, is_unified=False):
  """A target and an assistant of `transformers`; the classes of assistants are no names of the library itself."""
  module = importlib.import_module('transformers.models.gemma4_assistant.modeling_gemma4_assistant')
  sizes = families_test.SIZES | families_test._GEMMA4 | {'vocab_size': 64}
  target_class, config_class = transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig
  shared = _SHARED | {'vocab_size_per_layer_input': 64}
  if is_unified:
    name = 'transformers.models.gemma4_unified_assistant'
    module = importlib.import_module(f'{name}.modeling_gemma4_unified_assistant')
    unified = importlib.import_module('transformers.models.gemma4_unified.modeling_gemma4_unified')
    target_class, shared = unified.Gemma4UnifiedForCausalLM, {}
    config_class = target_class.config_class
  target = families_test.random_reference(target_class, config_class(**sizes, **shared))
  kinds = [*['sliding_attention'] * 3, 'full_attention']
  own = sizes | {'hidden_size': 24, 'num_hidden_layers': 4, 'layer_types': kinds}
  if not is_unified:
    own |= {'hidden_size_per_layer_input': 0, 'vocab_size_per_layer_input': 0}
  else:
    own |= {'model_type': 'gemma4_unified_text'}
  classes = {name: getattr(module, name) for name in dir(module) if name.endswith('AssistantForCausalLM')}
  assistant_class = classes['Gemma4UnifiedAssistantForCausalLM' if is_unified else 'Gemma4AssistantForCausalLM']
  config = assistant_class.config_class(
    text_config=own, backbone_hidden_size=32, use_ordered_embeddings=has_clusters, num_centroids=8,
    centroid_intermediate_top_k=3,
  )  # fmt: skip
  assistant = families_test.random_reference(assistant_class, config)
  with torch.no_grad():
    for parameter in assistant.parameters():
      if parameter.ndim == 2:
        parameter *= 0.5  # a step's output is the next one's input, and would amplify rounding
  if has_clusters:
    assistant.masked_embedding.token_ordering.copy_(torch.randperm(64))
  return target, assistant


def _their_logits(target, assistant, text, guesses):
  """After the last token of a text and after each guess but the last; tokens that are not scored have no logit."""
  ids = torch.tensor([text])
  with torch.no_grad():
    read = target(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    hidden, found = read.hidden_states[-1][:, -1:], []
    for token in (text[-1], *guesses[:-1]):
      embedded = target.get_input_embeddings()(torch.tensor([[token]]))
      output = assistant(
        inputs_embeds=torch.cat([embedded, hidden], -1), position_ids=torch.tensor([[len(text) - 1]]),
        shared_kv_states=dict(read.shared_kv_states),
      )  # fmt: skip
      found.append(output.logits[0, 0].numpy())
      hidden = output.last_hidden_state
  found = np.stack(found)
  if assistant.masked_embedding is not None:
    found = np.where(found > found.min(axis=1, keepdims=True), found, -np.inf)
  return found


@pytest.mark.parametrize('kind', ['all tokens', 'clusters', 'unified'])
def test_assistants(kind, tmp_path):
  """Their distributions in four rounds of ragged rows, and greedy text, which is that without a draft."""
  target, theirs = _assistant_pair(kind == 'clusters', is_unified=kind == 'unified')
  target.save_pretrained(tmp_path / 'target')
  theirs.save_pretrained(tmp_path / 'assistant')
  model = load_hub_model(tmp_path / 'target').for_decoding()
  drafter = load_drafter(str(tmp_path / 'assistant'), model).for_decoding()
  prompts, lengths = np.random.default_rng(0).integers(3, 64, (3, 14)), np.array([14, 2, 9])
  tree, temperature = TokenTree.chains(1, 3), 2.0
  decoder = Decoder.make(model, drafter, method='block', tree=tree, max_new_tokens=20, cache_size=40)
  state = init_decode(decoder, jax.random.key(2), prompts, lengths, sampling=SamplingParams(temperature))
  draft, advance = jax.jit(propose), jax.jit(run_round)
  for _ in range(4):
    proposal = draft(decoder, state, noise_keys(decoder, state)[0])
    for row, length in enumerate(lengths):
      text = [*prompts[row, :length].tolist(), *state.result.tokens[row, : state.result.lengths[row]].tolist()]
      expected = _their_logits(target, theirs, text, np.asarray(proposal.tokens[row]).tolist())
      probs = np.asarray(proposal.probs[row], np.float64)
      is_scored = np.isfinite(expected)
      np.testing.assert_array_equal(probs > 0, is_scored)
      logits = temperature * np.log(np.where(is_scored, probs, 1))
      tops = (np.where(is_scored, x, -np.inf).max(1, keepdims=True) for x in (logits, expected))
      centered = (np.where(is_scored, x - top, 0) for x, top in zip((logits, expected), tops))
      np.testing.assert_allclose(*centered, atol=1e-4 * np.abs(expected[is_scored]).max() + 1e-4)
    state, _ = advance(decoder, state)
  shared = {'max_new_tokens': 12, 'sampling': SamplingParams(0.0)}
  plain = generate(jax.random.key(0), model, None, prompts, lengths, method='autoregressive', **shared)
  for method, tree in (('race_traversal', TokenTree.chains(2, 3)), ('specinfer', families_test.TREE)):
    found = generate(jax.random.key(0), model, drafter, prompts, lengths, method=method, tree=tree, **shared)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
