"""Prompts that begin like earlier texts: the time to the first token, and the tokens read of conversations.

Command   python -m benchmarks.prefixes
          python -m benchmarks.prefixes --target=SmolLM2-135M-Instruct.Q4_1.gguf --weights=blocks
          python -m benchmarks.prefixes --target=MODEL.gguf --draft=OTHER.gguf --output=prefixes.json
Prompts   random ids; one row, which held another text before, so that what is known comes out of the cache of prefixes
Output    Milliseconds from a prompt to its first token, with all but --num_new of its tokens known and with
          --prefix_cache_bytes=0, in turns: medians, lowest and highest, and the ratio. Then eight conversations of six
          turns that take two rows from each other: the tokens that the target read, of those in all prompts, and the
          fewest, where nothing is read twice
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks import timing
from benchmarks.command import define_output, to_json
from common import command_line
from common.output_files import OutputFiles
from spectr_jax import Decoder, Drafter, Model, Request, TokenTree, load_drafter, load_model
from spectr_jax.engine.rows import Rows

_BYTES = 2**30
_CONVERSATIONS, _TURNS, _TURN, _ANSWER = 8, 6, 40, 16  # and the tokens that a turn and its answer add


def _request(ids: np.ndarray, limit: int) -> Request:
  return Request('', ids.tolist(), jax.random.key(0), max_new_tokens=limit)


def _answer(rows: Rows, ids: np.ndarray, limit: int) -> list[int]:
  """The continuation of a prompt, whose row is free again."""
  rows.put([_request(ids, limit)])
  (row,) = rows.owners
  while not all(piece.is_done for piece in rows.step(None)):
    pass
  tokens = rows.result.tokens[row, : rows.result.lengths[row]].tolist()
  rows.end([row])
  return tokens


def time_first_tokens(decoder: Decoder, size: int, num_new: int, num_runs: int) -> dict[str, Any]:
  """Seconds to the first token behind prompts of `size` tokens, all but `num_new` of which are known, or none."""
  rng, vocab_size = np.random.default_rng(0), decoder.target.vocab_size
  known, other = rng.integers(0, vocab_size, size - num_new), rng.integers(0, vocab_size, size)
  each = {name: Rows(decoder, batch_size=1, prefix_cache_bytes=most) for name, most in (('known', _BYTES), ('', 0))}
  times = {name: [] for name in each}
  kept = 0
  for run in range(num_runs + 1):
    for name, rows in each.items():
      prompt = np.concatenate([known, rng.integers(0, vocab_size, num_new)])
      if not run:
        _answer(rows, prompt, 1)
      _answer(rows, other, 1)
      jax.block_until_ready(rows.state)
      start = time.perf_counter()
      rows.put([_request(prompt, 1)])
      rows.step(1)
      times[name].append(time.perf_counter() - start)
      kept = int(rows.num_kept[0]) if name else kept
      rows.end([0])
  with_known, without = (timing.spread(times[name][1:]) for name in each)
  ratio = with_known['median'] / without['median']
  return {'size': size, 'kept': kept, 'known': with_known, 'unknown': without, 'ratio': ratio}


def count_read(decoder: Decoder) -> dict[str, int]:
  """The tokens of prompts of conversations in turns, those that the target read, and the fewest."""
  rng, vocab_size = np.random.default_rng(1), decoder.target.vocab_size
  rows = Rows(decoder, batch_size=2, prefix_cache_bytes=_BYTES)
  texts = [np.zeros(0, np.int64)] * _CONVERSATIONS
  num_prompt_tokens = 0
  for _ in range(_TURNS):
    for place, text in enumerate(texts):
      prompt = np.concatenate([text, rng.integers(0, vocab_size, _TURN)])
      num_prompt_tokens += len(prompt)
      texts[place] = np.concatenate([prompt, _answer(rows, prompt, _ANSWER)])
  fewest = _CONVERSATIONS * _TURNS * _TURN
  return {'prompt_tokens': num_prompt_tokens, 'read': rows.num_read, 'fewest': fewest}


def measure(target: Model, draft: Model | Drafter | None, size: int | None, num_new: int, num_runs: int):
  """The times and counts of a pair, with chains of four tokens if there is a draft."""
  room = min(2**20, target.context_length or 2**20, getattr(draft, 'context_length', None) or 2**20)
  size = min(766, room - _ANSWER) if size is None else size
  longest = max(size, _TURNS * (_TURN + _ANSWER)) + _ANSWER
  options = {'method': 'block', 'tree': TokenTree.chains(1, 4)} if draft else {'method': 'autoregressive'}
  decoder = Decoder.make(target, draft, max_new_tokens=_ANSWER, cache_size=longest, **options)
  return time_first_tokens(decoder, size, num_new, num_runs) | {'conversations': count_read(decoder)}


def describe(found: dict[str, Any]) -> list[str]:
  counts = found['conversations']
  return [
    f'first token behind {found["size"]} tokens: {timing.in_words(found["known"])} with {found["kept"]} known,'
    f' {timing.in_words(found["unknown"])} with none; ratio {found["ratio"]:.3f}',
    f'{_CONVERSATIONS} conversations of {_TURNS} turns: {counts["read"]:,} of {counts["prompt_tokens"]:,} tokens of'
    f' prompts read, {counts["fewest"]:,} are new',
  ]


if __name__ == '__main__':
  _TARGET = flags.DEFINE_string('target', 'pretrained/target', 'A folder or .gguf file.')
  _DRAFT = flags.DEFINE_string('draft', None, 'A folder or .gguf file of the same tokenizer; default no draft.')
  _HEAD = flags.DEFINE_string('head', None, 'A head for the target, in place of --draft.')
  _WEIGHTS = flags.DEFINE_string('weights', None, 'As for decode.main.')
  _SIZE = flags.DEFINE_integer('prompt_length', None, 'Tokens of a prompt (default 766, or what fits).', lower_bound=32)
  _NUM_NEW = flags.DEFINE_integer('num_new', 16, 'Those at its end that are not known.', lower_bound=1)
  _NUM_RUNS = flags.DEFINE_integer('num_runs', 15, 'Runs of which the median is taken.', lower_bound=1)
  _OUTPUT = define_output()

  def main():
    target = load_model(_TARGET.value, weights=_WEIGHTS.value)[0]
    draft = load_drafter(_HEAD.value, target) if _HEAD.value else None
    if _DRAFT.value:
      draft = load_model(_DRAFT.value, weights=_WEIGHTS.value)[0]
    sizes = _SIZE.value, _NUM_NEW.value, _NUM_RUNS.value
    with OutputFiles(output=_OUTPUT.value) as files:
      found = measure(target.for_decoding(), draft and draft.for_decoding(), *sizes)
      own = {each.name: each.value for each in (_TARGET, _DRAFT, _HEAD, _WEIGHTS, _SIZE, _NUM_NEW, _NUM_RUNS)}
      files.write_after(lambda: print('\n'.join(describe(found))), output=to_json([found], **own))

  command_line.run(main)
