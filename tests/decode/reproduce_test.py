"""`decode.reproduce`: names, flags and files of all exhibits, and those in docs/ against the code that made them."""

import json

import pytest
from commands import ROOT, refuse, run, succeed
from exhibit_checks import SMALL_FIGURES, request_of, rows_of

from decode.papers.exhibits import EXHIBITS, FIGURES, TABLES
from decode.study import from_csv, to_csv

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
  assert set(SMALL_FIGURES) == {name for name, figure in FIGURES.items() if figure.has_models}
  decoded = {name for name in EXHIBITS if EXHIBITS[name].has_prompts}
  assert {name for name in EXHIBITS if EXHIBITS[name].is_random} == decoded | {'batch_fig2', 'batch_fig5'}
  rows = [{'a': 1, 'b': 0.1 + 0.2, 'c': "' 7'", 'd': None}, {'a': 2, 'b': 1e-300, 'c': 'x, "y"', 'd': 3}]
  assert from_csv(to_csv(rows)) == rows


@pytest.mark.parametrize(
  ('name', 'sizes', 'message'),
  [
    ('batch_fig3', {'num_runs': 3}, 'num_runs is not for this figure, whose sizes are num_drafts'),
    ('pareto_fig4', {'num_runs': 3}, 'num_runs is not for this figure, which has none'),
  ],
)
def test_sizes_that_an_exhibit_has_not(name, sizes, message):
  with pytest.raises(ValueError, match=message):
    request_of(name, **sizes)


# What docs/ records, of earlier runs.

_RECORDED = sorted(
  path
  for path in (*(ROOT / 'docs/figures').glob('*.csv'), *(ROOT / 'docs/tables').glob('*.json'))
  if path.stem != 'shares'  # by a study that is over
)


def _exhibit_of(path):
  """The exhibit of a recorded file, whose name may go on behind a dash, for other models."""
  return EXHIBITS[path.stem.partition('-')[0]]


@pytest.mark.parametrize('path', _RECORDED, ids=lambda path: path.stem)
def test_recorded_pages_follow_from_their_data(path):
  exhibit, data, page = _exhibit_of(path), path.read_text(), path.with_suffix('.md').read_text()
  rows = rows_of(data)
  about = [line.removeprefix('- ') for line in page.splitlines() if line.startswith('- ')]
  if exhibit.kind == 'figure':  # its paragraph has numbers, which later runs give in a table
    assert to_csv(rows) == data
    assert page.startswith(f'# {exhibit.title}\n\n![{path.stem}]({path.stem}.svg)\n')
  else:
    assert exhibit.to_markdown(path.stem, rows, about) == page
    assert json.loads(data)['about'] == about


@pytest.mark.slow
@pytest.mark.parametrize('path', _RECORDED, ids=lambda path: path.stem)
def test_recorded_pictures_are_drawn_again_byte_by_byte(path):
  exhibit, page = _exhibit_of(path), path.with_suffix('.md').read_text()
  about = [line.removeprefix('- ') for line in page.splitlines() if line.startswith('- ')]
  for kind in ('png', 'svg'):
    picture = exhibit.to_image(rows_of(path.read_text()), about, kind=kind)
    recorded = path.with_suffix(f'.{kind}')
    assert not recorded.exists() or picture == recorded.read_bytes()


# The command.

