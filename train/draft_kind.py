"""The part of a draft's training on a target's text that depends on the kind of the draft."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Protocol

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
from train.head_step import HeadBatch, Step


class DraftKind(Protocol):
  """A draft that can be trained on a target's text.

  Its trained parameters are a nested dict.

  Attributes:
    rules: Rules of the experiment's fields that only this kind has.
    folder: The name of the folder below WORKDIR that it is written to.
    num_ids: Vd, the tokens that it guesses, or None for all.
    feature_layers: The target's layers whose hidden states it learns from, numbered as in `Model.features_fn`; the last
      one is -1, the input of the output head.
  """

  rules: ClassVar[tuple[Rule, ...]]
  folder: ClassVar[str]

  @property
  def num_ids(self) -> int | None: ...

  @property
  def feature_layers(self) -> tuple[int, ...]: ...

  @classmethod
  def of(cls, config, target: CausalLMConfig, files: ModelFiles) -> DraftKind:
    """The draft of an experiment.

    Args:
      config: The experiment, as `configs/head.py` describes.
      target: The target's sizes.
      files: The target's files.

    Raises:
      ValueError: There is no such draft for this target.
    """
    ...

  def init_params(self, key: jax.Array, target: Model, unembedding: jax.Array) -> dict[str, Any]:
    """The parameters at the beginning, in float32.

    Args:
      key: A typed key.
      target: The target.
      unembedding: `[D, Vd]`, the target's rows.
    """
    ...

  def load_params(self, path: epath.PathLike, target: Model) -> tuple[dict[str, Any], np.ndarray | None]:
    """The parameters of a saved draft in float32, as those of `init_params`, and the tokens that it guesses.

    Args:
      path: The saved draft.
      target: The target.

    Raises:
      ValueError: There is no such draft, or it is of another kind or has other sizes.
    """
    ...

  def frozen_params(self, target: Model) -> dict[str, Any]:
    """What it reads of the target beside the rows of the output head.

    Args:
      target: The target.
    """
    ...

  def steps(self, params: Mapping[str, Any], frozen: Mapping[str, Any], batch: HeadBatch) -> list[Step]:
    """The draft's guesses that are 1, 2, ... tokens ahead of what it reads of the target.

    Args:
      params: Its parameters.
      frozen: `frozen_params`, and `unembedding` `[D, Vd]`, the target's rows.
      batch: Conversations of S tokens.

    Returns:
      For each step s the inputs of an output head, `[B, S - 2, D]`, and that output head, `[D, Vd]`. Entry i guesses
      token i + 2 from the tokens up to i + 1 and, if it reads them, the target's hidden states up to token i - s; the
      first s entries are not valid.
    """
    ...

  def drafter(
    self, params: Mapping[str, Any], frozen: Mapping[str, Any], target_ids: np.ndarray | None, vocab_size: int
  ) -> Drafter:
    """The draft as a drafter.

    Args:
      params: Its parameters.
      frozen: As for `steps`.
      target_ids: The Vd tokens that it guesses, or None for all.
      vocab_size: V, the target's.
    """
    ...

  def check_folder(self, path: epath.Path) -> bool:
    """Whether a folder holds a draft that `save` has written.

    Args:
      path: The folder; it need not exist.

    Raises:
      ValueError: `save` could not write there, or would replace what it has not written.
    """
    ...

  def save(self, path: epath.PathLike, drafter: Drafter, tokenizer: TokenizerBase, info: Mapping[str, Any]) -> None:
    """Writes the draft in the published format of its kind, in place of one that is there.

    Args:
      path: The folder.
      drafter: The draft.
      tokenizer: The target's tokenizer.
      info: JSON values to store with it.
    """
    ...


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


class Head:
  """What is the same for all kinds of heads."""

  folder: ClassVar[str] = 'head'

  def check_folder(self, path: epath.Path) -> bool:
    """As for `DraftKind`."""
    return check_written(path, ('config.json', 'model.safetensors', 'medusa_lm_head.safetensors'))

  def save(self, path: epath.PathLike, drafter: Drafter, tokenizer: TokenizerBase, info: Mapping[str, Any]) -> None:
    """As for `DraftKind`."""
    del tokenizer  # heads are read with their target
    save_drafter(path, drafter, info=info, overwrite=True)


def cast(params: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Any]:
  """Parameters in the types of `shapes`."""
  return jax.tree.map(lambda x, shape: jnp.asarray(x, shape.dtype), dict(params), dict(shapes))


def load_head_params(
  path: epath.PathLike,
  target: Model,
  *,
  sizes: Mapping[str, Any],
  sizes_of: Callable[[Drafter], Mapping[str, Any]],
) -> tuple[dict[str, Any], np.ndarray | None]:
  """`DraftKind.load_params` of a head.

  Args:
    path: The saved head, as for `load_drafter`.
    target: The target.
    sizes: What it must have in common with the head to train, by name; `has_unembedding` is among them.
    sizes_of: These sizes of a saved head, or ValueError if it is of another kind.

  Raises:
    ValueError: There is no such head, or it is of another kind or has other sizes.
  """
  drafter = load_drafter(path, target, dtype='float32')
  found = sizes_of(drafter)
  for name, wanted in sizes.items():
    if found[name] != wanted:
      raise ValueError(f'{path}: {name} is {found[name]}, but {wanted} in this run')
  params = dict(drafter.params)
  ids = params.pop('target_ids', None)
  if not sizes['has_unembedding']:
    del params['unembedding']  # the target's rows
  return params, None if ids is None else np.asarray(ids)
