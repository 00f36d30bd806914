"""Conversations that take rows from each other: less is read, all is counted, and the answers are the same."""

import contextlib
import re

import numpy as np

from tests.serving.stub import client_of, make_worker, running

_TURNS, _MORE = 6, 10  # of each of eight conversations; tokens that a turn adds


def _conversations(rng):
  """Requests of all conversations turn by turn; they differ from their first token on."""
  texts = [[place, *rng.integers(8, 40, _TURNS * _MORE - 1).tolist()] for place in range(8)]
  for turn in range(1, _TURNS + 1):
    for place, text in enumerate(texts):
      yield {'prompt': text[: turn * _MORE], 'seed': place, 'temperature': place % 2, 'max_tokens': 5}


def _counts(client):
  lines = re.findall(r'^spectr_jax_prefix_(\w+) (\d+)$', client.get('/metrics').text, re.MULTILINE)
  return {name: int(value) for name, value in lines}


def test_eight_conversations_of_six_turns(models, tokenizer):
  """Three rows; what is not read are the whole blocks of 16 tokens that the turn before had."""
  said, counts, num_read = [], [], []
  for kept in (0, 2**20):
    with contextlib.ExitStack() as stack:
      worker = stack.enter_context(running(make_worker(models, tokenizer, prefix_cache_bytes=kept)))
      client = stack.enter_context(client_of(worker, tokenizer))
      answers = [client.post('/v1/completions', json=each) for each in _conversations(np.random.default_rng(0))]
      said.append([answer.json()['choices'] for answer in answers])
      counts.append(_counts(client))
      num_read.append(worker._rows.num_read)
  assert said[0] == said[1]
  assert counts[0] == {'hits_total': 0, 'tokens_total': 0, 'bytes': 0}
  known = [turn * _MORE // 16 * 16 for turn in range(1, _TURNS)]
  assert known == [0, 16, 16, 32, 48]
  num_bytes = counts[1].pop('bytes')
  assert counts[1] == {'hits_total': 8 * 4, 'tokens_total': 8 * sum(known)}
  assert 0 < num_bytes <= 2**20
  assert num_read[0] == 8 * sum(turn * _MORE - 1 for turn in range(1, _TURNS + 1))
  assert num_read[0] - num_read[1] == 8 * sum(known)
