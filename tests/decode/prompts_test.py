"""Prompt files in, padded ids out."""

import gzip

import pytest

from decode.experiment.prompts import Prompt, encode_prompts, read_prompts, without_long
from spectr_jax import Tokenizer


@pytest.fixture(scope='module')
def tokenizer():
  return Tokenizer.train(['an old oak tree and an old owl in the old oak tree, while a quick fox runs by'] * 3, 275)


def test_text_has_a_prompt_per_line(tmp_path):
  path = tmp_path / 'prompts.txt'
  path.write_bytes('\ufeffone two\r\n{"three"}\n'.encode())
  assert [(prompt.text, prompt.index, prompt.id) for prompt in read_prompts(path)] == [
    ('one two', 0, 0),
    ('{"three"}', 1, 1),
  ]


def test_jsonl_carries_ids(prompt_file):
  found = [(prompt.text, prompt.index, prompt.id) for prompt in read_prompts(prompt_file)]
  assert found == [('the quick', 0, 'a'), ('seven wise owls', 1, 1), ('old', 2, 7)]


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('', 'line 2: the prompt is empty'),
    ('[1]', 'line 2: no "prompt"'),
    ('{"prompt": 3}', 'line 2: "prompt" is 3'),
    ('{"prompt": "\\ud800"}', 'line 2: the prompt is not valid Unicode'),
    ('{"prompt": "x", "id": [1]}', 'line 2: "id" is'),
    ('{"question": ["x"]}', r'line 2: "question" is \["x"\]'),
    ('[' * 100000, 'line 2: not JSON'),
  ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
  path = tmp_path / 'prompts.jsonl'
  path.write_text(f'{{"prompt": "x"}}\n{line}\n{{"prompt": "y"}}\n')
  with pytest.raises(ValueError, match=message):
    read_prompts(path)


@pytest.mark.parametrize(
  ('name', 'text', 'expected'),
  [
    ('a.jsonl', '{"question": "x"}\n{"turns": ["y", "z"]}\n', ['x', 'y']),
    ('a.json', '[{"instruction": "x", "input": "y"}, {"instruction": "z", "input": ""}]', ['x\ny', 'z']),
    ('a.tsv', 'x y\t3\nz\t4\n', ['x y', 'z']),
  ],
)
def test_the_usual_prompt_sets_are_read_as_they_are(tmp_path, name, text, expected):
  (tmp_path / name).write_text(text)
  (tmp_path / f'{name}.gz').write_bytes(gzip.compress(text.encode()))
  for path in (tmp_path / name, tmp_path / f'{name}.gz'):
    assert [prompt.text for prompt in read_prompts(path)] == expected


def test_a_damaged_archive_is_one_line(tmp_path):
  path = tmp_path / 'a.jsonl.gz'
  path.write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 100)[:-9])
  with pytest.raises(ValueError, match='cannot read prompts from .*a.jsonl.gz'):
    read_prompts(path)


def test_long_prompts_can_be_left_out(tokenizer):
  prompts = [Prompt('an owl', 0), Prompt('an old oak tree ' * 9, 1), Prompt('an owl', 2)]
  room = {'max_new_tokens': 4, 'max_length': len(tokenizer.encode('an owl', add_bos=True)) + 4}
  assert [prompt.index for prompt in without_long(prompts, tokenizer, **room)] == [0, 2]
  with pytest.raises(ValueError, match='all 1 of its file are too long; at most 6 tokens'):
    without_long(prompts[1:2], tokenizer, **room)


def test_ids_begin_with_bos_and_share_a_size(tokenizer):
  prompts = [Prompt('an owl'), Prompt('an old oak tree ' * 4)]
  tokens, lengths = encode_prompts(prompts, tokenizer, max_new_tokens=4, max_length=64)
  assert tokens.shape[1] % 16 == 0
  for prompt, row, length in zip(prompts, tokens, lengths):
    assert row[:length].tolist() == tokenizer.encode(prompt.text, add_bos=True)
    assert (row[length:] == tokenizer.pad_id).all()


def test_the_limit_is_exact(tokenizer):
  prompt = Prompt('an owl')
  size = len(tokenizer.encode(prompt.text, add_bos=True))
  encode_prompts([prompt], tokenizer, max_new_tokens=4, max_length=size + 4)
  with pytest.raises(ValueError, match=f'{size} tokens; at most {size - 1} are allowed'):
    encode_prompts([prompt], tokenizer, max_new_tokens=4, max_length=size + 3)
  with pytest.raises(ValueError, match='no room for a prompt'):
    encode_prompts([prompt], tokenizer, max_new_tokens=9, max_length=10)
