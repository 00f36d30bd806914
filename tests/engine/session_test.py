"""Texts that grow in turns: what is kept in the caches changes nothing but the work."""

import dataclasses

import jax
import numpy as np
import pytest

import spectr_jax
from examples.fading_model import fading_model
from spectr_jax import Decoder, SamplingParams, TokenTree, lookup_beside, lookup_drafter
from spectr_jax.draft import Confident, SharedVocabulary, growing, vocabulary_drafter
from spectr_jax.engine import loop as engine_loop
from spectr_jax.engine import reading
from spectr_jax.engine import state as engine_state
from spectr_jax.engine.session import Session
from tests.draft.feature_drafter import FeatureDrafter
from tests.draft.tiny_heads import tiny_head, tiny_one_pass
from tests.engine.runs import TREES, VERSIONS, begin, make_keys
from tests.slow import slow

_NEW = 6
_PROMPTS = np.array([[3, 0, 0, 0], [1, 4, 0, 0], [5, 2, 0, 3], [2, 2, 5, 0]])
_LENGTHS = np.array([1, 2, 4, 3])


def _next_prompts(result, rng):
  """The rows' texts, cut or not, with more behind them: prompts, lengths, and what they share with the texts."""
  prompts, sizes, shared = np.zeros((4, 30), np.int64), [], []
  for row in range(4):
    text = [*_PROMPTS[row, : _LENGTHS[row]], *np.asarray(result.tokens)[row, : int(result.lengths[row])]]
    kept = [len(text), len(text) - 2, 1, len(text)][row]
    new = rng.integers(0, 6, [5, 1, 3, 9][row]).tolist()
    shared.append(kept)
    prompts[row, : kept + len(new)] = text[:kept] + new
    sizes.append(kept + len(new))
  return prompts, np.array(sizes), np.array(shared)


def _reprompt(decoder, state, num_kept, *rows, **options):
  return spectr_jax.engine.refill(decoder, state, range(4), *rows, num_kept=num_kept, **options)


def _own(target, draft):
  return draft


def _head(target, draft):
  return tiny_head(target.vocab_size, width=32)


@pytest.mark.usefixtures('highest')
@pytest.mark.parametrize(
  ('make', 'method', 'slots'),
  [
    (_own, 'greedy_block', None),
    *(slow(_own, name, None, id=name) for name in ('autoregressive', 'race_traversal', 'ersd')),
    slow(lambda target, _: FeatureDrafter(target.vocab_size), 'speculative', None, id='features'),
    (lambda target, _: lookup_drafter(target.vocab_size), 'speculative', None),  # it begins anew
    slow(_head, 'race_traversal', None),
    slow(lambda target, _: tiny_one_pass(target.vocab_size, width=32), 'race_traversal', None, id='one pass'),
    slow(lambda *models: lookup_beside(_head(*models), lookup_min=1), 'race_traversal', None, id='beside'),
    slow(lambda *models: growing(_head(*models), Confident()), 'race_traversal', (2, 3, 2), id='growing'),
  ],
)
def test_a_turn_is_the_same_as_anew(target, draft, make, method, slots):
  decoder, state = begin(
    (target, make(target, draft)), method, make_keys(), _PROMPTS, _LENGTHS, max_new_tokens=_NEW, cache_size=40,
    eos_id=2, tree=None if slots is None else TokenTree.slots(slots),
  )  # fmt: skip
  state = spectr_jax.engine.decode_rounds(decoder, state)
  prompts, lengths, shared = _next_prompts(state.result, np.random.default_rng(0))
  rows, options = (make_keys(1), prompts, lengths), {'sampling': SamplingParams(0.7)}
  anew = spectr_jax.engine.decode_rounds(decoder, spectr_jax.engine.init_decode(decoder, *rows, **options))
  state = spectr_jax.engine.decode_rounds(decoder, _reprompt(decoder, state, shared, *rows, **options))
  for field in ('tokens', 'lengths', 'num_target_calls', 'origins'):
    np.testing.assert_array_equal(getattr(state.result, field), getattr(anew.result, field), err_msg=field)


def test_what_is_kept_is_not_read_again(target, draft):
  """With a cache of other contents the second turn is another one: it was used."""
  decoder, state = begin((target, draft), 'speculative', make_keys(), _PROMPTS, _LENGTHS, cache_size=40)
  state = spectr_jax.engine.decode_rounds(decoder, state)
  text = np.concatenate([_PROMPTS[2], np.asarray(state.result.tokens)[2, :12]])
  prompts = np.tile(np.concatenate([text, [1, 3]]), (4, 1))
  lengths = np.full(4, prompts.shape[1])
  keys = jax.numpy.stack([jax.random.key(5)] * 4)
  shared = np.array([0, 3, len(text), 0])  # a lie about row 1
  state = spectr_jax.engine.decode_rounds(decoder, _reprompt(decoder, state, shared, keys, prompts, lengths))
  tokens = np.asarray(state.result.tokens)
  np.testing.assert_array_equal(tokens[2:], tokens[[0, 0]])
  assert (tokens[1] != tokens[0]).any()


@pytest.mark.slow
def test_a_session_streams_what_generate_gives(target, draft):
  options = {'method': VERSIONS['spectr'], 'tree': TREES['spectr'], 'max_new_tokens': _NEW}
  sampling = SamplingParams(top_k=9)
  session, text = Session(Decoder.make(target, draft, cache_size=48, **options), sampling=sampling), []
  for turn in range(3):
    prompt = [*text, 3, turn, 1]
    key = jax.random.key(turn)
    wanted = spectr_jax.generate(key[None], target, draft, [prompt], sampling=sampling, **options)
    parts = list(session.stream(key, prompt))
    new = [token for part in parts for token in part]
    assert len(parts) == session.num_target_calls == int(wanted.num_target_calls[0])
    np.testing.assert_array_equal(new, wanted.tokens[0])
    text = [*prompt, *new]
    assert session.tokens == text


