"""Continuations in bulk: a file that grows, survives any end, and is gone on with."""

import json
import pathlib
import re
import signal
import time

import commands
import jax
import jax.monitoring
import numpy as np
import pytest

import spectr_jax
from decode.bulk import decode_bulk
from decode.experiment.drafting import budget_of
from decode.experiment.latency import CompilingClock
from decode.experiment.options import DecodeOptions
from decode.experiment.run import run_decode
from tests.slow import slow

ROOT = pathlib.Path(__file__).parents[2]
_TEXT = 'the quick brown fox jumps over the lazy dog while seven wise owls watch from the old oak tree'


@pytest.fixture(scope='module')
def many_prompts(tmp_path_factory):
  path = tmp_path_factory.mktemp('many') / 'prompts.jsonl'
  rng, words = np.random.default_rng(0), _TEXT.split()
  texts = [' '.join(rng.choice(words, rng.integers(1, 6))) for _ in range(23)]
  path.write_text('\n'.join(json.dumps({'prompt': text, 'id': f'p{i}'}) for i, text in enumerate(texts)))
  return path


def _options(pair, prompts, **more):
  fields = {'method': ('spectr',), 'num_drafts': (2,), 'draft_length': (2,), 'max_new_tokens': 8, 'batch_size': 4}
  return DecodeOptions.of(**pair, prompts=str(prompts), **fields | more)


def read(path):
  return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def by_place(entries):
  placed = {(entry['seed'], entry['index'], entry['sample']): entry for entry in entries}
  assert len(placed) == len(entries)
  return placed


