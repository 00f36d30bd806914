"""The part of a head's training that depends on the kind of the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spectr_jax.draft import Drafter
from spectr_jax.io.heads.load import load_drafter
from spectr_jax.model import Model
from spectr_jax.models.causal_lm import CausalLMConfig
from train.config_rules import Rule
from train.head_step import HeadBatch, Step


class HeadKind(Protocol):
  """A head that can be trained.

  Its parameters are a nested dict; `unembedding` is among them if the head has an output head of its own.

  Attributes:
    rules: Rules of the experiment's fields that only this kind has.
    num_ids: Vd, the tokens that it guesses, or None for all.
    feature_layers: The target's layers whose hidden states it learns from, numbered as in `Model.features_fn`; the last
      one is -1, the input of the output head.
    sizes: What a saved head must have in common with this one, by name.
  """

  rules: ClassVar[tuple[Rule, ...]]

  @property
  def num_ids(self) -> int | None: ...

  @property
  def feature_layers(self) -> tuple[int, ...]: ...

  @property
  def sizes(self) -> dict[str, Any]: ...

  @classmethod
  def of(cls, config, target: CausalLMConfig) -> HeadKind:
    """The head of an experiment.

    Args:
      config: The experiment, as `configs/head.py` describes.
      target: The target's sizes.

    Raises:
      ValueError: There is no such head for this target.
    """
    ...

  @staticmethod
  def sizes_of(drafter: Drafter) -> dict[str, Any]:
    """`sizes` of a saved head.

    Args:
      drafter: The head.

    Raises:
      ValueError: It is of another kind.
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

  def frozen_params(self, target: Model) -> dict[str, jax.Array]:
    """What it reads of the target beside the output head.

    Args:
      target: The target.
    """
    ...

  def steps(self, params: Mapping[str, Any], frozen: Mapping[str, Any], batch: HeadBatch) -> list[Step]:
    """The head's guesses that are 1, 2, ... tokens ahead of the target.

    Args:
      params: Its parameters.
      frozen: `frozen_params`, and `unembedding` `[D, Vd]`, the target's rows.
      batch: Conversations of S tokens.

    Returns:
      For each step s the inputs of an output head, `[B, S - 2, D]`, and that output head, `[D, Vd]`. Entry i guesses
      token i + 2 from the target's hidden states up to token i - s; the first s entries are not valid.
    """
    ...

  def drafter(self, params: Mapping[str, Any], target_ids: np.ndarray | None, vocab_size: int) -> Drafter:
    """The head as a drafter.

    Args:
      params: Its parameters; `unembedding` are the target's rows if it has none of its own.
      target_ids: The Vd tokens that it guesses, or None for all.
      vocab_size: V, the target's.
    """
    ...


def cast(params: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Any]:
  """Parameters in the types of `shapes`."""
  return jax.tree.map(lambda x, shape: jnp.asarray(x, shape.dtype), dict(params), dict(shapes))


def load_params(
  path: epath.PathLike, head: HeadKind, target: Model, *, has_unembedding: bool
) -> tuple[dict[str, Any], np.ndarray | None]:
  """The parameters of a saved head in float32, as those of `init_params`, and the tokens that it guesses.

  Args:
    path: The saved head, as for `load_drafter`.
    head: The head to train.
    target: The target.
    has_unembedding: Whether the head to train has an output head of its own.

  Raises:
    ValueError: There is no such head, or it is of another kind or has other sizes.
  """
  try:
    drafter = load_drafter(path, target, dtype='float32')
    found = head.sizes_of(drafter)
  except ValueError as error:
    raise ValueError(f'config.init_from: {path}: {error}') from error
  for name, wanted in head.sizes.items():
    if found[name] != wanted:
      raise ValueError(f'config.init_from: {path}: {name} is {found[name]}, but {wanted} in this run')
  params = dict(drafter.params)
  ids = params.pop('target_ids', None)
  if not has_unembedding:
    del params['unembedding']  # the target's rows
  return params, None if ids is None else np.asarray(ids)
