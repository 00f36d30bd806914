"""The notebooks: what is stored of them, and that they run; `pytest -m slow` with the extra `notebooks` runs them."""

import ast
import importlib.util
import os
import pathlib
import re
import sys

import nbformat
import pytest
import smollm2

_ROOT = pathlib.Path(__file__).parent.parent
_PATHS = sorted((_ROOT / 'colab').glob('*.ipynb'))

_spec = importlib.util.spec_from_file_location('execute_notebooks', _ROOT / 'colab' / 'execute.py')
execute = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(execute)


@pytest.fixture(params=_PATHS, ids=lambda path: path.stem)
def path(request):
  return request.param


@pytest.fixture
def notebook(path):
  return nbformat.read(path, as_version=4)


def _code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def test_format(path, notebook):
  assert [path.stem for path in _PATHS] == ['quickstart', 'real_models', 'tpu_pod', 'train_pair', 'verification']
  nbformat.validate(notebook)
  text = path.read_text(encoding='utf-8')
  # As the tool that runs them writes them: a change shows as a difference of the lines it is about.
  assert text == nbformat.writes(notebook) + '\n'
  # Named by hand: they stay when a notebook is run again.
  assert all(re.fullmatch(r'[a-z]+(-[a-z]+)*', cell.id) for cell in notebook.cells)
  assert not re.search(r'/(home|root|Users|tmp|work|content)/|[A-Z]:\\\\Users', text)
  for source in execute.code_of(notebook):
    ast.parse(source)
    assert max(map(len, source.splitlines())) <= 120


def test_stored_outputs(path, notebook):
  cells = _code_cells(notebook)
  assert execute.is_current(notebook), f'the code is not what was run: python colab/execute.py {path.stem}'
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  outputs = [output for cell in cells for output in cell.outputs]
  assert not [output for output in outputs if output.output_type == 'error' or output.get('name') == 'stderr']
  pictures = [output.data['image/png'] for output in outputs if 'image/png' in output.get('data', {})]
  assert len(pictures) >= (0 if path.stem == 'tpu_pod' else 2)  # which runs commands and shows tables
  assert path.stat().st_size < 600_000
  execute.keep(notebook, pathlib.Path(os.devnull))
  assert execute.is_current(notebook)
  notebook.cells[-2].source += '\n1'
  _code_cells(notebook)[-1].source += '\n1'
  assert not execute.is_current(notebook)


def _printed(notebook):
  outputs = [output for cell in _code_cells(notebook) for output in cell.outputs]
  return '\n'.join(output.text for output in outputs if output.get('name') == 'stdout')


def test_what_is_stored_gains(path, notebook):
  """What is read first has no slower rows; a pair that anybody trains may have, and is told so below its table."""
  said = _printed(notebook)
  tables = re.split(r'^autoregressive .* 1\.00x +- *$', said, flags=re.MULTILINE)[1:]
  assert len(tables) == (path.stem in ('quickstart', 'train_pair'))
  for table in tables:
    gains = [float(value) for value in re.findall(r' (\d+\.\d\d)x\b', table)]
    assert len(gains) == 3
    assert path.stem != 'quickstart' or min(gains) > 1
    assert ('Nothing gains here' in said) == (max(gains) <= 1)
    assert said.count(' is slower here') == sum(gain < 1 for gain in gains)
  if path.stem == 'real_models':
    speeds = {name: float(value) for name, value in re.findall(r'^(\w+) +\d.* call +([\d.]+) tokens/s$', said, re.M)}
    assert list(speeds) == ['autoregressive', 'speculative', 'block']
    assert max(speeds.values()) > speeds['autoregressive']


@pytest.fixture
def commands(monkeypatch, tmp_path):
  """What would have run, in an empty directory."""
  (tmp_path / 'home').mkdir()
  monkeypatch.chdir(tmp_path / 'home')
  commands = []

  def run(command, *, check):
    assert check
    commands.append(command)

  monkeypatch.setattr('subprocess.run', run)
  return commands


@pytest.mark.parametrize('is_asked', [False, True])
def test_first_cell_installs_in_colab_alone(notebook, commands, monkeypatch, tmp_path, is_asked):
  """Without an address it asks for one, again where nothing is typed, and raises nothing."""
  exec(_code_cells(notebook)[0].source, {})
  assert not commands
  assert pathlib.Path.cwd() == tmp_path / 'home'
  assert not list(pathlib.Path.cwd().iterdir())
  monkeypatch.setitem(sys.modules, 'google.colab', object())
  source, typed = _code_cells(notebook)[0].source, iter(['', '  ', ' https://example.org/library ', 'too many'])
  if not is_asked:
    address = "REPOSITORY = 'https://example.org/library'"
    source, count = re.subn(r"^REPOSITORY = ''", address, source, flags=re.MULTILINE)
    assert count == 1
  monkeypatch.setattr('os.chdir', lambda path: commands.append(['cd', path]))
  exec(source, {'input': lambda question: next(typed) if 'git clone' in question else 1 / 0})
  assert len(list(typed)) == (1 if is_asked else 4)
  assert commands[0] == ['git', 'clone', '--depth=1', 'https://example.org/library', 'spectr_jax']
  assert commands[1][1:] == ['-m', 'pip', 'install', '--quiet', './spectr_jax[plots]']
  assert commands[2] == ['cd', 'spectr_jax']


@pytest.mark.slow
def test_runs(path):
  pytest.importorskip('nbclient', reason='needs the extra notebooks')
  pytest.importorskip('ipykernel', reason='needs the extra notebooks')
  env = {'SPECTR_SMALL': '1', 'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true'}
  if path.stem == 'real_models':
    env |= {smollm2.VARIABLE: str(smollm2.find_smollm2())}
  executed = execute.execute(path, timeout=300, env=env)
  cells = _code_cells(executed)
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  said = _printed(executed)
  for expected in _SAID[path.stem]:
    assert re.search(expected, said), f'{expected!r} is not in what the notebook printed:\n{said}'


# What the small runs print where they show what they are there for.
_SAID = {
  'quickstart': [r'\d+ tokens by \d+ target calls'],
  'verification': [
    r'speculative: largest error of the joint law of 3 tokens \d\.\de-1[4-9]',
    r'as it should be: PROVED',
    r'accepts too much: FAILS',
    r'my rule: FAILS',
  ],
  'real_models': [
    r'The capital of France is Paris',
    r'skipped blocks, 28 of 30 blocks: \d+% of the parameters, acceptance 0\.[5-9]',
    r'speculative +\d\.\d\d tokens per target call',
  ],
  'train_pair': [r'target after 20 steps: held-out perplexity', r'draft after 20 steps: .* probability 0\.\d+'],
  'tpu_pod': [
    r'data:4,model:2.* --dry_run',
    r'held-out loss',
    r'mesh data:4,model:2 of 8 devices',
    r'[34] of 4 texts are the same',
  ],
}
