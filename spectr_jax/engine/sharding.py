"""Decoding divided over the devices of a mesh: which array of the loop lives where."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spectr_jax.draft import Drafter, ModelDrafter
from spectr_jax.model import Model
from spectr_jax.sharding import DATA, MODEL, only_over, path_of, put, replicated, shardings

# Entries of a `KVCache`: rows, then heads.
_CACHED = re.compile(r'(^|/)(pending_)?(keys|values)/\d+$')


@dataclasses.dataclass(frozen=True)
class DecodeSharding:
  """How decoding is divided over a mesh `data` x `model`.

  Over `data`: rows, with their caches. Over `model`: the target's weights by `Model.sharding_rules`, its cache by heads
  and its laws by tokens; and the draft's, if it is divided too. If not, the devices along `model` all draft for the
  rows that they share: a small draft waits longer for what is sent than for what is computed.

  Attributes:
    mesh: From `spectr_jax.sharding.make_mesh`.
    is_draft_divided: Whether the draft is divided over `model`.
  """

  mesh: Mesh
  is_draft_divided: bool = False

  def round_up(self, num_rows: int) -> int:
    """The least number of rows from `num_rows` on that can be divided."""
    num_data = self.mesh.shape[DATA]
    return -(-num_rows // num_data) * num_data

  def check(self, batch_size: int, target: Model, drafter: Drafter | None) -> None:
    """Raises ValueError where rows or heads cannot be divided."""
    num_data, num_model = self.mesh.shape[DATA], self.mesh.shape[MODEL]
    if batch_size % num_data:
      raise ValueError(f'{batch_size} rows cannot be divided over {DATA}:{num_data}')
    for role, model in (('target', target), ('draft', self._divided_model_of(drafter))):
      if model is None or model.sharding_rules is None:
        continue
      cache = jax.eval_shape(lambda model=model: model.init_cache_fn(num_data, 1))
      for keys, array in jax.tree_util.tree_flatten_with_path(cache)[0]:
        if _CACHED.search(path_of(keys)) and array.shape[1] % num_model:
          raise ValueError(f"the {role}'s {array.shape[1]} heads cannot be divided over {MODEL}:{num_model}")

  def _divided_model_of(self, drafter: Drafter | None) -> Model | None:
    return drafter.model if self.is_draft_divided and isinstance(drafter, ModelDrafter) else None

  def of_model(self, model: Model, *, is_divided: bool = True) -> Model:
    """A model's shardings in place of its arrays; whole on every device without rules.

    Raises:
      ValueError: Its rules do not fit.
    """
    if model.sharding_rules is None or not is_divided:
      return jax.tree.map(lambda _: replicated(self.mesh), model)
    places = shardings(self.mesh, model.params, only_over(MODEL, model.sharding_rules))
    return dataclasses.replace(model, params=places)

  def of_drafter(self, drafter: Drafter | None) -> Any:
    """A drafter's shardings in place of its arrays."""
    if isinstance(drafter, ModelDrafter):
      return dataclasses.replace(drafter, model=self.of_model(drafter.model, is_divided=self.is_draft_divided))
    return jax.tree.map(lambda _: replicated(self.mesh), drafter)

  def of_rows(self, tree: Any) -> Any:
    """Shardings of arrays with rows in front; scalars are replicated."""
    return jax.tree.map(lambda x: NamedSharding(self.mesh, PartitionSpec(DATA) if x.ndim else PartitionSpec()), tree)

  def of_cache(self, tree: Any, model: Model | None) -> Any:
    """Shardings of what holds a model's cache: rows over `data`, and heads over `model` if the model is divided."""
    places = self.of_rows(tree)
    if model is None or model.sharding_rules is None:
      return places
    by_heads = NamedSharding(self.mesh, PartitionSpec(DATA, MODEL))
    return jax.tree_util.tree_map_with_path(
      lambda keys, place: by_heads if _CACHED.search(path_of(keys)) else place, places
    )

  def of_draft_state(self, state: Any, drafter: Drafter | None) -> Any:
    """Shardings of a drafter's state."""
    return self.of_cache(state, self._divided_model_of(drafter))

  def put_models(self, target: Model, drafter: Drafter | None) -> tuple[Model, Drafter | None]:
    """Target and drafter on their devices; nothing is moved that is there."""
    return put((target, drafter), (self.of_model(target), self.of_drafter(drafter)))

  def put_rows(self, tree: Any) -> Any:
    """Arrays with rows in front on their devices."""
    return put(tree, self.of_rows(tree))
