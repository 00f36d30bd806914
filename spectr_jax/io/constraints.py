"""`compile_constraint`: regular expressions, JSON schemas and choices as automata over the tokens of a tokenizer."""

from __future__ import annotations

import base64
import collections
import dataclasses
import functools
import importlib.util
import json
import pathlib
import zlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import scipy.sparse

from spectr_jax.constraint import Constraint
from spectr_jax.io.bounded_process import BoundedProcess
from spectr_jax.io.json_regex import JSON, either, escaped
from spectr_jax.io.json_schema import schema_regex
from spectr_jax.io.pattern_syntax import whole
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.io.untrusted import named, one_line, parse_json, shown
from spectr_jax.unicode import check_unicode

_SECONDS, _MEMORY = 30, 2**30  # of the process that compiles an expression
_MOST_STATES = 2**16  # of an automaton over bytes
_OBJECT_DEPTH = 3  # levels of objects and lists in `json_schema=True`
_MOST_CELLS = 2**25  # transitions of a table, 128 MiB
_MOST_MERGING = 2**28  # transitions that are looked at to merge states
_MOST_TEXT, _MOST_CHOICES = 2**20, 2**12
_MOST_WORDS, _MOST_IN_WORDS = 64, 2**10  # of `bad_words`; bytes and ids of all together
_LONGEST_WORD = 128  # bytes or ids of one, and bytes of `after`
_SAID_OF_SYNTAX = "it is no expression of Rust's `regex`, which does not look around or back, or repeats too often"
_SCRIPT = pathlib.Path(__file__).with_name('constraint_worker.py')
_MOST_ANSWER = 2**26  # bytes


class ConstraintBusyError(OSError):
  """Compiling a constraint took too much time or memory, which depends on the machine and on what else it does."""


def compile_constraint(
  tokenizer: TokenizerBase,
  *,
  regex: str | None = None,
  json_schema: Mapping[str, Any] | str | bool | None = None,
  choices: Sequence[str] | None = None,
  after: str | None = None,
  bad_words: Sequence[str | Sequence[int]] = (),
  vocab_size: int | None = None,
) -> Constraint:
  """Compiles what continuations must be.

  The id that ends a continuation is no part of the text.

  An expression matches whole texts. Its syntax is that of Rust's `regex`, without assertions that look around. Of a
  JSON schema those texts are allowed that `json_schema.schema_regex` describes: properties in the order of the schema,
  at most one space between two parts.

  With `after` any text comes first, and what follows the first `after` in it is constrained: so an answer behind the
  reasoning that `</think>` ends. A continuation may not end before. Tokens may divide the text `after` in any way;
  names of special tokens in it and in `bad_words` stand for these tokens, too, which are allowed up to there alone.

  Compiling runs `outlines-core` (the extra `grammar`) in a process of its own with at most 30 seconds and 1 GiB.

  Args:
    tokenizer: The target's tokenizer.
    regex: A regular expression.
    json_schema: A JSON schema, parsed or as a text; True for any JSON object.
    choices: Texts, of which a continuation is one.
    after: The text behind which the constraint begins, None for none. Up to two line breaks may precede JSON there.
    bad_words: What continuations never have in them, also without another constraint: texts, however their tokens
      divide them, and sequences of ids.
    vocab_size: V, where the target has more logits than the tokenizer has ids; the ids beyond are never allowed.

  Raises:
    ValueError: Not exactly one of the first three is given, or none without `bad_words`; it cannot be compiled, or has
      something that is not supported; or no text of these tokens is allowed. One line says why.
    ConstraintBusyError: Compiling took more than these seconds or bytes, and may not where the machine has less to do.
  """
  given = {'regex': regex, 'json_schema': json_schema, 'choices': choices}
  names = [name for name, value in given.items() if value is not None]
  words, sequences = _words(bad_words)
  if len(names) != 1 and (names or not (words or sequences)):
    raise ValueError(f'a constraint is one of {", ".join(given)}; got {", ".join(names) or "none"}')
  marker = None if after is None else _encoded(after, 'after')
  if marker and not names:
    raise ValueError(f'after is where a constraint begins, and there is none: give one of {", ".join(given)}')
  narrower: tuple[str, ...] = ()
  expression, name = '', names[0] if names else 'bad_words'
  if choices is not None:
    expression = _of_choices(choices)
  elif json_schema is not None:
    expression, narrower = _of_schema(json_schema)
    expression = expression if marker is None else rf'\n{{0,2}}(?:{expression})'
  elif regex is not None:
    expression = _of_regex(regex)
  if vocab_size is not None and (not isinstance(vocab_size, int | np.integer) or vocab_size < 1):
    raise ValueError(f'vocab_size must be a whole number of at least 1, got {shown(vocab_size)}')
  check_unicode(expression, name)
  if len(expression) > _MOST_TEXT:
    raise ValueError(f'{name} has {len(expression):,} characters, allowed are {_MOST_TEXT:,}')
  size = tokenizer.vocab_size if vocab_size is None else vocab_size
  with named(f'{name} cannot be compiled'):
    made = _of_expression(expression) if names else _Bytes(np.zeros((1, 256), np.int32), *np.ones((2, 1), bool))
    if marker is not None:
      made = _behind(marker, made)
    if words:
      search = _search(words, 256)
      table, first = _both(made.next_state, np.where(search == len(search), -1, search))
      made = _Bytes(table, made.is_final[first], made.is_free[first])
    constraint = _over_tokens(made, tokenizer, size)
    return dataclasses.replace(_without(sequences, constraint), narrower=narrower)


