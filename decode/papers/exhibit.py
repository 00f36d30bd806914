"""Exhibits of the papers: what a table or figure is measured on, and what each can say, write and draw."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from rich.console import Console

from decode import plots
from decode.experiment.measurements import DecodeRun
from decode.experiment.model_options import split_draft
from decode.experiment.options import DecodeOptions
from decode.experiment.prompt_options import PromptOptions
from decode.experiment.prompts import take_first, without_long
from decode.experiment.run import run_decode
from decode.experiment.settings import Setting
from decode.experiment.workload import Pick, find_head, model_title, portable
from decode.plots import Bars
from decode.study import Row, Value, lasts, markdown, table, to_csv, to_plain
from spectr_jax.auto.trial import Notify
from spectr_jax.engine.program_memory import describe_groups
from spectr_jax.io.model_files import open_model
from spectr_jax.io.tokenizer import check_same_tokens

# Sources of numbers: names of rows, and prefixes of columns.
HERE, PAPER = 'here', 'paper'
_TEXTS = pathlib.Path(__file__).with_name('figures.md')
# Lines that several tables share.
PAPER_SPREAD = 'in the paper: standard deviation, where it prints one'
CUT_ROUNDS = 'A round that the limit of new tokens cuts off counts as whole, which takes most from long drafts.'


# Amounts to measure, each a flag of `decode.reproduce`: whole numbers, and lists.
SIZES = {
  'num_prompts': 'Prompts of each set, at most.',
  'num_seeds': 'Runs of every setting.',
  'max_new_tokens': 'New tokens per prompt, at most.',
  'batch_size': 'Prompts decoded together, at most.',
  'num_runs': 'Repetitions of a timed call, or texts of a simulation.',
  'context': 'Room of the caches of a timed call, tokens.',
}
LISTS = {
  'num_drafts': 'K, several separated by commas.',
  'draft_length': 'L, several separated by commas.',
  'num_nodes': 'Tokens drafted in a call, several separated by commas.',
  'epsilon': 'Over-acceptance, several separated by commas.',
}
# The amounts that are no options of decoding; methods have an epsilon each.
_OTHER_SIZES = 'num_runs', 'context', 'num_nodes', 'epsilon'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """Models, prompts and sizes that an exhibit is measured on."""

  target: str
  drafts: Mapping[str, str]  # by name, each as `DecodeOptions.draft`
  prompts: Mapping[str, str | None]  # files by name; None for the shipped ones
  sizes: Mapping[str, Any]  # of `SIZES` and `LISTS`
  dtype: str = ''
  seed: int = 0  # the first
  # further ones of decoding, those of `Exhibit.options`
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def draft(self) -> str:
    """The first draft; the only one, unless the exhibit compares several."""
    return next(iter(self.drafts.values()))

  def decode_options(self, **options) -> DecodeOptions:
    """Options of decoding with these models, prompts and sizes; keyword arguments override those of the request."""
    own = {
      'target': self.target,
      'draft': self.draft,
      'dtype': self.dtype,
      'prompts': next(iter(self.prompts.values()), None),
      'skip_long': True,
      'seed': self.seed,
    }
    sizes = {name: value for name, value in self.sizes.items() if name not in _OTHER_SIZES}
    return DecodeOptions.of(**(own | sizes | dict(self.options) | options))


@dataclasses.dataclass
class Results:
  """The outcome of measuring an exhibit."""

  rows: list[Row] = dataclasses.field(default_factory=list)  # of the same columns
  runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # flags, versions, device and models of each run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exhibit:
  """A table or figure of a paper: `Table` or `Figure`, which say how rows are described, kept and drawn.

  Rows are all that is kept: pictures can be drawn again from the file of data.
  """

  kind: ClassVar[str]  # in messages
  data_format: ClassVar[str]  # extension of the file of data

  title: str  # its subject, and the paper and number
  measure: Callable[[Request, Notify], Results]  # call `run`, which checks the request first
  # by default; they take minutes with the pretrained pair on two cores
  sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  has_models: bool = True  # is about a pair of models
  compares_drafts: bool = False
  is_simulated: bool = False  # simulates texts, which a seed decides
  # of decoding that a request may change, with their defaults
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def has_prompts(self) -> bool:
    return 'num_prompts' in self.sizes

  @property
  def is_random(self) -> bool:
    return self.has_prompts or self.is_simulated

  def choose_sizes(self, given: Mapping[str, Any]) -> dict[str, Any]:
    """The default sizes with the given ones in their place."""
    for name in given:
      if name not in self.sizes:
        sizes = f'whose sizes are {", ".join(self.sizes)}' if self.sizes else 'which has none'
        raise ValueError(f'{name} is not for this {self.kind}, {sizes}')
    return {**self.sizes, **given}

  def choose_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
    """The default options with the given ones in their place."""
    for name in given:
      if name not in self.options:
        raise ValueError(f'{name} is not for this {self.kind}, which has its own')
    return {**self.options, **given}

  def run(self, request: Request, notify: Notify) -> Results:
    """Measures the rows, after every check that needs no measuring."""
    if self.has_models:
      if len(request.drafts) > 1 and not self.compares_drafts:
        raise ValueError(f'this {self.kind} has one draft, got {", ".join(request.drafts)}')
      _check_inputs(request)
    return self.measure(request, notify)

  def describe(self, request: Request, results: Results) -> list[str]:
    """Lines about models, prompts and sizes of the rows."""
    raise NotImplementedError

  def to_data(self, name: str, request: Request, results: Results, about: Sequence[str]) -> str:
    """The file of data, from which the rows can be read again; `about` is of `describe`."""
    raise NotImplementedError

  def to_image(self, rows: Sequence[Row], about: Sequence[str] = (), *, kind: str = 'png') -> bytes:
    """The picture, as `png` or `svg`."""
    raise NotImplementedError

  def shown(self, rows: Sequence[Row]) -> Sequence[Row]:
    """The rows that a table shows."""
    return rows

  def text(self, name: str) -> str | None:
    """A paragraph on the picture; None for tables, which speak for themselves."""
    del name

  def show(self, name: str, console: Console, rows: Sequence[Row], about: Sequence[str]) -> None:
    """Prints the table, never folded outside a terminal, between what it shows and the lines of `describe`."""
    if not console.is_terminal:
      console.width = 1000
    for part in (self.title, self.text(name), table(self.shown(rows))):
      if part is not None:
        console.print(part, soft_wrap=isinstance(part, str), end='\n\n')
    for line in about:
      console.print(line, soft_wrap=True)

  def to_markdown(self, name: str, rows: Sequence[Row], about: Sequence[str]) -> str:
    """What the exhibit shows, the lines of `describe` as a list, and the table."""
    text = self.text(name)
    lines = [] if text is None else [f'![{name}]({name}.svg)', '', text, '']
    lines += [f'- {line}' for line in about]
    return '\n'.join([f'# {self.title}', '', *lines, '', markdown(self.shown(rows))])

  def files(self, name: str, request: Request, results: Results, about: Sequence[str]) -> dict[str, str | bytes]:
    """Contents of the files to write, by file name: data, Markdown, and the picture twice; `about` is of `describe`."""
    return {
      f'{name}.{self.data_format}': self.to_data(name, request, results, about),
      f'{name}.md': self.to_markdown(name, results.rows, about),
      f'{name}.png': self.to_image(results.rows, about),
      f'{name}.svg': self.to_image(results.rows, about, kind='svg'),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure(Exhibit):
  """A figure of a paper: rows of plain numbers, with intervals in columns `low` and `high`, kept as CSV."""

  kind = 'figure'
  data_format = 'csv'

  draw: Callable[[Sequence[Row]], Any]  # the rows, as a figure of matplotlib

  def describe(self, request: Request, results: Results) -> list[str]:
    del results
    lines = []
    if self.has_models:
      lines.append(f'target {portable(request.target)}, draft {portable(request.draft)}, temperature 1')
    lines += [f'prompts: the first of {path or "pretrained/prompts.jsonl"}' for path in request.prompts.values()]
    sizes = describe_sizes(request.sizes)
    if self.is_random:
      sizes.append(f'seed {request.seed}')
    return [*lines, *([', '.join(sizes)] if sizes else [])]

  def to_data(self, name: str, request: Request, results: Results, about: Sequence[str]) -> str:
    del name, request, about
    return to_csv(results.rows)

  def to_image(self, rows: Sequence[Row], about: Sequence[str] = (), *, kind: str = 'png') -> bytes:
    del about
    return plots.to_image(self.draw(rows), title=self.title, kind=kind)

  def text(self, name: str) -> str:
    sections = _TEXTS.read_text(encoding='utf-8').split('\n## ')
    texts = {title: text for title, _, text in (each.partition('\n\n') for each in sections)}
    return texts[name.partition('-')[0]].strip()

  def shown(self, rows: Sequence[Row]) -> Sequence[Row]:
    return lasts(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(Exhibit):
  """A table of a paper, or a figure that is published as numbers: rows of `Value`s, beside the paper's, as JSON."""

  kind = 'table'
  data_format = 'json'

  setup: str  # models, texts and settings of the paper
  spreads: str  # meaning of ±, here and in the paper
  full: Mapping[str, int]  # the paper's sizes, as far as it gives them or its tables imply them
  panels: tuple[Bars, ...]
  notes: tuple[str, ...] = ()
  # from the paper's setup, that no size shows
  difference: str = 'other models and texts, so what compares is the pattern'

  def describe(self, request: Request, results: Results) -> list[str]:
    """Models, prompts, sizes and device of the rows, those of the paper, and every difference that matters."""
    device = results.runs[0]['device']
    sets = _describe_sets(results.runs)
    sizes = describe_sizes({name: value for name, value in request.sizes.items() if name != 'num_prompts'})
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

  def _describe_reduction(self, sizes: Mapping[str, Any], results: Results) -> str:
    less = []
    for name, full in self.full.items():
      used = sizes[name]
      if name == 'num_prompts':
        used = min(run['num_prompts'] for run in results.runs)
      if used < full:
        less.append(f'{name} {used} instead of {full}')
    return 'reduced: ' + (', '.join(less) if less else 'nothing that the paper states')

  def to_data(self, name: str, request: Request, results: Results, about: Sequence[str]) -> str:
    content = {
      'table': name,
      'title': self.title,
      'about': about,
      'sizes': request.sizes,
      'runs': results.runs,
      'rows': to_plain(results.rows),
    }
    return json.dumps(content, indent=2, allow_nan=False) + '\n'

  def to_image(self, rows: Sequence[Row], about: Sequence[str] = (), *, kind: str = 'png') -> bytes:
    """The panels, and below them the first two lines of `describe`: models and prompts."""
    return plots.draw_bars(self.panels, rows, title=self.title, footer='; '.join(about[:2]), kind=kind)


