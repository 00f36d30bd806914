"""Training checkpoints: the newest few are kept. A checkpoint is complete or absent, and has checksums of its files.

The checksums are a file within it, `checksums.json`, which is written before the checkpoint gets its name. So whatever
has the name of a checkpoint has all of its files and their checksums.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import hashlib
import itertools
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from spectr_jax.io import untrusted
from spectr_jax.io.checksums import file_hash, files_below
from spectr_jax.io.untrusted import is_remote

_CHECKSUMS = 'checksums.json'
_MAX_STEP = 2**31 - 1
# Orbax takes a folder whose name has this in it for a checkpoint that was never finished.
_UNFINISHED = '.orbax-checkpoint-tmp'
# Files of JSON, which are read whole and parsed; all others hold numbers and are read in parts.
_JSON = re.compile(r'_CHECKPOINT_METADATA|[^/]+/(_METADATA|_sharding|array_metadatas/[^/]+|metrics)|checksums\.json')


def _checksums(hashes: dict[str, str]) -> bytes:
  """The file of checksums. It has one of itself, so that damage to it is not taken for damage to another file."""
  own = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
  return (json.dumps({'sha256': hashes, 'sha256_of_these': own}, indent=1, sort_keys=True) + '\n').encode()


class _SealedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
  """A checkpoint that is being written. Once it is complete its checksums are added, and then it gets its name."""

  async def finalize(self) -> None:
    """Gives the folder its name; Orbax calls this in a background thread of the first process."""
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
    (folder / _CHECKSUMS).write_bytes(_checksums({name: file_hash(folder / name) for name in files_below(folder)}))


def check_files(checkpoint: epath.Path) -> None:
  """Refuses a local checkpoint whose files are not those of its checksums; a `ValueError` says which is missing,
  differs, was added or cannot be read.
  """
  if is_remote(checkpoint):  # such storage has checksums of its own
    return
  names = files_below(checkpoint)
  for name in filter(_JSON.fullmatch, names):
    untrusted.parse_json(untrusted.read_text(checkpoint / name, untrusted.LARGE), name)
  if _CHECKSUMS not in names:
    raise ValueError(f'{_CHECKSUMS} is missing')
  content = untrusted.read_bytes(checkpoint / _CHECKSUMS, untrusted.LARGE)
  fields = {'sha256': untrusted.map_of(untrusted.TEXT)}
  hashes = untrusted.check_object(json.loads(content), fields, _CHECKSUMS).get('sha256') or {}
  if content != _checksums(hashes) or _CHECKSUMS in hashes:
    raise ValueError(f'{_CHECKSUMS} is not as it was written')
  names.remove(_CHECKSUMS)
  for name in sorted(hashes.keys() | set(names)):
    if name not in names:
      raise ValueError(f'{untrusted.name_shown(name)} is missing')
    if name not in hashes:
      if not epath.Path(name).name.startswith('.'):  # which systems add
        raise ValueError(f'{untrusted.name_shown(name)} was not saved with it')
    elif file_hash(checkpoint / name) != hashes[name]:
      raise ValueError(f'{untrusted.name_shown(name)} differs from its checksum')


def steps_in(folder: epath.Path) -> list[int]:
  """The steps of the checkpoints in a folder, which need not exist, the newest first.

  Raises a `ValueError` if something has the name of a checkpoint and is none: Orbax would delete it once there are
  newer ones, or fail at its step. The same if the folder is something else, or cannot be read.
  """
  if not is_remote(folder) and os.path.lexists(folder) and not os.path.isdir(folder):
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
    elif _UNFINISHED in path.name and (not path.is_dir() or (not is_remote(path) and os.path.islink(path))):
      raise ValueError(f'{path} is no unfinished checkpoint: move it to another place')
  return sorted(steps, reverse=True)


def _check_checkpoint(path: epath.Path) -> None:
  """Refuses what is no checkpoint, and what cannot be looked at without harm."""
  if str(int(path.name[:20])) != path.name or int(path.name) > _MAX_STEP:
    raise ValueError(f'{path.parent} holds {untrusted.shown(path.name)}, which is no step: move it to another place')
  if is_remote(path):
    return
  try:
    files = files_below(path) if os.path.isdir(path) else []
    for name in filter(_JSON.fullmatch, files):
      if (size := os.path.getsize(path / name)) > untrusted.LARGE:
        raise ValueError(f'{name} has {size:,} bytes, where {untrusted.LARGE:,} are the most')
  except ValueError as error:
    raise ValueError(f'checkpoint {path} is damaged ({error}): move it to another place') from error
  if not {'_CHECKPOINT_METADATA', _CHECKSUMS, 'default/_METADATA'} & set(files):
    raise ValueError(f'{path} is not a checkpoint: move it to another place')


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
  """A log filter that drops errors of Orbax's threads, which are also raised here. One message is enough."""
  return record.levelno < logging.ERROR or 'orbax' not in record.pathname


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
  """Silences errors of other reads and writes in flight after one has failed. The first failure is raised."""
  hooks, log = (sys.unraisablehook, sys.excepthook), logging.getLogger('asyncio')
  sys.unraisablehook = sys.excepthook = lambda *_: None
  was_disabled, log.disabled = log.disabled, True
  try:
    yield
  except BaseException:
    time.sleep(0.2)  # the others end in threads that cannot be joined
    gc.collect()
    raise
  finally:
    sys.unraisablehook, sys.excepthook = hooks
    log.disabled = was_disabled


@jax.jit
def is_finite(tree) -> jax.Array:
  """True if every number of a tree is finite."""
  return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def reason_of(error: Exception) -> str:
  """The message of an error of storage, in one line of bounded length; what is wrong often stands at its end."""
  text = ' '.join(str(error).split('[tensorstore_spec')[0].split())
  return text if len(text) <= 400 else f'{text[:200]} ... {text[-200:]}'


