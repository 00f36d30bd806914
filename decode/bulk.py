"""Continues many prompts by one method: `python -m decode.bulk --method=NAME --prompts=FILE --generations=FILE`.

Finished rows are refilled with the next prompts, and every continuation is appended to the file as soon as it is
complete. `--resume` continues a run that ended early for any reason. No prompt is lost and none is decoded twice. Every
line records what determines it, and a file of another run is refused.

With N processes, each decodes every N-th prompt on its own devices and writes its own part of the output, named in an
index. They find each other like those of `decode.main`, and the first one prints.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

import jax
from absl import flags

from common import command_line, processes
from common.output_files import check_apart
from common.printable import printable
from decode.experiment.auto_choice import speeds_of
from decode.experiment.console import show_progress
from decode.experiment.generation_file import GenerationFile, check_parts, part_path, write_index
from decode.experiment.options import DecodeOptions
from decode.experiment.records import OPTIONS, describe_continuation, describe_prompt, describe_run
from decode.experiment.settings import only_setting
from decode.experiment.workload import Workload
from spectr_jax.auto.trial import Notify
from spectr_jax.engine.generate import generate_many
from spectr_jax.engine.rows import Request
from spectr_jax.engine.state import sample_keys
from spectr_jax.sharding import is_primary


def decode_bulk(
  options: DecodeOptions, path: str, *, resume: bool = False, rounds_at_a_time: int = 4, notify: Notify | None = None
) -> tuple[int, int, float]:
  """Continues every prompt with every seed, as many times as there are samples, appending to a file.

  Args:
    options: The options. They name one method, K, L and tree, or `auto`, which chooses them.
    path: The file. With several processes the names of their parts derive from it.
    resume: Whether to continue an existing file.
    rounds_at_a_time: Rounds between two checks for finished rows.
    notify: Called with the current activity, the number of continuations in the file, and their final number.

  Returns:
    New tokens, target calls, and seconds of decoding including compilation, of this run and process alone.
  """
  notify = notify or (lambda what, done, total: None)
  options.check_unused(OPTIONS['refused'], 'decode.bulk, which measures nothing')
  process, num_processes = jax.process_index(), jax.process_count()
  setting = None if options.is_auto else only_setting(options)
  part = part_path(path, process, num_processes)
  check_apart({'generations': part}, options.inputs())
  num_tokens = num_calls = 0
  with GenerationFile(part, resume=resume) as file:
    check_parts(path, num_processes)
    work = Workload.load(options, is_local=True)
    if setting is None:
      setting = speeds_of(work, notify)[0][0].setting
    prompts, stop = work.prompts, work.stop
    # By index, so that a prompt stays in its part whatever others are left out.
    own = [row for row, prompt in enumerate(prompts) if prompt.index % num_processes == process]
    if process == 0:
      write_index(path, num_processes)
    described = {prompts[row].index: describe_prompt(prompts[row]) for row in own}
    file.begin(describe_run(work, setting), described, process=process, num_processes=num_processes)
    places = itertools.product(options.seeds, (prompts[row].index for row in own), range(options.num_samples))
    total = len(own) * options.num_seeds * options.num_samples
    num_done = sum(place in file.done for place in places)

    def requests() -> Iterator[Request]:
      for seed in options.seeds:
        keys = work.keys(seed)
        for row in own:
          missing = [i for i in range(options.num_samples) if (seed, prompts[row].index, i) not in file.done]
          samples = sample_keys(keys[row : row + 1], options.num_samples) if missing else ()
          for sample in missing:
            name, tokens = (seed, row, sample), work.tokens[row, : work.lengths[row]]
            yield Request(name, tokens, samples[sample], constraint=work.constraint)

    notify('compiling and decoding', num_done, total)
    start = time.perf_counter()
    for continuation in generate_many(
      work.target,
      setting.drafter(work.draft),
      requests(),
      batch_size=options.batch_size,
      longest_prompt=int(work.lengths.max()),
      max_new_tokens=options.max_new_tokens,
      method=setting.method,
      tree=setting.tree,
      rounds_at_a_time=rounds_at_a_time,
      sampling=options.sampling,
      eos_id=work.tokenizer.eos_ids,
      sharding=work.sharding,
      logprobs=options.logprobs,
      stop=stop,
    ):
      seed, row, sample = continuation.name
      prompt = prompts[row]
      entry = describe_continuation({}, prompt, seed, sample, continuation, work.tokenizer, stop)
      corpus = {'lookup_corpus': list(options.lookup_corpus)} if options.lookup_corpus else {}
      file.append({'index': prompt.index} | described[prompt.index] | entry | corpus)
      num_tokens += len(continuation.tokens)
      num_calls += continuation.num_target_calls
      num_done += 1
      speed = num_tokens / (time.perf_counter() - start)
      notify(f'decoding; {speed:,.0f} tokens/s', num_done, total)
    seconds = time.perf_counter() - start
  return num_tokens, num_calls, seconds


if __name__ == '__main__':
  from decode.experiment.option_flags import read_options  # defines flags

  _GENERATIONS = flags.DEFINE_string('generations', None, 'JSONL file that grows by continuations.', required=True)
  _RESUME = flags.DEFINE_bool('resume', False, 'Go on with the file: what it has is not decoded again.')
  _ROUNDS = flags.DEFINE_integer(
    'rounds_at_a_time', 4, 'Rounds between two looks at which rows are done.', lower_bound=1
  )
  # A comparison takes a sample of the prompts; this command takes all.
  flags.FLAGS.set_default('num_prompts', 2**31 - 1)

  def main(argv):
    del argv
    processes.run_together(decode)

  def decode():
    options = read_options()
    with show_progress() if is_primary() else contextlib.nullcontext() as notify:
      num_tokens, num_calls, seconds = decode_bulk(
        options, _GENERATIONS.value, resume=_RESUME.value, rounds_at_a_time=_ROUNDS.value, notify=notify
      )
    if not is_primary():
      return
    part = part_path(_GENERATIONS.value, 0, jax.process_count())
    if not num_calls:
      print(printable(f'{part} has all continuations already'))
      return
    print(
      f'{num_tokens:,} tokens, {num_tokens / num_calls:.2f} per target call, {num_tokens / seconds:,.0f} tokens/s with'
      f' compilation; {printable(str(part))}'
    )

  command_line.run(
    main,
    [
      '--prompts=prompts.jsonl --generations=out.jsonl --method=race_traversal --batch_size=32',
      '--prompts=prompts.jsonl --generations=out.jsonl --method=race_traversal --batch_size=32 --resume',
      '--prompts=prompts.jsonl --generations=out.jsonl --method=auto --temperature=0',
    ],
  )
