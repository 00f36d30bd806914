"""Steps, rounds and calls of a target beside their floor and beside Hugging Face's transformers.

Command   pip install torch transformers gguf
          python -m benchmarks.speed --output=speed.json
          python -m benchmarks.speed --target_config=configs/hub/llama_3_8b --head --output=sizes.json
          python -m benchmarks.speed --target=MODEL.gguf --output=model.json
Models    target A and draft B of benchmarks/README.md, random weights; with `--target_config` random ones of a public
          model's sizes; with `--target` one from disk, without a draft
Peer      `generate` with its dynamic cache, with a static cache and torch.compile (not with `--target_config`), and
          with a draft `assistant_model` and a constant number of guesses. `--nopeer` leaves it out

Parts, of which `--part` chooses some:

peer      autoregressive decoding, and for one row rounds with a draft, prefill included, beside the peer
steps     a step of autoregressive decoding beside its floor: the time to read the target's weights at the device's rate
rounds    rounds of each method with every draft, whole and by parts: random models agree only by chance, so the tokens
          that a round keeps do not count. Parts are programs of their own, with launches and waits that within a round
          are hidden in part. So rounds that keep no guess are measured as well: what a round takes longer is the share
          of its verification within the loop
prompt    time and peak memory of the prefill of one long prompt, in a process of its own
trees     the target's call on a chain of tokens relative to its call on one, and its floor: reading all weights, or
          multiplying by them; on a CPU with products in C++ and of XLA
profile   some rounds for one row, recorded by JAX's profiler

What is compared takes turns in one process. Results are written after every measurement. Those that are there are not
measured again, so that a run that was ended goes on with the same command.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from etils import epath

from benchmarks import command, timing
from benchmarks.floor import floor_of
from benchmarks.speed_models import SHAPES, UNVERIFIED, Models, bytes_per_step, read_config
from common import command_line
from decode.experiment import latency
from decode.experiment.workload import describe_machine
from decode.study import Row, study
from spectr_jax import TokenTree
from spectr_jax.auto.timing import forward_calls, time_in_turns

PARTS = 'prompt', 'peer', 'steps', 'rounds', 'trees', 'profile'
NUM_ROUNDS = 16  # of a timed run
TREE_SIZES = 1, 2, 5, 9, 17, 33, 65, 128
TREE_CACHE = 256


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What is measured."""

  models: Models  # in the first type
  parts: tuple[str, ...] = ('peer', 'steps', 'rounds')  # names in `PARTS`
  dtypes: tuple[str, ...] = ('bfloat16',)  # of weights and activations of the target
  methods: tuple[str, ...] = ('race_traversal', 'spectr')
  batch_sizes: tuple[int, ...] = (1,)  # numbers of rows
  # K drafts of L tokens of each kind of round; a single draft of the first one's length is compared with the peer,
  # the second one, if there is one, is profiled
  shapes: tuple[tuple[int, int], ...] = ((1, 4),)
  num_runs: int = 5
  prompt_length: int = 8192  # tokens of the long prompt
  peer_device: str | None = None  # `cuda` or `cpu`; None leaves transformers out