@dataclasses.dataclass(frozen=True)
class _Bytes:
  """An automaton of whole texts over bytes, which begins in state 0."""

  next_state: np.ndarray  # int32 [S, 256], -1 for no way on
  is_final: np.ndarray  # bool [S]
  is_free: np.ndarray  # bool [S], where special tokens may come, each with the bytes of its name


def _encoded(text: Any, what: str) -> bytes:
  """The bytes of a text to look for."""
  if not isinstance(text, str) or not text or '\ufffd' in text:
    raise ValueError(f'{what} must be a text that is not empty and without U+FFFD, got {shown(text)}')
  check_unicode(text, what)
  if (size := len(text.encode())) > _LONGEST_WORD:
    raise ValueError(f'{what} has {size:,} bytes, allowed are {_LONGEST_WORD}')
  return text.encode()


def _words(bad_words: Any) -> tuple[list[bytes], list[tuple[int, ...]]]:
  """The texts and the sequences of ids of `bad_words`."""
  if isinstance(bad_words, str) or not isinstance(bad_words, Sequence) or len(bad_words) > _MOST_WORDS:
    raise ValueError(f'bad_words must be a list of at most {_MOST_WORDS} texts or lists of ids, got {shown(bad_words)}')
  words, sequences = [], []
  for each in bad_words:
    if isinstance(each, str):
      words.append(_encoded(each, 'a text of bad_words'))
    elif isinstance(each, Sequence) and 1 <= len(each) <= _LONGEST_WORD and all(type(i) is int for i in each):
      sequences.append(tuple(each))
    else:
      raise ValueError(f'bad_words must be texts or lists of 1 to {_LONGEST_WORD} ids, got {shown(each)}')
  if (size := sum(map(len, [*words, *sequences]))) > _MOST_IN_WORDS:
    raise ValueError(f'bad_words have {size:,} bytes and ids together, allowed are {_MOST_IN_WORDS:,}')
  return words, sequences


def _search(words: Sequence[Sequence[int]], num_symbols: int) -> np.ndarray:
  """The automaton that finds words in texts of symbols, int32 `[S, num_symbols]`; S where a word is complete.

  A state is the longest beginning of a word that the text ends with (Aho and Corasick 1975).
  """
  words = [tuple(word) for word in words]
  beginnings = sorted({word[:size] for word in words for size in range(len(word))}, key=len)
  numbers = {each: number for number, each in enumerate(beginnings)}
  table, found = np.zeros((len(numbers), num_symbols), np.int32), len(numbers)
  longer, complete = collections.defaultdict(list), collections.defaultdict(list)
  for each in beginnings[1:]:
    longer[each[:-1]].append(each)
  for word in words:
    complete[word[:-1]].append(word[-1])
  for each, row in zip(beginnings, table):
    if each:  # what goes on with no word goes on as after the longest other beginning that the text ends with
      row[:] = table[next(numbers[each[at:]] for at in range(1, len(each) + 1) if each[at:] in numbers)]
    for other in longer[each]:
      row[other[-1]] = found if row[other[-1]] == found else numbers[other]
    row[complete[each]] = found
  return table


