"""The models and prompts of a run, and decoding of a setting on them."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import spectr_jax
from decode.experiment.options import ROOT, DecodeOptions
from decode.experiment.prompts import Prompt, encode_prompts, without_long
from decode.experiment.settings import Setting
from spectr_jax import Generation, Model, Tokenizer
from spectr_jax.draft import model_drafter
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.result import NotFiniteError
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.engine.state import DecodeState

# The current activity, the steps done, and the steps in total.
Notify = Callable[[str, int, int], None]


def portable(path: str) -> str:
  """The path relative to the repository if the file is in it, so that it reads the same on any machine."""
  return path.removeprefix(f'{ROOT}/')


def load_models(options: DecodeOptions) -> tuple[Model, Model | None, Tokenizer, dict[str, Any]]:
  """The target, the draft (None if no method drafts), their tokenizer and a description of both models.

  Raises:
    ValueError: A model cannot be read, or the two have different tokenizers.
  """
  info, models, tokenizers = {}, {}, {}
  for role in ('target', 'draft'):
    if role == 'draft' and not options.needs_draft:
      continue
    path = getattr(options, role)
    model, tokenizer = spectr_jax.load_model(path, dtype=options.dtype or None)
    config = spectr_jax.transformer.config_of(model)
    models[role], tokenizers[role] = spectr_jax.transformer.for_decoding(model), tokenizer
    info[role] = {
      'path': portable(path),
      'num_params': config.num_params,
      'dtype': config.dtype,
      'tokenizer': tokenizer.fingerprint,
    }
  if len({tokenizer.fingerprint for tokenizer in tokenizers.values()}) > 1:
    raise ValueError(
      'target and draft must share a tokenizer, but their fingerprints differ: '
      + ', '.join(f'{tokenizer.fingerprint} in {getattr(options, role)}' for role, tokenizer in tokenizers.items())
    )
  return models['target'], models.get('draft'), tokenizers['target'], info


def describe_machine(num_devices: int = 1) -> dict[str, Any]:
  """Versions, the kind of device, and the number of devices used, as JSON values."""
  device = jax.devices()[0]
  return {
    'versions': {
      'spectr_jax': spectr_jax.__version__,
      'python': platform.python_version(),
      'jax': jax.__version__,
      'jaxlib': jaxlib.__version__,
      'flax': flax.__version__,
      'numpy': np.__version__,
    },
    'device': {
      'platform': device.platform,
      'kind': device.device_kind,
      'num_cpus': os.cpu_count(),
      'num_devices': num_devices,
    },
  }


def describe(options: DecodeOptions, models: dict[str, Any]) -> dict[str, Any]:
  """Flags, versions, device and models, as JSON values.

  Args:
    options: The options.
    models: Descriptions of the models, from `load_models`.
  """
  flags = dataclasses.asdict(options) | {'target': portable(options.target), 'draft': portable(options.draft)}
  return {'flags': flags} | describe_machine(jax.device_count() if options.mesh else 1) | {'models': models}


def row_keys(seed: int, prompts: list[Prompt]) -> jax.Array:
  """One key per prompt, which depends only on the seed and the prompt's index in its file.

  Args:
    seed: The seed.
    prompts: The prompts.
  """
  key = jax.random.fold_in(jax.random.key(0, impl='threefry2x32'), np.uint32(seed))
  return jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.array([prompt.index for prompt in prompts]))


@dataclasses.dataclass(frozen=True)
class Workload:
  """Models and P prompts, with the models already sharded over the devices.

  Attributes:
    options: The options.
    target, draft: The models. The draft is None if no method drafts.
    tokenizer: The models' tokenizer.
    info: The description of the run, see `describe`.
    prompts: The prompts.
    tokens, lengths: The prompts' token ids, int32 `[P, longest]`, and lengths, int32 `[P]`.
    sharding: The sharding of the work, None for one device.
  """

  options: DecodeOptions
  target: Model
  draft: Model | None
  tokenizer: Tokenizer
  info: dict[str, Any]
  prompts: list[Prompt]
  tokens: np.ndarray
  lengths: np.ndarray
  sharding: DecodeSharding | None

  @classmethod
  def load(cls, options: DecodeOptions, *, is_local: bool = False) -> Workload:
    """Reads prompts and models.

    Args:
      options: The options.
      is_local: Whether each of several processes decodes by itself, on its own devices.

    Raises:
      ValueError: Prompts or models are unusable; the message says why.
    """
    every = options.read_prompts()
    sharding = options.make_sharding(is_local=is_local)
    target, draft, tokenizer, models = load_models(options)
    limits = [model.context_length for model in (target, draft) if model is not None]
    limits = [limit for limit in limits if limit is not None]
    room = {'max_new_tokens': options.max_new_tokens, 'max_length': min(limits, default=None)}
    fitting = without_long(every, tokenizer, **room) if options.skip_long else every
    prompts = fitting[: options.num_prompts]
    tokens, lengths = encode_prompts(prompts, tokenizer, **room)
    if sharding is not None:  # shards models once, not with every batch
      target, drafter = sharding.put_models(target, None if draft is None else model_drafter(draft))
      draft = None if drafter is None else drafter.params
    info = describe(options, models) | {'num_long_prompts': len(every) - len(fitting)}
    return cls(options, target, draft, tokenizer, info, prompts, tokens, lengths, sharding)

  @property
  def is_joint(self) -> bool:
    """True if several processes decode together."""
    return self.sharding is not None and len({device.process_index for device in self.sharding.mesh.devices.flat}) > 1

  @property
  def batch_size(self) -> int:
    size = min(self.options.batch_size, len(self.prompts))
    return size if self.sharding is None else self.sharding.round_up(size)

  @property
  def batches(self) -> list[np.ndarray]:
    """Indices of the prompts of each batch. The last batch is padded with copies of the last prompt.

    A padding copy never needs more rounds than its original.
    """
    starts, last = range(0, len(self.prompts), self.batch_size), len(self.prompts) - 1
    return [np.minimum(np.arange(start, start + self.batch_size), last) for start in starts]

  def take(self, num_prompts: int) -> Workload:
    """The same workload with the first `num_prompts` prompts only."""
    firsts = {name: getattr(self, name)[:num_prompts] for name in ('prompts', 'tokens', 'lengths')}
    return dataclasses.replace(self, **firsts)

  @property
  def cache_size(self) -> int:
    """Committed tokens that a row's caches hold."""
    return self.tokens.shape[1] + self.options.max_new_tokens

  def keys(self, seed: int) -> jax.Array:
    """One key per prompt."""
    return row_keys(seed, self.prompts)

  @property
  def _sampling(self) -> dict[str, Any]:
    return {name: getattr(self.options, name) for name in ('temperature', 'top_k', 'top_p')}

  def _request(self, setting: Setting, statistics: bool) -> dict[str, Any]:
    return {
      'method': setting.method,
      'tree': setting.tree,
      'max_new_tokens': self.options.max_new_tokens,
      'eos_id': self.tokenizer.eos_id,
      'statistics': statistics,
      'sharding': self.sharding,
    }

  def decoder(self, setting: Setting, *, statistics: bool = False) -> Decoder:
    """The decoder of a setting.

    Args:
      setting: The setting.
      statistics: Whether to collect statistics of the positions visited.
    """
    return Decoder.make(self.target, self.draft, cache_size=self.cache_size, **self._request(setting, statistics))

  def init(self, decoder: Decoder, keys: jax.Array, rows: np.ndarray) -> DecodeState:
    """The state of a batch before its first round.

    Args:
      decoder: A decoder of this workload.
      keys: `[P]`, one key per prompt.
      rows: int `[B]`, indices of the batch's prompts.
    """
    return spectr_jax.init_decode(decoder, keys[rows], self.tokens[rows], self.lengths[rows], **self._sampling)

  def generate(self, setting: Setting, keys: jax.Array, rows: np.ndarray, *, statistics: bool = False) -> Generation:
    """Decodes a batch.

    Args:
      setting: The setting.
      keys: `[P]`, one key per prompt.
      rows: int `[B]`, indices of the batch's prompts.
      statistics: Whether to collect statistics of the positions visited.

    Raises:
      ValueError: A model gives logits that are not finite; the message names setting and prompt.
    """
    request = self._request(setting, statistics) | self._sampling
    try:
      return spectr_jax.generate(keys[rows], self.target, self.draft, self.tokens[rows], self.lengths[rows], **request)
    except NotFiniteError as error:
      raise ValueError(f'{setting}, prompt {self.prompts[rows[error.row]].id}: {error}') from error
