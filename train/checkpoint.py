"""Training checkpoints: the last few, each whole or absent."""

from __future__ import annotations

from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath


class Checkpoints:
  """Orbax checkpoints of a train state under `WORKDIR/checkpoints`, the newest `keep` kept."""

  def __init__(self, workdir: epath.Path, keep: int):
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False)
    self._manager = ocp.CheckpointManager(workdir / 'checkpoints', options=options)

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
    try:
      state = self._manager.restore(
        step, args=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
      )
    except Exception as error:  # Orbax and TensorStore raise many types
      directory = self._manager.directory / str(step)
      raise ValueError(f'checkpoint {directory} is damaged or of another configuration: {error}') from error
    return state

  def close(self) -> None:
    self._manager.close()
