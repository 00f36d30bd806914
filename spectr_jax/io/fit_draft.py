"""A draft for a target with another tokenizer: what the two vocabularies share, by the bytes that tokens stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.draft import Drafter, SharedVocabulary, vocabulary_drafter
from spectr_jax.draft.vocabulary_drafter import VocabularyDrafter
from spectr_jax.io.tokenizer import TokenizerBase, first_difference
from spectr_jax.model import Model

# The most of the draft's tokens that one of the target's stands for; of more, the last ones.
MOST_IDS = 8
_LONGEST = 32  # bytes of a token that is looked for where the draft's tokenizer gives other bytes
_QUESTION = 'owl'
# A text of several kinds, to see how much of the draft's mass the target's tokens have.
SAMPLE = (
  'The owl lives in old trees near the river, and hunts at night. In 1987, about 2,400 pairs were counted; today there'
  ' are fewer than half as many. "Why is that?" she asked. The answer has three parts.\n\n1. Fields are larger, and'
  ' hedges are gone.\n2. Winters are warmer, so that mice move elsewhere.\n\ndef area(radius):\n    """Returns the area'
  ' of a circle."""\n    return math.pi * radius ** 2\n'
)
_MOST_OF_SAMPLE = 128


def _roles(tokenizer: TokenizerBase) -> list[tuple[str, int]]:
  """Special tokens by what they do: where a turn of a conversation begins and ends, and where a text does."""
  roles = []
  if getattr(tokenizer, 'chat_template', None) is not None:
    try:
      ids = tokenizer.encode_chat([{'role': 'user', 'content': _QUESTION}])
    except ValueError:  # templates may want more of a conversation
      ids = []
    special = tokenizer.special_token_names
    end = next((i for i in range(len(ids)) if _QUESTION in tokenizer.decode(ids[: i + 1])), len(ids))
    before, behind = ([index for index in part if index in special] for part in (ids[:end], ids[end:]))
    roles = [('turn', each) for each in before[-1:]] + [('end of turn', each) for each in behind[:1]]
  if tokenizer.bos_id is not None:
    roles.append(('bos', tokenizer.bos_id))
  return roles + [(f'eos {place}', index) for place, index in enumerate(tokenizer.eos_ids)]


def _by_bytes(tokenizer: TokenizerBase, contents: Sequence[bytes]) -> dict[bytes, int]:
  """The id of each text that a token stands for; of several the one spelled with fewest characters, then the lowest.

  So a letter stands before the token of its byte, as in what tokenizers write.
  """
  best: dict[bytes, tuple[int, int]] = {}
  for index, content in enumerate(contents):
    if content:
      own = len(tokenizer.token(index) or ''), index
      best[content] = min(best.get(content, own), own)
  return {content: index for content, (_, index) in best.items()}


def _spelled(content: bytes, ids: Mapping[bytes, int]) -> list[int]:
  """The tokens of some bytes, the longest that fit from left to right; bytes that are in none are left out."""
  tokens, start = [], 0
  while start < len(content):
    for end in range(min(len(content), start + _LONGEST), start, -1):
      if (index := ids.get(content[start:end])) is not None:
        tokens.append(index)
        start = end
        break
    else:
      start += 1
  return tokens


def _encoded(
  tokenizer: TokenizerBase, texts: Sequence[bytes], own: Sequence[bytes], ids: Mapping[bytes, int]
) -> list[list[int]]:
  """The tokens of each text, as the tokenizer encodes it, unless its rules or half a character change the bytes."""

  def joined(row):
    return b''.join(own[index] for index in row if index < len(own))

  rows = tokenizer.encode_batch([text.decode(errors='replace') for text in texts])
  return [row if joined(row) == text else _spelled(text, ids) for text, row in zip(texts, rows)]


def _same_names(
  names: Mapping[int, str], ids: Mapping[bytes, int], own_names: Mapping[int, str], own: Mapping[bytes, int]
) -> list[tuple[int, int | None]]:
  """The target's and the draft's tokens of one name, of which one at least is special.

  Arguments are the names of the target's special tokens and the ids of its other tokens by bytes, and the draft's.
  """
  by_name = {name: index for index, name in own_names.items()}
  pairs = [(index, by_name.get(name, own.get(name.encode()))) for index, name in names.items()]
  are_special = set(names.values())
  plain = [(ids.get(name.encode()), mine) for name, mine in by_name.items() if name not in are_special]
  return pairs + [(index, mine) for index, mine in plain if index is not None]


