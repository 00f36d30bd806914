"""A measured table: printed, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json

from rich import box
from rich.table import Table as RichTable

from common.program_memory import describe_groups
from decode.experiment import report
from decode.papers.table import Found, Request, Row, Sizes, Table, Value


def describe_reduction(table: Table, found: Found, sizes: Sizes) -> str:
  """What is less than in the paper."""
  less = []
  for name, full in table.full.items():
    used = sizes.used[name]
    if name == 'num_prompts':
      used = min(info['num_prompts'] for info in found.info)
    if used < full:
      less.append(f'{name} {used} instead of {full}')
  return 'reduced: ' + (', '.join(less) if less else 'nothing that the paper states')


def describe(table: Table, request: Request, found: Found) -> list[str]:
  """What was measured on what, a line each."""
  models = {}
  for info in found.info:
    for role, model in info['models'].items():
      text = f'{role} {model["path"]} ({model["num_params"] / 1e6:.1f}M, {model["dtype"]})'
      models.setdefault(text)
  sets = {}
  for info in found.info:
    if 'prompts' in info:
      long = f', {info["num_long_prompts"]} too long and left out' if info['num_long_prompts'] else ''
      path = info['flags']['prompts'] or 'pretrained/prompts.jsonl'
      sets.setdefault(f'{info["prompts"]}, {info["num_prompts"]} of {path}{long}')
  temperatures = dict.fromkeys(info['flags']['temperature'] for info in found.info if 'prompts' in info)
  device = found.info[0]['device']
  sizes = [
    f'{name} {",".join(map(str, value)) if isinstance(value, tuple) else value}'
    for name, value in request.sizes.used.items()
    if name != 'num_prompts'
  ]
  if sets:
    sizes += [f'temperature {", ".join(map(str, temperatures))}', f'seed {request.seed}']
  lines = [f'here: {"; ".join(models)}']
  if sets:
    lines.append(f'prompts: {"; ".join(sets)}')
  return [
    *lines,
    f'sizes: {", ".join(sizes)}; {device["kind"]}, {device["num_cpus"]} CPU cores',
    f'paper: {table.setup}; other models and texts, so what compares is the pattern',
    describe_reduction(table, found, request.sizes),
    table.spreads,
    *(line for info in found.info for line in describe_groups(info.get('timed_together', ()))),
    *table.notes,
  ]


def _cell(value) -> str:
  return '-' if value is None else str(value)


def to_markdown(table: Table, rows: list[Row], lines: list[str]) -> str:
  columns = list(rows[0])
  body = [columns, ['---'] * len(columns), *([_cell(row[column]) for column in columns] for row in rows)]
  text = [f'# {table.title}', '', *(f'- {line}' for line in lines), '']
  return '\n'.join([*text, *(f'| {" | ".join(cells)} |' for cells in body)]) + '\n'


def to_json(name: str, table: Table, request: Request, found: Found, lines: list[str]) -> str:
  """Rows with numbers as `{"number", "spread", "interval"}`, and all that is needed to run them again."""

  def plain(cell):
    return dataclasses.asdict(cell) if isinstance(cell, Value) else cell

  content = {
    'table': name,
    'title': table.title,
    'about': lines,
    'sizes': request.sizes.used,
    'runs': found.info,
    'rows': [{column: plain(cell) for column, cell in row.items()} for row in found.rows],
  }
  return json.dumps(content, indent=2, allow_nan=False) + '\n'


def print_table(table: Table, rows: list[Row], lines: list[str]) -> None:
  console = report.make_console()
  if not console.is_terminal:
    console.width = 1000
  console.print(f'{table.title}\n', soft_wrap=True)
  shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
  for column in rows[0]:
    is_text = any(isinstance(row[column], str) for row in rows)
    shown.add_column(column.replace(': ', ':\n'), justify='left' if is_text else 'right')
  for row in rows:
    shown.add_row(*map(_cell, row.values()))
  console.print(shown)
  console.print()
  for line in lines:
    console.print(line, soft_wrap=True)
