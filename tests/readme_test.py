"""Tests of the README: its commands, example, tables and links."""

import pathlib
import re

from spectr_jax import METHODS

_ROOT = pathlib.Path(__file__).parent.parent
_README = (_ROOT / 'README.md').read_text(encoding='utf-8')
_EXAMPLES = re.findall(r'```python\n(.*?)```', _README, re.DOTALL)


def test_set_up_commands():
  assert (
    "python3 -m venv .venv && .venv/bin/pip install -e '.[commands]' && .venv/bin/python -m decode.main\n" in _README
  )
  assert "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest\n" in _README


def test_library_example(monkeypatch, capsys):
  monkeypatch.chdir(_ROOT)
  scope = {}
  exec(_EXAMPLES[0], scope)
  continuation = scope['continuation']
  assert 1 < continuation.tokens_per_call <= 5
  assert continuation.text == scope['tokenizer'].decode(continuation.tokens)
  assert continuation.text in capsys.readouterr().out


def test_table_of_methods():
  """Every method, with its mark; the one that keeps the most is recommended."""
  rows = re.findall(r'^\| (`\w+`(?:, `\w+`)*) \|[^|]*\| (yes|\*\*no\*\*) \|(.*)$', _README, re.MULTILINE)
  marks = {name: (mark, text) for names, mark, text in rows for name in re.findall(r'\w+', names)}
  assert set(marks) == set(METHODS)
  for name, (mark, _) in marks.items():
    assert (mark == 'yes') == METHODS[name].is_lossless, name
  assert [name for name, (_, text) in marks.items() if 'recommended' in text] == ['race_traversal']


def test_results_are_measured():
  """The table's rows are those of docs/results.md, up to its short names of trees."""
  page = (_ROOT / 'docs/results.md').read_text(encoding='utf-8')
  (results,) = re.findall(r'^## Results\n(.*?)^## ', _README, re.DOTALL | re.MULTILINE)
  rows = re.findall(r'^\| `(\w+)` \| [^|]* \| ([^|]*) \| ([^|]*)\|$', results, re.MULTILINE)
  assert len(rows) == 5
  for name, tokens, ratio in rows:
    tokens = tokens.replace('*', '')
    measured = re.findall(rf'^\| `{name}` \| [^|]* \| {re.escape(tokens)} \| ([^|]*)\|$', page, re.MULTILINE)
    assert ratio.strip() in [found.strip() for found in measured], name


def test_links_lead_somewhere():
  targets = re.findall(r'\]\((?!https?:)([^)#]+)(#[^)]+)?\)', _README)
  assert len(targets) > 15
  for path, anchor in targets:
    assert (_ROOT / path).exists(), path
    if anchor:
      headings = re.findall(r'^#+ (.*)$', (_ROOT / path).read_text(encoding='utf-8'), re.MULTILINE)
      assert anchor[1:] in [re.sub(r'[^\w -]', '', heading).lower().replace(' ', '-') for heading in headings], anchor


def test_no_placeholder_is_left():
  texts = [_README, (_ROOT / 'pretrained/README.md').read_text(encoding='utf-8')]
  assert not [match for text in texts for match in re.findall(r'@[A-Z_]+@', text)]
