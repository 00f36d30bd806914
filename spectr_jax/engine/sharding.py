"""Decoding sharded over the devices of a mesh: the placement of every array of the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spectr_jax.draft import Drafter
from spectr_jax.kernels.dispatch import tracing_for
from spectr_jax.model import Model
from spectr_jax.sharding import DATA, MODEL, only_over, put, replicated, shardings

# By the compiler's count, with transfers between TPUs taken to last 3 microseconds each: alone eight rows of a draft of
# 6M take 1.3 ms of a round, divided 2.8; four rows of a draft of 212M take 5.5 and 6.9 ms. A step of eight rows without
# a draft takes .52 ms apart and .64 together.
_MOST_ROWS_APART = 8
_MOST_ROWS_ALONE = 4
_MOST_ROWS_ALONE_OF_SMALL = 8
_SMALL = 2**26  # parameters of a small draft


def tracing_with(sharding: DecodeSharding | None) -> AbstractContextManager[None]:
  """A context in which programs are traced for the devices that decode alone, see `tracing_for`."""
  return tracing_for(None if sharding is None else sharding.mesh)


@dataclasses.dataclass(frozen=True)
class DecodeSharding:
  """The sharding of decoding over a mesh `data` x `model`.

  Rows and their caches are sharded over `data`. The target is sharded over `model`: its weights by
  `Model.sharding_rules`, its cache by heads, its distributions by tokens. So is the draft if `is_draft_divided`.
  Otherwise each device along `model` has the whole draft, since a small draft would wait longer for communication than
  its computation takes.

  Attributes:
    mesh: A mesh of `spectr_jax.sharding.make_mesh`.
    is_draft_divided: Whether the draft is sharded over `model`.
  """

  mesh: Mesh
  is_draft_divided: bool = False

  def round_up(self, num_rows: int) -> int:
    """The smallest multiple of the mesh's `data` axis that is at least `num_rows`."""
    num_data = self.mesh.shape[DATA]
    return -(-num_rows // num_data) * num_data

  def check_rows(self, batch_size: int) -> None:
    """Checks that rows can be sharded over `data`; ValueError if their number is no multiple of the axis."""
    if batch_size % self.mesh.shape[DATA]:
      raise ValueError(f'{batch_size} rows cannot be sharded over {DATA}:{self.mesh.shape[DATA]}')

  def of_model(self, model: Model, *, is_divided: bool = True) -> Model:
    """A model's shardings in place of its arrays, or shapes; whole on every device without rules or if not
    `is_divided`.

    Raises:
      ValueError: Its rules do not fit.
    """
    if model.sharding_rules is None or not is_divided:
      return jax.tree.map(lambda _: replicated(self.mesh), model)
    places = shardings(self.mesh, model.params, only_over(MODEL, model.sharding_rules))
    return dataclasses.replace(model, params=places)

  def of_drafter(self, drafter: Drafter | None) -> Drafter | None:
    """A drafter's shardings in place of its arrays."""
    return None if drafter is None else drafter.shardings(self)

  def of_decoder(self, decoder: Any) -> Any:
    """A decoder's shardings in place of its arrays."""
    places = jax.tree.map(lambda _: replicated(self.mesh), decoder)
    return dataclasses.replace(places, target=self.of_model(decoder.target), drafter=self.of_drafter(decoder.drafter))

  def of_rows(self, tree: Any) -> Any:
    """The shardings of arrays with rows in front; scalars are replicated."""
    return jax.tree.map(lambda x: NamedSharding(self.mesh, PartitionSpec(DATA) if x.ndim else PartitionSpec()), tree)

  def over_rows(
    self, function: Callable[..., Any], rows: Any, outputs: Callable[[Any, Any], Any]
  ) -> Callable[..., Any]:
    """`function(whole, rows)` for the rows of each device along `data` apart, inside of a program.

    So nothing moves along `data`, and operations see how many rows they really have. Along `model` arrays keep their
    shardings, and the compiler divides the work.

    Rows may need different numbers of trips of a loop, so no loop that depends on rows may make all devices wait. A sum
    along `model` waits for the devices of these rows only. Parts that move between devices wait for all on CPUs.

    `outputs` says what the function returns, given what stands for `rows` and for any tree of arrays with rows in
    front.
    """
    specs = jax.tree.map(lambda place: place.spec, self.of_rows(rows))
    return jax.shard_map(
      function,
      mesh=self.mesh,
      in_specs=(PartitionSpec(), specs),
      out_specs=outputs(specs, PartitionSpec(DATA)),
      axis_names={DATA},
      check_vma=False,
    )

  def runs_rows_apart(self, drafter: Drafter | None, num_rows: int) -> bool:
    """Tells whether rounds run on each device's rows apart, of `num_rows` on all devices.

    A step without a draft does so with few rows only: with more the compiler chooses better layouts for rows of all
    devices together.
    """
    return drafter is not None or num_rows <= _MOST_ROWS_APART * self.mesh.shape[DATA]

  def drafts_alone(self, drafter: Drafter, num_rows: int) -> bool:
    """Tells whether each device along `model` drafts by itself, and sends nothing, with `num_rows` per device.

    It does with few rows if the drafter's parameters are there and it needs none of the target. With more rows the
    distributions over the vocabulary, which would be computed on every device, cost more than what is sent.
    """
    places = jax.tree.leaves(self.of_drafter(drafter))
    is_whole = not drafter.reads_target and all(place.is_fully_replicated for place in places)
    is_small = sum(x.size for x in jax.tree.leaves(drafter)) <= _SMALL
    return is_whole and num_rows <= (_MOST_ROWS_ALONE_OF_SMALL if is_small else _MOST_ROWS_ALONE)

  def on_each_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of whole arrays, by each device along `model` for itself; within a function of `over_rows`.

    Otherwise the compiler divides the work where the results are divided later, and sends more than it saves.
    """
    return jax.shard_map(
      function, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names={MODEL}, check_vma=False
    )  # fmt: skip

  def of_cache(self, cache: Any, model: Model, *, role: str = 'target', is_divided: bool = True) -> Any:
    """The shardings of a model's cache, by `Model.cache_specs_fn` if the model has rules and is divided.

    Raises:
      ValueError: The heads cannot be sharded; the message calls the model by its role.
    """
    if model.sharding_rules is None or not is_divided:
      return self.of_rows(cache)
    num_model = self.mesh.shape[MODEL]

    def place(array, spec):
      for size, axis in zip(array.shape, spec):
        if axis == MODEL and size % num_model:
          raise ValueError(f"the {role}'s {size} heads cannot be sharded over {MODEL}:{num_model}")
      return NamedSharding(self.mesh, spec)

    return jax.tree.map(place, cache, model.cache_specs_fn(cache))

  def of_draft_state(self, state: Any, drafter: Drafter | None) -> Any:
    """The shardings of a drafter's state; `state` may be shapes."""
    return self.of_rows(state) if drafter is None else drafter.state_shardings(self, state)

  def put_models(self, target: Model, drafter: Drafter | None) -> tuple[Model, Drafter | None]:
    """Puts target and drafter on their devices. Arrays that are there already are not moved, and shapes stay shapes."""
    models = target, drafter
    places = self.of_model(target), self.of_drafter(drafter)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(models)):
      return models
    return put(models, places)

  def put_rows(self, tree: Any) -> Any:
    """Puts arrays with rows in front on their devices."""
    return put(tree, self.of_rows(tree))
