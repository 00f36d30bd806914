"""Imports: `import spectr_jax` is light, the library needs no command, and no module changes what is outside of it."""

import ast
import graphlib
import json
import pathlib
import subprocess
import sys

import pytest

import spectr_jax

_ROOT = pathlib.Path(__file__).parents[1]

_HEAVY = {
  'absl', 'flax', 'matplotlib', 'ml_collections', 'optax', 'orbax', 'rich', 'scipy', 'tensorboardX', 'tensorstore',
  'tokenizers',
}  # fmt: skip


def _run(code, *arguments):
  """Runs code in a fresh interpreter in the repository's root; what it prints is JSON."""
  command = [sys.executable, '-c', code, *arguments]
  return json.loads(subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=300, check=True).stdout)


_LOADED = """
import importlib, json, pkgutil, sys
import spectr_jax
if sys.argv[1] == 'all':
  for module in pkgutil.walk_packages(spectr_jax.__path__, 'spectr_jax.'):
    importlib.import_module(module.name)
if sys.argv[1] == 'load_model':
  spectr_jax.load_model
if sys.argv[1] == 'decode.main':
  import decode.main
print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))
"""


@pytest.mark.slow
def test_what_takes_long_to_import_is_imported_on_first_use():
  assert not _HEAVY & set(_run(_LOADED, 'nothing'))
  assert {'safetensors', 'tokenizers'} <= set(_run(_LOADED, 'load_model'))  # the check above can fail
  assert not {'matplotlib', 'scipy', 'tensorboardX'} & set(_run(_LOADED, 'decode.main'))  # only its report needs them


def test_the_library_imports_none_of_the_commands_and_what_only_they_need():
  loaded = set(_run(_LOADED, 'all'))
  assert {'flax', 'tokenizers'} <= loaded
  assert (
    not {'common', 'decode', 'train', 'benchmarks', 'matplotlib', 'ml_collections', 'orbax', 'tensorboardX'} & loaded
  )


def test_every_public_name_is_there():
  for name in spectr_jax.__all__:
    assert getattr(spectr_jax, name) is not None
  assert set(spectr_jax.__all__) <= set(dir(spectr_jax))
  assert spectr_jax.models.transformer is spectr_jax.models.transformer
  assert set(spectr_jax.models.__all__) <= set(dir(spectr_jax.models))
  for module in (spectr_jax, spectr_jax.models):
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'load_modle'"):
      _ = module.load_modle


# Other packages may change what they like when they are imported, so those come first. Flags are forgotten after every
# module, since several commands have flags of the same name.
_SIDE_EFFECTS = """
import importlib, json, logging, os, pkgutil, sys, warnings
import jax, absl.app, absl.logging, flax.linen, ml_collections.config_flags, optax, orbax.checkpoint, rich.console
import rich.progress, scipy.optimize, scipy.stats, tensorboardX, tokenizers
from absl import flags

def state():
  return {
    'excepthook': id(sys.excepthook),
    'unraisablehook': id(sys.unraisablehook),
    'warnings': list(map(str, warnings.filters)),
    'environment': dict(os.environ),
    'path': list(sys.path),
    'jax': {name: str(value) for name, value in jax.config.values.items()},
    'loggers': {
      name: [logger.level, logger.disabled, len(logger.filters), len(logger.handlers)]
      for name in (None, 'absl', 'asyncio', 'jax', 'orbax') for logger in [logging.getLogger(name)]
    },
  }

changed, names = {}, []
for package in sys.argv[1:]:
  for module in pkgutil.walk_packages([package], package + '.'):
    before, known = state(), set(flags.FLAGS)
    importlib.import_module(module.name)
    after = state()
    names.append(module.name)
    changed |= {f'{module.name}: {key}': [before[key], after[key]] for key in before if before[key] != after[key]}
    for flag in set(flags.FLAGS) - known:
      delattr(flags.FLAGS, flag)
print(json.dumps([names, changed]))
"""


@pytest.mark.slow
def test_imports_have_no_side_effects():
  names, changed = _run(_SIDE_EFFECTS, 'spectr_jax', 'common', 'decode', 'train')
  assert {'spectr_jax.io.hub.save', 'common.processes', 'decode.main', 'train.checkpoint'} <= set(names)
  assert changed == {}


_WITHOUT_TRAIN = """
import importlib, json, sys
from absl import flags
missing, find = ('ml_collections', 'optax', 'tensorboardX'), importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in missing else find(name)
sys.modules |= dict.fromkeys(missing)
ends = {}
for module in sys.argv[1:]:
  known = set(flags.FLAGS)
  try:
    importlib.import_module(module)
    ends[module] = None
  except SystemExit as error:
    ends[module] = str(error)
  for flag in set(flags.FLAGS) - known:  # several commands have flags of the same name
    delattr(flags.FLAGS, flag)
print(json.dumps(ends))
"""


def test_decoding_needs_nothing_that_only_training_does():
  commands = [f'decode.{name}' for name in ('main', 'bulk', 'chat', 'prove', 'trace', 'reproduce')]
  ends = _run(_WITHOUT_TRAIN, *commands, 'train.training_command')
  assert ends.pop('train.training_command').startswith('error: this needs ml_collections, optax')
  assert ends == dict.fromkeys(commands)


def _imports(text, modules):
  """The modules among `modules` that a module's source imports, also in functions and for type checkers."""
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom):
      own = (f'{node.module}.{alias.name}' for alias in node.names)
      yield from (name if name in modules else node.module for name in own if {name, node.module} & modules.keys())


def test_no_modules_import_each_other_in_a_circle():
  files = [path for package in ('spectr_jax', 'common', 'decode', 'train') for path in (_ROOT / package).rglob('*.py')]
  paths = {'.'.join(path.relative_to(_ROOT).with_suffix('').parts).removesuffix('.__init__'): path for path in files}
  imports = {name: {*_imports(path.read_text('utf-8'), paths)} - {name} for name, path in paths.items()}
  assert 'spectr_jax.tree' in imports['spectr_jax.engine.decoder']
  graphlib.TopologicalSorter(imports).prepare()  # names the modules of a circle
  imports['spectr_jax.tree'] |= {'spectr_jax.engine.decoder'}
  with pytest.raises(graphlib.CycleError, match=r'spectr_jax\.tree'):
    graphlib.TopologicalSorter(imports).prepare()
