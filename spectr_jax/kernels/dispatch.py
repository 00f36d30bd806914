"""Forms of a function for platforms.

A form is chosen when a program is traced: for the default platform, or for the one that `made_for` names. Forms are
right everywhere, so a program that runs on another platform than it was traced for is slower and not wrong. Choosing
when it is lowered, as `jax.lax.platform_dependent` does, would trace every form of each function.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

_platform = jax.make_user_context(None)  # the caches of `jax.jit` tell its values apart


def default_platform() -> str:
  """The platform of arrays and programs whose devices nobody has named: `cpu`, `gpu` or `tpu`.

  It is that of `jax.default_device`, where that is set, and else of the default backend.
  """
  device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue], which it gets when JAX starts
  if device is None:
    return jax.default_backend()
  return (jax.local_devices(backend=device)[0] if isinstance(device, str) else device).platform


def made_for(platform: str) -> AbstractContextManager[None]:
  """A context in which programs are traced that will run on one platform alone.

  Args:
    platform: `cpu`, `gpu` or `tpu`.
  """
  return _platform(platform)


def by_platform(*arguments: Any, default: Callable[..., Any], **forms: Callable[..., Any]) -> Any:
  """One of several forms of a function: that of the platform that programs are traced for, which alone is traced.

  Args:
    *arguments: The arguments of the form, any pytrees of arrays.
    default: The form for all platforms without one of their own.
    **forms: Forms by platform, `cpu`, `tpu` or `gpu`. All forms return the same shapes and dtypes, and are right on
      every platform.
  """
  return forms.get(_platform.value or default_platform(), default)(*arguments)
