"""Packages of engines without what they need to serve: the modules that verify import little, and that is replaced."""

import ast
import dataclasses
import importlib.util
import pathlib
import sys
import types


def find(package):
  """The folder of a package, or None; it is not imported."""
  spec = importlib.util.find_spec(package)
  return None if spec is None else pathlib.Path(spec.submodule_search_locations[0])


def _folder(package):
  folder = find(package)
  if folder is None:
    raise ModuleNotFoundError(f'there is no {package} among the installed packages', name=package)
  return folder


def _module(name, path=None, **names):
  module = sys.modules[name] = types.ModuleType(name)
  if path is not None:
    module.__path__ = [str(path)]
  for key, value in names.items():
    setattr(module, key, value)


def _packages(package, *names):
  """Packages that run none of their own code when they are imported."""
  folder = _folder(package)
  for name in ('', *names):
    _module(f'{package}{name and "."}{name}', folder.joinpath(*name.split('.')))


@dataclasses.dataclass
class _AxisNames:
  ATTN_DATA = 'data'
  MLP_TENSOR = 'model'


def install_tpu_inference():
  """Makes the samplers of tpu-inference importable without vLLM."""
  if 'tpu_inference' in sys.modules:
    return
  _packages('tpu_inference', 'layers', 'layers.common', 'layers.jax', 'layers.jax.sample', 'runner')
  _module('tpu_inference.layers.common.sharding', ShardingAxisName=_AxisNames)
  _module('tpu_inference.runner.input_batch', InputBatch=object)
  _module('tpu_inference.utils', device_array=lambda mesh, x, sharding=None: x)


def install_levanter():
  """Makes Levanter's verification importable without its models."""
  import jax

  if 'levanter' in sys.modules:
    return
  _packages('levanter', 'inference', 'layers', 'models', 'utils')
  _module('haliax', NamedArray=object)
  _module('levanter.inference.page_table', PageBatchInfo=object)
  _module('levanter.layers.kv_cache', KvPageCache=object, ListCache=dict)
  _module('levanter.layers.sampler', LogprobsMode=str)
  _module('levanter.models.snowball', SnowballLMHeadModel=object)
  _module('levanter.utils.jax_utils', logsumexp_last_axis=lambda x: jax.nn.logsumexp(x, axis=-1))


def install_seqspecdecod():
  """Makes the steps of sequential-speculative-decoding importable without transformers."""
  if 'seqspecdecod' not in sys.modules:
    _packages('seqspecdecod')


def install_flashspec():
  """Makes the samplers of flashspec importable without its engine."""
  if 'flashspec' not in sys.modules:
    _packages('flashspec', 'sampling', 'utils')


def function_of(file, name, **names):
  """A function of a file below a folder of `sys.path`, without the rest of the file; `names` are what it uses."""
  path = next((path for folder in sys.path if (path := pathlib.Path(folder, file)).is_file()), None)
  if path is None:
    raise ModuleNotFoundError(f'there is no {file} below a folder of PYTHONPATH', name=file)
  for node in ast.parse(path.read_text(encoding='utf-8')).body:
    if isinstance(node, ast.FunctionDef) and node.name == name:
      exec(compile(ast.Module([node], []), str(path), 'exec'), names)
      return names[name]
  raise ModuleNotFoundError(f'{path} has no function {name}', name=name)
