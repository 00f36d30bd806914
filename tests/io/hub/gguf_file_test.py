"""GGUF files: what llama.cpp's conversion does to a model is undone, and damaged or unknown files are refused."""

import json
import math
import random
import struct

import gguf
import gguf_files
import hostile
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from gguf import GGMLQuantizationType as Type
from gguf_files import CONTEXT, HEAD_DIM, KV_HEADS, LAYERS, VOCAB, WIDTH
from gguf_files import tensors_of as _hub_tensors
from gguf_files import write_model as _write
from tokenizers import decoders, models, pre_tokenizers, trainers

from spectr_jax.io.hub.families import read_spec
from spectr_jax.io.hub.gguf_header import read_header
from spectr_jax.io.hub.gguf_tokenizer import build_tokenizer
from spectr_jax.io.hub.redundant import check_model_buffers
from spectr_jax.io.model_files import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def _whole(tensors, name):
  return tensors.read(name, (slice(None),) * len(tensors.shape(name)))


# Tensors.


@pytest.mark.parametrize('architecture', gguf_files.SPECS)
def test_tensors_are_those_of_the_hub(architecture, tmp_path):
  found = GgufFile(_write(tmp_path / 'model.gguf', architecture)).tensors
  expected = _hub_tensors(architecture)
  assert found.names() == set(expected)
  for name, tensor in expected.items():
    assert found.shape(name) == tensor.shape
    assert found.dtype(name) == np.float32
    np.testing.assert_allclose(
      _whole(found, name), tensor, rtol=0, atol=3e-7 if 'norm' in name or 'A_log' in name else 0
    )
    part = tuple(slice(size // 3, size - 1) for size in tensor.shape)
    np.testing.assert_array_equal(found.read(name, part), _whole(found, name)[part])


@pytest.mark.parametrize('architecture', ['llama', 'gpt2'])
@pytest.mark.parametrize(
  'kind', [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_1], ids=lambda x: x.name
)
def test_stored_types(architecture, kind, tmp_path):
  file = GgufFile(_write(tmp_path / 'model.gguf', architecture, kind))
  found = file.tensors
  dtype = {Type.F16: np.float16, Type.BF16: ml_dtypes.bfloat16}.get(kind, np.float32)
  assert file.spec.get('torch_dtype', 'float32') == np.dtype(dtype).name
  for name, tensor in _hub_tensors(architecture).items():
    if tensor.ndim != 2:
      assert found.dtype(name) == np.float32
      continue
    # A block is a part of a row that is stored, so that converting permutes blocks and leaves them as they are.
    is_transposed = architecture == 'gpt2' and '.h.' in name
    stored = tensor.T if is_transposed else tensor
    expected = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
    values = _whole(found, name)
    assert values.dtype == found.dtype(name) == dtype
    np.testing.assert_array_equal(values.astype(np.float32), expected.T if is_transposed else expected)
    part = (slice(3, 38), slice(5, 39))
    np.testing.assert_array_equal(found.read(name, part), values[part])


def test_k_quants_are_read_by_rows_and_blocks(tmp_path):
  generator = np.random.default_rng(1)
  blocks = generator.integers(0, 256, (6, 3, gguf.GGML_QUANT_SIZES[Type.Q6_K][1]), dtype=np.uint8)
  blocks[..., -2:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
  extra = [('output.weight', blocks.reshape(6, -1), Type.Q6_K)]
  tensors = _hub_tensors('llama')
  del tensors['lm_head.weight']
  found = GgufFile(_write(tmp_path / 'model.gguf', tensors=tensors, extra=extra)).tensors
  expected = gguf.quants.dequantize(blocks.reshape(6, -1), Type.Q6_K)
  assert found.shape('lm_head.weight') == expected.shape == (6, 768)
  every = slice(None)
  for part in ((every, every), (slice(2, 5), slice(250, 520)), (slice(0, 0), every), (slice(1), slice(7, 7))):
    np.testing.assert_array_equal(found.read('lm_head.weight', part), expected[part])


def test_only_the_blocks_of_a_part_are_dequantized(tmp_path, monkeypatch):
  found = GgufFile(_write(tmp_path / 'model.gguf', kind=Type.Q8_0)).tensors
  sizes = []
  dequantize = gguf.quants.dequantize
  monkeypatch.setattr(gguf.quants, 'dequantize', lambda x, kind: (sizes.append(x.size), dequantize(x, kind))[1])
  found.read('model.layers.1.mlp.down_proj.weight', (slice(3, 5), slice(40, 70)))
  found.read('model.layers.1.self_attn.q_proj.weight', (slice(16, 20), slice(None)))
  bytes_of_block = 34  # of 32 numbers
  assert sizes == [2 * 2 * bytes_of_block, 4 * 2 * bytes_of_block]


# Configuration.


@pytest.mark.parametrize('architecture', gguf_files.SPECS)
def test_the_configuration_is_the_hubs(architecture, tmp_path):
  spec, config = gguf_files.SPECS[architecture], GgufFile(_write(tmp_path / 'model.gguf', architecture)).spec
  assert config['architectures'] == spec['architectures']
  assert read_spec(config) == read_spec(spec)


_YARN = {'rope.scaling.type': 'yarn', 'rope.scaling.factor': 4.0, 'rope.scaling.original_context_length': 32}


@pytest.mark.parametrize(
  ('metadata', 'expected'),
  [
    ({'rope.scaling.type': 'none', 'rope.scaling.factor': 2.0}, None),
    ({'rope.scaling.factor': 1.0}, None),
    ({'rope.scaling.type': 'linear', 'rope.scaling.factor': 4.0}, {'rope_type': 'linear', 'factor': 4.0}),
    ({'rope.scale_linear': 4.0}, {'rope_type': 'linear', 'factor': 4.0}),
    (
      _YARN | {'rope.scaling.yarn_beta_fast': 16.0},
      {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32, 'beta_fast': 16.0},
    ),
  ],
)
def test_rope_scaling(metadata, expected, tmp_path):
  path = _write(tmp_path / 'model.gguf', metadata={f'llama.{key}': value for key, value in metadata.items()})
  assert GgufFile(path).spec['rope_scaling'] == expected


def test_the_rope_scaling_of_llama_3_is_recovered_from_its_factors(tmp_path):
  base, head_dim, factor = 5e5, 64, 32.0
  factors = []
  for i in range(0, head_dim, 2):
    wavelength = 2 * math.pi * base ** (i / head_dim)
    smooth = (8192 / wavelength - 1) / 3
    between = 1 / ((1 - smooth) / factor + smooth)
    factors.append(1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else between)
  assert 1.0 < factors[15] < factor
  metadata = {'llama.attention.head_count': 1, 'llama.attention.head_count_kv': 1, 'llama.rope.dimension_count': 64}
  tensors = {'model.embed_tokens.weight': np.zeros((VOCAB, WIDTH), np.float32)}

  def write(values):
    extra = [('rope_freqs.weight', np.array(values, np.float32), Type.F32)]
    return GgufFile(_write(tmp_path / 'model.gguf', metadata=metadata, tensors=tensors, extra=extra))

  found = write(factors)
  assert found.tensors.names() == set(tensors)
  scales = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 8192}
  assert found.spec['rope_scaling'] == {'rope_type': 'llama3', 'factor': factor} | scales
  with pytest.raises(ValueError, match=r'rope_freqs\.weight must be 32 float32 numbers'):
    write(factors[:-1])


@pytest.mark.parametrize(
  ('metadata', 'factor', 'magnitude'),
  [
    ({}, 1.0, 1.0),
    ({'rope.scaling.type': 'linear', 'rope.scaling.factor': 4.0}, 4.0, 1.0),
    (_YARN, None, 0.1 * math.log(4) + 1),
  ],
)
def test_stored_divisors_of_frequencies_are_used(metadata, factor, magnitude, tmp_path):
  """As llama.cpp's `ggml_rope_ext` computes angles: position times frequency, divided by these, then scaled."""
  divisors = np.random.default_rng(0).uniform(0.5, 9, HEAD_DIM // 2).astype(np.float32)
  extra = [('rope_freqs.weight', divisors, Type.F32)]
  metadata = {f'llama.{key}': value for key, value in metadata.items()}
  file = GgufFile(_write(tmp_path / 'model.gguf', metadata=metadata, extra=extra))
  plain = 5e5 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
  if factor is None:
    scaled = GgufFile(_write(tmp_path / 'scaled.gguf', metadata=metadata)).spec
    factor = plain / np.array(read_spec(scaled)[1].rope.frequencies)
    assert factor.min() < factor.max() == 4
  rope = read_spec(file.spec)[1].rope
  np.testing.assert_allclose(rope.frequencies, plain / divisors / factor, rtol=1e-6)
  assert rope.magnitude == pytest.approx(magnitude)
  assert read_spec(file.spec)[1].context_length == CONTEXT


def test_divisors_that_divide_nothing_are_refused(tmp_path):
  for wrong in (0.0, -1.0, math.nan, math.inf):
    divisors = np.array([1.0] * 7 + [wrong], np.float32)
    path = _write(tmp_path / 'model.gguf', extra=[('rope_freqs.weight', divisors, Type.F32)])
    assert 'rope_freqs.weight must hold a finite number of at least 1e-06' in _refusal(path)


def test_divisors_of_gpt_neox_are_those_of_the_entries_that_turn(tmp_path):
  extra = [('rope_freqs.weight', np.array([2.0, 3.0], np.float32), Type.F32)]
  rope = read_spec(GgufFile(_write(tmp_path / 'model.gguf', 'gptneox', extra=extra)).spec)[1].rope
  np.testing.assert_allclose(rope.frequencies, [1 / 2, 1e-2 / 3])
  with pytest.raises(ValueError, match='tensor rope_freqs.weight: unknown for this architecture'):
    GgufFile(_write(tmp_path / 'gpt2.gguf', 'gpt2', extra=extra))


def test_stored_frequencies_are_compared(tmp_path):
  """Old files hold what a model of the hub held as `inv_freq`."""
  right = (5e5 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32)

  def check(values):
    file = GgufFile(_write(tmp_path / 'model.gguf', extra=[('blk.0.attn_rot_embd', values, Type.F32)]))
    check_model_buffers(file.spec, file.tensors, file.path)

  check(right)
  twice = [(f'blk.0.attn_rot_embd{end}', right, Type.F32) for end in ('', '.weight')]
  with pytest.raises(ValueError, match='attn_rot_embd.*: is there under another name as well'):
    GgufFile(_write(tmp_path / 'model.gguf', extra=twice))
  with pytest.raises(ValueError, match='model.gguf: tensor model.layers.0.rotary_emb.inv_freq holds other rotary'):
    check(right[::-1].copy())


def test_a_stored_head_is_used(tmp_path):
  """A tied model's file may have a head all the same."""
  head = np.random.default_rng(5).normal(size=(VOCAB, WIDTH)).astype(np.float32)
  path = _write(tmp_path / 'model.gguf', 'qwen2', extra=[('output.weight', head, Type.F32)])
  file = GgufFile(path)
  assert not file.spec['tie_word_embeddings']
  np.testing.assert_array_equal(_whole(file.tensors, 'lm_head.weight'), head)


def test_windows_and_per_layer_lists(tmp_path):
  metadata = {'llama.attention.sliding_window': 24, 'llama.attention.head_count_kv': [KV_HEADS] * LAYERS}
  config = GgufFile(_write(tmp_path / 'model.gguf', metadata=metadata)).spec
  assert (config['architectures'], config['sliding_window']) == (['MistralForCausalLM'], 24)
  assert config['num_key_value_heads'] == KV_HEADS
  with pytest.raises(ValueError, match=r'llama\.attention\.head_count_kv differs between layers'):
    GgufFile(_write(tmp_path / 'model.gguf', metadata={'llama.attention.head_count_kv': [1, 2]}))
  metadata = {'gemma3.attention.sliding_window_pattern': [False, True]}
  config = GgufFile(_write(tmp_path / 'model.gguf', 'gemma3', metadata=metadata)).spec
  assert config['layer_types'] == ['full_attention', 'sliding_attention']


# Tokenizers.


def _byte_level(pre_tokenizer, specials):
  """A small tokenizer trained on texts with a given pre-tokenizer."""
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizer
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=400, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
  )
  backend.train_from_iterator(TEXTS, trainer)
  return backend


def _split(pattern):
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  return pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated'), byte_level])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
  r'|\s+(?!\S)|\s+'
)
# As in the files of the models on the hub.
_PRE_TOKENIZERS = {
  'gpt-2': _GPT2,
  'smollm': pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
  'llama-bpe': _split(_LLAMA3),
  'qwen2': _split(_LLAMA3.replace('{1,3}', '')),
}
TEXTS = [
  "It's 1234567 o'clock,  isn't IT'S?\n\n\tdef f(x):\r\n    return x ** 2  # 99%",
  'Größe über Straße; 数字は12345個 — Привет, мир! \u00a0\u3000 café ½ Ⅷ 👩\u200d👩\u200d👧',
  '   leading,   trailing   ',
  'Say <|end|> and <|tool|>twice<|end|><|tool|>',
  '',
]


def _merges(backend):
  return [' '.join(pair) for pair in json.loads(backend.to_str())['model']['merges']]


@pytest.mark.parametrize('kind', _PRE_TOKENIZERS)
def test_byte_level_tokenizers(kind, tmp_path):
  backend = _byte_level(_PRE_TOKENIZERS[kind], specials=['<|end|>'])
  backend.add_tokens([tokenizers.AddedToken('<|tool|>', normalized=False)])
  size = backend.get_vocab_size()
  metadata = {
    'tokenizer.ggml.pre': kind,
    'tokenizer.ggml.tokens': [backend.id_to_token(i) for i in range(size)] + ['[PAD401]', '[PAD402]'],
    'tokenizer.ggml.token_type': [CONTROL] + [NORMAL] * (size - 2) + [USER_DEFINED, UNUSED, UNUSED],
    'tokenizer.ggml.merges': _merges(backend),
    'tokenizer.ggml.bos_token_id': 0,
    'tokenizer.ggml.eos_token_id': 0,
    'tokenizer.ggml.eot_token_id': 7,
    'tokenizer.chat_template': '{{ messages }}',
  }
  path = _write(tmp_path / 'model.gguf', metadata=metadata)
  file, found = GgufFile(path), build_tokenizer(read_header(path))
  assert found.get_vocab() == backend.get_vocab()
  for text in TEXTS:
    ids = found.encode(text).ids
    assert ids == backend.encode(text).ids
    assert found.decode(ids, skip_special_tokens=False) == text
    assert found.decode(ids) == text.replace('<|end|>', '')
  tokenizer = file.tokenizer()
  assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, (0, 7), 0)
  assert file.spec['eos_token_id'] == [0, 7]
  assert tokenizer.chat_template.source == '{{ messages }}'
  assert tokenizer.add_bos == (kind == 'llama-bpe')
  stated = GgufFile(_write(tmp_path / 'model.gguf', metadata=metadata | {'tokenizer.ggml.add_bos_token': True}))
  assert stated.tokenizer().add_bos


