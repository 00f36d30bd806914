"""The part of `benchmarks.speed` about sizes of public models: a target, a draft and a head with random weights.

No checkpoint is read and none is written: the sizes come from `config.json`, and the weights are made on the device.
For each number of rows a step of autoregressive decoding is measured beside its floor, and rounds of `spectr` and
`race_traversal` with the draft and with the head, whole and by parts; then some rounds are profiled. The floor is the
time to read what a step reads of the target's weights, at the rate of a copy in the same process; caches do not count.
Random models agree only by chance, so a round is what counts, and not the tokens that it keeps. Parts are programs of
their own: on a GPU each has its launch and waits for the host, which within a round are hidden in part. So rounds that
keep no guess are measured as well. What a round takes longer is the share of its verification within the loop.

The results are written after every measurement. Those that are there are not measured again, so that a run that was
ended goes on with the same command.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from benchmarks import real_models, speed
from benchmarks.memory_rates import copy_rate
from benchmarks.sizes_in_words import OWN, PEER, Result, describe, describe_ratios, describe_shares
from benchmarks.unverified import UNVERIFIED
from common.output_files import OutputFiles
from configs import head as head_experiment
from decode.experiment import latency
from decode.experiment.workload import describe_machine
from spectr_jax import Decoder, Model, TokenTree
from spectr_jax.draft import Drafter, head_drafter
from spectr_jax.io.foreign import LARGE, map_of, object_of, read_object
from spectr_jax.io.hub.load import read_hub_config
from spectr_jax.methods import Method
from spectr_jax.models import causal_lm, head
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.head import HeadConfig
from train import eagle3_head

SEED = 0
METHODS = 'race_traversal', 'spectr'
NUM_ROUNDS = 16  # of a timed run
PROFILED = 'race_traversal'
HEAD_TOKENS = 32000  # tokens that the head guesses, as EAGLE-3 has them


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What is measured.

  Attributes:
    target: Folder with the target's `config.json`.
    draft: The same for the draft.
    has_head: Whether a head of EAGLE-3's sizes drafts as well.
    dtype: Type of weights and activations.
    batch_sizes: Numbers of rows.
    shapes: K drafts of L tokens of each kind of round; a single draft of the first one's length is compared with the
      peer, the second shape, if there are several, is profiled.
    num_runs: Timed runs of each measurement.
    peer_device: Where Hugging Face's transformers run, `cuda` or `cpu`; None to leave them out.
  """

  target: str
  draft: str
  has_head: bool
  dtype: str
  batch_sizes: tuple[int, ...]
  shapes: tuple[tuple[int, int], ...]
  num_runs: int
  peer_device: str | None


