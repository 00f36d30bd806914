"""The report of a run for people: a table, explanations, and a sample colored by origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.printable import printable
from decode import study
from decode.experiment import metrics
from decode.experiment.console import make_console
from decode.experiment.measurements import DecodeRun, Measurement
from decode.experiment.workload import model_title
from spectr_jax import TextStream
from spectr_jax.auto import Speed
from spectr_jax.auto.setting import baseline_of
from spectr_jax.engine import ORIGIN_BONUS, ORIGIN_CORRECTION, ORIGIN_DRAFT
from spectr_jax.engine.program_memory import describe_groups
from spectr_jax.io.tokenizer import TokenizerBase

# Marks of a token's origin, with color and without.
_STYLES = {ORIGIN_DRAFT: 'green', ORIGIN_CORRECTION: 'bold red', ORIGIN_BONUS: 'bold blue'}
_MARKS = {ORIGIN_DRAFT: ('', ''), ORIGIN_CORRECTION: ('[', ']'), ORIGIN_BONUS: ('{', '}')}
_MEANINGS = {
  ORIGIN_DRAFT: 'accepted draft',
  ORIGIN_CORRECTION: "the target's correction",
  ORIGIN_BONUS: 'bonus token of the target',
}


def _range(interval: tuple[float, float] | None) -> str:
  return '-' if interval is None else f'{interval[0]:.2f} to {interval[1]:.2f}'


_NUM_POSITIONS = 8  # of which the acceptance is shown, at most
# Headers of columns, and those that a narrow console goes without, the first one first.
_TOKENS, _ACCEPTANCE, _SHARE, _RANGE = (
  'tokens per\ntarget call', 'acceptance\nby position', 'share of\noptimum', '95% range'
)  # fmt: skip
_GIVE_WAY = 'lossless', _RANGE, 'nodes'


def _shares(shares: list[float], num_shown: int) -> str:
  """The shares of the first positions as text. Deep trees have more positions than fit on a line."""
  shown = [f'{share:.2f}' for share in shares[:num_shown]]
  return ' '.join(shown + ['...'] * (len(shares) > num_shown)) or '-'


def fitting_table(run: DecodeRun, console: Console) -> Table:
  """The table of results that fits the console: acceptance by position gives way first, then what lines say too."""
  forms = [(number, ()) for number in range(_NUM_POSITIONS, 0, -1)]
  forms += [(0, _GIVE_WAY[:number]) for number in range(len(_GIVE_WAY) + 1)]
  unbounded = console.options.update(max_width=10_000)
  for form in forms:
    shown = make_table(run, *form)
    if console.measure(shown, options=unbounded).maximum <= console.width:
      break
  return shown


def make_table(run: DecodeRun, num_positions: int = _NUM_POSITIONS, left_out: Sequence[str] = ()) -> Table:
  """The table of results: one row per setting, over all seeds.

  Args:
    run: The run.
    num_positions: Positions whose acceptance is shown, at most.
    left_out: Columns to leave out. Without `lossless` methods that are not have a mark.
  """
  summaries, has_lossless = run.summaries, 'lossless' not in left_out
  has_trees = any(setting.tree.num_nodes and not setting.num_drafts for setting in run.settings)
  has_speedups = any(each['speedup'] is not None for each in summaries.values())
  empty = {'nodes': not has_trees, 'tree': not has_trees, _ACCEPTANCE: not num_positions, _RANGE: not has_speedups}
  empty |= {_SHARE: not run.options.prompts.share_of_optimum} | dict.fromkeys(left_out, True)
  rows = [
    {
      'method': setting.method.name + ('' if has_lossless or setting.method.is_lossless else ' (!)'),
      'lossless': 'yes' if setting.method.is_lossless else 'no',
      'K': setting.num_drafts or None,
      'L': setting.draft_length or None,
      'nodes': setting.tree.num_nodes or None,
      'tree': setting.tree_name,
      _TOKENS: metrics.text_of(each['block_efficiency'], each['block_efficiency_ci95']),
      _ACCEPTANCE: _shares(each['acceptance_by_position'], num_positions),
      _SHARE: '-'
      if each['share_of_optimum'] is None
      else metrics.text_of(each['share_of_optimum'], each['share_of_optimum_ci95']),
      'tokens/s': f'{each["tokens_per_second"]:,.0f}',
      'speed-up': None if each['speedup'] is None else f'{each["speedup"]:.2f}x',
      _RANGE: _range(each['speedup_ci95']),
    }
    for setting, each in summaries.items()
  ]
  rows = [{name: cell for name, cell in row.items() if not empty.get(name)} for row in rows]
  whole = [name for name in rows[0] if name != 'tree']
  return study.table(rows, right=('tokens/s', 'speed-up'), whole=whole, gap=2 if has_lossless else 1)


def make_speed_table(speeds: list[Speed]) -> Table:
  """A table of the settings that `auto` timed."""
  alone = next(each for each in speeds if not each.setting.tree.num_nodes)
  rows = [
    {
      'timed': str(each.setting),
      _TOKENS: f'{each.tokens_per_call:.2f}',
      'tokens/s': f'{each.tokens_per_second:,.0f}',
      _RANGE: f'{each.interval[0]:,.0f} to {each.interval[1]:,.0f}',
      'speed-up': f'{each.tokens_per_second / alone.tokens_per_second:.2f}x',
    }
    for each in speeds
  ]
  numbers = list(rows[0])[1:]
  return study.table(rows, right=numbers, whole=numbers)


def explain_choice(speeds: list[Speed], left_out: Mapping[str, str]) -> Iterator[str]:
  """A line with the setting that `auto` takes, and one with what keeps it from methods."""
  yield f'auto takes {speeds[0].setting}, the fastest of {len(speeds)} settings that it timed.'
  if left_out:
    yield f'It leaves out methods: {"; ".join(left_out.values())}.'


def explain_bias(run: DecodeRun) -> Iterator[str]:
  """One line for each method that is not lossless, with the reason."""
  for method in dict.fromkeys(setting.method for setting in run.settings if not setting.method.is_lossless):
    yield f"{method.name} is not lossless, its text does not have the target's distribution: {method.bias}."


def explain_slow(run: DecodeRun) -> Iterator[str]:
  """One line for each setting slower than autoregressive decoding: the cost and the tokens of a round."""
  for setting, summary in run.summaries.items():
    num_nodes = setting.tree.num_nodes + 1
    if not setting.tree.num_nodes or summary['speedup'] is None or summary['speedup'] >= 1:
      continue
    cost = run.node_costs[num_nodes]
    yield (
      f'{setting} is slower here: a round takes {summary["round_cost"]:.1f} times as long as an autoregressive step and'
      f" yields {summary['tokens_per_round']:.1f} tokens per row; on this {run.info['device']['platform']} the target's"
      f' call alone takes {cost:.1f} times as long for {num_nodes} nodes as for 1.'
    )


def explain_missing_baseline(run: DecodeRun) -> Iterator[str]:
  """A line where no setting says how fast decoding without a draft is."""
  if all(summary['speedup'] is None for summary in run.summaries.values()):
    yield 'speed-up is relative to autoregressive, which is not among the methods; add it to --method to compare.'


def explain_hidden_ranges(run: DecodeRun) -> Iterator[str]:
  """One line for each speed-up with an interval, for tables without a column of them."""
  for setting, each in run.summaries.items():
    if each['speedup_ci95'] is not None:
      yield f'{setting}: speed-up {each["speedup"]:.2f}x, 95% range {_range(each["speedup_ci95"])}.'


def explain_parts(run: DecodeRun) -> Iterator[str]:
  for setting, summary in run.summaries.items():
    if parts := summary['seconds_per_round']:
      each = ', '.join(f'{part} {1e3 * seconds:.2f}' for part, seconds in parts.items() if part != 'round')
      yield (
        f'{setting}: a round takes {1e3 * parts["round"]:.2f} ms, of which {each}; parts are timed as programs of their'
        ' own, the rest is what is left.'
      )


def split_by_origin(tokens: np.ndarray, origins: np.ndarray, tokenizer: TokenizerBase) -> list[tuple[str, int]]:
  """The text of each of T tokens with its origin, from arrays `[T]` as in `Generation`.

  The token that completes a character has all of its bytes.
  """
  stream = TextStream(tokenizer)
  pieces = [(stream.add([token]), int(origin)) for token, origin in zip(tokens, origins)]
  if len(pieces):
    text, origin = pieces[-1]
    pieces[-1] = text + stream.finish(), origin
  return [piece for piece in pieces if piece[0]]


def sample_measurement(run: DecodeRun) -> Measurement:
  """The measurement whose first continuation is shown: of the last setting that drafts, else of the last setting."""
  first_seed = [measurement for measurement in run.measurements if measurement.seed == run.options.sampling.seed]
  return ([measurement for measurement in first_seed if measurement.setting.tree.num_nodes] or first_seed)[-1]


def make_sample(run: DecodeRun, *, is_colored: bool) -> Text:
  """The first prompt's continuation below a legend, with tokens marked by origin: by color, or else by brackets."""
  measurement = sample_measurement(run)
  has_guesses = bool(measurement.setting.tree.num_nodes)

  def mark(text, origin):
    before, after = ('', '') if is_colored or not has_guesses else _MARKS[origin]
    return Text(before + text + after, style=_STYLES[origin] if is_colored and has_guesses else '')

  length = measurement.lengths[0]
  shown = Text(f'A continuation by {measurement.setting}' + ': ' * has_guesses)
  for place, (origin, meaning) in enumerate(_MEANINGS.items() if has_guesses else ()):
    shown.append(', ' if place else '').append_text(mark(meaning, origin))
  shown.append('\n' + printable(run.prompts[0].text), style='dim' if is_colored else '')
  shown.append('' if is_colored else ' ...\n')
  for text, origin in split_by_origin(measurement.tokens[0, :length], measurement.origins[0, :length], run.tokenizer):
    shown.append_text(mark(printable(text), origin))
  return shown


