"""Sources of training text. Each yields documents in a fixed order and describes its content by hashes.

`stdlib` reads the standard library of the running Python. `files` reads plain text. The content of their documents
decides which are held out, so none changes sides if the source grows. `lm1b` has a held-out part of its own.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import pathlib
import platform
import sysconfig
from collections.abc import Iterator
from typing import Literal, Protocol

from common.text_files import Files
from train.lm1b import Lm1b

Part = Literal['train', 'held_out']


class TextSource(Protocol):
  """A named collection of documents in two parts, training and held-out."""

  name: str

  def documents(self, part: Part) -> Iterator[str]:
    """The documents of a part, in the same order each time."""

  def describe(self) -> dict[str, str]:
    """The text's origin as a training log records it. Different texts have different descriptions."""


@dataclasses.dataclass(frozen=True)
class Stdlib:
  """Documentation, docstrings and source of the running Python's standard library."""

  name: str = 'stdlib'

  def documents(self) -> Iterator[str]:
    import pydoc_data.topics

    for _, text in sorted(pydoc_data.topics.topics.items()):
      yield text.strip()
    root = pathlib.Path(sysconfig.get_path('stdlib'))
    skipped = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__', 'pydoc_data', 'lib2to3'}
    for path in sorted(root.rglob('*.py')):
      if skipped.intersection(path.relative_to(root).parts):
        continue
      try:
        source = path.read_text(encoding='utf-8')
        tree = ast.parse(source)
      except (UnicodeDecodeError, SyntaxError, ValueError):
        continue  # a few files hold deliberately odd encodings or templates
      for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
          docstring = ast.get_docstring(node)
          if docstring and len(docstring) >= 200:
            yield docstring
      if source.strip():
        yield source.strip()

  def describe(self) -> dict[str, str]:
    digest = hashlib.sha256()
    for document in self.documents():
      digest.update(document.encode() + b'\0')
    return {'stdlib/documents': digest.hexdigest(), 'stdlib/python': platform.python_version()}


def is_held_out(document: str, percent: float) -> bool:
  """True if a document is among the held-out share of `percent`, which the hash of its content decides."""
  digest = hashlib.sha256(document.encode()).digest()
  return int.from_bytes(digest[:4], 'big') < percent / 100 * 2**32


@dataclasses.dataclass(frozen=True)
class SplitByContent:
  """A `TextSource` of documents without parts, of which `held_out_percent` are held out."""

  collection: Files | Stdlib
  held_out_percent: float

  @property
  def name(self) -> str:
    return self.collection.name

  def documents(self, part: Part) -> Iterator[str]:
    for document in self.collection.documents():
      if is_held_out(document, self.held_out_percent) == (part == 'held_out'):
        yield document

  def describe(self) -> dict[str, str]:
    return self.collection.describe() | {'held_out': f'{self.held_out_percent:g}% of documents, by content'}


def files_of(text: str) -> Files:
  """The files of paths or globs with commas between them."""
  return Files(tuple(filter(None, text.split(','))))


def make_source(config) -> TextSource:
  """The source that `config.source` names; a `ValueError` if there is none of that name."""
  match config.source:
    case 'lm1b':
      return Lm1b(config.data_dir)
    case 'files':
      collection = files_of(config.files)
    case 'stdlib':
      collection = Stdlib()
    case _:
      raise ValueError(f'unknown source {config.source!r}; allowed: files, lm1b, stdlib')
  return SplitByContent(collection, config.held_out_percent)
