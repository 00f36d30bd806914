"""Prompts: read from a file, checked, encoded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
from etils import epath

from spectr_jax import Tokenizer

_JSONL_SUFFIXES = ('.jsonl', '.json')


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A text to continue.

  Attributes:
    text: The text.
    index: Its place in the file, from 0; a row's randomness comes from it.
    id: The file's own `id`, or the index where it has none.
    origin: Where it came from, for messages.
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


def _parse_json_line(line: str, index: int, origin: str) -> Prompt:
  wanted = 'expected a JSON object with a text in "prompt"'
  try:
    entry = json.loads(line)
  except (json.JSONDecodeError, RecursionError) as error:
    raise ValueError(f'{origin}: not JSON ({error}); {wanted}') from error
  if not isinstance(entry, dict) or 'prompt' not in entry:
    raise ValueError(f'{origin}: no "prompt"; {wanted}')
  if not isinstance(entry['prompt'], str):
    raise ValueError(f'{origin}: "prompt" is {json.dumps(entry["prompt"])[:40]}; {wanted}')
  prompt_id = entry.get('id', index)
  if not isinstance(prompt_id, int | str):
    raise ValueError(f'{origin}: "id" is {json.dumps(prompt_id)[:40]}; expected a number or a text')
  return Prompt(entry['prompt'], index, prompt_id, origin)


def read_prompts(path: epath.PathLike) -> list[Prompt]:
  """Prompts of a file: JSONL with a `prompt` field if it ends in .jsonl or .json, else text with a prompt per line.

  Raises:
    ValueError: The file cannot be read, is not UTF-8, or a line of it is no prompt; the message names the line.
  """
  path = epath.Path(path)
  try:
    data = path.read_bytes()
  except OSError as error:
    raise ValueError(f'cannot read prompts from {path}: {error.strerror or error}') from error
  try:
    text = data.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    line = data.count(b'\n', 0, error.start) + 1
    raise ValueError(f'{path}, line {line}: not UTF-8 ({error.reason})') from error
  if not text:
    raise ValueError(f'{path} holds no prompts')
  prompts = []
  for index, line in enumerate(text.removesuffix('\n').split('\n')):
    origin = f'{path}, line {index + 1}'
    line = line.removesuffix('\r')
    is_json = path.suffix in _JSONL_SUFFIXES and line.strip()
    prompts.append(_parse_json_line(line, index, origin) if is_json else Prompt(line, index, index, origin))
  return prompts


def encode_prompts(
  prompts: Sequence[Prompt], tokenizer: Tokenizer, *, max_new_tokens: int, max_length: int | None, multiple: int = 16
) -> tuple[np.ndarray, np.ndarray]:
  """Token ids with bos in front, right-padded to one size.

  Args:
    prompts: What to encode.
    tokenizer: The models' tokenizer.
    max_new_tokens: Tokens to leave room for.
    max_length: Longest prompt plus continuation, or None for no limit.
    multiple: The size is a multiple of this, so that other prompts rarely need another compilation.

  Returns:
    int32 ids `[B, P]` and lengths `[B]`.

  Raises:
    ValueError: A prompt is too long; the message names it.
  """
  rows = [[tokenizer.bos_id, *ids] for ids in tokenizer.encode_batch([prompt.text for prompt in prompts])]
  if max_length is not None:
    limit = max_length - max_new_tokens
    if limit < 2:
      raise ValueError(
        f'max_new_tokens {max_new_tokens} leaves no room for a prompt: the models allow {max_length} tokens, prompt'
        f' included; at most {max_length - 2} can be new'
      )
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
