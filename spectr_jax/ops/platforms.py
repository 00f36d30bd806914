"""Forms of a function for platforms.

`jax.lax.platform_dependent` traces every form of a function, since a program may be lowered for any platform. Of a
round that is most of what is traced, and all but one form of each is thrown away. So the loop of decoding says which
platform it is traced for, and then only the forms of that platform are.
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
  """`jax.lax.platform_dependent`, which traces one form alone where the platform is known, see `made_for`.

  Args:
    *arguments: The arguments of the form, any pytrees of arrays.
    default: The form for all platforms without one of their own.
    **forms: Forms by platform, `cpu`, `tpu` or `gpu`, which is used only where the platform is known. All forms return
      the same shapes and dtypes.
  """
  if _platform.value is None:
    forms.pop('gpu', None)  # JAX has no one name for GPUs here
    return jax.lax.platform_dependent(*arguments, default=default, **forms) if forms else default(*arguments)
  return forms.get(_platform.value, default)(*arguments)
