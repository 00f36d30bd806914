"""Files of continuations: what is resumed, what is refused, and that nothing is cut that is not ours."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from decode.experiment.generation_file import GenerationFile, check_parts, part_path
from tests.hostile import refusal

ROOT = pathlib.Path(__file__).parents[2]
RUN = {'target': '0123456789abcdef', 'weights': '', 'logprobs': False}
SETTINGS = {'run': RUN, 'method': 'spectr', 'num_drafts': 2, 'is_lossless': True, 'stop': ['a']}
PROMPTS = {index: {'id': index, 'prompt': f'p{index}'} for index in range(4)}


def entry_of(index, seed=0, **more):
  fields = {'seed': seed, 'index': index, 'sample': 0, 'id': index, 'prompt': f'p{index}', 'tokens': [1, 2, 3]}
  return fields | {'text': 'ä', 'target_calls': 2, 'finish_reason': 'length'} | more


def line_of(index, *, settings=SETTINGS, **more):
  return json.dumps(settings | entry_of(index, **more), ensure_ascii=False) + '\n'


def resume(path, *, settings=SETTINGS, prompts=PROMPTS, entries=()):
  with GenerationFile(path, resume=True) as file:
    file.begin(settings, prompts)
    done = set(file.done)
    for entry in entries:
      file.append(entry)
  return done


def test_what_only_the_other_run_has_is_a_difference(tmp_path):
  path = tmp_path / 'out.jsonl'
  constrained = SETTINGS | {'run': RUN | {'constraint': '01234567'}}
  resume(path, settings=constrained, entries=[entry_of(0)])
  assert resume(path, settings=constrained) == {(0, 0, 0)}
  with pytest.raises(ValueError, match="has constraint '01234567', and this run None"):
    resume(path)


def test_a_file_is_written_and_resumed(tmp_path):
  path = tmp_path / 'out.jsonl'
  with GenerationFile(path, resume=False) as file:
    file.begin(SETTINGS, PROMPTS)
    file.append(entry_of(0))
  assert path.read_text() == line_of(0)
  assert resume(path, entries=[entry_of(1), entry_of(0, seed=1)]) == {(0, 0, 0)}
  assert resume(path) == {(0, 0, 0), (0, 1, 0), (1, 0, 0)}
  assert os.listdir(tmp_path) == ['out.jsonl']


@pytest.mark.parametrize('num_lines', [1, 2])
def test_a_line_that_was_not_finished_is_cut(tmp_path, num_lines):
  path = tmp_path / 'out.jsonl'
  whole = ''.join(line_of(index) for index in range(num_lines)).encode()
  for cut in range(1, len(line_of(0).encode())):
    path.write_bytes(whole[:-cut])
    assert resume(path, entries=[entry_of(num_lines - 1)]) == {(0, index, 0) for index in range(num_lines - 1)}
    assert path.read_bytes() == whole


OTHERS = (
  b'notes', b'notes\n', b'notes\nmore', b'{"a": 1}', b'{"a": 1}\n', b'[]\n', b'\n', b'\n\n', b'null\n', b'\0' * 9,
  b'\xff', b'\xef\xbb\xbf{"run": {', b'{"prompt": "a"}\n', b'{"prompt": "a"}', b'{"method": "spectr"', b'{"run": 1}',
  b'{"run": {"target": "0123456789abcdee"', b'NaN\n', b'9' * 10**5 + b'\n',
)  # fmt: skip


@pytest.mark.parametrize('content', OTHERS, ids=lambda content: repr(content[:12]))
def test_files_of_others_are_left_as_they_are(tmp_path, content):
  path = tmp_path / 'out.jsonl'
  for before in (b'', line_of(0).encode()):
    path.write_bytes(before + content)
    refusal(lambda: resume(path), path, r'^generations: .*out\.jsonl, line ')
    assert path.read_bytes() == before + content
  with pytest.raises(ValueError, match='has continuations; --resume goes'), GenerationFile(path, resume=False):
    pass
  assert path.read_bytes() == before + content


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'seed': True}, 'line 1: no continuation of this command .True in place of int'),
    ({'index': '0'}, 'line 1: no continuation of this command'),
    ({'prompt': 'p1'}, "continues another prompt than number 0 of this run: prompt 'p1', not 'p0'"),
    ({'id': '0'}, "continues another prompt than number 0 of this run: id '0', not 0"),
    ({'num_drafts': 3}, 'line 1, has num_drafts 3, and this run 2; only these may change: .*batch_size'),
    ({'is_lossless': 1}, 'has is_lossless 1, and this run True'),
    ({'stop': []}, r"has stop \[\], and this run \['a'\]"),
    ({'run': RUN | {'target': 'x'}}, "has target 'x', and this run '0123456789abcdef'"),
    ({'run': {}}, "has target None, and this run '0123456789abcdef'; weights None, and this run ''; logprobs"),
    ({'run': None}, 'has run None, and this run'),
  ],
)  # fmt: skip
def test_lines_that_are_not_of_this_run(tmp_path, change, message):
  path = tmp_path / 'out.jsonl'
  path.write_text(json.dumps(SETTINGS | entry_of(0) | change) + '\n')
  before = path.read_bytes()
  with pytest.raises(ValueError, match=message):
    resume(path)
  assert path.read_bytes() == before


def test_lines_have_their_own_place(tmp_path):
  path = tmp_path / 'out.jsonl'
  path.write_text(line_of(7) + line_of(0))
  assert resume(path) == {(0, 7, 0), (0, 0, 0)}
  path.write_text(line_of(0) + line_of(1) + line_of(0))
  with pytest.raises(ValueError, match='line 3, has seed, index and sample of an earlier line: 0, 0, 0'):
    resume(path)
  path.write_text(line_of(1) + line_of(2))
  message = 'line 2, continues number 2, which is not of part 1 of 2'
  with pytest.raises(ValueError, match=message), GenerationFile(path, resume=True) as file:
    file.begin(SETTINGS, PROMPTS, process=1, num_processes=2)


def test_one_process_at_a_time_has_a_file(tmp_path):
  path = tmp_path / 'out.jsonl'
  (tmp_path / 'link').symlink_to(path)
  for is_new in (True, False):
    with GenerationFile(path, resume=True) as file:
      for _ in range(2):
        for other in ('out.jsonl', 'link', *([] if is_new else ['hard'])):
          with pytest.raises(ValueError, match='is being written by another process'):
            resume(tmp_path / other)
      file.begin(SETTINGS, PROMPTS)
      if is_new:
        file.append(entry_of(0))
        os.link(path, tmp_path / 'hard')
  assert path.read_text() == line_of(0)


def test_what_cannot_be_appended_to_and_links_that_lead_to_files(tmp_path):
  with pytest.raises(ValueError, match='must be a local file'):
    resume('gs://bucket/out.jsonl')
  with pytest.raises(ValueError, match='cannot write .*: there is no directory .*nowhere'):
    resume(tmp_path / 'nowhere' / 'out.jsonl')
  os.mkfifo(tmp_path / 'pipe')
  (tmp_path / 'loop').symlink_to(tmp_path / 'loop')
  for path in (tmp_path, tmp_path / 'pipe', '/dev/null', '/dev/full', tmp_path / 'loop'):
    with pytest.raises(ValueError, match='^generations: cannot write '):
      resume(path)
  (tmp_path / 'link').symlink_to(tmp_path / 'real')
  resume(tmp_path / 'link', entries=[entry_of(0)])
  (tmp_path / 'real').chmod(0o600)
  resume(tmp_path / 'link', entries=[entry_of(1)])
  assert (tmp_path / 'link').is_symlink()
  assert (tmp_path / 'real').read_text() == line_of(0) + line_of(1)
  assert (tmp_path / 'real').stat().st_mode & 0o777 == 0o600


# A limit of the process stands for the disk's.
_FULL = """
import resource, signal, sys
sys.path.insert(0, 'tests/decode')
from generation_file_test import GenerationFile, PROMPTS, SETTINGS, entry_of
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
with GenerationFile(sys.argv[1], resume=False) as file:
  file.begin(SETTINGS, PROMPTS)
  for index in range(100):
    try:
      file.append(entry_of(index))
    except ValueError as error:
      sys.exit(str(error))
