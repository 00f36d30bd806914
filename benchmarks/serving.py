"""Load on an endpoint: many clients at once, mixed lengths, some of which go away in the middle of an answer.

Command   python -m decode.serve --target=pretrained/target --draft=pretrained/draft --batch_size=32 --most_waiting=512
          python -m benchmarks.serving --url=http://127.0.0.1:8000/v1 --num_clients=256 --seconds=600
          A soak, of an endpoint whose memory is looked at as well:
          python -m benchmarks.serving --num_clients=16 --seconds=1200 --mixed --pid=PID
          Conversations, with an endpoint of whatever engine, such as llama-server -m MODEL.gguf -np 8 -c 16384 -t 2:
          python -m benchmarks.serving --url=http://127.0.0.1:8080/v1 --num_clients=8 --seconds=90 --turns=4
Prompts   those of --prompts, again and again; limits of 8 to --max_tokens new tokens, drawn anew for each request
Clients   each sends its next request when the last is answered; a share of --leave of all answers is left early
Mixed     requests draw what they ask for: nothing more, an expression, a schema, also one behind a text, penalties, a
          seed, or a header before the prompt that others have, too; answers that do not follow what was asked for are
          counted as invalid
Turns     each client holds one conversation after another, greedy and streamed, with answers of up to --max_tokens;
          all begin with the first prompts of the file as a system message, so that much of each prompt is known

Every request is counted by how it ended. What is compared with `decode.bulk` are new tokens over seconds, both counted
by the endpoint itself. Conversations count the tokens that `usage` says, and the time to the first piece of a text.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import pathlib
import random
import re
import time
from typing import Any

from absl import flags

from common import command_line
from common.output_files import OutputFiles
from decode.experiment.prompt_options import SHIPPED_PROMPTS
from decode.experiment.prompts import read_prompts

_REGEX = '[a-z]{3,8}( [a-z]{3,8}){0,3}'
_SCHEMA = {'type': 'object', 'properties': {'kind': {'enum': ['a', 'b']}, 'size': {'type': 'integer'}}}
_SCHEMA |= {'required': ['kind', 'size'], 'additionalProperties': False}
_MARKER = ' the '  # frequent in text, as the end of a chain of thought is not
_PENALTIES = {'presence_penalty': 0.5, 'frequency_penalty': 0.3, 'logit_bias': {'5': -2.0}, 'min_tokens': 4}
# What a request may ask for besides, and what it may have in front.
_MIXED: tuple[dict[str, Any], ...] = (
  {}, {'temperature': 0}, {'structured_outputs': {'regex': _REGEX}}, {'structured_outputs': {'json': _SCHEMA}},
  {'structured_outputs': {'json': _SCHEMA}, 'constraint_after': _MARKER}, _PENALTIES, {'seed': 5},
  {'stop': ['.'], 'top_p': 0.9}, {'n': 2},
)  # fmt: skip
_HEADERS = '', 'Answer as briefly as you can, in plain words, and do not repeat the question. ' * 2
_NUM_SHARED = 8  # prompts that all conversations begin with


def _is_valid(body: dict[str, Any], choice: dict[str, Any]) -> bool:
  """Whether an answer that ended by itself follows the constraint that was asked for."""
  asked, text = body.get('structured_outputs', {}), choice['text']
  if 'constraint_after' in body:
    _, marker, text = text.partition(body['constraint_after'])
    if not marker:  # it ended before
      return True
  if choice['finish_reason'] != 'stop':
    return True
  if 'regex' in asked:
    return re.fullmatch(asked['regex'], text) is not None
  if 'json' in asked:
    value = json.loads(text)
    return set(value) == {'kind', 'size'} and value['kind'] in ('a', 'b') and isinstance(value['size'], int)
  return True


async def _client(
  session, prompts: list[str], request: dict, until: float, leave: float, seed: int, outcome, is_mixed: bool
) -> None:
  """Asks until the time is over, and counts how its requests ended and how long the answered ones took."""
  import httpx

  ends, seconds = outcome
  draws = random.Random(seed)
  while (start := time.perf_counter()) < until:
    body = request | {'prompt': draws.choice(prompts), 'max_tokens': draws.randint(8, request['max_tokens'])}
    if is_mixed:
      body |= draws.choice(_MIXED)
      body['prompt'] = draws.choice(_HEADERS) + body['prompt']
    try:
      if draws.random() < leave:
        async with session.stream('POST', 'completions', json=body | {'stream': True}) as response:
          async for _ in response.aiter_lines():
            break
        ends['left'] += 1
        continue
      response = await session.post('completions', json=body)
      ends[str(response.status_code)] += 1
      if response.status_code == 200:
        seconds.append(time.perf_counter() - start)
        ends['invalid'] += sum(not _is_valid(body, choice) for choice in response.json()['choices'])
      elif response.status_code == 429:
        await asyncio.sleep(float(response.headers['Retry-After']))
    except httpx.HTTPError as error:
      ends[type(error).__name__] += 1
      await asyncio.sleep(1)


async def _talk(session, prompts: list[str], request: dict, num_turns: int, until: float, seed: int, answers: list):
  """Holds conversations until the time is over. Adds each answer's seconds to its first piece, and its usage."""
  draws = random.Random(seed)
  header = {'role': 'system', 'content': '\n'.join(('Carry on in the manner of these.', *prompts[:_NUM_SHARED]))}
  messages = [header]
  while (start := time.perf_counter()) < until:
    messages = [header] if len(messages) > 2 * num_turns else messages
    messages.append({'role': 'user', 'content': draws.choice(prompts)})
    text, seconds, usage = '', None, None
    async with session.stream('POST', 'chat/completions', json=request | {'messages': messages}) as response:
      async for line in response.aiter_lines():
        chunk = json.loads(line.removeprefix('data: ')) if line.startswith(('data: {', '{')) else {}
        piece = ''.join(choice['delta'].get('content') or '' for choice in chunk.get('choices', ()))
        seconds = time.perf_counter() - start if piece and not text else seconds
        text, usage = text + piece, chunk.get('usage') or usage
        if 'error' in chunk:
          raise ValueError(f'the endpoint answers {response.status_code}: {chunk["error"]}')
    if usage is None:
      raise ValueError(f'the endpoint answers {response.status_code}, and does not count tokens')
    messages.append({'role': 'assistant', 'content': text})
    answers.append((time.perf_counter() - start if seconds is None else seconds, usage))


