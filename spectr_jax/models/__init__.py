"""Networks behind the `Model` seam. The transformer needs Flax and is imported on first use."""

import importlib
from typing import TYPE_CHECKING

from spectr_jax.models import causal_lm, table
from spectr_jax.models.cacheless import uncached

if TYPE_CHECKING:
  from spectr_jax.models import transformer

__all__ = ['causal_lm', 'table', 'transformer', 'uncached']

if not TYPE_CHECKING:  # seen by a type checker, this function would make every misspelt name valid

  def __getattr__(name: str):
    if name == 'transformer':
      return importlib.import_module('spectr_jax.models.transformer')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
