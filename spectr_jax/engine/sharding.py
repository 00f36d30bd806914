"""Decoding sharded over the devices of a mesh: which array of the loop lives where."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spectr_jax.draft import Drafter
from spectr_jax.model import Model
from spectr_jax.sharding import DATA, MODEL, only_over, put, replicated, shardings


@dataclasses.dataclass(frozen=True)
class DecodeSharding:
  """How decoding is sharded over a mesh `data` x `model`.

  Over `data`: rows, with their caches. Over `model`: the target's weights by `Model.sharding_rules`, its cache by heads
  and its distributions by tokens; and the draft's, if it is sharded too. If not, the devices along `model` all draft
  for the rows that they share: a small draft waits longer for what is sent than for what is computed.

  Attributes:
    mesh: From `spectr_jax.sharding.make_mesh`.
    is_draft_divided: Whether the draft is sharded over `model`.
  """

  mesh: Mesh
  is_draft_divided: bool = False

  def round_up(self, num_rows: int) -> int:
    """The smallest multiple of the mesh's `data` axis that is at least `num_rows`."""
    num_data = self.mesh.shape[DATA]
    return -(-num_rows // num_data) * num_data

  def check_rows(self, batch_size: int) -> None:
    """Raises ValueError where rows cannot be sharded."""
    if batch_size % self.mesh.shape[DATA]:
      raise ValueError(f'{batch_size} rows cannot be divided over {DATA}:{self.mesh.shape[DATA]}')

  def of_model(self, model: Model, *, is_divided: bool = True) -> Model:
    """A model's shardings in place of its arrays.

    Args:
      model: The model; its arrays may be shapes.
      is_divided: False to keep it whole on every device, as models without rules are.

    Raises:
      ValueError: Its rules do not fit.
    """
    if model.sharding_rules is None or not is_divided:
      return jax.tree.map(lambda _: replicated(self.mesh), model)
    places = shardings(self.mesh, model.params, only_over(MODEL, model.sharding_rules))
    return dataclasses.replace(model, params=places)

  def of_drafter(self, drafter: Drafter | None) -> Drafter | None:
    """A drafter's shardings in place of its arrays."""
    if drafter is None or drafter.param_shardings_fn is None:
      return jax.tree.map(lambda _: replicated(self.mesh), drafter)
    return dataclasses.replace(drafter, params=drafter.param_shardings_fn(self, drafter.params))

  def of_decoder(self, decoder: Any) -> Any:
    """A decoder's shardings in place of its arrays."""
    return dataclasses.replace(decoder, target=self.of_model(decoder.target), drafter=self.of_drafter(decoder.drafter))

  def of_rows(self, tree: Any) -> Any:
    """Shardings of arrays with rows in front; scalars are replicated."""
    return jax.tree.map(lambda x: NamedSharding(self.mesh, PartitionSpec(DATA) if x.ndim else PartitionSpec()), tree)

  def of_cache(self, cache: Any, model: Model, *, role: str = 'target', is_divided: bool = True) -> Any:
    """Shardings of a model's cache, by `Model.cache_specs_fn` if the model is sharded.

    Args:
      cache: The cache, or shapes.
      model: Its model.
      role: What messages call the model.
      is_divided: False for a model that every device holds whole.

    Raises:
      ValueError: The heads cannot be sharded.
    """
    if model.sharding_rules is None or not is_divided:
      return self.of_rows(cache)
    num_model = self.mesh.shape[MODEL]

    def place(array, spec):
      for size, axis in zip(array.shape, spec):
        if axis == MODEL and size % num_model:
          raise ValueError(f"the {role}'s {size} heads cannot be divided over {MODEL}:{num_model}")
      return NamedSharding(self.mesh, spec)

    return jax.tree.map(place, cache, model.cache_specs_fn(cache))

  def of_draft_state(self, state: Any, drafter: Drafter | None) -> Any:
    """Shardings of a drafter's state."""
    if drafter is None or drafter.state_shardings_fn is None:
      return self.of_rows(state)
    return drafter.state_shardings_fn(self, drafter.params, state)

  def put_models(self, target: Model, drafter: Drafter | None) -> tuple[Model, Drafter | None]:
    """Target and drafter on their devices; nothing is moved that is there, and shapes stay shapes."""
    models = target, drafter
    places = self.of_model(target), self.of_drafter(drafter)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(models)):
      return models
    return put(models, places)

  def put_rows(self, tree: Any) -> Any:
    """Arrays with rows in front on their devices."""
    return put(tree, self.of_rows(tree))
