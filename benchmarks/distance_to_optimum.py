"""The share of the optimum that methods keep, on tables cut from a pair's distributions, and where the rest is.

Command   python -m benchmarks.distance_to_optimum --output=docs/distance_to_optimum.json
Models    the pretrained pair, or --target and --draft
Tables    `benchmarks.real_tables` after the first prompts, V classes

For every table and K, in tokens kept of K chains of L tokens: `theory.stateless_chains_optimum`, the bounds that
`theory.stateless_kept_bound` and `theory.stateless_mean_bound` give, the optima with state and with correlated drafts,
for two drafts those of `benchmarks.planned_optimum`, and what the methods keep. Of these, the drafts are sampled and
the decisions summed exactly; errors are those of the drafts. All are in units of the optimum, means over the tables.
All lossless methods for independent candidates take part, those for a single draft with K = 1. With state, one round
may keep more than the optimum.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import command
from benchmarks.planned_optimum import coordinated_optimum, divided_optimum, given_texts
from benchmarks.real_tables import real_tables
from common import command_line
from common.output_files import OutputFiles
from decode.experiment.workload import Workload
from decode.papers.figure import by_value
from spectr_jax import METHODS, Proposal, TokenTree, get_method, theory
from spectr_jax.methods import FURTHER_METHODS
from spectr_jax.proposal import Independent

NAMES = tuple(
  name
  for name, method in (METHODS | FURTHER_METHODS).items()
  if method.is_lossless and method.max_drafts != 0 and isinstance(method.proposal_rule, Independent)
)
BOUNDS = {
  'bound': 'bound of each text', 'mean_bound': 'bound of sets of texts', 'state': 'with state',
  'correlated': 'correlated drafts, at most', 'divided': 'best division and order',
  'coordinated': 'coordinated as well',
}  # fmt: skip


@functools.partial(jax.jit, static_argnames=('tree', 'name'))
def _kept(tokens, draft_probs, target_probs, *, tree: TokenTree, name: str) -> jax.Array:
  verifier = get_method(name).verifier

  def one(row):
    tokens, draft_probs, target_probs = row
    law = verifier.law(tree, Proposal(tokens, draft_probs), target_probs, verifier.init_state(tree))
    return jnp.sum(law, axis=1) @ jnp.asarray(tree.depths, law.dtype)

  return jax.lax.map(one, (tokens, draft_probs, target_probs), batch_size=256)


def kept_by_methods(draft_law, target_law, num_drafts: int, names, num_samples: int, seed: int) -> dict[str, tuple]:
  """Tokens kept by each method, with the standard error."""
  size, tree = draft_law.shape[0], TokenTree.chains(num_drafts, draft_law.ndim)
  laws, rng = [given_texts(law) for law in (draft_law, target_law)], np.random.default_rng(seed)
  spelled = np.zeros((num_samples, tree.num_nodes + 1), int)
  tokens = np.zeros((num_samples, tree.num_nodes), np.int32)
  for node in range(1, tree.num_nodes + 1):
    parent = tree.parents[node - 1]
    sums = np.cumsum(laws[0][tree.depths[parent]][spelled[:, parent]], axis=1)
    drawn = (rng.random((num_samples, 1)) * sums[:, -1:] >= sums).sum(axis=1)
    tokens[:, node - 1] = np.minimum(drawn, size - 1)
    spelled[:, node] = spelled[:, parent] * size + tokens[:, node - 1]
  draft, target = (
    np.stack(
      [own[tree.depths[node]][spelled[:, node]] if tree.depths[node] < tree.max_depth else uniform for node in nodes],
      axis=1,
    ).astype(np.float32)
    for own, nodes in zip(laws, (tree.parent_nodes, range(tree.num_nodes + 1)))
    for uniform in [np.full((num_samples, size), 1 / size)]
  )
  found = {name: np.asarray(_kept(tokens, draft, target, tree=tree, name=name)) for name in names}
  return {name: (float(own.mean()), float(own.std() / np.sqrt(num_samples))) for name, own in found.items()}


def bounds_of_texts(draft_law, target_law, num_drafts: int) -> dict[str, float]:
  """The means of `stateless_kept_bound` and `stateless_mean_bound` over all texts of the target, in tokens kept."""
  texts = np.indices(draft_law.shape).reshape(draft_law.ndim, -1).T
  log_probs = []
  with np.errstate(divide='ignore'):
    for laws in map(given_texts, (draft_law, target_law)):
      number, own = np.zeros(len(texts), int), []
      for depth, law in enumerate(laws):
        own.append(np.log(law[number, texts[:, depth]]))
        number = number * draft_law.shape[0] + texts[:, depth]
      log_probs.append(np.stack(own, axis=1))
  tree, probs = TokenTree.chains(num_drafts, draft_law.ndim), target_law.reshape(-1)
  set_probs = theory.best_set_probs(tree, *log_probs, probs)
  return {
    'bound': float(probs @ theory.stateless_kept_bound(tree, *log_probs).sum(axis=1)),
    'mean_bound': float(probs @ theory.stateless_mean_bound(tree, *log_probs, set_probs).sum(axis=1)),
  }


def measure_table(draft_law, target_law, num_drafts: int, num_samples: int, seed: int) -> dict:
  laws = draft_law / draft_law.sum(), target_law / target_law.sum()
  optimum = theory.stateless_chains_optimum(*laws, num_drafts)
  others = bounds_of_texts(*laws, num_drafts) | {
    'state': theory.stateless_chains_optimum(*laws, num_drafts, has_state=True),
    'correlated': theory.stateless_chains_optimum(*laws, num_drafts, is_correlated=True),
  }
  if num_drafts == 2:
    others |= {'divided': divided_optimum(*laws), 'coordinated': coordinated_optimum(*laws)}
  names = [name for name in NAMES if num_drafts == 1 or get_method(name).max_drafts != 1]
  methods = kept_by_methods(*laws, num_drafts, names, num_samples, seed)
  return {'optimum': optimum} | {
    'shares': {name: value / optimum for name, value in others.items()}
    | {name: value / optimum for name, (value, _) in methods.items()},
    'errors': {name: error / optimum for name, (_, error) in methods.items()},
  }


def means(records: list[dict]) -> list[dict]:
  """The means over tables, one row for each temperature, K, L and quantity, with the lowest and highest share.

  The error is the largest standard error of a table, 0 for what is computed.
  """
  rows = []
  for (temperature, num_drafts, length), own in by_value(records, 'temperature', 'num_drafts', 'length').items():
    for name in own[0]['shares']:
      shares = [each['shares'][name] for each in own]
      error = max(each['errors'].get(name, 0.0) for each in own)
      place = {'temperature': temperature, 'K': num_drafts, 'L': length, 'tables': len(own), 'of': name}
      place['kept by the optimum'] = float(np.mean([each['optimum'] for each in own]))
      rows.append(place | {'share': float(np.mean(shares)), 'low': min(shares), 'high': max(shares), 'error': error})
  return rows


def table(records: list[dict]) -> str:
  """A Markdown table of means over tables: a column for each temperature, K and L."""
  rows = means(records)
  groups = list(dict.fromkeys((row['temperature'], row['K'], row['L']) for row in rows))
  cells = {(row['temperature'], row['K'], row['L'], row['of']): f'{row["share"]:.3f}' for row in rows}
  kept = {(row['temperature'], row['K'], row['L']): f'{row["kept by the optimum"]:.2f}' for row in rows}
  names = [f'T {temperature:g}, {num_drafts} x {length}' for temperature, num_drafts, length in groups]
  lines = [f'| | {" | ".join(names)} |', '|---' * (1 + len(groups)) + '|']
  lines.append(f'| tokens kept by the optimum | {" | ".join(kept[group] for group in groups)} |')
  for name in (*BOUNDS, *NAMES):
    own = [cells.get((*group, name), '') for group in groups]
    if any(own):
      lines.append(f'| {BOUNDS.get(name, f"`{name}`")} | {" | ".join(own)} |')
  return '\n'.join(lines)


if __name__ == '__main__':
  _OPTIONS = command.define_options('target', 'draft')
  _TEMPERATURES = command.define_numbers('temperature', '1,0.6', 'Temperatures.', float, least=0)
  _NUM_TABLES = flags.DEFINE_integer('num_tables', 4, 'Tables, of one prompt each.', lower_bound=1)
  _NUM_CLASSES = flags.DEFINE_integer('num_classes', 8, 'V, classes.', lower_bound=2)
  _LENGTHS = command.define_numbers('draft_length', '3', 'L, tokens.')
  _NUM_DRAFTS = command.define_numbers('num_drafts', '1,2,3', 'K, drafts.')
  _NUM_SAMPLES = flags.DEFINE_integer('num_samples', 8192, 'Drafts per table.', lower_bound=256)
  _OUTPUT = command.define_output()

  def main(argv):
    del argv
    temperatures, lengths, numbers = _TEMPERATURES(), _LENGTHS(), _NUM_DRAFTS()
    options = _OPTIONS(num_prompts=_NUM_TABLES.value, max_new_tokens=max(lengths))
    records = []
    with OutputFiles(output=_OUTPUT.value).apart_from(options.inputs()) as files:
      loaded = Workload.load(options)
      for temperature in temperatures:
        workload = loaded.at(temperature)
        for length in lengths:
          for prompt in range(_NUM_TABLES.value):
            laws = real_tables(workload, prompt, _NUM_CLASSES.value, length, seed=prompt)
            for number in numbers:
              place = {'temperature': temperature, 'num_drafts': number, 'length': length, 'prompt': prompt}
              records.append(place | measure_table(*laws, number, _NUM_SAMPLES.value, seed=prompt))
              print(records[-1], flush=True)
      run = {'num_classes': _NUM_CLASSES.value, 'num_samples': _NUM_SAMPLES.value, 'num_tables': _NUM_TABLES.value}
      files.write_after(lambda: print(table(records)), output=command.to_json(records, **run))

  command_line.run(main)
