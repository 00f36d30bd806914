"""Training checkpoints: the last few, each whole or absent."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath


@contextlib.contextmanager
def _quiet_reads() -> Iterator[None]:
  """Silences reads that are under way when another has failed: that failure is raised and says what is wrong."""
  hooks, log = (sys.unraisablehook, sys.excepthook), logging.getLogger('asyncio')
  sys.unraisablehook = sys.excepthook = lambda *_: None
  log.disabled = True
  try:
    yield
  except BaseException:
    time.sleep(0.2)  # they end in threads that cannot be waited for
    gc.collect()
    raise
  finally:
    sys.unraisablehook, sys.excepthook = hooks
    log.disabled = False


class Checkpoints:
  """Orbax checkpoints of a train state under `WORKDIR/checkpoints`, the newest `keep` kept."""

  def __init__(self, workdir: epath.Path, keep: int):
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False)
    self._manager = ocp.CheckpointManager((workdir / 'checkpoints').resolve(), options=options)

  def save(self, state: dict[str, Any]) -> None:
    """Writes `state` under its own step, unless that step is saved already."""
    step = int(state['step'])
    if step != self._manager.latest_step():
      self._manager.save(step, args=ocp.args.StandardSave(state), force=True)
      self._manager.wait_until_finished()

  def restore(self, like: dict[str, Any]) -> dict[str, Any] | None:
    """The newest state, or None where nothing was saved.

    Args:
      like: A state of the same structure; arrays or `ShapeDtypeStruct`s.

    Raises:
      ValueError: The checkpoint is damaged or of another configuration.
    """
    step = self._manager.latest_step()
    if step is None:
      return None
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
      with _quiet_reads():
        return self._manager.restore(step, args=ocp.args.StandardRestore(like))
    except Exception as error:  # Orbax and TensorStore raise many types
      reason = ' '.join(str(error).split('[tensorstore_spec')[0].split())[:200]
    path, others = self._manager.directory / str(step), [other for other in self._manager.all_steps() if other != step]
    remedy = f'; without that directory, training continues from step {max(others)}' if others else ''
    raise ValueError(f'checkpoint {path} is damaged or of another configuration ({reason}){remedy}')

  def close(self) -> None:
    self._manager.close()
