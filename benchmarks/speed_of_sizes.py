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

from benchmarks import timing
from benchmarks.unverified import UNVERIFIED
from common.output_files import OutputFiles
from configs import head as head_experiment
from decode.experiment import latency
from decode.experiment.workload import describe_machine
from spectr_jax import Decoder, Model, TokenTree
from spectr_jax.draft import Drafter, head_drafter, one_pass_drafter
from spectr_jax.io.foreign import LARGE, map_of, object_of, read_object
from spectr_jax.io.hub.load import read_hub_config
from spectr_jax.methods import Method
from spectr_jax.models import causal_lm, head, one_pass
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.head import HeadConfig
from spectr_jax.models.one_pass_config import OnePassConfig
from train import eagle3_head, one_pass_head

SEED = 0
METHODS = 'race_traversal', 'spectr'
NUM_ROUNDS = 16  # of a timed run
PROFILED = 'race_traversal'
HEAD_TOKENS = 32000  # tokens that the head guesses, as EAGLE-3 has them
OWN, PEER = 'spectr_jax with prefill, 1 row', 'transformers with prefill, 1 row'
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What is measured.

  Attributes:
    target: Folder with the target's `config.json`.
    draft: The same for the draft.
    has_head: Whether heads draft as well: one of EAGLE-3's sizes, and one of DSpark's that guesses in one pass.
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


def head_config(target: CausalLMConfig) -> HeadConfig:
  """The sizes of EAGLE-3's head for a target.

  Args:
    target: The target, of at least 6 layers.
  """
  config = head_experiment.get_config('eagle3')
  config.update({'vocab_size': min(HEAD_TOKENS, target.vocab_size), 'has_unembedding': True, 'dtype': target.dtype})
  return eagle3_head.head_config(config, target)


def one_pass_config(target: CausalLMConfig, num_slots: int) -> OnePassConfig:
  """The sizes of a DSpark network of two layers for a target.

  Args:
    target: The target, of at least 6 layers.
    num_slots: Tokens that it guesses.
  """
  config = head_experiment.get_config('dspark')
  vocab_size = min(HEAD_TOKENS, target.vocab_size)
  rank = min(config.markov_rank, target.embed_dim)
  config.update(vocab_size=vocab_size, has_unembedding=True, dtype=target.dtype, block_size=num_slots, markov_rank=rank)
  return one_pass_head.one_pass_config(config, target, 0)


def bytes_per_step(config: CausalLMConfig) -> int:
  """Bytes of the weights that a step reads; of an embedding that is no output head it reads a row per token.

  Args:
    config: The model.
  """
  shapes = causal_lm.param_shapes(config)
  if not config.is_tied:
    del shapes['embedding']
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


