"""Checkpoints on disk: their checksums, and what may stand in a folder of checkpoints.

The checksums of a checkpoint are a file within it, `checksums.json`. It is written before the checkpoint gets its name,
so that whatever has the name of a checkpoint has all of its files and their checksums.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re

import orbax.checkpoint as ocp
from etils import epath

from spectr_jax.io import foreign
from spectr_jax.io.checksums import file_hash, files_below

_CHECKSUMS = 'checksums.json'
_MAX_STEP = 2**31 - 1
# Orbax takes a folder whose name has this in it for a checkpoint that was never finished.
_UNFINISHED = '.orbax-checkpoint-tmp'
# Files of JSON, which are read whole and parsed; all others hold numbers and are read in parts.
_JSON = re.compile(r'_CHECKPOINT_METADATA|[^/]+/(_METADATA|_sharding|array_metadatas/[^/]+|metrics)|checksums\.json')


def _content(hashes: dict[str, str]) -> bytes:
  """The file of checksums. It has one of itself, so that damage to it is not taken for damage to another file."""
  own = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
  return (json.dumps({'sha256': hashes, 'sha256_of_these': own}, indent=1, sort_keys=True) + '\n').encode()


def _shown(name: str) -> str:
  return name if name.isprintable() and len(name) < 200 else foreign.shown(name)


class SealedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
  """A checkpoint that is being written. Once it is complete its checksums are added, and then it gets its name."""

  async def finalize(self) -> None:
    """Gives the folder its name. Orbax calls this in a background thread of the first process."""
    final = self._final_path
    if not re.fullmatch(r'\d+', final.name):  # a part of a checkpoint, which has folders of its own
      await super().finalize()
      return
    complete = final.parent / f'{final.name}{_UNFINISHED}-complete'
    if complete.exists():  # of a process that was killed
      complete.rmtree()
    self._final_path = complete
    try:
      await super().finalize()
    finally:
      self._final_path = final
    await asyncio.to_thread(self._seal, complete)
    complete.rename(final)

  @staticmethod
  def _seal(folder: epath.Path) -> None:
    (folder / _CHECKSUMS).write_bytes(_content({name: file_hash(folder / name) for name in files_below(folder)}))


def has_checksums(checkpoint: epath.Path) -> bool:
  """Whether a checkpoint has checksums; those of older versions of this program have none."""
  return (checkpoint / _CHECKSUMS).exists()


def check_files(checkpoint: epath.Path) -> None:
  """Compares the files of a checkpoint with its checksums, if it has some.

  Args:
    checkpoint: The checkpoint. Nothing is checked of a remote one.

  Raises:
    ValueError: A file is missing, differs, has been added or cannot be read.
  """
  if foreign.is_remote(checkpoint):  # such storage has checksums of its own
    return
  names = files_below(checkpoint)
  for name in filter(_JSON.fullmatch, names):
    foreign.parse_json(foreign.read_text(checkpoint / name, foreign.LARGE), name)
  if not has_checksums(checkpoint):
    return
  content = foreign.read_bytes(checkpoint / _CHECKSUMS, foreign.LARGE)
  fields = {'sha256': foreign.map_of(foreign.TEXT)}
  found = foreign.check_object(foreign.parse_json(content.decode(), _CHECKSUMS), fields, _CHECKSUMS)
  hashes = found.get('sha256') or {}
  if content != _content(hashes) or _CHECKSUMS in hashes:
    raise ValueError(f'{_CHECKSUMS} is not as it was written')
  names.remove(_CHECKSUMS)
  for name in sorted(hashes.keys() | set(names)):
    if name not in names:
      raise ValueError(f'{_shown(name)} is missing')
    if name not in hashes and not epath.Path(name).name.startswith('.'):  # which systems add
      raise ValueError(f'{_shown(name)} was not saved with it')
  for name in sorted(hashes):
    if file_hash(checkpoint / name) != hashes[name]:
      raise ValueError(f'{_shown(name)} differs from its checksum')


def steps_in(folder: epath.Path) -> list[int]:
  """The steps of the checkpoints in a folder, the newest first.

  What has the name of a checkpoint and is none is refused: Orbax would delete it once there are newer ones, or fail at
  its step.

  Args:
    folder: The folder; it need not exist.

  Raises:
    ValueError: There is such a thing, the folder is something else, or it cannot be read.
  """
  if not foreign.is_remote(folder) and os.path.lexists(folder) and not os.path.isdir(folder):
    raise ValueError(f'{folder} is not a folder')
  try:
    paths = sorted(folder.iterdir()) if folder.exists() else []
  except OSError as error:
    raise ValueError(f'cannot read {folder}: {error.strerror or error}') from error
  steps = []
  for path in paths:
    if re.fullmatch(r'[0-9]+', path.name):
      _check_checkpoint(path)
      steps.append(int(path.name))
    elif _UNFINISHED in path.name and (not path.is_dir() or (not foreign.is_remote(path) and os.path.islink(path))):
      raise ValueError(f'{path} is no unfinished checkpoint: move it to another place')
  return sorted(steps, reverse=True)


def _check_checkpoint(path: epath.Path) -> None:
  """Refuses what is no checkpoint, and what cannot be looked at without harm."""
  if str(int(path.name[:20])) != path.name or int(path.name) > _MAX_STEP:
    raise ValueError(f'{path.parent} holds {foreign.shown(path.name)}, which is no step: move it to another place')
  if foreign.is_remote(path):
    return
  try:
    files = files_below(path) if os.path.isdir(path) else []
    for name in filter(_JSON.fullmatch, files):
      if (size := os.path.getsize(path / name)) > foreign.LARGE:
        raise ValueError(f'{name} has {size:,} bytes, where {foreign.LARGE:,} are the most')
  except ValueError as error:
    raise ValueError(f'checkpoint {path} is damaged ({error}): move it to another place') from error
  if not {'_CHECKPOINT_METADATA', _CHECKSUMS, 'default/_METADATA'} & set(files):
    raise ValueError(f'{path} is not a checkpoint: move it to another place')
