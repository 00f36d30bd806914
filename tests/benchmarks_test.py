"""Benchmarks at sizes where nothing is worth measuring: they run, and what they say adds up."""

import pytest

from benchmarks import auto, drafters, equality, prefixes, speed_models
from decode.experiment.auto_choice import grid, speeds_of
from decode.experiment.options import DecodeOptions
from decode.experiment.workload import Workload
from spectr_jax.kernels import native
from spectr_jax.models.causal_lm import lm1b_config

pytestmark = pytest.mark.slow

TINY = lm1b_config(32000, 16, num_layers=1, num_heads=2, mlp_dim=16, context_length=512)


@pytest.fixture(autouse=True)
def _tiny_shapes(monkeypatch):
  for shape in speed_models.SHAPES:
    monkeypatch.setitem(speed_models.SHAPES, shape, TINY)


def test_drafters(capsys):
  """Greedy, so that every way decodes as many tokens, and guesses save calls."""
  options = DecodeOptions.of(
    method=('autoregressive', 'speculative', 'spectr'), num_drafts=(1,), draft_length=(3,), temperature=0.0,
    num_prompts=3, max_new_tokens=12,
  )  # fmt: skip
  workloads = drafters.load(options.flags, ['lookup', options.models.draft])
  ways = drafters.own_ways(workloads)
  names = [
    f'{draft}: {name} K=1 L=3' for draft in ('lookup', options.models.draft) for name in ('speculative', 'spectr')
  ]
  assert list(ways) == ['autoregressive', *names]
  measured = drafters.measure(ways, workloads['lookup'].batches)
  plain, drafted = measured['autoregressive'], measured[names[2]]
  for name, each in measured.items():
    assert each['tokens'].tolist() == plain['tokens'].tolist(), name
    assert (each['seconds'] > 0).all()
  assert plain['calls'].tolist() == plain['tokens'].tolist()
  assert drafted['calls'].sum() < plain['calls'].sum()
  lines = drafters.describe(measured)
  assert '1.00 (1.00 to 1.00)' in lines[1]
  kept = drafted['tokens'].sum() / drafted['calls'].sum()
  assert f'{kept:.2f} ±' in next(line for line in lines if line.startswith(names[2]))


def test_auto():
  options = DecodeOptions.of(
    method=('auto',), num_drafts=(1,), draft_length=(2,), num_prompts=4, max_new_tokens=4, calibration_prompts=2
  )
  workload = auto.with_shapes(Workload.load(options))
  speeds, _ = speeds_of(workload, lambda *_: None)
  comparison = auto.compare_choice(workload, speeds, grid(options)[0], lambda *_: None)
  assert comparison['run']['models'] == {
    role: {'shape': shape, 'num_params': TINY.num_params, 'dtype': 'float32'}
    for role, shape in (('target', 'A'), ('draft', 'B'))
  }
  rows = comparison['settings']
  assert {row['setting'] for row in rows} == {
    'autoregressive', *(f'{name} K=1 L=2' for name in ('speculative', 'block', 'greedy_block', 'ersd'))
  }  # fmt: skip
  assert all(row['timed'] > 0 for row in rows)
  assert comparison['chosen'] == max(rows, key=lambda row: row['timed'])['setting']
  assert comparison['best'] == rows[0]['setting']
  assert comparison['chosen_over_best'] <= 1 + 1e-9


def test_equality(monkeypatch):
  """Texts of several at a time, by several methods and drafters, beside those of one at a time."""
  options = {
    'method': ('autoregressive', 'block', 'race_traversal'), 'num_drafts': (1,), 'draft_length': (2,),
    'temperature': 0.0, 'num_prompts': 3, 'max_new_tokens': 12, 'batch_size': 2,
  }  # fmt: skip
  values = DecodeOptions.of().flags | options
  workloads = drafters.load(values, ['lookup', DecodeOptions.of().models.draft])
  rows = list(equality.compare(workloads))
  ways = [(row['drafter'], row['setting']) for row in rows]
  draft = DecodeOptions.of().models.draft
  assert ways == [
    ('', 'autoregressive'), ('lookup', 'race_traversal K=1 L=2'),
    (draft, 'block K=1 L=2'), (draft, 'race_traversal K=1 L=2'),
  ]  # fmt: skip
  assert {row['texts'] for row in rows} == {3}
  if native.form() is not None:
    assert {row['differ'] for row in rows} == {0}

  made = equality._texts

  def changed(workload, setting):
    texts = made(workload, setting)
    return [[*texts[0][:5], -1, *texts[0][6:]], *texts[1:]] if setting.method.name == 'autoregressive' else texts

  monkeypatch.setattr(equality, '_texts', changed)
  rows = list(equality.compare({'lookup': workloads['lookup']}))
  assert [(row['differ'], row['first']) for row in rows[1:]] == [(1, 5)]
  sampled = {'lookup': workloads['lookup'].at(1.0)}
  with pytest.raises(ValueError, match='with --gumbel, beside ersd alone'):
    next(equality.compare(sampled))


def test_prefixes():
  """What is not read are the whole blocks of 16 tokens that the turn before had, of 40 new ones and 16 of an answer."""
  found = prefixes.measure(speed_models.make_model('A', 'float32'), None, None, 16, 1)
  assert (found['size'], found['kept']) == (496, 480)
  kept = [(56 * turn - 2) // 16 * 16 for turn in range(1, 6)]
  whole = 8 * sum(56 * turn - 16 for turn in range(1, 7))
  assert found['conversations'] == {'prompt_tokens': whole, 'read': whole - 48 - 8 * sum(kept), 'fewest': 8 * 6 * 40}
  assert 'tokens of prompts read, 1,920 are new' in prefixes.describe(found)[1]
