"""What a model or a head on disk is: the files that it is read from, and a hash of what they hold."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json

from etils import epath

from spectr_jax.io.foreign import LARGE, TEXT, map_of, open_file, read_object
from spectr_jax.io.load import hub_folder

_OWN = 'model.json', 'tokenizer.json', 'params'
_INDEX = 'model.safetensors.index.json'
_HUB = (
  'config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json',
  'chat_template.jinja', _INDEX, 'model.safetensors', 'medusa_lm_head.safetensors', 'medusa_lm_head.pt',
  'pytorch_model.bin',
)  # fmt: skip
_PART = 2**26  # bytes that a thread hashes at a time
_BLOCK = 2**20


def files_of(path: epath.PathLike) -> list[epath.Path]:
  """The files that a model or a head may be read from, whether they exist or not, and folders of such files.

  Args:
    path: A folder or a file, as for `load_model` and `load_drafter`.

  Raises:
    ValueError: The index of a model's files is damaged.
  """
  path = epath.Path(path)
  if not path.is_dir():
    return [path]
  names = dict.fromkeys((*_OWN, *_HUB))
  if (path / _INDEX).exists():
    index = read_object(path / _INDEX, {'weight_map': map_of(TEXT)}, LARGE)
    names |= dict.fromkeys((index.get('weight_map') or {}).values())
  return [path / name for name in names]


def hash_content(path: epath.PathLike) -> str:
  """The first 16 hexadecimal digits of a SHA-256 of what a model or a head is read from.

  Every byte counts, and the place of the files does not. A folder that `save_model` wrote has the hashes of its files
  in `model.json`, which reading it checks, so that file alone is hashed. Others are hashed by all cores at once, at 0.5
  to 2 GB a second for each.

  Args:
    path: A folder, a file, or a name `ORG/NAME`, as for `load_model` and `load_drafter`.

  Raises:
    ValueError: A file cannot be read.
  """
  path = epath.Path(path) if str(path).endswith('.gguf') else hub_folder(path)
  if (path / 'model.json').exists():
    files = [path / 'model.json']
  else:
    files = [file for file in files_of(path) if file.exists() and not file.is_dir()]
  sizes = {file: file.stat().length for file in files}
  places = [(file, begin) for file, size in sizes.items() for begin in range(0, size, _PART)]
  with concurrent.futures.ThreadPoolExecutor() as threads:
    parts = list(threads.map(lambda place: (_name(path, place[0]), place[1], _hash_part(*place)), places))
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _name(path: epath.Path, file: epath.Path) -> str:
  return '' if file == path else str(file.relative_to(path))


def _hash_part(file: epath.Path, begin: int) -> str:
  """The SHA-256 of at most `_PART` bytes of a file."""
  digest, left = hashlib.sha256(), _PART
  with open_file(file) as stream:
    stream.seek(begin)
    while left and (block := stream.read(min(left, _BLOCK))):
      digest.update(block)
      left -= len(block)
  return digest.hexdigest()