async def _memory(pid: int | None, until: float) -> list[int]:
  """The resident bytes of a process, every second; none without one."""
  found = []
  while pid is not None and time.perf_counter() < until:
    status = pathlib.Path(f'/proc/{pid}/status').read_text(encoding='ascii')
    found.append(1024 * int(status.split('VmRSS:')[1].split()[0]))
    await asyncio.sleep(1)
  return found


@contextlib.asynccontextmanager
async def _session(url: str, num_clients: int):
  """A client of an endpoint, and the name of its model; `ValueError` if it cannot be reached, or goes."""
  import httpx

  limits = httpx.Limits(max_connections=num_clients)
  try:
    async with httpx.AsyncClient(base_url=f'{url}/', timeout=600, limits=limits) as session:
      (model,) = (await session.get('models')).json()['data']
      yield session, model['id']
  except httpx.HTTPError as error:
    raise ValueError(f'{url}: {error}') from error


def _quantiles(times: list[float], **shares: float) -> dict[str, float]:
  times = sorted(times) or [float('nan')]
  return {name: times[int(share * (len(times) - 1))] for name, share in shares.items()}


async def converse(
  url: str, prompts: list[str], *, num_clients: int, seconds: float, max_tokens: int, num_turns: int
) -> dict[str, Any]:
  """Lets `num_clients` hold conversations of `num_turns` turns at an endpoint's URL, up to `/v1`, for so many seconds.
  Returns the tokens of prompts and answers as the endpoint counts them, and quantiles of seconds to a first piece.
  """
  request = {'max_tokens': max_tokens, 'temperature': 0, 'stream': True, 'stream_options': {'include_usage': True}}
  answers = []
  async with _session(url, num_clients) as (session, model):
    request, start = request | {'model': model}, time.perf_counter()
    talks = (_talk(session, prompts, request, num_turns, start + seconds, seed, answers) for seed in range(num_clients))
    await asyncio.gather(*talks)
    elapsed = time.perf_counter() - start
  sums = {name: sum(usage[name] for _, usage in answers) for name in ('prompt_tokens', 'completion_tokens')}
  firsts = _quantiles([first for first, _ in answers], median=0.5, p90=0.9)
  return {'seconds': elapsed, 'answers': len(answers), **sums, 'first_seconds': firsts}


