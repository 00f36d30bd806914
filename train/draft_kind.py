"""The part of a draft's training on a target's text that depends on the kind of the draft."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spectr_jax.draft import Drafter
from spectr_jax.io.heads.load import load_drafter
from spectr_jax.io.heads.save import save_drafter
from spectr_jax.io.load import ModelFiles
from spectr_jax.io.new_files import check_new_folder
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.io.untrusted import LARGE, Kind, object_of, read_object
from spectr_jax.model import Model
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.head import random_params
from train.head_step import Guesses, HeadBatch


class DraftKind(abc.ABC):
  """A draft that can be trained on a target's text.

  Its trained parameters `params` are a nested dict. What it reads of the target, `frozen`, is that of `frozen_params`
  with `unembedding` `[D, Vd]`, rows of the target's output head.

  Attributes:
    fields: Values of the experiment's fields that only this kind has.
    folder: The folder below WORKDIR that it is written to.
    files: The names of the files in it.
    num_ids: Vd, the tokens that it guesses; None for all.
    num_depths: How many tokens ahead of what it reads of the target it learns to guess.
    feature_layers: The target's layers whose hidden states it learns from, numbered as in `Model.features_fn`. The last
      one is -1, the input of the output head, from which the target's distributions follow.
  """

  fields: ClassVar[Mapping[str, Kind]]
  folder: ClassVar[str]
  files: ClassVar[Collection[str]]
  num_ids: int | None = None
  num_depths: int
  feature_layers: tuple[int, ...] = (-1,)

  @classmethod
  @abc.abstractmethod
  def of(cls, config, target: CausalLMConfig, files: ModelFiles) -> DraftKind:
    """The draft of an experiment for a target; a `ValueError` if there is no such draft."""

  @abc.abstractmethod
  def init_params(self, key: jax.Array, target: Model, unembedding: jax.Array) -> dict[str, Any]:
    """The parameters at the beginning, in float32, from a typed key and the target's rows `[D, Vd]`."""

  @abc.abstractmethod
  def load_params(self, path: epath.PathLike, target: Model) -> tuple[dict[str, Any], np.ndarray | None]:
    """The parameters of a saved draft in float32, as those of `init_params`, and the tokens that it guesses.

    Raises:
      ValueError: There is no such draft, or it is of another kind or has other sizes.
    """

  def frozen_params(self, target: Model) -> dict[str, Any]:
    """The parts of the target that it reads beside the rows of the output head: none by itself."""
    del target
    return {}

  @abc.abstractmethod
  def guesses(self, params: Mapping[str, Any], frozen: Mapping[str, Any], batch: HeadBatch) -> list[Guesses]:
    """Its guesses that are 1, 2, ... tokens ahead of what it reads of the target, for conversations of S tokens.

    Returns:
      Guesses of token i + 2 in entry i: from the tokens up to i + 1 and, if it reads them, the target's hidden states
      up to token i - s, where s is the depth of the guess.
    """

  @abc.abstractmethod
  def drafter(
    self, params: Mapping[str, Any], frozen: Mapping[str, Any], target_ids: np.ndarray | None, vocab_size: int
  ) -> Drafter:
    """The draft as a drafter for a target of V tokens, of which it guesses the Vd `target_ids`, or all if None."""

  def check_folder(self, path: epath.Path) -> bool:
    """True if a folder, which need not exist, holds a draft that `save` has written.

    Raises:
      ValueError: `save` could not write there, or would replace what it has not written.
    """
    config, is_ours = path / 'config.json', False
    if config.exists():
      is_ours = 'steps' in (read_object(config, {'info': object_of({})}, LARGE).get('info') or {})
    check_new_folder(path, self.files, owned=lambda folder: self.files if is_ours else ())
    return is_ours

  @abc.abstractmethod
  def save(self, path: epath.PathLike, drafter: Drafter, tokenizer: TokenizerBase, info: Mapping[str, Any]) -> None:
    """Writes the draft in the published format of its kind, in place of one that is there.

    Args:
      path: The folder.
      drafter: The draft.
      tokenizer: The target's tokenizer.
      info: JSON values to store with it.
    """


def _sizes_of(config: Any) -> dict[str, Any]:
  """The fields of a head's configuration and of the blocks in it, but their types."""
  sizes = {}
  for name, value in vars(config).items():
    sizes |= vars(value) if isinstance(value, CausalLMConfig) else {name: value}
  return {name: value for name, value in sizes.items() if name not in ('dtype', 'cache_dtype')}


