"""Reports of a run: a table and a coloured sample for people, JSON and JSONL for programs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.program_memory import describe_groups
from decode.auto.prediction import Prediction
from decode.experiment.options import DecodeOptions
from decode.experiment.prompts import Prompt
from decode.experiment.results import DecodeRun, Measurement, Summary
from decode.experiment.settings import Setting
from decode.experiment.workload import Notify, model_title
from spectr_jax import ORIGIN_BONUS, ORIGIN_CORRECTION, ORIGIN_DRAFT, Continuation, StopStrings, finish_reason
from spectr_jax.io.tokenizer import TokenizerBase

# Marks of a token's origin, with colour and without.
_STYLES = {ORIGIN_DRAFT: 'green', ORIGIN_CORRECTION: 'bold red', ORIGIN_BONUS: 'bold blue'}
_MARKS = {ORIGIN_DRAFT: ('', ''), ORIGIN_CORRECTION: ('[', ']'), ORIGIN_BONUS: ('{', '}')}
_MEANINGS = {
  ORIGIN_DRAFT: 'accepted draft',
  ORIGIN_CORRECTION: "the target's correction",
  ORIGIN_BONUS: 'bonus token of the target',
}


def make_console(*, stderr: bool = False) -> Console:
  """A console without escape codes if NO_COLOR is set, and without line folding outside a terminal."""
  color_system = None if os.environ.get('NO_COLOR') else 'auto'
  console = Console(stderr=stderr, color_system=color_system, highlight=False, emoji=False, markup=False)
  # Texts may hold any character. A character that the terminal cannot show must not end the run.
  if hasattr(console.file, 'reconfigure'):
    console.file.reconfigure(errors='replace')
  return console


@contextlib.contextmanager
def show_progress() -> Iterator[Notify]:
  """Yields a progress callback for `run_decode`: a bar in a terminal, else one line per activity; on stderr."""
  console = make_console(stderr=True)
  if not console.is_terminal:
    last = None

    def print_line(what, done, total):
      nonlocal last
      if what != last:
        print(f'[{done}/{total}] {what}', file=sys.stderr, flush=True)
      last = what

    yield print_line
    return
  columns = (
    progress.TextColumn('{task.description}'),
    progress.BarColumn(),
    progress.MofNCompleteColumn(),
    progress.TimeElapsedColumn(),
  )
  with progress.Progress(*columns, console=console, transient=True) as bar:
    task = bar.add_task('loading', total=None)
    yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _result(summary: Summary, run: DecodeRun, seed: int) -> dict:
  setting = summary.setting
  return {
    'method': setting.method.name,
    'is_lossless': setting.method.is_lossless,
    'num_drafts': setting.num_drafts,
    'draft_length': setting.draft_length,
    'tree': setting.tree_name,
    'num_nodes': setting.tree.num_nodes,
    'children': setting.method.proposal_rule.name,
    'epsilon': run.options.epsilon,
    'temperature': run.options.temperature,
    'seed': seed,
    'num_prompts': len(run.prompts),
    'tokens': summary.num_tokens,
    'target_calls': summary.num_calls,
    'block_efficiency': summary.block_efficiency,
    'block_efficiency_ci95': None if summary.interval is None else list(summary.interval),
    'acceptance_by_position': summary.acceptance_by_position,
    'tokens_per_second': summary.tokens_per_second,
    'speedup': summary.speedup,
    'speedup_ci95': None if summary.speedup_interval is None else list(summary.speedup_interval),
    'seconds_per_round': summary.seconds_per_round or None,
    'share_of_optimum': summary.share_of_optimum,
    'share_of_optimum_ci95': None if summary.share_interval is None else list(summary.share_interval),
  }


def _prediction(found: Prediction) -> dict:
  setting = found.setting
  fields = dataclasses.asdict(dataclasses.replace(found, setting=None))
  return {
    'method': setting.method.name,
    'num_drafts': setting.num_drafts,
    'draft_length': setting.draft_length,
    'tree': setting.tree_name,
  } | {name: value for name, value in fields.items() if name != 'setting'}


def to_json(run: DecodeRun) -> str:
  """The run as JSON, with one result per setting and seed.

  These values can be null: `block_efficiency_ci95` for a single prompt, `speedup` if autoregressive decoding was not
  run, its interval (over batches) for a single batch, `seconds_per_round` and `share_of_optimum` unless requested, and
  `epsilon` if methods use their own. `acceptance_by_position[d]` is the share of rounds that kept at least d + 1
  drafted tokens. `acceptance` holds, by method, the rates that `optimal` trees were chosen from. `predictions` holds
  the settings that `auto` chose from, the fastest first.
  """
  results = [_result(run.summarize(found.setting, (found.seed,)), run, found.seed) for found in run.measurements]
  content = {'run': run.info, 'acceptance': run.acceptance, 'results': results}
  if run.predictions:
    content['predictions'] = [_prediction(found) for found in run.predictions]
  return json.dumps(content, indent=2, allow_nan=False) + '\n'


def describe_setting(options: DecodeOptions, setting: Setting) -> dict[str, Any]:
  """The values that a setting's continuations share, as JSON values.

  Args:
    options: The run's options.
    setting: The setting.
  """
  return {
    'method': setting.method.name,
    'is_lossless': setting.method.is_lossless,
    'num_drafts': setting.num_drafts,
    'draft_length': setting.draft_length,
    'tree': setting.tree_name,
    'children': setting.method.proposal_rule.name,
    'epsilon': options.epsilon,
    'temperature': options.temperature,
  }


def describe_continuation(
  setting: dict[str, Any],
  prompt: Prompt,
  seed: int,
  sample: int,
  found: Continuation,
  tokenizer: TokenizerBase,
  stop: StopStrings | None,
) -> dict[str, Any]:
  """A continuation as JSON values.

  Args:
    setting: The result of `describe_setting`.
    prompt: The prompt.
    seed: The seed.
    sample: The index of the sample among those of this prompt and seed.
    found: The continuation.
    tokenizer: The models' tokenizer.
    stop: The texts that end continuations, or None.
  """
  tokens = found.tokens.tolist()
  entry = {
    'id': prompt.id,
    'prompt': prompt.text,
    **setting,
    'seed': seed,
    'sample': sample,
    'tokens': tokens,
    'text': tokenizer.decode(tokens) if stop is None else stop.text_of(tokens),
    'target_calls': found.num_target_calls,
    'finish_reason': found.finish_reason,
  }
  return entry if found.logprobs is None else entry | {'logprobs': _numbers(found.logprobs)}


def _numbers(values: np.ndarray) -> list[float | None]:
  """float32 values with as few digits as tell them apart; null for a token that the target excludes."""
  return [float(str(value)) if np.isfinite(value) else None for value in values]


def continuation_of(
  measurement: Measurement, row: int, tokenizer: TokenizerBase, stop: StopStrings | None
) -> Continuation:
  """One row of a measurement, without padding.

  Args:
    measurement: The measurement.
    row: The row.
    tokenizer: The models' tokenizer.
    stop: The texts that end continuations, or None.
  """
  length = measurement.lengths[row]
  return Continuation(
    row,
    tokens=measurement.tokens[row, :length],
    origins=measurement.origins[row, :length],
    num_target_calls=int(measurement.calls[row]),
    finish_reason=finish_reason(measurement.tokens[row, :length], tokenizer.eos_ids, stop),
    logprobs=None if measurement.logprobs is None else measurement.logprobs[row, :length],
  )


def to_jsonl(run: DecodeRun) -> str:
  """The continuations as JSONL, one line per setting, seed, prompt and sample."""
  lines, texts = [], (run.tokenizer, run.options.make_stop(run.tokenizer))
  for found in run.measurements:
    setting = describe_setting(run.options, found.setting)
    for row in range(len(found.lengths)):
      place, sample = divmod(row, run.options.num_samples)
      continuation = continuation_of(found, row, *texts)
      line = describe_continuation(setting, run.prompts[place], found.seed, sample, continuation, *texts)
      lines.append(json.dumps(line, ensure_ascii=False) + '\n')
  return ''.join(lines)


def _with_interval(value: float, interval: tuple[float, float] | None) -> str:
  return f'{value:.2f}' + ('' if interval is None else f' ± {(interval[1] - interval[0]) / 2:.2f}')


_NUM_POSITIONS = 8


def _shares(shares: list[float]) -> str:
  """The shares of the first positions as text. Deep trees have more positions than fit on a line."""
  shown = [f'{share:.2f}' for share in shares[:_NUM_POSITIONS]]
  return ' '.join(shown + ['...'] * (len(shares) > _NUM_POSITIONS)) or '-'


def make_table(run: DecodeRun) -> Table:
  """The table of results: one row per setting, over all seeds."""
  has_trees = any(setting.spec is not None and setting.spec.name != 'chains' for setting in run.settings)
  columns = [('method', 'left'), ('lossless', 'left'), ('K', 'right'), ('L', 'right')]
  if has_trees:
    columns += [('nodes', 'right'), ('tree', 'left')]
  columns += [('tokens per\ntarget call', 'left'), ('acceptance\nby position', 'left')]
  if run.options.share_of_optimum:
    columns.append(('share of\noptimum', 'left'))
  columns += [('tokens/s', 'right'), ('speed-up', 'right')]
  table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
  for name, justify in columns:
    table.add_column(name, justify=justify, no_wrap=name not in ('acceptance\nby position', 'tree'))
  for setting in run.settings:
    summary = run.summarize(setting)
    cells = [
      setting.method.name,
      'yes' if setting.method.is_lossless else 'no',
      str(setting.num_drafts or '-'),
      str(setting.draft_length or '-'),
    ]
    if has_trees:
      cells += [str(setting.tree.num_nodes or '-'), setting.tree_name]
    cells += [
      _with_interval(summary.block_efficiency, summary.interval),
      _shares(summary.acceptance_by_position),
    ]
    if run.options.share_of_optimum:
      share = summary.share_of_optimum
      cells.append('-' if share is None else _with_interval(share, summary.share_interval))
    cells += [
      f'{summary.tokens_per_second:,.0f}',
      '-' if summary.speedup is None else f'{summary.speedup:.2f}x',
    ]
    table.add_row(*cells)
  return table


_NUM_PREDICTIONS = 12


def make_prediction_table(predictions: list[Prediction]) -> Table:
  """A table of the fastest settings by prediction, and of autoregressive decoding."""
  shown = predictions[:_NUM_PREDICTIONS]
  shown += [found for found in predictions[_NUM_PREDICTIONS:] if not found.setting.tree.num_nodes]
  alone = next(found for found in predictions if not found.setting.tree.num_nodes)
  table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
  table.add_column('predicted', no_wrap=True)
  for name in ('tokens per\ntarget call', 'draft\nms', 'target\nms', 'rest\nms', 'tokens/s', 'speed-up'):
    table.add_column(name, justify='right', no_wrap=True)
  for found in shown:
    table.add_row(
      str(found.setting),
      f'{found.tokens_per_call:.2f}',
      *(f'{1e3 * getattr(found, f"{part}_seconds"):.2f}' for part in ('draft', 'target', 'rest')),
      f'{found.tokens_per_second:,.0f}',
      f'{found.tokens_per_second / alone.tokens_per_second:.2f}x',
    )
  return table


def explain_choice(predictions: list[Prediction]) -> str:
  """A sentence that says which setting `auto` chose, and from how many."""
  best, num_seen = predictions[0], sum(found.is_observed for found in predictions)
  return (
    f'auto takes {best.setting}, the fastest of {len(predictions)} lossless settings by prediction; {num_seen} were'
    ' decoded on calibration prompts, the others follow from runs with longer drafts.'
  )


def explain_bias(run: DecodeRun) -> list[str]:
  """One line for each method that is not lossless, with the reason."""
  methods = dict.fromkeys(setting.method for setting in run.settings if not setting.method.is_lossless)
  return [
    f"{method.name} is not lossless, its text does not have the target's distribution: {method.bias}."
    for method in methods
  ]


def explain_slow(run: DecodeRun) -> list[str]:
  """One line for each setting slower than autoregressive decoding: the cost and the tokens of a round."""
  lines = []
  for setting in run.settings:
    summary = run.summarize(setting)
    num_nodes = setting.tree.num_nodes + 1
    if not setting.tree.num_nodes or summary.speedup is None or summary.speedup >= 1:
      continue
    cost = run.node_costs[num_nodes]
    lines.append(
      f'{setting} is slower here: a round takes {summary.round_cost:.1f} times as long as an autoregressive step and'
      f" yields {summary.tokens_per_round:.1f} tokens per row; on this {run.info['device']['platform']} the target's"
      f' call alone takes {cost:.1f} times as long for {num_nodes} nodes as for 1.'
    )
  return lines


def explain_parts(run: DecodeRun) -> list[str]:
  """One line for each setting whose parts were timed."""
  lines = []
  for setting in run.settings:
    parts = run.summarize(setting).seconds_per_round
    if parts:
      each = ', '.join(f'{part} {1e3 * seconds:.2f}' for part, seconds in parts.items() if part != 'round')
      lines.append(
        f'{setting}: a round takes {1e3 * parts["round"]:.2f} ms, of which {each}; parts are timed as programs of their'
        ' own, the rest is what is left.'
      )
  return lines


def _printable(text: str) -> str:
  """The text without control characters, which could control the terminal. Line breaks stay."""
  return ''.join(c if c == '\n' or unicodedata.category(c) not in ('Cc', 'Cf') else '\ufffd' for c in text)


def split_by_origin(tokens: np.ndarray, origins: np.ndarray, tokenizer: TokenizerBase) -> list[tuple[str, int]]:
  """The text of each token with the token's origin. The token that completes a character has all of its bytes.

  Args:
    tokens: int `[T]`, without padding.
    origins: int `[T]`, as in `spectr_jax.Generation`.
    tokenizer: The tokenizer.
  """
  pieces, begin = [], 0
  for end in range(1, len(tokens) + 1):
    text = tokenizer.decode(tokens[begin:end])
    if text.endswith('\ufffd') and end < len(tokens) and end - begin < 4:
      continue
    pieces.append((text, int(origins[end - 1])))
    begin = end
  return [piece for piece in pieces if piece[0]]


def sample_measurement(run: DecodeRun) -> Measurement:
  """The measurement whose first continuation is shown: of the last setting that drafts, else of the last setting."""
  first_seed = [found for found in run.measurements if found.seed == run.options.seed]
  return ([found for found in first_seed if found.setting.tree.num_nodes] or first_seed)[-1]


def make_sample(run: DecodeRun, *, is_colored: bool) -> Text:
  """The first prompt's continuation below a legend, with tokens marked by origin.

  Args:
    run: The run.
    is_colored: Whether to mark origins by colour, else by brackets and braces.
  """
  found = sample_measurement(run)

  def mark(text, origin):
    before, after = ('', '') if is_colored else _MARKS[origin]
    return Text(before + text + after, style=_STYLES[origin] if is_colored else '')

  length = found.lengths[0]
  shown = Text(f'A continuation by {found.setting}: ')
  for place, (origin, meaning) in enumerate(_MEANINGS.items()):
    shown.append(', ' if place else '').append_text(mark(meaning, origin))
  shown.append('\n' + _printable(run.prompts[0].text), style='dim' if is_colored else '')
  shown.append('' if is_colored else ' ...\n')
  for text, origin in split_by_origin(found.tokens[0, :length], found.origins[0, :length], run.tokenizer):
    shown.append_text(mark(_printable(text), origin))
  return shown


def _headline(run: DecodeRun) -> str:
  options, models = run.options, run.info['models']
  names = ', '.join(f'{role} {model_title(model)}' for role, model in models.items())
  names += ', guesses by lookup' if options.has_lookup else ''
  filters = [f'temperature {options.temperature:g}']
  if options.top_k:
    filters.append(f'top-k {options.top_k}')
  if options.top_p < 1:
    filters.append(f'top-p {options.top_p:g}')
  if options.min_p:
    filters.append(f'min-p {options.min_p:g}')
  device = run.info['device']
  batch_size = min(options.batch_size, len(run.prompts))
  samples = f', {options.num_samples} samples of each prompt' if options.num_samples > 1 else ''
  num_long = run.info['num_long_prompts']
  left_out = f' ({num_long} of the file are too long and left out)' if num_long else ''
  return (
    f'{names}\n{len(run.prompts)} prompts{left_out} in batches of {batch_size},'
    f' up to {options.max_new_tokens} new tokens, {", ".join(filters)}{samples},'
    f' {options.num_seeds} seed{"s" * (options.num_seeds > 1)} from {options.seed};'
    f' {device["kind"]}, {device["num_cpus"]} CPU cores'
    + (f', mesh {options.mesh} of {device["num_devices"]} devices' if options.mesh else '')
  )


def print_report(run: DecodeRun, console: Console | None = None) -> None:
  """Prints the table, explanations for slow settings, and a sample.

  Args:
    run: The run.
    console: The console to print to; None for stdout.
  """
  console = console or make_console()
  print_options = {'soft_wrap': True}
  console.print(_headline(run) + '\n', **print_options)
  if not console.is_terminal:
    console.width = 1000  # lines of a file need not fit into a window
  if run.predictions:
    console.print(make_prediction_table(run.predictions))
    console.print('\n' + explain_choice(run.predictions) + '\n', **print_options)
  console.print(make_table(run))
  console.print()
  for line in explain_bias(run) + explain_slow(run) + explain_parts(run) + describe_groups(run.info['timed_together']):
    console.print(line + '\n', **print_options)
  console.print(make_sample(run, is_colored=console.color_system is not None), **print_options)
