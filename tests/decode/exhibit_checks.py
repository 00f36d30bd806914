"""Requests for small exhibits, and checks that hold of every figure."""

import json

from decode.papers.exhibit import Request, Results
from decode.papers.exhibits import EXHIBITS, FIGURES
from decode.study import Value, from_csv, lasts, markdown

# Rows in JAX's float64, where K-SEQ's threshold is searched to within 1e-9.
CLOSE = 1e-6

_SMALL = {'num_prompts': 3, 'num_seeds': 1, 'max_new_tokens': 6, 'batch_size': 2}
# Sizes of every figure about a pair of models, as small as they can be.
SMALL_FIGURES = {
  'spectr_fig5': {'num_drafts': (1, 2)}, 'optimum': _SMALL | {'num_drafts': (1, 2)},
  'ersd_fig3': _SMALL | {'num_nodes': (5,)}, 'ersd_fig4': _SMALL | {'num_nodes': (5,)},
  'opt_uno': _SMALL | {'draft_length': (2,), 'epsilon': (0, 0.5), 'num_seeds': 2},
  'methods': _SMALL | {'num_drafts': (2,), 'draft_length': (2,)}, 'ladder': _SMALL | {'num_nodes': (4, 2)},
}  # fmt: skip


def request_of(name, pair=None, prompts='x', **sizes):
  """A request of an exhibit on a pair of models and a file of prompts, or files by name."""
  exhibit = EXHIBITS[name]
  pair = pair or {'target': '', 'draft': ''}
  prompts = prompts if isinstance(prompts, dict) else {'HumanEval': str(prompts)}
  return Request(
    target=pair['target'],
    drafts={'tiny': pair['draft']},
    prompts=prompts if exhibit.has_prompts else {},
    sizes=exhibit.choose_sizes(sizes),
  )


def rows_of(data):
  """The rows of a file of data, CSV of a figure or JSON of a table."""
  if not data.startswith('{'):
    return from_csv(data)

  def cell_of(plain):
    if not isinstance(plain, dict):
      return plain
    return Value(plain['number'], plain['spread'], plain['interval'] and tuple(plain['interval']))

  return [{column: cell_of(plain) for column, plain in row.items()} for row in json.loads(data)['rows']]


def check_figure(name, request, rows):
  """Checks columns, files and page of a figure, and that its picture follows from its data; returns the rows."""
  figure = FIGURES[name]
  assert len({tuple(row) for row in rows}) == 1
  results = Results(rows)
  files = figure.files(name, request, results, figure.describe(request, results))
  assert list(files) == [f'{name}.{kind}' for kind in ('csv', 'md', 'png', 'svg')]
  again = from_csv(files[f'{name}.csv'])
  assert again == rows
  picture = files[f'{name}.png']
  assert picture.startswith(b'\x89PNG')
  assert picture == figure.to_image(again)
  assert files[f'{name}.svg'] == figure.to_image(again, kind='svg')
  assert b'prefers-color-scheme: dark' in files[f'{name}.svg']
  text = files[f'{name}.md']
  assert text.startswith(f'# {figure.title}\n')
  assert len(figure.text(name)) > 150
  assert text.endswith(markdown(lasts(rows)))
  assert figure.text(name) in text
  return rows


def measure_figure(name, pair=None, prompts='x', **sizes):
  request = request_of(name, pair, prompts, **sizes)
  return check_figure(name, request, FIGURES[name].run(request, lambda *_: None).rows)


def measure_small(name, pair, prompts):
  return measure_figure(name, pair, prompts, **SMALL_FIGURES[name])
