"""Prompt files in, padded ids out."""

import bz2
import gzip
import json
import os

import hostile
import jax.numpy as jnp
import pytest
import tiny_hub
from tokenizers import normalizers

from decode.experiment import workload
from decode.experiment.options import DecodeOptions
from decode.experiment.prompt_sets import PROMPT_SETS, SPEC_BENCH_TASKS
from decode.experiment.prompts import Prompt, as_conversations, encode_prompts, read_prompts, take_evenly, without_long
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.models import table


def test_prompts_have_places_and_ids_and_controls_are_text(tmp_path, prompt_file):
  path = tmp_path / 'prompts.txt'
  path.write_bytes('\ufeffone two\r\n{"three"}\n'.encode())
  for file, expected in (
    (path, [('one two', 0, 0), ('{"three"}', 1, 1)]),
    (prompt_file, [('the quick', 0, 'a'), ('seven wise owls', 1, 1), ('old', 2, 7)]),
  ):
    assert [(prompt.text, prompt.index, prompt.id) for prompt in read_prompts(file)] == expected
  path = tmp_path / 'a.txt'
  path.write_bytes('a\0b\x1b[2J\r\n\u202e\x85\u2028c\n'.encode())
  assert [prompt.text for prompt in read_prompts(path)] == ['a\0b\x1b[2J', '\u202e\x85\u2028c']


@pytest.mark.parametrize('end', ['', '\n', '\n\n', '\r\n\r\n', '\n \t\n\n'])
def test_blank_lines_may_end_a_file_of_objects(tmp_path, end):
  path = tmp_path / 'prompts.jsonl'
  path.write_bytes(f'{{"prompt": "x"}}\n{{"prompt": "y"}}{end}'.encode())
  assert [(prompt.text, prompt.index) for prompt in read_prompts(path)] == [('x', 0), ('y', 1)]


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('', 'line 2: the prompt is empty'), ('[1]', 'line 2: no "prompt"'), ('{"prompt": 3}', 'line 2: "prompt" is 3'),
    ('{"prompt": "\\ud800"}', 'line 2: the prompt is not valid Unicode'),
    ('{"prompt": "x", "id": [1]}', 'line 2: "id" is'), ('{"question": ["x"]}', r'line 2: "question" is \["x"\]'),
    ('[' * 100000, 'line 2: not JSON'),
    ('{"prompt": "x", "id": "\\udcff"}', 'line 2: "id" is not valid Unicode: byte 0xff is not UTF-8'),
    ('{"prompt": "x", "id": ' + '9' * 5000 + '}', 'line 2: not JSON'),
    ('{"prompt": ' + '[' * 900 + ']' * 900 + '}', r'line 2: "prompt" is \[\[\['),
    ('{"prompt": {"\\ud800\x7f": "\x1b"}}'.replace('\x1b', '\\u001b'), r'line 2: "prompt" is {"\\ud800'),
    ('{"messages": []}', r'line 2: "messages" is \[\]; expected a list of messages'),
    ('{"messages": "x"}', 'line 2: "messages" is "x"'),
    ('{"messages": [{"role": "user"}]}', 'line 2: "messages" is .*among them "role" and "content"'),
    ('{"messages": [{"role": "user", "content": null}]}', 'line 2: "messages" is .*a JSON object of texts'),
    ('{"messages": [{"role": "user", "content": " "}]}', 'line 2: the prompt is empty'),
    ('{"messages": [{"role": "\\ud800", "content": "x"}]}', 'line 2: the prompt is not valid Unicode'),
  ],
)  # fmt: skip
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


# Published sets, in their formats.

