"""Tests registered methods, including your own, for bias: `python -m decode.prove --method=spectr`."""

import importlib
import os
import sys

from absl import flags

from common import command_line
from decode.experiment.console import make_console, show_progress
from spectr_jax import METHODS, Method, get_method
from spectr_jax.testing.proof import LEGEND, describe_error, prove

_METHOD = flags.DEFINE_list(
  'method', None, f'Methods, separated by commas, of {", ".join(METHODS)} and what the module registers.'
)
_MODULE = flags.DEFINE_string(
  'module',
  None,
  'Module to import first, such as examples.best_ratio, which registers methods with spectr_jax.register. Without a'
  ' method, all of those are proven.',
)
_NUM_SAMPLES = flags.DEFINE_integer(
  'num_samples',
  None,
  'Rows of the chi-square test on tables, at least 10,000; the engine draws a twentieth for each of three prompts.'
  ' Default: a million, or as many as fit into two minutes, and one for the engine.',
)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of tables and samples.')


def import_methods(module: str) -> list[str]:
  """Imports a module, also from the working directory, and returns the names of the methods that it registers.

  Raises:
    ValueError: `module` is not a module's name, or the module cannot be imported.
  """
  if not all(part.isidentifier() for part in module.split('.')):
    raise ValueError(f'module must be a name, such as examples.best_ratio for examples/best_ratio.py; got {module!r}')
  if '' not in sys.path and os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  before = set(METHODS)
  try:
    importlib.import_module(module)
  except (Exception, SystemExit) as error:  # the module's code may raise anything
    if isinstance(error, ModuleNotFoundError) and error.name and f'{module}.'.startswith(f'{error.name}.'):
      raise ValueError(f'module: there is no {error.name} here or among the installed packages') from None
    # The traceback starts after the frame of this function.
    cause = describe_error(error.with_traceback(error.__traceback__.tb_next))
    raise ValueError(f'module: cannot import {module}: {cause}') from None
  return [name for name in METHODS if name not in before]


def find_methods(names: list[str], module: str | None) -> list[Method]:
  """The methods to prove: the named ones, or all that the module registers.

  Args:
    names: Names of methods; empty for all of the module's methods.
    module: Name of a module to import first, or None.

  Raises:
    ValueError: A name is unknown, the module cannot be imported, or there is no method.
  """
  registered = import_methods(module) if module else []
  if not names and not registered:
    what = f'{module} registers no method with spectr_jax.register, and none is given' if module else 'no method given'
    raise ValueError(f'{what}; allowed: {", ".join(METHODS)}')
  return [get_method(name) for name in dict.fromkeys(names or registered)]


def main(argv):
  del argv
  methods = find_methods([name.strip() for name in _METHOD.value or ()], _MODULE.value)
  proofs = []
  with show_progress() as notify:
    for method in methods:
      proofs.append(prove(method, num_samples=_NUM_SAMPLES.value, seed=_SEED.value, notify=notify))
  console = make_console()
  for proof in proofs:
    console.print(f'{proof}\n', soft_wrap=True)
  console.print(f'{LEGEND}\n', soft_wrap=True)
  failed = [proof.method.name for proof in proofs if not proof.is_passed]
  if failed:
    console.print(f'FAILED: {", ".join(failed)}', soft_wrap=True)
    sys.exit(1)
  console.print(f'passed: {", ".join(proof.method.name for proof in proofs)}', soft_wrap=True)


if __name__ == '__main__':
  command_line.run(main)
