"""`benchmarks.speed` at sizes where nothing is worth measuring: it runs, goes on, and what it says adds up."""

import dataclasses
import json
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hub
from hub_specs import SPECS

import benchmarks
import spectr_jax
from benchmarks import speed, speed_models, timing
from benchmarks.speed_models import UNVERIFIED, Models
from spectr_jax import Decoder, TokenTree
from spectr_jax.engine.result import FAILED_DRAFT
from spectr_jax.io.hub.families import read_spec
from spectr_jax.io.hub.hub_model import read_hub_config
from spectr_jax.io.hub.hub_tokenizer import load_hub_tokenizer
from spectr_jax.models import head
from spectr_jax.models.causal_lm import causal_lm
from spectr_jax.models.param_shapes import init_params

_HUB = pathlib.Path(__file__).parents[1] / 'configs' / 'hub'


def _write(folder, **sizes):
  folder.mkdir()
  config = SPECS['llama'] | {'vocab_size': 64, 'max_position_embeddings': 64, **sizes}
  (folder / 'config.json').write_text(json.dumps(config))
  return str(folder)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
  monkeypatch.setattr(timing, 'NEW_TOKENS', 6)
  monkeypatch.setattr(timing, 'PROMPT_LENGTH', 4)
  monkeypatch.setattr(speed, 'NUM_ROUNDS', 2)
  monkeypatch.setattr(timing, 'read_rate', lambda: 1e9)
  target = _write(tmp_path / 'target', num_hidden_layers=6)
  draft = _write(tmp_path / 'draft', num_hidden_layers=1, tie_word_embeddings=True)
  models = Models(target, draft, has_head=True, num_slots=2)
  parts = 'steps', 'rounds', 'profile'
  return speed.Sizes(models, parts, methods=('race_traversal',), batch_sizes=(2,), shapes=((2, 2),), num_runs=2)


@pytest.mark.slow
def test_what_is_there_is_not_measured_again(tiny, tmp_path, capsys, monkeypatch):
  output = tmp_path / 'sizes.json'
  speed.run(tiny, output)
  written = json.loads(output.read_text())
  drafts = [f'rounds, 2 x 2, {draft}, 2 rows, bfloat16' for draft in ('draft', 'head', 'one pass')]
  assert list(written['results']) == ['steps, 2 rows, bfloat16', *drafts, 'profile, bfloat16']
  assert written['run']['flags']['num_params']['target'] == read_hub_config(tiny.models.target).num_params
  assert written['run']['device']['kind'] == jax.devices()[0].device_kind
  assert list((tmp_path / 'sizes_profile').rglob('*.xplane.pb'))
  steps, rounds = written['results']['steps, 2 rows, bfloat16'], written['results'][drafts[1]]
  step = steps['milliseconds']['step']
  assert step['low'] <= step['median'] <= step['high']
  assert steps['tokens_per_second'] == 2e3 / step['median']
  num_bytes = speed_models.bytes_per_step(read_hub_config(tiny.models.target, dtype='bfloat16'))
  assert steps['floor'] == 1e3 * num_bytes / steps['bytes_per_second']
  without, whole = (rounds['milliseconds'][name]['median'] for name in ('no verification', 'race_traversal'))
  assert rounds['race_traversal, verification / round, within the loop'] == 1 - without / whole
  assert rounds['race_traversal, verification / round'] == rounds['race_traversal, verification'] / whole
  assert min(rounds[f'race_traversal, {part}'] for part in ('draft', 'target', 'verification')) > 0
  said = f'{rounds["race_traversal, verification / round"]:.4g}'
  assert said in capsys.readouterr().out

  del written['results'][drafts[0]]
  output.write_text(json.dumps(written))
  monkeypatch.setattr(speed.Bench, 'measure_rounds', lambda _, rows, draft, *shape: {'measured': draft})
  speed.run(tiny, output)
  assert json.loads(output.read_text())['results'] == written['results'] | {drafts[0]: {'measured': 'draft'}}
  assert said in capsys.readouterr().out
  with pytest.raises(ValueError, match='other flags'):
    speed.run(dataclasses.replace(tiny, num_runs=3), output)


