"""Which head a checkpoint holds, by the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spectr_jax.io.hub.redundant import FREQUENCIES

DFLASH, DFLASH2, DSPARK = 'DFlash', 'DFlash 2', 'DSpark'
MEDUSA, MTP, DEEPSEEK_MTP = 'Medusa', 'MTP', 'MTP, DeepSeek'
_MTP_NAME = r'model\.layers\.([0-9]{1,5})\.eh_proj\.weight'


def find_format(spec: Mapping[str, Any], names: set[str]) -> str | None:
  """The format of a folder's head, `MEDUSA` or a key of `formats.READERS`; None if it holds none.

  Args:
    spec: The content of `config.json`.
    names: The names of the tensors.
  """
  if 'speculators_model_type' in spec:
    return 'speculators'
  if {'midlayer.self_attn.q_proj.weight', 'layers.0.hidden_norm.weight'} & names:
    return 'EAGLE-3'
  if {'fc.weight', 'hidden_norm.weight'} <= names:
    if 'candidate_selector.predecessor_codebook' in names:
      return DFLASH2
    # DFlash takes the target's embedding and output head; DSpark has copies.
    return DSPARK if {'lm_head.weight', 'markov_head.markov_w1.weight'} & names else DFLASH
  if {'fc.weight', 'layers.0.self_attn.q_proj.weight'} <= names:
    return 'EAGLE'
  if {'0.0.linear.weight', 'medusa_head.0.0.linear.weight'} & names:
    return MEDUSA
  if 'mtp.fc.weight' in names:
    return MTP
  if any(re.fullmatch(_MTP_NAME, name) for name in names):
    return DEEPSEEK_MTP
  return None


def head_prefix(found: str, names: set[str]) -> str:
  """The beginning of the names that belong to a head.

  Args:
    found: Its format.
    names: The names of all tensors.

  Raises:
    ValueError: There are several heads.
  """
  if found == DEEPSEEK_MTP:
    layers = [match[1] for name in sorted(names) if (match := re.fullmatch(_MTP_NAME, name))]
    if len(layers) > 1:
      raise ValueError(f'the checkpoint has {len(layers)} MTP layers; one is read')
    return f'model.layers.{layers[0]}.'
  return 'mtp.' if found == MTP else ''


def is_beside(prefix: str, name: str) -> bool:
  """Whether a tensor may stand beside a head's own: it follows from others, or belongs to the target.

  What follows from others is compared with them when the head is loaded.

  Args:
    prefix: The beginning of the names that belong to the head.
    name: The tensor's name.
  """
  return not name.startswith(prefix) or name.endswith(FREQUENCIES) or name == 't2d' or 'verifier_' in name
