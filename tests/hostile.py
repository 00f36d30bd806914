"""Mutations of valid files, and the bounds that reading any of them must keep.

A fuzz test of a reader takes a valid file, mutates it by fixed seeds, and reads every mutation by `Tally.read`: the
outcome is a result or one line that names the file, within `SECONDS` and `MEMORY`.
"""

import contextlib
import copy
import json
import random
import resource
import signal

import pytest

SECONDS = 30
MEMORY = 2**30  # bytes beyond the process's start
NUM_MUTATIONS = 2000

# Numbers and values that are valid JSON, and wrong in most places.
_VALUES = (
  None, True, False, 0, 1, -1, 2, 3, 7, -(2**31), 2**31, 2**32, 2**63, 10**9, 10**30, 10**400, 0.5, -0.0, 1e-320, 1e30,
  1e308, float('inf'), float('-inf'), float('nan'), '', 'a', '0', '\0', '\ud800', '字', 'x' * 1000, '../../x',
  '/dev/zero', '\x1b[2J', [], [[]], [None], [1, 2, 3], [0.5] * 100, {}, {'': None},
  {'a': {'b': []}}, [[[[[[[[[[]]]]]]]]]],
)  # fmt: skip
_WORDS = b'\0', b'\xff' * 4, b'\xff' * 8, b'\0' * 8, b'\x7f' + b'\xff' * 7, b'\0\0\0\x80', b'\1' + b'\0' * 7, b'{', b'"'


def _places(value, path=()):
  """The paths of all values within a JSON value, its own first."""
  yield path
  children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
  for key, child in children:
    yield from _places(child, (*path, key))


def mutated_json(value, rng):
  """A JSON value with one to three changes: values replaced, removed, doubled, nested, renamed or exchanged."""
  value = copy.deepcopy(value)
  for _ in range(rng.choice((1, 1, 1, 2, 3))):
    paths = [path for path in _places(value) if path]
    if not paths:
      return rng.choice(_VALUES)
    *parents, key = rng.choice(paths)
    place = value
    for part in parents:
      place = place[part]
    match rng.randrange(8):
      case 0:
        del place[key]
      case 1 if isinstance(place, list):
        place += [copy.deepcopy(place[key])] * rng.choice((1, 10, 1000))
      case 1:
        place[rng.choice(('', 'a', f'{key}_', '0', '\ud800'))] = place.pop(key)
      case 2:
        place[key] = [place[key]] if rng.random() < 0.5 else {'a': place[key]}
      case 3:
        other = rng.choice(paths)
        found = value
        with contextlib.suppress(KeyError, IndexError, TypeError):
          for part in other:
            found = found[part]
          place[key] = copy.deepcopy(found)
      case 4 if isinstance(place[key], int | float) and not isinstance(place[key], bool):
        place[key] = rng.choice((-place[key], place[key] + 1, place[key] - 1, place[key] * 2, place[key] * 10**6))
      case _:
        place[key] = copy.deepcopy(rng.choice(_VALUES))
  return value


def mutated_bytes(content, rng):
  """Bytes with one to three changes: bits flipped, parts removed, doubled, exchanged or overwritten."""
  content = bytearray(content)
  for _ in range(rng.choice((1, 1, 1, 2, 3))):
    begin = rng.randrange(len(content) + 1)
    end = min(len(content), begin + int(2 ** rng.uniform(0, 8)))
    match rng.randrange(7):
      case 0:
        del content[begin:]
      case 1:
        del content[begin:end]
      case 2:
        content[begin:begin] = content[begin:end] * rng.choice((1, 3, 100))
      case 3:
        content[begin:end] = rng.randbytes(end - begin)
      case 4:
        word = rng.choice(_WORDS)
        content[begin : begin + len(word)] = word
      case 5:
        content[begin:begin] = rng.choice(_WORDS)
      case _:
        for _ in range(rng.choice((1, 1, 4))):
          if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
  return bytes(content)


def mutated_json_text(value, rng):
  """The bytes of a mutated JSON value; some are mutated as bytes as well."""
  content = json.dumps(mutated_json(value, rng)).encode()
  return mutated_bytes(content, rng) if rng.random() < 0.2 else content


class _TooLong(Exception):  # noqa: N818 - no ValueError
  pass


@contextlib.contextmanager
def time_limit(seconds=SECONDS):
  """Ends what runs for longer, where it runs Python at all."""

  def stop(*_):
    raise _TooLong(f'ran for more than {seconds} seconds')

  before = signal.signal(signal.SIGALRM, stop)
  signal.setitimer(signal.ITIMER_REAL, seconds)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def peak_memory():
  """The largest memory that this process has had, in bytes."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Tally:
  """Outcomes of many reads of files, one of whose names every refusal must have in it."""

  def __init__(self, *names):
    self.num_read, self.refusals = 0, {}  # refusals: their number by message, without the numbers in it
    self._names, self._start = names, peak_memory()

  def read(self, function, what=''):
    """Calls a function that reads a file; fails if it ends in anything but a result or one line within the bounds."""
    try:
      with time_limit():
        function()
    except ValueError as error:
      text = str(error)
      assert text.strip(), what
      assert '\n' not in text.strip(), (what, text)
      assert len(text) < 2000, (what, text[:300])
      assert text.isprintable(), (what, text)
      assert any(str(name) in text for name in self._names), (what, text)
      key = ''.join('#' if c.isdigit() else c for c in text)[:200]
      self.refusals[key] = self.refusals.get(key, 0) + 1
    else:
      self.num_read += 1
    assert peak_memory() - self._start < MEMORY, what

  def check(self, num=NUM_MUTATIONS, least_read=0):
    """Checks that as many were tried as should be, that some were refused and enough read, and prints the counts."""
    num_refused = sum(self.refusals.values())
    print(f'{self.num_read + num_refused} tried, {num_refused} refused in {len(self.refusals)} ways')
    assert self.num_read + num_refused >= num
    assert num_refused
    assert self.num_read >= least_read


def rngs(num=NUM_MUTATIONS, seed=0):
  """Generators of fixed seeds, one per mutation."""
  return (random.Random(f'{seed}/{i}') for i in range(num))


def refusal(function, name, match='.'):
  """The one line with which a read is refused, within the bounds; it must match and have `name` in it."""
  start = peak_memory()
  with time_limit(), pytest.raises(ValueError, match=match) as error:
    function()
  message = str(error.value)
  assert peak_memory() - start < MEMORY
  assert str(name) in message
  assert message.isprintable()
  assert len(message) < 1000
  return message
