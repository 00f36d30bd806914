"""Checks an installed wheel of spectr_jax: nothing is missing or in excess, every module imports, and it decodes.

Usage, outside of the repository and in an environment with nothing but the wheel: check_wheel.py REPOSITORY
"""

import importlib
import importlib.metadata
import pathlib
import pkgutil
import platform
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np

import spectr_jax
from spectr_jax.kernels import native

_ROOT = pathlib.Path(spectr_jax.__file__).parent
_BUILT = 'products.bin'  # by the installation, where there is a compiler


def check_files(repository: pathlib.Path) -> None:
  """Compares the files of the wheel with those of the repository's package."""
  installed = {
    file.as_posix()
    for file in importlib.metadata.files('spectr_jax')
    if '.dist-info' not in file.parts[0] and '__pycache__' not in file.parts and file.name != _BUILT
  }
  package = repository / 'spectr_jax'
  wanted = {
    path.relative_to(repository).as_posix()
    for path in package.rglob('*')
    if path.is_file() and '__pycache__' not in path.parts and path.name != _BUILT
  }
  if installed != wanted:
    sys.exit(f'error: missing in the wheel {sorted(wanted - installed)}, in excess {sorted(installed - wanted)}')
  if repository.resolve() in _ROOT.resolve().parents:
    sys.exit(f'error: {_ROOT} is the repository, not an installed wheel')
  if importlib.metadata.version('spectr_jax') != spectr_jax.__version__:
    sys.exit(f'error: the wheel is of another version than {spectr_jax.__version__}')


def check_imports() -> int:
  """Imports every module; returns how many there are."""
  modules = list(pkgutil.walk_packages(spectr_jax.__path__, 'spectr_jax.'))
  for module in modules:
    importlib.import_module(module.name)
  for name in spectr_jax.__all__:
    getattr(spectr_jax, name)
  return len(modules)


def check_generate() -> None:
  """Decodes a chain in which token x is followed by x + 1, with a draft that knows nothing."""
  vocab_size, num_tokens = 7, 20
  follows = np.roll(np.eye(vocab_size), 1, axis=1)
  with np.errstate(divide='ignore'):
    target = spectr_jax.models.table.table_model(jnp.asarray(np.log(follows), jnp.float32))
  draft = spectr_jax.models.table.table_model(jnp.zeros((vocab_size, vocab_size)))
  tree = spectr_jax.TokenTree.chains(num_drafts=3, draft_length=2)
  new = spectr_jax.generate(
    jax.random.key(0), target, draft, np.array([[0], [3]]), np.array([1, 1]),
    method='spectr', tree=tree, max_new_tokens=num_tokens,
  )  # fmt: skip
  wanted = (np.array([[0], [3]]) + 1 + np.arange(num_tokens)) % vocab_size
  if not np.array_equal(new.tokens, wanted):
    sys.exit(f'error: decoded {np.asarray(new.tokens)}, not {wanted}')


def check_products() -> str:
  """The form of the products in C++; they must be there where a compiler was."""
  can_be_built = shutil.which('c++') and platform.machine() == 'x86_64' and platform.system() == 'Linux'
  if can_be_built and native.form() is None:
    sys.exit(f'error: no products in C++: {native.why_not()}')
  return native.form() or 'XLA'


if __name__ == '__main__':
  check_files(pathlib.Path(sys.argv[1]))
  count = check_imports()
  check_generate()
  print(f'spectr_jax {spectr_jax.__version__}: {count} modules, decodes, products of {check_products()}')
