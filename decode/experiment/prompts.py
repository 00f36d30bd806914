"""Prompts: read from a file, checked, encoded."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from decode.experiment.prompt_sets import PromptSet, excerpt, split_set
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.io.untrusted import open_unpacked
from spectr_jax.unicode import check_unicode

# Field names in common prompt sets. The first field that a JSON object has is the prompt.
_FIELDS = ('prompt', 'question', 'instruction', 'turns')
# What a file of prompts may hold. With each at its most, reading one takes less than 30 seconds and a gigabyte.
_MOST_BYTES = 2**26  # of text, unpacked
_MOST_PROMPTS = 2**19
_MOST_VALUES = 2**22  # commas and brackets, of which JSON has at least one for every value
_WANTED = 'expected a JSON object with a text in "prompt"'
_MESSAGE = 'a message is a JSON object of texts, among them "role" and "content"'


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
  """A text to continue."""

  text: str
  index: int = 0  # in the file; a row's random key derives from it
  id: int | str = 0  # the file's own, or the index
  origin: str = '--prompt'  # file and line, for messages
  task: str = ''  # category in a published set
  turns: tuple[str, ...] = ()  # the user's texts of a published set, of which `text` is the first
  messages: tuple[Mapping[str, str], ...] = ()  # a conversation, each with `role` and `content`; else empty

  def __post_init__(self):
    if not self.text.strip():
      raise ValueError(f'{self.origin}: the prompt is empty; a prompt is a text of at least one word')
    texts = (self.text, *self.turns, *(text for message in self.messages for text in message.values()))
    for text in texts:
      check_unicode(text, f'{self.origin}: the prompt')
    if isinstance(self.id, str):
      check_unicode(self.id, f'{self.origin}: "id"')


def _is_message(entry: Any) -> bool:
  return isinstance(entry, dict) and {'role', 'content'} <= {*entry} and {str} == {*map(type, entry.values())}


def _parse_messages(entry: dict[str, Any], prompt_id: int | str, index: int, origin: str) -> Prompt:
  messages = entry['messages']
  if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
    raise ValueError(f'{origin}: "messages" is {excerpt(messages)}; expected a list of messages, {_MESSAGE}')
  text = '\n'.join(message['content'] for message in messages)
  return Prompt(text, index, prompt_id, origin, messages=tuple(messages))


def _parse_entry(entry, index: int, origin: str) -> Prompt:
  prompt_id = entry.get('id', index) if isinstance(entry, dict) else index
  if not isinstance(prompt_id, int | str):
    raise ValueError(f'{origin}: "id" is {excerpt(prompt_id)}; expected a number or a text')
  if isinstance(entry, dict) and 'messages' in entry:
    return _parse_messages(entry, prompt_id, index, origin)
  field = next((name for name in _FIELDS if name in entry), None) if isinstance(entry, dict) else None
  if field is None:
    raise ValueError(f'{origin}: no "prompt"; {_WANTED} (or one of {", ".join((*_FIELDS[1:], "messages"))})')
  text = entry[field]
  if field == 'turns' and isinstance(text, list) and text:
    text = text[0]
  if not isinstance(text, str):
    raise ValueError(f'{origin}: "{field}" is {excerpt(text)}; {_WANTED}')
  if field == 'instruction' and isinstance(entry.get('input'), str) and entry['input']:
    text = f'{text}\n{entry["input"]}'
  return Prompt(text, index, prompt_id, origin)


def _parse_published(entry, index: int, origin: str, prompt_set: PromptSet) -> Prompt:
  try:
    published = prompt_set.parse(entry)
  except ValueError as error:
    raise ValueError(f'{origin}: {error}; an entry of {prompt_set.title} is {prompt_set.form}') from error
  prompt_id = index if published.id is None else published.id
  return Prompt(published.turns[0], index, prompt_id, origin, published.task, published.turns)


def _parse_json(text: str, origin: str, wanted: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{origin}: not JSON ({error}); {wanted}') from error


def _read_bytes(path: epath.Path) -> bytes:
  try:
    with open_unpacked(path) as file:
      data = file.read(_MOST_BYTES + 1)
  except ValueError as error:
    reason = getattr(error.__cause__, 'strerror', None) or error
    raise ValueError(f'cannot read prompts from {path}: {reason}') from error
  if not data:
    raise ValueError(f'{path} holds no prompts')
  if len(data) > _MOST_BYTES:
    raise ValueError(f'{path} has more than {_MOST_BYTES:,} bytes of text, the most that prompts may have; split it')
  _check_number(data.count(b'\n'), path)
  return data


def _check_number(num_prompts: int, path: epath.PathLike) -> None:
  if num_prompts > _MOST_PROMPTS:
    raise ValueError(f'{path} has {num_prompts:,} prompts, more than {_MOST_PROMPTS:,}; split it')


def _decode_text(path: epath.Path, is_json: bool) -> str:
  data = _read_bytes(path)
  if is_json and sum(map(data.count, (b',', b'[', b'{'))) > _MOST_VALUES:
    raise ValueError(f'{path} has more than {_MOST_VALUES:,} commas and brackets, the most of JSON; split it')
  try:
    return data.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    line = data.count(b'\n', 0, error.start) + 1
    raise ValueError(f'{path}, line {line}: not UTF-8 ({error.reason})') from error


def read_prompts(path: epath.PathLike) -> list[Prompt]:
  """The prompts of a file. The ending of its name determines the format; `.gz` or `.bz2` may follow.

  `.jsonl` holds a JSON object per line, and may end in blank lines, `.json` the same or one array of objects. The text
  is in the field `prompt`, else `question`, `instruction` (followed by `input` on a line of its own) or `turns` (the
  first). An object with `messages` is a conversation; its text is what the messages say. `.tsv` has the text in the
  first column. Any other file has one prompt per line. `SET:FILE` reads a published set of `prompt_sets.PROMPT_SETS`,
  whatever the ending.

  Raises:
    ValueError: The file cannot be read, has more than 64 MiB of text or 2**19 prompts, is not UTF-8, or a line is not a
      prompt of the set; the message names the line.
  """
  prompt_set, path = split_set(path)
  if prompt_set is None:
    kind = epath.Path(path.name.removesuffix('.gz').removesuffix('.bz2')).suffix
    parse, wanted = _parse_entry, _WANTED
  else:
    kind, parse = prompt_set.ending, functools.partial(_parse_published, prompt_set=prompt_set)
    wanted = f'an entry of {prompt_set.title} is {prompt_set.form}'
  name, is_json = str(path), kind in ('.json', '.jsonl')
  text = _decode_text(path, is_json)
  if kind == '.json' and text.lstrip().startswith('['):
    entries = _parse_json(text, name, wanted)
    if not entries:
      raise ValueError(f'{name} holds no prompts')
    _check_number(len(entries), name)
    return [parse(entry, index, f'{name}, entry {index + 1}') for index, entry in enumerate(entries)]
  prompts = []
  text = text.rstrip() if is_json else text.removesuffix('\n')
  if is_json and not text:
    raise ValueError(f'{name} holds no prompts')
  for index, line in enumerate(text.split('\n')):
    origin = f'{name}, line {index + 1}'
    line = line.removesuffix('\r')
    if is_json and line.strip():
      prompts.append(parse(_parse_json(line, origin, wanted), index, origin))
    elif kind == '.tsv' and prompt_set is not None:
      prompts.append(parse(line.split('\t'), index, origin))
    else:
      prompts.append(Prompt(line.split('\t')[0] if kind == '.tsv' else line, index, index, origin))
  return prompts


def take_first(prompts: Sequence[Prompt], num_prompts: int) -> list[Prompt]:
  return list(prompts[:num_prompts])


def take_evenly(prompts: Sequence[Prompt], num_prompts: int, *, group: Callable[[Prompt], str]) -> list[Prompt]:
  """Equally many prompts of every group, spread over the group, in the order of the file; at most so many.

  A group that has too few gives all it has, and the others give more. Of a remainder, earlier groups give one more.
  """
  places: dict[str, list[int]] = {}
  for place, prompt in enumerate(prompts):
    places.setdefault(group(prompt), []).append(place)
  # The n-th of a group is taken before the (n + 1)-th of any.
  ranked = sorted((rank, first) for first, members in enumerate(places.values()) for rank in range(len(members)))
  taken = [first for _, first in ranked[:num_prompts]]
  chosen = []
  for first, members in enumerate(places.values()):
    count = taken.count(first)
    chosen += [members[number * len(members) // count] for number in range(count)]
  return [prompts[place] for place in sorted(chosen)]


def as_conversations(prompts: Sequence[Prompt], system: str | None = None) -> list[Prompt]:
  """The prompts as conversations: a text becomes a turn of the user; `system` is for those without such a message."""
  rendered = []
  for prompt in prompts:
    messages = prompt.messages or ({'role': 'user', 'content': prompt.text},)
    if system is not None and messages[0]['role'] != 'system':
      messages = ({'role': 'system', 'content': system}, *messages)
    rendered.append(dataclasses.replace(prompt, messages=messages))
  return rendered


def _encode_chat(prompt: Prompt, tokenizer: TokenizerBase) -> list[int]:
  try:
    return tokenizer.encode_chat(prompt.messages)
  except ValueError as error:
    raise ValueError(f'{prompt.origin}: {error}') from error


def _encode(prompts: Sequence[Prompt], tokenizer: TokenizerBase) -> list[list[int]]:
  rows = iter(tokenizer.encode_prompts([prompt.text for prompt in prompts if not prompt.messages]))
  return [_encode_chat(prompt, tokenizer) if prompt.messages else next(rows) for prompt in prompts]


def longest_prompt(max_new_tokens: int, max_length: int | None) -> float:
  """The largest number of tokens of a prompt beside new ones, within the models' limit; inf for no limit."""
  if max_length is None:
    return math.inf
  if max_length - max_new_tokens < 2:
    raise ValueError(
      f'max_new_tokens {max_new_tokens} leaves no room for a prompt: the models allow {max_length} tokens, prompt'
      f' included; at most {max_length - 2} can be new'
    )
  return max_length - max_new_tokens


