"""Tokens per call of methods on the same drafts, on each method's best shape of at most so many nodes.

Command   python -m benchmarks.rivals --temperature=1,0.6,0.3 --nodes=16,64 --output=rivals.json
Models    the pretrained pair, or --target and --draft
Contexts  places in the target's own continuations of the prompts, drawn evenly

At every place one tree of each shape is drafted and scored once, and all methods decide on it several times, with
uniforms of their own. So methods differ by their decisions alone, and ratios are paired by place and draft.
Only lossless methods for independent children take part; a place counts as one call, so that numbers are
close to those of whole runs but not the same: rounds of a run begin where rounds end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from absl import flags

from benchmarks import command
from benchmarks.distance_to_optimum import NAMES
from common import command_line
from common.output_files import OutputFiles
from decode.experiment import metrics
from decode.experiment.distributions import target_texts
from decode.experiment.settings import parse_shape, shape_name
from decode.experiment.workload import Workload
from spectr_jax import TokenTree, get_method, verify
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import noise_keys, propose, score
from spectr_jax.engine.reading import init_decode
from spectr_jax.sampling import logits_to_probs

BASELINE = 'race_traversal'
METHODS_COMPARED = (
  'speculative', 'block', 'spectr', 'traversal', 'ratio_block', 'race_block', 'race_traversal', 'race_layers',
)  # fmt: skip
# Numbers of children by depth: chains, chains that part later, and stems of one token per depth before the branches.
SHAPES = (
  (4,) + (1,) * 15, (2,) + (1,) * 7, (4,) + (1,) * 3, (1, 1, 2) + (1,) * 6, (1,) * 16, (8,) + (1,) * 7,
  (1, 1, 4) + (1,) * 14, (3, 2) + (1,) * 9, (2, 2) + (1,) * 14, (1,) * 32,
)  # fmt: skip


def check_methods(names: Sequence[str]) -> None:
  """Refuses methods whose numbers would be wrong: the drafts are independent, and all methods decide on the same."""
  if wrong := [name for name in names if name not in NAMES]:
    raise ValueError(f'{", ".join(wrong)}: the methods for independent drafts that are lossless are {", ".join(NAMES)}')


@jax.jit
def _draft(decoder, state):
  """Guesses, the draft's distributions, and the target's."""
  proposal = propose(decoder, state, noise_keys(decoder, state)[0])
  logits = score(decoder, state, proposal).logits
  return proposal.tokens, proposal.probs, logits_to_probs(logits, state.sampling)


@functools.partial(jax.jit, static_argnames=('tree', 'method', 'num_decisions'))
def _kept(key, tokens, draft_probs, target_probs, *, tree, method, num_decisions):
  """The mean number of tokens that a call yields, `[B]`."""

  def once(key):
    return verify(key, tree, tokens, draft_probs, target_probs, method=method).lengths

  return jax.lax.map(once, jax.random.split(key, num_decisions)).mean(axis=0)


def _places(workload: Workload, seed: int) -> Workload:
  """The workload whose prompts end at a place of the target's continuation of each, drawn evenly."""
  texts, rng = target_texts(workload, seed), np.random.default_rng(seed)
  lengths = (texts >= 0).sum(axis=1)
  # An end of text is not continued.
  added = np.array([rng.integers(0, max(length, 1)) for length in lengths])
  longest = workload.tokens.shape[1] + texts.shape[1]
  tokens = np.zeros((len(texts), longest), np.int32)
  for row, (count, own) in enumerate(zip(added, workload.lengths)):
    tokens[row, :own] = workload.tokens[row, :own]
    tokens[row, own : own + count] = texts[row, :count]
  return dataclasses.replace(workload, tokens=tokens, lengths=np.asarray(workload.lengths) + added)


def _takes(name: str, tree: TokenTree) -> bool:
  """Whether a method is defined on the tree and is no other one there: a single draft is that of `block`."""
  method = get_method(name)
  return (method.max_drafts == 1) == tree.is_chain


def measure(workload: Workload, shapes, names, num_decisions: int, seed: int):
  """Tokens of a call by shape and method, `[P]` each, in turn."""
  places = _places(workload, seed)
  keys = places.keys(seed)
  for shape in shapes:
    tree = TokenTree.prefix(shape)
    own = [name for name in names if _takes(name, tree)]
    if not own:
      continue
    decoder = Decoder.make(
      places.target, places.draft, method=BASELINE, tree=tree, max_new_tokens=1, cache_size=places.tokens.shape[1] + 1
    )
    kept: dict[str, list[np.ndarray]] = {name: [] for name in own}
    for batch, rows in enumerate(places.batches):
      state = init_decode(decoder, keys[rows], places.tokens[rows], places.lengths[rows], sampling=places.sampling)
      drafted = _draft(decoder, state)
      for number, name in enumerate(own):
        key = jax.random.fold_in(jax.random.key(seed), batch * places.batch_size * 100 + number)
        kept[name].append(
          np.asarray(_kept(key, *drafted, tree=tree, method=get_method(name), num_decisions=num_decisions))
        )
    tokens = {name: np.concatenate(parts)[: len(places.prompts)] for name, parts in kept.items()}
    print(f'{shape_name(shape)}: ' + ', '.join(f'{name} {own.mean():.3f}' for name, own in tokens.items()), flush=True)
    for name, own in tokens.items():
      yield shape, name, own


