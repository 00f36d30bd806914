"""Writes the tables of names in front of the reference: `python -m docs.assets.api_tables` from the root of a clone.

GitHub shows the directives of the reference (`::: NAME`) as they stand, so the tables say what each name is.
"""

import inspect
import pathlib
import pkgutil
import re

PAGES = sorted(pathlib.Path(__file__).parents[1].glob('api*.md'))
_HEADER = '| name | what it is |\n|---|---|\n'


def _row(path: str) -> str:
  """A line of a table: the name, and the first sentence of its docstring."""
  summary = ' '.join(inspect.getdoc(pkgutil.resolve_name(path)).split('\n\n')[0].split())
  sentence = re.split(r'(?<!i\.i\.d)(?<! al)\. ', summary)[0].rstrip('.')
  return f'| `{path.rpartition(".")[2]}` | {sentence.replace("|", chr(92) + "|")} |\n'


def with_tables(page: str) -> str:
  """The page with a table in front of the directives of each section.

  Args:
    page: Markdown, with the tables that it has or without any.
  """
  page = re.sub(re.escape(_HEADER) + r'(?:\|.*\n)+\n', '', page)

  def add(found: re.Match) -> str:
    return _HEADER + ''.join(map(_row, re.findall(r'^::: (\S+)$', found[0], re.MULTILINE))) + '\n' + found[0]

  return re.sub(r'(?:^::: \S+\n\n?)+', add, page, flags=re.MULTILINE)


if __name__ == '__main__':
  for path in PAGES:
    path.write_text(with_tables(path.read_text(encoding='utf-8')), encoding='utf-8')
