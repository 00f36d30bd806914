"""Training checkpoints: the newest few are kept. A checkpoint is complete or absent.

It holds a checksum of its numbers, computed where the numbers are before they are written and after they are read.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from spectr_jax.io.untrusted import is_remote, reading


@jax.jit
def checksum(tree) -> jax.Array:
  """A uint32 of the bits of all arrays of a tree, the same on every mesh.

  It is a sum modulo 2^32 in which a number counts by an odd factor that depends on its place. One changed bit always
  changes it, and other damage does but for a chance of about 2^-32.
  """
  total = jnp.uint32(0)
  for leaf in jax.tree.leaves(tree):
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f'uint{8 * leaf.dtype.itemsize}')).astype(jnp.uint32)
    strides = [math.prod(leaf.shape[axis + 1 :]) for axis in range(leaf.ndim)]
    places = sum(jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * stride for axis, stride in enumerate(strides))
    total = 31 * total + jnp.sum(bits * (2 * jnp.uint32(places) + 1), dtype=jnp.uint32)
  return total


def steps_in(folder: epath.Path) -> list[int]:
  """The steps of the checkpoints in a folder, which need not exist, the newest first.

  Raises a `ValueError` if the folder cannot be read, or if something has the name of a checkpoint and is none: Orbax
  would delete it once there are newer ones.
  """
  if not is_remote(folder) and os.path.lexists(folder) and not os.path.isdir(folder):
    raise ValueError(f'{folder} is not a folder')
  with reading(folder):
    paths = [path for path in folder.iterdir() if path.name.isdecimal()] if folder.exists() else []
    for path in paths:
      if not any((path / name).exists() for name in ('_CHECKPOINT_METADATA', 'default')):
        raise ValueError(f'{path} is not a checkpoint: move it to another place')
  return sorted((int(path.name) for path in paths), reverse=True)


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
    """Writes and deletes checkpoints. It is made after one was read, since it reads the descriptions of all."""
    # Directories are created behind a barrier. A directory created in the background is announced to the other
    # processes under a count of saves, which differs between processes, since one process alone saves models.
    behind_barrier = ocp.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, create=True, async_options=behind_barrier)
    # The handler is named, because Orbax would otherwise infer the type from the newest checkpoint, even a damaged one.
    try:
      return ocp.CheckpointManager(self._folder, item_handlers=ocp.StandardCheckpointHandler(), options=options)
    except Exception as error:  # of damaged descriptions, or of storage, which may raise any type
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
        self._manager.save(step, args=ocp.args.StandardSave(state | {'checksum': checksum(state)}), force=True)

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
    like['checksum'] = like['step'].update(dtype=jnp.uint32)
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

  def _read(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
    path = self._folder / str(step)
    try:
      with _quietly(), contextlib.closing(ocp.StandardCheckpointer()) as checkpointer:
        state = checkpointer.restore(path / 'default', like)
    except Exception as error:  # Orbax and TensorStore raise many types
      raise ValueError(
        f'checkpoint {path} is damaged, or of another configuration or version ({reason_of(error)})'
      ) from error
    if state.pop('checksum') != checksum(state):
      raise ValueError(f'checkpoint {path} is damaged (its numbers differ from their checksum)')
    if int(state['step']) != step:
      raise ValueError(f'checkpoint {path} is that of step {int(state["step"])}')
    return state

  def _move_aside(self, steps: list[int]) -> None:
    for step in steps:
      path = self._folder / str(step)
      try:
        self._aside.mkdir(parents=True, exist_ok=True)
        path.rename(next(new for i in itertools.count() if not os.path.lexists(new := self._aside / f'{step}-{i}')))
      except OSError as error:
        raise ValueError(f'cannot move {path} to {self._aside}: {error.strerror or error}') from error

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
