"""Tests of the documentation: it builds, its code and commands run, and its numbers are those of the recorded files."""

import dataclasses
import html
import inspect
import itertools
import json
import os
import pathlib
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib

import documented
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from documented import ROOT, Command

import spectr_jax
from benchmarks import tabulate
from examples import copying_drafter, fading_model
from spectr_jax import METHODS, TokenTree, couplings, draft, generate, testing, theory, verifiers
from spectr_jax.methods import FURTHER_METHODS
from spectr_jax.models import causal_lm, table, transformer
from spectr_jax.testing import chi_square, prove

_DOCS = ROOT / 'docs'
_COMMANDS = list(dict.fromkeys(command for page in documented.PAGES for command in documented.commands(page)))
_OF_SOURCES = list(dict.fromkeys(documented.source_commands()))
# Placeholders of the pages, and values for them.
_STAND_INS = {
  '--config=...': '--config=configs/stdlib_pair.py:target',
  '--config=configs/NAME.py': '--config=configs/stdlib_pair.py:target',
  '--method=NAME': '--method=race_traversal',
}
_FLAGS_OF_OTHERS = {'worker', 'help', 'compilation_cache_dir'}  # of gcloud, and of `common.command_line.run`
_FLAGS_OF_PROGRAMS = {'merge', 'helpfull', 'name', 'no'}  # of llama-gguf-split, of absl, any one's, pip's --no-deps


def _read(name):
  return (_DOCS / name).read_text(encoding='utf-8')


# The site.


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  """The text of every built page, script and style by its path."""
  for package in ('mkdocs', 'material', 'mkdocstrings', 'latex2mathml'):
    pytest.importorskip(package, reason='needs the extra docs')
  directory = tmp_path_factory.mktemp('site')
  # A notice about the future of MkDocs, printed by the theme, is no warning about these pages.
  built = subprocess.run(
    [sys.executable, '-m', 'mkdocs', 'build', '--strict', f'--site-dir={directory}'],
    cwd=ROOT, env={**os.environ, 'NO_MKDOCS_2_WARNING': '1'}, capture_output=True, text=True, timeout=300,
  )  # fmt: skip
  assert built.returncode == 0, built.stderr
  assert 'WARNING' not in built.stderr
  paths = [path for path in directory.rglob('*') if path.suffix in ('.html', '.css', '.js')]
  return {path.relative_to(directory).as_posix(): path.read_text(encoding='utf-8') for path in paths}


def _remote_resources(page: str) -> list[str]:
  """Addresses that a browser would fetch to show a page; links that are followed by a click are none."""
  tags = re.findall(r'<(?:script|img|iframe|source|link)\b[^>]*>', page)
  return [tag for tag in tags if re.search(r'\b(?:src|srcset|href)=["\']?(?:https?:)?//', tag)]


def test_site(site):
  """It shows docstrings and formulas, fetches nothing, and is searched from disk, without workers and JSON."""
  pages = {name: text for name, text in site.items() if name.endswith('.html')}
  assert len(pages) > 30
  page = ' '.join(text for name, text in pages.items() if name.startswith('api'))
  text = ' '.join(html.unescape(re.sub(r'<[^>]+>', '', page)).split())
  for thing in (spectr_jax.generate, spectr_jax.TokenTree, couplings.Race, theory.kseq_gamma):
    assert ' '.join(re.sub('`', '', inspect.getdoc(thing).split('\n\n')[0]).split()) in text  # not only names
  assert not {name: tags for name, page in pages.items() if (tags := _remote_resources(page))}
  styles = {name: text for name, text in site.items() if name.endswith('.css')}
  assert not [name for name, text in styles.items() if re.search(r'url\(["\']?(?:https?:)?//', text)]
  assert _remote_resources('<link rel="icon" href="//cdn.org/a.png"><script src=https://cdn.org/a.js></script>')
  formulas = re.findall('<math.*?</math>', pages['methods/race_traversal.html'])
  assert any('<mfrac>' in formula for formula in formulas)
  assert len(formulas) > 40
  unset = re.compile(r'class="arithmatex"|<math[^$]*\\[a-z]')
  assert not [name for name, page in pages.items() if unset.search(page)]
  (shim,) = re.findall(r'<script src="([^"]*iframe-worker[^"]*)"', pages['index.html'])
  assert 'window.Worker' in site[shim]
  assert re.match('var __index = .*methods/race_traversal.html', site['search/search_index.js'], re.DOTALL)


