"""Training of a language model. The command is `train.main`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich import console

from common.progress_bar import ProgressBar
from spectr_jax import Model, Tokenizer, load_model, save_model
from spectr_jax.io.checksums import content_hash
from spectr_jax.io.model_files import load_own
from spectr_jax.io.tokenizer import first_difference
from spectr_jax.io.untrusted import Kind, whole
from spectr_jax.models.causal_lm import causal_lm, config_of
from spectr_jax.models.causal_lm_config import CausalLMConfig, lm1b_config
from spectr_jax.models.transformer import init_params
from spectr_jax.sharding import is_primary, put, shardings
from train import plan
from train.checkpoint import reason_of
from train.evaluate import evaluate
from train.input_pipeline import batch_at, load_packed
from train.run import Outcome, Run, Show, make_config_mesh
from train.run_record import check_fields
from train.step import Learner, Teacher, batch_sharding, init_state, make_optimizer, make_train_step
from train.text_sources import TextSource, make_source

_FIELDS = {
  **dict.fromkeys(('seq_len', 'num_microbatches', 'eval_batches'), whole(1)),
  'patience': whole(),
  'dropout': Kind('at least 0 and below 1', lambda x: 0 <= x < 1),
  'held_out_percent': Kind('above 0 and below 100', lambda x: 0 < x < 100),
  'distill_weight': Kind('above 0 and at most 1', lambda x: 0 < x <= 1),
  'distill_dtype': Kind("float32, bfloat16 or empty for the teacher's own", lambda x: x in ('', 'float32', 'bfloat16')),
}


def check_config(config) -> CausalLMConfig:
  """The network's sizes; a `ValueError` names an invalid field, as far as that is known without reading a file."""
  check_fields(config, _FIELDS)
  if config.batch_size % config.num_microbatches:
    raise ValueError(
      f'config.batch_size {config.batch_size} must be a multiple of config.num_microbatches {config.num_microbatches}'
    )
  try:
    return lm1b_config(config.vocab_size, context_length=config.seq_len, **config.model)
  except (TypeError, ValueError) as error:
    raise ValueError(f'config.model: {error}') from error


def check_teacher(config, teacher_config: CausalLMConfig) -> None:
  """Refuses a teacher of another vocabulary or a shorter context than those of `config`, with a `ValueError`."""
  if teacher_config.vocab_size != config.vocab_size:
    raise ValueError(
      f'{config.distill_from} has {teacher_config.vocab_size} tokens, config.vocab_size is {config.vocab_size}'
    )
  if teacher_config.context_length < config.seq_len:
    raise ValueError(
      f'{config.distill_from} was trained at {teacher_config.context_length} tokens, config.seq_len is {config.seq_len}'
    )


def read_teacher(config, tokenizer: Tokenizer) -> Model | None:
  """The teacher that `config.distill_from` names, None for an empty field; a `ValueError` if there is no such model, or
  it has another tokenizer than the learner or a shorter context.
  """
  if not config.distill_from:
    return None
  model, other = load_own(config.distill_from, dtype=config.distill_dtype or None)
  if other.fingerprint != tokenizer.fingerprint:
    raise ValueError(f'{config.distill_from} has another tokenizer than {config.tokenizer}')
  check_teacher(config, config_of(model))
  return model


def _sizes(params: Any, init_cache: Callable) -> dict[str, tuple[int, ...]]:
  """The shapes of parameters and of a cache, which shows the heads, by their places."""
  leaves = jax.tree_util.tree_leaves_with_path((params, jax.eval_shape(lambda: init_cache(1, 1))))
  return {jax.tree_util.keystr(keys[1:], simple=True, separator='/'): leaf.shape for keys, leaf in leaves}


