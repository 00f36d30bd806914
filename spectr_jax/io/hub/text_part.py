"""The text model of a multimodal checkpoint: its fields of `config.json` and its tensors, without what is beside it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from spectr_jax.io.hub.families import FAMILIES
from spectr_jax.io.hub.tensors import Tensors
from spectr_jax.io.untrusted import FLAG, TEXT, check_object, list_of, name_shown, object_of

# Classes of Transformers whose texts are those of a family alone: their `model_type`, and fields of the text model that
# their files may leave out.
_CLASSES: dict[str, tuple[str, Mapping[str, Any]]] = {
  'Gemma3ForConditionalGeneration': (
    'gemma3', {'vocab_size': 262_208, 'num_attention_heads': 8, 'max_position_embeddings': 131_072},
  ),
  'Gemma4ForConditionalGeneration': ('gemma4', {}),
  'Gemma4UnifiedForConditionalGeneration': ('gemma4_unified', {}),
  'Mistral3ForConditionalGeneration': ('mistral3', {}),
  'Qwen3_5ForConditionalGeneration': ('qwen3_5', {}),
  'Qwen3_5MoeForConditionalGeneration': ('qwen3_5_moe', {}),
}  # fmt: skip
_FIELDS = {
  'architectures': list_of(TEXT, 100), 'model_type': TEXT, 'text_config': object_of({'model_type': TEXT}),
  'tie_word_embeddings': FLAG,
}  # fmt: skip
# What the text model has from the whole where it says nothing itself.
_OF_THE_WHOLE = ('dtype', 'torch_dtype', 'quantization_config', 'bos_token_id', 'eos_token_id')
# Beginnings of names, and those that the text model alone would have.
_PREFIXES = {
  'model.language_model.': 'model.',
  'language_model.model.': 'model.',
  'language_model.lm_head.': 'lm_head.',
  'lm_head.': 'lm_head.',
}
_MOST_NAMED = 6


def _class_of(spec: Any) -> str | None:
  """The name in `_CLASSES` of a multimodal class; None for what else a file may hold."""
  names = spec.get('architectures') if isinstance(spec, dict) else None
  first = names[0] if isinstance(names, list) and names else None
  return first if isinstance(first, str) and first in _CLASSES else None


def text_spec(spec: dict[str, Any], where: str) -> dict[str, Any]:
  """The `config.json` that the text model of a multimodal one would have alone; that of another model as it is.

  Raises `ValueError` where there is no text model, or one of an unknown kind.
  """
  name = _class_of(spec)
  if name is None:
    return spec
  check_object(spec, _FIELDS, where)
  model_type, defaults = _CLASSES[name]
  if spec.get('model_type') not in (None, model_type):
    raise ValueError(f'{where}: model_type {name_shown(spec["model_type"])} is not {model_type}, that of {name}')
  text = spec.get('text_config')
  if text is None:
    raise ValueError(f'{where}: {name} has no text_config')
  known = {family.model_type: architecture for architecture, family in FAMILIES.items()}
  kind = text.get('model_type')
  if kind not in known:
    raise ValueError(f'{where}: text_config has model_type {name_shown(str(kind))}; known are {", ".join(known)}')
  whole = {field: spec[field] for field in _OF_THE_WHOLE if spec.get(field) is not None and text.get(field) is None}
  if spec.get('tie_word_embeddings') is not None:
    whole['tie_word_embeddings'] = spec['tie_word_embeddings']
  return {**defaults, **text, **whole, 'architectures': [known[kind]]}


class TextTensors(Tensors):
  """The tensors of the text model of a multimodal checkpoint, by the names that they would have alone."""

  def __init__(self, tensors: Tensors):
    self._tensors = tensors
    self._names: dict[str, str] = {}
    self.left_out: list[str] = []
    for name in sorted(tensors.names()):
      before = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
      if before is None:
        self.left_out.append(name)
        continue
      alone = f'{_PREFIXES[before]}{name.removeprefix(before)}'
      if alone in self._names:
        raise ValueError(
          f'tensors {name_shown(self._names[alone])} and {name_shown(name)} are the same of the text model'
        )
      self._names[alone] = name

  def names(self) -> set[str]:
    return set(self._names)

  def shape(self, name: str) -> tuple[int, ...]:
    return self._tensors.shape(self._names[name])

  def dtype(self, name: str) -> np.dtype:
    return self._tensors.dtype(self._names[name])

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    return self._tensors.read(self._names[name], index)


def text_tensors(spec: Any, tensors: Tensors) -> Tensors:
  """The tensors of what `text_spec` describes."""
  return tensors if _class_of(spec) is None else TextTensors(tensors)


def warn_of_left_out(tensors: Tensors, where: str) -> None:
  """Names the parts of a checkpoint that `text_tensors` has left out, in a warning."""
  if not isinstance(tensors, TextTensors) or not tensors.left_out:
    return
  parts = sorted({'.'.join(name.split('.')[: 2 if name.startswith('model.') else 1]) for name in tensors.left_out})
  more = f' and {len(parts) - _MOST_NAMED} more' if len(parts) > _MOST_NAMED else ''
  named = ', '.join(map(name_shown, parts[:_MOST_NAMED])) + more
  warnings.warn(f'{where}: the text model alone is read; left out are {named}', stacklevel=3)
