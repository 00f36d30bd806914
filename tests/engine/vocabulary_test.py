"""Drafts with another vocabulary in the loop: rows alone, refilled, in turns, in pieces, on a mesh, by seeds."""

import dataclasses

import jax
import numpy as np
import pytest

import spectr_jax
from spectr_jax import Session, TokenTree
from spectr_jax.draft import vocabulary_drafter
from spectr_jax.engine.generate import generate_many
from spectr_jax.engine.request import Request
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.models import causal_lm, transformer
from spectr_jax.sharding import make_mesh
from tests.conftest import CONFIG
from tests.draft.toy_vocabularies import other_vocabulary
from tests.engine.runs import LENGTHS, NEW, PROMPTS, begin, generate, make_keys
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures('highest')


@pytest.fixture(scope='module')
def drafter():
  """A draft of 23 tokens, of which 11 are among the target's 17."""
  config = dataclasses.replace(CONFIG, vocab_size=23, num_layers=1)
  params = transformer.init_params(jax.random.key(5), config)
  vocabulary = other_vocabulary(num_draft=23, num_target=CONFIG.vocab_size, num_shared=11)
  return vocabulary_drafter(causal_lm.causal_lm(params, config), vocabulary)


def _assert_same(found, wanted):
  for field in ('tokens', 'lengths', 'num_target_calls', 'origins'):
    np.testing.assert_array_equal(getattr(found, field), getattr(wanted, field), err_msg=field)


@pytest.mark.parametrize('method', slow_but(['race_traversal'], ['block', 'ersd', 'race_traversal']))
def test_greedy_tokens_are_those_without_a_draft(target, drafter, method):
  alone = generate((target, None), 'autoregressive', make_keys(), temperature=0.0)
  found = generate((target, drafter), method, make_keys(1), temperature=0.0)
  np.testing.assert_array_equal(found.tokens, alone.tokens)


def test_seed_exact_tokens_are_those_of_the_seed(target, drafter):
  """The race of `ersd` runs over the target's ids, whatever the draft's are."""
  np.testing.assert_array_equal(
    generate((target, drafter), 'ersd', make_keys()).tokens, generate((target, None), 'gumbel', make_keys()).tokens
  )


@pytest.mark.slow
def test_rounds_in_pieces_and_rows_alone_are_the_same(target, drafter):
  decoder, state = begin((target, drafter), 'race_traversal', make_keys())
  whole = generate((target, drafter), 'race_traversal', make_keys())
  while not np.asarray(state.is_done).all():
    state = spectr_jax.engine.decode_rounds(decoder, state, 1)
  _assert_same(state.result.of_size(NEW), whole)
  for row in range(4):
    one = slice(row, row + 1)
    alone = generate((target, drafter), 'race_traversal', make_keys()[one], PROMPTS[one], LENGTHS[one])
    np.testing.assert_array_equal(alone.tokens[0], whole.tokens[row])


@pytest.mark.slow
def test_rows_are_refilled(target, drafter):
  rng, keys = np.random.default_rng(0), make_keys()
  prompts = [rng.integers(0, 17, size).tolist() for size in (3, 1, 6, 2)]
  requests = [Request(i, prompt, key) for i, (prompt, key) in enumerate(zip(prompts, keys))]
  options = {'method': 'block', 'tree': TokenTree.chains(1, 3), 'max_new_tokens': NEW}
  found = generate_many(target, drafter, requests, batch_size=2, longest_prompt=6, rounds_at_a_time=2, **options)
  for each in found:
    wanted = spectr_jax.generate(keys[each.name][None], target, drafter, [prompts[each.name]], **options)
    np.testing.assert_array_equal(each.tokens, wanted.tokens[0, : wanted.lengths[0]])
    assert each.num_target_calls == wanted.num_target_calls[0]


@pytest.mark.slow
def test_a_text_grows_in_turns(target, drafter):
  decoder, _ = begin((target, drafter), 'block', make_keys(), cache_size=48)
  session, prompt = Session(decoder), [5, 2, 0]
  for turn in range(3):
    new = [token for part in session.stream(jax.random.key(turn), prompt) for token in part]
    anew = Session(decoder)
    assert new == [token for part in anew.stream(jax.random.key(turn), prompt) for token in part]
    assert session.num_target_calls == anew.num_target_calls
    prompt = [*prompt, *new[: len(new) - turn], 3, 16]


@pytest.mark.slow
def test_on_a_mesh_of_one(target, drafter):
  sharding = DecodeSharding(make_mesh({}, jax.devices()[:1]), is_draft_divided=True)
  found = generate((target, drafter), 'race_traversal', make_keys(), sharding=sharding)
  _assert_same(found, generate((target, drafter), 'race_traversal', make_keys()))
