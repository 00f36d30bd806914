"""The part of a draft's training on a target's text that depends on the kind of the draft."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spectr_jax import Drafter, Model, load_drafter, save_drafter
from spectr_jax.io.model_files import ModelFiles
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.io.untrusted import Kind
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.head import random_params
from train.head_step import Guesses, HeadBatch


class DraftKind(abc.ABC):
  """A draft that can be trained on a target's text.

  Its trained parameters `params` are a nested dict. What it reads of the target, `frozen`, is that of `frozen_params`
  with `unembedding` `[D, Vd]`, rows of the target's output head.
  """

  fields: ClassVar[Mapping[str, Kind]]  # values of the experiment's fields that only this kind has
  folder: ClassVar[str]  # below WORKDIR, where it is written to
  num_ids: int | None = None  # Vd, the tokens that it guesses; None for all
  num_depths: int  # how many tokens ahead of what it reads of the target it learns to guess
  # The target's layers whose hidden states it learns from, numbered as in `Model.features_fn`. The last one is -1,
  # the input of the output head, from which the target's distributions follow.
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
    """The parameters of a saved draft as those of `init_params`, and the tokens that it guesses; a `ValueError` if
    there is no such draft, or it is of another kind or has other sizes.
    """

  def frozen_params(self, target: Model) -> dict[str, Any]:
    """The parts of the target that it reads beside the rows of the output head."""
    del target
    return {}

  @abc.abstractmethod
  def guesses(self, params: Mapping[str, Any], frozen: Mapping[str, Any], batch: HeadBatch) -> list[Guesses]:
    """Its guesses that are 1, 2, ... tokens ahead of what it reads of the target. Entry i is of token i + 2: from the
    tokens up to i + 1 and, if it reads them, the target's hidden states up to token i - s, where s is the depth of the
    guess.
    """

  @abc.abstractmethod
  def drafter(
    self, params: Mapping[str, Any], frozen: Mapping[str, Any], target_ids: np.ndarray | None, vocab_size: int
  ) -> Drafter:
    """The draft as a drafter for a target of V tokens, of which it guesses the Vd `target_ids`, or all if None."""

  @abc.abstractmethod
  def save(self, path: epath.PathLike, drafter: Drafter, tokenizer: TokenizerBase, info: Mapping[str, Any]) -> None:
    """Writes the draft and the JSON values `info` in the published format of its kind, in place of one that is
    there.
    """


def _sizes_of(config: Any) -> dict[str, Any]:
  """The fields of a head's configuration and of the blocks in it, but their types."""
  sizes = {}
  for name, value in vars(config).items():
    sizes |= vars(value) if isinstance(value, CausalLMConfig) else {name: value}
  return {name: value for name, value in sizes.items() if name not in ('dtype', 'cache_dtype')}


class Head(DraftKind):
  """Common part of all kinds of heads."""

  folder = 'head'
  config: Any  # the sizes, `has_unembedding` among them
  config_of: ClassVar[Callable[[Drafter], Any]]  # a `ValueError` if the drafter is of another kind

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
  """Common part of heads that read the target's embedding and hidden states of several layers."""

  param_shapes: ClassVar[Callable[[Any], dict[str, Any]]]  # from the sizes
  make_drafter: ClassVar[Callable[..., Drafter]]  # from parameters, sizes and V

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
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


def begin_features(kernel: jax.Array, width: int) -> jax.Array:
  """A random kernel of hidden states `[F * D, width]` that begins as the last of them, with little of the others."""
  return (0.1 * kernel).at[-width:].set(jnp.eye(width))
