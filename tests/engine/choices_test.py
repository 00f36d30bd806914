"""The probabilities of choices: those of each choice alone, whatever stands beside it."""

import dataclasses

import jax
import numpy as np
import pytest

from spectr_jax import NotFiniteError, choice_probs, log_likelihood
from spectr_jax.engine import choices as choices_module
from spectr_jax.models import causal_lm, transformer

_CHOICES = ['yes', 'yes, but', 'no', 'nothing', 'never']
_TEXTS = ['a', 'Will they come? ' * 3, 'b c']


class _Bytes:
  """Bytes as tokens, with two ids that end a text."""

  eos_ids = (257, 258)

  def encode(self, text):
    return list(text.encode())

  def encode_prompts(self, texts):
    return [[256, *text.encode()] for text in texts]

  def token_bytes(self, ids):
    return [bytes([each]) if each < 256 else b'' for each in ids]


@pytest.fixture(scope='module')
def target():
  config = causal_lm.lm1b_config(260, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=32, context_length=64)
  params = transformer.init_params(jax.random.key(0), config)
  return causal_lm.causal_lm(jax.tree.map(lambda x: 1.3 * x, params), config)


@pytest.fixture(scope='module')
def found(target):
  return choice_probs(target, _Bytes(), _TEXTS, _CHOICES)


def _alone(target, text, choice, ends):
  """The log likelihood of a choice by reading its text once for each end."""
  tokenizer = _Bytes()
  prompt, own = tokenizer.encode_prompts([text])[0], tokenizer.encode(choice)
  texts = [[*prompt, *own, *end] for end in ends]
  read = log_likelihood(target, texts)
  return np.logaddexp.reduce([read.of(row, len(prompt), len(each))[0] for row, each in enumerate(texts)])


def test_logprobs_are_those_of_each_choice_alone(target, found):
  assert found.choices == tuple(_CHOICES)
  for row, text in enumerate(_TEXTS):
    # `yes` and `no` begin others, so that their end belongs to them.
    expected = [_alone(target, text, each, [[257], [258]] if each in ('yes', 'no') else [[]]) for each in _CHOICES]
    np.testing.assert_allclose(found.logprobs[row], expected, atol=1e-4)
    np.testing.assert_allclose(found.probs[row], np.exp(expected) / np.exp(expected).sum(), rtol=1e-4)


def test_choices_of_one_token_share_the_mass_of_the_vocabulary(target):
  letters = [chr(number) for number in range(97, 123)]
  found = choice_probs(target, _Bytes(), 'b c', letters)
  read = log_likelihood(target, [[*_Bytes().encode_prompts(['b c'])[0], ord('a')]], num_top=256)
  law = dict(zip(read.top_tokens[0, -1].tolist(), read.top_logprobs[0, -1].tolist(), strict=True))
  np.testing.assert_allclose(found.logprobs[0], [law[ord(each)] for each in letters], atol=1e-4)
  assert found.probs.sum() == pytest.approx(1)


def test_all_choices_take_one_call_of_the_target_where_they_fit(target, monkeypatch):
  calls = []
  score = choices_module._score
  monkeypatch.setattr(choices_module, '_score', lambda *arguments: (calls.append(1), score(*arguments))[1])
  choices = [f'choice {number}' for number in range(100)]
  whole = choice_probs(target, _Bytes(), _TEXTS, choices)
  assert calls == [1]
  monkeypatch.setattr(choices_module, '_MOST_NODES', 12)
  parts = choice_probs(target, _Bytes(), _TEXTS, choices)
  assert len(calls) > 3
  np.testing.assert_allclose(parts.logprobs, whole.logprobs, atol=1e-4)
  monkeypatch.setattr(choices_module, '_ROWS_AT_A_TIME', 2)
  np.testing.assert_allclose(choice_probs(target, _Bytes(), _TEXTS, choices).logprobs, whole.logprobs, atol=1e-4)


def test_sizes_that_are_given_change_no_value(target, found):
  prompts, choices = _Bytes().encode_prompts(_TEXTS), choices_module.Choices.of(_Bytes(), _CHOICES)
  for num_nodes in (8, 64):
    again = choices_module.score_choices(target, prompts, choices, width=64, num_nodes=num_nodes)
    np.testing.assert_allclose(again.logprobs, found.logprobs, atol=1e-4)


def test_a_single_choice_is_certain(target):
  assert choice_probs(target, _Bytes(), 'a', ['sure']).probs.tolist() == [[1.0]]


class _Spaced(_Bytes):
  """Puts a space in front of a text, as some tokenizers do."""

  def encode(self, text):
    return list(b' ' + text.encode())


def test_a_choice_stands_behind_the_text_without_a_space_of_its_own(target, found):
  np.testing.assert_allclose(choice_probs(target, _Spaced(), _TEXTS, _CHOICES).logprobs, found.logprobs, atol=1e-5)


class _Endless(_Bytes):
  eos_ids = ()


@pytest.mark.parametrize(
  ('tokenizer', 'text', 'choices', 'words'),
  [
    (_Bytes, 'a', [], 'must be a list of texts'),
    (_Bytes, 'a', 'yes', 'must be a list of texts'),
    (_Bytes, 'a', {'yes': 1}, 'must be a list of texts'),
    (_Bytes, 'a', 5, 'must be a list of texts'),
    (_Bytes, 'a', ['\ud800'], 'a choice is not valid Unicode'),
    (_Bytes, 'a', ['yes', ''], 'must be a list of texts'),
    (_Bytes, 'a', ['yes', 'yes'], 'differ'),
    (_Endless, 'a', ['no', 'not'], 'begins another one'),
    (_Bytes, 'a' * 63, ['no', 'yes'], 'prompt 0'),
    (_Bytes, 'a', ['n' * 70], 'the model takes 64'),
    (_Bytes, 'a', ['n' * 600], 'a choice has 600 tokens'),
    (_Bytes, 'a', ['n' * 500 + chr(40 + number) for number in range(80)] * 2, 'differ'),
    (_Bytes, 'a', [f'{number:400}' for number in range(200)], 'the choices have 80,000 tokens'),
    (_Bytes, [], ['no'], 'no prompt'),
  ],
)
def test_refuses_what_has_no_probabilities(target, tokenizer, text, choices, words):
  with pytest.raises(ValueError, match=words):
    choice_probs(target, tokenizer(), text, choices)


def test_logits_that_are_not_finite_are_an_error(target):
  broken = dataclasses.replace(target, params=jax.tree.map(lambda x: x * np.nan, target.params))
  with pytest.raises(NotFiniteError):
    choice_probs(broken, _Bytes(), 'a', ['no', 'yes'])
