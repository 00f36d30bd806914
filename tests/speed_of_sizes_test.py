"""Speed of public models' sizes with random weights, at sizes where nothing is worth measuring."""

import dataclasses
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hub_specs import SPECS

import spectr_jax
from benchmarks import speed_of_sizes, timing
from benchmarks.speed_of_sizes import Bench
from benchmarks.unverified import UNVERIFIED
from spectr_jax import Decoder, TokenTree
from spectr_jax.engine.result import FAILED_DRAFT
from spectr_jax.io.hub.load import read_hub_config
from spectr_jax.models import head
from spectr_jax.models.transformer import TransformerConfig, init_params, transformer_model

ROOT = pathlib.Path(__file__).parents[1]
_HUB = ROOT / 'configs' / 'hub'


def _write(folder, **sizes):
  folder.mkdir()
  config = SPECS['llama'] | {'vocab_size': 64, 'max_position_embeddings': 64, **sizes}
  (folder / 'config.json').write_text(json.dumps(config))
  return str(folder)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
  monkeypatch.setattr(timing, 'NEW_TOKENS', 6)
  monkeypatch.setattr(timing, 'PROMPT_LENGTH', 4)
  monkeypatch.setattr(speed_of_sizes, 'NUM_ROUNDS', 2)
  monkeypatch.setattr(timing, 'COPIED', 2**16)
  monkeypatch.setattr(speed_of_sizes, 'METHODS', ('race_traversal',))
  target = _write(tmp_path / 'target', num_hidden_layers=6)
  draft = _write(tmp_path / 'draft', num_hidden_layers=1, tie_word_embeddings=True)
  return speed_of_sizes.Sizes(target, draft, True, 'bfloat16', (2,), ((2, 2),), 2, None)


@pytest.mark.slow
def test_what_is_there_is_not_measured_again(tiny, tmp_path, capsys, monkeypatch):
  output = tmp_path / 'sizes.json'
  speed_of_sizes.run(tiny, output)
  written = json.loads(output.read_text())
  drafts = [f'race_traversal 2 x 2, {draft}, 2 rows' for draft in ('draft', 'head', 'one pass')]
  unverified = [name.replace('race_traversal', 'no verification') for name in drafts]
  rounds_of = [name for pair in zip(unverified, drafts) for name in pair]
  assert list(written['results']) == ['steps, 2 rows', *rounds_of, 'profile']
  assert written['run']['num_params']['target'] == read_hub_config(tiny.target).num_params
  assert written['run']['device']['kind'] == jax.devices()[0].device_kind
  assert list((tmp_path / 'sizes_profile').rglob('*.xplane.pb'))
  steps, rounds = written['results']['steps, 2 rows'], written['results'][drafts[1]]
  assert steps['step']['low'] <= steps['step']['median'] <= steps['step']['high']
  num_bytes = speed_of_sizes.bytes_per_step(read_hub_config(tiny.target, dtype='bfloat16'))
  assert steps['floor'] == 1e3 * num_bytes / steps['copy_bytes_per_second']
  assert set(rounds['parts']) == {'draft', 'target', 'verification'}
  share = f'verification {rounds["verification_share"]:.1%} of a round'
  assert share in capsys.readouterr().out

  del written['results'][drafts[0]]
  output.write_text(json.dumps(written))
  monkeypatch.setattr(Bench, 'measure_rounds', lambda _, rounds, method: {'measured': rounds.draft})
  speed_of_sizes.run(tiny, output)
  assert json.loads(output.read_text())['results'] == written['results'] | {drafts[0]: {'measured': 'draft'}}
  assert share in capsys.readouterr().out
  with pytest.raises(ValueError, match='other flags'):
    speed_of_sizes.run(dataclasses.replace(tiny, num_runs=3), output)


def test_rounds_that_keep_no_guess():
  config = TransformerConfig(vocab_size=64, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, max_length=64)
  model = transformer_model(init_params(jax.random.key(0), config), config)
  rows, tree = timing.prompts(2, 64)[:, :8], TokenTree.chains(2, 3)

  def run(draft):
    decoder = Decoder.make(model, draft, method=UNVERIFIED, tree=tree, max_new_tokens=6, cache_size=14)
    return spectr_jax.decode_rounds(decoder, timing.begin(decoder, rows)).result

  result = run(model)
  assert (np.asarray(result.num_target_calls) == 6).all()
  assert not np.asarray(result.accepted_by_depth).any()
  # Guesses are computed although none is kept: a draft that is not finite is seen.
  failed = run(dataclasses.replace(model, params=jax.tree.map(lambda x: x * jnp.nan, model.params)))
  assert (np.asarray(failed.failures) == FAILED_DRAFT).all()
  law = UNVERIFIED.verifier.law(tree, None, jnp.full((7, 64), 1 / 64), ())
  np.testing.assert_array_equal(law, np.broadcast_to(np.where(np.arange(7)[:, None] == 0, 1 / 64, 0), (7, 64)))


