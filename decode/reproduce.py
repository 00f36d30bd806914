"""Reproduces tables and figures of the papers: `python -m decode.reproduce --table=NAME`, or `--figure=NAME`.

`papers.exhibits` has all of them. `Exhibit.run` measures rows, `Exhibit.files` makes a page and a CSV of them, and of a
figure also pictures, by `plots.draw`.
"""

import functools
import time
from collections.abc import Iterable, Mapping

from absl import flags
from etils import epath

from common import command_line
from common.output_files import OutputFiles
from decode import plots
from decode.experiment.console import make_console, show_progress
from decode.experiment.model_options import LOOKUP, SHIPPED_DRAFT, SHIPPED_TARGET, split_draft
from decode.experiment.prompt_options import SHIPPED_PROMPTS
from decode.experiment.prompt_sets import split_set
from decode.papers.exhibit import LISTS, SIZES, Request
from decode.papers.exhibits import EXHIBITS, FIGURES, TABLES
from spectr_jax.io.model_files import files_of

_SHIPPED = 'shipped'
_ALL = 'all'

_TABLE = flags.DEFINE_string('table', None, f'A table to measure: {", ".join(TABLES)}.')
_FIGURE = flags.DEFINE_list(
  'figure',
  None,
  f'Figures to make, separated by commas, of {", ".join(FIGURES)}; or {_ALL}. Default sizes take minutes.',
)
_TARGET = flags.DEFINE_string('target', SHIPPED_TARGET, 'Directory of the target model.')
_DRAFT = flags.DEFINE_list(
  'draft',
  [SHIPPED_DRAFT],
  'The draft as in decode.main, or NAME=DRAFT; several for spectr_table2 and 4 and spec_bench.',
)
_PROMPTS = flags.DEFINE_list(
  'prompts',
  None,
  'Files of prompts, or NAME=FILE, separated by commas; one named as a published set (HumanEval, GSM8K, MGSM, LM1B,'
  ' Alpaca) is compared with that. FILE may be SET:PATH, which names it, with the sets of decode.main. Default: the'
  ' shipped prompts. A figure takes one.',
)
_OUTPUT = flags.DEFINE_string(
  'output',
  None,
  'Directory for NAME.json, .md, .png and .svg of a table, and NAME.csv, .md, .png and .svg of a figure.',
)
_DTYPE = flags.DEFINE_string('dtype', '', "Type to compute in, float32 or bfloat16; '' for each model's own.")
_SEED = flags.DEFINE_integer('seed', None, 'The first seed; default 0.', lower_bound=0)
_SIZES = {name: flags.DEFINE_integer(name, None, text, lower_bound=1) for name, text in SIZES.items()}
_SIZES |= {name: flags.DEFINE_list(name, None, text) for name, text in LISTS.items()}
_OPTIONS = {
  'method': flags.DEFINE_list('method', None, 'Methods, separated by commas; for spec_bench.'),
  'tree': flags.DEFINE_multi_string('tree', None, 'Tree of guesses, as in decode.main; for spec_bench.'),
  'temperature': flags.DEFINE_list(
    'temperature', None, 'Sampling temperature, several separated by commas; for spec_bench. Default 0, greedy.'
  ),
  'chat': flags.DEFINE_bool('chat', None, "Render prompts by the model's chat template; for spec_bench."),
}


def _given_sizes() -> dict:
  sizes = {name: flag.value for name, flag in _SIZES.items() if flag.value is not None}
  for name, value in sizes.items():
    if isinstance(value, list):
      kind, least = (float, 0) if name == 'epsilon' else (int, 1)
      sizes[name] = command_line.parse_numbers(name, value, kind, least=least)
  return sizes


def _given_options() -> dict:
  options = {name: flag.value for name, flag in _OPTIONS.items() if flag.value is not None}
  if 'temperature' in options:
    options['temperature'] = command_line.parse_numbers('temperature', options['temperature'], float, least=0)
  return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _with_title(text: str) -> str:
  """`TITLE=SET:PATH` in place of `SET:PATH`; any other text as it is."""
  prompt_set, _ = split_set(text.strip())
  return text if prompt_set is None else f'{prompt_set.title}={text.strip()}'


def _with_lookup(text: str) -> str:
  """`lookup+NAME=lookup+PATH` in place of `lookup+PATH`, named after its path; any other text as it is."""
  has_lookup, path = split_draft(text.strip())
  if not has_lookup or not path or '=' in path:
    return text
  [name] = command_line.parse_paths('draft', [path])
  return f'{LOOKUP}+{name}={text.strip()}'