_SPEC_BENCH = [
  {'question_id': 81, 'category': 'writing', 'turns': ['Describe a lighthouse.', 'Now as a rhyme.']},
  {'question_id': 161, 'category': 'translation', 'turns': ['Translate: Guten Tag.'], 'reference': ['Good day.']},
]
_HUMANEVAL = {'task_id': 'HumanEval/7', 'prompt': 'def f(x):\n', 'entry_point': 'f', 'canonical_solution': ''}
_GSM8K = {'question': 'Two hens lay two eggs each. How many?', 'answer': 'Two times two.\n#### 4'}
_ALPACA = {'instruction': 'Add the numbers.', 'input': '2, 3', 'output': '5'}
_ENTRIES = {
  'spec_bench': '\n'.join(map(json.dumps, _SPEC_BENCH)),
  'humaneval': json.dumps(_HUMANEVAL),
  'gsm8k': json.dumps(_GSM8K),
  'mgsm': 'Zwei Hennen. Wie viele?\t1,004\nDrei Hennen?\t3',
  'alpaca': json.dumps([_ALPACA, _ALPACA | {'input': ''}], indent=1),
}


@pytest.mark.parametrize(
  ('name', 'expected'),
  [
    ('spec_bench', [(81, 'writing', _SPEC_BENCH[0]['turns']), (161, 'translation', _SPEC_BENCH[1]['turns'])]),
    ('humaneval', [('HumanEval/7', '', ['def f(x):\n'])]),
    ('gsm8k', [(0, '', [_GSM8K['question']])]),
    ('mgsm', [(0, '', ['Zwei Hennen. Wie viele?']), (1, '', ['Drei Hennen?'])]),
    ('alpaca', [(0, '', ['Add the numbers.\n2, 3']), (1, '', ['Add the numbers.'])]),
  ],
)
def test_a_published_set_is_read_by_its_name(tmp_path, name, expected):
  path = tmp_path / 'whatever.txt'
  path.write_text(_ENTRIES[name] + '\n')
  prompts = read_prompts(f'{name}:{path}')
  assert [(prompt.id, prompt.task, list(prompt.turns)) for prompt in prompts] == expected
  assert [(prompt.text, prompt.index) for prompt in prompts] == [
    (turns[0], i) for i, (_, _, turns) in enumerate(expected)
  ]


@pytest.mark.parametrize('name', PROMPT_SETS)
def test_another_set_is_refused_with_its_line(tmp_path, name):
  for other, text in _ENTRIES.items():
    path = tmp_path / other
    path.write_text(text + '\n')
    if other != name:
      with pytest.raises(ValueError, match=rf'{path}(, line 1|, entry 1)?: .*an entry of {PROMPT_SETS[name].title} is'):
        read_prompts(f'{name}:{path}')


_QA = {'question_id': 1, 'category': 'qa', 'turns': ['y']}


@pytest.mark.parametrize(
  ('name', 'line', 'message'),
  [
    ('spec_bench', _QA | {'question_id': 'x'}, '"question_id" is "x"'),
    ('spec_bench', _QA | {'question_id': True}, '"question_id" is true'),
    ('spec_bench', _QA | {'category': 'poems'}, '"category" is "poems", not one of writing,'),
    ('spec_bench', _QA | {'turns': ['y', ' ']}, r'"turns" is \["y", " "\]'),
    ('spec_bench', _QA | {'turns': []}, r'"turns" is \[\]'),
    ('humaneval', {'prompt': 'x', 'entry_point': 'f'}, 'no "task_id"'),
    ('gsm8k', [1], r'\[1\] is not an object'),
    ('alpaca', {'instruction': 'x', 'output': 'y'}, 'no "input"'),
    ('mgsm', 'x\tfour', 'the answer is "four"'),
    ('mgsm', 'x\t4\t5', '3 columns'),
  ],
)
def test_a_bad_entry_of_a_set_is_named(tmp_path, name, line, message):
  path = tmp_path / 'set'
  first = _ENTRIES[name].split('\n')[0] if name != 'alpaca' else json.dumps(_ALPACA)
  path.write_text(f'{first}\n{line if isinstance(line, str) else json.dumps(line)}\n')
  with pytest.raises(ValueError, match=f'set, line 2: {message}.*; an entry of {PROMPT_SETS[name].title} is '):
    read_prompts(f'{name}:{path}')


