"""Where arrays live: one function that builds a mesh, and rules from a parameter's path to its sharding."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA, MODEL = 'data', 'model'

Rules = Sequence[tuple[str, tuple[str | None, ...]]]

# What the path of a parameter ends with, and the mesh axis that each of its dimensions is divided over: tensor
# parallelism over `model` (attention by heads, the MLP by hidden units, the embedding by tokens), and over `data`
# what is left, so that parameters and what the optimizer keeps for them are stored once.
TRANSFORMER_RULES = (
  (r'embedding', (MODEL, DATA)),
  (r'unembedding', (DATA, MODEL)),
  (r'(qkv|mlp_in)/kernel', (DATA, MODEL)),
  (r'(attention_out|mlp_out)/kernel', (MODEL, DATA)),
  (r'gain', ()),
)


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
  """The mesh `data` x `model`; both axes always exist.

  Neighbours along `model` are neighbours in hardware where the backend knows its topology.

  Args:
    sizes: Devices along an axis, -1 in at most one for all that are left; 1 where none is given.
    devices: The devices, all by default; those of a topology that is compiled for will do.

  Raises:
    ValueError: There is no such axis, or the sizes do not fit the number of devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  wanted = ','.join(f'{name}:{size}' for name, size in sizes.items())
  if not set(sizes) <= {DATA, MODEL} or not all(size >= 1 or size == -1 for size in sizes.values()):
    raise ValueError(f'a mesh is like data:8,model:2, -1 being all devices that are left; got {wanted}')
  shape = [sizes.get(name, 1) for name in (DATA, MODEL)]
  if shape.count(-1) > 1:
    raise ValueError(f'only one axis of a mesh can take all devices that are left; got {wanted}')
  num_known = math.prod(size for size in shape if size > 0)
  shape = [len(devices) // num_known if size == -1 else size for size in shape]
  if math.prod(shape) != len(devices):
    needed = f'a multiple of {num_known}' if -1 in sizes.values() else f'{num_known}'
    raise ValueError(f'mesh {wanted} needs {needed} devices, and there are {len(devices)}')
  # Axis types are given: left to themselves, meshes of devices and of described topologies differ.
  return jax.make_mesh(shape, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices)


def path_of(keys: Sequence[Any]) -> str:
  """`layer_0/qkv/kernel`, from the keys of a tree's leaf."""
  return '/'.join(str(getattr(key, 'key', getattr(key, 'name', getattr(key, 'idx', key)))) for key in keys)


def replicated(mesh: Mesh) -> NamedSharding:
  """A whole copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def divide_rows(mesh: Mesh, array: jax.Array) -> jax.Array:
  """Inside of a program: `[B, ...]` with B divided over `data`, the rest as the compiler likes.

  Parameters that are divided over `data` as well make it look, otherwise, as if every device should see all rows.
  """
  axes = PartitionSpec(DATA, *(PartitionSpec.UNCONSTRAINED,) * (array.ndim - 1))
  return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, axes))


def shardings(mesh: Mesh, tree: Any, rules: Rules = TRANSFORMER_RULES) -> Any:
  """Shardings of arrays by their path; scalars are replicated.

  A rule holds for every array whose path ends with what it matches, so also for an optimizer's moments. To divide over
  `data` only saves memory: a dimension that is no multiple of that axis stays whole.

  Args:
    mesh: The mesh.
    tree: Arrays or shapes.
    rules: Regular expressions and, for each dimension, the axis that it is divided over; the first that matches holds.

  Returns:
    A tree of `NamedSharding`.

  Raises:
    ValueError: No rule matches, or a dimension cannot be divided over `model`.
  """

  def place(keys, array):
    path = path_of(keys)
    if array.ndim == 0:
      return replicated(mesh)
    axes = next((axes for pattern, axes in rules if re.search(f'(^|/){pattern}$', path)), None)
    if axes is None:
      raise ValueError(f'no rule says how {path} {array.shape} is divided')
    is_whole = [axis is None or size % mesh.shape[axis] for size, axis in zip(array.shape, axes)]
    if any(axis == MODEL and whole for axis, whole in zip(axes, is_whole)):
      raise ValueError(f'{path} {array.shape} cannot be divided over {MODEL}:{mesh.shape[MODEL]}')
    return NamedSharding(mesh, PartitionSpec(*(None if whole else axis for axis, whole in zip(axes, is_whole))))

  return jax.tree_util.tree_map_with_path(place, tree)


def only_over(axis: str, rules: Rules) -> Rules:
  """The same rules with nothing divided over any other axis."""
  return tuple((pattern, tuple(name if name == axis else None for name in axes)) for pattern, axes in rules)


def put(tree: Any, places: Any) -> Any:
  """Arrays at their places; what is there already stays. Every process has to give the same."""

  def put_one(array, place):
    if isinstance(array, jax.core.Tracer):
      return array
    if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(place, array.ndim):
      return array
    if jax.process_count() == 1:
      return jax.device_put(array, place)
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
      data = jax.device_put(np.asarray(jax.random.key_data(array)), place)
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return jax.device_put(np.asarray(array), place)

  return jax.tree.map(put_one, tree, places)


def is_primary() -> bool:
  """Whether this process is the one that prints and writes what all have in common."""
  return jax.process_index() == 0


def fetch(tree: Any) -> Any:
  """Arrays of all devices as numpy arrays.

  Where they are divided over several processes each has to call this, and gets all of them; what a process has on its
  own devices alone is its own.
  """
  if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)):
    return jax.device_get(tree)
  return multihost_utils.process_allgather(tree, tiled=True)
