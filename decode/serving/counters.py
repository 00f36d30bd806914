"""Counters of the endpoint, as text that Prometheus reads."""

from __future__ import annotations

import bisect
import collections
import itertools
import threading

_SECONDS = 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
# Paths whose requests are counted, and their kinds.
KINDS = {'/v1/completions': 'completions', '/v1/chat/completions': 'chat'}
OUTCOMES = 'answered', 'refused', 'failed', 'left'
_THINGS = [(things, kind) for things in ('requests', 'continuations') for kind in KINDS.values()]
_HELP = {
  'requests_received_total': ('counter', 'Requests, by kind.'),
  'requests_total': ('counter', 'Requests that came to their end, by kind and outcome.'),
  'requests_in_progress': ('gauge', 'Requests that were received and have not ended, by kind.'),
  'continuations_received_total': ('counter', 'Continuations that requests asked for, by kind.'),
  'continuations_total': ('counter', 'Continuations that came to their end, by kind and outcome.'),
  'continuations_in_progress': ('gauge', 'Continuations that were asked for and have not ended, by kind.'),
  'prompt_tokens_total': ('counter', 'Tokens of prompts.'),
  'prefix_hits_total': ('counter', 'Prompts that began like an earlier text.'),
  'prefix_tokens_total': ('counter', 'Tokens of prompts that were not read, since they began an earlier text.'),
  'tokens_total': ('counter', 'New tokens.'),
  'target_calls_total': ('counter', 'Calls of the target, a row at a time.'),
  'accepted_total': ('counter', 'Rounds that kept at least so many guesses, by depth.'),
  'rounds_total': ('counter', 'Rounds, by the rows that they ran and the guesses of a row.'),
  'rows': ('gauge', 'Rows that decode.'),
  'queue': ('gauge', 'Continuations that wait for a row.'),
  'prefix_bytes': ('gauge', 'Bytes of beginnings of texts that are kept besides the rows.'),
  'tokens_per_call': ('gauge', 'New tokens per call of the target, since the start.'),
  'time_to_first_token_seconds': ('histogram', 'Time from a request to its first token.'),
}


class Metrics:
  """Numbers that several threads add to."""

  def __init__(self):
    self._lock = threading.Lock()
    self._counts: dict[tuple[str, str], float] = collections.defaultdict(float)
    self._buckets, self._sum = [0] * (len(_SECONDS) + 1), 0.0
    for things, kind in _THINGS:
      self.add(f'{things}_received_total', 0, kind=kind)
      for outcome in OUTCOMES:
        self.add(f'{things}_total', 0, kind=kind, outcome=outcome)

  def add(self, name: str, value: float = 1, **labels: str) -> None:
    """Adds to a counter, named without the prefix."""
    with self._lock:
      self._counts[name, _written(**labels)] += value

  def observe_first_token(self, seconds: float) -> None:
    with self._lock:
      self._buckets[bisect.bisect_left(_SECONDS, seconds)] += 1
      self._sum += seconds

  def render(self, **gauges: float) -> str:
    """All numbers in the text format of Prometheus, with the gauges that others know."""
    with self._lock:
      counts, buckets, total = self._counts.copy(), list(self._buckets), self._sum
    calls = counts['target_calls_total', '']
    values = counts | {(name, ''): value for name, value in gauges.items()}
    values['tokens_per_call', ''] = counts['tokens_total', ''] / calls if calls else 0
    for things, kind in _THINGS:
      ended = sum(counts[f'{things}_total', _written(kind=kind, outcome=outcome)] for outcome in OUTCOMES)
      received = counts[f'{things}_received_total', _written(kind=kind)]
      values[f'{things}_in_progress', _written(kind=kind)] = received - ended
    sums = list(itertools.accumulate(buckets))
    for bound, number in zip((*map(str, _SECONDS), '+Inf'), sums, strict=True):
      values['time_to_first_token_seconds', f'bucket{{le="{bound}"}}'] = number
    lines = []
    for name, (kind, meaning) in _HELP.items():
      lines += [f'# HELP spectr_jax_{name} {meaning}', f'# TYPE spectr_jax_{name} {kind}']
      own = [(label, value) for (each, label), value in values.items() if each == name] or [('', 0)]
      if kind == 'histogram':
        lines += [f'spectr_jax_{name}_{bucket} {number}' for bucket, number in own]
        lines += [f'spectr_jax_{name}_sum {total:g}', f'spectr_jax_{name}_count {sums[-1]}']
      else:
        lines += [f'spectr_jax_{name}{f"{{{label}}}" if label else ""} {value:.15g}' for label, value in sorted(own)]
    return '\n'.join(lines) + '\n'


def _written(**labels: str) -> str:
  """Labels as they are written, such as `outcome="left"`."""
  return ','.join(f'{name}="{value}"' for name, value in labels.items())