def test_everything_public_is_in_the_reference():
  reference = ' '.join(path.read_text(encoding='utf-8') for path in _DOCS.glob('api*.md'))
  listed = set(re.findall(r'^::: (\S+)$', reference, re.MULTILINE))
  names = set()
  for package in (spectr_jax, couplings, draft, testing, theory, verifiers):
    for name in package.__all__:
      thing = getattr(package, name)
      if inspect.ismodule(thing) or not hasattr(thing, '__qualname__'):
        assert f'`{name}`' in reference or f'`spectr_jax.{name}`' in reference, name
      else:
        names.add(f'{thing.__module__}.{thing.__qualname__}')
  assert names <= listed
  for path in listed - names:
    module, _, name = path.rpartition('.')
    assert not name.startswith('_')
    assert inspect.getdoc(getattr(__import__(module, fromlist=[name]), name)), path


def test_the_reference_is_readable_without_the_site():
  """GitHub shows directives as they stand: tables of what docstrings say are in front of them."""
  tables = runpy.run_path(str(_DOCS / 'assets' / 'api_tables.py'))
  assert len(tables['PAGES']) == 5
  for path in tables['PAGES']:
    page = path.read_text(encoding='utf-8')
    assert tables['with_tables'](page) == page, f'{path.name}: python -m docs.assets.api_tables'
    assert page.count('\n::: ') == len(re.findall(r'^\| `', page, re.MULTILINE))
  made = tables['with_tables']('# A\n\n::: spectr_jax.methods.Method\n\n## B\n\n::: spectr_jax.methods.register\n')
  assert '|\n\n::: spectr_jax.methods.Method\n\n## B\n\n| name' in made
  assert tables['with_tables'](made) == made


# What it says.


_MOST_WORDS = 1500
_MOST_WORDS_IN_ALL = 25_000  # of the README and the pages beside tables, figures and methods
_IN_FOLDERS = r'\b((?:spectr_jax|common|decode|train|tests|examples|benchmarks|configs)/[\w/.-]+\.(?:py|sh|md))\b'


def _unknown_objects(text):
  """Dotted names of the library, as `spectr_jax.verifiers.Walk`, and arguments of their calls that name nothing."""
  for name, argument in re.findall(r'(?<![\w/])spectr_jax((?:\.[A-Za-z]\w*)+)(?:\((\w+)\(\)\))?', text):
    try:  # a module comes before a function of its package with the same name
      pkgutil.resolve_name(f'spectr_jax{name}')
    except (AttributeError, ImportError):
      yield name
    if argument and not hasattr(couplings, argument):
      yield argument


def _flaws(page, text, navigation):
  """What is wrong with a page: names of what does not exist, too many words, dates, no place in the site."""
  own = page.relative_to(_DOCS).as_posix() if page.is_relative_to(_DOCS) else None
  for name in re.findall(_IN_FOLDERS, text):
    if not (ROOT / name).exists() and name != 'configs/NAME.py':
      yield f'names {name}, which does not exist'
  yield from (f'names {name}, which does not exist' for name in _unknown_objects(text))
  if own and len(text.split()) > _MOST_WORDS:  # words between blanks, as `wc -w` counts them
    yield f'has {len(text.split())} words, at most {_MOST_WORDS}'
  if own and not own.startswith(('tables/', 'figures/')) and not re.search(rf'\b{re.escape(own)}$', navigation, re.M):
    yield 'is not in the navigation'
  is_dated = own or page == ROOT / 'README.md'  # what was before belongs into benchmarks/log/
  if is_dated and not (own or '').startswith(('tables/', 'figures/')) and re.search(r'\b20\d\d-\d\d-\d\d\b', text):
    yield 'has a date'