def parse_shapes(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
  """The shapes of rounds from texts such as `4x8`, four drafts of eight tokens; `ValueError` for other texts."""
  matches = [re.fullmatch(r'([1-9]\d*)x([1-9]\d*)', text) for text in texts]
  if not texts or None in matches:
    raise ValueError(f'shapes: expected drafts x tokens such as 4x8, got {",".join(texts)!r}')
  return tuple((int(match[1]), int(match[2])) for match in matches if match)


def measure_prompt(models: Models, length: int) -> Row:
  """Seconds of the prefill of one prompt, without compilation, and the most memory of the process, which is to be its
  own: the peak includes loading and compilation.
  """
  model, tokens = models.decoding, models.prompts(1, length)

  @jax.jit
  def prefill(model, tokens):
    return model.prefill(tokens, jnp.array([tokens.shape[1]]), model.init_cache_fn(1, tokens.shape[1]))

  compiled = prefill.lower(model, tokens).compile()
  start = time.perf_counter()
  jax.block_until_ready(compiled(model, tokens))
  seconds = time.perf_counter() - start
  unit = 1 if sys.platform == 'darwin' else 1024
  peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return {'seconds': seconds, 'tokens_per_second': length / seconds, 'peak_gib': peak / 2**30}


class Bench:
  """Everything that is measured with a target in one type."""

  def __init__(self, sizes: Sizes, dtype: str):
    self.sizes, self.models = sizes, dataclasses.replace(sizes.models, dtype=dtype)

  def _own_calls(self, rows: np.ndarray) -> dict[str, timing.Call]:
    cases = {'step': (None, 'autoregressive', None)}
    if self.models.drafts and len(rows) == 1:
      tree = TokenTree.chains(1, self.sizes.shapes[0][1])  # the peer drafts a single chain
      cases['round'] = self.models.drafts['draft'], 'speculative', tree
    return {
      f'spectr_jax, {unit}': timing.own_call((self.models.decoding, draft), rows, method, tree)
      for unit, (draft, method, tree) in cases.items()
    }

  def _peer_calls(self, rows: np.ndarray) -> dict[str, timing.Call]:
    """Calls of Hugging Face's transformers; an `ImportError` if torch or they are missing, or torch finds no
    such device.
    """
    from benchmarks import peer

    peer.check_device(self.sizes.peer_device)
    models, new_tokens = self.models, timing.NEW_TOKENS
    make = functools.partial(models.make_peer, device=self.sizes.peer_device)
    target = make(models.target, models.dtype)
    calls = {'transformers, step': peer.counted(target, peer.sampler(target, rows, new_tokens))}
    if models.draft is None or models.target in SHAPES:  # a large model would need memory for two
      static = peer.compiled_sampler(make(models.target, models.dtype), rows, new_tokens)
      calls['transformers, step, static and compiled'] = lambda: static() or new_tokens
    if models.draft is not None and len(rows) == 1:
      draft = make(models.draft, models.draft_dtype or models.dtype)
      sample = peer.assisted_sampler(target, draft, rows, new_tokens, self.sizes.shapes[0][1])
      calls['transformers, round'] = peer.counted(target, sample)
    return calls

  def measure_peer(self, batch_size: int) -> Row:
    """Steps and rounds with prefill, of this library and of the peer, and how many times as fast ours are."""
    rows, result = self.models.prompts(batch_size), {}
    calls = self._own_calls(rows)
    try:
      calls |= self._peer_calls(rows) if self.sizes.peer_device else {}
    except ImportError as error:
      result['left_out'] = f'transformers are left out: {error}'
    times = timing.time_steps(calls, self.sizes.num_runs)
    for unit in ('step', 'round'):
      own, others = times.get(f'spectr_jax, {unit}'), [
        each['median'] for name, each in times.items() if name.startswith(f'transformers, {unit}')
      ]  # fmt: skip
      if own and others:
        result[f'{unit}s, times as fast as transformers'] = min(others) / own['median']
    return {'milliseconds': times} | result

  def _begin(self, batch_size: int, *case):
    """A decoder and its state behind prompts, of a draft, a method and a tree."""
    return timing.begin(timing.make_decoder(self.models.decoding, *case), self.models.prompts(batch_size))

  def _round_times(self, batch_size: int, cases: dict[str, tuple]) -> dict[str, timing.Spread]:
    """Times per round by name of the cases of `_begin`."""
    makers = {name: functools.partial(self._begin, batch_size, *case) for name, case in cases.items()}
    measured = timing.rounds_in_turns(makers, self.sizes.num_runs, NUM_ROUNDS)
    return {name: timing.spread(seconds) for name, seconds in measured.items()}

  def measure_steps(self, batch_size: int) -> Row:
    """Steps of autoregressive decoding, and their floor in milliseconds."""
    times = self._round_times(batch_size, {'step': (None, 'autoregressive', None)})
    rate, step = timing.read_rate(), times['step']['median']
    floor = 1e3 * bytes_per_step(self.models.config) / rate
    more = {'bytes_per_second': rate, 'floor': floor, 'floor_share': floor / step}
    return {'milliseconds': times, 'tokens_per_second': 1e3 * batch_size / step} | more

  def measure_rounds(self, batch_size: int, draft: str, num_drafts: int, draft_length: int) -> Row:
    """Rounds of K drafts by every method, and by none; their parts in ms, and the shares of verification."""
    drafter, tree = self.models.drafts[draft], TokenTree.chains(num_drafts, draft_length)
    cases = {name: (drafter, name, tree) for name in self.sizes.methods}
    times = self._round_times(batch_size, {UNVERIFIED.name: (drafter, UNVERIFIED, tree)} | cases)
    result, without = {'milliseconds': times}, times[UNVERIFIED.name]['median']
    for name, case in cases.items():
      parts = latency.time_parts(*self._begin(batch_size, *case), max(self.sizes.num_runs, 3))
      whole = times[name]['median']
      result |= {f'{name}, {part}': 1e3 * seconds for part, seconds in parts.items()}
      result[f'{name}, verification / round'] = 1e3 * parts['verification'] / whole
      result[f'{name}, verification / round, within the loop'] = 1 - without / whole
    return result

  def measure_trees(self) -> Row:
    """Calls of the target by their number of tokens, of the products in use and of XLA's, and relative to one token."""
    shapes = {size: (TokenTree.chains(1, size - 1) if size > 1 else TokenTree(), 1) for size in TREE_SIZES}
    calls = {
      f'{form}, tokens: {size}': call
      for form, model in self.models.forms().items()
      for size, call in forward_calls(model, shapes, cache_size=TREE_CACHE).items()
    }
    measured = time_in_turns(calls, self.sizes.num_runs)
    times = {name: timing.spread(seconds) for name, seconds in measured.items()}
    ones = {name: times[f'{name.partition(",")[0]}, tokens: 1']['median'] for name in times}
    floor = floor_of(self.models.decoding, self.sizes.num_runs)
    return (
      {'milliseconds': times}
      | {f'{name} / 1': each['median'] / ones[name] for name, each in times.items()}
      | {f'floor, tokens: {size}': floor.milliseconds(size) for size in TREE_SIZES}
      | dataclasses.asdict(floor)
    )

  def measure_profile(self, directory: epath.Path) -> Row:
    """Records some rounds of the first method with the first draft for one row, in a directory."""
    method, (num_drafts, draft_length) = self.sizes.methods[0], self.sizes.shapes[:2][-1]
    case = self.models.drafts['draft'], method, TokenTree.chains(num_drafts, draft_length)
    timing.seconds_per_round(*self._begin(1, *case), 1)
    latency.profile(*self._begin(1, *case), directory, num_rounds=4)
    return {'directory': directory.name, 'method': method, 'num_drafts': num_drafts, 'draft_length': draft_length}

  def measurements(self, directory: epath.Path) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Everything that is measured, by name; a profile goes to the directory."""
    sizes = self.sizes
    for rows in sizes.batch_sizes:
      if 'peer' in sizes.parts:
        yield f'with prefill, {rows} rows', functools.partial(self.measure_peer, rows)
      if 'steps' in sizes.parts:
        yield f'steps, {rows} rows', functools.partial(self.measure_steps, rows)
      if 'rounds' in sizes.parts:
        for draft in ('draft', 'head', 'one pass') if sizes.models.has_head else ('draft',):
          for shape in sizes.shapes:
            name = f'rounds, {shape[0]} x {shape[1]}, {draft}, {rows} rows'
            yield name, functools.partial(self.measure_rounds, rows, draft, *shape)
    if 'trees' in sizes.parts:
      yield 'trees', self.measure_trees
    if 'profile' in sizes.parts:
      yield 'profile', functools.partial(self.measure_profile, directory)


def measurements(sizes: Sizes, directory: epath.Path) -> Iterator[tuple[str, Callable[[], Row]]]:
  """Everything that is measured, by name. Prompts come first: a new process counts the peak of the one that
  starts it.
  """
  for dtype in sizes.dtypes if 'prompt' in sizes.parts else ():
    arguments = measure_prompt, dataclasses.replace(sizes.models, dtype=dtype), sizes.prompt_length
    yield f'prompt, {dtype}', functools.partial(timing.in_own_process, *arguments)
  for dtype in sizes.dtypes:
    for name, measure in Bench(sizes, dtype).measurements(directory):
      yield f'{name}, {dtype}', measure


def describe(name: str, result: Row) -> str:
  """Lines about a result: its times, and its other values."""
  lines = [f'{label:<44} {timing.in_words(times)}' for label, times in result.get('milliseconds', {}).items()]
  for label, value in result.items():
    if label != 'milliseconds':
      lines.append(f'{label:<44} {value:.4g}' if isinstance(value, float) else f'{label:<44} {value}')
  return '\n  '.join([name, *lines])


def describe_run(sizes: Sizes) -> dict[str, Any]:
  """What all results of a file share, as JSON values."""
  models = sizes.models
  names = () if models.draft is None else (models.target, models.draft)
  params = {role: read_config(name, models.dtype).num_params for role, name in zip(('target', 'draft'), names)}
  shared = {name: value for name, value in dataclasses.asdict(models).items() if name not in ('dtype', 'num_slots')}
  shared |= {'num_runs': sizes.num_runs, 'prompt_length': timing.PROMPT_LENGTH, 'num_params': params}
  return describe_machine() | {'flags': shared}


def run(sizes: Sizes, output: epath.PathLike) -> None:
  """Measures what the file lacks and prints everything; a profile goes to a folder of its name. See `study`."""
  path, models = epath.Path(output), sizes.models
  cells = dict(measurements(sizes, path.parent / f'{path.stem}_profile'))
  inputs = {'target': [models.target], 'text': [models.text]}
  study(cells, lambda *cell: print(describe(*cell), flush=True), output=path, run=describe_run(sizes), inputs=inputs)


if __name__ == '__main__':
  _TARGET = flags.DEFINE_string('target', None, 'A model from disk, in place of random weights.')
  _TARGET_CONFIG = flags.DEFINE_string('target_config', 'A', 'A, or a folder with config.json: sizes of the target.')
  _DRAFT_CONFIG = flags.DEFINE_string(
    'draft_config', None, 'B, or a folder with config.json: sizes of the draft. Default: B for A, else Llama 3 of 161M.'
  )
  _PART = flags.DEFINE_multi_enum(
    'part', None, PARTS, 'Parts to run; may be repeated. Default: all but prompt and trees; all that need no draft.'
  )
  _HEAD = flags.DEFINE_bool('head', False, "Whether heads of EAGLE-3's and DSpark's sizes draft as well.")
  _DTYPE = flags.DEFINE_list('dtype', ['bfloat16', 'float32'], 'Types of the target.')
  _DRAFT_DTYPE = flags.DEFINE_string('draft_dtype', None, 'Type of the draft; default that of the target.')
  _WEIGHTS = flags.DEFINE_enum('weights', None, ['int8', 'blocks'], 'How weights of a model from disk are held.')
  _METHOD = flags.DEFINE_list('method', ['race_traversal', 'spectr'], 'Methods of rounds.')
  _BATCH_SIZES = command.define_numbers('batch_size', '1,8', 'Rows.')
  _SHAPES = flags.DEFINE_list('shapes', ['1x4', '4x8', '4x16'], 'Rounds of K drafts of L tokens, KxL.')
  _NUM_RUNS = flags.DEFINE_integer('num_runs', 5, 'Runs of each, in turns.', lower_bound=1)
  _PROMPT_LENGTH = flags.DEFINE_integer('prompt_length', 8192, 'Tokens of the long prompt.', lower_bound=1)
  _TEXT = flags.DEFINE_string('text', 'README.md', 'Text file that prompts for a model from disk are cut from.')
  _PEER = flags.DEFINE_bool('peer', True, "Whether to run Hugging Face's transformers as well.")
  _PEER_DEVICE = flags.DEFINE_enum('peer_device', None, ['cuda', 'cpu'], 'Where transformers run; default as JAX.')
  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the results.', required=True)

  def main():
    shapes, device = parse_shapes(_SHAPES.value), 'cuda' if jax.default_backend() == 'gpu' else 'cpu'
    draft, parts = 'configs/hub/draft_160m_of_llama_3', ('peer', 'steps', 'rounds', 'profile')
    draft = _DRAFT_CONFIG.value or ('B' if _TARGET_CONFIG.value in SHAPES else draft)
    if _TARGET.value is not None:
      draft, parts = None, ('prompt', 'peer', 'steps', 'trees')
    sizes = Sizes(
      models=Models(
        target=_TARGET.value or _TARGET_CONFIG.value, draft=draft, has_head=_HEAD.value, dtype=_DTYPE.value[0],
        draft_dtype=_DRAFT_DTYPE.value, weights=_WEIGHTS.value, num_slots=max(length for _, length in shapes),
        text=_TEXT.value,
      ),
      parts=tuple(_PART.value or parts), dtypes=tuple(_DTYPE.value), methods=tuple(_METHOD.value),
      batch_sizes=_BATCH_SIZES(), shapes=shapes,
      num_runs=_NUM_RUNS.value, prompt_length=_PROMPT_LENGTH.value,
      peer_device=(_PEER_DEVICE.value or device) if _PEER.value else None,
    )  # fmt: skip
    run(sizes, _OUTPUT.value)

  command_line.run(main)
