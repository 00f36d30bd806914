"""The progress of a run where it is not drawn: in a pipe or a file."""

import pytest

from decode.experiment import console


@pytest.fixture
def clock(monkeypatch):
  """Seconds that have passed, in a list of one number."""
  seconds = [100.0]
  monkeypatch.setattr(console.time, 'monotonic', lambda: seconds[0])
  return seconds


def test_lines_of_long_work_say_what_is_left(clock, capsys):
  with console.show_progress() as notify:
    notify('loading a model', 0, 1)
    notify('decoding', 4, 100)
    for done in range(5, 16):
      clock[0] += 6
      notify(f'decoding; {done} tokens/s', done, 100)
    notify('done', 100, 100)
  # Six seconds for each of 91, then of 86.
  assert capsys.readouterr().err.splitlines() == [
    '[0/1] loading a model',
    '[4/100] decoding',
    '[9/100] decoding; 9 tokens/s, about 0:09:06 left',
    '[14/100] decoding; 14 tokens/s, about 0:08:36 left',
    '[100/100] done',
  ]


def test_work_without_progress_promises_nothing(clock, capsys):
  with console.show_progress() as notify:
    notify('choosing trees', 0, 0)
    clock[0] += 40
    notify('choosing trees', 0, 0)
  assert capsys.readouterr().err.splitlines() == ['[0/0] choosing trees'] * 2
