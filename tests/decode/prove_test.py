"""The command that proves: what passes, what fails and where, and what it refuses."""

import functools
import re
import sys
import textwrap

import commands
import pytest

from decode.prove import find_methods
from spectr_jax import METHODS
from spectr_jax.testing import CONTROLS, prove

run_command = functools.partial(commands.run, 'decode.prove')


def rows_of(stdout):
  rows = [re.split(r'\s{2,}', line) for line in stdout.splitlines()]
  return [row for row in rows if row[-1] in ('pass', 'FAIL')]


def write_module(path, text):
  path.write_text(textwrap.dedent(text), encoding='utf-8')
  return path.stem


@pytest.mark.slow
def test_the_example_is_lossless():
  ran = run_command('--method=best_ratio', '--module=examples.best_ratio', '--num_samples=20000')
  assert ran.returncode == 0, ran.stdout + ran.stderr
  rows = rows_of(ran.stdout)
  assert [row[0] for row in rows] == ['exact'] * 4 + ['sampling', 'engine']
  assert [row[1] for row in rows[:4]] == [
    'chains 1x3, 5 tokens, V=3', 'chains 2x2, 4 tokens, V=3', 'chains 3x2, 5 tokens, V=2', 'tree of 6, 5 tokens, V=2',
  ]  # fmt: skip
  for row in rows[:4]:
    assert float(row[2].removeprefix('error ')) < 1e-12
    assert row[3:6] == ['1e-10', 'all', '1e-10']
  assert [row[4] for row in rows[4:]] == ['20,000', '3,000']
  for row, limit, largest in zip(rows[4:], (5e-4, 1e-3 / 6), (0.035, 0.4)):
    assert float(row[2].removeprefix('p-value ')) > limit == pytest.approx(float(row[3]), rel=0.03)
    assert 0.005 < float(row[5]) < largest
  lines = ran.stdout.splitlines()
  assert 'best_ratio passed: lossless in all that was compared' in lines
  assert (
    'detects   the smallest bias, in total variation, that fails with probability 0.95, whatever it looks like' in lines
  )
  assert lines[-1] == 'passed: best_ratio'
  assert [line.partition('] ')[2].partition(', about')[0] for line in ran.stderr.splitlines()] == [
    'best_ratio: exact, chains 1x3', 'best_ratio: exact, chains 2x2', 'best_ratio: exact, chains 3x2',
    'best_ratio: exact, tree of 6', 'best_ratio: sampling, chains 3x2', 'best_ratio: engine, chains 3x2',
  ]  # fmt: skip


_BROKEN = """
  import dataclasses

  import jax.numpy as jnp

  from spectr_jax.methods import Method, register
  from spectr_jax.couplings import Maximal, SingleDraft
  from spectr_jax.proposal import Independent
  from spectr_jax.verifiers import Block, Walk


  class WrongResidual(Maximal):
    def __call__(self, draft_probs, target_probs, candidates, is_valid):
      outcome = super().__call__(draft_probs, target_probs, candidates, is_valid)
      return dataclasses.replace(outcome, residual=target_probs)


  class OneUniform(Walk):
    '''Its law is right, but all depths draw with the same key.'''

    def verify(self, keys, tree, proposal, target_probs, state):
      return super().verify(keys[jnp.zeros(len(keys), jnp.int32)], tree, proposal, target_probs, state)


  for name, verifier, is_seed_exact in (
    ('wrong_residual', Walk(WrongResidual()), False),
    ('one_uniform', OneUniform(Maximal()), False),
    ('keyed_by_position', Block(SingleDraft()), True),
  ):
    register(Method(
      name, verifier, Independent(), is_lossless=True, source='test', max_drafts=1, is_seed_exact=is_seed_exact
    ))
"""


@pytest.mark.slow
def test_what_is_broken_fails_where_it_shows(tmp_path):
  write_module(tmp_path / 'broken.py', _BROKEN)
  ran = run_command('--module=broken', '--num_samples=30000', cwd=tmp_path)
  assert ran.returncode == 1
  assert 'Traceback' not in ran.stderr
  assert ran.stdout.splitlines()[-1] == 'FAILED: wrong_residual, one_uniform, keyed_by_position'
  tables = ran.stdout.split('part  ')[1:]
  wrong_residual, one_uniform, keyed_by_position = ({row[0]: row for row in rows_of(table)} for table in tables)
  # A fault of the law shows in the law, and in what is drawn.
  assert (wrong_residual['exact'][-1], wrong_residual['sampling'][-1]) == ('FAIL', 'FAIL')
  assert float(wrong_residual['exact'][2].removeprefix('error ')) > 1e-2
  # One of the draws alone does not.
  assert (one_uniform['exact'][-1], one_uniform['sampling'][-1]) == ('pass', 'FAIL')
  assert 'one_uniform FAILED (sampling' in ran.stdout
  assert (keyed_by_position['exact'][-1], keyed_by_position['sampling'][-1]) == ('FAIL', 'FAIL')
  assert int(keyed_by_position['exact'][2].removeprefix('differing tokens ')) > 10_000
  assert 'wrong_residual FAILED (exact and sampling' in ran.stdout
  assert ran.stdout.count('not lossless, though registered as lossless') == 3


