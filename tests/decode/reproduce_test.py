"""`decode.reproduce`: names, flags and files of all exhibits, and those in docs/ against the code that made them."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from commands import ROOT
from exhibit_checks import SMALL_FIGURES, request_of

from decode.papers.exhibits import EXHIBITS, FIGURES, TABLES
from decode.papers.figure import from_csv, to_csv

_FIGURES = (
  'spectr_fig1 spectr_fig2 spectr_fig3 spectr_fig5 batch_fig2 batch_fig3 pareto_fig4 batch_fig5 ersd_fig3 ersd_fig4'
  ' opt_uno methods optimum ladder'
)
_TABLES = (
  'spectr_table1 spectr_table2 spectr_table3 spectr_table4 gbv_table1 gbv_table2 gbv_table4 gbv_figure2 gbv_table5'
  ' spec_bench'
)


def test_every_exhibit_is_there():
  assert set(FIGURES) == set(_FIGURES.split())
  assert list(TABLES) == _TABLES.split()
  assert list(EXHIBITS) == [*TABLES, *FIGURES]


def test_all_figures_about_models_are_measured():
  assert set(SMALL_FIGURES) == {name for name, figure in FIGURES.items() if figure.has_models}


def test_a_seed_is_for_what_is_drawn_at_random():
  decoded = {name for name in EXHIBITS if EXHIBITS[name].has_prompts}
  assert {name for name in EXHIBITS if EXHIBITS[name].is_random} == decoded | {'batch_fig2', 'batch_fig5'}


def test_cells_read_as_they_were_written():
  rows = [{'a': 1, 'b': 0.1 + 0.2, 'c': "' 7'", 'd': None}, {'a': 2, 'b': 1e-300, 'c': 'x, "y"', 'd': 3}]
  assert from_csv(to_csv(rows)) == rows


@pytest.mark.parametrize(
  ('name', 'sizes', 'message'),
  [
    ('batch_fig3', {'num_runs': 3}, 'num_runs is not for this figure, whose sizes are num_drafts'),
    ('pareto_fig4', {'num_runs': 3}, 'num_runs is not for this figure, which has none'),
    ('spectr_table1', {'num_seeds': 3}, 'num_seeds is not for this table, whose sizes are num_runs, context, '),
  ],
)
def test_sizes_that_an_exhibit_has_not(name, sizes, message):
  with pytest.raises(ValueError, match=message):
    request_of(name, **sizes)


# What docs/ records, of earlier runs.

_RECORDED = sorted([*(ROOT / 'docs/figures').glob('*.csv'), *(ROOT / 'docs/tables').glob('*.json')])


@pytest.mark.parametrize('path', _RECORDED, ids=lambda path: path.stem)
def test_recorded_pages_follow_from_their_data(path):
  exhibit, data, page = EXHIBITS[path.stem], path.read_text(), path.with_suffix('.md').read_text()
  rows = exhibit.read_rows(data)
  about = [line.removeprefix('- ') for line in page.splitlines() if line.startswith('- ')]
  assert exhibit.to_markdown(path.stem, rows, about) == page
  if exhibit.kind == 'figure':
    assert to_csv(rows) == data
  else:
    assert json.loads(data)['about'] == about


@pytest.mark.slow
@pytest.mark.parametrize('path', _RECORDED, ids=lambda path: path.stem)
def test_recorded_pictures_can_be_drawn_again(path):
  exhibit = EXHIBITS[path.stem]
  assert exhibit.to_image(exhibit.read_rows(path.read_text()), ['prompts: $a_b$']).startswith(b'\x89PNG')


# The command. All runs are forks of one process that has imported what takes long.

_RUN_ALL = """
import importlib, json, os, runpy, sys
for name in ('decode.papers.exhibits', 'decode.experiment.report', 'matplotlib.figure'):
  importlib.import_module(name)
