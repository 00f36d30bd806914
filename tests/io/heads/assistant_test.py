"""Assistants of Gemma 4 from their files: what is read, and what is refused by name."""

import json

import hostile
import jax
import numpy as np
import pytest
from hub_specs import SPECS
from safetensors.numpy import save_file
from tiny_hub import Recorded, random_array, tensors_of

from spectr_jax import SamplingParams, TokenTree, load_drafter
from spectr_jax.engine.generate import generate
from spectr_jax.io.heads.head_files import open_head
from spectr_jax.io.hub.hub_model import make_model

_TEXT = {
  name: SPECS['gemma4'][name]
  for name in ('vocab_size', 'num_attention_heads', 'num_key_value_heads', 'max_position_embeddings', 'head_dim',
               'global_head_dim', 'sliding_window')
} | {
  'model_type': 'gemma4_text', 'hidden_size': 12, 'intermediate_size': 20, 'num_hidden_layers': 2,
  'num_kv_shared_layers': 2, 'layer_types': ['sliding_attention', 'full_attention'], 'hidden_size_per_layer_input': 0,
  'vocab_size_per_layer_input': 0,
}  # fmt: skip
_SPEC = {
  'architectures': ['Gemma4AssistantForCausalLM'], 'model_type': 'gemma4_assistant', 'text_config': _TEXT,
  'backbone_hidden_size': 16, 'use_ordered_embeddings': True, 'num_centroids': 8, 'centroid_intermediate_top_k': 3,
}  # fmt: skip


@pytest.fixture(scope='module')
def target():
  return make_model(SPECS['gemma4'], Recorded(tensors_of(SPECS['gemma4'])))


def _arrays():
  alone = {'architectures': ['Gemma4ForCausalLM'], 'num_kv_shared_layers': 0}
  unread = ('k_proj', 'v_proj', 'k_norm')
  arrays = {name: x for name, x in tensors_of(_TEXT | alone).items() if not any(part in name for part in unread)}
  return arrays | {
    'pre_projection.weight': random_array(12, 32),
    'post_projection.weight': random_array(16, 12),
    'masked_embedding.centroids.weight': random_array(8, 12),
    'masked_embedding.token_ordering': np.random.default_rng(0).permutation(32),
  }


def _write(folder, spec=_SPEC, changes=()):
  folder.mkdir(exist_ok=True)
  arrays = {name: array for name, array in (_arrays() | dict(changes)).items() if array is not None}
  save_file(arrays, folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(spec))
  return folder


def test_it_reads_the_last_own_layers_and_drafts(tmp_path, target):
  folder = _write(tmp_path)
  files = open_head(folder)
  assert (files.format, files.is_part) == ('Gemma 4 assistant', False)
  drafter = files.load(target)
  assert drafter.kv_layers == (0, 1)
  assert drafter.feature_layers == (-1,)
  np.testing.assert_array_equal(drafter.params['token_ids'], _arrays()['masked_embedding.token_ordering'])
  np.testing.assert_array_equal(drafter.params['before']['kernel'], random_array(12, 32).T)
  prompts, shared = [[3, 1, 4, 1, 5], [9]], {'max_new_tokens': 8, 'sampling': SamplingParams(0.0)}
  key = jax.random.key(0)
  plain = generate(key, target, None, prompts, method='autoregressive', **shared)
  found = generate(key, target, drafter, prompts, method='race_traversal', tree=TokenTree.chains(2, 2), **shared)
  np.testing.assert_array_equal(found.tokens, plain.tokens)


def test_an_untied_head_is_the_one_that_counts(tmp_path, target):
  changes = {'lm_head.weight': 2 * random_array(32, 12), 'model.embed_tokens.weight': None}
  drafter = load_drafter(_write(tmp_path, _SPEC | {'tie_word_embeddings': False}, changes), target)
  np.testing.assert_array_equal(drafter.params['embedding'], 2 * random_array(32, 12))


@pytest.mark.parametrize(
  ('fields', 'text', 'message'),
  [
    ({'architectures': ['Gemma5Assistant']}, {}, 'architecture Gemma5Assistant is unknown in this format'),
    ({'text_config': None}, {}, 'has no text_config'),
    ({'backbone_hidden_size': 17}, {}, 'backbone_hidden_size is 17, and the target is 16 wide'),
    ({'backbone_hidden_size': 10**9}, {}, 'backbone_hidden_size must be a whole number'),
    ({'num_centroids': 7}, {}, '32 tokens in 7 clusters'),
    ({'centroid_intermediate_top_k': 9}, {}, 'of which 9 are chosen, do not fit'),
    ({}, {'model_type': 'gemma3_text'}, 'text_config has model_type gemma3_text'),
    ({}, {'num_kv_shared_layers': 1}, 'num_kv_shared_layers must be 2, all layers of an assistant; got 1'),
    ({}, {'hidden_size_per_layer_input': 4}, 'hidden_size_per_layer_input 4 is not supported in an assistant'),
    ({}, {'num_hidden_layers': -1}, 'num_hidden_layers must be a whole number|must be -1'),
    ({}, {'num_hidden_layers': 10_000, 'num_kv_shared_layers': 0, 'layer_types': None}, '10000 layers, but'),
    ({}, {'head_dim': 4}, 'layer 0 of the assistant reads 2 heads of 4 numbers, and layer 0 of the target has 2 of 6'),
    ({}, {'global_head_dim': 10}, 'layer 1 of the assistant reads 2 heads of 10 numbers'),
    ({}, {'enable_moe_block': True}, 'enable_moe_block True is not supported in an assistant'),
  ],
)
def test_what_is_refused(tmp_path, target, fields, text, message):
  spec = _SPEC | ({'text_config': _TEXT | text} if text else {}) | fields
  hostile.refusal(lambda: load_drafter(_write(tmp_path, spec), target), tmp_path, message)


@pytest.mark.parametrize(
  ('name', 'array', 'message'),
  [
    ('masked_embedding.token_ordering', np.zeros(32, np.int64), 'does not have each of the 32 tokens once'),
    ('masked_embedding.token_ordering', np.arange(32.0), 'must hold integers'),
    ('post_projection.weight', random_array(16, 13), 'must have shape'),
    ('model.norm.weight', None, 'lacks 1 tensors, the first of them model.norm.weight'),
    ('model.layers.0.self_attn.k_proj.weight', random_array(12, 12), '1 tensors too many'),
  ],
)
def test_tensors_that_are_refused(tmp_path, target, name, array, message):
  hostile.refusal(lambda: load_drafter(_write(tmp_path, changes={name: array}), target), tmp_path, message)


def test_targets_of_other_kinds(tmp_path):
  llama = SPECS['llama'] | {'head_dim': 6}
  other = make_model(llama, Recorded(tensors_of(llama)))
  hostile.refusal(
    lambda: load_drafter(_write(tmp_path), other), tmp_path, 'a layer of its kind, and the target has none'
  )


@pytest.mark.slow
def test_mutated_configurations(tmp_path, target):
  tally, folder = hostile.Tally(tmp_path), _write(tmp_path)
  for rng in hostile.rngs(200, 'assistant'):
    content = hostile.mutated_json_text(_SPEC, rng)
    (folder / 'config.json').write_bytes(content)
    tally.read(lambda: load_drafter(folder, target), content)
  tally.check(200)
