"""The form of what stands in `findings/`; the scripts themselves install packages and are run by `findings/run`."""

import os
import re

import documented
import pytest

_FOLDER = documented.ROOT / 'findings'
_SCRIPTS = sorted(_FOLDER.glob('*.sh'))
_OWN = 'spectr_jax', 'decode', 'common', 'train', 'benchmarks', 'integrations', 'configs'


def _installed(text):
  """The requirements of every `pip install` of a script."""
  commands = re.findall(r'/pip" install(.*)$', text, re.MULTILINE)
  return [word for command in commands for word in command.split() if not word.startswith('-')]


def _check(path):
  text = path.read_text(encoding='utf-8')
  assert os.access(path, os.X_OK), f'{path.name} lacks the run bit'
  lines = text.splitlines()
  assert lines[0] == '#!/usr/bin/env bash'
  head = '\n'.join(lines[: lines.index('set -euo pipefail')])
  library = re.search(r'^# Library: (.*)', head, re.MULTILINE)[1]
  versions = re.findall(r'([\w-]+) (\d+(?:\.\d+)+)', library)
  assert versions, f'{path.name} names no version'
  assert '\n# Behavior: ' in head
  assert '\n# Output seen: ' in head
  assert '\n# Exits with 1 if ' in head
  assert 'work=$(mktemp -d)\ntrap \'rm -rf "$work"\' EXIT\n' in text
  assert 'python3 -m venv "$work/venv"' in text
  assert len(re.findall(r'\bpip\b', text)) == text.count('/pip" install')  # nothing is installed elsewhere
  packages = _installed(text)
  assert packages
  unpinned = [package for package in packages if not re.fullmatch(r'[\w.-]+==\d[\w.]*', package)]
  assert not unpinned, f'{path.name} does not pin {unpinned}'
  assert {f'{name}=={version}' for name, version in versions} <= set(packages)
  own = re.search(rf'\b(import|from) ({"|".join(_OWN)})\b|PYTHONPATH|--editable|install -e', text)
  assert own is None, f'{path.name} uses this project'
  assert re.search(r'sys\.exit\(0 if .* else 1\)', text)
  assert f'({path.name})' in (_FOLDER / 'README.md').read_text(encoding='utf-8')


def test_findings_have_the_form():
  assert len(_SCRIPTS) >= 3
  for path in _SCRIPTS:
    _check(path)


@pytest.mark.parametrize(('old', 'new'), [
  ('==', '>='),
  ('trap ', '# trap '),
  ('import jax\n', 'import jax\nimport spectr_jax\n'),
  ('# Library: jax 0.10.2', '# Library: jax'),
  ('# Library: jax 0.10.2', '# Library: jax 0.10.1'),
  (' else 1)', ' else 0)'),
  ('work=$(mktemp -d)', 'work=.'),
])  # fmt: skip
def test_what_lacks_the_form_is_found(tmp_path, old, new):
  text = (_FOLDER / 'jax_categorical.sh').read_text(encoding='utf-8')
  assert old in text
  copy = tmp_path / 'jax_categorical.sh'
  copy.write_text(text.replace(old, new), encoding='utf-8')
  copy.chmod(0o755)
  with pytest.raises(AssertionError):
    _check(copy)
  copy.write_text(text, encoding='utf-8')
  _check(copy)
  copy.chmod(0o644)
  with pytest.raises(AssertionError, match='lacks the run bit'):
    _check(copy)


def test_one_command_runs_them_all_and_not_with_every_change():
  run = _FOLDER / 'run'
  assert os.access(run, os.X_OK)
  assert '*.sh' in run.read_text(encoding='utf-8')
  assert 'findings' not in (documented.ROOT / '.ci' / 'run').read_text(encoding='utf-8')
