"""For one release: sampling parameters as keywords of their own, instead of `sampling=SamplingParams(...)`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from spectr_jax.sampling import SAMPLING_NAMES, SamplingParams

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')


def takes_loose_sampling(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
  """Lets a function with the keyword `sampling` take `temperature`, `top_k`, `top_p` and `min_p` as well.

  They warn as deprecated. Together with `sampling` they are a ValueError.
  """

  @functools.wraps(function)
  def with_sampling(*args, **options):
    loose = {name: options.pop(name) for name in SAMPLING_NAMES if name in options}
    if loose:
      names = ', '.join(loose)
      if options.get('sampling') is not None:
        raise ValueError(f'sampling and {names} are both given: put {names} into sampling')
      values = '=..., '.join(loose)
      warnings.warn(
        f'{names}: pass sampling=SamplingParams({values}=...); keywords of their own go with the next release',
        DeprecationWarning,
        stacklevel=2,
      )
      options['sampling'] = SamplingParams(**loose)
    return function(*args, **options)

  return with_sampling
