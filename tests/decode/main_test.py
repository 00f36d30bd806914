"""The command: what it writes, what it refuses, and what does not change its tokens."""

import json
import pathlib
import re
import shutil
import types

import commands
import numpy as np
import pytest

from decode.experiment.model_options import SHIPPED_TARGET
from decode.experiment.options import DecodeOptions
from decode.experiment.run import run_decode
from spectr_jax import METHODS
from tests.slow import slow

_RESULT_FIELDS = [
  'method', 'is_lossless', 'num_drafts', 'draft_length', 'tree', 'children', 'epsilon', 'temperature', 'num_nodes',
  'seed', 'num_prompts', 'tokens', 'target_calls', 'block_efficiency', 'block_efficiency_ci95',
  'acceptance_by_position', 'tokens_per_second', 'speedup', 'speedup_ci95', 'seconds_per_round',
  'share_of_optimum', 'share_of_optimum_ci95',
]  # fmt: skip


@pytest.fixture(scope='module')
def grid(pair, prompt_file, tmp_path_factory):
  directory = tmp_path_factory.mktemp('grid')
  ran = commands.run(
    'decode.main', *(f'--{role}={path}' for role, path in pair.items()),
    '--method=autoregressive,speculative,spectr', '--num_drafts=1,2', '--draft_length=2',
    f'--prompts={prompt_file}', '--batch_size=2', '--max_new_tokens=9',
    '--num_seeds=2', '--seed=5', f'--output={directory / "o.json"}', f'--generations={directory / "g.jsonl"}',
  )  # fmt: skip
  assert ran.returncode == 0, ran.stderr
  return types.SimpleNamespace(
    stdout=ran.stdout,
    stderr=ran.stderr,
    files=sorted(path.name for path in directory.iterdir()),
    **json.loads((directory / 'o.json').read_text()),
    generations=[json.loads(line) for line in (directory / 'g.jsonl').read_text().splitlines()],
  )


def test_json_has_its_fields_and_generations_add_up_to_it(grid):
  assert grid.files == ['g.jsonl', 'o.json']
  assert list(grid.run) == ['flags', 'versions', 'device', 'models', 'num_long_prompts', 'timed_together', 'seconds']
  assert list(grid.run['seconds']) == ['loading', 'compiling', 'prompts', 'prompt_tokens']
  assert [len(group) for group in grid.run['timed_together']] == [4]
  assert grid.acceptance == {}
  assert grid.run['flags']['num_drafts'] == [1, 2]
  assert [list(result) for result in grid.results] == [_RESULT_FIELDS] * 8
  settings = [
    ('autoregressive', 0, 0, 'none'),
    ('speculative', 1, 2, 'chains'),
    ('spectr', 1, 2, 'chains'),
    ('spectr', 2, 2, 'chains'),
  ]
  names = ('method', 'num_drafts', 'draft_length', 'tree', 'seed')
  described = [tuple(result[name] for name in names) for result in grid.results]
  assert described == [(*setting, seed) for setting in settings for seed in (5, 6)]
  for result in grid.results:
    assert result['is_lossless'] is True
    assert (result['temperature'], result['num_prompts']) == (1.0, 3)
    assert result['block_efficiency'] == result['tokens'] / result['target_calls']
    low, high = result['block_efficiency_ci95']
    assert low <= result['block_efficiency'] <= high
    assert len(result['acceptance_by_position']) == result['draft_length']
    assert result['tokens_per_second'] > 0
  for result in grid.results[:2]:
    assert (result['block_efficiency'], result['block_efficiency_ci95'], result['speedup']) == (1.0, [1.0, 1.0], 1.0)
    assert result['acceptance_by_position'] == []
  assert len(grid.generations) == 8 * 3
  fields = ['id', 'prompt', 'method', 'is_lossless', 'num_drafts', 'draft_length', 'tree', 'children', 'epsilon']
  fields += ['temperature', 'seed', 'sample', 'tokens', 'text', 'target_calls', 'finish_reason']
  for place, result in enumerate(grid.results):
    lines = grid.generations[3 * place : 3 * place + 3]
    assert [list(line) for line in lines] == [fields] * 3
    assert [line['id'] for line in lines] == ['a', 1, 7]
    for name in ('method', 'num_drafts', 'draft_length', 'seed'):
      assert {line[name] for line in lines} == {result[name]}
    assert sum(len(line['tokens']) for line in lines) == result['tokens']
    assert sum(line['target_calls'] for line in lines) == result['target_calls']
    assert all(1 <= len(line['tokens']) <= 9 for line in lines)


def test_the_table_and_the_progress_are_plain_lines(grid):
  assert '\x1b' not in grid.stdout + grid.stderr
  rows = [line.split()[:4] for line in grid.stdout.splitlines()]
  for row in (['autoregressive', 'yes', '-', '-'], ['speculative', 'yes', '1', '2'], ['spectr', 'yes', '2', '2']):
    assert rows.count(row) == 1
  assert 'A continuation by spectr K=2 L=2' in grid.stdout
  assert 'the quick' in grid.stdout
  assert grid.stderr.splitlines()[0] == '[0/4] compiling 1 of 4: autoregressive'
  assert any(line.startswith('[8/16] decoding, seed 6') for line in grid.stderr.splitlines())
  *lines, last = grid.stderr.splitlines()
  assert all(line.startswith('[') for line in lines)
  assert re.fullmatch(r'[\d.]+ s: loading [\d.]+, compiling [\d.]+, decoding [\d.]+(, \w+ [\d.]+)*', last)