def without_long(
  prompts: Sequence[Prompt], tokenizer: TokenizerBase, *, max_new_tokens: int, max_length: int | None
) -> list[Prompt]:
  """The prompts that leave room for `max_new_tokens`, see `longest_prompt`; a `ValueError` if none does."""
  limit = longest_prompt(max_new_tokens, max_length)
  kept = [prompt for prompt, row in zip(prompts, _encode(prompts, tokenizer)) if len(row) <= limit]
  if not kept:
    raise ValueError(
      f'{prompts[0].origin}: this prompt and all {len(prompts)} of its file are too long;'
      f' at most {limit} tokens are allowed'
    )
  return kept


def check_known(ids: Sequence[int], tokenizer: TokenizerBase, vocab_size: int | None, where: str) -> None:
  """Refuses a prompt without tokens, or with one that a target of `vocab_size` ids does not have."""
  if not ids:
    raise ValueError(f'{where} has no tokens')
  if vocab_size is not None and (largest := max(ids)) >= vocab_size:
    raise ValueError(
      f'{where} has the token {tokenizer.token_text(largest)!r} of id {largest}, and the target has ids from 0 to'
      f' {vocab_size - 1}'
    )


def encode_prompts(
  prompts: Sequence[Prompt],
  tokenizer: TokenizerBase,
  *,
  max_new_tokens: int,
  max_length: int | None,
  vocab_size: int | None = None,
  multiple: int = 16,
) -> tuple[np.ndarray, np.ndarray]:
  """The prompts' int32 ids `[B, P]`, right-padded to a `multiple`, and lengths `[B]`; `ValueError`s name bad ones."""
  limit = longest_prompt(max_new_tokens, max_length)
  rows = _encode(prompts, tokenizer)
  for prompt, row in zip(prompts, rows):
    if len(row) > limit:
      raise ValueError(
        f'{prompt.origin}: the prompt is too long, {len(row)} tokens; at most {limit} are allowed: the models take'
        f' {max_length}, of which max_new_tokens are {max_new_tokens}'
      )
    check_known(row, tokenizer, vocab_size, f'{prompt.origin}: the prompt')
  lengths = np.array([len(row) for row in rows], np.int32)
  size = -(-int(lengths.max()) // multiple) * multiple
  tokens = np.full((len(rows), size), tokenizer.pad_id, np.int32)
  for row, ids in zip(tokens, rows):
    row[: len(ids)] = ids
  return tokens, lengths
