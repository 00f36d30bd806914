"""`--help` of every command: its own options in groups, within the terminal, and examples that it takes."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import numpy
import pytest

from spectr_jax import METHODS
from spectr_jax.methods import get_method
from spectr_jax.suggestion import did_you_mean
from tests import commands, documented
from train import config_flag

_ROOT = pathlib.Path(__file__).parents[1]

_COMMANDS = {
  **dict.fromkeys([f'decode.{name}' for name in ('main', 'bulk', 'chat', 'trace')], 'Method and tree'),
  **dict.fromkeys([f'decode.{name}' for name in ('prove', 'reproduce', 'aot', 'plot')], 'Options'),
  **dict.fromkeys([f'train.{n}' for n in ('main', 'head', 'tokenizer', 'evaluate', 'prepare_data', 'aot')], 'Options'),
}


def _options(text):
  return set(re.findall(r'--(?:\[no\])?(\w+)', text))


@pytest.mark.parametrize('command', _COMMANDS)
def test_help_is_of_the_command_and_fits_the_terminal(command):
  for columns in (60, 80):
    shown = commands.succeed(command, '--help', COLUMNS=str(columns))
    assert f'\n{_COMMANDS[command]}\n' in shown
    assert f'  python -m {command} ' in shown
    assert not re.search('logtostderr|pdb_post_mortem|jax_', shown)  # absl's and JAX's own
    # A line is longer only if it is one word.
    assert not [line for line in shown.splitlines() if len(line) > columns and len(line.rstrip(' \\').split()) > 1]
  what, _, options = shown.partition('\nExamples\n')
  examples, _, options = options.partition('\n\n')
  assert what.split('\n\n')[0].endswith('.')
  examples = [shlex.split(line) for line in examples.replace(' \\\n', ' ').splitlines()]
  assert 2 <= len(examples) <= 4
  for words in examples:
    assert words[:3] == ['python', '-m', command]
    files = ('.json', '.jsonl', '.csv') if command == 'decode.plot' else ()
    words = [word for word in words[3:] if not word.endswith(files)]
    assert all(re.match(r'--(config\.)?\w+(=|$)', word) for word in words)
    assert {word[2:].partition('=')[0].partition('.')[0] for word in words} <= _options(options)


# Shows the help of each command in a process of its own, where packages that no other needs are not there.
_SHOW = """
import json, os, runpy, sys
import spectr_jax
shown = {}
for command in sys.argv[1:]:
  reader, writer = os.pipe()
  pid = os.fork()
  if not pid:
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(reader)
    module, *arguments = command.split()
    sys.argv = [module, *arguments, '--help']
    try:
      runpy.run_module(module, run_name='__main__', alter_sys=True)
    finally:
      sys.stdout.flush()
  os.close(writer)
  with os.fdopen(reader) as pipe:
    shown[command] = pipe.read()
  os.waitpid(pid, 0)
