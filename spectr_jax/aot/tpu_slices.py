"""Descriptions of TPU slices to compile for; they need the extra `tpu`, which contains the compiler."""

from __future__ import annotations

import dataclasses
import importlib.util
import os

import jax

from spectr_jax.aot.kernels import write_schedules
from spectr_jax.sharding import Device


@dataclasses.dataclass(frozen=True)
class Chip:
  """Published figures of a kind of TPU.

  Attributes:
    memory: Bytes of high-bandwidth memory of a device.
    peak_flops: Floating-point operations per second in bfloat16.
    clock: Cycles per second of its matrix units; follows from their number and the peak.
    memory_bandwidth: Bytes per second between high-bandwidth memory and the chip.
    link_bandwidth: Bytes per second that a chip exchanges with its two neighbors along one axis of the slice.
  """

  memory: int
  peak_flops: float
  clock: float
  memory_bandwidth: float
  link_bandwidth: float


# By `device_kind` in JAX; from Google Cloud's documentation of TPU versions. v4 is missing, since its description has
# two devices per chip where a machine has one.
_CHIPS = {
  'TPU v5 lite': Chip(16 * 2**30, 197e12, 1.5e9, 819e9, 90e9),
  'TPU v5': Chip(95 * 2**30, 459e12, 1.75e9, 2765e9, 180e9),
  'TPU v5p': Chip(95 * 2**30, 459e12, 1.75e9, 2765e9, 180e9),
  'TPU v6 lite': Chip(32 * 2**30, 918e12, 1.75e9, 1640e9, 180e9),
}


def is_compiler_installed() -> bool:
  """Tells whether the extra `tpu` is installed."""
  return importlib.util.find_spec('libtpu') is not None


def describe_topology(name: str) -> list[Device]:
  """Describes the chips of a slice such as `v5e:4x4`.

  This sets environment variables of the TPU compiler that are not set yet. It also switches JAX's compilation cache
  off, because programs for described chips cannot be read back from disk.

  Returns:
    The described devices, to build a mesh of.

  Raises:
    ValueError: The compiler is missing or does not know the topology.
  """
  if not is_compiler_installed():
    raise ValueError("no TPU compiler: the extra tpu is not installed (pip install -e '.[tpu]')")
  from jax.experimental import topologies

  # By default the compiler looks for the machine's own TPUs, queries the cloud's metadata server and takes a lock that
  # only one process can hold.
  for variable, value in (
    ('TPU_SKIP_MDS_QUERY', '1'), ('TPU_WORKER_HOSTNAMES', 'localhost'), ('TPU_ACCELERATOR_TYPE', 'v5litepod-4'),
    ('ALLOW_MULTIPLE_LIBTPU_LOAD', '1'),
  ):  # fmt: skip
    os.environ.setdefault(variable, value)
  write_schedules()
  try:
    devices = list(topologies.get_topology_desc(platform='tpu', topology_name=name).devices)
  except Exception as error:  # the plug-in raises many types
    raise ValueError(f'no TPU topology {name!r}: {error}') from error
  jax.config.update('jax_enable_compilation_cache', False)
  return devices


def chip_of(device: Device) -> Chip:
  """Published figures of a device's chip; ValueError if the table has no such kind."""
  if device.device_kind not in _CHIPS:
    raise ValueError(f'nothing is known of {device.device_kind!r}; known: {", ".join(_CHIPS)}')
  return _CHIPS[device.device_kind]
