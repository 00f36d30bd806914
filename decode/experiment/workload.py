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
from jax.sharding import Mesh

import spectr_jax
from common.text_files import Files
from decode.experiment.model_options import ROOT, SHIPPED_TARGET, ModelOptions
from decode.experiment.options import DecodeOptions
from decode.experiment.prompts import Prompt, encode_prompts, take_first, without_long
from decode.experiment.settings import Setting
from spectr_jax import (
  DecodeSharding,
  Drafter,
  Generation,
  Model,
  NotFiniteError,
  StopStrings,
  fit_draft,
  lookup_beside,
  lookup_drafter,
)
from spectr_jax.auto.trial import BatchedDecoding, take_keys
from spectr_jax.draft import as_drafter, lookup_corpus
from spectr_jax.draft.vocabulary_drafter import VocabularyDrafter
from spectr_jax.io.fit_draft import describe_vocabulary
from spectr_jax.io.heads.head_files import HeadFiles, open_head
from spectr_jax.io.tokenizer import TokenizerBase, first_difference
from spectr_jax.kernels import native
from spectr_jax.kernels.int8 import BLOCKS
from spectr_jax.models.layers import is_quantized

# Of the corpus that lookup searches.
_MOST_DOCUMENTS, _MOST_CHARACTERS = 2**22, 2**30
# Takes at most so many of the prompts.
Pick = Callable[[list[Prompt], int], list[Prompt]]


def portable(path: str) -> str:
  """The path relative to the repository if the file is in it, so that it reads the same on any machine."""
  return path.removeprefix(f'{ROOT}/')


def read_corpus(files: Files) -> list[str]:
  """The documents of prompt lookup's corpus; a `ValueError` where there is none, or more than a corpus holds."""
  documents, size = [], 0
  try:
    for document in files.documents():
      documents.append(document)
      size += len(document)
      if len(documents) > _MOST_DOCUMENTS or size > _MOST_CHARACTERS:
        raise ValueError(
          f'at most {_MOST_DOCUMENTS:,} documents of {_MOST_CHARACTERS:,} characters in all are searched'
        )
  except ValueError as error:
    raise ValueError(f'lookup_corpus: {error}') from error
  if not documents:
    raise ValueError(f'lookup_corpus: there is no text in {", ".join(files.patterns)}')
  return documents


def _dtype_of(model: Model) -> str:
  """The type that a model computes in: that of its embedded tokens, or where it has none to give, of its caches."""

  def example():
    if model.embed_fn is None:
      return model.init_cache_fn(1, 1).keys[0]
    return model.embed_fn(model.params, jnp.zeros((1,), jnp.int32))

  return jax.eval_shape(example).dtype.name


def _load_model(options: ModelOptions, path: str, mesh: Mesh | None) -> tuple[Model, TokenizerBase, dict[str, Any]]:
  has_blocks = path == options.target or path.endswith('.gguf')  # a draft of another format is as its files are
  weights = options.weights if has_blocks or options.weights != BLOCKS else ''
  model, tokenizer = spectr_jax.load_model(path, dtype=options.dtype or None, weights=weights or None, mesh=mesh)
  params = jax.tree.leaves(model.params, is_leaf=is_quantized)
  model = model.for_decoding()
  info = {
    'path': portable(path),
    'num_params': sum(array.size for array in params),
    'dtype': _dtype_of(model),
    'tokenizer': tokenizer.fingerprint,
  }
  return model, tokenizer, info | ({'weights': weights} if weights else {})


def _load_head(options: ModelOptions, head: HeadFiles, target: Model) -> tuple[Drafter, dict[str, Any]]:
  drafter = head.load(target, dtype=options.dtype or None)
  leaves = jax.tree.leaves(drafter, is_leaf=is_quantized)
  wide = [leaf for leaf in leaves if not is_quantized(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)]
  info = {
    'path': portable(options.draft_model),
    'num_params': head.num_params,
    'dtype': wide[0].dtype.name,
    'head': head.format,
  }
  return drafter.for_decoding(), info | ({'weights': BLOCKS} if any(map(is_quantized, leaves)) else {})


@dataclasses.dataclass(frozen=True)
class Models:
  """A target with its draft: a model, a `Drafter` if guesses come from the text or a head, None if no method drafts."""

  target: Model
  draft: Model | Drafter | None
  tokenizer: TokenizerBase
  info: dict[str, Any]  # of both models, and of the corpus of guesses from the text, as JSON values

  @property
  def context_length(self) -> int | None:
    """The most tokens that both models take; None for any number."""
    limits = [model.context_length for model in (self.target, self.draft) if model is not None]
    return min((limit for limit in limits if limit is not None), default=None)