def _headline(run: DecodeRun) -> str:
  options, models = run.options, run.info['models']
  names = ', '.join(f'{role} {model_title(model, has_dtype=True)}' for role, model in models.items())
  names += ', guesses by lookup' if options.models.has_lookup else ''
  filters = [f'temperature {options.sampling.temperature:g}']
  if options.sampling.top_k:
    filters.append(f'top-k {options.sampling.top_k}')
  if options.sampling.top_p < 1:
    filters.append(f'top-p {options.sampling.top_p:g}')
  if options.sampling.min_p:
    filters.append(f'min-p {options.sampling.min_p:g}')
  filters += [f'{name} {value}'.replace('_', ' ') for name, value in options.sampling.penalties.items()]
  device = run.info['device']
  batch_size = min(options.prompts.batch_size, len(run.prompts))
  samples = f', {options.sampling.num_samples} samples of each prompt' if options.sampling.num_samples > 1 else ''
  num_long = run.info['num_long_prompts']
  left_out = f' ({num_long} of the file are too long and left out)' if num_long else ''
  return (
    f'{names}\n{len(run.prompts)} prompts{left_out} in batches of {batch_size},'
    f' up to {options.prompts.max_new_tokens} new tokens, {", ".join(filters)}{samples},'
    f' {options.sampling.num_seeds} seed{"s" * (options.sampling.num_seeds > 1)} from {options.sampling.seed};'
    f' {device["kind"]}, {device["num_cpus"]} CPU cores'
    + (f', products of {device["products"]}' if 'products' in device else '')
    + (f', mesh {options.models.mesh} of {device["num_devices"]} devices' if options.models.mesh else '')
  )