def _of_regex(regex: Any) -> str:
  if not isinstance(regex, str):
    raise ValueError(f'regex must be a text, got {shown(regex)}')
  with named(f'regex cannot be compiled, {shown(regex)}'):
    return whole(regex)


def _of_choices(choices: Any) -> str:
  is_several = isinstance(choices, Sequence | Set) and not isinstance(choices, str)
  if not is_several or not choices or not all(isinstance(each, str) and each for each in choices):
    raise ValueError(f'choices must be a list of texts that are not empty, got {shown(choices)}')
  if len(choices) > _MOST_CHOICES:
    raise ValueError(f'there are {len(choices):,} choices, allowed are {_MOST_CHOICES:,}')
  return either([escaped(each) for each in choices])


def _of_schema(schema: Any) -> tuple[str, tuple[str, ...]]:
  if schema is True:
    return JSON.any_object(_OBJECT_DEPTH), ()
  if isinstance(schema, str):
    schema = parse_json(schema, 'the JSON schema')
  try:
    text = json.dumps(schema, allow_nan=False)
    value = json.loads(text)  # in which names that are numbers are texts
  except (TypeError, ValueError, RecursionError):
    raise ValueError('the JSON schema must be a JSON value of finite numbers that is not nested too deeply') from None
  if len(text) > _MOST_TEXT:
    raise ValueError(f'the JSON schema is too large: more than {_MOST_TEXT:,} characters')
  return schema_regex(value)


def _of_expression(expression: str) -> _Bytes:
  next_state, is_final, num_states = _merged(*_automaton(expression))
  return _Bytes(next_state, is_final, np.zeros(num_states, bool))


def _behind(marker: bytes, own: _Bytes) -> _Bytes:
  """The automaton of texts that go on behind the first `marker` in them as `own` says."""
  search = _search([marker], 256)
  first = len(search)  # of the states of `own`
  table = np.where(own.next_state < 0, -1, own.next_state + first)
  is_final, is_free = np.append(np.zeros(first, bool), own.is_final), np.append(np.ones(first, bool), own.is_free)
  return _Bytes(np.concatenate([search, table]).astype(np.int32), is_final, is_free)


