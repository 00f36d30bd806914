"""The formats of published heads, by name: how each is recognised, and who reads its `config.json` and its tensors.

What differs between heads of a format follows from the tensors where it can, since configurations are often incomplete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from spectr_jax.io.heads import assistant_format, eagle_formats, one_pass_formats
from spectr_jax.io.heads.layout import Described, Layout
from spectr_jax.io.hub.config_fields import BLOCK_FIELDS, checked
from spectr_jax.io.untrusted import FLAG, TEXT, list_of, name_shown, object_of, whole

MEDUSA = 'Medusa'
# Of the `config.json` of a head. The number of blocks may be that of the target.
_FIELDS = (
  BLOCK_FIELDS
  | eagle_formats.EAGLE3_FIELDS
  | one_pass_formats.ONE_PASS_FIELDS
  | {
    'num_hidden_layers': whole(0, 10_000),
    'architectures': list_of(TEXT, 100),
    'bias': FLAG,
    'dflash_config': object_of({}),
    'eagle_config': object_of({}),
    'speculators_model_type': TEXT,
    'transformer_layer_config': object_of({}),
  }
)


# Readers of the speculators format, by type.
_SPECULATORS: dict[str, Callable[[Described], Layout]] = {
  'eagle3': eagle_formats.read_eagle3,
  'dflash': one_pass_formats.read_one_pass_speculators,
  'dflash2': one_pass_formats.read_one_pass_speculators,
  'dspark': one_pass_formats.read_one_pass_speculators,
  'peagle': eagle_formats.read_peagle,
}


def _speculators(head: Described) -> Layout:
  kind = head.spec['speculators_model_type']
  if kind not in _SPECULATORS:
    raise ValueError(f'speculators of type {name_shown(kind)} are not read; known are {", ".join(_SPECULATORS)}')
  block = checked(head.spec['transformer_layer_config'], _FIELDS, 'transformer_layer_config')
  return _SPECULATORS[kind](head.saying(block))


# By format, of a configuration as `checked_spec` gives it.
READERS: dict[str, Callable[[Described], Layout]] = {
  'EAGLE': eagle_formats.read_eagle,
  'EAGLE-3': eagle_formats.read_eagle3,
  'speculators': _speculators,
  'DFlash': one_pass_formats.read_dflash,
  'DFlash 2': functools.partial(one_pass_formats.read_dflash, architecture='DFlash2DraftModel'),
  'DSpark': one_pass_formats.read_dspark,
  'MTP': eagle_formats.read_qwen_mtp,
  'MTP, DeepSeek': eagle_formats.read_deepseek_mtp,
}
# Formats by names of tensors that only their heads have, all of a set; the first that is there counts. DFlash takes the
# target's embedding and output head, and DSpark has copies.
_MARKS = (
  ('EAGLE-3', {'midlayer.self_attn.q_proj.weight'}),
  ('EAGLE-3', {'layers.0.hidden_norm.weight'}),
  ('DFlash 2', {'fc.weight', 'hidden_norm.weight', 'candidate_selector.predecessor_codebook'}),
  ('DSpark', {'fc.weight', 'hidden_norm.weight', 'lm_head.weight'}),
  ('DSpark', {'fc.weight', 'hidden_norm.weight', 'markov_head.markov_w1.weight'}),
  ('DFlash', {'fc.weight', 'hidden_norm.weight'}),
  ('EAGLE', {'fc.weight', 'layers.0.self_attn.q_proj.weight'}),
  (assistant_format.FORMAT, assistant_format.MARKS),
  (MEDUSA, {'0.0.linear.weight'}),
  (MEDUSA, {'medusa_head.0.0.linear.weight'}),
  ('MTP', {'mtp.fc.weight'}),
)


def find_format(spec: Mapping[str, Any], names: set[str]) -> tuple[str, str] | None:
  """The format of a folder's head, and how the names that belong to it begin; None if it holds none."""
  if 'speculators_model_type' in spec:
    return 'speculators', ''
  for name, marks in _MARKS:
    if marks <= names:
      return name, 'mtp.' if name == 'MTP' else ''
  prefix = eagle_formats.deepseek_prefix(names)
  return None if prefix is None else ('MTP, DeepSeek', prefix)


def checked_spec(spec: Any, where: str) -> dict[str, Any]:
  """The `config.json` of a head, with fields of the right kinds."""
  return checked(spec, _FIELDS, where)