def explain_vocabulary(run: DecodeRun) -> Iterator[str]:
  """A line with what draft and target share, if they have different vocabularies."""
  shared = run.info['models'].get('draft', {}).get('vocabulary')
  if shared is not None:
    yield (
      f'The draft has another vocabulary: of its {shared["num_draft"]:,} tokens {shared["num_shared"]:,} are among the'
      f" target's {shared['num_target']:,}, with {shared['share_of_mass']:.1%} of its mass on a sample of text. It"
      ' guesses these alone.'
    )


def explain_gain(run: DecodeRun) -> Iterator[str]:
  """A line with what the fastest lossless setting that drafts gains, if speeds were compared on enough batches."""
  summaries = run.summaries
  compared = [each for each in summaries.values() if each['speedup_ci95'] and each['is_lossless']]
  if not compared:
    return
  best, alone = max(compared, key=lambda each: each['speedup']), summaries[baseline_of(run.settings)]
  subject = str(best['setting']) if best['speedup'] >= 1 else f'Nothing gains here: the fastest, {best["setting"]},'
  yield (
    f'{subject} decodes {best["speedup"]:.2f} times as fast as the target alone ({_range(best["speedup_ci95"])}):'
    f' {best["tokens_per_second"]:,.0f} tokens/s for {alone["tokens_per_second"]:,.0f}, {best["block_efficiency"]:.2f}'
    " tokens per call of the target, with exactly the target's distribution."
  )


def explain_seconds(run: DecodeRun) -> Iterator[str]:
  """A line with what took how long beside the new tokens."""
  if seconds := run.info.get('seconds'):
    yield (
      f'Loading took {seconds["loading"]:.1f} s and compiling {seconds["compiling"]:.1f} s, which tokens/s leave out.'
      f' Reading the prompts of the first batch, {seconds["prompt_tokens"]:,} tokens, took {seconds["prompts"]:.3f} s,'
      ' which they count.'
    )


def print_report(run: DecodeRun, console: Console | None = None, *, more: str = '') -> None:
  """Prints what is gained, the table, explanations for slow settings, a sample, and the line `more`."""
  console = console or make_console()
  print_options = {'soft_wrap': not console.is_terminal}  # lines of files are whole, those of windows end between words
  for line in explain_gain(run):
    console.print(line + '\n', **print_options)
  console.print(printable(_headline(run)) + '\n', **print_options)
  for line in explain_vocabulary(run):
    console.print(line + '\n', **print_options)
  if not console.is_terminal:
    console.width = 1000  # lines of a file need not fit into a window
  if run.speeds:
    console.print(make_speed_table(run.speeds))
    console.print()
    for line in explain_choice(run.speeds, run.left_out):
      console.print(line + '\n', **print_options)
  table = fitting_table(run, console)
  console.print(table)
  console.print()
  is_hidden = _RANGE not in [column.header for column in table.columns]
  explanations = explain_bias, explain_missing_baseline, explain_slow, explain_parts, explain_seconds
  for explain in (*[explain_hidden_ranges] * is_hidden, *explanations):
    for line in explain(run):
      console.print(line + '\n', **print_options)
  for line in describe_groups(run.info['timed_together']):
    console.print(line + '\n', **print_options)
  console.print(make_sample(run, is_colored=console.color_system is not None), **print_options)
  if more:
    console.print('\n' + more, **print_options)
