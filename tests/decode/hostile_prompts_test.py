"""Mutations of prompt files of every format: prompts, or one line that names the file."""

import gzip
import json

import hostile
import prompts_test
import pytest

from decode.experiment.prompts import encode_prompts, read_prompts

_MESSAGES = {'messages': [{'role': 'system', 'content': 'be brief'}, {'role': 'user', 'content': 'the owl'}], 'id': 'c'}
_LINES = [{'prompt': 'the owl', 'id': 3}, {'question': 'x'}, {'instruction': 'y', 'input': 'z'}, {'turns': ['a', 'b']}]
_VALUES = {
  'a.jsonl': [*_LINES, _MESSAGES], 'a.json': [*_LINES, _MESSAGES], 'spec_bench:a.jsonl': prompts_test._SPEC_BENCH,
  'humaneval:a.jsonl': [prompts_test._HUMANEVAL] * 2, 'gsm8k:a.jsonl': [prompts_test._GSM8K] * 2,
  'alpaca:a.json': [prompts_test._ALPACA] * 2,
}  # fmt: skip
_BYTES = {
  'a.txt': 'the owl\nan old 字 owl\r\n\u202e x\n'.encode(),
  'a.tsv': b'x y\t3\nz\t4\n',
  'mgsm:a.tsv': prompts_test._ENTRIES['mgsm'].encode(),
  'a.jsonl.gz': gzip.compress(prompts_test._ENTRIES['gsm8k'].encode() * 3),
}


def _mutated(name, rng):
  """The content of a file, which is right in everything but what was changed."""
  if name.endswith('.gz') and rng.random() < 0.5:
    return gzip.compress(hostile.mutated_bytes(gzip.decompress(_BYTES[name]), rng), 1)
  if name in _BYTES:
    return hostile.mutated_bytes(_BYTES[name], rng)
  entries = hostile.mutated_json(_VALUES[name], rng)
  if name.endswith('.json') or not isinstance(entries, list):
    content = json.dumps(entries).encode()
  else:
    content = '\n'.join(map(json.dumps, entries)).encode()
  return hostile.mutated_bytes(content, rng) if rng.random() < 0.3 else content


@pytest.mark.slow
def test_mutated_prompts(tmp_path, tokenizer):
  for name in (*_VALUES, *_BYTES):
    kind, _, ending = name.rpartition(':')
    path = tmp_path / f'{len(list(tmp_path.iterdir()))}-{ending}'
    tally = hostile.Tally(path)
    text = f'{kind}:{path}' if kind else str(path)

    def read(text=text):
      prompts = read_prompts(text)
      if texts := [prompt for prompt in prompts if not prompt.messages]:
        encode_prompts(texts, tokenizer, max_new_tokens=4, max_length=10**6, vocab_size=275)
      json.dumps([[prompt.text, prompt.id, prompt.turns] for prompt in prompts], ensure_ascii=False).encode()

    for rng in hostile.rngs(400):
      content = _mutated(name, rng)
      path.write_bytes(content)
      tally.read(read, content[:2000])
    tally.check(400)
