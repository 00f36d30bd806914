"""The data of the trace page are those of the run, and the page is one file that holds them safely."""

import json
import pathlib
import re

import commands
import jax
import numpy as np
import pytest

from decode import trace
from decode.experiment.options import DecodeOptions
from decode.experiment.run import run_decode
from decode.trace_page.data import pieces_of_tokens
from spectr_jax import METHODS, TokenTree
from spectr_jax.engine import ORIGIN_BONUS, ORIGIN_DRAFT
from spectr_jax.methods import Guesses
from tests.slow import slow

_PROMPT = 'the </script><b>fox</b> & \u2028 ü'


def _options(pair, **more):
  fields = {'method': ('spectr',), 'num_drafts': (2,), 'draft_length': (2,), 'max_new_tokens': 8, 'prompt': _PROMPT}
  return DecodeOptions.of(**pair, **fields | more)


@pytest.fixture(scope='module')
def recorded(pair):
  seen = []
  with jax.default_matmul_precision('highest'):
    return trace.record_trace(_options(pair), ('speculative',), lambda *args: seen.append(args)), seen


@pytest.fixture(scope='module')
def traced(recorded):
  return recorded[0]


def test_progress_shows_programs_and_then_tokens(recorded):
  traced, (loading, *seen) = recorded
  assert loading == ('loading', 0, 1)
  programs = [step for step in seen if step[0].startswith('compiling')]
  names = 'the prompt', 'spectr', 'speculative'
  assert programs == [(f'compiling {number + 1} of 3: {name}', number, 3) for number, name in enumerate(names)]
  ends = np.cumsum([len(played['origins']) for played in traced['rounds']])
  assert seen[len(programs) :] == [('decoding', end, 8) for end in ends]
  assert ends[-1] == 8


@pytest.mark.slow
@pytest.mark.usefixtures('highest')
def test_the_run_is_the_one_that_decoding_makes(pair, traced):
  run = run_decode(_options(pair))
  measured = run.measurements[0]
  length = measured.lengths[0]
  text = run.tokenizer.decode(measured.tokens[0, :length])
  assert ''.join(piece for played in traced['rounds'] for piece in played['pieces']) == text
  assert [origin for played in traced['rounds'] for origin in played['origins']] == measured.origins[
    0, :length
  ].tolist()
  assert len(traced['rounds']) == measured.num_target_calls[0]
  assert traced['run']['prompt'] == _PROMPT


def test_a_page_names_models_without_the_folders_of_the_machine(pair, traced):
  page = trace.make_page(traced)
  for role, name in traced['run']['models'].items():
    folder = pathlib.Path(pair[role])
    assert folder.is_absolute()
    assert name.split(' (')[0] == folder.name
    assert str(folder.parent) not in page


def test_every_round_says_what_was_kept_and_why(traced):
  assert [method['name'] for method in traced['methods']] == ['spectr', 'speculative']
  assert all(method['is_lossless'] and method['rule'] and method['residual'] for method in traced['methods'])
  assert traced['methods'][1]['nodes'] == [0, 1, 3]  # the first draft
  parents = [0, *traced['parents']]
  for played, following in zip(traced['rounds'], [*traced['rounds'][1:], None]):
    own = played['judgements'][0]
    if following:  # the limit cuts nothing off
      assert played['origins'] == [ORIGIN_DRAFT] * len(own['path']) + [own['origin']]
      assert following['root'] == own['next']
    assert [parents[node] for node in own['path']] == [0, *own['path'][:-1]][: len(own['path'])]
    assert (own['origin'] == ORIGIN_BONUS) == (len(own['path']) == 2)
    for judgement in played['judgements']:
      assert sum(weight for _, weight in judgement['law']) <= 1 + 1e-4
      assert judgement['next_prob'] > 0
      kept = [decision['chosen'] for decision in judgement['decisions'] if decision['chosen'] >= 0]
      spelled = [[played['tokens'][node - 1] for node in nodes] for nodes in (kept, judgement['path'])]
      assert spelled[0] == spelled[1]
      for decision in judgement['decisions']:
        ends = np.cumsum(decision['shares'])
        slot = np.searchsorted(ends, decision['uniform'], side='right')
        assert decision['chosen'] == ([*decision['nodes'], -1][slot])
    for node, (token, p, q) in enumerate(zip(played['tokens'], played['draft'], played['target']), start=1):
      assert 0 < p <= 1
      assert 0 <= q <= 1
      rows = {row[0]: row[1:] for row in played['laws'][str(played['places'][parents[node]])]}
      assert rows.get(token, [p, q]) == [p, q]
      assert str(token) in traced['names']