def _both(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The automaton of what both `[S1, C]` and `[S2, C]` allow, int32 `[S, C]`, and the first one's state in each."""
  codes, numbers, rows = [0], {0: 0}, []
  for code in codes:  # which grow
    first, second = one[code // len(other)].astype(np.int64), other[code % len(other)]
    rows.append(np.where((first < 0) | (second < 0), -1, first * len(other) + second))
    for new in np.unique(rows[-1]).tolist():
      if new >= 0 and new not in numbers:
        numbers[new] = len(codes)
        codes.append(new)
    if len(codes) * one.shape[1] > _MOST_CELLS:
      raise ValueError(f'its table has more than {_MOST_CELLS:,} transitions')
  known = np.sort(codes)
  number_of = np.append([numbers[code] for code in known.tolist()], -1)
  after = np.stack(rows)
  table = number_of[np.where(after < 0, len(known), np.searchsorted(known, after))]
  return table.astype(np.int32), np.array(codes) // len(other)


def _without(sequences: Sequence[tuple[int, ...]], made: Constraint) -> Constraint:
  """The constraint on continuations that have none of these sequences of ids in them besides."""
  if not sequences:
    return made
  ids = sorted({token for each in sequences for token in each})
  if ids[0] < 0 or ids[-1] >= made.vocab_size:
    raise ValueError(f'bad_words must name ids from 0 to {made.vocab_size - 1}, got {min(ids[0], 0) or ids[-1]}')
  symbol_of = np.zeros(made.vocab_size, np.int32)
  symbol_of[ids] = np.arange(1, len(ids) + 1)
  search = _search([symbol_of[list(each)].tolist() for each in sequences], len(ids) + 1)
  pairs, class_of = np.unique(np.stack([made.class_of, symbol_of]), axis=1, return_inverse=True)
  table, first = _both(made.next_state[:, pairs[0]], np.where(search == len(search), -1, search)[:, pairs[1]])
  return _trimmed(table, made.is_final[first], class_of.reshape(-1))


def _automaton(regex: str) -> tuple[np.ndarray, np.ndarray]:
  """The automaton of whole texts over bytes: int32 `[S, 256]`, -1 for no way on, and bool `[S]`, the final states."""
  if importlib.util.find_spec('outlines_core') is None:
    raise ValueError("constraints need the package outlines-core: pip install 'spectr_jax[grammar]'")
  bounds = {'seconds': _SECONDS, 'memory': _MEMORY, 'most': _MOST_ANSWER}
  try:
    process = BoundedProcess(_SCRIPT, ['outlines_core'], **bounds)
    try:
      answer = process.ask({'regex': regex, 'most_states': _MOST_STATES})
    finally:
      process.stop()
  except ValueError as error:
    raise ConstraintBusyError(f'the constraint cannot be compiled within its bounds: {error}') from error
  if 'refused' in answer:
    said = one_line(answer['refused'])
    if answer.get('is_bound'):
      raise ConstraintBusyError(f'the constraint cannot be compiled within its bounds: {said}')
    raise ValueError(_SAID_OF_SYNTAX if said == 'Failed to build DFA error building NFA' else said)
  is_final = np.zeros(answer['num_states'], bool)
  is_final[answer['finals']] = True
  # Some final states have no way on, and do not count.
  table = zlib.decompressobj().decompress(base64.b64decode(answer['table']), 4 * 1024 * _MOST_STATES)
  return np.frombuffer(table, np.int32).reshape(-1, 256), is_final


@functools.lru_cache(maxsize=4)
def _levels(tokenizer: TokenizerBase) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
  """The tokens' bytes as a tree of beginnings.

  Returns:
    For each depth from 1 on the place of each beginning's parent in the depth above, and its last byte; and int32
    `[V, 2]`, the depth of each token, 0 for one without bytes, and its place there.
  """
  places: list[dict[bytes, int]] = [{b'': 0}]
  found = np.zeros((tokenizer.vocab_size, 2), np.int32)
  for token, content in enumerate(tokenizer.token_contents):
    for depth in range(1, len(content) + 1):
      if depth == len(places):
        places.append({})
      places[depth].setdefault(content[:depth], len(places[depth]))
    found[token] = len(content), places[len(content)][content]
  levels = []
  for above, own in zip(places, places[1:]):
    parents = np.fromiter((above[each[:-1]] for each in own), np.int32, len(own))
    levels.append((parents, np.fromiter((each[-1] for each in own), np.int32, len(own))))
  return levels, found


def _over_tokens(made: _Bytes, tokenizer: TokenizerBase, vocab_size: int) -> Constraint:
  """The constraint of an automaton over bytes.

  A beginning of tokens maps states to states. Few of these maps are different, so each is computed once for every pair
  of a shorter map and a byte, whatever the number of tokens.
  """
  # The last state is the one without a way on.
  next_state, num_states = made.next_state, len(made.next_state)
  step = np.append(np.where(next_state < 0, num_states, next_state), np.full((1, 256), num_states, np.int32), axis=0)
  kinds, kind_of = np.unique(step, axis=1, return_inverse=True)
  kinds, kind_of = np.ascontiguousarray(kinds.T), kind_of.reshape(-1)
  dead = np.full(num_states + 1, num_states, np.int32)
  maps = [dead, np.arange(num_states + 1, dtype=np.int32)]
  numbers = {each.tobytes(): number for number, each in enumerate(maps)}
  levels, tokens = _levels(tokenizer)
  own, of_depths = np.array([1]), [np.array([0])]
  for parents, last in levels:
    pairs, places = np.unique(np.stack([own[parents], kind_of[last]]), axis=1, return_inverse=True)
    after = np.zeros(pairs.shape[1], np.int32)
    for place, (number, kind) in enumerate(pairs.T):
      if number == 0:
        continue
      new = kinds[kind][maps[number]]
      after[place] = numbers.setdefault(new.tobytes(), len(maps))
      if after[place] == len(maps):
        maps.append(new)
        if len(maps) * num_states > _MOST_CELLS:
          raise ValueError(f'its table has more than {_MOST_CELLS:,} transitions')
    own = after[places.reshape(-1)]
    of_depths.append(own)
  map_of = np.zeros(max(vocab_size, len(tokens)), np.int32)
  for depth, of_depth in enumerate(of_depths):
    is_there = np.flatnonzero(tokens[:, 0] == depth)
    map_of[is_there] = of_depth[tokens[is_there, 1]]
  for token, name in tokenizer.special_token_names.items() if made.is_free.any() else ():
    new = np.append(np.where(made.is_free, np.arange(num_states), num_states), num_states).astype(np.int32)
    for byte in name.encode():
      new = step[new, byte]
    map_of[token] = numbers.setdefault(new.tobytes(), len(maps))
    if map_of[token] == len(maps):
      maps.append(new)
  used, class_of = np.unique(map_of[:vocab_size], return_inverse=True)
  table = np.stack([maps[number][:-1] for number in used], axis=1)
  return _trimmed(np.where(table == num_states, -1, table), made.is_final, class_of.reshape(-1))


def _merged(next_state: np.ndarray, is_final: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
  """The automaton with states merged that nothing tells apart, and their number; as it is where that takes too long.

  States are told apart by whether they are final, then round by round by the groups of the states that follow (Moore's
  algorithm, with hashes of 64 bits in place of lists of groups).
  """
  kinds = np.unique(next_state, axis=1)
  group = is_final.astype(np.int64)
  num_groups = len(np.unique(group))
  rng = np.random.default_rng(0)
  for _ in range(_MOST_MERGING // kinds.size):
    hashes = rng.integers(1, 2**62, len(next_state) + 1)
    hashed = hashes[np.append(group, -1)]
    mixed = hashed[:-1] + (hashed[kinds] * (2 * rng.integers(1, 2**62, kinds.shape[1]) + 1)).sum(axis=1)
    _, first, group = np.unique(mixed, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    if len(first) == num_groups:
      break
    num_groups = len(first)
  else:
    return next_state, is_final, len(next_state)
  # The first state's group comes first.
  order = np.argsort(np.arange(num_groups) != group[0], kind='stable')
  numbers = np.append(np.argsort(order), -1)
  merged = numbers[np.append(group, -1)][next_state[first[order]]]
  return merged.astype(np.int32), is_final[first[order]], num_groups


def _trimmed(table: np.ndarray, is_final: np.ndarray, class_of: np.ndarray) -> Constraint:
  """The constraint of the states that the first one leads to and that lead to an end."""
  num_states = len(table)
  states, classes = np.nonzero(table >= 0)
  edges = np.unique(states.astype(np.int64) * num_states + table[states, classes])
  sources, targets = np.append(edges // num_states, np.flatnonzero(is_final)), edges % num_states
  targets = np.append(targets, np.full(is_final.sum(), num_states))
  graph = scipy.sparse.csr_array((np.ones(len(sources)), (sources, targets)), shape=(num_states + 1,) * 2)

  def reached(graph, start: int) -> np.ndarray:
    is_reached = np.zeros(num_states + 1, bool)
    order = scipy.sparse.csgraph.breadth_first_order(graph, start, return_predecessors=False)
    is_reached[order] = True
    return is_reached[:-1]

  is_kept = reached(graph, 0) & reached(graph.T.tocsr(), num_states)
  if not is_kept[0]:
    raise ValueError('no text of these tokens matches')
  numbers = np.append(np.where(is_kept, np.cumsum(is_kept) - 1, -1), -1)
  kept = numbers[table[is_kept]]
  columns, class_of_class = np.unique(kept, axis=1, return_inverse=True)
  return Constraint(class_of_class.reshape(-1)[class_of], columns, is_final[is_kept])
