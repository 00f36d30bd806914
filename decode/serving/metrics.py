"""Counters of the endpoint, as text that Prometheus reads."""

from __future__ import annotations

import bisect
import collections
import threading

_SECONDS = 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
# Paths whose requests are counted, and their kinds.
KINDS = {'/v1/completions': 'completions', '/v1/chat/completions': 'chat'}
OUTCOMES = 'answered', 'refused', 'failed', 'left'
_HELP = {
  'requests_received_total': ('counter', 'Requests, by kind.'),
  'requests_total': ('counter', 'Requests that came to their end, by kind and outcome.'),
  'requests_in_progress': ('gauge', 'Requests that were received and have not ended, by kind.'),
  'continuations_received_total': ('counter', 'Continuations that requests asked for, by kind.'),
  'continuations_total': ('counter', 'Continuations that came to their end, by kind and outcome.'),
  'continuations_in_progress': ('gauge', 'Continuations that were asked for and have not ended, by kind.'),
  'prompt_tokens_total': ('counter', 'Tokens of prompts.'),
  'tokens_total': ('counter', 'New tokens.'),
  'target_calls_total': ('counter', 'Calls of the target, a row at a time.'),
  'accepted_total': ('counter', 'Rounds that kept at least so many guesses, by depth.'),
  'rows': ('gauge', 'Rows that decode.'),
  'queue': ('gauge', 'Continuations that wait for a row.'),
  'tokens_per_call': ('gauge', 'New tokens per call of the target, since the start.'),
  'time_to_first_token_seconds': ('histogram', 'Time from a request to its first token.'),
}


class Metrics:
  """Numbers that several threads add to."""

  def __init__(self):
    self._lock = threading.Lock()
    self._counts: dict[tuple[str, str], float] = collections.defaultdict(float)
    for things in ('requests', 'continuations'):
      for kind in KINDS.values():
        self._counts[f'{things}_received_total', f'kind="{kind}"'] = 0
        for outcome in OUTCOMES:
          self._counts[f'{things}_total', f'kind="{kind}",outcome="{outcome}"'] = 0
    self._buckets, self._sum = [0] * (len(_SECONDS) + 1), 0.0

  def add(self, name: str, value: float = 1, label: str = '') -> None:
    """Adds to a counter.

    Args:
      name: Its name, without the prefix.
      value: What is added.
      label: Its label as it is written, such as `outcome="done"`.
    """
    with self._lock:
      self._counts[name, label] += value

  def count(self, name: str, label: str = '') -> float:
    """The value of a counter."""
    with self._lock:
      return self._counts[name, label]

  def observe_first_token(self, seconds: float) -> None:
    """Adds the time that a request waited for its first token."""
    with self._lock:
      self._buckets[bisect.bisect_left(_SECONDS, seconds)] += 1
      self._sum += seconds

  def render(self, **gauges: float) -> str:
    """All numbers in the text format of Prometheus.

    Args:
      **gauges: The gauges that others know.
    """
    with self._lock:
      counts, buckets, total = dict(self._counts), list(self._buckets), self._sum
    calls = counts.get(('target_calls_total', ''), 0)
    values: dict[tuple[str, str], float] = counts | {(name, ''): value for name, value in gauges.items()}
    values['tokens_per_call', ''] = counts.get(('tokens_total', ''), 0) / calls if calls else 0
    for things in ('requests', 'continuations'):
      for kind in KINDS.values():
        ended = sum(counts[f'{things}_total', f'kind="{kind}",outcome="{outcome}"'] for outcome in OUTCOMES)
        label = f'kind="{kind}"'
        values[f'{things}_in_progress', label] = counts[f'{things}_received_total', label] - ended
    lines = []
    for name, (kind, what) in _HELP.items():
      lines += [f'# HELP spectr_jax_{name} {what}', f'# TYPE spectr_jax_{name} {kind}']
      if kind != 'histogram':
        own = sorted((label, value) for (each, label), value in values.items() if each == name) or [('', 0)]
        lines += [f'spectr_jax_{name}{f"{{{label}}}" if label else ""} {value:.15g}' for label, value in own]
      else:
        sums = [sum(buckets[: place + 1]) for place in range(len(buckets))]
        for bound, number in zip((*map(str, _SECONDS), '+Inf'), sums, strict=True):
          lines.append(f'spectr_jax_{name}_bucket{{le="{bound}"}} {number}')
        lines += [f'spectr_jax_{name}_sum {total:g}', f'spectr_jax_{name}_count {sums[-1]}']
    return '\n'.join(lines) + '\n'
