"""Configurations: what a file does not say, what is refused by name, and sizes that nothing may be made of."""

import json
import time

import hostile
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hub_specs import SPECS
from tiny_hub import Recorded, tensors_of, write_model

from spectr_jax import generate
from spectr_jax.engine.result import NotFiniteError
from spectr_jax.io.hub.families import FAMILIES, read_spec
from spectr_jax.io.hub.hub_model import load_hub_model, make_model, read_hub_config

_BARE = {
  'vocab_size': 32, 'hidden_size': 128, 'intermediate_size': 24, 'num_hidden_layers': 30, 'num_attention_heads': 64,
  'max_position_embeddings': 8192,
}  # fmt: skip


def _bare(architecture, **fields):
  return read_spec({**_BARE, 'architectures': [architecture], **fields})[1]


def _refused(folder, content):
  """The message with which a folder is refused that holds the tensors of a tiny Llama."""
  if not (folder / 'model.safetensors').exists():
    write_model(folder, SPECS['llama'])
  (folder / 'config.json').write_text(content if isinstance(content, str) else json.dumps(content))
  return hostile.refusal(lambda: load_hub_model(folder), folder)


def _decode(spec, length, tensors=None):
  model = make_model(spec, Recorded(tensors_of(spec) if tensors is None else tensors))
  prompts, lengths = jnp.ones((1, length), jnp.int32), jnp.array([length])
  return generate(jax.random.key(0), model, None, prompts, lengths, method='autoregressive', max_new_tokens=2)


@pytest.mark.parametrize(
  ('architecture', 'fields', 'expected'),
  [
    ('LlamaForCausalLM', {}, {'num_kv_heads': 64, 'head_dim': 2, 'windows': ()}),
    ('MistralForCausalLM', {}, {'num_kv_heads': 8, 'windows': (4096,) * 30}),
    ('MistralForCausalLM', {'sliding_window': None, 'num_key_value_heads': None}, {'num_kv_heads': 64, 'windows': ()}),
    ('Qwen2ForCausalLM', {}, {'num_kv_heads': 32, 'head_dim': 2, 'windows': ()}),
    ('Qwen2ForCausalLM', {'use_sliding_window': True}, {'windows': (None,) * 28 + (4096,) * 2}),
    ('Qwen2ForCausalLM', {'use_sliding_window': True, 'sliding_window': None}, {'windows': ()}),
    ('Qwen3ForCausalLM', {}, {'num_kv_heads': 32, 'head_dim': 128, 'has_qkv_bias': False}),
    ('GemmaForCausalLM', {}, {'num_kv_heads': 16, 'head_dim': 256, 'is_tied': True, 'attention_soft_cap': None}),
    (
      'Gemma2ForCausalLM', {},
      {
        'num_kv_heads': 4, 'head_dim': 256, 'query_scale': 1 / 16, 'attention_soft_cap': 50.0, 'logit_soft_cap': 30.0,
        'windows': (4096, None) * 15,
      },
    ),
    ('Gemma2ForCausalLM', {'attn_logit_softcapping': None}, {'attention_soft_cap': None, 'logit_soft_cap': 30.0}),
    ('Gemma2ForCausalLM', {'hidden_activation': 'gelu'}, {'activation': 'gelu'}),
    (
      'Gemma3ForCausalLM', {},
      {
        'num_kv_heads': 4, 'head_dim': 256, 'query_scale': 1 / 16, 'attention_soft_cap': None, 'logit_soft_cap': None,
        'windows': (*(4096,) * 5, None) * 5,
      },
    ),
    ('GPTNeoXForCausalLM', {'hidden_size': 1024, 'num_key_value_heads': 2}, {'num_kv_heads': 64, 'norm_epsilon': 1e-5}),
  ],
)  # fmt: skip
def test_fields_that_are_not_there(architecture, fields, expected):
  """As the configuration classes of Transformers 5.24 have them."""
  config = _bare(architecture, **fields)
  assert {name: getattr(config, name) for name in expected} == expected


def test_rope_of_gemma3_by_default():
  config = _bare('Gemma3ForCausalLM', rope_parameters={'full_attention': {'rope_type': 'linear', 'factor': 2.0}})
  assert config.rope.frequencies[1] == pytest.approx(1e6 ** (-1 / 128) / 2)
  assert config.window_rope.frequencies[1] == pytest.approx(1e4 ** (-1 / 128))


