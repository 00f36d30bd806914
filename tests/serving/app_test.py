"""What the endpoint answers is what the library gives, and what it cannot do it refuses by name."""

import concurrent.futures
import dataclasses
import gzip
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hub

import spectr_jax
from decode.conversation import Chat
from decode.experiment.prompts import Prompt, as_conversations, encode_prompts
from decode.serving.answer import Answer, Served, _Place
from decode.serving.protocol import parse
from spectr_jax import SamplingParams, Tokenizer, TokenTree, log_likelihood
from spectr_jax.engine import sample_keys
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from tests.serving import stub as stub_module
from tests.serving.stub import DEPTH, EOS, LONGEST, NEW, client_of, make_tokenizer, make_worker, running

_TEXT = 'the quick brown fox'
_PROMPT = {'prompt': _TEXT, 'seed': 3}


def _expected(models, prompt, key, sampling=None, most=NEW):
  padded = np.pad([prompt], ((0, 0), (0, LONGEST - len(prompt))))
  generated = spectr_jax.generate(
    key[None], *models, padded, [len(prompt)], method='race_traversal', tree=TokenTree.chains(2, 2),
    max_new_tokens=NEW, eos_id=(EOS,), sampling=sampling,
  )  # fmt: skip
  return np.asarray(generated.tokens[0, : int(generated.lengths[0])]).tolist()[:most]


def _text(tokenizer, tokens):
  return tokenizer.decode([token for token in tokens if token != EOS])


def _key(seed, place=0):
  key = jax.random.key(seed, impl='threefry2x32')
  return jax.random.fold_in(key, place) if place else key


def _ask(client, body, path='completions'):
  response = client.post(f'/v1/{path}', json=body)
  assert response.status_code == 200, response.text
  return response.json()


def test_answers_are_those_of_the_library(client, models, tokenizer):
  prompts = [_TEXT, 'the owl', 'seven wise owls watch']
  body = {'prompt': prompts, 'seed': 5, 'n': 2, 'temperature': 0.7, 'top_p': 0.9, 'max_tokens': NEW}
  answer = _ask(client, body)
  assert (answer['object'], answer['model']) == ('text_completion', 'tiny')
  total = 0
  for place, prompt in enumerate(prompts):
    ids = tokenizer.encode_prompt(prompt)
    for sample, key in enumerate(sample_keys(_key(5, place)[None], 2)):
      choice = answer['choices'][2 * place + sample]
      tokens = _expected(models, ids, key, SamplingParams(0.7, top_p=0.9))
      assert choice['text'] == _text(tokenizer, tokens)
      assert choice['index'] == 2 * place + sample
      assert choice['finish_reason'] == ('stop' if tokens[-1] == EOS else 'length')
      total += len(tokens)
  usage = answer['usage']
  assert usage['completion_tokens'] == total
  assert usage['prompt_tokens'] == sum(len(tokenizer.encode_prompt(prompt)) for prompt in prompts)
  assert usage['spectr_jax']['target_calls'] + usage['spectr_jax']['accepted_tokens'] >= total
  ids = tokenizer.encode_prompt(_TEXT)
  assert _ask(client, {'prompt': ids, 'seed': 3})['choices'][0]['text'] == _ask(client, _PROMPT)['choices'][0]['text']
  messages = [{'role': 'system', 'content': 'be kind'}, {'role': 'user', 'content': [{'type': 'text', 'text': 'owl'}]}]
  answer = _ask(client, {'messages': messages, 'seed': 1, 'max_completion_tokens': 9}, 'chat/completions')
  flat = [messages[0], {'role': 'user', 'content': 'owl'}]
  tokens = _expected(models, tokenizer.encode_chat(flat), _key(1), most=9)
  message = answer['choices'][0]['message']
  assert message == {'role': 'assistant', 'content': _text(tokenizer, tokens)}
  assert answer['object'] == 'chat.completion'


def _events(client, body, path='completions'):
  with client.stream('POST', f'/v1/{path}', json=body | {'stream': True}) as response:
    assert response.status_code == 200
    lines = [line for line in response.iter_lines() if line]
  assert lines[-1] == 'data: [DONE]'
  return [json.loads(line.removeprefix('data: ')) for line in lines[:-1]]


