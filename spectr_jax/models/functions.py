"""The functions of a `Model`, made from those of a network and its sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from spectr_jax.model import Model
from spectr_jax.models import layers


@functools.lru_cache
def _apply_fn(apply, config, feature_layers):
  layers.check_feature_layers(feature_layers, config.num_layers)
  return functools.partial(apply, config=config, feature_layers=feature_layers)


@functools.lru_cache
def model_functions(config: Any, *, apply: Callable, **others: Callable | None) -> dict[str, Any]:
  """The functions of a `Model` by field: one object per configuration, so that equal models share compiled programs.

  `apply` is `(params, tokens, positions, mask, cache, *, config, feature_layers) -> ModelOutput`; the others, by name
  without `_fn`, take the keyword `config`, or are None where one is missing.
  """
  functions = {
    f'{name}_fn': None if function is None else functools.partial(function, config=config)
    for name, function in others.items()
  }
  return functions | {
    'apply_fn': _apply_fn(apply, config, ()),
    'features_fn': functools.partial(_apply_fn, apply, config),
  }


def config_of(model: Model, apply: Callable, maker: str) -> Any:
  """The configuration of a model that `maker` made of the network's `apply`; ValueError for others."""
  if not isinstance(model.apply_fn, functools.partial) or model.apply_fn.func is not apply:
    raise ValueError(f'not a model made by {maker}')
  return model.apply_fn.keywords['config']
