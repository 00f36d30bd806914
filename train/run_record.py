"""What made a WORKDIR: all settings that determine its result, in `WORKDIR/run.json`.

Each field of an experiment determines the result or may change while a run goes on, and the tables say which. Files
count by their content, wherever they lie.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from typing import Any

from etils import epath

from spectr_jax.io import foreign
from spectr_jax.io.new_files import write_file
from spectr_jax.sharding import is_primary

NAME = 'run.json'
_FORMAT = 'spectr_jax training run'
_LIMIT = 2**20  # bytes
_NUMBER = foreign.either(foreign.whole(-(2**63), 2**64), foreign.real())
_VALUE = foreign.either(foreign.NOTHING, foreign.FLAG, foreign.TEXT, _NUMBER)
_FIELDS = {
  'format': foreign.one_of(_FORMAT),
  'trains': foreign.TEXT,
  'settings': foreign.map_of(foreign.either(_VALUE, foreign.list_of(_VALUE))),
  'num_steps': foreign.list_of(foreign.list_of(foreign.whole(), 2)),
}


class Rule(enum.Enum):
  """Whether a field determines the result of an experiment."""

  DETERMINES = 'always'
  FREE = 'no: it changes nothing, or the order of sums at most'
  BY_CONTENT = 'no: it names files, which count by their content'
  RECORDED = 'no: it is the number of steps, which may change; the record says where it did'
  WITH_PATIENCE = 'with patience: it says which model is the best one'
  WITH_DROPOUT = 'with dropout: it says which entries are dropped'

  def is_met(self, config) -> bool:
    """Whether it determines the result of this experiment."""
    has = {Rule.WITH_PATIENCE: 'patience', Rule.WITH_DROPOUT: 'dropout'}
    return self is Rule.DETERMINES or (self in has and bool(config[has[self]]))


def _table(names: Mapping[Rule, str]) -> dict[str, Rule]:
  return {name: rule for rule, those in names.items() for name in those.split()}


_OF_RUNS = _table({
  Rule.DETERMINES: 'seed batch_size learning_rate warmup_steps weight_decay adam_b2 max_grad_norm',
  Rule.FREE: 'mesh log_every checkpoint_every keep_checkpoints',
  Rule.RECORDED: 'num_steps',
})  # fmt: skip

# The fields of `configs/base.py`.
MODEL_FIELDS = _OF_RUNS | _table({
  Rule.BY_CONTENT: 'source files held_out_percent data_dir tokenizer distill_from',
  Rule.DETERMINES: 'vocab_size seq_len dropout distill_weight distill_dtype patience'
  ' model.embed_dim model.num_layers model.num_heads model.mlp_dim model.dtype',
  Rule.FREE: 'cache_dir remat',
  Rule.WITH_DROPOUT: 'num_microbatches',
  Rule.WITH_PATIENCE: 'eval_every eval_batches',
})  # fmt: skip

# The fields of `configs/head.py`, of all kinds.
HEAD_FIELDS = _OF_RUNS | _table({
  Rule.DETERMINES: 'kind num_shards rows_per_shard max_user_tokens max_new_tokens user_temperature temperatures'
  ' data_dtype num_layers num_unrolled has_unembedding vocab_size mlp_dim from_target decay tv_weight dtype'
  ' block_size markov_rank markov_kind mask_id ce_weight lk_weight confidence_weight',
  Rule.BY_CONTENT: 'user_files init_from',
  Rule.FREE: 'eval_every',
})  # fmt: skip


def _value(config, name: str) -> Any:
  """The field of a dotted name as JSON has it; None if there is no such field."""
  for part in name.split('.'):
    config = config.get(part)
    if config is None:
      return None
  return list(config) if isinstance(config, tuple) else config


class RunRecord:
  """The settings of a run, and those that its WORKDIR was begun with.

  Args:
    workdir: The run's directory.
    config: The experiment.
    table: Which of its fields determine the result.
    trains: The command that trains.
    content: What the files hold that determine the result, by words that name them; None for what is not known yet.
  """

  def __init__(self, workdir: epath.Path, config, table: Mapping[str, Rule], trains: str, content: Mapping[str, Any]):
    self._path, self._trains, self._num_steps = workdir / NAME, trains, config.num_steps
    fields = {f'config.{name}': _value(config, name) for name, rule in table.items() if rule.is_met(config)}
    self._settings = fields | dict(content)
    self._found = self._read()

  @property
  def is_there(self) -> bool:
    """Whether the WORKDIR has a record."""
    return self._found is not None

  def _read(self) -> dict[str, Any] | None:
    if not (self._path.exists() or (not foreign.is_remote(self._path) and os.path.lexists(self._path))):
      return None
    way = 'move it away to train here'
    try:
      found = foreign.read_object(self._path, _FIELDS, _LIMIT)
    except ValueError as error:
      raise ValueError(f'{error}: {way}') from error
    if any(found.get(name) is None for name in _FIELDS):
      raise ValueError(f'{self._path} is not the record of a training run: {way}')
    return found

  def check(self) -> None:
    """Compares the settings with those that the WORKDIR was begun with, as far as both are known.

    Raises:
      ValueError: Some differ; the message names them with both values.
    """
    if self._found is None:
      return
    found, folder = self._found, self._path.parent
    if found['trains'] != self._trains:
      raise ValueError(
        f'{folder} was begun by {foreign.shown(found["trains"])}, not by {self._trains}: take another one'
      )
    was = found['settings']
    known = [name for name in was if was[name] is not None or self._settings.get(name) is not None]
    wrong = [
      f'{name if name in self._settings else foreign.shown(name)} is {foreign.shown(self._settings.get(name))}'
      f' and was {foreign.shown(was[name])}'
      for name in known
      if self._settings.get(name) != was[name] and not self._is_unknown(name)
    ]
    if wrong:
      more = f' and {len(wrong) - 8} more' if len(wrong) > 8 else ''
      raise ValueError(
        f'{folder} was begun with other settings: {"; ".join(wrong[:8])}{more}.'
        f' Continue with those in {self._path}, or take another --workdir'
      )

  def _is_unknown(self, name: str) -> bool:
    """Whether content is not known yet, now or then."""
    is_content = name in self._settings and not name.startswith('config.')
    assert self._found is not None
    return is_content and None in (self._settings[name], self._found['settings'][name])

  def know(self, name: str, value: Any) -> None:
    """Sets content that was not known yet."""
    self._settings[name] = value

  def forget(self) -> None:
    """Begins a new record: nothing is left of the run that the old one is about."""
    self._found = None

  def write(self, step: int = 0) -> str:
    """Writes the record.

    Args:
      step: The step from which the run continues.

    Returns:
      What users should know of the difference to the old one, in one line; empty if there is none.

    Raises:
      ValueError: It cannot be written, or the run is beyond its number of steps.
    """
    if step > self._num_steps:
      raise ValueError(f'{self._path.parent} is at step {step}, beyond config.num_steps {self._num_steps}')
    notes, history = [], [[0, self._num_steps]]
    if self._found is not None:
      history = self._found['num_steps'] or history
      before = history[-1][-1] if history[-1] else self._num_steps
      if before != self._num_steps:
        history = [part for part in history if part and part[0] < step] + [[step, self._num_steps]]
        if step:
          notes.append(
            f'config.num_steps was {before} up to step {step} and is {self._num_steps} from here on, and so is the'
            ' schedule of the learning rate'
          )
      was = self._found['settings']
      if added := sorted(name for name, value in self._settings.items() if name not in was and value is not None):
        notes.append(f'{self._path} does not say what {", ".join(added)} was')
    content = {'format': _FORMAT, 'trains': self._trains, 'settings': dict(self._settings), 'num_steps': history}
    foreign.check_object(content, _FIELDS, str(self._path))
    if content != self._found and is_primary():
      write_file(self._path, (json.dumps(content, indent=2) + '\n').encode())
    self._found = content
    return '; '.join(notes)


def note(line: str) -> None:
  """Tells users something about their run in one line, in the first process only."""
  if line and is_primary():
    print(line, flush=True)
