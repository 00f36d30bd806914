"""The page on theory names every function, nothing else, and its example prints what it says."""

import pathlib
import re

from spectr_jax import testing, theory

_PAGE = (pathlib.Path(__file__).parents[2] / 'docs/api_theory.md').read_text(encoding='utf-8')


def test_every_function_is_listed():
  tables = '\n'.join(line for line in _PAGE.splitlines() if line.startswith('|'))
  assert set(theory.__all__) == set(re.findall(r'`(\w+)', tables)) & set(dir(theory))
  for name in theory.__all__:
    assert theory.__dict__[name].__doc__
  for name in re.findall(r'`spectr_jax\.testing\.(\w+)`', _PAGE):
    assert name in testing.__all__


def test_example(capsys):
  (example,) = re.findall(r'```python\n(.*?)```', _PAGE, re.DOTALL)
  exec(example, {})
  assert capsys.readouterr().out.splitlines() == re.findall(r'  # (\[.*\])$', example, re.MULTILINE)
