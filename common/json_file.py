"""Reading a JSON file that another run wrote."""

from __future__ import annotations

import json
from typing import Any

from etils import epath


def read_json(path: epath.PathLike, what: str, advice: str) -> Any:
  """What a file holds.

  Args:
    path: The file.
    what: What it should hold, for messages.
    advice: What would be right, for messages.

  Raises:
    ValueError: The file cannot be read or is no JSON.
  """
  try:
    return json.loads(epath.Path(path).read_text(encoding='utf-8'))
  except OSError as error:
    raise ValueError(f'cannot read {what} from {path}: {error.strerror or error}') from error
  except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
    raise ValueError(f'{path} is not JSON ({error}); {advice}') from error