def test_default_words_and_whole_words(tmp_path):
  """Punctuation and threes of digits are words by default; only Llama 3 takes a word that is a token unmerged."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  metadata = {
    'tokenizer.ggml.tokens': [*alphabet, '12', '123', '45', ', ', 'xyz'],
    'tokenizer.ggml.merges': ['1 2', '12 3', '4 5'],
  }

  def tokens(kind, text):
    path = _write(tmp_path / 'model.gguf', metadata=metadata | {'tokenizer.ggml.pre': kind})
    return build_tokenizer(read_header(path)).encode(text).tokens

  assert tokens('default', 'xyz 12345.') == ['x', 'y', 'z', 'Ġ', '123', '45', '.']
  assert tokens(None, '412345.') == ['4', '12', '3', '45', '.']
  assert tokens('llama-bpe', 'xyz 12345.') == ['xyz', 'Ġ', '123', '45', '.']
  assert tokens('deepseek-coder', 'xyz 123') == ['x', 'y', 'z', 'Ġ', '1', '2', '3']


# Files that are refused.


def _refusal(path):
  return hostile.refusal(lambda: GgufFile(path).tokenizer(), path)


def test_missing_empty_and_truncated_files_are_refused(tmp_path):
  path = tmp_path / 'model.gguf'
  assert 'no file at' in _refusal(path)
  path.write_bytes(b'GGUF' + struct.pack('<IQQ', 3, 0, 0))
  assert 'the metadata has no general.architecture' in _refusal(path)
  _write(path)
  whole = path.read_bytes()
  start = min(tensor.offset for tensor in read_header(path).tensors.values())
  generator = random.Random(0)
  lengths = 5, start // 2, start - 40, start, len(whole) - 1
  for length in (*lengths, *(generator.randrange(4, len(whole)) for _ in range(5))):
    path.write_bytes(whole[:length])
    assert 'truncated' in _refusal(path), length


@pytest.mark.parametrize(
  ('metadata', 'problem'),
  [
    ({'llama.expert_count': 8}, 'the metadata has no llama.expert_used_count'),
    ({'llama.expert_count': 10**9}, 'llama.expert_count must be'),
    ({'llama.expert_count': 8, 'llama.expert_shared_count': 1}, 'llama.expert_shared_count 1 is not supported'),
    ({'llama.block_count': None}, 'the metadata has no llama.block_count'),
    ({'llama.rope.scaling.type': 'longrope'}, "unknown RoPE scaling 'longrope'; known are none, linear"),
    ({'llama.rope.dimension_count': 8, 'llama.attention.key_length': 16}, 'RoPE of 8 of 16 dimensions'),
    ({'llama.attention.value_length': 8}, 'keys and values of different widths'),
    ({'llama.attention.head_count': 0}, 'llama.attention.head_count must be a positive number, got 0'),
    ({'llama.block_count': 'two'}, "llama.block_count must be a positive number, got 'two'"),
    ({'llama.block_count': 10**9}, 'llama.block_count must be a whole number from 1 to 10000, got 1000000'),
    ({'llama.embedding_length': 64.0}, 'llama.embedding_length must be a positive number, got 64.0'),
    ({'llama.attention.head_count_kv': [2, 4]}, 'llama.attention.head_count_kv differs between layers'),
    ({'llama.attention.key_length': 2**31}, 'key_length must be a whole number from 1 to 16384'),
    ({'llama.context_length': 2**32 - 1}, 'context_length must be a whole number from 1 to 2147483647'),
    ({'llama.rope.freq_base': math.inf}, 'llama.rope.freq_base must be a finite number above 1'),
    ({'llama.rope.freq_base': '5e5'}, "llama.rope.freq_base must be a finite number above 1, got '5e5'"),
    ({'llama.attention.layer_norm_rms_epsilon': -1.0}, 'epsilon must be a finite number of at least 0'),
    ({'llama.attention.sliding_window': 0}, 'sliding_window must be a whole number from 1'),
    ({'llama.attention.causal': False}, 'llama.attention.causal False is not supported'),
    ({'llama.attention.scale': 0.5}, 'llama.attention.scale 0.5 is not supported'),
    ({'llama.expert_count': 'eight'}, 'llama.expert_count must be a whole number'),
    ({'llama.rope.scaling.type': 3}, 'llama.rope.scaling.type must be a text'),
    ({'tokenizer.ggml.eos_token_id': 10**6}, 'eos_token_id must be a whole number from 0 to 2, got 1000000'),
    ({'tokenizer.ggml.eot_token_id': 40}, 'eot_token_id must be a whole number from 0 to 2, got 40'),
    ({'tokenizer.ggml.eos_token_id': 'x'}, 'eos_token_id must be a whole number from 0'),
    ({'llama.attention.head_count_kv': 1}, 'tensor blk.0.attn_k.bias: 32 rows, expected 1 x 8 x 2'),
    ({'tokenizer.ggml.model': 't5'}, "unknown tokenizer 't5'; known are 'gpt2', 'llama' and 'gemma4'"),
    ({'tokenizer.ggml.pre': 'viking'}, "unknown pre-tokenizer 'viking'; known are default, gpt-2,"),
    ({'tokenizer.ggml.merges': None}, 'the metadata has no tokenizer.ggml.merges'),
    ({'tokenizer.ggml.merges': ['a c']}, "'a' and 'c' are merged, but join to no token"),
    ({'tokenizer.ggml.merges': ['ab']}, 'the tokenizer fails: Error while initializing BPE: Token ``'),
    ({'tokenizer.ggml.token_type': [1, 1]}, '3 tokens, but types of 2'),
    ({'tokenizer.ggml.model': 'llama', 'tokenizer.ggml.scores': [0.0, 0.0]}, '3 tokens, but 2 scores'),
  ],
)
def test_metadata_that_is_refused(metadata, problem, tmp_path):
  # With a beginning of a document, opening a file asks for the kind of its tokenizer.
  path = _write(tmp_path / 'model.gguf', metadata=metadata | {'tokenizer.ggml.bos_token_id': 0})
  assert problem in _refusal(path)


@pytest.mark.parametrize(
  ('architecture', 'metadata', 'problem'),
  [
    ('lfm2', {'attention.head_count_kv': 2}, 'lfm2.attention.head_count_kv must tell all 2 layers'),
    ('lfm2', {'attention.head_count_kv': [0, 2, 2]}, 'lfm2.attention.head_count_kv must tell all 2 layers'),
    ('lfm2', {'shortconv.l_cache': 65}, 'lfm2.shortconv.l_cache must be a whole number from 1 to 64, got 65'),
    ('granitehybrid', {'rope.scaling.finetuned': True}, 'with rotary positions (Bamba) is not supported'),
    ('granitehybrid', {'ssm.inner_size': 2**21}, 'ssm.inner_size must be a whole number from 1 to'),
    ('qwen35', {'nextn_predict_layers': 2}, '2 layers, all of which guess'),
    ('qwen35', {'ssm.group_count': 4}, 'rows, expected'),
    ('qwen35', {'ssm.inner_size': 90}, 'rows, expected 12 + 3 x 2 x 15'),
  ],
)
def test_metadata_of_recurrent_models_that_is_refused(architecture, metadata, problem, tmp_path):
  own = {f'{architecture}.{key}': value for key, value in metadata.items()}
  assert problem in _refusal(_write(tmp_path / 'model.gguf', architecture, metadata=own))


def test_layers_that_guess_and_rates_that_grow(tmp_path):
  """The last layers of Qwen 3.5 are left out; a state that grows is refused."""
  guess = ('blk.2.nextn.eh_proj.weight', np.zeros((WIDTH, 2 * WIDTH), np.float32), Type.F32)
  metadata = {'qwen35.block_count': 3, 'qwen35.nextn_predict_layers': 1}
  file = GgufFile(_write(tmp_path / 'model.gguf', 'qwen35', metadata=metadata, extra=[guess]))
  assert file.tensors.names() == set(_hub_tensors('qwen35'))
  assert read_spec(file.spec) == read_spec(gguf_files.SPECS['qwen35'])
  name = 'model.layers.0.mamba.A_log'
  tensors = _hub_tensors('granitehybrid') | {name: np.full(4, -np.inf, np.float32)}
  file = GgufFile(_write(tmp_path / 'other.gguf', 'granitehybrid', tensors=tensors))
  with pytest.raises(ValueError, match='a rate of decay must be below 0'):
    _whole(file.tensors, name)


@pytest.mark.parametrize(
  ('metadata', 'problem'),
  [
    (
      {'attention.sliding_window_pattern': 2},
      'must tell each layer, and the last has no window',
    ),
    ({'attention.sliding_window_pattern': [True] * 4}, 'must tell each layer, and the last has no window'),
    ({'attention.sliding_window_pattern': [True, False]}, 'must tell each layer, and the last has no window'),
    ({'attention.sliding_window': None}, 'there is no sliding_window'),
    (
      {'attention.shared_kv_layers': 4, 'feed_forward_length': 96},
      'num_kv_shared_layers 4 must be below',
    ),
    ({'attention.shared_kv_layers': 10**6}, 'shared_kv_layers must be a whole number from 0 to 10000'),
    ({'feed_forward_length': [96, 96, 192, 96]}, 'gemma4.feed_forward_length differs between layers'),
    ({'feed_forward_length': [96, 192]}, 'feed_forward_length has 2 numbers, and there are 4 layers'),
    ({'attention.head_count_kv': [2, 2, 1, 2]}, 'other sizes for layer 2 than for others of sliding_attention'),
    ({'attention.value_length_swa': 8}, 'gemma4.attention.key_length_swa, attention.value_length_swa and'),
    ({'rope.dimension_count': 16}, 'rope.dimension_count differ'),
    ({'attention.key_length': 16, 'attention.value_length': 16, 'rope.dimension_count': 16}, 'must be 8 float32'),
    ({'rope.scaling.factor': 2.0}, 'scaled rotary positions of gemma4 are not supported'),
    ({'embedding_length_per_layer_input': 2**21}, 'embedding_length_per_layer_input must be a whole number'),
    ({'expert_count': 5}, 'has no gemma4.expert_used_count'),
  ],
)
def test_metadata_of_gemma_4_that_is_refused(metadata, problem, tmp_path):
  metadata = {f'gemma4.{key}': value for key, value in metadata.items()}
  path = _write(tmp_path / 'model.gguf', 'gemma4', metadata=metadata)
  assert problem in hostile.refusal(lambda: read_spec(GgufFile(path).spec, str(path)), path)


@pytest.mark.parametrize('divisors', [[1] * 8 + [2] * 8, [1e30] * 8 + [1] * 8, [float('nan')] * 16, None])
def test_divisors_of_gemma_4_that_are_refused(divisors, monkeypatch, tmp_path):
  monkeypatch.setattr(gguf_files, 'TURNED', np.float32(divisors or [1] * 4))
  message = 'must hold 1 and then 1e30' if divisors else 'must be 16 float32 numbers'
  assert message in _refusal(_write(tmp_path / 'model.gguf', 'gemma4'))


def test_experts_of_gemma_4_need_their_number(tmp_path):
  path = _write(tmp_path / 'model.gguf', 'gemma4 mixture', metadata={'gemma4.expert_count': None})
  assert 'it has 5 experts, and the metadata 0' in _refusal(path)


@pytest.mark.parametrize(
  ('changes', 'problem'),
  [
    (
      {'architecture': 'mamba', 'tensors': {}},
      "unknown architecture 'mamba'; known are llama, qwen2, qwen3,",
    ),
    ({'tensors': {}}, 'no tensor token_embd.weight'),
    ({'extra': [('blk.0.up.weight', np.zeros((2, 2), np.float32), Type.F32)]}, 'blk.0.up.weight: unknown for this'),
    (
      {'extra': [('blk.5.ffn_up.weight', np.zeros((2, 40), np.uint8), Type.Q8_1)]},
      'tensor blk.5.ffn_up.weight: unknown type Q8_1; known are F32, F16, Q4_0,',
    ),
  ],
)
def test_unknown_models_are_refused(changes, problem, tmp_path):
  assert problem in _refusal(_write(tmp_path / 'model.gguf', **changes))
