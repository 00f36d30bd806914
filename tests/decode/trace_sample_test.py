"""The sample of the trace page in the docs: it is written by the present code, with the command beside its link."""

import html
import json
import pathlib
import re

import documented
import pytest

from decode import trace
from spectr_jax import METHODS, theory

_SAMPLE = documented.ROOT / 'docs' / 'sample_trace.html'
_GUIDE = pathlib.Path(trace.__file__).parent / 'trace_page' / 'guide.html'


@pytest.fixture(scope='module')
def sample():
  return _SAMPLE.read_text(encoding='utf-8')


@pytest.fixture(scope='module')
def data(sample):
  return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', sample, re.DOTALL)[1])


def test_the_sample_is_of_the_present_page(sample, data):
  is_present = sample == trace.make_page(data)  # not in the assert, which would compare both line by line
  assert is_present, 'write it again with the command of docs/commands.md'
  assert len(sample.encode()) < 600_000
  for method in data['methods']:
    explanation = METHODS[method['name']].verifier.explanation
    assert [method[name] for name in ('rule', 'residual', 'plain')] == [
      explanation.rule,
      explanation.residual,
      explanation.plain,
    ]


def test_the_sample_is_written_by_the_command_beside_it(data):
  (command,) = (
    command
    for command in documented.commands(documented.ROOT / 'docs' / 'commands.md')
    if f'--output=docs/{_SAMPLE.name}' in command.arguments
  )
  assert command.module == 'decode.trace'
  values = dict(argument.removeprefix('--').split('=', 1) for argument in command.arguments)
  run = data['run']
  assert values.pop('method') == data['methods'][0]['name']
  assert int(values.pop('max_new_tokens')) == sum(len(played['pieces']) for played in data['rounds'])
  assert [int(values.pop(name)) for name in ('num_drafts', 'draft_length')] == [run['num_drafts'], run['draft_length']]
  assert values.pop('prompt') == run['prompt']
  assert set(values) == {'output'}
  assert [name.split()[0] for name in run['models'].values()] == ['pretrained/target', 'pretrained/draft']
  assert {'spectr', 'speculative', 'block', 'traversal'} < {method['name'] for method in data['methods']}


def test_the_arithmetic_of_credit_is_in_the_sample(data):
  """P of every box, and the numbers that it is made of: m = s min(1, P q/p̃) and P = m / (1 - sum of m before)."""
  assert data['methods'][0]['name'] == 'race_traversal'
  parents, num_without = [0, *data['parents']], 0
  for played in data['rounds']:
    own = played['judgements'][0]
    credits = own['credits']
    assert credits[0] == 1
    assert [credits[place] for place in played['places']] == credits  # nodes that spell the same are one
    for each in own['decisions']:
      wanted = [credits[each['node']], credits[parents[each['node']]]]
      assert [each['kept'], each['above']] == pytest.approx(wanted, rel=1e-5)
      mass = each['picked_share'] * min(1, each['above'] * each['ratio'])
      assert each['mass'] == pytest.approx(mass, rel=1e-4, abs=1e-9)
      assert each['kept'] == pytest.approx(each['mass'] / (1 - each['before']) if mass else 0, rel=1e-3, abs=1e-9)
      num_without += not each['above']
    assert all(judgement['credits'] is None for judgement in played['judgements'][1:])
  assert num_without > 10  # branches that have no credit at all are explained as well


def test_pages_link_to_the_sample_and_the_guide_has_their_numbers():
  for page in ('README.md', 'docs/index.md', 'docs/commands.md'):
    assert f'{_SAMPLE.name})' in (documented.ROOT / page).read_text(encoding='utf-8'), page
  guide = html.unescape(re.sub(r'<[^>]+>', ' ', _GUIDE.read_text(encoding='utf-8')))
  guide = re.sub(r'\s+', ' ', guide)
  log = (documented.ROOT / 'benchmarks/log/performance.md').read_text(encoding='utf-8')
  row = r'^(\w+) +yes +\S+ +\S+ +(\d\.\d\d) ± (\d\.\d\d) .*? (\d\.\d\d)x +(- *|.* to .*)$'
  run = re.findall(row, log, re.MULTILINE)
  assert len(run) == 5
  for method, tokens, interval, speed_up, its_interval in run[1:]:
    assert re.search(rf'{method} \d x 8 {tokens} ± {interval} {speed_up} \({its_interval}\)', guide), method
  measured = {method: tokens for method, tokens, *_ in run}
  first, second = theory.expected_chain_tokens([0.76, 1 - 0.24**2], 8)
  assert re.search(r'^speculative +.* 0\.76 ', log, re.MULTILINE)
  assert f'gives {first:.2f}, and the run has {measured["speculative"]} with speculative' in guide
  assert (
    f'gives {second:.2f}, and the run has {measured["spectr"]} with spectr and {measured["race_traversal"]}' in guide
  )
  assert '2.3 times as long for 17 nodes' in ' '.join(log.split())
  assert f'a call yields {float(theory.expected_chain_tokens(0.8, 4)):.2f} tokens' in guide
  training = (documented.ROOT / 'docs' / 'training.md').read_text(encoding='utf-8')
  assert re.search(r'`speculative`, one draft \| 2\.89 ± \S+ \| 3\.60 ±', training)
  assert '2.89 to 3.60' in guide