def _describe_models(runs: Sequence[Mapping[str, Any]]) -> list[str]:
  titles = (f'{role} {model_title(model, has_dtype=True)}' for run in runs for role, model in run['models'].items())
  return list(dict.fromkeys(titles))


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


def block_efficiency(summary: Row) -> Value:
  return Value.of(summary['block_efficiency'], summary['block_efficiency_ci95'])


def published_value(printed: tuple[float, float | None] | None) -> Value | None:
  """A published mean and standard deviation; None where the paper prints none."""
  return None if printed is None else Value(*printed)


def _check_inputs(request: Request) -> None:
  """Reads what is quickly read of all models and prompts, so that nothing is measured in vain."""
  limits, tokenizers = [], []
  drafts = (split_draft(draft)[1] for draft in request.drafts.values())
  # A head has the limit and the tokenizer of its target, and so has a draft without a model.
  models = (path for path in drafts if path and find_head(request.target, path) is None)
  for path in (request.target, *models):
    files = open_model(path)
    limits.append(files.context_length)
    tokenizers.append((path, files.tokenizer()))
  check_same_tokens(tokenizers)
  tokenizer = tokenizers[0][1]
  for path in request.prompts.values():
    prompts = PromptOptions(prompts=path, chat=request.options.get('chat', False)).read()
    without_long(prompts, tokenizer, max_new_tokens=request.sizes['max_new_tokens'], max_length=min(limits))


def method_label(setting: Setting) -> str:
  """The method's name, marked where it is not lossless."""
  method = setting.method
  return method.name if method.is_lossless_on(setting.tree) else f'{method.name} (not lossless)'


def describe_sizes(used: Mapping[str, Any]) -> list[str]:
  """Each size as `name value`, several values separated by commas."""
  texts = {
    name: ','.join(f'{number:g}' for number in value) if isinstance(value, tuple) else str(value)
    for name, value in used.items()
  }
  return [f'{name} {text}' for name, text in texts.items()]