def parse_shapes(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
  """The shapes of rounds from texts such as `4x8`, four drafts of eight tokens.

  Args:
    texts: The texts, at least one.

  Raises:
    ValueError: A text is of another form.
  """
  matches = [re.fullmatch(r'([1-9]\d*)x([1-9]\d*)', text) for text in texts]
  if not texts or None in matches:
    raise ValueError(f'shapes: expected drafts x tokens such as 4x8, got {",".join(texts)!r}')
  return tuple((int(match[1]), int(match[2])) for match in matches if match)


@dataclasses.dataclass(frozen=True)
class Models:
  """The target and what drafts for it, by name."""

  target: Model
  drafts: dict[str, Model | Drafter]


@dataclasses.dataclass(frozen=True)
class Rounds:
  """Rounds with K drafts of L tokens.

  Attributes:
    batch_size: Rows.
    draft: The name of what drafts.
    num_drafts: K.
    draft_length: L.
  """

  batch_size: int
  draft: str
  num_drafts: int
  draft_length: int

  def __str__(self) -> str:
    return f'{self.num_drafts} x {self.draft_length}, {self.draft}, {self.batch_size} rows'

  def begin(self, models: Models, method: str | Method) -> tuple[Decoder, np.ndarray]:
    """Their decoder by a method, and prompts, int32 `[B, P]`."""
    tree = TokenTree.chains(self.num_drafts, self.draft_length)
    decoder = speed.make_decoder(models.target, models.drafts[self.draft], method, tree)
    return decoder, speed.prompts(self.batch_size, models.target.vocab_size)


def head_config(target: CausalLMConfig) -> HeadConfig:
  """The sizes of EAGLE-3's head for a target.

  Args:
    target: The target, of at least 6 layers.
  """
  config = head_experiment.get_config('eagle3')
  config.update({'vocab_size': min(HEAD_TOKENS, target.vocab_size), 'has_unembedding': True, 'dtype': target.dtype})
  return eagle3_head.head_config(config, target)


def bytes_per_step(config: CausalLMConfig) -> int:
  """Bytes of the weights that a step reads; of an embedding that is no output head it reads a row per token.

  Args:
    config: The model.
  """
  shapes = causal_lm.param_shapes(config)
  if not config.is_tied:
    del shapes['embedding']
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def make_models(sizes: Sizes) -> Models:
  """The models with random weights, made on the device.

  Args:
    sizes: What is measured.
  """
  target_key, draft_key, head_key = jax.random.split(jax.random.key(SEED), 3)

  def model(key, folder):
    config = read_hub_config(folder, dtype=sizes.dtype)
    return config, causal_lm.causal_lm(causal_lm.init_params(key, config), config).for_decoding()

  config, target = model(target_key, sizes.target)
  drafts: dict[str, Model | Drafter] = {'draft': model(draft_key, sizes.draft)[1].with_vocab_size(config.vocab_size)}
  if sizes.has_head:
    own = head_config(config)
    drafts['head'] = head_drafter(head.init_params(head_key, own), own, config.vocab_size).for_decoding()
  return Models(target, drafts)


def spread(seconds: Sequence[float]) -> dict[str, float]:
  """Milliseconds: median, lowest and highest."""
  times = 1e3 * np.array(seconds)
  return {'median': float(np.median(times)), 'low': float(times.min()), 'high': float(times.max())}


def measure_steps(models: Models, sizes: Sizes, batch_size: int) -> Result:
  """Steps of autoregressive decoding, and their floor.

  Args:
    models: The models.
    sizes: What is measured.
    batch_size: Rows.
  """
  decoder = speed.make_decoder(models.target, None, 'autoregressive', None)
  rows = speed.prompts(batch_size, models.target.vocab_size)
  step = spread(speed.round_seconds(decoder, rows, sizes.num_runs, NUM_ROUNDS))
  rate = copy_rate()
  floor = 1e3 * bytes_per_step(causal_lm.config_of(models.target)) / rate
  return {
    'step': step,
    'copy_bytes_per_second': rate,
    'floor': floor,
    'floor_share': floor / step['median'],
    'tokens_per_second': 1e3 * batch_size / step['median'],
  }


def measure_unverified(models: Models, sizes: Sizes, rounds: Rounds) -> Result:
  """Rounds that keep no guess.

  Args:
    models: The models.
    sizes: What is measured.
    rounds: Their rows, draft and shape.
  """
  decoder, rows = rounds.begin(models, UNVERIFIED)
  return {'unverified': spread(speed.round_seconds(decoder, rows, sizes.num_runs, NUM_ROUNDS))}


def measure_rounds(models: Models, sizes: Sizes, rounds: Rounds, method: str) -> Result:
  """Rounds, and their parts, each of which is a separate program.

  Args:
    models: The models.
    sizes: What is measured.
    rounds: Their rows, draft and shape.
    method: Name of the method.
  """
  decoder, rows = rounds.begin(models, method)
  found: Result = {'round': spread(speed.round_seconds(decoder, rows, sizes.num_runs, NUM_ROUNDS))}
  parts = latency.time_parts(decoder, speed.begin(decoder, rows), max(sizes.num_runs, 3))
  found['parts'] = {name: 1e3 * seconds for name, seconds in parts.items()}
  found['verification_share'] = found['parts']['verification'] / found['round']['median']
  return found


def measure_profile(models: Models, sizes: Sizes, directory: epath.Path) -> Result:
  """Records some rounds of the first kind of draft for one row.

  Args:
    models: The models.
    sizes: What is measured.
    directory: Where the profile goes.
  """
  shape = sizes.shapes[:2][-1]
  decoder, rows = Rounds(1, 'draft', *shape).begin(models, PROFILED)
  speed.round_seconds(decoder, rows, 1, 1)
  latency.profile(decoder, speed.begin(decoder, rows), directory, num_rounds=4)
  return {'directory': directory.name, 'method': PROFILED, 'num_drafts': shape[0], 'draft_length': shape[1]}


def measure_peer(sizes: Sizes, device: str) -> Result:
  """Steps and rounds of Hugging Face's transformers for one row, prefill included; it runs in a process of its own.

  Args:
    sizes: What is measured.
    device: `cuda` or `cpu`.

  Returns:
    Times by name, or `left_out` with the reason.
  """
  try:
    import torch

    from benchmarks import peer
  except ImportError as error:
    return {'left_out': str(error)}
  if device == 'cuda' and not torch.cuda.is_available():
    return {'left_out': 'this torch finds no CUDA device'}
  target, draft = (peer.make_public(path, sizes.dtype, device) for path in (sizes.target, sizes.draft))
  rows, draft_length = speed.prompts(1, target.config.vocab_size), sizes.shapes[0][1]
  counter, num_new = peer.count_calls(target), speed.NEW_TOKENS

  def counted(sample):
    def call():
      before = counter[0]
      sample()
      return counter[0] - before

    return call

  calls = {
    'transformers, step': counted(peer.sampler(target, rows, num_new)),
    'transformers, round': counted(peer.assisted_sampler(target, draft, rows, num_new, draft_length)),
  }
  versions = {'torch': torch.__version__, 'transformers': peer.VERSION}
  return {'versions': versions, 'times': speed.time_steps(calls, sizes.num_runs)}


def measure_beside_peer(models: Models, sizes: Sizes) -> Result:
  """The same as `measure_peer` of this library, prefill included.

  Args:
    models: The models.
    sizes: What is measured.
  """
  rows, target = speed.prompts(1, models.target.vocab_size), models.target
  tree = TokenTree.chains(1, sizes.shapes[0][1])  # the peer drafts a single chain
  calls = {
    'spectr_jax, step': speed.own_call((target, None), rows, 'autoregressive', None),
    'spectr_jax, round': speed.own_call((target, models.drafts['draft']), rows, 'speculative', tree),
  }
  return {'times': speed.time_steps(calls, sizes.num_runs)}


def measurements(sizes: Sizes, directory: epath.Path) -> Iterator[tuple[str, Callable[[Models], Result]]]:
  """Everything that is measured on the device, by name.

  Args:
    sizes: What is measured.
    directory: Where the profile goes.
  """
  if sizes.peer_device is not None:
    yield OWN, lambda models: measure_beside_peer(models, sizes)
  for batch_size in sizes.batch_sizes:
    yield f'steps, {batch_size} rows', functools.partial(measure_steps, sizes=sizes, batch_size=batch_size)
    for draft in ('draft', 'head')[: 1 + sizes.has_head]:
      for num_drafts, draft_length in sizes.shapes:
        rounds = Rounds(batch_size, draft, num_drafts, draft_length)
        yield f'{UNVERIFIED.name} {rounds}', functools.partial(measure_unverified, sizes=sizes, rounds=rounds)
        for method in METHODS:
          yield f'{method} {rounds}', functools.partial(measure_rounds, sizes=sizes, rounds=rounds, method=method)
  yield 'profile', lambda models: measure_profile(models, sizes, directory)


def describe_run(sizes: Sizes) -> dict[str, Any]:
  """What all results of a file share, as JSON values: others may be added with other rows or with the peer.

  Args:
    sizes: What is measured.
  """
  flags = {name: getattr(sizes, name) for name in ('target', 'draft', 'has_head', 'dtype', 'num_runs')}
  params = {name: read_hub_config(flags[name], dtype=sizes.dtype).num_params for name in ('target', 'draft')}
  shared = {'flags': flags, 'seed': SEED, 'prompt_length': speed.PROMPT_LENGTH, 'num_params': params}
  return describe_machine() | shared


def run(sizes: Sizes, output: epath.PathLike) -> None:
  """Measures what the file lacks and prints everything.

  Args:
    sizes: What is measured.
    output: The JSON file, which may hold results of an earlier run. A profile goes to a folder of its name.

  Raises:
    ValueError: The file holds results of other sizes or of another machine, or some measurements failed.
  """
  path, failed, models = epath.Path(output), 0, None
  fields = {'run': object_of({}), 'results': map_of(object_of({}))}
  kept = read_object(path, fields, LARGE) if path.exists() else {}
  results: dict[str, Result] = kept.get('results') or {}
  peer = None
  if sizes.peer_device is not None and PEER not in results:
    # Before this process takes the device's memory.
    peer = real_models.in_own_process(measure_peer, sizes, sizes.peer_device)
  described = describe_run(sizes)
  if kept and kept.get('run') != described:
    raise ValueError(f'{path} holds results of another machine or of other flags: {kept.get("run")}')

  with OutputFiles(output=output) as files:

    def keep(name, found):
      results[name] = found
      files.write(output=json.dumps({'run': described, 'results': results}, indent=2) + '\n')

    if peer is not None and 'left_out' in peer:
      print(f'transformers are left out: {peer["left_out"]}', flush=True)
    elif peer is not None:
      keep(PEER, peer)
      print(describe(PEER, peer), flush=True)
    for name, measure in measurements(sizes, path.parent / f'{path.stem}_profile'):
      if name not in results:
        models = models or make_models(sizes)
        try:
          keep(name, measure(models))
        except jax.errors.JaxRuntimeError as error:  # such as too little memory: the others are measured all the same
          failed += 1
          print(f'{name}: FAILED, {str(error).splitlines()[0]}', flush=True)
          continue
      print(describe(name, results[name]), flush=True)
  print('\n'.join([*describe_shares(results), *describe_ratios(results)]))
  if failed:
    raise ValueError(f'{failed} measurements failed')
