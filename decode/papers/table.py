"""Tables of the papers: rows measured here beside published numbers, printed, as Markdown, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from decode.experiment import metrics
from decode.experiment.prompts import take_first
from decode.experiment.results import DecodeRun, Summary
from decode.experiment.run import run_decode
from decode.experiment.settings import Setting
from decode.experiment.workload import Pick, model_title
from decode.papers import table_panels
from decode.papers.exhibit import Exhibit, Request, Results, Row, Sizes, Value, describe_sizes, method_label
from decode.papers.table_panels import Panel
from spectr_jax.auto.trial import Notify
from spectr_jax.engine.program_memory import describe_groups

# Sources of numbers: names of rows, and prefixes of columns.
HERE, PAPER = 'here', 'paper'
# Lines that several tables share.
PAPER_SPREAD = 'in the paper: standard deviation, where it prints one'
CUT_ROUNDS = 'A round that the limit of new tokens cuts off counts as whole, which takes most from long drafts.'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(Exhibit):
  """A table of a paper, or a figure that is published as numbers."""

  kind = 'table'
  data_format = 'json'

  setup: str  # models, texts and settings of the paper
  spreads: str  # meaning of ±, here and in the paper
  full: Mapping[str, int]  # the paper's sizes, as far as it gives them or its tables imply them
  panels: tuple[Panel, ...]
  notes: tuple[str, ...] = ()
  # from the paper's setup, that no size shows
  difference: str = 'other models and texts, so what compares is the pattern'

  def describe(self, request: Request, results: Results) -> list[str]:
    """Models, prompts, sizes and device of the rows, those of the paper, and every difference that matters."""
    device = results.runs[0]['device']
    sets = _describe_sets(results.runs)
    sizes = describe_sizes({name: value for name, value in request.sizes.used.items() if name != 'num_prompts'})
    if sets:
      temperatures = dict.fromkeys(str(run['flags']['temperature']) for run in results.runs if 'prompts' in run)
      sizes += [f'temperature {", ".join(temperatures)}', f'seed {request.seed}']
    return [
      f'here: {"; ".join(_describe_models(results.runs))}',
      *([f'prompts: {"; ".join(sets)}'] if sets else []),
      f'sizes: {", ".join(sizes)}; {device["kind"]}, {device["num_cpus"]} CPU cores',
      f'paper: {self.setup}; {self.difference}',
      self._describe_reduction(request.sizes, results),
      self.spreads,
      *(line for run in results.runs for line in describe_groups(run.get('timed_together', ()))),
      *(line for run in results.runs for line in run.get('notes', ())),
      *self.notes,
    ]

  def _describe_reduction(self, sizes: Sizes, results: Results) -> str:
    less = []
    for name, full in self.full.items():
      used = sizes.used[name]
      if name == 'num_prompts':
        used = min(run['num_prompts'] for run in results.runs)
      if used < full:
        less.append(f'{name} {used} instead of {full}')
    return 'reduced: ' + (', '.join(less) if less else 'nothing that the paper states')

  def show(self, console: Console, rows: Sequence[Row], about: Sequence[str]) -> None:
    """Prints the table, never folded outside a terminal, and the lines of `describe`."""
    if not console.is_terminal:
      console.width = 1000
    console.print(f'{self.title}\n', soft_wrap=True)
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in rows[0]:
      is_text = any(isinstance(row[column], str) for row in rows)
      shown.add_column(column.replace(': ', ':\n'), justify='left' if is_text else 'right')
    for row in rows:
      shown.add_row(*map(_text_of, row.values()))
    console.print(shown)
    console.print()
    for line in about:
      console.print(line, soft_wrap=True)

  def to_data(self, name: str, request: Request, results: Results, about: Sequence[str]) -> str:
    """JSON: rows with numbers as `{"number", "spread", "interval"}`, and all that is needed to run them again."""

    def plain(cell):
      return dataclasses.asdict(cell) if isinstance(cell, Value) else cell

    content = {
      'table': name,
      'title': self.title,
      'about': about,
      'sizes': request.sizes.used,
      'runs': results.runs,
      'rows': [{column: plain(cell) for column, cell in row.items()} for row in results.rows],
    }
    return json.dumps(content, indent=2, allow_nan=False) + '\n'

  def to_markdown(self, name: str, rows: Sequence[Row], about: Sequence[str]) -> str:
    """The lines of `describe` as a list, and the table."""
    del name
    columns = list(rows[0])
    body = [columns, ['---'] * len(columns), *([_text_of(row[column]) for column in columns] for row in rows)]
    text = [f'# {self.title}', '', *(f'- {line}' for line in about), '']
    return '\n'.join([*text, *(f'| {" | ".join(cells)} |' for cells in body)]) + '\n'

  def to_image(self, rows: Sequence[Row], about: Sequence[str] = (), *, kind: str = 'png') -> bytes:
    """The panels, and below them the first two lines of `describe`: models and prompts."""
    return table_panels.draw(self.panels, rows, title=self.title, footer='; '.join(about[:2]), kind=kind)


def _text_of(cell) -> str:
  return '-' if cell is None else str(cell)


def _describe_models(runs: Sequence[Mapping[str, Any]]) -> list[str]:
  return list(
    dict.fromkeys(
      f'{role} {model_title(model, has_dtype=True)}' for run in runs for role, model in run['models'].items()
    )
  )


def _describe_sets(runs: Sequence[Mapping[str, Any]]) -> list[str]:
  """Each set of prompts once, over all runs; none where nothing was decoded."""
  sets = {}
  for run in runs:
    if 'prompts' in run:
      long = f', {run["num_long_prompts"]} too long and left out' if run['num_long_prompts'] else ''
      path = run['flags']['prompts'] or 'pretrained/prompts.jsonl'
      sets.setdefault(f'{run["prompts"]}, {run["num_prompts"]} of {path}{long}')
  return list(sets)


# Measuring tables.


def decode_sets(
  request: Request, notify: Notify, results: Results, *, pick: Pick = take_first, **options
) -> Iterator[tuple[str, DecodeRun]]:
  """The name and the run of every set of prompts; each run is recorded in the results.

  `options` are fields of `DecodeOptions`, which override those of the request.
  """
  for name, path in request.prompts.items():
    run = run_decode(request.decode_options(prompts=path, **options), _labelled(notify, name), pick)
    results.runs.append(run.info | {'prompts': name, 'num_prompts': len(run.prompts)})
    yield name, run


def _labelled(notify: Notify, label: str) -> Notify:
  return lambda what, done, total: notify(f'{label}: {what}', done, total)


def setting_columns(setting: Setting, **before) -> Row:
  """Columns that name a setting: method, K and L, behind the columns `before`."""
  return {**before, 'method': method_label(setting), 'K': setting.num_drafts, 'L': setting.draft_length}


def with_interval(mean: float, interval: tuple[float, float] | None) -> Value:
  """A mean with its interval, as ± where it is symmetric."""
  spread = metrics.half_width(mean, interval)
  return Value(mean, spread, interval=interval if spread is None else None)


def block_efficiency(summary: Summary) -> Value:
  return with_interval(summary.block_efficiency, summary.interval)


def published_value(printed: tuple[float, float | None] | None) -> Value | None:
  """A published mean and standard deviation; None where the paper prints none."""
  return None if printed is None else Value(*printed)
