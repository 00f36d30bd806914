"""Measures tables and figures of the papers: `python -m decode.reproduce --table=NAME`, or `--figure=NAME`."""

import time

from absl import flags
from etils import epath

from common import command_line
from common.output_files import OutputFiles
from decode.experiment import report
from decode.experiment.options import DecodeOptions
from decode.papers import figures, paper_figure, plots, table_report
from decode.papers.gallery import FIGURES
from decode.papers.table import Request
from decode.papers.tables import TABLES

_SHIPPED = 'shipped'
_ALL = 'all'

_TABLE = flags.DEFINE_string('table', None, f'A table to measure: {", ".join(TABLES)}.')
_FIGURE = flags.DEFINE_list(
  'figure',
  None,
  f'Figures to make, separated by commas, of {", ".join(FIGURES)}; or {_ALL}. Default sizes take minutes.',
)
_TARGET = flags.DEFINE_string('target', DecodeOptions.target, 'Directory of the target model.')
_DRAFT = flags.DEFINE_list(
  'draft', [DecodeOptions.draft], 'Directory of the draft model, or NAME=DIRECTORY; several for spectr_table2 and 4.'
)
_PROMPTS = flags.DEFINE_list(
  'prompts',
  None,
  'Files of prompts, or NAME=FILE, separated by commas; one named as a published set (HumanEval, GSM8K, MGSM, LM1B,'
  ' Alpaca) is compared with that. Default: the shipped prompts. A figure takes one.',
)
_OUTPUT = flags.DEFINE_string(
  'output', None, 'Directory for NAME.json, NAME.md and NAME.png of a table, and NAME.csv, .md and .png of a figure.'
)
_DTYPE = flags.DEFINE_string('dtype', '', "Type to compute in, float32 or bfloat16; '' for each model's own.")
_SEED = flags.DEFINE_integer('seed', None, 'The first seed; default 0.', lower_bound=0)
_SIZES = {
  'num_prompts': flags.DEFINE_integer('num_prompts', None, 'Prompts of each set, at most.', lower_bound=1),
  'num_seeds': flags.DEFINE_integer('num_seeds', None, 'Runs of every setting.', lower_bound=1),
  'max_new_tokens': flags.DEFINE_integer('max_new_tokens', None, 'New tokens per prompt, at most.', lower_bound=1),
  'batch_size': flags.DEFINE_integer('batch_size', None, 'Prompts decoded together, at most.', lower_bound=1),
  'num_runs': flags.DEFINE_integer(
    'num_runs', None, 'Repetitions of a timed call, or texts of a simulation.', lower_bound=1
  ),
  'context': flags.DEFINE_integer('context', None, 'Room of the caches of a timed call, tokens.', lower_bound=1),
  'num_drafts': flags.DEFINE_list('num_drafts', None, 'K, several separated by commas.'),
  'draft_length': flags.DEFINE_list('draft_length', None, 'L, several separated by commas.'),
  'num_nodes': flags.DEFINE_list('num_nodes', None, 'Tokens drafted in a call, several separated by commas.'),
  'epsilon': flags.DEFINE_list('epsilon', None, 'Over-acceptance, several separated by commas.'),
}  # fmt: skip


def _given() -> dict:
  sizes = {}
  for name, flag in _SIZES.items():
    sizes[name] = value = flag.value
    if isinstance(value, list):
      kind, least = (float, 0) if name == 'epsilon' else (int, 1)
      sizes[name] = command_line.parse_numbers(name, value, kind, least=least)
  return sizes


def _prompts() -> dict[str, str | None]:
  return {_SHIPPED: None} if _PROMPTS.value is None else command_line.parse_paths('prompts', _PROMPTS.value)


def _request(sizes, prompts: dict[str, str | None]) -> Request:
  return Request(
    target=_TARGET.value,
    drafts=command_line.parse_paths('draft', _DRAFT.value),
    prompts=prompts,
    sizes=sizes,
    dtype=_DTYPE.value,
    seed=_SEED.value or 0,
  )


