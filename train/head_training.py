"""Training of a head on a target's hidden states. The command is `train.head`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from common.command_line import parse_sizes
from spectr_jax.draft import Drafter, head_drafter
from spectr_jax.draft.head_drafter import config_of
from spectr_jax.io.heads.load import load_drafter
from spectr_jax.io.heads.save import save_drafter
from spectr_jax.io.load import load_model
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.model import Model
from spectr_jax.models import causal_lm, head
from spectr_jax.models.head import HeadConfig
from spectr_jax.sharding import DATA, is_primary, make_mesh, replicated
from train.checkpoint import Checkpoints
from train.head_data import Shard, Sizes, generate_shard
from train.head_step import HeadBatch, head_loss
from train.metrics import MetricWriter
from train.step import make_optimizer
from train.train import Outcome, check_losses, place, termination

_WIDTH = 64  # texts of a batch are padded to a multiple of this
_RULES = (
  *((name, 'at least 1', lambda x: x >= 1) for name in (
    'rows_per_shard', 'max_user_tokens', 'max_new_tokens', 'vocab_size', 'num_unrolled', 'batch_size', 'num_steps',
    'log_every', 'eval_every', 'checkpoint_every', 'keep_checkpoints',
  )),
  ('num_shards', 'at least 2', lambda x: x >= 2),
  *((name, 'finite and at least 0', lambda x: 0 <= x < math.inf) for name in (
    'seed', 'warmup_steps', 'weight_decay', 'tv_weight', 'user_temperature', 'mlp_dim',
  )),
  *((name, 'finite and above 0', lambda x: 0 < x < math.inf) for name in ('learning_rate', 'max_grad_norm')),
  ('adam_b2', 'at least 0 and below 1', lambda x: 0 <= x < 1),
  ('decay', 'above 0 and at most 1', lambda x: 0 < x <= 1),
  ('temperatures', 'numbers of at least 0', lambda x: len(x) and all(t >= 0 for t in x)),
  *((name, 'float32 or bfloat16', lambda x: x in ('float32', 'bfloat16')) for name in ('dtype', 'data_dtype')),
)  # fmt: skip


def check_config(config) -> None:
  """Checks the fields of an experiment, as `configs/head.py` describes them.

  Raises:
    ValueError: A field has an invalid value.
  """
  for name, allowed, is_valid in _RULES:
    if not is_valid(config[name]):
      raise ValueError(f'config.{name} must be {allowed}, got {config[name]}')
  if config.warmup_steps >= config.num_steps:
    raise ValueError(
      f'config.warmup_steps must be below config.num_steps, got {config.warmup_steps} and {config.num_steps}'
    )


def feature_layers(num_layers: int) -> tuple[int, int, int]:
  """The layers whose inputs EAGLE-3 reads: an early one, one in the middle and a late one.

  Args:
    num_layers: Layers of the target, at least 6.

  Raises:
    ValueError: There are fewer layers.
  """
  if num_layers < 6:
    raise ValueError(f'a head reads three layers of a target with at least 6; this one has {num_layers}')
  return 2, num_layers // 2, num_layers - 3


def head_config(config, target: causal_lm.CausalLMConfig) -> HeadConfig:
  """The head of an experiment.

  Args:
    config: The experiment.
    target: The target's sizes.
  """
  block = dataclasses.replace(
    target,
    num_layers=1,
    vocab_size=config.vocab_size,
    mlp_dim=config.mlp_dim or target.mlp_dim,
    dtype=config.dtype,
    cache_dtype=None,
    weights=None,
    kv_copies=1,
    windows=(),
    is_tied=False,
  )
  layers = feature_layers(target.num_layers)
  return HeadConfig(block, target.embed_dim, target.embed_dim, layers, has_unembedding=False)


def init_params(key: jax.Array, config: HeadConfig, target: Model, *, from_target: bool) -> dict[str, Any]:
  """The trained parameters at the beginning, in float32: all but the output head and the ids.

  Args:
    key: A typed key.
    config: The head.
    target: The target.
    from_target: Whether h begins as the last hidden state that is read, and the block as the target's last one, which
      reads h; else they are random. The output norm is the target's in any case.
  """
  wide = dataclasses.replace(config, block=dataclasses.replace(config.block, dtype='float32'))
  params = head.init_params(key, wide)
  for name in ('unembedding', 'target_ids'):
    params.pop(name, None)
  own = jax.tree.map(lambda x: x.astype(jnp.float32), target.params)
  params['output_norm'] = own['final_norm']
  if not from_target:
    return params
  width, last = config.block.embed_dim, own[f'layer_{causal_lm.config_of(target).num_layers - 1}']
  kernel = 0.1 * params['features']['kernel']
  params['features']['kernel'] = kernel.at[-width:].set(jnp.eye(width))
  for name in 'qkv':
    kernel = 0.3 * params['attention'][name]['kernel']
    params['attention'][name]['kernel'] = kernel.at[-width:].set(last['attention'][name]['kernel'])
  params['attention']['out'], params['hidden_norm'] = last['attention']['out'], last['attention_norm']
  if config.block.mlp_dim == causal_lm.config_of(target).mlp_dim:
    params |= {'mlp': last['mlp'], 'mlp_norm': last['mlp_norm']}
  return params


def load_params(path: epath.PathLike, config: HeadConfig, target: Model) -> tuple[dict[str, Any], np.ndarray]:
  """The trained parameters of a saved head in float32, as those of `init_params`, and the ids that it guesses.

  Args:
    path: The head, as for `load_drafter`.
    config: The head of the experiment, whose sizes it must have.
    target: The target.

  Raises:
    ValueError: There is no such head, or it has other sizes.
  """
  try:
    drafter = load_drafter(path, target, dtype='float32')
    found = config_of(drafter)
  except ValueError as error:
    raise ValueError(f'config.init_from: {path}: {error}') from error
  if found.block.vocab_size != config.block.vocab_size:
    raise ValueError(
      f'config.init_from: {path} guesses {found.block.vocab_size} tokens, but config.vocab_size is'
      f' {config.block.vocab_size}'
    )
  # The types are those of this run.
  block = dataclasses.replace(found.block, dtype=config.block.dtype, cache_dtype=config.block.cache_dtype)
  for one, other in ((block, config.block), (dataclasses.replace(found, block=config.block), config)):
    for field in dataclasses.fields(one):
      values = getattr(one, field.name), getattr(other, field.name)
      if values[0] != values[1]:
        raise ValueError(f'config.init_from: {path} has {field.name} {values[0]}, the head of this run {values[1]}')
  params = dict(drafter.params)
  del params['unembedding']  # the target's rows
  return params, np.asarray(params.pop('target_ids'))


class _Data:
  """Shards of conversations under `WORKDIR/data`, of which the first is held out."""

  def __init__(self, config, directory: epath.Path):
    self.config, self.directory = config, directory
    self._open: tuple[int, Shard] | None = None

  def path(self, number: int) -> epath.Path:
    return self.directory / f'shard_{number:05d}.npz'

  def generate(self, target: Model, tokenizer: TokenizerBase, layers: tuple[int, ...]) -> None:
    """Writes the shards that are missing; several processes share them."""
    config = self.config
    sizes = Sizes(
      config.rows_per_shard,
      config.max_user_tokens,
      config.max_new_tokens,
      config.user_temperature,
      tuple(config.temperatures),
    )
    self.directory.mkdir(parents=True, exist_ok=True)
    for number in range(jax.process_index(), config.num_shards, jax.process_count()):
      if self.path(number).exists():
        continue
      start = time.perf_counter()
      key = jax.random.fold_in(jax.random.key(config.seed), number)
      shard = generate_shard(target, tokenizer, sizes, layers, key)
      shard.save(self.path(number))
      count = int((shard.lengths - shard.starts).sum())
      print(f'shard {number} of {config.num_shards}: {count:,} tokens in {time.perf_counter() - start:.0f} s')

  def shard(self, number: int) -> Shard:
    if self._open is None or self._open[0] != number:
      self._open = number, Shard.load(self.path(number))
    return self._open[1]

  def target_ids(self, vocab_size: int, num_ids: int) -> np.ndarray:
    """The most frequent tokens of the training text, int32 `[num_ids]`, ascending."""
    counts = np.zeros(vocab_size, np.int64)
    for number in range(1, self.config.num_shards):
      shard = Shard.load(self.path(number))
      places = np.arange(shard.tokens.shape[1])
      is_own = (places >= shard.starts[:, None]) & (places < shard.lengths[:, None])
      counts += np.bincount(shard.tokens[is_own], minlength=vocab_size)[:vocab_size]
    return np.sort(np.argsort(-counts, kind='stable')[:num_ids]).astype(np.int32)

  def _batches_of(self, number: int, rng: np.random.Generator) -> list[tuple[int, np.ndarray]]:
    """Rows of similar lengths, in random order."""
    rows, size = self.config.rows_per_shard, self.config.batch_size
    order = np.argsort(self.shard(number).lengths + rng.integers(0, _WIDTH, rows), kind='stable')
    groups = [order[i : i + size] for i in range(0, rows - size + 1, size)]
    return [(number, groups[i]) for i in rng.permutation(len(groups))]

  def batches(self, first_step: int) -> Iterator[HeadBatch]:
    """Batches from a step on, without end; they depend on the seed and the step alone."""
    per_shard = self.config.rows_per_shard // self.config.batch_size
    per_epoch = per_shard * (self.config.num_shards - 1)
    epoch, at = divmod(first_step, per_epoch)
    while True:
      rng = np.random.default_rng((self.config.seed, epoch))
      order = rng.permutation(np.arange(1, self.config.num_shards))
      seeds = rng.integers(0, 2**31, len(order))
      for place_, number in enumerate(order):
        if at >= per_shard:
          at -= per_shard
          continue
        for shard, rows in self._batches_of(int(number), np.random.default_rng(seeds[place_]))[at:]:
          yield self.batch(shard, rows)
        at = 0
      epoch += 1

  def held_out(self) -> Iterator[HeadBatch]:
    size = self.config.batch_size
    order = np.argsort(self.shard(0).lengths, kind='stable')
    for start in range(0, len(order) - size + 1, size):
      yield self.batch(0, order[start : start + size])

  def batch(self, number: int, rows: np.ndarray) -> HeadBatch:
    shard = self.shard(number)
    longest = int(shard.lengths[rows].max())
    width = min(-(-longest // _WIDTH) * _WIDTH, shard.tokens.shape[1])
    return HeadBatch(shard.tokens[rows, :width], shard.lengths[rows], shard.starts[rows], shard.features[rows, :width])


class HeadTraining:
  """A training run: its data and program, its state, and its log.

  Args:
    config: The experiment, as `configs/head.py` describes.
    target_path: The target, as for `load_model`.
    workdir: Directory for data, checkpoints, metrics and the head.
    allow_fallback: Whether to continue from an older checkpoint if the newest is damaged.

  Raises:
    ValueError: The configuration, the target, the data or a checkpoint is unusable.
  """

  def __init__(self, config, target_path: epath.PathLike, workdir: epath.Path, *, allow_fallback: bool):
    check_config(config)
    self.config, self.workdir = config, workdir
    self.mesh = make_config_mesh(config)
    target, tokenizer = load_model(target_path, dtype=config.data_dtype)
    try:
      target_config = causal_lm.config_of(target)
    except ValueError as error:
      raise ValueError(f'{target_path}: heads are trained for public models; this one is {error}') from error
    self.head_config = head_config(config, target_config)
    if config.vocab_size > target.vocab_size:
      raise ValueError(f'config.vocab_size must be at most {target.vocab_size}, got {config.vocab_size}')
    # Before the text is written, which takes long.
    params, ids = load_params(config.init_from, self.head_config, target) if config.init_from else (None, None)
    self.target_name, self.vocab_size = epath.Path(target_path).name, target.vocab_size
    self.data = _Data(config, workdir / 'data')
    self.data.generate(target.for_decoding(), tokenizer, (*self.head_config.feature_layers, -1))
    multihost_utils.sync_global_devices('the data is written')
    self.target_ids = self.data.target_ids(target.vocab_size, config.vocab_size) if ids is None else ids
    self.frozen = jax.jit(self._frozen, out_shardings=replicated(self.mesh))(target.params, self.target_ids)
    self.optimizer = make_optimizer(config)
    make_state = functools.partial(self._init_state, target, params)
    whole = jax.tree.map(lambda _: replicated(self.mesh), jax.eval_shape(make_state))
    workdir.mkdir(parents=True, exist_ok=True)
    self.checkpoints = Checkpoints(workdir, config.keep_checkpoints)
    like = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(make_state), whole
    )
    self.state = self.checkpoints.restore(like, allow_fallback=allow_fallback)
    if self.state is None:
      self.state = place(make_state(), whole)
    self.step = int(self.state['step'])
    self.writer = MetricWriter(workdir, self.step) if is_primary() else None
    self._advance = jax.jit(self._update, donate_argnums=0)
    self._measure = jax.jit(self._loss)
    if is_primary():
      count = sum(x.size for x in jax.tree.leaves(self.state['params']))
      print(f'{count:,} trained parameters on {self.mesh.size} devices; at step {self.step}', flush=True)

  def _init_state(self, target: Model, params: dict[str, Any] | None) -> dict[str, Any]:
    if params is None:
      key = jax.random.key(self.config.seed)
      params = init_params(key, self.head_config, target, from_target=self.config.from_target)
    return {'params': params, 'opt_state': self.optimizer.init(params), 'step': jnp.zeros((), jnp.int32)}

  def _frozen(self, params, target_ids):
    # A head reads and writes with the target's own rows.
    head_rows = params['unembedding'].T if 'unembedding' in params else params['embedding']
    unembedding = jnp.take(head_rows, target_ids, axis=0).T
    frozen = {'embedding': params['embedding'], 'target_unembedding': unembedding, 'unembedding': unembedding}
    return jax.tree.map(lambda x: x.astype(self.config.dtype), frozen)

  def _loss(self, params, frozen, batch):
    config = self.config
    return head_loss(
      params, frozen, self.head_config, batch, num_steps=config.num_unrolled, decay=config.decay,
      tv_weight=config.tv_weight,
    )  # fmt: skip

  def _update(self, state, frozen, batch):
    (loss, _), grads = jax.value_and_grad(self._loss, has_aux=True)(state['params'], frozen, batch)
    updates, opt_state = self.optimizer.update(grads, state['opt_state'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {'params': params, 'opt_state': opt_state, 'step': state['step'] + 1}, loss

  def _place(self, batch: HeadBatch) -> HeadBatch:
    return place(batch, jax.tree.map(lambda _: NamedSharding(self.mesh, PartitionSpec(DATA)), batch))

  def evaluate(self) -> dict[str, float]:
    """Means over the held-out conversations: the loss, and by depth of the guess `acceptance_1`, `greedy_1`, ..."""
    totals, count, losses = {}, 0.0, []
    for batch in self.data.held_out():
      loss, means = jax.device_get(self._measure(self.state['params'], self.frozen, self._place(batch)))
      weight = means.pop('count')
      losses.append(float(loss))
      count = count + weight
      totals = {name: totals.get(name, 0.0) + weight * value for name, value in means.items()}
    found = {'loss': float(np.mean(losses))}
    for name, total in totals.items():
      found |= {f'{name}_{depth}': float(x) for depth, x in enumerate(total / count, start=1)}
    return found

  def drafter(self) -> Drafter:
    """The head as it stands, with the target's rows for its output head."""
    params = jax.device_get(self.state['params'])
    params |= {'unembedding': jax.device_get(self.frozen['unembedding']), 'target_ids': self.target_ids}
    shapes = head.param_shapes(self.head_config)
    params = jax.tree.map(lambda x, shape: jnp.asarray(x, shape.dtype), params, shapes)
    return head_drafter(params, self.head_config, self.vocab_size)

  def keep_head(self, found: dict[str, float]) -> None:
    """Writes the head to `WORKDIR/head`, in the format of EAGLE-3.

    Args:
      found: The held-out metrics.
    """
    if is_primary():
      info = {'target': self.target_name, 'steps': self.step, 'held_out': found}
      save_drafter(self.workdir / 'head', self.drafter(), info=info, overwrite=True)
    multihost_utils.sync_global_devices('the head is written')

  def run(self) -> Outcome:
    """Trains to the last step and writes the head; SIGTERM saves a checkpoint and ends the run."""
    config, found = self.config, None
    losses, since, stop_now = [], time.perf_counter(), False
    batches = self.data.batches(self.step)
    with termination(config.log_every) as is_told_to_stop, contextlib.closing(self.checkpoints):
      while self.step < config.num_steps and not stop_now:
        self.state, loss = self._advance(self.state, self.frozen, self._place(next(batches)))
        losses.append(loss)
        self.step += 1
        is_last = self.step == config.num_steps
        stop_now = is_told_to_stop(self.step)
        save_now = is_last or stop_now or self.step % config.checkpoint_every == 0
        eval_now = is_last or self.step % config.eval_every == 0
        if not (save_now or eval_now or self.step % config.log_every == 0):
          continue
        losses = [float(loss) for loss in losses]
        check_losses(self.step - len(losses) + 1, losses)
        metrics = {
          'train_loss': float(np.mean(losses)),
          'seconds_per_step': (time.perf_counter() - since) / len(losses),
        }
        if eval_now:
          found = self.evaluate()
          metrics |= {f'held_out_{name}': value for name, value in found.items()}
        if self.writer:
          self.writer.write(self.step, metrics)
          print(f'step {self.step}: ' + ', '.join(f'{k} {v:.3f}' for k, v in metrics.items()), flush=True)
        if save_now:
          self.checkpoints.save(self.state)
        losses, since = [], time.perf_counter()
    if self.writer:
      self.writer.close()
    if self.step < config.num_steps:
      return Outcome(self.step, None)
    found = self.evaluate() if found is None else found
    self.keep_head(found)
    return Outcome(self.step, found)


def make_config_mesh(config) -> Mesh:
  """The mesh that `config.mesh` describes; a batch must be possible to shard over it.

  Args:
    config: The experiment.

  Raises:
    ValueError: There is no such mesh, or a batch cannot be sharded over it.
  """
  mesh = make_mesh(parse_sizes(config.mesh))
  if config.batch_size % mesh.shape[DATA]:
    raise ValueError(f'a batch of {config.batch_size} rows cannot be sharded over {DATA}:{mesh.shape[DATA]}')
  return mesh