def _fit_draft(
  options: ModelOptions, draft: Model, own: TokenizerBase, target: Model, tokenizer: TokenizerBase
) -> tuple[Model | Drafter, dict[str, Any]]:
  """The draft for the target, and what their vocabularies share if they are not the same.

  Raises:
    ValueError: Vocabularies share nothing, or differ and the target is the shipped one, since none is given.
  """
  pair = f'{options.target} and {options.draft_model}'
  if options.target == SHIPPED_TARGET and first_difference(tokenizer, own) is not None:
    raise ValueError(
      f'{pair} have different tokenizers; the target is the shipped one, since none is given: give --target'
    )
  try:
    fitted = fit_draft(draft, own, target, tokenizer)
  except ValueError as error:
    raise ValueError(f'{pair}: {error}') from error
  if isinstance(fitted, VocabularyDrafter):
    return fitted, {'vocabulary': describe_vocabulary(fitted, own)}
  return fitted, {}


def load_models(options: DecodeOptions, sharding: DecodeSharding | None = None) -> Models:
  """The models of a run; a `ValueError` where one cannot be read, or they share no token.

  Vocabularies may be padded to different sizes: the draft's is brought to the target's, whose distribution stays. A
  draft with another tokenizer guesses the tokens that both have. A model that `sharding` shards is read shard by shard.
  """
  pair = options.models
  files = Files(pair.lookup_corpus)
  documents = read_corpus(files) if files.patterns else []
  mesh = None if sharding is None else sharding.mesh
  target, tokenizer, description = _load_model(pair, pair.target, mesh)
  info = {'target': description}
  if not options.methods.needs_draft:
    return Models(target, None, tokenizer, info)
  draft = None
  if head := find_head(pair.target, pair.draft_model):
    draft, info['draft'] = _load_head(pair, head, target)
  elif path := pair.draft_model:
    is_divided = sharding is not None and sharding.is_draft_divided
    draft, own, info['draft'] = _load_model(pair, path, mesh if is_divided else None)
    draft, shared = _fit_draft(pair, draft, own, target, tokenizer)
    info['draft'] |= shared
  if pair.has_lookup:
    search: dict[str, Any] = {'lookup_max': pair.lookup_max, 'lookup_min': pair.lookup_min}
    if documents:
      ids = tokenizer.encode_batch(documents)
      search['corpus'] = lookup_corpus(ids)
      info['corpus'] = {
        'path': ','.join(map(portable, files.patterns)),
        'num_documents': len(ids),
        'num_tokens': sum(map(len, ids)),
        'sha256': files.describe(),
      }
    draft = lookup_drafter(target.vocab_size, **search) if draft is None else lookup_beside(draft, **search)
  return Models(target, draft, tokenizer, info)


def find_head(target: str, draft: str) -> HeadFiles | None:
  """The head that a draft is, or None if it is a model, or there is none.

  A head among the tensors of a model counts only where that model is the target: any other is a draft as a whole.
  """
  head = open_head(draft) if draft else None
  return None if head is not None and head.is_part and draft != target else head


def model_title(model: dict[str, Any], *, has_dtype: bool = False) -> str:
  """The path and the size of a model as `load_models` describes it, the format of a head; or those of a corpus."""
  if 'num_tokens' in model:
    return f'{model["path"]} ({model["num_tokens"]:,} tokens)'
  parts = [f'{model["num_params"] / 1e6:.1f}M', *([model['dtype']] if has_dtype else [])]
  if 'head' in model:
    parts.append(f'{model["head"]} head')
  if 'weights' in model:
    parts.append('weights in blocks, int8 activations' if model['weights'] == BLOCKS else f'{model["weights"]} weights')
  return f'{model["path"]} ({", ".join(parts)})'


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
      **({'products': native.form() or 'XLA'} if device.platform == 'cpu' else {}),
    },
  }


def describe(options: DecodeOptions, models: dict[str, Any]) -> dict[str, Any]:
  """Flags, versions, device and models, as JSON values."""
  flags = options.flags | {'target': portable(options.models.target), 'draft': portable(options.models.draft or '')}
  return {'flags': flags} | describe_machine(jax.device_count() if options.models.mesh else 1) | {'models': models}


