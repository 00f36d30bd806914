"""What two tokenizers share: by the bytes that tokens stand for and by roles, whatever tokens are spelled like."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hub
import tokenizers
from text_tokenizers import TOKENIZERS
from tokenizers import models

import spectr_jax
from spectr_jax import Model, SamplingParams, TokenTree, fit_draft
from spectr_jax.draft.vocabulary_drafter import VocabularyDrafter
from spectr_jax.io.fit_draft import MOST_IDS, SAMPLE, describe_vocabulary, share_of_mass, share_vocabulary
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.models import table

_TEXT = 'the owl and the end of the oak, é 日本 \t\n'


def _hub(backend, **options):
  return HubTokenizer.from_parts(backend, **{'bos_id': None, 'eos_ids': (41,), 'add_bos': False, **options})


def _shared(draft, target):
  return share_vocabulary(draft, target, num_draft=draft.vocab_size, num_target=target.vocab_size)


def _pairs(vocabulary):
  return [(own, other) for own, other in enumerate(vocabulary.to_target.tolist()) if other >= 0]


def _read(vocabulary, ids):
  """The draft's tokens of ids of the target."""
  counts = vocabulary.num_draft_ids.tolist()
  return [index for each in ids for index in vocabulary.draft_ids[each, : counts[each]].tolist()]