def test_streams_say_the_same(client):
  body = _PROMPT | {'n': 2, 'max_tokens': NEW, 'logprobs': 0}
  whole = _ask(client, body)
  *events, last = _events(client, body | {'stream_options': {'include_usage': True}})
  assert (last['choices'], last['usage']) == ([], whole['usage'])
  for index, choice in enumerate(whole['choices']):
    own = [each for event in events for each in event['choices'] if each['index'] == index]
    assert len(own) > 1
    assert ''.join(each['text'] for each in own) == choice['text']
    values = [value for each in own for value in each['logprobs']['token_logprobs']]
    np.testing.assert_allclose(values, choice['logprobs']['token_logprobs'], atol=1e-5)
    assert [each['finish_reason'] for each in own][-1] == choice['finish_reason']
  options = {'include_usage': True, 'continuous_usage_stats': True}
  *events, last = _events(client, _PROMPT | {'n': 2, 'max_tokens': NEW, 'stream_options': options})
  counts = [event['usage']['completion_tokens'] for event in events]
  assert counts == sorted(counts)
  assert counts[-1] == last['usage']['completion_tokens'] > counts[0]
  assert events[0]['usage']['prompt_tokens'] == last['usage']['prompt_tokens']
  body = {'messages': [{'role': 'user', 'content': 'owl'}], 'seed': 2}
  whole = _ask(client, body, 'chat/completions')['choices'][0]
  deltas = [event['choices'][0]['delta'] for event in _events(client, body, 'chat/completions')]
  assert deltas[0]['role'] == 'assistant'
  assert all('role' not in delta for delta in deltas[1:])
  assert ''.join(delta['content'] for delta in deltas) == whole['message']['content']


def test_stop_texts_and_limits(client):
  whole = _ask(client, _PROMPT | {'max_tokens': NEW})['choices'][0]['text']
  pairs = (whole[place : place + 2] for place in range(3, len(whole) - 1))
  stop = next(pair for pair in pairs if '\ufffd' not in pair)
  stopped = _ask(client, _PROMPT | {'max_tokens': NEW, 'stop': stop})
  assert stopped['choices'][0]['text'] == whole[: whole.index(stop)]
  assert stopped['choices'][0]['finish_reason'] == 'stop'
  short = _ask(client, _PROMPT | {'max_tokens': 2})
  assert short['usage']['completion_tokens'] == 2
  assert whole.startswith(short['choices'][0]['text'])


def test_a_context_bounds_prompt_and_continuation_together(worker, tokenizer):
  client = client_of(worker, tokenizer, together=20)
  ids = tokenizer.encode_prompt(_TEXT)
  prompt = (ids * 15)[:15]
  assert _ask(client, {'prompt': prompt, 'seed': 1, 'max_tokens': 5})['usage']['completion_tokens'] <= 5
  for body in ({'prompt': prompt, 'max_tokens': 6}, {'prompt': [ids[:2], prompt], 'max_tokens': 6}):
    response = client.post('/v1/completions', json=body)
    assert (response.status_code, response.json()['error']['param']) == (400, 'max_tokens')
    assert 'at most 5 behind 15 tokens' in response.json()['error']['message']
  # Without a limit what the context leaves is one, of each prompt its own.
  by_seed = [_ask(client, {'prompt': [ids[:2], prompt], 'seed': seed, 'logprobs': 0})['choices'] for seed in range(5)]
  lengths = np.array([[len(choice['logprobs']['tokens']) for choice in choices] for choices in by_seed])
  assert lengths.max(0).tolist() == [NEW, 5]


@pytest.mark.slow  # other sizes are another program
def test_a_context_can_be_filled(models, tokenizer):
  room = LONGEST + NEW
  worker = make_worker(models, tokenizer, longest=room - 1, most_new=room - 1)
  with running(worker):
    client = client_of(worker, tokenizer, most_new=room - 1, together=room)
    ids = tokenizer.encode_prompt(_TEXT) * 20
    for size in (2, 40, room - 1):
      body = {'prompt': ids[:size], 'max_tokens': room - size, 'seed': 4, 'logprobs': 0}
      choices = [_ask(client, body | {'n': 3})['choices'][0], _ask(client, body)['choices'][0]]
      generated = spectr_jax.generate(
        _key(4)[None], *models, np.array([ids[:size]]), [size], method='race_traversal', eos_id=(EOS,),
        tree=TokenTree.chains(2, DEPTH), max_new_tokens=room - size,
      )  # fmt: skip
      expected = [token.name for token in tokenizer.decode_tokens(generated.tokens[0, : int(generated.lengths[0])])]
      assert [choice['logprobs']['tokens'] for choice in choices] == [expected] * 2
    assert client.post('/v1/completions', json={'prompt': ids[:size], 'max_tokens': 2}).status_code == 400


