"""Configurations: files of `configs/`, whose `get_config` returns a `ConfigDict`."""

from __future__ import annotations

import importlib.util

from common.extras import need

need('train', 'ml_collections')

import ml_collections  # noqa: E402


def load(path: str) -> ml_collections.ConfigDict:
  """The configuration that `get_config` of `FILE.py[:ARGUMENT]` returns; a `ValueError` if there is none."""
  name, *argument = path.split(':', 1)
  try:
    spec = importlib.util.spec_from_file_location('checked_config', name)
    if spec is None:
      raise ValueError('not a Python file')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*argument)
    if not isinstance(config, ml_collections.ConfigDict):
      raise ValueError(f'get_config returns {type(config).__name__}, not a ConfigDict')
  except Exception as error:  # the file's code may raise anything
    raise ValueError(f'cannot load config {path}: {error}') from error
  return config
