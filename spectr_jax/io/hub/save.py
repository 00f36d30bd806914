"""Writing of models, as the hub serves them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors.numpy import save

from spectr_jax.io.checksums import file_hash
from spectr_jax.io.hub.families import FAMILIES, OWN, Family, read_spec
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.io.hub.sources import source_of
from spectr_jax.io.new_files import new_folder
from spectr_jax.io.tokenizer import Tokenizer, TokenizerBase
from spectr_jax.kernels.int8 import check_savable
from spectr_jax.model import Model
from spectr_jax.models import layers
from spectr_jax.models.causal_lm import config_of
from spectr_jax.models.causal_lm_config import CausalLMConfig, is_lm1b
from spectr_jax.models.param_shapes import param_shapes

OWN_FILES = ('model.safetensors', 'tokenizer.json')  # whose checksums a model that is trained here has
_FILES = ('config.json', 'generation_config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json')


def _tensors(params: Mapping[str, Any], family: Family, config: CausalLMConfig, dtype: np.dtype):
  tensors: dict[str, np.ndarray] = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
    path = jax.tree_util.keystr(keys, simple=True, separator='/')
    kind = np.float32 if keys[-1].key == 'choice_bias' else dtype  # small differences of large numbers
    source, values = source_of(path, leaf.shape, family, config, {family.prefix}), np.asarray(leaf).astype(kind)
    for name, one in zip(source.names, [values] if source.num_experts is None else values, strict=True):
      tensor = tensors.setdefault(name, np.empty(source.shape, kind))  # queries, keys and values may share one
      at = 0
      for outputs in source.ranges(slice(0, one.shape[-1])):
        part = one[..., at : at + outputs.stop - outputs.start]
        stored = part.T if source.is_transposed else part
        tensor[outputs if source.is_transposed else (..., outputs)] = stored[:, None] if source.has_axis else stored
        at += part.shape[-1]
  return tensors


def spec_of(config: CausalLMConfig) -> dict[str, Any]:
  """The `config.json` of a model that is trained here; `ValueError` for one of another kind."""
  if not is_lm1b(config):
    raise ValueError('a model of a public family is saved with its config.json, by save_hub_model')
  return {
    'architectures': [OWN],
    'model_type': FAMILIES[OWN].model_type,
    'vocab_size': config.vocab_size,
    'hidden_size': config.embed_dim,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'intermediate_size': config.mlp_dim,
    'max_position_embeddings': config.context_length,
    'dtype': config.dtype,
  }


def save_model(
  path: epath.PathLike,
  model: Model,
  tokenizer: Tokenizer,
  *,
  info: Mapping[str, Any] | None = None,
  param_dtype: str = 'bfloat16',
  overwrite: bool = False,
) -> None:
  """Writes a model that was trained here and its tokenizer, both or neither, as a folder that `load_model` reads.

  Args:
    path: The folder to create.
    model: A `causal_lm` of `lm1b_config`.
    tokenizer: The tokenizer it was trained with.
    info: JSON values to store in `config.json` as `info`, such as hashes of the training text.
    param_dtype: The dtype to store parameters in, `float32` or `bfloat16`; they are computed in that of the model.
    overwrite: Whether to replace an existing model. Other files beside it stay.

  Raises:
    ValueError: As of `save_hub_model`; or the vocabularies of model and tokenizer differ.
  """
  if tokenizer.vocab_size != model.vocab_size:
    raise ValueError(f'the tokenizer has {tokenizer.vocab_size} tokens, the model {model.vocab_size}')
  spec = spec_of(config_of(model))
  save_hub_model(path, model, tokenizer, spec, info=info, param_dtype=param_dtype, overwrite=overwrite)


def save_hub_model(
  path: epath.PathLike,
  model: Model,
  tokenizer: TokenizerBase,
  spec: Mapping[str, Any],
  *,
  info: Mapping[str, Any] | None = None,
  param_dtype: str = 'bfloat16',
  overwrite: bool = False,
) -> None:
  """Writes a model and its tokenizer as the hub serves them, which `load_model` reads.

  Args:
    path: The folder to create.
    model: A model made by `causal_lm`.
    tokenizer: Its tokenizer, a `HubTokenizer`, or a `Tokenizer` of a model that was trained here.
    spec: The content of its `config.json`, but for the type of its parameters.
    info: JSON values to store in `config.json` as `info`.
    param_dtype: The dtype to store parameters in, `float32` or `bfloat16`.
    overwrite: Whether to replace an existing folder.

  Raises:
    ValueError: The folder exists and `overwrite` is False, `spec` describes another model, `param_dtype` is unknown, or
      the model is in int8 or in a form for one platform or mesh.
  """
  if param_dtype not in ('float32', 'bfloat16'):
    raise ValueError(f'param_dtype must be float32 or bfloat16, got {param_dtype!r}')
  config = config_of(model)
  check_savable(model.params)
  family, described = read_spec(spec)
  is_own = isinstance(tokenizer, Tokenizer)
  if not family.is_saved or (described.experts and described.experts.are_beside_mlp):
    raise ValueError(f'a model of the family {family.model_type} is not saved')
  types = {'dtype': config.dtype, 'cache_dtype': config.cache_dtype}
  if dataclasses.replace(described, **types) != config:
    raise ValueError('config.json would describe another model than the one to save')
  layers.check_params(model.params, param_shapes(config))
  spec = {
    name: value
    for name, value in spec.items()
    if name not in ('torch_dtype', 'transformers_version', 'quantization_config')
  }
  spec |= {
    'dtype': config.dtype if is_own else param_dtype,
    'bos_token_id': tokenizer.bos_id,
    'eos_token_id': list(tokenizer.eos_ids),
  }
  with new_folder(path, overwrite=overwrite, owned=_FILES) as folder:
    tensors = _tensors(model.params, family, config, jnp.dtype(param_dtype))
    # `save_file` would let no one else read the file.
    (folder / 'model.safetensors').write_bytes(save(tensors, metadata={'format': 'pt'}))
    if isinstance(tokenizer, Tokenizer):
      tokenizer.save(folder / 'tokenizer.json')
    elif isinstance(tokenizer, HubTokenizer):
      tokenizer.save(folder)
    if is_own:
      spec['sha256'] = {name: file_hash(folder / name) for name in OWN_FILES}
    (folder / 'config.json').write_text(json.dumps(spec | {'info': dict(info or {})}, indent=2) + '\n')