def test_unknown_sets_and_file_systems_are_refused_and_paths_are_not(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match="no set 'humanevil'; SET:FILE reads spec_bench, humaneval, gsm8k, mgsm, alpaca"):
    read_prompts('humanevil:a.jsonl')
  with pytest.raises(ValueError, match='cannot read prompts from /nowhere'):
    read_prompts('gsm8k:/nowhere')
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'a:b.txt').write_text('one two\n')
  [prompt] = read_prompts('a:b.txt')
  assert (prompt.text, prompt.task, prompt.turns) == ('one two', '', ())
  for path in ('foo://x.jsonl', 'gsm8k:foo://x.jsonl'):
    with pytest.raises(ValueError, match="'foo://x.jsonl' is not a path: remote ones begin with gs://"):
      read_prompts(path)


def test_prompts_are_taken_evenly_over_groups():
  tasks = ['a'] * 6 + ['b'] * 4 + ['c']
  prompts = [Prompt('x', index, task=task) for index, task in enumerate(tasks)]

  def taken(number):
    return [prompt.index for prompt in take_evenly(prompts, number, group=lambda prompt: prompt.task)]

  assert taken(2) == [0, 6]
  assert taken(3) == [0, 6, 10]
  assert taken(6) == [0, 2, 4, 6, 8, 10]  # c has one only, so that a gives one more
  assert taken(99) == list(range(11))
  assert (len(SPEC_BENCH_TASKS), len(set(SPEC_BENCH_TASKS.values()))) == (13, 6)


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('a.jsonl.gz', gzip.compress(b'{"prompt": "x"}\n' * 100, mtime=0)[:-9], 'cannot read prompts from .*a.jsonl.gz'),
    ('empty.txt', b'', 'empty.txt holds no prompts'),
    ('blank.jsonl', b'\n \n', 'blank.jsonl holds no prompts'),
    ('latin.txt', b'x\n\xe9', 'latin.txt, line 2: not UTF-8'),
  ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message):
    read_prompts(tmp_path / name)


def test_lengths_are_limited_exactly_and_ids_share_a_size(tokenizer):
  prompts = [Prompt('an owl', 0), Prompt('an old oak tree ' * 9, 1), Prompt('an owl', 2)]
  size = len(tokenizer.encode('an owl', add_bos=True))
  room = {'max_new_tokens': 4, 'max_length': size + 4}
  assert [prompt.index for prompt in without_long(prompts, tokenizer, **room)] == [0, 2]
  with pytest.raises(ValueError, match=f'all 1 of its file are too long; at most {size} tokens'):
    without_long(prompts[1:2], tokenizer, **room)
  encode_prompts(prompts[:1], tokenizer, **room)
  with pytest.raises(ValueError, match=f'{size} tokens; at most {size - 1} are allowed'):
    encode_prompts(prompts[:1], tokenizer, max_new_tokens=4, max_length=size + 3)
  with pytest.raises(ValueError, match='no room for a prompt'):
    encode_prompts(prompts[:1], tokenizer, max_new_tokens=9, max_length=10)
  prompts = [Prompt('an owl'), Prompt('an old oak tree ' * 4)]
  tokens, lengths = encode_prompts(prompts, tokenizer, max_new_tokens=4, max_length=64)
  assert tokens.shape[1] % 16 == 0
  for prompt, row, length in zip(prompts, tokens, lengths):
    assert row[:length].tolist() == tokenizer.encode(prompt.text, add_bos=True)
    assert (row[length:] == tokenizer.pad_id).all()


# Other tokenizers, and conversations.


def _hub_tokenizer(**parts):
  return HubTokenizer.from_parts(tiny_hub.backend(), **{'bos_id': 7, 'eos_ids': [41], 'add_bos': False} | parts)