class Checkpoints:
  """Orbax checkpoints of a train state under `WORKDIR/checkpoints`, of which the newest `keep` are kept.

  They are written in the background. A failed write is raised by the next call, as a `ValueError`. Until `close` has
  succeeded, Python prints no messages about unhandled errors of background threads: reads go on after one has failed.
  """

  def __init__(self, workdir: epath.Path, keep: int):
    self._unraisablehook, sys.unraisablehook = sys.unraisablehook, lambda *_: None
    logging.getLogger('asyncio').disabled = True
    logging.getLogger('absl').addFilter(_is_not_from_orbax)  # the filter stays, since models are saved after `close`
    self._folder, self._aside, self._keep = (workdir / 'checkpoints').resolve(), workdir / 'damaged_checkpoints', keep

  @functools.cached_property
  def _manager(self) -> ocp.CheckpointManager:
    """Writes and deletes checkpoints. It is made after one was read: it reads descriptions without checking them."""
    # Directories are created behind a barrier. A directory created in the background is announced to the other
    # processes under a count of saves, which differs between processes, since one process alone saves models.
    behind_barrier = ocp.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CheckpointManagerOptions(
      max_to_keep=self._keep, create=True, async_options=behind_barrier,
      temporary_path_class=None if is_remote(self._folder) else _SealedPath,
    )  # fmt: skip
    # The handler is named, because Orbax would otherwise infer the type from the newest checkpoint, even a damaged one.
    try:
      return ocp.CheckpointManager(self._folder, item_handlers=ocp.StandardCheckpointHandler(), options=options)
    except Exception as error:  # of damaged descriptions, or of storage, which may raise any type
      for step in steps_in(self._folder):
        self._check(self._folder / str(step))
      raise ValueError(f'the checkpoints in {self._folder} cannot be used ({reason_of(error)})') from error

  @property
  def last_step(self) -> int | None:
    """The step of the newest checkpoint, which may still be being written."""
    return self._manager.latest_step()

  def save(self, state: dict[str, Any]) -> None:
    """Starts to write `state` under its own step, unless that step is already saved."""
    step = int(state['step'])
    if step != self._manager.latest_step():
      with self._writing():
        self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

  def restore(self, like: dict[str, Any], *, allow_fallback: bool = False) -> dict[str, Any] | None:
    """The state of the newest checkpoint, or None if there is none, with the shapes, types and shardings of `like`.

    If that one is damaged or of another configuration this is a `ValueError`; with `allow_fallback` older ones are
    tried, and those that were passed over are moved to `WORKDIR/damaged_checkpoints` once one can be read.
    """
    if allow_fallback and jax.process_count() > 1:
      raise ValueError(
        f'of several processes none can fall back by itself: move the damaged checkpoint out of {self._folder}'
      )
    steps = steps_in(self._folder)
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    for place, step in enumerate(steps):
      try:
        state = self._read(step, like)
      except ValueError as error:
        older = steps[place + 1 :]
        if not older or not allow_fallback:
          how = 'with --allow_fallback' if jax.process_count() == 1 else 'once it is moved away'
          way = f'; {how}, training continues from step {older[0]}' if older else ''
          raise ValueError(f'{error}{way}') from error
        print(f'{error}; continuing from step {older[0]}', file=sys.stderr)
        continue
      self._move_aside(steps[:place])
      break
    else:
      state = None
    _ = self._manager  # made now, so that a folder that cannot be used is said at once
    return state

  def _check(self, path: epath.Path) -> None:
    try:
      check_files(path)  # by every process, so that all end at once
    except ValueError as error:
      raise ValueError(f'checkpoint {path} is damaged ({error})') from error

  def _read(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
    path = self._folder / str(step)
    self._check(path)
    try:
      with _quietly(), contextlib.closing(ocp.StandardCheckpointer()) as checkpointer:
        state = checkpointer.restore(path / 'default', like)
    except Exception as error:  # Orbax and TensorStore raise many types
      what = 'is damaged or' if is_remote(path) else 'has all of its files, but is'
      raise ValueError(f'checkpoint {path} {what} of another configuration or version ({reason_of(error)})') from error
    if int(state['step']) != step:
      raise ValueError(f'checkpoint {path} is that of step {int(state["step"])}')
    if not is_finite(state):
      raise ValueError(f'checkpoint {path} is damaged (it has numbers that are not finite)')
    return state

  def _move_aside(self, steps: list[int]) -> None:
    for step in steps:
      path = self._folder / str(step)
      try:
        if os.path.islink(self._aside):
          raise ValueError('it is a symbolic link')
        self._aside.mkdir(parents=True, exist_ok=True)
        path.rename(next(new for i in itertools.count() if not os.path.lexists(new := self._aside / f'{step}-{i}')))
      except (OSError, ValueError) as error:
        raise ValueError(f'cannot move {path} to {self._aside}: {getattr(error, "strerror", None) or error}') from error

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    try:
      with _quietly():
        yield
    except Exception as error:  # storage may raise any type
      last = self._manager.latest_step()
      raise ValueError(
        f'a checkpoint under {self._folder} could not be written ({reason_of(error)});'
        f' {"there is no other" if last is None else f"the last good one is of step {last}"}'
      ) from error

  def close(self) -> None:
    """Waits until the last checkpoint is written."""
    if '_manager' in self.__dict__:  # it was made
      with self._writing():
        self._manager.wait_until_finished()
        self._manager.close()
    sys.unraisablehook = self._unraisablehook
    logging.getLogger('asyncio').disabled = False
