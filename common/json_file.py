"""JSON files that another run wrote."""

from __future__ import annotations

from typing import Any

from etils import epath

from spectr_jax.io import untrusted


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
