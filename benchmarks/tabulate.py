"""Markdown tables from runs of `decode.main`: block efficiency by method and tree, and comparisons of methods.

Command   python -m benchmarks.tabulate --files=FILE,... [--output=SUMMARY.json] [--nodes=64]
Files     the --generations of `decode.main` or `decode.bulk`, or a summary that this program wrote

Continuations of one prompt under several seeds are one unit of the sample. The 95% intervals are over prompts. Ratios
to `--baseline` are paired: both methods decode every prompt and seed. `--nodes` adds a table of each method on its best
shape of at most that many nodes, with the factor by which the best method keeps more.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Callable

import numpy as np
from absl import flags

from common import command_line
from common.output_files import OutputFiles
from decode.experiment import metrics
from decode.experiment.settings import parse_shape
from spectr_jax import METHODS, TokenTree


@dataclasses.dataclass(frozen=True)
class Setting:
  """A setting of a run."""

  temperature: float
  method: str  # with deviations from its defaults
  is_lossless: bool
  shape: str  # 'K x L' for chains, else the name of the tree

  @property
  def is_chains(self) -> bool:
    return ' x ' in self.shape


@dataclasses.dataclass
class Counts:
  """Counts by prompt, summed over seeds."""

  tokens: dict = dataclasses.field(default_factory=collections.Counter)
  target_calls: dict = dataclasses.field(default_factory=collections.Counter)
  runs: set = dataclasses.field(default_factory=set)  # the pairs of prompt and seed that are counted

  @property
  def seeds(self) -> list[int]:
    return sorted({seed for _, seed in self.runs})

  def arrays(self, prompts=None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and target calls, `[P]` each, of the given prompts, by default of all."""
    prompts = self.tokens if prompts is None else prompts
    return tuple(np.array([counts[prompt] for prompt in prompts]) for counts in (self.tokens, self.target_calls))


def read(paths: list[str]) -> dict[Setting, Counts]:
  """The counts in the files, by setting; a `ValueError` if a prompt and seed are there twice, or a file has
  another format.
  """
  by_setting = collections.defaultdict(Counts)
  for path in paths:
    with open(path, encoding='utf-8') as file:
      try:
        if path.endswith('.json'):
          _add_summary(json.load(file), by_setting)
        else:
          _add_generations(file, by_setting)
      except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f'{path}: neither generations of decode.main nor a summary: {error!r}') from error
  return dict(by_setting)


def _version(line: dict) -> str:
  """The method's name, with deviations from its defaults: its proposal rule and over-acceptance."""
  name, children, epsilon = line['method'], line['children'], line['epsilon']
  is_own = name not in METHODS or children == METHODS[name].proposal_rule.name
  return name + ('' if is_own else f', {children}') + ('' if epsilon is None else f', epsilon {epsilon:g}')


def _add_generations(lines, by_setting) -> None:
  for line in map(json.loads, lines):
    is_chains = line['tree'] == 'chains'
    shape = f'{line["num_drafts"]} x {line["draft_length"]}' if is_chains else line['tree']
    setting = Setting(line['temperature'], _version(line), line['is_lossless'], shape)
    counts, run = by_setting[setting], (line['id'], line['seed'])
    if run in counts.runs:
      raise ValueError(f'{setting} has prompt {run[0]!r} with seed {run[1]} twice')
    counts.runs.add(run)
    counts.tokens[line['id']] += len(line['tokens'])
    counts.target_calls[line['id']] += line['target_calls']


def _add_summary(records, by_setting) -> None:
  for record in records:
    setting = Setting(record['temperature'], record['method'], record['is_lossless'], record['shape'])
    if setting in by_setting:
      raise ValueError(f'{setting} is in two files')
    by_prompt = (dict(zip(record['prompts'], record[name])) for name in ('tokens', 'target_calls'))
    runs = set(itertools.product(record['prompts'], record['seeds']))
    by_setting[setting] = Counts(*map(collections.Counter, by_prompt), runs)


def summarize(by_setting: dict[Setting, Counts]) -> str:
  """JSON with one setting per line, from which every table can be made again."""
  lines = []
  for setting, counts in by_setting.items():
    tokens, calls = counts.arrays()
    record = dataclasses.asdict(setting) | {
      'seeds': counts.seeds, 'block_efficiency': metrics.ratio(tokens, calls),
      'block_efficiency_ci95': metrics.ratio_interval(tokens, calls), 'prompts': list(counts.tokens),
      'tokens': tokens.tolist(), 'target_calls': calls.tolist(),
    }  # fmt: skip
    lines.append(json.dumps(record))
  return '[\n' + ',\n'.join(lines) + '\n]\n'


def _factor(counts: Counts, baseline: Counts | None) -> str:
  if baseline is None or baseline is counts or counts.seeds != baseline.seeds:
    return ''
  shared = [prompt for prompt in counts.tokens if prompt in baseline.tokens]
  if len(shared) < 2:
    return ''
  return metrics.comparison_text(counts.arrays(shared), baseline.arrays(shared))


