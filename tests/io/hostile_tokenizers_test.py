"""Mutated tokenizers of every kind: each ends in a tokenizer that encodes and decodes, or in one line."""

import functools
import json

import hostile
import numpy as np
import pytest
import tiny_hub
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from spectr_jax import Tokenizer
from spectr_jax.io import tokenizer_file
from spectr_jax.io.hub.gguf_header import GgufHeader, StoredTensor
from spectr_jax.io.hub.hub_tokenizer import load_hub_tokenizer
from spectr_jax.io.model_files import GgufFile
from spectr_jax.io.patterns import check_pattern

_TEXT = 'the owl <s> in 1234 naïve 日本 trees  \n' * 3


def _small_byte_level():
  found = tokenizers.Tokenizer(models.BPE({'a': 0, 'b': 1, 'Ġ': 2, 'ab': 3, 'Ġab': 4}, [('a', 'b'), ('Ġ', 'ab')]))
  split = pre_tokenizers.Split(tokenizers.Regex(r" ?\p{L}+| ?\p{N}{1,3}|\s+(?!\S)|\s+|'(?i:s|t)?"), 'isolated')
  found.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
  found.decoder = decoders.ByteLevel()
  found.add_special_tokens(['<s>', '</s>'])
  found.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 5)])
  return found


def _sentence_piece():
  vocab = {token: i for i, token in enumerate(['<unk>', '<s>', '</s>', '<0x61>', '<0xC3>', '▁', 't', 'h', '▁t', '▁th'])}
  merges = [('▁', 't'), ('▁t', 'h')]
  found = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token='<unk>', fuse_unk=True, byte_fallback=True))
  found.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
  found.decoder = decoders.Sequence(
    [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
  )
  found.add_special_tokens(['<unk>', '<s>', '</s>'])
  return found


def _unigram():
  pieces = [('<unk>', 0.0), ('<s>', -1.0), ('▁', -2.0), *((c, -5.0) for c in 'thewol'), ('▁the', -3.0), ('owl', -2.5)]
  found = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
  found.normalizer = normalizers.Sequence(
    [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(' {2,}'), ' '), normalizers.Strip()]
  )
  found.pre_tokenizer = pre_tokenizers.Metaspace()
  found.decoder = decoders.Metaspace()
  found.add_special_tokens(['<s>'])
  return found


def _word_level():
  found = tokenizers.Tokenizer(models.WordLevel({'[UNK]': 0, 'the': 1, 'owl': 2, '<s>': 3}, '[UNK]'))
  found.normalizer = normalizers.BertNormalizer()
  found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
  found.add_special_tokens(['<s>'])
  return found


def _word_piece():
  vocab = {token: i for i, token in enumerate(['[UNK]', '[CLS]', '[SEP]', 'the', 'ow', '##l', '1', '##2', '##3'])}
  found = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token='[UNK]'))
  found.normalizer = normalizers.BertNormalizer()
  found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  found.post_processor = processors.BertProcessing(('[SEP]', 2), ('[CLS]', 1))
  found.decoder = decoders.WordPiece()
  found.enable_padding(length=8)
  found.enable_truncation(6)
  return found


_KINDS = {
  function.__name__: function
  for function in (_small_byte_level, _sentence_piece, _unigram, _word_level, _word_piece, tiny_hub.spaced_backend)
}


def _use(tokenizer):
  rows = tokenizer.encode_prompts([_TEXT, ''])
  ids = [*rows[0], *tokenizer.encode('the<s>'), 0, 1, 10**6]
  tokenizer.decode(ids)
  for index in ids[:5]:
    tokenizer.token_text(index)
  assert len(tokenizer.fingerprint) == 16
  assert tokenizer.vocab_size > 0


