"""Trains a language model; `train.main` is the command around it."""

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

from spectr_jax.io.command_line import parse_sizes
from spectr_jax.io.model_files import load_model, save_model
from spectr_jax.io.tokenizer import Tokenizer
from spectr_jax.models.transformer import TransformerConfig, config_of, transformer_model
from spectr_jax.sharding import DATA, make_mesh, shardings
from train import plan
from train.checkpoint import Checkpoints
from train.held_out import evaluate
from train.input_pipeline import batch_at, load_packed
from train.metrics import MetricWriter
from train.step import Teacher, batch_sharding, init_state, make_optimizer, make_train_step
from train.text_sources import make_source

# Field, what it must be, and the test of it; numbers that are NaN fail each test.
_RULES = (
  *((name, 'at least 1', lambda x: x >= 1) for name in (
    'seq_len', 'batch_size', 'num_microbatches', 'num_steps', 'log_every', 'eval_every', 'eval_batches',
    'checkpoint_every', 'keep_checkpoints',
  )),
  *((name, 'finite and at least 0', lambda x: 0 <= x < math.inf) for name in (
    'seed', 'warmup_steps', 'weight_decay', 'patience',
  )),
  *((name, 'finite and above 0', lambda x: 0 < x < math.inf) for name in ('learning_rate', 'max_grad_norm')),
  *((name, 'at least 0 and below 1', lambda x: 0 <= x < 1) for name in ('adam_b2', 'dropout')),
  ('held_out_percent', 'above 0 and below 100', lambda x: 0 < x < 100),
  ('distill_weight', 'above 0 and at most 1', lambda x: 0 < x <= 1),
)  # fmt: skip


def check_config(config) -> TransformerConfig:
  """The network's sizes, after checking all that can be checked without reading a file.

  Raises:
    ValueError: A field has a value that cannot be trained with.
  """
  for name, allowed, is_valid in _RULES:
    if not is_valid(config[name]):
      raise ValueError(f'config.{name} must be {allowed}, got {config[name]}')
  if config.warmup_steps >= config.num_steps:
    raise ValueError(
      f'config.warmup_steps must be below config.num_steps, got {config.warmup_steps} and {config.num_steps}'
    )
  if config.batch_size % config.num_microbatches:
    raise ValueError(
      f'config.batch_size {config.batch_size} must be a multiple of config.num_microbatches {config.num_microbatches}'
    )
  try:
    return TransformerConfig(config.vocab_size, max_length=config.seq_len, **config.model)
  except (TypeError, ValueError) as error:
    raise ValueError(f'config.model: {error}') from error


def make_config_mesh(config, devices=None) -> Mesh:
  """The mesh that `config.mesh` describes, after checking that microbatches can be divided over it.

  Raises:
    ValueError: There is no such mesh, or a microbatch cannot be divided.
  """
  mesh = make_mesh(parse_sizes(config.mesh), devices)
  rows = config.batch_size // config.num_microbatches
  if rows % mesh.shape[DATA]:
    raise ValueError(f'a microbatch of {rows} rows cannot be divided over {DATA}:{mesh.shape[DATA]}')
  return mesh


def _check_finite(first_step: int, losses: list[float]) -> None:
  for step, loss in enumerate(losses, start=first_step):
    if not math.isfinite(loss):
      raise ValueError(f'loss is {loss} at step {step}: stopped; the last checkpoint is from before')


@jax.jit
def _is_finite(tree) -> jax.Array:
  """Whether every number is."""
  return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def is_primary() -> bool:
  """Whether this process is the one that prints and writes what all have in common."""
  return jax.process_index() == 0


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
def _termination(every: int) -> Iterator[Callable[[int], bool]]:
  """A function of the step that says whether to stop after it, since SIGTERM has come.

  Several processes have to agree, which they do at every so many steps.
  """
  has_come = []
  try:
    before = signal.signal(signal.SIGTERM, lambda *_: has_come.append(True))
  except ValueError:  # not the main thread, which alone may handle signals
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