def _budget(setting: Setting) -> str:
  """The group of a setting: `optimal:64 = prefix:2,2,1` belongs to `optimal:64`, any other tree to itself."""
  return setting.shape.split(' = ')[0]


def num_nodes(shape: str) -> int | None:
  """The number of nodes of a tree, from its name; None for trees other than K x L and prefix trees."""
  try:
    return TokenTree.prefix(parse_shape(shape.split(' = ')[-1])).num_nodes
  except ValueError:
    return None


def _comparison(title: str, rows: dict[Setting, Counts], column: str, factor: Callable[[Counts], str]) -> list[str]:
  """A table of settings, the best first, with a column of factors."""
  lines = [f'\n{title}:\n', f'| method | tree | tokens per call | {column} |', '|---|---|---|---|']
  for setting, counts in sorted(rows.items(), key=lambda item: -metrics.ratio(*item[1].arrays())):
    tree = setting.shape.split(' = ')[-1]
    value = metrics.ratio_text(*counts.arrays())
    lines.append(f'| `{setting.method}` | {tree} | {value} | {factor(counts)} |')
  return lines


def best_shapes(by_setting: dict[Setting, Counts], most_nodes: int) -> list[str]:
  """Markdown: per temperature each method on its best shape of at most so many nodes, the best method first."""
  lines = []
  for temperature in sorted({setting.temperature for setting in by_setting}, reverse=True):
    best: dict[str, tuple[float, Setting]] = {}
    for setting, counts in by_setting.items():
      nodes = num_nodes(setting.shape)
      if setting.temperature == temperature and nodes is not None and nodes <= most_nodes:
        value = metrics.ratio(*counts.arrays())
        if value > best.get(setting.method, (0.0,))[0]:
          best[setting.method] = value, setting
    if len(best) < 2:
      continue
    rows = {setting: by_setting[setting] for _, setting in best.values()}
    first = max(rows, key=lambda setting: metrics.ratio(*rows[setting].arrays()))
    title = f'Temperature {temperature:g}, at most {most_nodes} nodes, each method on its best shape'
    lines += _comparison(title, rows, f'`{first.method}` to it', functools.partial(_factor, rows[first]))
  return lines


def _natural(text: str) -> list:
  """A sort key that puts `2 x 8` before `16 x 1`, and both before `optimal:8`."""
  return [(int(part), '') if part.isdigit() else (math.inf, part) for part in re.findall(r'\d+|\D+', text)]


def tables(by_setting: dict[Setting, Counts], baseline: str) -> list[str]:
  """Markdown: per temperature a table of all chains, and per shape one that compares methods with the baseline."""
  lines = []
  for temperature in sorted({setting.temperature for setting in by_setting}, reverse=True):
    own = {setting: counts for setting, counts in by_setting.items() if setting.temperature == temperature}
    shapes = sorted({s.shape for s in own if s.is_chains}, key=_natural)
    methods = list(dict.fromkeys(s.method for s in own if s.is_chains))
    cells = {(s.method, s.shape): counts for s, counts in own.items()}
    if shapes:
      lines += [f'\nTemperature {temperature:g}, K x L:\n', '| method |' + ''.join(f' {s} |' for s in shapes)]
      lines.append('|---|' + '---|' * len(shapes))
      for method in methods:
        row = [cells.get((method, shape)) for shape in shapes]
        values = [f' {metrics.ratio_text(*counts.arrays())} |' if counts else ' |' for counts in row]
        lines.append(f'| `{method}` |' + ''.join(values))
    for group in sorted(set(map(_budget, own)), key=_natural):
      members = {setting: counts for setting, counts in own.items() if _budget(setting) == group}
      against = next((counts for setting, counts in members.items() if setting.method == baseline), None)
      if len(members) < 2 or (against is None and ' x ' in group):
        continue
      title, factor = f'Temperature {temperature:g}, `{group}`', functools.partial(_factor, baseline=against)
      lines += _comparison(title, members, f'to `{baseline}`', factor)
  return lines


if __name__ == '__main__':
  _FILES = flags.DEFINE_list('files', [], 'Files to read.')
  _BASELINE = flags.DEFINE_string('baseline', 'spectr', 'Method that others are compared with.')
  _NODES = flags.DEFINE_integer('nodes', None, 'Also compare best shapes of at most so many nodes.', lower_bound=1)
  _OUTPUT = flags.DEFINE_string('output', None, 'Write counts by prompt to this file, as JSON.')

  def main():
    outputs = OutputFiles(output=_OUTPUT.value).apart_from({'files': _FILES.value})
    by_setting = read(_FILES.value)
    if not by_setting:
      raise ValueError('no files given, or nothing in them')
    lines = tables(by_setting, _BASELINE.value)
    if _NODES.value is not None:
      lines += best_shapes(by_setting, _NODES.value)
    with outputs:
      outputs.write_after(lambda: print('\n'.join(lines)), output=summarize(by_setting))

  command_line.run(main)