_TEXTS = '', ' ', '▁', 'a', 'aa', '字', '\0', '\u0301', '🙂' * 3
_PATTERNS = r'\s+', '.', 'x*', '', r'\p{L}+| ?\p{N}', '(?=a)', '^', '[^a]|$'
_INSERTED = {'id': '<s>', 'ids': [5], 'tokens': ['<s>']}
_PIECES = [{'SpecialToken': {'id': '<s>', 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}]
_VALUES = (
  True, False, 0, 1, 2, 7, 10**9, *_TEXTS, 'the', *({'String': text} for text in (*_TEXTS, 'the')),
  *({'Regex': pattern} for pattern in _PATTERNS), 'always', 'never', 'first', 'Removed', 'Isolated',
  'MergedWithPrevious', 'MergedWithNext', 'Contiguous', ['<s>', 0], ['<s>', 2**20], ['a', 1], _PIECES, _PIECES[1:],
  _PIECES[:1], [], {}, {'<s>': _INSERTED}, {'<s>': _INSERTED | {'ids': []}}, {'<s>': _INSERTED | {'ids': [2**20] * 2}},
)  # fmt: skip


def _step(rng, section):
  """A step of a section whose fields are right one by one."""
  kinds = {name: kind for name, kind in tokenizer_file._STEPS[section].items() if name != 'Precompiled'}
  name = rng.choice(sorted(kinds))
  fields = kinds[name].items()
  return {'type': name} | {field: rng.choice([x for x in _VALUES if kind.is_valid(x)]) for field, kind in fields}


def _with_other_rules(spec, rng):
  """The file with one or several sections of other steps, which need not fit together."""
  spec = dict(spec)
  for section in rng.sample(sorted(tokenizer_file._SEQUENCES), rng.choice((1, 1, 2, 4))):
    steps = [_step(rng, section) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    spec[section] = steps[0] if len(steps) == 1 else {'type': 'Sequence', tokenizer_file._SEQUENCES[section]: steps}
  model = dict(spec['model'])
  field, value = rng.choice((
    ('fuse_unk', True), ('byte_fallback', True), ('ignore_merges', True), ('end_of_word_suffix', '字'),
    ('unk_token', 'a'), ('max_input_chars_per_word', 3), ('unk_id', 1), ('continuing_subword_prefix', '#'),
    ('', 0), ('', 0), ('', 0),
  ))  # fmt: skip
  if field:
    spec['model'] = model | {field: value}
  flags = 'single_word', 'lstrip', 'rstrip', 'normalized', 'special'
  spec['added_tokens'] = [token | {rng.choice(flags): rng.random() < 0.5} for token in spec['added_tokens']]
  return json.dumps(spec).encode()


def _read_mutations(spec, path, mutate, load, least_read):
  tally = hostile.Tally(path.parent)
  for rng in hostile.rngs():
    content = mutate(spec, rng)
    path.write_bytes(content)
    tally.read(lambda: _use(load(path)), content[:3000])
  tally.check(least_read=least_read)


@pytest.mark.slow
@pytest.mark.parametrize(('mutate', 'least_read'), [(_with_other_rules, 500), (hostile.mutated_json_text, 100)])
@pytest.mark.parametrize('kind', _KINDS)
def test_mutated_tokenizer_files(kind, mutate, least_read, tmp_path):
  spec, path = json.loads(_KINDS[kind]().to_str()), tmp_path / 'tokenizer.json'
  _read_mutations(spec, path, mutate, lambda path: load_hub_tokenizer(path.parent), least_read)


@pytest.mark.slow
def test_mutated_files_beside_the_tokenizer(tmp_path):
  files = {
    'tokenizer_config': {
      'bos_token': {'content': '<s>', 'lstrip': False}, 'eos_token': '<|im_end|>', 'pad_token': '<pad>',
      'add_bos_token': True, 'chat_template': [{'name': 'default', 'template': '{{ messages }}'}],
      'added_tokens_decoder': {'301': {'content': '<|new|>', 'special': True, 'lstrip': False}},
    },
    'special_tokens_map': {'eos_token': '<|stop|>', 'unk_token': None, 'sep_token': {'content': '<s>'}},
    'generation_config': {'bos_token_id': 7, 'eos_token_id': [200, 41]},
    'config': {'vocab_size': 302, 'bos_token_id': 7, 'eos_token_id': 41},
  }  # fmt: skip
  folder, tally = tiny_hub.write(tmp_path / 'model'), hostile.Tally(tmp_path)
  for rng in hostile.rngs():
    for file, content in files.items():
      (folder / f'{file}.json').write_text(json.dumps(content))
    name = rng.choice([*files, 'tokenizer_config'])
    content = hostile.mutated_json_text(files[name], rng)
    (folder / f'{name}.json').write_bytes(content)
    tally.read(lambda: _use(load_hub_tokenizer(folder)), content[:3000])
  tally.check(least_read=100)


@pytest.mark.slow
def test_mutated_tokenizers_of_this_project(tmp_path):
  path = tmp_path / 'tokenizer.json'
  Tokenizer.train(['an old oak tree and an old owl in the old oak tree'] * 3, 265).save(path)
  _read_mutations(json.loads(path.read_text()), path, hostile.mutated_json_text, Tokenizer.load, 10)


_LLAMA = {
  'general.architecture': 'llama',
  'llama.block_count': 1, 'llama.embedding_length': 8, 'llama.feed_forward_length': 8, 'llama.context_length': 8,
  'llama.attention.head_count': 1, 'llama.attention.layer_norm_rms_epsilon': 1e-5,
}  # fmt: skip
_BYTE_LEVEL = {
  'model': 'gpt2', 'pre': 'llama-bpe', 'tokens': ['a', 'b', 'ab', 'Ġ', '<s>', '</s>'], 'token_type': [1, 1, 1, 1, 3, 3],
  'merges': ['a b'], 'bos_token_id': 4, 'eos_token_id': 5, 'eot_token_id': 5, 'padding_token_id': 5,
  'unknown_token_id': 0, 'add_bos_token': True,
}  # fmt: skip
_PIECES_OF_GGUF = {
  'model': 'llama', 'pre': 'default',
  'tokens': ['<unk>', '<s>', '</s>', '<0x0A>', '▁', 't', 'h', 'th', '▁th', '[PAD9]'],
  'token_type': [2, 3, 3, 6, 1, 1, 1, 1, 1, 5], 'scores': [0.0, 0.0, 0.0, 0.0, -3.0, -4.0, -5.0, -1.0, -2.0, 0.0],
  'bos_token_id': 1, 'eos_token_id': 2, 'unknown_token_id': 0, 'add_space_prefix': True,
  'remove_extra_whitespaces': False,
}  # fmt: skip


def _as_gguf(value):
  """A JSON value as far as GGUF can hold it, which has lists of one type, None for others."""
  if isinstance(value, list):
    items = [_as_gguf(item) for item in value]
    return items if len(set(map(type, items))) == 1 and items[0] is not None else None
  is_held = isinstance(value, bool | float | str) or (isinstance(value, int) and -(2**63) <= value < 2**64)
  return value.encode(errors='replace').decode() if isinstance(value, str) else value if is_held else None


@pytest.mark.slow
@pytest.mark.parametrize('fields', [_BYTE_LEVEL, _PIECES_OF_GGUF], ids=['gpt2', 'llama'])
def test_mutated_tokenizers_of_gguf_files(fields, monkeypatch):
  tally = hostile.Tally('model.gguf')
  tensors = {'token_embd.weight': StoredTensor((16, 8), 0, 0)}
  for rng in hostile.rngs():
    mutated = hostile.mutated_json(fields, rng)
    values = mutated if isinstance(mutated, dict) else {}
    found = {f'tokenizer.ggml.{name}': _as_gguf(value) for name, value in values.items()}
    metadata = _LLAMA | {key: value for key, value in found.items() if value is not None}
    header = GgufHeader('model.gguf', metadata, tensors, np.zeros(4 * 8 * 16, np.uint8))
    monkeypatch.setattr('spectr_jax.io.model_files.read_header', lambda path, header=header: header)
    tally.read(lambda: _use(GgufFile('model.gguf').tokenizer()), mutated)
  tally.check(least_read=100)


_BITS = ('a', 'b', '.', '[ab]', '[^b]', r'\w', r'\s', r'\p{L}', '$', '(?=a)', '(?!b)')
_REPEATS = ('', '', '', '*', '+', '?', '{2}', '{1,3}', '{2,}', '*?', '++', '{1,40}')


def _expression(rng, depth=0):
  parts = []
  for _ in range(rng.choice((1, 1, 2, 3))):
    bit = rng.choice(_BITS)
    if depth < 4 and rng.random() < 0.4:
      bit = rng.choice(('(', '(?:', '(?=', '(?>')) + _expression(rng, depth + 1) + ')'
    parts.append(bit + rng.choice(_REPEATS))
  return ''.join(parts) + (f'|{_expression(rng, depth + 1)}' if depth < 4 and rng.random() < 0.3 else '')


@pytest.mark.slow
def test_random_expressions_match_in_bounded_time():
  texts = ('a' * 300 + 'c', 'ab' * 150 + 'c', 'aab' * 100 + ' c', 'a ' * 150)
  tally = hostile.Tally('file')

  def split(pattern):
    check_pattern(pattern, 'file')
    try:
      splitter = pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated')
    except Exception as error:
      raise ValueError('file: not an expression') from error
    with hostile.time_limit(10):
      for text in texts:
        splitter.pre_tokenize_str(text)

  for rng in hostile.rngs():
    pattern = _expression(rng)
    tally.read(functools.partial(split, pattern), pattern)
  tally.check(least_read=100)