codes = []
for output, arguments in json.load(sys.stdin):
  if not os.fork():
    for number, stream in ((1, 'stdout'), (2, 'stderr')):
      os.dup2(os.open(f'{output}.{stream}', os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ['decode.reproduce', *arguments, f'--output={output}']
    try:
      runpy.run_module('decode.reproduce', run_name='__main__')
    except SystemExit as end:
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(end.code or 0)  # the interpreter takes a second to shut down
    os._exit(99)  # a command ends with an exit code
  codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
print(json.dumps(codes))
"""


def _run(cases, directory):
  """Runs commands by name, each with a directory for its files: exit code, lines of stdout and stderr, directory."""
  outputs = {name: directory / name for name in cases}
  for output in outputs.values():
    output.mkdir()
    (output / 'batch_fig3.csv').write_text('kept')
    (output / 'gbv_table1.json').write_text('kept')
  tasks = json.dumps([(str(outputs[name]), arguments) for name, arguments in cases.items()])
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true', 'PYTHONIOENCODING': 'utf-8'}
  ran = subprocess.run(
    [sys.executable, '-W', 'ignore', '-c', _RUN_ALL],
    cwd=ROOT, env=env, input=tasks, capture_output=True, text=True, timeout=600,
  )  # fmt: skip
  assert ran.returncode == 0, ran.stderr
  found = {}
  for (name, output), code in zip(outputs.items(), json.loads(ran.stdout), strict=True):
    streams = (pathlib.Path(f'{output}.{stream}').read_text() for stream in ('stdout', 'stderr'))
    found[name] = code, *streams, output
  return found


_BAD = {
  'unknown figure': (['--figure=spectr_fig4'], 'error: figure must be one of spectr_fig1, '),
  'no figure': (['--figure='], 'error: figure must be one of spectr_fig1, '),
  'unknown table': (['--table=gbv_table3'], 'error: table must be one of spectr_table1,'),
  'both': (['--figure=batch_fig3', '--table=gbv_table1'], 'error: give --table=NAME or --figure=NAME, one of the two'),
  'size of no figure': (['--figure=all', '--context=3'], 'error: context: no figure has such a size'),
  'size of others': (
    ['--table=spectr_table1', '--num_seeds=3'],
    'error: num_seeds is not for this table, whose sizes are num_runs',
  ),
  'seed of a table': (
    ['--table=spectr_table3', '--seed=3'],
    'error: spectr_table3 decodes nothing: prompts and seed are not for it',
  ),
  'seed of a figure': (
    ['--figure=pareto_fig4', '--seed=3'],
    'error: pareto_fig4 draws nothing at random: a seed is not for it',
  ),
  'prompts of a figure': (['--figure=batch_fig2', '--prompts=a.txt'], 'error: batch_fig2 decodes no prompts'),
  'several prompts': (
    ['--figure=opt_uno', '--prompts=a.txt,b.txt'],
    'error: a figure takes one file of prompts, got a, b',
  ),
  'no prompts there': (
    ['--table=gbv_table1', '--prompts=HumanEval=/nowhere.jsonl'],
    'error: cannot read prompts from /nowhere.jsonl',
  ),
  'option of others': (
    ['--table=gbv_table1', '--temperature=1'],
    'error: temperature is not for this table, which has its own',
  ),
  'temperatures that are none': (
    ['--table=spec_bench', '--temperature=0,hot'],
    'error: temperature must be numbers',
  ),
  'several drafts': (
    ['--table=gbv_table1', '--draft=lookup,pretrained/draft,lookup+pretrained/draft,own=lookup+pretrained/draft'],
    'error: this table has one draft, got lookup, draft, lookup+draft, own',
  ),
  'prompts without tasks': (
    ['--table=spec_bench'],
    'error: this table is about the tasks of Spec-Bench: give one file, as --prompts=spec_bench:FILE',
  ),
  'no such set': (['--table=gbv_table1', '--prompts=humanevil:a'], "error: prompts: there is no set 'humanevil'; "),
  'a set twice': (
    ['--table=gbv_table1', '--prompts=mgsm:mgsm_de.tsv,mgsm:mgsm_en.tsv'],
    'error: prompts: MGSM is there twice; give names, NAME=PATH',
  ),
}


@pytest.fixture(scope='module')
def ran(pair, tmp_path_factory):
  """Outcomes of all commands below, by name."""
  table = ['--num_drafts=1', '--draft_length=2', '--num_runs=2', '--context=8']
  models = [f'--{role}={path}' for role, path in pair.items()]
  good = {
    'table': ['--table=spectr_table1', *models, *table],
    'figures': ['--figure=batch_fig3,pareto_fig4', '--num_drafts=1,2'],
  }
  return _run(good | {name: arguments for name, (arguments, _) in _BAD.items()}, tmp_path_factory.mktemp('commands'))


@pytest.mark.parametrize('name', _BAD)
def test_bad_input_is_one_line(name, ran):
  code, _, err, output = ran[name]
  assert code == 1
  [error] = [line for line in err.splitlines() if not line.startswith('[')]
  assert error.startswith(_BAD[name][1])
  assert {path.name: path.read_text() for path in output.iterdir()} == {
    'batch_fig3.csv': 'kept',
    'gbv_table1.json': 'kept',
  }


def test_the_command_writes_a_table(ran):
  code, out, err, output = ran['table']
  assert code == 0, err
  written = {path.name for path in output.iterdir()} - {'batch_fig3.csv', 'gbv_table1.json'}
  assert written == {f'spectr_table1.{kind}' for kind in ('json', 'md', 'png', 'svg')}
  assert 'reduced: num_runs 2 instead of 1000' in out
  assert out.startswith(TABLES['spectr_table1'].title)
  assert '[0/1] 2 calls, 2 times each' in err


def test_the_command_writes_figures(ran):
  code, out, err, output = ran['figures']
  assert code == 0, err
  written = {path.name for path in output.iterdir()} - {'gbv_table1.json'}
  assert written == {f'{name}.{kind}' for name in ('batch_fig3', 'pareto_fig4') for kind in ('csv', 'md', 'png', 'svg')}
  # Of several figures each takes the sizes that are for it.
  request = request_of('batch_fig3', num_drafts=(1, 2))
  figure = FIGURES['batch_fig3']
  results = figure.run(request, None)
  for name, content in figure.files('batch_fig3', request, results).items():
    assert (output / name).read_bytes() == (content if isinstance(content, bytes) else content.encode())
  assert figure.tell(results.rows) in out


@pytest.mark.slow
def test_figures_with_the_same_rows_are_measured_once(pair, prompt_file, tmp_path):
  models = [f'--{role}={path}' for role, path in pair.items()]
  sizes = ['--num_prompts=2', '--max_new_tokens=4', '--batch_size=2', '--num_nodes=2']
  arguments = ['--figure=ersd_fig3,ersd_fig4', *models, f'--prompts={prompt_file}', *sizes]
  code, out, err, output = _run({'both': arguments}, tmp_path)['both']
  assert code == 0, err
  assert '] ersd_fig3: ' in err
  assert '] ersd_fig4: ' not in err
  first, second = ((output / f'{name}.csv').read_text() for name in ('ersd_fig3', 'ersd_fig4'))
  assert first == second
  assert all(FIGURES[name].tell(from_csv(first)) in out for name in ('ersd_fig3', 'ersd_fig4'))
