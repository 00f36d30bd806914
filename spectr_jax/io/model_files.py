"""Model directories: `model.json`, `tokenizer.json` and the parameters as an Orbax checkpoint in `params/`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from spectr_jax.io.new_files import new_folder
from spectr_jax.io.tokenizer import Tokenizer
from spectr_jax.model import Model
from spectr_jax.models import transformer
from spectr_jax.models.int8 import check_savable, check_weights, quantised

_FORMAT = 3


def _file_hashes(directory: epath.Path) -> dict[str, str]:
  """SHA-256 of every file below `directory`, by relative path."""
  hashes, waiting = {}, [directory]
  while waiting:
    for path in waiting.pop().iterdir():
      if path.is_dir():
        waiting.append(path)
      else:
        hashes[str(path.relative_to(directory))] = hashlib.sha256(path.read_bytes()).hexdigest()
  return dict(sorted(hashes.items()))


def _checkpointer() -> ocp.StandardCheckpointer:
  """A checkpointer that waits for no other process: one process writes a model, and any may read one by itself."""
  process = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(
    primary_host=process, active_processes={process}, barrier_sync_key_prefix=f'process_{process}'
  )
  return ocp.StandardCheckpointer(multiprocessing_options=alone)


def _path(keys: jax.tree_util.KeyPath) -> str:
  return jax.tree_util.keystr(keys, simple=True, separator='/')


def _transposed_kernels(params: Any) -> Any:
  return jax.tree_util.tree_map_with_path(lambda keys, x: x.T if _path(keys).endswith('kernel') else x, params)


def _from_older_format(params: Any, config: transformer.TransformerConfig, number: int) -> Any:
  """Converts the kernels of format 1 or 2 to the current layout.

  Format 2 stores them as `[out, in]`. In format 1, moreover, the rows of `qkv` are ordered by query, key and value
  first; now they are ordered by head first.
  """

  def by_head(keys, kernel):
    if not _path(keys).endswith('qkv/kernel'):
      return kernel
    parts = kernel.reshape(3, config.num_heads, config.head_dim, config.embed_dim)
    return parts.swapaxes(0, 1).reshape(kernel.shape)

  if number == 1:
    params = jax.tree_util.tree_map_with_path(by_head, params)
  return _transposed_kernels(params)


def files_of_model(folder: epath.Path) -> set[str]:
  """The relative paths of the files in a folder that belong to its model; none if it has none that can be read."""
  try:
    return {'model.json', *_read_spec(folder).hashes}
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
      vocabularies of model and tokenizer differ, or the model was loaded with weights in int8.
  """
  if tokenizer.vocab_size != model.vocab_size:
    raise ValueError(f'the tokenizer has {tokenizer.vocab_size} tokens, the model {model.vocab_size}')
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
      'sha256': _file_hashes(folder),
    }
    (folder / 'model.json').write_text(json.dumps(spec, indent=2) + '\n')


@dataclasses.dataclass(frozen=True)
class _Spec:
  """Content of `model.json`."""

  format: int
  config: transformer.TransformerConfig
  param_dtype: Any
  tokenizer: str
  hashes: dict[str, str]


def _read_spec(path: epath.Path) -> _Spec:
  if not (path / 'model.json').exists():
    raise ValueError(f'no model at {path}: expected a directory with model.json, tokenizer.json and params/')
  try:
    content = json.loads((path / 'model.json').read_text())
    config = transformer.TransformerConfig(**content['config'])
    param_dtype = jnp.dtype(content['param_dtype'])
    spec = _Spec(content['format'], config, param_dtype, content['tokenizer'], dict(content['sha256']))
  except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
    raise ValueError(f'{path / "model.json"} is damaged or not a model description: {error!r}') from error
  if spec.format not in range(1, _FORMAT + 1):
    raise ValueError(f'{path} has format {spec.format}; this version reads formats 1 to {_FORMAT}')
  return spec


def read_config(path: epath.PathLike) -> transformer.TransformerConfig:
  """Reads the configuration of a model that `save_model` wrote, without its parameters.

  Raises:
    ValueError: The directory is missing or not a model.
  """
  return _read_spec(epath.Path(path)).config


def load_transformer(
  path: epath.PathLike, *, dtype: str | None = None, weights: str | None = None
) -> tuple[Model, Tokenizer]:
  """Reads a transformer that `save_model` wrote.

  Args:
    path: The directory; may be remote (`gs://...`).
    dtype: The dtype to compute in, `float32` or `bfloat16`; None for the one in its configuration.
    weights: `int8` to quantise kernels and embedding once they are read; None for floating point numbers.

  Returns:
    The model and its tokenizer.

  Raises:
    ValueError: The directory is missing, not a model, a file in it is missing or damaged, or the type of weights is
      unknown.
  """
  check_weights(weights)
  path = epath.Path(path)
  spec = _read_spec(path)
  config = spec.config if dtype is None else dataclasses.replace(spec.config, dtype=dtype)
  found = _file_hashes(path)
  for name, wanted in spec.hashes.items():
    if found.get(name) != wanted:
      problem = 'is damaged (its SHA-256 differs from model.json)' if name in found else 'is missing'
      raise ValueError(f'{path / name} {problem}')
  tokenizer = Tokenizer.load(path / 'tokenizer.json')
  if tokenizer.fingerprint != spec.tokenizer or tokenizer.vocab_size != config.vocab_size:
    raise ValueError(f'{path / "tokenizer.json"} is not the tokenizer model.json names ({spec.tokenizer})')
  like = jax.tree.map(
    lambda x: np.empty(x.shape, spec.param_dtype),
    jax.eval_shape(functools.partial(transformer.init_params, config=config), jax.random.key(0)),
  )
  if spec.format < _FORMAT:
    like = _transposed_kernels(like)
  with contextlib.closing(_checkpointer()) as checkpointer:
    params = checkpointer.restore((path / 'params').resolve(), like)
  if spec.format < _FORMAT:
    params = _from_older_format(params, config, spec.format)
  if weights is not None:
    params = quantised(params)
  return transformer.transformer_model(params, config), tokenizer