def test_log_probabilities_are_those_of_the_target(client, models, tokenizer):
  body = _PROMPT | {'max_tokens': 5, 'temperature': 0, 'logprobs': 3}
  own = _ask(client, body)['choices'][0]
  echoed = _ask(client, body | {'echo': True})['choices'][0]
  ids = tokenizer.encode_prompt(_TEXT)
  new = _expected(models, ids, _key(3), SamplingParams(0), most=5)
  likelihood = log_likelihood(models[0], [[*ids, *new]], num_top=3)
  np.testing.assert_allclose(own['logprobs']['token_logprobs'], likelihood.logprobs[0, len(ids) :], atol=1e-4)
  assert own['logprobs']['tokens'] == [token.name for token in tokenizer.decode_tokens(new)]
  assert echoed['text'] == tokenizer.decode(ids) + own['text']
  values = echoed['logprobs']['token_logprobs']
  assert values[0] is None
  assert echoed['logprobs']['top_logprobs'][0] is None
  np.testing.assert_allclose(values[1:], likelihood.logprobs[0, 1:], atol=1e-4)
  # Greedy tokens are the likeliest of their place: how evaluations tell them.
  for value, top in zip(values[len(ids) :], echoed['logprobs']['top_logprobs'][len(ids) :], strict=True):
    assert value == max(top.values())
  alone = _ask(client, {'prompt': _TEXT, 'max_tokens': 0, 'echo': True, 'logprobs': 1})['choices'][0]
  np.testing.assert_allclose(alone['logprobs']['token_logprobs'][1:], likelihood.logprobs[0, 1 : len(ids)], atol=1e-4)
  assert alone['text'] == tokenizer.decode(ids)
  body = {'messages': [{'role': 'user', 'content': 'owl'}], 'seed': 2, 'logprobs': True, 'top_logprobs': 2}
  content = _ask(client, body | {'max_tokens': 4}, 'chat/completions')['choices'][0]['logprobs']['content']
  assert len(content) == 4
  for entry in content:
    assert len(entry['top_logprobs']) == 2
    assert entry['token'] in (bytes(entry['bytes']).decode(errors='replace'), _spelled(entry), *_SPECIAL)
    assert entry['logprob'] <= entry['top_logprobs'][0]['logprob']


_SPECIAL = (*tiny_hub.SPECIAL,)
_OTHERS = 'bytes:', 'token_id:'  # names that are no text


def _spelled(entry):
  return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in entry['bytes'])


def _check_places(text, logprobs, *, is_cut=False):
  """Whole tokens stand in the text where they are said to, those of special tokens behind the text before."""
  num_whole = num_parts = num_special = 0
  for token, offset in zip(logprobs['tokens'], logprobs['text_offset'], strict=True):
    num_parts += token.startswith('bytes:')
    num_special += token in _SPECIAL
    if token not in _SPECIAL and not token.startswith(_OTHERS):
      assert text[offset : offset + len(token)] == token or (is_cut and offset + len(token) > len(text))
      num_whole += 1
  assert logprobs['text_offset'] == sorted(logprobs['text_offset'])
  return np.array([num_whole, num_parts, num_special])


def _ids_of(names, tokenizer):
  known = {token.name: index for index in range(tokenizer.vocab_size) for token in tokenizer.decode_tokens([index])}
  return [known[name] for name in names]


