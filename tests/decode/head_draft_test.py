"""`--draft=FOLDER` of a head on the target: what commands do with it, say of it and refuse."""

import dataclasses
import json

import jax
import pytest
from exhibit_checks import SMALL_FIGURES, request_of, rows_of
from published_heads import write_head
from small_head import CONFIG, save_one_pass

from decode.bulk import decode_bulk
from decode.experiment.options import DecodeOptions
from decode.experiment.run import run_decode
from decode.experiment.workload import Workload, find_head, load_models, model_title
from decode.papers import exhibit
from decode.papers.exhibits import EXHIBITS
from decode.trace import make_page, record_trace
from spectr_jax.models import head


@pytest.fixture(scope='module')
def options(small_options, tiny_head_file):
  return small_options('speculative', draft=tiny_head_file, batch_size=3)


@pytest.fixture(scope='module')
def one_pass_file(tmp_path_factory):
  return save_one_pass(tmp_path_factory.mktemp('heads') / 'one_pass')


def _with(options, **changes):
  return DecodeOptions.of(**{name: options.flags[name] for name in ('target', 'draft', 'prompts')} | changes)


@pytest.mark.slow
def test_results_say_what_head_it_was(options):
  run = run_decode(options)
  described = run.info['models']['draft']
  assert (described['head'], described['path'], described['dtype']) == ('EAGLE-3', options.models.draft, 'float32')
  own = {
    name: shapes for name, shapes in head.param_shapes(CONFIG).items() if name not in ('target_ids', 'unembedding')
  }
  assert described['num_params'] == sum(leaf.size for leaf in jax.tree.leaves(own))
  assert model_title(described) == f'{options.models.draft} (0.0M, EAGLE-3 head)'
  assert all(measurement.lengths.min() > 0 for measurement in run.measurements)


def test_lookup_stands_beside_a_head(options):
  work = Workload.load(_with(options, draft=f'lookup+{options.models.draft}', method=('race',), max_new_tokens=6))
  assert work.draft.has_mixed_positions
  assert work.draft.feature_layers == (0, 1, -1)
  assert work.info['models']['draft']['head'] == 'EAGLE-3'


@pytest.fixture
def one_pass_options(options, one_pass_file):
  return options.replace(draft=one_pass_file, draft_length=(3,), method=('race_traversal',))


def test_what_a_network_of_one_pass_cannot_do(one_pass_options, pair):
  models = load_models(one_pass_options)
  assert (models.draft.max_depth, models.draft.estimates) == (3, True)
  with pytest.raises(ValueError, match='guesses 3 tokens ahead, and the tree is 4 deep'):
    run_decode(one_pass_options.replace(draft_length=(4,)))
  with pytest.raises(ValueError, match='estimate'):
    run_decode(one_pass_options.replace(draft=pair['draft'], draft_length=None, tree=('estimated:2,2',)))


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['head', 'lookup beside a head', 'one pass'])
def test_trace_pages_show_a_head(options, one_pass_options, kind):
  is_beside, others, name = kind == 'lookup beside a head', ('speculative', 'block'), 'EAGLE-3 head'
  if is_beside:
    options = options.replace(draft=f'lookup+{options.models.draft}', method=('race',), lookup_min=1)
    others = ('race_block',)
  elif kind == 'one pass':
    options, others, name = one_pass_options, ('race_traversal', 'block'), 'speculators head'
  trace = record_trace(options, others)
  assert name in trace['run']['models']['draft']
  assert trace['run']['has_lookup'] == is_beside
  assert name in make_page(trace)


def _lines(path):
  return sorted(path.read_text().splitlines(), key=lambda line: json.loads(line)['index'])


