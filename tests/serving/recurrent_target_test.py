"""A folder of Qwen 3.5's layers talks in turns, in a chat and behind the endpoint, and reads what is new of each."""

import pytest
import tiny_hub
from hub_specs import SPECS

import spectr_jax
from decode.conversation import Chat
from spectr_jax import SamplingParams, Session
from tests.serving.stub import EOS, LONGEST, NEW, client_of, make_worker, running

_TEMPLATE = "{% for m in messages %}{{ m['role'][0] + m['content'] + '.' }}{% endfor %}a"
pytestmark = pytest.mark.slow
_QUESTIONS = 'the owl', 'and then', 'why'


@pytest.fixture(scope='module')
def target_and_tokenizer(tmp_path_factory):
  """It says letters alone, each a token, so that the text of an answer has the ids of the answer."""
  folder, backend = tmp_path_factory.mktemp('qwen'), tiny_hub.backend(merges=())
  spec = SPECS['qwen3_5'] | {'vocab_size': backend.get_vocab_size() + 64, 'max_position_embeddings': LONGEST + NEW}
  tensors = tiny_hub.tensors_of(spec)
  letters = [backend.token_to_id(letter) for letter in 'abcdefghijklmnopqrstuvwxyz']
  said = tensors['lm_head.weight'][letters]
  tensors['lm_head.weight'][:] = 0
  tensors['lm_head.weight'][letters] = said
  tiny_hub.write(folder, backend, chat_template=_TEMPLATE, generation_config={'eos_token_id': EOS})
  tiny_hub.write_model(folder, spec, tensors)
  return spectr_jax.load_model(folder)


@pytest.fixture(scope='module')
def recurrent_worker(target_and_tokenizer):
  """The target drafts for itself, so that a recurrent drafter takes part."""
  target, tokenizer = target_and_tokenizer
  with running(make_worker([target, target], tokenizer)) as worker:
    yield worker


def _expected(tokenizer, answers):
  """What turns read: a row ends with a token that is not read yet; what stands before it is not read again."""
  messages, read, held = [], [], 0
  for question, answer in zip(_QUESTIONS, answers, strict=True):
    prompt = tokenizer.encode_chat([*messages, {'role': 'user', 'content': question}])
    read.append(len(prompt) - held)
    messages += [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]
    held = len(prompt) + len(answer) - 1
  return read


def test_turns_of_a_chat(recurrent_worker, target_and_tokenizer):
  tokenizer = target_and_tokenizer[1]
  chat, answers, read = Chat(Session(recurrent_worker._decoder, sampling=SamplingParams(0.0)), tokenizer), [], []
  for question in _QUESTIONS:
    answers.append(''.join(chat.ask(question)))
    read.append(chat.answer.num_read)
  assert [len(answer) for answer in answers] == [NEW] * 3
  assert read == _expected(tokenizer, answers)


def test_turns_behind_the_endpoint(recurrent_worker, target_and_tokenizer):
  tokenizer = target_and_tokenizer[1]
  rows, messages, answers, read = recurrent_worker._rows, [], [], []
  with client_of(recurrent_worker, tokenizer) as client:
    for question in _QUESTIONS:
      messages.append({'role': 'user', 'content': question})
      before = rows.num_read
      body = {'messages': messages, 'temperature': 0, 'max_tokens': NEW}
      answer = client.post('/v1/chat/completions', json=body).json()['choices'][0]['message']
      messages.append({'role': 'assistant', 'content': answer['content']})
      answers.append(answer['content'])
      read.append(rows.num_read - before)
  assert [len(answer) for answer in answers] == [NEW] * 3
  # Of a prompt, rows count the tokens before the last one.
  assert read == [num - 1 for num in _expected(tokenizer, answers)]