@pytest.mark.parametrize('draft', TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize('target', TOKENIZERS.values(), ids=TOKENIZERS)
def test_shared_tokens_stand_for_the_same_bytes(draft, target):
  vocabulary = _shared(draft, target)
  special = {index: 'special' for index in target.special_token_names}
  pairs = _pairs(vocabulary)
  assert len(pairs) > 8
  for own, other in pairs:
    if other not in special:
      assert draft.token_bytes([own]) == target.token_bytes([other]) != [b'']
  theirs = [content for content in target.token_bytes(range(target.vocab_size)) if content]
  mine = set(draft.token_bytes(range(draft.vocab_size)))
  assert len([other for _, other in pairs if other not in special]) == len(mine & set(theirs))


@pytest.mark.parametrize('draft', TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize('target', TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_draft_reads_the_same_text(draft, target):
  """Also characters of which the target's tokens are a part."""
  ids = _read(_shared(draft, target), target.encode(_TEXT))
  assert draft.decode(ids) == target.decode(target.encode(_TEXT))


def _literal(words):
  """A tokenizer whose tokens are spelled as texts are."""
  found = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
  found.decoder = tokenizers.decoders.Fuse()
  return _hub(found, eos_ids=())


def test_ids_mapped_by_spelling_would_be_caught():
  """A control: Ġ is a space in one vocabulary, a letter in the other; and é is half a character in the first."""
  draft, target = TOKENIZERS['byte level'], _literal(['a', 'Ġ', 'é', ' ', 'b'])
  by_spelling = {draft.token(own): own for own in range(draft.vocab_size)}
  ids = [3, 0, 2, 1]
  text = target.decode(ids)
  assert text == ' aéĠ'
  assert draft.decode(_read(_shared(draft, target), ids)) == text
  assert draft.decode([by_spelling.get(target.token(index), 0) for index in ids]) != text
  assert by_spelling['Ġ'] in dict(_pairs(_shared(draft, target)))
  assert dict(_pairs(_shared(draft, target)))[by_spelling['Ġ']] == 3


def test_special_tokens_are_shared_by_their_roles():
  """Where turns begin and end, then where texts do; of the target's other ends each is read as the draft's first."""
  special = {'<a>': 3, '<turn>': 5, '</turn>': 6, '<end>': 9, '<more>': 11}
  template = "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}</turn>\n{% endfor %}<turn>"
  draft = _hub(tiny_hub.backend(special), bos_id=3, eos_ids=(9,), add_bos=True, chat_template=template)
  target = _hub(tiny_hub.backend(), bos_id=7, eos_ids=(200, 41), chat_template=tiny_hub.CHAT)
  vocabulary = _shared(draft, target)
  pairs = {own: other for own, other in _pairs(vocabulary) if own in special.values()}
  assert pairs == {5: 40, 6: 41, 3: 7, 9: 200}
  assert int(vocabulary.bos_id) == 3
  assert _read(vocabulary, [300]) == draft.encode('<pad>')
  without = _shared(_hub(tiny_hub.backend(special), bos_id=3, eos_ids=(9,)), target)
  assert {own: other for own, other in _pairs(without) if own in special.values()} == {3: 7, 9: 200}
  assert _read(without, [41]) == [9]
  assert int(without.bos_id) == -1


_LLAMA = (
  "<|begin|>{% for m in messages %}<|header|>{{ m['role'] }}<|/header|>\n\n{{ m['content'] }}<|eot|>{% endfor %}"
  '<|header|>assistant<|/header|>\n\n'
)


def _with_names(ids, **options):
  names = ['<|begin|>', '<|end|>', '<|header|>', '<|/header|>', '<|eot|>']
  return _hub(tiny_hub.backend(dict(zip(names, ids))), bos_id=ids[0], chat_template=_LLAMA, **options)


@pytest.mark.parametrize('eos_places', [(1, 4), (4, 1), (4,)])
def test_special_tokens_of_one_name_are_shared(eos_places):
  """Also where the two tokenizers end a text with another one of them first."""
  mine, theirs = (1, 2, 3, 5, 8), (301, 302, 305, 307, 310)
  draft = _with_names(mine, eos_ids=(2, 8))
  target = _with_names(theirs, eos_ids=tuple(theirs[place] for place in eos_places))
  vocabulary = _shared(draft, target)
  assert {own: other for own, other in _pairs(vocabulary) if own in mine} == dict(zip(mine, theirs))
  messages = [{'role': 'system', 'content': 'the owl'}, {'role': 'user', 'content': 'he'}]
  assert _read(vocabulary, target.encode_chat(messages)) == draft.encode_chat(messages)


def test_a_token_is_shared_by_name_where_one_of_both_calls_it_special():
  plain, special = tiny_hub.backend({}), tiny_hub.backend({'<tool>': 300})
  plain.add_tokens([tokenizers.AddedToken('<tool>', normalized=False, special=False)])
  plain, special = _hub(plain, eos_ids=()), _hub(special, eos_ids=())
  index = plain.encode('<tool>')
  assert plain.special_token_names == {}
  assert len(index) == 1
  for draft, target, own, other in ((plain, special, index[0], 300), (special, plain, 300, index[0])):
    vocabulary = _shared(draft, target)
    assert (own, other) in _pairs(vocabulary)
    assert _read(vocabulary, [other]) == [own]


def test_a_template_of_shared_names_takes_as_few_calls_as_with_equal_ids():
  mine, theirs = (1, 2, 3, 5, 8), (301, 302, 305, 307, 310)
  draft, target = _with_names(mine, eos_ids=(8,)), _with_names(theirs, eos_ids=(310,))
  rows = [tokenizer.encode('<|begin|><|header|>a<|/header|>b<|end|>cd<|eot|>fgij') for tokenizer in (draft, target)]
  models = []
  for tokenizer, row in zip((draft, target), rows):
    logits = np.zeros((tokenizer.vocab_size, tokenizer.vocab_size), np.float32)
    logits[row[:-1], row[1:]] = 30
    models.append(table.table_model(jnp.asarray(logits)))
  drafter = fit_draft(models[0], draft, models[1], target)
  options = {'method': 'speculative', 'tree': TokenTree.chains(1, 2), 'max_new_tokens': 12}
  found = spectr_jax.generate(
    jax.random.key(0), models[1], drafter, [rows[1][:1]], sampling=SamplingParams(0.0), **options
  )
  assert found.tokens[0].tolist() == rows[1][1:]
  assert int(found.num_target_calls[0]) == 4  # three tokens each


def test_of_a_token_of_many_ids_the_last_are_read():
  word = 'abcdefghijklm'
  draft, target = TOKENIZERS['byte level'], _literal(['a', word])
  assert draft.decode(_read(_shared(draft, target), [1])) == word[-MOST_IDS:]


def test_of_equal_tokens_the_one_that_texts_are_written_with_is_shared():
  draft, target = TOKENIZERS['spaced'], TOKENIZERS['byte level']
  letter = next(index for index in range(draft.vocab_size) if draft.token(index) == 'a')
  assert dict(_pairs(_shared(draft, target)))[letter] == target.encode('a')[0]


def test_ids_without_a_token_are_read_as_something():
  draft, target = TOKENIZERS['own'], TOKENIZERS['byte level']
  vocabulary = share_vocabulary(draft, target, num_draft=draft.vocab_size, num_target=target.vocab_size + 9)
  assert _read(vocabulary, [target.vocab_size + 3]) == [draft.pad_id]
  fewer = share_vocabulary(draft, target, num_draft=40, num_target=20)
  assert max(_read(fewer, range(20))) < 40


def test_vocabularies_with_nothing_in_common_are_refused():
  with pytest.raises(ValueError, match='^draft and target share no token: no guess of this draft could be kept$'):
    _shared(_literal(['aa', 'bb']), _literal(['cc', 'dd']))


# Drafts of models.


def _model(tokenizer):
  size = tokenizer.vocab_size
  return table.table_model(jnp.asarray(np.random.default_rng(0).normal(size=(size, size)), jnp.float32))


def test_a_draft_is_fitted_to_its_target():
  own, other = TOKENIZERS['own'], TOKENIZERS['byte level']
  target, draft = _model(own), _model(other)
  assert isinstance(fit_draft(target.with_vocab_size(280), own, target, own), Model)
  fitted = fit_draft(draft, other, target, own)
  assert isinstance(fitted, VocabularyDrafter)
  assert fitted.vocab_size == target.vocab_size
  found = describe_vocabulary(fitted, other)
  assert found.pop('share_of_mass') == share_of_mass(fitted, other)
  assert found == {
    'num_shared': fitted.vocabulary.num_shared,
    'num_draft': other.vocab_size,
    'num_target': own.vocab_size,
  }


def test_the_share_of_mass_is_that_of_shared_tokens():
  own, other = TOKENIZERS['own'], TOKENIZERS['byte level']
  draft = _model(other)
  fitted = fit_draft(draft, other, _model(own), own)
  probs = np.exp(np.asarray(draft.params))
  probs /= probs.sum(axis=1, keepdims=True)
  ids = other.encode(SAMPLE)[:128]
  wanted = probs[ids][:, np.asarray(fitted.vocabulary.to_target) >= 0].sum(axis=1).mean()
  assert share_of_mass(fitted, other) == pytest.approx(wanted, rel=1e-5)
  assert wanted < 1