@pytest.mark.usefixtures('highest')
def test_continuations_are_those_of_a_comparison(pair, many_prompts, tmp_path):
  options = _options(pair, many_prompts, num_seeds=2, num_samples=2, logprobs=True, stop=(' ', 'e'))
  seen = []
  begin = time.perf_counter()
  found = decode_bulk(options, tmp_path / 'out.jsonl', notify=lambda *args: seen.append(args))
  took = time.perf_counter() - begin
  run = run_decode(options)
  entries = by_place(read(tmp_path / 'out.jsonl'))
  assert len(entries) == 92
  for measured in run.measurements:
    for row in range(46):
      prompt = run.prompts[row // 2]
      entry = entries[measured.seed, prompt.index, row % 2]
      assert (entry['id'], entry['prompt']) == (prompt.id, prompt.text)
      assert entry['tokens'] == measured.tokens[row, : measured.lengths[row]].tolist()
      assert entry['target_calls'] == measured.num_target_calls[row]
      np.testing.assert_allclose(
        entry['logprobs'], measured.logprobs[row, : measured.lengths[row]], rtol=1e-4, atol=1e-5
      )
      text = run.tokenizer.decode(entry['tokens'])
      end = re.search('[ e]', text)
      assert entry['text'] == (text if end is None else text[: end.start()])
      assert (entry['finish_reason'] == 'stop') == (end is not None)
      setting = [entry[name] for name in ('method', 'num_drafts', 'tree', 'is_lossless')]
      assert setting == ['spectr', 2, 'chains', True]
  assert found.num_tokens == sum(len(entry['tokens']) for entry in entries.values())
  assert found.num_calls == sum(entry['target_calls'] for entry in entries.values())
  assert found.num_prompt_tokens == 4 * sum(len(run.tokenizer.encode_prompt(prompt.text)) for prompt in run.prompts)
  assert min(found.loading, found.compiling, found.seconds) > 0
  assert found.loading + found.compiling + found.seconds < took
  assert seen[0] == ('compiling and decoding', 0, 92)
  assert re.fullmatch(r'decoding; [\d,]+ tokens/s', seen[-1][0])
  assert seen[-1][1:] == (92, 92)
  # What is there already is not decoded again.
  assert decode_bulk(options, tmp_path / 'out.jsonl', resume=True)[:2] == (0, 0)
  assert by_place(read(tmp_path / 'out.jsonl')) == entries


def test_speeds_leave_compiling_out():
  with CompilingClock() as clock:
    jax.jit(lambda x: jax.jit(_slowly_traced)(x) + 1)(1.0)
    jax.monitoring.record_event_duration_secs('/jax/other', 1000.0)
    first = clock.seconds
    time.sleep(0.3)
    assert clock.seconds == first  # nothing was compiled
  assert 0.5 <= first < 1.0  # a trace within another counts once
  jax.jit(lambda x: x - 1.25)(1.0)
  assert clock.seconds == first


def _slowly_traced(x):
  time.sleep(0.5)
  return x * 2


@pytest.mark.parametrize('more', [slow({}), {'num_samples': 2, 'batch_size': 3}])
def test_lines_have_the_probabilities_of_all_choices(pair, many_prompts, tmp_path, more):
  pytest.importorskip('outlines_core', reason='needs the extra grammar')
  choices = ('fox', 'ow', 'oww')
  options = _options(pair, many_prompts, choice=choices, num_prompts=7, **more)
  decode_bulk(options, tmp_path / 'out.jsonl', choice_probs=True)
  target, tokenizer = spectr_jax.load_model(pair['target'])
  entries = read(tmp_path / 'out.jsonl')
  assert len(entries) == 7 * options.sampling.num_samples
  for entry in entries:
    prompt, found = tokenizer.encode_prompt(entry['prompt']), entry['choice_probs']
    encoded = [tokenizer.encode(choice) for choice in choices]
    is_beginning = [any(each != own and each[: len(own)] == own for each in encoded) for own in encoded]
    assert is_beginning == [False, True, False]
    assert [each['choice'] for each in found] == list(choices)
    for each, own, begins in zip(found, encoded, is_beginning):
      ends = [[end] for end in tokenizer.eos_ids] if begins else [[]]
      texts = [[*prompt, *own, *end] for end in ends]
      likelihood = spectr_jax.log_likelihood(target, texts)
      alone = [likelihood.of(row, len(prompt), len(text))[0] for row, text in enumerate(texts)]
      assert each['logprob'] == pytest.approx(np.logaddexp.reduce(alone), abs=1e-3)
    total = np.logaddexp.reduce([each['logprob'] for each in found])
    assert [each['prob'] for each in found] == pytest.approx([np.exp(each['logprob'] - total) for each in found])
  decode_bulk(options, tmp_path / 'out.jsonl', choice_probs=True, resume=True)
  with pytest.raises(ValueError, match='choice_probs True, and this run None'):
    decode_bulk(options, tmp_path / 'out.jsonl', resume=True)


def test_the_last_line_is_as_the_page_shows(pair, many_prompts, tmp_path):
  (line,) = commands.succeed('decode.bulk', *flags(pair, many_prompts, tmp_path / 'OUT.jsonl')).splitlines()
  assert line.endswith(f'; {tmp_path}/OUT.jsonl')
  shown = re.sub(r'\b\d[\d,.]*', 'N', line.replace(f'{tmp_path}/', ''))
  assert f'```\n{shown}\n```' in (ROOT / 'docs' / 'commands.md').read_text(encoding='utf-8')


def test_probabilities_need_choices(pair, many_prompts, tmp_path):
  with pytest.raises(ValueError, match='choice_probs needs choices: --choice'):
    decode_bulk(_options(pair, many_prompts), tmp_path / 'out.jsonl', choice_probs=True)
  assert not (tmp_path / 'out.jsonl').exists()


@pytest.mark.usefixtures('highest')
@pytest.mark.parametrize(('word', 'guesses'), [('8', {'1x2', '2x2'}), ('0', {'0'})])
def test_a_budget_leaves_greedy_texts_as_they_are(pair, many_prompts, tmp_path, word, guesses):
  """Rows share it: two drafts of two tokens for two rows, which are left in the end. Lines say it, and so do counts."""
  options = _options(pair, many_prompts, temperature=0.0)
  decode_bulk(options.replace(method=('autoregressive',)), tmp_path / 'plain.jsonl')
  done = decode_bulk(options, tmp_path / 'out.jsonl', budget=budget_of(word))
  plain, found = (by_place(read(tmp_path / f'{name}.jsonl')) for name in ('plain', 'out'))
  assert {place: entry['text'] for place, entry in found.items()} == {i: entry['text'] for i, entry in plain.items()}
  assert {entry['run']['budget'] for entry in found.values()} == {int(word)}
  assert set(done.rounds) == guesses
  with pytest.raises(ValueError, match='run'):
    decode_bulk(options, tmp_path / 'out.jsonl', budget=budget_of('auto'), resume=True)


@pytest.mark.parametrize('word', ['fast', '-1', '1.5', ''])
def test_words_that_are_no_budget(word):
  assert budget_of('off') is None
  with pytest.raises(ValueError, match='budget must be auto, off or a number'):
    budget_of(word)


def flags(pair, prompts, path, *arguments, **options):
  values = {**pair, 'prompts': prompts, 'generations': path, 'method': 'spectr', 'num_drafts': 2, 'draft_length': 2}
  values |= {'max_new_tokens': 8, 'batch_size': 4, 'rounds_at_a_time': 1} | options
  return [*(f'--{name}={value}' for name, value in values.items()), *arguments]


def start(*arguments, **options):
  return commands.start('decode.bulk', *flags(*arguments, **options))


@pytest.mark.slow
def test_four_thousand_prompts_take_no_more_memory_than_one_thousand(pair, tmp_path):
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text(''.join(f'the {i % 97} old owls\n' for i in range(4_000)))
  sizes = {}

  def look(what, done, total):
    sizes[done] = int(re.search(r'VmRSS:\s+(\d+) kB', pathlib.Path('/proc/self/status').read_text())[1]) / 1024

  options = _options(pair, prompts, num_prompts=4_000, batch_size=200, max_new_tokens=4)
  decode_bulk(options, tmp_path / 'out.jsonl', notify=look)
  print(f'\nresident after 1,000 continuations {sizes[1000]:.0f} MiB, after 4,000 {sizes[4_000]:.0f} MiB')
  assert sizes[4_000] < sizes[1000] + 8


@pytest.mark.slow
def test_several_processes_write_parts(pair, many_prompts, tmp_path):
  commands.succeed('decode.bulk', *flags(pair, many_prompts, tmp_path / 'whole.jsonl'))
  path = tmp_path / 'out.jsonl'
  outputs = [
    commands.finish(process) for process in commands.start_two('decode.bulk', *flags(pair, many_prompts, path))
  ]
  assert ['tokens/s' in output for output in outputs] == [True, False]
  parts = ['out-00000-of-00002.jsonl', 'out-00001-of-00002.jsonl']
  assert sorted(path.name for path in tmp_path.glob('out*')) == parts
  entries = [read(tmp_path / part) for part in parts]
  assert [len(part) for part in entries] == [12, 11]
  assert by_place(entries[0] + entries[1]) == by_place(read(tmp_path / 'whole.jsonl'))
  # What a part has lost is decoded again, by the process whose part it is.
  (tmp_path / parts[1]).write_text('')
  processes = commands.start_two('decode.bulk', *flags(pair, many_prompts, path, '--resume'))
  assert 'has all continuations already' in commands.finish(processes[0])
  commands.finish(processes[1])
  assert by_place(read(tmp_path / parts[1])) == by_place(entries[1])


@pytest.mark.slow
@pytest.mark.usefixtures('own_programs')
def test_a_run_that_is_killed_at_any_moment_is_gone_on_with(pair, many_prompts, tmp_path):
  # So many that no machine ends between two looks at the file.
  commands.succeed('decode.bulk', *flags(pair, many_prompts, tmp_path / 'straight.jsonl', num_seeds=30))
  wanted = by_place(read(tmp_path / 'straight.jsonl'))
  assert len(wanted) == 690
  path, rng = tmp_path / 'killed.jsonl', np.random.default_rng(3)

  def num_lines():
    return path.read_bytes().count(b'\n') if path.exists() else 0

  def kill_when(is_time):
    process = start(pair, many_prompts, path, '--resume', num_seeds=30)
    while process.poll() is None and not is_time():
      time.sleep(0.001)
    # A moment later: while others are written or decoded.
    time.sleep(float(rng.uniform(0, 0.01)))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL

  # At its start, where the file may be there or not.
  kill_when(path.exists)
  kill_when(path.exists)
  for _ in range(4):
    target = num_lines() + int(rng.integers(1, 6))
    kill_when(lambda target=target: num_lines() >= target)
  assert 4 <= num_lines() < 690
  commands.succeed('decode.bulk', *flags(pair, many_prompts, path, '--resume', num_seeds=30))
  assert by_place(read(path)) == wanted


@pytest.mark.slow
def test_a_second_run_is_refused_before_it_loads_anything(pair, many_prompts, tmp_path):
  path = tmp_path / 'out.jsonl'
  process = start(pair, many_prompts, path)
  while process.poll() is None and not path.exists():
    time.sleep(0.01)
  for more in ((), ('--resume',)):
    line = commands.refuse('decode.bulk', *flags(pair, many_prompts, path, *more))
    assert line == f'error: generations: {path} is being written by another process'
  commands.finish(process)
  assert len(by_place(read(path))) == 23
  assert [file.name for file in tmp_path.iterdir()] == ['out.jsonl']


def test_a_file_that_the_run_reads_is_no_output(pair, many_prompts, tmp_path):
  before = many_prompts.read_bytes()
  for more in ((), ('--resume',)):
    line = commands.refuse('decode.bulk', *flags(pair, many_prompts, many_prompts, *more))
    assert line == f'error: generations would overwrite {many_prompts}, which prompts reads'
  line = commands.refuse('decode.bulk', *flags(pair, many_prompts, f'{pair["draft"]}/config.json', '--resume'))
  assert line.endswith('draft/config.json, which draft reads')
  line = commands.refuse('decode.bulk', *flags(pair, many_prompts, tmp_path))
  assert line == f'error: generations: cannot write {tmp_path}: it exists and is not a regular file'
  assert many_prompts.read_bytes() == before


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'method': ('spectr', 'race')}, 'one method, K, L and tree at a time, got 2'),
    ({'num_drafts': (1, 2)}, 'one method, K, L and tree at a time, got 2'),
    ({'tree': ('optimal:4',)}, 'optimal trees are chosen by decode.main'),
    ({'breakdown': True}, 'breakdown is not for decode.bulk'),
    ({'share_of_optimum': True}, 'share_of_optimum is not for decode.bulk'),
    ({'profile_dir': 'profile'}, 'profile_dir is not for decode.bulk'),
  ],
)
def test_what_it_does_not_take(pair, many_prompts, tmp_path, fields, message):
  with pytest.raises(ValueError, match=message):
    decode_bulk(_options(pair, many_prompts, **fields), tmp_path / 'out.jsonl')
  assert not (tmp_path / 'out.jsonl').exists()
