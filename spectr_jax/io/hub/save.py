"""Writing of models as the hub serves them."""

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

from spectr_jax.io.hub.families import Family, read_spec, source_of
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.io.new_files import new_folder
from spectr_jax.kernels.int8 import check_savable
from spectr_jax.model import Model
from spectr_jax.models import layers
from spectr_jax.models.causal_lm import config_of
from spectr_jax.models.causal_lm_config import CausalLMConfig, param_shapes

FILES = ('config.json', 'generation_config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json')


def _tensors(params: Mapping[str, Any], family: Family, config: CausalLMConfig, dtype: np.dtype):
  tensors: dict[str, np.ndarray] = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
    path = jax.tree_util.keystr(keys, simple=True, separator='/')
    source, values = source_of(path, leaf.shape, family, config, {family.prefix}), np.asarray(leaf).astype(dtype)
    tensor = tensors.setdefault(source.name, np.empty(source.shape, dtype))  # queries, keys and values may share one
    at = 0
    for outputs in source.ranges(slice(0, values.shape[-1])):
      part = values[..., at : at + outputs.stop - outputs.start]
      tensor[outputs if source.is_transposed else (..., outputs)] = part.T if source.is_transposed else part
      at += part.shape[-1]
  return tensors


def save_hub_model(
  path: epath.PathLike,
  model: Model,
  tokenizer: HubTokenizer,
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
    tokenizer: Its tokenizer.
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
  types = {'dtype': config.dtype, 'cache_dtype': config.cache_dtype}
  if dataclasses.replace(described, **types) != config:
    raise ValueError('config.json would describe another model than the one to save')
  layers.check_params(model.params, param_shapes(config))
  spec = {name: value for name, value in spec.items() if name not in ('torch_dtype', 'transformers_version')}
  spec |= {'dtype': param_dtype, 'bos_token_id': tokenizer.bos_id, 'eos_token_id': list(tokenizer.eos_ids)}
  with new_folder(path, overwrite=overwrite, owned=lambda folder: FILES) as folder:
    tensors = _tensors(model.params, family, config, jnp.dtype(param_dtype))
    # `save_file` would let no one else read the file.
    (folder / 'model.safetensors').write_bytes(save(tensors, metadata={'format': 'pt'}))
    tokenizer.save(folder)
    (folder / 'config.json').write_text(json.dumps(spec | {'info': dict(info or {})}, indent=2) + '\n')
