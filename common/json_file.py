"""JSON files that this program wrote. They may be cut off, of another version or something else; nobody forges them.

Files of strangers are read by `spectr_jax.io.untrusted`; docs/security.md says which are which.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

from etils import epath

from spectr_jax.io import untrusted
from spectr_jax.io.new_files import write_file

_T = TypeVar('_T')


def read_json(path: epath.PathLike, what: str, advice: str) -> Any:
  """The content of a JSON file of at most 16 MiB; a `ValueError` about `what` if it cannot be read, is larger, or is
  not JSON, in which case it ends with `advice`.
  """
  try:
    text = untrusted.read_text(path, untrusted.LARGE)
  except ValueError as error:
    raise ValueError(f'cannot read {what}: {error}') from error
  try:
    return untrusted.parse_json(text, str(path))
  except ValueError as error:
    raise ValueError(f'{path} is not JSON ({error.__cause__}); {advice}') from error


def load_ours(path: epath.PathLike, kind: type[_T], what: str, advice: str) -> _T:
  """A dataclass from the JSON of its fields; a `ValueError` about `what`, which ends with `advice`, if there is none.

  Fields with a default may be missing, and other fields may be there.
  """
  content = read_json(path, what, advice)
  try:
    return typed(kind, content)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{path} is no {what} ({error}); {advice}') from error


def save_ours(path: epath.PathLike, value: Any) -> None:
  """Writes the fields of a dataclass as JSON, completely or not at all; `ValueError` if it cannot be written."""
  write_file(path, (json.dumps(dataclasses.asdict(value), indent=2) + '\n').encode())


def typed(kind: Any, value: Any) -> Any:
  """A JSON value as a dataclass, a list, a dict, one of several types, or a plain one; else `TypeError` or
  `ValueError`.
  """
  origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
  if origin is types.UnionType:
    for part in args:
      with contextlib.suppress(TypeError, ValueError):
        return typed(part, value)
  elif dataclasses.is_dataclass(kind) and type(value) is dict:
    hints = typing.get_type_hints(kind)
    return typing.cast(Any, kind)(**{name: typed(hints[name], value[name]) for name in hints if name in value})
  elif origin is list and type(value) is list:
    return [typed(args[0], part) for part in value]
  elif origin is dict and type(value) is dict:
    return {args[0](key): typed(args[1], part) for key, part in value.items()}
  elif kind is Any or type(value) is kind:
    return value
  elif kind is float and type(value) is int:
    return float(value)
  raise TypeError(f'{untrusted.shown(value)} in place of {getattr(kind, "__name__", kind)}')
