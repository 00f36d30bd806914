"""Continues many prompts by one method: `python -m decode.bulk --method=NAME --prompts=FILE --generations=FILE`.

Finished rows are refilled with the next prompts, and every continuation is appended to the file as soon as it is
complete. `--resume` continues a run that ended early for any reason. No prompt is lost and none is decoded twice. Every
line records what determines it, and a file of another run is refused.

With N processes, each decodes every N-th prompt on its own devices and writes its own part of the output, named in an
index. They find each other like those of `decode.main`, and the first one prints.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
from absl import flags

from common import command_line, processes
from common.output_files import check_apart
from common.printable import printable
from decode.experiment.auto_choice import speeds_of
from decode.experiment.console import show_progress
from decode.experiment.drafting import budget_of, define_row_flags
from decode.experiment.exports import OPTIONS, describe_continuation, describe_prompt, describe_run
from decode.experiment.generation_file import GenerationFile, check_parts, part_path
from decode.experiment.latency import CompilingClock
from decode.experiment.options import DecodeOptions
from decode.experiment.settings import only_setting
from decode.experiment.workload import Workload
from spectr_jax import ChoiceProbs, Request, generate_many
from spectr_jax.auto.trial import Notify
from spectr_jax.engine import Budget, sample_keys
from spectr_jax.engine.choices import Choices, score_choices
from spectr_jax.sharding import is_primary


class BulkStatistics(NamedTuple):
  """Of one run and process."""

  num_tokens: int  # new ones
  num_calls: int  # of the target
  seconds: float  # of reading prompts and decoding, without compiling
  compiling: float  # seconds
  loading: float  # seconds
  num_prompt_tokens: int
  num_hits: int  # prompts that began like an earlier text
  num_kept: int  # their tokens that were not read
  rounds: dict[str, int] = {}  # of a budget, by the guesses of a row


def decode_bulk(
  options: DecodeOptions,
  path: str,
  *,
  resume: bool = False,
  rounds_at_a_time: int = 4,
  choice_probs: bool = False,
  prefix_cache_bytes: int | None = None,
  budget: Budget | None = None,
  notify: Notify | None = None,
) -> BulkStatistics:
  """Continues every prompt with every seed, as many times as there are samples, appending to a file.

  Args:
    options: The options. They name one method, K, L and tree, or `auto`, which chooses them.
    path: The file. With several processes the names of their parts derive from it.
    resume: Whether to continue an existing file.
    rounds_at_a_time: Rounds between two checks for finished rows.
    choice_probs: Whether every line has the probabilities of all of the options' choices.
    prefix_cache_bytes: As for `generate_many`.
    budget: Guesses of all rows of a call, see `generate_many`, or None.
    notify: Called with the current activity, the number of continuations in the file, and their final number.
  """
  notify = notify or (lambda what, done, total: None)
  options.check_unused(OPTIONS['refused'], 'decode.bulk, which measures nothing')
  if choice_probs and (not options.sampling.choice or options.models.mesh):
    raise ValueError(f'choice_probs {"is not for a mesh" if options.sampling.choice else "needs choices: --choice"}')
  process, num_processes = jax.process_index(), jax.process_count()
  setting = None if options.methods.is_auto else only_setting(options)
  part = part_path(path, process, num_processes)
  check_apart({'generations': part}, options.inputs())
  num_tokens = num_calls = num_prompt_tokens = num_hits = num_kept = 0
  with GenerationFile(part, resume=resume) as file, CompilingClock() as clock:
    check_parts(path, num_processes)
    start = time.perf_counter()
    work = Workload.load(options, is_local=True)
    loading = time.perf_counter() - start
    if setting is None:
      setting = speeds_of(work, notify)[0][0].setting
    prompts, stop = work.prompts, work.stop
    # By index, so that a prompt stays in its part whatever others are left out.
    own = [row for row, prompt in enumerate(prompts) if prompt.index % num_processes == process]
    described = {prompts[row].index: describe_prompt(prompts[row]) for row in own}
    settings = describe_run(work, setting)
    settings['run'] |= {'choice_probs': True} if choice_probs else {}
    settings['run'] |= {} if budget is None else {'budget': 'auto' if budget.guesses is None else budget.guesses}
    file.begin(settings, described, process=process, num_processes=num_processes)
    choices = Choices.of(work.tokenizer, options.sampling.choice) if choice_probs else None

    @functools.lru_cache(64)
    def score(number: int, choices: Choices) -> ChoiceProbs:
      """The probabilities of choices behind some of the prompts, which are read together."""
      rows = own[number * options.prompts.batch_size : (number + 1) * options.prompts.batch_size]
      prompts = [work.tokens[row, : work.lengths[row]] for row in rows]
      return score_choices(work.target, prompts, choices, width=work.tokens.shape[1])

    places = itertools.product(
      options.sampling.seeds, (prompts[row].index for row in own), range(options.sampling.num_samples)
    )
    total = len(own) * options.sampling.num_seeds * options.sampling.num_samples
    num_done = sum(place in file.done for place in places)

    def requests() -> Iterator[Request]:
      for seed in options.sampling.seeds:
        keys = work.keys(seed)
        for row in own:
          missing = [i for i in range(options.sampling.num_samples) if (seed, prompts[row].index, i) not in file.done]
          samples = sample_keys(keys[row : row + 1], options.sampling.num_samples) if missing else ()
          for sample in missing:
            name, tokens = (seed, row, sample), work.tokens[row, : work.lengths[row]]
            yield Request(name, tokens, samples[sample], constraint=work.constraint)

    notify('compiling and decoding', num_done, total)
    start = time.perf_counter()
    before = clock.seconds

    def seconds() -> float:
      return time.perf_counter() - start - (clock.seconds - before)

    for continuation in generate_many(
      work.target,
      setting.drafter(work.draft),
      requests(),
      batch_size=options.prompts.batch_size,
      longest_prompt=int(work.lengths.max()),
      max_new_tokens=work.max_new_tokens,
      method=setting.method,
      tree=setting.tree,
      rounds_at_a_time=rounds_at_a_time,
      sampling=work.sampling,
      eos_id=work.tokenizer.eos_ids,
      sharding=work.sharding,
      logprobs=work.logprobs,
      stop=stop,
      prefix_cache_bytes=prefix_cache_bytes,
      budget=budget,
    ):
      seed, row, sample = continuation.name
      prompt = prompts[row]
      entry = describe_continuation({}, prompt, seed, sample, continuation, work.tokenizer, stop)
      corpus = {'lookup_corpus': list(options.models.lookup_corpus)} if options.models.lookup_corpus else {}
      if choices is not None:
        number, place = divmod(bisect.bisect(own, row) - 1, options.prompts.batch_size)
        scored = score(number, choices)
        values = zip(choices.texts, scored.logprobs[place].tolist(), scored.probs[place].tolist())
        entry['choice_probs'] = [dict(zip(('choice', 'logprob', 'prob'), each)) for each in values]
      file.append({'index': prompt.index} | described[prompt.index] | entry | corpus)
      num_tokens += len(continuation.tokens)
      num_calls += continuation.num_target_calls
      num_prompt_tokens += int(work.lengths[row])
      num_hits += continuation.num_kept > 0
      num_kept += continuation.num_kept
      num_done += 1
      notify(f'decoding; {num_tokens / seconds():,.0f} tokens/s', num_done, total)
    rounds = {} if budget is None else {guesses: number for (_, guesses), number in budget.rounds.items()}
    times = seconds(), clock.seconds - before, loading
    return BulkStatistics(num_tokens, num_calls, *times, num_prompt_tokens, num_hits, num_kept, rounds)


if __name__ == '__main__':
  from decode.experiment.option_flags import read_options  # defines flags

  _GENERATIONS = flags.DEFINE_string('generations', None, 'JSONL file that grows by continuations.', required=True)
  _RESUME = flags.DEFINE_bool('resume', False, 'Go on with the file: what it has is not decoded again.')
  _ROUNDS = flags.DEFINE_integer(
    'rounds_at_a_time', 4, 'Rounds between two looks at which rows are done.', lower_bound=1
  )
  _PROBS = flags.DEFINE_bool('choice_probs', False, 'Write how likely each --choice is behind the prompt.')
  _BUDGET, _PREFIXES = define_row_flags('off')
  # A comparison takes a sample of the prompts; this command takes all.
  flags.FLAGS.set_default('num_prompts', 2**31 - 1)

  def main():
    processes.run_together(decode)

  def decode():
    options, budget = read_options(), budget_of(_BUDGET.value)
    with show_progress() if is_primary() else contextlib.nullcontext() as notify:
      done = decode_bulk(
        options,
        _GENERATIONS.value,
        resume=_RESUME.value,
        rounds_at_a_time=_ROUNDS.value,
        choice_probs=_PROBS.value,
        prefix_cache_bytes=_PREFIXES.value,
        budget=budget,
        notify=notify,
      )
    if not is_primary():
      return
    part = part_path(_GENERATIONS.value, 0, jax.process_count())
    if not done.num_calls:
      print(printable(f'{part} has all continuations already'))
      return
    print(
      f'{done.num_tokens:,} tokens, {done.num_tokens / done.num_calls:.2f} per target call,'
      f' {done.num_tokens / done.seconds:,.0f} tokens/s; loading {done.loading:.1f} s, compiling'
      f' {done.compiling:.1f} s, {done.num_prompt_tokens:,} tokens of prompts ({done.num_kept:,} kept,'
      f' in {done.num_hits:,} prompts) and the new ones {done.seconds:.1f} s;'
      f' {printable(str(part))}'
    )
    if done.rounds:
      by_guesses = ', '.join(f'{number:,} with {guesses}' for guesses, number in done.rounds.items())
      print(f'budget {_BUDGET.value}: rounds {by_guesses} guesses a row')

  command_line.run(
    main,
    [
      '--prompts=prompts.jsonl --generations=out.jsonl --method=race_traversal --batch_size=32',
      '--prompts=prompts.jsonl --generations=out.jsonl --method=race_traversal --batch_size=32 --resume',
      '--prompts=prompts.jsonl --generations=out.jsonl --method=auto --temperature=0',
    ],
  )