class Head(DraftKind):
  """Common part of all kinds of heads.

  Attributes:
    config: The sizes. `has_unembedding` is among them.
    config_of: From a drafter to its sizes; a `ValueError` if it is of another kind.
  """

  folder = 'head'
  files = 'config.json', 'model.safetensors', 'medusa_lm_head.safetensors'
  config: Any
  config_of: ClassVar[Callable[[Drafter], Any]]

  def load_params(self, path: epath.PathLike, target: Model) -> tuple[dict[str, Any], np.ndarray | None]:
    drafter = load_drafter(path, target, dtype='float32')
    saved = _sizes_of(self.config_of(drafter))
    for name, wanted in _sizes_of(self.config).items():
      if saved[name] != wanted:
        raise ValueError(f'{path}: {name} is {saved[name]}, but {wanted} in this run')
    params = dict(drafter.params)
    ids = params.pop('target_ids', None)
    if not self.config.has_unembedding:
      del params['unembedding']  # the target's rows
    return params, None if ids is None else np.asarray(ids)

  def save(self, path: epath.PathLike, drafter: Drafter, tokenizer: TokenizerBase, info: Mapping[str, Any]) -> None:
    del tokenizer  # heads are read with their target
    save_drafter(path, drafter, info=info, overwrite=True)


class FeatureHead(Head):
  """Common part of heads that read the target's embedding and hidden states of several layers.

  Attributes:
    param_shapes: From the sizes to shapes of all parameters.
    make_drafter: From parameters, sizes and V to a drafter.
  """

  param_shapes: ClassVar[Callable[[Any], dict[str, Any]]]
  make_drafter: ClassVar[Callable[..., Drafter]]

  @property
  def feature_layers(self) -> tuple[int, ...]:
    return (*self.config.feature_layers, -1)

  def frozen_params(self, target: Model) -> dict[str, Any]:
    """The embedded tokens, `[V, D]`, as the drafter reads them."""
    assert target.embed_fn is not None  # the target has rotary positions
    return {'embedding': target.embed_fn(target.params, jnp.arange(target.vocab_size))}

  def random_params(self, key: jax.Array, unembedding: jax.Array) -> dict[str, Any]:
    """Random parameters in float32; an output head of its own begins as the target's rows."""
    shapes = self.param_shapes(self.config)
    params = random_params(key, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), shapes))
    del params['target_ids'], params['unembedding']
    return params | ({'unembedding': as_float32(unembedding)} if self.config.has_unembedding else {})

  def drafter(
    self, params: Mapping[str, Any], frozen: Mapping[str, Any], target_ids: np.ndarray | None, vocab_size: int
  ) -> Drafter:
    params = {'unembedding': frozen['unembedding'], **params, 'target_ids': target_ids}
    return self.make_drafter(cast(params, self.param_shapes(self.config)), self.config, vocab_size)


def cast(params: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Any]:
  """Parameters in the types of `shapes`."""
  return jax.tree.map(lambda x, shape: jnp.asarray(x, shape.dtype), dict(params), dict(shapes))


def as_float32(params: Any) -> Any:
  """A tree of arrays in float32."""
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


def block_config(config, target: CausalLMConfig, *, num_layers: int) -> CausalLMConfig:
  """The blocks of an experiment's head: those of the target, of another vocabulary and perhaps another MLP.

  Raises:
    ValueError: The target has fewer tokens, or learned positions.
  """
  if config.vocab_size > target.vocab_size:
    raise ValueError(f'config.vocab_size must be at most {target.vocab_size}, got {config.vocab_size}')
  if target.rope is None:
    raise ValueError('a head has rotary positions like its target; this one has learned ones')
  mlp_dim = config.mlp_dim or target.mlp_dim
  return dataclasses.replace(
    target, num_layers=num_layers, vocab_size=config.vocab_size, mlp_dim=mlp_dim, dtype=config.dtype, cache_dtype=None,
    weights=None, kv_copies=1, windows=(), is_tied=False,
  )  # fmt: skip


def feature_layers(num_layers: int) -> tuple[int, int, int]:
  """The layers of a target whose inputs EAGLE-3 reads: an early one, one in the middle and a late one.

  Raises:
    ValueError: There are fewer than 6 layers.
  """
  if num_layers < 6:
    raise ValueError(f'a head reads three layers of a target with at least 6; this one has {num_layers}')
  return 2, num_layers // 2, num_layers - 3


def begin_features(kernel: jax.Array, width: int) -> jax.Array:
  """A random kernel of hidden states `[F * D, width]` that begins as the last of them, with little of the others."""
  return (0.1 * kernel).at[-width:].set(jnp.eye(width))
