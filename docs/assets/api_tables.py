"""Writes the tables of names in front of the reference: `python -m docs.assets.api_tables` from the root of a clone.

GitHub shows the directives of the reference (`::: NAME`) as they stand, so the tables say what each name is.
"""

import collections
import inspect
import pathlib
import pkgutil
import re

PAGES = sorted(pathlib.Path(__file__).parents[1].glob('api*.md'))
_HEADER = '| name | what it is |\n|---|---|\n'


def _row(path: str, name: str) -> str:
  """A line of a table: a name, and the first sentence of the docstring of what it names."""
  summary = ' '.join(inspect.getdoc(pkgutil.resolve_name(path)).split('\n\n')[0].split())
  sentence = re.split(r'(?<!i\.i\.d)(?<! al)\. ', summary)[0].rstrip('.')
  return f'| `{name}` | {sentence.replace("|", chr(92) + "|")} |\n'


def with_tables(page: str) -> str:
  """The page with a table in front of the directives of each section.

  Args:
    page: Markdown, with the tables that it has or without any.
  """
  page = re.sub(re.escape(_HEADER) + r'(?:\|.*\n)+\n', '', page)
  paths = re.findall(r'^::: (\S+)$', page, re.MULTILINE)
  last = collections.Counter(path.rpartition('.')[2] for path in paths)

  def name(path: str) -> str:
    """The last part of a path, with the module before it if the page has two of this name."""
    return '.'.join(path.split('.')[-1 - (last[path.rpartition('.')[2]] > 1) :])

  def add(found: re.Match) -> str:
    rows = [_row(path, name(path)) for path in re.findall(r'^::: (\S+)$', found[0], re.MULTILINE)]
    return _HEADER + ''.join(rows) + '\n' + found[0]

  return re.sub(r'(?:^::: \S+\n\n?)+', add, page, flags=re.MULTILINE)


if __name__ == '__main__':
  for path in PAGES:
    path.write_text(with_tables(path.read_text(encoding='utf-8')), encoding='utf-8')
