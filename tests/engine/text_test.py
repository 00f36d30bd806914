"""Tests of `generate_text`, with letters as tokens."""

import dataclasses
import types

import jax
import numpy as np
import pytest

import spectr_jax
from spectr_jax import METHODS, Constraint, SamplingParams, TokenTree, auto, generate_text, text
from tests.slow import slow


@dataclasses.dataclass(frozen=True)
class _Letters:
  """Each of the letters a to f is a token; f ends a text, and has no text of its own, but the name <end>."""

  eos_ids: tuple[int, ...] = (5,)
  special_token_names = {5: '<end>'}

  def encode_prompts(self, texts):
    return [[ord(letter) - ord('a') for letter in text] for text in texts]

  def decode(self, ids):
    return ''.join(chr(ord('a') + i) for i in ids if i not in self.eos_ids)


_TEXTS = ['a', 'abcde', 'dd']
_OPTIONS = {
  'method': 'speculative', 'tree': TokenTree.chains(1, 3), 'max_new_tokens': 12, 'sampling': SamplingParams(1.5),
}  # fmt: skip


_NO_B = Constraint(np.array([0, 1, 0, 0, 0, 0]), [[0, -1]], [True])


def _continue(tables, texts=_TEXTS, **options):
  return generate_text(*tables, _Letters(), texts, seed=3, **options, **_OPTIONS)


def test_continuations_are_those_of_the_ids(tables):
  continuations = _continue(tables)
  rows = _Letters().encode_prompts(_TEXTS)
  prompts, lengths = np.array([[*row, *[0] * (16 - len(row))] for row in rows]), np.array([len(row) for row in rows])
  expected = spectr_jax.generate(jax.random.key(3), *tables, prompts, lengths, eos_id=5, **_OPTIONS)
  assert [each.name for each in continuations] == _TEXTS
  for row, each in enumerate(continuations):
    tokens = np.asarray(expected.tokens[row, : expected.lengths[row]])
    assert each.tokens.tolist() == tokens.tolist()
    assert each.text == _Letters().decode(tokens)
    assert each.tokens_per_call == float(expected.lengths[row]) / float(expected.num_target_calls[row])
    assert each.finish_reason == ('eos' if tokens[-1] == 5 else 'length')
  # A stop text cuts them.
  stop = max((each.text for each in continuations), key=len)[1:3]
  assert len(stop) == 2
  for each in _continue(tables, stop=[stop]):
    whole = continuations[_TEXTS.index(each.name)].text
    assert each.text == whole.partition(stop)[0]
    assert (each.finish_reason == 'stop') == (stop in whole)
  # A special token is one as well, and so is one behind a text.
  ended = next(each for each in continuations if each.finish_reason == 'eos' and each.text)
  for stop, kept in (('<end>', ended.text), (ended.text[-1] + '<end>', ended.text[:-1])):
    again = _continue(tables, stop=[stop])[continuations.index(ended)]
    assert (again.text, again.finish_reason, again.tokens.tolist()) == (kept, 'stop', ended.tokens.tolist())


@pytest.mark.slow  # a batch of another size is another program
def test_one_text_is_continued_as_among_others(tables):
  (alone,) = _continue(tables, _TEXTS[0])
  assert alone.tokens.tolist() == _continue(tables)[0].tokens.tolist()


@pytest.mark.parametrize('constraint', [None, slow([None, _NO_B, None])], ids=['none', 'some'])
def test_auto_takes_the_fastest(tables, monkeypatch, constraint):
  """... of those measured on the texts, under their constraints."""
  best = auto.Setting.of_chains(METHODS['speculative'], 1, 3)

  def measure_speeds(target, draft, prompts, lengths, **options):
    assert (target, draft) == tables
    assert [row[:length].tolist() for row, length in zip(prompts, lengths)] == _Letters().encode_prompts(_TEXTS)
    assert (options['max_new_tokens'], options['batch_size'], options['eos_id']) == (12, 8, (5,))
    assert options['constraint'] == constraint
    return [types.SimpleNamespace(setting=best), None]

  monkeypatch.setattr(text, 'measure_speeds', measure_speeds)
  own = _OPTIONS | {'constraint': constraint}
  options = own | {'method': 'auto', 'tree': None}
  continuations, expected = (generate_text(*tables, _Letters(), _TEXTS, **each) for each in (options, own))
  assert [each.tokens.tolist() for each in continuations] == [each.tokens.tolist() for each in expected]
  with pytest.raises(ValueError, match='auto chooses the tree'):
    generate_text(*tables, _Letters(), _TEXTS, **_OPTIONS | {'method': 'auto'})
  assert generate_text(*tables, _Letters(), [], max_new_tokens=3) == []


@pytest.mark.parametrize(
  ('texts', 'message'),
  [
    (['a', ''], "a text has at least one token, and '' has none"),
    (['a', 3], 'texts must be strings, got 3; generate takes ids'),
    (['az'], 'ids from 0 to 25, the vocabulary is 0 to 5'),
  ],
)
def test_what_is_no_text_is_refused(tables, texts, message):
  with pytest.raises(ValueError, match=message):
    generate_text(*tables, _Letters(), texts, max_new_tokens=3)