@pytest.mark.slow
@pytest.mark.usefixtures('highest')
@pytest.mark.parametrize('is_beside', [False, slow(True)])
def test_given_candidates_are_shown_as_given(pair, is_beside):
  draft = f'lookup+{pair["draft"]}' if is_beside else 'lookup'
  fields = {'draft': draft, 'method': ('race',), 'prompt': 'the fox the fox the', 'lookup_min': 1}
  options = _options({'target': pair['target']}, **fields)
  traced, run = trace.record_trace(options), run_decode(options)
  names = ['race', 'speculative', *([] if is_beside else ['specinfer', 'spectr']), 'race_block', 'race_traversal']
  assert sorted(method['name'] for method in traced['methods']) == sorted(names)
  measured = run.measurements[0]
  text = run.tokenizer.decode(measured.tokens[0, : measured.lengths[0]])
  assert ''.join(piece for played in traced['rounds'] for piece in played['pieces']) == text
  assert len(traced['rounds']) == measured.num_target_calls[0]
  first = traced['rounds'][0]
  # What followed the first "the", and the same again in a chain of its own only if there is another continuation.
  assert first['given'] == [1, 3]
  assert traced['names'][str(first['tokens'][0])] == run.tokenizer.token_text(run.tokenizer.encode(' fox')[0])
  parents = [0, *traced['parents']]
  for played in traced['rounds']:
    for node, (token, p) in enumerate(zip(played['tokens'], played['draft']), start=1):
      if node in played['given']:
        assert (p, token >= 0) == (None, True)
      else:
        assert (p > 0) == (token >= 0) == is_beside
      law = played['laws'][str(played['places'][parents[node]])]
      assert all((row[1] is not None) == is_beside for row in law)
    made = [decision for decision in played['judgements'][0]['decisions'] if decision['kind'] == 'accept']
    for decision in made:
      given = [
        probability for node, probability in zip(decision['nodes'], decision['draft_prob']) if node in played['given']
      ]
      assert given == [1] * len(given)
  assert trace.make_page(traced)


def test_the_page_is_one_file_that_holds_its_data(traced):
  page = trace.make_page(traced)
  assert len(page.encode()) < trace.MAX_BYTES
  inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
  assert json.loads(inside) == json.loads(json.dumps(traced))
  assert not set('<>&\u2028') & set(inside)
  assert '<b>fox' not in page
  assert '{{' not in page
  # Nothing is loaded from elsewhere.
  assert not re.findall(r'<script src|<link rel="stylesheet"|@import|url\(', page)
  assert set(re.findall(r'https?://[^\s"\']+', page)) <= {'http://www.w3.org/2000/svg'}
  ids = re.findall(r' id="([^"]*)"', trace.make_page({}))
  assert len(ids) > 30
  assert len(set(ids)) == len(ids)
  with pytest.raises(ValueError, match=r'the page would have \d+\.\d MB, more than 1: lower max_new_tokens'):
    trace.make_page(traced | {'rounds': traced['rounds'] * 500})


def test_the_sample_of_the_docs_has_the_fields_of_a_run(traced):
  sample = (pathlib.Path(trace.__file__).parents[1] / 'docs' / 'sample_trace.html').read_text(encoding='utf-8')
  fields = []
  for data in (traced, json.loads(re.search(r'id="data">(.*?)</script>', sample)[1])):
    played = data['rounds'][0]
    fields.append([set(part) for part in (data, data['run'], data['methods'][0], played, played['judgements'][0])])
  assert fields[0] == fields[1]


