"""Runs decoding methods over prompts and counts: `run_decode(DecodeOptions(...))`."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from etils import epath

import spectr_jax
from decode import metrics
from decode.prompts import Prompt, encode_prompts, read_prompts
from spectr_jax import METHODS, Generation, Method, Model, Tokenizer, TokenTree
from spectr_jax.methods import get_method

_ROOT = epath.Path(__file__).resolve().parent.parent
PRETRAINED = _ROOT / 'pretrained'
_MAX_NODES = 1024
_DTYPES = ('', 'float32', 'bfloat16')

Notify = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Setting:
  """A method with the drafts it gets: one row of the table.

  Attributes:
    method: The method.
    num_drafts: K, 0 for a method that drafts nothing.
    draft_length: L, likewise.
  """

  method: Method
  num_drafts: int
  draft_length: int

  @property
  def tree(self) -> TokenTree:
    return TokenTree.chains(self.num_drafts, self.draft_length) if self.num_drafts else TokenTree()

  @property
  def tree_name(self) -> str:
    return 'chains' if self.num_drafts else 'none'

  def __str__(self):
    return f'{self.method.name} K={self.num_drafts} L={self.draft_length}' if self.num_drafts else self.method.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions:
  """What to run; every field is a flag of `decode.main`.

  Attributes:
    target, draft: Directories of models.
    dtype: Type to compute in, '' for each model's own.
    method: Names of methods.
    num_drafts, draft_length: K and L, every pair of which is run.
    temperature, top_k, top_p: The law to sample from.
    prompt: One text to continue, or None.
    prompts: File of prompts, or None for the shipped ones; see `read_prompts`.
    num_prompts: How many of the file's prompts, from its beginning, at most.
    batch_size: Prompts decoded together, at most.
    max_new_tokens: Limit of each continuation.
    num_seeds, seed: Seeds `seed` to `seed + num_seeds - 1` are run.

  Raises:
    ValueError: A value is out of range; the message says what is allowed.
  """

  target: str = str(PRETRAINED / 'target')
  draft: str = str(PRETRAINED / 'draft')
  dtype: str = ''
  method: tuple[str, ...] = ('autoregressive', 'speculative', 'spectr')
  num_drafts: tuple[int, ...] = (4,)
  draft_length: tuple[int, ...] = (4,)
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  prompt: str | None = None
  prompts: str | None = None
  num_prompts: int = 32
  batch_size: int = 1
  max_new_tokens: int = 64
  num_seeds: int = 1
  seed: int = 0

  def __post_init__(self):
    if not self.method:
      raise ValueError(f'no method given; allowed: {", ".join(METHODS)}')
    for name in self.method:
      get_method(name)
    for name in ('num_drafts', 'draft_length'):
      values = getattr(self, name)
      if not values or min(values) < 1:
        raise ValueError(f'{name} must be whole numbers of at least 1, got {", ".join(map(str, values)) or "none"}')
    if max(self.num_drafts) * max(self.draft_length) > _MAX_NODES:
      raise ValueError(
        f'num_drafts times draft_length must be at most {_MAX_NODES}, got {max(self.num_drafts)} times'
        f' {max(self.draft_length)}'
      )
    if not (math.isfinite(self.temperature) and self.temperature >= 0):
      raise ValueError(f'temperature must be finite and at least 0, got {self.temperature}')
    if not 0 <= self.top_k < 2**31:
      raise ValueError(f'top_k must be at least 0 (0 keeps all) and below 2**31, got {self.top_k}')
    if not 0 < self.top_p <= 1:
      raise ValueError(f'top_p must be above 0 and at most 1, got {self.top_p}')
    for name in ('num_prompts', 'batch_size', 'max_new_tokens', 'num_seeds'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be at least 1, got {getattr(self, name)}')
    if self.seed < 0 or self.seed + self.num_seeds > 2**32:
      raise ValueError(f'seeds must be from 0 to 2**32 - 1, got {self.num_seeds} from {self.seed} on')
    if self.dtype not in _DTYPES:
      raise ValueError(f"dtype must be float32 or bfloat16, or '' for the model's own, got {self.dtype!r}")
    if self.prompt is not None and self.prompts is not None:
      raise ValueError('prompt and prompts are both given; choose one: a text, or a file of texts')

  @property
  def settings(self) -> list[Setting]:
    """The grid, in the order given; what a method cannot use collapses, so each setting is there once."""
    settings = []
    for method in map(get_method, self.method):
      if method.max_drafts == 0:
        settings.append(Setting(method, 0, 0))
        continue
      most = math.inf if method.max_drafts is None else method.max_drafts
      for draft_length in self.draft_length:
        settings.extend(Setting(method, min(num_drafts, most), draft_length) for num_drafts in self.num_drafts)
    return list(dict.fromkeys(settings))

  @property
  def seeds(self) -> range:
    return range(self.seed, self.seed + self.num_seeds)

  def read_prompts(self) -> list[Prompt]:
    """The prompts to continue."""
    if self.prompt is not None:
      return [Prompt(self.prompt)]
    path = PRETRAINED / 'prompts.jsonl' if self.prompts is None else self.prompts
    return read_prompts(path)[: self.num_prompts]


@dataclasses.dataclass(frozen=True)
class Measurement:
  """One setting on all prompts with one seed; P prompts.

  Attributes:
    setting, seed: What was run.
    tokens: int32 `[P, max_new_tokens]`, -1 after a row's end.
    origins: int32 `[P, max_new_tokens]`, as in `spectr_jax.Generation`.
    lengths: int32 `[P]`, tokens emitted.
    calls: int32 `[P]`, target calls.
    accepted_by_depth: int32 `[P, L]`.
    seconds: Wall time of all batches, prefill included and compilation not.
    rounds: Rounds the device ran: a batch runs until its last row is done.
  """

  setting: Setting
  seed: int
  tokens: np.ndarray
  origins: np.ndarray
  lengths: np.ndarray
  calls: np.ndarray
  accepted_by_depth: np.ndarray
  seconds: float
  rounds: int


@dataclasses.dataclass(frozen=True)
class Summary:
  """A setting's numbers, over one seed or several.

  Attributes:
    setting: What was run.
    num_tokens, num_calls: Tokens emitted and target calls.
    block_efficiency: Their ratio.
    interval: Its 95% interval over prompts, None for a single prompt.
    acceptance_by_position: `[L]`, the share of rounds that kept at least d + 1 drafted tokens.
    tokens_per_second: Compilation excluded.
    speedup: Tokens per second over those of autoregressive decoding, None if that was not run.
    round_cost: Time of a round over that of an autoregressive step, None if that was not run.
    tokens_per_round: Tokens per round and row, rows that wait for the rest of their batch counted.
  """

  setting: Setting
  num_tokens: int
  num_calls: int
  block_efficiency: float
  interval: tuple[float, float] | None
  acceptance_by_position: list[float]
  tokens_per_second: float
  speedup: float | None
  round_cost: float | None
  tokens_per_round: float


@dataclasses.dataclass(frozen=True)
class DecodeRun:
  """All that a run found.

  Attributes:
    options: What was asked for.
    info: Flags, versions, device and models, as JSON values.
    prompts: The prompts.
    tokenizer: The models' tokenizer.
    measurements: One per setting and seed.
    node_costs: Time of a target call on so many tokens over that on one; for settings slower than autoregressive.
  """

  options: DecodeOptions
  info: dict[str, Any]
  prompts: list[Prompt]
  tokenizer: Tokenizer
  measurements: list[Measurement]
  node_costs: dict[int, float] = dataclasses.field(default_factory=dict)

  def summarize(self, setting: Setting, seeds=None) -> Summary:
    """The numbers of one setting over `seeds`, by default all that were run."""
    seeds = self.options.seeds if seeds is None else seeds

    def select(is_wanted):
      return [found for found in self.measurements if found.seed in seeds and is_wanted(found.setting)]

    def speed(group):
      return sum(int(found.lengths.sum()) for found in group) / sum(found.seconds for found in group)

    def round_time(group):
      return sum(found.seconds for found in group) / sum(found.rounds for found in group)

    own = select(lambda other: other == setting)
    baseline = select(lambda other: other.method.max_drafts == 0)
    # Continuations of one prompt under several seeds are one unit of the sample.
    tokens, calls = sum(found.lengths for found in own), sum(found.calls for found in own)
    num_batches = -(-len(self.prompts) // self.options.batch_size)
    rows_per_batch = len(self.prompts) / num_batches
    return Summary(
      setting=setting,
      num_tokens=int(tokens.sum()),
      num_calls=int(calls.sum()),
      block_efficiency=metrics.block_efficiency(tokens, calls),
      interval=metrics.block_efficiency_interval(tokens, calls),
      acceptance_by_position=metrics.acceptance_by_position(sum(found.accepted_by_depth for found in own), calls),
      tokens_per_second=speed(own),
      speedup=speed(own) / speed(baseline) if baseline else None,
      round_cost=round_time(own) / round_time(baseline) if baseline else None,
      tokens_per_round=int(tokens.sum()) / (sum(found.rounds for found in own) * rows_per_batch),
    )


def _portable(path: str) -> str:
  """`path` as it reads on any machine, if it is a file of the repository."""
  return path.removeprefix(f'{_ROOT}/')


def _load_models(options: DecodeOptions) -> tuple[Model, Model | None, Tokenizer, dict[str, Any]]:
  """Target, draft (None if no method drafts), their tokenizer and a description of both."""
  info, models, tokenizers = {}, {}, {}
  for role in ('target', 'draft'):
    if role == 'draft' and not any(setting.num_drafts for setting in options.settings):
      continue
    path = getattr(options, role)
    model, tokenizer = spectr_jax.load_model(path, dtype=options.dtype or None)
    models[role], tokenizers[role] = model, tokenizer
    info[role] = {
      'path': _portable(path),
      'num_params': sum(leaf.size for leaf in jax.tree.leaves(model.params)),
      'dtype': spectr_jax.transformer.config_of(model).dtype,
      'tokenizer': tokenizer.fingerprint,
    }
  if len({tokenizer.fingerprint for tokenizer in tokenizers.values()}) > 1:
    raise ValueError(
      'target and draft must share a tokenizer, but their fingerprints differ: '
      + ', '.join(f'{tokenizer.fingerprint} in {getattr(options, role)}' for role, tokenizer in tokenizers.items())
    )
  return models['target'], models.get('draft'), tokenizers['target'], info


def _describe(options: DecodeOptions, models: dict[str, Any]) -> dict[str, Any]:
  device = jax.devices()[0]
  return {
    'flags': dataclasses.asdict(options) | {'target': _portable(options.target), 'draft': _portable(options.draft)},
    'versions': {
      'spectr_jax': spectr_jax.__version__,
      'python': platform.python_version(),
      'jax': jax.__version__,
      'jaxlib': jaxlib.__version__,
      'flax': flax.__version__,
      'numpy': np.__version__,
    },
    'device': {'platform': device.platform, 'kind': device.device_kind, 'num_cpus': os.cpu_count()},
    'models': models,
  }


def row_keys(seed: int, prompts: list[Prompt]) -> jax.Array:
  """One key per prompt, from the seed and the prompt's place in its file alone."""
  key = jax.random.fold_in(jax.random.key(0, impl='threefry2x32'), np.uint32(seed))
  return jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.array([prompt.index for prompt in prompts]))


