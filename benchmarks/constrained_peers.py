"""Constrained decoding beside llama.cpp, and transformers with xgrammar: tokens per second and valid texts.

Command   python -m benchmarks.constrained_peers --target=MODEL.gguf --head=pretrained/smollm2_head --output=FILE.json
Model     a `.gguf` file with a chat template; ours multiplies in the file's blocks, as llama.cpp does; transformers
          computes in --peer_dtype. --peers= leaves both out, --free decodes with ours without constraints as well
Prompts   the schemas of `benchmarks.constraints` with two tasks each, at --temperature
Peers     `pip install xllamacpp torch transformers xgrammar gguf`, each with its own defaults of white space

All ways take turns on each prompt, one row at a time, after one run that is not counted. Seconds include the prefill,
and with llama.cpp the parsing of the schema: it takes the others less than half a second and is done before. A text is
whole where the model ended it; the others were cut at --max_new_tokens. Tokens count the one that ends a text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

import spectr_jax
from benchmarks import timing
from benchmarks.constraints import SCHEMAS
from common import command_line
from common.output_files import OutputFiles
from decode.experiment import metrics
from decode.experiment.options import DecodeOptions
from decode.experiment.workload import describe_machine, load_models
from spectr_jax import SamplingParams, TokenTree, lookup_drafter

TASKS = {
  'person': ('Invent a baker.', 'Describe Ada Lovelace.'),
  'address': ('Invent an address in Rome.', 'Where is the White House?'),
  'calendar event': ('Plan a birthday party.', 'Plan a meeting of three engineers.'),
  'device': ('Describe a cheap phone.', 'Describe a new laptop.'),
  'product': ('Invent a green door.', 'Describe a loaf of bread.'),
  'math steps': ('Solve 8x + 7 = -23.', 'What is 12 times 12?'),
  'sentiment': ('The review: "I loved this film."', 'The review: "The soup was cold."'),
  'line string': ('Draw a line from (0, 0) to (3, 4).', 'Draw a triangle.'),
  'linked list': ('Make a list of two colors.', 'Make a list of the first three letters.'),
  'tool call': ('What is the weather in Oslo?', 'Who wrote Faust?'),
}


class Prompt(NamedTuple):
  name: str  # of the schema
  tokens: list[int]
  temperature: float
  seed: int


class Answer(NamedTuple):
  text: str
  num_tokens: int
  is_whole: bool  # or cut at the limit
  num_calls: int  # of the target


Way = Callable[[Prompt], Answer]


def make_prompts(tokenizer: Any, temperature: float) -> list[Prompt]:
  """Two prompts for each schema, each with a seed of its own."""
  prompts = []
  for name, tasks in TASKS.items():
    for task in tasks:
      text = f'Answer with a JSON text that follows this schema: {json.dumps(SCHEMAS[name])}\n{task}'
      tokens = tokenizer.encode_chat([{'role': 'user', 'content': text}])
      prompts.append(Prompt(name, tokens, temperature, len(prompts)))
  return prompts


def own_ways(path: str, head: str, names: Sequence[str], limit: int, longest: int, *, free: bool) -> dict[str, Way]:
  """Without a draft, with lookup, and with the head; perhaps all of them without constraints, too."""
  models = load_models(DecodeOptions(target=path, draft=head, weights='blocks', dtype='bfloat16', method=('block',)))
  target, tokenizer = models.target, models.tokenizer
  constraints = {
    name: spectr_jax.compile_constraint(tokenizer, json_schema=SCHEMAS[name], vocab_size=target.vocab_size)
    for name in names
  }
  drafted = {
    'no draft': (None, 'autoregressive', None),
    'lookup 1 x 4': (lookup_drafter(target.vocab_size), 'speculative', TokenTree.chains(1, 4)),
    'head 1 x 2': (models.draft, 'block', TokenTree.chains(1, 2)),
  }

  def way(draft, method, tree, *, is_free) -> Way:
    def answer(prompt: Prompt) -> Answer:
      row = np.array([prompt.tokens + [0] * (longest - len(prompt.tokens))])
      constraint = None if is_free else constraints[prompt.name]
      made = spectr_jax.generate(
        jax.random.key(prompt.seed), target, draft, row, np.array([len(prompt.tokens)]), method=method, tree=tree,
        max_new_tokens=limit, sampling=SamplingParams(prompt.temperature), constraint=constraint,
        eos_id=tokenizer.eos_ids,
      )  # fmt: skip
      tokens = np.asarray(made.tokens)[0, : int(made.lengths[0])].tolist()
      is_whole = tokens[-1] in tokenizer.eos_ids
      text = tokenizer.decode(tokens[:-1] if is_whole else tokens)
      return Answer(text, len(tokens), is_whole, int(made.num_target_calls[0]))

    return answer

  ways = {name: way(*each, is_free=False) for name, each in drafted.items()}
  return ways | ({f'{name}, free': way(*each, is_free=True) for name, each in drafted.items()} if free else {})


def llama_cpp_way(path: str, limit: int, longest: int) -> Way:
  """llama.cpp with a grammar that it makes of each schema."""
  ask = timing.llama_cpp(path, longest + limit)

  def answer(prompt: Prompt) -> Answer:
    own = {'prompt': prompt.tokens, 'temperature': prompt.temperature, 'seed': prompt.seed}
    reply = ask(max_tokens=limit, json_schema=SCHEMAS[prompt.name], **own)
    made, num_tokens = reply['choices'][0], reply['usage']['completion_tokens']
    return Answer(made['text'], num_tokens, made['finish_reason'] == 'stop', num_tokens)

  return answer


def transformers_way(path: str, dtype: str, tokenizer: Any, limit: int) -> Way:
  """transformers' `generate` with xgrammar's masks."""
  import torch
  import xgrammar
  from xgrammar.contrib.hf import LogitsProcessor

  from benchmarks import peer

  model, eos_ids = peer.load_gguf(path, dtype), list(tokenizer.eos_ids)
  size = model.config.vocab_size
  content = [*tokenizer.token_contents, *[b''] * (size - len(tokenizer.token_contents))]
  vocabulary = xgrammar.TokenizerInfo(content, vocab_size=size, stop_token_ids=eos_ids)
  compiler = xgrammar.GrammarCompiler(vocabulary)
  grammars = {name: compiler.compile_json_schema(json.dumps(schema)) for name, schema in SCHEMAS.items()}

  def answer(prompt: Prompt) -> Answer:
    torch.manual_seed(prompt.seed)
    masks = [LogitsProcessor(grammars[prompt.name])]
    [tokens] = peer.answer(model, [prompt.tokens], limit, eos_ids, prompt.temperature, logits_processor=masks)
    is_whole = tokens[-1] in eos_ids
    return Answer(tokenizer.decode(tokens[:-1] if is_whole else tokens), len(tokens), is_whole, len(tokens))

  return answer


def is_valid(text: str, schema: Mapping[str, Any]) -> bool:
  """Whether a text is JSON that a schema accepts, formats included."""
  import jsonschema

  try:
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
  except (ValueError, jsonschema.ValidationError):
    return False
  return True


def measure(ways: Mapping[str, Way], prompts: Sequence[Prompt]) -> dict[str, list[dict[str, Any]]]:
  """By way its answers with their seconds, one for each prompt. The ways take turns."""
  found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
  for number, prompt in enumerate(prompts):
    print(f'prompt {number + 1} of {len(prompts)}', flush=True)
    for name, way in ways.items():
      start = time.perf_counter()
      made = way(prompt)
      own = {'schema': prompt.name, 'seconds': time.perf_counter() - start}
      valid = made.is_whole and is_valid(made.text, SCHEMAS[prompt.name])
      found[name].append(own | made._asdict() | {'is_valid': valid})
  return found


def describe(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
  """A line for each way: tokens per second with their 95% interval over prompts, tokens per call, and valid texts."""
  lines = []
  for name, rows in found.items():
    tokens, calls, seconds = (np.array([row[key] for row in rows]) for key in ('num_tokens', 'num_calls', 'seconds'))
    low, high = metrics.ratio_interval(tokens, seconds) or (np.nan, np.nan)
    whole = [row for row in rows if row['is_whole']]
    lines.append(
      f'{name:22}  {metrics.ratio(tokens, seconds):6.1f} ({low:.1f} to {high:.1f}) tokens/s,'
      f' {metrics.ratio(tokens, calls):.2f} tokens per call, {sum(row["is_valid"] for row in whole)} of {len(whole)}'
      f' whole texts valid, {len(rows) - len(whole)} cut'
    )
  return lines


if __name__ == '__main__':
  _TARGET = flags.DEFINE_string('target', None, 'A GGUF file.', required=True)
  _HEAD = flags.DEFINE_string('head', 'pretrained/smollm2_head', 'A head on it.')
  _PEERS = flags.DEFINE_list('peers', ['llama.cpp', 'transformers'], 'Which of these two to run.')
  _PEER_DTYPE = flags.DEFINE_enum('peer_dtype', 'float32', ['float32', 'bfloat16'], 'What transformers compute in.')
  _FREE = flags.DEFINE_bool('free', False, 'Whether ours decodes without constraints as well.')
  _SCHEMAS = flags.DEFINE_integer('num_schemas', len(SCHEMAS), 'How many of the schemas.', lower_bound=1)
  _TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Temperature; 0 decodes greedily.', lower_bound=0)
  _LIMIT = flags.DEFINE_integer('max_new_tokens', 96, 'Limit of new tokens.', lower_bound=1)
  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file.', required=True)

  def main(argv):
    del argv
    if unknown := set(_PEERS.value) - {'llama.cpp', 'transformers'}:
      raise ValueError(f'peers must be llama.cpp, transformers or both, got {", ".join(unknown)}')
    with OutputFiles(output=_OUTPUT.value) as outputs:
      names, limit, path = [*SCHEMAS][: _SCHEMAS.value], _LIMIT.value, _TARGET.value
      tokenizer = spectr_jax.io.load.open_model(path).tokenizer()
      prompts = make_prompts(tokenizer, _TEMPERATURE.value)
      longest = max(len(prompt.tokens) for prompt in prompts)
      ways = own_ways(path, _HEAD.value, names, limit, longest, free=_FREE.value)
      if 'llama.cpp' in _PEERS.value:
        ways['llama.cpp'] = llama_cpp_way(path, limit, longest)
      if 'transformers' in _PEERS.value:
        ways['transformers, xgrammar'] = transformers_way(path, _PEER_DTYPE.value, tokenizer, limit)
      for way in ways.values():  # compiles
        way(prompts[0])
      found = measure(ways, [prompt for prompt in prompts if prompt.name in names])
      sizes = {'max_new_tokens': limit, 'longest_prompt': longest, 'temperature': _TEMPERATURE.value}
      content = describe_machine() | sizes | {'answers': found}
      outputs.write_after(lambda: print('\n'.join(describe(found))), output=json.dumps(content, indent=1) + '\n')

  command_line.run(main, ['--target=MODEL.gguf --output=FILE.json'])
