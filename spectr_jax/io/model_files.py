"""`load_model`: models of every format that is read.

A folder: `hub.hub_model.read_folder` checks `config.json` (`hub.families.read_spec`), opens tensors; `make_model` there
compares names and shapes (`hub.tensors.check_tensors`) before it reads one. A `.gguf` file: `hub.gguf_header`, then
`hub.gguf_config` says what a `config.json` would, and `make_model` goes on. `untrusted` has what all stages use. Heads
come by `heads.head_files.open_head`, tokenizers by `hub.hub_tokenizer`. Weights that are not finite end decoding.
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from jax.sharding import Mesh

from spectr_jax.io import untrusted
from spectr_jax.io.checksums import file_hash
from spectr_jax.io.compilation_cache import cache_programs
from spectr_jax.io.hub.families import OWN, read_spec
from spectr_jax.io.hub.gguf_config import hub_config, stop_ids
from spectr_jax.io.hub.gguf_header import read_header
from spectr_jax.io.hub.gguf_metadata import architecture_of
from spectr_jax.io.hub.gguf_tensors import GgufTensors
from spectr_jax.io.hub.gguf_tokenizer import adds_bos, build_tokenizer
from spectr_jax.io.hub.hub_model import load_hub_model, make_model, read_folder, read_hub_config, read_json
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer, load_hub_tokenizer
from spectr_jax.io.hub.redundant import settle_head
from spectr_jax.io.hub.tensors import read_index
from spectr_jax.io.tokenizer import Tokenizer, TokenizerBase
from spectr_jax.io.untrusted import TEXT, map_of, read_object
from spectr_jax.kernels.int8 import check_weights
from spectr_jax.model import Model

# What a model or a head may be read from, beside the files that an index names.
_FILES = (
  'config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json',
  'special_tokens_map.json', 'chat_template.jinja', 'model.safetensors.index.json', 'model.safetensors',
  'medusa_lm_head.safetensors', 'medusa_lm_head.pt', 'pytorch_model.bin',
)  # fmt: skip
_PART = 2**26  # bytes that a thread hashes at a time
# What is downloaded: files at the top of a repository only, since others are the same weights for other programs.
_DOWNLOADED = ('*.json', '*.safetensors', '*.jinja', 'tokenizer*', 'merges.txt', 'vocab.txt')


def load_model(
  path: epath.PathLike, *, dtype: str | None = None, weights: str | None = None, mesh: Mesh | None = None
) -> tuple[Model, TokenizerBase]:
  """Reads a model and its tokenizer. Programs that are compiled from now on are kept on disk, see `cache_programs`.

  Args:
    path: A folder that `save_model` wrote or as the Hugging Face hub serves it, also remote (`gs://...`), with
      `config.json`, safetensors files and `tokenizer.json`; a `.gguf` file; or the name `ORG/NAME` of a model on
      the hub, which is downloaded to the hub's cache (needs the extra `hub`).
    dtype: The dtype to compute in, `float32` or `bfloat16`; None for the one that the model was saved with, or for
      float32 where that is another one.
    weights: `int8` to hold kernels, embedding and output head as 8-bit integers with a scale per output channel, which
      takes a quarter of float32's memory. The model is another one then: decoding without loss gives the distribution
      of the quantized target. Numbers are rounded while they are read. Products are computed in `dtype`, and norms and
      biases stay in it. `blocks` to hold the matrices of a `.gguf` file in its own blocks of 4 to 8 bits, and to round
      the inputs of products to 8 bits, as llama.cpp does: fastest on CPUs, in a third of bfloat16's memory. The target
      is then the model with rounded inputs. None for the weights of the file in `dtype`.
    mesh: The devices whose axis `model` the parameters are sharded over, as `DecodeSharding` shards a target; None for
      the default device.

  Raises:
    ValueError: There is no such model, it is of an unknown kind, a file is missing or damaged, or the type of weights
      is unknown.
  """
  check_weights(weights)
  cache_programs()
  files = open_model(path)
  tokenizer = files.tokenizer()  # first, since it is read in no time
  return files.load(dtype=dtype, weights=weights, mesh=mesh), tokenizer


def load_own(path: epath.PathLike, *, dtype: str | None = None) -> tuple[Model, Tokenizer]:
  """`load_model` of a model that was trained here; `ValueError` for others."""
  model, tokenizer = load_model(path, dtype=dtype)
  if not isinstance(tokenizer, Tokenizer):
    raise ValueError(f'{path} is not a model that was trained here')
  return model, tokenizer


class ModelFiles(abc.ABC):
  """A model on disk, of which little is read before it is asked for. What is damaged or unknown raises `ValueError`."""

  @property
  @abc.abstractmethod
  def context_length(self) -> int:
    """The longest context that the model is made for, in tokens."""

  @property
  def spec(self) -> Mapping[str, Any]:
    """The content of the `config.json` that the model has on the hub; a `ValueError` if it is none of a kind there."""
    raise ValueError('only public models have a config.json')

  @abc.abstractmethod
  def tokenizer(self) -> TokenizerBase:
    """Reads the tokenizer."""

  @abc.abstractmethod
  def load(self, *, dtype: str | None, weights: str | None, mesh: Mesh | None) -> Model:
    """Reads the model; the options are those of `load_model`."""


@dataclasses.dataclass(frozen=True)
class _Folder(ModelFiles):
  """A folder as the hub serves it, or as `save_model` writes it."""

  path: epath.Path

  @property
  def spec(self) -> Mapping[str, Any]:
    return settle_head(*read_folder(self.path), f'{self.path}/config.json')

  @property
  def context_length(self) -> int:
    return read_hub_config(self.path).context_length

  def tokenizer(self) -> TokenizerBase:
    is_own = read_json(self.path).get('architectures') == [OWN]
    return Tokenizer.load(self.path / 'tokenizer.json') if is_own else load_hub_tokenizer(self.path)

  def load(self, *, dtype, weights, mesh) -> Model:
    content = read_object(self.path / 'config.json', {'sha256': map_of(TEXT)})
    for name, wanted in (content.get('sha256') or {}).items():  # of a model that was trained here
      if name in _FILES and (self.path / name).exists() and file_hash(self.path / name) != wanted:
        raise ValueError(f'{self.path / name} is damaged or of another model: its SHA-256 is not that of config.json')
    return load_hub_model(self.path, dtype=dtype, weights=weights, mesh=mesh)


class GgufFile(ModelFiles):
  """A GGUF file, with its header read and with the names, shapes and layout that the model has on the hub."""

  def __init__(self, path: epath.PathLike):
    self._header = header = read_header(path)
    self.path = header.path
    self._spec = hub_config(header)
    self.tensors = GgufTensors(header, self._spec, architecture_of(header))
    self.bos_id: int | None = header.metadata.get('tokenizer.ggml.bos_token_id')
    self.add_bos: bool = self.bos_id is not None and adds_bos(header)

  @property
  def spec(self) -> Mapping[str, Any]:
    return self._spec

  @property
  def context_length(self) -> int:
    return read_spec(self.spec, self.path)[1].context_length

  def tokenizer(self) -> HubTokenizer:
    metadata = self._header.metadata
    return HubTokenizer.from_parts(
      build_tokenizer(self._header),
      bos_id=self.bos_id,
      eos_ids=stop_ids(self._header),
      add_bos=self.add_bos,
      chat_template=metadata.get('tokenizer.chat_template'),
      pad_id=metadata.get('tokenizer.ggml.padding_token_id'),
    )

  def load(self, *, dtype, weights, mesh) -> Model:
    with untrusted.named(self.path):
      return make_model(self.spec, self.tensors, dtype=dtype, weights=weights, mesh=mesh, where=self.path)


def open_model(path: epath.PathLike) -> ModelFiles:
  """The files of a model of any format that `load_model` reads, downloaded if need be, or a `ValueError`."""
  path = untrusted.as_path(path)
  if path.suffix == '.gguf':
    return GgufFile(path)
  path = hub_folder(path)
  if (path / 'config.json').exists():
    return _Folder(path)
  if (path / 'model.json').exists():
    raise ValueError(f'{path} is a model in the format of an older version: convert it by python -m train.convert')
  raise ValueError(
    f'no model at {path}: {untrusted.gguf_files(path)}expected a directory with config.json, a .gguf file,'
    ' or the name ORG/NAME of a model on the hub'
  )


def hub_folder(path: epath.PathLike, *, files: Sequence[str] = _DOWNLOADED) -> epath.Path:
  """The folder of a model: the path itself, or the one in the hub's cache if the path is a name `ORG/NAME`.

  What is not in the cache is downloaded, `files` being the patterns of its files. A path that cannot be read, or a name
  that is neither a folder nor on the hub, raises `ValueError`.
  """
  path = untrusted.as_path(path)
  try:
    is_there = path.exists()
  except Exception as error:  # remote file systems raise their own types
    raise ValueError(f'no model at {untrusted.name_shown(str(path))}: {untrusted.first_line(error)}') from error
  if is_there or not re.fullmatch(r'[\w.-]+/[\w.-]+', str(path)):
    return path
  return _download(str(path), files)


def _download(name: str, files: Sequence[str]) -> epath.Path:
  try:
    import huggingface_hub
    import huggingface_hub.constants
  except ImportError as error:
    raise ValueError(
      f'no model at {name}; models on the hub need huggingface_hub, which the extra hub installs'
    ) from error
  if str(huggingface_hub.constants.HF_HUB_CACHE).startswith('~'):
    raise ValueError(f'no model at {name}; to download one, set HF_HOME, since the user has no home directory')
  try:
    return epath.Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), ignore_patterns=['*/*']))
  except (OSError, ValueError) as error:  # what the client's errors are, of names, of the network and of the server
    reason = untrusted.first_line(error)
    raise ValueError(f'no model at {name}, neither a folder nor on the hub: {reason}') from error


def files_of(path: epath.PathLike) -> list[epath.Path]:
  """The files and folders, existing or not, that a model or a head is read from; `ValueError` for a damaged index."""
  path = epath.Path(path)
  if not path.is_dir():
    return [path]
  names: dict[str, Any] = dict.fromkeys(_FILES)
  index = path / 'model.safetensors.index.json'
  if index.exists():
    names |= read_index(index)
  return [path / name for name in names]


def hash_content(path: epath.PathLike) -> str:
  """The first 16 hexadecimal digits of a SHA-256 of what a model or a head is read from, wherever it stands.

  Files are hashed by all cores at once, at 0.5 to 2 GB a second for each. One that cannot be read raises `ValueError`.
  """
  path = epath.Path(path) if str(path).endswith('.gguf') else hub_folder(path)
  sizes = {file: file.stat().length for file in files_of(path) if file.exists() and not file.is_dir()}
  if not sizes:
    raise ValueError(f'no model at {path}: none of the files that one is read from is there')
  places = [(file, begin) for file, size in sizes.items() for begin in range(0, size, _PART)]

  def hashed(place):
    file, begin = place
    return '' if file == path else str(file.relative_to(path)), begin, file_hash(file, begin, _PART)

  with concurrent.futures.ThreadPoolExecutor() as threads:
    return hashlib.sha256(json.dumps(list(threads.map(hashed, places))).encode()).hexdigest()[:16]
