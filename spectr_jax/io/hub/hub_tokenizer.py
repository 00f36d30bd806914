"""Tokenizers of public models, with the special tokens and the chat template that their files name."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from etils import epath

from spectr_jax.io import untrusted
from spectr_jax.io.backend import Backend, guarded
from spectr_jax.io.hub.chat_template import ChatTemplate, mark_special, render_marked
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.io.tokenizer_file import FLAGS_OF_ADDED, MOST_ID, TOKEN, TOKEN_ID, read_backend
from spectr_jax.io.untrusted import FLAG, TEXT, either, list_of, map_of, object_of, read_object, read_text, shown, whole
from spectr_jax.unicode import check_unicode


class HubTokenizer(TokenizerBase):
  """The tokenizer of a public model. Its `chat_template` is None if the model has none.

  Names of special tokens in a text are those tokens, as everywhere with such models. In messages of a conversation they
  are text: only the template can end a turn or begin one.
  """

  chat_template: ChatTemplate | None

  @classmethod
  def from_parts(
    cls,
    backend: tokenizers.Tokenizer | Backend,
    *,
    bos_id: int | None,
    eos_ids: Sequence[int],
    add_bos: bool,
    chat_template: str | None = None,
    pad_id: int | None = None,
    special_tokens: Mapping[str, str] | None = None,
    tool_template: str | None = None,
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
      tool_template: The chat template where there are tools, None for the same.

    Raises:
      ValueError: The ids are not those of a vocabulary.
    """
    backend = Backend(backend)
    for index in (bos_id, pad_id, *eos_ids):
      if index is not None and not TOKEN_ID.is_valid(index):
        raise ValueError(
          f'ids of special tokens must be whole numbers of at least 0 and at most {MOST_ID}, got {shown(index)}'
        )
    if add_bos and (bos_id is None or backend.id_to_token(bos_id) is None):
      raise ValueError(f'prompts are to begin with a bos token, and the tokenizer has none of id {bos_id}')
    backend.no_truncation()
    backend.no_padding()
    if special_tokens is None:
      ids = {'bos_token': bos_id, 'eos_token': eos_ids[0] if eos_ids else None}
      found = ((name, backend.id_to_token(index)) for name, index in ids.items() if index is not None)
      special_tokens = {name: token for name, token in found if token is not None}
    # Files may name special tokens that their vocabulary takes for words.
    special = {None, *(index for index, token in backend.get_added_tokens_decoder().items() if token.special)}
    words = [token for token in special_tokens.values() if backend.token_to_id(token) not in special]
    backend.add_special_tokens([tokenizers.AddedToken(word, normalized=False) for word in words])
    if pad_id is None:
      pad_id = eos_ids[0] if eos_ids and backend.id_to_token(eos_ids[0]) is not None else 0
    result = cls(backend)
    result.pad_id, result.bos_id, result.add_bos = pad_id, bos_id, add_bos
    result.eos_ids = tuple(dict.fromkeys(eos_ids))
    result.chat_template = None if chat_template is None else ChatTemplate(chat_template, special_tokens, tool_template)
    return result

  @functools.cached_property
  def vocab_size(self) -> int:
    """The largest id plus one. Ids may be missing, and models may have logits for more."""
    return _num_ids(self._backend)

  @functools.cached_property
  def fingerprint(self) -> str:
    """The first 16 hexadecimal digits of a SHA-256 of all ids and their tokens."""
    content = json.dumps(sorted((index, token) for token, index in self._backend.get_vocab().items()))
    return hashlib.sha256(content.encode()).hexdigest()[:16]

  def token_text(self, index: int) -> str:
    """The text of one id; special tokens by their names, and ⟨id⟩ for an id without a token."""
    if self.token(index) is None:
      return f'⟨{index}⟩'
    return self.special_token_names.get(index) or self.decode([index])

  def encode_chat(
    self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
  ) -> list[int]:
    """Encodes a conversation up to where the model answers; messages and tools as for `ChatTemplate.render`.

    The ids are those of the rendered template, which writes a bos where the model wants one. Special tokens that
    messages spell are encoded as text, see `render_marked`.

    Raises `ValueError` if the model has no chat template, its template refuses the conversation or writes nothing, a
    message holds no text or invalid Unicode, or a special token in a message cannot be told from the template's.
    """
    if self.chat_template is None:
      return super().encode_chat(messages, tools)
    for text in (text for message in messages for text in message.values() if isinstance(text, str)):
      check_unicode(text, 'a message')
    marked = render_marked(self.chat_template, messages, self._marks, tools)
    if marked is None:
      ids = self.encode(self.chat_template.render(messages, tools))
    else:
      ids = self._marked_backend.encode(marked, add_special_tokens=False).ids
    if not ids:
      raise ValueError('the chat template writes nothing for this conversation')
    return ids

  def save(self, folder: epath.PathLike) -> None:
    """Writes the files that `load_hub_tokenizer` reads: `tokenizer.json`, `tokenizer_config.json` and
    `generation_config.json`.
    """
    folder, template = epath.Path(folder), self.chat_template
    ids = {'bos_token': self.bos_id, 'eos_token': next(iter(self.eos_ids), None), 'pad_token': self.pad_id}
    named = {name: token for name, index in ids.items() if index is not None and (token := self.token(index))}
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'add_bos_token': self.add_bos, **named}
    if template is not None:
      named_sources = (('default', template.source), ('tool_use', template.tool_source))
      several = [{'name': name, 'template': source} for name, source in named_sources if source is not None]
      config |= template.special_tokens | {'chat_template': several if len(several) > 1 else template.source}
    (folder / 'tokenizer.json').write_text(self._content())
    (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=2) + '\n')
    stops = {'bos_token_id': self.bos_id, 'eos_token_id': list(self.eos_ids)}
    (folder / 'generation_config.json').write_text(json.dumps(stops) + '\n')

  def _content(self) -> str:
    """`tokenizer.json` with rules that begin a text as prompts do."""
    content = self._backend.to_str()
    wanted = self.bos_id if self.add_bos else None
    if _put_in_front(self._backend) == wanted:
      return content
    rule = None if wanted is None else _putting_in_front(self._backend.id_to_token(wanted), wanted)
    return json.dumps({**json.loads(content), 'post_processor': rule})

  @functools.cached_property
  def _marks(self) -> dict[str, str]:
    return mark_special(self.special_token_names.values())

  @functools.cached_property
  def _marked_backend(self) -> Backend:
    """The same vocabulary and rules with marks in place of special tokens."""
    name, rewrite = self._backend.name, self._backend.rewrite
    spec, marks = json.loads(guarded(name, self._backend.tokenizer.to_str)), self._marks
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
    return Backend(guarded(name, tokenizers.Tokenizer.from_str, json.dumps(spec)), name, rewrite)