@pytest.mark.slow
@pytest.mark.parametrize('name', ['spectr_gbv', 'block_keyed_by_position'])
def test_what_is_known_to_be_biased_fails(name):
  method = (CONTROLS | METHODS)[name]
  proof = prove(method, num_samples=10_000)
  assert not proof.is_passed, proof
  assert f'{name} FAILED' in proof.conclusion


@pytest.mark.slow
def test_seed_exact_methods_are_compared_token_for_token():
  proof = prove('ersd', num_samples=10_000)
  assert proof.is_passed, proof
  exact = [check for check in proof.checks if check.part == 'exact']
  assert [check.compared.split(',')[0] for check in exact] == ['chains 1x3', 'chains 2x2', 'chains 3x2', 'tree of 6']
  assert {(check.measure, check.value, check.limit, check.num_samples) for check in exact} == {
    ('differing tokens', 0, 0, 10_000)
  }
  # 10,000 rows all agree with probability .05 if a share of .0003 differs.
  assert exact[0].detectable_bias == pytest.approx(3e-4, rel=0.01)


_RAISES = """
  from spectr_jax.methods import Method, register
  from spectr_jax.couplings import Maximal
  from spectr_jax.proposal import Independent
  from spectr_jax.verifiers import Walk


  class Raises(Walk):
    def verify(self, keys, tree, proposal, target_probs, state):
      if target_probs[0, 0] > 0:
        return None


  register(Method('raises', Raises(Maximal()), Independent(), is_lossless=True, source='test', max_drafts=1))
"""


def test_a_verifier_that_raises(tmp_path):
  write_module(tmp_path / 'raises.py', _RAISES)
  ran = run_command('--module=raises', '--method=raises', '--num_samples=10000', cwd=tmp_path)
  assert ran.returncode == 1
  assert ran.stdout == ''
  *progress, error = ran.stderr.splitlines()
  assert not progress
  assert error.startswith('error: raises raised in part shapes: TracerBoolConversionError: ')
  assert error.endswith(f'({tmp_path / "raises.py"}:10)')


def test_bad_flags_end_in_a_line_and_methods_are_found_once():
  line = commands.refuse('decode.prove', '--num_samples=many', '--method=spectr')
  assert line.startswith('error: flag --num_samples=many')
  assert [method.name for method in find_methods(['spectr', 'block', 'spectr'], None)] == ['spectr', 'block']


_TAKEN = """
  import dataclasses
  from spectr_jax import METHODS
  from spectr_jax.methods import register
  register(dataclasses.replace(METHODS['race'], name='spectr'))
"""
_MISMATCH = """
  from spectr_jax import METHODS
  from spectr_jax.methods import Method, register
  from spectr_jax.proposal import WithoutReplacement
  register(Method('m', METHODS['spectr'].verifier, WithoutReplacement(), is_lossless=True, source=''))
"""
_NAME = 'must be a name'
_ALLOWED = ', '.join(METHODS)


@pytest.mark.parametrize(
  ('text', 'names', 'module', 'parts'),
  [
    ('', [], None, ['no method given; allowed: ', _ALLOWED]),
    ('', [''], None, ["unknown method ''", _ALLOWED]),
    ('', ['spectr', 'magic'], None, ["unknown method 'magic'", _ALLOWED]),
    ('', [], 'provable', ['provable registers no method', 'spectr_jax.methods.register', _ALLOWED]),
    ('', ['magic'], 'provable', ["unknown method 'magic'"]),
    ('import math\n\nmath.sqrt(-1)\n', ['spectr'], 'provable', ['import provable: ValueError: ', 'provable.py:3)']),
    ('import sys\n\nsys.exit("no way")\n', ['spectr'], 'provable', ['SystemExit: no way', 'provable.py:3)']),
    ('def f(:\n', ['spectr'], 'provable', ['cannot import provable: SyntaxError: ', 'provable.py, line 1']),
    ('import none_such\n', ['spectr'], 'provable', ["provable: ModuleNotFoundError: No module named 'none_such'"]),
    (_TAKEN, ['spectr'], 'provable', ["ValueError: there is another method named 'spectr'", 'provable.py:5)']),
    (_MISMATCH, [], 'provable', ['children are drawn independent, not without_replacement', 'provable.py:5)']),
    ('', ['spectr'], 'prove_missing', ['there is no prove_missing here']),
    ('', ['spectr'], 'provable.part', ['there is no provable.part here']),
    ('', ['spectr'], 'provable.py', ['there is no provable.py here']),
    ('', ['spectr'], './provable.py', [f'module {_NAME}, such as examples.best_ratio for', "'./provable.py'"]),
    ('', ['spectr'], '.provable', [f'module {_NAME}']),
  ],
)
def test_what_is_refused(tmp_path, monkeypatch, text, names, module, parts):
  write_module(tmp_path / 'provable.py', text)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  before = set(METHODS)
  with pytest.raises(ValueError, match=f'allowed: |cannot import|there is no|{_NAME}') as caught:
    find_methods(names, module)
  assert all(part in str(caught.value) for part in parts), caught.value
  assert '\n' not in str(caught.value)
  assert set(METHODS) == before
  sys.modules.pop('provable', None)
