"""The loop of training, whatever is trained: steps, evaluation, checkpoints, the log, and the end of a run."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from common.command_line import parse_sizes
from spectr_jax.io.new_files import check_new_folder, check_writable, only_writer, writing
from spectr_jax.sharding import DATA, is_primary, make_mesh
from train.checkpoint import Checkpoints, is_finite, steps_in
from train.metric_writer import LOG, MetricWriter
from train.run_record import RunRecord

# Shows the metrics of a step, and the held-out ones where the step was evaluated.
Show: TypeAlias = Callable[[dict[str, float], dict[str, float] | None], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The end of a run; outcomes are equal wherever their folders are."""

  step: int  # steps done; with `config.patience`, those of the best model
  held_out: dict[str, float] | None  # final metrics; None if the run was stopped before its end
  folder: epath.Path = dataclasses.field(compare=False)


def make_config_mesh(config, devices=None) -> Mesh:
  """The mesh that `config.mesh` describes, of some devices or all; a `ValueError` if there is none, or if batches or
  microbatches cannot be sharded over it.
  """
  mesh, rows = make_mesh(parse_sizes(config.mesh), devices), config.batch_size // config.get('num_microbatches', 1)
  if rows % mesh.shape[DATA]:
    what = 'microbatch' if 'num_microbatches' in config else 'batch'
    raise ValueError(f'a {what} of {rows} rows cannot be sharded over {DATA}:{mesh.shape[DATA]}')
  return mesh


@contextlib.contextmanager
def _termination(every: int) -> Iterator[Callable[[int], bool]]:
  """Yields a function that says whether to stop after a step, because SIGTERM or Ctrl-C has arrived; a second Ctrl-C
  ends the program at once. Several processes agree on it every `every` steps.
  """
  has_come = []

  def stop(number, _):
    has_come.append(True)
    if number == signal.SIGINT:
      signal.signal(signal.SIGINT, signal.default_int_handler)
      os.write(2, b'saving a checkpoint and ending; Ctrl-C again ends at once\n')  # print may be at work

  numbers = [signal.SIGTERM]
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell ignores it in the background
    numbers.append(signal.SIGINT)
  try:
    before = {number: signal.signal(number, stop) for number in numbers}
  except ValueError:  # only the main thread may handle signals
    yield lambda step: False
    return

  def is_told_to_stop(step):
    if jax.process_count() == 1:
      return bool(has_come)
    return step % every == 0 and bool(np.any(multihost_utils.process_allgather(np.array(bool(has_come)))))

  try:
    yield is_told_to_stop
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _note(line: str) -> None:
  """Tells users something about their run in one line, in the first process only."""
  if line and is_primary():
    print(line, flush=True)


