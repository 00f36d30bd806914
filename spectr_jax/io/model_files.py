"""Model directories: `model.json`, `tokenizer.json` and the parameters as an Orbax checkpoint in `params/`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from spectr_jax.io import untrusted
from spectr_jax.io.checksums import file_hash, files_below
from spectr_jax.io.hub import config_fields
from spectr_jax.io.new_files import new_folder
from spectr_jax.io.stored_params import StoredParams
from spectr_jax.io.tokenizer import Tokenizer
from spectr_jax.kernels.int8 import BLOCKS, check_savable, check_weights, quantized
from spectr_jax.model import Model
from spectr_jax.models import transformer

_FORMAT = 3
# Files and parameters, in bytes: numbers are stored once, and compressed by a factor near 1 unless they are few.
_MOST_STORED, _MOST_COMPRESSED, _SMALL = 2, 16, 2**26


def _files_of(folder: epath.Path) -> list[str]:
  """The relative paths of a model's files but `model.json`: its tokenizer and its parameters."""
  names = ['tokenizer.json'] if (folder / 'tokenizer.json').exists() else []
  if (folder / 'params').exists():
    names += [f'params/{name}' for name in files_below(folder / 'params')]
  return names


def _checkpointer() -> ocp.StandardCheckpointer:
  """A checkpointer that waits for no other process: one writes a model, and any may read one by itself."""
  process = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(
    primary_host=process, active_processes={process}, barrier_sync_key_prefix=f'process_{process}'
  )
  return ocp.StandardCheckpointer(multiprocessing_options=alone)


def _path(keys: jax.tree_util.KeyPath, separator: str = '/') -> str:
  return jax.tree_util.keystr(keys, simple=True, separator=separator)


def _from_older_format(params: Any, config: transformer.TransformerConfig, number: int) -> Any:
  """Converts the kernels of format 1 or 2, which store them as `[out, in]`.

  In format 1, moreover, the rows of `qkv` are ordered by query, key and value first; now they are ordered by head
  first.
  """

  def by_head(keys, kernel):
    if not _path(keys).endswith('qkv/kernel'):
      return kernel
    parts = kernel.reshape(3, config.num_heads, config.head_dim, config.embed_dim)
    return parts.swapaxes(0, 1).reshape(kernel.shape)

  if number == 1:
    params = jax.tree_util.tree_map_with_path(by_head, params)
  return jax.tree_util.tree_map_with_path(lambda keys, x: x.T if _path(keys).endswith('kernel') else x, params)


def files_of_model(folder: epath.Path) -> set[str]:
  """The relative paths of the files in a folder that belong to its model; none if no model can be read."""
  try:
    return {'model.json', *_read_spec(folder)[0]['sha256']}
  except ValueError:
    return set()


def save_model(
  path: epath.PathLike,
  model: Model,
  tokenizer: Tokenizer,
  *,
  info: dict[str, Any] | None = None,
  param_dtype: str = 'bfloat16',
  overwrite: bool = False,
) -> None:
  """Writes a transformer and its tokenizer, both or neither.

  Args:
    path: The directory to create.
    model: A model made by `transformer_model`.
    tokenizer: The tokenizer it was trained with.
    info: JSON values to store with it, such as hashes of the training text.
    param_dtype: The dtype to store parameters in.
    overwrite: Whether to replace an existing model. Other files beside it stay.

  Raises:
    ValueError: The directory exists and `overwrite` is False, a file in it would be replaced that is not a model's, the
      vocabularies of model and tokenizer differ, the type is no floating point one, or the model was loaded with
      weights in int8.
  """
  if tokenizer.vocab_size != model.vocab_size:
    raise ValueError(f'the tokenizer has {tokenizer.vocab_size} tokens, the model {model.vocab_size}')
  if not _DTYPES.is_valid(param_dtype):
    raise ValueError(f'param_dtype must be {_DTYPES.words}, got {param_dtype!r}')
  config = transformer.config_of(model)
  check_savable(model.params)
  with new_folder(path, overwrite=overwrite, owned=files_of_model) as folder:
    with _checkpointer() as checkpointer:
      # One process can save NumPy arrays by itself; JAX arrays would have to be saved by all processes together.
      params = jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(param_dtype)), model.params)
      checkpointer.save((folder / 'params').resolve(), params)
    tokenizer.save(folder / 'tokenizer.json')
    spec = {
      'format': _FORMAT,
      'architecture': 'transformer',
      'config': dataclasses.asdict(config),
      'num_params': config.num_params,
      'param_dtype': param_dtype,
      'tokenizer': tokenizer.fingerprint,
      'info': info or {},
      'sha256': {name: file_hash(folder / name) for name in _files_of(folder)},
    }
    (folder / 'model.json').write_text(json.dumps(spec, indent=2) + '\n')


def _is_hash(item: tuple[str, Any]) -> bool:
  """Whether a path is a plain one below the folder, and its value a SHA-256."""
  path, value = item
  return (
    bool(re.fullmatch(r'[\w.-]+(/[\w.-]+)*', path, re.ASCII))
    and not {'.', '..'} & set(path.split('/'))
    and type(value) is str
    and bool(re.fullmatch('[0-9a-f]{64}', value))
  )


