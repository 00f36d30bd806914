"""Fields of experiments: the values that they may have, and those that a WORKDIR was begun with.

`WORKDIR/run.json` records every field that determines the result, and the content of the files that fields name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from common.json_file import load_ours, save_ours
from spectr_jax.io import untrusted
from spectr_jax.io.heads import head_sizes
from spectr_jax.io.untrusted import Kind, real, whole
from spectr_jax.sharding import is_primary

# Of the optimizer, the logs and the checkpoints, which all experiments have.
_COUNTS = 'batch_size', 'num_steps', 'log_every', 'eval_every', 'checkpoint_every', 'keep_checkpoints'
_KINDS_OF_RUNS = {
  **dict.fromkeys(_COUNTS, whole(1)),
  **dict.fromkeys(('seed', 'warmup_steps'), whole(0, 2**63 - 1)),
  **dict.fromkeys(('learning_rate', 'max_grad_norm'), real(above=0)),
  'weight_decay': real(0),
  'adam_b2': Kind('at least 0 and below 1', lambda x: 0 <= x < 1),
}
# Fields that may change while a run goes on: they change nothing or the order of sums, they name files, whose content
# counts, or they are the number of steps, of which the record says where it changed.
_FREE = {
  'mesh', 'remat', 'log_every', 'checkpoint_every', 'keep_checkpoints', 'cache_dir', 'num_steps', 'source', 'files',
  'held_out_percent', 'data_dir', 'tokenizer', 'distill_from', 'user_files', 'init_from',
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Record:
  """The content of `run.json`."""

  trains: str  # the command
  settings: dict[str, Any]
  num_steps: list[list[int]]  # pairs of a step, and `config.num_steps` from there on
  format: str = 'spectr_jax training run'


def check_fields(config, kinds: Mapping[str, Kind]) -> None:
  """Checks the fields that all experiments have, and those of `kinds`; a `ValueError` names the first wrong one."""
  head_sizes.check_fields(config, _KINDS_OF_RUNS | dict(kinds))
  if config.warmup_steps >= config.num_steps:
    raise ValueError(
      f'config.warmup_steps must be below config.num_steps, got {config.warmup_steps} and {config.num_steps}'
    )


def _flat(config, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """All fields by dotted name, with the values that JSON has."""
  for name, value in config.items():
    if hasattr(value, 'items'):
      yield from _flat(value, f'{prefix}{name}.')
    else:
      yield prefix + name, list(value) if isinstance(value, tuple) else value


def determining_fields(config) -> dict[str, Any]:
  """The fields that determine the result of an experiment, by name: all but those that are known to be free."""
  free = _FREE.copy()
  if not config.get('patience'):  # no evaluation decides which model is the best one
    free |= {'eval_every', 'eval_batches'}
  if not config.get('dropout'):  # what is dropped depends on the microbatch
    free.add('num_microbatches')
  return {name: value for name, value in _flat(config) if name not in free}


class RunRecord:
  """The settings of a run of the command `trains`, and those that its WORKDIR was begun with. `content` has hashes of
  the files that determine the result, by words that name them, None where not known yet. A `ValueError` if there is a
  `run.json` that is no record.
  """

  def __init__(self, workdir: epath.Path, config, trains: str, content: Mapping[str, Any]):
    self._path, self._trains, self._num_steps = workdir / 'run.json', trains, config.num_steps
    self._content = dict(content)
    self._fields = {f'config.{name}': value for name, value in determining_fields(config).items()}
    self._before = self._read()

  @property
  def is_there(self) -> bool:
    return self._before is not None

  def _read(self) -> _Record | None:
    if not self._path.exists():
      return None
    return load_ours(self._path, _Record, 'record of a training run', 'move it away to train here')

  def check(self) -> None:
    """Compares the settings with those that the WORKDIR was begun with, as far as both are known; a `ValueError` names
    those that differ.
    """
    if self._before is None:
      return
    folder, was, now = self._path.parent, self._before.settings, self._fields | self._content
    if self._before.trains != self._trains:
      raise ValueError(f'{folder} was begun by {self._before.trains}, not by {self._trains}: take another one')
    unknown = {name for name in self._content if name in was and None in (was[name], now[name])}
    wrong = [
      f'{name} is {untrusted.shown(now.get(name))} and was {untrusted.shown(value)}'
      for name, value in was.items()
      if now.get(name) != value and name not in unknown
    ]
    if wrong:
      more = f' and {len(wrong) - 8} more' if len(wrong) > 8 else ''
      raise ValueError(
        f'{folder} was begun with other settings: {"; ".join(wrong[:8])}{more}.'
        f' Continue with those in {self._path}, or take another --workdir'
      )

  def know(self, name: str, value: Any) -> None:
    """Sets content that was not known yet."""
    self._content[name] = value

  def forget(self) -> None:
    """Begins a new record: nothing is left of the run that the old one is about."""
    self._before = None

  def write(self, step: int = 0) -> str:
    """Writes the record of a run that continues from a step, and returns in one line what users should know of the
    difference to the old one. A `ValueError` if it cannot be written, or the run is beyond its number of steps.
    """
    if step > self._num_steps:
      raise ValueError(f'{self._path.parent} is at step {step}, beyond config.num_steps {self._num_steps}')
    settings, notes, history = self._fields | self._content, [], [[0, self._num_steps]]
    if self._before is not None:
      history = self._before.num_steps
      before = history[-1][-1]
      if before != self._num_steps:
        history = [part for part in history if part[0] < step] + [[step, self._num_steps]]
        if step:
          notes.append(
            f'config.num_steps was {before} up to step {step} and is {self._num_steps} from here on, and so is the'
            ' schedule of the learning rate'
          )
      if added := sorted(settings.keys() - self._before.settings.keys()):
        notes.append(f'{self._path} does not say what {", ".join(added)} was')
    record = _Record(self._trains, settings, history)
    if record != self._before and is_primary():
      save_ours(self._path, record)
    self._before = record
    return '; '.join(notes)