def test_pages():
  navigation = (ROOT / 'mkdocs.yml').read_text(encoding='utf-8')
  flaws = {page: [*_flaws(page, page.read_text(encoding='utf-8'), navigation)] for page in documented.PAGES}
  assert len(flaws) > 25
  assert not {str(page.relative_to(ROOT)): each for page, each in flaws.items() if each}
  top = [page for page in documented.PAGES if page.parent == _DOCS or page == ROOT / 'README.md']
  assert sum(len(page.read_text(encoding='utf-8').split()) for page in top) <= _MOST_WORDS_IN_ALL
  text = 'decode/mian.py `spectr_jax.verifiers.Wlak` on 2026-01-01 ' + '| a | b |\n' * 300
  ends = [flaw.split()[-1] for flaw in _flaws(_DOCS / 'new.md', text, '')]
  assert ends == ['exist', 'exist', '1500', 'navigation', 'date']


def test_tables_of_block_efficiency():
  """The pages have all tables that `benchmarks.tabulate` prints, and no other numbers in such tables."""
  by_setting = tabulate.read([str(_DOCS / 'block_efficiency.json')])
  printed = '\n'.join(tabulate.tables(by_setting, 'spectr')).strip().split('\n\nTemperature ')
  pages = _read('tables/block_sizes.md') + _read('tables/block_efficiency.md')
  assert len(printed) > 10
  assert not [part for part in printed if part.removeprefix('Temperature ') not in pages]
  rows = set('\n'.join(printed).splitlines())
  assert set(re.findall(r'^\|.*\|$', _read('tables/block_efficiency.md'), re.MULTILINE)) <= rows


def test_figure_of_methods_has_all():
  """All that draft; those that over-accept have a figure of their own."""
  drawn = {line.split(',')[0].removesuffix(' (not lossless)') for line in _read('figures/methods.csv').splitlines()[1:]}
  assert drawn == {*METHODS, *FURTHER_METHODS} - {'autoregressive', 'decoding_opt', 'decoding_uno'}


def test_table_of_methods():
  """Every method with its lossless mark, and the figures of the files that the pages beside it show."""
  measured = {}  # with the interval, at temperature 1
  for record in json.loads(_read('block_efficiency.json')):
    if record['temperature'] == 1:
      low, high = record['block_efficiency_ci95']
      measured[record['method'], record['shape']] = f'{record["block_efficiency"]:.2f} ± {(high - low) / 2:.2f}'
  times = {
    record['method']: f'{record["microseconds"]["random"]["median"] / 1000:.2f}'
    for record in json.loads(_read('verification_cost.json'))['results']
    if record['rows'] == 1 and not record['filters']
  }
  rows = re.findall(r'^\| `(\w+)` \|(.*)\|$', _read('methods/index.md'), re.MULTILINE)
  assert {name for name, _ in rows} == set(METHODS)
  for name, row in rows:
    _, lossless, tokens, milliseconds, page = (cell.strip() for cell in row.split('|'))
    method = METHODS[name]
    assert lossless == ('yes' if method.is_lossless else '**no**')
    if method.max_drafts != 0:
      assert tokens == measured[name, '1 x 8' if method.max_drafts == 1 else '8 x 8']
    assert milliseconds == times[name]
    text = _read('methods/' + re.search(r'\((.*)\)', page)[1])
    assert f'`{name}`' in text
    assert all(part in text for part in ('**Source.**', '**Guarantee.**', '**Cost.**', '**When.**'))


# Code.


def _execute(text, scope):
  """Runs the Python blocks of a page one after another, and returns the arguments of every `print`."""
  printed = []
  scope['print'] = lambda *values: printed.append(values)
  exec('\n'.join(documented.code_blocks(text, 'python')), scope)
  return printed


def test_first_verifier(capsys):
  scope = {}
  exec(documented.code_blocks(_read('extending.md'), 'python')[0], scope)
  assert scope['error'] <= 1e-10
  assert scope['first_only'].source == 'docs/extending.md'
  assert 'joint distribution of four tokens' in capsys.readouterr().out