@pytest.mark.parametrize(
  ('options', 'most'),
  [
    # Casts, the check of products in C++, keys, prefills, the first state, the loop; of bfloat16 the output heads, too.
    (['--method=block', '--dtype=bfloat16'], 12),
    slow(['--method=block'], 10),
    slow(['--method=autoregressive,block', '--num_samples=2', '--top_p=0.9', '--stop=the'], 17),
  ],
)
def test_a_command_compiles_few_modules(pair, prompt_file, options, most):
  arguments = *(f'--{role}={path}' for role, path in pair.items()), f'--prompts={prompt_file}', '--max_new_tokens=9'
  ran = commands.run('decode.main', *arguments, *options, '--draft_length=2', '--verbosity=0', JAX_LOG_COMPILES='true')
  compiled = re.findall(r'Finished XLA compilation of jit\(([^)]*)\)', ran.stderr)
  assert ran.returncode == 0, ran.stderr[-3000:]
  assert {'_read_target', '_read_draft', 'run_rounds'} <= {*compiled}
  assert len(compiled) <= most, ' '.join(compiled)


@pytest.mark.parametrize(
  'other', [{'seed': 6, 'batch_size': 2}, slow({'batch_size': 3}), slow({'batch_size': 1, 'num_prompts': 2})]
)
def test_tokens_do_not_depend_on_batch_or_grid(grid, pair, prompt_file, other):
  options = {'method': ('spectr',), 'num_drafts': (2,), 'seed': 5}
  options = DecodeOptions.of(**pair, draft_length=(2,), prompts=str(prompt_file), max_new_tokens=9, **(options | other))
  names = ('method', 'num_drafts', 'seed', 'prompt')
  wanted = {tuple(line[name] for name in names): line['tokens'] for line in grid.generations}
  compared = 0
  run = run_decode(options)
  for measured in run.measurements:
    for prompt, tokens, length in zip(run.prompts, measured.tokens, measured.lengths):
      key = (measured.setting.method.name, measured.setting.num_drafts, measured.seed, prompt.text)
      if key in wanted:
        assert tokens[:length].tolist() == wanted[key]
        assert np.all(tokens[length:] == -1)
        compared += 1
  assert compared == len(run.prompts)


@pytest.mark.slow
def test_the_pretrained_pair_runs_from_anywhere(tmp_path):
  arguments = '--num_prompts=2', '--max_new_tokens=4', '--draft_length=2', '--num_drafts=2', '--method=spectr'
  printed = commands.finish(commands.start('decode.main', *arguments, cwd=tmp_path))
  assert printed.startswith('target pretrained/target')
  assert 'spectr' in printed
  assert not list(tmp_path.iterdir())


def _bad_inputs(directory, pair):
  """Flags, and what the message must say; options that are refused by themselves are in settings_test."""
  target = pathlib.Path(pair['target'])

  rates = directory / 'rates.json'
  rates.write_text('{}')
  damaged = shutil.copytree(target, directory / 'damaged')
  largest = damaged / 'model.safetensors'
  largest.write_bytes(largest.read_bytes()[:-1])
  return [
    (['--num_draft=3'], ["Unknown command line flag 'num_draft'", '--help']),
    (['spectr'], ["unexpected argument 'spectr'", '--name=value']),
    (['--temperature=hot'], ['--temperature=hot']),
    (['--method='], [', '.join(METHODS)]),
    (['--num_drafts=4,x'], ['num_drafts', 'whole numbers of at least 1', "'4,x'"]),
    (['--draft_length=1.5'], ['draft_length', 'whole numbers', '1.5']),
    (
      ['--method=spectr', '--tree=optimal:4', f'--acceptance={rates}'],
      ['rates.json', '"acceptance"'],
    ),
    (['--max_new_tokens=64'], ['max_new_tokens 64', '64 tokens', 'at most 62']),
    (['--prompt='], ['--prompt', 'empty']),
    ([f'--prompt={"owl " * 99}'], ['--prompt', 'too long', 'at most 60']),
    ([f'--target={directory / "none"}'], ['no model at', 'config.json']),
    ([f'--target={damaged}'], [largest.name, 'damaged/']),
    ([f'--target={SHIPPED_TARGET}'], ['tokenizer', 'the shipped one, since none is given: give --target']),
    ([f'--output={directory / "none" / "o.json"}'], ['output', 'no directory']),
    ([f'--output={directory / "o"}', f'--generations={directory / "o"}'], ['same file']),
  ]


def test_bad_input_is_one_clear_line(tmp_path, pair):
  common = *(f'--{role}={path}' for role, path in pair.items()), '--max_new_tokens=4'
  kept = tmp_path / 'kept.json'
  kept.write_text('old')
  wrong = []
  for arguments, parts in _bad_inputs(tmp_path, pair):
    line = commands.refuse('decode.main', *common, f'--output={kept}', *arguments)
    if not all(part in line for part in parts) or kept.read_text() != 'old' or list(tmp_path.glob('*.unfinished')):
      wrong.append((arguments, parts, line))
  assert not wrong


def test_a_process_of_its_own_ends_in_one_line():
  """What it imports first, before anything is refused, prints nothing."""
  process = commands.start('decode.main', '--num_draft=3')
  out, err = process.communicate(timeout=300)
  assert process.returncode == 1
  assert out == ''
  (line,) = err.splitlines()
  assert line.startswith("error: Unknown command line flag 'num_draft'")