@pytest.mark.slow
def test_a_model_from_disk(tiny, monkeypatch, tmp_path):
  config = SPECS['llama'] | {'vocab_size': 300, 'max_position_embeddings': 256}
  tiny_hub.write(tmp_path / 'hub', config=config)
  _, sizes = read_spec(config)
  loaded = causal_lm(init_params(jax.random.key(0), sizes), sizes), load_hub_tokenizer(tmp_path / 'hub')
  monkeypatch.setattr(spectr_jax, 'load_model', lambda *_, **__: loaded)
  monkeypatch.setattr(timing, 'in_own_process', lambda function, *arguments: function(*arguments))
  (tmp_path / 'text').write_text('abc ' * 40)
  models = Models('', None, dtype='float32', text=str(tmp_path / 'text'))
  parts = 'prompt', 'peer', 'steps', 'trees'
  sizes = dataclasses.replace(tiny, models=models, dtypes=('float32',), parts=parts, prompt_length=80)
  speed.run(sizes, tmp_path / 'out.json')
  results = json.loads((tmp_path / 'out.json').read_text())['results']
  names = 'prompt', 'with prefill, 2 rows', 'steps, 2 rows', 'trees'
  assert list(results) == [f'{name}, float32' for name in names]
  assert results['prompt, float32']['peak_gib'] > 2**-10
  assert list(results['with prefill, 2 rows, float32']['milliseconds']) == ['spectr_jax, step']
  trees = results['trees, float32']['milliseconds']
  assert {name for name in trees if name.startswith('XLA')} == {f'XLA, tokens: {size}' for size in speed.TREE_SIZES}
  five, one = (trees[f'XLA, tokens: {size}']['median'] for size in (5, 1))
  assert results['trees, float32']['XLA, tokens: 5 / 1'] == five / one


def test_rounds_that_keep_no_guess(target):
  rows, tree = timing.prompts(2, 17)[:, :8], TokenTree.chains(2, 3)

  def run(draft):
    decoder = Decoder.make(target, draft, method=UNVERIFIED, tree=tree, max_new_tokens=6, cache_size=14)
    return spectr_jax.engine.decode_rounds(*timing.begin(decoder, rows)).result

  result = run(target)
  assert (np.asarray(result.num_target_calls) == 6).all()
  assert not np.asarray(result.accepted_by_depth).any()
  # Guesses are computed although none is kept: a draft that is not finite is seen.
  failed = run(dataclasses.replace(target, params=jax.tree.map(lambda x: x * jnp.nan, target.params)))
  assert (np.asarray(failed.failures) == FAILED_DRAFT).all()
  joint = UNVERIFIED.verifier.law(tree, None, jnp.full((7, 64), 1 / 64), ())
  np.testing.assert_array_equal(joint, np.broadcast_to(np.where(np.arange(7)[:, None] == 0, 1 / 64, 0), (7, 64)))


def test_shapes_from_texts():
  assert speed.parse_shapes(['1x4', '4x16']) == ((1, 4), (4, 16))
  for texts in ([], ['4'], ['4x'], ['0x3'], ['2x3x4']):
    with pytest.raises(ValueError, match='such as 4x8'):
      speed.parse_shapes(texts)


def test_what_fails_does_not_stop_the_rest(tiny, tmp_path, capsys, monkeypatch):
  def fail(*_):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory')

  monkeypatch.setattr(speed.Bench, 'measure_rounds', fail)
  for name in ('measure_profile', 'measure_steps'):
    monkeypatch.setattr(speed.Bench, name, lambda *_: {})
  with pytest.raises(ValueError, match='3 measurements failed'):
    speed.run(tiny, tmp_path / 'sizes.json')
  results = json.loads((tmp_path / 'sizes.json').read_text())['results']
  assert list(results) == ['steps, 2 rows, bfloat16', 'profile, bfloat16']
  assert 'FAILED, RESOURCE_EXHAUSTED' in capsys.readouterr().out