@pytest.mark.slow
def test_library_page(monkeypatch):
  """Its ways to decode run, and streaming shows the text of whole runs."""
  monkeypatch.chdir(ROOT)
  scope = {}
  printed = [values[0] for values in _execute(_read('library.md'), scope)]
  num_texts = len(scope['texts'])
  continued, printed = printed[:num_texts], printed[num_texts:]
  assert all(isinstance(text, str) and text for text in continued)
  assert scope['own'].tokens.shape == (2, 8)  # of two rows
  assert scope['new'].tokens.shape == (num_texts, 32)
  assert printed[:num_texts] == [
    scope['tokenizer'].decode(np.asarray(tokens[:length]))
    for tokens, length in zip(scope['new'].tokens, scope['new'].lengths)
  ]
  streamed, reasons, many = np.split(np.array(printed[num_texts:]), [-2 * num_texts, -num_texts])
  assert 'stop' in reasons
  assert len(streamed) > 1
  result = scope['state'].result
  session, decode = scope['session'], scope['tokenizer'].decode
  first, answer = decode(np.asarray(result.tokens[0, : result.lengths[0]])), session.tokens[len(scope['prompt']) :]
  shown = ''.join(streamed)
  assert shown.startswith(first)
  assert len(shown) > len(first + decode(answer))  # of two turns
  assert shown.endswith(decode(answer))
  assert sorted(many) == sorted(scope['texts'])


def _extended(name):
  """The names that the code of a page defines, run without the compiler's optimizations, and its printed values."""
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  scope = {}
  try:
    printed = _execute(_read(name), scope)
  finally:
    jax.config.update('jax_disable_most_optimizations', before)
  return scope, printed


@pytest.fixture(scope='module')
def own_drafters():
  return _extended('extending_drafters.md')


@pytest.mark.slow
def test_verifiers_of_the_page():
  try:
    scope, (*_, errors) = _extended('extending.md')
    assert max(scope['errors'][name] for name in ('any_one', 'matching')) <= 1e-10
    assert scope['errors']['likeliest'] > 1e-3
    assert errors == ({name: f'{error:.0e}' for name, error in scope['errors'].items()},)
    for name in ('any_one', 'matching', 'likeliest'):
      assert prove(scope[name], num_samples=10_000).is_passed == (name != 'likeliest')
  finally:
    METHODS.pop('any_one', None)


@pytest.mark.slow
def test_drafters_of_the_page(own_drafters):
  _, (speed,) = own_drafters
  assert speed[1] > 2


@pytest.mark.slow
def test_examples(capsys):
  fading_model.main()
  equal, calls = capsys.readouterr().out.splitlines()
  assert equal == 'equal texts: True'
  assert int(calls.split()[-1]) < 10  # guesses were accepted
  copying_drafter.main()
  speed, *errors = capsys.readouterr().out.splitlines()
  assert float(speed.split()[-1]) > 2
  assert len(errors) == 2
  assert all(float(line.split()[-1]) < 1e-10 for line in errors)


@pytest.mark.slow
@pytest.mark.parametrize('method', ['spectr', 'gsd'])
def test_drafter_of_the_page_keeps_the_distribution(own_drafters, method):
  """Its guesses depend on a row's whole text; the output has the chain's distribution, unless the drafter lies."""
  scope, _ = own_drafters
  probs = np.array([[0.6, 0.3, 0.1], [0.1, 0.5, 0.4], [0.45, 0.1, 0.45]])
  num_rows, prompt = 20_000, [0, 1, 2, 0, 1, 1]
  joint = np.einsum('a,ab,bc,cd->abcd', probs[prompt[-1]], probs, probs, probs).reshape(-1)

  def p_value(drafter):
    new = generate(
      jax.random.key(3), table.table_model(jnp.log(probs)), drafter, np.tile(prompt, (num_rows, 1)),
      np.full(num_rows, len(prompt)), method=method, tree=TokenTree.prefix((2, 1)), max_new_tokens=4,
    )  # fmt: skip
    counts = np.bincount(np.asarray(new.tokens) @ [27, 9, 3, 1], minlength=81)
    return chi_square(counts, joint).p_value

  honest = scope['CountingDrafter'](3, smoothing=0.3)

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Lying(type(honest)):
    def propose(self, *arguments):
      proposal = super().propose(*arguments)
      return dataclasses.replace(proposal, probs=jnp.full_like(proposal.probs, 1 / 3))

  assert p_value(honest) > 1e-4
  assert p_value(Lying(**vars(honest))) < 1e-9