_DTYPES = untrusted.one_of('float32', 'bfloat16', 'float16', 'float64')
_FIELDS = {
  'format': untrusted.whole(),
  'config': untrusted.object_of({}),
  'param_dtype': _DTYPES,
  'tokenizer': untrusted.TEXT,
  'sha256': untrusted.Kind('SHA-256 by relative path', lambda x: type(x) is dict and all(map(_is_hash, x.items()))),
}
# Of the configuration.
_SIZES = {
  'vocab_size': config_fields.VOCAB,
  'embed_dim': config_fields.WIDTH,
  'num_layers': config_fields.LAYERS,
  'num_heads': config_fields.HEADS,
  'mlp_dim': config_fields.WIDTH,
  'max_length': config_fields.LENGTH,
  'dtype': _DTYPES,
}


def _read_spec(path: epath.Path) -> tuple[dict[str, Any], transformer.TransformerConfig]:
  """The content of `model.json`, and the configuration in it."""
  if not (path / 'model.json').exists():
    raise ValueError(f'no model at {path}: expected a directory with model.json, tokenizer.json and params/')
  where = path / 'model.json'
  content = untrusted.read_object(where, _FIELDS, required=_FIELDS)
  if content['format'] not in range(1, _FORMAT + 1):
    raise ValueError(f'{path} has format {content["format"]}; this version reads formats 1 to {_FORMAT}')
  sizes = untrusted.check_object(content['config'], _SIZES, f'{where}: config', _SIZES.keys() - {'dtype'})
  if wrong := sorted(sizes.keys() - _SIZES.keys()):
    raise ValueError(
      f'{where} is damaged: the fields of its config must be {", ".join(_SIZES)}, and not {untrusted.shown(wrong[0])}'
    )
  with untrusted.named(where):
    config = transformer.TransformerConfig(**{name: value for name, value in sizes.items() if value is not None})
  return content, config


def read_config(path: epath.PathLike) -> transformer.TransformerConfig:
  """Reads the configuration of a model that `save_model` wrote, without its parameters.

  Raises `ValueError` if there is none.
  """
  return _read_spec(epath.Path(path))[1]


def _check_files(path: epath.Path, hashes: Mapping[str, str], num_bytes: int) -> None:
  """Compares the files of a model with their hashes, and with the bytes that its parameters take."""
  most_bytes = _MOST_STORED * num_bytes + _SMALL
  stored_bytes, names = 0, _files_of(path)
  for name in names:
    if name not in hashes:
      raise ValueError(f'{path / name} is surplus: model.json does not name it')
    limit = untrusted.LARGE if name == 'tokenizer.json' else most_bytes - stored_bytes
    size = (path / name).stat().length
    if size > limit:
      raise ValueError(f'{path / name} is larger than {limit:,} bytes, the most that it may have')
    if file_hash(path / name) != hashes[name]:
      raise ValueError(f'{path / name} is damaged (its SHA-256 differs from model.json)')
    stored_bytes += size
  missing = sorted(hashes.keys() - set(names))
  if missing:
    raise ValueError(f'{path}/{untrusted.name_shown(missing[0])} is missing')
  if num_bytes > _MOST_COMPRESSED * stored_bytes + _SMALL:
    raise ValueError(f'{path}: parameters of {num_bytes:,} bytes cannot be in files of {stored_bytes:,}')


def _read_params(folder: epath.Path, config: transformer.TransformerConfig, number: int, dtype: np.dtype) -> Any:
  stored = StoredParams(folder)
  # Before anything is made for each layer.
  num_layers = len({name.split('.')[0] for name in stored.names if name.startswith('layer_')})
  if num_layers != config.num_layers:
    raise ValueError(f'{folder} has parameters of {num_layers} layers, expected {config.num_layers}')
  like = transformer.param_shapes(config)
  if number < _FORMAT:
    like = jax.tree_util.tree_map_with_path(
      lambda keys, x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype) if _path(keys).endswith('kernel') else x, like
    )
  shapes = {_path(keys, '.'): x.shape for keys, x in jax.tree_util.tree_leaves_with_path(like)}
  arrays = stored.read(shapes, dtype)
  params = jax.tree_util.tree_map_with_path(lambda keys, _: arrays[_path(keys, '.')], like)
  return _from_older_format(params, config, number) if number < _FORMAT else params


def load_transformer(
  path: epath.PathLike, *, dtype: str | None = None, weights: str | None = None
) -> tuple[Model, Tokenizer]:
  """Reads a transformer that `save_model` wrote.

  Args:
    path: The directory; may be remote (`gs://...`).
    dtype: The dtype to compute in, `float32` or `bfloat16`; None for the one in its configuration.
    weights: `int8` to quantize kernels and embedding once they are read; None for floating point numbers.

  Raises:
    ValueError: The directory is missing, not a model, a file in it is missing or damaged, or the type of weights is
      unknown.
  """
  check_weights(weights)
  if weights == BLOCKS:
    raise ValueError(f'{path} is not a .gguf file, whose blocks weights={BLOCKS!r} are')
  path = untrusted.as_path(path)
  spec, config = _read_spec(path)
  config, stored_dtype = dataclasses.replace(config, dtype=dtype or config.dtype), jnp.dtype(spec['param_dtype'])
  _check_files(path, spec['sha256'], config.num_params * stored_dtype.itemsize)
  tokenizer = Tokenizer.load(path / 'tokenizer.json')
  if tokenizer.fingerprint != spec['tokenizer'] or tokenizer.vocab_size != config.vocab_size:
    named = untrusted.shown(spec['tokenizer'])
    raise ValueError(f'{path / "tokenizer.json"} is not the tokenizer model.json names ({named})')
  params = _read_params(path / 'params', config, spec['format'], stored_dtype)
  if weights is not None:
    params = quantized(params)
  return transformer.transformer_model(params, config), tokenizer
