"""Prompts: read from a file, checked, encoded."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from spectr_jax import Tokenizer

# Field names in common prompt sets. The first field that a JSON object has is the prompt.
_FIELDS = ('prompt', 'question', 'instruction', 'turns')
_WANTED = 'expected a JSON object with a text in "prompt"'


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A text to continue.

  Attributes:
    text: The text.
    index: Its index in the file, from 0. A row's random key derives from it.
    id: The file's own `id`, or the index if it has none.
    origin: The prompt's file and line, for messages.
  """

  text: str
  index: int = 0
  id: int | str = 0
  origin: str = '--prompt'

  def __post_init__(self):
    if not self.text.strip():
      raise ValueError(f'{self.origin}: the prompt is empty; a prompt is a text of at least one word')
    try:
      self.text.encode()
    except UnicodeEncodeError as error:
      raise ValueError(f'{self.origin}: the prompt is not valid Unicode: {error.reason}') from error


def _parse_entry(entry, index: int, origin: str) -> Prompt:
  field = next((name for name in _FIELDS if name in entry), None) if isinstance(entry, dict) else None
  if field is None:
    raise ValueError(f'{origin}: no "prompt"; {_WANTED} (or one of {", ".join(_FIELDS[1:])})')
  text = entry[field]
  if field == 'turns' and isinstance(text, list) and text:
    text = text[0]
  if not isinstance(text, str):
    raise ValueError(f'{origin}: "{field}" is {json.dumps(text)[:40]}; {_WANTED}')
  if field == 'instruction' and isinstance(entry.get('input'), str) and entry['input']:
    text = f'{text}\n{entry["input"]}'
  prompt_id = entry.get('id', index)
  if not isinstance(prompt_id, int | str):
    raise ValueError(f'{origin}: "id" is {json.dumps(prompt_id)[:40]}; expected a number or a text')
  return Prompt(text, index, prompt_id, origin)


def _parse_json(text: str, origin: str) -> Any:
  try:
    return json.loads(text)
  except (json.JSONDecodeError, RecursionError) as error:
    raise ValueError(f'{origin}: not JSON ({error}); {_WANTED}') from error


def _read_bytes(path: epath.Path) -> bytes:
  try:
    data = path.read_bytes()
  except OSError as error:
    raise ValueError(f'cannot read prompts from {path}: {error.strerror or error}') from error
  if path.suffix != '.gz':
    return data
  try:
    return gzip.decompress(data)
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f'cannot read prompts from {path}: {error}') from error


def read_prompts(path: epath.PathLike) -> list[Prompt]:
  """The prompts of a file. The ending of its name determines the format; `.gz` may follow.

  `.jsonl` holds a JSON object per line, `.json` the same or one array of objects. The text is in the field `prompt`,
  else `question`, `instruction` (followed by `input` on a line of its own) or `turns` (the first). `.tsv` has the text
  in the first column. Any other file has one prompt per line.

  Raises:
    ValueError: The file cannot be read, is not UTF-8, or a line is not a prompt; the message names the line.
  """
  path = epath.Path(path)
  data = _read_bytes(path)
  try:
    text = data.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    line = data.count(b'\n', 0, error.start) + 1
    raise ValueError(f'{path}, line {line}: not UTF-8 ({error.reason})') from error
  if not text:
    raise ValueError(f'{path} holds no prompts')
  kind = epath.Path(path.name.removesuffix('.gz')).suffix
  if kind == '.json' and text.lstrip().startswith('['):
    entries = _parse_json(text, str(path))
    if not entries:
      raise ValueError(f'{path} holds no prompts')
    return [_parse_entry(entry, index, f'{path}, entry {index + 1}') for index, entry in enumerate(entries)]
  prompts = []
  for index, line in enumerate(text.removesuffix('\n').split('\n')):
    origin = f'{path}, line {index + 1}'
    line = line.removesuffix('\r')
    if kind in ('.jsonl', '.json') and line.strip():
      prompts.append(_parse_entry(_parse_json(line, origin), index, origin))
    else:
      prompts.append(Prompt(line.split('\t')[0] if kind == '.tsv' else line, index, index, origin))
  return prompts


def _encode(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
  return [[tokenizer.bos_id, *ids] for ids in tokenizer.encode_batch([prompt.text for prompt in prompts])]


def longest_prompt(max_new_tokens: int, max_length: int | None) -> float:
  """The largest number of tokens of a prompt, bos included.

  Args:
    max_new_tokens: Number of new tokens to leave room for.
    max_length: The models' limit for prompt plus continuation, in tokens, or None for no limit.

  Raises:
    ValueError: There is no room for a prompt.
  """
  if max_length is None:
    return math.inf
  if max_length - max_new_tokens < 2:
    raise ValueError(
      f'max_new_tokens {max_new_tokens} leaves no room for a prompt: the models allow {max_length} tokens, prompt'
      f' included; at most {max_length - 2} can be new'
    )
  return max_length - max_new_tokens


def without_long(
  prompts: Sequence[Prompt], tokenizer: Tokenizer, *, max_new_tokens: int, max_length: int | None
) -> list[Prompt]:
  """The prompts that leave room for `max_new_tokens`.

  Args:
    prompts: The prompts.
    tokenizer: The models' tokenizer.
    max_new_tokens: Number of new tokens to leave room for.
    max_length: The models' limit for prompt plus continuation, in tokens, or None for no limit.

  Raises:
    ValueError: No prompt leaves enough room.
  """
  limit = longest_prompt(max_new_tokens, max_length)
  kept = [prompt for prompt, row in zip(prompts, _encode(prompts, tokenizer)) if len(row) <= limit]
  if not kept:
    raise ValueError(
      f'{prompts[0].origin}: this prompt and all {len(prompts)} of its file are too long;'
      f' at most {limit} tokens are allowed'
    )
  return kept


def encode_prompts(
  prompts: Sequence[Prompt], tokenizer: Tokenizer, *, max_new_tokens: int, max_length: int | None, multiple: int = 16
) -> tuple[np.ndarray, np.ndarray]:
  """The prompts' token ids, starting with bos, right-padded to one size.

  Args:
    prompts: The prompts.
    tokenizer: The models' tokenizer.
    max_new_tokens: Number of new tokens to leave room for.
    max_length: The models' limit for prompt plus continuation, in tokens, or None for no limit.
    multiple: The size is a multiple of this, so that other prompts rarely need another compilation.

  Returns:
    int32 ids `[B, P]` and lengths `[B]`.

  Raises:
    ValueError: A prompt is too long; the message names it.
  """
  limit = longest_prompt(max_new_tokens, max_length)
  rows = _encode(prompts, tokenizer)
  for prompt, row in zip(prompts, rows):
    if len(row) > limit:
      raise ValueError(
        f'{prompt.origin}: the prompt is too long, {len(row)} tokens; at most {limit} are allowed: the models take'
        f' {max_length}, of which max_new_tokens are {max_new_tokens}'
      )
  lengths = np.array([len(row) for row in rows], np.int32)
  size = -(-int(lengths.max()) // multiple) * multiple
  tokens = np.full((len(rows), size), tokenizer.pad_id, np.int32)
  for row, ids in zip(tokens, rows):
    row[: len(ids)] = ids
  return tokens, lengths