_BAD = [
  ('--figure=spectr_fig4', 'figure must be one of spectr_fig1, '),
  ('--figure=', 'figure must be one of spectr_fig1, '),
  ('--table=gbv_table3', 'table must be one of spectr_table1,'),
  ('--figure=batch_fig3 --table=gbv_table1', 'give --table=NAME or --figure=NAME, one of the two'),
  ('--figure=all --context=3', 'context: no figure has such a size'),
  ('--table=spectr_table1 --num_seeds=3', 'num_seeds is not for this table, whose sizes are num_runs'),
  ('--table=spectr_table3 --seed=3', 'spectr_table3 draws nothing at random: a seed is not for it'),
  ('--figure=pareto_fig4 --seed=3', 'pareto_fig4 draws nothing at random: a seed is not for it'),
  ('--figure=batch_fig2 --prompts=a.txt', 'batch_fig2 decodes no prompts'),
  ('--figure=opt_uno --prompts=a.txt,b.txt', 'a figure takes one file of prompts, got a, b'),
  ('--table=gbv_table1 --prompts=HumanEval=/nowhere.jsonl', 'cannot read prompts from /nowhere.jsonl'),
  ('--table=gbv_table1 --temperature=1', 'temperature is not for this table, which has its own'),
  ('--table=spec_bench --temperature=0,hot', 'temperature must be numbers'),
  (
    '--table=gbv_table1 --draft=lookup,pretrained/draft,lookup+pretrained/draft,own=lookup+pretrained/draft',
    'this table has one draft, got lookup, draft, lookup+draft, own',
  ),
  ('--table=spec_bench', 'this table is about the tasks of Spec-Bench: give one file, as --prompts=spec_bench:FILE'),
  ('--table=gbv_table1 --prompts=humanevil:a', "prompts: there is no set 'humanevil'; "),
  (
    '--table=gbv_table1 --prompts=mgsm:mgsm_de.tsv,mgsm:mgsm_en.tsv',
    'prompts: MGSM is there twice; give names, NAME=PATH',
  ),
]


@pytest.mark.parametrize(('arguments', 'message'), _BAD)
def test_bad_input_is_one_line(arguments, message, tmp_path):
  kept = {'batch_fig3.csv': 'kept', 'gbv_table1.json': 'kept'}
  for name, text in kept.items():
    (tmp_path / name).write_text(text)
  line = refuse('decode.reproduce', *arguments.split(), f'--output={tmp_path}')
  assert line.startswith(f'error: {message}')
  assert {path.name: path.read_text() for path in tmp_path.iterdir()} == kept


def _files(output):
  return {path.name for path in output.iterdir()}


def test_the_command_writes_a_table(pair, tmp_path):
  models = [f'--{role}={path}' for role, path in pair.items()]
  sizes = ['--num_drafts=1', '--draft_length=2', '--num_runs=2', '--context=8']
  ran = run('decode.reproduce', '--table=spectr_table1', *models, *sizes, f'--output={tmp_path}')
  assert ran.returncode == 0, ran.stderr
  assert _files(tmp_path) == {f'spectr_table1.{kind}' for kind in ('json', 'md', 'png', 'svg')}
  assert 'reduced: num_runs 2 instead of 1000' in ran.stdout
  assert ran.stdout.startswith(TABLES['spectr_table1'].title)
  assert '[0/1] 2 calls, 2 times each' in ran.stderr


def test_the_command_writes_figures(tmp_path):
  (tmp_path / 'batch_fig3.csv').write_text('of before')
  out = succeed('decode.reproduce', '--figure=batch_fig3,pareto_fig4', '--num_drafts=1,2', f'--output={tmp_path}')
  assert _files(tmp_path) == {
    f'{name}.{kind}' for name in ('batch_fig3', 'pareto_fig4') for kind in ('csv', 'md', 'png', 'svg')
  }
  # Of several figures each takes the sizes that are for it.
  request = request_of('batch_fig3', num_drafts=(1, 2))
  figure = FIGURES['batch_fig3']
  results = figure.run(request, None)
  about = figure.describe(request, results)
  for name, content in figure.files('batch_fig3', request, results, about).items():
    assert (tmp_path / name).read_bytes() == (content if isinstance(content, bytes) else content.encode())
  assert figure.text('batch_fig3') in out


@pytest.mark.slow
def test_figures_with_the_same_rows_are_measured_once(pair, prompt_file, tmp_path):
  models = [f'--{role}={path}' for role, path in pair.items()]
  sizes = ['--num_prompts=2', '--max_new_tokens=4', '--batch_size=2', '--num_nodes=2']
  arguments = ['--figure=ersd_fig3,ersd_fig4', *models, f'--prompts={prompt_file}', *sizes, f'--output={tmp_path}']
  ran = run('decode.reproduce', *arguments, timeout=600)
  assert ran.returncode == 0, ran.stderr
  assert '] ersd_fig3: ' in ran.stderr
  assert '] ersd_fig4: ' not in ran.stderr
  first, second = ((tmp_path / f'{name}.csv').read_text() for name in ('ersd_fig3', 'ersd_fig4'))
  assert first == second
  assert all(FIGURES[name].text(name) in ran.stdout for name in ('ersd_fig3', 'ersd_fig4'))