def _measure_node_costs(
  target: Model, trees: list[TokenTree], *, batch_size: int, max_length: int, repeats: int = 15
) -> dict[int, float]:
  """Time of a target call on each tree, root included, over one on a single token; medians, taken in turns."""
  forward = jax.jit(lambda target, *args: target.apply(*args).logits)
  cache = target.init_cache_fn(batch_size, max_length)
  calls = {}
  for tree in (TokenTree(), *trees):
    positions = jnp.broadcast_to(jnp.asarray(tree.depths), (batch_size, tree.num_nodes + 1))
    arguments = target, jnp.zeros_like(positions), positions, jnp.asarray(tree.ancestors), cache
    calls[tree.num_nodes + 1] = functools.partial(forward, *arguments)
  times = {size: [] for size in calls}
  for call in calls.values():
    jax.block_until_ready(call())
  for _ in range(repeats):
    for size, call in calls.items():
      start = time.perf_counter()
      jax.block_until_ready(call())
      times[size].append(time.perf_counter() - start)
  one = float(np.median(times[1]))
  return {size: float(np.median(found)) / one for size, found in times.items()}


def run_decode(options: DecodeOptions, notify: Notify | None = None) -> DecodeRun:
  """Decodes every prompt with every setting and seed.

  A continuation depends on its prompt, its place in the file, the seed and the setting; not on the rest of the grid,
  and on the batch size only where rounding differs.

  Args:
    options: What to run.
    notify: Called with what is being done, batches done so far and batches in all.

  Returns:
    The continuations and what they took.

  Raises:
    ValueError: Prompts or models are unusable; the message says why.
  """
  notify = notify or (lambda what, done, total: None)
  prompts = options.read_prompts()
  target, draft, tokenizer, models = _load_models(options)
  used = [model for model in (target, draft) if model is not None and model.max_length is not None]
  tokens, lengths = encode_prompts(
    prompts,
    tokenizer,
    max_new_tokens=options.max_new_tokens,
    max_length=min((model.max_length for model in used), default=None),
  )
  batch_size = min(options.batch_size, len(prompts))
  # The last batch is filled up with copies of the last row, which take no round more than the row itself.
  batches = [
    np.minimum(np.arange(start, start + batch_size), len(prompts) - 1) for start in range(0, len(prompts), batch_size)
  ]
  settings = options.settings
  done, total = 0, len(settings) * options.num_seeds * len(batches)
  measurements = []

  def request(setting: Setting, keys, rows):
    return (keys[rows], target, draft, tokens[rows], lengths[rows]), {
      'method': setting.method,
      'tree': setting.tree,
      'max_new_tokens': options.max_new_tokens,
      'temperature': options.temperature,
      'top_k': options.top_k,
      'top_p': options.top_p,
      'eos_id': tokenizer.eos_id,
    }

  for setting in settings:
    notify(f'{setting}: compiling', done, total)
    args, kwargs = request(setting, row_keys(options.seed, prompts), batches[0])
    # One round compiles what `generate` runs.
    jax.block_until_ready(spectr_jax.decode_rounds(spectr_jax.init_decode(*args, **kwargs), 1).result)
    for seed in options.seeds:
      keys = row_keys(seed, prompts)
      generations, seconds = [], 0.0
      for rows in batches:
        notify(f'{setting}, seed {seed}', done, total)
        args, kwargs = request(setting, keys, rows)
        start = time.perf_counter()
        generation = jax.block_until_ready(spectr_jax.generate(*args, **kwargs))
        seconds += time.perf_counter() - start
        generations.append(jax.device_get(generation))
        done += 1
      rounds = sum(int(generation.num_target_calls.max()) for generation in generations)
      every: Generation = jax.tree.map(lambda *parts: np.concatenate(parts)[: len(prompts)], *generations)
      measurements.append(
        Measurement(
          setting=setting,
          seed=seed,
          tokens=every.tokens,
          origins=every.origins,
          lengths=every.lengths,
          calls=every.num_target_calls,
          accepted_by_depth=every.accepted_by_depth,
          seconds=seconds,
          rounds=rounds,
        )
      )
  run = DecodeRun(options, _describe(options, models), prompts, tokenizer, measurements)
  slow = [setting for setting in settings if setting.num_drafts and (run.summarize(setting).speedup or 1) < 1]
  if slow:
    notify("measuring the target's cost of a call", done, total)
    max_length = tokens.shape[1] + options.max_new_tokens
    trees = {setting.tree.num_nodes: setting.tree for setting in slow}
    costs = _measure_node_costs(target, list(trees.values()), batch_size=batch_size, max_length=max_length)
    run = dataclasses.replace(run, node_costs=costs)
  notify('done', total, total)
  return run