class Run(abc.ABC):
  """A training run: its state, its checkpoints and its log. What is trained is a subclass's."""

  has_data = False

  def __init__(self, config, workdir: epath.Path, *, allow_fallback: bool):
    self.config, self.workdir, self._allow_fallback = config, workdir, allow_fallback
    self._lock = contextlib.ExitStack()

  @contextlib.contextmanager
  def opened(self, trains: str, content: Mapping[str, Any]) -> Iterator[None]:
    """Takes the WORKDIR for the run of the command `trains`, until `run` has ended or what follows here fails;
    `content` is that of `RunRecord`. Raises a `ValueError` if another run writes there, it was begun with other
    settings, or something stands there that it would have to replace, without the record of a run that wrote it.
    """
    with writing(self.workdir):
      self.workdir.mkdir(parents=True, exist_ok=True)
    checkpoints = self.workdir / 'checkpoints'
    try:
      if is_primary():
        self._lock.enter_context(only_writer(self.workdir))
        if checkpoints.is_dir():
          check_writable(checkpoints / 'checkpoint')  # said now and not after hours
      check_new_folder(self.result)
      has_result = self.result.is_dir() and any(self.result.iterdir())
      saved = [path for path, is_there in ((checkpoints, steps_in(checkpoints)), (self.result, has_result)) if is_there]
      self.record, log = RunRecord(self.workdir, self.config, trains, content), self.workdir / LOG
      if not self.record.is_there and (saved or log.exists()):
        raise ValueError(f'{[*saved, log][0]} is there, and no training has written it: take another --workdir')
      if not (saved or self.has_data):
        self.record.forget()
      self.record.check()
      yield
    except BaseException:
      self._lock.close()
      raise

  @property
  @abc.abstractmethod
  def result(self) -> epath.Path:
    """The folder of what is trained."""

  def begin(self, make_state: Callable[[], Any], sharding: Any, init: Callable[[], Any] | None = None) -> None:
    """Takes the state of the newest checkpoint, or makes one: `init` makes it with `sharding`, a tree of shardings, by
    itself the compiled `make_state`. A `ValueError` says why the checkpoint is unusable, or a file cannot be written.
    """
    self.checkpoints = Checkpoints(self.workdir, self.config.keep_checkpoints)
    try:
      shapes = jax.eval_shape(make_state)
      like = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, sharding)
      state = self.checkpoints.restore(like, allow_fallback=self._allow_fallback)
      step = 0 if state is None else int(state['step'])
      self.record.check()
      _note(self.record.write(step))
      self._writer = MetricWriter(self.workdir, step) if is_primary() else None
    except BaseException:
      self.checkpoints.close()
      raise
    if state is None:
      state = (init or jax.jit(make_state, out_shardings=sharding))()
    self.state: dict[str, Any] = state
    self.step = step

  @property
  def is_over(self) -> bool:
    return bool(self.step >= self.config.num_steps)

  @abc.abstractmethod
  def advance(self) -> jax.Array:
    """Starts the next step, of index `step`, and returns its loss without waiting for it."""

  def rates(self, seconds_per_step: float) -> dict[str, float]:
    """Metrics of speed."""
    return {'seconds_per_step': seconds_per_step}

  @abc.abstractmethod
  def evaluate(self) -> dict[str, float]:
    """Held-out metrics of the current parameters."""

  def keep_if_best(self, held_out: dict[str, float]) -> None:
    """Called after every evaluation; does nothing by itself."""
    del held_out

  @abc.abstractmethod
  def finish(self, held_out: dict[str, float] | None) -> dict[str, float]:
    """Writes what was trained, and returns the final held-out metrics: `held_out` if the last step has some."""

  @contextlib.contextmanager
  def showing(self) -> Iterator[Show]:
    """A function that shows the run to the user while it goes on: here a line per step that is logged."""

    def show(metrics, held_out):
      metrics |= {f'held_out_{name}': value for name, value in (held_out or {}).items()}
      if is_primary():
        print(f'step {self.step}: ' + ', '.join(f'{name} {value:.3f}' for name, value in metrics.items()), flush=True)

    yield show

  def _what_is_saved(self) -> str:
    last = self.checkpoints.last_step
    return 'nothing was saved' if last is None else f'the last checkpoint, of step {last}, is from before'

  def _log(self, metrics: dict[str, float]) -> None:
    if self._writer:
      self._writer.write(self.step, metrics)

  def run(self) -> Outcome:
    """Trains to the end and writes what was trained; SIGTERM or Ctrl-C saves a checkpoint and ends the run. A
    `ValueError` says that the loss or the parameters are not finite, or a file could not be written.
    """
    with self._lock:
      final = self._train()
      if final:
        self._log({f'final_{name}': value for name, value in final.items()})
      if self._writer:
        self._writer.close()
    return Outcome(self.step, final, self.result)

  def _train(self) -> dict[str, float] | None:
    """The final held-out metrics, or None if the run was stopped before its end."""
    config = self.config
    losses, since, stop_now, held_out = [], time.perf_counter(), False, None
    interrupts = _termination(config.log_every)
    with interrupts as is_told_to_stop, self.showing() as show, contextlib.closing(self.checkpoints):
      while not self.is_over and not stop_now:
        losses.append(self.advance())
        self.step += 1
        held_out = None
        is_last = self.step == config.num_steps
        stop_now = is_told_to_stop(self.step)
        save_now = is_last or stop_now or self.step % config.checkpoint_every == 0
        eval_now = is_last or self.step % config.eval_every == 0
        if not (save_now or eval_now or self.step % config.log_every == 0):
          continue
        losses = [float(loss) for loss in losses]
        for step, loss in enumerate(losses, start=self.step - len(losses) + 1):
          if not math.isfinite(loss):
            raise ValueError(f'loss is {loss} at step {step}: stopped; {self._what_is_saved()}')
        # The loss belongs to the parameters before the step. It can be finite although the step's result is not.
        if (save_now or eval_now) and not is_finite(self.state):
          raise ValueError(f'parameters are not finite after step {self.step}: stopped; {self._what_is_saved()}')
        metrics = {'train_loss': float(np.mean(losses))} | self.rates((time.perf_counter() - since) / len(losses))
        if eval_now:
          held_out = self.evaluate()
          self.keep_if_best(held_out)
        show(dict(metrics), held_out)
        self._log(metrics | {f'held_out_{name}': value for name, value in (held_out or {}).items()})
        if save_now or self.is_over:
          self.checkpoints.save(self.state)
        losses, since = [], time.perf_counter()
      # SIGTERM does not interrupt this, since the run ends here anyway.
      return self.finish(held_out) if self.is_over else None
