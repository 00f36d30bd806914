"""Text of models and files cannot steer a terminal."""

import subprocess
import sys
import unicodedata

import pytest
from commands import ROOT

from common.printable import printable


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('a\x1b[31mb\x1b]0;title\x07', 'a\ufffd[31mb\ufffd]0;title\ufffd'),
    ('\x9b2J\x90q\x9c', '\ufffd2J\ufffdq\ufffd'),  # C1 controls
    ('right\rwrong\x08\x7f\x00', 'right\ufffdwrong\ufffd\ufffd\ufffd'),
    ('\u202eevil\u2066\u2069\u200e\ufeff\u00ad', '\ufffdevil' + 5 * '\ufffd'),
    ('\u2028\u2029\x85\x0b\x0c', 5 * '\ufffd'),
    ('\ud800\udcff\U000e0041', 3 * '\ufffd'),
    ('a\nb\tc', 'a\nb\tc'),
    ('字\u3000é\u00a0👩\u200d👧 مِی\u200cخواهم\U0001fae9', '字\u3000é\u00a0👩\u200d👧 مِی\u200cخواهم\U0001fae9'),
    ('', ''),
  ],
)
def test_what_steers_a_terminal_is_replaced(text, expected):
  assert printable(text) == expected
  assert ''.join(map(printable, text)) == expected


def test_no_control_of_all_characters_is_left():
  shown = printable(''.join(map(chr, range(0x110000))))
  left = {c for c in shown if unicodedata.category(c) in ('Cc', 'Cf', 'Cs')}
  assert left == {'\n', '\t', '\u200c', '\u200d'}
  assert len(shown) == 0x110000


def test_an_error_cannot_steer_the_terminal():
  code = (
    'from common import command_line\n'
    "def main(argv): raise ValueError('in \\x1b[2J\\r\\x9b \\u202e \\ud800\\n 字')\n"
    'command_line.run(main)'
  )
  command = [sys.executable, '-c', code, '--compilation_cache_dir=']
  for encoding in ('utf-8', 'ascii'):
    ran = subprocess.run(
      command, cwd=ROOT, capture_output=True, timeout=300, env={'PYTHONIOENCODING': encoding, 'JAX_PLATFORMS': 'cpu'}
    )
    assert ran.returncode == 1
    wanted = 'error: in \ufffd[2J \ufffd \ufffd \ufffd 字\n'
    assert ran.stderr == (wanted.encode() if encoding == 'utf-8' else wanted.encode('ascii', 'replace'))
