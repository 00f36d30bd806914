"""The progress of a run where it is not drawn: in a pipe or a file."""

import io
import pathlib
import re

import numpy as np
import pytest
from rich.console import Console

from common.progress_bar import ProgressBar, TimeLeft
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
    '[0/1] loading a model', '[0/1] compiling 1 of 1: block', '[4/100] decoding',
    '[9/100] decoding; 9 tokens/s, about 0:09:06 left', '[14/100] decoding; 14 tokens/s, about 0:08:36 left',
    '[100/100] done', '81.2 s: loading 3.0, compiling 12.2, decoding 66.0',
  ]  # fmt: skip
  with console.show_progress() as notify:
    notify('choosing trees', 0, 0)
    clock[0] += 40
    notify('choosing trees', 0, 0)
  assert capsys.readouterr().err.splitlines() == ['[0/0] choosing trees'] * 2

  def fail():
    with console.show_progress() as notify:
      notify('compiling', 0, 1)
      raise ValueError('no model')

  with pytest.raises(ValueError, match='no model'):
    fail()
  assert capsys.readouterr().err.splitlines() == ['[0/1] compiling']


class _Terminal(Console):
  """A terminal whose time is that of the fixture `clock`."""

  def __init__(self, clock):
    super().__init__(file=io.StringIO(), force_terminal=True, width=120, get_time=lambda: clock[0], color_system=None)


def _drawn(terminal, bar):
  with terminal.capture() as shown:
    terminal.print(bar.get_renderable())
  return ' '.join(shown.get().split())


def test_a_bar_names_its_times_and_always_moves(clock, monkeypatch):
  terminal = _Terminal(clock)
  bar = ProgressBar(terminal)
  assert '0:00:00 elapsed' in _drawn(terminal, bar)
  bar.show('compiling 1 of 2: spectr', 0, 1)
  clock[0] += 217
  first = _drawn(terminal, bar)
  clock[0] += 0.2
  assert _drawn(terminal, bar) != first  # though no step is done
  assert first.endswith('0:03:37 elapsed')
  assert not re.search(r'-:--:--|left|0/1', first)
  for done in range(11):
    bar.show('decoding', done, 100, f'{done} tokens/s')
    clock[0] += 6
  drawn = _drawn(terminal, bar)
  assert re.search(r'decoding .* 10/100 0:04:43 elapsed, about 0:0[89]:\d\d left 10 tokens/s$', drawn), drawn
  bar.show('timing', 0, 7)
  assert re.search(r'timing .*0/7 0:04:43 elapsed$', _drawn(terminal, bar))  # at a pace of its own
  bar.show('timing', 7, 7)
  assert re.search(r' 7/7 0:04:43 elapsed$', _drawn(terminal, bar))
  terminal = _Terminal(clock)
  monkeypatch.setattr(console, 'make_console', lambda *, stderr: terminal)
  with console.show_progress() as notify:
    notify('decoding [red]; \x1b[5 tokens/s', 3, 12)
  shown = terminal.file.getvalue()
  assert re.search(r'decoding \[red\] .* 3/12 0:00:00 elapsed +\ufffd\[5 tokens/s', shown), shown


def test_no_command_draws_a_bar_of_its_own():
  """Times without a name come with the columns of `rich`."""
  root = pathlib.Path(__file__).parents[2]
  files = [path for name in ('common', 'decode', 'train', 'benchmarks') for path in (root / name).rglob('*.py')]
  users = [path.name for path in files if re.search(r'\brich import.*\bprogress|rich\.progress', path.read_text())]
  assert users == ['progress_bar.py']


def _times(kind, rng):
  """When 1, 2, ... steps are done, in seconds, and after how many of them at once a command says so."""
  if kind == 'train':
    return 60 + np.cumsum(np.full(500, 0.2)), 10  # with the first step's compiling
  if kind == 'bulk':
    rows, times = np.full(8, 45.0), []
    for _ in range(200):  # texts of unequal lengths; a row that is done takes the next one
      row = rows.argmin()
      rows[row] += rng.uniform(1, 9)
      times.append(rows[row])
    return np.sort(times), 1
  if kind == 'batches':
    return 90 + np.repeat(np.cumsum(rng.uniform(4, 6, 12)), 8), 1  # a batch is done at once
  return np.cumsum(rng.uniform(3, 5, 40)), 1  # programs of auto, or those of chat


@pytest.mark.parametrize('kind', ['train', 'bulk', 'batches', 'auto'])
@pytest.mark.parametrize('seed', range(5))
def test_what_is_left_is_right_within_a_third(kind, seed):
  times, every = _times(kind, np.random.default_rng(seed))
  left, checked, total = TimeLeft(), 0, len(times)
  left.note(f'{kind} 0', 0, total, 0.0)
  for done in range(every, total, every):
    now = times[done - 1]
    left.note(f'{kind} {done}', done, total, now)
    if done >= total / 5 and times[done] > now:
      assert left.at(now) == pytest.approx(times[-1] - now, rel=1 / 3, abs=times[-1] / 20), done
      checked += 1
  assert checked > 5
  left.note(f'{kind} 0', 0, total, 0.0)
  assert left.at(0.0) is None  # another run of it has a pace of its own