def test_example_of_race_traversal():
  """It prints the page's output, and the page's fractions by hand are those of the library."""
  text, scope = _read('methods/race_traversal.md'), {}
  printed = _execute(text, scope)
  (output,) = (block for block in documented.code_blocks(text, 'text') if block.startswith('ab '))
  assert [' '.join(map(str, values)) for values in printed] == output.splitlines()
  by_hand = {'race_traversal': [0.07, 0.05, 0.07, 0.6, 0.21], 'race_block': [0.14, 0, 0.14, 0.3, 0.42]}
  following = [[0, 0, 1], [1, 0, 0], [1, 0, 0], *np.asarray(scope['target_probs'][3:])]
  for name, stops in by_hand.items():
    np.testing.assert_allclose(scope['laws'][name], np.array(stops)[:, None] * following, atol=1e-3, err_msg=name)
    kept = np.dot(stops, scope['tree'].depths)
    assert f'= {kept:.2f}' in text, name


# Commands.


def _task(command: Command, arguments=None, **more):
  arguments = command.arguments if arguments is None else arguments
  return {'module': command.module, 'arguments': [_STAND_INS.get(a, a) for a in arguments], 'env': {}} | more


@pytest.fixture(scope='module')
def shown():
  """All commands that are shown anywhere: on pages, in help, in docstrings, in messages and where programs end."""
  return [*_COMMANDS, *_OF_SOURCES, *documented.help_commands()]


@pytest.mark.slow
def test_every_shown_command_has_its_flags(shown):
  assert len(_COMMANDS) > 150
  assert len(_OF_SOURCES) > 40
  assert len(shown) - len(_COMMANDS) - len(_OF_SOURCES) > 40
  assert {command.module for command in shown} >= {*documented.modules()}
  wrong = Command('here', 'decode.main', ('--num_draft=4', '--no_such_flag'))
  refused = Command('here', 'decode.main', ('--draft=lookup', '--method=block'))
  *parsed, caught, other = documented.attempt([_task(command, is_run=False) for command in (*shown, wrong, refused)])
  assert not {str(command): result['error'] for command, result in zip(shown, parsed) if result['error']}
  assert 'Unknown command line flag' in caught['error']
  assert 'block takes drawn candidates only' in other['error']
  known = {name for result in parsed for name in result['flags']} | _FLAGS_OF_OTHERS
  mentioned = {str(page.relative_to(ROOT)): documented.inline_flags(page) - known for page in documented.PAGES}
  assert not {page: unknown for page, unknown in mentioned.items() if unknown}
  for path in documented.SOURCES:
    flags = {name for text in documented.texts(path) for name in re.findall(r'(?<![-\w])--(?!xla_)([a-z]\w+)', text)}
    flags -= known | _FLAGS_OF_PROGRAMS | {f'no{name}' for name in known} | {'config'}
    assert not flags, path


def test_commands_in_texts_are_found():
  """In docstrings, over several lines, within messages, and with parts that are known only when they are printed."""
  assert {
    'configs/head.py: train.head --config=configs/head.py:eagle3 --target=SmolLM2-135M-Instruct.Q4_1.gguf'
    ' --workdir=runs/smollm2_head',
    'train/lm1b.py: train.prepare_data --manual_dir=DIR_OF_THE_ARCHIVE --data_dir=DIR',
    'decode/plot.py: decode.plot results.json --output=results.svg',
  } <= set(map(str, _OF_SOURCES))