_ONE_PASS = {'draft_length': (3,), 'method': ('race_traversal',)}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('head', 'changes'),
  [
    ('{head}', {}),
    ('lookup+{head}', {'method': ('race_traversal',), 'lookup_min': 1}),
    ('{head}', {'method': ('spectr',), 'tree': ('likeliest:2,2',), 'temperature': 0.0, 'growth_threshold': 0.01}),
    ('{one_pass}', _ONE_PASS),
    ('{one_pass}', _ONE_PASS | {'draft_length': None, 'tree': ('estimated:2,2',), 'growth_threshold': 0.01}),
    ('lookup+{one_pass}', _ONE_PASS),
  ],
  ids=str,
)
def test_bulk_decoding_resumes(options, one_pass_file, tmp_path, head, changes):
  draft = head.format(head=options.models.draft, one_pass=one_pass_file)
  options, path = options.replace(**changes, draft=draft), tmp_path / 'out.jsonl'
  decode_bulk(options, path)
  whole = _lines(path)
  assert len(whole) == 3
  assert json.loads(whole[0])['tokens']
  path.write_text(path.read_text().partition('\n')[0] + '\n')
  decode_bulk(options, path, resume=True)
  assert _lines(path) == whole
  assert decode_bulk(options, path, resume=True)[1] == 0


def _request(options, name, drafts=None, **sizes):
  request = request_of(
    name, {'target': options.models.target, 'draft': options.models.draft}, options.prompts.prompts, **sizes
  )
  return request if drafts is None else dataclasses.replace(request, drafts=drafts)


def test_exhibits_know_drafts_of_every_kind_before_they_measure(options):
  drafts = {'head': options.models.draft, 'lookup': 'lookup', 'both': f'lookup+{options.models.draft}'}
  exhibit._check_inputs(_request(options, 'gbv_table1', drafts, max_new_tokens=4))
  with pytest.raises(ValueError, match='no model at .*/nothing'):
    exhibit._check_inputs(_request(options, 'gbv_table1', drafts | {'x': f'lookup+{options.models.draft}/nothing'}))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gbv_table1', 'ersd_fig3'])
def test_exhibits_decode_with_a_head(options, name):
  sizes = SMALL_FIGURES.get(name, {'max_new_tokens': 6, 'num_drafts': (2,), 'draft_length': (2,), 'num_prompts': 3})
  results = EXHIBITS[name].run(_request(options, name, **sizes), lambda *_: None)
  data = EXHIBITS[name].to_data(name, _request(options, name, **sizes), results, [])
  assert rows_of(data) == results.rows


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('spectr_table3', '^this table times the calls of a draft model, and .*/head is not a model$'),
    ('optimum', '^this needs the probabilities of a draft model along texts, and .*/head is not a model$'),
  ],
)
def test_exhibits_about_the_probabilities_or_calls_of_a_model_refuse_a_head(options, name, message):
  with pytest.raises(ValueError, match=message):
    EXHIBITS[name].run(_request(options, name, **SMALL_FIGURES.get(name, {})), lambda *_: None)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'method': ('race_traversal',), 'tree': ('optimal:6',)},
      'this needs the probabilities of a draft model along texts, and .*/head is not a model',
    ),
    ({'draft': '{}/nothing'}, 'no model at .*/nothing'),
  ],
)
def test_what_a_head_cannot_do(options, changes, message):
  draft = changes.get('draft', '{}').format(options.models.draft)
  changed = _with(options, **{'max_new_tokens': 4, 'draft_length': (2,)} | changes | {'draft': draft})
  with pytest.raises(ValueError, match=message):
    run_decode(changed)


def test_a_head_is_its_targets(options, tmp_path):
  folder = str(write_head(tmp_path, 'deepseek mtp'))
  assert find_head(folder, folder).format == 'MTP, DeepSeek'
  assert find_head(options.models.target, folder) is None
  with pytest.raises(
    ValueError, match=r'tensor embed_tokens.weight has shape \(23, 16\), and the target has 320 tokens$'
  ):
    load_models(_with(options, draft=str(write_head(tmp_path, 'speculators'))))
