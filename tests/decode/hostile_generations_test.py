"""Damaged files of continuations: resumed with whole lines of this run only, or refused in one line; nothing is cut."""

import json

import generation_file_test as files
import pytest
from hostile import Tally, mutated_bytes, mutated_json, mutated_json_text, rngs

from decode.experiment.generation_file import check_parts

_KEYS = ('seed', 'index', 'sample')


def _line(entry):
  return json.dumps(entry, ensure_ascii=False).encode('utf-8', 'surrogatepass') + b'\n'


def _mutated(rng):
  """A file of three lines: one of them mutated as JSON, or the file as bytes."""
  entries = [files.SETTINGS | files.entry_of(index) for index in range(3)]
  if rng.random() < 0.5:
    return mutated_bytes(b''.join(map(_line, entries)), rng)
  number = rng.randrange(3)
  lines = [*map(_line, entries)]
  lines[number] = _line(mutated_json(entries[number], rng))
  return b''.join(lines)[: None if rng.random() < 0.7 else -rng.randrange(1, 300)]


@pytest.mark.slow
def test_no_damage_is_taken_for_a_continuation(tmp_path):
  path, tally = tmp_path / 'out.jsonl', Tally('out.jsonl')
  begin = json.dumps(files.SETTINGS, ensure_ascii=False).encode()[:-1]
  num_cut = 0
  for rng in rngs():
    content = _mutated(rng)
    path.write_bytes(content)
    resumed = []
    tally.read(lambda resumed=resumed: resumed.append(files.resume(path)), repr(content[:2000]))
    after = path.read_bytes()
    assert content.startswith(after)
    if after != content:  # cut is what is incomplete and ours
      num_cut += 1
      cut = content[len(after) :]
      assert resumed
      assert b'\n' not in cut
      assert begin.startswith(cut) or cut.startswith(begin)
    if resumed:
      (done,) = resumed
      entries = [json.loads(line) for line in after.decode().splitlines(keepends=False) if line]
      assert len(done) == len(entries)
      for entry in entries:
        assert tuple(entry[key] for key in _KEYS) in done
        assert all(entry[name] == value for name, value in files.SETTINGS.items())
        assert entry['prompt'] == files.PROMPTS.get(entry['index'], entry)['prompt']
        assert all(type(token) is int and token >= 0 for token in entry['tokens'])
    assert tally.num_read < 2000
  tally.check()
  assert num_cut > 20


@pytest.mark.slow
def test_no_damage_is_taken_for_an_index(tmp_path):
  path, index, tally = tmp_path / 'out.jsonl', tmp_path / 'out.index.json', Tally('out.index.json')
  content = {'parts': [f'out-{part:05}-of-00003.jsonl' for part in range(3)]}
  for rng in rngs():
    mutated = mutated_json_text(content, rng)
    index.write_bytes(mutated)
    read = []
    tally.read(lambda read=read: read.append(check_parts(path, 3)), repr(mutated))
    assert index.read_bytes() == mutated
    assert not read or json.loads(mutated)['parts'] == content['parts']
  tally.check()