def test_every_method_says_how_it_decides():
  for method in METHODS.values():
    explanation = method.verifier.explanation
    assert explanation.rule, method.name
    assert explanation.residual, method.name
    sentences = explanation.plain.split('. ')
    assert len(sentences) == 2, method.name
    assert all(sentence[0].isupper() for sentence in sentences), method.name
    assert sentences[1].endswith('.')
    # Plain words: no symbols, and not the words of the formula once more.
    assert not re.search(r'[^A-Za-z ,.:;\'-]|\b[a-zA-Z]\b(?<!a)(?<!A)', explanation.plain), method.name


def test_who_is_compared():
  tree, spectr = TokenTree.chains(2, 2), METHODS['spectr']
  usual = ['speculative', 'block', 'specinfer', 'race', 'race_block', 'race_traversal', 'traversal']
  assert trace.choose_others((), spectr, tree) == usual
  assert trace.choose_others(('race', 'spectr'), spectr, tree) == ['race']
  assert trace.choose_others((), METHODS['gsd'], tree) == ['traversal']
  assert trace.choose_others((), METHODS['ersd'], tree) == []
  assert trace.choose_others((), METHODS['race'], tree, Guesses(True, True)) == [
    'speculative', 'race_block', 'race_traversal'
  ]  # fmt: skip
  with pytest.raises(ValueError, match='block takes drawn candidates only'):
    trace.choose_others(('block',), spectr, tree, Guesses(has_given_candidates=True))
  with pytest.raises(ValueError, match='spectr takes .* this draft mixes them'):
    trace.choose_others(('spectr',), METHODS['race'], tree, Guesses(True, True))
  with pytest.raises(ValueError, match='only if children are drawn independent'):
    trace.choose_others(('spectr',), METHODS['gsd'], tree)
  with pytest.raises(ValueError, match='unknown method'):
    trace.choose_others(('nothing',), spectr, tree)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'method': ('autoregressive',)}, 'autoregressive drafts nothing'),
    ({'method': ('spectr', 'race')}, 'one method, K, L and tree at a time, got 2'),
    ({'max_new_tokens': 60}, 'the prompt is too long'),
    ({'num_samples': 2}, 'num_samples is not for decode.trace'),
    ({'stop': ('a',)}, 'stop is not for decode.trace'),
    ({'logprobs': True}, 'logprobs is not for decode.trace'),
  ],
)
def test_bad_options_are_refused(pair, fields, message):
  with pytest.raises(ValueError, match=message):
    trace.record_trace(_options(pair, **fields))


class _Bytes:
  """A tokenizer of single bytes."""

  def decode(self, ids):
    return bytes(int(i) for i in ids).decode(errors='replace')


@pytest.mark.parametrize(
  ('tokens', 'pieces'),
  [
    ('aüb'.encode(), ['a', '', 'ü', 'b']),
    ('x\U0001f600y'.encode(), ['x', '', '', '', '\U0001f600', 'y']),
    ('€'.encode()[:2], ['\ufffd', '']),  # cut off
    (b'', []),
  ],
)
def test_pieces_put_together_are_the_text(tokens, pieces):
  assert pieces_of_tokens(np.frombuffer(tokens, np.uint8), _Bytes()) == pieces


def _flags(pair, *arguments):
  return [*(f'--{name}={value}' for name, value in pair.items()), *arguments]


def test_bad_input_is_one_line(pair, tmp_path):
  flags = _flags(pair, '--method=autoregressive', f'--output={tmp_path / "trace.html"}')
  assert commands.refuse('decode.trace', *flags) == 'error: autoregressive drafts nothing: there is nothing to trace'
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_writes_the_page(pair, tmp_path):
  path = tmp_path / 'trace.html'
  flags = _flags(pair, '--prompt=the fox', '--max_new_tokens=6', '--compare=spectr,block', f'--output={path}')
  out = commands.finish(commands.start('decode.trace', *flags))
  data = json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(encoding='utf-8'))[1])
  assert [method['name'] for method in data['methods']] == ['race_block', 'spectr', 'block']
  assert (data['run']['num_drafts'], data['run']['draft_length']) == (2, 6)
  assert f'6 tokens in {len(data["rounds"])} rounds' in out