def test_extras_that_are_named_exist():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']
  texts = [page.read_text(encoding='utf-8') for page in (*documented.PAGES, ROOT / 'CONTRIBUTING.md')]
  texts += [text for path in documented.SOURCES for text in documented.texts(path)]
  named = [name for text in texts for names in re.findall(r'\.\[([\w,]+)\]', text) for name in names.split(',')]
  assert len(named) > 15
  assert set(named) - {'VALUE'} <= project['optional-dependencies'].keys()
  needs = [path.read_text(encoding='utf-8') for path in documented.SOURCES]
  needed = {name for text in needs for name in re.findall(r"\bneed\('(\w+)'", text)}
  assert {'commands', 'train', 'serve'} <= needed <= project['optional-dependencies'].keys()


# Commands that are not run here: a part of the command, and the reason.
_NOT_RUN = {
  'decode.aot': 'needs the extra tpu: tests/tpu_test.py',
  'train.aot': 'needs the extra tpu: tests/tpu_test.py',
  'train.prepare_data': 'needs the archive of LM1B: tests/train/lm1b_test.py',
  'gs://BUCKET': 'needs a pod and a bucket',
  '--coordinator_address': 'needs several processes: tests/train/sharded_test.py',
  '--mesh=data:8,model:2': 'needs a pod: tests/decode/mesh_test.py',
  '--method=auto,': 'times every method: tests/decode/auto_test.py',
  'decode.serve': 'does not end: tests/serving',
  'benchmarks.serving': 'needs an endpoint',
  'decode.chat': 'needs a chat template: tests/decode/chat_test.py',
  'decode.reproduce': 'times several settings: tests/decode/reproduce_test.py',
  'train.head': 'trains for hours: tests/train/head_test.py',
  **dict.fromkeys(
    ('benchmarks.drafters', 'benchmarks.equality', 'benchmarks.constraints', 'benchmarks.rounds --target'),
    'needs a public model',
  ),
  'benchmarks.constraint_references': 'needs node and jsonschema[format]',
  'benchmarks.load': 'compiles and times every number of rows: tests/engine/budget_test.py',
  'benchmarks.prefixes': 'times long prompts: tests/engine/prefixes_test.py',
  **dict.fromkeys(('benchmarks.experts', 'benchmarks.recurrent'), 'times large layers: tests/models'),
  'train.convert': 'needs a folder of a former version: tests/train/convert_test.py',
  '--weights=blocks': 'needs a .gguf file: tests/io/hub/gguf_blocks_test.py',
  'benchmarks.public_verifiers': "needs other projects' packages: tests/engines",
  **dict.fromkeys(
    ('benchmarks.auto', 'benchmarks.speed'), 'times large models or many settings: tests/benchmarks_test.py'
  ),
}
# What ends with an error, as it should.
_FAILS = ('decode.prove', '--method=spectr_gbv')  # which is not lossless
# Small values of options, the same for every command.
_SMALL = {
  'num_prompts': 2, 'num_seeds': 1, 'max_new_tokens': 4, 'num_drafts': 2, 'draft_length': 2, 'rows': 1,
}  # fmt: skip
_SMALL_TRAINING = {
  'vocab_size': 320, 'seq_len': 24, 'batch_size': 4, 'num_microbatches': 1, 'num_steps': 2, 'warmup_steps': 1,
  'eval_batches': 1, 'held_out_percent': 20, 'model.embed_dim': 12, 'model.num_layers': 1, 'model.num_heads': 2,
  'model.mlp_dim': 16, 'model.dtype': 'float32', 'mesh': 'data:-1',
}  # fmt: skip
_MODELS_AND_PROMPTS = {
  'decode.main': ('num_prompts', 'max_new_tokens', 'prompts'),
  'decode.bulk': ('num_prompts', 'max_new_tokens', 'prompts'),
  'decode.trace': ('max_new_tokens',),
}
_MORE = {'benchmarks.verification': ('--vocab_size=50', '--repeats=1', '--num_proposals=2', '--methods=speculative')}


def _not_run(command):
  words = f'{command.module} {" ".join(command.arguments)}'
  return next((why for part, why in _NOT_RUN.items() if part in words), None)