print(json.dumps(shown))
"""


def _run(packages, *arguments):
  """Runs Python with the packages of a folder, and no others."""
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'COLUMNS': '80', 'PYTHONPATH': str(packages)}
  command = [sys.executable, '-W', 'ignore', '-S', *arguments]
  return subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope='module')
def core(tmp_path_factory):
  """A folder of the packages that the library needs without extras, and no others."""
  folder, site = tmp_path_factory.mktemp('core'), pathlib.Path(numpy.__file__).parents[1]
  for name in ('jax', 'jaxlib', 'ml_dtypes', 'numpy', 'opt_einsum', 'scipy'):
    for path in (*site.glob(name), *site.glob(f'{name}.libs'), *site.glob(f'{name}-*.dist-info')):
      (folder / path.name).symlink_to(path)
  (folder / 'spectr_jax').symlink_to(_ROOT / 'spectr_jax')
  return folder


def _check_help_without_extras(core, every):
  """It is the same, and at its end says what is missing."""
  ran = _run(core, '-c', _SHOW, *every)
  assert ran.returncode == 0, ran.stderr
  for command, shown in json.loads(ran.stdout).items():
    text, end = shown.rsplit('\n\n', 1)
    whole = commands.succeed(*command.split(), '--help', COLUMNS='80')
    assert whole.rsplit('\n\n', 1) == [text, '--helpfull says more of each option.\n'], command
    assert re.search(r"this needs absl,[\w,\s]+: pip install -e\s'\.\[(commands|train)\]'", end), command


def test_help_needs_no_extra(core):
  _check_help_without_extras(core, ['decode.serve', 'train.tokenizer', 'train.main --config=configs/lm1b.py:6m'])
  ran = _run(core, '-m', 'train.tokenizer', '--config=x')
  assert (ran.returncode, ran.stdout, ran.stderr.count('\n')) == (1, '', 1)
  assert ran.stderr.startswith('error: this needs absl, ')


@pytest.mark.slow
def test_help_of_all_needs_no_extra(core):
  assert len(documented.modules()) > 25
  _check_help_without_extras(core, documented.modules())


@pytest.mark.parametrize(('command', 'config', 'number'), [
  ('train.main', '', 34), ('train.tokenizer', '', 34), ('train.aot', 'configs/family.py:2m', 34),
  ('train.main', 'configs/stdlib_pair.py:draft', 34), ('train.head', '', 30),
  ('train.head', 'configs/head.py:dspark', 30),
])  # fmt: skip
def test_help_names_the_fields_of_the_experiment(command, config, number):
  shown = commands.succeed(command, *([f'--config={config}'] if config else []), '--help', COLUMNS='80')
  path = config or ('configs/head.py' if command == 'train.head' else 'configs/base.py')
  assert f'\nFields, and what they are in {path}\n' in shown
  values = config_flag.load(path)
  flat = {name: value for name, value in values.items() if not hasattr(value, 'items')}
  flat |= {f'model.{name}': value for name, value in values.get('model', {}).items()}
  assert len(flat) >= number
  fields = re.findall(r"^  --config\.([\w.]+)=('.*?'|\S*)", shown, re.MULTILINE)
  assert {name: ''.join(shlex.split(value)) for name, value in fields} == {n: str(x) for n, x in flat.items()}


def test_fields_have_the_comments_of_their_file(tmp_path):
  path = tmp_path / 'own.py'
  path.write_text(
    'import ml_collections\n\ndef get_config():\n  config = ml_collections.ConfigDict()\n'
    "  # Of both.\n  config.one = '# 1'  # First.\n  config.two = (1, 2)\n\n"
    '  config.three = 3.5\n  return config\n'
  )
  (both, *others) = config_flag.sections_of(str(path))
  assert (both.text, others) == ('Of both.', [])
  assert [(entry.name, entry.what) for entry in both.entries] == [
    ("--config.one='# 1'", 'First.'), ("--config.two='(1, 2)'", ''), ('--config.three=3.5', ''),
  ]  # fmt: skip


def test_help_of_decoding_takes_two_screens_and_that_of_one_setting_offers_one():
  shown = commands.succeed('decode.main', '--help', COLUMNS='80')
  assert len(shown.splitlines()) <= 110
  places = [shown.index(f'\n{title}\n') for title in ('Models', 'Method and tree', 'Prompts', 'Sampling', 'Machine')]
  assert places == sorted(places)
  assert '[autoregressive,block,race_traversal]' in shown
  assert '--num_drafts=A,B' in shown
  shown = commands.succeed('decode.chat', '--help', COLUMNS='80')
  assert all(f'--{name}' in shown for name in ('method=NAME', 'num_drafts=N', 'draft_length=N'))


def test_names_that_are_nearly_right():
  with pytest.raises(ValueError, match=r"unknown method 'race_traversel', did you mean race_traversal\?; allowed: "):
    get_method('race_traversel')
  assert did_you_mean('Spectr', METHODS) == ', did you mean spectr?'
  assert did_you_mean('nothing like it', METHODS) == ''
  assert commands.refuse('decode.main', '--draft=lokup') == 'error: no draft at lokup, did you mean lookup?'
  line = commands.refuse('decode.main', '--tree=chain')
  assert line.endswith("got 'chain', did you mean chains?")
