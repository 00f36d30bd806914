"""Rotary positions as `config.json` describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from spectr_jax.io.hub.config_fields import ROPE_FIELDS
from spectr_jax.io.untrusted import check_object, shown
from spectr_jax.models.causal_lm_config import Rope


def _linear(frequencies, parameters):
  return frequencies / parameters['factor'], 1.0


def _llama3(frequencies, parameters):
  """Divides low frequencies by the factor, keeps high ones, and goes over smoothly in between."""
  low, high = parameters['low_freq_factor'], parameters['high_freq_factor']
  if high <= low:
    raise ValueError(f'high_freq_factor {high} must be above low_freq_factor {low}')
  rotations = parameters['original_max_position_embeddings'] * frequencies / (2 * math.pi)
  share_kept = np.clip((rotations - low) / (high - low), 0, 1)
  return frequencies * (share_kept + (1 - share_kept) / parameters['factor']), 1.0


def _yarn_factor(parameters: Mapping[str, Any]) -> float:
  """By how much YaRN stretches the context; files without a factor have the lengths before and after."""
  before, after = parameters['original_max_position_embeddings'], parameters['max_position_embeddings']
  return parameters['factor'] if 'factor' in parameters or before == after else after / before


def _yarn(frequencies, parameters):
  """As `_llama3`, with a ramp over the frequencies' numbers, and with sharper attention (Peng et al. 2023)."""
  num, length = len(frequencies), parameters['original_max_position_embeddings']
  factor = _yarn_factor(parameters)
  if parameters.get('attn_factor') not in (None, 1):
    raise ValueError(f'attn_factor {shown(parameters["attn_factor"])} is not supported')

  def number_of(num_rotations):
    """The number of the frequency that makes so many rotations over the original context."""
    return num * math.log(length / (num_rotations * 2 * math.pi)) / math.log(parameters['rope_theta'])

  first, last = number_of(parameters.get('beta_fast') or 32), number_of(parameters.get('beta_slow') or 1)
  if parameters.get('truncate', True):
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, 2 * num - 1)
  share_kept = 1 - np.clip((np.arange(num) - first) / (last - first or 0.001), 0, 1)

  def temperature(scale):
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1

  magnitude = parameters.get('attention_factor')
  if magnitude is None:
    scales = parameters.get('mscale'), parameters.get('mscale_all_dim')
    magnitude = temperature(scales[0]) / temperature(scales[1]) if all(scales) else temperature(1)
  return frequencies * (share_kept + (1 - share_kept) / factor), magnitude


def _longrope(frequencies, parameters):
  """Divides each frequency by a number of its own, the same for short contexts and for long ones."""
  divisors, length = parameters.get('short_factor'), parameters['original_max_position_embeddings']
  if divisors is None or divisors != parameters.get('long_factor'):
    raise ValueError("RoPE scaling 'longrope' is unknown unless short_factor and long_factor are the same")
  if len(divisors) != len(frequencies):
    raise ValueError(f'short_factor has {len(divisors)} numbers, and there are {len(frequencies)} frequencies')
  factor, magnitude = parameters.get('factor', parameters['max_position_embeddings'] / length), 1.0
  if factor > 1 and length > 1:
    magnitude = math.sqrt(1 + math.log(factor) / math.log(length))
  return frequencies / divisors, parameters.get('attention_factor', magnitude)


def _proportional(frequencies, parameters):
  """Those of the whole head, of which the first turn, by their share, and the others stand still."""
  num_turned = int(parameters.get('partial_rotary_factor', 1.0) * 2 * len(frequencies) // 2)
  is_turned = np.arange(len(frequencies)) < num_turned
  return np.where(is_turned, frequencies / parameters.get('factor', 1.0), 0.0), 1.0


_SCALINGS = {
  'default': lambda frequencies, parameters: (frequencies, 1.0),
  'linear': _linear,
  'llama3': _llama3,
  'yarn': _yarn,
  'longrope': _longrope,
  'proportional': _proportional,
}


def _kind(parameters: Mapping[str, Any]) -> str:
  kind = parameters.get('rope_type') or parameters.get('type') or 'default'
  if kind not in _SCALINGS:
    raise ValueError(f'RoPE scaling {shown(kind)} is unknown; known are {", ".join(_SCALINGS)}')
  return kind


def rope_parameters(spec: Mapping[str, Any], name: str, values: Any, **defaults: float | None) -> dict[str, Any]:
  """The parameters of rotary positions: those found in the field `name`, with what stands elsewhere in `spec`.

  `defaults` apply where neither names a parameter.
  """
  values = {key: value for key, value in check_object(values, ROPE_FIELDS, name).items() if value is not None}
  nested = [key for key, value in values.items() if isinstance(value, dict)]
  if nested:
    raise ValueError(f'{name}: RoPE of its own for {shown(nested[0])} is not supported')
  length = 'original_max_position_embeddings'
  sizes = {'max_position_embeddings': spec['max_position_embeddings'], length: spec['max_position_embeddings']}
  outside = {length: spec[length]} if length in spec else {}  # beside the other sizes it counts more than within
  return sizes | {key: value for key, value in defaults.items() if value is not None} | values | outside


def context_length(parameters: Mapping[str, Any]) -> int:
  """The longest context: `max_position_embeddings`, or what YaRN stretches the original one to if that is more."""
  length = parameters['max_position_embeddings']
  if _kind(parameters) != 'yarn':
    return length
  return min(max(length, int(_yarn_factor(parameters) * parameters['original_max_position_embeddings'])), 2**31 - 1)


def read_rope(parameters: Mapping[str, Any], head_dim: int) -> Rope:
  """Rotary positions of heads of width `head_dim`, with the scaling that `parameters` names.

  `rope_theta` is the base; `rope_type` (older: `type`), `partial_rotary_factor` and the scaling's numbers are optional.
  An unknown type raises `ValueError`, and a missing number `KeyError`.
  """
  kind = _kind(parameters)
  width = head_dim if kind == 'proportional' else int(head_dim * parameters.get('partial_rotary_factor', 1.0))
  if width < 1:
    raise ValueError(f'RoPE turns none of the {head_dim} entries of a head')
  frequencies = parameters['rope_theta'] ** (-np.arange(0, width, 2) / width)
  frequencies, magnitude = _SCALINGS[kind](frequencies, parameters)
  return Rope(tuple(frequencies.tolist()), float(magnitude))
