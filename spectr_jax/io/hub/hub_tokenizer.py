"""Tokenizers of public models, with the special tokens and the chat template that their files name."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from etils import epath

from spectr_jax.io.hub.chat_template import ChatTemplate, mark_special, render_marked
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.unicode import check_unicode


class HubTokenizer(TokenizerBase):
  """The tokenizer of a public model.

  Names of special tokens in a text are those tokens, as everywhere with such models. In messages of a conversation they
  are text: only the template can end a turn or begin one.

  Attributes:
    pad_id: Id that fills rows behind their text.
    bos_id: Id that begins a text, None if there is none.
    eos_ids: Ids that end a text.
    add_bos: Whether a prompt begins with `bos_id`.
    chat_template: The chat template, None if the model has none.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    *,
    pad_id: int,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
    add_bos: bool,
    chat_template: ChatTemplate | None,
  ):
    super().__init__(backend)
    self.pad_id, self.bos_id, self.eos_ids, self.add_bos = pad_id, bos_id, eos_ids, add_bos
    self.chat_template = chat_template
    added = backend.get_added_tokens_decoder()
    self._special = {index: token.content for index, token in added.items() if token.special}

  @classmethod
  def from_parts(
    cls,
    backend: tokenizers.Tokenizer,
    *,
    bos_id: int | None,
    eos_ids: Sequence[int],
    add_bos: bool,
    chat_template: str | None = None,
    pad_id: int | None = None,
    special_tokens: Mapping[str, str] | None = None,
  ) -> HubTokenizer:
    """Puts a tokenizer together.

    Args:
      backend: Vocabulary and rules. It belongs to the result from now on, which changes it.
      bos_id: Id that begins a text, None if there is none.
      eos_ids: Ids that end a text, the tokenizer's own first.
      add_bos: Whether a prompt begins with `bos_id`.
      chat_template: The Jinja text of the chat template, None if there is none.
      pad_id: Id that fills rows, None for the first of `eos_ids`.
      special_tokens: Special tokens by the names that templates have for them; default `bos_token` and `eos_token`.
        Each is a token of the vocabulary.

    Raises:
      ValueError: The ids are not those of a vocabulary.
    """
    named = [] if bos_id is None else [bos_id]
    for index in (*named, *eos_ids):
      if not isinstance(index, int) or index < 0:
        raise ValueError(f'ids of special tokens must be whole numbers of at least 0, got {index!r}')
    if add_bos and (bos_id is None or backend.id_to_token(bos_id) is None):
      raise ValueError(f'prompts are to begin with a bos token, and the tokenizer has none of id {bos_id}')
    backend.no_truncation()
    backend.no_padding()
    if special_tokens is None:
      ids = {'bos_token': bos_id, 'eos_token': eos_ids[0] if eos_ids else None}
      tokens = {name: backend.id_to_token(index) for name, index in ids.items() if index is not None}
      special_tokens = {name: token for name, token in tokens.items() if token is not None}
    # Files may name special tokens that their vocabulary takes for words.
    special = {None, *(index for index, token in backend.get_added_tokens_decoder().items() if token.special)}
    words = [token for token in special_tokens.values() if backend.token_to_id(token) not in special]
    backend.add_special_tokens([tokenizers.AddedToken(word, normalized=False) for word in words])
    if pad_id is None:
      pad_id = eos_ids[0] if eos_ids and backend.id_to_token(eos_ids[0]) is not None else 0
    template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)
    unique = tuple(dict.fromkeys(eos_ids))
    return cls(backend, pad_id=pad_id, bos_id=bos_id, eos_ids=unique, add_bos=add_bos, chat_template=template)

  @functools.cached_property
  def _ids(self) -> dict[str, int]:
    return self._backend.get_vocab()

  @functools.cached_property
  def vocab_size(self) -> int:
    """The largest id plus one. Ids may be missing, and models may have logits for more."""
    return max(self._ids.values()) + 1

  @functools.cached_property
  def fingerprint(self) -> str:
    """The first 16 hexadecimal digits of a SHA-256 of all ids and their tokens."""
    content = json.dumps(sorted((index, token) for token, index in self._ids.items()))
    return hashlib.sha256(content.encode()).hexdigest()[:16]

  def token_text(self, index: int) -> str:
    """The text of one id; special tokens by their names, and ⟨id⟩ for an id without a token."""
    if self.token(index) is None:
      return f'⟨{index}⟩'
    return self._special.get(index) or self.decode([index])

  def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Encodes a conversation up to where the model answers.

    The ids are those of the rendered template, which writes a bos where the model wants one. Special tokens that
    messages spell are encoded as text, see `render_marked`.

    Args:
      messages: The messages, each with the texts `role` and `content`.

    Raises:
      ValueError: The model has no chat template, its template refuses the conversation or writes nothing, a message is
        not valid Unicode, or a special token in a message cannot be told from the template's.
    """
    if self.chat_template is None:
      return super().encode_chat(messages)
    for text in (text for message in messages for text in message.values()):
      check_unicode(text, 'a message')
    marked = render_marked(self.chat_template, messages, self._marks)
    if marked is None:
      ids = self.encode(self.chat_template.render(messages))
    else:
      ids = self._marked_backend.encode(marked, add_special_tokens=False).ids
    if not ids:
      raise ValueError('the chat template writes nothing for this conversation')
    return ids

  def save(self, folder: epath.PathLike) -> None:
    """Writes the files that `load_hub_tokenizer` reads: `tokenizer.json`, `tokenizer_config.json` and
    `generation_config.json`.

    Args:
      folder: The folder, which exists.
    """
    folder, template = epath.Path(folder), self.chat_template
    ids = {'bos_token': self.bos_id, 'eos_token': next(iter(self.eos_ids), None), 'pad_token': self.pad_id}
    named = {name: self.token(index) for name, index in ids.items() if index is not None}
    named = {name: token for name, token in named.items() if token is not None}
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'add_bos_token': self.add_bos, **named}
    if template is not None:
      config |= template.special_tokens | {'chat_template': template.source}
    (folder / 'tokenizer.json').write_text(self._backend.to_str())
    (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=2) + '\n')
    stops = {'bos_token_id': self.bos_id, 'eos_token_id': list(self.eos_ids)}
    (folder / 'generation_config.json').write_text(json.dumps(stops) + '\n')

  @functools.cached_property
  def _marks(self) -> dict[str, str]:
    return mark_special(self._special.values())

  @functools.cached_property
  def _marked_backend(self) -> tokenizers.Tokenizer:
    """The same vocabulary and rules, except that special tokens are spelled as their marks."""
    spec, marks = json.loads(self._backend.to_str()), self._marks
    for token in spec['added_tokens']:
      if token['special'] and token['normalized'] and spec['normalizer'] is not None:
        raise ValueError(
          f'a message spells a special token, and this tokenizer looks for {token["content"]!r} in texts that it has'
          ' changed, where the two cannot be told apart: write it otherwise'
        )
      if token['special']:
        token['content'] = marks[token['content']]
    model = spec['model']
    vocab = model['vocab']
    if isinstance(vocab, dict):
      model['vocab'] = {marks.get(token, token): index for token, index in vocab.items()}
    else:  # of Unigram models
      model['vocab'] = [[marks.get(token, token), score] for token, score in vocab]
    if model.get('unk_token') is not None:
      model['unk_token'] = marks.get(model['unk_token'], model['unk_token'])
    spec['post_processor'] = None  # adds special tokens by their names
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


_NAMED = ('bos_token', 'eos_token', 'unk_token', 'pad_token', 'sep_token', 'cls_token', 'mask_token')


def _read_json(path: epath.Path) -> dict[str, Any]:
  """The object of a JSON file, empty if there is no such file."""
  if not path.exists():
    return {}
  try:
    content = json.loads(path.read_text())
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is not JSON: {error}') from error
  if not isinstance(content, dict):
    raise ValueError(f'{path} must be a JSON object')
  return content


def _read_backend(path: epath.Path, added: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """Reads tokenizer.json, and adds the tokens by id that only tokenizer_config.json has."""
  if not path.exists():
    raise ValueError(f'no tokenizer at {path}: expected the file that the tokenizers library writes')
  try:
    backend = tokenizers.Tokenizer.from_str(path.read_text())
  except Exception as error:  # the backend raises bare Exception
    raise ValueError(f'{path} is not a readable tokenizer file: {error}') from error
  flags = 'single_word', 'lstrip', 'rstrip', 'normalized', 'special'
  for index, token in sorted(added.items(), key=lambda entry: int(entry[0])):
    if backend.token_to_id(token['content']) is not None:
      continue
    backend.add_tokens([tokenizers.AddedToken(token['content'], **{f: token[f] for f in flags if f in token})])
    if backend.token_to_id(token['content']) != int(index):
      raise ValueError(f'{path} has no room for {token["content"]!r}, which tokenizer_config.json gives id {index}')
  return backend


def _chosen_template(found: str | list[dict[str, str]] | None) -> str | None:
  """The template of a config, which has one or several with names: that of the name `default`."""
  if isinstance(found, list):
    return {entry['name']: entry['template'] for entry in found}.get('default')
  return found


def _as_ids(value: int | list[int] | None) -> list[int]:
  return [] if value is None else [value] if isinstance(value, int) else list(value)


def load_hub_tokenizer(folder: epath.PathLike) -> HubTokenizer:
  """Reads the tokenizer of a folder as the hub serves it.

  Text ends at the tokenizer's `eos_token` and at the ids of `generation_config.json`, or of `config.json` if that says
  nothing. Prompts begin with bos if `tokenizer_config.json` says so (`add_bos_token`), or if that says nothing and the
  rules of `tokenizer.json` add it.

  Args:
    folder: Has `tokenizer.json`, and may have `tokenizer_config.json`, `special_tokens_map.json`,
      `generation_config.json`, `config.json` and `chat_template.jinja`.

  Raises:
    ValueError: A file is missing or damaged; the message names it.
  """
  folder = epath.Path(folder)
  config, special, model, generation = (
    _read_json(folder / f'{name}.json')
    for name in ('tokenizer_config', 'special_tokens_map', 'config', 'generation_config')
  )
  try:
    backend = _read_backend(folder / 'tokenizer.json', config.get('added_tokens_decoder') or {})
    template = folder / 'chat_template.jinja'
    source = template.read_text() if template.exists() else _chosen_template(config.get('chat_template'))
    found = {name: values[name] for name in _NAMED for values in (special, config) if name in values}
    named = {k: v['content'] if isinstance(v, dict) else v for k, v in found.items() if v is not None}
    ids = {name: backend.token_to_id(token) for name, token in named.items()}
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'{folder}/tokenizer_config.json is damaged: {error!r}') from error
  for name in ('bos_token', 'eos_token'):
    if name in ids and ids[name] is None:
      raise ValueError(f'{folder}: the {name} {named[name]!r} is not a token of tokenizer.json')
  bos_id = ids.get('bos_token') if 'bos_token' in found else model.get('bos_token_id')
  stops = _as_ids(ids.get('eos_token'))
  stops += _as_ids(generation.get('eos_token_id', model.get('eos_token_id')))
  add_bos = config.get('add_bos_token')
  if add_bos is None:
    add_bos = bos_id is not None and backend.encode('a').ids[:1] == [bos_id]
  try:
    return HubTokenizer.from_parts(
      backend,
      bos_id=bos_id,
      eos_ids=stops,
      add_bos=bool(add_bos),
      chat_template=source,
      pad_id=ids.get('pad_token'),
      special_tokens={name: token for name, token in named.items() if ids[name] is not None},
    )
  except ValueError as error:
    raise ValueError(f'{folder}: {error}') from error
