"""Tests of sampling parameters as keywords of their own, which are deprecated."""

import jax
import numpy as np
import pytest

import spectr_jax
from spectr_jax import Request, SamplingParams, Session
from spectr_jax.engine.session import reprompt
from tests.engine.runs import LENGTHS, NEW, PROMPTS, make_keys

_OPTIONS = {'method': 'autoregressive', 'max_new_tokens': NEW}


def _calls(target):
  """Calls of every function that takes sampling parameters, and the tokens that each gives."""
  decoder = spectr_jax.Decoder.make(target, None, cache_size=18, **_OPTIONS)

  def tokens_of(state):
    return np.asarray(spectr_jax.decode_rounds(decoder, state).result.tokens)

  def anew(**sampling):
    return spectr_jax.init_decode(decoder, make_keys(), PROMPTS, LENGTHS, **sampling)

  def generate_many(**sampling):
    requests = [Request(0, PROMPTS[0, :1], jax.random.key(0))]
    found = spectr_jax.generate_many(target, None, requests, batch_size=1, longest_prompt=6, **_OPTIONS, **sampling)
    return [each.tokens for each in found]

  return {
    'generate': lambda **sampling: (
      spectr_jax.generate(make_keys(), target, None, PROMPTS, LENGTHS, **_OPTIONS, **sampling).tokens
    ),
    'init_decode': lambda **sampling: tokens_of(anew(**sampling)),
    'refill': lambda **sampling: tokens_of(
      spectr_jax.refill(decoder, anew(), range(4), make_keys(1), PROMPTS, LENGTHS, **sampling)
    ),
    'reprompt': lambda **sampling: tokens_of(
      reprompt(decoder, anew(), [0] * 4, make_keys(1), PROMPTS, LENGTHS, **sampling)
    ),
    'generate_many': generate_many,
    'Session': lambda **sampling: list(Session(decoder, **sampling).stream(jax.random.key(0), [3])),
  }


@pytest.mark.parametrize('name', ['generate', 'init_decode', 'refill', 'reprompt', 'generate_many', 'Session'])
def test_they_warn_and_mean_the_same(tables, name):
  call = _calls(tables[0])[name]
  expected = call(sampling=SamplingParams(temperature=0.5, top_k=2))
  with pytest.warns(DeprecationWarning, match=r'pass sampling=SamplingParams\(temperature=\.\.\., top_k=') as caught:
    found = call(temperature=0.5, top_k=2)
  assert caught[0].filename == __file__
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  with pytest.raises(ValueError, match='sampling and top_p are both given'):
    call(sampling=SamplingParams(), top_p=0.5)
