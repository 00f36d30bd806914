"""Tools that others wrote talk with the endpoint: the client of `openai`, and the tasks of `lm-eval`."""

import json
import pathlib
import shutil

import commands
import jax
import numpy as np
import pytest

import spectr_jax
from spectr_jax import SamplingParams, log_likelihood
from tests.serving.stub import client_of, make_app_of, running
from tests.serving.tool_models import ALL, make_tool_worker, tokenizer_of

pytestmark = pytest.mark.clients

_ROOT = pathlib.Path(__file__).parents[2]
_TARGET, _DRAFT = 'pretrained/draft', 'pretrained/draft_undistilled'
_NEW = 24
_QUESTIONS = [
  ('Mr. Speaker, I rise today to', [' honor', ' the purple', ' zebra of']),
  ('It was a dark and', [' stormy night', ' bill', ' the the']),
  ('I thank the gentleman for', [' yielding', ' his', ' seven']),
  ('She looked at him and', [' said', ' Senate', ' smiled']),
]


@pytest.fixture(scope='module', params=['with a draft', 'without'])
def address(request):
  guesses = [f'--draft={_DRAFT}', '--num_drafts=2', '--draft_length=3']
  own = guesses if request.param == 'with a draft' else ['--method=autoregressive']
  sizes = f'--max_new_tokens={_NEW}', '--longest_prompt=128', '--batch_size=4', '--port=0'
  process = commands.start('decode.serve', f'--target={_TARGET}', *own, *sizes, '--api_key=secret')
  line = process.stdout.readline()
  assert line.startswith('serving '), process.stderr.read()
  yield line.split(' at ')[1].split(',')[0]
  process.terminate()
  process.communicate(timeout=60)


@pytest.fixture(scope='module')
def model():
  return spectr_jax.load_model(_ROOT / _TARGET)


def _greedy(model, ids):
  target, tokenizer = model
  generated = spectr_jax.generate(
    jax.random.key(0), target, None, np.array([ids]), [len(ids)], method='autoregressive', max_new_tokens=_NEW,
    sampling=SamplingParams(temperature=0), eos_id=tokenizer.eos_ids,
  )  # fmt: skip
  return np.asarray(generated.tokens[0, : int(generated.lengths[0])]).tolist()


def test_openai(address, model):
  import openai

  client, (_, tokenizer) = openai.OpenAI(base_url=address, api_key='secret', max_retries=0), model
  assert [each.id for each in client.models.list()] == ['draft']
  assert client.models.retrieve('draft').id == 'draft'
  with pytest.raises(openai.NotFoundError, match='there is no model') as caught:
    client.models.retrieve('org/another')
  assert (caught.value.param, caught.value.code) == ('model', 'model_not_found')
  text = _QUESTIONS[0][0]
  asked = {'model': 'draft', 'prompt': text, 'temperature': 0, 'max_tokens': _NEW}
  expected = tokenizer.decode(_greedy(model, tokenizer.encode_prompt(text)))
  completion = client.completions.create(**asked, logprobs=2)
  assert completion.choices[0].text == expected
  assert completion.usage.completion_tokens == _NEW
  assert len(completion.choices[0].logprobs.top_logprobs) == _NEW
  for token, offset in zip(
    completion.choices[0].logprobs.tokens, completion.choices[0].logprobs.text_offset, strict=True
  ):
    assert token in ('<eos>', expected[offset : offset + len(token)])
  streamed = client.completions.create(**asked, stream=True)
  assert ''.join(chunk.choices[0].text for chunk in streamed) == expected
  with pytest.raises(openai.BadRequestError, match='max_tokens must be at most'):
    client.completions.create(model='draft', prompt=text, max_tokens=10_000)
  with pytest.raises(openai.BadRequestError, match='no chat template|takes no conversations'):
    client.chat.completions.create(model='draft', messages=[{'role': 'user', 'content': 'hello'}])
  with pytest.raises(openai.NotFoundError, match='there is no model'):
    client.completions.create(model='another', prompt=text)
  with pytest.raises(openai.AuthenticationError):
    openai.OpenAI(base_url=address, api_key='wrong', max_retries=0).models.list()


@pytest.fixture
def in_process(client):
  """The client of `openai` 3.57 before the tiny pair, whose model has a chat template and special tokens."""
  import openai

  return openai.OpenAI(base_url='http://testserver/v1', api_key='none', max_retries=0, http_client=client)


def test_answers_are_sent_back_as_openai_gives_them(in_process):
  asked = {'model': 'tiny', 'seed': 3, 'max_tokens': 8}
  messages = [{'role': 'user', 'content': 'owl', 'name': 'ann'}]
  nothing = {'metadata': {}, 'service_tier': 'auto', 'store': False, 'function_call': 'none', 'verbosity': 'medium'}
  extra = {'stop_token_ids': [], 'min_tokens': 0}
  first = in_process.chat.completions.create(messages=messages, **asked)
  again = in_process.chat.completions.create(messages=messages, **asked, **nothing, extra_body=extra)
  assert again.choices == first.choices
  message = first.choices[0].message
  for answer in (message, message.model_dump() | {'annotations': [], 'tool_calls': []}):
    talk = [*messages, answer, {'role': 'user', 'content': 'the owl'}]
    assert in_process.chat.completions.create(messages=talk, **asked).choices[0].message.content is not None


