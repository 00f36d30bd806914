"""Rotary positions as `config.json` describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from spectr_jax.models.causal_lm_config import Rope


def _linear(frequencies, parameters):
  return frequencies / parameters['factor'], 1.0


def _llama3(frequencies, parameters):
  """Divides low frequencies by the factor, keeps high ones, and goes over smoothly in between."""
  low, high = parameters['low_freq_factor'], parameters['high_freq_factor']
  rotations = parameters['original_max_position_embeddings'] * frequencies / (2 * math.pi)
  share_kept = np.clip((rotations - low) / (high - low), 0, 1)
  return frequencies * (share_kept + (1 - share_kept) / parameters['factor']), 1.0


def _yarn(frequencies, parameters):
  """As `_llama3`, with a ramp over the frequencies' numbers, and with sharper attention (Peng et al. 2023)."""
  num, length = len(frequencies), parameters['original_max_position_embeddings']
  factor = parameters.get('factor') or parameters['max_position_embeddings'] / length

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


_SCALINGS = {
  'default': lambda frequencies, parameters: (frequencies, 1.0),
  'linear': _linear,
  'llama3': _llama3,
  'yarn': _yarn,
}


def read_rope(parameters: Mapping[str, Any], head_dim: int) -> Rope:
  """Rotary positions with their scaling.

  Args:
    parameters: `rope_theta`, the base, and optionally `rope_type` (older: `type`), `partial_rotary_factor` and the
      numbers of the scaling.
    head_dim: Width of a head.

  Raises:
    ValueError: The scaling is of an unknown type.
    KeyError: A number of the scaling is missing.
  """
  kind = parameters.get('rope_type') or parameters.get('type') or 'default'
  if kind not in _SCALINGS:
    raise ValueError(f'RoPE scaling {kind!r} is unknown; known are {", ".join(_SCALINGS)}')
  width = int(head_dim * (parameters.get('partial_rotary_factor') or 1.0))
  frequencies = parameters['rope_theta'] ** (-np.arange(0, width, 2) / width)
  frequencies, magnitude = _SCALINGS[kind](frequencies, parameters)
  return Rope(tuple(frequencies.tolist()), float(magnitude))
