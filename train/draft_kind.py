"""The part of a draft's training on a target's text that depends on the kind of the draft."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spectr_jax.draft import Drafter
from spectr_jax.io.foreign import LARGE, object_of, read_object
from spectr_jax.io.heads.load import load_drafter
from spectr_jax.io.heads.save import save_drafter
from spectr_jax.io.load import ModelFiles
from spectr_jax.io.new_files import check_new_folder
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.model import Model
from spectr_jax.models.causal_lm_config import CausalLMConfig
from train.config_rules import Rule
from train.head_step import Guesses, HeadBatch


class DraftKind(abc.ABC):
  """A draft that can be trained on a target's text.

  Its trained parameters are a nested dict.

  Attributes:
    rules: Rules of the experiment's fields that only this kind has.
    folder: The name of the folder below WORKDIR that it is written to.
  """

  rules: ClassVar[tuple[Rule, ...]]
  folder: ClassVar[str]

  @property
  def num_ids(self) -> int | None:
    """Vd, the tokens that it guesses; None for all."""
    return None

  @property
  def feature_layers(self) -> tuple[int, ...]:
    """The target's layers whose hidden states it learns from, numbered as in `Model.features_fn`.

    The last one is -1, the input of the output head, from which the target's distributions follow.
    """
    return (-1,)

  @classmethod
  @abc.abstractmethod
  def of(cls, config, target: CausalLMConfig, files: ModelFiles) -> DraftKind:
    """The draft of an experiment.

    Args:
      config: The experiment, as `configs/head.py` describes.
      target: The target's sizes.
      files: The target's files.

    Raises:
      ValueError: There is no such draft for this target.
    """

  @abc.abstractmethod
  def init_params(self, key: jax.Array, target: Model, unembedding: jax.Array) -> dict[str, Any]:
    """The parameters at the beginning, in float32.

    Args:
      key: A typed key.
      target: The target.
      unembedding: `[D, Vd]`, the target's rows.
    """

  @abc.abstractmethod
  def load_params(self, path: epath.PathLike, target: Model) -> tuple[dict[str, Any], np.ndarray | None]:
    """The parameters of a saved draft in float32, as those of `init_params`, and the tokens that it guesses.

    Args:
      path: The saved draft.
      target: The target.

    Raises:
      ValueError: There is no such draft, or it is of another kind or has other sizes.
    """

  def frozen_params(self, target: Model) -> dict[str, Any]:
    """What it reads of the target beside the rows of the output head: nothing by itself."""
    del target
    return {}

  @property
  @abc.abstractmethod
  def num_depths(self) -> int:
    """How many tokens ahead of what it reads of the target it learns to guess."""

  @abc.abstractmethod
  def guesses(self, params: Mapping[str, Any], frozen: Mapping[str, Any], batch: HeadBatch) -> list[Guesses]:
    """The draft's guesses that are 1, 2, ... tokens ahead of what it reads of the target.

    Args:
      params: Its parameters.
      frozen: `frozen_params`, and `unembedding` `[D, Vd]`, the target's rows.
      batch: Conversations of S tokens.

    Returns:
      Guesses of token i + 2 in entry i: from the tokens up to i + 1 and, if it reads them, the target's hidden states
      up to token i - s, where s is the depth of the guess.
    """

  @abc.abstractmethod
  def drafter(
    self, params: Mapping[str, Any], frozen: Mapping[str, Any], target_ids: np.ndarray | None, vocab_size: int
  ) -> Drafter:
    """The draft as a drafter.

    Args:
      params: Its parameters.
      frozen: As for `guesses`.
      target_ids: The Vd tokens that it guesses, or None for all.
      vocab_size: V, the target's.
    """

  @abc.abstractmethod
  def check_folder(self, path: epath.Path) -> bool:
    """Whether a folder holds a draft that `save` has written.

    Args:
      path: The folder; it need not exist.

    Raises:
      ValueError: `save` could not write there, or would replace what it has not written.
    """

  @abc.abstractmethod
  def save(self, path: epath.PathLike, drafter: Drafter, tokenizer: TokenizerBase, info: Mapping[str, Any]) -> None:
    """Writes the draft in the published format of its kind, in place of one that is there.

    Args:
      path: The folder.
      drafter: The draft.
      tokenizer: The target's tokenizer.
      info: JSON values to store with it.
    """


def check_written(path: epath.Path, names: Collection[str]) -> bool:
  """`DraftKind.check_folder` of a draft that has a `config.json`, with the steps of its training.

  Args:
    path: The folder.
    names: The names of the files that are written.
  """
  config, is_ours = path / 'config.json', False
  if config.exists():
    is_ours = 'steps' in (read_object(config, {'info': object_of({})}, LARGE).get('info') or {})
  check_new_folder(path, names, owned=lambda folder: names if is_ours else ())
  return is_ours


class Head(DraftKind):
  """What is the same for all kinds of heads."""

  folder = 'head'
  config: Any

  @staticmethod
  @abc.abstractmethod
  def sizes_of(config: Any) -> dict[str, Any]:
    """What saved heads have in common with the head to train, by name; `has_unembedding` is among it."""

  @staticmethod
  @abc.abstractmethod
  def config_of(drafter: Drafter) -> Any:
    """The configuration of a saved head; ValueError if it is of another kind."""

  def load_params(self, path: epath.PathLike, target: Model) -> tuple[dict[str, Any], np.ndarray | None]:
    drafter = load_drafter(path, target, dtype='float32')
    found = self.sizes_of(self.config_of(drafter))
    for name, wanted in self.sizes_of(self.config).items():
      if found[name] != wanted:
        raise ValueError(f'{path}: {name} is {found[name]}, but {wanted} in this run')
    params = dict(drafter.params)
    ids = params.pop('target_ids', None)
    if not self.config.has_unembedding:
      del params['unembedding']  # the target's rows
    return params, None if ids is None else np.asarray(ids)

  def check_folder(self, path: epath.Path) -> bool:
    return check_written(path, ('config.json', 'model.safetensors', 'medusa_lm_head.safetensors'))

  def save(self, path: epath.PathLike, drafter: Drafter, tokenizer: TokenizerBase, info: Mapping[str, Any]) -> None:
    del tokenizer  # heads are read with their target
    save_drafter(path, drafter, info=info, overwrite=True)


class FeatureHead(Head):
  """What is the same for heads that read the target's embedding and hidden states of several layers."""

  @property
  def feature_layers(self) -> tuple[int, ...]:
    return (*self.config.feature_layers, -1)

  def frozen_params(self, target: Model) -> dict[str, Any]:
    """The embedded tokens, `[V, D]`, as the drafter reads them."""
    assert target.embed_fn is not None  # the target has rotary positions
    return {'embedding': target.embed_fn(target.params, jnp.arange(target.vocab_size))}