def read_start(config, tokenizer: Tokenizer, like: Model) -> Any:
  """The parameters that `config.init_from` names, in float32, None for an empty field; a `ValueError` if there is no
  such model, or it has another tokenizer or other sizes than `like`.
  """
  if not config.init_from:
    return None
  try:
    model, other = load_model(config.init_from, dtype='float32')
    if first_difference(tokenizer, other) is not None:
      raise ValueError(f'it has another tokenizer than {config.tokenizer}')
    found, wanted = (_sizes(each.params, each.init_cache_fn) for each in (model, like))
    for name in sorted(wanted.keys() | found.keys()):
      if found.get(name) != wanted.get(name):
        raise ValueError(f'{name} has shape {found.get(name)}, and in this configuration {wanted.get(name)}')
  except ValueError as error:
    raise ValueError(f'config.init_from: {config.init_from}: {error}') from error
  return model.params


def make_teacher(config, model: Model, mesh: Mesh) -> Teacher:
  return Teacher(put(model.params, shardings(mesh, model.params)), config_of(model), config.distill_weight)


class _Training(Run):
  def __init__(self, config, workdir: epath.Path, *, allow_fallback: bool):
    super().__init__(config, workdir, allow_fallback=allow_fallback)
    self.model_config = check_config(config)
    self.tokenizer = Tokenizer.load(config.tokenizer)
    if self.tokenizer.vocab_size != config.vocab_size:
      raise ValueError(
        f'{config.tokenizer} has {self.tokenizer.vocab_size} tokens but config.vocab_size is {config.vocab_size}'
      )
    self.mesh = make_config_mesh(config)
    source = make_source(config)
    teacher = read_teacher(config, self.tokenizer)
    like = jax.eval_shape(lambda: causal_lm(init_params(jax.random.key(0), self.model_config), self.model_config))
    start = read_start(config, self.tokenizer, like)
    origin = source.describe()
    content = {
      'the content of the text': list(origin.values()),
      'the content of config.tokenizer': self.tokenizer.fingerprint,
      'the content of config.distill_from': content_hash(teacher.params) if teacher else '',
      'the content of config.init_from': '' if start is None else content_hash(start),
    }
    with self.opened('train.main', content):
      self._prepare(source, origin, teacher, start)

  def _prepare(self, source: TextSource, origin: dict[str, str], teacher: Model | None, start: Any):
    config, self.origin = self.config, origin
    optimizer = make_optimizer(config)
    make_state = functools.partial(init_state, config.seed, optimizer, self.model_config)
    self.sharding = shardings(self.mesh, jax.eval_shape(make_state))
    cache_dir = epath.Path(config.cache_dir or self.workdir / 'data')
    self.text, self.held_out = load_packed(source, self.tokenizer, cache_dir, origin)
    for part, packed in (('training', self.text), ('held-out', self.held_out)):
      packed.check(config.seq_len, part)
    self.teacher = None if teacher is None else make_teacher(config, teacher, self.mesh)
    self.learner = Learner(self.model_config, self.tokenizer.bos_id, self.mesh, config.remat, config.dropout)
    self.train_step = make_train_step(optimizer, self.learner, seed=config.seed)
    init = None
    if start is not None:
      init = functools.partial(jax.jit(lambda params: make_state(params=params), out_shardings=self.sharding), start)
    self.begin(make_state, self.sharding, init)
    # The host keeps its own copies, so that no step waits for the one before it.
    self.best_loss, self.best_step = float(self.state['best_loss']), int(self.state['best_step'])
    if is_primary():
      shape = ' x '.join(f'{name} {size}' for name, size in self.mesh.shape.items())
      print(
        f'{self.model_config.num_params:,} parameters on {self.mesh.size} devices ({shape});'
        f' {len(self.text.tokens):,} training tokens from {source.name}; at step {self.step}'
      )

  @property
  def result(self) -> epath.Path:
    return self.workdir / 'model'

  @property
  def is_over(self) -> bool:
    config = self.config
    has_best = config.patience and self.best_step
    is_patience_over = has_best and self.step - self.best_step >= config.patience * config.eval_every
    return bool(super().is_over or is_patience_over)

  def advance(self) -> jax.Array:
    config = self.config
    rows = batch_at(
      self.text, self.step, batch_size=config.batch_size, seq_len=config.seq_len, seed=config.seed,
      num_microbatches=config.num_microbatches, sharding=batch_sharding(self.mesh),
    )  # fmt: skip
    self.state, loss = self.train_step(self.state, rows, self.teacher)
    return loss

  def rates(self, seconds_per_step: float) -> dict[str, float]:
    config = self.config
    # The model's FLOPs without recomputation; divided by the device's peak they give model FLOP utilisation.
    flops = plan.train_flops(self.model_config, config.batch_size, config.seq_len)
    return {
      'tokens_per_second': config.batch_size * config.seq_len / seconds_per_step,
      'teraflops_per_device': flops / seconds_per_step / self.mesh.size / 1e12,
    }

  def _evaluate(self, max_batches: int | None = None) -> dict[str, float]:
    config = self.config
    return evaluate(
      self.state['params'], text=self.held_out, learner=dataclasses.replace(self.learner, remat=False),
      seq_len=config.seq_len, batch_size=config.batch_size // config.num_microbatches, max_batches=max_batches,
      teacher=self.teacher,
    )  # fmt: skip

  def evaluate(self) -> dict[str, float]:
    return self._evaluate(self.config.eval_batches * self.config.num_microbatches)

  @contextlib.contextmanager
  def showing(self) -> Iterator[Show]:
    bar = ProgressBar(console.Console(quiet=not is_primary()), transient=False)

    def show(metrics, held_out):
      said = f'loss {metrics["train_loss"]:.3f}  {metrics["tokens_per_second"]:,.0f} tokens/s'
      bar.show('training', self.step, self.config.num_steps, said)
      if held_out:
        bar.console.print(f'step {self.step}: held-out ' + ', '.join(f'{k} {v:.3f}' for k, v in held_out.items()))

    bar.show('training', self.step, self.config.num_steps, 'compiling the first step')
    with bar:
      yield show

  def keep_model(self, step: int, held_out: dict[str, float]) -> None:
    """Writes the current model to `WORKDIR/model`."""
    params = multihost_utils.process_allgather(self.state['params'], tiled=True)
    if is_primary():
      model = causal_lm(params, self.model_config)
      info = {'text': self.origin, 'steps': step, 'held_out': held_out}
      try:
        save_model(self.result, model, self.tokenizer, info=info, overwrite=True)
      except Exception as error:  # storage may raise any type
        raise ValueError(
          f'cannot write {self.result} ({reason_of(error)}); what was there and the checkpoints are kept'
        ) from error
    multihost_utils.sync_global_devices('the model is written')

  def keep_if_best(self, held_out: dict[str, float]) -> None:
    if self.config.patience and held_out['loss'] < self.best_loss:
      best = {'best_loss': np.float32(held_out['loss']), 'best_step': np.int32(self.step)}
      self.best_loss, self.best_step = float(best['best_loss']), self.step
      self.state |= put(best, {name: self.sharding[name] for name in best})
      self.keep_model(self.step, held_out)

  def finish(self, held_out: dict[str, float] | None) -> dict[str, float]:
    """Evaluates the model on all held-out text and writes it. With `config.patience` this is the best model."""
    del held_out  # of some held-out text
    if self.config.patience and self.best_step:
      best = load_own(self.result)[0].params
      self.state['params'], self.step = put(best, self.sharding['params']), self.best_step
    final = self._evaluate()
    self.keep_model(self.step, final)
    return final


def train(config, workdir: epath.PathLike, *, allow_fallback: bool = False) -> Outcome:
  """Trains to `config.num_steps`, continuing from the newest checkpoint under `workdir` if there is one.

  On the same mesh, an interrupted and continued run ends with the same parameters as an uninterrupted one. On another
  mesh sums have another order. SIGTERM or Ctrl-C saves a checkpoint and ends the run. The trained model is written to
  `WORKDIR/model`; with `config.patience` it is the best of the evaluated models and exists from the first evaluation
  on. With several processes (`jax.distributed`) each calls this function.

  Args:
    config: The experiment, as `configs/base.py` describes.
    workdir: Directory for checkpoints, metrics, encoded text and the model.
    allow_fallback: Whether to continue from an older checkpoint if the newest is damaged.

  Raises:
    ValueError: The configuration, its files or a checkpoint is unusable, or the loss is not finite.
  """
  return _Training(config, epath.Path(workdir), allow_fallback=allow_fallback).run()
