"""Where a round's time goes: its networks, its draws and verification, and the rest; kernels of its program.

Command   python -m benchmarks.rounds
          python -m benchmarks.rounds --target=MODEL.gguf --head=pretrained/smollm2_head --draft_length=2
Output    One line for each temperature: milliseconds, medians; kernels of the loop's program, and those outside of
          networks; CPU-seconds of compiling it. Parts are programs of their own; the rest is what a round in the loop
          takes beside them. The draft holds its draws, and verification the distributions of the target
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import numpy as np
from absl import flags

from benchmarks import timing
from common import command_line
from decode.experiment import latency
from spectr_jax import SamplingParams, TokenTree, load_drafter, load_model
from spectr_jax.engine.loop import run_rounds

# What is no kernel of a CPU's program.
_FREE = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'conditional', 'after-all', 'call'}
PARTS = 'round', 'target', 'draft', 'verification', 'rest'
COUNTS = 'kernels', 'outside', 'compiling'
_NETWORK = '/network'  # the scope of models' calls
NUM_ROUNDS = 16


def kernels(program: str) -> Iterator[str]:
  """The names of the operations that a compiled program launches, by its text; '' for those without one."""
  inside = set(re.findall(r'(?:calls|to_apply)=%?([\w.\-]+)', program))
  computation = ''
  for line in program.splitlines():
    if head := re.match(r'(?:ENTRY )?%?([\w.\-]+) .*\{$', line):
      computation = head[1]
    elif computation not in inside:
      kind = re.match(r'\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][\w\-]*)\(', line)
      if kind and kind[1] not in _FREE:
        name = re.search(r'op_name="([^"]*)"', line)
        yield name[1] if name else ''


def outside_networks(names: list[str]) -> int:
  """How many kernels carry no network's name."""
  return sum(_NETWORK not in name for name in names)


def measure(target, draft, method: str, tree: TokenTree, temperature: float, num_runs: int) -> dict[str, float]:
  """Milliseconds of a round and its parts, medians; kernels; CPU-seconds of compiling the loop."""
  decoder = timing.make_decoder(target, draft, method, tree)
  rows, sampling = timing.prompts(1, target.vocab_size), SamplingParams(temperature)

  def begin():
    return timing.begin(decoder, rows, sampling=sampling)

  state = begin()[1]
  lowered = run_rounds.lower(decoder, state, np.int32(NUM_ROUNDS))
  start = time.process_time()
  program = lowered.compile().as_text()
  compiling = time.process_time() - start
  rounds = timing.rounds_in_turns({'': begin}, num_runs, NUM_ROUNDS)['']
  parts = latency.time_parts(decoder, state, num_runs)
  names = list(kernels(program))
  values = {'round': float(np.median(rounds)), **parts}
  values['rest'] = values['round'] - sum(parts.values())
  milliseconds = {name: 1e3 * seconds for name, seconds in values.items()}
  return milliseconds | {'kernels': len(names), 'outside': outside_networks(names), 'compiling': compiling}


if __name__ == '__main__':
  _TARGET = flags.DEFINE_string('target', 'pretrained/target', 'A folder or .gguf file.')
  _DRAFT = flags.DEFINE_string('draft', 'pretrained/draft', 'A folder or .gguf file of the same tokenizer.')
  _HEAD = flags.DEFINE_string('head', None, 'A head for the target, in place of --draft.')
  _WEIGHTS = flags.DEFINE_string('weights', None, 'As for decode.main.')
  _METHOD = flags.DEFINE_string('method', 'block', 'A method.')
  _NUM_DRAFTS = flags.DEFINE_integer('num_drafts', 1, 'Drafts of a round.', lower_bound=1)
  _DRAFT_LENGTH = flags.DEFINE_integer('draft_length', 4, 'Tokens of a draft.', lower_bound=1)
  _NUM_RUNS = flags.DEFINE_integer('num_runs', 15, 'Runs of which the median is taken.', lower_bound=1)

  def main():
    target, _ = load_model(_TARGET.value, dtype='bfloat16', weights=_WEIGHTS.value)
    draft = load_drafter(_HEAD.value, target) if _HEAD.value else load_model(_DRAFT.value, dtype='bfloat16')[0]
    models = target.for_decoding(), draft.for_decoding()
    tree = TokenTree.chains(_NUM_DRAFTS.value, _DRAFT_LENGTH.value)
    print(timing.line(['temperature', *(f'{part}, ms' for part in PARTS), *COUNTS]))
    for temperature in (1.0, 0.0):
      found = measure(*models, _METHOD.value, tree, temperature, _NUM_RUNS.value)
      times, counts = (found[part] for part in PARTS), (f'{found[name]:g}' for name in COUNTS)
      print(timing.line([f'{temperature:g}', *times, *counts]))

  command_line.run(main)
