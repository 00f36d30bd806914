"""Files that this program wrote: the dataclass that was saved, or one line."""

import dataclasses
from typing import Any

import pytest

from common.json_file import load_ours, save_ours


@dataclasses.dataclass(frozen=True)
class _Part:
  size: int
  rates: list[list[float | None]]


@dataclasses.dataclass(frozen=True)
class _Whole:
  name: str
  parts: dict[int, _Part]
  anything: dict[str, Any]
  is_done: bool = True


_VALUE = _Whole('a', {3: _Part(1, [[0.5, None], [1.0]])}, {'x': [1, None, {'y': True}]}, is_done=False)


def _load(path):
  return load_ours(path, _Whole, 'whole', 'write another one')


def test_what_was_saved_is_read(tmp_path):
  path = tmp_path / 'x.json'
  save_ours(path, _VALUE)
  assert _load(path) == _VALUE
  # Of an earlier version, which had no field for it and one more; whole numbers may stand for real ones.
  path.write_text('{"name": "b", "parts": {"3": {"size": 2, "rates": [[1]]}}, "anything": {}, "more": 1}')
  assert _load(path) == _Whole('b', {3: _Part(2, [[1.0]])}, {})


@pytest.mark.parametrize(('content', 'message'), [
  (None, 'cannot read whole: there is no file .*x.json'),
  ('', 'x.json is not JSON .*; write another one'),
  ('cut', 'x.json is not JSON .*; write another one'),
  ('\0' * 200, 'x.json is not JSON .*; write another one'),
  ('[' * 10**5, 'x.json is not JSON .*; write another one'),
  ('[]', r'x.json is no whole \(\[\] in place of _Whole\); write another one'),
  ('{}', "x.json is no whole .*missing 3 required .*'name'.*; write another one"),
  ('{"name": 1, "parts": {}, "anything": {}}', r'x.json is no whole \(1 in place of str\)'),
  ('{"name": "", "parts": {"x": {}}, "anything": {}}', "x.json is no whole .*invalid literal for int"),
  ('{"name": "", "parts": {"1": {"size": 1.5, "rates": []}}, "anything": {}}', r'\(1.5 in place of int\)'),
  ('{"name": "", "parts": {"1": {"size": 1, "rates": [["a"]]}}, "anything": {}}', r"'a' in place of float"),
  ('{"name": "", "parts": {}, "anything": {}, "is_done": 1}', r'\(1 in place of bool\)'),
])  # fmt: skip
def test_accidents_are_one_line(tmp_path, content, message):
  path = tmp_path / 'x.json'
  if content == 'cut':
    save_ours(path, _VALUE)
    path.write_text(path.read_text()[:-5])
  elif content is not None:
    path.write_text(content)
  with pytest.raises(ValueError, match=message) as error:
    _load(path)
  assert '\n' not in str(error.value)