def row_keys(seed: int, prompts: list[Prompt]) -> jax.Array:
  """One key per prompt, which depends only on the seed and the prompt's index in its file."""
  return _fold_in_indices(np.uint32(seed), np.array([prompt.index for prompt in prompts], np.int32))


@jax.jit
def _fold_in_indices(seed: jax.Array, indices: jax.Array) -> jax.Array:
  key = jax.random.fold_in(jax.random.key(0, impl='threefry2x32'), seed)
  return jax.vmap(lambda index: jax.random.fold_in(key, index))(indices)


def _rows_of(batch_size: int, num_prompts: int, sharding: DecodeSharding | None) -> int:
  size = min(batch_size, num_prompts)
  return size if sharding is None else sharding.round_up(size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload(BatchedDecoding):
  """Models and P prompts, with the models already sharded over the devices."""

  options: DecodeOptions
  tokenizer: TokenizerBase
  info: dict[str, Any]  # see `describe`
  prompts: list[Prompt]

  @classmethod
  def load(cls, options: DecodeOptions, *, is_local: bool = False, pick: Pick = take_first) -> Workload:
    """Reads models, and the prompts that `pick` takes; with `is_local` for each of several processes alone."""
    asked, sampling = options.prompts, options.sampling
    every = asked.read()
    sharding = options.models.make_sharding(asked.batch_size, is_local=is_local)
    models = load_models(options, sharding)
    target, draft, tokenizer = models.target, models.draft, models.tokenizer
    room = {'max_new_tokens': asked.max_new_tokens, 'max_length': models.context_length}
    fitting = without_long(every, tokenizer, **room) if asked.skip_long else every
    prompts = pick(fitting, asked.num_prompts)
    tokens, lengths = encode_prompts(prompts, tokenizer, **room, vocab_size=target.vocab_size)
    if sharding is not None:  # shards models once, not with every batch
      is_model = isinstance(draft, Model)
      target, drafter = sharding.put_models(target, as_drafter(draft))
      draft = drafter.model if drafter is not None and is_model else drafter
    info = describe(options, models.info) | {'num_long_prompts': len(every) - len(fitting)}
    return cls(
      target, draft, tokens, lengths, _rows_of(asked.batch_size, len(prompts), sharding), asked.max_new_tokens,
      sampling.params, tokenizer.eos_ids, asked.logprobs, sharding,
      options=options, tokenizer=tokenizer, info=info, prompts=prompts,
      constraint=sampling.make_constraint(tokenizer, target.vocab_size),
    )  # fmt: skip

  def take(self, num_prompts: int) -> Workload:
    firsts = {name: getattr(self, name)[:num_prompts] for name in ('prompts', 'tokens', 'lengths')}
    batch_size = _rows_of(self.options.prompts.batch_size, len(firsts['prompts']), self.sharding)
    return dataclasses.replace(self, **firsts, batch_size=batch_size)

  def at(self, temperature: float) -> Workload:
    options = self.options.replace(temperature=temperature)
    return dataclasses.replace(self, options=options, sampling=options.sampling.params)

  @property
  def seeds(self) -> range:
    return self.options.sampling.seeds

  def keys(self, seed: int) -> jax.Array:
    """One key per prompt."""
    return row_keys(seed, self.prompts)

  @property
  def stop(self) -> StopStrings | None:
    return self.options.prompts.make_stop(self.tokenizer)

  def generate(
    self, setting: Setting, keys: jax.Array, rows: np.ndarray, *, statistics: bool = False, num_samples: int = 1
  ) -> Generation:
    """Decodes prompts `rows` int `[B]` with `keys` `[P]`; stop texts end no row whose statistics are wanted."""
    try:
      return spectr_jax.generate(
        take_keys(keys, rows),
        self.target,
        setting.drafter(self.draft),
        self.tokens[rows],
        self.lengths[rows],
        method=setting.method,
        tree=setting.tree,
        max_new_tokens=self.max_new_tokens,
        num_samples=num_samples,
        sampling=self.sampling,
        constraint=self.constraint,
        eos_id=self.eos_ids,
        stop=None if statistics else self.stop,
        statistics=statistics,
        logprobs=self.logprobs,
        sharding=self.sharding,
      )
    except NotFiniteError as error:
      raise ValueError(f'{setting}, prompt {self.prompts[rows[error.row // num_samples]].id}: {error}') from error