def _output_files(names, kinds) -> OutputFiles:
  """The files of each name, as `NAME.KIND`, in the directory that was asked for; none if none was."""
  if _OUTPUT.value is None:
    return OutputFiles()
  plots.check_available()
  directory = epath.Path(_OUTPUT.value)
  directory.mkdir(parents=True, exist_ok=True)
  files = (f'{name}.{kind}' for name in names for kind in kinds)
  return OutputFiles(**{file: directory / file for file in files})


def _measure_table(name: str) -> None:
  table = TABLES[name]
  if not table.has_prompts and not (_PROMPTS.value is None and _SEED.value is None):
    raise ValueError(f'{name} decodes nothing: prompts and seed are not for it')
  request = _request(table.sizes.choose(_given(), 'table'), _prompts() if table.has_prompts else {})
  with _output_files([name], ('json', 'md', 'png')) as outputs:
    with report.show_progress() as notify:
      found = table.run(request, notify)
    lines = table_report.describe(table, request, found)
    table_report.print_table(table, found.rows, lines)
    if outputs.paths:
      outputs.write(
        **{
          f'{name}.json': table_report.to_json(name, table, request, found, lines),
          f'{name}.md': table_report.to_markdown(table, found.rows, lines),
          f'{name}.png': figures.draw(table, found.rows, '; '.join(lines[:2])),
        }
      )


def _figure_requests(names) -> dict[str, Request]:
  """What each figure is made on. Of all figures each takes what is for it, but something must be for one."""
  given = {name: value for name, value in _given().items() if value is not None}
  if len(names) > 1:
    unused = set(given) - {size for name in names for size in FIGURES[name].sizes.used}
    if unused:
      raise ValueError(f'{", ".join(sorted(unused))}: no figure has such a size')
  prompts = _prompts()
  if len(prompts) > 1:
    raise ValueError(f'a figure takes one file of prompts, got {", ".join(prompts)}')
  requests = {}
  for name in names:
    figure, sizes = FIGURES[name], given
    if len(names) > 1:
      sizes = {size: value for size, value in given.items() if size in figure.sizes.used}
    elif _PROMPTS.value is not None and not figure.has_prompts:
      raise ValueError(f'{name} decodes no prompts')
    elif _SEED.value is not None and not figure.is_random:
      raise ValueError(f'{name} draws nothing at random: a seed is not for it')
    requests[name] = _request(figure.sizes.choose(sizes, 'figure'), prompts if figure.has_prompts else {})
  return requests


def _make_figures(names) -> None:
  requests = _figure_requests(names)
  console = report.make_console()
  with _output_files(names, ('csv', 'md', 'png')) as outputs:
    for name, request in requests.items():
      start = time.perf_counter()
      figure = FIGURES[name]
      with report.show_progress() as notify:
        rows = figure.run(request, lambda what, *progress, name=name: notify(f'{name}: {what}', *progress))
      about = paper_figure.describe(figure, request)
      for line in (figure.title, '', figure.tell(rows), '', *about, f'{time.perf_counter() - start:.0f} s', ''):
        console.print(line, soft_wrap=True)
      if outputs.paths:
        # One by one: what is finished stays, whatever becomes of the others.
        outputs.write(
          **{
            f'{name}.csv': paper_figure.to_csv(rows),
            f'{name}.md': figure.to_markdown(name, rows, about),
            f'{name}.png': figure.to_png(rows),
          }
        )


def _check_name(kind: str, name: str, allowed) -> None:
  if name not in allowed:
    raise ValueError(f'{kind} must be one of {", ".join(allowed)}, got {name or "none"}')


def main(argv):
  del argv
  if (_TABLE.value is None) == (_FIGURE.value is None):
    raise ValueError('give --table=NAME or --figure=NAME, one of the two')
  if _TABLE.value is not None:
    _check_name('table', _TABLE.value, TABLES)
    _measure_table(_TABLE.value)
    return
  names = list(dict.fromkeys(_FIGURE.value))
  for name in names or ['']:
    _check_name('figure', name, [*FIGURES, _ALL])
  _make_figures(list(FIGURES) if _ALL in names else names)


if __name__ == '__main__':
  command_line.run(main)
