"""Tensors that say again what others or the configuration say. They are compared before they are passed over."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from spectr_jax.io.hub.families import read_spec
from spectr_jax.io.hub.sources import source_of, telling_names
from spectr_jax.io.hub.tensors import Tensors, are_equal, row_ranges
from spectr_jax.io.untrusted import name_shown, named
from spectr_jax.models.causal_lm_config import Rope

FREQUENCIES = 'rotary_emb.inv_freq'
_MASKING = -9e3  # added to scores that do not count; files have -1e4 and less, in types of few digits


def settle_head(spec: Mapping[str, Any], tensors: Tensors, where: str = 'config.json') -> Mapping[str, Any]:
  """The configuration with `tie_word_embeddings` as the tensors have it.

  It may say that the embedding is the output head where the checkpoint has a head of other numbers. That head then is
  the model's, as in Transformers, and there is a warning.
  """
  family, config = read_spec(spec, where)
  names = tensors.names()
  heads = [name for head in family.head_names if (name := f'{head}.weight') in names]
  for other in heads[1:]:
    if not are_equal(tensors, heads[0], tensors, other, dtype=config.dtype):
      raise ValueError(f'{heads[0]} and {other} hold different numbers, and each is the output head')
  shape = config.vocab_size, config.embed_dim
  embedding = source_of('embedding', shape, family, config, telling_names(family, names)).name
  if not config.is_tied or not heads or embedding == heads[0]:  # a file of the head alone
    return spec
  if are_equal(tensors, heads[0], tensors, embedding, dtype=config.dtype):
    return spec
  warnings.warn(
    f'{where}: tie_word_embeddings is true, but {heads[0]} and {embedding} hold different numbers: {heads[0]} is used'
    ' as the output head',
    stacklevel=2,
  )
  return {**spec, 'tie_word_embeddings': False}


def _check_frequencies(tensors: Tensors, name: str, ropes: Collection[Rope]) -> None:
  """Checks rotary frequencies, which files may have rounded to 8 bits and to float16 after that."""
  shape = tensors.shape(name)
  for rope in ropes:
    expected = np.array(rope.frequencies)
    if shape == expected.shape:
      frequencies = tensors.read(name, (slice(0, len(expected)),)).astype(np.float64)
      if (np.abs(frequencies - expected) <= 2**-8 * expected + 2**-24).all():
        return
  raise ValueError(f'tensor {name_shown(name)} holds other rotary frequencies than those of the configuration')


def _check_mask(tensors: Tensors, name: str) -> None:
  """Checks a mask by which every position sees those up to itself."""
  shape = tensors.shape(name)
  fault = f'tensor {name_shown(name)} holds another mask than that of attention to all positions before'
  if len(shape) < 2 or shape[-1] != shape[-2] or set(shape[:-2]) - {1}:
    raise ValueError(f'{fault}: its shape is {shape}')
  size, ones = shape[-1], (slice(0, 1),) * (len(shape) - 2)
  for part in row_ranges(size, size):
    rows = tensors.read(name, (*ones, part, slice(0, size))).reshape(-1, size)
    if not np.array_equal(rows != 0, np.tri(len(rows), size, part.start, dtype=bool)):
      raise ValueError(fault)


def _check_masking(tensors: Tensors, name: str) -> None:
  """Checks the number that scores of masked positions become."""
  shape = tensors.shape(name)
  if set(shape) - {1} or not (tensors.read(name, (slice(0, 1),) * len(shape)) <= _MASKING).all():
    raise ValueError(f'tensor {name_shown(name)} must be one number of at most {_MASKING:,.0f}, which masks positions')


def check_buffers(tensors: Tensors, names: Iterable[str], ropes: Collection[Rope]) -> None:
  """Checks tensors that follow from the configuration and that some programs stored all the same."""
  for name in sorted(names):
    if name.endswith(FREQUENCIES):
      _check_frequencies(tensors, name, ropes)
    elif name.endswith('.masked_bias'):
      _check_masking(tensors, name)
    else:
      _check_mask(tensors, name)


def check_model_buffers(spec: Mapping[str, Any], tensors: Tensors, where: str) -> None:
  family, config = read_spec(spec, where)
  # Linear scaling divided positions where frequencies are divided now.
  _, unscaled = read_spec({**spec, 'rope_scaling': None}, where)
  ropes = [rope for rope in (config.rope, config.window_rope, unscaled.rope) if rope is not None]
  with named(where):
    check_buffers(tensors, [name for name in tensors.names() if name.endswith(family.buffers)], ropes)
