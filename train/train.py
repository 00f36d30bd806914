"""Training of a language model. The command is `train.main`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich import console, progress

from common.command_line import parse_sizes
from spectr_jax.io.model_files import load_transformer, save_model
from spectr_jax.io.tokenizer import Tokenizer
from spectr_jax.models.transformer import TransformerConfig, config_of, transformer_model
from spectr_jax.sharding import DATA, is_primary, make_mesh, shardings
from train import plan
from train.checkpoint import Checkpoints
from train.config_rules import at_least, check_fields, finite_at_least_0
from train.held_out import evaluate
from train.input_pipeline import batch_at, load_packed
from train.metrics import MetricWriter
from train.step import Teacher, batch_sharding, init_state, make_optimizer, make_train_step
from train.text_sources import make_source

_RULES = (
  *at_least(1, 'seq_len', 'num_microbatches', 'eval_batches'),
  *finite_at_least_0('patience'),
  ('dropout', 'at least 0 and below 1', lambda x: 0 <= x < 1),
  ('held_out_percent', 'above 0 and below 100', lambda x: 0 < x < 100),
  ('distill_weight', 'above 0 and at most 1', lambda x: 0 < x <= 1),
  ('distill_dtype', "float32, bfloat16 or empty for the teacher's own", lambda x: x in ('', 'float32', 'bfloat16')),
)


def check_config(config) -> TransformerConfig:
  """The network's sizes. All fields are checked as far as possible without reading a file.

  Raises:
    ValueError: A field has an invalid value.
  """
  check_fields(config, _RULES)
  if config.batch_size % config.num_microbatches:
    raise ValueError(
      f'config.batch_size {config.batch_size} must be a multiple of config.num_microbatches {config.num_microbatches}'
    )
  try:
    return TransformerConfig(config.vocab_size, max_length=config.seq_len, **config.model)
  except (TypeError, ValueError) as error:
    raise ValueError(f'config.model: {error}') from error


def make_config_mesh(config, devices=None) -> Mesh:
  """The mesh that `config.mesh` describes. It must be possible to shard microbatches over it.

  Args:
    config: The experiment, as `configs/base.py` describes.
    devices: The devices; None for all of `jax.devices()`.

  Raises:
    ValueError: There is no such mesh, or a microbatch cannot be sharded over it.
  """
  mesh = make_mesh(parse_sizes(config.mesh), devices)
  rows = config.batch_size // config.num_microbatches
  if rows % mesh.shape[DATA]:
    raise ValueError(f'a microbatch of {rows} rows cannot be sharded over {DATA}:{mesh.shape[DATA]}')
  return mesh


def check_losses(first_step: int, losses: list[float]) -> None:
  for step, loss in enumerate(losses, start=first_step):
    if not math.isfinite(loss):
      raise ValueError(f'loss is {loss} at step {step}: stopped; the last checkpoint is from before')


@jax.jit
def _is_finite(tree) -> jax.Array:
  """Returns whether every number of a tree is finite."""
  return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _progress_bar(num_steps: int, step: int):
  bar = progress.Progress(
    progress.TextColumn('{task.description}'),
    progress.BarColumn(),
    progress.MofNCompleteColumn(),
    progress.TimeRemainingColumn(),
    progress.TextColumn('loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s'),
    console=console.Console(quiet=not is_primary()),
  )
  return bar, bar.add_task('training', total=num_steps, completed=step, loss=math.nan, speed=0.0)


@contextlib.contextmanager
def termination(every: int) -> Iterator[Callable[[int], bool]]:
  """Yields a function of the step that returns whether to stop after it, because SIGTERM has arrived.

  Several processes must agree on it. They do so every `every` steps.
  """
  has_come = []
  try:
    before = signal.signal(signal.SIGTERM, lambda *_: has_come.append(True))
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
    signal.signal(signal.SIGTERM, before)


def check_teacher(config, teacher_config: TransformerConfig) -> None:
  """Refuses a teacher whose sizes do not fit `config`.

  Args:
    config: The experiment, as `configs/base.py` describes.
    teacher_config: Sizes of the teacher.

  Raises:
    ValueError: The teacher has another vocabulary or a shorter context.
  """
  if teacher_config.vocab_size != config.vocab_size:
    raise ValueError(
      f'{config.distill_from} has {teacher_config.vocab_size} tokens, config.vocab_size is {config.vocab_size}'
    )
  if teacher_config.max_length < config.seq_len:
    raise ValueError(
      f'{config.distill_from} was trained at {teacher_config.max_length} tokens, config.seq_len is {config.seq_len}'
    )


def load_teacher(config, tokenizer: Tokenizer, mesh: Mesh) -> Teacher | None:
  """The teacher that `config.distill_from` names, sharded over the mesh; None if the field is empty.

  Args:
    config: The experiment, as `configs/base.py` describes.
    tokenizer: The learner's tokenizer.
    mesh: The mesh.

  Raises:
    ValueError: There is no such model, or it has another tokenizer or a shorter context.
  """
  if not config.distill_from:
    return None
  model, other = load_transformer(config.distill_from, dtype=config.distill_dtype or None)
  if other.fingerprint != tokenizer.fingerprint:
    raise ValueError(f'{config.distill_from} has another tokenizer than {config.tokenizer}')
  check_teacher(config, config_of(model))
  return Teacher(place(model.params, shardings(mesh, model.params)), config_of(model), config.distill_weight)


def place(arrays, sharding):
  """Shards arrays that every process holds.

  Args:
    arrays: A tree of arrays.
    sharding: A tree of shardings of the same structure.
  """
  return jax.tree.map(
    lambda x, s: jax.make_array_from_callback(x.shape, s, np.asarray(x).__getitem__), arrays, sharding
  )


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The end of a run.

  Attributes:
    step: Number of steps done. If `config.patience` is set, the steps of the best model.
    held_out: The final held-out metrics, or None if the run was stopped before its end.
  """

  step: int
  held_out: dict[str, float] | None