@pytest.mark.parametrize(
  ('spec', 'length'),
  [
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': 4, 'original_max_position_embeddings': 32}}, 128),
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': 4}}, 128),
    ({'rope_parameters': {'rope_type': 'yarn', 'factor': 2.5}, 'original_max_position_embeddings': 32}, 80),
    ({'rope_scaling': {'type': 'yarn', 'original_max_position_embeddings': 8}}, 32),
    ({'rope_scaling': {'rope_type': 'linear', 'factor': 4}}, 32),
    (
      {
        'rope_scaling': {
          'rope_type': 'llama3', 'factor': 8, 'low_freq_factor': 1, 'high_freq_factor': 4,
          'original_max_position_embeddings': 32,
        }
      },
      32,
    ),
  ],
)  # fmt: skip
def test_yarn_stretches_the_context(spec, length):
  assert read_spec(SPECS['llama'] | spec)[1].context_length == length


def test_texts_beyond_the_original_context_are_decoded():
  scaling = {'rope_type': 'yarn', 'factor': 4, 'original_max_position_embeddings': 32}
  _decode(SPECS['llama'] | {'rope_scaling': scaling}, 40)
  with pytest.raises(ValueError, match='limit of 32'):
    _decode(SPECS['llama'], 40)


# What is refused.

_LLAMA = SPECS['llama']
_HUGE = [10**9, 2 * 10**9, 10**18, 10**30, -1, 0, 2.5, 3.0, True, '3', [3], {'a': 3}, float('nan'), float('inf')]
_NUMBERS = [0, -1, -0.5, float('inf'), float('-inf'), float('nan'), 10**400, True, '1', [1.0], {}]


@pytest.mark.parametrize(
  'name',
  [
    'vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads', 'num_key_value_heads',
    'head_dim',
  ],
)  # fmt: skip
def test_sizes_are_numbers_within_reason(tmp_path, name):
  for value in _HUGE:
    assert f'config.json: {name} must be a whole number from 1 to ' in _refused(tmp_path, _LLAMA | {name: value})


@pytest.mark.parametrize(('name', 'others'), [('rope_theta', []), ('partial_rotary_factor', [10**9])])
def test_numbers_are_finite_and_in_their_range(tmp_path, name, others):
  for value in (*_NUMBERS, *others):
    assert f'config.json: {name} must be a finite number' in _refused(tmp_path, _LLAMA | {name: value})


