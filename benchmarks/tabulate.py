"""Tables in Markdown from results of `decode.main --output`: `python -m benchmarks.tabulate FILE...`.

Block efficiency by method and tree, one table per temperature, all seeds of a setting together. The interval is the
mean of the seeds' own, over the square root of their number: it covers prompts and seeds as if seeds were new prompts.
"""

import collections
import json
import math
import sys

Row = collections.namedtuple('Row', 'value half num_seeds num_prompts shape')


def _shape(result: dict) -> str:
  if result['tree'] == 'chains':
    return f'{result["num_drafts"]} x {result["draft_length"]}'
  return result['tree']


def read(paths: list[str]) -> dict[float, dict[tuple[str, str], Row]]:
  """Rows by temperature, then by method and shape."""
  groups = collections.defaultdict(list)
  for path in paths:
    with open(path, encoding='utf-8') as file:
      for result in json.load(file)['results']:
        groups[result['temperature'], result['method'], _shape(result)].append(result)
  tables = collections.defaultdict(dict)
  for (temperature, method, shape), results in groups.items():
    tokens, calls = (sum(result[name] for result in results) for name in ('tokens', 'target_calls'))
    intervals = [result['block_efficiency_ci95'] for result in results]
    half = sum(high - low for low, high in intervals) / (2 * len(intervals)) / math.sqrt(len(intervals))
    tables[temperature][method, shape] = Row(tokens / calls, half, len(results), results[0]['num_prompts'], shape)
  return tables


def main(paths: list[str]) -> None:
  for temperature, rows in sorted(read(paths).items(), reverse=True):
    shapes = list(dict.fromkeys(shape for _, shape in rows if ' x ' in shape))
    shapes.sort(key=lambda shape: tuple(map(int, shape.split(' x '))))
    methods = list(dict.fromkeys(method for method, shape in rows if ' x ' in shape))
    print(f'\nTemperature {temperature:g}, K x L:\n')
    print('| method |' + ''.join(f' {shape} |' for shape in shapes))
    print('|---|' + '---|' * len(shapes))
    for method in methods:
      cells = [rows.get((method, shape)) for shape in shapes]
      texts = ('' if row is None else f' {row.value:.2f} ± {row.half:.2f}' for row in cells)
      print(f'| `{method}` |' + ''.join(text + ' |' for text in texts))
    others = [(method, shape, row) for (method, shape), row in rows.items() if ' x ' not in shape and shape != 'none']
    if others:
      print('\n| method | tree | tokens per target call |\n|---|---|---|')
      for method, shape, row in others:
        print(f'| `{method}` | `{shape}` | {row.value:.2f} ± {row.half:.2f} |')


if __name__ == '__main__':
  main(sys.argv[1:])