def test_places_in_texts_and_streams_and_what_echo_joins(client, tokenizer):
  counts = np.zeros(3, int)
  for seed in range(4):
    body = {'prompt': ['☃ a', 'é the \U0001f989 owl<|im_start|>☃!'], 'seed': seed, 'n': 4, 'max_tokens': NEW}
    echoed = _ask(client, body | {'echo': True, 'logprobs': 0})['choices']
    whole = _ask(client, body | {'logprobs': 0})['choices']
    events = _events(client, body | {'logprobs': 0})
    for index, (own, echo) in enumerate(zip(whole, echoed, strict=True)):
      counts += _check_places(own['text'], own['logprobs'])
      counts += _check_places(echo['text'], echo['logprobs'])
      prompt = tokenizer.encode_prompt(body['prompt'][index // 4])
      assert echo['text'] == tokenizer.decode([*prompt, *_ids_of(own['logprobs']['tokens'], tokenizer)])
      pieces = [each for event in events for each in event['choices'] if each['index'] == index]
      for name in ('tokens', 'text_offset'):
        assert [value for each in pieces for value in each['logprobs'][name]] == own['logprobs'][name]
  assert min(counts) > 20
  first = tokenizer.encode('é')[:1]
  for seed in range(40):
    body = {'prompt': first, 'seed': seed, 'n': 16, 'max_tokens': NEW, 'echo': True, 'logprobs': 0}
    for choice in _ask(client, body)['choices']:
      content = _ids_of(choice['logprobs']['tokens'], tokenizer)
      assert choice['text'] == tokenizer.decode(content)
      _check_places(choice['text'], choice['logprobs'])
      if '\ufffd' not in choice['text'][:1] and len(choice['text']) > 1:
        return
  pytest.fail('no character was completed')


def test_bytes_in_a_row_are_the_text(client):
  body = {'messages': [{'role': 'user', 'content': 'owl'}], 'n': 16, 'logprobs': True, 'max_tokens': NEW}
  names, num_parts = set(), 0
  for seed in range(3):
    for choice in _ask(client, body | {'seed': seed}, 'chat/completions')['choices']:
      content = choice['logprobs']['content']
      joined = b''.join(bytes(entry['bytes']) for entry in content)
      assert joined.decode(errors='replace') == choice['message']['content']
      num_parts += sum(entry['token'].startswith('bytes:') for entry in content)
      names |= {entry['token'] for entry in content if not entry['bytes']}
  assert num_parts > 20
  assert len(names & {*_SPECIAL}) > 1


def test_the_likeliest_have_names_of_their_own(client, worker):
  """Tokens that share a text too: the own tokenizer of models that are trained here has letters twice."""
  body = {'prompt': 'the owl', 'n': 8, 'seed': 1, 'logprobs': 20, 'max_tokens': NEW}
  for choice in _ask(client, body)['choices']:
    logprobs = choice['logprobs']
    for token, value, top in zip(logprobs['tokens'], logprobs['token_logprobs'], logprobs['top_logprobs'], strict=True):
      # The token that stands there is the last of 21 where it is none of the 20 likeliest, as in OpenAI's responses.
      assert top[token] == pytest.approx(value, abs=1e-4)
      assert len(top) == 20 or (len(top) == 21 and [*top][-1] == token and value <= min(top.values()) + 1e-4)
  own = Tokenizer.train(['the owl and the end ' * 20], 270)
  (letter,), byte, nothing = own.encode('e'), 3 + ord('e'), 10**5
  top = {letter: -1.0, byte: -2.0, 3 + 0xE2: -3.0, nothing: -4.0, 2: -5.0}
  answer = Answer(Served(worker, own, 'tiny', NEW), parse({'prompt': 'the'}, is_chat=False, model='tiny'))
  for chosen, others in (
    (letter, {f'token_id:{byte}': -2.0, 'e': -1.0}),
    (byte, {f'token_id:{letter}': -1.0, 'e': -2.0}),
  ):
    named = answer._named(_Place(chosen, own.decode_tokens([chosen])[0], top[chosen], top))
    assert named == others | {'bytes:\\xe2': -3.0, f'token_id:{nothing}': -4.0, '<eos>': -5.0}


def test_special_tokens_are_stop_texts(client, tokenizer):
  ends = {}
  for seed in range(8):
    body = {'prompt': 'the owl', 'seed': seed, 'n': 16, 'max_tokens': NEW}
    for index, choice in enumerate(_ask(client, body | {'logprobs': 0})['choices']):
      tokens = choice['logprobs']['tokens']
      place = next((place for place, token in enumerate(tokens) if token in _SPECIAL), 0)
      if place and not tokens[place - 1].startswith(_OTHERS):
        ends[tokens[place]] = body, index, tokens[:place]
  assert len(ends) > 1
  assert '<|im_end|>' in ends
  for name, (body, index, before) in ends.items():
    text = tokenizer.decode(_ids_of(before, tokenizer))
    for stop, cut in ((name, text), ([before[-1] + name, 'zzz'], text[: -len(before[-1])])):
      stopped = _ask(client, body | {'stop': stop, 'logprobs': 0})['choices'][index]
      assert (stopped['text'], stopped['finish_reason']) == (cut, 'stop')
      shown = before if stop == name else before[:-1]
      assert stopped['logprobs']['tokens'] == shown
      events = _events(client, body | {'stop': stop, 'logprobs': 0})
      streamed = [each for event in events for each in event['choices'] if each['index'] == index]
      assert ''.join(each['text'] for each in streamed) == cut
      assert [token for each in streamed for token in each['logprobs']['tokens']] == shown


def _whole_tokens(logprobs, text):
  """The places of tokens that lie in a text whole: what log probabilities show of a text that was cut."""
  pairs = zip(logprobs['tokens'], logprobs['text_offset'], strict=True)
  sizes = ((offset, 1 if token in _SPECIAL or token.startswith(_OTHERS) else len(token)) for token, offset in pairs)
  return [offset + size <= len(text) for offset, size in sizes]


def _stop_within(text):
  """A text of two characters for which others stand before it, none of them U+FFFD nearby, or None."""
  found = re.search('(?<=[^\ufffd])[^\ufffd]{2}', text)
  return found and text.index(found[0]) > 0 and text[text.index(found[0]) - 1] != '\ufffd' and found[0]


@pytest.mark.parametrize('more', [{}, {'echo': True}, {'logprobs': 3}, {'logprobs': 3, 'echo': True}])
def test_log_probabilities_end_where_the_text_ends(client, tokenizer, more):
  num_cut = 0
  for seed in range(4):
    body = {'prompt': 'the owl', 'seed': seed, 'n': 4, 'max_tokens': NEW, 'logprobs': 0} | more
    for index, choice in enumerate(_ask(client, body)['choices']):
      begin = len(tokenizer.decode(tokenizer.encode_prompt('the owl'))) if 'echo' in more else 0
      new = choice['text'][begin:]
      if not (stop := _stop_within(new)):  # within a token, over two, or a token itself
        continue
      cut = choice['text'][: begin + new.index(stop)]
      stopped = _ask(client, body | {'stop': [stop]})['choices'][index]
      assert (stopped['text'], stopped['finish_reason']) == (cut, 'stop')
      is_whole = _whole_tokens(choice['logprobs'], cut)
      size = sum(is_whole)
      assert is_whole == [True] * size + [False] * (len(is_whole) - size)
      for name in ('tokens', 'text_offset', 'token_logprobs', 'top_logprobs'):
        assert len(stopped['logprobs'][name]) == size
      for name in ('tokens', 'text_offset'):
        assert stopped['logprobs'][name] == choice['logprobs'][name][:size]
      num_cut += 1
      if not more:
        streamed = _events(client, body | {'stop': [stop]})
        own = [each['logprobs'] for event in streamed for each in event['choices'] if each['index'] == index]
        for name in ('tokens', 'text_offset'):
          assert [value for each in own for value in each[name]] == stopped['logprobs'][name]
  assert num_cut > 3


def test_log_probabilities_end_before_the_token_that_a_stop_text_begins_in(stub, tokenizer, monkeypatch):
  stub.start()
  client, body = client_of(stub, tokenizer), {'prompt': 'a', 'max_tokens': NEW, 'logprobs': 0}
  mark = next(index for index, name in tokenizer.special_token_names.items() if index != EOS)
  said = [*tokenizer.encode(' the owl☃'), mark, *tokenizer.encode(' owl')]
  said += tokenizer.encode('!' * (NEW - len(said)))
  monkeypatch.setattr(stub_module, 'said', lambda prompt: said)
  text, num_inside = tokenizer.decode(said), 0
  contents = [token.content for token in tokenizer.decode_tokens(said)]
  for begin in range(len(text)):
    for end in range(begin + 1, min(begin + 4, len(text)) + 1):
      stop, cut = text[begin:end], text[: text.index(text[begin:end])].encode()
      # Tokens whose bytes are all before the stop text, those without bytes where more of the text follows.
      sizes = [len(b''.join(contents[: size + 1])) for size in range(NEW)]
      places = [
        place for place in range(NEW) if sizes[place] <= len(cut) and (contents[place] or sizes[place] < len(cut))
      ]
      own = _ask(client, body | {'stop': stop})['choices'][0]
      assert own['text'].encode() == cut
      assert own['logprobs']['tokens'] == [token.name for token in tokenizer.decode_tokens(said)][: len(places)]
      assert len(own['logprobs']['token_logprobs']) == len(places)
      for more in ({}, {'echo': True}):
        likeliest = _ask(client, body | {'stop': stop, 'logprobs': 2} | more)['choices'][0]['logprobs']
        assert likeliest['tokens'][len(tokenizer.encode_prompt('a')) if more else 0 :] == own['logprobs']['tokens']
      pieces = [each['logprobs'] for event in _events(client, body | {'stop': stop}) for each in event['choices']]
      for name in ('tokens', 'text_offset', 'token_logprobs'):
        assert [value for each in pieces for value in each[name]] == own['logprobs'][name]
      num_inside += sizes[len(places) - 1] < len(cut) if places else bool(cut)
  assert num_inside > 3


def test_log_probabilities_of_chats_end_where_the_text_ends(client):
  body = {'messages': [{'role': 'user', 'content': 'owl'}], 'n': 8, 'logprobs': True, 'max_tokens': NEW, 'seed': 1}
  num_cut = 0
  for index, choice in enumerate(_ask(client, body, 'chat/completions')['choices']):
    text = choice['message']['content']
    if not (first := _stop_within(text)):
      continue
    stop = {'stop': [first, 'zzzz']}
    stopped = _ask(client, body | stop, 'chat/completions')['choices'][index]
    content = stopped['logprobs']['content']
    assert stopped['message']['content'] == text[: text.index(first)]
    joined = b''.join(bytes(entry['bytes']) for entry in content).decode(errors='replace')
    following = bytes(choice['logprobs']['content'][len(content)]['bytes']).decode(errors='replace')
    assert stopped['message']['content'].startswith(joined)
    assert len(joined) + max(len(following), 1) > len(stopped['message']['content'])
    events = _events(client, body | stop, 'chat/completions')
    own = [each['logprobs']['content'] for event in events for each in event['choices'] if each['index'] == index]
    assert [entry['token'] for each in own for entry in each] == [entry['token'] for entry in content]
    # A stop text that does not come holds back no more than until the end.
    unstopped = _events(client, body | {'stop': ['zzzz']}, 'chat/completions')
    own = [each['logprobs']['content'] for event in unstopped for each in event['choices'] if each['index'] == index]
    assert sum(map(len, own)) == len(choice['logprobs']['content'])
    num_cut += 1
  assert num_cut > 1


@pytest.mark.parametrize('name', ['gzip', 'br', 'deflate', 'zstd', 'identity, gzip', 'GZIP', 'x\tunknown'])
def test_bodies_in_another_coding_are_refused_by_its_name(client, name):
  for path in ('completions', 'chat/completions'):
    response = client.post(f'/v1/{path}', content=gzip.compress(b'{}'), headers={'Content-Encoding': name})
    assert response.status_code == 415
    assert 'Content-Encoding' in response.json()['error']['message']
    assert response.json()['error']['message'].isprintable()
  for plain in ('identity', 'Identity', '', ' '):
    response = client.post('/v1/completions', json=_PROMPT, headers={'Content-Encoding': plain})
    assert response.status_code == 200


def test_an_assistant_may_have_said_nothing(client):
  def ask(role, **content):
    messages = [{'role': 'user', 'content': 'owl'}, {'role': role} | content, {'role': 'user', 'content': 'fox'}]
    return client.post('/v1/chat/completions', json={'messages': messages, 'seed': 1, 'max_tokens': 4})

  nothing, empty = ask('assistant', content=None), ask('assistant', content='')
  assert nothing.status_code == 200
  assert nothing.json()['choices'] == empty.json()['choices']
  assert nothing.json()['usage'] == empty.json()['usage']
  assert ask('assistant', content=None, tool_calls=None, refusal=None).status_code == 200
  for role in ('user', 'system', 'developer'):
    assert ask(role, content=None).json()['error']['param'] == 'messages[1].content'
  assert ask('assistant').status_code == 400


def test_names_reach_the_template(worker):
  template = (
    "{% for m in messages %}{{ m['role'] }}{% if m.name %} {{ m.name }}{% endif %}: {{ m['content'] }}\n{% endfor %}"
  )
  own = make_tokenizer(template)
  messages = [{'role': 'user', 'content': 'hi', 'name': 'ann<|im_end|>'}, {'role': 'user', 'content': 'ho'}]
  answer = Answer(Served(worker, own, 'tiny', NEW), parse({'messages': messages}, is_chat=True, model='tiny'))
  # As by `apply_chat_template` of transformers 5.24; what users spell is text.
  assert own.decode(answer.choices[0].prompt) == 'user ann<|im_end|>: hi\nuser: ho\n'
  assert EOS not in answer.choices[0].prompt


@pytest.mark.parametrize('has_bos', [False, True])
def test_every_entry_reads_a_question_alike(worker, has_bos):
  """The endpoint, conversations and commands give the ids of the template, with one bos where it writes one."""
  template = ('{{ bos_token }}' if has_bos else '') + tiny_hub.CHAT
  own = HubTokenizer.from_parts(tiny_hub.backend(), bos_id=7, eos_ids=(EOS,), add_bos=True, chat_template=template)
  messages = [{'role': 'user', 'content': 'What is the capital of France?'}]
  ids = own.encode_chat(messages)
  assert ids.count(7) == has_bos
  text = messages[0]['content']
  asked = Answer(Served(worker, own, 'tiny', NEW), parse({'messages': messages}, is_chat=True, model='tiny'))
  tokens, lengths = encode_prompts(as_conversations([Prompt(text)]), own, max_new_tokens=NEW, max_length=LONGEST + NEW)
  decoder = types.SimpleNamespace(target=types.SimpleNamespace(vocab_size=own.vocab_size))
  session, read = types.SimpleNamespace(decoder=decoder, longest_prompt=LONGEST), []
  session.stream = lambda key, prompt: read.append(prompt) or iter(())
  list(Chat(session, own).ask(text))
  assert list(asked.choices[0].prompt) == tokens[0, : lengths[0]].tolist() == read[0] == ids


def test_requests_beside_each_other_are_as_alone(client):
  bodies = [
    {'prompt': 'the owl ' * (i % 5 + 1), 'seed': i, 'temperature': i % 3 / 2, 'top_k': i % 4, 'max_tokens': 1 + i % NEW}
    for i in range(14)
  ]
  alone = [_ask(client, body)['choices'][0]['text'] for body in bodies]
  with concurrent.futures.ThreadPoolExecutor(14) as pool:
    together = list(pool.map(lambda body: _ask(client, body)['choices'][0]['text'], bodies))
  assert together == alone


# Values that are refused, by field.
_TINY = 1e-300, 5e-324, 1e-46, 1e-60, 2e-46  # zero in float32
_HUGE = -1e-300, -1e300, 1e300
_WRONG = {
  'prompt': [None, '', [], [1, 'a'], [-1], [10**6], 'x y z ' * 100, 'a\ud800'], 'temperature': [-1, True, *_HUGE],
  'top_p': [0, 1 + 1e-12, *_TINY, *_HUGE], 'min_p': [1.0000001, *_HUGE], 'n': [17], 'seed': [0.5],
  'stop': [[''], ['x'] * 17], 'max_tokens': [NEW + 1, 0], 'logprobs': [21, True], 'presence_penalty': [0.5, 1e-300],
  'repetition_penalty': [1 + 1e-12], 'stream_options': [{'include_usage': True}], 'ignore_eos': [1], 'beams': [3],
  'messages': [[]], 'model': ['another'],
}  # fmt: skip
_WRONG_IN_STREAMS = {'stream_options': {'include_all': True}, 'echo': True, 'logprobs': 2}


def test_what_is_wrong_is_named(stub, tokenizer):
  client = client_of(stub, tokenizer)
  stub.start()
  bodies = [(field, {field: value}) for field, values in _WRONG.items() for value in values]
  bodies += [(field, {'stream': True, field: value}) for field, value in _WRONG_IN_STREAMS.items()]
  for field, body in bodies:
    response = client.post('/v1/completions', content=json.dumps({'prompt': 'a'} | body))
    error = response.json()['error']
    assert (response.status_code, error['param']) == (404 if field == 'model' else 400, field), body
    assert error['message']


def test_bodies_that_are_not_json_and_extreme_values(client):
  for content, message in (
    (b'{', 'body'), (b'\xff\xfe', 'not UTF-8'), (b'[]', 'JSON object'), (b'[' * 100_000, 'body'),
  ):  # fmt: skip
    response = client.post('/v1/completions', content=content)
    assert response.status_code == 400
    assert message in response.json()['error']['message']
  response = client.post('/v1/completions', content=b' ' * (2**22 + 1))
  assert response.status_code == 413
  bodies = [{'temperature': value} for value in (*_TINY, 1e-38, 1e-40, 1e6)]
  bodies += [{'min_p': value} for value in (*_TINY, 1e-40, 1.0)] + [{'top_p': 1.2e-38}]
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    responses = pool.map(lambda body: client.post('/v1/completions', json={'prompt': 'owl'} | body), bodies)
  for body, response in zip(bodies, responses, strict=True):
    assert response.status_code == 200, (body, response.text)


def test_other_places(client):
  assert client.get('/health').text == 'ok\n'
  (model,) = client.get('/v1/models').json()['data']
  assert model['id'] == 'tiny'
  assert client.get('/v1/models/tiny').json() == model
  for name in ('another', 'org/name', 'org%2Fname', 'tiny/', 'Tiny', '%1b[2J'):
    response = client.get(f'/v1/models/{name}')
    error = response.json()['error']
    assert (response.status_code, error['param'], error['code']) == (404, 'model', 'model_not_found')
    assert error['message'].startswith('there is no model')
    assert '\x1b' not in error['message']
  for method, path, status, allowed in (
    ('GET', '/v1/completions', 405, {'POST'}),
    ('DELETE', '/v1/chat/completions', 405, {'POST'}),
    ('OPTIONS', '/v1/completions', 405, {'POST'}),
    ('POST', '/v1/models', 405, {'GET', 'HEAD'}),
    ('PUT', '/metrics', 405, {'GET', 'HEAD'}),
    ('GET', '/v1/../../etc/passwd', 404, None),
    ('POST', '/v1/embeddings', 404, None),
    ('GET', '/%1b[2J', 404, None),
    ('GET', '/health/', 404, None),  # no redirect: its address would be that of the Host
    ('POST', '/v1/completions/', 404, None),
  ):
    response = client.request(method, path, headers={'Host': 'elsewhere'}, follow_redirects=False)
    assert response.status_code == status
    message = response.json()['error']['message']
    assert 'there is no' in message
    assert message.isprintable()
    methods = response.headers.get('allow')
    assert (set(methods.split(', ')) if methods else None) == allowed


def test_metrics_count(client):
  def numbers():
    lines = [line.rsplit(' ', 1) for line in client.get('/metrics').text.splitlines() if not line.startswith('#')]
    return {name: float(value) for name, value in lines}

  before = numbers()
  usage = _ask(client, _PROMPT | {'max_tokens': 5})['usage']  # rounds give more, which nobody sees
  after = numbers()

  def grown(name):
    return after[f'spectr_jax_{name}'] - before.get(f'spectr_jax_{name}', 0)

  assert grown('requests_total{kind="completions",outcome="answered"}') == 1
  assert grown('prompt_tokens_total') == usage['prompt_tokens']
  assert grown('time_to_first_token_seconds_count') == 1
  assert grown('tokens_total') == usage['completion_tokens']
  assert grown('target_calls_total') == usage['spectr_jax']['target_calls']
  assert after['spectr_jax_tokens_per_call'] >= 1
  assert after['spectr_jax_time_to_first_token_seconds_bucket{le="+Inf"}'] >= 1


def test_a_failed_round_fails_its_request_alone(models, tokenizer):
  target = models[0]
  bad = tokenizer.encode_prompt('fox')[-1]

  def apply_fn(params, tokens, positions, mask, cache):
    output = target.apply_fn(params, tokens, positions, mask, cache)
    is_bad = (tokens == bad)[..., None] & (positions[..., None] == 0)
    return dataclasses.replace(output, logits=jnp.where(is_bad, jnp.nan, output.logits))

  worker = make_worker([dataclasses.replace(target, apply_fn=apply_fn), models[1]], tokenizer)
  with running(worker):
    client = client_of(worker, tokenizer)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
      bodies = [{'prompt': [bad], 'seed': 0}, _PROMPT, {'prompt': 'the owl', 'seed': 1}]
      failed, *others = pool.map(lambda body: client.post('/v1/completions', json=body), bodies)
    assert failed.status_code == 500
    assert 'not finite' in failed.json()['error']['message']
    assert [each.status_code for each in others] == [200, 200]
    assert client.post('/v1/completions', json=_PROMPT).json()['choices'] == others[0].json()['choices']
