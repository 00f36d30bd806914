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
    clock[0] += 3
    notify('compiling 1 of 1: block', 0, 1)
    clock[0] += 12.25
    notify('decoding', 4, 100)
    for done in range(5, 16):
      clock[0] += 6
      notify(f'decoding; {done} tokens/s', done, 100)
    notify('done', 100, 100)
  # Six seconds for each of 91, then of 86.
  assert capsys.readouterr().err.splitlines() == [
    '[0/1] loading a model',
    '[0/1] compiling 1 of 1: block',
    '[4/100] decoding',
    '[9/100] decoding; 9 tokens/s, about 0:09:06 left',
    '[14/100] decoding; 14 tokens/s, about 0:08:36 left',
    '[100/100] done',
    '81.2 s: loading 3.0, compiling 12.2, decoding 66.0',
  ]


def test_work_without_progress_promises_nothing(clock, capsys):
  with console.show_progress() as notify:
    notify('choosing trees', 0, 0)
    clock[0] += 40
    notify('choosing trees', 0, 0)
  assert capsys.readouterr().err.splitlines() == ['[0/0] choosing trees'] * 2


def test_a_run_that_fails_says_nothing_of_its_time(clock, capsys):
  def fail():
    with console.show_progress() as notify:
      notify('compiling', 0, 1)
      raise ValueError('no model')

  with pytest.raises(ValueError, match='no model'):
    fail()
  assert capsys.readouterr().err.splitlines() == ['[0/1] compiling']
