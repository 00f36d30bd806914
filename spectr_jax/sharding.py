"""Placement of arrays on devices: the mesh, and rules that give every parameter a sharding by its path."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
  Device: TypeAlias = Any  # jaxlib has no type stubs, so a type checker does not accept `jax.Device` as a type
else:
  Device = jax.Device

DATA, MODEL = 'data', 'model'

_Rule: TypeAlias = tuple[str, tuple[str | None, ...]]
Rules: TypeAlias = Sequence[_Rule]


def _matrix(path: str, axes: tuple[str | None, str | None], *, channel_axis: int = 1) -> tuple[_Rule, ...]:
  """The rules of a matrix, an array or int8 values and scales of channels, in every form of `kernels.matrices`."""
  over_channels = (MODEL,) if axes[channel_axis] == MODEL else ()
  return (
    (rf'{path}(/values|/in_out)?', axes),
    (rf'{path}/out_in(/values)?', axes[::-1]),
    (rf'{path}(/out_in)?/scale', over_channels),
    (rf'{path}/panels', (None, None)),  # XLA cannot divide the product; what has a mesh already is not packed
  )


# The end of a parameter's path, and the mesh axis that each of its dimensions is sharded over. Tensor parallelism over
# `model`: attention by heads, the MLP by hidden units, the embedding by tokens. The other dimension is sharded over
# `data`, so that every parameter and its optimizer state is stored once.
_EMBEDDINGS = (*_matrix('embedding', (MODEL, DATA), channel_axis=0), *_matrix('unembedding', (DATA, MODEL)))
_EXPERTS = (  # by hidden units, as one MLP would be
  (r'experts/(gate|up)/kernel(/values)?', (None, DATA, MODEL)),
  (r'experts/(gate|up)/(bias|kernel/scale)', (None, MODEL)),
  (r'experts/down/kernel(/values)?', (None, MODEL, DATA)),
  (r'experts/[a-z_]+/(bias|kernel/scale|kernel/panels)', ()),
  *_matrix('router/kernel', (DATA, None)),
  (r'router/(choice_bias|expert_scale)', ()),
)
CAUSAL_LM_RULES = (
  *_EMBEDDINGS,
  *_EXPERTS,
  (r'attention/sinks', (MODEL,)),
  (r'position_embedding', (None, DATA)),
  *_matrix('(attention/(qkv|[qkv])|(mlp|shared)/(gate_up|gate|up))/kernel', (DATA, MODEL)),
  (r'(attention/(qkv|[qkv])|(mlp|shared)/(gate_up|gate|up))/bias', (MODEL,)),
  *_matrix('(attention/out|(mlp|shared)/down)/kernel', (MODEL, DATA)),
  *_matrix('recurrence/(into|z)/kernel', (DATA, MODEL)),
  *_matrix('(recurrence/[ab]|shared_gate)/kernel', (DATA, None)),
  *_matrix('recurrence/out/kernel', (MODEL, DATA)),
  (r'recurrence/(taps|taps_bias|log_rate|step_bias|norm|skip)', ()),
  *_matrix('(per_layer/projection|layer_input/(gate|out))/kernel', (DATA, None)),
  (r'(gain(/values)?|bias|layer_scale)', ()),
)


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Device] | None = None) -> Mesh:
  """Builds the mesh `data` x `model`; both axes always exist.

  Neighbors along `model` are neighbors in hardware where the backend knows its topology.

  Args:
    sizes: Number of devices by axis. A missing axis has 1; at most one may be -1 and takes all remaining devices.
    devices: The devices; all of this run by default. Described devices of a topology to compile for are valid too.

  Raises:
    ValueError: An axis is unknown, or the sizes do not fit the number of devices.
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
  # Explicit axis types: the defaults of meshes of real and of described devices differ.
  return jax.make_mesh(shape, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding that puts a whole copy on every device of the mesh."""
  return NamedSharding(mesh, PartitionSpec())


def divide_rows(mesh: Mesh, array: jax.Array) -> jax.Array:
  """Constrains an array `[B, ...]` to be sharded over `data` by rows, inside of a compiled program.

  Parameters are sharded over `data` as well. Without the constraint the compiler may conclude from them that every
  device needs all rows. It chooses the sharding of the other dimensions.
  """
  axes = PartitionSpec(DATA, *(PartitionSpec.UNCONSTRAINED,) * (array.ndim - 1))
  return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, axes))


def shardings(mesh: Mesh, tree: Any, rules: Rules = CAUSAL_LM_RULES) -> Any:
  """Chooses a `NamedSharding` for every array in a tree, or shape, by its path; scalars are replicated.

  A rule applies to every array whose path ends with its pattern, so also to an optimizer's moments. Sharding over
  `data` only saves memory, so a dimension that is not a multiple of that axis stays whole.

  Args:
    mesh, tree: The mesh, and arrays or shapes.
    rules: Pairs of a regular expression and, for each dimension, the mesh axis to shard it over or None. The first
      match applies.

  Raises:
    ValueError: No rule matches an array, or a dimension is not a multiple of the axis `model`.
  """

  def place(keys, array):
    path = jax.tree_util.keystr(keys, simple=True, separator='/')
    if array.ndim == 0:
      return replicated(mesh)
    axes = next((axes for pattern, axes in rules if re.search(f'(^|/){pattern}$', path)), None)
    if axes is None:
      raise ValueError(f'no rule says how {path} {array.shape} is sharded')
    is_whole = [axis is None or size % mesh.shape[axis] for size, axis in zip(array.shape, axes)]
    if any(axis == MODEL and whole for axis, whole in zip(axes, is_whole)):
      raise ValueError(f'{path} {array.shape} cannot be sharded over {MODEL}:{mesh.shape[MODEL]}')
    return NamedSharding(mesh, PartitionSpec(*(None if whole else axis for axis, whole in zip(axes, is_whole))))

  return jax.tree_util.tree_map_with_path(place, tree)


def only_over(axis: str, rules: Rules) -> Rules:
  """The same rules, sharding over one axis alone."""
  return tuple((pattern, tuple(name if name == axis else None for name in axes)) for pattern, axes in rules)


def put(tree: Any, places: Any) -> Any:
  """Moves arrays, the same in every process, to their shardings; tracers, and arrays that have them already, stay."""

  def part_by_part(array, place):
    # `jax.device_put` would compare the processes' arrays with one another.
    return jax.make_array_from_callback(array.shape, place, np.asarray(array).__getitem__)

  def put_one(array, place):
    if isinstance(array, Tracer):
      return array
    if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(place, array.ndim):
      return array
    if jax.process_count() == 1:
      return jax.device_put(array, place)
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
      return jax.random.wrap_key_data(part_by_part(jax.random.key_data(array), place), impl=jax.random.key_impl(array))
    return part_by_part(array, place)

  return jax.tree.map(put_one, tree, places)


def automatic_axes() -> dict[str, int]:
  """The mesh axes that are the compiler's in the program that is being traced, with their sizes.

  Along these an array has all of its entries. Along the others, those of a `shard_map`, it has those of one device.
  """
  mesh = jax.sharding.get_abstract_mesh()
  named = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
  return {name: size for name, size, kind in named if kind != AxisType.Manual}


def dividing_axes() -> list[str]:
  """The `automatic_axes` of several devices: the compiler divides work over these."""
  return [name for name, size in automatic_axes().items() if size > 1]


def shards_in_program(size: int) -> int:
  """Equal parts of an axis, across whose borders blocks would be sent between devices; one if it cannot be divided."""
  num_shards = math.prod(automatic_axes().values())
  return num_shards if size % num_shards == 0 else 1


def is_primary() -> bool:
  """Tells whether this process prints and writes for all of them; it is process 0."""
  return jax.process_index() == 0


def fetch(tree: Any) -> Any:
  """Copies arrays to the host as NumPy arrays.

  If an array is sharded over several processes, all of them must call this function, and each gets the whole array.
  """
  if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)):
    return jax.device_get(tree)
  return multihost_utils.process_allgather(tree, tiled=True)
