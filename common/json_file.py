"""JSON files that another run wrote."""

from __future__ import annotations

import json
from typing import Any

from etils import epath


def read_json(path: epath.PathLike, what: str, advice: str) -> Any:
  """Reads a JSON file.

  Args:
    path: The file.
    what: The expected content, for messages.
    advice: Advice on a file that is not JSON, for messages.

  Returns:
    The parsed content.

  Raises:
    ValueError: The file cannot be read or is not JSON.
  """
  try:
    return json.loads(epath.Path(path).read_text(encoding='utf-8'))
  except OSError as error:
    raise ValueError(f'cannot read {what} from {path}: {error.strerror or error}') from error
  except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
    raise ValueError(f'{path} is not JSON ({error}); {advice}') from error
