"""Conversations: what is said is what the model continues, turn after turn, and it is shown as it comes."""

import dataclasses
import io
import sys

import commands
import jax
import numpy as np
import pytest
import tiny_hub

import spectr_jax
from decode import chat
from decode.experiment.options import DecodeOptions
from spectr_jax import Decoder, Session, TokenTree, lookup_beside
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.models import transformer
from tests.draft.tiny_heads import tiny_head

_NEW, _CONTEXT = 10, 200


@pytest.fixture(scope='module')
def tokenizer():
  return HubTokenizer.from_parts(
    tiny_hub.backend(), bos_id=None, eos_ids=(41,), add_bos=False, chat_template=tiny_hub.CHAT
  )


@pytest.fixture(scope='module')
def target(tokenizer):
  config = transformer.TransformerConfig(
    tokenizer.vocab_size, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16, max_length=_CONTEXT
  )
  return transformer.transformer_model(transformer.init_params(jax.random.key(0), config), config)


@pytest.fixture(scope='module')
def decoder(target, tokenizer):
  return Decoder.make(
    target, None, method='autoregressive', max_new_tokens=_NEW, cache_size=_CONTEXT, eos_id=tokenizer.eos_ids
  )


def _chat(decoder, tokenizer, **options):
  return chat.Chat(Session(decoder, top_k=20), tokenizer, **options)


def _answer(target, tokenizer, messages, turn, seed=0):
  """The tokens of an answer by `generate`, from the whole conversation."""
  prompt = tokenizer.encode_chat(messages)
  key = jax.random.fold_in(jax.random.key(seed), turn)
  found = spectr_jax.generate(
    key[None], target, None, np.array([prompt]), [len(prompt)], method='autoregressive', max_new_tokens=_NEW,
    eos_id=tokenizer.eos_ids, top_k=20,
  )  # fmt: skip
  return [token for token in found.tokens[0, : int(found.lengths[0])].tolist() if token not in tokenizer.eos_ids]


@pytest.mark.slow
def test_turns_continue_the_whole_conversation(decoder, target, tokenizer):
  talk, messages = _chat(decoder, tokenizer, system='be kind', seed=3), [{'role': 'system', 'content': 'be kind'}]
  for turn, text in enumerate(('the owl', 'and then?')):
    messages.append({'role': 'user', 'content': text})
    pieces = list(talk.ask(text))
    tokens = _answer(target, tokenizer, messages, turn, seed=3)
    messages.append({'role': 'assistant', 'content': ''.join(pieces)})
    assert ''.join(pieces) == tokenizer.decode(tokens)
    assert talk.messages == messages
    assert talk.answer.num_target_calls >= len(tokens) > 1
    assert talk.answer.num_left_out == 0 < talk.answer.seconds


@pytest.mark.slow
@pytest.mark.parametrize('is_beside', [False, True])
def test_turns_with_a_head_are_those_of_a_fresh_start(target, tokenizer, is_beside):
  head = tiny_head(tokenizer.vocab_size)
  drafter = lookup_beside(head) if is_beside else head
  options = {'method': 'race_traversal', 'tree': TokenTree.chains(2, 3), 'max_new_tokens': _NEW}
  decoder = Decoder.make(target, drafter, cache_size=_CONTEXT, eos_id=tokenizer.eos_ids, **options)
  talk = _chat(decoder, tokenizer)
  for turn, text in enumerate(('the owl', 'and then?', 'the owl')):
    said = [*talk.messages, {'role': 'user', 'content': text}]
    prompt, key = tokenizer.encode_chat(said), jax.random.fold_in(jax.random.key(0), turn)
    pieces = list(talk.ask(text))
    padded = np.pad([prompt], ((0, 0), (0, _CONTEXT - _NEW - len(prompt))))  # one program for all turns
    wanted = spectr_jax.generate(
      key[None], target, drafter, padded, [len(prompt)], eos_id=tokenizer.eos_ids, top_k=20, **options
    )
    tokens = [token for token in wanted.tokens[0, : int(wanted.lengths[0])].tolist() if token not in tokenizer.eos_ids]
    assert ''.join(pieces) == tokenizer.decode(tokens)
    assert talk.answer.num_target_calls == int(wanted.num_target_calls[0])


def test_a_stop_text_ends_the_answer(decoder, tokenizer):
  whole = ''.join(_chat(decoder, tokenizer).ask('the owl'))
  stop = spectr_jax.StopStrings(tokenizer, [whole[3:5]])
  cut = _chat(decoder, tokenizer, stop=stop)
  assert ''.join(cut.ask('the owl')) == whole[: whole.index(whole[3:5])]
  assert cut.messages[-1]['content'] == whole[: whole.index(whole[3:5])]


def test_the_oldest_turns_are_left_out(decoder, tokenizer):
  talk = _chat(decoder, tokenizer, system='be kind')
  for _ in range(3):
    list(talk.ask('x y z ' * 8))
  assert talk.answer.num_left_out == 2
  assert [message['role'] for message in talk.messages] == ['system', *['user', 'assistant'] * 3]
  with pytest.raises(ValueError, match='the message is too long, 2.. tokens with its template; at most 190 are'):
    list(talk.ask('x y z ' * 40))
  assert len(talk.messages) == 7  # the conversation goes on without it
  assert list(talk.ask('owl'))


def test_answers_are_printed_and_measured(decoder, tokenizer, monkeypatch, capsys):
  monkeypatch.setattr(sys, 'stdin', io.StringIO('the owl\n\n  then?\n'))
  talk = _chat(decoder, tokenizer)
  chat.talk(talk, chat.read_turns())
  out, err = capsys.readouterr()
  answers = [message['content'] for message in talk.messages if message['role'] == 'assistant']
  assert out == ''.join(answer + '\n' for answer in answers)
  assert [message['content'] for message in talk.messages[::2]] == ['the owl', 'then?']
  assert err.count('tokens/s, 1.00 per target call]') == 2


def test_options_that_mean_nothing_are_refused(pair):
  options = DecodeOptions(**pair, method=('block',), chat=True)
  with pytest.raises(ValueError, match='breakdown is not for decode.chat'):
    chat.start_chat(dataclasses.replace(options, breakdown=True), 64)
  with pytest.raises(ValueError, match='max_new_tokens 64 leaves no room for a prompt: the conversation may have 64'):
    chat.start_chat(options, 2048)
  talk = chat.start_chat(dataclasses.replace(options, max_new_tokens=8), 2048)
  with pytest.raises(ValueError, match='the model has no chat template'):
    list(talk.ask('the owl'))


def test_the_command_says_what_is_wrong_in_one_line(pair):
  ran = commands.run('decode.chat', f'--target={pair["target"]}', '--prompt=the owl', '--max_new_tokens=8')
  assert ran.returncode == 1
  assert ran.stderr.splitlines() == [
    'error: the model has no chat template: it continues texts, and takes no conversations'
  ]
