"""Training checkpoints: the newest few are kept. A checkpoint is complete or absent, and has checksums of its files."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from spectr_jax.io.foreign import is_remote
from train import sealed


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
  """Whether every number of a tree is finite."""
  return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def reason_of(error: Exception) -> str:
  """The message of an error of storage, in one line of bounded length; what is wrong often stands at its end."""
  text = ' '.join(str(error).split('[tensorstore_spec')[0].split())
  return text if len(text) <= 400 else f'{text[:200]} ... {text[-200:]}'


class Checkpoints:
  """Orbax checkpoints of a train state under `WORKDIR/checkpoints`, of which the newest few are kept.

  They are written in the background. A failed write is raised by the next call. Until `close` has succeeded, Python
  prints no messages about unhandled errors of background threads.

  Attributes:
    unchecked: The checkpoint that was read without comparing it with checksums, since it has none; None if there is no
      such one.

  Args:
    workdir: The run's directory.
    keep: Number of checkpoints to keep.
  """

  def __init__(self, workdir: epath.Path, keep: int):
    self._unraisablehook, sys.unraisablehook = sys.unraisablehook, lambda *_: None
    logging.getLogger('asyncio').disabled = True
    logging.getLogger('absl').addFilter(_is_not_from_orbax)  # the filter stays, since models are saved after `close`
    self._folder, self._aside, self._keep = (workdir / 'checkpoints').resolve(), workdir / 'damaged_checkpoints', keep
    self.unchecked: epath.Path | None = None

  @functools.cached_property
  def _manager(self) -> ocp.CheckpointManager:
    """Writes and deletes checkpoints. It is made after one was read: it reads descriptions without checking them."""
    # Directories are created behind a barrier. A directory created in the background is announced to the other
    # processes under a count of saves, which differs between processes, since one process alone saves models.
    behind_barrier = ocp.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CheckpointManagerOptions(
      max_to_keep=self._keep, create=True, async_options=behind_barrier,
      temporary_path_class=None if is_remote(self._folder) else sealed.SealedPath,
    )  # fmt: skip
    # The handler is named, because Orbax would otherwise infer the type from the newest checkpoint, even a damaged one.
    try:
      return ocp.CheckpointManager(self._folder, item_handlers=ocp.StandardCheckpointHandler(), options=options)
    except Exception as error:  # of damaged descriptions, or of storage, which may raise any type
      for step in sealed.steps_in(self._folder):
        self._check(self._folder / str(step))
      raise ValueError(f'the checkpoints in {self._folder} cannot be used ({reason_of(error)})') from error

  @property
  def last_step(self) -> int | None:
    """The step of the newest checkpoint, which may still be being written."""
    return self._manager.latest_step()

  def save(self, state: dict[str, Any]) -> None:
    """Starts to write `state` under its own step, unless that step is already saved.

    Raises:
      ValueError: This checkpoint or the previous one could not be written.
    """
    step = int(state['step'])
    if step != self._manager.latest_step():
      with self._writing():
        self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

  def restore(self, like: dict[str, Any], *, allow_fallback: bool = False) -> dict[str, Any] | None:
    """The newest state, or None if no state was saved.

    Args:
      like: A state of the same structure, of arrays or `ShapeDtypeStruct`s. The result has their shardings, which may
        differ from those of the run that saved it.
      allow_fallback: Whether to take an older checkpoint if the newest cannot be read. Unreadable checkpoints are moved
        to `WORKDIR/damaged_checkpoints`. This is refused with several processes, since others may have read what one
        cannot.

    Raises:
      ValueError: The checkpoint is damaged or of another configuration, or a fallback is allowed with several
        processes.
    """
    if allow_fallback and jax.process_count() > 1:
      raise ValueError(
        f'of several processes none can fall back by itself: move the damaged checkpoint out of {self._folder}'
      )
    steps = sealed.steps_in(self._folder)
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    for place, step in enumerate(steps):
      try:
        state = self._read(step, like)
      except ValueError as error:
        older = steps[place + 1 :]
        if not older or not allow_fallback:
          how = 'with --allow_fallback' if jax.process_count() == 1 else 'once it is moved away'
          way = f'; {how}, training continues from step {older[0]}' if older else ''
          self.close()
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
      sealed.check_files(path)  # by every process, so that all end at once
    except ValueError as error:
      raise ValueError(f'checkpoint {path} is damaged ({error})') from error

  def _read(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
    path = self._folder / str(step)
    self._check(path)
    is_checked = sealed.has_checksums(path)
    try:
      with _quietly(), contextlib.closing(ocp.StandardCheckpointer()) as checkpointer:
        state = checkpointer.restore(path / 'default', like)
    except Exception as error:  # Orbax and TensorStore raise many types
      what = 'has all of its files, but is' if is_checked else 'is damaged or'
      raise ValueError(f'checkpoint {path} {what} of another configuration or version ({reason_of(error)})') from error
    if int(state['step']) != step:
      raise ValueError(f'checkpoint {path} is that of step {int(state["step"])}')
    if not is_finite(state):
      raise ValueError(f'checkpoint {path} is damaged (it has numbers that are not finite)')
    self.unchecked = None if is_checked or is_remote(path) else path
    return state

  def _move_aside(self, steps: list[int]) -> None:
    for step in steps:
      try:
        if os.path.islink(self._aside):
          raise ValueError(f'{self._aside} is a symbolic link')
        self._aside.mkdir(parents=True, exist_ok=True)
        target = next(path for i in itertools.count() if not os.path.lexists(path := self._aside / f'{step}-{i}'))
        (self._folder / str(step)).rename(target)
      except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ValueError(f'cannot move {self._folder / str(step)} to {self._aside}: {reason}') from error

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
    """Waits until the last checkpoint is written.

    Raises:
      ValueError: It could not be written.
    """
    if '_manager' in self.__dict__:  # it was made
      with self._writing():
        self._manager.wait_until_finished()
        self._manager.close()
    sys.unraisablehook = self._unraisablehook
    logging.getLogger('asyncio').disabled = False
