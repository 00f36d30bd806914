"""Turns a regular expression into an automaton over bytes, for `constraints`, in a process of its own.

It imports `outlines_core` and the standard library alone.
"""

from __future__ import annotations

import array
import base64
import zlib


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


def answer(request):
  """Answers `{"regex": ..., "most_states": ...}`.

  `{"num_states": S, "finals": [...], "table": ...}` has the transitions, int32 `[S, 256]`, packed, -1 where there is
  none; state 0 is the first. `{"refused": ...}` says why there is none.
  """
  most = request['most_states']
  try:
    transitions, finals, first = _automaton(request['regex'], most)
  except MemoryError:
    raise
  except BaseException as error:  # a panic of the library is no Exception
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = (lines[-1] if lines else type(error).__name__)[:1000]
    return {'refused': said, 'is_bound': isinstance(error, ImportError)}  # the library needs memory, too
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
  finals = [numbers[each] for each in finals if each in numbers]
  return {
    'num_states': len(numbers), 'finals': finals, 'table': base64.b64encode(zlib.compress(table, 1)).decode(),
  }  # fmt: skip