class _Training:
  """A training run: its data and program, its state, and its log."""

  def __init__(self, config, workdir: epath.Path, *, allow_fallback: bool):
    self.config, self.workdir = config, workdir
    self.model_config = check_config(config)
    self.tokenizer = Tokenizer.load(config.tokenizer)
    if self.tokenizer.vocab_size != config.vocab_size:
      raise ValueError(
        f'{config.tokenizer} has {self.tokenizer.vocab_size} tokens but config.vocab_size is {config.vocab_size}'
      )
    self.mesh = make_config_mesh(config)
    optimizer = make_optimizer(config)
    make_state = functools.partial(init_state, config.seed, optimizer, self.model_config)
    self.sharding = shardings(self.mesh, jax.eval_shape(make_state))
    source = make_source(config)
    cache_dir = epath.Path(config.cache_dir or workdir / 'data')
    self.text, self.held_out, self.origin = load_packed(source, self.tokenizer, cache_dir)
    for part, packed in (('training', self.text), ('held-out', self.held_out)):
      packed.check(config.seq_len, part)
    self.teacher = load_teacher(config, self.tokenizer, self.mesh)
    self.train_step = make_train_step(
      optimizer, self.model_config, self.tokenizer.bos_id, self.mesh, remat=config.remat, dropout=config.dropout,
      seed=config.seed,
    )  # fmt: skip
    workdir.mkdir(parents=True, exist_ok=True)
    self.checkpoints = Checkpoints(workdir, config.keep_checkpoints)
    like = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(make_state), self.sharding
    )
    self.state = self.checkpoints.restore(like, allow_fallback=allow_fallback)
    if self.state is None:
      self.state = jax.jit(make_state, out_shardings=self.sharding)()
    # The host keeps its own copies, so that no step waits for the one before it.
    self.step = int(self.state['step'])
    self.best_loss, self.best_step = float(self.state['best_loss']), int(self.state['best_step'])
    self.writer = MetricWriter(workdir, self.step) if is_primary() else None
    if is_primary():
      shape = ' x '.join(f'{name} {size}' for name, size in self.mesh.shape.items())
      print(
        f'{self.model_config.num_params:,} parameters on {self.mesh.size} devices ({shape});'
        f' {len(self.text.tokens):,} training tokens from {source.name}; at step {self.step}'
      )

  @property
  def is_over(self) -> bool:
    config = self.config
    has_best = config.patience and self.best_step
    is_patience_over = has_best and self.step - self.best_step >= config.patience * config.eval_every
    return bool(self.step >= config.num_steps or is_patience_over)

  def advance(self) -> jax.Array:
    """Starts one step and returns its loss without waiting for it."""
    config = self.config
    rows = batch_at(
      self.text, self.step, batch_size=config.batch_size, seq_len=config.seq_len, seed=config.seed,
      num_microbatches=config.num_microbatches, sharding=batch_sharding(self.mesh),
    )  # fmt: skip
    self.state, loss = self.train_step(self.state, rows, self.teacher)
    self.step += 1
    return loss

  def evaluate(self, max_batches: int | None = None) -> dict[str, float]:
    config = self.config
    return evaluate(
      self.state['params'], text=self.held_out, model_config=self.model_config, bos_id=self.tokenizer.bos_id,
      seq_len=config.seq_len, batch_size=config.batch_size // config.num_microbatches, max_batches=max_batches,
      mesh=self.mesh, teacher=self.teacher,
    )  # fmt: skip

  def keep_model(self, step: int, found: dict[str, float]) -> None:
    """Writes the current model to `WORKDIR/model`."""
    params = multihost_utils.process_allgather(self.state['params'], tiled=True)
    if is_primary():
      model = transformer_model(params, self.model_config)
      info = {'text': self.origin, 'steps': step, 'held_out': found}
      save_model(self.workdir / 'model', model, self.tokenizer, info=info, overwrite=True)
    multihost_utils.sync_global_devices('the model is written')

  def keep_if_best(self, found: dict[str, float]) -> None:
    if self.config.patience and found['loss'] < self.best_loss:
      best = {'best_loss': np.float32(found['loss']), 'best_step': np.int32(self.step)}
      self.best_loss, self.best_step = float(best['best_loss']), self.step
      self.state |= place(best, {name: self.sharding[name] for name in best})
      self.keep_model(self.step, found)

  def log(self, metrics: dict[str, float]) -> None:
    if self.writer:
      self.writer.write(self.step, metrics)

  def run(self) -> Outcome:
    config = self.config
    # The model's FLOPs without recomputation; divided by the device's peak they give model FLOP utilisation.
    flops = plan.train_flops(self.model_config, config.batch_size, config.seq_len)
    bar, task = _progress_bar(config.num_steps, self.step)
    losses, since, stop_now, final = [], time.perf_counter(), False, None
    with termination(config.log_every) as is_told_to_stop, bar, contextlib.closing(self.checkpoints):
      while not self.is_over and not stop_now:
        losses.append(self.advance())
        is_last = self.step == config.num_steps
        stop_now = is_told_to_stop(self.step)
        save_now = is_last or stop_now or self.step % config.checkpoint_every == 0
        eval_now = is_last or self.step % config.eval_every == 0
        if not (save_now or eval_now or self.step % config.log_every == 0):
          continue
        losses = [float(loss) for loss in losses]
        check_losses(self.step - len(losses) + 1, losses)
        # The loss belongs to the parameters before the step. It can be finite although the step's result is not.
        if (save_now or eval_now) and not _is_finite(self.state):
          raise ValueError(
            f'parameters are not finite after step {self.step}: stopped; the last checkpoint is from before'
          )
        steps_per_second = len(losses) / (time.perf_counter() - since)
        metrics = {
          'train_loss': float(np.mean(losses)),
          'tokens_per_second': steps_per_second * config.batch_size * config.seq_len,
          'teraflops_per_device': steps_per_second * flops / self.mesh.size / 1e12,
        }
        bar.update(task, completed=self.step, loss=metrics['train_loss'], speed=metrics['tokens_per_second'])
        if eval_now:
          found = self.evaluate(config.eval_batches * config.num_microbatches)
          metrics |= {f'held_out_{name}': value for name, value in found.items()}
          bar.console.print(f'step {self.step}: held-out ' + ', '.join(f'{k} {v:.3f}' for k, v in found.items()))
          self.keep_if_best(found)
        self.log(metrics)
        if save_now or self.is_over:
          self.checkpoints.save(self.state)
        losses, since = [], time.perf_counter()
      # SIGTERM does not interrupt this, since the run ends here anyway.
      if self.is_over:
        final = self.finish()
    if final:
      self.log({f'final_{name}': value for name, value in final.items()})
    if self.writer:
      self.writer.close()
    return Outcome(self.step, final)

  def finish(self) -> dict[str, float]:
    """Evaluates the model on all held-out text and writes it. With `config.patience` this is the best model."""
    if self.config.patience and self.best_step:
      best = load_transformer(self.workdir / 'model')[0].params
      self.state['params'], self.step = place(best, self.sharding['params']), self.best_step
    found = self.evaluate()
    self.keep_model(self.step, found)
    return found


def train(config, workdir: epath.PathLike, *, allow_fallback: bool = False) -> Outcome:
  """Trains to `config.num_steps`, continuing from the newest checkpoint under `workdir` if there is one.

  On the same mesh, an interrupted and continued run ends with the same parameters as an uninterrupted one. A run can
  also continue on another mesh, where sums have another order. SIGTERM saves a checkpoint and ends the run. The trained
  model is written to `WORKDIR/model`. With `config.patience` it is the best of the evaluated models and exists from the
  first evaluation on. With several processes (`jax.distributed`) each calls this function.

  Args:
    config: The experiment, as `configs/base.py` describes.
    workdir: Directory for checkpoints, metrics, encoded text and the model.
    allow_fallback: Whether to continue from an older checkpoint if the newest is damaged.

  Returns:
    The step at the end and the final held-out metrics.

  Raises:
    ValueError: The configuration, its files or a checkpoint is unusable, or the loss is not finite.
  """
  return _Training(config, epath.Path(workdir), allow_fallback=allow_fallback).run()