def _reduced(command, directory):
  """The arguments with tiny models and small sizes, and all files in one directory."""
  words = [_STAND_INS.get(word, word) for word in command.arguments]
  values = dict(word.removeprefix('--').partition('=')[::2] for word in words if word.startswith('--'))
  files = [directory / f'given{pathlib.Path(word).suffix}' for word in words if not word.startswith('--')]
  own = _MODELS_AND_PROMPTS.get(command.module, ())
  if own:
    draft = values.get('draft', '')
    values['target'] = directory / 'target'
    values['draft'] = draft if draft == 'lookup' else f'{"lookup+" * draft.startswith("lookup+")}{directory / "draft"}'
  values.pop('chat', None)  # tiny models have no chat template
  if 'prompts' in own and 'prompt' not in values:
    values['prompts'] = directory / 'prompts.txt'
  values |= {name: _SMALL[name] for name in (*values, *own) if name in _SMALL}
  if 'batch_size' in values:
    values['batch_size'] = 8 if 'mesh' in values else 2
  if command.module == 'decode.main':
    values = {'num_drafts': 2, 'draft_length': 2, 'method': 'speculative', 'batch_size': 2} | values
  if 'method' in values and 'gumbel' not in values:
    # A second method is another program; a race takes longest to compile.
    values['method'] = re.sub('race_(block|traversal)', 'spectr', values['method']).split(',')[:2][-1]
  if values.get('tree', '').startswith('optimal:'):
    values['tree'] = 'optimal:4'
  for name in ('output', 'generations'):
    if name in values:
      # What goes on in a file of `decode.bulk` is of the same method.
      own = f'{values["method"]}_' if command.module == 'decode.bulk' and 'method' in values else ''
      values[name] = directory / (own + pathlib.Path(values[name]).name)
  if command.module == 'benchmarks.tabulate':
    values['files'] = re.sub('^FILE,', 'docs/block_efficiency.json', values['files'].replace('runs/', f'{directory}/'))
  if command.module == 'benchmarks.cut_prompts':
    values['text'] = directory / 'text.txt'
  if command.module == 'train.tokenizer':
    values |= {'config.source': 'files', 'config.files': directory / 'prompts.txt', 'config.vocab_size': 280}
    values['output'] = directory / f'{re.sub("[^a-z0-9]", "_", str(command))[-100:]}.json'
  if command.module == 'train.main':
    values = {name: value for name, value in values.items() if name in ('config', 'dry_run', 'config.distill_from')}
    if 'config.distill_from' in values:
      values['config.distill_from'] = directory / 'target'
    text = {'source': 'files', 'files': directory / 'text.txt', 'cache_dir': directory / 'data'}
    text['tokenizer'] = directory / 'target' / 'tokenizer.json'
    values |= {f'config.{name}': value for name, value in (text | _SMALL_TRAINING).items()}
    values['workdir'] = directory / f'run{len(list(directory.glob("run*")))}'
    values['workdir'].mkdir()
  if command.module == 'decode.prove':
    values['num_samples'] = 10_000
  if command.module == 'decode.plot':
    values['output'] = directory / f'plot{pathlib.Path(values["output"]).suffix}'
  if command.module == 'train.evaluate':
    values |= {'model': directory / 'target', 'files': directory / 'prompts.txt'}
  options = [f'--{name}={value}' if value != '' else f'--{name}' for name, value in values.items()]
  return [*map(str, files), *options, *_MORE.get(command.module, ())]


# Commands without a recorded run: a part of the command, and the reason.
_NOT_RECORDED = {
  'train.prepare_data': 'needs the archive of LM1B',
  'gs://BUCKET': 'needs a pod and a bucket',
  '--coordinator_address': 'needs several machines',
  '--mesh=data:8,model:2 --output': 'needs a pod',
  '--config=configs/NAME.py': 'shows the form of others',
  '--target=MODEL': 'shows the form of others',
  'train.convert': 'needs a folder of a former version',
  'ORG/': 'shows the form of others',
  'train.head': 'its run is described beside the head: pretrained/README.md',
  'benchmarks.auto': 'decodes whole grids, for up to an hour',
  **dict.fromkeys(
    ('benchmarks.experts', 'benchmarks.load', 'benchmarks.prefixes', 'benchmarks.recurrent', '--mixed --pid=4321',
     '--seconds=40 --turns=4'),
    'their tables are beside them',
  ),
  **dict.fromkeys(
    (
      'train.tokenizer --config=configs/pretrained_pair.py', 'runs/t1_k8_l8.jsonl',
      'benchmarks.verification', 'benchmarks.public_verifiers', 'benchmarks.speed',
      '--num_prompts=16 --dtype=bfloat16', '--method=auto,autoregressive', '--xla_backend_optimization_level=0',
    ),
    'measured, but not timed: named at the end of the page',
  ),
}  # fmt: skip
_RECORDS = 'benchmarks/log/runs.md'