async def measure(
  url: str, prompts: list[str], *, num_clients: int, seconds: float, max_tokens: int, leave: float,
  is_mixed: bool = False, pid: int | None = None,
):  # fmt: skip
  """Runs the load of `num_clients` at an endpoint's URL, up to `/v1`, for so many seconds; a share `leave` goes early.
  Returns requests by their end, quantiles of seconds of those that were answered, by how much the endpoint's counters
  grew, none of these if it is gone, and the median bytes of a process in each quarter of the time.
  """
  import httpx

  outcome = collections.Counter(), []
  async with _session(url, num_clients) as (session, model):
    request = {'model': model, 'max_tokens': max_tokens, 'temperature': 1.0}
    before, start = await _counters(session), time.perf_counter()
    until = start + seconds
    clients = (_client(session, prompts, request, until, leave, seed, outcome, is_mixed) for seed in range(num_clients))
    memory, *_ = await asyncio.gather(_memory(pid, until), *clients)
    elapsed = time.perf_counter() - start
    try:
      after = await _counters(session)
    except httpx.TransportError:  # it ended before the clients did
      after = {}
  ends, times = outcome
  quantiles = _quantiles(times, median=0.5, p99=0.99)
  grown = {name: after[name] - before.get(name, 0) for name in after if name.endswith('_total')}
  size = len(memory) // 4
  quarters = [sorted(memory[i * size : (i + 1) * size])[size // 2] for i in range(4)] if size else []
  return {
    'seconds': elapsed, 'ends': dict(ends), 'answer_seconds': quantiles, 'counted': grown, 'quarters_bytes': quarters,
  }  # fmt: skip


async def _counters(session) -> dict[str, float]:
  text = (await session.get('../metrics')).text
  lines = (line.rsplit(' ', 1) for line in text.splitlines() if not line.startswith('#'))
  return {name: float(value) for name, value in lines if '{' not in name}


def describe(load: dict) -> list[str]:
  if 'first_seconds' in load:
    first = load['first_seconds']
    return [
      f'{load["answers"]:,} answers of {load["completion_tokens"]:,} tokens to {load["prompt_tokens"]:,} in'
      f' {load["seconds"]:.0f} s: {load["completion_tokens"] / load["seconds"]:.1f} tokens/s; the first piece after'
      f' {first["median"]:.2f} s, 90% at most {first["p90"]:.2f}'
    ]
  ends = ', '.join(f'{name} {number:,}' for name, number in sorted(load['ends'].items()))
  counted = load['counted']
  number = sum(number for name, number in load['ends'].items() if name != 'invalid')  # those were answered
  requests = f'{number:,} requests in {load["seconds"]:.0f} s: {ends}'
  if not counted:
    return [requests, 'the endpoint is gone']
  tokens, calls = counted['spectr_jax_tokens_total'], counted['spectr_jax_target_calls_total']
  lines = [
    requests,
    f'{tokens / load["seconds"]:.1f} tokens/s, {tokens / max(calls, 1):.2f} per target call; an answer takes'
    f' {load["answer_seconds"]["median"]:.2f} s, 99% at most {load["answer_seconds"]["p99"]:.2f}',
  ]
  if load['quarters_bytes']:
    sizes = ', '.join(f'{each / 2**20:,.0f}' for each in load['quarters_bytes'])
    lines.append(f'memory in each quarter of the time: {sizes} MiB')
  return lines


if __name__ == '__main__':
  _URL = flags.DEFINE_string('url', 'http://127.0.0.1:8000/v1', 'The endpoint.')
  _CLIENTS = flags.DEFINE_integer('num_clients', 256, 'Clients at once.', lower_bound=1)
  _SECONDS = flags.DEFINE_float('seconds', 600, 'How long they ask.', lower_bound=1)
  _MAX_TOKENS = flags.DEFINE_integer('max_tokens', 64, 'The most new tokens of a request.', lower_bound=8)
  _LEAVE = flags.DEFINE_float(
    'leave', 0.1, 'Share of requests that are left after the first token.', lower_bound=0, upper_bound=1
  )
  _MIXED_KINDS = flags.DEFINE_bool('mixed', False, 'Let requests ask for different things.')
  _PID = flags.DEFINE_integer('pid', None, 'The process of the endpoint, to look at its memory.')
  _TURNS = flags.DEFINE_integer(
    'turns', None, 'Hold conversations of so many turns, in place of single requests.', lower_bound=1
  )
  _PROMPTS = flags.DEFINE_string('prompts', str(SHIPPED_PROMPTS), 'File of prompts.')
  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the results.')

  def main():
    texts = [prompt.text for prompt in read_prompts(_PROMPTS.value)]
    sizes = {'num_clients': _CLIENTS.value, 'seconds': _SECONDS.value, 'max_tokens': _MAX_TOKENS.value}
    if _TURNS.value is not None and any(flag.present for flag in (_LEAVE, _MIXED_KINDS, _PID)):
      raise ValueError('--leave, --mixed and --pid are of single requests, without --turns')
    others = {'leave': _LEAVE.value, 'is_mixed': _MIXED_KINDS.value, 'pid': _PID.value}
    run, others = (measure, others) if _TURNS.value is None else (converse, {'num_turns': _TURNS.value})
    with OutputFiles(output=_OUTPUT.value).apart_from({'prompts': [_PROMPTS.value]}) as files:
      load = asyncio.run(run(_URL.value, texts, **sizes, **others))
      files.write_after(lambda: print('\n'.join(describe(load))), output=json.dumps(load, indent=2) + '\n')

  command_line.run(main)
