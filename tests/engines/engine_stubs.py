"""Packages of engines without what they need to serve: the modules that verify import little, and that is replaced."""

import dataclasses
import importlib.util
import pathlib
import sys
import types


def find(package):
  """The folder of an installed package, or None; it is not imported."""
  spec = importlib.util.find_spec(package)
  return None if spec is None else pathlib.Path(spec.submodule_search_locations[0])


def _module(name, path=None, **names):
  module = sys.modules[name] = types.ModuleType(name)
  if path is not None:
    module.__path__ = [str(path)]
  for key, value in names.items():
    setattr(module, key, value)


@dataclasses.dataclass
class _AxisNames:
  ATTN_DATA = 'data'
  MLP_TENSOR = 'model'


def install_tpu_inference(folder):
  """Makes the samplers of tpu-inference importable without vLLM."""
  for name in ('', '.layers', '.layers.common', '.layers.jax', '.layers.jax.sample', '.runner'):
    _module(f'tpu_inference{name}', pathlib.Path(folder, *name.split('.')))
  _module('tpu_inference.layers.common.sharding', ShardingAxisName=_AxisNames)
  _module('tpu_inference.runner.input_batch', InputBatch=object)
  _module('tpu_inference.utils', device_array=lambda mesh, x, sharding=None: x)