def test_ids_begin_as_the_tokenizer_wants_and_keep_their_order():
  prompts = [Prompt('the owl'), Prompt('<s>an owl')]
  ids = [_hub_tokenizer().encode(text) for text in ('the owl', 'an owl')]
  for add_bos, wanted in ((False, [ids[0], [7, *ids[1]]]), (True, [[7, *ids[0]], [7, *ids[1]]])):
    tokens, lengths = encode_prompts(prompts, _hub_tokenizer(add_bos=add_bos), max_new_tokens=4, max_length=64)
    assert [row[:length].tolist() for row, length in zip(tokens, lengths)] == wanted
    assert (tokens[0, lengths[0] :] == 41).all()
  prompts = [Prompt('the owl'), *as_conversations([Prompt('an owl')]), Prompt('old')]
  tokenizer = _hub_tokenizer(chat_template=tiny_hub.CHAT)
  tokens, lengths = encode_prompts(prompts, tokenizer, max_new_tokens=4, max_length=200)
  assert tokenizer.decode(tokens[2, : lengths[2]]) == 'old'
  assert tokens[1, 0] == 40


_CONVERSATION = (
  '{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the owl"}], "id": "c"}\n'
)


@pytest.fixture
def conversations(tmp_path):
  path = tmp_path / 'prompts.jsonl'
  path.write_text(_CONVERSATION + '{"prompt": "an owl"}\n')
  return str(path)


@pytest.mark.parametrize('system', [None, 'the fox'])
def test_conversations_and_texts_are_rendered(conversations, system):
  prompts = DecodeOptions.of(prompts=conversations, chat=True, system=system).prompts.read()
  assert [(prompt.text, prompt.id) for prompt in prompts] == [('be brief\nthe owl', 'c'), ('an owl', 1)]
  tokenizer = _hub_tokenizer(chat_template=tiny_hub.CHAT)
  tokens, lengths = encode_prompts(prompts, tokenizer, max_new_tokens=4, max_length=200)
  start = '' if system is None else f'<|im_start|>system\n{system}<|im_end|>\n'  # the first has its own
  wanted = (
    '<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe owl<|im_end|>\n<|im_start|>assistant\n',
    f'{start}<|im_start|>user\nan owl<|im_end|>\n<|im_start|>assistant\n',
  )
  assert [row[:length].tolist() for row, length in zip(tokens, lengths)] == [*map(tokenizer.encode, wanted)]


def test_conversations_that_are_refused_are_named(conversations, tokenizer):
  with pytest.raises(ValueError, match="line 1: a conversation, which --chat renders by the model's template"):
    DecodeOptions.of(prompts=conversations).prompts.read()
  prompts = DecodeOptions.of(prompts=conversations, chat=True).prompts.read()
  room = {'max_new_tokens': 4, 'max_length': 64}
  with pytest.raises(ValueError, match='prompts.jsonl, line 1: the model has no chat template'):
    encode_prompts(prompts, tokenizer, **room)
  strict = _hub_tokenizer(chat_template="{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}")
  with pytest.raises(ValueError, match='line 1: the chat template refuses the conversation: one turn'):
    encode_prompts(prompts, strict, **room)


# Hostile files.


@pytest.mark.parametrize('name', ['a.jsonl', 'spec_bench:a.jsonl', 'a.txt.gz'])
@pytest.mark.parametrize('kind', ['pipe', 'folder', 'device', 'link to a device'])
def test_only_regular_files_are_read(tmp_path, kind, name):
  path = tmp_path / name.split(':')[-1]
  if kind == 'pipe':
    os.mkfifo(path)
  elif kind == 'folder':
    path.mkdir()
  elif kind == 'device':
    path = '/dev/zero'
  else:
    path.symlink_to('/dev/zero')
  text = f'spec_bench:{path}' if ':' in name else str(path)
  with pytest.raises(ValueError, match=f'cannot read prompts from {path}: .*is not a regular file'):
    read_prompts(text)