def best_of(records: list[dict], num_nodes: int, temperature: float) -> dict[str, dict]:
  """The record of each method on its best shape of at most so many nodes; single drafts are those of all methods."""
  best: dict[str, dict] = {}
  for record in records:
    if record['num_nodes'] <= num_nodes and record['temperature'] == temperature:
      names = [record['method']]
      if record['method'] == 'block':
        names += ['traversal', 'ratio_block', 'race_block', 'race_traversal', 'race_layers']
      if record['method'] == 'speculative':
        names.append('spectr')
      for name in names:
        if name not in best or np.mean(record['tokens']) > np.mean(best[name]['tokens']):
          best[name] = record
  return best


def table(records: list[dict], budgets: list[int]) -> str:
  """A Markdown table: tokens per call and the ratio to `BASELINE`, with 95% intervals over prompts."""
  lines = [
    '| temperature | nodes | method | shape | tokens per call | to `race_traversal` |',
    '|---|---|---|---|---|---|',
  ]
  for temperature in dict.fromkeys(record['temperature'] for record in records):
    for budget in budgets:
      best = best_of(records, budget, temperature)
      for name in sorted(best, key=lambda name: np.mean(best[name]['tokens'])):
        tokens, ones = np.array(best[name]['tokens']), np.ones(len(best[name]['tokens']))
        value, ratio = metrics.ratio_text(tokens, ones), ''
        if name != BASELINE and BASELINE in best and len(tokens) > 1:
          ratio = metrics.comparison_text((tokens, ones), (np.array(best[BASELINE]['tokens']), ones))
        lines.append(f'| {temperature:g} | {budget} | `{name}` | {best[name]["shape"]} | {value} | {ratio} |')
  return '\n'.join(lines)


if __name__ == '__main__':
  _OPTIONS = command.define_options(
    'target', 'draft', 'prompts', 'chat', 'dtype', num_prompts=64, max_new_tokens=32, batch_size=16
  )
  _METHOD = flags.DEFINE_list('method', list(METHODS_COMPARED), 'Methods.')
  _TEMPERATURES = command.define_numbers('temperature', '1,0.6,0.3', 'Temperatures.', float, least=0)
  _NODES = command.define_numbers('nodes', '16,64', 'Nodes of a tree, at most.')
  _SHAPE = flags.DEFINE_multi_string(
    'shape', None, 'Only this shape, such as "4 x 16" or "prefix:2,2,1"; repeat the flag for several.'
  )
  _NUM_DECISIONS = flags.DEFINE_integer('num_decisions', 4, 'Decisions on every draft.', lower_bound=1)
  _SEED = flags.DEFINE_integer('seed', 0, 'Seed.', lower_bound=0)
  _OUTPUT = command.define_output()

  def main(argv):
    del argv
    temperatures, budgets, options = _TEMPERATURES(), _NODES(), _OPTIONS(skip_long=True)
    check_methods(_METHOD.value)
    shapes = [parse_shape(text) for text in _SHAPE.value] if _SHAPE.value else SHAPES
    shapes = [shape for shape in shapes if TokenTree.prefix(shape).num_nodes <= max(budgets)]
    records: list[dict] = []
    with OutputFiles(output=_OUTPUT.value).apart_from(options.inputs()) as files:
      loaded = Workload.load(options)
      for temperature in temperatures:
        own = [
          {
            'temperature': temperature,
            'method': name,
            'shape': shape_name(shape),
            'num_nodes': TokenTree.prefix(shape).num_nodes,
            'tokens': [round(float(each), 4) for each in tokens],
          }
          for shape, name, tokens in measure(
            loaded.at(temperature), shapes, _METHOD.value, _NUM_DECISIONS.value, _SEED.value
          )
        ]
        print(table(own, budgets), flush=True)
        records += own
      run = {'num_prompts': options.num_prompts, 'num_decisions': _NUM_DECISIONS.value}
      files.write(output=command.to_json(records, indent=None, methods=_METHOD.value, **run))

  command_line.run(main)