def load_teacher(config, tokenizer: Tokenizer, mesh: Mesh) -> Teacher | None:
  """The model that `config.distill_from` names, on the mesh; None if it names none.

  Raises:
    ValueError: There is no such model, or it has another tokenizer or reads shorter texts.
  """
  if not config.distill_from:
    return None
  model, other = load_model(config.distill_from)
  if other.fingerprint != tokenizer.fingerprint:
    raise ValueError(f'{config.distill_from} has another tokenizer than {config.tokenizer}')
  teacher_config = config_of(model)
  if teacher_config.max_length < config.seq_len:
    raise ValueError(
      f'{config.distill_from} was trained at {teacher_config.max_length} tokens, config.seq_len is {config.seq_len}'
    )
  return Teacher(place(model.params, shardings(mesh, model.params)), teacher_config, config.distill_weight)


def place(arrays, sharding):
  """Arrays that every process has, divided over a mesh."""
  return jax.tree.map(
    lambda x, s: jax.make_array_from_callback(x.shape, s, np.asarray(x).__getitem__), arrays, sharding
  )


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a run ended.

  Attributes:
    step: Steps done; those of the best model, where `config.patience` looks for it.
    held_out: The final held-out metrics, or None if the run was told to stop before its end.
  """

  step: int
  held_out: dict[str, float] | None


def train(config, workdir: epath.PathLike, *, allow_fallback: bool = False) -> Outcome:
  """Trains to `config.num_steps`, continuing from the newest checkpoint under `workdir` if there is one.

  A run that is interrupted and continued ends with the parameters of one that was not, on the same mesh; on another
  mesh it continues as well, with sums in another order. SIGTERM saves a checkpoint and ends the run. The trained model
  is written to `WORKDIR/model`; with `config.patience` it is the best of those evaluated, and is there from the first
  evaluation on. With several processes (`jax.distributed`) each calls this.

  Args:
    config: As `configs/base.py` describes.
    workdir: Directory for checkpoints, metrics, encoded text and the model.
    allow_fallback: Whether to continue from an older checkpoint where the newest is damaged.

  Returns:
    How it ended.

  Raises:
    ValueError: The configuration, its files or a checkpoint is unusable, or the loss is not finite.
  """
  model_config = check_config(config)
  workdir = epath.Path(workdir)
  tokenizer = Tokenizer.load(config.tokenizer)
  if tokenizer.vocab_size != config.vocab_size:
    raise ValueError(
      f'{config.tokenizer} has {tokenizer.vocab_size} tokens but config.vocab_size is {config.vocab_size}'
    )
  mesh = make_config_mesh(config)
  optimizer = make_optimizer(config)
  make_state = functools.partial(init_state, config.seed, optimizer, model_config)
  state_sharding = shardings(mesh, jax.eval_shape(make_state))
  source = make_source(config)
  text, held_out, origin = load_packed(source, tokenizer, epath.Path(config.cache_dir or workdir / 'data'))
  for part, packed in (('training', text), ('held-out', held_out)):
    packed.check(config.seq_len, part)
  teacher = load_teacher(config, tokenizer, mesh)
  workdir.mkdir(parents=True, exist_ok=True)
  checkpoints = Checkpoints(workdir, config.keep_checkpoints)
  like = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(make_state), state_sharding
  )
  state = checkpoints.restore(like, allow_fallback=allow_fallback)
  if state is None:
    state = jax.jit(make_state, out_shardings=state_sharding)()
  step = int(state['step'])
  if is_primary():
    shape = ' x '.join(f'{name} {size}' for name, size in mesh.shape.items())
    print(
      f'{model_config.num_params:,} parameters on {mesh.size} devices ({shape}); {len(text.tokens):,} training tokens'
      f' from {source.name}; at step {step}'
    )
  writer = MetricWriter(workdir, step) if is_primary() else None
  train_step = make_train_step(
    optimizer, model_config, tokenizer.bos_id, mesh, remat=config.remat, dropout=config.dropout, seed=config.seed
  )
  run_eval = functools.partial(
    evaluate, text=held_out, model_config=model_config, bos_id=tokenizer.bos_id, seq_len=config.seq_len,
    batch_size=config.batch_size // config.num_microbatches, mesh=mesh, teacher=teacher,
  )  # fmt: skip
  next_batch = functools.partial(
    batch_at, text, batch_size=config.batch_size, seq_len=config.seq_len, seed=config.seed,
    num_microbatches=config.num_microbatches, sharding=batch_sharding(mesh),
  )  # fmt: skip

  def keep_model(params, step, found):
    params = multihost_utils.process_allgather(params, tiled=True)
    if is_primary():
      info = {'text': origin, 'steps': step, 'held_out': found}
      save_model(workdir / 'model', transformer_model(params, model_config), tokenizer, info=info, overwrite=True)
    multihost_utils.sync_global_devices('the model is written')

  def is_over():
    has_best = config.patience and best_step
    return step >= config.num_steps or (has_best and step - best_step >= config.patience * config.eval_every)

  # What the model needs: over the device's peak this is model FLOP utilisation.
  flops = plan.train_flops(model_config, config.batch_size, config.seq_len)
  bar, task = _progress_bar(config.num_steps, step)
  losses, since, stop_now, final = [], time.perf_counter(), False, None
  # Known here as well, so that no step has to wait for the one before.
  best_loss, best_step = float(state['best_loss']), int(state['best_step'])
  with _termination(config.log_every) as is_told_to_stop, bar, contextlib.closing(checkpoints):
    while not is_over() and not stop_now:
      state, loss = train_step(state, next_batch(step), teacher)
      losses.append(loss)
      step += 1
      is_last = step == config.num_steps
      stop_now = is_told_to_stop(step)
      save_now = is_last or stop_now or step % config.checkpoint_every == 0
      eval_now = is_last or step % config.eval_every == 0
      if save_now or eval_now or step % config.log_every == 0:
        losses = [float(loss) for loss in losses]
        _check_finite(step - len(losses) + 1, losses)
        # The loss is of the parameters before the step: it can be finite where the step's result is not.
        if (save_now or eval_now) and not _is_finite(state):
          raise ValueError(f'parameters are not finite after step {step}: stopped; the last checkpoint is from before')
        steps_per_second = len(losses) / (time.perf_counter() - since)
        metrics = {
          'train_loss': float(np.mean(losses)),
          'tokens_per_second': steps_per_second * config.batch_size * config.seq_len,
          'teraflops_per_device': steps_per_second * flops / mesh.size / 1e12,
        }
        bar.update(task, completed=step, loss=metrics['train_loss'], speed=metrics['tokens_per_second'])
        if eval_now:
          found = run_eval(state['params'], max_batches=config.eval_batches * config.num_microbatches)
          metrics |= {f'held_out_{name}': value for name, value in found.items()}
          bar.console.print(f'step {step}: held-out ' + ', '.join(f'{k} {v:.3f}' for k, v in found.items()))
          if config.patience and found['loss'] < best_loss:
            best = {'best_loss': np.float32(found['loss']), 'best_step': np.int32(step)}
            best_loss, best_step = float(best['best_loss']), step
            state |= place(best, {name: state_sharding[name] for name in best})
            keep_model(state['params'], step, found)
        if writer:
          writer.write(step, metrics)
        if save_now or is_over():
          checkpoints.save(state)
        losses, since = [], time.perf_counter()
    # Still where SIGTERM cannot interrupt: this is the end anyway.
    if is_over():
      params = state['params']
      if config.patience and best_step:
        params, step = place(load_model(workdir / 'model')[0].params, state_sharding['params']), best_step
      final = run_eval(params)
      keep_model(params, step, final)
  if writer:
    if final:
      writer.write(step, {f'final_{name}': value for name, value in final.items()})
    writer.close()
  return Outcome(step, final)