@pytest.mark.parametrize('module', [gzip, bz2])
@pytest.mark.parametrize('unit', [b'\0', b'a\n', b'{"prompt": "a"}\n', b'['])
def test_what_unpacks_to_too_much_is_refused(tmp_path, unit, module):
  path = tmp_path / f'a.jsonl.{"gz" if module is gzip else "bz2"}'
  path.write_bytes(module.compress(unit * (2**20 // len(unit))) * 10_000)  # ten gigabytes
  hostile.refusal(lambda: read_prompts(path), path, 'more than 67,108,864 bytes of text')


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('a.txt', b'a\n' * (2**19 + 1), 'has 524,289 prompts, more than 524,288; split it'),
    ('a.json', b'[' + b','.join([b'"a"'] * (2**19 + 1)) + b']', 'has 524,289 prompts, more than 524,288'),
    ('a.json', b'[{"prompt": "a", "x": [' + b'[],' * 2**22 + b'0]}]', 'more than 4,194,304 commas and brackets'),
    ('a.jsonl', b'{"prompt": "a", "x": [' + b'{},' * 2**22 + b'0]}', 'more than 4,194,304 commas and brackets'),
    ('a.json', b'[{"prompt": "x"}' + b'[' * 10**6, 'a.json: not JSON'),
  ],
)
def test_the_number_of_prompts_is_bounded(tmp_path, name, content, message):
  path = tmp_path / name
  path.write_bytes(content)
  hostile.refusal(lambda: read_prompts(path), path, message)


@pytest.mark.parametrize('name', ['spec_bench', 'humaneval', 'gsm8k', 'alpaca'])
@pytest.mark.parametrize('value', [None, True, 10**30, 0.5, [], {}, [None], [[]], {'': 1}, '', ' ', '\ud800', [' ']])
def test_fields_of_published_sets_have_their_types(tmp_path, name, value):
  entry = json.loads(_ENTRIES[name].split('\n')[0]) if name != 'alpaca' else _ALPACA
  path = tmp_path / 'set'
  tally = hostile.Tally(f'{path}, line 2: ')
  for field in entry:
    path.write_text(json.dumps(entry) + '\n' + json.dumps(entry | {field: value}))
    tally.read(lambda: [prompt.text.encode() for prompt in read_prompts(f'{name}:{path}')])
  assert tally.refusals or (name == 'alpaca' and value in ('', ' '))  # there are instructions without a word


def test_a_token_that_the_target_does_not_have_is_named_with_its_line(tmp_path, monkeypatch):
  """All prompts are looked at before the first is decoded."""
  path = tmp_path / 'prompts.txt'
  path.write_text('the owl\n' * 20 + 'an <pad> owl\n')
  prompts, tokenizer = read_prompts(path), _hub_tokenizer()
  room = {'max_new_tokens': 4, 'max_length': 200}
  assert len(encode_prompts(prompts, tokenizer, **room)[0]) == 21
  assert len(encode_prompts(prompts, tokenizer, **room, vocab_size=301)[0]) == 21
  message = "txt, line 21: the prompt has the token '<pad>' of id 300, and the target has ids"
  with pytest.raises(ValueError, match=message):
    encode_prompts(prompts, tokenizer, **room, vocab_size=300)
  # A run has the number of ids of its target.
  target = table.table_model(jnp.zeros((300, 300)))
  monkeypatch.setattr(workload, 'load_models', lambda *_: workload.Models(target, None, tokenizer, {}))
  with pytest.raises(ValueError, match=message):
    workload.Workload.load(DecodeOptions.of(prompts=str(path), method=('autoregressive',), max_new_tokens=4))


def test_prompts_without_tokens_are_named():
  nothing = _hub_tokenizer(chat_template='')
  room = {'max_new_tokens': 4, 'max_length': 200}
  with pytest.raises(ValueError, match='--prompt: the chat template is empty'):
    encode_prompts(as_conversations([Prompt('owl')]), nothing, **room)
  backend = tiny_hub.backend()
  backend.normalizer = normalizers.Replace('owl', '')
  empty = HubTokenizer.from_parts(backend, bos_id=None, eos_ids=[41], add_bos=False)
  with pytest.raises(ValueError, match='--prompt: the prompt has no tokens'):
    encode_prompts([Prompt('owl')], empty, **room)