def test_the_peer_drafts_a_chain_and_is_named_where_it_is_left_out(tiny, monkeypatch):
  trees = []
  monkeypatch.setitem(sys.modules, 'torch', None)
  monkeypatch.setattr(timing, 'own_call', lambda models, rows, *method: trees.append(method) or (lambda: 1))
  bench = speed.Bench(dataclasses.replace(tiny, shapes=((2, 3), (4, 4)), peer_device='cuda'), 'bfloat16')
  measured = bench.measure_peer(1)
  assert set(measured['milliseconds']) == {'spectr_jax, step', 'spectr_jax, round'}
  assert trees == [('autoregressive', None), ('speculative', TokenTree.chains(1, 3))]
  assert 'transformers are left out: import of torch halted' in speed.describe('peer', measured)


def test_ratios_are_those_of_medians(tiny, monkeypatch):
  medians = {
    'spectr_jax, step': 2.0, 'spectr_jax, round': 3.0, 'transformers, step': 8.0,
    'transformers, step, static and compiled': 6.0, 'transformers, round': 6.0,
  }  # fmt: skip

  def sampler(model, *_):
    return lambda: asked.append(model)

  asked = []
  peer = types.SimpleNamespace(check_device=asked.append, counted=lambda model, sample: sample)
  peer.sampler = peer.compiled_sampler = peer.assisted_sampler = sampler
  monkeypatch.setitem(sys.modules, 'benchmarks.peer', peer)
  monkeypatch.setattr(benchmarks, 'peer', peer, raising=False)
  monkeypatch.setattr(Models, 'make_peer', lambda _, name, dtype, device: (name, dtype, device))
  monkeypatch.setattr(timing, 'own_call', lambda *_: int)

  def time_steps(calls, num_runs):
    assert list(calls) == list(medians)
    assert [call() for call in calls.values()][3] == 6  # of the static cache: as many as there are new tokens
    return {name: dict.fromkeys(('median', 'low', 'high'), value) for name, value in medians.items()}

  monkeypatch.setattr(timing, 'time_steps', time_steps)
  bench = speed.Bench(dataclasses.replace(tiny, models=Models(), peer_device='cpu'), 'bfloat16')
  monkeypatch.setattr(Models, 'decoding', None)
  monkeypatch.setattr(Models, 'drafts', {'draft': None})
  said = speed.describe('peer', bench.measure_peer(1))
  assert asked == ['cpu', *[('A', 'bfloat16', 'cpu')] * 3]
  assert [line.split()[-1] for line in said.splitlines() if 'times as fast' in line] == ['3', '2']
  assert 'steps, times as fast as transformers' in said


def test_sizes_of_the_default_models():
  target, draft = (read_hub_config(_HUB / name, dtype='bfloat16') for name in ('llama_3_8b', 'draft_160m_of_llama_3'))
  assert (target.num_params, draft.num_params) == (8_030_261_248, 160_743_040)
  # All but the embedding of the target; the draft's is its output head.
  assert speed_models.bytes_per_step(target) == 2 * (target.num_params - 128_256 * 4096)
  assert speed_models.bytes_per_step(draft) == 2 * draft.num_params
  assert speed_models.bytes_per_step(speed_models.SHAPES['A']) == 4 * speed_models.SHAPES['A'].num_params
  own = speed_models.head_config(target)
  assert own.feature_layers == (2, 16, 29)
  assert own.block.vocab_size == 32000
  inputs = 3 * 4096 + (2 * 4096 + 2 * 2 * 1024) + 4096 + 3 * 14336 + 32000 + 4  # of width 4096, four norms among them
  assert sum(leaf.size for leaf in jax.tree.leaves(head.param_shapes(own))) == 4096 * inputs + 32000