def test_a_whole_run_of_every_command_is_recorded():
  def words(is_record):
    commands = [each for each in _COMMANDS if (each.page == _RECORDS) == is_record and each.arguments]
    return {' '.join((*map('='.join, each.env), each.module, *each.arguments)) for each in commands}

  recorded, shown = words(True), words(False)
  assert len(recorded) > 30
  assert recorded <= shown
  parts = {command: [part for part in _NOT_RECORDED if part in command] for command in shown - recorded}
  assert not [command for command, reasons in parts.items() if not reasons]
  assert set(itertools.chain(*parts.values())) == set(_NOT_RECORDED)
  for line in (ROOT / _RECORDS).read_text(encoding='utf-8').splitlines():
    if line.startswith('| `'):
      assert '@' not in line
      assert re.search(r'\| \d+(\.\d)? (s|min|h) \|', line), line
  assert not [part for part in _NOT_RUN if not any(part in line for line in recorded | shown)]


def _files_of_runs(directory):
  """Tiny models, texts, results and the log of a training, which stand for those of the commands."""
  words = 'the quick brown fox jumps over the lazy dog while seven wise owls watch from the old oak tree'
  tokenizer = spectr_jax.Tokenizer.train([words] * 4, 320)
  config = causal_lm.lm1b_config(320, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16, context_length=128)
  for seed, role in enumerate(('target', 'draft')):
    params = transformer.init_params(jax.random.key(seed), config)
    spectr_jax.save_model(directory / role, causal_lm.causal_lm(params, config), tokenizer)
  (directory / 'prompts.txt').write_text('\n'.join([words] * 3) + '\n')
  (directory / 'text.txt').write_text('\n\n'.join(f'{number} {words}' for number in range(60)) + '\n')
  result = {'method': 'block', 'num_drafts': 1, 'draft_length': 4, 'tokens': 9, 'target_calls': 3}
  (directory / 'given.json').write_text(json.dumps({'results': [result | {'tokens_per_second': 2.0}]}))
  (directory / 'given.jsonl').write_text('{"step": 1, "train_loss": 2.0}\n')
  (directory / 'given.csv').write_text('method,tokens,target_calls,tokens_per_second\nblock,9,3,2.0\n')


@pytest.mark.slow
def test_shown_commands_run(shown, tmp_path, capsys):
  _files_of_runs(tmp_path)
  tasks, seen, left_out = [], set(), []
  for command in shown:
    if _not_run(command):
      left_out.append(command)
      continue
    arguments = _reduced(command, tmp_path)
    # Many reduced commands differ only in their files and prompts.
    free = '--output', '--generations', '--prompt', '--workdir', '--config='
    own = command.module, *sorted(a for a in arguments if not a.startswith(free))
    if own not in seen:
      seen.add(own)
      tasks.append(_task(command, arguments, is_run=True, env=dict(command.env)))
  assert {task['module'] for task in tasks} >= {
    'decode.main', 'decode.bulk', 'decode.trace', 'decode.plot', 'decode.prove', 'benchmarks.tabulate', 'train.main',
    'train.tokenizer', 'train.evaluate',
  }  # fmt: skip
  results = documented.attempt(tasks, timeout=1800)
  with capsys.disabled():
    print(
      f'\n{len(shown)} commands are shown, {len(shown) - len(left_out)} of them run here as {len(tasks)} small ones'
    )
  ends = [
    (task, result['error'], _FAILS[0] == task['module'] and _FAILS[1] in task['arguments'])
    for task, result in zip(tasks, results)
  ]
  assert not {str(task): error for task, error, fails in ends if bool(error) != fails}
