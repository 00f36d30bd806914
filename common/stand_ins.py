"""Stand-ins for packages that are not installed, so that `--help` is shown without them; nothing of them computes.

Importing a name from one gives a class that can be called, subclassed, or used as a decorator or an annotation. What
help is made of has stand-ins that work: flags, paths and configurations.
"""

from __future__ import annotations

import collections
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import types
from collections.abc import Iterable
from typing import Any

# In imports: all that the extras of the commands install.
PACKAGES = (
  'absl', 'etils', 'filelock', 'flax', 'gguf', 'jinja2', 'ml_collections', 'optax', 'orbax', 'prompt_toolkit', 'rich',
  'safetensors', 'scipy', 'tensorboardX', 'tensorstore', 'tokenizers',
)  # fmt: skip


class _Placeholder(type):
  """The type of classes that stand for anything."""

  def __getattr__(cls, name: str) -> type:
    if name.startswith('__'):
      raise AttributeError(name)
    return _placeholder(f'{cls.__name__}.{name}')

  def __call__(cls, *args: Any, **kwargs: Any) -> type:
    return _placeholder(f'{cls.__name__}()')

  def __getitem__(cls, key: Any) -> type:
    return cls


def _placeholder(name: str) -> type:
  return _Placeholder(name, (), {})


# Kinds of flags in absl's words, by the end of the name of `DEFINE_...`.
_KINDS = {
  'string': 'string', 'integer': 'int', 'float': 'float', 'bool': 'bool', 'boolean': 'bool',
  'list': 'comma separated list of strings', 'multi_string': 'multi string', 'config_file': 'config object',
  'enum': 'string enum', 'multi_enum': 'multi string enum',
}  # fmt: skip


class _Flags(dict):
  """In the place of `absl.flags.FLAGS`: flags by name, as far as help reads them; nothing is parsed."""

  def __init__(self):
    super().__init__()
    self.by_module = collections.defaultdict(list)  # the command's own under the name of the program

  def flags_by_module_dict(self) -> dict[str, list]:
    return self.by_module

  def set_default(self, name: str, default: Any) -> None:
    self[name].default = default

  def definer(self, ending: str, kind: str):
    # `rest` is the help, after the allowed values if there are any; `more` are bounds, and whether it is required.
    def define(name: str, default: Any, *rest: Any, **more: Any) -> types.SimpleNamespace:
      default = float(default) if ending == 'float' and default is not None else default
      parser = types.SimpleNamespace(enum_values=list(rest[0]) if len(rest) > 1 else None)
      flag = self[name] = types.SimpleNamespace(
        name=name, default=default, value=default, help=rest[-1], parser=parser, using_default_value=True,
        flag_type=lambda: kind,
      )  # fmt: skip
      module = sys._getframe(1).f_globals['__name__']
      self.by_module[sys.argv[0] if module == '__main__' else module].append(flag)
      return flag

    return define


def _flags_module() -> types.SimpleNamespace:
  """In the place of `absl.flags`, with what commands use of it before they run."""
  registry = _Flags()
  definers = {f'DEFINE_{ending}': registry.definer(ending, kind) for ending, kind in _KINDS.items()}
  marks = ('mark_flag_as_required', 'mark_flags_as_required', 'adopt_module_key_flags')  # help requires no flag
  return types.SimpleNamespace(FLAGS=registry, Error=ValueError, **definers, **dict.fromkeys(marks, lambda *_: None))


class ConfigDict(dict):
  """In the place of `ml_collections.ConfigDict`: a dictionary whose values are attributes."""

  def __getattr__(self, name: str) -> Any:
    try:
      return self[name]
    except KeyError as error:
      raise AttributeError(name) from error

  __setattr__ = dict.__setitem__


def _define_config_file(name: str, default: Any, help: str, **more: Any) -> Any:
  """In the place of ml_collections' flag, where absl is installed."""
  from absl import flags

  class Parser(flags.ArgumentParser):
    def flag_type(self) -> str:
      return 'config object'

  del more
  flags.disclaim_key_flags()
  return flags.DEFINE(Parser(), name, default, help)


def _working() -> dict[str, Any]:
  """Stand-ins that are more than placeholders, by their dotted names."""
  flags = _flags_module()
  has_absl = importlib.util.find_spec('absl') is not None
  define = _define_config_file if has_absl else flags.DEFINE_config_file
  return {
    'absl.flags': flags,
    'etils.epath': types.SimpleNamespace(Path=pathlib.Path, PathLike=os.PathLike),
    'ml_collections.ConfigDict': ConfigDict,
    'ml_collections.config_flags': types.SimpleNamespace(DEFINE_config_file=define),
  }


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds and makes the modules of packages that are not installed."""

  def __init__(self, packages: Iterable[str]):
    self._packages, self._working = set(packages), _working()

  def find_spec(self, fullname, path=None, target=None):
    is_missing = fullname.partition('.')[0] in self._packages
    return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_missing else None

  def create_module(self, spec):
    module = types.ModuleType(spec.name)
    module.__getattr__ = lambda name: self._attribute(spec.name, name)
    return module

  def exec_module(self, module) -> None:
    """Does nothing: attributes are made when they are asked for."""

  def _attribute(self, module: str, name: str) -> Any:
    if name.startswith('__'):
      raise AttributeError(name)
    dotted = f'{module}.{name}'
    return self._working[dotted] if dotted in self._working else _placeholder(dotted)


def install() -> None:
  """Makes all of `PACKAGES` importable that are not installed."""
  import jax  # noqa: F401 - what it looks for itself stays as it is

  missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
  sys.meta_path.insert(0, _Finder(missing))