def share_vocabulary(
  draft: TokenizerBase, target: TokenizerBase, *, num_draft: int, num_target: int
) -> SharedVocabulary:
  """What two vocabularies share.

  A token is shared if it stands for the same bytes in both, whatever it is spelled like. A special token is shared with
  the token of the same name, else with the one of the same role: it begins or ends a turn of a conversation or a text.
  Of several tokens with the same bytes one in each vocabulary is shared. All other tokens of the target are read as the
  draft's tokenizer encodes their text, by the last `MOST_IDS` tokens if there are more; special tokens as their names.

  Args:
    draft: The draft's tokenizer.
    target: The target's.
    num_draft, num_target: The ids that the models know, which may be more than the tokenizers have.

  Raises:
    ValueError: They have no token in common.
  """
  own = draft.token_bytes(range(min(draft.vocab_size, num_draft)))
  theirs = target.token_bytes(range(min(target.vocab_size, num_target)))
  ids, target_ids = _by_bytes(draft, own), _by_bytes(target, theirs)
  to_target = np.full(num_draft, -1, np.int32)
  for content, index in target_ids.items():
    if content in ids:
      to_target[ids[content]] = index
  names, own_names = target.special_token_names, draft.special_token_names
  roles = dict(_roles(draft))
  last = roles.get('eos 0')
  pairs = _same_names(names, target_ids, own_names, ids)
  pairs += [(index, roles.get(role, last if role.startswith('eos') else None)) for role, index in _roles(target)]
  pairs = [(index, mine) for index, mine in pairs if index < num_target and mine is not None and mine < num_draft]
  read: dict[int, list[int]] = {}
  taken = set(to_target[to_target >= 0].tolist())
  for index, mine in pairs:
    if to_target[mine] < 0 and index not in taken:
      to_target[mine] = index
      taken.add(index)
    read.setdefault(index, [mine])
  missing = [index for index in range(len(theirs)) if index not in taken and index not in read]
  texts = [theirs[index] or names.get(index, '').encode() for index in missing]
  read |= dict(zip(missing, _encoded(draft, texts, own, ids)))
  nothing = [draft.pad_id if draft.pad_id < num_draft else 0]
  rows = [read.get(index, nothing)[-MOST_IDS:] or nothing for index in range(num_target)]
  rows = [row if max(row) < num_draft else nothing for row in rows]
  bos_id = draft.bos_id if draft.add_bos and draft.bos_id is not None and draft.bos_id < num_draft else None
  return SharedVocabulary.make(to_target, rows, bos_id=bos_id)


def fit_draft(draft: Model, draft_tokenizer: TokenizerBase, target: Model, tokenizer: TokenizerBase) -> Model | Drafter:
  """A draft for a target, whatever its tokenizer.

  Args:
    draft: A model, with its tokenizer `draft_tokenizer`.
    draft_tokenizer: As `load_model` gives it.
    target: The target, with its tokenizer `tokenizer`.
    tokenizer: As `load_model` gives it.

  Returns:
    The draft itself, with logits for the target's ids, if ids mean the same in both. Otherwise a drafter that guesses
    the tokens that both have, see `vocabulary_drafter`.

  Raises:
    ValueError: The vocabularies have no token in common.
  """
  if first_difference(tokenizer, draft_tokenizer) is None:
    return draft.with_vocab_size(target.vocab_size)
  sizes = {'num_draft': draft.vocab_size, 'num_target': target.vocab_size}
  return vocabulary_drafter(draft, share_vocabulary(draft_tokenizer, tokenizer, **sizes))


@jax.jit
def _share_of_mass(model: Model, is_shared: jax.Array, tokens: jax.Array) -> jax.Array:
  size = tokens.shape[1]
  causal, positions = jnp.tril(jnp.ones((size, size), bool)), jnp.arange(size, dtype=jnp.int32)[None]
  logits = model.apply(tokens, positions, causal, model.init_cache_fn(1, 1)).logits
  return jnp.mean(jnp.sum(jnp.where(is_shared, jax.nn.softmax(logits.astype(jnp.float32)), 0), axis=-1))


def share_of_mass(drafter: VocabularyDrafter, tokenizer: TokenizerBase, text: str = SAMPLE) -> float:
  """The mean share of the draft's own distributions that is on shared tokens, from 0 to 1.

  Args:
    drafter: The drafter.
    tokenizer: The draft's tokenizer.
    text: A text, whose first 128 tokens are read.
  """
  limit = drafter.model.context_length or _MOST_OF_SAMPLE
  ids = tokenizer.encode_prompt(text)[: min(_MOST_OF_SAMPLE, limit)]
  is_shared = drafter.vocabulary.to_target >= 0
  return float(_share_of_mass(drafter.model, is_shared, jnp.asarray([ids], jnp.int32)))


def describe_vocabulary(drafter: VocabularyDrafter, tokenizer: TokenizerBase) -> dict[str, Any]:
  """The sizes of both vocabularies, the tokens in common and their share of the draft's mass, as JSON values."""
  return drafter.vocabulary.describe() | {'share_of_mass': share_of_mass(drafter, tokenizer)}