def test_log_probabilities_as_openai_reads_them(in_process):
  for seed in range(8):
    asked = {'model': 'tiny', 'seed': seed, 'logprobs': True, 'top_logprobs': 5, 'max_tokens': 12}
    answer = in_process.chat.completions.create(messages=[{'role': 'user', 'content': 'owl'}], **asked)
    content = answer.choices[0].logprobs.content
    joined = b''.join(bytes(entry.bytes or []) for entry in content)
    assert joined.decode(errors='replace') == answer.choices[0].message.content
    assert all(len({top.token for top in entry.top_logprobs}) == 5 for entry in content)


_TASK = """
task: tiny_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
{more}
"""
_MORE = {
  # What some of its tasks write: fields of other programs, and several answers to each question.
  'beams': 'output_type: generate_until\ndoc_to_target: "x"\nrepeats: 4\ngeneration_kwargs: {until: ["\\n\\n\\n"],'
  ' do_sample: true, temperature: 1, num_beams: 1, max_new_tokens: 7, max_gen_toks: 20}\n'
  'metric_list: [{metric: exact_match}]\nfilter_list: [{name: all, filter: [{function: take_first_k, k: 4}]}]',
  'choice': 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: 0\n'
  'metric_list: [{metric: acc}]',
  'text': 'output_type: generate_until\ndoc_to_target: "x"\ngeneration_kwargs: {until: ["\\n\\n\\n"], do_sample: false,'
  f' temperature: 0, max_gen_toks: {_NEW}}}\nmetric_list: [{{metric: exact_match}}]',
}


