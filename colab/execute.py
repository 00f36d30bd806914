"""Runs the notebooks of this folder: `python colab/execute.py quickstart verification`; needs the extra `notebooks`.

Notebooks keep their outputs, marked with a hash of the code that they came from, so that a test sees where a notebook
was changed and not run again.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import sys
from collections.abc import Mapping

import nbformat

FOLDER = pathlib.Path(__file__).parent
_HASH = 'sha256_of_executed_code'


def code_of(notebook: nbformat.NotebookNode) -> list[str]:
  """The sources of the code cells."""
  return [cell.source for cell in notebook.cells if cell.cell_type == 'code']


def is_current(notebook: nbformat.NotebookNode) -> bool:
  """Whether the outputs came from the code as it stands."""
  return notebook.metadata.get(_HASH) == _hash(notebook)


def _hash(notebook: nbformat.NotebookNode) -> str:
  """The hash of the code behind the first cell, which does nothing outside of Colab."""
  return hashlib.sha256('\0'.join(code_of(notebook)[1:]).encode()).hexdigest()


def execute(path: pathlib.Path, *, timeout: int = 1800, env: Mapping[str, str] | None = None) -> nbformat.NotebookNode:
  """A notebook with the outputs of a run in its own folder.

  Args:
    path: The notebook.
    timeout: Seconds that a cell may take.
    env: Environment of the kernel, by default that of this process.

  Raises:
    nbclient.exceptions.CellExecutionError: A cell failed.
  """
  import nbclient

  notebook = nbformat.read(path, as_version=4)
  client = nbclient.NotebookClient(
    notebook,
    timeout=timeout,
    kernel_name='python3',
    record_timing=False,
    coalesce_streams=True,
    resources={'metadata': {'path': path.parent}},
  )
  return client.execute(env={**os.environ, **(env or {})})


def keep(notebook: nbformat.NotebookNode, path: pathlib.Path) -> None:
  """Writes a notebook with its outputs and their mark."""
  notebook.metadata[_HASH] = _hash(notebook)
  # What the kernel says of itself changes with the machine.
  notebook.metadata.language_info = {'name': 'python'}
  nbformat.write(notebook, path)


if __name__ == '__main__':
  for file in [FOLDER / f'{name}.ipynb' for name in sys.argv[1:]] or sorted(FOLDER.glob('*.ipynb')):
    keep(execute(file), file)
    print(f'{file}: executed, outputs kept')
