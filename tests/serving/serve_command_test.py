"""The command: what it serves, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import threading

import commands
import httpx
import pytest

from decode.serve import choose_bounds

_TARGET = '--target=pretrained/draft'
_SMALL = (
  _TARGET, '--draft=pretrained/draft_undistilled', '--num_drafts=2', '--draft_length=2', '--batch_size=2',
  '--max_new_tokens=300', '--longest_prompt=64', '--port=0',
)  # fmt: skip
_BODY = {'prompt': 'Mr. Speaker, I rise', 'seed': 1, 'max_tokens': 300}


@pytest.mark.parametrize(
  ('context', 'longest_prompt', 'max_new_tokens', 'expected'),
  [
    (None, None, None, (1024, 1024, None)), (8192, None, None, (1024, 1024, None)),
    (2048, None, None, (1024, 1024, None)), (1500, None, None, (1024, 1024, 1500)),
    (512, None, None, (511, 511, 512)), (6, None, None, (5, 5, 6)),  # both together
    (8192, 100, None, (100, 1024, None)), (1100, 100, None, (100, 1000, None)),
    (8192, None, 7000, (1024, 7000, None)), (8192, None, 8000, (192, 8000, None)),  # a limit of new tokens goes before
    (512, None, 300, (212, 300, None)), (512, 64, 300, (64, 300, None)), (512, 600, None, (511, 1, None)),
    (None, 5000, 7000, (5000, 7000, None)),
  ],
)  # fmt: skip
def test_bounds_are_those_of_the_context(context, longest_prompt, max_new_tokens, expected):
  assert choose_bounds(context, longest_prompt, max_new_tokens) == expected


def test_no_room_for_a_prompt_is_refused():
  with pytest.raises(ValueError, match='max_new_tokens must be below 512, the context of the models'):
    choose_bounds(512, None, 512)


@pytest.fixture
def served():
  process = commands.start('decode.serve', *_SMALL)
  line = process.stdout.readline()
  assert line.startswith('serving draft at http://127.0.0.1:'), line + process.stderr.read()
  yield process, line.split(' at ')[1].split(',')[0]
  process.kill()
  process.communicate()


@pytest.fixture
def streaming(served):
  """The server while it streams, the thread that reads, the lines or the error so far, and the whole text."""
  (process, address), lines, begun = served, [], threading.Event()

  whole = httpx.post(f'{address}/completions', json=_BODY, timeout=300).json()['choices'][0]['text']

  def stream():
    try:
      with httpx.stream('POST', f'{address}/completions', json=_BODY | {'stream': True}, timeout=120) as response:
        for line in filter(None, response.iter_lines()):
          lines.append(line.removeprefix('data: '))
          begun.set()
    except httpx.HTTPError as error:
      lines.append(error)
      begun.set()

  reader = threading.Thread(target=stream)
  reader.start()
  assert begun.wait(300)
  return process, reader, lines, whole


@pytest.mark.slow
def test_the_end_waits_for_answers_that_have_begun(streaming):
  process, reader, lines, whole = streaming
  process.send_signal(signal.SIGTERM)
  reader.join(120)
  assert lines[-1] == '[DONE]'
  assert ''.join(json.loads(line)['choices'][0]['text'] for line in lines[:-1]) == whole
  _, err = process.communicate(timeout=60)
  assert process.returncode == 0
  assert err.splitlines()[-1] == 'ended'


@pytest.mark.slow
def test_a_server_that_is_killed_is_one_clear_end(streaming):
  process, reader, lines, _ = streaming
  process.kill()
  reader.join(60)
  assert isinstance(lines[-1], httpx.HTTPError)


# The command, with a device that is lost in the first round and does not come back.
_LOST = """
import runpy, sys
from decode.serving import worker

def lose(*_, **__):
  raise RuntimeError('the device is lost')

def start(self, start=worker.Worker.start):
  worker.Rows = self._rows.step = lose
  start(self)

worker.Worker.start = start
sys.argv = ['decode.serve', *sys.argv[1:]]
runpy.run_module('decode.serve', run_name='__main__', alter_sys=True)
"""


@pytest.mark.slow
def test_a_thread_that_cannot_go_on_ends_the_command():
  environment = os.environ | commands._environment()
  process = subprocess.Popen(
    [sys.executable, '-c', _LOST, *_SMALL], cwd=commands.ROOT, env=environment, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip
  address = process.stdout.readline().split(' at ')[1].split(',')[0]
  response = httpx.post(f'{address}/completions', json=_BODY, timeout=60)
  assert response.status_code == 500
  _, err = process.communicate(timeout=60)
  assert process.returncode == 1
  assert err.splitlines()[-1] == 'error: the thread that decodes has ended: RuntimeError: the device is lost'
  assert 'Traceback' not in err


@pytest.mark.slow
def test_wrong_options_are_one_line(tmp_path):
  for option, message in (
    ('--breakdown', 'breakdown is not for decode.serve'),
    ('--method=block,spectr', 'one method, K, L and tree at a time'),
    ('--max_new_tokens=512', 'max_new_tokens must be below 512'),
    ('--api_key=', 'the key must be at least one ASCII character'),
    (f'--api_key_file={tmp_path / "none"}', 'No such file'),
    ('--host=no-such-name.invalid', 'cannot listen on no-such-name.invalid:0: this machine knows no address'),
    ('--allowed_hosts=box.lan:80', 'allowed_hosts must be names without ports'),
  ):
    draft = '--draft=pretrained/draft_undistilled'
    more = '--num_drafts=1', '--draft_length=2', '--port=0'
    assert message in commands.refuse('decode.serve', _TARGET, draft, *more, option)
  with commands.socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    ran = commands.run('decode.serve', _TARGET, f'--port={port}')
    assert ran.stderr == f'error: cannot listen on 127.0.0.1:{port}: Address already in use\n'