@pytest.mark.parametrize(
  ('architecture', 'fields', 'message'),
  [
    ('LlamaForCausalLM', {'architectures': ['BloomForCausalLM']}, 'architecture BloomForCausalLM is unknown; known '),
    ('LlamaForCausalLM', {'architectures': None}, 'architecture none is unknown'),
    ('LlamaForCausalLM', {'hidden_act': 'mish'}, "activation 'mish' is unknown; known are silu, "),
    ('LlamaForCausalLM', {'hidden_size': None}, 'the configuration of LlamaForCausalLM has no hidden_size'),
    ('LlamaForCausalLM', {'num_key_value_heads': 3}, 'num_heads 4 must be a multiple of the 3 heads'),
    ('LlamaForCausalLM', {'quantization_config': {'quant_method': 'gptq'}}, 'quantized by gptq are not read; known'),
    ('GPT2LMHeadModel', {'scale_attn_by_inverse_layer_idx': True}, 'scale_attn_by_inverse_layer_idx True is not supp'),
    ('LlamaForCausalLM', {'max_position_embeddings': 10**18}, 'max_position_embeddings must be'),
    ('LlamaForCausalLM', {'rms_norm_eps': -1e-6}, 'rms_norm_eps must be a finite number of at least 0'),
    ('LlamaForCausalLM', {'architectures': [['a']]}, 'architectures must be a list'),
    ('LlamaForCausalLM', {'architectures': ['a\nb\x1b[2J']}, r"architecture 'a\\nb\\x1b\[2J' is unknown"),
    ('LlamaForCausalLM', {'quantization_config': [1]}, 'quantization_config must be an object'),
    ('LlamaForCausalLM', {'quantization_config': {'quant_method': {'a': 1}}}, 'quantized by'),
    ('LlamaForCausalLM', {'model_type': 'granite'}, 'model_type granite is not llama, that of LlamaForCausalLM'),
    ('LlamaForCausalLM', {'tie_word_embeddings': 1}, 'tie_word_embeddings must be true or false'),
    ('LlamaForCausalLM', {'hidden_act': ['silu']}, 'hidden_act must be a text'),
    ('LlamaForCausalLM', {'torch_dtype': 32}, 'torch_dtype must be a text'),
    ('LlamaForCausalLM', {'eos_token_id': -1}, 'eos_token_id must be'),
    ('LlamaForCausalLM', {'eos_token_id': [1, None]}, 'eos_token_id must be'),
    ('LlamaForCausalLM', {'bos_token_id': -1}, 'bos_token_id must be'),
    ('LlamaForCausalLM', {'hidden_size': 30}, 'width of 30 does not divide into 4 heads'),
    ('LlamaForCausalLM', {'use_bidirectional_attention': True}, 'use_bidirectional_attention True is not supported'),
    ('GemmaForCausalLM', {'use_bidirectional_attention': 'vision'}, 'use_bidirectional_attention .* is not supported'),
    ('LlamaForCausalLM', {'is_causal': False}, 'is_causal False is not supported'),
    ('LlamaForCausalLM', {'num_local_experts': 8}, 'num_local_experts 8 is not supported'),
    ('LlamaForCausalLM', {'clip_qkv': 8.0}, 'clip_qkv 8.0 is not supported'),
    ('LlamaForCausalLM', {'rope_interleaved': True}, 'rope_interleaved True is not supported'),
    ('LlamaForCausalLM', {'logits_scaling': 8.0}, 'logits_scaling 8.0 is not supported'),
    ('LlamaForCausalLM', {'embedding_multiplier': 12}, 'embedding_multiplier 12 is not supported'),
    ('LlamaForCausalLM', {'attn_logit_softcapping': 50.0}, 'attn_logit_softcapping 50.0 is not supported'),
    ('LlamaForCausalLM', {'no_rope_layers': [1, 0]}, r'no_rope_layers \[1, 0\] is not supported'),
    ('LlamaForCausalLM', {'sliding_window': 4}, 'sliding_window 4 is not supported in this family'),
    ('MistralForCausalLM', {'sliding_window': 0}, 'sliding_window must be a whole number from 1'),
    ('LlamaForCausalLM', {'layer_types': ['chunked_attention'] * 2}, "'chunked_attention' is not supported"),
    ('Qwen2ForCausalLM', {'layer_types': ['linear_attention', 'full_attention']}, "'linear_attention' is not supp"),
    ('Gemma2ForCausalLM', {'layer_types': ['full_attention']}, 'layer_types names 1 layers, but there are 2'),
    ('Qwen3ForCausalLM', {'layer_types': ['sliding_attention'] * 2}, 'sliding_attention, but there is no sliding_wind'),
    ('Gemma2ForCausalLM', {'attn_logit_softcapping': 0}, 'attn_logit_softcapping must be a finite number above 0'),
    ('Gemma2ForCausalLM', {'final_logit_softcapping': -30}, 'final_logit_softcapping must be a finite number above 0'),
    ('Gemma2ForCausalLM', {'query_pre_attn_scalar': -5}, 'query_pre_attn_scalar must be a finite number'),
    ('Gemma3ForCausalLM', {'sliding_window_pattern': 0}, 'sliding_window_pattern must be'),
    ('Gemma3ForCausalLM', {'rope_parameters': {'rope_theta': 1e6}}, "rope_parameters: 'rope_theta' is not supported"),
    ('Gemma3ForCausalLM', {'rope_parameters': {'full_attention': [1]}}, 'must hold an object'),
    ('GemmaForCausalLM', {'hidden_act': 'relu', 'hidden_activation': 'silu'}, 'contradict each other'),
    ('GPTNeoXForCausalLM', {'rotary_pct': 10**9}, 'rotary_pct must be a finite number above 0 and of at most 1'),
    ('GPTNeoXForCausalLM', {'head_dim': 8}, 'head_dim 8 is not supported in this family'),
    ('LlamaForCausalLM', {'rope_parameters': {'full_attention': {}}}, "RoPE of its own for 'full_attention'"),
    ('LlamaForCausalLM', {'rope_parameters': {'rope_type': 'default'}, 'rope_scaling': {'factor': 2}}, 'contradict'),
  ],
)
def test_what_is_refused(architecture, fields, message):
  spec = next(spec for spec in SPECS.values() if spec['architectures'] == [architecture])
  hostile.refusal(lambda: read_spec(spec | fields, 'there/config.json'), 'there/config.json', f'^there/.*{message}')


