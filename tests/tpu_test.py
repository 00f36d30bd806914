"""Decoding and training compile for TPUs ahead of time and fit their memory; with the extra `tpu`, `pytest -m tpu`."""

import dataclasses

import pytest

from benchmarks import tpu_memory
from configs import lm1b
from decode.options import DecodeOptions
from spectr_jax import topology
from spectr_jax.tree import TokenTree
from train import aot, plan
from train.train import check_config, make_config_mesh

pytestmark = pytest.mark.tpu


@pytest.fixture(scope='module')
def chip():
  if not topology.is_compiler_installed():
    pytest.skip('needs the extra tpu')
  return topology.describe_topology('v5e:2x2')[0]


def test_the_pair_of_the_paper_fits_one_chip(chip):
  _, report = tpu_memory.compile_rounds(chip, 'spectr', TokenTree.chains(8, 8), batch_size=8, max_length=256)
  print('\nspectr, K = 8, L = 8, batch 8, v5e\n' + tpu_memory.describe(report, topology.chip_of(chip).memory))
  weights = 2 * (tpu_memory.TARGET.num_params + tpu_memory.DRAFT.num_params)
  assert weights < report.arguments < 2 * weights
  # All of the state that comes out stands where it went in.
  assert report.aliased == pytest.approx(report.outputs, rel=0.01)
  assert report.total < topology.chip_of(chip).memory
  # Well below the 16 GiB: a copy of the caches per draft, or of the laws per node, would show.
  assert report.temporaries < 2**30


@pytest.mark.parametrize(('method', 'tree'), [('autoregressive', TokenTree()), ('speculative', TokenTree.chains(1, 4))])
def test_single_draft_methods_compile(chip, method, tree):
  small = dict(vocab_size=1024, embed_dim=128, num_layers=2, num_heads=2, mlp_dim=256)
  _, report = tpu_memory.compile_rounds(
    chip,
    method,
    tree,
    target=dataclasses.replace(tpu_memory.TARGET, **small),
    draft=dataclasses.replace(tpu_memory.DRAFT, **{**small, 'num_layers': 1}),
    batch_size=2,
    max_length=64,
  )
  print(f'\n{method}, small\n' + tpu_memory.describe(report, topology.chip_of(chip).memory))
  assert 0 < report.total < 2**26


@pytest.fixture(scope='module')
def train_config():
  config = lm1b.get_config('6m')
  config.model.num_layers = 2
  config.update(vocab_size=4096, batch_size=64, num_microbatches=2, mesh='data:8,model:2')
  return config


@pytest.mark.parametrize('teacher', ['', DecodeOptions.target])
def test_the_train_step_compiles_for_a_slice(chip, train_config, teacher):
  train_config = train_config.copy_and_resolve_references()
  train_config.distill_from = teacher
  mesh = make_config_mesh(train_config, topology.describe_topology('v5e:4x4'))
  report = aot.analyse(train_config, mesh)
  print('\n' + aot.describe(report))
  state = sum(entry.device_bytes for entry in plan.state_entries(train_config, check_config(train_config), mesh))
  # Small arrays are padded; a teacher is divided as well.
  assert state < report.arguments < 1.1 * state + (4 if teacher else 1) * 2**20
  # Matrix products, and a little for everything else; a loop counted once would leave much of them out.
  assert 1 < report.flops / report.closed_form_flops < 1.1
  # Four rows per device at a time: were all rows of a microbatch on every device, eight times as much.
  logits = 4 * 4 * 512 * 4096 / 2
  assert report.temporaries < (6 if teacher else 2) * logits  # the teacher has larger activations, in float32
  assert 0 < report.seconds < 1
  assert report.collectives['all-gather'] > 0


def test_a_train_step_that_does_not_fit_is_refused(chip, train_config):
  config = train_config.copy_and_resolve_references()
  config.update(batch_size=2**18, num_microbatches=1)
  mesh = make_config_mesh(config, topology.describe_topology('v5e:4x4'))
  with pytest.raises(ValueError, match='does not fit .*more microbatches'):
    aot.compile_step(config, mesh)
