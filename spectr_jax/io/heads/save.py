"""`save_drafter`: heads in the formats of EAGLE-3 and Medusa-1, networks of one pass in that of speculators."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors.numpy import save

from spectr_jax.draft import Drafter
from spectr_jax.draft.head_drafter import HeadDrafter
from spectr_jax.draft.medusa_drafter import MedusaDrafter
from spectr_jax.draft.one_pass_drafter import OnePassDrafter
from spectr_jax.io.heads.eagle_formats import eagle3_modules
from spectr_jax.io.heads.formats import READERS, checked_spec
from spectr_jax.io.heads.layout import Described, Layout, TargetSizes, is_transposed, names_and_shapes
from spectr_jax.io.heads.one_pass_formats import one_pass_modules
from spectr_jax.io.new_files import new_folder
from spectr_jax.kernels.int8 import check_savable
from spectr_jax.models.causal_lm_config import CausalLMConfig, Rope
from spectr_jax.models.head import HeadConfig
from spectr_jax.models.one_pass_config import OnePassConfig


def _base_of(rope: Rope) -> float:
  if len(rope.frequencies) == 1:
    return 10000.0
  return float(f'{rope.frequencies[1] ** -len(rope.frequencies):.9g}')


def _block_spec(block: CausalLMConfig) -> dict[str, Any]:
  assert block.rope is not None  # checked by the heads' configurations
  return {
    'num_hidden_layers': block.num_layers,
    'hidden_size': block.embed_dim,
    'intermediate_size': block.mlp_dim,
    'num_attention_heads': block.num_heads,
    'num_key_value_heads': block.num_kv_heads,
    'head_dim': block.head_dim,
    'hidden_act': block.activation.replace('gelu_tanh', 'gelu_pytorch_tanh'),
    'attention_bias': block.has_qkv_bias,
    'mlp_bias': block.has_mlp_bias,
    'rms_norm_eps': block.norm_epsilon,
    'rope_theta': _base_of(block.rope),
    'partial_rotary_factor': 2 * len(block.rope.frequencies) / block.head_dim,
    'max_position_embeddings': block.context_length,
  }


def _check_spec(name: str, spec: dict[str, Any], config: HeadConfig | OnePassConfig, sizes: TargetSizes) -> None:
  """Refuses a `config.json` that reads otherwise than the head is, but for the platform's type of caches."""
  head = _layout(config)
  stored = names_and_shapes(head).items()
  shapes = {name: leaf.shape[::-1] if is_transposed(path) else leaf.shape for path, (name, leaf) in stored}
  tensors: Any = types.SimpleNamespace(names=shapes.keys, shape=shapes.__getitem__)  # readers ask for nothing else
  read = READERS[name](Described(checked_spec(spec, f'the format of {name}'), tensors, sizes, None))
  for one, other in ((head.config, read.config), (head.blocks, read.blocks)):
    for field in dataclasses.fields(one):
      value = getattr(one, field.name)
      if field.name not in ('block', 'backbone', 'cache_dtype') and value != getattr(other, field.name):
        raise ValueError(f'the format of {name} cannot say that {field.name} is {value!r}')


def eagle3_spec(config: HeadConfig, vocab_size: int) -> dict[str, Any]:
  """The `config.json` of a head in EAGLE-3's format; `ValueError` if the format cannot say what the head does."""
  if config.join != 'wide':
    raise ValueError(f"a head whose join is {config.join!r} is not of EAGLE-3's kind")
  block = config.block
  spec = {
    'architectures': ['LlamaForCausalLMEagle3'],
    'model_type': 'llama',
    **_block_spec(block),
    'vocab_size': vocab_size,
    'draft_vocab_size': block.vocab_size,
    'target_hidden_size': config.target_dim,
    'eagle_aux_hidden_state_layer_ids': list(config.feature_layers),
    'norm_before_residual': config.is_residual_normed,
    'norm_before_fc': config.features_norm == 'joint',
    'fc_norm': config.features_norm == 'each',
    'norm_output': config.is_output_normed,
    'tie_word_embeddings': False,
    'dtype': block.dtype,
  }
  sizes = TargetSizes(vocab_size, config.target_dim, config.embedding_dim, 3 + max(map(abs, config.feature_layers)))
  _check_spec('EAGLE-3', spec, config, sizes)
  return spec