def test_shares_are_those_of_the_same_shape_and_draft():
  def spread(median):
    return {'median': median, 'low': median, 'high': median}

  results = {
    'no verification 4 x 8, draft, 1 rows': {'unverified': spread(8.0)},
    'no verification 4 x 8, head, 1 rows': {'unverified': spread(2.0)},
    'spectr 4 x 8, draft, 1 rows': {'round': spread(10.0)},
    'race_traversal 4 x 8, head, 1 rows': {'round': spread(2.5)},
    'spectr 1 x 4, draft, 1 rows': {'round': spread(3.0)},
  }
  assert speed_of_sizes.describe_shares(results) == [
    'spectr 4 x 8, draft, 1 rows: verification 2.00 ms within the loop, 20.0% of a round',
    'race_traversal 4 x 8, head, 1 rows: verification 0.50 ms within the loop, 20.0% of a round',
  ]


def test_shapes_from_texts():
  assert speed_of_sizes.parse_shapes(['1x4', '4x16']) == ((1, 4), (4, 16))
  for texts in ([], ['4'], ['4x'], ['0x3'], ['2x3x4']):
    with pytest.raises(ValueError, match='such as 4x8'):
      speed_of_sizes.parse_shapes(texts)


def test_what_fails_does_not_stop_the_rest(tiny, tmp_path, capsys, monkeypatch):
  def fail(*_, **__):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory')

  monkeypatch.setattr(Bench, 'measure_rounds', fail)
  for name in ('measure_unverified', 'measure_profile', 'measure_steps'):
    monkeypatch.setattr(Bench, name, lambda *_: {})
  with pytest.raises(ValueError, match='3 measurements failed'):
    speed_of_sizes.run(tiny, tmp_path / 'sizes.json')
  assert set(json.loads((tmp_path / 'sizes.json').read_text())['results']) == {
    'steps, 2 rows', 'no verification 2 x 2, draft, 2 rows', 'no verification 2 x 2, head, 2 rows',
    'no verification 2 x 2, one pass, 2 rows', 'profile',
  }  # fmt: skip
  assert 'FAILED, RESOURCE_EXHAUSTED' in capsys.readouterr().out


def test_the_peer_is_named_where_it_is_left_out(tiny, tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  monkeypatch.setattr(timing, 'in_own_process', lambda function, *arguments: function(*arguments))
  monkeypatch.setattr(Bench, 'measurements', lambda *_: [])
  speed_of_sizes.run(dataclasses.replace(tiny, peer_device='cuda'), tmp_path / 'sizes.json')
  assert 'transformers are left out: import of torch halted' in capsys.readouterr().out


def test_a_single_draft_is_compared_with_the_peer(tiny, monkeypatch):
  """Whatever shape comes first, since the peer drafts a chain."""
  trees = []
  monkeypatch.setattr(
    timing, 'own_call', lambda models, rows, method, tree: trees.append((method, tree)) or (lambda: 1)
  )
  found = Bench(dataclasses.replace(tiny, shapes=((2, 3), (4, 4)))).measure_beside_peer()
  assert set(found['times']) == {'spectr_jax, step', 'spectr_jax, round'}
  assert trees[-1] == ('speculative', TokenTree.chains(1, 3))


def test_ratios_are_those_of_medians():
  times = {'step': 2.0, 'round': 3.0}
  results = {
    speed_of_sizes.OWN: {'times': {f'spectr_jax, {unit}': {'median': value} for unit, value in times.items()}},
    speed_of_sizes.PEER: {'times': {f'transformers, {unit}': {'median': 6.0} for unit in times}},
  }
  assert speed_of_sizes.describe_ratios(results) == [
    'step: 3.00 times as fast as transformers', 'round: 2.00 times as fast as transformers'
  ]  # fmt: skip


def test_sizes_of_the_default_models():
  target, draft = (read_hub_config(_HUB / name, dtype='bfloat16') for name in ('llama_3_8b', 'draft_160m_of_llama_3'))
  assert (target.num_params, draft.num_params) == (8_030_261_248, 160_743_040)
  # All but the embedding of the target; the draft's is its output head.
  assert speed_of_sizes.bytes_per_step(target) == 2 * (target.num_params - 128_256 * 4096)
  assert speed_of_sizes.bytes_per_step(draft) == 2 * draft.num_params
  own = speed_of_sizes.head_config(target)
  assert own.feature_layers == (2, 16, 29)
  assert own.block.vocab_size == 32000
  inputs = 3 * 4096 + (2 * 4096 + 2 * 2 * 1024) + 4096 + 3 * 14336 + 32000 + 4  # of width 4096, four norms among them
  assert sum(leaf.size for leaf in jax.tree.leaves(head.param_shapes(own))) == 4096 * inputs + 32000
