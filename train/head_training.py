"""Training of a draft on text that its target writes. The command is `train.head`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import multihost

from spectr_jax import Drafter, Model
from spectr_jax.io.checksums import content_hash
from spectr_jax.io.heads.head_files import output_head_rows
from spectr_jax.io.model_files import ModelFiles, open_model
from spectr_jax.io.new_files import writing
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.io.untrusted import Kind, real, whole
from spectr_jax.models import causal_lm
from spectr_jax.sharding import DATA, is_primary, put, replicated
from train.draft_kind import DraftKind
from train.draft_model import ModelKind
from train.eagle3_head import Eagle3Kind
from train.head_data import Shard, generate_shard, shard_checksums
from train.head_step import HeadBatch, LossWeights, head_loss
from train.medusa_head import MedusaKind
from train.one_pass_head import OnePassKind
from train.run import Run, make_config_mesh
from train.run_record import check_fields
from train.step import make_optimizer, make_update, new_state
from train.text_sources import files_of

_MAX_OFFSET = 2**20
_WIDTH = 64  # texts of a batch are padded to a multiple of this
_DATA = 'the content of WORKDIR/data'
_TIMEOUT_MS = 24 * 3600 * 1000  # for the text of all processes
_KINDS: dict[str, type[DraftKind]] = {
  'eagle3': Eagle3Kind,
  'medusa': MedusaKind,
  'dspark': OnePassKind,
  'dflash': OnePassKind,
  'model': ModelKind,
}
_FLOATS = Kind('float32 or bfloat16', lambda x: x in ('float32', 'bfloat16'))
_FIELDS = {
  'kind': Kind(f'one of {", ".join(_KINDS)}', lambda x: x in _KINDS),
  **dict.fromkeys(('rows_per_shard', 'max_user_tokens', 'max_new_tokens'), whole(1)),
  'num_shards': whole(2),
  **dict.fromkeys(('tv_weight', 'user_temperature'), real(0)),
  'decay': Kind('above 0 and at most 1', lambda x: 0 < x <= 1),
  'temperatures': Kind('numbers of at least 0', lambda x: bool(x) and all(t >= 0 for t in x)),
  'dtype': _FLOATS,
  'data_dtype': _FLOATS,
}


def check_config(config) -> type[DraftKind]:
  """The kind of the draft; a `ValueError` names a field that is missing or invalid, as far as that is known without the
  target.
  """
  check_fields(config, _FIELDS)
  kind = _KINDS[config.kind]
  check_fields(config, kind.fields)
  return kind


def _target_hash(files: ModelFiles, target: Model, tokenizer: TokenizerBase) -> str:
  asked = []
  with contextlib.suppress(ValueError):  # it may have no chat template, if the text is there
    asked = tokenizer.encode_chat([{'role': 'user', 'content': 'red'}])
  about = json.dumps([dict(files.spec), tokenizer.fingerprint, list(tokenizer.eos_ids), asked], sort_keys=True)
  return content_hash([target.params, np.frombuffer(about.encode(), np.uint8)])


class _Data:
  """Shards of conversations in a folder, of which the first is held out. Hidden states are those of some layers."""

  def __init__(self, config, directory: epath.Path, layers: tuple[int, ...]):
    self.config, self.directory, self.layers = config, directory, layers
    self.shard = functools.lru_cache(maxsize=2)(self._load)  # the held-out one, and that of the step

  def path(self, number: int) -> epath.Path:
    return self.directory / f'shard_{number:05d}.npz'

  def _check(self, path: epath.Path) -> None:
    num_rows, _, num_stored, _ = Shard.load(path).features.shape
    num_layers = len(self.layers)
    # The last layer is the last one of every shard.
    if num_rows != self.config.rows_per_shard or not (num_stored == num_layers or self.layers == (-1,)):
      raise ValueError(
        f'{path} holds {num_rows} conversations with {num_stored} hidden states a token; this run needs'
        f' {self.config.rows_per_shard} with {num_layers}'
      )

  @property
  def is_begun(self) -> bool:
    return any(self.path(number).exists() for number in range(self.config.num_shards))

  def identity(self) -> str:
    """A hash of what all shards hold."""
    return content_hash([np.array(shard_checksums(self.path(n)), np.uint32) for n in range(self.config.num_shards)])

  def generate(self, target: Model, tokenizer: TokenizerBase) -> None:
    """Writes the missing shards, shared among processes; a `ValueError` if one is there of another experiment."""
    config = self.config
    for path in map(self.path, range(config.num_shards)):
      if path.exists():
        self._check(path)
    texts_of = self._user_texts()
    with writing(self.directory):
      self.directory.mkdir(parents=True, exist_ok=True)
    for number in range(jax.process_index(), config.num_shards, jax.process_count()):
      if self.path(number).exists():
        continue
      start = time.perf_counter()
      key = jax.random.fold_in(jax.random.key(config.seed), number)
      shard = generate_shard(target, tokenizer, config, self.layers, key, texts_of(number))
      shard.save(self.path(number))
      count = int((shard.lengths - shard.starts).sum())
      print(f'shard {number} of {config.num_shards}: {count:,} tokens in {time.perf_counter() - start:.0f} s')

  def _user_texts(self) -> Callable[[int], list[str] | None]:
    """The messages of a shard's user, by its number: None if the target writes them. Those held out are in no other."""
    config = self.config
    if not config.user_files:
      return lambda number: None
    texts, size = list(files_of(config.user_files).documents()), config.rows_per_shard
    if len(texts) < 2 * size:
      raise ValueError(
        f'config.user_files has {len(texts)} messages, and two shards take {2 * size}; a blank line ends a message'
      )
    order = np.random.default_rng(config.seed).permutation(len(texts))

    def texts_of(number):
      chosen = order[:size] if number == 0 else np.roll(order[size:], -(number - 1) * size)[:size]
      return [texts[i] for i in chosen]

    return texts_of

  def _load(self, number: int) -> Shard:
    shard = Shard.load(self.path(number))
    return dataclasses.replace(shard, features=shard.features[:, :, -len(self.layers) :])

  def target_ids(self, vocab_size: int, num_ids: int) -> np.ndarray:
    """The most frequent tokens of the training text, int32 `[num_ids]`, ascending."""
    counts = np.zeros(vocab_size, np.int64)
    for number in range(1, self.config.num_shards):
      shard = self._load(number)
      places = np.arange(shard.tokens.shape[1])
      is_own = (places >= shard.starts[:, None]) & (places < shard.lengths[:, None])
      counts += np.bincount(shard.tokens[is_own], minlength=vocab_size)[:vocab_size]
    return np.sort(np.argsort(-counts, kind='stable')[:num_ids]).astype(np.int32)

  def batch_at(self, step: int) -> HeadBatch:
    """The batch of a step, which depends on the seed and the step alone: rows of one shard that are of similar length.

    An epoch has all shards in a new order, and each of them cut into batches in another way.
    """
    num_rows, size, num_shards = self.config.rows_per_shard, self.config.batch_size, self.config.num_shards
    per_shard = num_rows // size
    epoch, place = divmod(step, per_shard * (num_shards - 1))
    place, at = divmod(place, per_shard)
    rng = np.random.default_rng((self.config.seed, epoch))
    number = int(rng.permutation(np.arange(1, num_shards))[place])
    rng = np.random.default_rng(rng.integers(0, 2**31, num_shards - 1)[place])
    order = np.argsort(self.shard(number).lengths + rng.integers(0, _WIDTH, num_rows), kind='stable')
    groups = rng.permutation(order[: per_shard * size].reshape(per_shard, size))
    offsets = rng.integers(0, _MAX_OFFSET, (per_shard, size))
    return self._batch(number, groups[at], offsets[at])

  def held_out(self) -> Iterator[HeadBatch]:
    size = self.config.batch_size
    order = np.argsort(self.shard(0).lengths, kind='stable')
    for start in range(0, len(order) - size + 1, size):
      yield self._batch(0, order[start : start + size], np.arange(start, start + size))

  def _batch(self, number: int, rows: np.ndarray, offsets: np.ndarray) -> HeadBatch:
    shard = self.shard(number)
    lengths = shard.lengths[rows]
    width = min(-(-int(lengths.max()) // _WIDTH) * _WIDTH, shard.tokens.shape[1])
    tokens, features = shard.tokens[rows, :width], shard.features[rows, :width]
    return HeadBatch(tokens, lengths, shard.starts[rows], features, offsets.astype(np.int32))


class HeadTraining(Run):
  """A run that trains a draft for a target, by an experiment as `configs/head.py` describes."""

  def __init__(self, config, target_path: epath.PathLike, workdir: epath.Path, *, allow_fallback: bool):
    kind = check_config(config)
    super().__init__(config, workdir, allow_fallback=allow_fallback)
    self.mesh = make_config_mesh(config)
    files = open_model(target_path)
    target, self.tokenizer = files.load(dtype=config.data_dtype, weights=None, mesh=None), files.tokenizer()
    try:
      target_config = causal_lm.config_of(target)
    except ValueError as error:
      raise ValueError(f'{target_path}: drafts are trained for public models; this one is {error}') from error
    self.draft = kind.of(config, target_config, files)
    # Before the text is written, which takes long.
    params, self.target_ids = None, None
    if config.init_from:
      try:
        params, self.target_ids = self.draft.load_params(config.init_from, target)
      except ValueError as error:
        raise ValueError(f'config.init_from: {error}') from error
    self.target_name, self.vocab_size = epath.Path(target_path).name, target.vocab_size
    self.data = _Data(config, workdir / 'data', self.draft.feature_layers)
    texts = files_of(config.user_files).describe() if config.user_files else {}
    content = {
      'the content of --target': _target_hash(files, target, self.tokenizer),
      'the content of config.user_files': [*texts.values()],
      'the content of config.init_from': '' if params is None else content_hash((params, self.target_ids)),
      _DATA: None,
    }
    with self.opened('train.head', content):
      self._prepare(target, params)

  def _prepare(self, target: Model, params: dict[str, Any] | None) -> None:
    config = self.config
    unembedding = output_head_rows(target, None, config.dtype)
    if not self.record.is_there:
      self.record.write()  # the text depends on it, and takes long
    self.data.generate(target.for_decoding(), self.tokenizer)
    # Some processes write for longer than others, for longer than a collective waits.
    multihost.get_barrier_sync_fn()(key='the text is written', timeout_ms=_TIMEOUT_MS)
    self.record.know(_DATA, self.data.identity())
    if self.target_ids is None and self.draft.num_ids is not None:
      self.target_ids = self.data.target_ids(target.vocab_size, self.draft.num_ids)
    rows = unembedding if self.target_ids is None else unembedding[:, self.target_ids]
    frozen = jax.tree.map(lambda x: x.astype(config.dtype), self.draft.frozen_params(target))
    frozen |= {'unembedding': rows}
    self.frozen = put(frozen, jax.tree.map(lambda _: replicated(self.mesh), frozen))
    optimizer = make_optimizer(config)

    def make_state():
      own = self.draft.init_params(jax.random.key(config.seed), target, rows) if params is None else params
      return new_state(own, optimizer)

    whole = replicated(self.mesh)
    places = jax.tree.map(lambda _: whole, jax.eval_shape(make_state))

    def init():
      # Updates donate the state, so it shares no array with the target.
      return put(jax.tree.map(jnp.copy, make_state()), places)

    self.begin(make_state, places, init)
    self._update = make_update(optimizer, self._differentiate, out_shardings=whole)
    self._measure = jax.jit(self._loss, out_shardings=whole)
    if is_primary():
      count = sum(x.size for x in jax.tree.leaves(self.state['params']))
      print(f'{count:,} trained parameters on {self.mesh.size} devices; at step {self.step}', flush=True)

  @property
  def has_data(self) -> bool:
    return self.data.is_begun

  @property
  def result(self) -> epath.Path:
    return self.workdir / self.draft.folder

  def _loss(self, params, frozen, batch):
    guesses, weights = self.draft.guesses(params, frozen, batch), LossWeights.of(self.config)
    return head_loss(guesses, frozen['unembedding'], batch, num_depths=self.draft.num_depths, weights=weights)

  def _differentiate(self, state, batch, frozen):
    (loss, _), grads = jax.value_and_grad(self._loss, has_aux=True)(state['params'], frozen, batch)
    return loss, grads

  def _place(self, batch: HeadBatch) -> HeadBatch:
    return put(batch, jax.tree.map(lambda _: NamedSharding(self.mesh, PartitionSpec(DATA)), batch))

  def evaluate(self) -> dict[str, float]:
    """Means over the held-out conversations: the loss, and by depth of the guess `acceptance_1`, `greedy_1`, ..."""
    totals, count, losses = {}, 0.0, []
    for batch in self.data.held_out():
      loss, means = jax.device_get(self._measure(self.state['params'], self.frozen, self._place(batch)))
      weight = means.pop('count')
      losses.append(float(loss))
      count = count + weight
      totals = {name: totals.get(name, 0.0) + weight * value for name, value in means.items()}
    held_out = {'loss': float(np.mean(losses))}
    for name, total in totals.items():
      held_out |= {f'{name}_{depth}': float(x) for depth, x in enumerate(total / count, start=1)}
    return held_out

  def drafter(self) -> Drafter:
    """The draft as it stands, with the target's rows for an output head if it has none of its own."""
    params, frozen = jax.device_get((self.state['params'], self.frozen))
    return self.draft.drafter(params, frozen, self.target_ids, self.vocab_size)

  def advance(self) -> jax.Array:
    self.state, loss = self._update(self.state, self._place(self.data.batch_at(self.step)), self.frozen)
    return loss

  def finish(self, held_out: dict[str, float] | None) -> dict[str, float]:
    final = self.evaluate() if held_out is None else held_out
    if is_primary():
      info = {'target': self.target_name, 'steps': self.step, 'held_out': final}
      self.draft.save(self.result, self.drafter(), self.tokenizer, info)
    multihost_utils.sync_global_devices('the draft is written')
    return final