@pytest.mark.parametrize(
  ('scaling', 'message'),
  [
    ({'rope_type': 'longrope', 'factor': 4}, "'longrope' is unknown"),
    ({'type': 'dynamic', 'factor': 2.0}, "RoPE scaling 'dynamic' is unknown; known are default, "),
    ({'type': 'linear'}, 'the configuration of LlamaForCausalLM has no factor'),
    ({'rope_type': 'yarn'}, 'has no factor'),
    ({'rope_type': 'yarn', 'factor': 0}, 'factor must be a finite number'),
    ({'rope_type': 'yarn', 'factor': 4, 'beta_fast': -1}, 'beta_fast must be'),
    ({'rope_type': 'yarn', 'factor': 4, 'attention_factor': 0}, 'attention_factor must be a finite number above 0'),
    ({'rope_type': 'yarn', 'factor': 4, 'attn_factor': 2}, 'attn_factor 2 is not supported'),
    ({'rope_type': 'yarn', 'factor': 4, 'truncate': 0}, 'truncate must be true or false'),
    ({'rope_type': 'linear', 'factor': 4, 'rope_theta': 1}, 'rope_theta must be a finite number above 1'),
    ({'rope_type': ['linear']}, 'rope_type must be a text'),
    (
      {'rope_type': 'llama3', 'factor': 8, 'low_freq_factor': 4, 'high_freq_factor': 4},
      'high_freq_factor 4 must be above low_freq_factor 4',
    ),
    ([1], 'rope_scaling must be an object'),
  ],
)
def test_scalings_that_are_refused(scaling, message):
  with pytest.raises(ValueError, match=message):
    read_spec(SPECS['llama'] | {'rope_scaling': scaling})


def test_files_that_are_no_objects(tmp_path):
  for content in ('[]', 'null', '[' * 10**5, '{', '\x00', '{"hidden_size": ' + '9' * 5000 + '}'):
    assert 'config.json' in _refused(tmp_path, content)
  (tmp_path / 'config.json').unlink()
  (tmp_path / 'config.json').mkdir()
  with pytest.raises(ValueError, match='config.json is not a regular file'):
    read_hub_config(tmp_path)


@pytest.mark.parametrize(
  'fields',
  [
    {'num_hidden_layers': 10_000},
    {'num_hidden_layers': 10_000, 'layer_types': ['full_attention'] * 10_000},
    {'vocab_size': 2**22, 'hidden_size': 2**20, 'intermediate_size': 2**20, 'head_dim': 2**14},
    {'num_attention_heads': 2**14, 'num_key_value_heads': 2**14, 'head_dim': 2**14},
    {'num_hidden_layers': 1},
    {'max_position_embeddings': 2**31 - 1, 'vocab_size': 31},
  ],
)
def test_sizes_are_those_of_the_tensors(tmp_path, fields):
  assert 'checkpoint' in (message := _refused(tmp_path, _LLAMA | fields)) or 'must have shape' in message


def test_many_names_and_many_layers_take_no_time():
  """Names without the family's prefix are looked through once, not for every parameter."""
  start = time.monotonic()
  tensors = Recorded({f'x{i}': np.zeros(1, np.float32) for i in range(200_000)})
  with pytest.raises(ValueError, match='the checkpoint lacks 90003 tensors'):
    make_model(SPECS['llama'] | {'num_hidden_layers': 10_000}, tensors)
  assert time.monotonic() - start < 20


@pytest.mark.parametrize('name', SPECS)
def test_a_model_of_a_family_has_its_model_type(name):
  architecture = SPECS[name]['architectures'][0]
  assert read_spec(SPECS[name] | {'model_type': FAMILIES[architecture].model_type}) == read_spec(SPECS[name])


@pytest.mark.parametrize('name', ['llama', 'gemma2', 'gpt_neox', 'gpt2'])
def test_weights_beyond_all_bounds_are_no_flat_text(name):
  spec = SPECS[name]
  tensors = {key: array * np.float32(1e30) for key, array in tensors_of(spec).items()}
  with pytest.raises(NotFiniteError, match='logits of the target are not finite'):
    _decode(spec, 3, tensors)