"""


def test_a_full_disk_leaves_whole_lines(tmp_path):
  path = tmp_path / 'out.jsonl'
  ran = subprocess.run([sys.executable, '-c', _FULL, path], cwd=ROOT, capture_output=True, text=True)
  assert ran.returncode == 1
  num_lines = len(path.read_text().splitlines())
  assert 5 < num_lines < 15
  assert f'cannot write {path}: File too large; it has {num_lines} continuations, all whole' in ran.stderr
  assert path.read_text() == ''.join(line_of(index) for index in range(num_lines))


def test_parts_are_of_one_number_of_processes(tmp_path):
  path = tmp_path / 'out[1].jsonl'
  assert part_path(path, 0, 1) == path
  part_path(path, 1, 2).touch()  # empty
  (tmp_path / 'out[1]-1-of-2.jsonl').write_text('mine')
  for count in (1, 2, 3):
    check_parts(path, count)
  part_path(path, 1, 2).write_text(line_of(0))
  check_parts(path, 2)
  for count in (1, 3):
    with pytest.raises(ValueError, match=f'00002.jsonl is of another number of processes, and this run has {count}$'):
      check_parts(path, count)
  part_path(path, 1, 2).unlink()
  path.write_text(line_of(0))
  check_parts(path, 1)
  with pytest.raises(ValueError, match=r'out\[1\].jsonl is of another number of processes, and this run has 2$'):
    check_parts(path, 2)