@pytest.fixture(scope='module')
def tasks(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tasks')
  data = folder / 'questions.jsonl'
  data.write_text(''.join(json.dumps({'question': text, 'choices': own}) + '\n' for text, own in _QUESTIONS))
  for kind, more in _MORE.items():
    (folder / f'{kind}.yaml').write_text(_TASK.format(kind=kind, data=data, more=more))
  tokenizer = tmp_path_factory.mktemp('tokenizer')
  shutil.copy(_ROOT / _TARGET / 'tokenizer.json', tokenizer)
  (tokenizer / 'tokenizer_config.json').write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
  return folder, tokenizer


def _evaluate(address, tasks, kind, monkeypatch, **more):
  import lm_eval
  from lm_eval.tasks import TaskManager

  monkeypatch.setenv('OPENAI_API_KEY', 'secret')
  folder, tokenizer = tasks
  arguments = {
    'model': 'draft', 'base_url': f'{address}/completions', 'tokenizer': str(tokenizer), 'max_length': 120,
    'num_concurrent': 3, 'max_retries': 1, **more,
  }  # fmt: skip
  results = lm_eval.simple_evaluate(
    'local-completions', model_args=arguments, tasks=[f'tiny_{kind}'], bootstrap_iters=0, log_samples=True,
    task_manager=TaskManager(include_path=str(folder), include_defaults=False),
  )  # fmt: skip
  return sorted(results['samples'][f'tiny_{kind}'], key=lambda sample: sample['doc_id'])


def test_multiple_choice_of_lm_eval(address, tasks, model, monkeypatch):
  target, tokenizer = model
  samples = _evaluate(address, tasks, 'choice', monkeypatch)
  assert len(samples) == len(_QUESTIONS)
  for sample, (text, choices) in zip(samples, _QUESTIONS, strict=True):
    for choice, (value, is_greedy) in zip(choices, sample['filtered_resps'], strict=True):
      start, whole = len(tokenizer.encode(text)), tokenizer.encode(text + choice)
      expected, expected_greedy = log_likelihood(target, [whole]).of(0, start, len(whole))
      assert float(value) == pytest.approx(expected, abs=1e-3), (text, choice)
      assert str(is_greedy) == str(expected_greedy)


def test_texts_of_lm_eval(address, tasks, model, monkeypatch):
  tokenizer = model[1]
  for sample, (text, _) in zip(_evaluate(address, tasks, 'text', monkeypatch), _QUESTIONS, strict=True):
    expected = tokenizer.decode(_greedy(model, tokenizer.encode(text)))
    assert sample['filtered_resps'] == [expected.split('\n\n\n')[0]]


def test_repeats_of_lm_eval(address, tasks, model, monkeypatch):
  """lm-eval 0.4.13 sends every repeat with one seed; in requests of as many prompts each has a key of its own."""
  for batch_size, num_texts in ((1, 1), (4, 4)):
    for sample in _evaluate(address, tasks, 'beams', monkeypatch, batch_size=batch_size):
      (texts,) = sample['resps']
      assert len(texts) == 4
      assert len(set(texts)) == num_texts
      assert all(1 <= len(model[1].encode(text)) <= 7 + 2 for text in texts)


def test_constraints_as_openai_asks_for_them(in_process):
  schema = {
    'type': 'object',
    'properties': {'a': {'type': 'boolean'}},
    'required': ['a'],
    'additionalProperties': False,
  }
  form = {'type': 'json_schema', 'json_schema': {'name': 'it', 'schema': schema, 'strict': True}}
  asked = {'model': 'tiny', 'messages': [{'role': 'user', 'content': 'owl'}], 'seed': 3}
  (choice,) = in_process.chat.completions.create(**asked, response_format=form).choices
  assert choice.finish_reason == 'length' or set(json.loads(choice.message.content)) == {'a'}
  (choice,) = in_process.chat.completions.create(
    **asked, extra_body={'structured_outputs': {'choice': ['a', 'b']}}
  ).choices
  assert choice.message.content in ('a', 'b')


@pytest.fixture(scope='module')
def tool_worker():
  with running(make_tool_worker(2, longest=4096, most_new=256)) as worker:
    yield worker


_COLORS = {'enum': ['red', 'blue']}
_TOOL = {
  'type': 'function',
  'function': {
    'name': 'paint', 'strict': True,
    'parameters': {
      'type': 'object', 'properties': {'color': _COLORS, 'more': {'type': 'array', 'items': _COLORS, 'maxItems': 2}},
      'required': ['color', 'more'], 'additionalProperties': False,
    },
  },
}  # fmt: skip


@pytest.mark.parametrize('name', ['hermes', 'llama3_json', 'gemma4'])
def test_tools_as_openai_asks_for_them(tool_worker, name):
  import openai

  with client_of(tool_worker, tokenizer_of(name, ALL), most_new=256) as http:
    client = openai.OpenAI(base_url='http://testserver/v1', api_key='none', max_retries=0, http_client=http)
    asked = {'model': 'tiny', 'seed': 3, 'tools': [_TOOL], 'parallel_tool_calls': False}
    talk = [{'role': 'user', 'content': 'owl'}]
    for _ in range(2):  # turns, of which the second has the first call and its result
      (choice,) = client.chat.completions.create(messages=talk, tool_choice='required', **asked).choices
      (call,) = choice.message.tool_calls
      assert (choice.finish_reason, call.function.name) == ('tool_calls', 'paint')
      assert json.loads(call.function.arguments)['color'] in ('red', 'blue')
      talk += [choice.message, {'role': 'tool', 'tool_call_id': call.id, 'content': 'done'}]
    with client.chat.completions.stream(messages=talk[:1], tool_choice='required', **asked) as stream:
      pieces = [event.arguments_delta for event in stream if event.type == 'tool_calls.function.arguments.delta']
      (again,) = stream.get_final_completion().choices
    first = talk[1].tool_calls[0].function
    assert again.finish_reason == 'tool_calls'
    assert ''.join(pieces) == again.message.tool_calls[0].function.arguments == first.arguments
    assert len(pieces) > 1
    with pytest.raises(openai.NotFoundError, match='OpenAIChatModel'):
      client.responses.create(model='tiny', input='owl')


def test_an_agent_of_pydantic_ai(tool_worker):
  """Version 2.68: it offers the form of its answer as a tool, and must get one that is valid at once."""
  import asyncio
  import typing

  import httpx
  import openai
  import pydantic
  from pydantic_ai import Agent, UsageLimitExceeded
  from pydantic_ai.models.openai import OpenAIChatModel
  from pydantic_ai.providers.openai import OpenAIProvider
  from pydantic_ai.usage import UsageLimits

  class Painting(pydantic.BaseModel):
    color: typing.Literal['red', 'blue']
    is_large: bool

  async def work(app):
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport) as http:
      client = openai.AsyncOpenAI(base_url='http://testserver/v1', api_key='none', max_retries=0, http_client=http)
      model = OpenAIChatModel('tiny', provider=OpenAIProvider(openai_client=client))
      agent, seen = Agent(model, output_type=Painting, retries=0), []

      @agent.tool_plain
      def mix(colors: list[typing.Literal['red', 'blue']]) -> str:
        seen.append(colors)
        return 'mixed'

      answers = []
      for seed in range(3):
        try:
          settings = {'seed': seed, 'parallel_tool_calls': False}
          result = await agent.run('owl', model_settings=settings, usage_limits=UsageLimits(request_limit=3))
          answers.append(result.output)
        except UsageLimitExceeded:  # it went on mixing
          pass
      return answers, seen

  app = make_app_of(tool_worker, tokenizer_of('hermes', ALL), most_new=256)
  answers, seen = asyncio.run(work(app))
  assert answers
  assert all(isinstance(each, Painting) for each in answers)
  assert all(color in ('red', 'blue') for colors in seen for color in colors)