def _num_ids(backend: Backend) -> int:
  return max(backend.get_vocab().values()) + 1


def _put_in_front(backend: Backend) -> int | None:
  """The one token that the tokenizer's rules put in front of a text, or None."""
  encoding = backend.encode('a')
  is_added = encoding.special_tokens_mask
  return encoding.ids[0] if is_added[:1] == [1] and is_added[1:2] != [1] else None


def _putting_in_front(token: str, index: int) -> dict[str, Any]:
  """The rule of `tokenizer.json` that puts a token in front of a text."""
  first, text = {'SpecialToken': {'id': token, 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}
  return {
    'type': 'TemplateProcessing',
    'single': [first, text],
    'pair': [first, text, {'Sequence': {'id': 'B', 'type_id': 1}}],
    'special_tokens': {token: {'id': token, 'ids': [index], 'tokens': [token]}},
  }


_NAMED = ('bos_token', 'eos_token', 'unk_token', 'pad_token', 'sep_token', 'cls_token', 'mask_token')
_MOST_STOPS = 1024
# A token by its name, with more about it or without.
_TOKEN = either(TOKEN, object_of({'content': TOKEN}))
_NAMES = dict.fromkeys(_NAMED, _TOKEN)
_IDS = {'bos_token_id': TOKEN_ID, 'eos_token_id': either(TOKEN_ID, list_of(TOKEN_ID, _MOST_STOPS))}
_OF_MODEL = _IDS | {'vocab_size': whole(1)}
_FILES = {
  'tokenizer_config': {
    **_NAMES,
    'add_bos_token': FLAG,
    'added_tokens_decoder': map_of(object_of({'content': TOKEN, **dict.fromkeys(FLAGS_OF_ADDED, FLAG)})),
    # One template, or several with names.
    'chat_template': either(TEXT, list_of(object_of({'name': TEXT, 'template': TEXT}), 64)),
  },
  'special_tokens_map': _NAMES,
  'config': _OF_MODEL | {'text_config': object_of(_OF_MODEL)},
  'generation_config': _IDS,
}


def _content(token: str | dict[str, Any], path: epath.Path, name: str) -> str:
  """The name of a token that may be an object."""
  content = token if isinstance(token, str) else token.get('content')
  if content is None:
    raise ValueError(f'{path}: {name} has no content')
  return content


def _read_backend(folder: epath.Path, added: Mapping[str, Any]) -> Backend:
  """Reads `tokenizer.json`, and adds the tokens by id that only `tokenizer_config.json` has."""
  path, config = folder / 'tokenizer.json', folder / 'tokenizer_config.json'
  if not path.exists():
    raise ValueError(f'no tokenizer at {path}: expected the file that the tokenizers library writes')
  backend = read_backend(path)
  wrong = [index for index in added if not re.fullmatch('[0-9]{1,9}', index)]
  if wrong:
    raise ValueError(f'{config}: added_tokens_decoder must have tokens by id, got the id {shown(wrong[0])}')
  for index, token in sorted(added.items(), key=lambda entry: int(entry[0])):
    content = _content(token, config, f'added_tokens_decoder: {index}')
    if backend.token_to_id(content) is not None:
      continue
    flags = {name: token[name] for name in FLAGS_OF_ADDED if token.get(name) is not None}
    backend.add_tokens([tokenizers.AddedToken(content, **flags)])
    if backend.token_to_id(content) != int(index):
      raise ValueError(f'{path} has no room for {content!r}, which tokenizer_config.json gives id {index}')
  return backend


def _ids_of(path: epath.Path, content: Mapping[str, Any], name: str, num_ids: int) -> list[int]:
  """The ids that a field of a file has, one or several; a warning names those that are beyond the vocabulary."""
  value = content.get(name)
  ids = [] if value is None else [value] if isinstance(value, int) else value
  beyond = [index for index in ids if index >= num_ids]
  if beyond:
    warnings.warn(f'{path}: {name} {shown(beyond)} is beyond the {num_ids} ids of the model: left out', stacklevel=3)
  return [index for index in ids if index < num_ids]


def load_hub_tokenizer(folder: epath.PathLike) -> HubTokenizer:
  """Reads the tokenizer of a folder as the hub serves it.

  The folder has `tokenizer.json`, and may have `tokenizer_config.json`, `special_tokens_map.json`,
  `generation_config.json`, `config.json` and `chat_template.jinja`. Text ends at the tokenizer's `eos_token` and at the
  ids of `generation_config.json`, or of `config.json` if that says nothing; ids beyond the vocabulary are left out,
  with a warning. Prompts begin with the token that the rules of `tokenizer.json` put in front of a text, whatever
  `add_bos_token` says: Transformers 5 reads them so.

  A missing or damaged file raises a `ValueError` that names it.
  """
  folder = epath.Path(folder)
  paths = {name: folder / f'{name}.json' for name in _FILES}
  read = {name: read_object(path, _FILES[name]) if path.exists() else {} for name, path in paths.items()}
  if whole_model := read['config']:  # what a multimodal one says of its text model stands apart
    said = {name: value for name, value in whole_model.items() if value is not None}
    read['config'] = {**(said.get('text_config') or {}), **said}
  config, model, generation = (read[name] for name in ('tokenizer_config', 'config', 'generation_config'))
  backend = _read_backend(folder, config.get('added_tokens_decoder') or {})
  file, template, tool_template = folder / 'chat_template.jinja', config.get('chat_template'), None
  if file.exists():
    template = read_text(file)
  elif isinstance(template, list):  # several with names
    several = {entry.get('name'): entry.get('template') for entry in template}
    template, tool_template = several.get('default'), several.get('tool_use')
  stored = {
    name: (read[file][name], paths[file])
    for name in _NAMED
    for file in ('special_tokens_map', 'tokenizer_config')
    if name in read[file]
  }
  named = {name: _content(token, path, name) for name, (token, path) in stored.items() if token is not None}
  ids = {name: backend.token_to_id(token) for name, token in named.items()}
  for name in ('bos_token', 'eos_token'):
    if name in ids and ids[name] is None:
      raise ValueError(f'{folder}: the {name} {named[name]!r} is not a token of tokenizer.json')
  num_ids = max(_num_ids(backend), model.get('vocab_size') or MOST_ID + 1)
  bos_id = ids.get('bos_token')
  if 'bos_token' not in stored:
    bos_id = next(iter(_ids_of(paths['config'], model, 'bos_token_id', num_ids)), None)
  stops = [ids['eos_token']] if 'eos_token' in ids else []
  file = 'generation_config' if 'eos_token_id' in generation else 'config'
  stops += _ids_of(paths[file], read[file], 'eos_token_id', num_ids)
  first = _put_in_front(backend)
  with untrusted.named(folder):
    return HubTokenizer.from_parts(
      backend,
      bos_id=bos_id if first is None else first,
      eos_ids=stops,
      add_bos=first is not None,
      chat_template=template,
      tool_template=tool_template,
      pad_id=ids.get('pad_token'),
      special_tokens={name: token for name, token in named.items() if ids[name] is not None},
    )
