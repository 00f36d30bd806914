"""What the README shows runs as it stands."""

import pathlib
import re

import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).parent.parent
_README = (_ROOT / 'README.md').read_text(encoding='utf-8')
_EXAMPLES = re.findall(r'```python\n(.*?)```', _README, re.DOTALL)


def test_set_up_commands():
  assert 'python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/python -m decode.main\n' in _README
  assert "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest\n" in _README


def test_library_example(monkeypatch, capsys):
  monkeypatch.chdir(_ROOT)
  scope = {}
  exec(_EXAMPLES[0], scope)
  new = scope['new']
  assert 1 < float(new.lengths[0] / new.num_target_calls[0]) <= 5
  assert scope['tokenizer'].decode(np.asarray(new.tokens[0])) in capsys.readouterr().out


def test_verifier_example(capsys):
  scope = {}
  exec(_EXAMPLES[1], scope)
  assert scope['error'] <= 1e-10
  assert 'joint law of four tokens' in capsys.readouterr().out


@pytest.mark.parametrize('name', sorted(set(re.findall(r'configs/\w+\.py', _README))))
def test_named_configs_exist(name):
  assert (_ROOT / name).exists()


def test_no_placeholder_is_left():
  texts = [_README, (_ROOT / 'pretrained/README.md').read_text(encoding='utf-8')]
  assert not [match for text in texts for match in re.findall(r'@[A-Z_]+@', text)]
