"""Tests registered methods, including your own, for bias: `python -m decode.prove --method=spectr`.

`--callable=MODULE:FUNCTION` tests a verifier of another project instead, see `spectr_jax.testing.check_verifier`.
"""

import importlib
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from absl import flags

from common import command_line
from decode.experiment.console import make_console, show_progress
from spectr_jax import METHODS, TokenTree
from spectr_jax.methods import Method, get_method
from spectr_jax.testing import check_verifier, conformance, prove
from spectr_jax.testing.checks import describe_error
from spectr_jax.testing.conformance import CHILDREN
from spectr_jax.testing.proof import LEGEND

_METHOD = flags.DEFINE_list(
  'method', None, f'Methods, separated by commas, of {", ".join(METHODS)} and what the module registers.'
)
_MODULE = flags.DEFINE_string(
  'module',
  None,
  'Module to import first, such as examples.best_ratio, which registers methods with spectr_jax.methods.register.'
  ' Without a method, all of those are proven.',
)
_NUM_SAMPLES = flags.DEFINE_integer(
  'num_samples',
  None,
  'Rows of the chi-square test on tables, at least 10,000; the engine draws a twentieth for each of three prompts.'
  ' Default: a million, or as many as fit into two minutes, and one for the engine.',
)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of tables and samples.')
_CALLABLE = flags.DEFINE_string(
  'callable', None, 'MODULE:FUNCTION, a verifier of any project to test by the conformance kit, in place of methods.'
)
_TREE = flags.DEFINE_string('tree', 'chains:1,3', 'Guesses for --callable: chains:K,L, prefix:FACTORS or specinfer:L.')
_CHILDREN = flags.DEFINE_enum('children', 'independent', CHILDREN, 'How --callable expects its guesses to be drawn.')
_RAGGED = flags.DEFINE_bool('ragged', True, 'Whether rows of --callable have different numbers of guesses.')
_ARRAYS = flags.DEFINE_enum('arrays', 'numpy', ('numpy', 'torch'), 'Arrays that --callable takes.')


def import_module(module: str) -> types.ModuleType:
  """Imports a module, also from the working directory; a `ValueError` of one line where that fails."""
  if not all(part.isidentifier() for part in module.split('.')):
    raise ValueError(f'module must be a name, such as examples.best_ratio for examples/best_ratio.py; got {module!r}')
  if '' not in sys.path and os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  try:
    return importlib.import_module(module)
  except (Exception, SystemExit) as error:  # the module's code may raise anything
    if isinstance(error, ModuleNotFoundError) and error.name and f'{module}.'.startswith(f'{error.name}.'):
      raise ValueError(f'module: there is no {error.name} here or among the installed packages') from None
    # The traceback starts after the frame of this function.
    cause = describe_error(error.with_traceback(error.__traceback__.tb_next))
    raise ValueError(f'module: cannot import {module}: {cause}') from None


def find_callable(text: str) -> Callable[..., Any]:
  module, _, name = text.partition(':')
  if not name.isidentifier():
    raise ValueError(f'callable must be MODULE:FUNCTION, such as examples.rejection_sampling:verify; got {text!r}')
  verifier = getattr(import_module(module), name, None)
  if not callable(verifier):
    raise ValueError(f'callable: {module} has no function {name}')
  return verifier


def parse_tree(text: str) -> TokenTree:
  """The tree that `chains:K,L`, `prefix:FACTORS` or `specinfer:L` names."""
  try:
    name, numbers = command_line.parse_name_and_ints(text)
    if (name, len(numbers)) == ('chains', 2):
      return TokenTree.chains(*numbers)
    if name == 'prefix' and numbers:
      return TokenTree.prefix(numbers)
    if (name, len(numbers)) == ('specinfer', 1):
      return TokenTree.specinfer(*numbers)
  except ValueError as error:
    raise ValueError(f'tree: {error}') from error
  raise ValueError(f'tree must be chains:K,L, prefix:FACTORS or specinfer:L, got {text!r}')


def find_methods(names: list[str], module: str | None) -> list[Method]:
  """The methods to prove: the named ones, or all that the module registers, which is imported first."""
  before = set(METHODS)
  if module:
    import_module(module)
  registered = [name for name in METHODS if name not in before]
  if not names and not registered:
    what = (
      f'{module} registers no method with spectr_jax.methods.register, and none is given'
      if module
      else 'no method given'
    )
    raise ValueError(f'{what}; allowed: {", ".join(METHODS)}')
  return [get_method(name) for name in dict.fromkeys(names or registered)]


def _check_callable() -> None:
  function = find_callable(_CALLABLE.value)
  with show_progress() as notify:
    verdict = check_verifier(
      function,
      tree=parse_tree(_TREE.value),
      children=_CHILDREN.value,
      is_ragged=_RAGGED.value,
      arrays=_ARRAYS.value,
      num_samples=_NUM_SAMPLES.value,
      seed=_SEED.value,
      notify=notify,
    )
  make_console().print(f'{verdict}\n\n{conformance.LEGEND}', soft_wrap=True)
  if not verdict.is_passed:
    sys.exit(1)


def main():
  if _CALLABLE.value is not None:
    if _METHOD.value or _MODULE.value:
      raise ValueError('callable tests one function: it goes without --method and --module')
    _check_callable()
    return
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
  command_line.run(
    main,
    [
      '--method=race_traversal',
      '--module=examples.best_ratio',
      '--callable=examples.rejection_sampling:verify --tree=chains:1,2',
    ],
  )
