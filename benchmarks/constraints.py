"""Constraints: how long their tables take to make, what a round costs with them, and what guesses they keep.

Command   python -m benchmarks.constraints --output=constraints.json
Models    the shipped pair, and the target alone of --target; temperature 1, prompts of the shipped set

tables   states, classes, bytes and seconds of each of ten schemas, of the kinds that json-schema.org and the makers of
         endpoints show, for the tokenizer of each model
rounds   seconds of a round under a constraint that allows all text, over those without, in turns
calls    tokens per call of the target under each schema: with the mask on draft and target, with the mask on the target
         alone, and without a constraint
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from typing import Any

import jax
import numpy as np
from absl import flags

import spectr_jax
from benchmarks import timing
from common import command_line
from common.output_files import OutputFiles
from decode.experiment.model_options import ROOT
from decode.experiment.workload import describe_machine
from spectr_jax.draft.model_drafter import ModelDrafter

_TEXT, _WHOLE = {'type': 'string'}, {'type': 'integer'}
_POINT = {'type': 'array', 'items': {'type': 'number'}, 'minItems': 2, 'maxItems': 2}


def _object(required: str, **properties: Any) -> dict[str, Any]:
  return {'type': 'object', 'properties': properties, 'required': required.split(), 'additionalProperties': False}


_STEP = _object('explanation output', explanation=_TEXT, output=_TEXT)
SCHEMAS = {
  'person': _object('', firstName=_TEXT, lastName=_TEXT, age={'type': 'integer', 'minimum': 0}),
  'address': _object('locality region countryName', postOfficeBox=_TEXT, streetAddress=_TEXT, locality=_TEXT,
                     region=_TEXT, postalCode=_TEXT, countryName=_TEXT),
  'calendar event': _object('name date participants', name=_TEXT, date={'type': 'string', 'format': 'date'},
                            participants={'type': 'array', 'items': _TEXT}),
  'device': _object('deviceType', deviceType={'enum': ['smartphone', 'laptop', 'tablet']}, model=_TEXT,
                    isNew={'type': 'boolean'}),
  'product': _object('productId productName price', productId=_WHOLE, productName=_TEXT,
                     price={'type': 'number', 'minimum': 0}, tags={'type': 'array', 'items': _TEXT, 'minItems': 1}),
  'math steps': _object('steps final_answer', steps={'type': 'array', 'items': _STEP}, final_answer=_TEXT),
  'sentiment': _object('sentiment confidence', sentiment={'enum': ['positive', 'neutral', 'negative']},
                       confidence={'type': 'integer', 'minimum': 0, 'maximum': 100}),
  'line string': _object('type coordinates', type={'const': 'LineString'},
                         coordinates={'type': 'array', 'items': _POINT, 'minItems': 2}),
  'linked list': {'$ref': '#/$defs/node', '$defs': {'node': _object(
    'value next', value=_TEXT, next={'anyOf': [{'$ref': '#/$defs/node'}, {'type': 'null'}]})}},
  'tool call': {'anyOf': [
    _object('name arguments', name={'const': 'weather'}, arguments=_object('city', city=_TEXT, days=_WHOLE)),
    _object('name arguments', name={'const': 'search'}, arguments=_object('query', query=_TEXT)),
  ]},
}  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unmasked(ModelDrafter):
  """A model that guesses without regard to constraints."""

  def propose(self, state, context, request):
    return super().propose(state, context, dataclasses.replace(request, constraints=None, states=None))


def tables(tokenizer: Any) -> dict[str, Any]:
  """The size of each schema's table and the seconds that it takes, beside those of the vocabulary's first use."""
  begin = time.perf_counter()
  spectr_jax.compile_constraint(tokenizer, regex='a')
  found: dict[str, Any] = {'first': {'seconds': time.perf_counter() - begin}}
  for name, schema in SCHEMAS.items():
    begin = time.perf_counter()
    made = spectr_jax.compile_constraint(tokenizer, json_schema=schema)
    states, classes = made.next_state.shape
    own = {'states': states, 'classes': classes, 'bytes': made.nbytes, 'seconds': time.perf_counter() - begin}
    found[name] = own
  return found


def rounds(models: Any, tokenizer: Any, drafted: dict[str, Any], repeats: int, num_rounds: int) -> dict[str, Any]:
  """Milliseconds of a round without and with a constraint that allows all text, medians of turns, and their ratio."""
  target, draft = models
  anything = spectr_jax.compile_constraint(tokenizer, regex=r'(?s:.)*', vocab_size=target.vocab_size)
  prompt = np.array([tokenizer.encode_prompt('Mr. Speaker, I rise today to')])
  makers = {}
  for name, constraints, own in (('without', [], {}), ('with', [anything], {'constraint': 0})):
    decoder = spectr_jax.Decoder.make(
      target, draft, constraints=constraints, max_new_tokens=200, cache_size=256, **drafted
    )
    makers[name] = functools.partial(timing.begin, decoder, prompt, **own)
  times = {name: 1e3 * np.array(each) for name, each in timing.rounds_in_turns(makers, repeats, num_rounds).items()}
  ratios = times['with'] / times['without']
  medians = {name: float(np.median(each)) for name, each in (times | {'ratio': ratios}).items()}
  return medians | {'quartiles': np.percentile(ratios, [25, 75]).tolist()}


def calls(target: Any, draft: Any, tokenizer: Any, num_prompts: int, num_new: int) -> dict[str, Any]:
  """Tokens per call of the target and valid texts, by schema and place of the mask."""
  lines = (ROOT / 'pretrained' / 'prompts.jsonl').read_text().splitlines()[:num_prompts]
  prompts = [tokenizer.encode_prompt(json.loads(line)['prompt'])[:64] for line in lines]
  options = {'method': 'race_traversal', 'tree': spectr_jax.TokenTree.chains(2, 4), 'max_new_tokens': num_new}
  options |= {'eos_id': tokenizer.eos_ids, 'logprobs': False}
  drafts = {'both': spectr_jax.draft.model_drafter(draft), 'target alone': Unmasked(draft), 'no constraint': draft}
  found: dict[str, Any] = {}
  for name, schema in SCHEMAS.items():
    constraint = spectr_jax.compile_constraint(tokenizer, json_schema=schema, vocab_size=target.vocab_size)
    found[name] = {}
    for place, own in drafts.items():
      given = None if place == 'no constraint' else constraint
      made = spectr_jax.generate(jax.random.key(1), target, own, prompts, constraint=given, **options)
      lengths = np.asarray(made.lengths)
      number = float(lengths.sum() / np.asarray(made.num_target_calls).sum())
      texts = [np.asarray(tokens)[:length] for tokens, length in zip(np.asarray(made.tokens), lengths)]
      ended = [tokens for tokens in texts if tokens[-1] in tokenizer.eos_ids]
      found[name][place] = {'tokens_per_call': number, 'tokens': int(lengths.sum()), 'ended': len(ended)}
      if given is not None:
        found[name][place]['accepted'] = sum(constraint.accepts(tokens[:-1]) for tokens in ended)
  return found


if __name__ == '__main__':
  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file.', required=True)
  _TARGET = flags.DEFINE_string('target', None, 'Another target, whose tables and rounds without a draft are measured.')
  _REPEATS = flags.DEFINE_integer('repeats', 15, 'Turns of the rounds.', lower_bound=1)
  _PROMPTS = flags.DEFINE_integer('num_prompts', 16, 'Prompts of the calls; 0 leaves them out.', lower_bound=0)

  def main():
    with OutputFiles(output=_OUTPUT.value) as outputs:
      folder = ROOT / 'pretrained'
      (target, tokenizer), (draft, _) = (spectr_jax.load_model(folder / name) for name in ('target', 'draft'))
      target, draft = target.for_decoding(), draft.for_decoding()
      found = describe_machine() | {'shipped pair': {'tables': tables(tokenizer)}}
      own, drafted = found['shipped pair'], {'method': 'race_traversal', 'tree': spectr_jax.TokenTree.chains(1, 4)}
      own['rounds'] = rounds((target, draft), tokenizer, drafted, _REPEATS.value, 40)
      print(json.dumps(own['rounds']), flush=True)
      if _TARGET.value:
        other, tokens = spectr_jax.load_model(_TARGET.value)
        found[_TARGET.value] = {'tables': tables(tokens)}
        alone = {'method': 'autoregressive'}
        found[_TARGET.value]['rounds'] = rounds((other.for_decoding(), None), tokens, alone, _REPEATS.value, 16)
        print(json.dumps(found[_TARGET.value]['rounds']), flush=True)
      if _PROMPTS.value:
        own['calls'] = calls(target, draft, tokenizer, _PROMPTS.value, 64)
      outputs.write_after(lambda: print(json.dumps(found, indent=1)), output=json.dumps(found, indent=1) + '\n')

  command_line.run(main, ['--output=constraints.json', '--output=constraints.json --target=MODEL.gguf'])
