"""Trains a language model; `train.main` is the command around it."""

from __future__ import annotations

import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from rich import progress

from spectr_jax.io.model_files import save_model
from spectr_jax.io.tokenizer import Tokenizer
from spectr_jax.models.transformer import Transformer, TransformerConfig, init_params, transformer_model
from train.checkpoint import Checkpoints
from train.input_pipeline import PackedText, batch_at, load_packed
from train.metrics import MetricWriter
from train.text_sources import make_source

# Field, what it must be, and the test of it; numbers that are NaN fail each test.
_RULES = (
  *((name, 'at least 1', lambda x: x >= 1) for name in (
    'seq_len', 'batch_size', 'num_steps', 'log_every', 'eval_every', 'eval_batches', 'checkpoint_every',
    'keep_checkpoints',
  )),
  *((name, 'finite and at least 0', lambda x: 0 <= x < math.inf) for name in ('warmup_steps', 'weight_decay')),
  *((name, 'finite and above 0', lambda x: 0 < x < math.inf) for name in ('learning_rate', 'max_grad_norm')),
  ('adam_b2', 'at least 0 and below 1', lambda x: 0 <= x < 1),
  ('held_out_percent', 'above 0 and below 100', lambda x: 0 < x < 100),
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
  try:
    return TransformerConfig(config.vocab_size, max_length=config.seq_len, **config.model)
  except (TypeError, ValueError) as error:
    raise ValueError(f'config.model: {error}') from error


def make_optimizer(config) -> optax.GradientTransformation:
  """AdamW with linear warm-up, cosine decay to a tenth and gradient clipping; only matrices are decayed."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, config.warmup_steps, config.num_steps, end_value=config.learning_rate / 10
  )
  return optax.chain(
    optax.clip_by_global_norm(config.max_grad_norm),
    optax.adamw(
      schedule,
      b2=config.adam_b2,
      weight_decay=config.weight_decay,
      mask=lambda params: jax.tree.map(lambda x: x.ndim == 2, params),
    ),
  )


def token_losses(params, rows, model_config: TransformerConfig, bos_id: int):
  """Negative log-likelihood of each target token, in nats.

  Args:
    params: Parameters of the transformer.
    rows: int32 `[B, T + 1]`, packed documents; attention stays within a document.
    model_config: Sizes of the transformer.
    bos_id: The token that begins a document; it is never a target.

  Returns:
    Losses `[B, T]`, 0 where there is no target, and weights `[B, T]`, 1 where there is one.
  """
  inputs, targets = rows[:, :-1], rows[:, 1:]
  positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
  document = jnp.cumsum(inputs == bos_id, axis=1)
  mask = (document[:, :, None] == document[:, None, :]) & (positions[:, :, None] >= positions[:, None, :])
  logits, _, _ = Transformer(model_config).apply({'params': params}, inputs, positions, mask)
  weights = (targets != bos_id).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights, weights


@functools.partial(jax.jit, static_argnames=('model_config', 'bos_id'))
def _sum_losses(params, rows, *, model_config, bos_id):
  losses, weights = token_losses(params, rows, model_config, bos_id)
  return losses.sum(), weights.sum()


def evaluate(
  params, text: PackedText, model_config, bos_id, *, seq_len, batch_size, max_batches=None
) -> dict[str, float]:
  """Loss of `text` in rows of `seq_len`, evenly spaced where `max_batches` does not cover it.

  Returns:
    `loss` in nats per token, `perplexity` per token, and `bits_per_byte` of the UTF-8 text.

  Raises:
    ValueError: The text is shorter than one row.
  """
  text.check(seq_len, 'held-out')
  num_rows = text.num_rows(seq_len)
  wanted = num_rows if max_batches is None else min(num_rows, max_batches * batch_size)
  chosen = np.linspace(0, num_rows - 1, wanted).astype(np.int64)
  total = count = 0.0
  for start in range(0, wanted, batch_size):
    rows = text.rows(chosen[start : start + batch_size], seq_len)
    absent = batch_size - len(rows)
    # Targets that are all bos weigh nothing: padding of the last batch.
    rows = np.pad(rows, ((0, absent), (0, 0)), constant_values=bos_id)
    losses, weights = _sum_losses(params, rows, model_config=model_config, bos_id=bos_id)
    total, count = total + float(losses), count + float(weights)
  loss = total / count
  bytes_per_token = text.num_bytes / np.count_nonzero(text.tokens != bos_id)
  return {
    'loss': loss,
    'perplexity': math.exp(min(loss, 50.0)),
    'bits_per_byte': loss / math.log(2) / bytes_per_token,
  }


def make_train_step(optimizer, model_config, bos_id):
  """The jitted update `(state, rows) -> (state, loss)`; the state is donated."""

  def mean_loss(params, rows):
    losses, weights = token_losses(params, rows, model_config, bos_id)
    return losses.sum() / weights.sum()

  @functools.partial(jax.jit, donate_argnums=0)
  def train_step(state, rows):
    loss, grads = jax.value_and_grad(mean_loss)(state['params'], rows)
    updates, opt_state = optimizer.update(grads, state['opt_state'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {'params': params, 'opt_state': opt_state, 'step': state['step'] + 1}, loss

  return train_step


def _check_finite(first_step: int, losses: list[float]) -> None:
  for step, loss in enumerate(losses, start=first_step):
    if not math.isfinite(loss):
      raise ValueError(f'loss is {loss} at step {step}: stopped; the last checkpoint is from before')


@jax.jit
def _is_finite(tree) -> jax.Array:
  """Whether every number is."""
  return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _progress_bar(num_steps: int, step: int):
  bar = progress.Progress(
    progress.TextColumn('{task.description}'),
    progress.BarColumn(),
    progress.MofNCompleteColumn(),
    progress.TimeRemainingColumn(),
    progress.TextColumn('loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s'),
  )
  return bar, bar.add_task('training', total=num_steps, completed=step, loss=math.nan, speed=0.0)


def train(config, workdir: epath.PathLike) -> dict[str, float]:
  """Trains to `config.num_steps`, continuing from the newest checkpoint under `workdir` if there is one.

  A run that is interrupted and continued ends with the parameters of one that was not. The trained model is written to
  `WORKDIR/model`.

  Args:
    config: As `configs/base.py` describes.
    workdir: Directory for checkpoints, metrics, encoded text and the model.

  Returns:
    The final held-out metrics.

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
  source = make_source(config)
  text, held_out, origin = load_packed(source, tokenizer, epath.Path(config.cache_dir or workdir / 'data'))
  for part, packed in (('training', text), ('held-out', held_out)):
    packed.check(config.seq_len, part)
  optimizer = make_optimizer(config)
  params = init_params(jax.random.key(config.seed), model_config)
  state = {'params': params, 'opt_state': optimizer.init(params), 'step': jnp.zeros((), jnp.int32)}
  workdir.mkdir(parents=True, exist_ok=True)
  checkpoints = Checkpoints(workdir, config.keep_checkpoints)
  state = checkpoints.restore(state) or state
  step = int(state['step'])
  print(
    f'{model_config.num_params:,} parameters; {len(text.tokens):,} training tokens from {source.name}; at step {step}'
  )
  writer = MetricWriter(workdir, step)
  train_step = make_train_step(optimizer, model_config, tokenizer.bos_id)
  run_eval = functools.partial(
    evaluate, text=held_out, model_config=model_config, bos_id=tokenizer.bos_id, seq_len=config.seq_len,
    batch_size=config.batch_size,
  )  # fmt: skip
  bar, task = _progress_bar(config.num_steps, step)
  losses, since = [], time.perf_counter()
  with bar:
    while step < config.num_steps:
      rows = batch_at(text, step, batch_size=config.batch_size, seq_len=config.seq_len, seed=config.seed)
      state, loss = train_step(state, rows)
      losses.append(loss)
      step += 1
      is_last = step == config.num_steps
      save_now = is_last or step % config.checkpoint_every == 0
      eval_now = is_last or step % config.eval_every == 0
      if save_now or eval_now or step % config.log_every == 0:
        losses = [float(loss) for loss in losses]
        _check_finite(step - len(losses) + 1, losses)
        # The loss is of the parameters before the step: it can be finite where the step's result is not.
        if (save_now or eval_now) and not _is_finite(state):
          raise ValueError(f'parameters are not finite after step {step}: stopped; the last checkpoint is from before')
        now = time.perf_counter()
        speed = len(losses) * config.batch_size * config.seq_len / (now - since)
        writer.write(step, {'train_loss': float(np.mean(losses)), 'tokens_per_second': speed})
        bar.update(task, completed=step, loss=float(np.mean(losses)), speed=speed)
        if eval_now:
          found = run_eval(state['params'], max_batches=config.eval_batches)
          writer.write(step, {f'held_out_{name}': value for name, value in found.items()})
          bar.console.print(f'step {step}: held-out ' + ', '.join(f'{k} {v:.3f}' for k, v in found.items()))
        if save_now:
          checkpoints.save(state)
        losses, since = [], time.perf_counter()
  final = run_eval(state['params'])
  writer.write(step, {f'final_{name}': value for name, value in final.items()})
  writer.close()
  checkpoints.close()
  model = transformer_model(state['params'], model_config)
  save_model(
    workdir / 'model', model, tokenizer, info={'text': origin, 'steps': step, 'held_out': final}, overwrite=True
  )
  return final
