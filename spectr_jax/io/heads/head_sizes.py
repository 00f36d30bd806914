"""The sizes of a target's head, from an experiment as `configs/head.py` describes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from spectr_jax.io.heads.save import eagle3_spec, one_pass_spec
from spectr_jax.io.untrusted import Kind, real, whole
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.head import HeadConfig
from spectr_jax.models.one_pass_config import MARKOV_KINDS, Markov, OnePassConfig

# The fields of an experiment that only one kind of head has.
EAGLE3_FIELDS = dict.fromkeys(('num_unrolled', 'vocab_size'), whole(1)) | {'mlp_dim': whole()}
ONE_PASS_FIELDS = {
  **dict.fromkeys(('num_layers', 'block_size', 'vocab_size'), whole(1)),
  **dict.fromkeys(('mlp_dim', 'markov_rank'), whole()),
  **dict.fromkeys(('ce_weight', 'lk_weight', 'confidence_weight'), real(0)),
  'markov_kind': Kind(f'one of {", ".join(MARKOV_KINDS)}', lambda x: x in MARKOV_KINDS),
  'mask_id': whole(-1),
}


def check_fields(config, kinds: Mapping[str, Kind]) -> None:
  """Checks fields of an experiment; a `ValueError` names the first one that is missing or wrong."""
  for name, kind in kinds.items():
    if name not in config:
      raise ValueError(f'config.{name} is missing')
    if not kind.is_valid(config[name]):
      raise ValueError(f'config.{name} must be {kind.words}, got {config[name]}')


def block_config(config, target: CausalLMConfig, *, num_layers: int) -> CausalLMConfig:
  """The blocks of an experiment's head: those of the target, of another vocabulary and perhaps another MLP."""
  if config.vocab_size > target.vocab_size:
    raise ValueError(f'config.vocab_size must be at most {target.vocab_size}, got {config.vocab_size}')
  if target.rope is None:
    raise ValueError('a head has rotary positions like its target; this one has learned ones')
  if target.recurrence is not None or target.parts:
    raise ValueError('no head is trained for a target with recurrent layers, or with layers that are a part of a block')
  if target.full_head_dim is not None:
    raise ValueError('a head has layers like its target; those of this one (Gemma 4) differ from each other')
  if target.has_wide_qk_norm or target.has_sinks:
    raise ValueError('no head is known that has sinks, or norms of queries and keys over all heads, as this target has')
  mlp_dim = config.mlp_dim or target.mlp_dim
  return dataclasses.replace(
    target, num_layers=num_layers, vocab_size=config.vocab_size, mlp_dim=mlp_dim, dtype=config.dtype, cache_dtype=None,
    weights=None, kv_copies=1, windows=(), is_tied=False, experts=None,
  )  # fmt: skip


def feature_layers(num_layers: int) -> tuple[int, int, int]:
  """The layers of a target whose inputs EAGLE-3 reads: an early one, one in the middle and a late one."""
  if num_layers < 6:
    raise ValueError(f'a head reads three layers of a target with at least 6; this one has {num_layers}')
  return 2, num_layers // 2, num_layers - 3


def head_config(config, target: CausalLMConfig) -> HeadConfig:
  """The sizes of an experiment's head; a `ValueError` if there is no such head for this target, or no format of it."""
  width, read = target.embed_dim, feature_layers(target.num_layers)
  block = block_config(config, target, num_layers=1)
  own = HeadConfig(block, width, width, read, has_unembedding=config.has_unembedding)
  eagle3_spec(own, target.vocab_size)  # refuses a head that could not be written
  return own


def one_pass_config(config, target: CausalLMConfig, mask_id: int) -> OnePassConfig:
  """The sizes of an experiment's network, whose slots behind the last token are filled with `mask_id`.

  Raises:
    ValueError: There is no such network for this target, or it could not be written.
  """
  if mask_id >= target.vocab_size:
    raise ValueError(f'config.mask_id must be below {target.vocab_size}, got {mask_id}')
  if config.num_layers > target.num_layers:
    raise ValueError(f'config.num_layers must be at most {target.num_layers}, got {config.num_layers}')
  is_sequential = config.kind == 'dspark'
  markov = Markov(config.markov_rank, target.vocab_size, config.markov_kind) if config.markov_rank else None
  if markov is not None and markov.rank > target.embed_dim:
    raise ValueError(f'config.markov_rank must be at most {target.embed_dim}, got {markov.rank}')
  block = block_config(config, target, num_layers=config.num_layers)
  own = OnePassConfig(
    dataclasses.replace(block, has_qk_norm=True),
    target.embed_dim,
    feature_layers(target.num_layers),
    num_slots=config.block_size if is_sequential else config.block_size + 1,
    mask_id=mask_id,
    guesses_at_root=is_sequential,
    sees_from_root=True,
    markov=markov,
    confidence=('hidden' if markov is None else 'markov') if config.confidence_weight else None,
    has_unembedding=config.has_unembedding,
    is_reduced=True,
  )
  one_pass_spec(own, target.vocab_size)  # refuses one that could not be written
  return own
