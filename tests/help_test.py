"""`--help` of every command: its own options in groups, within the terminal, and examples that it takes."""

import re
import shlex

import pytest

from spectr_jax import METHODS, get_method
from spectr_jax.suggestion import did_you_mean
from tests import commands

_COMMANDS = {
  **dict.fromkeys([f'decode.{name}' for name in ('main', 'bulk', 'chat', 'trace')], 'Method and tree'),
  **dict.fromkeys(
    ['decode.prove', 'decode.reproduce', 'decode.aot', 'decode.plot', 'train.main', 'train.head'], 'Options'
  ),
  **dict.fromkeys([f'train.{name}' for name in ('tokenizer', 'evaluate', 'prepare_data', 'aot')], 'Options'),
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
  found = [shlex.split(line) for line in examples.replace(' \\\n', ' ').splitlines()]
  assert 2 <= len(found) <= 4
  for words in found:
    assert words[:3] == ['python', '-m', command]
    words = (
      [word for word in words[3:] if not word.endswith(('.json', '.jsonl'))] if command == 'decode.plot' else words[3:]
    )
    assert all(re.match(r'--(config\.)?\w+(=|$)', word) for word in words)
    assert {word[2:].partition('=')[0].partition('.')[0] for word in words} <= _options(options)


def test_help_of_decoding_takes_two_screens():
  shown = commands.succeed('decode.main', '--help', COLUMNS='80')
  assert len(shown.splitlines()) <= 110
  places = [shown.index(f'\n{title}\n') for title in ('Models', 'Method and tree', 'Prompts', 'Sampling', 'Machine')]
  assert places == sorted(places)
  assert '[autoregressive,speculative,block,spectr,race_traversal]' in shown


def test_names_that_are_nearly_right():
  with pytest.raises(ValueError, match=r"unknown method 'race_traversel', did you mean race_traversal\?; allowed: "):
    get_method('race_traversel')
  assert did_you_mean('Spectr', METHODS) == ', did you mean spectr?'
  assert did_you_mean('nothing like it', METHODS) == ''
  assert commands.refuse('decode.main', '--draft=lokup') == 'error: no draft at lokup, did you mean lookup?'
  line = commands.refuse('decode.main', '--tree=chain')
  assert line.endswith("got 'chain', did you mean chains?")