class Bench:
  """Everything that is measured on the device: the models, made when the first measurement needs them.

  Args:
    sizes: What is measured.
  """

  def __init__(self, sizes: Sizes):
    self.sizes = sizes

  @functools.cached_property
  def _models(self) -> tuple[Model, dict[str, Model | Drafter]]:
    """The target, and what drafts for it by name, with random weights made on the device."""
    sizes = self.sizes
    target_key, draft_key, head_key = jax.random.split(jax.random.key(SEED), 3)

    def model(key, folder):
      config = read_hub_config(folder, dtype=sizes.dtype)
      return config, causal_lm.causal_lm(causal_lm.init_params(key, config), config).for_decoding()

    config, target = model(target_key, sizes.target)
    drafts: dict[str, Model | Drafter] = {'draft': model(draft_key, sizes.draft)[1].with_vocab_size(config.vocab_size)}
    if sizes.has_head:
      own = head_config(config)
      drafts['head'] = head_drafter(head.init_params(head_key, own), own, config.vocab_size).for_decoding()
      network = one_pass_config(config, max(length for _, length in sizes.shapes))
      params = head.random_params(head_key, one_pass.param_shapes(network))
      drafts['one pass'] = one_pass_drafter(params, network, config.vocab_size).for_decoding()
    return target, drafts

  def _prompts(self, batch_size: int) -> np.ndarray:
    return timing.prompts(batch_size, self._models[0].vocab_size)

  def _begin(self, rounds: Rounds, method: str | Method) -> tuple[Decoder, np.ndarray]:
    """The decoder of rounds by a method, and prompts, int32 `[B, P]`."""
    target, drafts = self._models
    tree = TokenTree.chains(rounds.num_drafts, rounds.draft_length)
    decoder = timing.make_decoder(target, drafts[rounds.draft], method, tree)
    return decoder, self._prompts(rounds.batch_size)

  def _times(self, decoder: Decoder, rows: np.ndarray) -> dict[str, float]:
    return timing.spread(timing.round_seconds(decoder, rows, self.sizes.num_runs, NUM_ROUNDS))

  def measure_steps(self, batch_size: int) -> Result:
    """Steps of autoregressive decoding, and their floor."""
    target, _ = self._models
    step = self._times(timing.make_decoder(target, None, 'autoregressive', None), self._prompts(batch_size))
    rate = timing.copy_rate()
    floor = 1e3 * bytes_per_step(causal_lm.config_of(target)) / rate
    return {
      'step': step,
      'copy_bytes_per_second': rate,
      'floor': floor,
      'floor_share': floor / step['median'],
      'tokens_per_second': 1e3 * batch_size / step['median'],
    }

  def measure_unverified(self, rounds: Rounds) -> Result:
    """Rounds that keep no guess."""
    return {'unverified': self._times(*self._begin(rounds, UNVERIFIED))}

  def measure_rounds(self, rounds: Rounds, method: str) -> Result:
    """Rounds by a method, and their parts, each of which is a separate program."""
    decoder, rows = self._begin(rounds, method)
    found: Result = {'round': self._times(decoder, rows)}
    parts = latency.time_parts(decoder, timing.begin(decoder, rows), max(self.sizes.num_runs, 3))
    found['parts'] = {name: 1e3 * seconds for name, seconds in parts.items()}
    found['verification_share'] = found['parts']['verification'] / found['round']['median']
    return found

  def measure_profile(self, directory: epath.Path) -> Result:
    """Records some rounds of the first kind of draft for one row, in a directory."""
    num_drafts, draft_length = self.sizes.shapes[:2][-1]
    decoder, rows = self._begin(Rounds(1, 'draft', num_drafts, draft_length), PROFILED)
    timing.round_seconds(decoder, rows, 1, 1)
    latency.profile(decoder, timing.begin(decoder, rows), directory, num_rounds=4)
    return {'directory': directory.name, 'method': PROFILED, 'num_drafts': num_drafts, 'draft_length': draft_length}

  def measure_beside_peer(self) -> Result:
    """The same as `measure_peer` of this library, prefill included."""
    rows, (target, drafts) = self._prompts(1), self._models
    tree = TokenTree.chains(1, self.sizes.shapes[0][1])  # the peer drafts a single chain
    calls = {
      'spectr_jax, step': timing.own_call((target, None), rows, 'autoregressive', None),
      'spectr_jax, round': timing.own_call((target, drafts['draft']), rows, 'speculative', tree),
    }
    return {'times': timing.time_steps(calls, self.sizes.num_runs)}

  def measurements(self, directory: epath.Path) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Everything that is measured, by name; a profile goes to the directory."""
    if self.sizes.peer_device is not None:
      yield OWN, self.measure_beside_peer
    for batch_size in self.sizes.batch_sizes:
      yield f'steps, {batch_size} rows', functools.partial(self.measure_steps, batch_size)
      for draft in ('draft', 'head', 'one pass') if self.sizes.has_head else ('draft',):
        for num_drafts, draft_length in self.sizes.shapes:
          rounds = Rounds(batch_size, draft, num_drafts, draft_length)
          yield f'{UNVERIFIED.name} {rounds}', functools.partial(self.measure_unverified, rounds)
          for method in METHODS:
            yield f'{method} {rounds}', functools.partial(self.measure_rounds, rounds, method)
    yield 'profile', functools.partial(self.measure_profile, directory)


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
  rows, draft_length = timing.prompts(1, target.config.vocab_size), sizes.shapes[0][1]
  step = peer.sampler(target, rows, timing.NEW_TOKENS)
  of_round = peer.assisted_sampler(target, draft, rows, timing.NEW_TOKENS, draft_length)
  calls = {'transformers, step': peer.counted(target, step), 'transformers, round': peer.counted(target, of_round)}
  versions = {'torch': torch.__version__, 'transformers': peer.VERSION}
  return {'versions': versions, 'times': timing.time_steps(calls, sizes.num_runs)}


def describe(name: str, found: Result) -> str:
  """A line about a result of a name."""
  if 'step' in found:
    said = f'{timing.in_words(found["step"])}, {found["tokens_per_second"]:.1f} tokens/s; floor {found["floor"]:.2f} ms'
    return f'{name}: {said}, {found["floor_share"]:.0%} of the step'
  if 'round' in found:
    parts = ', '.join(f'{part} {value:.2f}' for part, value in found['parts'].items())
    return (
      f'{name}: {timing.in_words(found["round"])}; {parts}; verification {found["verification_share"]:.1%} of a round'
    )
  if 'unverified' in found:
    return f'{name}: {timing.in_words(found["unverified"])}'
  if 'times' in found:
    return f'{name}: ' + '; '.join(f'{key} {timing.in_words(value)}' for key, value in found['times'].items())
  return f'{name}: {found}'


def describe_shares(results: dict[str, Result]) -> list[str]:
  """Lines about the share of verification in the rounds of each method, from all results by name."""
  lines = []
  for name, found in results.items():
    method, _, shape = name.partition(' ')
    beside = results.get(f'{UNVERIFIED.name} {shape}')
    if 'round' in found and beside is not None:
      own, without = found['round']['median'], beside['unverified']['median']
      lines.append(f'{name}: verification {own - without:.2f} ms within the loop, {1 - without / own:.1%} of a round')
  return lines


def describe_ratios(results: dict[str, Result]) -> list[str]:
  """Lines about how much faster this library is than transformers, if both are among all results by name."""
  if OWN not in results or PEER not in results:
    return []
  own, peer = results[OWN]['times'], results[PEER]['times']
  ratios = {
    unit: peer[f'transformers, {unit}']['median'] / own[f'spectr_jax, {unit}']['median'] for unit in ('step', 'round')
  }
  return [f'{unit}: {ratio:.2f} times as fast as transformers' for unit, ratio in ratios.items()]


def describe_run(sizes: Sizes) -> dict[str, Any]:
  """What all results of a file share, as JSON values: others may be added with other rows or with the peer.

  Args:
    sizes: What is measured.
  """
  flags = {name: getattr(sizes, name) for name in ('target', 'draft', 'has_head', 'dtype', 'num_runs')}
  params = {name: read_hub_config(flags[name], dtype=sizes.dtype).num_params for name in ('target', 'draft')}
  shared = {'flags': flags, 'seed': SEED, 'prompt_length': timing.PROMPT_LENGTH, 'num_params': params}
  return describe_machine() | shared


def run(sizes: Sizes, output: epath.PathLike) -> None:
  """Measures what the file lacks and prints everything.

  Args:
    sizes: What is measured.
    output: The JSON file, which may hold results of an earlier run. A profile goes to a folder of its name.

  Raises:
    ValueError: The file holds results of other sizes or of another machine, or some measurements failed.
  """
  path, failed, bench = epath.Path(output), 0, Bench(sizes)
  fields = {'run': object_of({}), 'results': map_of(object_of({}))}
  kept = read_object(path, fields, LARGE) if path.exists() else {}
  results: dict[str, Result] = kept.get('results') or {}
  peer = None
  if sizes.peer_device is not None and PEER not in results:
    # Before this process takes the device's memory.
    peer = timing.in_own_process(measure_peer, sizes, sizes.peer_device)
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
    for name, measure in bench.measurements(path.parent / f'{path.stem}_profile'):
      if name not in results:
        try:
          keep(name, measure())
        except jax.errors.JaxRuntimeError as error:  # such as too little memory: the others are measured all the same
          failed += 1
          print(f'{name}: FAILED, {str(error).splitlines()[0]}', flush=True)
          continue
      print(describe(name, results[name]), flush=True)
  print('\n'.join([*describe_shares(results), *describe_ratios(results)]))
  if failed:
    raise ValueError(f'{failed} measurements failed')