def one_pass_spec(config: OnePassConfig, vocab_size: int) -> dict[str, Any]:
  """The `config.json` of DSpark or DFlash in the speculators format; `ValueError` as of `eagle3_spec`."""
  if config.selector is not None or config.convolution is not None:
    raise ValueError('DFlash 2 is read, but not written')
  backbone = config.backbone
  windows = [backbone.window(layer) for layer in range(backbone.num_layers)]
  widths = [each for each in windows if each is not None]
  if not widths:  # which part of a window slots see is then nothing
    config = dataclasses.replace(config, sees_from_root=True)
  kind, name = ('dflash', 'DFlash') if config.markov is None and config.confidence is None else ('dspark', 'DSpark')
  spec = {
    'architectures': [f'{name}DraftModel'],
    'speculators_model_type': kind,
    'transformer_layer_config': {
      'model_type': 'qwen3',
      **_block_spec(backbone),
      'vocab_size': vocab_size,
      'layer_types': [f'{"full" if each is None else "sliding"}_attention' for each in windows],
      **({'sliding_window': max(widths)} if widths else {}),
      'tie_word_embeddings': False,
      'dtype': backbone.dtype,
    },
    'draft_vocab_size': backbone.vocab_size,
    'target_hidden_size': config.target_dim,
    'block_size': config.num_slots,
    'mask_token_id': config.mask_id,
    'aux_hidden_state_layer_ids': list(config.feature_layers),
    'sample_from_anchor': config.guesses_at_root,
    'sliding_window_non_causal': not config.has_causal_windows,
    'dtype': backbone.dtype,
  }
  if kind == 'dspark':
    spec |= {
      'markov_rank': 0 if config.markov is None else config.markov.rank,
      'markov_head_type': 'vanilla' if config.markov is None else config.markov.kind,
      'enable_confidence_head': config.confidence is not None,
      'confidence_head_with_markov': config.confidence != 'hidden',
    }
  sizes = TargetSizes(vocab_size, config.target_dim, backbone.embed_dim, 3 + max(map(abs, config.feature_layers)))
  _check_spec('speculators', spec, config, sizes)
  return spec


def _layout(config: HeadConfig | OnePassConfig) -> Layout:
  if isinstance(config, OnePassConfig):
    return Layout(config, one_pass_modules(config.backbone.num_layers))
  return Layout(config, eagle3_modules(config, 'midlayer.'))


# A head's `config.json` and its tensors by name, parameters in the type that is stored.
_Content: TypeAlias = tuple[dict[str, Any], dict[str, np.ndarray]]


def _content(drafter: HeadDrafter | OnePassDrafter, dtype: np.dtype) -> _Content:
  config = drafter.config
  size, arrays = drafter.vocab_size, {}
  spec = one_pass_spec(config, size) if isinstance(config, OnePassConfig) else eagle3_spec(config, size)
  params = {
    jax.tree_util.keystr(keys, simple=True, separator='/'): np.asarray(leaf)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(drafter.params)
  }
  for path, (name, _) in names_and_shapes(_layout(config)).items():
    array = params[path]
    if path == 'target_ids':
      arrays[name] = array.astype(np.int64) - np.arange(len(array))
      arrays['t2d'] = np.isin(np.arange(drafter.vocab_size), array)
    else:
      arrays[name] = (array.T if is_transposed(path) else array).astype(dtype)
  return spec, arrays


def _medusa_content(drafter: MedusaDrafter, dtype: np.dtype) -> _Content:
  config = drafter.config
  spec = {
    'architectures': ['MedusaModel'],
    'model_type': 'medusa',
    'medusa_num_heads': config.num_heads,
    'medusa_num_layers': 1,
    'hidden_size': config.embed_dim,
    'vocab_size': config.vocab_size,
    'dtype': config.dtype,
  }
  params, arrays = jax.tree.map(lambda x: np.asarray(x).astype(dtype), drafter.params), {}
  for i in range(config.num_heads):
    arrays[f'{i}.0.linear.weight'] = params['residual']['kernel'][i].T
    arrays[f'{i}.0.linear.bias'] = params['residual']['bias'][i]
    if config.has_unembedding:
      arrays[f'{i}.1.weight'] = params['unembedding'][i].T
  return spec, arrays


def save_drafter(
  path: epath.PathLike,
  drafter: Drafter,
  *,
  info: Mapping[str, Any] | None = None,
  param_dtype: str = 'bfloat16',
  overwrite: bool = False,
) -> None:
  """Writes a head in the format of EAGLE-3, speculators or Medusa-1, which `load_drafter` reads, wholly or not at all.

  Rows of the target are not written, so that a small head stays small.

  Args:
    path: The directory to create, local.
    drafter: A drafter of `head_drafter` whose head is of EAGLE-3's kind, of `one_pass_drafter` without a selector, or
      of `medusa_drafter`.
    info: JSON values to store in `config.json` as `info`.
    param_dtype: The dtype to store parameters in, `float32` or `bfloat16`.
    overwrite: Whether to replace an existing head. Other files beside it stay.

  Raises:
    ValueError: The directory exists and `overwrite` is False, the drafter is no head, or the format cannot say what the
      head does.
  """
  if param_dtype not in ('float32', 'bfloat16'):
    raise ValueError(f'param_dtype must be float32 or bfloat16, got {param_dtype!r}')
  if not isinstance(drafter, (HeadDrafter, OnePassDrafter, MedusaDrafter)):
    raise ValueError('not a drafter made by head_drafter, one_pass_drafter or medusa_drafter')
  check_savable(drafter.params)
  files, dtype = ('model.safetensors', 'medusa_lm_head.safetensors'), jnp.dtype(param_dtype)
  name = files[isinstance(drafter, MedusaDrafter)]
  spec, arrays = _medusa_content(drafter, dtype) if isinstance(drafter, MedusaDrafter) else _content(drafter, dtype)
  with new_folder(path, overwrite=overwrite, owned=('config.json', *files)) as folder:
    # `save_file` would let no one else read the file.
    (folder / name).write_bytes(save({key: np.ascontiguousarray(array) for key, array in arrays.items()}))
    (folder / 'config.json').write_text(json.dumps(spec | {'info': dict(info or {})}, indent=2) + '\n')
