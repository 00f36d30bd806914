"""The results of `benchmarks.speed_of_sizes` as lines of text."""

from __future__ import annotations

from typing import Any

from benchmarks.unverified import UNVERIFIED

UNITS = 'step', 'round'
OWN, PEER = 'spectr_jax with prefill, 1 row', 'transformers with prefill, 1 row'
Result = dict[str, Any]


def describe(name: str, found: Result) -> str:
  """A line about a result.

  Args:
    name: Its name.
    found: The result.
  """

  def times(found):
    return f'{found["median"]:.2f} ms ({found["low"]:.2f} to {found["high"]:.2f})'

  if 'step' in found:
    said = f'{times(found["step"])}, {found["tokens_per_second"]:.1f} tokens/s; floor {found["floor"]:.2f} ms'
    return f'{name}: {said}, {found["floor_share"]:.0%} of the step'
  if 'round' in found:
    parts = ', '.join(f'{part} {value:.2f}' for part, value in found['parts'].items())
    return f'{name}: {times(found["round"])}; {parts}; verification {found["verification_share"]:.1%} of a round'
  if 'unverified' in found:
    return f'{name}: {times(found["unverified"])}'
  if 'times' in found:
    return f'{name}: ' + '; '.join(f'{key} {times(value)}' for key, value in found['times'].items())
  return f'{name}: {found}'


def describe_shares(results: dict[str, Result]) -> list[str]:
  """Lines about the share of verification in the rounds of each method.

  Args:
    results: All results by name.
  """
  lines = []
  for name, found in results.items():
    method, _, shape = name.partition(' ')
    beside = results.get(f'{UNVERIFIED.name} {shape}')
    if 'round' in found and beside is not None:
      own, without = found['round']['median'], beside['unverified']['median']
      lines.append(f'{name}: verification {own - without:.2f} ms within the loop, {1 - without / own:.1%} of a round')
  return lines


def describe_ratios(results: dict[str, Result]) -> list[str]:
  """Lines about how much faster this library is than transformers, if both were measured.

  Args:
    results: All results by name.
  """
  if OWN not in results or PEER not in results:
    return []
  own, peer = results[OWN]['times'], results[PEER]['times']
  ratios = {unit: peer[f'transformers, {unit}']['median'] / own[f'spectr_jax, {unit}']['median'] for unit in UNITS}
  return [f'{unit}: {ratio:.2f} times as fast as transformers' for unit, ratio in ratios.items()]
