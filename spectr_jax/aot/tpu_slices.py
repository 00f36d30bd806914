"""Slices of TPUs to compile for without having them; needs the extra `tpu`, for the compiler."""

from __future__ import annotations

import dataclasses
import importlib.util
import os

import jax


@dataclasses.dataclass(frozen=True)
class Chip:
  """What is published about a kind of TPU.

  Attributes:
    memory: Bytes of high-bandwidth memory of a device.
    peak_flops: Floating-point operations per second in bfloat16.
    clock: Cycles per second of its matrix units, which follows from their number and the peak.
  """

  memory: int
  peak_flops: float
  clock: float


# By what JAX calls the kind; from Google Cloud's documentation of TPU versions. Not v4: its chips are described as two
# devices, and are one on a machine.
_CHIPS = {
  'TPU v5 lite': Chip(16 * 2**30, 197e12, 1.5e9),
  'TPU v5': Chip(95 * 2**30, 459e12, 1.75e9),
  'TPU v5p': Chip(95 * 2**30, 459e12, 1.75e9),
  'TPU v6 lite': Chip(32 * 2**30, 918e12, 1.75e9),
}


def is_compiler_installed() -> bool:
  """Whether the extra `tpu` is."""
  return importlib.util.find_spec('libtpu') is not None


def describe_topology(name: str) -> list[jax.Device]:
  """The chips of a slice such as `v5e:4x4`, as descriptions.

  JAX does not begin after it to keep compiled programs on disk: those for described chips cannot be read back.

  Raises:
    ValueError: The compiler is missing or does not know the topology.
  """
  if not is_compiler_installed():
    raise ValueError("no TPU compiler: the extra tpu is not installed (pip install -e '.[tpu]')")
  from jax.experimental import topologies

  # The compiler would look for the machine's own TPUs, ask the cloud about them, and let only one process have them.
  for variable, value in (
    ('TPU_SKIP_MDS_QUERY', '1'), ('TPU_WORKER_HOSTNAMES', 'localhost'), ('TPU_ACCELERATOR_TYPE', 'v5litepod-4'),
    ('ALLOW_MULTIPLE_LIBTPU_LOAD', '1'),
  ):  # fmt: skip
    os.environ.setdefault(variable, value)
  try:
    devices = list(topologies.get_topology_desc(platform='tpu', topology_name=name).devices)
  except Exception as error:  # the plug-in raises many types
    raise ValueError(f'no TPU topology {name!r}: {error}') from error
  jax.config.update('jax_enable_compilation_cache', False)
  return devices


def chip_of(device: jax.Device) -> Chip:
  """What is known of a described chip.

  Raises:
    ValueError: Its kind is not known here.
  """
  if device.device_kind not in _CHIPS:
    raise ValueError(f'nothing is known of {device.device_kind!r}; known: {", ".join(_CHIPS)}')
  return _CHIPS[device.device_kind]
