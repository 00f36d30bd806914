"""Throughput on many prompts whose continuations end at different times: refilled rows against whole batches.

Command   python -m benchmarks.refill --method=race_block --num_drafts=2 --draft_length=4 --batch_size=16
Models    the pretrained pair, or --target and --draft
Prompts   --num_prompts pieces of the joined shipped prompts, of 16 to 256 tokens with lengths evenly spaced
Stops     a row ends at a token whose id is a multiple of --stop, or after --max_new_tokens

Both ways decode the same prompts with the same keys, and must give the same tokens except where rounding decides. The
share of continuations that differ is printed; with JAX_ENABLE_X64=1 and --dtype=float64 it should be 0. The two take
turns, after one run of each that compiles. Batches pad their prompts to the longest of all, as in `decode.main`.
"""

from __future__ import annotations

import time

import jax
import numpy as np
from absl import flags

import spectr_jax
from benchmarks import command
from common import command_line
from decode.experiment.options import DecodeOptions
from spectr_jax import TokenTree
from spectr_jax.engine.rows import Request

_SHORTEST, _LONGEST = 16, 256


def make_requests(tokenizer, num_prompts: int) -> list[Request]:
  """So many prompts in random order, each with its own key."""
  texts = [prompt.text for prompt in DecodeOptions().read_prompts()]
  ids = np.concatenate([row for row in tokenizer.encode_batch(texts)])
  rng = np.random.default_rng(0)
  keys = jax.random.split(jax.random.key(0), num_prompts)
  first = [tokenizer.bos_id] if tokenizer.add_bos else []
  requests = []
  for index, length in enumerate(rng.permutation(np.linspace(_SHORTEST, _LONGEST, num_prompts).astype(int))):
    start = rng.integers(0, len(ids) - length)
    requests.append(Request(index, [*first, *ids[start : start + length - len(first)].tolist()], keys[index]))
  return requests


def run_batches(models, requests, batch_size: int, **options) -> dict[int, list[int]]:
  """Tokens by name of the request, decoded in whole batches; the last one is padded with copies of its last prompt."""
  decoded = {}
  for first in range(0, len(requests), batch_size):
    part = requests[first : first + batch_size]
    filled = [*part, *[part[-1]] * (batch_size - len(part))]
    prompts = np.zeros((batch_size, _LONGEST), np.int32)
    for row, request in zip(prompts, filled):
      row[: len(request.tokens)] = request.tokens
    lengths = np.array([len(request.tokens) for request in filled])
    keys = jax.numpy.stack([request.key for request in filled])
    result = jax.device_get(spectr_jax.generate(keys, *models, prompts, lengths, **options))
    for row, request in enumerate(part):
      decoded[request.name] = result.tokens[row, : result.lengths[row]].tolist()
  return decoded


def run_refilled(models, requests, batch_size: int, **options) -> dict[int, list[int]]:
  """Tokens by name of the request, decoded with rows that are refilled as soon as they are done."""
  stream = spectr_jax.generate_many(*models, iter(requests), batch_size=batch_size, longest_prompt=_LONGEST, **options)
  return {each.name: each.tokens.tolist() for each in stream}


if __name__ == '__main__':
  _OPTIONS = command.define_options('target', 'draft', num_prompts=512, max_new_tokens=128, batch_size=16)
  _DTYPE = flags.DEFINE_enum('dtype', None, ['float32', 'bfloat16', 'float64'], "Weights' type; as stored by default.")
  _METHOD = flags.DEFINE_string('method', 'race_block', 'Method.')
  _NUM_DRAFTS = flags.DEFINE_integer('num_drafts', 2, 'K.', lower_bound=1)
  _DRAFT_LENGTH = flags.DEFINE_integer('draft_length', 4, 'L.', lower_bound=1)
  _STOP = flags.DEFINE_integer('stop', 24, 'Tokens whose id is a multiple of it end a row.', lower_bound=1)
  _NUM_RUNS = flags.DEFINE_integer('num_runs', 3, 'Runs of both, in turns.', lower_bound=1)

  def main(argv):
    del argv
    given = _OPTIONS()
    target, tokenizer = spectr_jax.load_model(given.target, dtype=_DTYPE.value)
    models = target, spectr_jax.load_model(given.draft, dtype=_DTYPE.value)[0]
    requests = make_requests(tokenizer, given.num_prompts)
    tree = TokenTree.chains(_NUM_DRAFTS.value, _DRAFT_LENGTH.value)
    ends = tuple(range(0, target.vocab_size, _STOP.value))
    options = {'method': _METHOD.value, 'tree': tree, 'max_new_tokens': given.max_new_tokens, 'eos_id': ends}
    ways = {'batches': run_batches, 'refilled': run_refilled}
    for way in ways.values():
      way(models, requests[: 4 * given.batch_size], given.batch_size, **options)
    speeds, decoded = {name: [] for name in ways}, {}
    for _ in range(_NUM_RUNS.value):
      for name, way in ways.items():
        start = time.perf_counter()
        decoded[name] = way(models, requests, given.batch_size, **options)
        speeds[name].append(sum(map(len, decoded[name].values())) / (time.perf_counter() - start))
        print(f'{name:<10} {speeds[name][-1]:8.1f} tokens/s', flush=True)
    lengths = np.array([len(tokens) for tokens in decoded['batches'].values()])
    differing = np.mean([decoded['batches'][name] != decoded['refilled'][name] for name in decoded['batches']])
    ratios = np.array(speeds['refilled']) / np.array(speeds['batches'])
    print(
      f'{len(requests)} prompts, {lengths.mean():.1f} new tokens on average ({lengths.min()} to {lengths.max()}),'
      f' {differing:.1%} differ\nrefilled is {np.median(ratios):.2f} times as fast ({ratios.min():.2f} to'
      f' {ratios.max():.2f} in {len(ratios)} runs)'
    )

  command_line.run(main)