def cast(params: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Any]:
  """Parameters in the types of `shapes`."""
  return jax.tree.map(lambda x, shape: jnp.asarray(x, shape.dtype), dict(params), dict(shapes))


def block_config(config, target: CausalLMConfig, *, num_layers: int) -> CausalLMConfig:
  """The blocks of an experiment's head: those of the target, of another vocabulary and perhaps another MLP.

  Args:
    config: The experiment, as `configs/head.py` describes.
    target: The target's sizes.
    num_layers: The number of blocks.

  Raises:
    ValueError: The target has fewer tokens, or learned positions.
  """
  if config.vocab_size > target.vocab_size:
    raise ValueError(f'config.vocab_size must be at most {target.vocab_size}, got {config.vocab_size}')
  if target.rope is None:
    raise ValueError('a head has rotary positions like its target; this one has learned ones')
  return dataclasses.replace(
    target,
    num_layers=num_layers,
    vocab_size=config.vocab_size,
    mlp_dim=config.mlp_dim or target.mlp_dim,
    dtype=config.dtype,
    cache_dtype=None,
    weights=None,
    kv_copies=1,
    windows=(),
    is_tied=False,
  )


def begin_features(kernel: jax.Array, width: int) -> jax.Array:
  """A kernel of hidden states `[F * D, width]` that begins as the last of them, with little of the others.

  Args:
    kernel: Random, `[F * D, width]`.
    width: D.
  """
  return (0.1 * kernel).at[-width:].set(jnp.eye(width))
