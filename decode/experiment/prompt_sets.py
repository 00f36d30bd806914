"""Published prompt sets: `SET:FILE` reads a file in the format of its authors."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from etils import epath

from spectr_jax.io.untrusted import as_path

# Spec-Bench's tasks by category. The categories of MT-Bench are one task.
_MT_BENCH = ('writing', 'roleplay', 'reasoning', 'math', 'coding', 'extraction', 'stem', 'humanities')
SPEC_BENCH_TASKS = dict.fromkeys(_MT_BENCH, 'multi-turn conversation') | {
  'translation': 'translation',
  'summarization': 'summarization',
  'qa': 'question answering',
  'math_reasoning': 'mathematical reasoning',
  'rag': 'retrieval-augmented generation',
}
_SET_AND_FILE = re.compile(r'([A-Za-z][\w-]*):(?!//)(.+)', re.ASCII | re.DOTALL)
_NUMBER = re.compile(r'-?\d[\d,]*(\.\d+)?', re.ASCII)


@dataclasses.dataclass(frozen=True)
class PublishedPrompt:
  """The prompt of an entry of a published set: the user's texts, at least one."""

  turns: tuple[str, ...]
  task: str = ''
  id: int | str | None = None


@dataclasses.dataclass(frozen=True)
class PromptSet:
  title: str  # in papers
  ending: str  # of its file's name: `.jsonl`, `.json` or `.tsv`
  form: str  # an entry in words, for messages
  parse: Callable[[Any], PublishedPrompt]  # of a JSON value, or the columns of a line


def excerpt(value: Any) -> str:
  """The beginning of a JSON value as JSON, for messages; only that much of it is written."""
  text = ''
  for part in json.JSONEncoder().iterencode(value):
    text += part
    if len(text) >= 40:
      break
  return text[:40]


def _field(entry: Any, name: str, kind: type = str) -> Any:
  if not isinstance(entry, dict):
    raise ValueError(f'{excerpt(entry)} is not an object')
  if name not in entry:
    raise ValueError(f'no "{name}"')
  if not isinstance(entry[name], kind) or isinstance(entry[name], bool):
    raise ValueError(f'"{name}" is {excerpt(entry[name])}')
  return entry[name]


def _spec_bench(entry: Any) -> PublishedPrompt:
  number, category = _field(entry, 'question_id', int), _field(entry, 'category')
  if category not in SPEC_BENCH_TASKS:
    raise ValueError(f'"category" is {excerpt(category)}, not one of {", ".join(SPEC_BENCH_TASKS)}')
  turns = _field(entry, 'turns', list)
  if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
    raise ValueError(f'"turns" is {excerpt(turns)}')
  return PublishedPrompt(tuple(turns), category, number)


def _humaneval(entry: Any) -> PublishedPrompt:
  _field(entry, 'entry_point')
  return PublishedPrompt((_field(entry, 'prompt'),), id=_field(entry, 'task_id'))


def _gsm8k(entry: Any) -> PublishedPrompt:
  _field(entry, 'answer')
  return PublishedPrompt((_field(entry, 'question'),))


def _mgsm(columns: list[str]) -> PublishedPrompt:
  if len(columns) != 2:
    raise ValueError(f'{len(columns)} column{"s" * (len(columns) > 1)}')
  if not _NUMBER.fullmatch(columns[1].strip()):
    raise ValueError(f'the answer is {excerpt(columns[1])}')
  return PublishedPrompt((columns[0],))


def _alpaca(entry: Any) -> PublishedPrompt:
  instruction, more = _field(entry, 'instruction'), _field(entry, 'input')
  _field(entry, 'output')
  return PublishedPrompt((f'{instruction}\n{more}' if more else instruction,))


PROMPT_SETS = {
  'spec_bench': PromptSet('Spec-Bench', '.jsonl', 'an object with question_id, category and turns', _spec_bench),
  'humaneval': PromptSet('HumanEval', '.jsonl', 'an object with task_id, prompt and entry_point', _humaneval),
  'gsm8k': PromptSet('GSM8K', '.jsonl', 'an object with question and answer', _gsm8k),
  'mgsm': PromptSet('MGSM', '.tsv', 'a question, a tab and a number', _mgsm),
  'alpaca': PromptSet('Alpaca', '.json', 'an object with instruction, input and output', _alpaca),
}


def split_set(text: epath.PathLike) -> tuple[PromptSet | None, epath.Path]:
  """The set and the file that `SET:FILE` names; None and the file for a path alone.

  `scheme://` begins a path, and so does the name of a file that exists. An unknown set raises `ValueError`.
  """
  match = _SET_AND_FILE.fullmatch(str(text))
  if match is None:
    return None, as_path(text)
  name, path = match.groups()
  if name in PROMPT_SETS:
    return PROMPT_SETS[name], as_path(path)
  if epath.Path(text).exists():
    return None, epath.Path(text)
  raise ValueError(f'prompts: there is no set {name!r}; SET:FILE reads {", ".join(PROMPT_SETS)}')