def test_no_turn_compiles_after_the_programs_were_compiled(target, draft, monkeypatch):
  """Whatever the lengths of prompts and of what is new in them; and nothing of the compilation stays in the text."""
  monkeypatch.setattr(reading, '_FEW', 3)
  decoder = Decoder.make(target, draft, method='block', tree=TokenTree.chains(1, 2), max_new_tokens=_NEW, cache_size=60)
  session, steps, text = Session(decoder), [], []
  session.compile(lambda done, total: steps.append((done, total)))
  assert steps == [(number, 3) for number in range(4)]

  def num_programs():
    return reading._read_target._cache_size(), reading._read_draft._cache_size(), engine_loop.run_rounds._cache_size()

  before = num_programs()
  for turn, num_new in enumerate((1, 17, 4, 2, 6)):
    prompt = [*text, *np.random.default_rng(turn).integers(0, 17, num_new).tolist()]
    new = [token for part in session.stream(jax.random.key(turn), prompt) for token in part]
    assert num_programs() == before
    anew = Session(decoder)
    assert new == [token for part in anew.stream(jax.random.key(turn), prompt) for token in part]
    before, text = num_programs(), [*prompt, *new]


def test_a_single_prompt_compiles_nothing_after_what_it_runs_was_compiled(target, draft):
  decoder = Decoder.make(target, draft, method='block', tree=TokenTree.chains(1, 2), max_new_tokens=_NEW, cache_size=53)
  session = Session(decoder)
  session.compile(prompt_length=9)
  programs = engine_loop.run_rounds, reading._read_target, reading._read_draft, engine_state.first_state
  before = [each._cache_size() for each in programs]
  new = [token for part in session.stream(jax.random.key(3), list(range(9))) for token in part]
  assert before == [each._cache_size() for each in programs]
  assert (session.num_read, session.tokens) == (9, [*range(9), *new])
  assert session.prompt_seconds > 0
  assert new == [token for part in Session(decoder).stream(jax.random.key(3), list(range(9))) for token in part]


def test_a_stream_may_be_left(target):
  session = Session(Decoder.make(target, None, max_new_tokens=_NEW, cache_size=48))
  for part in session.stream(jax.random.key(0), [3, 1]):
    assert len(part) == 1
    if len(session.tokens) == 4:
      break
  prompt = [*session.tokens, 5, 5]
  wanted = spectr_jax.generate(jax.random.key(1)[None], target, None, [prompt], max_new_tokens=_NEW)
  new = [token for part in session.stream(jax.random.key(1), prompt) for token in part]
  np.testing.assert_array_equal(new, wanted.tokens[0])


def test_prompts_that_do_not_fit_are_refused(target):
  decoder, state = begin((target, None), 'autoregressive', make_keys(), _PROMPTS, _LENGTHS, cache_size=40)
  for rows, message in (
    (([0, 3, 0, 0], make_keys(), _PROMPTS, _LENGTHS), 'from 0 to the length of each prompt'),
    (([0, 0], jax.random.key(0), _PROMPTS[:2], _LENGTHS[:2]), 'rows must be one different row of 4 for each prompt'),
    (([0] * 4, make_keys(), np.zeros((4, 39), int), [1, 2, 39, 3]), 'cache_size must be at least'),
  ):
    with pytest.raises(ValueError, match=message):
      _reprompt(decoder, state, *rows)
  session, ids = Session(dataclasses.replace(decoder, max_new_tokens=8)), 'the prompt has ids from .*, the vocabulary'
  for prompt, message in (
    ([], 'has 0 tokens, allowed are 1 to 32'), ([1] * 33, 'has 33 tokens, allowed are 1 to 32'), ([9999], ids),
    ([-1], ids), ([2**32 + 1], ids), (np.array([2**32 + 1]), ids),  # int32 would take the last ones for 1
  ):  # fmt: skip
    with pytest.raises(ValueError, match=message):
      next(session.stream(jax.random.key(0), prompt))


def test_models_that_cannot_truncate_read_prompts_from_their_start():
  embedding = jax.random.normal(jax.random.key(1), (12, 16)) / 4
  target, draft = fading_model(embedding), fading_model(embedding + 0.05)
  assert not target.can_truncate
  options = {'method': 'specinfer', 'tree': TokenTree.prefix((2, 2)), 'max_new_tokens': _NEW}
  session, text = Session(Decoder.make(target, draft, **options, cache_size=40)), [3, 1, 4]
  texts = [text]
  for turn in range(3):
    alone = spectr_jax.generate(jax.random.key(turn)[None], target, draft, [text], **options)
    new = [token for piece in session.stream(jax.random.key(turn), text) for token in piece]
    assert new == alone.tokens[0].tolist()
    assert session.num_read == len(text)
    text = [*text, *new, turn]
    texts.append(text)
  requests = [spectr_jax.Request(str(i), text, jax.random.key(i)) for i, text in enumerate(texts[:3])]
  sizes = {'batch_size': 1, 'longest_prompt': 30}
  for each in spectr_jax.generate_many(target, draft, requests, **sizes, **options):
    assert [*texts[int(each.name)], *each.tokens.tolist()] == texts[int(each.name) + 1][:-1]


def test_drafts_with_another_vocabulary_must_truncate():
  with pytest.raises(ValueError, match='needs a truncate_fn'):
    vocabulary_drafter(fading_model(np.ones((12, 16), np.float32)), SharedVocabulary.make(range(12), [[0]] * 12))
