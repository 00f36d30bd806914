"""Training checkpoints: the newest few are kept, and a checkpoint is either complete or absent."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath


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


class Checkpoints:
  """Orbax checkpoints of a train state under `WORKDIR/checkpoints`, of which the newest few are kept.

  They are written in the background. A failed write is raised by the next call. Until `close` has succeeded, Python
  prints no messages about unhandled errors of background threads.

  Args:
    workdir: The run's directory.
    keep: Number of checkpoints to keep.
  """

  def __init__(self, workdir: epath.Path, keep: int):
    self._unraisablehook, sys.unraisablehook = sys.unraisablehook, lambda *_: None
    logging.getLogger('asyncio').disabled = True
    logging.getLogger('absl').addFilter(_is_not_from_orbax)  # the filter stays, since models are saved after `close`
    self._aside = workdir / 'damaged_checkpoints'
    # Directories are created behind a barrier. A directory created in the background is announced to the other
    # processes under a count of saves, which differs between processes, since one process alone saves models.
    behind_barrier = ocp.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, async_options=behind_barrier)
    # The handler is named, because Orbax would otherwise infer the type from the newest checkpoint, even a damaged one.
    self._manager = ocp.CheckpointManager(
      (workdir / 'checkpoints').resolve(), item_handlers=ocp.StandardCheckpointHandler(), options=options
    )

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
        'of several processes none can fall back by itself: move the damaged checkpoint out of'
        f' {self._manager.directory}'
      )
    steps = sorted(self._manager.all_steps(), reverse=True)
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    for place, step in enumerate(steps):
      try:
        with _quietly():
          state = self._manager.restore(step, args=ocp.args.StandardRestore(like))
      except Exception as error:  # Orbax and TensorStore raise many types
        reason = ' '.join(str(error).split('[tensorstore_spec')[0].split())[:200]
        older = steps[place + 1 :]
        problem = f'checkpoint {self._manager.directory / str(step)} is damaged or of another configuration ({reason})'
        if not older or not allow_fallback:
          remedy = f'; with --allow_fallback, training continues from step {older[0]}' if older else ''
          self.close()
          raise ValueError(problem + remedy) from error
        print(f'{problem}; continuing from step {older[0]}', file=sys.stderr)
        continue
      self._move_aside(steps[:place])
      return state
    return None

  def _move_aside(self, steps: list[int]) -> None:
    for step in steps:
      self._aside.mkdir(parents=True, exist_ok=True)
      target = next(path for i in itertools.count() if not (path := self._aside / f'{step}-{i}').exists())
      (self._manager.directory / str(step)).rename(target)
    if steps:
      self._manager.reload()

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    try:
      with _quietly():
        yield
    except Exception as error:  # storage may raise any type
      raise ValueError(
        f'a checkpoint under {self._manager.directory} could not be written ({" ".join(str(error).split())[:200]});'
        f' the last good one is of step {self._manager.latest_step()}'
      ) from error

  def close(self) -> None:
    """Waits until the last checkpoint is written.

    Raises:
      ValueError: It could not be written.
    """
    with self._writing():
      self._manager.wait_until_finished()
      self._manager.close()
    sys.unraisablehook = self._unraisablehook
    logging.getLogger('asyncio').disabled = False