def _given_prompts() -> dict[str, str | None]:
  """Files of prompts by name; by default the shipped prompts."""
  if _PROMPTS.value is None:
    return {_SHIPPED: None}
  prompts = command_line.parse_paths('prompts', map(_with_title, _PROMPTS.value))
  if _FIGURE.value is not None and len(prompts) > 1:
    raise ValueError(f'a figure takes one file of prompts, got {", ".join(prompts)}')
  return prompts


def _requests(names: list[str]) -> dict[str, Request]:
  """The request of each exhibit.

  A single exhibit refuses flags that it does not use. With several exhibits, each takes the flags that it uses, and a
  size that no exhibit uses is refused.
  """
  sizes, prompts = _given_sizes(), _given_prompts()
  unused = set(sizes) - {size for name in names for size in EXHIBITS[name].sizes}
  if len(names) > 1 and unused:
    raise ValueError(f'{", ".join(sorted(unused))}: no figure has such a size')
  requests = {}
  for name in names:
    exhibit, own = EXHIBITS[name], sizes
    if len(names) > 1:
      own = {size: value for size, value in sizes.items() if size in exhibit.sizes}
    elif _PROMPTS.value is not None and not exhibit.has_prompts:
      raise ValueError(f'{name} decodes no prompts')
    elif _SEED.value is not None and not exhibit.is_random:
      raise ValueError(f'{name} draws nothing at random: a seed is not for it')
    requests[name] = Request(
      target=_TARGET.value,
      drafts=command_line.parse_paths('draft', map(_with_lookup, _DRAFT.value)),
      prompts=prompts if exhibit.has_prompts else {},
      sizes=exhibit.choose_sizes(own),
      dtype=_DTYPE.value,
      seed=_SEED.value or 0,
      options=exhibit.choose_options(_given_options()),
    )
  return requests


def _output_files(requests: Mapping[str, Request]) -> OutputFiles:
  """The output files of all exhibits; no files if no output directory was given."""
  if _OUTPUT.value is None:
    return OutputFiles()
  plots.check_available()
  directory = epath.Path(_OUTPUT.value)
  directory.mkdir(parents=True, exist_ok=True)
  files = (f'{name}.{kind}' for name in requests for kind in (EXHIBITS[name].data_format, 'md', 'png', 'svg'))
  return OutputFiles(**{file: directory / file for file in files}).apart_from(_inputs(requests.values()))


def _inputs(requests: Iterable[Request]) -> dict[str, list[epath.Path]]:
  inputs = {'target': [], 'draft': [], 'prompts': []}
  for request in requests:
    inputs['target'] += files_of(request.target)
    for draft in filter(None, (split_draft(draft)[1] for draft in request.drafts.values())):
      inputs['draft'] += files_of(draft)
    inputs['prompts'] += [split_set(SHIPPED_PROMPTS if path is None else path)[1] for path in request.prompts.values()]
  return inputs


def _reproduce(names: list[str]) -> None:
  """Measures, prints and writes exhibits one by one, so that finished ones remain if a later one fails."""
  requests, console = _requests(names), make_console()
  measured = []
  with _output_files(requests) as outputs:
    for name, request in requests.items():
      exhibit, start = EXHIBITS[name], time.perf_counter()
      label = f'{name}: ' if exhibit.kind == 'figure' else ''
      # Exhibits that share rows are measured once.
      same = (results for measure, other, results in measured if (measure, other) == (exhibit.measure, request))
      results = next(same, None)
      if results is None:
        with show_progress() as notify:
          results = exhibit.run(request, lambda what, *more, label=label: notify(f'{label}{what}', *more))
      measured.append((exhibit.measure, request, results))
      about = exhibit.describe(request, results)
      files = exhibit.files(name, request, results, about) if outputs.paths else {}
      if exhibit.kind == 'figure':
        about.append(f'{time.perf_counter() - start:.0f} s\n')
      outputs.write_after(functools.partial(exhibit.show, name, console, results.rows, about), **files)


def _check_name(kind: str, name: str, allowed) -> None:
  if name not in allowed:
    raise ValueError(f'{kind} must be one of {", ".join(allowed)}, got {name or "none"}')


def _names() -> list[str]:
  if (_TABLE.value is None) == (_FIGURE.value is None):
    raise ValueError('give --table=NAME or --figure=NAME, one of the two')
  if _TABLE.value is not None:
    _check_name('table', _TABLE.value, TABLES)
    return [_TABLE.value]
  names = list(dict.fromkeys(_FIGURE.value))
  for name in names or ['']:
    _check_name('figure', name, [*FIGURES, _ALL])
  return list(FIGURES) if _ALL in names else names


def main():
  _reproduce(_names())


if __name__ == '__main__':
  command_line.run(
    main,
    [
      '--table=gbv_table1',
      '--figure=all --output=figures',
      '--table=spec_bench --prompts=spec_bench:question.jsonl --output=tables',
    ],
  )
