"""Load on an endpoint: many clients at once, mixed lengths, some of which go away in the middle of an answer.

Command   python -m decode.serve --target=pretrained/target --draft=pretrained/draft --batch_size=32 --most_waiting=512
          python -m benchmarks.serving --url=http://127.0.0.1:8000/v1 --num_clients=256 --seconds=600
Prompts   those of --prompts, again and again; limits of 8 to --max_tokens new tokens, drawn anew for each request
Clients   each sends its next request when the last is answered; a share of --leave of all answers is left early

Every request is counted by how it ended. What is compared with `decode.bulk` are new tokens over seconds, both counted
by the endpoint itself.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import time

from absl import flags

from common import command_line
from common.output_files import OutputFiles
from decode.experiment.prompt_options import SHIPPED_PROMPTS
from decode.experiment.prompts import read_prompts


async def _client(session, prompts: list[str], request: dict, until: float, leave: float, seed: int, outcome) -> None:
  """Asks until the time is over, and counts how its requests ended and how long the answered ones took."""
  import httpx

  ends, seconds = outcome
  draws = random.Random(seed)
  while (start := time.perf_counter()) < until:
    body = request | {'prompt': draws.choice(prompts), 'max_tokens': draws.randint(8, request['max_tokens'])}
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
      elif response.status_code == 429:
        await asyncio.sleep(float(response.headers['Retry-After']))
    except httpx.HTTPError as error:
      ends[type(error).__name__] += 1
      await asyncio.sleep(1)


async def measure(url: str, prompts: list[str], *, num_clients: int, seconds: float, max_tokens: int, leave: float):
  """Runs the load of `num_clients` at an endpoint's URL, up to `/v1`, for so many seconds; a share `leave` goes early.
  Returns requests by their end, quantiles of seconds of those that were answered, and by how much the endpoint's
  counters grew; none of these if it is gone.
  """
  import httpx

  outcome = collections.Counter(), []
  limits = httpx.Limits(max_connections=num_clients)
  async with httpx.AsyncClient(base_url=f'{url}/', timeout=600, limits=limits) as session:
    (model,) = (await session.get('models')).json()['data']
    request = {'model': model['id'], 'max_tokens': max_tokens, 'temperature': 1.0}
    before, start = await _counters(session), time.perf_counter()
    until = start + seconds
    clients = [_client(session, prompts, request, until, leave, seed, outcome) for seed in range(num_clients)]
    await asyncio.gather(*clients)
    elapsed = time.perf_counter() - start
    try:
      after = await _counters(session)
    except httpx.TransportError:  # it ended before the clients did
      after = {}
  ends, times = outcome
  times = sorted(times) or [float('nan')]
  quantiles = {name: times[int(share * (len(times) - 1))] for name, share in (('median', 0.5), ('p99', 0.99))}
  grown = {name: after[name] - before.get(name, 0) for name in after if name.endswith('_total')}
  return {'seconds': elapsed, 'ends': dict(ends), 'answer_seconds': quantiles, 'counted': grown}


async def _counters(session) -> dict[str, float]:
  text = (await session.get('../metrics')).text
  lines = (line.rsplit(' ', 1) for line in text.splitlines() if not line.startswith('#'))
  return {name: float(value) for name, value in lines if '{' not in name}


def describe(load: dict) -> list[str]:
  ends = ', '.join(f'{name} {number:,}' for name, number in sorted(load['ends'].items()))
  counted = load['counted']
  requests = f'{sum(load["ends"].values()):,} requests in {load["seconds"]:.0f} s: {ends}'
  if not counted:
    return [requests, 'the endpoint is gone']
  tokens, calls = counted['spectr_jax_tokens_total'], counted['spectr_jax_target_calls_total']
  return [
    requests,
    f'{tokens / load["seconds"]:.1f} tokens/s, {tokens / max(calls, 1):.2f} per target call; an answer takes'
    f' {load["answer_seconds"]["median"]:.2f} s, 99% at most {load["answer_seconds"]["p99"]:.2f}',
  ]


if __name__ == '__main__':
  _URL = flags.DEFINE_string('url', 'http://127.0.0.1:8000/v1', 'The endpoint.')
  _CLIENTS = flags.DEFINE_integer('num_clients', 256, 'Clients at once.', lower_bound=1)
  _SECONDS = flags.DEFINE_float('seconds', 600, 'How long they ask.', lower_bound=1)
  _MAX_TOKENS = flags.DEFINE_integer('max_tokens', 64, 'The most new tokens of a request.', lower_bound=8)
  _LEAVE = flags.DEFINE_float(
    'leave', 0.1, 'Share of requests that are left after the first token.', lower_bound=0, upper_bound=1
  )
  _PROMPTS = flags.DEFINE_string('prompts', str(SHIPPED_PROMPTS), 'File of prompts.')
  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the results.')

  def main(argv):
    del argv
    texts = [prompt.text for prompt in read_prompts(_PROMPTS.value)]
    sizes = {'num_clients': _CLIENTS.value, 'seconds': _SECONDS.value, 'max_tokens': _MAX_TOKENS.value}
    with OutputFiles(output=_OUTPUT.value).apart_from({'prompts': [_PROMPTS.value]}) as files:
      load = asyncio.run(measure(_URL.value, texts, **sizes, leave=_LEAVE.value))
      files.write_after(lambda: print('\n'.join(describe(load))), output=json.dumps(load, indent=2) + '\n')

  command_line.run(main)
