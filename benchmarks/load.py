"""A budget beside fixed settings: tokens per second by the number of rows, and over a load that changes.

Command   python -m benchmarks.load --rows=1,2,4,8,16 --load=1,16,4,8,1 --output=load.json
Models    the pretrained pair, or --target and --draft, which may be `lookup`; with no draft, 1 x 1, 1 x 2, 1 x 4 and
          2 x 4 of --method beside a budget of the largest of them that it takes
Prompts   --num_prompts of --prompts in turn; each is continued by --max_new_tokens tokens, greedily and by sampling

All settings take turns, batch by batch. A load of n rows are n requests at once in rows for the most of --load, for
every part of it twice as many requests as there are rows; fixed settings run all rows, the budget as many as it needs.
Programs are compiled, and costs are measured, before the first batch that counts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import flags

from benchmarks import timing
from benchmarks.command import define_numbers, to_json
from common import command_line
from common.output_files import OutputFiles
from decode.experiment.options import DecodeOptions
from decode.experiment.prompt_options import SHIPPED_PROMPTS
from decode.experiment.prompts import read_prompts
from decode.experiment.workload import Models, load_models
from spectr_jax import METHODS, Decoder, Request, SamplingParams, TokenTree
from spectr_jax.draft import as_drafter
from spectr_jax.engine import Budget, Rows
from spectr_jax.methods import why_not

BUDGET = 'budget'
TREES = {'no draft': None} | {
  f'{k}x{length}': TokenTree.chains(k, length) for k, length in ((1, 1), (1, 2), (1, 4), (2, 4))
}
_LONGEST = 128  # tokens of a prompt


def names_for(method: str) -> list[str]:
  """The settings that a method takes."""
  return [name for name, tree in TREES.items() if tree is None or not why_not(METHODS[method], tree)]


def make_rows(models: Models, name: str, method: str, load: Sequence[int], max_new_tokens: int) -> Rows:
  """Rows of a setting for a load; those of a budget compiled, and of fewer rows only if the load changes."""
  tree = TREES[names_for(method)[-1] if name == BUDGET else name]
  decoder = Decoder.make(
    models.target,
    None if tree is None else as_drafter(models.draft),
    method=METHODS['autoregressive' if tree is None else method],
    tree=tree,
    max_new_tokens=max_new_tokens,
    cache_size=_LONGEST + max_new_tokens,
  )
  budget = Budget(is_resized=len(load) > 1) if name == BUDGET else None
  rows = Rows(decoder, batch_size=max(load), longest_prompt=_LONGEST, budget=budget)
  for _ in rows.measure():
    pass
  return rows


def run(rows: Rows, requests: Iterator[Request], num_rows: int, num_requests: int) -> tuple[int, float]:
  """New tokens and seconds of so many requests, `num_rows` at once."""
  num_left, num_tokens, start = num_requests, 0, time.perf_counter()
  while num_left or rows.owners:
    if new := min(num_left, num_rows - len(rows.owners)):
      rows.put([*itertools.islice(requests, new)])
      num_left -= new
    pieces = rows.step()
    num_tokens += sum(piece.end - piece.start for piece in pieces)
    rows.end([piece.row for piece in pieces if piece.is_done])
  return num_tokens, time.perf_counter() - start


def compare(
  models: Models,
  names: Sequence[str],
  prompts: Sequence[Sequence[int]],
  load: Sequence[int],
  *,
  method: str,
  temperature: float,
  max_new_tokens: int,
  num_runs: int,
) -> dict:
  """Tokens per second of settings over parts of a load, in turns, after one run that does not count."""
  made = {name: make_rows(models, name, method, load, max_new_tokens) for name in names}
  sums = {name: np.zeros(2) for name in names}
  for number in range(num_runs + 1):
    for name, rows in made.items():
      keys = jax.random.split(jax.random.key(number), len(prompts))
      requests = itertools.cycle(
        Request(i, prompt, keys[i], SamplingParams(temperature)) for i, prompt in enumerate(prompts)
      )
      for num_rows in load:
        tokens = run(rows, requests, num_rows, 2 * num_rows)
        sums[name] += np.array(tokens) * (number > 0)
  speeds = {name: float(tokens / seconds) for name, (tokens, seconds) in sums.items()}
  best = max((name for name in names if name != BUDGET), key=lambda name: speeds[name])
  found = {'load': list(load), 'temperature': temperature, 'tokens_per_second': speeds, 'best': best}
  own = made[BUDGET].budget if BUDGET in made else None
  if own is not None:
    chosen = {f'{size} rows, {name}': number for (size, name), number in own.rounds.items()}
    found |= {'over_best': speeds[BUDGET] / speeds[best], 'rounds': chosen, 'round_ms': own.describe()}
  return found


if __name__ == '__main__':
  _TARGET = flags.DEFINE_string('target', 'pretrained/target', 'Folder or file of the target.')
  _DRAFT = flags.DEFINE_string('draft', 'pretrained/draft', 'That of the draft or head, or lookup.')
  _METHOD = flags.DEFINE_string('method', None, 'Method of all settings; default race_traversal.')
  _DTYPE = flags.DEFINE_string('dtype', None, 'Type of the models.')
  _WEIGHTS = flags.DEFINE_string('weights', None, 'Form of the weights: int8 or blocks.')
  _PROMPTS = flags.DEFINE_string('prompts', str(SHIPPED_PROMPTS), 'File of prompts.')
  _NUM_PROMPTS = flags.DEFINE_integer('num_prompts', 64, 'Prompts.', lower_bound=1)
  _NEW = flags.DEFINE_integer('max_new_tokens', 128, 'New tokens of a request.', lower_bound=1)
  _RUNS = flags.DEFINE_integer('num_runs', 3, 'Runs of each setting.', lower_bound=1)
  _ROWS = define_numbers('rows', '1,2,4,8,16', 'Numbers of rows.')
  _LOAD = define_numbers('load', '1,16,4,8,1', 'A load that changes: requests at once.')
  _TEMPERATURES = define_numbers('temperatures', '0,1', 'Temperatures.', float, least=0)
  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the results.')

  def main():
    more = {'dtype': _DTYPE.value, 'weights': _WEIGHTS.value}
    method = _METHOD.value or 'race_traversal'
    options = DecodeOptions.of(
      target=_TARGET.value, draft=_DRAFT.value, method=(method,), **{k: v for k, v in more.items() if v is not None}
    )
    models = load_models(options)
    texts = [each.text for each in read_prompts(_PROMPTS.value)][: _NUM_PROMPTS.value]
    prompts = [models.tokenizer.encode(text)[:_LONGEST] for text in texts]
    sizes = {'method': method, 'max_new_tokens': _NEW.value, 'num_runs': _RUNS.value}
    results, names = [], [*names_for(method), BUDGET]
    with OutputFiles(output=_OUTPUT.value).apart_from({'prompts': [_PROMPTS.value]}) as files:
      for temperature in _TEMPERATURES():
        for load in [*((number,) for number in _ROWS()), _LOAD()]:
          found = compare(models, names, prompts, load, temperature=temperature, **sizes)
          results.append(found)
          print(f'{"-".join(map(str, load))} rows at temperature {temperature:g}, tokens/s')
          print(timing.line(names), timing.line(found['tokens_per_second'].values(), 1), sep='\n')
          print(f'budget over {found["best"]}: {found["over_best"]:.3f}; rounds {found["rounds"]}', flush=True)
      flagged = {'target': _TARGET.value, 'draft': _DRAFT.value, **more, **sizes}
      files.write(output=to_json(results, **flagged))

  command_line.run(main)
