"""Turns a regular expression into an automaton over bytes in a process of its own, with bounds on its time and memory.

`constraints` starts this file as a script. It imports `outlines_core` and the standard library alone. It reads one line
of JSON, `{"regex": ..., "patterns": [...], "limits": {...}}`, and writes one, `{"num_states": S, "finals": [...]}`, and
then the transitions of all states, int32 `[S, 256]`, -1 where there is none; state 0 is the first. In place of both it
writes `{"refused": ...}`. It refuses patterns that match characters which JSON strings escape.
"""

from __future__ import annotations

import array
import contextlib
import json
import sys

try:
  import resource
except ImportError:  # not a POSIX system
  resource = None

_ESCAPED = {ord('"'), ord('\\'), *range(32)}


def _limit_resources(limits):
  """Bounds this process's memory and processor time, and keeps it from writing files."""
  if resource is None:
    return
  kinds = {'RLIMIT_AS': limits['memory'], 'RLIMIT_CPU': limits['seconds'], 'RLIMIT_FSIZE': 0, 'RLIMIT_CORE': 0}
  for name, most in kinds.items():
    with contextlib.suppress(AttributeError, OSError, ValueError):  # some systems lack limits that they name
      kind = getattr(resource, name)
      hard = resource.getrlimit(kind)[1]
      most = most if hard == resource.RLIM_INFINITY else min(most, hard)
      resource.setrlimit(kind, (most, most))


def _automaton(regex, most_states):
  """The transitions, a dictionary of dictionaries, the final states and the first one.

  The vocabulary is that of all bytes; 256 stands for the end.
  """
  from outlines_core import Index, Vocabulary

  bytes_alone = Vocabulary(256, {bytes([value]): [value] for value in range(256)})
  # A match that ends with the text alone: otherwise the first alternative that matches ends the automaton's search, and
  # `a|ab` would not have `ab`. The library refuses an assertion that may come first, so a byte comes before.
  index = Index(rf'\x02(?:{regex})\z', bytes_alone)
  transitions = index.get_transitions()
  if len(transitions) > most_states:
    raise ValueError(f'its automaton has {len(transitions):,} states, allowed are {most_states:,}')
  before = index.get_initial_state()
  return transitions, index.get_final_states(), transitions.pop(before)[2]


def _answer(request):
  """The header, and the transitions as bytes."""
  most = request['limits']['states']
  for pattern in request['patterns']:
    transitions, _, _ = _automaton(pattern, most)
    if any(byte in _ESCAPED for row in transitions.values() for byte in row):
      return {'refused': f'pattern {pattern} can match characters that JSON escapes: leave them out of it'}, b''
  transitions, finals, first = _automaton(request['regex'], most)
  numbers = {first: 0}
  for state, row in transitions.items():
    for each in (state, *(after for byte, after in row.items() if byte < 256)):
      numbers.setdefault(each, len(numbers))
  table = array.array('i', [-1]) * (256 * len(numbers))
  for state, row in transitions.items():
    start = 256 * numbers[state]
    for byte, after in row.items():
      if byte < 256:
        table[start + byte] = numbers[after]
  return {'num_states': len(numbers), 'finals': [numbers[each] for each in finals if each in numbers]}, table.tobytes()


def _main():
  sys.path += sys.argv[1:]
  request = json.loads(sys.stdin.buffer.readline())
  _limit_resources(request['limits'])
  try:
    header, table = _answer(request)
  except MemoryError:
    header, table = {'refused': 'it needs too much memory'}, b''
  except BaseException as error:  # a panic of the library is no Exception
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    header, table = {'refused': (lines[-1] if lines else type(error).__name__)[:1000]}, b''
  sys.stdout.buffer.write(json.dumps(header).encode() + b'\n' + table)


if __name__ == '__main__':
  _main()
